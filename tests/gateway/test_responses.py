"""Responses: what is read, what is answered, and that a stream put together by OpenAI's client is the answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.conversations import user
from tests.gateway.answers import (
    CALL,
    COMPLETIONS,
    CUT_OFF,
    FAMILIES,
    LOOK,
    Sampled,
    head_of,
    pocket,
    renderer,
    sampled,
    serve,
    streamed,
    told_message,
    written,
)
from tests.gateway.bodies import JSON, check_read, fields_of
from tests.gateway.test_responses_sse import put_together
from tests.gateway.test_shapes import assert_no_extras
from tests.parsing.forms import families
from tests.support import examples
from tokentrace.conversation.responses import from_responses, unsealed
from tokentrace.engines.protocol import FinishReason
from tokentrace.gateway.dialect import Head
from tokentrace.gateway.requests import Request, RequestError
from tokentrace.gateway.responses import RESPONSES
from tokentrace.gateway.responses_request import bare_id

WIRE_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
OURS = frozenset({"store", "tokentrace"})
"""Fields of a response that its type does not declare."""
ASK: dict[str, Any] = {"model": "m", "input": "Hi."}
FLAT = {"type": "function", **LOOK["function"]}


def read(**fields: Any) -> Request:
    return RESPONSES.read({**ASK, **fields}, {})


def asked(**fields: Any) -> Head:
    return head_of(pocket(), read(tools=[FLAT], **fields))


# -- streams are the answer


def client_of(body: str, kind: str = "text/event-stream", status: int = 200) -> openai.OpenAI:
    return openai.OpenAI(api_key="k", base_url="http://localhost", max_retries=0, http_client=serve(body, kind, status))


def answered_by(head: Head, choice: Sampled) -> dict[str, Any]:
    """The answer, as OpenAI's client takes it."""
    answer = RESPONSES.answer(head, [choice.reply])
    assert_no_extras(Response.model_validate(answer, strict=True), OURS)
    with client_of(json.dumps(answer), "application/json") as client:
        assert client.responses.create(model="m", input="x").to_dict() == answer
    return answer


def events_of(frames: list[str]) -> list[dict[str, Any]]:
    """The events, each of which its type takes; a frame's name is its type."""
    events = []
    for frame in frames:
        name, data = frame.removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        WIRE_EVENT.validate_python(event, strict=True)
        events.append(event)
    return events


def check(head: Head, choice: Sampled) -> dict[str, Any]:
    answer = answered_by(head, choice)
    frames = streamed(RESPONSES, head, [choice])
    events = events_of(frames)
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun.pop("tokentrace", None)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["response"] for event in events[:2]] == [begun, begun]
    assert events[-1]["type"] == f"response.{answer['status']}"
    assert events[-1]["response"] == answer
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    shifted = [{**event, "sequence_number": event["sequence_number"] - 1} for event in events[2:]]
    assert [said(item) for item in put_together([{"sequence_number": 0}, *shifted])] == [
        said(item) for item in answer["output"]
    ]
    if answer["status"] == "completed":
        with client_of("".join(frames)) as client, client.responses.stream(model="m", input="x") as stream:
            final = stream.get_final_response()
        assert [item.id for item in final.output] == [item["id"] for item in answer["output"]]
        assert final.output_text == "".join(
            item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"
        )
    return answer


def said(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what a call has only in the end: it was done before the ids were."""
    return {key: value for key, value in item.items() if "token" not in key and "log_probs" not in key}


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_is_the_answer(name: str, allowed: bool, size: int) -> None:
    choice = written(pocket(), COMPLETIONS[name], size=size)
    answer = check(head_of(pocket(), calls_allowed=allowed), choice)
    assert answer["status"] == "completed"
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert allowed or not calls
    if allowed:
        message = told_message(choice)
        assert from_responses(answer["output"]) == [{**message, "content": message["content"] or ""}]
    ids = [item["id"] for item in answer["output"]]
    assert len(set(ids)) == len(ids) > 0
    assert all("_a1b2_" in id for id in ids)


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_is_the_answer_that_was_cut_off(name: str, allowed: bool) -> None:
    answer = check(head_of(pocket(), calls_allowed=allowed), written(pocket(), CUT_OFF[name], stops=False))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    last = answer["output"][-1]
    if last["type"] == "message" or (last["type"] == "function_call" and name != "after a call"):
        assert last["status"] == "incomplete"


@families(["gpt-oss"])
def test_streams_of_real_families_are_the_answers(any_family: str) -> None:
    made = renderer(any_family)
    for text, allowed in itertools.product(FAMILIES[any_family], (True, False)):
        choice = written(made, text, stops=not text.endswith(("<|call|>", "<|return|>")))
        answer = check(head_of(made, calls_allowed=allowed), choice)
        if allowed:
            message = told_message(choice)
            assert from_responses(answer["output"]) == [{**message, "content": message["content"] or ""}]


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.integers(0, 4095), max_size=40), size=st.integers(1, 9), allowed=st.booleans(), stops=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
)  # fmt: skip
def test_whatever_ids_are_sampled(ids: list[int], size: int, allowed: bool, stops: bool, logprobs: int | None) -> None:
    known = [one for one in ids if one not in pocket().get_stop_token_ids()]
    choice = sampled(pocket(), [*known, *pocket().get_stop_token_ids()[:stops]], size=size)
    check(head_of(pocket(), calls_allowed=allowed, logprobs=logprobs), choice)


def test_text_is_told_as_it_comes_and_the_end_only_at_the_end() -> None:
    choice = written(pocket(), f"<think>\nHm.\n</think>\n\nYes, I do.\n{CALL}")
    frames = RESPONSES.stream(head_of(pocket()), [choice.reply.call_id])
    frames.open()
    fed = [events_of(frames.feed(0, events, delta)) for events, delta in choice.pieces]
    kinds = [{event["type"] for event in events} for events in fed]
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        kind = f"response.{kind}.delta"
        assert sum(kind in each for each in kinds) >= 2
    assert not any("response.completed" in each for each in kinds)
    last = events_of(frames.close([choice.reply]))
    assert [event["type"] for event in last] == ["response.completed"]


def test_a_stream_that_fails() -> None:
    frames = RESPONSES.stream(asked(), [str])
    error = RequestError("the engine is gone", status=503, code="engine")
    events = events_of([*frames.open(), *frames.fail(error)])
    assert [event["type"] for event in events[2:]] == ["response.failed", "error"]
    assert events[2]["response"]["status"] == "failed"
    assert events[2]["response"]["error"] == {"code": "server_error", "message": "the engine is gone"}
    assert events[3] == {
        "type": "error",
        "code": "engine",
        "message": "the engine is gone",
        "param": None,
        "sequence_number": 3,
    }


def test_an_aborted_answer_is_incomplete_for_no_reason_that_the_api_has() -> None:
    reply = written(pocket(), "One two", stops=False).reply
    aborted = dataclasses.replace(
        reply, completion=dataclasses.replace(reply.completion, finish_reason=FinishReason.ABORT)
    )
    answer = RESPONSES.answer(asked(), [aborted])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", None)


def test_a_stop_text_is_a_stop() -> None:
    reply = written(pocket(), "One two", stops=False, stopped_by=" three").reply
    answer = RESPONSES.answer(asked(), [reply])
    assert (answer["status"], answer["output"][-1]["status"]) == ("completed", "completed")


# -- what an answer says


def test_the_answer() -> None:
    head = asked(
        instructions="Be brief.",
        metadata={"a": "b"},
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=99,
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        previous_response_id="resp_x1",
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        truncation="auto",
        user="me",
    )
    choice = written(pocket(), "<think>\nHm.\n</think>\n\nYes.", cached=3, reasoning_tokens=2)
    count = len(choice.reply.completion.ids)
    assert answered_by(head, choice) == {
        "id": "resp_a1b2",
        "object": "response",
        "created_at": 17,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief.",
        "max_output_tokens": 99,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "m",
        "output": [
            {
                "type": "reasoning",
                "id": "rs_a1b2_0",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "type": "message",
                "id": "msg_a1b2_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
            },
        ],
        "parallel_tool_calls": False,
        "previous_response_id": "resp_x1",
        "reasoning": {"effort": "low", "summary": "auto"},
        "store": True,
        "temperature": 0.5,
        "text": {
            "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": False},
            "verbosity": "low",
        },
        "tool_choice": {"type": "function", "name": "look"},
        "tools": [{**FLAT, "description": None, "strict": False}],
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "auto",
        "usage": {
            "input_tokens": len(head.prompt_ids),
            "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": len(head.prompt_ids) + count,
        },
        "user": "me",
    }


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_stored_answer_is_given_again(choice: str) -> None:
    """A store keeps the echo, as JSON, and the tools."""
    head = asked(
        tool_choice=choice, temperature=0.5, top_logprobs=1, include=["reasoning.encrypted_content"], user="me"
    )
    kept = Request((), head.request.tools, "m", echo=json.loads(json.dumps(head.request.echo)))
    reply = written(pocket(), COMPLETIONS["everything"]).reply
    again = RESPONSES.answer(dataclasses.replace(head, request=kept), [reply])
    assert again == RESPONSES.answer(head, [reply])
    assert RESPONSES.answer(dataclasses.replace(head, request=Request((), None)), [reply])["output"]


def test_logprobs_are_those_of_the_text() -> None:
    choice = written(pocket(), COMPLETIONS["everything"], size=3)
    answer = check(asked(include=["message.output_text.logprobs"], top_logprobs=1), choice)
    message = next(item for item in answer["output"] if item["type"] == "message")
    part = message["content"][0]
    raw = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert raw.strip() == part["text"].strip() == "Let me see."
    sampled_at = {round(value, 6) for value in choice.reply.completion.logprobs.tolist()}
    for entry in part["logprobs"]:
        assert round(entry["logprob"], 6) in sampled_at
        assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]
    assert "logprobs" not in json.dumps(check(asked(), choice)["output"])


def test_opaque_reasoning_comes_back() -> None:
    choice = written(pocket(), COMPLETIONS["everything"])
    answer = check(asked(include=["reasoning.encrypted_content"], store=False), choice)
    assert unsealed(answer["output"][0]["encrypted_content"]) == "Which?"
    emptied = [{**answer["output"][0], "content": []}, *answer["output"][1:]]
    assert from_responses(emptied) == from_responses(answer["output"])
    assert answer["store"] is False


@pytest.mark.parametrize("text", [COMPLETIONS["everything"], "Yes.", ""])
def test_ids_as_nemo_gym_has_them(text: str) -> None:
    choice = written(pocket(), text)
    fields = {
        "prompt_token_ids": asked().prompt_ids.tolist(),
        "generation_token_ids": choice.reply.completion.ids.tolist(),
        "generation_log_probs": choice.reply.completion.logprobs.tolist(),
    }
    for way in ("return_token_ids", "return_token_id_information"):
        output = RESPONSES.answer(asked(**{way: True}), [choice.reply])["output"]
        assert fields.items() <= output[-1].items()
        assert not any("generation_token_ids" in item for item in output[:-1])
        final = events_of(streamed(RESPONSES, asked(**{way: True}), [choice]))[-1]
        assert final["response"]["output"] == output
    assert from_responses(output) == from_responses(RESPONSES.answer(asked(), [choice.reply])["output"])


def test_ids_as_every_dialect_has_them() -> None:
    choice = written(pocket(), "Yes.")
    head = head_of(pocket(), RESPONSES.read(ASK, {"x-tokentrace-token-ids": "true"}))
    assert check(head, choice)["tokentrace"]["completion_token_ids"] == choice.reply.completion.ids.tolist()
    with pytest.raises(RequestError, match="chat completions"):
        RESPONSES.read(ASK, {"x-tokentrace-token-ids": "vllm"})


# -- what is read


def test_everything_is_read() -> None:
    request = read(
        instructions="Be brief.",
        tools=[{**FLAT, "strict": True, "description": "Looks."}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=7,
        max_tool_calls=3,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=3,
        stop="x",
        stream=True,
        stream_options={"include_obfuscation": False},
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "tone": "mild"},
        reasoning={"effort": "low", "summary": "auto", "context": "auto"},
        chat_template_kwargs={"custom": 1},
        previous_response_id="resp_x1",
        store=False,
        truncation="auto",
        background=False,
        user="me",
        service_tier="auto",
        flavour="mint",
        frequency_penalty=0,
    )
    assert request.echo["metadata"] == {}
    assert dataclasses.replace(request, echo={}) == Request(
        messages=[{"role": "system", "content": "Be brief."}, user("Hi.")],
        tools=[{"type": "function", "function": {**LOOK["function"], "description": "Looks."}}],
        model="m",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        seed=3,
        stop=("x",),
        stream=True,
        logprobs=2,
        structure={"type": "json_schema", "schema": {"type": "object"}},
        variables={"custom": 1},
        hints={"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        previous="x1",
        instructions=1,
        stored=False,
        ignored=("flavour", "reasoning.context", "text.tone"),
        wishes=("tool_choice", "reasoning.summary", "parallel_tool_calls", "truncation", "max_tool_calls"),
    )


def test_little_is_read() -> None:
    assert dataclasses.replace(read(), echo={}) == Request(messages=[user("Hi.")], model="m")
    assert read(instructions="", tools=[], include=None, text={"format": {"type": "text"}}).instructions == 0
    assert read(text={"format": {"type": "json_object"}}).structure == {"type": "json_object"}
    assert read(include=["message.output_text.logprobs"]).logprobs == 0
    assert not read(tool_choice="none").calls_allowed
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    assert read(tools=[LOOK], tool_choice=allowed).wishes == ("tool_choice",)


def test_results_go_on_from_a_response() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    assert read(input=[result], previous_response_id="resp_x1").messages[0]["tool_call_id"] == "c1"
    with pytest.raises(RequestError) as refused:
        read(input=[result])
    assert refused.value.field == "input.0.call_id"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({"input": None}, "input", "missing"),
    "no items": ({"input": []}, "input", "empty"),
    "an unknown item": ({"input": [{"type": "web_search_call"}]}, "input.0.type", "web_search_call"),
    "background": ({"background": True}, "background", "background"),
    "conversation": ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", "instructions"),
    "compaction": ({"context_management": [{"type": "compaction"}]}, "context_management", "rewrite"),
    "moderation": ({"moderation": {}}, "moderation", "moderated"),
    "penalty": ({"presence_penalty": 1}, "presence_penalty", "distribution"),
    "foreign id": ({"previous_response_id": "chatcmpl-1"}, "previous_response_id", "resp_"),
    "include": ({"include": ["everything"]}, "include", "everything"),
    "effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "low"),
    "summary": ({"reasoning": {"summary": "long"}}, "reasoning.summary", "concise"),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "schema"),
    "no name of a schema": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "string"),
    "verbosity": ({"text": {"verbosity": "extreme"}}, "text.verbosity", "medium"),
    "truncation": ({"truncation": "always"}, "truncation", "disabled"),
    "metadata": ({"metadata": {"a": 1}}, "metadata", "16"),
    "tool choice": ({"tool_choice": "all"}, "tool_choice", "required"),
    "a function that is not there": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "'f'"),
    "a hosted choice": ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "file_search"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools.0.name", "missing"),
    "a tool without a type": ({"tools": [{"name": "f"}]}, "tools.0.type", "missing"),
    "deferred": ({"tools": [{**FLAT, "defer_loading": True}]}, "tools.0.defer_loading", "served"),
    "logprobs": ({"top_logprobs": 21}, "top_logprobs", "20"),
    "temperature": ({"temperature": 3}, "temperature", "2"),
    **{
        kind: ({"tools": [LOOK, {"type": kind}]}, "tools.1.type", kind)
        for kind in (
            *("computer_use_preview", "computer", "mcp", "custom", "local_shell", "shell", "apply_patch"),
            *("web_searches", "my_web_search", "web_search_preview_1"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_its_field(name: str) -> None:
    fields, field, words = REFUSED[name]
    with pytest.raises(RequestError, match=words) as refused:
        read(**fields)
    assert (refused.value.field, refused.value.status) == (field, 400)


def test_errors_are_those_of_the_api() -> None:
    with pytest.raises(RequestError) as refused:
        read(background=True)
    body = json.dumps(RESPONSES.error(refused.value))
    with client_of(body, "application/json", 400) as client, pytest.raises(openai.BadRequestError) as told:
        client.responses.create(model="m", input="x")
    assert told.value.param == "background"
    assert told.value.type == "invalid_request_error"
    assert told.value.code == "unsupported_parameter"
    assert "background" in told.value.message


def test_ids_of_responses() -> None:
    assert bare_id("resp_a1b2") == "a1b2"
    for foreign in ("a1b2", "resp_", "resp_a-b", "resp_ä", "", "msg_a1b2"):
        assert bare_id(foreign) is None


@settings(max_examples=examples(300), deadline=None)
@given(body=JSON | fields_of({**ASK, "tools": [FLAT]}, "responses"))
def test_whatever_is_sent_is_read_or_refused(body: Any) -> None:
    check_read(RESPONSES, body)
