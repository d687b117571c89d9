"""What grows at its end: arrays whose views never change, and the JSON text of a stream."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids

Scalar = TypeVar("Scalar", np.int32, np.uint8, np.float32)

_CHUNK: Final = 65536
"""How many ids become text at a time: bounds the memory of the conversion."""
_FEW: Final = 64
"""Up to so many ids are formatted by `repr`, more by table."""
_THOUSANDS: Final = np.array([",", *(f",{n}" for n in range(1, 1000))], "S8").view("<u8")
_UNITS: Final = np.array([f"\0\0\0\0{n}" for n in range(1000)] + [f"\0\0\0\0{n:03}" for n in range(1000)], "S8").view(
    "<u8"
)
"""The last three digits of a number below 1000, then of a larger one, which needs leading zeros."""


class Buffer(Generic[Scalar]):
    """Values of one dtype that are only ever appended.

    A full buffer moves to a new array that is one sixteenth larger. Views returned earlier keep the old array, so
    they never change. Views are read-only, and cannot be made writable.
    """

    __slots__ = ("_array", "_frozen", "_length")

    def __init__(self, dtype: type[Scalar]) -> None:
        self._array: npt.NDArray[Scalar] = np.empty(0, dtype)
        self._frozen: npt.NDArray[Scalar] = _read_only(self._array)
        self._length = 0

    def reserve(self, extra: int) -> None:
        """Make room, so that the next `push` of up to `extra` values cannot fail."""
        needed, capacity = self._length + extra, len(self._array)
        if needed <= capacity:
            return
        # A sixteenth keeps a sampled token below ten bytes: 9 * 17/16.
        larger = capacity + capacity // 16 + 16 if capacity else 0
        array: npt.NDArray[Scalar] = np.empty(max(needed, larger), self._array.dtype)
        array[: self._length] = self._array[: self._length]
        self._array, self._frozen = array, _read_only(array)

    def push(self, values: npt.ArrayLike, count: int) -> None:
        """Append `count` values; a single value is repeated."""
        self.reserve(count)
        stop = self._length + count
        self._array[self._length : stop] = values
        self._length = stop

    def extend(self, values: npt.NDArray[Scalar]) -> None:
        self.push(values, len(values))

    def view(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Scalar]:
        """Values `start` to `stop`, read-only, without a copy."""
        return self._frozen[start : self._length if stop is None else min(stop, self._length)]

    @property
    def nbytes(self) -> int:
        """The memory of the array, including room that is not used yet."""
        return self._array.nbytes

    def __len__(self) -> int:
        return self._length


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    # Over a read-only buffer: whoever holds a plain view could set `flags.writeable` back.
    return np.asarray(array.data.toreadonly())


class WireText:
    """The text of a JSON array of ids that grows at its end.

    The text is in pieces, so appending costs what is new. A piece is joined with the one before it once it has half
    of that one's size, so there are never more than some twenty pieces, and each byte is copied about as often.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = [b"["]
        self._count = 0

    def extend(self, ids: Ids) -> None:
        """Append ids."""
        for start in range(0, len(ids), _CHUNK):
            self._add(ids[start : start + _CHUNK])

    def _add(self, ids: Ids) -> None:
        text = _digits(ids)
        tail = [text if self._count else text[1:]]
        size = len(tail[0])
        while self._parts and len(self._parts[-1]) < 2 * size:
            tail.append(self._parts.pop())
            size += len(tail[-1])
        self._parts.append(b"".join(reversed(tail)))
        self._count += len(ids)

    @property
    def parts(self) -> tuple[bytes, ...]:
        """Pieces of text that make the array when joined."""
        return (*self._parts, b"]")

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._parts))

    def __len__(self) -> int:
        """How many ids it holds."""
        return self._count


def _digits(ids: Ids) -> bytes:
    """Each id in decimal, with a comma before it."""
    if len(ids) <= _FEW or np.maximum.reduce(ids.view(np.uint32)) >= 1_000_000:
        return f",{repr(ids.tolist())[1:-1]}".replace(" ", "").encode("ascii")  # in C, unlike a join
    thousands, units = np.divmod(ids, 1000)
    np.add(units, 1000, out=units, where=thousands > 0)
    text: bytes = (_THOUSANDS.take(thousands) | _UNITS.take(units)).tobytes()
    return text.translate(None, b"\0")
