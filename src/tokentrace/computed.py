"""Attributes that are computed on first access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class computed(Generic[Value]):  # noqa: N801
    """An attribute that a method computes on first access, without a lock.

    Concurrent threads may compute the value twice, but all of them get the one stored first. On Python 3.11 and
    earlier, the standard library's `cached_property` holds one lock for the whole class, which can deadlock with
    any other lock taken while the value is computed.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> computed[Value]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self._name, self._compute(owner))
