"""Values as JSON has them: what arguments, results, schemas and template variables are made of.

What JSON does not have is refused by name, with the place: a template would print it as Python does, or not at all.
So is what contains itself, which nothing could print.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from ..errors import InputError, kind_of
from .place import Place

MAX_DEPTH: Final = 128
"""How deep a value may be nested. Python's own JSON gives up somewhere below 1,000."""
MAX_VALUES: Final = 1_000_000
"""How many values one may hold altogether; what is shared counts each time, as it is printed each time."""

_LARGEST_INT: Final = 10**4300
_SCALARS: Final = frozenset({str, int, bool, type(None)})
"""Types whose values JSON all has. Of floats it has the finite ones."""
_TEXT: Final = frozenset({str})
_USUAL: Final = 100
"""How many values `is_usual` looks at, so that none is nested too deeply; larger ones are counted."""

_KINDS: Final[Sequence[tuple[type, Callable[[Any], Any]]]] = (
    *((str, str.__str__), (int, int), (float, float), (Mapping, dict), (list, list), (tuple, tuple)),
)


def json_like(value: Any, otherwise: Any) -> Any:
    """The JSON-like value that an object stands for, one level deep; `otherwise` for what has none."""
    for kind, base in _KINDS:
        if isinstance(value, kind):
            return base(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump()
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return value.item()  # a NumPy scalar
    return otherwise


def is_usual(value: Any) -> bool:
    """Whether a value is a dict as nearly all arguments are: JSON all the way down, and not much of it."""
    if type(value) is not dict:
        return False
    left = _USUAL
    containers: list[Any] = [value]
    for one in containers:  # which grows meanwhile
        left -= len(one)
        keys, items = (one, one.values()) if type(one) is dict else ((), one)
        if left < 0 or not _TEXT.issuperset(map(type, keys)):
            return False
        for item in items:
            if type(item) is dict or type(item) is list:
                containers.append(item)
            elif not _is_scalar(item):
                return False
    return True


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-_LARGEST_INT < value < _LARGEST_INT)
    return kind in _SCALARS or (kind is float and math.isfinite(value))


def is_plain(value: Any) -> bool:
    """True for dicts, lists, tuples and scalars of JSON, without subclasses. The value must not contain itself."""
    kind = type(value)
    if kind is dict:
        return _TEXT.issuperset(map(type, value)) and all(map(is_plain, value.values()))
    return _is_scalar(value) or ((kind is list or kind is tuple) and all(map(is_plain, value)))


def plain_json(value: Any, place: Place) -> Any:
    """`value` made of dicts, lists, strings and numbers; the same object if it is made of them already.

    Raises InputError for what JSON does not have (sets, arrays, bytes, NaN, keys that are not strings), for a value
    that contains itself, and for one that is nested too deeply.
    """
    if is_usual(value):
        return value
    return _Plain(place).value(value, ())


class _Plain:
    """One value on its way to plain JSON."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._around: set[int] = set()
        self._left = MAX_VALUES

    def _refused(self, problem: str, path: tuple[Any, ...]) -> InputError:
        place = self._place
        for key in path[:4]:
            place = place.at(str(key)[:40])
        return place.error(problem)

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._refused(f"holds more than {MAX_VALUES} values", ())
        if _is_scalar(value):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            name = "NaN" if math.isnan(value) else "Infinity"
            raise self._refused(f"contains {name}, which is not valid JSON", path)
        if type(value) is int:
            raise self._refused("contains an integer of more than 4,300 digits, which Python does not print", path)
        if id(value) in self._around or len(path) > MAX_DEPTH:
            raise self._refused(f"contains itself, or is nested more than {MAX_DEPTH} deep", path)
        self._around.add(id(value))
        try:
            return self._inside(value, path)
        finally:
            self._around.discard(id(value))

    def _inside(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Mapping):
            made = {self._key(key, path): self.value(item, (*path, key)) for key, item in value.items()}
            return value if type(value) is dict and _same(made.values(), value.values()) else made
        if isinstance(value, (list, tuple)):
            items = [self.value(item, (*path, at)) for at, item in enumerate(value)]
            return value if type(value) is list and _same(items, value) else items
        found = json_like(value, self)
        if found is not self:
            return self.value(found, path)
        hint = "; give its tolist()" if callable(getattr(value, "tolist", None)) else ""
        raise self._refused(f"contains {kind_of(value)}, which is not valid JSON{hint}", path)

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, str):
            return key
        raise self._refused(f"has a key that is {kind_of(key)}, which is not valid JSON; keys are strings", path)


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def check_depth(value: Any, place: Place) -> None:
    """InputError for a value that contains itself, or is nested deeper or shared more often than can be printed."""
    if not isinstance(value, (Mapping, list, tuple)):
        return
    left = MAX_VALUES
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        inside: list[Any] = []
        for one in level:
            items = one.values() if isinstance(one, Mapping) else one
            inside += [item for item in items if isinstance(item, (Mapping, list, tuple))]
            left -= len(one)
            if left < 0 or len(inside) > MAX_VALUES:
                raise place.error(f"holds more than {MAX_VALUES} values")
        if not inside:
            return
        level = inside
    raise place.error(f"contains itself, or is nested more than {MAX_DEPTH} deep")


# -- for readers of JSON: what Python's own would let pass


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant``: NaN and infinities are not JSON."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """For ``parse_float``: a number, where a float can be that large."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: an object, where no key is there twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} comes twice")
    return made
