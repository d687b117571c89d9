"""Buffer: an array that grows at its end, and whose views never change."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", np.int32, np.uint8, np.float32)


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
