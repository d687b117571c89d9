"""In every dialect the stream, assembled by the real client, equals the whole answer: all the model wrote."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import user
from tests.gateway.answers import (
    CALL,
    COMPLETIONS,
    CUT_OFF,
    FAMILIES,
    LOOK,
    Sampled,
    as_sse,
    expected_message,
    from_text,
    head_of,
    pocket,
    renderer_of,
    sampled,
    streamed,
)
from tests.lazy import lazy
from tests.parsing.forms import families
from tests.support import examples
from tokentrace.conversation.responses import from_responses, unsealed
from tokentrace.conversation.shapes import from_anthropic, from_openai
from tokentrace.engines.protocol import FinishReason
from tokentrace.gateway.chat import Chat
from tokentrace.gateway.dialect import Dialect, Head, encode_sse
from tokentrace.gateway.messages import Messages, signature
from tokentrace.gateway.requests import AnswerOptions, RequestError
from tokentrace.gateway.responses import Responses

anthropic, openai, pydantic = lazy("anthropic"), lazy("openai"), lazy("pydantic")
HI: Any = [user("x")]


def sdk(kind: Any, body: str, media: str = "text/event-stream", status: int = 200) -> Any:
    answer = httpx2.Response(status, headers={"content-type": media}, content=body.encode())
    http = httpx2.Client(transport=httpx2.MockTransport(lambda _: answer))
    return kind(api_key="k", base_url="http://localhost", http_client=http, max_retries=0)


def frames(sse: str) -> list[Any]:
    pieces = [frame.partition("data: ")[2] for frame in sse.split("\n\n")]
    return [json.loads(data) for data in pieces if data and data != "[DONE]"]


def chat_whole(answer: dict[str, Any]) -> Any:
    return _choices(openai.types.chat.ChatCompletion.model_validate(answer, strict=True).to_dict())


def chat_assembled(sse: str) -> Any:
    for chunk in frames(sse):
        if "error" not in chunk:
            openai.types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    with sdk(openai.OpenAI, sse) as client, client.chat.completions.stream(model="m", messages=HI) as stream:
        return _choices(stream.until_done().current_completion_snapshot.to_dict())


def _choices(completion: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices, without fields that only a stream or only a whole answer has."""
    choices = []
    for choice in completion["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        for call in message.get("tool_calls", []):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        logprobs = (choice.get("logprobs") or {}).get("content") or None
        choices.append({**choice, "message": message, "logprobs": logprobs})
        choices[-1].pop("token_ids", None)  # OpenAI's client does not add these up
    return choices


def messages_whole(answer: dict[str, Any]) -> Any:
    return _filled(anthropic.types.Message.model_validate(answer, strict=True).to_dict())


def messages_assembled(sse: str) -> Any:
    adapter = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in frames(sse):
        if event["type"] not in ("ping", "error"):
            adapter.validate_python(event, strict=True)
    with (
        sdk(anthropic.Anthropic, sse) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HI) as stream,
    ):
        return _filled(stream.get_final_message().to_dict())


def _filled(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if value is not None} for block in message["content"]]
    fields = {key: value for key, value in message.items() if value is not None}
    return {**fields, "content": blocks}


def responses_whole(answer: dict[str, Any]) -> Any:
    assert openai.types.responses.Response.model_validate(answer, strict=True).to_dict() == answer
    return answer


def responses_assembled(sse: str) -> Any:
    """The last event has the whole answer; checks that the others add up to its items."""
    adapter = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    events = frames(sse)
    for event in events:
        adapter.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    answer = events[-1]["response"]
    initial = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    initial.pop("tokentrace", None)
    assert [event["response"] for event in events[:2]] == [initial, initial]
    texts: dict[int, str] = {}
    done: dict[int, Any] = {}
    for event in events[2:-1]:
        at, kind = event["output_index"], event["type"]
        assert at not in done
        if kind == "response.output_item.added":
            assert at == len(texts)
            texts[at] = ""
        elif kind.endswith(".delta"):
            texts[at] += event["delta"]
        elif kind == "response.output_item.done":
            done[at] = event["item"]
    output = [_without_tokens(item) for item in answer["output"]]
    assert [_without_tokens(done[at]) for at in sorted(done)] == output
    assert [texts[at] for at in sorted(texts)] == [_text(item) for item in output]
    if answer["status"] == "completed":
        with sdk(openai.OpenAI, sse) as client, client.responses.stream(model="m", input="x") as stream:
            assert [item.id for item in stream.get_final_response().output] == [item["id"] for item in output]
    return answer


def _without_tokens(item: dict[str, Any]) -> dict[str, Any]:
    """An item without token ids, which are added after its last event."""
    return {key: value for key, value in item.items() if "token" not in key and "log_probs" not in key}


def _text(item: dict[str, Any]) -> str:
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


@dataclass(frozen=True)
class Client:
    dialect: type[Dialect]
    whole: Callable[[dict[str, Any]], Any]
    assembled: Callable[[str], Any]
    message: Callable[[dict[str, Any]], dict[str, Any]]
    """The answer as a message in OpenAI's shape, with empty content as an empty string."""
    options: dict[str, Any]

    def check(self, head: Head, *choices: Sampled) -> dict[str, Any]:
        answer = self.dialect(head).whole([choice.reply for choice in choices])
        sse = as_sse(self.dialect, streamed(self.dialect, head, choices))
        assert self.assembled(sse) == self.whole(answer)
        return answer


def _from_chat(answer: dict[str, Any]) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    return {**message, "content": message["content"] or ""}


def _from_messages(answer: dict[str, Any]) -> dict[str, Any]:
    [message] = from_anthropic([{"role": "assistant", "content": answer["content"]}]) or [{}]
    return dict(message)


def _from_responses(answer: dict[str, Any]) -> dict[str, Any]:
    [message] = from_responses(answer["output"])
    return dict(message)


REPEATED = Responses.read({"input": "Hi."}, {}).answer.repeated
CLIENTS = {
    "chat": Client(Chat, chat_whole, chat_assembled, _from_chat, {}),
    "messages": Client(Messages, messages_whole, messages_assembled, _from_messages, {"object_arguments": True}),
    "responses": Client(Responses, responses_whole, responses_assembled, _from_responses, {"repeated": REPEATED}),
}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> Client:
    return CLIENTS[request.param]


ZURICH = {"place": "Zürich"}
INPUTS: dict[str, list[dict[str, Any]]] = {
    **{key: [] for key in ("a broken call", "arguments that are no object", "no arguments")},
    **{key: [] for key in ("in a call", "in a list", "after a call's name")},
    **{key: [ZURICH] for key in ("a quote that is not escaped", "after a call")},
    "a broken call between others": [ZURICH, ZURICH],
    "an argument twice": [{"place": "b"}],
}
"""The inputs of Anthropic's tool uses in completions with a broken call."""


def check_message(client: Client, name: str, message: dict[str, Any], expected: dict[str, Any]) -> None:
    if client.dialect is Messages:
        inputs = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        if name in INPUTS:
            assert inputs == INPUTS[name]
            attempts = len(expected.get("tool_calls", ()))
            assert message["content"].count("<tool_call>") == attempts - len(inputs), "the others are text"
            return
        for call in expected.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert message == {**expected, "content": expected["content"] or ""}


@pytest.mark.parametrize("name", [*COMPLETIONS, *CUT_OFF])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_stream_is_the_answer(client: Client, name: str, allowed: bool) -> None:
    text = COMPLETIONS.get(name, CUT_OFF.get(name, ""))
    options = AnswerOptions(calls_allowed=allowed, **client.options)
    head = head_of(pocket(), calls_allowed=allowed, **client.options)
    for size in (1, 7):
        choice = from_text(pocket(), text, options, size=size, stops=name in COMPLETIONS)
        answer = client.check(head, choice)
        if not answer.get("content", True):
            continue
        message = client.message(answer)
        if allowed:
            check_message(client, name, message, expected_message(choice))
        else:
            assert "tool_calls" not in message
            if name in COMPLETIONS:
                assert message["content"] == text.rpartition("</think>\n\n")[2]
    reason = choice.reply.finish_reason
    has_calls = any(item.name for item in choice.reply.items)
    assert reason == ("length" if name in CUT_OFF else "tool_calls" if has_calls else "stop")


@settings(max_examples=examples(60), deadline=None)
@given(
    ids=st.lists(st.integers(0, 4095), max_size=40),
    size=st.integers(1, 9),
    allowed=st.booleans(),
    stops=st.booleans(),
    logprobs=st.sampled_from([None, 1]),
)
def test_streams_of_any_ids_agree(ids: list[int], size: int, allowed: bool, stops: bool, logprobs: int | None) -> None:
    end = pocket().get_stop_token_ids()
    ids = [*(id for id in ids if id not in end), *end[:stops]]
    for client in CLIENTS.values():
        options = AnswerOptions(calls_allowed=allowed, **client.options)
        head = head_of(pocket(), calls_allowed=allowed, logprobs=logprobs, **client.options)
        client.check(head, sampled(pocket(), ids, options, size=size))


@families(["gpt-oss"])
def test_streams_of_real_families_are_the_answers(any_family: str) -> None:
    renderer = renderer_of(any_family)
    for text, client in itertools.product(FAMILIES[any_family], CLIENTS.values()):
        options = AnswerOptions(**client.options)
        choice = from_text(renderer, text, options, stops=not text.endswith(("<|call|>", "<|return|>")))
        answer = client.check(head_of(renderer, **client.options), choice)
        if client.dialect is not Messages:
            check_message(client, text, client.message(answer), expected_message(choice))


def test_text_and_arguments_come_as_they_are_sampled(client: Client) -> None:
    text = f"<think>\nHm.\n</think>\n\nYes, I do.\n{CALL.replace('Zürich', '1234567890' * 20)}"
    choice = from_text(pocket(), text, AnswerOptions(**client.options))
    encoder = client.dialect(head_of(pocket(), **client.options))
    encoder.open()
    fed = [json.dumps(encoder.feed(0, *piece)) for piece in choice.pieces]
    assert any(events != "[]" for events in fed[:6])
    sent = [at for at, events in enumerate(fed) if "arguments" in events]
    if client.dialect is not Messages:
        assert len(sent) > 20
        assert sent[1] < len(fed) // 2


@pytest.mark.parametrize("stop", ["three", "x", "\n"])
def test_a_stop_text_ends_the_content(client: Client, stop: str) -> None:
    options = AnswerOptions(**client.options)
    for size, text in itertools.product((1, 3, 50), ("One two th", "One <tool_call>{")):
        choice = from_text(pocket(), f"{text}{stop} four", options, stop=[stop, "zz"], stops=False, size=size)
        answer = client.check(head_of(pocket(), **client.options), choice)
        assert client.message(answer)["content"] == text
        assert (choice.reply.stopped_by, choice.reply.finish_reason) == (stop, "stop")
    if client.dialect is Messages:
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


def test_a_stream_that_fails_ends_with_the_error(client: Client) -> None:
    encoder = client.dialect(head_of(pocket(), **client.options))
    choice = from_text(pocket(), "Yes.")
    events = [*encoder.open(), *encoder.feed(0, *choice.pieces[0])]
    events += encoder.fail(RequestError("it is gone", status=503, code="engine"))
    assert "it is gone" in json.dumps(events[-1])
    if client.dialect is not Responses:
        with pytest.raises(Exception, match="gone"):
            client.assembled(b"".join(map(encode_sse, events)).decode())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 503])
def test_clients_know_the_errors(client: Client, status: int) -> None:
    error = RequestError("no", field="n", status=status, code="c")
    response = (json.dumps(client.dialect.error(error)), "application/json", status)
    if client.dialect is Messages:
        with sdk(anthropic.Anthropic, *response) as client_sdk, pytest.raises(anthropic.APIStatusError) as raised:
            client_sdk.messages.create(model="m", max_tokens=9, messages=HI)
        assert raised.value.body["error"] == {"type": error.kind, "message": "n: no"}
        return
    with sdk(openai.OpenAI, *response) as client_sdk, pytest.raises(openai.APIStatusError) as failed:
        client_sdk.responses.create(model="m", input="x")
    assert (failed.value.status_code, failed.value.param, failed.value.code) == (status, "n", "c")


def test_every_dialect_carries_ids(client: Client) -> None:
    choice = from_text(pocket(), COMPLETIONS["everything"], AnswerOptions(**client.options))
    head = head_of(pocket(), token_fields=("tokentrace",), **client.options)
    fields = {
        "prompt_token_ids": head.prompt_ids.tolist(),
        "completion_token_ids": choice.reply.completion.ids.tolist(),
        "logprobs": choice.reply.completion.logprobs.tolist(),
    }
    answer = client.dialect(head).whole([choice.reply])
    holder = answer["choices"][0] if client.dialect is Chat else answer
    assert holder["tokentrace"] == fields
    sent = json.dumps(fields, separators=(",", ":"))
    assert sent in as_sse(client.dialect, streamed(client.dialect, head, [choice]))
    assert "token_ids" not in json.dumps(client.dialect(head_of(pocket())).whole([choice.reply]))


def test_chat_carries_ids_as_vllm_and_nemo_gym() -> None:
    choice, ids = from_text(pocket(), COMPLETIONS["everything"], size=2), head_of(pocket()).prompt_ids.tolist()
    sampled_ids = choice.reply.completion.ids.tolist()
    head = head_of(pocket(), token_fields=("vllm",))
    answer = CLIENTS["chat"].check(head, choice)
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (ids, sampled_ids)
    chunks = streamed(Chat, head, [choice])
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [ids] + [None] * (len(chunks) - 1)
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])] == sampled_ids
    head = head_of(pocket(), token_fields=("nemo_gym",))
    fields = {"prompt_token_ids": ids, "generation_token_ids": sampled_ids}
    assert fields.items() <= Chat(head).whole([choice.reply])["choices"][0]["message"].items()
    output = Responses(head).whole([choice.reply])["output"]
    assert fields.items() <= output[-1].items()
    assert not any("generation_token_ids" in item for item in output[:-1])


@pytest.mark.parametrize("name", ["content", "everything", "a broken call"])
def test_logprobs_are_of_every_token_in_chat_and_of_the_text_in_responses(name: str) -> None:
    choice = from_text(pocket(), COMPLETIONS[name], size=3)
    entries = CLIENTS["chat"].check(head_of(pocket(), logprobs=1), choice)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == choice.reply.completion.logprobs.tolist()
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode().startswith(COMPLETIONS[name])
    output = CLIENTS["responses"].check(head_of(pocket(), logprobs=1, repeated=REPEATED), choice)["output"]
    for item in (item for item in output if item["type"] == "message"):
        part = item["content"][0]
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode().strip() == part["text"].strip()
        for entry in part["logprobs"]:
            assert entry["top_logprobs"] == [{key: entry[key] for key in ("token", "logprob", "bytes")}]


def test_tokens_are_named_by_their_ids() -> None:
    choice = from_text(pocket(), "Yes.")
    answer = CLIENTS["chat"].check(head_of(pocket(), logprobs=1, tokens_as_ids=True), choice)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in choice.reply.completion.ids.tolist()]


def test_legacy_functions_are_answered_with_a_function_call() -> None:
    head, choice = head_of(pocket(), functions=True), from_text(pocket(), CALL)
    [answer] = CLIENTS["chat"].dialect(head).whole([choice.reply])["choices"]
    call = {"name": "look", "arguments": '{"place":  "Zürich" }'}
    assert (answer["finish_reason"], answer["message"]["function_call"]) == ("function_call", call)
    deltas = [chunk["choices"][0] for chunk in streamed(Chat, head, [choice])]
    calls = [delta["delta"]["function_call"] for delta in deltas if "function_call" in delta["delta"]]
    streamed_call = {name: "".join(call_delta.get(name, "") for call_delta in calls) for name in call}
    assert (deltas[-1]["finish_reason"], streamed_call) == ("function_call", call)
    assert not any("tool_calls" in json.dumps(each) for each in [answer, *deltas])
    echo, result = from_openai([answer["message"], {"role": "function", "name": "look", "content": "Here."}])
    assert result == {"role": "tool", "name": "look", "content": "Here."}
    [call_again] = echo["tool_calls"]
    assert call_again["function"] == call


def test_several_choices_and_usage() -> None:
    head = head_of(pocket(), n=2, usage_in_stream=True)
    choices = [from_text(pocket(), COMPLETIONS["everything"], turn="x"), from_text(pocket(), "Nô.", turn="y", cached=3)]
    answer = CLIENTS["chat"].check(head, *choices)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop"]
    assert [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["callx0", "callx1"]
    chunks = streamed(Chat, head, choices)
    assert [chunk["usage"] for chunk in chunks] == [None] * (len(chunks) - 1) + [answer["usage"]]
    count = sum(len(choice.reply.completion.ids) for choice in choices)
    assert answer["usage"]["completion_tokens"] == count
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    usage = Messages(head).whole([choices[1].reply])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (len(head.prompt_ids) - 3, 3)
    assert Responses(head).whole([choices[1].reply])["usage"]["input_tokens"] == len(head.prompt_ids)


def test_thinking_is_signed() -> None:
    answer = CLIENTS["messages"].check(head_of(pocket()), from_text(pocket(), COMPLETIONS["reasoning"]))
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm. 🧮", "signature": signature("a1b2")}
    assert signature("a1b2") != signature("a1b3")


def test_a_response_repeats_its_request_and_has_opaque_reasoning() -> None:
    fields = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "max_output_tokens": 99,
        "previous_response_id": "resp_x1",
        "reasoning": {"effort": "low", "summary": "auto"},
        "truncation": "auto",
        "user": "me",
        "metadata": {"a": "b"},
    }
    more = {
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "tools": [{"type": "function", **LOOK["function"]}],
    }
    head = head_of(pocket(), Responses.read({"model": "m", "input": "Hi.", **fields, **more}, {}))
    answer = CLIENTS["responses"].check(head, from_text(pocket(), COMPLETIONS["everything"]))
    assert fields.items() <= answer.items()
    assert (answer["id"], answer["status"], answer["store"]) == ("resp_a1b2", "completed", False)
    assert unsealed(answer["output"][0]["encrypted_content"]) == "Which?"
    emptied = [{**answer["output"][0], "content": []}, *answer["output"][1:]]
    assert from_responses(emptied) == from_responses(answer["output"])


def test_an_aborted_response_is_incomplete_without_a_reason() -> None:
    reply = sampled(pocket(), [300, 301], finish_reason=FinishReason.ABORT).reply
    answer = Responses(head_of(pocket())).whole([reply])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", None)


@pytest.mark.parametrize("text", ["\ud800", "\u2028\u2029\x85", "née\r\n\x00"])
def test_a_frame_is_one_line_of_json(text: str) -> None:
    frame = encode_sse({"type": "t", "text": text}).decode()
    name, data, *end = frame.split("\n")
    assert (name, end, len(data.splitlines())) == ("event: t", ["", ""], 1)
    assert json.loads(data.removeprefix("data: "))["text"] == text
