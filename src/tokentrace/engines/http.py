"""What the engines behind HTTP share: one pool of connections, timeouts, retries, and typed errors.

A request is sent again only while nothing of its answer was accepted:

- The connection is lost before a byte of the answer's body arrived, or the server says 429 or 5xx: again, after a
  pause that doubles. A ``Retry-After`` is waited for.
- A whole answer that broke off after its first byte, or a stream after its first token: `EngineError`, never again.
  The engine has sampled by then, and a second sample in its place would be another draw.
- A timeout after connecting: `EngineUnavailable` at once. The connection is closed, which ends the request; the same
  engine would take as long again, another may not.

A stream of which bytes arrived but no token counts as not accepted.

What a server may send is bounded: a whole answer by `HTTPSettings.longest_answer`, an event of a stream by
`_EVENT_BYTES`, the words of a refusal by `_ERROR_BYTES`. Packed answers (gzip and the like) are not asked for and not
read: a few kilobytes of them may unpack to gigabytes.

No error, repr or log names a secret: the user and password of an address become an ``Authorization`` header and are
gone from the address, and the values of headers are taken out of whatever a server says.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import reduce
from itertools import count
from time import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from ..errors import shown
from ..settings import limit, whole
from .answers import AnswerReader
from .protocol import Delta, EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from .sse import EventReader

if TYPE_CHECKING:
    import httpx2

_SHOWN: Final = 300
"""How many characters of a server's own words an error quotes."""
_ERROR_BYTES: Final = 1 << 16
"""How much of a refusal's body is read."""
_EVENT_BYTES: Final = 16 << 20
"""How large one event of a stream may be. A stream as a whole is bounded by the tokens that were asked for."""
_CONNECT_SECONDS: Final = 10.0
_BACKOFF: Final = 0.5
"""Seconds before the first retry; the pause doubles with each, up to `_LONGEST_BACKOFF`, and is cut by up to a half at
random."""
_LONGEST_BACKOFF: Final = 30.0
_LONGEST_RETRY_AFTER: Final = 120.0
"""A server that asks to be left alone for longer counts as unavailable."""
_DONE: Final = b"[DONE]"
_LINGER: Final = 1.0
"""How many seconds the end of a body is waited for, after the event that says that there is no more."""
_SOON: Final = 5.0
"""How many seconds a server has to say that it is there."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[ -~\t]*")
_HIDDEN: Final = "[hidden]"
_SECRET_LENGTH: Final = 4
"""Shorter values of headers are not looked for in what a server says: they would be found everywhere."""


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """How to talk to a server. Times are seconds; None is no limit."""

    read_timeout: float | None = 600.0
    """The longest silence. A whole answer is silent until the last token is sampled."""
    total_timeout: float | None = 3600.0
    """For one try, from the wait for a free connection to the last byte."""
    connections: int | None = 1000
    """How many requests may be under way at once; others wait for their turn."""
    retries: int = 5
    longest_answer: int | None = 64 << 20
    """Bytes of a whole answer. A sampled token takes some 100 of them, an id of the prompt that is sent back some 7."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request, such as ``Authorization``. Their values are never shown."""

    def __post_init__(self) -> None:
        for name in ("read_timeout", "total_timeout"):
            limit(name, getattr(self, name), error=EngineError)
        limit("longest_answer", self.longest_answer, unit="bytes", error=EngineError)
        whole("retries", self.retries, least=0, most=2**31, error=EngineError)
        if self.connections is not None:
            whole("connections", self.connections, least=1, most=2**31, error=EngineError)
        if not isinstance(self.headers, Mapping):
            raise EngineError(f"headers must be a mapping of names to values, not {type(self.headers).__name__}")
        for name, value in self.headers.items():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise EngineError(f"headers: {shown(name)} cannot be the name of a header")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                raise EngineError(f"headers: the value of {name} is not shown here; it must be printable ASCII text")


class _Lost(Exception):  # noqa: N818
    """One try failed. The next may not, unless a part of a good answer was `accepted`."""

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
        self.settings: Final = settings or HTTPSettings()
        self.base_url, authorization = _address(base_url)
        headers = {**self.settings.headers, "Accept-Encoding": "identity"}
        if authorization is not None:
            if any(name.lower() == "authorization" for name in headers):
                raise EngineError(f"{self.base_url}: give a user in the address or an Authorization header, not both")
            headers["Authorization"] = authorization
        self._secrets: Final = _secrets(self.settings.headers, base_url, authorization)
        self._sleep: Final = sleep
        self._jitter: Final = jitter
        self._httpx: Final = httpx2
        limits = httpx2.Limits(max_connections=self.settings.connections, max_keepalive_connections=None)
        timeout = httpx2.Timeout(
            connect=_CONNECT_SECONDS,
            read=self.settings.read_timeout,
            write=self.settings.read_timeout,
            pool=None,
        )
        try:
            self._client: Final = httpx2.AsyncClient(
                headers=headers,
                limits=limits,
                timeout=timeout,
                transport=transport,
                trust_env=False,
            )
            self._client.build_request("GET", self.base_url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise EngineError(f"{self.base_url!r} is not the address of a server: {error}") from error

    async def get(self, path: str) -> Any:
        """The JSON value at a path."""
        return await self._answer("GET", path, None, self._json)

    async def post(self, path: str, body: bytes, read: Callable[[bytes], Any] = json.loads) -> Any:
        """The JSON value that is answered to a body of JSON text; `read` reads it."""
        return await self._answer("POST", path, body, lambda answer: self._json(answer, read))

    async def tell(self, path: str, body: bytes | None = None) -> None:
        """Post something whose answer says nothing."""
        await self._answer("POST", path, body, bytes)

    async def found(self, path: str) -> Any | None:
        """As `get`; None where the server does not know the path or does not allow it."""
        try:
            return await self.get(path)
        except EngineRefusal:
            return None

    async def reach(self, path: str) -> None:
        """Ask for a path, once. Raises `EngineUnavailable` unless the server answers soon, with a status below 500."""
        try:
            async with asyncio.timeout(_SOON), self._opened("GET", path, None) as (response, _):
                if response.status_code >= 500:
                    raise _Lost(f"the server said {response.status_code}")
        except (TimeoutError, _Lost) as error:
            raise EngineUnavailable(f"{self.base_url}{path}: {error or f'no answer in {_SOON:g} s'}") from error

    async def stream(self, path: str, body: bytes, make: Callable[[], AnswerReader]) -> AsyncGenerator[Delta]:
        """The pieces of a streamed answer. Closing the iterator closes the connection."""
        for tries in count():
            reader = make()
            try:
                async with aclosing(self._events(path, body, reader.read)) as events:
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

    async def _answer(self, method: str, path: str, body: bytes | None, read: Callable[[bytes], Any]) -> Any:
        for tries in count():
            try:
                async with self._opened(method, path, body) as (response, deadline):
                    async with asyncio.timeout_at(deadline):
                        answer = await self._body(response)
                    self._check_status(response, answer)
                    return read(answer)
            except _Lost as lost:
                if lost.accepted:
                    raise EngineError(
                        f"{self.base_url}{path}: {lost}, when a part of the answer had arrived; it is not sent again, "
                        "because that would be another sample"
                    ) from lost
                await self._rest(path, tries, lost)
        raise AssertionError("the last try raises")

    async def _events(self, path: str, body: bytes, read: Callable[[bytes], Any]) -> AsyncGenerator[Any]:
        reader = EventReader(_EVENT_BYTES)
        began = False
        async with self._opened("POST", path, body) as (response, deadline):
            if not response.is_success:
                async with asyncio.timeout_at(deadline):
                    self._check_status(response, await self._body(response))
            _check_packing(response)
            arriving = response.aiter_bytes()
            while True:
                async with asyncio.timeout_at(deadline):  # around each wait, never around a yield
                    piece = await anext(arriving, None)
                if piece is None:
                    break
                began = True
                for data in reader.feed(piece):
                    if data.strip() == _DONE:
                        await self._finish(arriving)
                        return
                    yield self._event(data, read)
            if not began:
                raise _Lost("the stream ended before its first byte")

    async def _finish(self, arriving: AsyncIterator[bytes]) -> None:
        """Read the end of a body, of which nothing matters any more: a connection that was read to its end is kept."""
        with suppress(TimeoutError, self._httpx.TransportError):
            async with asyncio.timeout(_LINGER):
                while await anext(arriving, None) is not None:
                    pass

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: bytes | None
    ) -> AsyncIterator[tuple[httpx2.Response, float | None]]:
        """A response, and when it must be whole. What goes wrong until it is closed is an error with the address."""
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
            raise _Lost(f"no connection: {self._words(error)}") from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise _Lost("no whole answer in time", again=False, accepted=_began(response)) from error
        except (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.ProxyError) as error:
            raise EngineError(f"{where}: {self._words(error)}") from error
        except EngineError as error:
            error.args = (f"{where}: {error}",)
            raise
        except httpx2.TransportError as error:
            raise _Lost(f"the connection broke: {self._words(error)}", accepted=_began(response)) from error
        finally:
            if response is not None:
                await response.aclose()

    async def _rest(self, path: str, tries: int, lost: _Lost) -> None:
        """Wait before the next try; `EngineUnavailable` where there will be none."""
        asked = lost.wait or 0.0
        too_long = asked > _LONGEST_RETRY_AFTER
        if not lost.again or tries >= self.settings.retries or too_long:
            times = f", {tries + 1} times" if tries else ""
            later = f"; it asks to be left alone for {asked:g} s" if too_long else ""
            raise EngineUnavailable(f"{self.base_url}{path}: {lost}{times}{later}") from lost
        backoff = min(_BACKOFF * 2**tries, _LONGEST_BACKOFF) * (1 - self._jitter() / 2)
        await self._sleep(max(backoff, asked))

    # -- what the server says

    async def _body(self, response: httpx2.Response) -> bytes:
        """A whole answer; of a refusal, the beginning."""
        if not response.is_success and (packing := _packing(response)) is not None:
            return f"something packed with {packing}, which is not read".encode()
        _check_packing(response)
        most = self.settings.longest_answer if response.is_success else _ERROR_BYTES
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if most is not None and len(body) > most:
                if not response.is_success:
                    break
                raise EngineAnswerError(f"the answer has more than {most} bytes (longest_answer), and was not read")
        return bytes(body)

    def _hidden(self, text: str) -> str:
        """Without what is secret."""
        return reduce(lambda shorter, secret: shorter.replace(secret, _HIDDEN), self._secrets, text)

    def _words(self, error: Exception) -> str:
        return self._hidden(str(error) or type(error).__name__)

    def _check_status(self, response: httpx2.Response, answer: bytes) -> None:
        status = response.status_code
        if response.is_success:
            return
        said = f"the server said {status}: {self._said(answer)}"
        if status == 429 or status >= 500:
            raise _Lost(said, wait=_retry_after(response.headers.get("retry-after")))
        raise EngineRefusal(said, status=status)

    def _event(self, data: bytes, read: Callable[[bytes], Any]) -> Any:
        event = self._json(data, read)
        if not isinstance(event, dict) or event.get("error") is None:
            return event
        error = event["error"]
        code = error.get("code") if isinstance(error, dict) else None
        said = f"the server said, in its stream: {self._said(data)}"
        if isinstance(code, int) and 400 <= code < 500 and code != 429:
            raise EngineRefusal(said, status=code)
        raise _Lost(said)

    def _json(self, answer: bytes, read: Callable[[bytes], Any] = json.loads) -> Any:
        try:
            return read(answer)
        except (ValueError, RecursionError) as error:
            begins = _short(self._hidden(answer[:_ERROR_BYTES].decode("utf-8", "replace")))
            # the error of the parser has the whole document at hand
            raise EngineAnswerError(f"the answer is not JSON: {begins!r}") from ValueError(str(error))

    def _said(self, answer: bytes) -> str:
        """A server's own words about what went wrong."""
        text = self._hidden(answer.decode("utf-8", "replace"))
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return _short(text)
        for name in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(name):
                value = value[name]
        return _short(value if isinstance(value, str) else text)


def _began(response: httpx2.Response | None) -> bool:
    """Whether a part of a good answer has arrived."""
    return response is not None and response.is_success and response.num_bytes_downloaded > 0


def _packing(response: httpx2.Response) -> str | None:
    """What an answer is packed with; None where it is not."""
    found = response.headers.get("content-encoding", "").strip().lower()
    return _short(found) if found not in ("", "identity") else None


def _check_packing(response: httpx2.Response) -> None:
    packing = _packing(response)
    if packing is not None:
        raise EngineAnswerError(
            f"the answer is packed with {packing}, which was not asked for and is not read: turn compression off, in "
            "the server or in the proxy before it"
        )


def shown_address(given: str) -> str:
    """An address as errors show it: without user, password, query and fragment."""
    rest = re.split(r"[?#]", given.rpartition("@")[2])[0]
    scheme = given.partition("://")[0]
    return f"{scheme}://{rest}" if "@" in given and scheme in ("http", "https") else rest


def _address(given: Any) -> tuple[str, str | None]:
    """An address without its user and password, and the header that says them."""
    if not isinstance(given, str):
        raise EngineError(f"the address of a server is a str such as 'http://127.0.0.1:8000', not {shown(given)}")
    try:
        parts = urlsplit(given)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # its words may hold the password
        is_right = False
    public = shown_address(given)
    if not is_right:
        raise EngineError(f"{public!r} is not the address of a server: one is 'http://host:port', or https")
    if parts.query or parts.fragment:
        raise EngineError(f"{public!r}: an address has no query and no fragment; send keys in HTTPSettings.headers")
    user, at, host = parts.netloc.rpartition("@")
    authorization = None
    if at:
        name, _, password = user.partition(":")
        both = f"{unquote(name)}:{unquote(password)}"
        authorization = f"Basic {base64.b64encode(both.encode()).decode('ascii')}"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), authorization


def _secrets(headers: Mapping[str, str], address: str, authorization: str | None) -> tuple[str, ...]:
    """What must not be shown, the longest first: values of headers, with and without ``Bearer`` or the like."""
    found = [*headers.values(), *([authorization] if authorization else [])]
    found += [value.partition(" ")[2] for value in found]
    if authorization:
        user = urlsplit(address).netloc.rpartition("@")[0]
        found += [user, unquote(user), user.partition(":")[2], unquote(user.partition(":")[2])]
    return tuple(sorted({one for one in found if len(one) >= _SECRET_LENGTH}, key=len, reverse=True))


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _retry_after(value: str | None) -> float | None:
    """The seconds that a ``Retry-After`` asks for, as a number or a date; None where it is neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError, OSError):
        return None
