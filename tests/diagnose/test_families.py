"""Audits of every family: verdicts agree with brute force, and reports describe what the template does."""

import random

import pytest

from tests.diagnose.brute import audit_of, breaks, reworded, source_of
from tests.support import JINJA_FAMILIES, rotating, some
from tokentrace.diagnose import Grade
from tokentrace.diagnose.appends import TOOLS, Append, AppendOutcome, Where
from tokentrace.show.terminal import plain_view

DROPPING = ["qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "glm-4.6", "glm-4.7", "glm-5", "nemotron-3-nano"]
"""Families that drop reasoning once a user message follows."""
DESCRIBED = ["qwen3", "glm-4.5", "gpt-oss", "deepseek-r1", "llama-3.1", "qwen3.6", "glm-4.7"]
"""Families that the tests at the end audit in every run."""
MORE = [name for name in JINJA_FAMILIES if name not in DESCRIBED]
AUDITED = [*rotating(DESCRIBED, "known", 4), *rotating(MORE, "audit", 12)]
"""A part of the families in each run, all in a full run: an audit takes seconds."""


@pytest.fixture(scope="module", params=AUDITED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_verdict_is_that_of_brute_force(family: str) -> None:
    rng, failures = random.Random(family), []
    for cell in audit_of(family).cells:
        tools = TOOLS if cell.tools else None
        for messages in (list(map(dict, cell.messages)), reworded(cell.messages, rng)):
            past, reply, appended = messages[: cell.index], messages[cell.index], messages[cell.index + 1 :]
            broken = breaks(source_of(family), past, reply, appended, tools)
            expected = None if cell.outcome is AppendOutcome.REFUSED else cell.outcome is AppendOutcome.BREAKS
            if broken is not expected:
                failures.append((cell.turn, cell.outcome, broken, messages))
    assert not failures, some(failures)


def test_no_longer_conversation_breaks_where_the_audit_holds(family: str) -> None:
    rng, failures, count = random.Random(family), [], 0
    holding = [cell for cell in audit_of(family).cells if cell.outcome in (AppendOutcome.HOLDS, AppendOutcome.LOSES)]
    for cell in rng.sample(holding, min(12, len(holding))):
        past, (reply, *appended) = cell.messages[: cell.index], cell.messages[cell.index :]
        longer = [*past]
        for _ in range(rng.randint(1, 3)):
            longer += [reply, *appended] if appended[-1]["role"] in ("user", "tool") else [reply, past[-1]]
        broken = breaks(source_of(family), reworded(longer, rng), reply, appended, TOOLS if cell.tools else None)
        count += broken is not None
        if broken:
            failures.append((cell.turn, longer))
    assert not failures, some(failures)
    assert count or not holding


def test_every_break_names_its_line_and_is_bridged_or_counted(family: str) -> None:
    report, lines = audit_of(family), source_of(family).split("\n")
    past = [(cell, one) for cell in report.cells for one in cell.breaks if one.where is not Where.SEAM]
    assert past or family not in DROPPING
    for cell, one in past:
        assert one.blame is not None, (cell.turn, one)
        assert 1 <= one.blame.line <= len(lines)
    assert bool(report.facts.date) == (family in ("gpt-oss", "llama-3.2"))
    assert not report.facts.random
    assert bool(report.bridging) == any(cell.breaks for cell in report.cells if cell.append is not Append.ASSISTANT)


@pytest.mark.parametrize("name", [name for name in DROPPING if name in AUDITED])
def test_reasoning_is_dropped_once_a_user_speaks(name: str) -> None:
    for cell in audit_of(name).cells:
        if cell.append in (Append.USER, Append.TOOL_USER) and cell.turn.reasoning:
            assert cell.outcome is AppendOutcome.BREAKS
            (one,) = (one for one in cell.breaks if not one.at_turn)
            assert "reasoning_content" in one.gone
            assert one.blame is not None
            assert one.blame.before is not None
    assert audit_of(name).verdict("rl-user-turns").grade is not Grade.HOLDS


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("qwen3", ["{%- if loop.last or", "a condition in it is true, then false"]),
        ("gpt-oss", ["had '<|return|>'", "the second call reaches no token"]),
        ("deepseek-v3", ["kinds of turns: tool_calls reaches no token", "past turn without stop yes"]),
        ("deepseek-r1", ["reasoning_content reaches no token", "✗ sft-per-turn", "opens reasoning yes"]),
        (
            "llama-3.1",
            ["parallel results: refused: This model only supports single tool-calls", "builtin_tools and custom_tools"],
        ),
        ("glm-4.7", ["with clear_thinking=False sft-one-row"]),
        ("qwen3.6", ["holds with preserve_thinking=True", "rl-append-only: partly; rl-user-turns: partly"]),
        ("glm-4.5", ["<|user|> (265, the head of the next turn), ", "last turn without stop yes"]),
    ],
)
def test_the_report_says_what_a_template_does(name: str, lines: list[str]) -> None:
    report = " ".join(plain_view(audit_of(name)).split())
    assert [line for line in lines if line not in report] == []
