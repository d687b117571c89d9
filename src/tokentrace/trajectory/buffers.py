"""What grows at its end: arrays whose views never change, and the JSON text of a stream."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids

Scalar = TypeVar("Scalar", np.int32, np.uint8, np.float32)

_AT_ONCE: Final = 65536
"""How many ids are turned into text at a time."""
_FEW: Final = 64
"""So many ids are written one by one; more are put together of thousands and the rest."""
_THOUSANDS: Final = np.array([",", *(f",{n}" for n in range(1, 1000))], "S8").view("<u8")
_RESTS: Final = np.array([f"\0\0\0\0{n}" for n in range(1000)] + [f"\0\0\0\0{n:03}" for n in range(1000)], "S8").view(
    "<u8"
)
"""A number below 1000 as it stands alone, and as it stands after thousands: three digits."""


class Buffer(Generic[Scalar]):
    """Values of one dtype, or rows of `width` of them, that are only ever added to.

    A full buffer moves to a new array that is one sixteenth larger, never to a resized one: a view handed out
    earlier keeps the array it was cut from and reads what it read. Views are read-only, and cannot be made
    writable.
    """

    __slots__ = ("_array", "_frozen", "_length")

    def __init__(self, dtype: type[Scalar], width: int = 0) -> None:
        self._array: npt.NDArray[Scalar] = np.empty((0, width) if width else 0, dtype)
        self._frozen: npt.NDArray[Scalar] = _read_only(self._array)
        self._length = 0

    def reserve(self, extra: int) -> None:
        """Make room, so that the next `push` of up to `extra` values cannot fail."""
        needed = self._length + extra
        capacity = len(self._array)
        if needed <= capacity:
            return
        # The slack is what memory a token costs beyond its own bytes: 9 * 17/16 < 10.
        roomier = capacity + capacity // 16 + 16 if capacity else 0
        array: npt.NDArray[Scalar] = np.empty((max(needed, roomier), *self._array.shape[1:]), self._array.dtype)
        array[: self._length] = self._array[: self._length]
        self._array, self._frozen = array, _read_only(array)

    def push(self, values: npt.ArrayLike, count: int) -> None:
        """Add `count` values."""
        stop = self._length + count
        if stop > len(self._array):
            self.reserve(count)
        self._array[self._length : stop] = values
        self._length = stop

    def extend(self, values: npt.NDArray[Scalar]) -> None:
        self.push(values, len(values))

    def view(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Scalar]:
        """Values `start` to `stop`, read-only, not copied."""
        return self._frozen[start : self._length if stop is None else min(stop, self._length)]

    @property
    def nbytes(self) -> int:
        """The memory of the array, its slack included."""
        return self._array.nbytes

    def __len__(self) -> int:
        return self._length


def _read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    # Over a read-only buffer, since `flags.writeable` of a plain view can be set back by whoever holds it.
    return np.asarray(array.data.toreadonly())


def _joined(ids: Ids) -> bytes:
    """Each id in decimal, with a comma before it."""
    if len(ids) <= _FEW or np.maximum.reduce(ids.view(np.uint32)) >= 1_000_000:
        return f",{repr(ids.tolist())[1:-1]}".replace(" ", "").encode("ascii")  # in C, unlike a join
    thousands, rests = np.divmod(ids, 1000)
    np.add(rests, 1000, out=rests, where=thousands > 0)
    written: bytes = (_THOUSANDS.take(thousands) | _RESTS.take(rests)).tobytes()
    return written.translate(None, b"\0")


class WireText:
    """The text of a JSON array of ids that grows at its end.

    It is kept in pieces, so that adding ids costs what is new. A piece is joined with the one before it once it has
    half of that one's size: there are never more than some twenty, and each byte is copied about as often.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = [b"["]
        self._count = 0

    def extend(self, ids: Ids) -> None:
        """Add what comes next."""
        for start in range(0, len(ids), _AT_ONCE):
            self._add(ids[start : start + _AT_ONCE])

    def _add(self, ids: Ids) -> None:
        text = _joined(ids)
        fresh = [text if self._count else text[1:]]
        size = len(fresh[0])
        while self._parts and len(self._parts[-1]) < 2 * size:
            fresh.append(self._parts.pop())
            size += len(fresh[-1])
        self._parts.append(b"".join(fresh[::-1]))
        self._count += len(ids)

    @property
    def parts(self) -> tuple[bytes, ...]:
        """Pieces of text that joined are the array."""
        return (*self._parts, b"]")

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._parts))

    def __len__(self) -> int:
        """How many ids are in it."""
        return self._count
