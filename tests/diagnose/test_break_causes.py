"""The cause of a break in a turn that is rendered again, and in a changed context."""

import json
from typing import Any

import numpy as np
import pytest

from tests.conversations import ADD, NOW, SYS, assistant, result, system, user
from tests.diagnose.two_requests import HELLO, HISTORY, TOOLS, Rollout, called, consistent, hermes, renderer_of, weather
from tests.support import make_renderer
from tokentrace.diagnose.break_checks import REASONING_TAGS
from tokentrace.diagnose.breaks import Break, explain_break
from tokentrace.diagnose.finding import Cause

C = Cause
END = {"qwen3": "<|im_end|>", "qwen3.5": "<|im_end|>", "pocket": "<|end|>"}
BYE = user("Bye")
HERMES = ["pocket", "qwen3"]


def xml(name: str, body: str) -> str:
    """A call as Qwen3.5 writes it; the prompt has opened the reasoning."""
    return f"I look.\n</think>\n\n<tool_call>\n<function={name}>\n{body}</function>\n</tool_call><|im_end|>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def answered(family: str, text: str, content: str) -> Rollout:
    return Rollout(family, f"{text}{END[family]}", (assistant(content), BYE))


def weather_call(family: str, arguments: str, values: Any) -> Rollout:
    return Rollout(family, weather(arguments, family=family), called("get_weather", values))


PARIS = {"city": "Paris"}
INVALID = called("invalid", {"tool": "Bash", "error": "Model tried to call unavailable tool Bash"})
BASH = "the stream has `Bash`, the next prompt `invalid`"
SPACE = "Only white space differs"
GLM_BASH = (
    "\n<think>I look.</think>\n<tool_call>Bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
    "</tool_call><|observation|>"
)
DRY_RUN = xml("remove", parameter("path", "a.txt") + parameter("dry_run", "false"))
LONE_TAG = xml("remove", parameter("path", "a.txt") + "<parameter=dry_run></parameter>\n")
FORMATS = {
    "spacing": ('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}),
    "order": ('{"unit": "c", "city": "Paris"}', {"city": "Paris", "unit": "c"}),
    "escapes": ('{"city": "Orl\\u00e9ans"}', {"city": "Orléans"}),
    "numbers": ('{"city": "Paris", "days": 1.0}', {"city": "Paris", "days": 1}),
    "string": (json.dumps('{"city": "Paris"}'), PARIS),
}
TURNS: dict[str, tuple[Rollout, Cause, str]] = {
    "white space after": (answered("pocket", "Hello there. \n", "Hello there."), C.WHITESPACE, SPACE),
    "white space inside": (answered("pocket", "Hello  there, friend.", "Hello there, friend."), C.WHITESPACE, SPACE),
    "white space before": (answered("qwen3", "\n\nHello there.", "Hello there."), C.WHITESPACE, SPACE),
    "white space after reasoning": (
        Rollout("qwen3.5", "Hm.</think>Hello!<|im_end|>", (assistant("Hello!", reasoning="Hm."), result("ok"))),
        C.WHITESPACE, SPACE),
    **{f"other words, {family}": (answered(family, "The answer is four.", "I refuse to say."), C.UNKNOWN, "known cause")
       for family in HERMES},
    "a word less": (answered("pocket", "The answer is four.", "The answer is five."), C.UNKNOWN, "known cause"),
    "a capital letter in prose": (answered("pocket", "true stories", "True stories"), C.UNKNOWN, ""),
    **{f"a boolean that became a string, {family}": (
        weather_call(family, '{"city": "Paris", "now": true}', PARIS | {"now": "True"}), C.BOOLEAN_CASE, "")
       for family in HERMES},
    **{f"JSON: {name}, {family}": (weather_call(family, *FORMATS[name]), C.JSON_FORMAT, "")
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
    "a missing completion": (answered("pocket", HELLO, ""), C.ZEROED_ANCHOR, "lost some"),
    "a missing completion with reasoning": (
        answered("qwen3.5", f"Hm.\n</think>\n\n{HELLO}", ""), C.ZEROED_ANCHOR, "lost some"),
    "a repaired call of pocket": (
        Rollout("pocket", hermes('{"name": "Bash", "arguments": {"command": "ls"}}', family="pocket"), INVALID),
        C.REWRITTEN_CALL, BASH),
    "a repaired call of qwen3.5": (
        Rollout("qwen3.5", xml("Bash", parameter("command", "ls")), INVALID), C.REWRITTEN_CALL, BASH),
    "a repaired call of glm-4.5": (Rollout("glm-4.5", GLM_BASH, INVALID), C.REWRITTEN_CALL, BASH),
    "a boolean written by str()": (
        Rollout("qwen3.5", DRY_RUN, called("remove", {"path": "a.txt", "dry_run": False})), C.BOOLEAN_CASE,
        "the stream has `false`, the next prompt `False`"),
    "another stop token of gpt-oss": (
        Rollout("gpt-oss", f"<|channel|>final<|message|>{HELLO}<|return|>", (assistant(HELLO), BYE)), C.STOP_TOKEN,
        "`<|return|>`"),
    "another stop token of qwen3": (
        Rollout("qwen3", f"{HELLO}<|endoftext|>", (assistant(HELLO), BYE)), C.STOP_TOKEN, "`<|endoftext|>`"),
    "a call that was dropped": (
        Rollout("pocket", weather('{"city": "Paris"}', family="pocket"), (assistant("No.", reasoning="I look."), BYE)),
        C.REWRITTEN_CALL, "the stream has `get_weather`, the next prompt nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_the_cause_of_a_turn_rendered_again(name: str) -> None:
    turn, cause, words = TURNS[name]
    broken = turn.explain()
    assert broken.cause is cause
    assert words in broken.words
    if cause in (Cause.JSON_FORMAT, Cause.REWRITTEN_CALL):
        assert broken.later == ()
    if cause in (Cause.REWRITTEN_CALL, Cause.EMPTY_PARAMETER):
        assert explain_break(turn.stream, turn.next_prompt, turn.renderer).cause is cause
    if cause in (Cause.BOOLEAN_CASE, Cause.STOP_TOKEN):
        assert broken.region == "completion 1"


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
    fields = {} if family == "pocket" else {"reasoning": THOUGHT}
    turn = Rollout(family, text, (assistant(HELLO, **fields), BYE))
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
    assert consistent(stream, after, tokenizer).cause is Cause.STRIPPED_REASONING


def test_two_turns_of_stripped_reasoning_are_both_reported() -> None:
    renderer = renderer_of("qwen3.5")
    messages = [
        *HISTORY[:2],
        assistant(HELLO, reasoning=THOUGHT),
        BYE,
        assistant("Goodbye then, friend.", reasoning="Yes."),
    ]
    preserved = make_renderer("qwen3.5", preserve_all_thinking=True).render(messages, tools=TOOLS)
    after = renderer.render([*messages, user("More")], tools=TOOLS, add_generation_prompt=True)
    broken = consistent(preserved.ids, after.ids, renderer, sampled=preserved.mask)
    assert (broken.cause, broken.later) == (Cause.STRIPPED_REASONING, (Cause.STRIPPED_REASONING,))
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


def test_a_lost_stream() -> None:
    turn = Rollout("pocket", f"{HELLO}<|end|>", ())
    renderer, prompt = turn.renderer, turn.prompt
    zeros = np.concatenate([np.where(turn.sampled, 0, turn.stream), turn.stream[:8]])
    for stream, after, sampled in (([], prompt, []), (turn.stream, zeros, turn.sampled)):
        assert consistent(stream, after, renderer, sampled=sampled).cause is Cause.ZEROED_ANCHOR
    assert explain_break([], prompt, renderer) is None
    assert explain_break([], [], renderer, sampled=[]) is None


# -- the context: tools, system prompts, compaction, cleared results

ANSWER = assistant("All is known now.")
LONGER = [*HISTORY, ANSWER, user("And?")]
DESCRIBED = {"type": "function", "function": NOW["function"] | {"description": "What time it is."}}
Request = dict[str, Any]


def request(messages: list[Any], tools: Any = TOOLS) -> Request:
    return {"messages": messages, "tools": tools}


FIRST = request(HISTORY)
CHANGES: dict[str, tuple[Request, Request, Cause, str]] = {
    "tools added": (FIRST, request(LONGER, [*TOOLS, ADD]), C.CHANGED_TOOLS, "new tools: add"),
    "tools removed": (FIRST, request(LONGER, TOOLS[:2]), C.CHANGED_TOOLS, "left out: now"),
    "tools described": (FIRST, request(LONGER, [*TOOLS[:2], DESCRIBED]), C.CHANGED_TOOLS, "changed tools: now"),
    "no tools": (FIRST, request(LONGER, None), C.CHANGED_TOOLS, "left out: "),
    "system": (FIRST, request([system("You are careless."), *LONGER[1:]]), C.CHANGED_SYSTEM, "careless"),
    "no system": (request(HISTORY, None), request(LONGER[1:], None), C.CHANGED_SYSTEM, ""),
    "summary": (
        FIRST,
        request([SYS, user("So far: the weather of four cities was asked for. Go on.")]),
        C.COMPACTION,
        "",
    ),
    "middle": (FIRST, request([*HISTORY[:4], *LONGER[6:]]), C.COMPACTION, ""),
    "window": (FIRST, request([SYS, *LONGER[6:]]), C.COMPACTION, ""),
}
FAMILIES = [
    *(("pocket", name) for name in CHANGES),
    *((family, name) for family in ("qwen3.5", "gpt-oss") for name in ("tools added", "no tools")),
    *((family, name) for family in ("qwen3.5", "glm-4.5") for name in ("system", "window")),
    *(("qwen3", name) for name in ("no system", "summary", "middle")),
]


def explained(family: str, before: Request, after: Request, *, proof: bool = False, mask: bool = True) -> Break:
    """The break between two requests. The first one, with the answer that was sampled for it, is the stream."""
    renderer = renderer_of(family)
    first = renderer.render([*before["messages"], ANSWER], tools=before["tools"])
    second = renderer.render(after["messages"], tools=after["tools"], add_generation_prompt=True)
    requests: dict[str, Any] = {"before": before, "after": after} if proof else {}
    return consistent(first.ids, second.ids, renderer, sampled=first.mask if mask else None, **requests)


@pytest.mark.parametrize("proof", [False, True], ids=["by text", "by messages"])
@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_the_cause_of_a_changed_context(family: str, name: str, proof: bool) -> None:
    before, after, cause, words = CHANGES[name]
    broken = explained(family, before, after, proof=proof)
    assert broken.cause is cause
    assert not proof or words in broken.words
    assert cause is Cause.COMPACTION or broken.region == "first prompt"
    if cause is Cause.CHANGED_SYSTEM:
        assert explained(family, before, after, mask=False).cause is cause


def test_cleared_tool_result() -> None:
    broken = explained("pocket", FIRST, request([*HISTORY[:3], result("[cleared]"), *LONGER[4:]]))
    assert (broken.cause, broken.region) == (Cause.COMPACTION, "context after completion 1")
    assert "in the turn of the tool" in broken.words


def test_json_of_a_tool_result() -> None:
    spaced, compact = (['{"sky": "sunny", "temp": 21}'], ['{"sky":"sunny","temp":21}', user("And?")])
    before, after = (request([*HISTORY[:3], result(text), *more]) for text, *more in (spaced, compact))
    renderer = renderer_of("pocket")
    stream, prompt = (
        renderer.render(one["messages"], tools=TOOLS, add_generation_prompt=True) for one in (before, after)
    )
    broken = consistent(stream.ids, prompt.ids, renderer, sampled=stream.mask)
    assert (broken.cause, broken.region) == (Cause.JSON_FORMAT, "context after completion 1")


def test_the_conversations_disprove_what_the_text_suggests() -> None:
    renderer = renderer_of("pocket")
    stream, other = (renderer.render(HISTORY, tools=tools, add_generation_prompt=True) for tools in (TOOLS, TOOLS[:2]))
    broken = consistent(stream.ids, other.ids, renderer, sampled=stream.mask, before=FIRST, after=FIRST)
    assert broken.cause is Cause.UNKNOWN
    assert "messages and tools of both requests are the same" in broken.words


def test_text_about_tools_is_no_tool_definition() -> None:
    question = "Read this:\n# Tools\n<tools>\n{}\n</tools>\nand tell."
    rows = [SYS, user(question.format("hammer")), assistant("Yes."), user("So?")]
    changed = [SYS, user(question.format("saw")), *rows[2:]]
    for after in (changed, [*changed, *LONGER[-2:]]):
        broken = explained("pocket", request(rows, None), request(after, None))
        assert broken.cause is Cause.UNKNOWN
        assert "in the turn of the user" in broken.words


def test_a_removed_message_is_a_compaction_even_among_similar_ones() -> None:
    renderer = renderer_of("pocket")
    messages = [user("hello there"), assistant("It is 4."), user("What is 2+2?"), assistant("It is 4.")]
    stream = renderer.render_ids(messages)
    for removed in (0, 1):
        remaining = [*messages[:removed], *messages[removed + 1 :], user("n")]
        after = renderer.render_ids(remaining, add_generation_prompt=True)
        assert consistent(stream, after, renderer).cause is Cause.COMPACTION
    prompt = renderer.render_ids([user("n")], add_generation_prompt=True)
    requests = {"before": {"messages": messages}, "after": {"messages": []}}
    assert consistent(stream, prompt, renderer, **requests).cause is Cause.COMPACTION
