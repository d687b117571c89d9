"""Calls with broken arguments over HTTP: the agent is told them, repeats them, and its tokens go on in one row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.gateway.echoes import TOOLS as WEATHER
from tests.gateway.echoes import Bench
from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy
from tests.parsing.forms import ids_of
from tokentrace import create_renderer
from tokentrace.engines.protocol import Completion, FinishReason
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.errors import InputError
from tokentrace.gateway.adapting import render_readably
from tokentrace.gateway.answering import finish_reply, item_stream
from tokentrace.gateway.dialect import call_ids_of
from tokentrace.gateway.items import openai_message
from tokentrace.gateway.requests import AnswerOptions
from tokentrace.gateway.turns import TurnDetails
from tokentrace.pocket import POCKET

anthropic = lazy("anthropic")
openai = lazy("openai")

ASK: Any = {"role": "user", "content": "What is 17 * 23?"}
QUOTED = '<tool_call>\n{"name": "compute", "arguments": {"n": 1, "formula": "say "17"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "compute", "arguments": {"n": 1, "formula": "17 * '
RENDERER = create_renderer(POCKET)
STOP = RENDERER.get_stop_token_ids()[0]


def engine() -> ScriptedEngine:
    """A broken call first, and words once anybody complained."""
    broken, cut, done = (ids_of(RENDERER, (text,)) for text in (QUOTED, CUT, "Well."))

    def script(prompt: Sequence[int], sampling: Any) -> list[int]:
        text = bytes_of(prompt)
        if b"not JSON" in text:
            return [*done, STOP]
        return cut[: sampling.max_tokens] if b"cut off" in text else [*broken, STOP]

    return ScriptedEngine(script, piece=3)


def bytes_of(ids: Sequence[int]) -> bytes:
    return b"".join(RENDERER.tokenizer.vocabulary.token_bytes(int(one)) for one in ids)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server(engine) as server:
        yield server


def check(served: Served, session: str) -> None:
    state = served.state(session)
    assert [turn["cause"] for turn in state["tree"]] == [None, None]
    assert state["tree"][1]["reused"] == state["tree"][0]["stop"]
    assert state["rows"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_chat(served: Served, stream: bool) -> None:
    session = f"chat-{stream}"
    given: Any = {"model": "pocket", "tools": TOOLS}
    with openai.OpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="none", max_retries=0) as client:
        if stream:
            with client.chat.completions.stream(**given, messages=[ASK]) as frames:
                first = frames.get_final_completion().choices[0]
        else:
            first = client.chat.completions.create(**given, messages=[ASK]).choices[0]
        assert first.finish_reason == "tool_calls"
        [call] = first.message.tool_calls or []
        assert call.function.arguments.startswith('{"n": 1, "formula": "say "')
        with pytest.raises(ValueError, match="delimiter"):
            json.loads(call.function.arguments)
        echo = first.message.to_dict()
        for made in echo.get("tool_calls", []):  # what OpenAI's client adds for itself
            made.pop("index", None)
            made["function"].pop("parsed_arguments", None)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Error: not JSON"}
        second = client.chat.completions.create(**given, messages=[ASK, echo, result])
        assert second.choices[0].message.content == "Well."
        check(served, session)
        if not stream:  # a conversation that branches has to be rendered, the call too
            edited = [{"role": "user", "content": "Another question"}, echo, result]
            assert client.chat.completions.create(**given, messages=edited).choices[0].message.content == "Well."
            assert len(served.state(session)["tree"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_messages(served: Served, stream: bool) -> None:
    session = f"messages-{stream}"
    tools = [{"name": "compute", "input_schema": TOOLS[0]["function"]["parameters"]}]
    given: Any = {"model": "pocket", "tools": tools, "max_tokens": 200}
    with anthropic.Anthropic(base_url=f"{served.url}/sessions/{session}", api_key="none", max_retries=0) as client:
        if stream:
            with client.messages.stream(**given, messages=[ASK]) as frames:
                first = frames.get_final_message()
        else:
            first = client.messages.create(**given, messages=[ASK])
        assert first.stop_reason == "end_turn"
        assert [block.to_dict() for block in first.content] == [{"type": "text", "text": QUOTED}]
        echo: Any = [each.to_dict() for each in first.content]
        messages: Any = [ASK, {"role": "assistant", "content": echo}, {"role": "user", "content": "That is not JSON."}]
        second = client.messages.create(**given, messages=messages)
        assert second.content[0].to_dict()["text"] == "Well."
    check(served, session)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off(served: Served, stream: bool) -> None:
    ask: Any = {"role": "user", "content": "This will be cut off."}
    tools: Any = [{"name": "compute", "input_schema": TOOLS[0]["function"]["parameters"]}]
    given: Any = {"model": "pocket", "tools": tools, "max_tokens": len(ids_of(RENDERER, (CUT,))), "messages": [ask]}
    with anthropic.Anthropic(base_url=f"{served.url}/sessions/cut-{stream}", api_key="none") as client:
        if stream:
            with client.messages.stream(**given) as frames:
                first = frames.get_final_message()
        else:
            first = client.messages.create(**given)
    assert (first.stop_reason, first.content[0].to_dict()) == ("max_tokens", {"type": "text", "text": CUT})


def test_results_name_the_call_as_the_model_did() -> None:
    """Mistral's models write the id of a call after its arguments, when a stream has told another one."""
    bench = Bench("mistral-nemo")
    ask: list[Any] = [{"role": "user", "content": "Weather?"}]
    placed = bench.session.place(bench.asked(ask))
    call = '[TOOL_CALLS][{"name": "read_file", "arguments": {"path": "a"}, "id": "Qwertyui9"}]'
    ids = [*ids_of(bench.renderer, (call,)), bench.renderer.get_stop_token_ids()[0]]
    parser, call_id = bench.renderer.streaming_parser(tools=WEATHER, prompt_ids=placed.ids), call_ids_of("a", 0)
    stream = item_stream("a", 0, AnswerOptions(), ())
    stream.feed(parser.feed(ids))
    completion = Completion(np.array(ids, np.int32), np.full(len(ids), -1, np.float32), FinishReason.STOP)
    late_ids = dict(finish_reply(parser, stream, completion)[0].late_ids)
    reply = openai_message(stream.items)
    assert reply["tool_calls"][0]["id"] == call_id(0) != "Qwertyui9"
    bench.session.commit(placed, completion, reply, TurnDetails(late_ids=late_ids), {})
    result = {"role": "tool", "tool_call_id": call_id(0), "name": "read_file", "content": "x"}
    after = bench.session.place(bench.asked([*ask, reply, result]))
    assert after.reused == len(placed.ids) + len(ids)
    told = bench.renderer.tokenizer.decode(after.ids[after.reused :].tolist())
    assert "Qwertyui9" in told
    assert call_id(0) not in told


def test_a_template_that_reads_mappings_is_shown_what_can_be_read() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "here", "x": oh'}}
    messages: list[Any] = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    renderer = Bench("qwen3-coder").renderer
    with pytest.raises(InputError, match="not valid JSON"):
        renderer.render(messages, tools=WEATHER)
    _, notes = render_readably(renderer, messages, tools=WEATHER)
    assert [note.partition(":")[0] for note in notes] == ["message 1"]
    with pytest.raises(InputError):
        render_readably(renderer, [{"role": "user", "content": 7}])
