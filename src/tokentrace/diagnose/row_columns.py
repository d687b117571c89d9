"""Rows that hold ids already: which column holds what, without padding, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..data.conversations import COMPLETIONS, MESSAGES, Columns
from ..data.trainers import ATTENTION
from ..errors import InputError, kind_of
from ..samples.sample import IGNORE
from ..tokens.tokenizer import Ids
from .record_shapes import IDS
from .records import Mask

_MASKS: Final = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "mask")
_LABELS: Final = "labels"


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of ids and mask; None uses the first name that trainers use. `mask` may name labels."""

    ids: str | None = None
    mask: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IdsRow:
    """A row without padding. `mask` is None if the row does not say what is trained.

    `start` tokens of padding came before it, `padding` before and after it; `trained_padding` are the positions of
    padding that is trained. `columns` are the others.
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
        stop = len(self.ids) - max(0, min(_run(idle[::-1]), _run(pads[::-1]) - _run(theirs[::-1])))
        return self.cut(start, stop) if start < stop else self


def read_ids_row(value: Any, columns: RowColumns) -> IdsRow:
    """A row of ids.

    Raises InputError, with the column, for ids that are not token ids; for masks, labels and attention masks of another
    length; for masks other than 0 and 1; for labels that are neither -100 nor the id at their place, or contradict the
    mask; and for an attention mask with a hole.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    name = _column(value, columns.ids, IDS)
    if name is None:
        names = ", ".join(str(column)[:80] for column in list(value)[:8]) or "no columns"
        raise InputError(f"the row holds no ids; it has {names}; searched: {', '.join(IDS)}")
    ids = _read_ids(value[name], name)
    used = {name, _LABELS, ATTENTION, *_MASKS, columns.mask}
    others = {key: inner for key, inner in value.items() if key not in used}
    row = IdsRow(ids, _trained(value, columns, ids), columns=others)
    return row if value.get(ATTENTION) is None else _attended(row, value[ATTENTION])


def has_conversation(row: Mapping[str, Any], columns: Columns = Columns()) -> bool:  # noqa: B008 (frozen)
    """True if a row's columns hold a conversation, valid or not."""
    named = [name for name in (columns.messages, columns.prompt, columns.completion) if name is not None]
    present = {name for name, value in row.items() if value is not None}
    if named:
        return bool(present.intersection(named))
    return bool(present.intersection(MESSAGES)) or ("prompt" in present and bool(present.intersection(COMPLETIONS)))


def _column(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...]) -> str | None:
    if named is not None and row.get(named) is None:
        raise InputError("the row has no such column, or nothing in it", field=named)
    return named or next((name for name in usual if row.get(name) is not None), None)


def _numbers(value: Any, name: str, size: int | None = None) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError("must be one list of numbers", field=name) from None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iubf"):
        what = "is a list of lists" if array.ndim > 1 else "holds a value that is not a number"
        raise InputError(f"must be one list of numbers, and {what}", field=name)
    if size is not None and len(array) != size:
        raise InputError(f"has {len(array):,} entries, and there are {size:,} ids", field=name)
    return array


def _read_ids(value: Any, name: str) -> Ids:
    array = _numbers(value, name)
    if not len(array):
        raise InputError("holds no ids", field=name)
    if array.dtype.kind not in "iu":
        raise InputError("holds a value that is not a token id", field=name)
    if int(array.max()) >= 2**31 or int(array.min()) < -(2**31):
        raise InputError("holds a number too large for a token id", field=name)
    return array.astype(np.int32)


def _trained(row: Mapping[str, Any], columns: RowColumns, ids: Ids) -> Mask | None:
    name = _column(row, columns.mask, _MASKS)
    mask = None
    if name is not None:
        array = _numbers(row[name], name, len(ids))
        if columns.mask is not None and array.dtype.kind in "iu" and (array == IGNORE).any():
            return _labelled(array, name, ids)
        wrong = np.flatnonzero((array != 0) & (array != 1))
        if len(wrong):
            raise InputError(f"must hold 0 and 1, and holds {array[wrong[0]]} at token {wrong[0]}", field=name)
        mask = array.astype(np.bool_)
    if columns.mask is not None or row.get(_LABELS) is None:
        return mask
    labelled = _labelled(_numbers(row[_LABELS], _LABELS, len(ids)), _LABELS, ids)
    if mask is not None and not np.array_equal(mask, labelled):
        at = int(np.flatnonzero(mask != labelled)[0])
        raise InputError(f"contradict {name}: the first at token {at}", field=_LABELS)
    return labelled


def _labelled(labels: npt.NDArray[Any], name: str, ids: Ids) -> Mask:
    trained: Mask = labels != IGNORE
    wrong = np.flatnonzero(trained & (labels != ids))
    if not len(wrong):
        return trained
    at = int(wrong[0])
    words = f"the label at token {at} is {labels[at]}, neither {IGNORE} nor the id {ids[at]} at this place"
    if np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]]):
        words += "; all labels are those of the next token: models shift them on their own"
    raise InputError(words, field=name)


def _attended(row: IdsRow, value: Any) -> IdsRow:
    """A row without what its attention mask leaves out."""
    attention = _numbers(value, ATTENTION, len(row.ids)) != 0
    present = np.flatnonzero(attention)
    if not len(present):
        raise InputError("leaves out every token", field=ATTENTION)
    start, stop = int(present[0]), int(present[-1]) + 1
    if len(present) != stop - start:
        hole = start + int(np.flatnonzero(~attention[start:stop])[0])
        raise InputError(f"has a hole at token {hole}: padding comes before and after a row", field=ATTENTION)
    trained = () if row.mask is None else tuple(np.flatnonzero(row.mask & ~attention).tolist())
    return replace(row.cut(start, stop), trained_padding=trained, attended=True)


def _run(flags: Mask) -> int:
    """How many are True at the beginning."""
    return len(flags) if flags.all() else int(flags.argmin())
