"""Breaks inside of a turn: booleans, merges, JSON, parameters, reasoning, anchors, rewritten calls."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.conversations import assistant, result, user
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

C = Cause
END = {"qwen3": "<|im_end|>", "qwen3.5": "<|im_end|>", "pocket": "<|end|>"}
BYE = user("Bye")


def xml(name: str, body: str) -> str:
    """A call as Qwen3.5 writes it; the prompt has opened the reasoning."""
    return f"I look.\n</think>\n\n<tool_call>\n<function={name}>\n{body}</function>\n</tool_call><|im_end|>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def said(family: str, text: str, content: str) -> Rollout:
    return Rollout(family, f"{text}{END[family]}", (assistant(content), BYE))


def asked(family: str, arguments: str, values: Any) -> Rollout:
    return Rollout(family, weather(arguments, family=family), called("get_weather", values))


PARIS = {"city": "Paris"}
INVALID = called("invalid", {"tool": "Bash", "error": "Model tried to call unavailable tool Bash"})
BASH = "the stream has `Bash`, the next prompt `invalid`"
SPACE = "Only white space differs"
GLM_BASH = (
    "\n<think>I look.</think>\n<tool_call>Bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
    "</tool_call><|observation|>"
)
LONE_TAG = xml("remove", parameter("path", "a.txt") + "<parameter=dry_run></parameter>\n")
FORMATS = {
    "spacing": ('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}),
    "order": ('{"unit": "c", "city": "Paris"}', {"city": "Paris", "unit": "c"}),
    "escapes": ('{"city": "Orl\\u00e9ans"}', {"city": "Orléans"}),
    "numbers": ('{"city": "Paris", "days": 1.0}', {"city": "Paris", "days": 1}),
    "string": (json.dumps('{"city": "Paris"}'), PARIS),
}
TURNS: dict[str, tuple[Rollout, Cause, str]] = {
    "white space after": (said("pocket", "Hello there. \n", "Hello there."), C.WHITESPACE, SPACE),
    "white space inside": (said("pocket", "Hello  there, friend.", "Hello there, friend."), C.WHITESPACE, SPACE),
    "white space before": (said("qwen3", "\n\nHello there.", "Hello there."), C.WHITESPACE, SPACE),
    "white space after reasoning": (
        Rollout("qwen3.5", "Hm.</think>Hello there.<|im_end|>", (assistant("Hello there.", reasoning="Hm."), OK)),
        C.WHITESPACE, SPACE),
    **{f"other words, {family}": (said(family, "The answer is four.", "I refuse to say."), C.UNKNOWN, "shows why")
       for family in HERMES},
    "a word less": (said("pocket", "The answer is four.", "The answer is five."), C.UNKNOWN, "shows why"),
    "a capital letter in prose": (said("pocket", "true stories", "True stories"), C.UNKNOWN, ""),
    **{f"a boolean that became a string, {family}": (
        asked(family, '{"city": "Paris", "now": true}', PARIS | {"now": "True"}), C.BOOLEAN_CASE, "")
       for family in HERMES},
    **{f"JSON: {name}, {family}": (asked(family, *FORMATS[name]), C.JSON_FORMAT, "")
       for name in FORMATS for family in HERMES},
    "a stray closing tag": (
        Rollout("qwen3.5", xml("now", "</parameter>\n"), called("now", {})), C.EMPTY_PARAMETER, "</parameter>"),
    "an empty parameter that vanished": (
        Rollout("qwen3.5", LONE_TAG, called("remove", {"path": "a.txt"})), C.EMPTY_PARAMETER,
        'the stream has `dry_run=""`, the next prompt nothing'),
    "arguments left out": (
        Rollout("pocket", hermes('{"name": "now"}', family="pocket"), called("now", {})), C.EMPTY_PARAMETER, ""),
    "an empty block of reasoning that appeared": (
        Rollout("glm-4.5", f"\n{HELLO}<|user|>", (assistant(HELLO), BYE)), C.STRIPPED_REASONING,
        "the stream has nothing, the next prompt `<think>"),
    "a missing completion": (said("pocket", HELLO, ""), C.ZEROED_ANCHOR, "lost part"),
    "a missing completion with reasoning": (
        said("qwen3.5", f"Hm.\n</think>\n\n{HELLO}", ""), C.ZEROED_ANCHOR, "lost part"),
    "a repaired call of pocket": (
        Rollout("pocket", hermes('{"name": "Bash", "arguments": {"command": "ls"}}', family="pocket"), INVALID),
        C.REWRITTEN_CALL, BASH),
    "a repaired call of qwen3.5": (
        Rollout("qwen3.5", xml("Bash", parameter("command", "ls")), INVALID), C.REWRITTEN_CALL, BASH),
    "a repaired call of glm-4.5": (Rollout("glm-4.5", GLM_BASH, INVALID), C.REWRITTEN_CALL, BASH),
    "a call that was dropped": (
        Rollout("pocket", weather('{"city": "Paris"}', family="pocket"), (assistant("No.", reasoning="I look."), BYE)),
        C.REWRITTEN_CALL, "the stream has `get_weather`, the next prompt nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_the_cause_of_a_turn_that_was_rendered_again(name: str) -> None:
    turn, cause, words = TURNS[name]
    broken = turn.explain()
    assert broken.cause is cause
    assert words in broken.words
    if cause in (Cause.JSON_FORMAT, Cause.REWRITTEN_CALL):
        assert broken.later == ()


@pytest.mark.parametrize(
    ("family", "text"),
    [("gpt-oss", f"<|channel|>final<|message|>{HELLO}<|return|>"), ("qwen3", f"{HELLO}<|endoftext|>")],
)
def test_stop_token(family: str, text: str) -> None:
    turn = Rollout(family, text, (assistant(HELLO), BYE))
    broken = turn.explain()
    assert broken.cause is Cause.STOP_TOKEN
    assert text[text.rindex("<") :] in broken.words
    assert broken.position == len(turn.stream) - 1
    assert broken.prompt_range == (broken.position, broken.position + 1)


def test_boolean_written_by_str() -> None:
    text = xml("remove", parameter("path", "a.txt") + parameter("dry_run", "false"))
    turn = Rollout("qwen3.5", text, called("remove", {"path": "a.txt", "dry_run": False}))
    broken = turn.explain()
    assert broken.cause is Cause.BOOLEAN_CASE
    assert broken.words.endswith("the stream has `false`, the next prompt `False`")
    assert broken.region == "completion 1"
    assert broken.stream_range[1] - broken.position == 1
    assert turn.renderer.tokenizer.decode(turn.stream[slice(*broken.stream_range)]) == "false"
    assert turn.renderer.tokenizer.decode(turn.next_prompt[slice(*broken.prompt_range)]) == "False"
    assert "│⟦false⟧│" in str(broken)
    assert "│⟦False⟧│" in str(broken)
    assert broken.later == ()


@pytest.mark.parametrize("family", ["pocket", "qwen3.5"])
def test_remerge(family: str) -> None:
    renderer = renderer_of(family)
    before = "" if family == "pocket" else "I look.\n</think>\n\n"
    split = np.concatenate([renderer.tokenizer.encode(text) for text in (before + "use arg", "uments here")])
    whole = renderer.tokenizer.encode(before + "use arguments here")
    assert split.tolist() != whole.tolist()
    prompt = renderer.render(GO, add_generation_prompt=True).ids
    stream, after = np.concatenate([prompt, split]), np.concatenate([prompt, whole, whole])
    broken = explain_break(stream, after, renderer, sampled=np.arange(len(stream)) >= len(prompt))
    assert broken is not None
    consistent(broken, stream, after)
    assert broken.cause is Cause.BPE_REMERGE
    assert "Other tokens spell the same text" in broken.words
    decode = renderer.tokenizer.decode
    assert decode(stream[slice(*broken.stream_range)]) == decode(after[slice(*broken.prompt_range)])


def test_json_of_a_tool_result() -> None:
    text = weather('{"city": "Paris"}', family="pocket")
    first = Rollout("pocket", text, called("get_weather", {"city": "Paris"}))
    before = [*first.messages, first.replies[0], result('{"sky": "sunny", "temp": 21}')]
    after = [*first.messages, first.replies[0], result('{"sky":"sunny","temp":21}'), user("And?")]
    stream = first.renderer.render(before, tools=TOOLS, add_generation_prompt=True)
    prompt = first.renderer.render(after, tools=TOOLS, add_generation_prompt=True)
    broken = explain_break(stream.ids, prompt.ids, first.renderer, sampled=stream.mask)
    assert broken is not None
    assert broken.cause is Cause.JSON_FORMAT
    assert broken.region == "context after completion 1"


# -- reasoning


THOUGHT = "They greet me.\n\nI greet them: Hello there, how can I help you today?"


@pytest.mark.parametrize(
    ("family", "text"),
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
def test_stripped_reasoning(family: str, text: str) -> None:
    kept = {} if family == "pocket" else {"reasoning": THOUGHT}
    turn = Rollout(family, text, (assistant(HELLO, **kept), BYE))
    broken = turn.explain()
    assert broken.cause is Cause.STRIPPED_REASONING
    assert THOUGHT[:14] in broken.words
    assert 'past="preserve"' in broken.advice
    # the reasoning drafts the answer word for word: all of it is in the range, and nothing of the answer
    decode = turn.renderer.tokenizer.decode
    assert THOUGHT in decode(turn.stream[broken.position - 4 : broken.stream_range[1]])
    assert decode(turn.stream[broken.stream_range[1] :]).count("Hello") == 1
    assert broken.prompt_range == (broken.position, broken.position)


@pytest.mark.parametrize("tags", REASONING_TAGS, ids=[pair[0].strip() for pair in REASONING_TAGS])
def test_every_known_pair_of_tags(tags: tuple[str, str]) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    stream = tokenizer.encode(f"<|turn|>assistant\n{tags[0]}{THOUGHT}{tags[1]}{HELLO}<|end|>")
    after = tokenizer.encode(f"<|turn|>assistant\n{HELLO}<|end|><|turn|>user\nBye")
    broken = explain_break(stream, after, tokenizer)
    assert broken is not None
    consistent(broken, stream, after)
    assert broken.cause is Cause.STRIPPED_REASONING


def test_two_turns_of_stripped_reasoning_are_both_reported() -> None:
    family = "qwen3.5"
    renderer = renderer_of(family)
    first = [*GO, assistant(HELLO, reasoning=THOUGHT), BYE, assistant("Goodbye then, friend.", reasoning="Yes.")]
    kept = make_renderer(family, preserve_all_thinking=True).render(first, tools=TOOLS)
    after = renderer.render([*first, user("More")], tools=TOOLS, add_generation_prompt=True)
    broken = explain_break(kept.ids, after.ids, renderer, sampled=kept.mask)
    assert broken is not None
    assert broken.cause is Cause.STRIPPED_REASONING
    assert broken.later == (Cause.STRIPPED_REASONING,)
    assert "further on: stripped reasoning" in str(broken)


# -- anchors


def test_anchor() -> None:
    text = weather('{"city":"Paris"}', family="pocket")
    turn = Rollout("pocket", text, called("get_weather", {"city": "Paris"}))
    for lost in ([], turn.prompt, np.where(turn.sampled, 0, turn.stream)):
        broken = turn.explain(anchor=lost)
        assert broken.cause is Cause.ZEROED_ANCHOR
        assert "JSON spacing" in broken.words
    assert turn.explain(anchor=turn.stream).cause is Cause.JSON_FORMAT


def test_empty_stream() -> None:
    renderer = renderer_of("pocket")
    prompt = renderer.render(GO, add_generation_prompt=True).ids
    assert explain_break([], prompt, renderer) is None
    broken = explain_break([], prompt, renderer, sampled=[])
    assert broken is not None
    assert (broken.cause, broken.position) == (Cause.ZEROED_ANCHOR, 0)
    assert explain_break([], [], renderer, sampled=[]) is None


def test_zeros_in_the_prompt() -> None:
    turn = Rollout("pocket", f"{HELLO}<|end|>", ())
    zeros = np.concatenate([np.where(turn.sampled, 0, turn.stream), turn.stream[:8]])
    broken = explain_break(turn.stream, zeros, turn.renderer, sampled=turn.sampled)
    assert broken is not None
    assert broken.cause is Cause.ZEROED_ANCHOR
