"""The conclusion of an audit: one plain line, and the commands to type."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ..show.visible import listed
from .appends import AppendOutcome
from .cases import Append
from .verdicts import Grade, Use, verdicts_of

if TYPE_CHECKING:
    from .audit_report import AuditReport

_USERS: Final = frozenset({Append.USER, Append.TOOL_USER})
_TOOLS: Final = frozenset({Append.TOOL, Append.PARALLEL})
_NEW: Final[Mapping[frozenset[Append], str]] = {_USERS: "a new user message", _TOOLS: "a tool's result"}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One line about fine-tuning and rollouts, and the commands to type."""

    text: str
    commands: tuple[str, ...]


def conclude(report: AuditReport) -> Conclusion:
    """Say what to do with a template. One that writes no calls is judged by conversations without tools."""
    scope = ""
    if not report.facts.calls:
        report, scope = _without_tools(report), " for conversations without tools"
    name = shlex.quote((report.tokenizer.name if report.tokenizer is not None else "") or report.name)
    variables = "".join(f" --kwargs {shlex.quote(f'{key}={value}')}" for key, value in report.settings.items())
    sft, options = _fine_tuning(report, scope)
    commands = []
    if options is not None:
        commands.append(f"tokentrace tokenize chats.jsonl -o rows.parquet -t {name}{variables}{options}")
    rollouts = _rollouts(report, scope)
    if rollouts is None:
        rollouts = f"RL: safe{scope}, every prompt only appends."
    else:
        engine = "--engine http://127.0.0.1:8000"
        commands.append(f"tokentrace serve --dev {engine} -t {name}{variables} --store runs.db")
        commands.append(f"tokentrace audit {name}{variables} --on chat.json")
    date = report.facts.date.partition(":")[0]
    dated = [f"The prompt holds the day's date, {date}."] if date else []
    return Conclusion(" ".join([sft, rollouts, *dated]), tuple(commands))


def _without_tools(report: AuditReport) -> AuditReport:
    """Restrict a report to conversations without tools."""
    cells = tuple(cell for cell in report.cells if cell.append not in (*_TOOLS, Append.TOOL_USER))
    altered = (replace(one, roles=tuple(role for role in one.roles if role != "tool")) for one in report.facts.altered)
    facts = replace(report.facts, altered=tuple(one for one in altered if one.roles))
    scoped = replace(report, cells=cells, facts=facts)
    return replace(scoped, verdicts=tuple(verdicts_of(scoped.judged, facts)))


def _fine_tuning(report: AuditReport, scope: str) -> tuple[str, str | None]:
    """Return a sentence about fine-tuning, and the options for ``tokentrace tokenize``; None if it is not safe."""
    row, turn = report.verdict(Use.SFT_ONE_ROW), report.verdict(Use.SFT_PER_TURN)
    if row.grade is Grade.HOLDS:
        return f"SFT: safe{scope or ' as it is'}.", ""
    options = ["--past expand"] * (report.bridging.broken > 0) + ["--final-stop"] * report.facts.last_turn_without_stop
    with_them, typed = listed(options), "".join(f" {option}" for option in options)
    ends_only = report.facts.last_turn_without_stop and all(
        "final_stop=True" in words and "; " not in words for words in turn.against
    )
    if turn.grade is Grade.HOLDS or ends_only:
        return f"SFT: safe{f' with {with_them}' if options else ''}{scope}.", typed
    if lines := _altering(report):
        return f"SFT: not safe before {lines} fixed, where texts are altered.", None
    if turn.grade is Grade.PARTLY:
        safe = f"safe with {with_them}" if options else "safe"
        return f"SFT: {safe} for some turns only: {turn.against[0]}.", typed
    return f"SFT: not safe{f', even with {with_them}' if options else ''}: {turn.against[0]}.", None


def _rollouts(report: AuditReport, scope: str) -> str | None:
    """Return a sentence about rollouts; None if every prompt only appends."""
    tools, users = report.verdict(Use.RL_APPEND_ONLY), report.verdict(Use.RL_USER_TURNS)
    if tools.grade is Grade.HOLDS and users.grade is Grade.HOLDS:
        return None
    bridging = report.bridging
    refused = f" (it refuses {bridging.broken - bridging.bridged} of {bridging.broken} cases)"
    bridge = f"use the bridge{refused if bridging.bridged < bridging.broken else ''}"
    why = _rewrites(report) or f"rendering again is not exact, {(*tools.against, *users.against)[0]}"
    return f"RL: {'safe with tools alone; else ' if tools.grade is Grade.HOLDS and not scope else ''}{bridge}; {why}."


def _rewrites(report: AuditReport) -> str:
    """Say which appends make the template rewrite earlier turns, and by which lines; empty if none do."""
    appends, lines = set(), Counter[int]()
    for cell in report.judged:
        if cell.outcome is AppendOutcome.BREAKS and cell.append in _USERS | _TOOLS:
            appends.add(cell.append)
            lines.update({one.blame.line for one in cell.breaks if one.blame is not None})
    if not appends:
        return ""
    new = next((words for some, words in _NEW.items() if appends <= some), "any new message")
    by = f", line{'s' * (len(lines) > 1)} {listed(sorted(lines))}" if lines else ""
    return f"{new} rewrites earlier turns{by}"


def _altering(report: AuditReport) -> str:
    """Name the lines that alter texts: ``"line 15 is"``."""
    lines = sorted({one.line for one in report.facts.altered if one.line is not None and not one.dropped})
    return f"line{'s' * (len(lines) > 1)} {listed(lines)} {'are' if len(lines) > 1 else 'is'}" if lines else ""
