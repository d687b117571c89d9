"""Responses over HTTP: whether an agent repeats the conversation or names the response before, its tokens go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy

openai = lazy("openai")

FLAT: Any = [{"type": "function", **TOOLS[0]["function"]}]
ASK: Any = {"role": "user", "content": "What is 17 * 23?"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server


class Agent:
    """Speaks to one session, streaming or not."""

    def __init__(self, client: openai.OpenAI, stream: bool) -> None:
        self.client = client
        self._stream = stream

    def ask(self, input: Any, **more: Any) -> Any:
        given = {
            "model": "pocket",
            "tools": FLAT,
            "instructions": "Be brief.",
            "input": input,
            "temperature": 0,
            **more,
        }
        if not self._stream:
            return self.client.responses.create(**given)
        with self.client.responses.stream(**given) as stream:
            return stream.get_final_response()


@contextlib.contextmanager
def agent_of(served: Served, session: str, *, stream: bool = False) -> Iterator[Agent]:
    url = f"{served.url}/sessions/{session}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield Agent(client, stream)


def items_of(response: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.to_dict().items() if k != "parsed_arguments"} for item in response.output]


def result_of(response: Any) -> dict[str, Any]:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": call.call_id, "output": "391"}


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "status")}


ECHOES: dict[str, Any] = {
    "exact": lambda items: items,
    "without ids": lambda items: [without_ids(item) for item in items],
    "reasoning emptied": lambda items: [i | {"content": []} if i["type"] == "reasoning" else i for i in items],
    "reasoning left out": lambda items: [i for i in items if i["type"] != "reasoning"],
}


@pytest.mark.parametrize(("echo", "stream"), [*((echo, False) for echo in ECHOES), ("exact", True)])
def test_a_conversation_that_is_repeated_goes_on(served: Served, echo: str, stream: bool) -> None:
    session = f"repeats-{list(ECHOES).index(echo)}-{stream}"
    seen = len(served.prompts)
    with agent_of(served, session, stream=stream) as agent:
        first = agent.ask([ASK])
        agent.ask([ASK, *ECHOES[echo](items_of(first)), result_of(first)])
    check(served, session, served.prompts[seen:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_named_is_gone_on_from(served: Served, stream: bool) -> None:
    session = f"names-{stream}"
    seen = len(served.prompts)
    with agent_of(served, session, stream=stream) as agent:
        first = agent.ask([ASK])
        second = agent.ask([result_of(first)], previous_response_id=first.id)
        third = agent.ask("And 3 + 4?", previous_response_id=second.id)
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
    check(served, session, served.prompts[seen:])


def check(served: Served, session: str, prompts: list[list[int]]) -> None:
    """One row, which begins with every prompt that the engine was given."""
    state = served.state(session)
    assert [turn["cause"] for turn in state["tree"]] == [None] * len(prompts)
    assert [turn["reused"] for turn in state["tree"]] == [0] + [turn["stop"] for turn in state["tree"][:-1]]
    assert state["rows"] == 1
    stream = served.run(_stream(served, session))
    for prompt in prompts:
        assert stream[: len(prompt)] == prompt


async def _stream(served: Served, session: str) -> list[int]:
    live = await served.app.gateway.sessions.get(session)
    return [int(each) for each in live.session.trajectory.stream(0)]


def test_a_response_that_was_not_stored_cannot_be_named(served: Served) -> None:
    with agent_of(served, "unstored") as agent:
        first = agent.ask([ASK], store=False)
        for id in (first.id, "resp_nobody"):
            with pytest.raises(openai.APIStatusError) as refused:
                agent.ask("And?", previous_response_id=id)
            assert refused.value.param == "previous_response_id"
            assert refused.value.code == "previous_response_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_retrieved(served: Served, stream: bool) -> None:
    with agent_of(served, f"stored-{stream}", stream=stream) as agent:
        first = agent.ask([ASK], metadata={"a": "b"}, top_logprobs=0, user="me")
        agent.ask([result_of(first)], previous_response_id=first.id)
        again = agent.client.responses.retrieve(first.id)
        assert again.to_dict() | {"output": items_of(again)} == first.to_dict() | {"output": items_of(first)}
        unstored = agent.ask([ASK], store=False)
        chat = agent.client.chat.completions.create(model="pocket", messages=[ASK])
        for id in ("resp_nobody", unstored.id, chat.id):
            with pytest.raises(openai.NotFoundError):
                agent.client.responses.retrieve(id)
