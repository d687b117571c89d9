"""Breaks in the context: tools, system prompts, compaction, cleared results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversations import ADD, NOW, SYS, assistant, call, result, system, user
from tests.diagnose.two_requests import GO, TOOLS, consistent, renderer_of, report
from tokentrace.diagnose.breaks import Break, explain_break
from tokentrace.diagnose.finding import Cause

ROWS = list(GO)
for n in range(4):
    ROWS += [assistant("", call("get_weather", {"city": f"City {n}"})), result(report(n))]
ANSWER = assistant("All is known now, and the rest is as it was before.")
END = [ANSWER, user("And?")]
DESCRIBED = {"type": "function", "function": NOW["function"] | {"description": "What time it is."}}
SUMMARY = user("So far: the weather of four cities was asked for. Go on.")
Request = dict[str, Any]


def asked(messages: list[Any], tools: Any = TOOLS) -> Request:
    return {"messages": messages, "tools": tools}


FIRST = asked(ROWS)
CHANGES: dict[str, tuple[Request, Request, Cause, str]] = {
    "tools added": (FIRST, asked([*ROWS, *END], [*TOOLS, ADD]), Cause.CHANGED_TOOLS, "new tools: add"),
    "tools removed": (FIRST, asked([*ROWS, *END], TOOLS[:2]), Cause.CHANGED_TOOLS, "left out: now"),
    "tools described": (FIRST, asked([*ROWS, *END], [*TOOLS[:2], DESCRIBED]), Cause.CHANGED_TOOLS, "otherwise: now"),
    "no tools": (FIRST, asked([*ROWS, *END], None), Cause.CHANGED_TOOLS, "left out: "),
    "system": (FIRST, asked([system("You are careless."), *ROWS[1:], *END]), Cause.CHANGED_SYSTEM, "careless"),
    "no system": (asked(ROWS, None), asked([*ROWS[1:], *END], None), Cause.CHANGED_SYSTEM, ""),
    "summary": (FIRST, asked([SYS, SUMMARY]), Cause.COMPACTION, ""),
    "middle": (FIRST, asked([*ROWS[:4], *ROWS[6:], *END]), Cause.COMPACTION, ""),
    "window": (FIRST, asked([SYS, *ROWS[6:], *END]), Cause.COMPACTION, ""),
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
    broken = explain_break(first.ids, second.ids, renderer, sampled=first.mask if mask else None, **requests)
    assert broken is not None
    consistent(broken, first.ids, second.ids)
    return broken


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
    broken = explained("pocket", FIRST, asked([*ROWS[:3], result("[cleared]"), *ROWS[4:], *END]))
    assert broken.cause is Cause.COMPACTION
    assert broken.region == "context after completion 1"
    assert "in the turn of the tool" in broken.words


def test_the_conversations_disprove_what_the_text_suggests() -> None:
    renderer = renderer_of("pocket")
    stream = renderer.render(ROWS, tools=TOOLS, add_generation_prompt=True)
    other = renderer.render(ROWS, tools=TOOLS[:2], add_generation_prompt=True)
    broken = explain_break(stream.ids, other.ids, renderer, sampled=stream.mask, before=FIRST, after=FIRST)
    assert broken is not None
    assert broken.cause is Cause.UNKNOWN
    assert "messages and tools of both requests are the same" in broken.words


def test_words_about_tools_are_no_tools() -> None:
    question = "Read this:\n# Tools\n<tools>\n{}\n</tools>\nand tell."
    rows = [SYS, user(question.format("hammer")), assistant("Yes."), user("So?")]
    changed = [SYS, user(question.format("saw")), *rows[2:]]
    for after in (changed, [*changed, *END]):
        broken = explained("pocket", asked(rows, None), asked(after, None))
        assert broken.cause is Cause.UNKNOWN
        assert "in the turn of the user" in broken.words
