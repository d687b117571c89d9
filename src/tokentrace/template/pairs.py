"""What compiled templates work on: pairs of a value and its origin (see `compiling.py`).

- a plain value with an `Origin`: that field, or text that was cut out of it;
- a plain list with a tuple of origins, one per item;
- a plain value with None: the template's own;
- a boxed value (``TracedStr``, ``TracedDict``, …) carries its trace itself; the origin next to
  it is ignored.

Compiled code does the most common operations on plain values, the environment others on boxed.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from .budget import SMALL, charge, check_items, listed
from .origin import KEY, Origin
from .strings import TracedStr, traced
from .traced import TRACED_TYPES, TracedDict, TracedList, TracedNone, plain, wrap

PLAIN = TRACED_TYPES | {str, dict, list, int, float, bool}
"""Types of field values used as they are. Not None: a missing key gives it, too."""
SIZED = frozenset({str, dict, list, TracedStr, TracedDict, TracedList})
TEXT = frozenset({str, TracedStr})
"""Text that is joined as it is. (Markup escapes what it is joined with.)"""
PRINTED = TEXT | {int, float, bool, type(None)}
"""Types of values that may be printed later: they do not change until then."""
_ITEMS = PLAIN | {type(None)}
_WRAPPED = frozenset({dict, list, int, float, bool, type(None)})

Origins = tuple[Origin | None, ...]
Beside = Origin | Origins | None
"""The second half of a pair."""


def box(value: Any, origin: Beside) -> Any:
    if origin is None:
        return value
    if type(value) is str and type(origin) is Origin:
        return traced(value, origin)
    if type(value) not in _WRAPPED:
        return value
    if type(origin) is Origin:
        return wrap(value, origin)
    return [
        box(item, item_origin) for item, item_origin in zip(value, _origins(value, origin), strict=True)
    ]


@functools.lru_cache(maxsize=1 << 14)
def inside(origin: Beside, key: Any) -> Origin | None:
    return Origin(origin + (key,)) if type(origin) is Origin else None


def _origins(value: list[Any], origin: Beside) -> Origins:
    if type(origin) is Origin:
        return tuple(map(inside, itertools.repeat(origin), range(len(value))))
    return origin  # type: ignore[return-value]


def of_item(origin: Beside, value: Any, key: Any) -> Origin | None:
    if origin is not None and type(value) is dict:
        return inside(origin, plain(key))
    if (
        origin is None
        or type(value) is not list
        or type(key) is not int
        or not -len(value) <= key < len(value)
    ):
        return None
    return inside(origin, key % len(value)) if type(origin) is Origin else _origins(value, origin)[key]


def bounds(*ends: Any) -> slice:
    return slice(*(None if type(end) is TracedNone else end for end in ends))


def of_cut(origin: Beside, value: Any, which: slice) -> Beside:
    if type(value) is str or origin is None:
        return origin
    return _origins(value, origin)[which] if type(value) is list else None


def of_pieces(origin: Beside, pieces: Any) -> Beside:
    return (origin,) * len(pieces) if type(origin) is Origin and type(pieces) is list else None


def keeps_items(value: list[Any]) -> bool:
    return _ITEMS.issuperset(map(type, value))


def paid(text: str) -> str:
    """`text` after charging for a copy."""
    if len(text) >= SMALL:
        charge((len(text) if text.isascii() else 4 * len(text)) + 128)
    return text


def split(text: str, name: str, *args: Any) -> list[str]:
    paid(text)
    check_items(text.count(args[0] if args else "\n"))
    parts: list[str] = getattr(text, name)(*args)
    check_items(len(parts))
    return parts


def rows(value: Any, origin: Beside) -> tuple[Sequence[Any], Origins]:
    if type(value) is list and origin is not None and (type(origin) is not Origin or keeps_items(value)):
        check_items(len(value))
        return value, _origins(value, origin)
    boxed = box(value, origin)
    boxed = boxed if isinstance(boxed, (list, tuple)) else listed(boxed)
    return boxed, (None,) * len(boxed)


def item_rows(value: Any, origin: Beside, items: Callable[[Any], Any]) -> list[tuple[Any, ...]]:
    """``value.items()`` as (key, its origin, value, its origin). `items` lists those of a boxed value."""
    if type(value) is dict and type(origin) is Origin:
        check_items(len(value))
        if {str}.issuperset(map(type, value)) and keeps_items(list(value.values())):
            origins = [inside(origin, key) for key in value]
            return [(key, inside(at, KEY), value[key], at) for key, at in zip(value, origins, strict=True)]
    return [(key, None, item, None) for key, item in listed(items(box(value, origin)))]
