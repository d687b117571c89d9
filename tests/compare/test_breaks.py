"""Every cause is found on real renders, shown with its tokens, and never claimed without evidence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import ADD, GET_WEATHER, NOW, SYS, assistant, call, result, system, tool, user
from tests.support import make_renderer, per_vocabulary
from tokentrace import Renderer, create_renderer
from tokentrace.compare.breaks import ADVICE, REASONING_TAGS, Break, Cause, explain_break
from tokentrace.compare.texts import DiffOp
from tokentrace.errors import TrajectoryError
from tokentrace.pocket import POCKET
from tokentrace.tokens.alignment import next_hunk
from tokentrace.tokens.kinds import Kind

REMOVE = tool("remove", "Remove a file.", {"path": {"type": "string"}, "dry_run": {"type": "boolean"}}, ["path"])
TOOLS = [REMOVE, GET_WEATHER, NOW]
GO = [SYS, user("Go.")]
OK = result("ok")

Ids = npt.NDArray[np.int32]


@per_vocabulary
def renderer_of(family: str) -> Renderer:
    return create_renderer(POCKET) if family == "pocket" else make_renderer(family)


@dataclass(frozen=True)
class Rollout:
    """A prompt that was rendered, a completion that was sampled, and what a client made of them."""

    family: str
    completion: str
    replies: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...] = tuple(GO)

    @property
    def renderer(self) -> Renderer:
        return renderer_of(self.family)

    @property
    def prompt(self) -> Ids:
        return self.renderer.render(list(self.messages), tools=TOOLS, add_generation_prompt=True).ids

    @property
    def stream(self) -> Ids:
        return np.concatenate([self.prompt, self.renderer.tokenizer.encode(self.completion)])

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        return np.arange(len(self.stream)) >= len(self.prompt)

    @property
    def next_prompt(self) -> Ids:
        messages = [*self.messages, *self.replies]
        return self.renderer.render(messages, tools=TOOLS, add_generation_prompt=True).ids

    def explain(self, **more: Any) -> Break:
        found = explain_break(self.stream, self.next_prompt, self.renderer, sampled=self.sampled, **more)
        assert found is not None
        consistent(found, self.stream, self.next_prompt)
        blind = explain_break(self.stream, self.next_prompt, self.renderer.tokenizer)
        assert blind is not None
        consistent(blind, self.stream, self.next_prompt)
        return found


def consistent(found: Break, stream: Any, prompt: Any) -> None:
    """What holds of every break, whatever its cause."""
    ours, theirs = np.asarray(stream, np.int64), np.asarray(prompt, np.int64)
    at = found.position
    assert np.array_equal(ours[:at], theirs[:at])
    if min(len(ours), len(theirs)) > at:
        assert ours[at] != theirs[at]
    assert found.stream_range[0] == found.prompt_range[0] == at
    a, b = found.stream_range[1], found.prompt_range[1]
    assert at <= a <= len(ours)
    assert at <= b <= len(theirs)
    assert a > at or b > at
    assert a == len(ours) or (b < len(theirs) and ours[a] == theirs[b])
    for row in found.tokens:
        assert len(row.ids) == len(row.texts) == (0 if row.op is DiffOp.SKIPPED else row.count)
        if row.op in (DiffOp.EQUAL, DiffOp.REMOVED):
            assert ours[row.start : row.start + row.count].tolist() == list(row.ids)
        if row.op is DiffOp.ADDED:
            assert theirs[row.start : row.start + row.count].tolist() == list(row.ids)
    report = str(found)
    assert report.startswith(f"break at token {at:,} of {len(ours):,}")
    assert found.cause in report.splitlines()[0]
    assert "\x1b" not in report
    assert found.advice == ADVICE[found.cause]


def hermes(body: str, *, family: str) -> str:
    end = {"qwen3": "<|im_end|>", "pocket": "<|end|>"}[family]
    return f"<think>\nI look.\n</think>\n\n<tool_call>\n{body}\n</tool_call>{end}"


def weather(arguments: str, *, family: str) -> str:
    return hermes(f'{{"name": "get_weather", "arguments": {arguments}}}', family=family)


def xml(name: str, body: str) -> str:
    """A call as Qwen3.5 writes it; the prompt has opened the reasoning."""
    return f"I look.\n</think>\n\n<tool_call>\n<function={name}>\n{body}</function>\n</tool_call><|im_end|>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def glm(body: str) -> str:
    return f"\n<think>I look.</think>\n<tool_call>{body}</tool_call><|observation|>"


def arg(name: str, value: str) -> str:
    return f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"


def called(name: str, arguments: Any) -> tuple[dict[str, Any], ...]:
    return assistant("", call(name, arguments), reasoning="I look."), OK


HERMES = ["pocket", "qwen3"]


# -- a. booleans and None


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_boolean_written_by_str(family: str) -> None:
    told = xml("remove", parameter("path", "a.txt") + parameter("dry_run", "false"))
    made = Rollout(family, told, called("remove", {"path": "a.txt", "dry_run": False}))
    found = made.explain()
    assert found.cause is Cause.BOOLEAN_CASE
    assert found.detail == "the stream has `false`, the next prompt `False`: the value went through Python's str()"
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


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_null_written_by_str_and_further_booleans(family: str) -> None:
    told = xml("remove", parameter("path", "null") + "".join(parameter(f"flag_{n}", "true") for n in range(3)))
    flags = {f"flag_{n}": True for n in range(3)}
    found = Rollout(family, told, called("remove", {"path": None, **flags})).explain()
    assert found.cause is Cause.BOOLEAN_CASE
    assert "`null`" in found.detail
    assert "`None`" in found.detail
    assert "true][" not in str(found)


@pytest.mark.parametrize("family", ["glm-4.5"])
def test_boolean_written_by_json(family: str) -> None:
    told = glm("remove\n" + arg("path", "x") + arg("dry_run", "False"))
    found = Rollout(family, told, called("remove", {"path": "x", "dry_run": False})).explain()
    assert found.cause is Cause.BOOLEAN_CASE
    assert "through JSON" in found.detail


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
    assert "decoded and encoded again" in found.detail
    decode = renderer.tokenizer.decode
    assert decode(stream[slice(*found.stream_range)]) == decode(after[slice(*found.prompt_range)])


def test_remerge_of_one_word_into_bytes() -> None:
    renderer = renderer_of("pocket")
    vocabulary = renderer.tokenizer.vocabulary
    whole = renderer.tokenizer.encode("Give the arguments please, and thank you.")
    place = next(n for n, index in enumerate(whole.tolist()) if len(vocabulary.token_bytes(index)) > 6)
    letters = [int(renderer.tokenizer.encode(chr(byte))[0]) for byte in vocabulary.token_bytes(int(whole[place]))]
    stream = np.asarray([*whole[:place], *letters, *whole[place + 1 :]], np.int32)
    found = explain_break(stream, whole, renderer)
    assert found is not None
    consistent(found, stream, whole)
    assert found.cause is Cause.BPE_REMERGE
    assert found.position == place
    assert found.stream_range == (place, place + len(letters))
    assert found.prompt_range == (place, place + 1)
    assert f"{len(letters)} tokens in the stream and one token in the next prompt" in found.detail


def test_control_token_that_became_text() -> None:
    tokenizer = renderer_of("pocket").tokenizer
    stream = tokenizer.encode("Say <tool_call> aloud")
    plain = np.concatenate(tokenizer.encode_plain(["Say <tool_call> aloud"]))
    found = explain_break(stream, plain, tokenizer)
    assert found is not None
    assert found.cause is Cause.BPE_REMERGE
    assert "<tool_call> is a control token in the stream" in found.detail


# -- JSON


FORMATS = {
    "spacing": ('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}, "with other spacing"),
    "newlines": ('{\n  "city": "Paris"\n}', {"city": "Paris"}, "with other spacing"),
    "order": ('{"unit": "c", "city": "Paris"}', {"city": "Paris", "unit": "c"}, "keys in another order"),
    "escapes": ('{"city": "Orl\\u00e9ans"}', {"city": "Orléans"}, "with other escapes"),
    "numbers": ('{"city": "Paris", "days": 1.0}', {"city": "Paris", "days": 1}, "spelled another way"),
    "exponent": ('{"city": "Paris", "days": 1e3}', {"city": "Paris", "days": 1000.0}, "spelled another way"),
    "string": (json.dumps('{"city": "Paris"}'), {"city": "Paris"}, "inside a string"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", HERMES)
def test_json_format(family: str, name: str) -> None:
    told, arguments, said = FORMATS[name]
    found = Rollout(family, weather(told, family=family), called("get_weather", arguments)).explain()
    assert found.cause is Cause.JSON_FORMAT
    assert said in found.detail
    assert found.later == ()


def test_json_that_python_wrote() -> None:
    told = weather('{"city": "Paris", "days": [1, true]}', family="pocket")
    found = Rollout("pocket", told, called("get_weather", "{'city': 'Paris', 'days': [1, True]}")).explain()
    assert found.cause is Cause.JSON_FORMAT


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_parameter_that_python_wrote(family: str) -> None:
    told = xml("remove", parameter("path", '{"name": "a.txt"}'))
    found = Rollout(family, told, called("remove", {"path": "{'name': 'a.txt'}"})).explain()
    assert found.cause is Cause.JSON_FORMAT
    assert "as Python writes it" in found.detail


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_order_of_parameters(family: str) -> None:
    told = xml("remove", parameter("path", "a.txt") + parameter("dry_run", "no"))
    found = Rollout(family, told, called("remove", {"dry_run": "no", "path": "a.txt"})).explain()
    assert found.cause is Cause.JSON_FORMAT
    assert "another order" in found.detail
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
    assert "closes no parameter" in found.detail
    assert "parameter" in str(found)


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_empty_parameter_that_vanished(family: str) -> None:
    told = xml("remove", parameter("path", "a.txt") + "<parameter=dry_run></parameter>\n")
    found = Rollout(family, told, called("remove", {"path": "a.txt"})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert found.detail == "the stream gives `remove` the empty argument `dry_run`, the next prompt does not"


@pytest.mark.parametrize("family", HERMES)
def test_null_argument_that_vanished_or_appeared(family: str) -> None:
    told = weather('{"city": "Paris", "unit": null}', family=family)
    found = Rollout(family, told, called("get_weather", {"city": "Paris"})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert "empty argument `unit`" in found.detail
    told = weather('{"city": "Paris"}', family=family)
    found = Rollout(family, told, called("get_weather", {"city": "Paris", "unit": ""})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert found.detail.startswith("the next prompt gives")


@pytest.mark.parametrize("family", ["glm-4.5"])
def test_default_that_a_client_filled_in(family: str) -> None:
    told = glm("remove\n" + arg("path", "x"))
    found = Rollout(family, told, called("remove", {"path": "x", "dry_run": True})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER
    assert "`dry_run`" in found.detail


def test_arguments_left_out() -> None:
    told = hermes('{"name": "now"}', family="pocket")
    found = Rollout("pocket", told, called("now", {})).explain()
    assert found.cause is Cause.EMPTY_PARAMETER


# -- d. reasoning


THOUGHT = "They greet me.\n\nI greet them: Hello there, how can I help you today?"
HELLO = "Hello there, how can I help you today?"


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
    assert f"reasoning of {len(THOUGHT)} characters" in found.detail
    assert "preserve_all_thinking" in found.advice
    # the reasoning drafts the answer word for word: all of it is in the range, and nothing of the answer
    decode = made.renderer.tokenizer.decode
    assert THOUGHT in decode(made.stream[found.position - 4 : found.stream_range[1]])
    assert decode(made.stream[found.stream_range[1] :]).count("Hello") == 1
    assert found.prompt_range == (found.position, found.position)
    assert "nothing" in str(found)


@pytest.mark.parametrize("family", ["qwen3"])
def test_empty_block_that_vanished(family: str) -> None:
    told = f"<think>\n\n</think>\n\n{HELLO}<|im_end|>"
    found = Rollout(family, told, (assistant(HELLO), user("Bye"))).explain()
    assert found.cause is Cause.STRIPPED_REASONING
    assert "an empty block of reasoning" in found.detail


@pytest.mark.parametrize("family", ["glm-4.5"])
def test_empty_block_that_appeared(family: str) -> None:
    found = Rollout(family, f"\n{HELLO}<|user|>", (assistant(HELLO), user("Bye"))).explain()
    assert found.cause is Cause.STRIPPED_REASONING
    assert "in the next prompt only" in found.detail


def test_reasoning_with_tags_of_ones_own() -> None:
    told = f"((ponder)) {THOUGHT} ((/ponder)) {HELLO}<|end|>"
    made = Rollout("pocket", told, (assistant(HELLO), user("Bye")))
    assert made.explain().cause is Cause.UNKNOWN
    found = made.explain(reasoning=("((ponder))", "((/ponder))"))
    assert found.cause is Cause.STRIPPED_REASONING


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


def test_empty_anchor() -> None:
    told = weather('{"city":"Paris"}', family="pocket")
    made = Rollout("pocket", told, called("get_weather", {"city": "Paris"}))
    found = made.explain(anchor=[])
    assert found.cause is Cause.ZEROED_ANCHOR
    assert "anchor is empty" in found.detail
    assert "JSON spacing" in found.detail
    assert made.explain(anchor=made.stream).cause is Cause.JSON_FORMAT


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_anchor_without_the_completion(family: str) -> None:
    told = xml("remove", parameter("dry_run", "false"))
    made = Rollout(family, told, called("remove", {"dry_run": False}))
    found = made.explain(anchor=made.prompt)
    assert found.cause is Cause.ZEROED_ANCHOR
    assert f"ends {len(made.stream) - len(made.prompt):,} ids before the stream does" in found.detail
    zeros = np.where(made.sampled, 0, made.stream)
    assert "has zeros for" in made.explain(anchor=zeros).detail
    other = made.stream.copy()
    other[3] += 1
    assert made.explain(anchor=other).cause is Cause.BOOLEAN_CASE


def test_anchor_that_does_not_reach_the_break_explains_nothing() -> None:
    made = Rollout("pocket", f"{HELLO} <|end|>", (assistant(HELLO), user("Bye")))
    position = made.explain().position
    assert made.explain(anchor=made.stream[: position + 1]).cause is Cause.WHITESPACE
    assert made.explain(anchor=made.stream[:position]).cause is Cause.ZEROED_ANCHOR


@pytest.mark.parametrize("family", ["pocket", "qwen3.5"])
def test_missing_completion(family: str) -> None:
    end = "<|end|>" if family == "pocket" else "<|im_end|>"
    thought = "" if family == "pocket" else "Hm.\n</think>\n\n"
    made = Rollout(family, f"{thought}{HELLO}{end}", (assistant(""), user("Bye")))
    found = made.explain()
    assert found.cause is Cause.ZEROED_ANCHOR
    assert "is missing whole" in found.detail


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
    assert found.detail == "the model called `Bash`, the next prompt has a call of `invalid`"
    assert found.later == ()
    assert "[Bash]" in str(found) or "[B][ash]" in str(found)


@pytest.mark.parametrize("family", ["qwen3.5"])
def test_other_value(family: str) -> None:
    told = xml("remove", parameter("path", "/tmp/a.txt"))
    found = Rollout(family, told, called("remove", {"path": "/tmp/b.txt"})).explain()
    assert found.cause is Cause.REWRITTEN_CALL
    assert "`/tmp/a.txt`" in found.detail
    assert "`/tmp/b.txt`" in found.detail


def test_call_that_was_dropped() -> None:
    told = weather('{"city": "Paris"}', family="pocket")
    found = Rollout("pocket", told, (assistant("I cannot.", reasoning="I look."), user("Why?"))).explain()
    assert found.cause is Cause.REWRITTEN_CALL
    assert "has no such call" in found.detail


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
    assert found.detail.startswith("message 2 has other tool calls")


# -- the context


def report(city: int) -> str:
    """A long tool result that is like no other."""
    return "\n".join(f"{hour} o'clock in city {city}: {city * 7 + hour * 13} degrees" for hour in range(24))


def history(*more: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [*GO]
    for n in range(4):
        rows += [assistant("", call("get_weather", {"city": f"City {n}"})), result(report(n))]
    return [*rows, *more]


@dataclass(frozen=True)
class Requests:
    """Two requests as conversations. The first one, with the answer that was sampled for it, is the stream."""

    family: str
    before: dict[str, Any]
    after: dict[str, Any]

    def explain(self, *, proof: bool = False, mask: bool = True) -> Break:
        renderer = renderer_of(self.family)
        first = renderer.render([*self.before["messages"], ANSWER], tools=self.before.get("tools"))
        second = renderer.render(self.after["messages"], tools=self.after.get("tools"), add_generation_prompt=True)
        given: dict[str, Any] = {"before": self.before, "after": self.after} if proof else {}
        found = explain_break(first.ids, second.ids, renderer, sampled=first.mask if mask else None, **given)
        assert found is not None
        consistent(found, first.ids, second.ids)
        return found


ANSWER = assistant("All is known now, and the rest is as it was before.")
AND = user("And?")
BOTH = pytest.mark.parametrize("proof", [False, True], ids=["by text", "by messages"])


@BOTH
@pytest.mark.parametrize("change", ["added", "removed", "described", "all removed"])
@pytest.mark.parametrize("family", ["pocket", "qwen3.5", "gpt-oss"])
def test_changed_tools(family: str, change: str, proof: bool) -> None:
    other = {"type": "function", "function": NOW["function"] | {"description": "What time it is."}}
    tools = {
        "added": [*TOOLS, ADD],
        "removed": TOOLS[:2],
        "described": [*TOOLS[:2], other],
        "all removed": None,
    }[change]
    rows = history()
    after = {"messages": [*rows, ANSWER, AND], "tools": tools}
    found = Requests(family, {"messages": rows, "tools": TOOLS}, after).explain(proof=proof)
    assert found.cause is Cause.CHANGED_TOOLS
    assert found.region == "first prompt"
    if proof:
        said = {"added": "`add` was added", "described": "`now` changed"}.get(change, "`now` was removed")
        assert said in found.detail


@BOTH
@pytest.mark.parametrize("family", ["pocket", "qwen3.5", "glm-4.5"])
def test_changed_system(family: str, proof: bool) -> None:
    rows = history()
    changed = [system("You are a careless assistant."), *rows[1:], ANSWER, AND]
    asked = Requests(family, {"messages": rows, "tools": TOOLS}, {"messages": changed, "tools": TOOLS})
    found = asked.explain(proof=proof)
    assert found.cause is Cause.CHANGED_SYSTEM
    assert "careful" in found.before_text
    assert "careless" in found.after_text
    assert asked.explain(mask=False).cause is Cause.CHANGED_SYSTEM


@BOTH
@pytest.mark.parametrize("family", ["pocket", "qwen3"])
def test_system_that_vanished(family: str, proof: bool) -> None:
    rows = history()
    found = Requests(family, {"messages": rows}, {"messages": [*rows[1:], ANSWER, AND]}).explain(proof=proof)
    assert found.cause is Cause.CHANGED_SYSTEM


@BOTH
@pytest.mark.parametrize("change", ["summary", "middle", "window"])
@pytest.mark.parametrize("family", ["pocket", "qwen3"])
def test_compaction(family: str, change: str, proof: bool) -> None:
    rows = history()
    changed = {
        "summary": [SYS, user("So far: the weather of four cities was asked for. Go on.")],
        "middle": [*rows[:4], *rows[6:], ANSWER, AND],
        "window": [SYS, *rows[6:], ANSWER, AND],
    }[change]
    asked = Requests(family, {"messages": rows, "tools": TOOLS}, {"messages": changed, "tools": TOOLS})
    found = asked.explain(proof=proof)
    assert found.cause is Cause.COMPACTION
    if proof and change == "middle":
        assert "2 messages are missing from message 4 on" in found.detail


def test_cleared_tool_result() -> None:
    rows = history()
    changed = [*rows[:3], result("[cleared]"), *rows[4:], ANSWER, AND]
    found = Requests("pocket", {"messages": rows, "tools": TOOLS}, {"messages": changed, "tools": TOOLS}).explain()
    assert found.cause is Cause.COMPACTION
    assert found.region == "context after completion 1"
    assert "text of the tool was cut" in found.detail


def test_the_conversations_disprove_what_the_text_suggests() -> None:
    rows = history()
    renderer = renderer_of("pocket")
    stream = renderer.render(rows, tools=TOOLS, add_generation_prompt=True)
    other = renderer.render(rows, tools=TOOLS[:2], add_generation_prompt=True)
    same: dict[str, Any] = {"before": {"messages": rows, "tools": TOOLS}, "after": {"messages": rows, "tools": TOOLS}}
    found = explain_break(stream.ids, other.ids, renderer, sampled=stream.mask, **same)
    assert found is not None
    assert found.cause is Cause.UNKNOWN
    assert "the tools of both requests are the same" in found.detail


def test_words_about_tools_are_no_tools() -> None:
    rows = [SYS, user("Read this:\n# Tools\n<tools>\nhammer\n</tools>\nand tell."), assistant("Yes."), user("So?")]
    changed = [SYS, user("Read this:\n# Tools\n<tools>\nsaw\n</tools>\nand tell."), *rows[2:]]
    for after in (changed, [*changed, ANSWER, AND]):
        found = Requests("pocket", {"messages": rows}, {"messages": after}).explain()
        assert found.cause is Cause.UNKNOWN
        assert "text of the user" in found.detail


# -- white space, stop tokens, unknown


@pytest.mark.parametrize(
    ("family", "told", "content"),
    [
        ("pocket", "Hello there. \n<|end|>", "Hello there."),
        ("pocket", "Hello  there, my friend.<|end|>", "Hello there, my friend."),
        ("qwen3.5", "Hm.</think>Hello there.<|im_end|>", "Hello there."),
        ("qwen3", "\n\nHello there.<|im_end|>", "Hello there."),
    ],
)
def test_whitespace(family: str, told: str, content: str) -> None:
    after = OK if family == "qwen3.5" else user("Bye")
    reply = assistant(content, reasoning="Hm.") if family == "qwen3.5" else assistant(content)
    found = Rollout(family, told, (reply, after)).explain()
    assert found.cause is Cause.WHITESPACE
    assert "only white space differs" in found.detail


def test_whitespace_within_an_argument() -> None:
    told = weather('{"city": "Paris "}', family="pocket")
    found = Rollout("pocket", told, called("get_weather", {"city": "Paris"})).explain()
    assert found.cause is Cause.WHITESPACE


@pytest.mark.parametrize(
    ("family", "told"),
    [("gpt-oss", f"<|channel|>final<|message|>{HELLO}<|return|>"), ("qwen3", f"{HELLO}<|endoftext|>")],
)
def test_stop_token(family: str, told: str) -> None:
    made = Rollout(family, told, (assistant(HELLO), user("Bye")))
    found = made.explain()
    assert found.cause is Cause.STOP_TOKEN
    assert told[told.rindex("<") :] in found.detail
    assert found.position == len(made.stream) - 1
    assert found.prompt_range == (found.position, found.position + 1)


@pytest.mark.parametrize("family", HERMES)
@pytest.mark.parametrize("kept", ["The answer is five.", "I refuse to say."])
def test_unknown_is_said(kept: str, family: str) -> None:
    end = {"qwen3": "<|im_end|>", "pocket": "<|end|>"}[family]
    found = Rollout(family, f"The answer is four.{end}", (assistant(kept), user("Bye"))).explain()
    assert found.cause is Cause.UNKNOWN
    assert "nothing shows why" in found.detail
    assert "before=" in found.advice


def test_a_request_that_was_repeated() -> None:
    made = Rollout("pocket", f"{HELLO}<|end|>", ())
    found = explain_break(made.stream, made.prompt, made.renderer, sampled=made.sampled)
    assert found is not None
    assert found.cause is Cause.UNKNOWN
    assert found.position == len(made.prompt)
    assert found.prompt_range == (len(made.prompt), len(made.prompt))
    assert "repeated" in found.detail


# -- arguments


def test_regions_and_kinds() -> None:
    tokenizer = renderer_of("pocket").tokenizer
    kinds = [Kind.PROMPT] * 3 + [Kind.SAMPLED] * 2 + [Kind.CONTEXT, Kind.SCAFFOLD] + [Kind.SAMPLED] * 2
    stream = list(range(300, 309))
    regions = []
    for at in range(len(stream)):
        prompt = [*stream]
        prompt[at] = 999
        found = explain_break(stream, prompt, tokenizer, kinds=kinds)
        assert found is not None
        assert explain_break(stream, prompt, tokenizer, sampled=[k is Kind.SAMPLED for k in kinds]) == found
        regions.append(found.region)
    context = "context after completion 1"
    assert regions == ["first prompt"] * 3 + ["completion 1"] * 2 + [context] * 2 + ["completion 2"] * 2
    assert found.region is not None
    blind = explain_break(stream, prompt, tokenizer)
    assert blind is not None
    assert blind.region is None


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], 7, None, [2**40], np.zeros((2, 2), np.int32)])
def test_what_are_no_ids(ids: Any) -> None:
    with pytest.raises(TrajectoryError):
        explain_break(ids, [1], renderer_of("pocket"))
    with pytest.raises(TrajectoryError):
        explain_break([1], ids, renderer_of("pocket"))


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(TrajectoryError, match="one entry per token"):
        explain_break([1, 2], [1, 3], renderer_of("pocket"), sampled=[True])
    with pytest.raises(TrajectoryError, match="one entry per token"):
        explain_break([1, 2], [1, 3], renderer_of("pocket"), kinds=[1])
    with pytest.raises(TrajectoryError, match="Tokenizer or a Renderer"):
        explain_break([1, 2], [1, 3], "pocket")


@pytest.mark.parametrize("odd", [{}, {"messages": None}, {"messages": 3}, {"messages": ["x"], "tools": "y"}])
def test_conversations_that_are_none(odd: Any) -> None:
    found = explain_break([1, 2], [1, 3], renderer_of("pocket"), before=odd, after=odd)
    assert found is not None


def test_text_of_the_report_cannot_act_on_a_terminal() -> None:
    told, kept = "\x1b[31mred\u202e<|end|>", "\x1b[32mgreen\u202e"
    found = Rollout("pocket", told, (assistant(kept), user("Bye"))).explain()
    assert "\u202e" not in str(found)
    assert "␛" in str(found)


# -- laws


TOKENS = st.integers(0, 4200)  # some beyond the vocabulary
SMALL = st.integers(0, 12)


@given(st.lists(TOKENS | SMALL, max_size=40), st.lists(TOKENS | SMALL, max_size=40), st.data())
@settings(deadline=None, max_examples=200)
def test_never_raises_and_none_iff_extension(stream: list[int], prompt: list[int], data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        prompt = stream[: data.draw(st.integers(0, len(stream)))] + prompt
    sampled = data.draw(st.none() | st.lists(st.booleans(), min_size=len(stream), max_size=len(stream)))
    if not stream:
        sampled = None
    anchor = data.draw(st.none() | st.lists(SMALL, max_size=4))
    found = explain_break(stream, prompt, renderer_of("pocket"), sampled=sampled, anchor=anchor)
    extends = prompt[: len(stream)] == stream
    assert (found is None) == extends
    if found is not None:
        first = next((n for n, pair in enumerate(zip(stream, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
        assert found.position == first
        consistent(found, stream, prompt)


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>",
        "</parameter>", '{"a": 1', "}", "[", "]", '"', "'", ", ", "\n", " ", "true", "True", "null", "None", "é",
        "\\u00e9", "<|end|>", "<|turn|>", "user\n", "system\n", "assistant\n", "<tools>", "</tools>", "name", "{",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", " to=functions.", "<|call|>", "[TOOL_CALLS]", "</s>",
        '{"name": "f", "arguments": {}}', "# Tools\n", "日", "本",
    ]
)  # fmt: skip


@given(st.lists(PIECES, max_size=30), st.data())
@settings(deadline=None, max_examples=300)
def test_edited_text(pieces: list[str], data: st.DataObject) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    edited = [*pieces]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(edited)))
        edited[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(PIECES, max_size=2))
    stream, prompt = tokenizer.encode("".join(pieces)), tokenizer.encode("".join(edited))
    mask = data.draw(st.none() | st.integers(0, len(stream)).map(lambda n: np.arange(len(stream)) >= n))
    if not len(stream):
        mask = None
    found = explain_break(stream, prompt, tokenizer, sampled=mask)
    assert (found is None) == (prompt[: len(stream)].tolist() == stream.tolist())
    if found is not None:
        consistent(found, stream, prompt)
        assert found.cause is not Cause.BPE_REMERGE or found.before_text != ""


@given(st.text(min_size=1, max_size=60), st.data())
@settings(deadline=None, max_examples=200)
def test_any_other_way_to_spell_the_same_text_is_a_remerge(text: str, data: st.DataObject) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    whole = tokenizer.encode_plain([text])[0]
    cut = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        parts = [text[:cut], text[cut:]]
        split = np.concatenate(tokenizer.encode_plain([part for part in parts if part]))
    else:
        split = np.asarray([i for char in text for i in tokenizer.encode_plain([char])[0]], np.int32)
    found = explain_break(split, np.concatenate([whole, tokenizer.encode("<|end|>")]), tokenizer)
    if split.tolist() == whole.tolist():
        assert found is None
    else:
        assert found is not None
        assert found.cause is Cause.BPE_REMERGE
        assert set(found.later) <= {Cause.BPE_REMERGE}


@given(st.lists(SMALL, max_size=60), st.lists(SMALL, max_size=60))
@settings(deadline=None, max_examples=200)
def test_hunks_meet_again_where_they_say(stream: list[int], prompt: list[int]) -> None:
    hunk = next_hunk(np.asarray(stream, np.int32), np.asarray(prompt, np.int32), 0, 0)
    a, b = hunk.stop, hunk.other_stop
    if a < len(stream):
        assert stream[a : a + 1] == prompt[b : b + 1]
    else:
        assert (a, b) == (len(stream), len(prompt))


# -- size: what is looked at is bounded, so these end


def counted(stream: Ids, prompt: Ids) -> Break:
    found = explain_break(stream, prompt, renderer_of("pocket"))
    assert found is not None
    assert str(found)
    assert sum(row.count for row in found.tokens if row.op is not DiffOp.SKIPPED) < 2_000
    assert len(found.before_text) + len(found.after_text) < 40_000
    return found


def test_two_hundred_thousand_tokens() -> None:
    size = 200_000
    rng = np.random.default_rng(7)
    base = rng.integers(0, 4_000, size).astype(np.int32)
    changed = base.copy()
    changed[size // 2] += 1
    assert counted(base, changed).stream_range == (size // 2, size // 2 + 1)
    cut = np.concatenate([base[: size // 4], base[size // 2 :]])
    assert counted(base, cut).stream_range == (size // 4, size // 2)
    assert counted(base, rng.integers(0, 4_000, size).astype(np.int32)).stream_range[1] == size
    changed[::5] += 1
    counted(base, changed)
    same = np.full(size, 5, np.int32)
    counted(same, np.concatenate([same[: size // 2], [7], same]))


@pytest.mark.parametrize(
    ("piece", "end"),
    [("{", "["), ("[ 1,", "[1,"), ("<parameter=x>", "</function>"), ("<think>", "</think>"), ("{'a': ", "{'b")],
)
def test_text_that_invites_quadratic_work(piece: str, end: str) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    start = "<tool_call>\n<function=f>\n"
    counted(
        tokenizer.encode(start + piece * 50_000 + "a" + end),
        tokenizer.encode(start + piece * 25_000 + end * 25_000),
    )


@pytest.mark.parametrize("lead", ["", "x", "A long way before it. " * 600], ids=["none", "short", "long"])
def test_later_differences_are_named_wherever_the_first_one_stands(lead: str) -> None:
    """Two words spelled otherwise, far apart: the second is named too, however much text stands before the first."""
    encode = create_renderer(POCKET).tokenizer.encode
    middle = " and much more in between," * 8
    stream = encode(f"{lead}a  b{middle} c  d, and the rest of it")
    prompt = encode(f"{lead}a b{middle} c d, and the rest of it")
    found = explain_break(stream, prompt, create_renderer(POCKET))
    assert found is not None
    assert found.cause is Cause.WHITESPACE
    assert found.later == (Cause.WHITESPACE,)
