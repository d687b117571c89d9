"""AuditReport: all that an audit says, as data and as a document."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

from ..formats.dialects import dialect_of
from ..formats.grammar import TurnGrammar
from ..settings import choose
from ..show.document import Cell, Document, Table
from ..show.visible import counted, listed
from ..showing import ShowsItself
from .appends import AppendBreak, AppendCell, AppendOutcome
from .cases import Append, Style
from .facts import TemplateFacts
from .verdicts import (
    FLAWS,
    TOOL_APPENDS,
    USER_APPENDS,
    AppendFinding,
    Grade,
    Use,
    Verdict,
    cause,
    find_flaws,
    grade,
    judge,
    judged,
)

SIGNS: Final[Mapping[Grade | None, Cell]] = {
    Grade.HOLDS: Cell("✓", "good"),
    Grade.PARTLY: Cell("◐", "poor"),
    Grade.FAILS: Cell("✗", "bad"),
    None: Cell("−", "dim"),
}
_KEY: Final = "✓ holds   ◐ for some turns   ✗ for none   − refused by the template"
_COLUMNS: Final = {
    "content": (False, True, Style.PLAIN),
    "reasoning + content": (True, True, Style.PLAIN),
    "calls alone": (False, False, Style.PLAIN),
    "reasoning + calls": (True, False, Style.PLAIN),
    "spaces around content": (False, True, Style.SPACED),
    "reasoning in content": (False, True, Style.INLINE),
}
"""Reasoning, content, and the style of content."""

_Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Bridging:
    """How many cells break, how many of them the bridge mends, and why it refuses others."""

    broken: int
    bridged: int
    refused: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SettingAudit:
    """The matrix and the verdicts with one setting of the template."""

    setting: Mapping[str, Any]
    cells: tuple[AppendCell, ...] = ()
    verdicts: tuple[Verdict, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.setting.items())


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One line about fine-tuning and rollouts, and the commands to type."""

    text: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuditReport(ShowsItself):
    """The certificate of a template: its matrix, facts, and a verdict for each use.

    `switches` are settings that change the text of a probe; those `without_effect` do not.
    """

    name: str
    tokenizer: str
    family: str
    digest: str
    settings: Mapping[str, Any]
    cells: tuple[AppendCell, ...]
    facts: TemplateFacts
    grammar: TurnGrammar
    verdicts: tuple[Verdict, ...]
    switches: tuple[SettingAudit, ...]
    without_effect: tuple[str, ...]
    bridging: Bridging
    notes: tuple[str, ...] = ()

    @property
    def dialect(self) -> str | None:
        """The name of the dialect of calls, if it has one."""
        return dialect_of(self.grammar.calls, self.grammar.channels)

    def verdict(self, use: str) -> Verdict:
        """Return the verdict on a use."""
        return next(verdict for verdict in self.verdicts if verdict.use == choose(Use, "use", use))

    def unmet(self, uses: Iterable[str], *, partly: bool = False) -> list[Verdict]:
        """Return the verdicts that do not hold; with `partly`, those that fail."""
        good = {Grade.HOLDS, Grade.PARTLY} if partly else {Grade.HOLDS}
        return [one for use in uses if (one := self.verdict(use)).grade not in good]

    @property
    def judged(self) -> dict[Append, list[AppendCell]]:
        """The cells that verdicts count, by what is appended."""
        cells = judged(self.cells, self.facts)
        return {append: [cell for cell in cells if cell.append is append] for append in Append}

    @property
    def grades(self) -> list[Grade | None]:
        """The grade of each append, None for one that the template refuses, and of each use."""
        return [*map(grade, self.judged.values()), *(one.grade for one in self.verdicts)]

    @property
    def findings(self) -> list[AppendFinding]:
        """Everything that does not hold, once for each cause."""
        return find_flaws(self.judged, FLAWS)

    @property
    def conclusion(self) -> Conclusion:
        """The conclusion in one line, and the commands to type."""
        return _conclude(self)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for ``json.dumps``."""
        return {"conclusion": asdict(self.conclusion), **asdict(self)}

    def document(self, _: Any = None) -> Document:
        """Return the report as a document."""
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        findings = [row for number, one in enumerate(self.findings, 1) for row in _finding(number, one)]
        return Document(
            f"Audit of {self.name}",
            "tokentrace audit",
            lead=" · ".join([f"family {self.family}", f"template {self.digest[:12]}", *settings]),
            summary=[self.conclusion.text, *(f"$ {command}" for command in self.conclusion.commands)],
            notes=self.notes,
            tables=[
                Table("What it is safe for", ["", " "], list(self._verdict_rows()), words=2, code=True),
                self._matrix(),
                *([Table("What goes wrong", ["", " "], findings, words=2, code=True)] if findings else []),
                Table("What else is known", ["", " "], list(self._fact_rows()), words=2),
            ],
        )

    def differences(self, now: AuditReport) -> Iterator[tuple[str, str, str]]:
        """Yield what differs in another report, but for line numbers: name, before, now."""
        before, after = dict(self._statements()), dict(now._statements())
        for what in dict.fromkeys((*before, *after)):
            if before.get(what, "") != after.get(what, ""):
                yield what, before.get(what, ""), after.get(what, "")

    def _statements(self) -> Iterator[tuple[str, str]]:
        for verdict in self.verdicts:
            yield f"verdict on {verdict.use}", str(verdict.grade)
        for cell in self.cells:
            why = cell.reason or (cause(cell) if cell.lost else "")
            yield f"{cell.append} after {cell.turn}", f"{cell.outcome}: {why}" if why else str(cell.outcome)
        altered = tuple(replace(one, line=None) for one in self.facts.altered)
        facts = replace(self.facts, date="a line" * bool(self.facts.date), altered=altered)
        yield from replace(self, facts=facts)._fact_rows()
        for name, value in asdict(self.grammar).items():
            yield f"grammar, {name}", str(value)

    def _verdict_rows(self) -> Iterator[_Row]:
        for one in self.verdicts:
            sign = SIGNS[one.grade]
            yield [sign._replace(text=f"{sign.text} {one.use}"), str(one)]
            yield from (["", words] for words in one.against)
            if one.holds_with:
                yield ["", Cell(f"holds with {' or '.join(one.holds_with)}", "good")]

    def _matrix(self) -> Table:
        """Grade each kind of turn for each append."""
        counting = {cell.turn for cells in self.judged.values() for cell in cells}
        groups: dict[Any, list[AppendCell]] = {}
        for cell in self.cells:
            form = (cell.turn.reasoning, cell.turn.content, cell.turn.style)
            groups.setdefault((cell.append, form), []).append(cell)
        signs = {key: SIGNS[grade(cells)] for key, cells in groups.items()}
        for key, cells in groups.items():
            if counting.isdisjoint(cell.turn for cell in cells):
                signs[key] = Cell(f"({signs[key].text})", "dim")
        rows = [[str(append), *(signs.get((append, form), "") for form in _COLUMNS.values())] for append in Append]
        about = f"{_KEY}   ( ) does not count: reasoning that the template neither writes nor asks for"
        return Table("What is appended, after which turn", ["", *_COLUMNS], rows, about)

    def _fact_rows(self) -> Iterator[tuple[str, str]]:
        """Yield a label and words for each fact."""
        for name in (one.name for one in fields(self.facts)):
            yield name.replace("_", " "), _words(getattr(self.facts, name))
        calls = f": {self.grammar.calls.outline()}" if self.grammar.calls is not None else ""
        yield "dialect of calls", f"{self.dialect or 'none that is known'}{calls}"
        yield from (("", note) for note in self.grammar.notes)
        if self.bridging.broken:
            why = "".join(f"; {reason} ({count})" for reason, count in self.bridging.refused)
            cases = f"{self.bridging.bridged} of {self.bridging.broken} cases that break"
            yield "bridge", f"appends to the sampled ids in {cases}{why}"
        for one in self.switches:
            yield f"with {one.name}", ", ".join(f"{verdict.use} {verdict.grade}" for verdict in one.verdicts)
        if self.without_effect:
            yield "has no effect", ", ".join(self.without_effect)

    def __repr__(self) -> str:
        return f"AuditReport({self.name!r}, {', '.join(f'{one.use}: {one.grade}' for one in self.verdicts)})"


def audits_document(reports: Sequence[AuditReport]) -> Document:
    """Return the document of one audit, or of several as a table."""
    if len(reports) == 1:
        return reports[0].document()
    names = [report.name for report in reports]
    title = f"Audit of {counted(len(names), 'template') if len(names) > 3 else listed(names)}"
    grades: list[_Row] = [[report.name, *(SIGNS[one] for one in report.grades)] for report in reports]
    findings: list[_Row] = []
    for one in reports:
        findings += [[one.name], [one.conclusion.text], *([finding.why] for finding in one.findings)]
    overview = Table("All", ["", *Append, *Use], grades, _KEY)
    tables = [overview, Table("What goes wrong", ["", " "], findings, words=2, code=True)]
    return Document(title, "tokentrace audit", tables=tables)


def differences_document(before: AuditReport, now: AuditReport) -> Document:
    """Return the document of what differs between two audits."""
    changed = list(before.differences(now))
    verdicts = [
        f"{one.use}: {one.grade} → {other.grade}"
        for one, other in zip(before.verdicts, now.verdicts, strict=True)
        if one.grade is not other.grade
    ]
    words = counted(len(changed), "difference") if changed else "nothing differs"
    summary = [f"{before.name} → {now.name}: {words}", *(verdicts or ["all verdicts are the same"] * bool(changed))]
    rows: list[_Row] = [[what, Cell(old or "−", "bad"), Cell(new or "−", "good")] for what, old, new in changed]
    tables = [Table("Differences", ["", "before", "now"], rows, words=3)] if rows else []
    return Document(f"{before.name} and {now.name}", "tokentrace audit", summary=summary, tables=tables)


def _finding(number: int, finding: AppendFinding) -> Iterator[_Row]:
    yield [f"{number}.", finding.why]
    cell = finding.smallest
    for one in cell.breaks:
        yield from _break_rows(one)
    yield ["", Cell("the smallest conversation that shows it:", "dim")]
    first = len(cell.messages) - len(cell.case.appended)
    for at, message in enumerate(cell.messages):
        sign, tone = ("+", "good") if at >= first else (" ", "")
        yield [f"{sign} {message['role']}", Cell(_message_words(message), tone)]


def _break_rows(one: AppendBreak) -> Iterator[_Row]:
    blame = one.blame
    if blame is not None:
        yield f"line {blame.line}", blame.source
        if blame.condition:
            proof = "" if blame.proven else " (not proven to be the cause)"
            yield "", f"`{blame.condition}` is {'true, then false' if blame.before else 'false, then true'}{proof}"
        for line, name, before, after in blame.because:
            yield "", f"line {line} sets {name}: {before}, then {after}"
    yield from (("", words) for words in one.fields)
    yield "had", repr(one.before)
    yield "has", repr(one.after)


def _words(value: Any) -> str:
    """Say a fact."""
    match value:
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return "; ".join(f"{key}: {_words(one)}" for key, one in value.items())
        case tuple():
            return ", ".join(map(str, value)) or "none"
    return (str(value) or "none") if str(value).isprintable() else repr(value)


def _message_words(message: Mapping[str, Any]) -> str:
    """Say what a message holds."""
    parts = [f"reasoning {message['reasoning_content']!r}"] if message.get("reasoning_content") else []
    if content := message.get("content"):
        parts.append(repr(content) if isinstance(content, str) else json.dumps(content))
    for one in message.get("tool_calls") or ():
        arguments = one["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"calls {one['function']['name']}({text})")
    return ", ".join(parts)


# -- the conclusion


def _conclude(report: AuditReport) -> Conclusion:
    """Say what to do with a template. One that writes no calls is judged by conversations without tools."""
    scope = ""
    if not report.facts.calls:
        report, scope = _without_tools(report), " for conversations without tools"
    name = shlex.quote(report.tokenizer or report.name)
    variables = "".join(f" --kwargs {shlex.quote(f'{key}={value}')}" for key, value in report.settings.items())
    sft, options = _fine_tuning(report, scope)
    commands = []
    if options is not None:
        commands.append(f"tokentrace tokenize chats.jsonl -o rows.parquet -t {name}{variables}{options}")
    rollouts = _rollouts(report, scope)
    if rollouts:
        engine = "--engine http://127.0.0.1:8000"
        commands.append(f"tokentrace serve --dev {engine} -t {name}{variables} --store runs.db")
        commands.append(f"tokentrace audit {name}{variables} --on chat.json")
    date = report.facts.date.partition(":")[0]
    dated = f" The prompt holds the day's date, {date}." if date else ""
    rollouts = rollouts or f"RL: safe{scope}, every prompt only appends."
    return Conclusion(f"{sft} {rollouts}{dated}", tuple(commands))


def _without_tools(report: AuditReport) -> AuditReport:
    """Restrict a report to conversations without tools."""
    cells = tuple(cell for cell in report.cells if not cell.append.calls)
    altered = (replace(one, roles=tuple(role for role in one.roles if role != "tool")) for one in report.facts.altered)
    facts = replace(report.facts, altered=tuple(one for one in altered if one.roles))
    verdicts = tuple(judge(use, judged(cells, facts), facts) for use in Use)
    return replace(report, cells=cells, facts=facts, verdicts=verdicts)


def _fine_tuning(report: AuditReport, scope: str) -> tuple[str, str | None]:
    """Return a sentence about fine-tuning, and the options for ``tokentrace tokenize``; None if it is not safe."""
    row, turn = report.verdict(Use.SFT_ONE_ROW), report.verdict(Use.SFT_PER_TURN)
    if row.grade is Grade.HOLDS:
        return f"SFT: safe{scope or ' as it is'}.", ""
    no_stop = report.facts.last_turn_without_stop
    options = ["--past expand"] * (report.bridging.broken > 0) + ["--final-stop"] * no_stop
    with_them, typed = f" with {listed(options)}" if options else "", "".join(f" {option}" for option in options)
    ends_only = no_stop and all("final_stop=True" in words and "; " not in words for words in turn.against)
    if turn.grade is Grade.HOLDS or ends_only:
        return f"SFT: safe{with_them}{scope}.", typed
    if lines := sorted({one.line for one in report.facts.altered if one.line is not None and not one.dropped}):
        fixed = f"lines {listed(lines)} are" if len(lines) > 1 else f"line {lines[0]} is"
        return f"SFT: not safe before {fixed} fixed, where texts are altered.", None
    if turn.grade is Grade.PARTLY:
        return f"SFT: safe{with_them} for some turns only: {turn.against[0]}.", typed
    return f"SFT: not safe{f', even{with_them}' if options else ''}: {turn.against[0]}.", None


def _rollouts(report: AuditReport, scope: str) -> str:
    """Return a sentence about rollouts; empty if every prompt only appends."""
    tools, users = report.verdict(Use.RL_APPEND_ONLY), report.verdict(Use.RL_USER_TURNS)
    if tools.grade is Grade.HOLDS and users.grade is Grade.HOLDS:
        return ""
    refused = report.bridging.broken - report.bridging.bridged
    bridge = f"use the bridge{f' (it refuses {refused} of {report.bridging.broken} cases)' if refused else ''}"
    why = _rewrites(report) or f"rendering again is not exact, {(*tools.against, *users.against)[0]}"
    return f"RL: {'safe with tools alone; else ' if tools.grade is Grade.HOLDS and not scope else ''}{bridge}; {why}."


def _rewrites(report: AuditReport) -> str:
    """Say which appends make the template rewrite earlier turns, and by which lines; empty if none do."""
    appends, lines = set(), Counter[int]()
    for append in (*TOOL_APPENDS, *USER_APPENDS):
        for cell in report.judged[append]:
            if cell.outcome is AppendOutcome.BREAKS:
                appends.add(append)
                lines.update({one.blame.line for one in cell.breaks if one.blame is not None})
    if not appends:
        return ""
    new = "a new user message" if appends <= {*USER_APPENDS} else "any new message"
    new = "a tool's result" if appends <= {*TOOL_APPENDS} else new
    by = f", line{'s' * (len(lines) > 1)} {listed(sorted(lines))}" if lines else ""
    return f"{new} rewrites earlier turns{by}"
