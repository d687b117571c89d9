"""What a check came to: an outcome for every row, counts, and a few examples of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from ...diagnose.finding import Cause
from ...show.document import Document
from ...showing import ShowsItself
from .deviations import Deviation
from .masks import MaskDifference, difference_words

EXAMPLES: Final = 5
"""Rows that are kept of each outcome."""


class Outcome(StrEnum):
    """What became of a row. The value is its name for people."""

    SAME = "same"
    IDS = "ids differ"
    MASK = "mask differs"
    BOTH = "ids and mask differ"
    CUT = "cut"
    """A proper part of the expected row, its beginning or its end, with the mask that belongs to it."""
    UNCHECKED = "unchecked"
    """There is no conversation to compare it with; nothing is wrong with it as far as can be told without one."""
    BAD = "bad"
    """It cannot be read, contradicts itself, or its conversation gives no row."""


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What became of one row. A row is named by its file and its number, counted from 1."""

    source: str
    row: int
    line: int | None
    outcome: Outcome = Outcome.SAME
    reason: str | None = None
    """Why it is bad, or unchecked; other remarks."""
    deviations: tuple[Deviation, ...] = ()
    """Where its ids differ, the first few places."""
    mask: tuple[MaskDifference, ...] = ()
    shifted: int = 0
    """By how many tokens its mask is moved, where that is all that is wrong with it."""
    tokens: int = 0
    trained: int | None = None
    """How many of its tokens are trained; None where it does not say."""
    expected_tokens: int | None = None
    expected_trained: int | None = None
    padding: int = 0

    @property
    def causes(self) -> list[Cause]:
        """Why it differs, each cause once."""
        shifted = [Cause.MASK_SHIFTED] if self.shifted else []
        return list(dict.fromkeys([*(found.cause for found in self.deviations), *shifted]))

    @property
    def position(self) -> int | None:
        """The first token at which ids or mask differ, in the row as it is given."""
        places = [*(found.position for found in self.deviations), *(found.position for found in self.mask)]
        return min(places, default=None)

    def to_json(self) -> dict[str, Any]:
        known = {
            name: getattr(self, name)
            for name in ("source", "row", "line", "reason", "tokens", "trained", "expected_tokens", "expected_trained")
        }
        out: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        out |= {"outcome": str(self.outcome), "position": self.position, "padding": self.padding}
        out["deviations"] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(found).items()}
            for found in self.deviations
        ]
        out["mask"] = [{**asdict(found), "words": str(found)} for found in self.mask]
        return out


@dataclass(slots=True)
class MaskCount:
    """Tokens of one role and part whose mask is wrong, over all rows."""

    tokens: int = 0
    messages: int = 0
    rows: int = 0


@dataclass(slots=True)
class CheckReport(ShowsItself):
    """Counts over all rows, and the first few rows of each outcome."""

    settings: dict[str, Any] = field(default_factory=dict)
    """What the rows were compared with: tokenizer, template, settings."""
    findings: list[str] = field(default_factory=list)
    """What is to be said of the dataset as a whole: that it was made with another template, say."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    causes: Counter[Cause] = field(default_factory=Counter)
    """How many rows differ for each reason; a row may have several."""
    mask: dict[tuple[str, str, bool], MaskCount] = field(default_factory=dict)
    """Wrong masks by role, part, and whether the tokens are trained (and should not be)."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why rows are bad or unchecked, the most frequent few."""
    examples: dict[Outcome, list[CheckedRow]] = field(default_factory=dict)
    rows: int = 0
    masks: int = 0
    """Rows that say what is trained."""
    tokens: int = 0
    trained: int = 0
    expected_tokens: int = 0
    expected_trained: int = 0
    compared: int = 0
    """Rows that were compared with their conversation: those that `expected_tokens` counts."""
    padding: int = 0
    stopped: bool = False
    """Whether rows were left that a limit kept from being looked at."""

    def document(self, _: Any = None) -> Document:
        """Return the report as a document."""
        from .document import check_document

        return check_document(self)

    def add(self, row: CheckedRow) -> None:
        """Count a row."""
        self.rows += 1
        self.outcomes[row.outcome] += 1
        self.causes.update(row.causes)
        self.tokens += row.tokens
        self.padding += row.padding
        if row.trained is not None:
            self.masks += 1
            self.trained += row.trained
        if row.expected_tokens is not None:
            self.compared += 1
            self.expected_tokens += row.expected_tokens
            self.expected_trained += row.expected_trained or 0
        for found in row.mask:
            count = self.mask.setdefault((found.role, found.part, found.trained), MaskCount())
            count.tokens += found.tokens
            count.messages += found.messages
            count.rows += 1
        if row.reason is not None and (row.reason in self.reasons or len(self.reasons) < 1000):
            self.reasons[row.reason] += 1
        kept = self.examples.setdefault(row.outcome, [])
        if len(kept) < EXAMPLES:
            kept.append(row)

    @property
    def differing(self) -> int:
        """Rows that are not as they should be: neither the same nor unchecked."""
        return self.rows - self.outcomes[Outcome.SAME] - self.outcomes[Outcome.UNCHECKED]

    @property
    def clean(self) -> bool:
        """Whether every row is the same as the one that its conversation gives."""
        return self.rows == self.outcomes[Outcome.SAME]

    @property
    def verdict(self) -> str:
        """What it came to, in a sentence."""
        unchecked = self.outcomes[Outcome.UNCHECKED]
        what = "ids and mask" if self.masks == self.rows else "ids (no mask is given)" if not self.masks else "ids"
        if not self.rows:
            return "there are no rows"
        if self.clean:
            return f"all {self.rows:,} rows are what the template gives: {what}"
        if not self.differing:
            same = f", {self.outcomes[Outcome.SAME]:,} are the same" if unchecked < self.rows else ""
            return f"{unchecked:,} of {self.rows:,} rows have no conversation to compare them with{same}"
        said = f"{self.differing:,} of {self.rows:,} rows are not what the template gives"
        return f"{said}, {unchecked:,} have no conversation to compare them with" if unchecked else said

    def ranked_masks(self) -> list[tuple[tuple[str, str, bool], MaskCount]]:
        """The mask differences, the most frequent first."""
        return sorted(self.mask.items(), key=lambda item: (-item[1].tokens, item[0]))

    def mask_words(self) -> list[str]:
        """The same in words."""
        return [difference_words(*key, count.tokens, count.messages) for key, count in self.ranked_masks()]

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        names = ("rows", "masks", "compared", "tokens", "trained", "expected_tokens", "expected_trained", "padding")
        return {
            "verdict": self.verdict,
            "clean": self.clean,
            **{name: getattr(self, name) for name in names},
            "stopped": self.stopped,
            "outcomes": {str(one): self.outcomes[one] for one in Outcome if self.outcomes[one]},
            "causes": {str(cause): count for cause, count in self.causes.most_common()},
            "mask": [
                {"role": role, "part": part, "trained": trained, **asdict(count)}
                for (role, part, trained), count in sorted(self.mask.items())
            ],
            "reasons": dict(self.reasons.most_common(20)),
            "findings": self.findings,
            "settings": self.settings,
            "examples": {str(one): [row.to_json() for row in rows] for one, rows in self.examples.items()},
        }
