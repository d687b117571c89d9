"""Memory: a bounded cache. Each value is computed once, by one thread while others wait."""

import functools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, TypeVarTuple

Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")
_MISSING: Any = object()


class Memory:
    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self.lock = threading.RLock()
        self._values: dict[Hashable, Any] = {}
        _ALL.add(self)

    def once(
        self, key: Hashable, find: Callable[[], Value], keep: Callable[[Value], bool] = lambda _: True
    ) -> Value:
        """The result of `find`, computed once per key; stored if `keep` says so."""
        value: Value = self._values.get(key, _MISSING)
        if value is not _MISSING:
            return value
        with self.lock:  # not in an except clause: an error of `find` would have a KeyError as its context
            value = self._values.get(key, _MISSING)
            if value is _MISSING:
                value = find()
                if keep(value):
                    if len(self._values) >= self._most:
                        self._values.clear()
                    self._values[key] = value
        return value


def learned(find: Callable[[Any, *Arguments], Value]) -> Callable[[Any, *Arguments], Value]:
    """A method whose results the `cache` of its object keeps."""

    @functools.wraps(find)
    def cached(owner: Any, /, *arguments: *Arguments) -> Value:
        result: Value = owner.cache.once((find.__name__, *arguments), lambda: find(owner, *arguments))
        return result

    return cached


_ALL: weakref.WeakSet[Memory] = weakref.WeakSet()


def _renew_locks() -> None:
    """A child process has one thread: others' locks would stay locked."""
    for memory in list(_ALL):
        memory.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
