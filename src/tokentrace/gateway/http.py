"""HTTP bodies in, answers out, and the log. Refuses long, deep and invalid bodies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import operator
import time
import traceback
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engines.protocol import Delta
from ..errors import TokentraceError
from ..values.plain import MAX_DEPTH, finite, json_bytes, no_constant
from .answering import Answer, Result
from .dialect import ItemChange, StreamEvent, encode_sse
from .requests import NOTHING_READ, ReadHistory, RequestError, request_error
from .requests import Request as AgentRequest

LOGGER = logging.getLogger("tokentrace.gateway")
FIRST_TOKEN_SECONDS = 5.0
"""Until the first token, or this long, an error still sets the status."""
KEEP_ALIVE_SECONDS = 15.0
"""Proxies close streams that are silent for longer."""
_NOSNIFF = {"x-content-type-options": "nosniff"}
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])


async def read_body(http: Request, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in http.stream():
        size += len(piece)
        if size > limit:
            problem = f"the body is longer than {limit} bytes"
            raise RequestError(problem, status=413, code="request_too_large")
        pieces.append(piece)
    return b"".join(pieces)


def parse_json(raw: bytes | msgspec.Raw) -> Any:
    text = bytes(raw)
    try:
        try:
            value = msgspec.json.decode(text)
        except ValueError:  # agents send lone surrogates; `json` accepts them
            value = json.loads(text, parse_constant=no_constant, parse_float=finite)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    if text.count(b"[") + text.count(b"{") < MAX_DEPTH:
        return value
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH):
        nested = (each.values() if type(each) is dict else each for each in level)
        level = [item for items in nested for item in items if type(item) in (dict, list)]
        if not level:
            return value
    raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")


@dataclass(frozen=True, slots=True)
class Body:
    """A parsed body. Its history lacks the items of `past`."""

    value: Any
    past: ReadHistory = NOTHING_READ
    texts: Sequence[msgspec.Raw] = ()
    tools: msgspec.Raw | None = None


def parse_body(raw: bytes, history: str, earlier: tuple[Body, AgentRequest] | None) -> Body:
    """Parse a body, without the `history` that an `earlier` request with the same tools had."""
    try:
        fields = _FIELDS.decode(raw)
        texts = _TEXTS.decode(fields.pop(history))
    except (KeyError, ValueError, RecursionError):
        return Body(parse_json(raw))
    tools, past, value = fields.get("tools"), NOTHING_READ, dict[str, Any]()
    if earlier is not None and earlier[0].tools == tools:
        # the last item is always read
        same = map(operator.eq, texts[:-1], earlier[0].texts)
        past = earlier[1].past(sum(itertools.takewhile(bool, same)))
        if fields.pop("tools", None):
            value["tools"] = earlier[0].value["tools"]
    value |= {name: parse_json(text) for name, text in fields.items()}
    value[history] = parse_json(b"[" + b",".join(texts[past.items :]) + b"]")
    return Body(value, past, texts, tools)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, {**_NOSNIFF, **(headers or {})}, "application/json")


def log_request(method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
    level = logging.INFO if status < 500 else logging.WARNING
    if LOGGER.isEnabledFor(level):
        line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
        LOGGER.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))


def as_problem(error: BaseException) -> RequestError:
    """The error for the client. The log has the type and place of an unexpected one."""
    if isinstance(error, TokentraceError):
        return request_error(error)
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    where = [f"{one.filename.rsplit('/tokentrace/', 1)[-1]}:{one.lineno} {one.name}" for one in frames]
    line = {"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}
    LOGGER.error(json.dumps(line))
    return RequestError("the gateway failed; see its log", status=500, code="internal")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Wait for work, cancelled if the client disconnects. Raises ClientDisconnect."""
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


class StreamedAnswer(Response):
    """An answer as server-sent events. `status_code` becomes an error's."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, headers: Mapping[str, str], details: dict[str, Any]) -> None:
        super().__init__(None, 200, {**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._answer, self._details = answer, details
        self._encoder = answer.dialect(answer.head)
        self._frames: list[bytes] = []
        """Frames to send. Sampling never waits for a slow reader."""
        self._news = asyncio.Event()
        self._status: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the status is certain. Later errors are part of the stream."""
        self._task = asyncio.create_task(self._produce())
        self._task.add_done_callback(self._end)

    async def opened(self, receive: Receive) -> StreamedAnswer:
        """Wait for the first token. Raises any error until then."""
        try:
            await unless_gone(receive, asyncio.wait((self._status,), timeout=FIRST_TOKEN_SECONDS))
        except BaseException:
            await self._cancel()
            raise
        self._settle()
        self._status.result()
        return self

    def _settle(self) -> None:
        if not self._status.done():
            self._status.set_result(None)

    async def _produce(self) -> None:
        def feed(choice: int, changes: Sequence[ItemChange], delta: Delta | None) -> None:
            self._settle()
            self._write(self._encoder.feed(choice, changes, delta))

        try:
            self._frames += map(encode_sse, self._encoder.open())
            replies = await self._answer.run(feed)
            self._settle()
            self._write(self._encoder.close(replies))
            self._frames.append(self._answer.dialect.end)
        except Exception as error:
            if not self._status.done():
                self._status.set_exception(error)
                return
            problem = as_problem(error)
            self.status_code = problem.status
            self._details["problem"] = problem.code or type(error).__name__
            self._write(self._encoder.fail(problem))
        finally:
            self._details["sampled"] = self._answer.sampled

    def _end(self, task: asyncio.Task[None]) -> None:
        self._answer.claim.end()
        self._news.set()

    def _write(self, events: list[StreamEvent]) -> None:
        if events:
            self._frames += map(encode_sse, events)
            self._news.set()

    async def _cancel(self) -> None:
        self._task.cancel()
        with contextlib.suppress(BaseException):
            await self._task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            self.status_code = 499
        finally:
            await self._cancel()

    async def _send_all(self, send: Send) -> None:
        while self._frames or not self._task.done():
            if not self._frames:
                self._news.clear()
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await self._news.wait()
                except TimeoutError:
                    self._frames.append(self._answer.dialect.keep_alive)
            frames, self._frames = b"".join(self._frames), []
            if frames:
                await send({"type": "http.response.body", "body": frames, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
