"""Responses over HTTP: however an agent repeats, refers to or names the response before, its tokens go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy
from tokentrace.gateway.gateway import resolved
from tokentrace.gateway.requests import RequestError

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
        self.client, self._stream = client, stream

    def ask(self, input: Any, **more: Any) -> Any:
        asked = {"model": "pocket", "tools": FLAT, "instructions": "Be brief.", "temperature": 0, "input": input}
        if not self._stream:
            return self.client.responses.create(**asked, **more)
        with self.client.responses.stream(**asked, **more) as stream:
            return stream.get_final_response()


@contextlib.contextmanager
def agent_of(served: Served, session: str, *, stream: bool = False) -> Iterator[Agent]:
    with openai.OpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="none", max_retries=0) as client:
        yield Agent(client, stream)


def items_of(response: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.to_dict().items() if k != "parsed_arguments"} for item in response.output]


def result_of(response: Any) -> dict[str, Any]:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": call.call_id, "output": "391"}


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "status")}


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


WAYS: dict[str, Any] = {
    "exact": lambda item: item,
    "without ids": without_ids,
    "reasoning emptied": lambda item: item | {"content": []} if item["type"] == "reasoning" else item,
    "reasoning left out": lambda item: None if item["type"] == "reasoning" else item,
    "references": reference,  # as Vercel's AI SDK sends them
    "calls inline": lambda item: without_ids(item) if item["type"] == "function_call" else reference(item),
    "references without a type": lambda item: {"id": item["id"]},
    "previous response": None,
}


@pytest.mark.parametrize(
    ("way", "stream"), [*((way, False) for way in WAYS), *((way, True) for way in ("exact", "previous response"))]
)
def test_a_conversation_goes_on(served: Served, way: str, stream: bool) -> None:
    session, seen, repeat = f"goes-on-{list(WAYS).index(way)}-{stream}", len(served.prompts), WAYS[way]
    with agent_of(served, session, stream=stream) as agent:
        first = agent.ask([ASK])
        assert {item.type for item in first.output} >= {"reasoning", "function_call"}
        if repeat is None:
            second = agent.ask([result_of(first)], previous_response_id=first.id)
            third = agent.ask("And 3 + 4?", previous_response_id=second.id)
            assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)
        else:
            asked = [ASK, *filter(None, map(repeat, items_of(first))), result_of(first)]
            second = agent.ask(asked)
            asked += [*filter(None, map(repeat, items_of(second))), {"role": "user", "content": "And 3 + 4?"}]
            agent.ask(asked)
    state = served.state(session)
    assert [turn["cause"] for turn in state["tree"]] == [None] * 3
    assert [turn["reused"] for turn in state["tree"]] == [0] + [turn["stop"] for turn in state["tree"][:-1]]
    live = served.run(served.app.gateway.sessions.get(session))
    stream_ids = live.session.trajectory.stream(0).tolist()
    assert all(stream_ids[: len(prompt)] == prompt for prompt in served.prompts[seen:])
    roles = [message["role"] for message in live.session.conversation(2)]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


def test_what_was_not_stored_here_can_be_neither_named_nor_referred_to(served: Served) -> None:
    with agent_of(served, "another") as other, agent_of(served, "unstored") as agent:
        elsewhere, unstored = other.ask([ASK]), agent.ask([ASK], store=False)
        for id in (unstored.id, elsewhere.id, "resp_nobody"):
            with pytest.raises(openai.APIStatusError) as refused:
                agent.ask("And?", previous_response_id=id)
            assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
            with pytest.raises(openai.NotFoundError):
                agent.client.responses.retrieve(id)
        for id in (elsewhere.output[0].id, unstored.output[0].id, "rs_nobody_0", "rs_foreign"):
            with pytest.raises(openai.BadRequestError, match=id) as unknown:
                agent.ask([ASK, {"type": "item_reference", "id": id}])
            assert unknown.value.param in ("input", "input.1")
    assert len(served.state("unstored")["tree"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_retrieved(served: Served, stream: bool) -> None:
    with agent_of(served, f"stored-{stream}", stream=stream) as agent:
        first = agent.ask([ASK], metadata={"a": "b"}, top_logprobs=0, user="me")
        agent.ask([result_of(first)], previous_response_id=first.id)
        again = agent.client.responses.retrieve(first.id)
        assert again.to_dict() | {"output": items_of(again)} == first.to_dict() | {"output": items_of(first)}
        chat = agent.client.chat.completions.create(model="pocket", messages=[ASK])
        with pytest.raises(openai.NotFoundError):
            agent.client.responses.retrieve(chat.id)


def test_only_what_is_referred_to_is_added() -> None:
    call: Any = {"id": "c1", "type": "function", "function": {"name": "compute", "arguments": "{}"}}
    reply: Any = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [call]}
    empty: Any = {"role": "assistant", "content": ""}
    assert resolved(empty, reply, ["rs_a_0", "msg_a_1", "fc_a_2"]) == reply
    assert resolved(empty, reply, ["msg_a_1"]) == {"role": "assistant", "content": "Well."}
    edited = {**call, "function": {"name": "compute", "arguments": '{"formula": "1"}'}}
    inline = {**empty, "tool_calls": [edited, {**call, "id": "c2"}]}
    assert resolved(inline, reply, ["rs_a_0"]) == {**inline, "reasoning_content": "Hm."}
    assert resolved(inline, reply, ["fc_a_2"])["tool_calls"] == inline["tool_calls"]
    assert resolved({**empty, "content": " So."}, reply, ["msg_a_1"])["content"] == "Well. So."
    for item in ("rs_a_0", "fc_a_1"):
        with pytest.raises(RequestError, match=item):
            resolved(empty, {"role": "assistant", "content": "Well."}, [item])
