"""Memory: answers that are found once, by one thread while the others wait, and kept within a bound."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Final, TypeVar

MOST_KEPT: Final = 1024
"""How many answers are kept. Templates need some hundred."""

Found = TypeVar("Found")


class Memory:
    """Answers by key. Finding one may ask for others."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._known: dict[Hashable, Any] = {}
        _ALL.add(self)

    def once(self, key: Hashable, find: Callable[[], Found], keep: Callable[[Found], bool] = lambda _: True) -> Found:
        """What `find` gives, found once for a key, unless it is not to be kept. An error is raised, and not kept."""
        try:
            known: Found = self._known[key]
        except KeyError:
            with self._lock:
                if key in self._known:
                    return self._known[key]  # type: ignore[no-any-return]
                known = find()
                if keep(known):
                    if len(self._known) >= self._most:
                        self._known.clear()
                    self._known[key] = known
        return known

    def renew_lock(self) -> None:
        self._lock = threading.RLock()


_ALL: weakref.WeakSet[Memory] = weakref.WeakSet()


def _renew_locks() -> None:
    """A child process has only the thread that forked: locks that others held would never be free."""
    for memory in list(_ALL):
        memory.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
