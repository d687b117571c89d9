"""Side channels: more values for each sampled token, such as routed experts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TrajectoryError, brief
from ..tokens.ids import runs
from .checks import from_json

Entries = npt.NDArray[Any] | Sequence[Any]
"""One entry per token: an array with a row for each, or JSON values. None means no entry."""

MOST_BYTES = 1 << 28
"""The most bytes in one channel of one completion."""
_INTEGERS = tuple(map(np.dtype, ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8")))
_DTYPES = sorted([*(dtype.str for dtype in _INTEGERS), "<u8", "|b1", "<f2", "<f4", "<f8"])


@dataclass(frozen=True, slots=True)
class Packed:
    """A completion's channel of `count` entries: rows of `dtype` and `shape`, or compressed JSON."""

    count: int
    data: bytes
    dtype: str | None = None
    shape: tuple[int, ...] = ()

    def entries(self) -> Entries:
        """A read-only array or a new list. Raises ValueError for other bytes."""
        if self.dtype is not None:
            return np.frombuffer(self.data, self.dtype).reshape(self.count, *self.shape)
        reader = zlib.decompressobj()
        try:
            text = reader.decompress(self.data, MOST_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not reader.eof or reader.unused_data:
            raise ValueError("the compressed text does not end where it should")
        entries = from_json(text)
        if not isinstance(entries, list) or len(entries) != self.count or self.shape:
            raise ValueError("it must be a JSON array with that many entries")
        return entries

    def check(self, what: str) -> None:
        """Raise `TrajectoryError` unless the bytes hold `count` entries of this type and shape."""
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise TrajectoryError(f"{what} is of type {brief(self.dtype)}; it must be one of {_DTYPES}")
        try:
            entries = self.entries()
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"{what} does not hold {self.count} entries: {error}") from error
        if isinstance(entries, np.ndarray) and entries.dtype.kind == "f" and not np.isfinite(entries).all():
            raise TrajectoryError(f"{what} has NaN or infinity, which files of rows cannot hold: give None")


def pack_channels(channels: Mapping[str, Any], count: int) -> dict[str, Packed]:
    """Check and pack the channels of a completion of `count` tokens; without tokens it has none.

    Integers of one shape become the smallest array, finite arrays keep their type, others are JSON.
    """
    if not isinstance(channels, Mapping) or not all(isinstance(name, str) and name for name in channels):
        raise TrajectoryError(f"channels must map names to one entry for each token, not {brief(channels)}")
    return {name: _pack(values, count, f"channels[{name!r}]") for name, values in channels.items() if count}


def _pack(entries: Any, count: int, what: str) -> Packed:
    if isinstance(entries, Packed):
        entries.check(what)
        return entries
    is_scalar = isinstance(entries, np.ndarray) and not entries.ndim
    if is_scalar or not isinstance(entries, np.ndarray | list | tuple):
        raise TrajectoryError(f"{what} must be a list or an array of entries, not {brief(entries)}")
    if len(entries) != count:
        raise TrajectoryError(f"{what} has {len(entries)} entries for {count} tokens: give one for each")
    array = entries if isinstance(entries, np.ndarray) else _integers(entries)
    try:
        if array is None:
            data = json.dumps(_plain(entries), allow_nan=False, separators=(",", ":")).encode("ascii")
            packed = Packed(count, zlib.compress(data, 1))
        else:
            array = array.astype(array.dtype.newbyteorder("<"), copy=False)
            data = array.tobytes()
            packed = Packed(count, data, array.dtype.str, array.shape[1:])
    except (TypeError, ValueError, RecursionError) as error:
        raise TrajectoryError(f"{what} cannot be stored as JSON: {error}") from error
    if len(data) > MOST_BYTES:
        raise TrajectoryError(f"{what} takes {len(data)} bytes; a completion may have {MOST_BYTES}")
    if array is not None:
        packed.check(what)
    return packed


def _integers(entries: Sequence[Any]) -> npt.NDArray[Any] | None:
    try:
        array = np.array(entries)
    except Exception:  # lists of different lengths, and any error from objects that claim to be arrays
        return None
    if array.dtype.kind not in "iu" or not array.size or _has_bools(entries):
        return None
    low, high = int(array.min()), int(array.max())
    fitting = (dtype for dtype in _INTEGERS if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return next((array.astype(dtype) for dtype in fitting), None)


def _has_bools(entries: Any) -> bool:
    """True if there are bools, which numpy would make 1 and 0."""
    if isinstance(entries, np.ndarray):
        return bool(entries.dtype.kind == "b")
    if {bool, np.bool_} & set(map(type, entries)):
        return True
    return any(_has_bools(entry) for entry in entries if isinstance(entry, list | tuple | np.ndarray))


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("the keys of a mapping must be strings")
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """One side channel along a stream or a row, with entries for sampled tokens.

    `pieces` are runs of tokens with entries: where each run begins, and the entries of it.

    >>> channel = Channel(5, ((3, [[7, 8], [8, 9]]),))
    >>> channel.entries()
    [None, None, None, [7, 8], [8, 9]]
    >>> channel.array(fill=-1).tolist()
    [[-1, -1], [-1, -1], [-1, -1], [7, 8], [8, 9]]
    """

    length: int
    pieces: tuple[tuple[int, Entries], ...]

    def __post_init__(self) -> None:
        ends = [0]
        for start, entries in self.pieces:
            ends += [start, start + len(entries)]
        if any(after < before for before, after in pairwise([*ends, self.length])):
            law = f"in order, without overlap, within its {self.length} tokens"
            raise TrajectoryError(f"channel pieces must be {law}")

    @classmethod
    def of(cls, entries: Iterable[Any]) -> Channel:
        """A channel from one entry per token; None means no entry."""
        values = list(entries)
        present = np.array([value is not None for value in values], np.bool_)
        return cls(len(values), tuple((start, values[start:stop]) for start, stop in runs(present)))

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        mask = np.zeros(self.length, np.bool_)
        for start, entries in self.pieces:
            is_array = isinstance(entries, np.ndarray)
            mask[start : start + len(entries)] = is_array or [entry is not None for entry in entries]
        return mask

    def entries(self) -> list[Any]:
        """One entry per token; None where there is none."""
        out: list[Any] = [None] * self.length
        for start, entries in self.pieces:
            out[start : start + len(entries)] = (
                _plain(entries) if isinstance(entries, np.ndarray) else entries
            )
        return out

    def array(self, fill: float) -> npt.NDArray[Any]:
        """Entries as one array, with `fill` for none. Raises TrajectoryError if they fit none."""
        try:
            arrays = [
                (start + at, np.asarray(run))
                for start, values in self.pieces
                for at, run in (
                    [(0, values)] if isinstance(values, np.ndarray) else Channel.of(values).pieces
                )
            ]
            dtype = np.result_type(*(array.dtype for _, array in arrays)) if arrays else np.dtype(np.int64)
        except (ValueError, TypeError):
            dtype = np.dtype(object)
        shapes = {array.shape[1:] for _, array in arrays} if dtype.kind in "iufb" else set()
        if len(shapes) > 1 or dtype.kind not in "iufb":
            raise TrajectoryError("the entries of the channel are not numbers of one shape: use entries()")
        if dtype.kind in "iu" or (dtype.kind == "b" and fill not in (0, 1)):
            dtype = np.result_type(dtype, np.min_scalar_type(fill))
            if dtype.kind not in "iu":
                raise TrajectoryError(f"fill is {fill}: give a whole number, as the channel has only these")
        out = np.full((self.length, *next(iter(shapes), ())), fill, dtype)
        for start, array in arrays:
            out[start : start + len(array)] = array
        return out

    def slice(self, start: int, stop: int) -> Channel:
        pieces = []
        for first, entries in self.pieces:
            low, high = max(first, start), min(first + len(entries), stop)
            if low < high:
                pieces.append((low - start, entries[low - first : high - first]))
        return Channel(stop - start, tuple(pieces))

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Channel({sum(len(entries) for _, entries in self.pieces)} of {self.length} tokens)"
