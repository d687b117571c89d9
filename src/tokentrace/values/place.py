"""Where a value is in a conversation: typed access to fields, errors that name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from ..errors import InputError, kind_of

Fields = Mapping[str, Any]
"""A message, a part of its content, a call: any object of JSON."""


class Place(NamedTuple):
    """A message and a field of it. Either may be None: tools have no messages."""

    message: int | None = None
    field: str | None = None

    def at(self, key: str | int) -> Place:
        return Place(self.message, f"{self.field}.{key}" if self.field else str(key))

    def each(self, values: Iterable[Any]) -> Iterator[tuple[Place, Any]]:
        return ((self.at(at), value) for at, value in enumerate(values))

    def error(self, problem: str) -> InputError:
        return InputError(problem, message=self.message, field=self.field)

    def wrong(self, value: Any, expected: str) -> InputError:
        """The error for a missing or unexpected value."""
        return self.error("is missing" if value is None else f"must be {expected}, not {kind_of(value)}")

    def get(self, holder: Fields, key: str, kinds: Any, expected: str) -> Any:
        """A field of the mapping at this place. Raises InputError unless it is one of `kinds`."""
        value = holder.get(key)
        if not isinstance(value, kinds):
            raise self.at(key).wrong(value, expected)
        return value

    def string(self, holder: Fields, key: str) -> str:
        value: str = self.get(holder, key, str, "a string")
        return value

    def mapping(self, value: Any, expected: str = "a mapping") -> Fields:
        fields = value if type(value) is dict else fields_of(value, exclude_none=True)
        if fields is None:
            raise self.error(f"must be {expected}, not {kind_of(value)}")
        return fields

    def parts(self, content: Any) -> Iterator[tuple[Place, Fields]]:
        """Yield the parts of content with their places. Each needs a type; a string is one part."""
        if isinstance(content, str):
            yield self, {"type": "text", "text": content}
        elif not is_list(content):
            raise self.wrong(content, "a string or a list of parts")
        else:
            for inner, part in self.each(content):
                fields = inner.mapping(part)
                inner.string(fields, "type")
                yield inner, fields


def fields_of(value: Any, **options: Any) -> Fields | None:
    """A mapping, dataclass or object with ``model_dump`` as a mapping; else None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.model_dump(**options) if callable(getattr(value, "model_dump", None)) else None


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
