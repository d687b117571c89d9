"""What tests of values share."""

from __future__ import annotations

from typing import Any

from tokentrace.parsing.values import Schema, read_value

DEEP = 100_000


def typed(value: Any) -> Any:
    """A value with the type of everything in it: `==` takes 1, 1.0 and True for the same."""
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    return type(value), value


def check(text: str, schema: Any, value: Any, sure: bool = True) -> None:
    read = read_value(text, None if schema is None else Schema(schema))
    assert (typed(read[0]), read[1]) == (typed(value), sure)
