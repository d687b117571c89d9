"""WireText: ids as JSON text, kept in pieces so that a longer stream costs what it is longer by."""

from __future__ import annotations

from ..tokens.tokenizer import Ids

_AT_ONCE = 65536


class WireText:
    """The text of a JSON array of ids that grows at its end.

    Pieces are joined with those before them once they have grown to half of their size, so that there are never
    more than some twenty, and each byte is copied about as often as there are pieces.
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
