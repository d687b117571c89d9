"""Checks token ids from outside, and compares arrays of them."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError, TokentraceError, brief
from .tokenizer import Ids

Error = type[TokentraceError]
INT32_MAX = 2**31 - 1


def check_ids(
    value: Any, name: str, *, vocab_size: int | None = None, error: Error = InputError, first: int = 0
) -> Ids:
    """A sequence of token ids as int32. Errors name the wrong entry, counted from `first`."""
    ids = check_integers(value, name, error, first)
    if not len(ids):
        return np.zeros(0, np.int32)
    limit, is_int32 = INT32_MAX if vocab_size is None else vocab_size - 1, ids.dtype == np.int32
    unsigned = ids.view(np.uint32) if is_int32 else ids  # a negative int32 becomes a large one
    if int(np.maximum.reduce(unsigned)) > limit or not (is_int32 or int(ids.min()) >= 0):
        where = int(((ids < 0) | (ids > limit)).argmax())
        bound = "ids are 0 to 2**31 - 1" if vocab_size is None else f"the vocabulary has {vocab_size} ids"
        raise _error(error, name, f"is {int(ids[where])}, which is not a token id: {bound}", first + where)
    return ids if is_int32 else ids.astype(np.int32)


def check_sampled(value: Any, name: str, vocab_size: int) -> Ids:
    """Ids that a model may have sampled: an embedding may be padded, not to twice its size."""
    ids = check_ids(value, name)
    return ids if ids.max(initial=0) < 2 * vocab_size else check_ids(ids, name, vocab_size=vocab_size)


def _kind(value: Any) -> str:
    return f"{type(value).__name__}{'; pass its .ids' if hasattr(value, 'ids') else ''}"


def check_last(ids: Any, name: str, count: int) -> Ids:
    """The last `count` ids, checked, as int32."""
    if not isinstance(ids, (np.ndarray, Sequence)) or getattr(ids, "ndim", 1) == 0:
        raise InputError(f"must be a list of token ids, not {_kind(ids)}", field=name)
    first = max(len(ids) - count, 0)
    return check_ids(ids[first:], name, first=first)


def check_integers(value: Any, name: str, error: Error = InputError, first: int = 0) -> npt.NDArray[Any]:
    """A sequence of integers as an array; arrays stay as they are. Errors count from `first`."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        if isinstance(value, (str, bytes)) or not (
            isinstance(value, Sequence) or hasattr(value, "__array__")
        ):
            raise _error(error, name, f"must be a list of token ids or an array, not {_kind(value)}")
        value = np.asarray(value) if hasattr(value, "__array__") else list(value)
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or (len(value) and value.dtype.kind not in "iu"):
            what = f"{value.dtype} of shape {value.shape}"
            raise _error(error, name, f"must be a flat array of integers, not {what}")
        return value
    for kind in {*map(type, value)} - {int}:
        if not issubclass(kind, int | np.integer) or issubclass(kind, bool | np.timedelta64):
            where = next(at for at, item in enumerate(value) if type(item) is kind)
            raise _error(
                error, name, f"is {brief(value[where])}; pass a list of integer token ids", first + where
            )
    try:
        return np.fromiter(value, np.int64, len(value))
    except OverflowError:
        where = next(at for at, item in enumerate(value) if not -(2**63) <= int(item) < 2**63)
        problem = f"is {brief(value[where])}, larger than any token id"
        raise _error(error, name, problem, first + where) from None


def _error(error: Error, name: str, problem: str, where: int | None = None) -> TokentraceError:
    if error is InputError:
        return InputError(problem if where is None else f"entry {where} {problem}", field=name)
    return error(f"{name if where is None else f'{name}[{where}]'} {problem}")


def segments(*columns: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """The stretches in which no column changes. All columns have the same length.

    >>> segments(np.asarray([5, 5, 7]), np.asarray([0, 1, 1]))
    [(0, 1), (1, 2), (2, 3)]
    """
    changes = functools.reduce(np.logical_or, (column[1:] != column[:-1] for column in columns))
    ends = [*(changes.nonzero()[0] + 1).tolist(), len(columns[0])]
    return list(zip([0, *ends], ends, strict=False)) if ends[-1] else []


def runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The stretches in which a mask is True.

    >>> runs(np.asarray([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many leading items two arrays share. Reads little more than these."""
    size = min(len(one), len(other))
    step, at = 64, 0
    while at < size:
        stop = min(at + step, size)
        differs = one[at:stop] != other[at:stop]
        if differs.any():
            return at + int(differs.argmax())
        at, step = stop, step * 4
    return size


def common_suffix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    return common_prefix(one[::-1], other[::-1])
