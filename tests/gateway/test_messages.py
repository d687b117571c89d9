"""Anthropic's messages: what is read, what is answered, and that a stream put together by its client is the answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.conversations import system, user
from tests.gateway.answers import (
    CALL,
    COMPLETIONS,
    CUT_OFF,
    LOOK,
    Sampled,
    head_of,
    pocket,
    sampled,
    serve,
    streamed,
    written,
)
from tests.gateway.bodies import JSON, check_read, fields_of
from tests.support import examples
from tokentrace.conversation.shapes import from_anthropic
from tokentrace.gateway.dialect import QUIET, Head
from tokentrace.gateway.messages import MESSAGES, count_answer, read_count, signature
from tokentrace.gateway.requests import Request, RequestError
from tokentrace.parsing.messages import history_message

ASK: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [user("Hi.")]}
TOOL: dict[str, Any] = {"name": "look", "input_schema": LOOK["function"]["parameters"]}
WIRE_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def read(**fields: Any) -> Request:
    return MESSAGES.read({**ASK, **fields}, {})


# -- streams are the answer


def client_of(body: str, kind: str = "text/event-stream", status: int = 200) -> anthropic.Anthropic:
    http = serve(body, kind, status)
    return anthropic.Anthropic(api_key="k", base_url="http://localhost", http_client=http, max_retries=0)


def answered_by(head: Head, choice: Sampled) -> dict[str, Any]:
    """The answer, as Anthropic's client takes it."""
    answer = MESSAGES.answer(head, [choice.reply])
    Message.model_validate(answer, strict=True)
    with client_of(json.dumps(answer), "application/json") as client:
        return client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]).to_dict()


def put_together(frames: list[str]) -> dict[str, Any]:
    """What Anthropic's client makes of a stream."""
    messages: Any = [user("x")]
    with (
        client_of("".join(frames)) as client,
        client.messages.stream(model="m", max_tokens=9, messages=messages) as got,
    ):
        return got.get_final_message().to_dict()


def events_of(frames: list[str]) -> list[dict[str, Any]]:
    events = []
    for frame in frames:
        name, data = frame.removesuffix("\n\n").split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def said_by(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields that say nothing."""
    blocks = [{key: value for key, value in block.items() if value is not None} for block in message["content"]]
    kept = {key: value for key, value in message.items() if value is not None or key == "stop_sequence"}
    return {"stop_sequence": None, **kept, "content": blocks}


def check(head: Head, choice: Sampled) -> dict[str, Any]:
    head = dataclasses.replace(head, request=dataclasses.replace(head.request, object_arguments=True))
    answer = answered_by(head, choice)
    frames = streamed(MESSAGES, head, [choice])
    for event in events_of(frames):
        if event["type"] != "ping":
            WIRE_EVENT.validate_python(event, strict=True)
    assert said_by(put_together(frames)) == said_by(answer)
    return answer


LOOKED = {"place": "Zürich"}
INPUTS: dict[str, list[dict[str, Any]]] = {
    "a broken call": [{}],
    "a broken call between others": [LOOKED, {}, LOOKED],
    "a quote that is not escaped": [{"day": 1}, LOOKED],
    "an argument twice": [{"place": "b"}],
}
"""What is told of calls with something wrong in them. All other attempts that are not calls are text."""


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_is_the_answer(name: str, allowed: bool, size: int) -> None:
    choice = written(pocket(), COMPLETIONS[name], size=size)
    answer = check(head_of(pocket(), calls_allowed=allowed), choice)
    kinds = [block["type"] for block in answer["content"]]
    assert answer["stop_reason"] == ("tool_use" if "tool_use" in kinds else "end_turn")
    if not allowed:
        assert "tool_use" not in kinds
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        assert text == COMPLETIONS[name].rpartition("</think>\n\n")[2]
    else:
        [echo] = from_anthropic([{"role": "assistant", "content": answer["content"]}])
        if name in INPUTS:
            inputs = [call["function"]["arguments"] for call in echo.get("tool_calls", ())]
            assert inputs == INPUTS[name]
            return
        told = history_message(choice.reply.response, call_id=choice.reply.call_id)
        for call in told.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        assert echo == told | {"content": told["content"] or ""}


CUT_OFF_INPUTS = {"in a call": [{}], "after a call": [LOOKED], "in a list": [{"place": [1, {"a": [2.5]}]}]}


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_is_the_answer_that_was_cut_off(name: str, allowed: bool) -> None:
    answer = check(head_of(pocket(), calls_allowed=allowed), written(pocket(), CUT_OFF[name], stops=False))
    assert answer["stop_reason"] == "max_tokens"
    inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    assert inputs == (CUT_OFF_INPUTS.get(name, []) if allowed else [])


@settings(max_examples=examples(60), deadline=None)
@given(ids=st.lists(st.integers(0, 4095), max_size=40), size=st.integers(1, 9), allowed=st.booleans())
def test_whatever_ids_are_sampled(ids: list[int], size: int, allowed: bool) -> None:
    known = [one for one in ids if one not in pocket().get_stop_token_ids()]
    check(head_of(pocket(), calls_allowed=allowed), sampled(pocket(), known, size=size))


def test_text_and_input_are_told_as_they_come() -> None:
    choice = written(pocket(), f"<think>\nHm.\n</think>\n\n{CALL.replace('Zürich', '1234567890' * 20)}")
    frames = MESSAGES.stream(head_of(pocket(), object_arguments=True), [choice.reply.call_id])
    assert [event["type"] for event in events_of(frames.open())] == ["message_start"]
    told = [events_of(frames.feed(0, *piece)) for piece in choice.pieces]
    assert ["content_block_start", "content_block_delta"] in [[event["type"] for event in said] for said in told[:6]]
    inputs = [at for at, said in enumerate(told) if any("partial_json" in event.get("delta", {}) for event in said)]
    assert len(inputs) > 20
    assert inputs[1] < len(told) // 2


def test_pings_keep_a_call_alive_that_is_told_late() -> None:
    """Its name comes after its arguments."""
    text = f'<tool_call>\n{{"arguments": {{"place": "{"1" * 200}"}}, "name": "look"}}\n</tool_call>'
    choice = written(pocket(), text)
    frames = MESSAGES.stream(head_of(pocket(), object_arguments=True), [choice.reply.call_id])
    frames.open()
    told = [[event["type"] for event in events_of(frames.feed(0, *piece))] for piece in choice.pieces]
    assert sum(said == ["ping"] for said in told) >= 150 // QUIET
    assert max(sum(1 for _ in g) for said, g in itertools.groupby(told, key=bool) if not said) <= QUIET + 4
    assert check(head_of(pocket()), choice)["stop_reason"] == "tool_use"


def test_input_that_claude_code_could_not_read_is_what_it_was_told() -> None:
    def echo(raw: str, length: int) -> Any:
        unparsed = {"__unparsedToolInput": {"raw": raw, "len": length}}
        block = {"type": "tool_use", "id": "t", "name": "look", "input": unparsed}
        answer = {"type": "tool_result", "tool_use_id": "t", "content": "no"}
        request = read(
            messages=[user("a"), {"role": "assistant", "content": [block]}, {"role": "user", "content": [answer]}]
        )
        return request.messages[1]["tool_calls"][0]["function"]["arguments"]

    raw = '{"day": 1, "place": "🧮'
    assert echo(raw, len(raw) + 1) == {"day": 1}  # it counts as JavaScript does
    assert echo(raw, 5000) == {"__unparsedToolInput": {"raw": raw, "len": 5000}}


def test_thinking_is_signed_and_its_echo_is_taken() -> None:
    choice = written(pocket(), COMPLETIONS["reasoning"])
    answer = check(head_of(pocket()), choice)
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm. 🧮", "signature": signature("a1b2")}
    assert len(signature("a1b2")) > 20
    assert signature("a1b2") != signature("a1b3")
    request = read(messages=[user("a"), {"role": "assistant", "content": answer["content"]}, user("b")])
    assert request.messages[1] == {"role": "assistant", "content": "So it is.", "reasoning_content": "Hm. 🧮"}


def test_usage_tells_cached_tokens_apart() -> None:
    head, choice = head_of(pocket()), written(pocket(), "Yes.", cached=4, reasoning_tokens=2)
    answer = check(head, choice)
    assert answer["usage"] == {
        "input_tokens": len(head.prompt_ids) - 4,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(choice.reply.completion.ids),
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_a_stop_text_is_named() -> None:
    choice = written(pocket(), "One two", stops=False, stopped_by=" three")
    answer = check(head_of(pocket()), choice)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")


def test_ids_on_request() -> None:
    choice = written(pocket(), COMPLETIONS["everything"])
    for request in (MESSAGES.read(ASK, {"x-tokentrace-token-ids": "true"}), read(return_token_ids=True)):
        head = head_of(pocket(), request)
        fields = {
            "prompt_token_ids": head.prompt_ids.tolist(),
            "completion_token_ids": choice.reply.completion.ids.tolist(),
            "logprobs": choice.reply.completion.logprobs.tolist(),
        }
        assert MESSAGES.answer(head, [choice.reply])["tokentrace"] == fields
        events = events_of(streamed(MESSAGES, head, [choice]))
        assert [event["type"] for event in events if "tokentrace" in event] == ["message_delta"]
        assert events[-2]["tokentrace"] == fields
    assert "tokentrace" not in MESSAGES.answer(head_of(pocket()), [choice.reply])


# -- what is read


def test_everything_is_read() -> None:
    request = read(
        system=[
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " brief."},
        ],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["x"],
        stream=True,
        thinking={"type": "enabled", "budget_tokens": 2000},
        metadata={"user_id": "u"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        flavour="mint",
    )
    assert request == Request(
        messages=[system("Be brief."), user("Hi.")],
        object_arguments=True,
        tools=[LOOK],
        model="m",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop=("x",),
        stream=True,
        usage_in_stream=True,
        structure={"type": "json_schema", "schema": {"type": "object"}},
        hints={"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ignored=("flavour",),
        wishes=("tool_choice", "tool_choice.disable_parallel_tool_use", "thinking.budget_tokens"),
        echo={"token_fields": []},
    )
    json.dumps(request.echo)


def claude_code(**more: Any) -> dict[str, Any]:
    """A body with the fields that Claude Code 2.1.325 sends."""
    text = {"type": "text", "text": "Where am I?"}
    late = {"name": "fetch", "description": "Fetch a page.", "input_schema": {"type": "object"}, "defer_loading": True}
    return {
        "model": "claude-opus-5-5",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nx\n</system-reminder>\n"}, text]},
            {
                "role": "system",
                "content": [{"type": "text", "text": "# Environment", "cache_control": {"type": "ephemeral"}}],
                "output_config": {"effort": "medium"},
            },
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.325.0dc; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\nBe careful.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{**TOOL, "description": "Look."}, late],
        "metadata": {"user_id": '{"session_id":"s"}'},
        "max_tokens": 128000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }


def test_claude_code_is_understood() -> None:
    request = MESSAGES.read(claude_code(), {"anthropic-beta": "claude-code-20250219,effort-2025-11-24"})
    assert request.messages == [
        system("You are an agent.\nBe careful."),
        user("<system-reminder>\nx\n</system-reminder>\nWhere am I?"),
        system("# Environment"),
    ]
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["look"]
    assert request.hints == {"reasoning_effort": "medium", "enable_thinking": True, "thinking": True}
    assert request.wishes == ("messages.output_config", "thinking.display")
    assert request.ignored == ("system.x-anthropic-billing-header",)
    assert not request.continued


def test_a_message_that_turns_from_blocks_to_a_string_is_the_same() -> None:
    body = claude_code()
    turned = [body["messages"][0], {"role": "system", "content": "# Environment"}]
    assert MESSAGES.read({**body, "messages": turned}, {}).messages == MESSAGES.read(body, {}).messages


def test_a_deferred_tool_is_defined_where_it_is_referred_to() -> None:
    asked = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]}
    found = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}
    messages = [*claude_code()["messages"], asked, {"role": "user", "content": [found]}]
    before, after = MESSAGES.read(claude_code(), {}), MESSAGES.read(claude_code(messages=messages), {})
    assert after.tools == before.tools
    assert list(after.messages[:3]) == list(before.messages)
    assert after.messages[-1]["content"] == (
        '<function>{"description": "Fetch a page.", "name": "fetch", "parameters": {"type": "object"}}</function>\n'
    )
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    more = [*claude_code()["messages"], {"role": "system", "content": [addition, removal]}]
    said = MESSAGES.read(claude_code(messages=more), {}).messages[-1]["content"]
    assert said == after.messages[-1]["content"] + "The function look is no longer available.\n"
    with pytest.raises(RequestError, match="defer_loading"):
        MESSAGES.read(claude_code(messages=messages, tools=[TOOL]), {})


def test_system_messages_that_say_nothing_are_left_out() -> None:
    quiet = {"role": "system", "content": [], "output_config": {"effort": "high"}}
    request = read(messages=[user("a"), quiet])
    assert request.messages == [user("a")]
    assert request.wishes == ("messages.output_config",)


def test_the_system_prompt_stands_before_a_system_message() -> None:
    assert read(system="A", messages=[system("B"), user("a")]).messages == [system("A"), system("B"), user("a")]


def test_a_last_message_of_the_assistants_is_gone_on_with() -> None:
    assert read(messages=[user("a"), {"role": "assistant", "content": "The answer is"}]).continued
    assert not read().continued


def test_thinking_and_choices() -> None:
    assert read(thinking={"type": "disabled"}).hints == {"enable_thinking": False, "thinking": False}
    assert read().hints == {}
    assert not read(tools=[TOOL], tool_choice={"type": "none"}).calls_allowed
    assert read(tools=[TOOL], tool_choice={"type": "none"}).tools == [LOOK]
    assert read(tools=[TOOL], tool_choice={"type": "tool", "name": "look"}).wishes == ("tool_choice",)


def test_edits_that_would_leave_something_out_are_wishes() -> None:
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert read(context_management=edits).wishes == ("context_management",)


def test_counting_needs_no_limit() -> None:
    body = {"model": "m", "messages": [user("Hi.")], "system": "A"}
    assert read_count(body, {}).messages == [system("A"), user("Hi.")]
    assert count_answer(12) == {"input_tokens": 12}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "system", "content": []}]}),
        ("messages.0.role", {"messages": [{"role": "tool", "content": "a"}]}),
        ("messages.0.tool_calls", {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}),
        ("messages.0.content.0.type", {"messages": [{"role": "user", "content": [{}]}]}),
        ("system", {"system": 3}),
        ("system.0.text", {"system": [{"type": "text"}]}),
        ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools.0.input_schema", {"tools": [{"name": "look"}]}),
        ("tool_choice.type", {"tool_choice": {"type": "required"}}),
        ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "fly"}}),
        ("temperature", {"temperature": -1}),
        ("stop_sequences", {"stop_sequences": [3]}),
        ("thinking.type", {"thinking": {"type": "much"}}),
        ("output_config.effort", {"output_config": {"effort": "\n"}}),
        ("output_config.format", {"output_config": {"format": {"type": "xml"}}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
        ("container", {"container": "c"}),
        ("thread", {"thread": {"type": "continue", "previous_message_id": "msg_1"}, "messages": []}),
        ("min_p", {"min_p": 0.5}),
        ("x-tokentrace-token-ids", {"return_token_id_information": True}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.field == field
    said = MESSAGES.error(refused.value)
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["message"].startswith(f"{field}: ")
    threads = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert said["error"].get("details") == (threads if field == "thread" else None)


@settings(max_examples=examples(300), deadline=None)
@given(body=JSON | fields_of(ASK, "messages") | fields_of(claude_code(), "messages"))
def test_no_body_is_more_than_refused(body: Any) -> None:
    check_read(MESSAGES, body)


# -- errors


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (529, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_anthropics_client_knows_the_errors(status: int, kind: str, raised: type[anthropic.APIStatusError]) -> None:
    error = RequestError("no", field="n", status=status)
    body = json.dumps(MESSAGES.error(error))
    with client_of(body, "application/json", status) as client, pytest.raises(raised) as found:
        client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
    assert isinstance(found.value.body, dict)
    assert found.value.body["error"] == {"type": kind, "message": "n: no"}


def test_a_stream_that_fails_ends_with_the_error() -> None:
    choice = written(pocket(), "Yes.")
    frames = MESSAGES.stream(head_of(pocket()), [choice.reply.call_id])
    said = frames.open() + frames.feed(0, *choice.pieces[0]) + frames.fail(RequestError("gone", status=503))
    assert events_of(said)[-1]["error"] == {"type": "overloaded_error", "message": "gone"}
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        put_together(said)
