"""Breaks inside of a turn: booleans, merges, JSON, parameters, reasoning, anchors, rewritten calls."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.conversations import assistant, call, result, user
from tests.diagnose.two_requests import (
    GO,
    HELLO,
    HERMES,
    OK,
    TOOLS,
    Rollout,
    called,
    consistent,
    hermes,
    renderer_of,
    weather,
)
from tests.support import make_renderer
from tokentrace.diagnose.break_checks import REASONING_TAGS
from tokentrace.diagnose.breaks import explain_break
from tokentrace.diagnose.finding import Cause


def xml(name: str, body: str) -> str:
    """A call as Qwen3.5 writes it; the prompt has opened the reasoning."""
    return f"I look.\n</think>\n\n<tool_call>\n<function={name}>\n{body}</function>\n</tool_call><|im_end|>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def glm(body: str) -> str:
    return f"\n<think>I look.</think>\n<tool_call>{body}</tool_call><|observation|>"


def arg(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


# -- a. booleans and None


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_boolean_written_by_str(family: str) -> None:
    told = xml("remove", parameter("path", "a.txt") + parameter("dry_run", "false"))
    made = Rollout(family, told, called("remove", {"path": "a.txt", "dry_run": False}))
    found = made.explain()
    assert found.cause is Cause.BOOLEAN_CASE
    assert found.words == "the stream has `false`, the next prompt `False`: the value went through Python's str()"
    assert found.region == "completion 1"
    assert found.stream_range[1] - found.position == 1
    assert made.renderer.tokenizer.decode(made.stream[slice(*found.stream_range)]) == "false"
    assert made.renderer.tokenizer.decode(made.next_prompt[slice(*found.prompt_range)]) == "False"
    report = str(found)
    ours, theirs = int(made.stream[found.position]), int(made.next_prompt[found.position])
    assert f"{ours} (false) -> {theirs} (False)" in report
    assert "=dry_run>⏎[false]⏎</parameter>" in report
    assert "=dry_run>⏎[False]⏎</parameter>" in report
    assert found.later == ()


@pytest.mark.parametrize("family", HERMES)
def test_boolean_that_became_a_string(family: str) -> None:
    told = weather('{"city": "Paris", "now": true}', family=family)
    found = Rollout(family, told, called("get_weather", {"city": "Paris", "now": "True"})).explain()
    assert found.cause is Cause.BOOLEAN_CASE


def test_a_capital_letter_in_prose_is_no_boolean() -> None:
    found = Rollout("pocket", "true stories<|end|>", (assistant("True stories"), user("And?"))).explain()
    assert found.cause is Cause.UNKNOWN


# -- b. merges


@pytest.mark.parametrize("family", ["pocket", "qwen3.5"])
def test_remerge(family: str) -> None:
    renderer = renderer_of(family)
    before = "" if family == "pocket" else "I look.\n</think>\n\n"
    split = np.concatenate([renderer.tokenizer.encode(text) for text in (before + "use arg", "uments here")])
    whole = renderer.tokenizer.encode(before + "use arguments here")
    assert split.tolist() != whole.tolist()
    prompt = renderer.render(GO, add_generation_prompt=True).ids
    stream, after = np.concatenate([prompt, split]), np.concatenate([prompt, whole, whole])
    found = explain_break(stream, after, renderer, sampled=np.arange(len(stream)) >= len(prompt))
    assert found is not None
    consistent(found, stream, after)
    assert found.cause is Cause.BPE_REMERGE
    assert "decoded and encoded again" in found.words
    decode = renderer.tokenizer.decode
    assert decode(stream[slice(*found.stream_range)]) == decode(after[slice(*found.prompt_range)])


def test_control_token_that_became_text() -> None:
    tokenizer = renderer_of("pocket").tokenizer
    stream = tokenizer.encode("Say <tool_call> aloud")
    plain = tokenizer.encode_plain("Say <tool_call> aloud")
    found = explain_break(stream, plain, tokenizer)
    assert found is not None
    assert found.cause is Cause.BPE_REMERGE
    assert "<tool_call> is a control token in the stream" in found.words


# -- JSON


FORMATS = {
    "spacing": ('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}),
    "order": ('{"unit": "c", "city": "Paris"}', {"city": "Paris", "unit": "c"}),
    "escapes": ('{"city": "Orl\\u00e9ans"}', {"city": "Orléans"}),
    "numbers": ('{"city": "Paris", "days": 1.0}', {"city": "Paris", "days": 1}),
    "string": (json.dumps('{"city": "Paris"}'), {"city": "Paris"}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", HERMES)
def test_json_format(family: str, name: str) -> None:
    told, arguments = FORMATS[name]
    found = Rollout(family, weather(told, family=family), called("get_weather", arguments)).explain()
    assert found.cause is Cause.JSON_FORMAT
    assert found.later == ()


def test_json_of_a_tool_result() -> None:
    told = weather('{"city": "Paris"}', family="pocket")
    first = Rollout("pocket", told, called("get_weather", {"city": "Paris"}))
    before = [*first.messages, first.replies[0], result('{"sky": "sunny", "temp": 21}')]
    after = [*first.messages, first.replies[0], result('{"sky":"sunny","temp":21}'), user("And?")]
    stream = first.renderer.render(before, tools=TOOLS, add_generation_prompt=True)
    prompt = first.renderer.render(after, tools=TOOLS, add_generation_prompt=True)
    found = explain_break(stream.ids, prompt.ids, first.renderer, sampled=stream.mask)
    assert found is not None
    assert found.cause is Cause.JSON_FORMAT
    assert found.region == "context after completion 1"


# -- c. parameters


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_stray_closing_tag(family: str) -> None:
    found = Rollout(family, xml("now", "</parameter>\n"), called("now", {})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert "other markup" in found.words
    assert "parameter" in str(found)


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_empty_parameter_that_vanished(family: str) -> None:
    told = xml("remove", parameter("path", "a.txt") + "<parameter=dry_run></parameter>\n")
    found = Rollout(family, told, called("remove", {"path": "a.txt"})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert found.words == "the stream gives `remove` the empty argument `dry_run`, the next prompt does not"


def test_arguments_left_out() -> None:
    told = hermes('{"name": "now"}', family="pocket")
    found = Rollout("pocket", told, called("now", {})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER


# -- d. reasoning


THOUGHT = "They greet me.\n\nI greet them: Hello there, how can I help you today?"


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("pocket", f"<think>\n{THOUGHT}\n</think>\n\n{HELLO}<|end|>"),
        ("qwen3", f"<think>\n{THOUGHT}\n</think>\n\n{HELLO}<|im_end|>"),
        ("qwen3.5", f"{THOUGHT}\n</think>\n\n{HELLO}<|im_end|>"),
        ("glm-4.5", f"\n<think>{THOUGHT}</think>\n{HELLO}<|user|>"),
        (
            "gpt-oss",
            f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{HELLO}<|return|>",
        ),
    ],
)
def test_stripped_reasoning(family: str, told: str) -> None:
    kept = {} if family == "pocket" else {"reasoning": THOUGHT}
    made = Rollout(family, told, (assistant(HELLO, **kept), user("Bye")))
    found = made.explain()
    assert found.cause is Cause.STRIPPED_REASONING
    assert f"reasoning of {len(THOUGHT)} characters" in found.words
    assert "preserve_all_thinking" in found.advice
    # the reasoning drafts the answer word for word: all of it is in the range, and nothing of the answer
    decode = made.renderer.tokenizer.decode
    assert THOUGHT in decode(made.stream[found.position - 4 : found.stream_range[1]])
    assert decode(made.stream[found.stream_range[1] :]).count("Hello") == 1
    assert found.prompt_range == (found.position, found.position)
    assert "nothing" in str(found)


@pytest.mark.parametrize("family", ["glm-4.5"])
def test_empty_block_that_appeared(family: str) -> None:
    found = Rollout(family, f"\n{HELLO}<|user|>", (assistant(HELLO), user("Bye"))).explain()
    assert found.cause is Cause.STRIPPED_REASONING
    assert "in the next prompt only" in found.words


@pytest.mark.parametrize("tags", REASONING_TAGS, ids=[pair[0].strip() for pair in REASONING_TAGS])
def test_every_known_pair_of_tags(tags: tuple[str, str]) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    stream = tokenizer.encode(f"<|turn|>assistant\n{tags[0]}{THOUGHT}{tags[1]}{HELLO}<|end|>")
    after = tokenizer.encode(f"<|turn|>assistant\n{HELLO}<|end|><|turn|>user\nBye")
    found = explain_break(stream, after, tokenizer)
    assert found is not None
    consistent(found, stream, after)
    assert found.cause is Cause.STRIPPED_REASONING


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_two_turns_of_stripped_reasoning_are_both_reported(family: str) -> None:
    renderer = renderer_of(family)
    first = [
        *GO,
        assistant(HELLO, reasoning=THOUGHT),
        user("Bye"),
        assistant("Goodbye then, friend.", reasoning="Yes."),
    ]
    kept = make_renderer(family, preserve_all_thinking=True).render(first, tools=TOOLS)
    after = renderer.render([*first, user("More")], tools=TOOLS, add_generation_prompt=True)
    found = explain_break(kept.ids, after.ids, renderer, sampled=kept.mask)
    assert found is not None
    assert found.cause is Cause.STRIPPED_REASONING
    assert found.later == (Cause.STRIPPED_REASONING,)
    assert "further on: stripped reasoning" in str(found)


# -- e. anchors


@pytest.mark.parametrize("family", ["pocket", "qwen3.5"])
def test_missing_completion(family: str) -> None:
    end = "<|end|>" if family == "pocket" else "<|im_end|>"
    thought = "" if family == "pocket" else "Hm.\n</think>\n\n"
    made = Rollout(family, f"{thought}{HELLO}{end}", (assistant(""), user("Bye")))
    found = made.explain()
    assert found.cause is Cause.ZEROED_ANCHOR
    assert "is missing whole" in found.words


def test_anchor() -> None:
    told = weather('{"city":"Paris"}', family="pocket")
    made = Rollout("pocket", told, called("get_weather", {"city": "Paris"}))
    for lost in ([], made.prompt, np.where(made.sampled, 0, made.stream)):
        found = made.explain(anchor=lost)
        assert found.cause is Cause.ZEROED_ANCHOR
        assert "JSON spacing" in found.words
    assert made.explain(anchor=made.stream).cause is Cause.JSON_FORMAT


def test_empty_stream() -> None:
    renderer = renderer_of("pocket")
    prompt = renderer.render(GO, add_generation_prompt=True).ids
    assert explain_break([], prompt, renderer) is None
    found = explain_break([], prompt, renderer, sampled=[])
    assert found is not None
    assert (found.cause, found.position) == (Cause.ZEROED_ANCHOR, 0)
    assert str(found).startswith("break at token 0 of 0")
    assert explain_break([], [], renderer, sampled=[]) is None


def test_zeros_in_the_prompt() -> None:
    made = Rollout("pocket", f"{HELLO}<|end|>", ())
    zeros = np.concatenate([np.where(made.sampled, 0, made.stream), made.stream[:8]])
    found = explain_break(made.stream, zeros, made.renderer, sampled=made.sampled)
    assert found is not None
    assert found.cause is Cause.ZEROED_ANCHOR


# -- f. calls that were rewritten


INVALID = {"tool": "Bash", "error": "Model tried to call unavailable tool Bash"}


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("pocket", hermes('{"name": "Bash", "arguments": {"command": "ls"}}', family="pocket")),
        ("qwen3.5", xml("Bash", parameter("command", "ls"))),
        ("glm-4.5", glm("Bash\n" + arg("command", "ls"))),
    ],
)
def test_repaired_call(family: str, told: str) -> None:
    made = Rollout(family, told, called("invalid", INVALID))
    found = made.explain()
    assert found.cause is Cause.REWRITTEN_CALL
    assert found.words == "the model called `Bash`, the next prompt has a call of `invalid`"
    assert found.later == ()
    assert "[Bash]" in str(found) or "[B][ash]" in str(found)


def test_call_that_was_dropped() -> None:
    told = weather('{"city": "Paris"}', family="pocket")
    found = Rollout("pocket", told, (assistant("I cannot.", reasoning="I look."), user("Why?"))).explain()
    assert found.cause is Cause.REWRITTEN_CALL
    assert "has no such call" in found.words


def test_call_rewritten_in_the_messages() -> None:
    renderer = renderer_of("pocket")
    rows = [*GO, assistant("", call("Bash", {"command": "ls"})), OK]
    changed = [*GO, assistant("", call("invalid", '{"tool": "Bash"}')), OK, user("And?")]
    stream = renderer.render(rows, tools=TOOLS, add_generation_prompt=True).ids
    after = renderer.render(changed, tools=TOOLS, add_generation_prompt=True).ids
    pair: dict[str, Any] = {"before": {"messages": rows}, "after": {"messages": changed}}
    found = explain_break(stream, after, renderer, **pair)
    assert found is not None
    assert found.cause is Cause.REWRITTEN_CALL
    assert "the model called Bash" in found.words
