"""Stream: the ids of one branch in one growing array, and the same as JSON text."""

from __future__ import annotations

import msgspec
import numpy as np

from ..tokens.tokenizer import Ids


class Stream:
    """Ids that are only ever appended, with a cached JSON text of them.

    A full array moves to a larger one. Views that `ids` returned earlier keep the old array, so they never change.
    """

    __slots__ = ("_array", "_length", "_text", "_text_length", "branch")

    def __init__(self, branch: int = -1) -> None:
        self.branch = branch
        self._array: Ids = np.empty(0, np.int32)
        self._length = 0
        self._text: list[bytes] = []
        self._text_length = 0

    def copy(self) -> Stream:
        """A stream that grows on its own: its array has no room, so that it moves to another one first."""
        twin = Stream(self.branch)
        twin._array, twin._length = self._array[: self._length], self._length
        twin._text, twin._text_length = [*self._text], self._text_length
        return twin

    def extend(self, ids: Ids) -> None:
        """Append ids."""
        stop = self._length + len(ids)
        if stop > len(self._array):
            larger = np.empty(max(stop, self._length + self._length // 8 + 16), np.int32)
            larger[: self._length] = self._array[: self._length]
            self._array = larger
        self._array[self._length : stop] = ids
        self._length = stop

    @property
    def ids(self) -> Ids:
        """All ids, as a read-only view."""
        view = self._array[: self._length]
        view.flags.writeable = False
        return view

    def wire_parts(self) -> tuple[bytes, ...]:
        """The ids as JSON text, ``[1,2,3]``, in a few pieces. Encodes only what was added since the last call.

        A piece is joined with the one before it once it has half its size, so there are at most some twenty.
        """
        if self._text_length < self._length:
            added = msgspec.json.encode(self._array[self._text_length : self._length].tolist())[1:-1]
            text = b"," + added if self._text_length else added
            while self._text and len(self._text[-1]) < 2 * len(text):
                text = self._text.pop() + text
            self._text.append(text)
            self._text_length = self._length
        return (b"[", *self._text, b"]")

    def __len__(self) -> int:
        return self._length
