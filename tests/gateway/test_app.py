"""The gateway over HTTP: repeated requests, ids, stop texts, broken calls, variables, and refusals."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gateway.recorded import TOOLS as WEATHER
from tests.gateway.recorded import Bench
from tests.gateway.server import TOOLS, Served, gateway_server
from tests.parsing.forms import ids_of
from tokentrace import create_renderer
from tokentrace.engines import EngineReply, SamplingParams, ScriptedEngine, VLLMEngine, connect
from tokentrace.engines.protocol import Completion, FinishReason
from tokentrace.errors import InputError
from tokentrace.gateway.adapting import render_readably
from tokentrace.gateway.answering import finish_reply
from tokentrace.gateway.dialect import ItemStream, call_ids_of
from tokentrace.gateway.requests import AnswerOptions
from tokentrace.pocket import POCKET

ASK: Any = {"role": "user", "content": "What is 3 + 4?"}
RENDERER = create_renderer(POCKET)
STOP = RENDERER.get_stop_token_ids()[0]


def test_the_same_request_is_another_sample_unless_it_has_the_same_key(served: Served) -> None:
    """Also if an SDK counts it as a retry: the gateway may have seen another request before it."""
    retries: list[Any] = [{"x-stainless-retry-count": count} for count in "0112"]
    answers = [served.chat("again", {"messages": [ASK]}, headers)[1] for headers in retries]
    state = served.state("again")
    assert len({answer["id"] for answer in answers}) == state["turns"] == 4
    assert [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]] == [None, "retry", "retry", "retry"]
    body = {"messages": [ASK], "logprobs": True, "top_logprobs": 2}
    third, fourth = (served.chat("again", body, {"idempotency-key": "k1"}) for _ in range(2))
    assert third == fourth
    assert third[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert served.state("again")["turns"] == 5


def test_samples_of_one_prompt_share_all_of_it(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 17 * 23?"}]
    body = {"messages": messages, "tools": TOOLS, "n": 3}
    reply = served.chat("shared", body)[1]["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "391"} for call in reply.get("tool_calls", [])]
    again = {**body, "messages": [*messages, reply, *(results or [{"role": "user", "content": "Sure?"}])], "n": 1}
    for _ in range(3):
        assert served.chat("shared", again)[0] == 200
    state = served.state("shared")
    sampled = sum(turn["stop"] - turn["start"] for turn in state["tree"])
    prompts = state["tree"][0]["start"] + state["tree"][3]["start"] - state["tree"][0]["stop"]
    assert state["tokens"] == sampled + prompts
    assert len(served.rows("shared")) == state["rows"] == 5


def test_prompts_of_ids_are_recorded_by_their_ids(served: Served) -> None:
    async def rollout() -> tuple[list[int], Any]:
        engine = await connect(f"{served.url}/sessions/ids", vocab_size=4096)
        assert isinstance(engine, VLLMEngine)
        assert (engine.capabilities.engine, engine.capabilities.aborts) == ("gateway", False)
        try:
            seen = len(served.prompts)
            first = await engine.generate([5, 6, 7], SamplingParams(8))
            second = await engine.generate([5, 6, 7, *first.ids.tolist(), 9], SamplingParams(8))
            streamed = [delta async for delta in engine.stream([5, 6, 8], SamplingParams(4))]
        finally:
            await engine.close()
        assert served.prompts[seen:] == [[5, 6, 7], [5, 6, 7, *first.ids.tolist(), 9], [5, 6, 8]]
        whole = np.concatenate([delta.ids for delta in streamed])
        return [5, 6, 7, *first.ids.tolist(), 9, *second.ids.tolist()], whole.tolist()

    stream, third = asyncio.run(rollout())
    last = served.state("ids")["tree"][-2:]
    assert last[0]["cause"] is None
    assert last[1]["cause"]["cause"] == "edit"
    trajectory = served.record("ids").trajectory
    assert trajectory.stream(last[0]["branch"]).tolist() == stream
    assert trajectory.stream(last[1]["branch"]).tolist() == [5, 6, 8, *third]


def test_a_prompt_that_cannot_be_recorded_is_refused_before_sampling(served: Served) -> None:
    path = "/sessions/whole/inference/v1/generate"
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 60}}
    sampled = served.call("POST", path, body)[1]["choices"][0]
    seen = len(served.prompts)
    status, answer = served.call("POST", path, {**body, "token_ids": [5, 6, 7, *sampled["token_ids"]]})
    expected = (400, seen) if sampled["finish_reason"] == "stop" else (200, seen + 1)
    assert (status, len(served.prompts)) == expected, answer


@pytest.mark.parametrize("aborts", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_a_stop_text_ended_keeps_its_metadata(served: Served, stream: bool, aborts: bool) -> None:
    session, engine = f"stopped-{stream}-{aborts}", served.app.gateway.engine
    body = {"messages": [ASK], "seed": 0, "stop": [" "], "stream": stream}
    engine.capabilities = replace(engine.capabilities, aborts=aborts)
    assert served.chat(session, body)[0] == 200
    engine.capabilities = replace(engine.capabilities, aborts=True)
    [turn] = served.state(session)["tree"]
    [recorded] = served.record(session).trajectory.turns(0)
    assert turn["stopped_by"]
    assert (turn["finish_reason"], recorded.finish_reason) == ("stop", "abort")
    assert (recorded.logprobs_kind, recorded.version) == ("processed", 0 if aborts else None)
    assert (recorded.cached_tokens is not None) == aborts
    assert ["weight versions" in note for note in turn["notes"]] == [True] * (not aborts)
    [row] = served.rows(session)
    assert row["tokenizer"]
    assert row["template"]


def test_a_structure_that_the_engine_cannot_follow_is_refused_by_name(served: Served) -> None:
    form = {"type": "json_object"}
    body = {"messages": [ASK], "input": "Hi!", "response_format": form, "text": {"format": form}}
    for path, field in (("chat/completions", "response_format"), ("responses", "text.format")):
        status, answer = served.call("POST", f"/sessions/structure/v1/{path}", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert "(embedded)" in answer["error"]["message"]


def test_a_stop_text_cuts_channels_and_a_continuation_starts_before_it() -> None:
    ids = RENDERER.tokenizer.encode("one two STOP three four").tolist()
    sampled = EngineReply(ids, [-0.5] * len(ids), experts=np.arange(len(ids)).reshape(-1, 1))
    with gateway_server(lambda: ScriptedEngine(lambda prompt, sampling: sampled, piece=0)) as served:
        status, answer = served.chat("experts", {"messages": [ASK], "stop": ["STOP"]})
        assert status == 200, answer
        reply = answer["choices"][0]["message"]
        assert reply["content"] == "one two "
        [row] = served.rows("experts")
        assert sum(row["loss_mask"]) == served.state("experts")["sampled"] < len(ids)
        body = {"messages": [ASK, reply], "continue_final_message": True, "add_generation_prompt": False}
        assert served.chat("experts", body)[0] == 200
        assert served.prompts[-1] == RENDERER.render([ASK, reply], continue_final_message=True).token_ids


def test_a_stream_without_a_piece_is_the_engines_fault() -> None:
    class Silent(ScriptedEngine):
        async def stream(self, *arguments: Any, **options: Any) -> AsyncGenerator[Any]:
            return
            yield

    with gateway_server(lambda: Silent(lambda prompt, sampling: [STOP])) as served:
        status, answer = served.chat("silent", {"messages": [ASK], "stop": ["x"]})
    assert (status, answer["error"]["code"]) == (502, "engine")


def test_a_prefilled_message_and_its_continuation_are_one_message_of_the_row(served: Served) -> None:
    messages: list[Any] = [ASK, {"role": "assistant", "content": "The answer is"}]
    body = {"messages": messages, "seed": 0, "continue_final_message": True, "add_generation_prompt": False}
    reply = served.chat("prefilled", body)[1]["choices"][0]["message"]["content"]
    messages = [ASK, {"role": "assistant", "content": f"The answer is{reply}"}, ASK]
    assert served.chat("prefilled", {"messages": messages, "seed": 0})[0] == 200
    for row in served.rows("prefilled"):
        messages, owners = json.loads(row["messages"]), np.array(row["message_indices"])
        assert owners.max() + 1 == len(messages) == row["num_messages"]
        assert {messages[at]["role"] for at in owners[np.array(row["loss_mask"]) == 1]} == {"assistant"}


QUOTED = '<tool_call>\n{"name": "compute", "arguments": {"n": 1, "formula": "say "17"}}\n</tool_call>'
ANTHROPIC_TOOLS: Any = [{"name": "compute", "input_schema": TOOLS[0]["function"]["parameters"]}]


@pytest.fixture(scope="module")
def broken() -> Iterator[Served]:
    def script(prompt: Sequence[int], sampling: Any) -> list[int]:
        text = b"".join(RENDERER.tokenizer.vocabulary.token_bytes(int(id)) for id in prompt)
        return [*ids_of(RENDERER, ("Well." if b"not JSON" in text else QUOTED,)), STOP]

    with gateway_server(lambda: ScriptedEngine(script, piece=3)) as server:
        yield server


@pytest.mark.parametrize("way", ["header", "tool"])
def test_input_streams_as_it_is_sampled_to_clients_that_ask_and_claude_codes_echo_continues(
    broken: Served, way: str
) -> None:
    path = f"/sessions/eager-{way}/v1/messages"
    headers = {"anthropic-beta": "a-1, fine-grained-tool-streaming-2025-05-14"} if way == "header" else {}
    tools = [{**ANTHROPIC_TOOLS[0], **({"eager_input_streaming": True} if way == "tool" else {})}]
    body: Any = {"model": "m", "max_tokens": 99, "tools": tools, "messages": [ASK], "stream": True}
    raw = broken.call("POST", path, body, headers)[1].decode()
    events = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]
    [block] = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 5
    text = "".join(pieces)
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(text)
    block["input"] = {"__unparsedToolInput": {"raw": text, "len": len(text)}}  # as Claude Code sends it back
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "not JSON", "is_error": True}
    body["messages"] += [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    assert broken.call("POST", path, {**body, "stream": False}, headers)[0] == 200
    state = broken.state(f"eager-{way}")
    assert [turn["cause"] for turn in state["tree"]] == [None, None]
    assert (state["tree"][1]["reused"], state["rows"]) == (state["tree"][0]["stop"], 1)


def test_results_name_the_call_as_the_model_did() -> None:
    """Mistral's models write a call's id after its arguments, when the stream has already sent another id."""
    bench, ask = Bench("mistral-nemo"), [{"role": "user", "content": "Weather?"}]
    placed = bench.session.place(bench.conversation(ask))
    call = '[TOOL_CALLS][{"name": "read_file", "arguments": {"path": "a"}, "id": "Qwertyui9"}]'
    ids = [*ids_of(bench.renderer, (call,)), bench.renderer.get_stop_token_ids()[0]]
    parser, call_id = bench.renderer.streaming_parser(tools=WEATHER, prompt_ids=placed.ids), call_ids_of("a", 0)
    stream = ItemStream(call_ids_of("a", 0), AnswerOptions())
    stream.feed(parser.feed(ids))
    completion = Completion(np.array(ids, np.int32), np.full(len(ids), -1, np.float32), FinishReason.STOP)
    finished = finish_reply(parser, stream, completion)[0]
    late_ids, reply = dict(finished.late_ids), finished.message
    assert reply["tool_calls"][0]["id"] == call_id(0) != "Qwertyui9"
    bench.session.apply(bench.session.prepare(placed, completion, reply, {"late_ids": late_ids}, {}))
    result = {"role": "tool", "tool_call_id": call_id(0), "name": "read_file", "content": "x"}
    after = bench.session.place(bench.conversation([*ask, reply, result]))
    assert after.reused == len(placed.ids) + len(ids)
    text = bench.renderer.tokenizer.decode(after.ids[after.reused :].tolist())
    assert "Qwertyui9" in text
    assert call_id(0) not in text


def test_a_call_that_anthropics_clients_cannot_read_is_text() -> None:
    stream, call = ItemStream(call_ids_of("a", 0), AnswerOptions(object_arguments=True)), '{"path": "\\ud800"}'
    parser = RENDERER.streaming_parser(tools=TOOLS)
    text = f'<tool_call>\n{{"name": "compute", "arguments": {call}}}\n</tool_call>'
    stream.feed(parser.feed([*ids_of(RENDERER, (text,)), STOP]))
    assert [(item.kind, call in item.text) for item in stream.items] == [("content", True)]


def test_a_template_that_reads_mappings_gets_only_readable_arguments() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "here", "x": oh'}}
    messages: list[Any] = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    renderer = Bench("qwen3-coder").renderer
    with pytest.raises(InputError, match="not valid JSON"):
        renderer.render(messages, tools=WEATHER)
    _, notes = render_readably(renderer, messages, tools=WEATHER)
    assert [note.partition(":")[0] for note in notes] == ["message 1"]
    call["function"] |= {"arguments": '{"path": "\\ud800"}'}  # half of a surrogate pair
    assert len(render_readably(renderer, messages, tools=WEATHER)[1]) == 1
    with pytest.raises(InputError):
        render_readably(renderer, [{"role": "user", "content": 7}])


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "enable_thinkin"])
def test_variables_replace_nothing_and_are_read_by_the_template(served: Served, name: str) -> None:
    body = {"messages": [ASK], "chat_template_kwargs": {name: [{"role": "user", "content": "Other"}]}}
    status, answer = served.chat("replace", body)
    assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_variables_of_a_request_cannot_spell_control_tokens() -> None:
    template = (
        "{{ messages[0].content }}{{ greeting }}<|end|>{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    with gateway_server(renderer=create_renderer(POCKET, "default", chat_template=template)) as served:
        for value, expected in (("hello", 200), ("a<|end|>b", 400), ({"k<|turn|>": 1}, 400), (["<|end|>"], 400)):
            body = {"messages": [ASK], "chat_template_kwargs": {"greeting": value}, "max_tokens": 3}
            assert served.chat("spell", body)[0] == expected, value


def test_reasoning_that_is_rewritten_in_a_part_is_not_taken_for_what_was_sampled(served: Served) -> None:
    """It does not match the reply, and OpenAI's messages have no such part."""
    reply = served.chat("part", {"messages": [ASK]})[1]["choices"][0]["message"]
    parts = [{"type": "thinking", "thinking": "Zebras."}, {"type": "text", "text": reply["content"] or ""}]
    calls = {"tool_calls": reply["tool_calls"]} if reply.get("tool_calls") else {}
    echo = {"role": "assistant", "content": parts, **calls}
    status, answer = served.chat("part", {"messages": [ASK, echo, {"role": "user", "content": "Thanks."}]})
    assert (status, answer["error"]["param"]) == (400, "messages.1.content.0")
    assert served.state("part")["turns"] == 1


def test_errors_of_a_continued_session_name_the_item_of_the_request(served: Served) -> None:
    echo = served.chat("place", {"messages": [ASK]})[1]["choices"][0]["message"]
    reply = {"role": "assistant", "content": echo["content"] or "Yes."}
    picture = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]}
    body = {
        "system": "s",
        "instructions": "s",
        "max_tokens": 4,
        "input": [ASK, reply, ASK | {"content": [{"type": "input_image"}]}],
    }
    body |= {"messages": [ASK, reply, picture]}
    for path, place in (
        ("chat/completions", "messages.2.content.1"),
        ("messages", "messages.2"),
        ("responses", "input.2"),
    ):
        error = served.call("POST", f"/sessions/place/v1/{path}", body)[1]["error"]
        assert place in (error.get("param"), error["message"].partition(": ")[0]), error


def test_any_name_of_an_ignored_field_fits_into_a_header(served: Served) -> None:
    """The turn is stored already, so the answer must not fail because of the header that lists the field."""
    names = [*map(chr, range(32)), "\x7f", "\x85", "é", "\u2028", "🌞", "a" * 2000]
    body = {"messages": [ASK], "max_tokens": 1, **{f"x{name}y": 1 for name in names}}
    request = urllib.request.Request(f"{served.url}/sessions/names/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        ignored = answer.headers["x-tokentrace-ignored"]
    assert "x?y" in ignored
    assert ignored.isascii()
    assert ignored.isprintable()


def test_odd_paths_and_headers_are_answered_with_an_error_that_has_an_id(served: Served) -> None:
    status, answer = served.chat("typo/v1", {"messages": [ASK]})
    assert status == 404
    assert "repeated" in answer["error"]["message"]
    status, answer = served.call("POST", "/sessions/typo/v1/messages", {"messages": []})
    assert (status, bool(answer["request_id"])) == (400, True)
    for session in ("a%00b", "%2e%2e", "x" * 129, "%F0%9F%8C%9E"):
        assert served.chat(session, {"messages": [ASK]})[0] in (400, 404), session
    odd: list[dict[str, str]] = [{"x-session-id": "a b"}, {"x-session-id": "é"}]
    for headers in (*odd, {"authorization": "Bearer \xff"}, {"authorization": "Basic \xe9"}):
        assert served.call("POST", "/v1/chat/completions", {"messages": [ASK]}, headers)[0] in (200, 400), headers
    assert served.call("GET", "/healthz", None, {"x-long": "y" * 100_000})[0] in (200, 400, 431)
    assert served.call("GET", "/healthz")[0] == 200


def test_calls_without_an_id_or_with_other_fields_are_read(served: Served) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "name": "compute", "input": {}}]}
    history = [ASK, use, {"role": "user", "content": "Go on."}, {"role": "assistant", "content": "OK."}, ASK]
    for count in (3, 5):
        body = {"model": "m", "max_tokens": 2, "messages": history[:count]}
        assert served.call("POST", "/sessions/no-id/v1/messages", body)[0] == 200, count
    call = {"name": "compute", "arguments": {}, "custom": "x"}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK]
    assert served.chat("custom", {"messages": messages, "max_tokens": 2})[0] == 200


def test_other_messages_with_the_same_ids_are_recorded() -> None:
    """The template writes no empty message, so both prompts are the same."""
    template = (
        "{% for m in messages %}{% if m.content %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    with gateway_server(renderer=create_renderer(POCKET, "default", chat_template=template)) as served:
        for messages in ([{"role": "system", "content": ""}, ASK], [ASK]):
            assert served.chat("same", {"messages": messages, "max_tokens": 2})[0] == 200
        assert len(served.rows("same")) == 2
