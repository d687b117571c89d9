"""A shape: how somebody writes rollouts down, told by its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import DumpedRollout, Unreadable
from .fields import Fields

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one line looks. `name` is whose shape it is, `form` what a line is, for people."""

    name: str
    form: str
    fits: Callable[[Row], bool]
    """Whether a line looks so, by the fields that it has."""
    read: Callable[[Fields], Iterable[DumpedRollout]]
    """The rollouts of a line. InputError names the field that is wrong."""
    key: Callable[[Row], str | None] | None = None
    """Whose line it is, where a rollout has several; None of a line: nobody says, it is a rollout by itself."""
    gather: Callable[[Sequence[Fields]], Iterator[Fields | Unreadable]] | None = None
    """What is to be done to all lines of a rollout before each is read."""
    one_file: bool = False
    """Lines that name no rollout are all of one, that of their file."""

    def __str__(self) -> str:
        return f"{self.name} ({self.form})"


def line_name(fields: Fields) -> str:
    """The name of a rollout that has none: its line."""
    return fields.where.rpartition(", ")[2]


def first_of(row: Any, *names: str) -> Row:
    """The first object of the first of these lists that a line has; an empty one where there is none."""
    found = next((row[name] for name in names if row.get(name)), None) if isinstance(row, Mapping) else None
    first = found[0] if isinstance(found, list) else None
    return first if isinstance(first, Mapping) else {}


def named_by(*names: str) -> Callable[[Row], str | None]:
    """A key: the first of these fields that a line has."""

    def key(row: Row) -> str | None:
        found = next((row[name] for name in names if row.get(name) is not None), None)
        return None if found is None or isinstance(found, (Mapping, list)) else str(found)

    return key
