"""What compiled templates work on: pairs of a value and its origin (see `compiling.py`).

- a plain value with an `Origin`: it is that field, or text that was cut out of it;
- a plain list with `Items`: each of its items has an origin;
- a plain value with None: the template's own;
- a boxed value (``TracedStr``, ``TracedDict``, …) carries its trace itself; the origin beside it is ignored.

`box` makes one value of a pair. Compiled code has a plain form for what templates do all the time; everything else is
done on boxed values by the environment, so each operation has one meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from .budget import charge, check_items, listed
from .origin import KEY, Origin
from .strings import TracedStr, traced
from .traced import TRACED_TYPES, TracedDict, TracedList, TracedNone, plain, wrap

PLAIN: Final = TRACED_TYPES | {str, dict, list, int, float, bool}
"""Types that a field's value may have as it is. None is left out: a look-up gives it for a missing key, too."""
SIZED: Final = frozenset({str, dict, list, TracedStr, TracedDict, TracedList})
TEXT: Final = frozenset({str, TracedStr})
"""Text that is joined as it is. Markup escapes what it is joined with."""
PRINTED: Final = TEXT | {int, float, bool, type(None)}
"""Types of values that may be printed later: they do not change until then."""
_WRAPPED: Final = frozenset({dict, list, int, float, bool, type(None)})


class Items:
    """The origins of the items of a plain list that is no field itself.

    `indices` are the places of the items in the list at `origin`; None: each item is a piece of the text there.
    """

    __slots__ = ("indices", "origin")

    def __init__(self, origin: Origin, indices: range | None) -> None:
        self.origin = origin
        self.indices = indices

    def __getitem__(self, index: int) -> Origin | None:
        return self.origin if self.indices is None else inside(self.origin, self.indices[index])


Beside = Origin | Items | None
"""The second half of a pair."""


def box(value: Any, origin: Beside) -> Any:
    """The pair as one value that carries its trace."""
    if origin is None:
        return value
    if type(value) is str and type(origin) is Origin:
        return traced(value, origin)
    if type(value) not in _WRAPPED:
        return value
    if type(origin) is Items:
        return [box(item, origin[index]) for index, item in enumerate(value)]
    return wrap(value, origin)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1 << 14)
def inside(origin: Beside, key: Any) -> Origin | None:
    """The origin of ``value.key``, or of ``value["key"]``."""
    return Origin(origin + (key,)) if type(origin) is Origin else None


def of_item(origin: Beside, value: Any, key: Any) -> Origin | None:
    """The origin of ``value[key]``, with a key that is only known when the template runs."""
    if origin is None or (type(value) is not dict and type(value) is not list):
        return None
    if type(value) is dict:
        return inside(origin, plain(key))
    if type(key) is not int or not -len(value) <= key < len(value):
        return None
    return origin[key] if type(origin) is Items else inside(origin, key % len(value))


def of_get(origin: Beside, value: Any, key: str, default: Beside) -> Beside:
    """The origin of ``value.get(key, default)``."""
    return inside(origin, key) if type(value) is dict and key in value else default


def bounds(*ends: Any) -> slice:
    """A slice; the None of a field is None."""
    return slice(*(None if type(end) is TracedNone else end for end in ends))


def of_slice(origin: Beside, value: Any, which: slice) -> Beside:
    """The origin of ``value[start:stop]``."""
    if type(value) is str or origin is None:
        return origin
    if type(value) is not list:
        return None
    if type(origin) is Items:
        return Items(origin.origin, None if origin.indices is None else origin.indices[which])
    return Items(origin, range(len(value))[which])  # type: ignore[arg-type]


def of_pieces(origin: Beside) -> Beside:
    """The origin of the pieces that a text is split into."""
    return Items(origin, None) if type(origin) is Origin else None


def keeps_items(value: list[Any]) -> bool:
    """True if the items of a list that is a field can stay as they are."""
    return PLAIN.issuperset(map(type, value)) or all(item is None or type(item) in PLAIN for item in value)


def paid(text: str) -> str:
    """`text`, of which a part is about to be made."""
    charge((len(text) if text.isascii() else 4 * len(text)) + 128)
    return text


def split(text: str, name: str, *args: Any) -> list[str]:
    """``text.split(…)`` or ``text.splitlines()``."""
    paid(text)
    check_items(text.count(args[0] if args else "\n"))
    parts: list[str] = getattr(text, name)(*args)
    check_items(len(parts))
    return parts


def pieces(out: Iterable[Any]) -> Iterator[Any]:
    """The values that were printed to a list of values and origins, boxed."""
    entries = iter(out)
    for value, origin in zip(entries, entries, strict=True):
        yield value if origin is None else box(value, origin)


# -- loops


def rows(value: Any, origin: Beside) -> tuple[Sequence[Any], list[Origin | None]]:
    """The items that a loop runs over, and the origin of each."""
    if type(value) is list and type(origin) is Origin and keeps_items(value):
        check_items(len(value))
        return value, [inside(origin, index) for index in range(len(value))]
    if type(value) is list and type(origin) is Items:
        return value, [origin[index] for index in range(len(value))]
    boxed = box(value, origin)
    boxed = boxed if isinstance(boxed, (list, tuple)) else listed(boxed)
    return boxed, [None] * len(boxed)


def item_rows(value: Any, origin: Beside, items: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """``value.items()`` as (key, its origin, value, its origin). `items` gives those of a boxed value."""
    if type(value) is dict and type(origin) is Origin:
        check_items(len(value))
        if {str}.issuperset(map(type, value)) and keeps_items(list(value.values())):
            return [(key, inside(inside(origin, key), KEY), item, inside(origin, key)) for key, item in value.items()]
    return [(key, None, item, None) for key, item in listed(items(box(value, origin)))]


def neighbour(items: Any, index: int, undefined: Any) -> Any:
    """``loop.previtem`` or ``loop.nextitem``."""
    return items[index] if 0 <= index < len(items) else undefined("there is no such item in the loop")


def of_neighbour(origins: list[Origin | None], index: int) -> Origin | None:
    return origins[index] if 0 <= index < len(origins) else None
