"""Values with their origins beside them: what the code of a compiled template works on (see `compiling.py`).

A pair is a value and where it came from:

- a plain value with an `Origin`: it is that field, or text that was cut out of it;
- a plain value with None: the template's own;
- a boxed value (``TracedStr``, ``TracedDict``, …) carries its trace itself, and what stands beside it is not looked at;
- a list with an `Each`: the template's own list of values that have an origin each.

`box` makes one value of a pair. Whatever the generator has no plain form for is done on boxed values, so each
operation has one meaning, and refuses in the same words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from jinja2.runtime import LoopContext

from .budget import check_items, check_pieces, listed, looked_at, made
from .origin import KEY, Origin
from .strings import TracedStr, traced
from .trace import Mark, Trace, field_origins, message_origins
from .traced import TRACED_TYPES, TracedDict, TracedList, TracedNone, wrap

PLAIN: Final = TRACED_TYPES | {str, dict, list, int, float, bool}
"""What may lie in a field as it is. None is left out: a look-up gives it for what is missing, too."""
SIZED: Final = frozenset({str, dict, list, TracedStr, TracedDict, TracedList})
TEXT: Final = frozenset({str, TracedStr})
"""Text that is joined as it is. Markup escapes what it is joined with."""
PRINTED: Final = TEXT | {int, float, bool, type(None)}
"""What may be printed later: it will not change until then."""
SMALL: Final = 1024
"""Text up to this size is paid for by the step that makes it (see `strings`)."""
_SHORT: Final = 8
"""The rounds of a loop over so many items are made at once."""
_KEPT: Final = PLAIN | {type(None)}
_WRAPPED: Final = frozenset({dict, list, int, float, bool, type(None)})


class Each(list[Origin | None]):
    """The origins of the items of a list that the template made: it is no field, but its items are."""

    __slots__ = ("cut",)
    cut: tuple[int, slice] | None
    """How many messages there are, and which of them these are, where it is a part of all of them."""

    def __init__(self, origins: Iterable[Origin | None], cut: tuple[int, slice] | None = None) -> None:
        super().__init__(origins)
        self.cut = cut


Beside = Origin | Each | None
"""What stands beside a value."""


class _Inside:
    """The origins of the items of a list that lies in a field, and of more: each is made when it is asked for."""

    __slots__ = ("origin",)

    def __init__(self, origin: Origin) -> None:
        self.origin = origin

    def __getitem__(self, index: int) -> Origin:
        return Origin(self.origin + (index,))

    def __iter__(self) -> Iterator[Origin]:
        return map(Origin, map(self.origin.__add__, zip(itertools.count())))


_Origins = Sequence[Origin | None] | _Inside


def box(value: Any, origin: Beside) -> Any:
    """The pair as one value that carries its trace."""
    if origin is None:
        return value
    if type(value) is str:
        return traced(value, origin)  # type: ignore[arg-type]
    if type(value) not in _WRAPPED:
        return value
    return list(map(box, value, origin)) if type(origin) is Each else wrap(value, origin)  # type: ignore[arg-type]


def parts_of(pieces: Any, origin: Beside) -> Any:
    """Parts of a text, each boxed."""
    return [box(piece, origin) for piece in pieces] if type(pieces) is list else pieces


def inside(origin: Beside, key: Any) -> Origin | None:
    """The origin of ``value.key``, or of ``value["key"]``."""
    return Origin(origin + (key,)) if type(origin) is Origin else None


def of_item(origin: Beside, value: Any, key: Any) -> Origin | None:
    """The origin of ``value[key]``, with a key that is only known when the template runs."""
    if origin is None:
        return None
    if type(key) is not int:
        return inside(origin, key if type(key) is not TracedStr else str.__getitem__(key, slice(None)))
    if type(value) is list and -len(value) <= key < len(value):
        return origin[key] if type(origin) is Each else inside(origin, key + len(value) if key < 0 else key)
    return None


def of_get(origin: Beside, value: Any, key: str, default: Beside) -> Beside:
    """The origin of ``value.get(key, default)``."""
    return inside(origin, key) if type(value) is dict and key in value else default


def bounds(*ends: Any) -> slice:
    """A slice; the None of a field is None."""
    return slice(*(None if type(end) is TracedNone else end for end in ends))


def of_slice(origin: Beside, value: Any, which: slice) -> Beside:
    """The origin of ``value[start:stop]``."""
    if type(value) is list:
        origins = _origins(value, origin)
        if not isinstance(origins, _Inside):
            cut = (len(value), which) if type(origins) is list else None
            return None if origins is None else Each(origins[: len(value)][which], cut)
        places = range(len(value))[which]
        check_pieces(len(places))
        return Each(map(origins.__getitem__, places))
    return origin if type(value) is str else None


def _origins(value: list[Any], origin: Beside) -> _Origins | None:
    """The origins of the items of a plain list (or more of them); None where its items have to be boxed."""
    if origin is None or type(origin) is Each:
        return origin
    if len(origin) == 1 and origin[0] == "messages":
        return message_origins(len(value))
    check_items(len(value))
    return _Inside(origin) if keeps_items(value) else None  # type: ignore[arg-type]


def keeps_items(value: list[Any]) -> bool:
    """Whether the items of a list can stay as they are."""
    return _KEPT.issuperset(map(type, value))


def paid(text: str) -> str:
    """`text`, which is about to be gone through, and a part of which is about to be made."""
    looked_at(text)
    made((len(text) if text.isascii() else 4 * len(text)) + 128)
    return text


def pieces_of(text: str, name: str, *args: Any) -> list[str]:
    """``text.split(…)`` and the like."""
    paid(text)
    if name == "splitlines":  # checked before the list is made
        check_pieces(text.count("\n"))
    parts: list[str] = getattr(text, name)(*args)
    check_pieces(len(parts))
    return parts


def pieces(written: Iterable[Any]) -> Iterator[Any]:
    """What was written as values and origins in turn, boxed."""
    entries = iter(written)
    for value, origin in zip(entries, entries, strict=True):
        yield value if origin is None else box(value, origin)


# -- loops

Rows = tuple[Any, _Origins | None, bool | list[Mark], Iterable[Any]]


def rows(value: Any, origin: Beside, undefined: Any, trace: Trace, counted: bool, fields: tuple[str, ...] = ()) -> Rows:
    """What a loop runs over, the origins of its items, whether a round begins a turn, and the rounds.

    A round is its number, where `counted`, the item, its origin, and those of its `fields`, which are known where the
    items are messages; elsewhere None stands for them. Marks: each round begins the turn of its message. No round does
    that runs over what lies in a field, inside another loop. Else the trace is asked.
    """
    begins: bool | list[Mark] = True
    origins = _origins(value, origin) if type(value) is list else None
    if origins is None:
        found = value = box(value, origin)
        if not isinstance(value, list):
            value = LoopContext(value, undefined) if counted else iter(value)
            found = (item for item, _ in value) if counted else value
        columns: list[Any] = [found, itertools.repeat(None)]
    else:
        columns = [value, origins]
        if type(origins) is _Inside:
            begins = trace.stack == [-1]
            if not fields and len(value) <= _SHORT:
                path = origins.origin
                own = [(at, item, Origin(path + (at,))) for at, item in enumerate(value)]
                return value, origins, begins, own if counted else [row[1:] for row in own]
        elif trace.stack[-1] < 0 and getattr(origins, "cut", True):
            begins = trace.marks
    if fields:
        cut = origins.cut if type(origins) is Each else None
        count = len(value) if type(origins) is list else cut[0] if cut is not None else 0
        for name in fields:
            known: Any = field_origins(name, count) if count else None
            columns.append(
                itertools.repeat(None) if known is None else known if cut is None else known[: cut[0]][cut[1]]
            )
    rounds = zip(itertools.count(), *columns) if counted else zip(*columns)  # noqa: B905 - there may be more origins
    return value, origins, begins, rounds


def length_of(found: Any) -> int:
    """How many items a counted loop has."""
    return found.length if type(found) is LoopContext else len(found)


def is_last(found: Any, index: int) -> bool:
    return bool(found.last) if type(found) is LoopContext else index + 1 == len(found)


def neighbour(found: Any, index: int, by: int, undefined: Any) -> Any:
    """``loop.previtem``, ``loop.nextitem``."""
    if type(found) is LoopContext:
        return found.previtem if by < 0 else found.nextitem
    if 0 <= index + by < len(found):
        return found[index + by]
    return undefined("there is no previous item" if by < 0 else "there is no next item")


def of_neighbour(found: Any, origins: _Origins | None, at: int) -> Origin | None:
    return origins[at] if origins is not None and 0 <= at < len(found) else None


def items_of(value: Any, origin: Beside, boxed_items: Any, *, counted: bool) -> Iterable[tuple[Any, ...]]:
    """``value.items()`` as (key, its origin, value, its origin). `boxed_items` gives those of a boxed value."""
    pairs: Iterator[tuple[Any, ...]]
    if type(value) is dict and type(origin) is Origin:
        check_pieces(len(value))
        if {str}.issuperset(map(type, value)) and _KEPT.issuperset(map(type, value.values())):
            pairs = ((key, Origin(origin + (key, KEY)), item, Origin(origin + (key,))) for key, item in value.items())
            return list(pairs) if counted else pairs
    pairs = ((key, None, item, None) for key, item in boxed_items(box(value, origin)))
    return listed(pairs) if counted else pairs
