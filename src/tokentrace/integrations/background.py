"""An event loop in a thread: agents and engines are asynchronous, and most trainers are not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ..errors import InputError

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines in a thread of its own.

    An engine belongs to the loop that it is used in, so connect it here: ``loop.run(VLLMEngine.connect(url))``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tokentrace-loop", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin to run a coroutine; what it returns or raises is in the future."""
        if self._loop.is_closed():
            work.close()
            raise InputError("it was closed: make a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What a coroutine returns. It is cancelled where the waiting is interrupted (Ctrl-C)."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel what is under way and end the thread. A loop that is closed cannot be used again."""
        if not self._loop.is_closed():
            self.run(_cancel_tasks())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


async def _cancel_tasks() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
