"""Rows that hold ids already: their columns, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..data.conversations import COMPLETIONS, MESSAGES, Columns
from ..data.trainers import ATTENTION
from ..errors import InputError, kind_of
from ..samples.sample import IGNORE
from ..tokens.ids import check_ids, check_integers
from ..tokens.tokenizer import Ids
from .finding import Finding
from .records import IDS, MASKS, Mask, Place, first_of, read_row_mask


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of ids and mask; None uses the first name that trainers use. `mask` may name labels."""

    ids: str | None = None
    mask: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IdsRow:
    """A row without padding. `mask` is None if the row does not say what is trained.

    `start` tokens of padding came before it, `padding` before and after it, some of them trained
    (`trained_padding`). `columns` are the other ones.
    """

    ids: Ids
    mask: Mask | None
    start: int = 0
    padding: int = 0
    trained_padding: tuple[int, ...] = ()
    attended: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> IdsRow:
        """The row without the padding before `start` and from `stop` on."""
        mask = None if self.mask is None else self.mask[start:stop]
        padding = self.padding + start + len(self.ids) - stop
        return replace(self, ids=self.ids[start:stop], mask=mask, start=self.start + start, padding=padding)

    def without_padding(self, pad: int | None, expected: Ids) -> IdsRow:
        """The row without untrained runs of the pad token at its ends that the expected row lacks."""
        if self.attended or pad is None:
            return self
        pads, theirs = self.ids == pad, expected == pad
        idle = pads if self.mask is None else pads & ~self.mask
        start = max(0, min(_run(idle), _run(pads) - _run(theirs)))
        end = max(0, min(_run(idle[::-1]), _run(pads[::-1]) - _run(theirs[::-1])))
        stop = len(self.ids) - end
        return self.cut(start, stop) if start < stop else self


def read_ids_row(value: Any, columns: RowColumns) -> IdsRow:
    """A row of ids. Raises InputError, with the column, for anything that does not fit the ids."""
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    for name in (columns.ids, columns.mask):
        if name is not None and value.get(name) is None:
            raise InputError("the row has no such column, or nothing in it", field=name)
    name = columns.ids or first_of(value, IDS)
    if name is None:
        names = ", ".join(str(column)[:80] for column in list(value)[:8]) or "no columns"
        raise InputError(f"the row holds no ids; it has {names}; searched: {', '.join(IDS)}")
    ids = check_ids(value[name], name)
    if not len(ids):
        raise InputError("holds no ids", field=name)
    used = {name, "labels", ATTENTION, *MASKS, columns.mask}
    row = IdsRow(ids, _mask(value, columns.mask, ids), columns={key: value[key] for key in value if key not in used})
    if value.get(ATTENTION) is None:
        return row
    attention = check_integers(value[ATTENTION], ATTENTION) != 0
    present = np.flatnonzero(attention)
    if len(attention) != len(ids) or not len(present):
        raise InputError(f"has {len(attention):,} entries for {len(ids):,} ids, or only zeros", field=ATTENTION)
    start, stop = int(present[0]), int(present[-1]) + 1
    if len(present) != stop - start:
        raise InputError("has a hole: padding comes before and after a row", field=ATTENTION)
    trained = () if row.mask is None else tuple(np.flatnonzero(row.mask & ~attention).tolist())
    return replace(row.cut(start, stop), trained_padding=trained, attended=True)


def _mask(value: Mapping[str, Any], named: str | None, ids: Ids) -> Mask | None:
    """What a row trains, by its mask or its labels; None if it has neither."""
    if named is not None:
        labels = isinstance(value[named], (list, np.ndarray)) and IGNORE in value[named]
        value = {"labels" if labels else "mask": value[named]}
    if first_of(value, (*MASKS, "labels")) is None:
        return None
    findings: list[Finding] = []
    mask = read_row_mask(value, Place("the row"), ids, 0, findings)
    if findings:
        raise InputError(findings[0].words, field=findings[0].where.rpartition(", ")[2])
    return mask


def has_conversation(row: Mapping[str, Any], columns: Columns = Columns()) -> bool:  # noqa: B008 (frozen)
    """True if a row's columns hold a conversation, valid or not."""
    named = [name for name in (columns.messages, columns.prompt, columns.completion) if name is not None]
    present = {name for name, value in row.items() if value is not None}
    if named:
        return bool(present.intersection(named))
    return bool(present.intersection(MESSAGES)) or ("prompt" in present and bool(present.intersection(COMPLETIONS)))


def _run(flags: Mask) -> int:
    """How many are True at the beginning."""
    return len(flags) if flags.all() else int(flags.argmin())
