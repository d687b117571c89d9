"""Letting the garbage collector rest while many small values are made, not one cycle among them."""

from __future__ import annotations

import gc
import os
import threading


class _Rest:
    """How many renders are under way, in all threads and in this one. The first switches it off, the last on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._all = 0
        self._own = threading.local()
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if self._all == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._all += 1
            self._own.count = getattr(self._own, "count", 0) + 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._all -= 1
            self._own.count -= 1
            if self._all == 0 and self._was_on:
                gc.enable()

    def forked(self) -> None:
        """In a child process only the thread that forked is left: what other threads had begun is never ended."""
        self._lock = threading.RLock()
        others = self._all - getattr(self._own, "count", 0)
        self._all -= others
        if others and self._all == 0 and self._was_on:
            gc.enable()


_REST = _Rest()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_REST.forked)


def no_collection() -> _Rest:
    """Switch the garbage collector off until this, and all that other threads have under way, is done."""
    return _REST
