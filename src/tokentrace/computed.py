"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class computed(Generic[Value]):  # noqa: N801
    """A method as an attribute that is computed once, without a lock.

    Threads that ask at the same time may compute it twice; all of them get the value that was stored first. The
    standard library's `cached_property` holds a lock of the whole class on Python 3.11 and earlier, which deadlocks
    with any other lock that is taken while the value is computed.
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
