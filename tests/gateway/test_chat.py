"""Chat completions: what is read, what is answered, and that a stream put together by OpenAI's client is the answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.conversations import user
from tests.gateway.answers import (
    BROKEN,
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
    told_message,
    written,
)
from tests.gateway.bodies import JSON, check_read, fields_of
from tests.support import examples
from tokentrace.gateway.chat import CHAT
from tokentrace.gateway.dialect import QUIET, Head
from tokentrace.gateway.requests import Request, RequestError
from tokentrace.gateway.sse import OPENAI_END

ASK: dict[str, Any] = {"model": "m", "messages": [user("Hi.")]}


def read(**fields: Any) -> Request:
    return CHAT.read({**ASK, **fields}, {})


# -- streams are the answer


def answered_by(head: Head, choices: list[Sampled]) -> dict[str, Any]:
    """The answer, as OpenAI's client takes it."""
    answer = CHAT.answer(head, [choice.reply for choice in choices])
    ChatCompletion.model_validate(answer, strict=True)
    client = openai.OpenAI(
        api_key="k", base_url="http://localhost", http_client=serve(json.dumps(answer), "application/json")
    )
    with client:
        return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}]).to_dict()


def put_together(frames: list[str]) -> dict[str, Any]:
    """What OpenAI's client makes of a stream."""
    client = openai.OpenAI(api_key="k", base_url="http://localhost", http_client=serve("".join(frames)))
    with client, client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as stream:
        return stream.until_done().current_completion_snapshot.to_dict()


def plain(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices, without what only one of the two ways has."""
    found = []
    for choice in completion["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": call["type"],
                    "function": {name: call["function"][name] for name in ("name", "arguments")},
                }
                for call in message["tool_calls"]
            ]
        logprobs = {"content": (choice.get("logprobs") or {}).get("content")}
        found.append({**choice, "message": message, "logprobs": logprobs})
        found[-1].pop("token_ids", None)  # OpenAI's client does not add these up
    return found


def check(head: Head, *choices: Sampled) -> dict[str, Any]:
    answer = answered_by(head, list(choices))
    frames = streamed(CHAT, head, list(choices))
    assert frames[-1] == OPENAI_END
    for frame in frames[:-1]:
        ChatCompletionChunk.model_validate(json.loads(frame.removeprefix("data: ")), strict=True)
    together = put_together(frames)
    assert plain(together) == plain(answer)
    return answer


@pytest.mark.parametrize("name", COMPLETIONS)
@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_is_the_answer(name: str, allowed: bool, size: int) -> None:
    choice = written(pocket(), COMPLETIONS[name], size=size)
    answer = check(head_of(pocket(), calls_allowed=allowed), choice)
    message = answer["choices"][0]["message"]
    if not allowed:
        assert "tool_calls" not in message
        assert message["content"] == COMPLETIONS[name].rpartition("</think>\n\n")[2]
        assert answer["choices"][0]["finish_reason"] == "stop"
    else:
        assert message == told_message(choice)
        calls = bool(message.get("tool_calls"))
        assert answer["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")


CALLS_CUT_OFF = {"in a call", "after a call", "after a call's name", "in a list"}


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_is_the_answer_that_was_cut_off(name: str, allowed: bool) -> None:
    answer = check(head_of(pocket(), calls_allowed=allowed), written(pocket(), CUT_OFF[name], stops=False))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert ("tool_calls" in answer["choices"][0]["message"]) == (allowed and name in CALLS_CUT_OFF)


@settings(max_examples=examples(60), deadline=None)
@given(
    ids=st.lists(st.integers(0, 4095), max_size=40), size=st.integers(1, 9), allowed=st.booleans(), stops=st.booleans()
)
def test_whatever_ids_are_sampled(ids: list[int], size: int, allowed: bool, stops: bool) -> None:
    known = [one for one in ids if one not in pocket().get_stop_token_ids()]
    choice = sampled(pocket(), [*known, *pocket().get_stop_token_ids()[:stops]], size=size)
    check(head_of(pocket(), calls_allowed=allowed), choice)


def test_text_and_arguments_are_told_as_they_come() -> None:
    choice = written(pocket(), f"<think>\nHm.\n</think>\n\nYes.\n{CALL.replace('Zürich', '1234567890' * 20)}")
    frames = CHAT.stream(head_of(pocket()), [choice.reply.call_id])
    assert len(frames.open()) == 1
    made = ["".join(frames.feed(0, events, delta)) for events, delta in choice.pieces]
    telling = [at for at, said in enumerate(made) if said]
    assert '"reasoning_content"' in made[telling[0]]
    assert telling[0] < 6
    calls = [at for at, said in enumerate(made) if '"arguments"' in said]
    assert len(calls) > 20
    assert '"name":"look"' in made[calls[0]]
    assert calls[0] < calls[1] < len(made) // 2


def test_arguments_that_are_not_json_are_told_as_they_were_written() -> None:
    answer = check(head_of(pocket()), written(pocket(), f"I try.\n{BROKEN}"))
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "I try."
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert call["function"]["arguments"].strip() == '{"place":'
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_is_told_late_keeps_the_stream_alive() -> None:
    """Its name comes after its arguments."""
    text = f'<tool_call>\n{{"arguments": {{"place": "{"1" * 200}"}}, "name": "look"}}\n</tool_call>'
    choice = written(pocket(), text)
    frames = CHAT.stream(head_of(pocket()), [choice.reply.call_id])
    quiet = [len(frames.feed(0, events, delta)) for events, delta in choice.pieces[:-2]]
    gaps = [sum(1 for _ in group) for made, group in itertools.groupby(quiet, key=bool) if not made]
    assert len(gaps) > 5
    assert max(gaps) <= QUIET + 4  # the call's opening is not known to be one at once
    assert check(head_of(pocket()), choice)["choices"][0]["message"]["tool_calls"]


def test_several_choices() -> None:
    head = head_of(pocket(), n=2, usage_in_stream=True)
    choices = [written(pocket(), COMPLETIONS["everything"], turn="x"), written(pocket(), "Nô.", turn="y", cached=3)]
    answer = check(head, *choices)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop"]
    assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["callx0", "callx1"]
    frames = streamed(CHAT, head, choices)
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    count = sum(len(choice.reply.completion.ids) for choice in choices)
    assert chunks[-1]["usage"] == answer["usage"]
    assert answer["usage"] == {
        "prompt_tokens": len(head.prompt_ids),
        "completion_tokens": count,
        "total_tokens": len(head.prompt_ids) + count,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_usage_in_a_stream_only_where_it_was_asked_for() -> None:
    frames = streamed(CHAT, head_of(pocket()), [written(pocket(), "Yes.")])
    assert not any('"usage"' in frame for frame in frames)


def test_a_stop_text_is_a_stop() -> None:
    reply = written(pocket(), "One two", stops=False, stopped_by=" three").reply
    assert CHAT.answer(head_of(pocket()), [reply])["choices"][0]["finish_reason"] == "stop"


# -- ids and logprobs


@pytest.mark.parametrize("name", ["content", "everything", "a broken call"])
def test_logprobs_of_every_token(name: str) -> None:
    choice = written(pocket(), COMPLETIONS[name], size=3)
    answer = check(head_of(pocket(), logprobs=1), choice)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == choice.reply.completion.logprobs.tolist()
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert raw.decode().startswith(COMPLETIONS[name])
    for entry in entries:
        assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]


def test_logprobs_name_ids_where_vllm_does() -> None:
    choice = written(pocket(), "Yes.")
    head = head_of(pocket(), read(logprobs=True, return_tokens_as_token_ids=True))
    entries = check(head, choice)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{one}" for one in choice.reply.completion.ids]


def test_ids_as_vllm_gives_them() -> None:
    choice, head = written(pocket(), COMPLETIONS["everything"], size=2), head_of(pocket(), read(return_token_ids=True))
    answer = CHAT.answer(head, [choice.reply])
    ids = choice.reply.completion.ids.tolist()
    assert answer["prompt_token_ids"] == head.prompt_ids.tolist()
    assert answer["choices"][0]["token_ids"] == ids
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in streamed(CHAT, head, [choice])[:-1]]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [head.prompt_ids.tolist()] + [None] * (
        len(chunks) - 1
    )
    assert [one for chunk in chunks for one in chunk["choices"][0].get("token_ids", [])] == ids
    check(head, choice)


def test_ids_as_nemo_gym_has_them() -> None:
    choice = written(pocket(), COMPLETIONS["everything"])
    head = head_of(pocket(), read(return_token_id_information=True))
    fields = {
        "prompt_token_ids": head.prompt_ids.tolist(),
        "generation_token_ids": choice.reply.completion.ids.tolist(),
        "generation_log_probs": choice.reply.completion.logprobs.tolist(),
    }
    answer = CHAT.answer(head, [choice.reply])
    assert fields.items() <= answer["choices"][0]["message"].items()
    assert "prompt_token_ids" not in answer
    last = json.loads(streamed(CHAT, head, [choice])[-2].removeprefix("data: "))
    assert last["choices"][0]["delta"] == fields


def test_ids_as_every_dialect_has_them() -> None:
    choice = written(pocket(), "Yes.")
    head = head_of(pocket(), CHAT.read(ASK, {"x-tokentrace-token-ids": "true"}))
    fields = {
        "prompt_token_ids": head.prompt_ids.tolist(),
        "completion_token_ids": choice.reply.completion.ids.tolist(),
        "logprobs": choice.reply.completion.logprobs.tolist(),
    }
    assert CHAT.answer(head, [choice.reply])["choices"][0]["tokentrace"] == fields
    last = json.loads(streamed(CHAT, head, [choice])[-2].removeprefix("data: "))
    assert last["choices"][0]["tokentrace"] == fields


def test_the_header_names_ways() -> None:
    assert CHAT.read(ASK, {"x-tokentrace-token-ids": "vllm, nemo-gym"}).echo["token_fields"] == ["vllm", "nemo_gym"]
    assert not CHAT.read(ASK, {"x-tokentrace-token-ids": "0"}).token_ids
    with pytest.raises(RequestError, match="tokentrace, vllm"):
        CHAT.read(ASK, {"x-tokentrace-token-ids": "all"})


def test_no_ids_unasked() -> None:
    said = json.dumps(CHAT.answer(head_of(pocket()), [written(pocket(), "Yes.").reply]))
    assert "token_ids" not in said
    assert '"logprobs": null' in said


# -- the functions of old


def test_functions_are_answered_with_a_function_call() -> None:
    head = head_of(pocket(), read(functions=[LOOK["function"]]))
    assert head.request.tools == [LOOK]
    choice = written(pocket(), CALL)
    answer = check(head, choice)["choices"][0]
    assert answer["finish_reason"] == "function_call"
    assert answer["message"] == {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "look", "arguments": '{"place":  "Zürich" }'},
    }
    again = read(messages=[user("Hi."), answer["message"]], functions=[LOOK["function"]]).messages[-1]
    assert again["tool_calls"][0]["function"]["name"] == "look"


# -- what is read


def test_everything_is_read() -> None:
    request = read(
        tools=[LOOK],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        seed=3,
        stop="x",
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
        metadata={"a": "b"},
        user="me",
        flavour="mint",
        frequency_penalty=0,
        presence_penalty=0.0,
    )
    assert request == Request(
        messages=[user("Hi.")],
        tools=[LOOK],
        model="m",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        seed=3,
        stop=("x",),
        n=2,
        stream=True,
        usage_in_stream=True,
        logprobs=2,
        structure={"type": "json_schema", "schema": {"type": "object"}},
        variables={"enable_thinking": False},
        hints={"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ignored=("flavour",),
        wishes=("parallel_tool_calls", "tool_choice"),
        echo={"token_fields": [], "functions": False, "tokens_as_ids": False},
    )
    json.dumps(request.echo)


def test_what_is_not_said_is_not_set() -> None:
    assert read(temperature=None, stop=None, tools=[], tool_choice="auto") == Request(
        messages=[user("Hi.")], model="m", echo={"token_fields": [], "functions": False, "tokens_as_ids": False}
    )


def test_choices_of_tools() -> None:
    named = {"type": "function", "function": {"name": "look"}}
    assert read(tools=[LOOK], tool_choice=named).wishes == ("tool_choice",)
    assert not read(tools=[LOOK], tool_choice="none").calls_allowed
    assert read(tools=[LOOK], tool_choice="none").tools == [LOOK]
    assert read(tools=[LOOK]).calls_allowed
    assert read(functions=[LOOK["function"]], function_call={"name": "look"}).wishes == ("function_call",)


def test_structures() -> None:
    assert read(response_format={"type": "text"}).structure is None
    assert read(response_format={"type": "json_object"}).structure == {"type": "json_object"}


def test_an_answer_that_is_to_go_on() -> None:
    begun = [user("Hi."), {"role": "assistant", "content": "We"}]
    assert read(messages=begun, continue_final_message=True, add_generation_prompt=False).continued
    assert not read(messages=begun).continued


@pytest.mark.parametrize("effort", ["none", "low"])
def test_hints(effort: str) -> None:
    hints = read(reasoning_effort=effort).hints
    assert hints["enable_thinking"] is (effort != "none")
    assert ("reasoning_effort" in hints) == (effort != "none")
    assert read(thinking={"type": "disabled"}).hints == {"enable_thinking": False, "thinking": False}
    assert read(enable_thinking=True).hints == {"enable_thinking": True, "thinking": True}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "Hi."}),
        ("messages.0", {"messages": [3]}),
        ("messages.1.content", {"messages": [user("a"), user(3)]}),
        ("messages.0.role", {"messages": [{"content": "a"}]}),
        ("messages.0.tool_calls.0.name", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("tools.0.type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
        ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
        ("functions", {"tools": [LOOK], "functions": [LOOK["function"]]}),
        ("tool_choice", {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "fly"}}}),
        ("tool_choice", {"tool_choice": "sometimes"}),
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": 2.5}),
        ("temperature", {"temperature": 1e-5}),
        ("temperature", {"temperature": float("nan")}),
        ("top_p", {"top_p": 0}),
        ("top_p", {"top_p": True}),
        ("top_k", {"top_k": -2}),
        ("seed", {"seed": -1}),
        ("stop", {"stop": ["a"] * 17}),
        ("stop", {"stop": [""]}),
        ("n", {"n": 0}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        ("reasoning_effort", {"reasoning_effort": "<|im_end|>"}),
        ("thinking.type", {"thinking": {}}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("continue_final_message", {"continue_final_message": True}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("frequency_penalty", {"frequency_penalty": 2.1}),
        ("repetition_penalty", {"repetition_penalty": 0}),
        ("min_p", {"min_p": "much"}),
        ("audio", {"audio": {"voice": "x"}}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("chat_template", {"chat_template": "{{ x }}"}),
        ("guided_json", {"guided_json": {}}),
        ("return_token_ids", {"return_token_ids": "yes"}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        read(**body)
    assert refused.value.field == field
    assert refused.value.status == 400
    said = CHAT.error(refused.value)["error"]
    assert said["param"] == field
    assert said["type"] == "invalid_request_error"


@settings(max_examples=examples(300), deadline=None)
@given(body=JSON | fields_of(ASK, "chat"))
def test_no_body_is_more_than_refused(body: Any) -> None:
    check_read(CHAT, body)


# -- errors


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", openai.BadRequestError),
        (401, "authentication_error", openai.AuthenticationError),
        (403, "permission_error", openai.PermissionDeniedError),
        (404, "not_found_error", openai.NotFoundError),
        (413, "request_too_large", openai.APIStatusError),
        (429, "rate_limit_error", openai.RateLimitError),
        (500, "api_error", openai.InternalServerError),
        (503, "overloaded_error", openai.InternalServerError),
    ],
)
def test_openais_client_knows_the_errors(status: int, kind: str, raised: type[openai.APIStatusError]) -> None:
    error = RequestError("no", field="n", status=status, code="c")
    http = serve(json.dumps(CHAT.error(error)), "application/json", status)
    with (
        openai.OpenAI(api_key="k", base_url="http://localhost", http_client=http, max_retries=0) as client,
        pytest.raises(raised) as found,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert (found.value.param, found.value.code, found.value.type) == ("n", "c", kind)
    assert "n: no" in str(found.value)


def test_a_stream_that_fails_ends_with_the_error() -> None:
    choice = written(pocket(), f"Yes.\n{BROKEN}")
    frames = CHAT.stream(head_of(pocket()), [choice.reply.call_id])
    said = frames.open() + frames.feed(0, *choice.pieces[0]) + frames.fail(RequestError("gone", status=503))
    assert OPENAI_END not in said
    with pytest.raises(openai.APIError, match="gone"):
        put_together(said)
