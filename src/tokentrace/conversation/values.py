"""JSON values: what arguments, results, schemas and template variables consist of."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from ..errors import InputError, kind_of
from .place import Place

MAX_DEPTH: Final = 128
"""How deeply a value may be nested. Python's own JSON gives up somewhere below 1,000."""
MAX_VALUES: Final = 1_000_000
"""How many values one may contain; a shared value counts each time, since it is printed each time."""

_LARGEST_INT: Final = 10**4300
_SCALARS: Final = frozenset({str, bool, type(None)})
_TEXT: Final = frozenset({str})
_KINDS: Final[Sequence[tuple[type, Callable[[Any], Any]]]] = (
    *((str, str.__str__), (int, int), (float, float), (Mapping, dict), (list, list), (tuple, tuple)),
)


def json_like(value: Any, default: Any) -> Any:
    """The JSON value of an object (a dataclass, a Pydantic model, a NumPy scalar), one level deep; or `default`."""
    for kind, base in _KINDS:
        if isinstance(value, kind):
            return base(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return value.model_dump()
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return value.item()
    return default


def plain_json(value: Any, place: Place, *, strict: bool = True) -> Any:
    """`value` as dicts, lists, strings and numbers; the same object if it already consists of them.

    Raises InputError for a value that contains itself, or is too deep or too large to print. If `strict`, raises it
    also for what JSON cannot express: sets, arrays, bytes, NaN, keys that are not strings.
    """
    return value if is_flat(value) else _Walker(place, strict).walk(value, ())


def is_plain(value: Any) -> bool:
    """True for dicts, lists and scalars of JSON, without subclasses, of a depth and size that can be printed."""
    try:
        return plain_json(value, Place()) is value
    except InputError:
        return False


def check_depth(value: Any, place: Place) -> None:
    """Raise InputError for a value that contains itself, or is too deep or too large to print."""
    plain_json(value, place, strict=False)


def is_flat(value: Any) -> bool:
    """True for a text, and for a dict of scalars: most values are no more than that."""
    if type(value) is not dict:
        return type(value) is str
    is_plain = _SCALARS.issuperset(map(type, value.values())) or all(map(_is_scalar, value.values()))
    return is_plain and _TEXT.issuperset(map(type, value)) and len(value) < 1000


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-_LARGEST_INT < value < _LARGEST_INT)
    return kind in _SCALARS or (kind is float and math.isfinite(value))


class _Walker:
    def __init__(self, place: Place, strict: bool) -> None:
        self._place = place
        self._strict = strict
        self._parents: set[int] = set()
        self._budget = MAX_VALUES

    def walk(self, value: Any, path: tuple[Any, ...]) -> Any:
        self._budget -= 1
        if self._budget < 0:
            raise self._place.error(f"holds more than {MAX_VALUES} values")
        if _is_scalar(value):
            return value
        if id(value) in self._parents or len(path) > MAX_DEPTH:
            raise self._place.error(f"contains itself, or is nested more than {MAX_DEPTH} deep")
        self._parents.add(id(value))
        plain: Any = value
        if isinstance(value, Mapping):
            keys = [key for key in value if not isinstance(key, str)] if self._strict else []
            if keys:
                raise self._error(f"has a key that is {kind_of(keys[0])}, which is not valid JSON", path)
            items = {key: self.walk(item, (*path, key)) for key, item in value.items()}
            is_plain = type(value) is dict and _TEXT.issuperset(map(type, value))
            plain = value if is_plain and all(map(operator.is_, items.values(), value.values())) else items
        elif isinstance(value, (list, tuple)):
            plain = [self.walk(item, (*path, at)) for at, item in enumerate(value)]
            plain = value if type(value) is list and all(map(operator.is_, plain, value)) else plain
        elif self._strict:
            plain = self._scalar(value, path)
        self._parents.discard(id(value))
        return plain

    def _scalar(self, value: Any, path: tuple[Any, ...]) -> Any:
        plain = json_like(value, self)
        if isinstance(value, float) and not math.isfinite(value):
            problem = "NaN" if math.isnan(value) else "Infinity"
        elif type(value) is int:
            raise self._error("contains an integer of more than 4,300 digits, which Python does not print", path)
        elif plain is not self:
            return self.walk(plain, path)
        else:
            problem = kind_of(value)
        hint = "; pass its tolist()" if callable(getattr(value, "tolist", None)) else ""
        raise self._error(f"contains {problem}, which is not valid JSON{hint}", path)

    def _error(self, problem: str, path: tuple[Any, ...]) -> InputError:
        place = self._place
        for key in path[:4]:
            place = place.at(str(key)[:40])
        return place.error(problem)


def parse_json(text: str, place: Place) -> Any:
    """The value of JSON text. Raises InputError if it is not valid."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise place.error("is nested too deeply") from error
    except ValueError as error:
        raise place.error(f"is not valid JSON: {str(error)[:200]}") from error


def strict_json(text: str) -> Any:
    """The value of JSON text, without what Python's parser lets pass: NaN, infinite numbers, keys that come twice.

    Raises ValueError or RecursionError.
    """
    return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite, strict=False)


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant``: refuse NaN and infinities."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """For ``parse_float``: refuse numbers that are too large for a float."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: refuse an object in which a key comes twice."""
    items = dict(pairs)
    if len(items) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} comes twice")
    return items
