"""Rows that hold ids already: which column holds what, and what is wrong in itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError, kind_of
from ...samples.sample import IGNORE
from ...tokens.tokenizer import Ids
from ..conversations import COMPLETIONS, MESSAGES, Columns
from ..trainers import ATTENTION

Mask = npt.NDArray[np.bool_]

IDS: Final = ("input_ids", "token_ids", "ids", "tokens")
MASKS: Final = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "mask")
LABELS: Final = "labels"


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Where a row holds its ids and what is trained. None: found out by the names that trainers use.

    `mask` may name a column of 0 and 1 (or booleans) or one of labels; labels are told by their values.
    """

    ids: str | None = None
    mask: str | None = None


FOUND_OUT: Final = RowColumns()
"""No column is named."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyRow:
    """What a row holds, padding taken off where an attention mask says what is padding."""

    ids: Ids
    mask: Mask | None
    """True where a token is trained; None where the row does not say."""
    start: int = 0
    """How many tokens of padding stood before `ids`."""
    padding: int = 0
    """How many tokens of padding are off, before and after."""
    trained_padding: tuple[int, ...] = ()
    """The positions in the given row of padding that was trained."""
    attended: bool = False
    """Whether an attention mask said what is padding."""
    rest: Mapping[str, Any] | None = None
    """The other columns."""

    def cut(self, start: int, stop: int) -> ReadyRow:
        """Without the padding before `start` and from `stop` on."""
        mask = None if self.mask is None else self.mask[start:stop]
        padding = self.padding + start + len(self.ids) - stop
        return replace(self, ids=self.ids[start:stop], mask=mask, start=self.start + start, padding=padding)


def ready_row(value: Any, columns: RowColumns = FOUND_OUT) -> ReadyRow:
    """What a row holds, or InputError naming the column and what is wrong with it.

    Refused are ids that are not token ids; masks, labels and attention masks of another length than the ids; masks of
    other values than 0 and 1; labels that are neither -100 nor the id at their place, or contradict the mask beside
    them; and attention masks with a hole.
    """
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    name = _column(value, columns.ids, IDS)
    if name is None:
        names = ", ".join(str(column)[:80] for column in list(value)[:8]) or "no columns"
        raise InputError(f"the row holds no ids; it has {names}; looked for: {', '.join(IDS)}")
    ids = _ids(value[name], name)
    used = {name, LABELS, ATTENTION, *MASKS, *((columns.mask,) if columns.mask is not None else ())}
    rest = {key: inner for key, inner in value.items() if key not in used}
    row = ReadyRow(ids, _trained(value, columns, ids), rest=rest)
    return _attended(row, value[ATTENTION]) if value.get(ATTENTION) is not None else row


def has_conversation(rest: Mapping[str, Any], columns: Columns) -> bool:
    """Whether a row's other columns hold a conversation, be it a good one or not."""
    named = [name for name in (columns.messages, columns.prompt, columns.completion) if name is not None]
    if named:
        return any(rest.get(name) is not None for name in named)
    there = {name for name, value in rest.items() if value is not None}
    return bool(there & set(MESSAGES)) or ("prompt" in there and bool(there & set(COMPLETIONS)))


def _column(row: Mapping[str, Any], named: str | None, usual: tuple[str, ...]) -> str | None:
    if named is not None:
        if row.get(named) is None:
            raise InputError("the row has no such column, or nothing in it", field=named)
        return named
    return next((name for name in usual if row.get(name) is not None), None)


def _numbers(value: Any, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError("must be one list of numbers", field=name) from None
    if array.ndim == 1 and not len(array):
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iubf":
        what = "is a list of lists" if array.ndim > 1 else "holds a value that is not a number"
        raise InputError(f"must be one list of numbers, and {what}", field=name)
    return array


def _ids(value: Any, name: str) -> Ids:
    array = _numbers(value, name)
    if not len(array):
        raise InputError("holds no ids", field=name)
    if array.dtype.kind not in "iu":
        raise InputError("holds a value that is not a token id", field=name)
    if int(array.max()) >= 2**31 or int(array.min()) < -(2**31):
        raise InputError("holds a number too large for a token id", field=name)
    return array.astype(np.int32)


def _per_token(value: Any, name: str, size: int) -> npt.NDArray[Any]:
    array = _numbers(value, name)
    if len(array) != size:
        raise InputError(f"has {len(array):,} entries, and there are {size:,} ids", field=name)
    return array


def _trained(row: Mapping[str, Any], columns: RowColumns, ids: Ids) -> Mask | None:
    name = _column(row, columns.mask, MASKS)
    mask = None
    if name is not None:
        array = _per_token(row[name], name, len(ids))
        if columns.mask is not None and array.dtype.kind in "iu" and (array == IGNORE).any():
            return _labelled(array, name, ids)
        wrong = np.flatnonzero((array != 0) & (array != 1))
        if len(wrong):
            at = int(wrong[0])
            raise InputError(f"must hold 0 and 1, and holds {array[at]} at token {at}", field=name)
        mask = array.astype(np.bool_)
    if columns.mask is not None or row.get(LABELS) is None:
        return mask
    labelled = _labelled(_per_token(row[LABELS], LABELS, len(ids)), LABELS, ids)
    if mask is None or np.array_equal(mask, labelled):
        return labelled
    at = int(np.flatnonzero(mask != labelled)[0])
    raise InputError(f"and {name} do not say the same: the first at token {at}", field=LABELS)


def _labelled(labels: npt.NDArray[Any], name: str, ids: Ids) -> Mask:
    trained: Mask = labels != IGNORE
    wrong = np.flatnonzero(trained & (labels != ids))
    if not len(wrong):
        return trained
    at = int(wrong[0])
    said = f"the label at token {at} is {labels[at]}, neither {IGNORE} nor the id {ids[at]} at this place"
    if np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]]):
        said += "; all labels are those of the next token: models shift them on their own"
    raise InputError(said, field=name)


def _attended(row: ReadyRow, value: Any) -> ReadyRow:
    """A row without what its attention mask leaves out."""
    attention = _per_token(value, ATTENTION, len(row.ids)) != 0
    seen = np.flatnonzero(attention)
    if not len(seen):
        raise InputError("leaves out every token", field=ATTENTION)
    start, stop = int(seen[0]), int(seen[-1]) + 1
    if len(seen) != stop - start:
        hole = start + int(np.flatnonzero(~attention[start:stop])[0])
        raise InputError(
            f"has a hole at token {hole}: padding comes before and after a row, not inside", field=ATTENTION
        )
    trained = () if row.mask is None else tuple(np.flatnonzero(row.mask & ~attention).tolist())
    return replace(row.cut(start, stop), trained_padding=trained, attended=True)


def without_padding(row: ReadyRow, pad: int | None, expected: Ids) -> ReadyRow:
    """A row without runs of the pad token at its ends that are not trained and that the expected row has not."""
    if row.attended or pad is None:
        return row
    pads = row.ids == pad
    idle = pads if row.mask is None else pads & ~row.mask
    wanted = expected == pad
    start = max(0, min(_run(idle), _run(pads) - _run(wanted)))
    off = max(0, min(_run(idle[::-1]), _run(pads[::-1]) - _run(wanted[::-1])))
    stop = len(row.ids) - off
    return row.cut(start, stop) if start < stop and (start or stop < len(row.ids)) else row


def _run(flags: Mask) -> int:
    """How many are True at the beginning."""
    return len(flags) if flags.all() else int(flags.argmin())
