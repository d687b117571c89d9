"""JSON values: what arguments, results, schemas and template variables consist of."""

import collections
import functools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from ..errors import InputError, kind_of
from .place import Place, fields_of

MAX_DEPTH = 128  # of nested values; Python's JSON gives up below 1,000
MAX_VALUES = 1_000_000  # in a value; one in several places counts each time it would be printed
_LARGEST_INT = 10**4300
_SCALARS = frozenset({str, bool, type(None)})
_TEXT = frozenset({str})
_KINDS: Any = {str: str.__str__, int: int, float: float, Mapping: dict, list: list, tuple: tuple}
_NO_JSON = {float: "NaN or Infinity", int: "an integer of more than 4,300 digits"}


def json_like(value: Any, default: Any) -> Any:
    """An object (a dataclass, a NumPy scalar) as JSON, one level deep, or `default`."""
    for kind, base in _KINDS.items():
        if isinstance(value, kind):
            return base(value)
    if (fields := fields_of(value)) is not None:
        return fields
    is_number = callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ()
    return value.item() if is_number else default


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8; in ASCII if a text has half a surrogate pair."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode("ascii")


def plain_json(value: Any, place: Place, *, strict: bool = True) -> Any:
    """`value` as dicts, lists, strings and numbers; the same object if it consists of them already.

    Raises InputError for a value that contains itself, or is too deep or too large to print. If
    `strict`, also for NaN and all else that JSON cannot express.
    """
    if is_flat(value):
        return value
    count = 0

    def error(problem: str, path: tuple[Any, ...]) -> InputError:
        where = functools.reduce(Place.at, (str(key)[:40] for key in path[:4]), place)
        return where.error(f"{problem}, which is not valid JSON")

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        nonlocal count
        count += 1
        if count > MAX_VALUES:
            raise place.error(f"holds more than {MAX_VALUES} values")
        if _is_scalar(value):
            return value
        if len(path) > MAX_DEPTH:
            raise place.error(f"contains itself, or is nested more than {MAX_DEPTH} deep")
        if isinstance(value, Mapping):
            items = {key: walk(item, (*path, key)) for key, item in value.items()}
            if strict and (keys := [key for key in value if not isinstance(key, str)]):
                raise error(f"has a key that is {kind_of(keys[0])}", path)
            is_plain = type(value) is dict and _TEXT.issuperset(map(type, value))
            return value if is_plain and all(map(operator.is_, items.values(), value.values())) else items
        if isinstance(value, (list, tuple)):
            plain = [walk(item, (*path, at)) for at, item in enumerate(value)]
            return value if type(value) is list and all(map(operator.is_, plain, value)) else plain
        if not strict:
            return value
        reduced = json_like(value, value)
        if type(reduced) is type(value):
            hint = ": pass its tolist()" if hasattr(value, "tolist") else ""
            raise error(f"contains {_NO_JSON.get(type(value)) or kind_of(value)}{hint}", path)
        return walk(reduced, path)

    return walk(value, ())


def is_plain(value: Any) -> bool:
    """True for JSON of plain dicts, lists and scalars that is not too deep or large."""
    try:
        return plain_json(value, Place()) is value
    except InputError:
        return False


def is_unicode(value: Any) -> bool:
    """False if a text in a JSON value has half of a surrogate pair."""
    try:
        return bool(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        return False


def check_depth(value: Any, place: Place) -> None:
    """Raise InputError for a value that contains itself, or is too deep or large to print."""
    plain_json(value, place, strict=False)


def is_flat(value: Any) -> bool:
    """True for a dict of scalars, the usual value."""
    if type(value) is not dict or len(value) > 1000 or not _TEXT.issuperset(map(type, value)):
        return False
    return _SCALARS.issuperset(map(type, value.values())) or all(map(_is_scalar, value.values()))


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    if kind is int:
        return bool(-_LARGEST_INT < value < _LARGEST_INT)
    return kind in _SCALARS or (kind is float and math.isfinite(value))


def parse_json(text: str, place: Place, **options: Any) -> Any:
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise place.error("is nested too deeply") from error
    except ValueError as error:
        raise place.error(f"is not valid JSON: {str(error)[:200]}") from error


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant``: reject NaN and infinities."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """For ``parse_float``: reject numbers that are too large for a float."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: reject duplicate keys."""
    items = dict(pairs)
    if len(items) < len(pairs):
        [(twice, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} comes twice")
    return items
