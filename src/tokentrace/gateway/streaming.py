"""Answers as server-sent events. When the client goes away, the work for it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engines.protocol import Delta
from .answering import Answer
from .dialect import StreamEvent, encode_sse
from .http import as_problem

Result = TypeVar("Result")
FIRST_TOKEN_SECONDS: Final = 5.0
"""How long the response waits for the first token: an error until then has a status of its own."""
KEEP_ALIVE_SECONDS: Final = 15.0
"""After so long without a token, a comment is sent: proxies close silent streams."""
_COMMENT: Final = b": keep-alive\n\n"


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work. Cancels it and raises ClientDisconnect if the client goes away."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled() and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(BaseException):
            await task


class StreamedAnswer(Response):
    """An answer that is sent while it is sampled, with status 200; `opened` waits for its first token.

    Afterwards `status_code` is that of an error in the middle, or 499 if the client left.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, headers: Mapping[str, str], details: dict[str, Any]) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._answer, self._details = answer, details
        self._encoder = answer.dialect.stream(answer.head)
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What is to be sent. Sampling never waits for a slow reader: the completion's length bounds the queue."""
        self._error: Exception | None = None
        self._opened = False
        """True once a token came, or the status was sent: from then on an error is part of the stream."""
        self._first = asyncio.Event()
        """Set at the first token, or at the end."""
        self._task = asyncio.create_task(self._produce())

    async def opened(self, receive: Receive) -> StreamedAnswer:
        """The answer, when its first token came. Raises what goes wrong before."""
        try:
            async with asyncio.timeout(FIRST_TOKEN_SECONDS):
                await unless_gone(receive, self._first.wait())
        except TimeoutError:
            pass
        except BaseException:
            await _cancel(self._task)
            raise
        if self._error is not None and not self._opened:
            raise self._error
        self._opened = True
        return self

    async def _produce(self) -> None:
        def feed(choice: int, changes: Any, delta: Delta | None) -> None:
            self._write(self._encoder.feed(choice, changes, delta))
            self._opened = True
            self._first.set()

        try:
            self._write(self._encoder.open())
            replies = await self._answer.run(feed)
            self._write(self._encoder.close(replies), self._answer.dialect.end)
            self._opened = True
        except Exception as error:
            self._error = error
            if self._opened:
                problem = as_problem(error)
                self.status_code, self._details["problem"] = problem.status, problem.code or type(error).__name__
                self._write(self._encoder.fail(problem))
        finally:
            self._details["sampled"] = self._answer.sampled
            self._queue.put_nowait(None)
            self._first.set()

    def _write(self, events: list[StreamEvent], end: bytes = b"") -> None:
        frames = b"".join(map(encode_sse, events)) + end
        if frames:
            self._queue.put_nowait(frames)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI)."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            self.status_code = 499
        finally:
            await _cancel(self._task)

    async def _send_all(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    frame = await self._queue.get()
            except TimeoutError:
                frame = _COMMENT
            await send({"type": "http.response.body", "body": frame or b"", "more_body": frame is not None})
            if frame is None:
                return
