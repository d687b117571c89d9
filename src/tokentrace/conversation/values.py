"""Values as JSON has them: what arguments, results, schemas and template variables are made of.

What JSON has not is refused by name, with the place: a template would print it as Python does, or not at all. So is
what contains itself, which nothing could print.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..errors import InputError

MAX_DEPTH: Final = 128
"""How deep a value may be nested. Python's own JSON gives up somewhere below 1,000."""
MAX_VALUES: Final = 1_000_000
"""How many values one may hold altogether; what is shared counts each time, as it is printed each time."""

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})


def plain_json(value: Any, *, message: int | None = None, field: str) -> Any:
    """`value` made of dicts, lists, strings and numbers; the same object if it is made of them already.

    InputError for what JSON has not (sets, arrays, bytes, keys that are no strings), for what contains itself, and for
    what is nested deeper than anything that is meant.
    """
    if type(value) is dict and all(type(key) is str and type(item) in _SCALARS for key, item in value.items()):
        return value
    return _Plain(message, field).value(value, ())


class _Plain:
    """One value on its way to plain JSON."""

    def __init__(self, message: int | None, field: str) -> None:
        self._message = message
        self._field = field
        self._around: set[int] = set()
        self._left = MAX_VALUES

    def _refused(self, problem: str, path: tuple[Any, ...]) -> InputError:
        shown = ".".join([self._field, *(str(key)[:40] for key in path[:4])])
        return InputError(problem, message=self._message, field=shown)

    def value(self, value: Any, path: tuple[Any, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise self._refused(f"holds more than {MAX_VALUES} values", ())
        if type(value) in _SCALARS:
            return value
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
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.value({one.name: getattr(value, one.name) for one in dataclasses.fields(value)}, path)
        if callable(getattr(value, "model_dump", None)):
            return self.value(value.model_dump(), path)
        if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
            return self.value(value.item(), path)  # a NumPy scalar
        hint = "; give its tolist()" if callable(getattr(value, "tolist", None)) else ""
        raise self._refused(f"holds a {type(value).__name__}, which JSON has not{hint}", path)

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(key, (str, int, float)) or key is None:
            return key
        raise self._refused(f"has a key that is no string but a {type(key).__name__}", path)


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    return all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def check_depth(value: Any, *, message: int | None = None, field: str) -> None:
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
                raise InputError(f"holds more than {MAX_VALUES} values", message=message, field=field)
        if not inside:
            return
        level = inside
    raise InputError(f"contains itself, or is nested more than {MAX_DEPTH} deep", message=message, field=field)
