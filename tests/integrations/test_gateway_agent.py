"""Agents that are not ours, run behind the gateway for a trainer: their sessions' rows are what TRL is given."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from tests.gateway.server import TOOLS, gateway_server
from tests.integrations.trl_config import trainer
from tests.lazy import lazy
from tokentrace import Task
from tokentrace.demo.calculator import calculate
from tokentrace.errors import SampleError
from tokentrace.integrations.gateway import GatewayAgent, Session
from tokentrace.integrations.trl import RolloutFunction, rollout_reward

openai = lazy("openai")

PROMPT = [{"role": "user", "content": "What is 17 * 23?"}]


def ask_twice(session: Session) -> float:
    """An agent of somebody else: OpenAI's client, two turns, its history as messages."""
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key, max_retries=0) as client:
        messages: list[Any] = list(session.task.messages)
        for _ in range(2):
            answer = client.chat.completions.create(
                model="pocket", messages=messages, tools=TOOLS, max_tokens=64, temperature=0.1
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": str(calculate("17 * 23"))}
                for call in said.tool_calls or ()
            ] or [{"role": "user", "content": "Sure?"}]
    return 0.25


def forget(session: Session) -> None:
    """An agent that begins anew after its first answer: another branch of the session."""
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key, max_retries=0) as client:
        for text in ("What is 17 * 23?", "Summary: they asked for a product. Go on."):
            client.chat.completions.create(
                model="pocket", messages=[{"role": "user", "content": text}], max_tokens=16, tools=TOOLS
            )


def fail(session: Session) -> float:
    raise RuntimeError("the agent broke")


def test_rows_of_a_session_are_what_trl_is_given() -> None:
    with gateway_server() as served:
        kept: list[Any] = []
        function = RolloutFunction(GatewayAgent(served.url, ask_twice), weights_to=None, done=kept.extend)
        rows = function([PROMPT, PROMPT], trainer())
        function.close()
        for at, one in enumerate(kept):
            (sample,) = one.samples
            ids = rows["prompt_ids"][at] + rows["completion_ids"][at]
            assert ids == sample.token_ids
            assert [0] * len(rows["prompt_ids"][at]) + rows["env_mask"][at] == sample.loss_mask
            assert 0 in rows["env_mask"][at]
            recorded = served.rows(sample.name)
            assert [row["input_ids"] for row in recorded] == [ids]
            sampled = [number for number in recorded[0]["logprobs"] if number is not None]
            assert [x for x, m in zip(rows["logprobs"][at], rows["env_mask"][at], strict=True) if m] == sampled
            assert sample.completions[0].temperature == 1.0  # not what the agent asked for
            assert one.messages[: one.prompt] == PROMPT
            assert [message["role"] for message in one.messages][-3:-1] == ["assistant", "tool"]
        assert kept[0].samples[0].name != kept[1].samples[0].name
        assert rollout_reward(**rows) == [0.25, 0.25]


def test_a_history_that_was_rewritten_gives_several_rows() -> None:
    with gateway_server() as served:
        agent = GatewayAgent(served.url, forget)
        finished = asyncio.run(agent.run(Task(PROMPT, name="one")))
        assert len(finished.samples) == 2
        assert finished.reward is None
        function = RolloutFunction(agent, weights_to=None)
        with pytest.raises(SampleError, match="has 2 rows"):
            function([PROMPT], trainer())
        function.close()


def test_an_agent_that_raises_has_failed() -> None:
    with gateway_server() as served:
        finished = asyncio.run(GatewayAgent(served.url, fail).run(Task(PROMPT, name="one")))
    assert finished.samples == []
    assert (finished.reward, finished.metrics["end"]) == (None, "failed")
    assert finished.notes == ["RuntimeError: the agent broke"]


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_a_gateway_that_cannot_be_reached_or_refuses_ends_the_rollout_alone() -> None:
    finished = asyncio.run(GatewayAgent(nobody(), ask_twice).run(Task(PROMPT)))
    assert (finished.metrics["end"], finished.samples, finished.reward) == ("engine", [], None)
    assert "the gateway cannot be reached" in finished.notes[0]
    with gateway_server() as served:
        agent = GatewayAgent(served.url, ask_twice, settings={"max_turnz": 3})
        refused = asyncio.run(agent.run(Task(PROMPT)))
    assert refused.failed
    assert "400" in refused.notes[0]
