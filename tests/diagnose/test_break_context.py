"""Breaks in the context: tools, system prompts, compaction, cleared results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.conversations import ADD, NOW, SYS, assistant, call, result, system, user
from tests.diagnose.two_requests import GO, TOOLS, consistent, renderer_of, report
from tokentrace.diagnose.breaks import Break, explain_break
from tokentrace.diagnose.finding import Cause


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
    tools = {"added": [*TOOLS, ADD], "removed": TOOLS[:2], "described": [*TOOLS[:2], other], "all removed": None}[
        change
    ]
    rows = history()
    after = {"messages": [*rows, ANSWER, AND], "tools": tools}
    found = Requests(family, {"messages": rows, "tools": TOOLS}, after).explain(proof=proof)
    assert found.cause is Cause.CHANGED_TOOLS
    assert found.region == "first prompt"
    if proof:
        said = {"added": "new tools: add", "described": "otherwise: now", "all removed": "left out: "}
        said = said.get(change, "left out: now")
        assert said in found.words


@BOTH
@pytest.mark.parametrize("family", ["pocket", "qwen3.5", "glm-4.5"])
def test_changed_system(family: str, proof: bool) -> None:
    rows = history()
    changed = [system("You are a careless assistant."), *rows[1:], ANSWER, AND]
    asked = Requests(family, {"messages": rows, "tools": TOOLS}, {"messages": changed, "tools": TOOLS})
    found = asked.explain(proof=proof)
    assert found.cause is Cause.CHANGED_SYSTEM
    assert "careless" in found.words
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


def test_cleared_tool_result() -> None:
    rows = history()
    changed = [*rows[:3], result("[cleared]"), *rows[4:], ANSWER, AND]
    found = Requests("pocket", {"messages": rows, "tools": TOOLS}, {"messages": changed, "tools": TOOLS}).explain()
    assert found.cause is Cause.COMPACTION
    assert found.region == "context after completion 1"
    assert "in the turn of the tool" in found.words


def test_the_conversations_disprove_what_the_text_suggests() -> None:
    rows = history()
    renderer = renderer_of("pocket")
    stream = renderer.render(rows, tools=TOOLS, add_generation_prompt=True)
    other = renderer.render(rows, tools=TOOLS[:2], add_generation_prompt=True)
    same: dict[str, Any] = {"before": {"messages": rows, "tools": TOOLS}, "after": {"messages": rows, "tools": TOOLS}}
    found = explain_break(stream.ids, other.ids, renderer, sampled=stream.mask, **same)
    assert found is not None
    assert found.cause is Cause.UNKNOWN
    assert "messages and tools of both requests are the same" in found.words


def test_words_about_tools_are_no_tools() -> None:
    rows = [SYS, user("Read this:\n# Tools\n<tools>\nhammer\n</tools>\nand tell."), assistant("Yes."), user("So?")]
    changed = [SYS, user("Read this:\n# Tools\n<tools>\nsaw\n</tools>\nand tell."), *rows[2:]]
    for after in (changed, [*changed, ANSWER, AND]):
        found = Requests("pocket", {"messages": rows}, {"messages": after}).explain()
        assert found.cause is Cause.UNKNOWN
        assert "in the turn of the user" in found.words
