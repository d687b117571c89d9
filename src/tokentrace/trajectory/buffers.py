"""What grows at its end: arrays whose views never change, and the JSON text of a stream."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids

Scalar = TypeVar("Scalar", np.int32, np.uint8, np.float32)

_AT_ONCE: Final = 65536
"""How many ids are turned into text at a time."""


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
        self.reserve(count)
        self._array[self._length : self._length + count] = values
        self._length += count

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
        text = repr(ids.tolist())[1:-1].replace(" ", "").encode("ascii")  # in C, unlike a join
        fresh = [b"," + text if self._count else text]
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
