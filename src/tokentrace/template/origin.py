"""Where a piece of text came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FieldPath = tuple[str | int, ...]
"""The path to a value inside a message: ``("tool_calls", 0, "id")``."""

KEY = "<key>"
"""The last element of the origin of a dict's key, as opposed to its value."""


class Origin(FieldPath):
    """Where text came from: a path such as ``("messages", 2, "content")``, equal to that plain tuple.

    Its `source` comes first: ``"messages"``, ``"tools"``, ``"kwargs"`` or ``"?"`` (unknown).

    >>> origin = Origin.of(2, "tool_calls", 0, "id")
    >>> origin.message, origin.path, origin.is_role, origin.source
    (2, ('tool_calls', 0, 'id'), False, 'messages')
    """

    __slots__ = ()

    @classmethod
    def of(cls, message: int, *path: str | int) -> Origin:
        return cls(("messages", message, *path))

    def at(self, *keys: Any) -> Origin:
        return Origin(self + keys)

    def renumbered(self, numbers: Sequence[int]) -> Origin:
        """The same place in a conversation where message i is number ``numbers[i]``."""
        return self if self.message is None else Origin.of(numbers[self.message], *self.path)

    @property
    def source(self) -> str:
        return self[0]  # type: ignore[return-value]

    @property
    def message(self) -> int | None:
        return self[1] if len(self) > 1 and self[0] == "messages" else None  # type: ignore[return-value]

    @property
    def path(self) -> FieldPath:
        return self[2:] if self[0] == "messages" else self[1:]

    @property
    def field(self) -> str | None:
        return self[2] if len(self) > 2 and self[0] == "messages" else None  # type: ignore[return-value]

    @property
    def is_role(self) -> bool:
        return len(self) == 3 and self[2] == "role" and self[0] == "messages"

    @property
    def is_key(self) -> bool:
        return self[-1] == KEY


class InTurn(Origin):
    """The origin of text that was written to a buffer (a set block, a macro) in a message's turn.

    It belongs to that turn wherever the template prints it. A `Rendering` has none.
    """

    __slots__ = ()

    @classmethod
    def within(cls, origin: Origin | None, turn: int) -> InTurn:
        return cls((*(_SCAFFOLD if origin is None else origin), "@turn", turn))

    @property
    def turn(self) -> int:
        return self[-1]  # type: ignore[return-value]

    @property
    def origin(self) -> Origin | None:
        return None if self[:-2] == _SCAFFOLD else Origin(self[:-2])


_SCAFFOLD = ("@scaffold",)
UNKNOWN = Origin(("?",))
