"""Attributes that are computed on first access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class computed(Generic[Value]):  # noqa: N801
    """An attribute that a method computes on first access, without a lock.

    Threads may compute the value twice, but all get the first. Python 3.11's `cached_property`
    holds a lock for the class, which can deadlock with locks taken in the computation.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> computed[Value]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> Value: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self._name, self._compute(owner))
