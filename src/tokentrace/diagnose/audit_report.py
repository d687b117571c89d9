"""AuditReport: all that an audit says, as data and as a document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..formats.dialects import dialect_of
from ..formats.grammar import TurnGrammar
from ..settings import choose
from ..show.document import Cell, Document, Table
from ..show.visible import counted, listed
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .appends import AppendBreak, AppendCell
from .cases import Append, Style
from .conclusion import Conclusion, conclude
from .facts import TemplateFacts
from .verdicts import FLAWS, AppendFinding, Grade, Use, Verdict, cause, find_flaws, grade, judged

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
class AuditReport(ShowsItself):
    """The certificate of a template: its matrix, facts, and a verdict for each use."""

    name: str
    family: str
    digest: str
    settings: Mapping[str, Any]
    cells: tuple[AppendCell, ...]
    facts: TemplateFacts
    grammar: TurnGrammar
    verdicts: tuple[Verdict, ...]
    switches: tuple[SettingAudit, ...]
    """Settings that change the text of a probe."""
    without_effect: tuple[str, ...]
    """Settings that do not."""
    bridging: Bridging
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

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
    def judged(self) -> list[AppendCell]:
        """The cells that verdicts count."""
        return judged(self.cells, self.facts)

    def outcome(self, append: Append) -> Grade | None:
        """Grade an append; None if the template refuses it."""
        return grade([cell for cell in self.judged if cell.append is append])

    @property
    def grades(self) -> list[Grade | None]:
        """The grade of each append and each use."""
        return [*map(self.outcome, Append), *(one.grade for one in self.verdicts)]

    @property
    def findings(self) -> list[AppendFinding]:
        """Everything that does not hold, once for each cause."""
        return find_flaws({append: [cell for cell in self.judged if cell.append is append] for append in Append}, FLAWS)

    @property
    def conclusion(self) -> Conclusion:
        """The conclusion in one line, and the commands to type."""
        return conclude(self)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for ``json.dumps``."""
        fields = dataclasses.asdict(replace(self, tokenizer=None))
        del fields["tokenizer"]
        return {"conclusion": dataclasses.asdict(self.conclusion), **fields}

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
                Table("What else is known", ["", " "], [list(row) for row in self._fact_rows()], words=2),
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
        for name, value in dataclasses.asdict(self.grammar).items():
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
        counting = {cell.turn for cell in self.judged}
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
        for name in (one.name for one in dataclasses.fields(self.facts)):
            yield name.replace("_", " "), _words(getattr(self.facts, name))
        calls = f": {self.grammar.calls.outline}" if self.grammar.calls is not None else ""
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
    for one in finding.breaks:
        yield from _break_rows(one)
    yield ["", Cell("the smallest conversation that shows it:", "dim")]
    cell = finding.smallest
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
