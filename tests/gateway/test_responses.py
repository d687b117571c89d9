"""Responses over HTTP: however an agent repeats or refers to the last response, its tokens are reused."""

import json
from typing import Any

import pytest

from tests.gateway.server import TOOLS, Served
from tokentrace.gateway.gateway import resolved
from tokentrace.gateway.requests import RequestError

FLAT: Any = [{"type": "function", **TOOLS[0]["function"]}]
ASK: Any = {"role": "user", "content": "What is 17 * 23?"}


def ask(served: Served, session: str, input: Any, **more: Any) -> Any:
    """Request a response, streamed or not; returns it, or the error."""
    body = {"model": "pocket", "tools": FLAT, "instructions": "Be brief.", "temperature": 0, "input": input, **more}
    _, answer = served.call("POST", f"/sessions/{session}/v1/responses", body)
    return json.loads(answer.decode().rpartition("data: ")[2])["response"] if isinstance(answer, bytes) else answer


def result_of(response: Any) -> dict[str, Any]:
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "391"}


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
def test_a_conversation_continues(served: Served, way: str, stream: bool) -> None:
    session, seen, repeat = f"goes-on-{list(WAYS).index(way)}-{stream}", len(served.prompts), WAYS[way]
    sent: list[Any] = []
    previous: Any = None
    for at in range(3):
        sent += [ASK if at == 0 else result_of(previous) if at == 1 else {"role": "user", "content": "And 3 + 4?"}]
        more = {"previous_response_id": previous["id"]} if repeat is None and previous else {}
        response = ask(served, session, sent[-1:] if more else sent, stream=stream, **more)
        assert response["previous_response_id"] == more.get("previous_response_id")
        sent += [] if repeat is None else filter(None, map(repeat, response["output"]))
        previous = response
    state = served.state(session)
    assert [turn["cause"] for turn in state["tree"]] == [None] * 3
    assert [turn["reused"] for turn in state["tree"]] == [0] + [turn["stop"] for turn in state["tree"][:-1]]
    record = served.record(session)
    stream_ids = record.trajectory.stream(0).tolist()
    assert all(stream_ids[: len(prompt)] == prompt for prompt in served.prompts[seen:])
    roles = [message["role"] for message in record.conversation(2)]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


def test_responses_that_are_not_stored_in_this_session_cannot_be_referenced(served: Served) -> None:
    elsewhere, unstored = ask(served, "another", [ASK]), ask(served, "unstored", [ASK], store=False)
    for id in (unstored["id"], elsewhere["id"], "resp_nobody"):
        error = ask(served, "unstored", "And?", previous_response_id=id)["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
        assert id in error["message"]
        assert served.call("GET", f"/sessions/unstored/v1/responses/{id}")[0] == 404
    for id in (elsewhere["output"][0]["id"], unstored["output"][0]["id"], "rs_nobody_0", "rs_foreign"):
        error = ask(served, "unstored", [ASK, {"type": "item_reference", "id": id}])["error"]
        assert id in error["message"]
        assert error["param"] in ("input", "input.1")
    assert len(served.state("unstored")["tree"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_can_be_retrieved(served: Served, stream: bool) -> None:
    session, path = f"stored-{stream}", f"/sessions/stored-{stream}/v1"
    more = {"metadata": {"a": "b"}, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "user": "me"}
    first = ask(served, session, [ASK], stream=stream, **more)
    second = ask(served, session, [result_of(first)], stream=stream, previous_response_id=first["id"], **more)
    assert [part for item in second["output"] for part in item.get("content", ()) if part.get("logprobs")]
    for response in (first, second):
        assert served.call("GET", f"{path}/responses/{response['id']}") == (200, response)
    _, chat = served.call("POST", f"{path}/chat/completions", {"messages": [ASK]})
    assert served.call("GET", f"{path}/responses/{chat['id']}")[0] == 404


def test_only_referenced_items_are_added() -> None:
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
