"""What the engines behind HTTP share: one pool of connections, timeouts, retries, and typed errors.

A request is sent again only while nothing of its answer was accepted:

- The connection is lost before a byte of the answer's body arrived, or the server says 429 or 5xx: again, after a
  pause that doubles. A ``Retry-After`` is waited for.
- A whole answer that broke off after its first byte, or a stream after its first token: `EngineError`, never again.
  The engine has sampled by then, and a second sample in its place would be another draw.
- A timeout after connecting: `EngineUnavailable` at once. The connection is closed, which ends the request; the same
  engine would take as long again, another may not.

A stream of which bytes arrived but no token counts as not accepted.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import count
from time import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from .protocol import Delta, EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from .sse import EventReader

if TYPE_CHECKING:
    import httpx2

_SHOWN: Final = 300
"""How many characters of a server's own words an error quotes."""
_DONE: Final = b"[DONE]"


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """How to talk to a server. Seconds, all of them; None is no limit."""

    connect_timeout: float | None = 10.0
    read_timeout: float | None = 600.0
    """The longest silence. A whole answer is silent until the last token is sampled."""
    total_timeout: float | None = 3600.0
    """For one try, from the wait for a free connection to the last byte."""
    connections: int | None = 1000
    """How many requests may be under way at once; others wait for their turn."""
    retries: int = 5
    backoff: float = 0.5
    """The pause before the first retry; it doubles with each, and is cut by up to a half at random."""
    longest_backoff: float = 30.0
    longest_retry_after: float = 120.0
    """A server that asks to be left alone for longer counts as unavailable."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request, such as ``Authorization``."""
    trust_env: bool = False
    """Whether to use the proxies that the environment names."""


class StreamReader(Protocol):
    """Makes pieces of a completion out of the events of one stream."""

    count: int
    """How many ids arrived."""
    finished: bool
    """Whether the reason why it ended has arrived."""

    def feed(self, answer: Any) -> Delta | None:
        """The piece that an event brings; None where it brings no ids. The last piece is held back."""
        ...

    def close(self) -> Delta:
        """The last piece."""
        ...


class _Lost(Exception):  # noqa: N818
    """A try that came to nothing."""

    def __init__(self, reason: str, *, wait: float | None = None, again: bool = True, accepted: bool = False) -> None:
        self.wait = wait
        """What the server asks to wait, in seconds."""
        self.again = again
        """Whether to try again here."""
        self.accepted = accepted
        """Whether a part of a good answer had arrived."""
        super().__init__(reason)


class Connection:
    """A server, and the pool of connections to it.

    `transport`, `sleep` and `jitter` (0 to 1) are for tests.
    """

    def __init__(
        self,
        base_url: str,
        settings: HTTPSettings | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise EngineError("engines behind HTTP need httpx2: install tokentrace[engines]") from error
        self.base_url: Final = base_url.rstrip("/")
        self.settings: Final = settings or HTTPSettings()
        self._sleep: Final = sleep
        self._jitter: Final = jitter
        self._httpx: Final = httpx2
        limits = httpx2.Limits(max_connections=self.settings.connections, max_keepalive_connections=None)
        timeout = httpx2.Timeout(
            connect=self.settings.connect_timeout,
            read=self.settings.read_timeout,
            write=self.settings.read_timeout,
            pool=None,
        )
        try:
            self._client: Final = httpx2.AsyncClient(
                headers=dict(self.settings.headers),
                limits=limits,
                timeout=timeout,
                transport=transport,
                trust_env=self.settings.trust_env,
            )
            self._client.build_request("GET", self.base_url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise EngineError(f"{base_url!r} is no address of a server: {error}") from error

    async def get(self, path: str) -> Any:
        """The JSON value at a path."""
        return self._json(path, await self._answer("GET", path, None))

    async def post(self, path: str, body: bytes) -> Any:
        """The JSON value that is answered to a body of JSON text."""
        return self._json(path, await self._answer("POST", path, body))

    async def tell(self, path: str, body: bytes | None = None) -> None:
        """Post something whose answer says nothing."""
        await self._answer("POST", path, body)

    async def found(self, path: str) -> Any | None:
        """As `get`; None where the server does not know the path or does not allow it."""
        try:
            return await self.get(path)
        except EngineRefusal:
            return None

    async def stream(self, path: str, body: bytes, make: Callable[[], StreamReader]) -> AsyncGenerator[Delta]:
        """The pieces of a streamed answer. Closing the iterator closes the connection."""
        for tries in count():
            reader = make()
            try:
                async with aclosing(self._events(path, body)) as events:
                    async for event in events:
                        delta = reader.feed(event)
                        if delta is not None:
                            yield delta
            except _Lost as lost:
                if reader.count and not reader.finished:
                    raise EngineError(
                        f"{self.base_url}{path}: {lost}, after {reader.count} tokens had arrived; it is not sent "
                        "again, because that would be another sample"
                    ) from lost
                if not reader.finished:
                    await self._rest(path, tries, lost)
                    continue
            if not reader.finished:
                raise EngineAnswerError(
                    f"{self.base_url}{path}: the stream ended after {reader.count} tokens without saying why"
                )
            yield reader.close()
            return

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    # -- one try, and the next

    async def _answer(self, method: str, path: str, body: bytes | None) -> bytes:
        for tries in count():
            try:
                async with self._opened(method, path, body) as (response, deadline):
                    async with asyncio.timeout_at(deadline):
                        answer = b"".join([piece async for piece in response.aiter_bytes()])
                    self._check_status(path, response, answer)
                    return answer
            except _Lost as lost:
                if lost.accepted:
                    raise EngineError(
                        f"{self.base_url}{path}: {lost}, when a part of the answer had arrived; it is not sent again, "
                        "because that would be another sample"
                    ) from lost
                await self._rest(path, tries, lost)
        raise AssertionError("the last try raises")

    async def _events(self, path: str, body: bytes) -> AsyncGenerator[Any]:
        reader = EventReader()
        began = False
        async with self._opened("POST", path, body) as (response, deadline):
            arriving = response.aiter_bytes()
            if not response.is_success:
                async with asyncio.timeout_at(deadline):
                    self._check_status(path, response, b"".join([piece async for piece in arriving]))
            while True:
                async with asyncio.timeout_at(deadline):  # around each wait, never around a yield
                    piece = await anext(arriving, None)
                if piece is None:
                    break
                began = True
                for data in reader.feed(piece):
                    if data.strip() == _DONE:
                        return
                    yield self._event(path, data)
            if not began:
                raise _Lost("the stream ended before its first byte")

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: bytes | None
    ) -> AsyncIterator[tuple[httpx2.Response, float | None]]:
        """A response, and when it must be whole. What goes wrong until it is closed is told in our own errors."""
        httpx2 = self._httpx
        where = f"{self.base_url}{path}"
        total = self.settings.total_timeout
        deadline = None if total is None else asyncio.get_running_loop().time() + total
        headers = {} if body is None else {"content-type": "application/json"}
        request = self._client.build_request(method, where, content=body, headers=headers)
        response = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._client.send(request, stream=True)
            yield response, deadline
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _Lost(f"no connection: {_words(error)}") from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise _Lost("no whole answer in time", again=False, accepted=_began(response)) from error
        except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.ProxyError) as error:
            raise EngineError(f"{where}: {_words(error)}") from error
        except httpx2.TransportError as error:
            raise _Lost(f"the connection broke: {_words(error)}", accepted=_began(response)) from error
        except httpx2.DecodingError as error:
            raise EngineAnswerError(f"{where}: the answer cannot be decoded: {_words(error)}") from error
        finally:
            if response is not None:
                await response.aclose()

    async def _rest(self, path: str, tries: int, lost: _Lost) -> None:
        """Wait before the next try; `EngineUnavailable` where there is none."""
        settings = self.settings
        asked = lost.wait or 0.0
        if not lost.again or tries >= settings.retries or asked > settings.longest_retry_after:
            times = f", {tries + 1} times" if tries else ""
            later = f"; it asks to be left alone for {asked:g} s" if asked > settings.longest_retry_after else ""
            raise EngineUnavailable(f"{self.base_url}{path}: {lost}{times}{later}") from lost
        backoff = min(settings.backoff * 2**tries, settings.longest_backoff) * (1 - self._jitter() / 2)
        await self._sleep(max(backoff, asked))

    # -- what the server says

    def _check_status(self, path: str, response: httpx2.Response, answer: bytes) -> None:
        status = response.status_code
        if response.is_success:
            return
        said = f"the server said {status}: {_said(answer)}"
        if status == 429 or status >= 500:
            raise _Lost(said, wait=_retry_after(response.headers.get("retry-after")))
        raise EngineRefusal(f"{self.base_url}{path}: {said}", status=status)

    def _event(self, path: str, data: bytes) -> Any:
        event = self._json(path, data)
        if not isinstance(event, dict) or event.get("error") is None:
            return event
        error = event["error"]
        code = error.get("code") if isinstance(error, dict) else None
        said = f"the server said, in its stream: {_said(data)}"
        if isinstance(code, int) and 400 <= code < 500 and code != 429:
            raise EngineRefusal(f"{self.base_url}{path}: {said}", status=code)
        raise _Lost(said)

    def _json(self, path: str, answer: bytes) -> Any:
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            shown = _short(answer.decode("utf-8", "replace"))
            raise EngineAnswerError(f"{self.base_url}{path}: the answer is no JSON: {shown!r}") from error


def _began(response: httpx2.Response | None) -> bool:
    """Whether a part of a good answer has arrived."""
    return response is not None and response.is_success and response.num_bytes_downloaded > 0


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _said(answer: bytes) -> str:
    """A server's own words about what went wrong."""
    text = answer.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _short(text)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return _short(value if isinstance(value, str) else text)


def _retry_after(value: str | None) -> float | None:
    """The seconds that a ``Retry-After`` asks for, as a number or a date; None where it is neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None
