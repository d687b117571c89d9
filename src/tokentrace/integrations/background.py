"""An event loop in a thread: agents and engines are asynchronous, and most trainers are not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import InputError

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines in a thread. Connect engines here, too: ``loop.run(VLLMEngine.connect(url))``."""

    def __init__(self) -> None:
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tokentrace-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine and return its future."""
        if self._loop.is_closed():
            work.close()
            raise InputError("it was closed: make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine and return its result. Ctrl-C cancels it."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all coroutines and end the thread. A closed loop cannot be used again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
