"""AuditReport: everything known about one tokenizer and template, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..formats.dialects import dialect_of
from ..formats.grammar import TurnGrammar
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .appends import AppendBreak, AppendCell, AppendOutcome
from .bridge_trials import Bridging
from .cases import Append
from .conclusion import Conclusion, conclude
from .facts import Changes, Prompting, Reading, Stops
from .field_texts import Altered
from .verdicts import Grade, Use, Verdict, cause, common_form, grade, judged, sentence

if TYPE_CHECKING:
    from ..show.document import Document


@dataclass(frozen=True, slots=True)
class SettingAudit:
    """The verdicts with one setting of the template; empty if the template refuses everything with it."""

    setting: Mapping[str, Any]
    cells: tuple[AppendCell, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.setting.items())


@dataclass(frozen=True, slots=True)
class AppendFinding:
    """One way in which appends go wrong, and the cells that show it."""

    why: str
    cells: tuple[AppendCell, ...]

    @property
    def smallest(self) -> AppendCell:
        """The cell with the smallest conversation."""
        return min(self.cells, key=lambda cell: (len(cell.messages), len(str(cell.messages))))

    @property
    def breaks(self) -> Sequence[AppendBreak]:
        return self.smallest.breaks


@dataclass(frozen=True, slots=True)
class AuditReport(ShowsItself):
    """The certificate of a template: what it does to the past, other facts, and a verdict for each use."""

    name: str
    family: str
    digest: str
    settings: Mapping[str, Any]
    cells: tuple[AppendCell, ...]
    switches: tuple[SettingAudit, ...]
    """Settings that change the text of a probe."""
    without_effect: tuple[str, ...]
    """Settings that do not."""
    stops: Stops
    prompting: Prompting
    forgeable: tuple[str, ...]
    """Control tokens of the scaffold that users can forge under transformers' own rendering."""
    reading: Reading
    grammar: TurnGrammar
    altered: tuple[Altered, ...]
    """Fields whose texts do not arrive unchanged."""
    system: str
    """The system prompt that the template adds."""
    changes: Changes
    bridging: Bridging
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def document(self, _: Any = None) -> Document:
        """Return the report as a document."""
        from .audit_document import audit_document

        return audit_document([self])

    @property
    def dialect(self) -> str | None:
        """The name of the dialect of calls, if it has one."""
        return dialect_of(self.grammar.calls, self.grammar.channels)

    def verdict(self, use: str) -> Verdict:
        """Return the verdict on a use."""
        return next(verdict for verdict in self.verdicts if verdict.use == Use(use))

    def unmet(self, uses: Iterable[str], *, partly: bool = False) -> list[Verdict]:
        """Return the verdicts on these uses that do not hold; with `partly`, those that fail."""
        good = {Grade.HOLDS, Grade.PARTLY} if partly else {Grade.HOLDS}
        return [one for use in uses if (one := self.verdict(use)).grade not in good]

    def outcome(self, append: Append) -> Grade | None:
        """Grade an append over all turns that verdicts count; None if the template refuses it."""
        return grade([cell for cell in self.judged if cell.append is append])

    @property
    def judged(self) -> list[AppendCell]:
        """The cells that verdicts count."""
        return judged(self.cells, self.reading, self.prompting)

    @property
    def findings(self) -> list[AppendFinding]:
        """Everything that does not hold; cells that go wrong in the same way are one finding."""
        causes: dict[str, list[AppendCell]] = {}
        for cell in self.judged:
            if cell.outcome is not AppendOutcome.HOLDS:
                causes.setdefault(cause(cell), []).append(cell)
        findings = []
        for why, cells in causes.items():
            appends = list(dict.fromkeys(cell.append for cell in cells))
            turns = common_form(cells, [cell for cell in self.judged if cell.append in appends])
            findings.append(AppendFinding(sentence(appends, turns, why), tuple(cells)))
        return findings

    @property
    def conclusion(self) -> Conclusion:
        """The conclusion in one line, and the commands to type."""
        return conclude(self)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for ``json.dumps``."""
        fields = dataclasses.asdict(dataclasses.replace(self, tokenizer=None))
        del fields["tokenizer"]
        return {"conclusion": dataclasses.asdict(self.conclusion), **fields}

    def differences(self, now: AuditReport) -> Iterator[tuple[str, str, str]]:
        """Yield what differs in another report: what it is, before and now. Lines of templates are not compared."""
        before, after = dict(self._statements()), dict(now._statements())
        for what in dict.fromkeys((*before, *after)):
            if before.get(what, "") != after.get(what, ""):
                yield what, before.get(what, ""), after.get(what, "")

    def _statements(self) -> Iterator[tuple[str, str]]:
        for verdict in self.verdicts:
            yield f"verdict on {verdict.use}", str(verdict.grade)
        for cell in self.cells:
            why = cell.reason or (cause(cell) if cell.lost else "")
            yield f"{cell.append} after {cell.turn.words}", f"{cell.outcome}: {why}" if why else str(cell.outcome)
        for name in ("stops", "prompting", "reading", "grammar", "changes"):
            for key, value in dataclasses.asdict(getattr(self, name)).items():
                yield f"{name}, {key}", str(value)
        yield "system prompt", self.system
        yield "forgeable control tokens", " ".join(self.forgeable)
        altered = (str(dataclasses.replace(one, line=None)) for one in self.altered)
        yield "texts that are not written as given", "; ".join(altered)
        for switch in self.switches:
            grades = ", ".join(f"{verdict.use} {verdict.grade}" for verdict in switch.verdicts)
            yield f"with {switch.name}", grades or "refused"

    def __repr__(self) -> str:
        return f"AuditReport({self.name!r}, {', '.join(f'{one.use}: {one.grade}' for one in self.verdicts)})"
