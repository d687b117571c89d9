"""A shape: how somebody writes rollouts down, told by its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import Call, DumpedRollout, DumpedRow, UnreadSource
from .fields import Fields
from .rows import RowArrays, read_row

Row = Mapping[str, Any]
Fits = Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class DumpShape:
    """How one line looks. `name` is whose shape it is, `form` what a line is, for people."""

    name: str
    form: str
    fits: Fits
    """Whether a line looks so, by the fields that it has."""
    read: Callable[[Fields], Iterable[DumpedRollout]]
    """The rollouts of a line. InputError names the field that is wrong."""
    key: Callable[[Row], str | None] | None = None
    """Whose line it is, where a rollout has several; None of a line: nobody says, it is a rollout by itself."""
    gather: Callable[[Sequence[Fields]], Iterator[Fields | UnreadSource]] | None = None
    """What is to be done to all lines of a rollout before each is read."""
    one_file: bool = False
    """Lines that name no rollout are all of one, that of their file."""

    def __str__(self) -> str:
        return f"{self.name} ({self.form})"


def call_lines(
    name: str,
    form: str,
    fits: Fits,
    call: Callable[[Fields], Call],
    names: Sequence[str],
    *,
    inside: str | None = None,
    **more: Any,
) -> DumpShape:
    """Calls that are lines of their own; the first of `names` that a line has says which rollout it is of."""
    key = named_by(*names, inside=inside)

    def read(fields: Fields) -> Iterator[DumpedRollout]:
        whose = fields.text(*names) or key(fields.value) or line_name(fields)
        yield DumpedRollout(whose, fields.where, [call(fields)])

    return DumpShape(name, form, fits, read, key, **more)


def call_lists(
    name: str, form: str, fits: Fits, call: Callable[[Fields], Call], names: Sequence[str], lists: Sequence[str]
) -> DumpShape:
    """The calls of a rollout in one of these lists, the first of which fits."""

    def read(fields: Fields) -> Iterator[DumpedRollout]:
        listed = fields.first(*lists)
        assert listed is not None
        yield rollout(fields, names, [call(one) for one in fields.each(listed)])

    return DumpShape(name, form, lambda row: fits(first_of(row, *lists)), read)


def row_lines(
    name: str, form: str, fits: Fits, arrays: Callable[[Fields], RowArrays], names: Sequence[str]
) -> DumpShape:
    """Training rows that are lines of their own."""
    return DumpShape(name, form, fits, lambda row: [rollout(row, names, *read_row(row, arrays(row)))], named_by(*names))


def rollout(
    fields: Fields, names: Sequence[str], calls: Sequence[Call], rows: Sequence[DumpedRow] = ()
) -> DumpedRollout:
    """What a line says of a rollout, called as the first of these fields says, or after its line."""
    return DumpedRollout(fields.text(*names) or line_name(fields), fields.where, calls, rows)


def line_name(fields: Fields) -> str:
    """The name of a rollout that has none: its line."""
    return fields.where.rpartition(", ")[2]


def has(*names: str) -> Fits:
    """Whether a line has all of these fields."""
    return lambda row: all(name in row for name in names)


def first_of(row: Any, *names: str) -> Row:
    """The first object of the first of these lists that a line has; an empty one where there is none."""
    found = next((row[name] for name in names if row.get(name)), None) if isinstance(row, Mapping) else None
    first = found[0] if isinstance(found, list) else None
    return first if isinstance(first, Mapping) else {}


def named_by(*names: str, inside: str | None = None) -> Callable[[Row], str | None]:
    """A key: the first of these fields that a line has, or that an object inside of it has."""

    def key(row: Row) -> str | None:
        found = next((row[name] for name in names if row.get(name) is not None), None)
        own = None if found is None or isinstance(found, (Mapping, list)) else str(found)
        inner = row.get(inside) if inside is not None else None
        return named_by(*names)(inner) if not own and isinstance(inner, Mapping) else own

    return key
