"""AuditReport: what is known of one tokenizer and template, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..show.document import Document
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .appends import AppendBreak, AppendCell, AppendOutcome
from .cases import Append
from .conclusion import Conclusion, conclude
from .facts import Forging, Prompting, Reading, Stops
from .field_texts import Altered
from .readback import Writing
from .remedies import Remedies
from .running import Cost, Defaults
from .verdicts import Grade, Use, Verdict, cause, judged, plain, sentence, which_turns


@dataclass(frozen=True, slots=True)
class SettingAudit:
    """What one setting of the template changes: None where the template refuses everything with it."""

    setting: Mapping[str, Any]
    cells: tuple[AppendCell, ...] | None
    prompting: Prompting | None
    verdicts: tuple[Verdict, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.setting.items())


@dataclass(frozen=True, slots=True)
class AuditReport(ShowsItself):
    """A template certified: what it does to the past, what else is known of it, and a verdict for each use."""

    name: str
    family: str
    digest: str
    settings: Mapping[str, Any]
    cells: tuple[AppendCell, ...]
    switches: tuple[SettingAudit, ...]
    without_effect: tuple[str, ...]
    """Settings that change nothing that was looked at."""
    stops: Stops
    prompting: Prompting
    forging: Forging
    reading: Reading
    writing: Writing
    altered: tuple[Altered, ...]
    """Fields of messages that do not arrive as they were given."""
    defaults: Defaults
    cost: Cost
    remedies: Remedies
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)

    def document(self, _: Any = None) -> Document:
        """Return the report as a document."""
        from .audit_document import audit_document

        return audit_document([self])

    def verdict(self, use: str) -> Verdict:
        """The verdict on a use, by its name."""
        return next(verdict for verdict in self.verdicts if verdict.use == Use(use))

    def unmet(self, uses: Iterable[str], *, partly: bool = False) -> list[Verdict]:
        """The verdicts on these uses that do not hold; with `partly`, those that fail altogether."""
        good = {Grade.HOLDS, Grade.PARTLY} if partly else {Grade.HOLDS}
        return [one for use in uses if (one := self.verdict(use)).grade not in good]

    def outcome(self, append: Append) -> Grade | None:
        """What becomes of an append over all turns that verdicts are about; None where the template refuses it."""
        return grade([cell for cell in self.judged if cell.append is append])

    @property
    def judged(self) -> list[AppendCell]:
        """The cells that the verdicts are about."""
        return judged(self.cells, self.reading, self.prompting)

    @property
    def findings(self) -> list[AppendFinding]:
        """All that does not hold, cells that go wrong in the same way together, each with its smallest conversation."""
        found: dict[str, list[AppendCell]] = {}
        for cell in self.judged:
            if cell.outcome is not AppendOutcome.HOLDS:
                found.setdefault(cause(cell), []).append(cell)
        made = []
        for why, cells in found.items():
            appends = {cell.append for cell in cells}
            turns = which_turns(cells, [cell for cell in self.judged if cell.append in appends])
            made.append(
                AppendFinding(sentence(list(dict.fromkeys(cell.append for cell in cells)), turns, why), tuple(cells))
            )
        return made

    @property
    def conclusion(self) -> Conclusion:
        """What it comes to, in one line, and the commands to type."""
        return conclude(self)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data that ``json.dumps`` takes."""
        fields = {
            one.name: _plain(getattr(self, one.name))
            for one in dataclasses.fields(self)
            if one.name not in ("cells", "switches", "tokenizer")
        }
        switches = [
            {
                "setting": dict(one.setting),
                "refused": one.cells is None,
                "prompting": _plain(one.prompting),
                "verdicts": {verdict.use: verdict.grade for verdict in one.verdicts},
                "cells": [_cell(cell) for cell in one.cells or ()],
            }
            for one in self.switches
        ]
        return {
            "conclusion": _plain(self.conclusion),
            **fields,
            "cells": [_cell(cell) for cell in self.cells],
            "switches": switches,
        }

    def __repr__(self) -> str:
        return f"AuditReport({self.name!r}, {', '.join(f'{one.use}: {one.grade}' for one in self.verdicts)})"


@dataclass(frozen=True, slots=True)
class AppendFinding:
    """One way in which appends go wrong."""

    why: str
    cells: tuple[AppendCell, ...]

    @property
    def smallest(self) -> AppendCell:
        """The smallest conversation that shows it."""
        return min(self.cells, key=lambda cell: (len(cell.messages), len(str(cell.messages))))

    @property
    def breaks(self) -> Sequence[AppendBreak]:
        return self.smallest.breaks


def grade(cells: Sequence[AppendCell]) -> Grade | None:
    """What becomes of some turns: holds, partly or fails; None where the template refuses them after every past."""
    if all(cell.outcome is AppendOutcome.REFUSED and not cell.elsewhere for cell in cells):
        return None
    if all(cell.outcome is AppendOutcome.HOLDS for cell in cells):
        return Grade.HOLDS
    some = any(
        cell.outcome is AppendOutcome.HOLDS or (cell.outcome is AppendOutcome.REFUSED and cell.elsewhere)
        for cell in plain(cells)
    )
    return Grade.PARTLY if some else Grade.FAILS


def _cell(cell: AppendCell) -> dict[str, Any]:
    return {
        **_plain(cell.turn),
        "outcome": str(cell.outcome),
        "messages": _plain(cell.messages),
        "appended": len(cell.case.appended),
        "tools": cell.case.tools,
        "breaks": _plain(cell.breaks),
        "lost": list(cell.lost),
        "lost_after": list(cell.lost_after),
        "reason": cell.reason,
        "ends": cell.ends,
        "also": [_cell(one) for one in cell.also],
    }


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
