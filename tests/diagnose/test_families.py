"""Audits of every family: their verdicts are those of brute force, and say what these templates do."""

import random
from typing import Any

import pytest

from tests.diagnose.brute import audit_of, breaks, reworded, source_of
from tests.support import FULL, JINJA_FAMILIES, rotating, some
from tokentrace.diagnose import AuditReport, Grade
from tokentrace.diagnose.appends import AppendCell, AppendOutcome, Where
from tokentrace.diagnose.cases import TOOLS, Append, Style

DROPPING = ["qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "glm-4.6", "glm-4.7", "glm-5", "nemotron-3-nano"]
"""Families that drop reasoning once a user speaks."""
DESCRIBED = ["qwen3", "glm-4.5", "gpt-oss", "deepseek-r1", "llama-3.1", "qwen3.6", "glm-4.7"]
"""Those that tests below are about."""
MORE = [name for name in JINJA_FAMILIES if name not in DESCRIBED]
TRIED = [*rotating(DESCRIBED, "known", 2), *rotating(MORE, "audit", 8)]
"""Some of them in each run, all of them in a full one: an audit takes seconds."""


@pytest.fixture(scope="module", params=TRIED)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cells(report: AuditReport, append: str, **features: Any) -> list[AppendCell]:
    """The cells of an append whose turn has these features, with plain arguments and content."""
    features = {"style": Style.PLAIN, **features}
    plain = [cell for cell in report.cells if cell.append == append and cell.turn.arguments in ("object", "")]
    return [cell for cell in plain if all(getattr(cell.turn, name) == features[name] for name in features)]


def outcomes(report: AuditReport, append: str, **features: Any) -> set[AppendOutcome]:
    return {cell.outcome for cell in cells(report, append, **features)}


def test_every_verdict_is_that_of_brute_force(family: str) -> None:
    chance, wrong = random.Random(family), []
    for cell in audit_of(family).cells:
        tools = TOOLS if cell.tools else None
        for messages in (list(map(dict, cell.messages)), reworded(cell.messages, chance)):
            past, reply, appended = messages[: cell.index], messages[cell.index], messages[cell.index + 1 :]
            broken = breaks(source_of(family), past, reply, appended, tools)
            expected = None if cell.outcome is AppendOutcome.REFUSED else cell.outcome is AppendOutcome.BREAKS
            if broken is not expected:
                wrong.append((cell.turn, cell.outcome, broken, messages))
    assert not wrong, some(wrong)


def test_no_longer_conversation_breaks_where_the_audit_says_that_it_holds(family: str) -> None:
    chance, wrong, tried = random.Random(family), [], 0
    holding = [cell for cell in audit_of(family).cells if cell.outcome in (AppendOutcome.HOLDS, AppendOutcome.LOSES)]
    for cell in chance.sample(holding, min(12, len(holding))):
        past, (reply, *appended) = cell.messages[: cell.index], cell.messages[cell.index :]
        longer = [*past]
        for _ in range(chance.randint(1, 3)):
            longer += [reply, *appended] if appended[-1]["role"] in ("user", "tool") else [reply, past[-1]]
        broken = breaks(source_of(family), reworded(longer, chance), reply, appended, TOOLS if cell.tools else None)
        tried += broken is not None
        if broken:
            wrong.append((cell.turn, longer))
    assert not wrong, some(wrong)
    assert tried or not holding


def test_every_break_names_its_line_and_is_bridged_or_counted(family: str) -> None:
    report, lines = audit_of(family), source_of(family).split("\n")
    past = [(cell, one) for cell in report.cells for one in cell.breaks if one.where is not Where.SEAM]
    assert past or family not in DROPPING
    for cell, one in past:
        assert one.blame is not None, (cell.turn, one)
        assert 1 <= one.blame.line <= len(lines)
        assert not one.blame.condition or one.blame.proven, one.blame
    assert bool(report.facts.date) == (family in ("gpt-oss", "llama-3.2"))
    assert not report.facts.random
    assert bool(report.bridging) == any(cell.breaks for cell in report.cells if cell.append is not Append.ASSISTANT)


@pytest.mark.parametrize("name", [name for name in DROPPING if name in TRIED])
def test_reasoning_is_dropped_once_a_user_speaks(name: str) -> None:
    for append in (Append.USER, Append.TOOL_USER):
        for cell in cells(audit_of(name), append, reasoning=True):
            assert cell.outcome is AppendOutcome.BREAKS
            (one,) = (one for one in cell.breaks if not one.at_turn)
            assert "reasoning_content" in one.gone
            assert one.blame is not None
            assert "last" in one.blame.condition or one.blame.because
    assert audit_of(name).verdict("rl-user-turns").grade is not Grade.HOLDS


@pytest.mark.parametrize("name", ["qwen3", "qwen3-thinking-2507"] if FULL else ["qwen3"])
def test_qwen3_breaks_on_a_tools_result_by_loop_last(name: str) -> None:
    report = audit_of(name)
    for append in (Append.TOOL, Append.PARALLEL):
        for cell in cells(report, append, reasoning=False):
            (blame,) = {one.blame for one in cell.breaks if not one.at_turn}
            assert blame is not None
            assert blame.condition == "loop.last"
            assert "loop.last" in source_of(name).split("\n")[blame.line - 1]
        assert outcomes(report, append, reasoning=True) == {AppendOutcome.HOLDS}
    assert report.verdict("rl-append-only").grade is Grade.PARTLY
    assert report.verdict("rl-user-turns").grade is Grade.FAILS


def test_qwen3_2507_passes() -> None:
    report = audit_of("qwen3-instruct-2507")
    assert {verdict.grade for verdict in report.verdicts} == {Grade.HOLDS}
    assert not report.facts.reasoning


def test_gpt_oss_breaks_on_a_user_by_its_stop_token() -> None:
    (cell,) = cells(audit_of("gpt-oss"), Append.USER, reasoning=False)
    assert cell.breaks[-1].before.startswith("<|return|>")
    assert cell.breaks[-1].after.startswith("<|end|>")


def test_deepseek_drops_calls_and_reasoning() -> None:
    for cell in cells(audit_of("deepseek-v3"), Append.TOOL, content=True):
        assert "tool_calls.0" in cell.lost
    r1 = audit_of("deepseek-r1")
    assert {cell.lost for cell in cells(r1, Append.USER, reasoning=True)} == {("reasoning_content",)}
    assert r1.facts.opens_reasoning
    assert r1.verdict("sft-per-turn").grade is Grade.FAILS


def test_llama_refuses_parallel_calls_and_lists_are_no_switches() -> None:
    report = audit_of("llama-3.1")
    assert outcomes(report, Append.PARALLEL) == {AppendOutcome.REFUSED}
    assert all("single tool-calls" in cell.reason for cell in cells(report, Append.PARALLEL))
    assert report.verdict("rl-append-only").grade is Grade.PARTLY
    assert not [name for name in report.switches if "custom_tools" in name or "builtin_tools" in name]
    assert any("builtin_tools, custom_tools" in note for note in report.notes)


def test_settings_that_keep_reasoning_are_tried() -> None:
    assert "clear_thinking=False" in audit_of("glm-4.7").switches
    verdicts = audit_of("qwen3.6").switches["preserve_thinking=True"]
    assert {str(one.use): str(one.grade) for one in verdicts}["rl-user-turns"] == "partly"


def test_glm_stops_with_the_head_of_the_next_turn() -> None:
    facts = audit_of("glm-4.5").facts
    stops = {one.text: one for one in facts.stop_tokens}
    assert (stops["<|user|>"].is_next_head, stops["<|user|>"].trained) == (True, True)
    assert facts.last_turn_without_stop
