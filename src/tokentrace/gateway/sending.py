"""Answers over HTTP: streamed as server-sent events, or whole. Whoever goes away ends the work done for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engines.protocol import Delta
from .answering import Answer
from .dialect import AnswerFrames, Replied
from .requests import RequestError

Result = TypeVar("Result")
PATIENCE: Final = 5.0
"""How long the first token is waited for before the stream is opened: an error until then has a status of its own."""
KEEP_ALIVE: Final = 15.0
"""After so many seconds without a token, a comment is sent: proxies close streams in which nothing happens."""
_COMMENT: Final = b": keep-alive\n\n"


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of some work, which is given up if the client goes away: ClientDisconnect."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        await _end(gone)
        await _end(working)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(BaseException):
            await task


class StreamedAnswer(Response):
    """An answer as it is sampled. Make one with `begin`, which waits for the first token.

    It is sent with status 200. When it has ended, `status_code` is that of an error in the middle, or 499 if the client
    went away.
    """

    media_type = "text/event-stream"

    def __init__(
        self, headers: Mapping[str, str], failed: Callable[[BaseException], RequestError], about: dict[str, Any]
    ) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._failed = failed
        self._about = about
        self._frames: AnswerFrames
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        """What is to be sent. Sampling never waits for a slow reader: it is bounded by the completion's length."""
        self._task: asyncio.Task[None]
        self._error: Exception | None = None
        self._told = False
        self._begun = asyncio.Event()
        """Something was told, or it is over."""

    @classmethod
    async def begin(
        cls,
        answer: Answer,
        headers: Mapping[str, str],
        receive: Receive,
        failed: Callable[[BaseException], RequestError],
        about: dict[str, Any],
    ) -> StreamedAnswer:
        """Begin to sample. What goes wrong before the first token is raised; `about` gets what becomes of the rest."""
        streamed = cls(headers, failed, about)
        streamed._frames = answer.dialect.stream(answer.head, answer.call_ids)
        streamed._say(streamed._frames.open())
        streamed._task = asyncio.create_task(streamed._produce(answer))
        try:
            async with asyncio.timeout(PATIENCE):
                await unless_gone(receive, streamed._begun.wait())
        except TimeoutError:
            pass
        except BaseException:
            await _end(streamed._task)
            raise
        if streamed._error is not None and not streamed._told:
            raise streamed._error
        streamed._told = True  # from now on an error is told in the stream
        return streamed

    def _say(self, frames: list[str]) -> None:
        if frames:
            self._queue.put_nowait("".join(frames).encode())

    async def _produce(self, answer: Answer) -> None:
        def feed(choice: int, events: Any, delta: Delta | None) -> None:
            self._say(self._frames.feed(choice, events, delta))
            self._told = True
            self._begun.set()

        try:
            replies: list[Replied] = await answer.run(feed)
            self._say(self._frames.close(replies))
            self._told = True
        except Exception as error:
            self._error = error
            if self._told:
                known = self._failed(error)
                self.status_code, self._about["problem"] = known.status, known.code or type(error).__name__
                self._say(self._frames.fail(known))
        finally:
            self._about["sampled"] = answer.sampled
            self._queue.put_nowait(None)
            self._begun.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            self.status_code = 499
        finally:
            await _end(self._task)

    async def _send_all(self, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    frame = await self._queue.get()
            except TimeoutError:
                frame = _COMMENT
            if frame is None:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            await send({"type": "http.response.body", "body": frame, "more_body": True})
