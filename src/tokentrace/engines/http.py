"""What HTTP engines share: a connection pool, timeouts, retries and typed errors.

- Lost before a byte of the answer's body arrived, 429 or 5xx: sent again, after a pause that doubles.
- A whole answer lost after its first byte, a stream lost after its first token: `EngineError`, never sent again. The
  engine has sampled by then, and a second sample would be another draw.
- A timeout after connecting: `EngineUnavailable` at once. The same engine would take as long again.

Answers are bounded. Compressed ones are not read: a few kilobytes may unpack to gigabytes. No error, repr or log
contains a secret.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from itertools import count
from time import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from ..errors import brief
from ..settings import limit, whole
from .answers import AnswerReader, decode
from .errors import Backoff, EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from .protocol import Delta

if TYPE_CHECKING:
    import httpx2

_QUOTED: Final = 300
"""How many characters of a server's message an error quotes."""
_ERROR_BYTES: Final = 1 << 16
_EVENT_BYTES: Final = 16 << 20
_CONNECTIONS: Final = 1000
_CONNECT_SECONDS: Final = 10.0
_BACKOFF: Final = Backoff(0.5, 30.0)
_LONGEST_RETRY_AFTER: Final = 120.0
"""A server that asks for a longer pause counts as unavailable."""
_LINGER: Final = 1.0
"""Seconds to wait for the end of a body after the event that ends the stream."""
_HEALTH_SECONDS: Final = 5.0
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE: Final = re.compile(r"[ -~\t]*")
_SECRET_LENGTH: Final = 4
"""Shorter header values are not hidden: they would match everywhere."""
_NO_RESEND: Final = "the request is not sent again, because that would be another sample"


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """How to talk to a server. Times are seconds; None is no limit."""

    read_timeout: float | None = 600.0
    """The longest silence. Without streaming, a server is silent until the last token is sampled."""
    total_timeout: float | None = 3600.0
    """For one try, from the wait for a free connection to the last byte."""
    retries: int = 5
    longest_answer: int | None = 64 << 20
    """Bytes: about 100 per sampled token, and 7 per id of an echoed prompt."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Such as ``Authorization``. Errors never contain their values."""

    def __post_init__(self) -> None:
        for name in ("read_timeout", "total_timeout"):
            limit(name, getattr(self, name), error=EngineError)
        limit("longest_answer", self.longest_answer, unit="bytes", error=EngineError)
        whole("retries", self.retries, least=0, most=2**31, error=EngineError)
        if not isinstance(self.headers, Mapping):
            raise EngineError(f"headers must be a mapping of names to values, not {type(self.headers).__name__}")
        for name, value in self.headers.items():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise EngineError(f"headers: {brief(name)} cannot be the name of a header")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                raise EngineError(f"headers: the value of {name} must be printable ASCII text")


class EventReader:
    r"""Returns the data of server-sent events as soon as each is whole, from bytes in any pieces.

    Ignores comments and fields other than ``data``. Raises EngineAnswerError for an event that is too long.

    >>> reader = EventReader()
    >>> reader.feed(b"data: 1\n\nda"), reader.feed(b"ta: 2\r\n"), reader.feed(b"\r\n")
    ([b'1'], [], [b'2'])
    """

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that end in this piece."""
        *lines, self._line = (self._line + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line) + 1
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._size + len(self._line) > _EVENT_BYTES:
            raise EngineAnswerError(f"an event of the stream has more than {_EVENT_BYTES} bytes")
        return events


class _Lost(Exception):  # noqa: N818
    """One try failed. The next may succeed after `wait` seconds, unless retrying is pointless (`again` is False)."""

    def __init__(self, reason: str, *, wait: float = 0.0, again: bool = True) -> None:
        self.wait, self.again = wait, again
        super().__init__(reason)


class Connection:
    """A server and the pool of connections to it. `transport`, `sleep` and `jitter` are for tests."""

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
        self.base_url, user = _address(base_url)
        headers = dict(self.settings.headers)
        if user is not None:
            if any(name.lower() == "authorization" for name in headers):
                raise EngineError(f"{self.base_url}: give a user in the address or an Authorization header, not both")
            headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode('ascii')}"
        self._secrets: Final = _secrets(headers, user)
        self._sleep: Final = sleep
        self._jitter: Final = jitter
        self._httpx: Final = httpx2
        silence = self.settings.read_timeout
        try:
            self._client: Final = httpx2.AsyncClient(
                headers={**headers, "Accept-Encoding": "identity"},
                limits=httpx2.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=None),
                timeout=httpx2.Timeout(connect=_CONNECT_SECONDS, read=silence, write=silence, pool=None),
                transport=transport,
                trust_env=False,
            )
            self._client.build_request("GET", self.base_url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise EngineError(f"{self.base_url!r} is not the address of a server: {error}") from error

    async def get(self, path: str, kind: Any = Any) -> Any:
        """Return the answer at a path, decoded as a struct of `kind`."""
        return await self._request("GET", path, None, kind)

    async def find(self, path: str, kind: Any = Any) -> Any | None:
        """Like `get`, but returns None if the server does not know or allow the path."""
        with suppress(EngineRefusal):
            return await self.get(path, kind)
        return None

    async def post(self, path: str, body: bytes | None = None, kind: Any = None) -> Any:
        """Return the answer to a JSON body, decoded as `kind`; None ignores the answer."""
        return await self._request("POST", path, body, kind)

    async def reach(self, path: str) -> None:
        """Request a path once. Raises EngineUnavailable if the server does not answer soon, or answers 429 or 5xx."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS), aclosing(self._chunks("GET", path, None)) as chunks:
                await anext(chunks, None)
        except (EngineRefusal, EngineAnswerError):  # it answers
            return
        except (TimeoutError, _Lost) as error:
            problem = str(error) or f"no answer in {_HEALTH_SECONDS:g} s"
            raise EngineUnavailable(f"{self.base_url}{path}: {problem}") from error

    async def stream(
        self, path: str, body: bytes, kind: Any, new_reader: Callable[[], AnswerReader]
    ) -> AsyncGenerator[Delta]:
        """Yield the pieces of a streamed answer, whose events are of `kind`. Closing the iterator ends the request."""
        with errors_at(f"{self.base_url}{path}"):
            for tries in count(1):
                reader, events, started = new_reader(), EventReader(), False
                try:
                    async with aclosing(self._chunks("POST", path, body)) as chunks:
                        async for chunk in chunks:
                            started = True
                            for data in events.feed(chunk):
                                if data.strip() == b"[DONE]":
                                    await _drain(chunks)
                                    break
                                self._check_event(data)
                                delta = reader.feed(decode(data, kind, self._hide))
                                if delta is not None:
                                    yield delta
                    if not started:
                        raise _Lost("the stream ended before its first byte")
                except _Lost as lost:
                    if reader.last is None and reader.count:
                        raise EngineError(f"{lost}, after {reader.count} tokens; {_NO_RESEND}") from lost
                    if reader.last is None:
                        await self._pause(tries, lost)
                        continue
                if reader.last is None:
                    raise EngineAnswerError(f"the stream ended after {reader.count} tokens without a finish reason")
                yield reader.close()
                return

    async def close(self) -> None:
        await self._client.aclose()

    # -- one try, and the next

    async def _request(self, method: str, path: str, body: bytes | None, kind: Any) -> Any:
        longest = self.settings.longest_answer
        with errors_at(f"{self.base_url}{path}"):
            tries = 0
            while True:
                tries, answer = tries + 1, bytearray()
                try:
                    async with aclosing(self._chunks(method, path, body)) as chunks:
                        async for chunk in chunks:
                            answer += chunk
                            if longest is not None and len(answer) > longest:
                                raise EngineAnswerError(f"the answer has more than {longest} bytes (longest_answer)")
                    return None if kind is None else decode(bytes(answer), kind, self._hide)
                except _Lost as lost:
                    if answer:
                        part = "after part of the answer had arrived"
                        raise EngineError(f"{lost}, {part}; {_NO_RESEND}") from lost
                    await self._pause(tries, lost)

    async def _chunks(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes]:
        """Yield the body of a successful answer, in one try. Raises _Lost if another try may succeed."""
        errors, total = self._httpx, self.settings.total_timeout
        deadline = None if total is None else asyncio.get_running_loop().time() + total
        headers = {} if body is None else {"content-type": "application/json"}
        request = self._client.build_request(method, f"{self.base_url}{path}", content=body, headers=headers)
        response: httpx2.Response | None = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._client.send(request, stream=True)
                compression = response.headers.get("content-encoding", "").strip().lower()
                compression = "" if compression == "identity" else compression[:_QUOTED]
                if not response.is_success:
                    raise await self._problem(response, readable=not compression)
            if compression:
                raise EngineAnswerError(
                    f"the answer is compressed with {compression} and cannot be read: turn compression off, in the "
                    "server or in the proxy in front of it"
                )
            arriving = response.aiter_bytes()
            while True:
                async with asyncio.timeout_at(deadline):  # around each wait, never around a yield
                    chunk = await anext(arriving, None)
                if chunk is None:
                    return
                yield chunk
        except (errors.ConnectError, errors.ConnectTimeout) as error:
            raise _Lost(f"no connection: {self._message(error)}") from error
        except (errors.TimeoutException, TimeoutError) as error:
            raise _Lost("no complete answer in time", again=False) from error
        except (errors.UnsupportedProtocol, errors.LocalProtocolError, errors.ProxyError) as error:
            raise EngineError(self._message(error)) from error
        except errors.TransportError as error:
            raise _Lost(f"the connection broke: {self._message(error)}") from error
        finally:
            if response is not None:
                await response.aclose()

    async def _pause(self, tries: int, lost: _Lost) -> None:
        """Wait before the next try. Raises EngineUnavailable if another try is pointless or not allowed."""
        too_long = lost.wait > _LONGEST_RETRY_AFTER
        if not lost.again or tries > self.settings.retries or too_long:
            times = f", {tries} times" if tries > 1 else ""
            later = f"; it asks for a pause of {lost.wait:g} s" if too_long else ""
            raise EngineUnavailable(f"{lost}{times}{later}") from lost
        await self._sleep(max(_BACKOFF.after(tries) * (1 - self._jitter() / 2), lost.wait))

    # -- what the server sends

    async def _problem(self, response: httpx2.Response, *, readable: bool) -> Exception:
        """Return the error for an answer with an error status."""
        body, status = bytearray(), response.status_code
        if readable:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _ERROR_BYTES:
                    break
        problem = f"the server answered {status}: {self._error_text(bytes(body))}"
        if status == 429 or status >= 500:
            return _Lost(problem, wait=_retry_after(response.headers.get("retry-after", "0")))
        return EngineRefusal(problem, status=status)

    def _hide(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "[hidden]")
        return text

    def _message(self, error: Exception) -> str:
        return self._hide(str(error) or type(error).__name__)

    def _check_event(self, data: bytes) -> None:
        event: Any = decode(data, Any, self._hide) if b'"error"' in data else None
        error = event.get("error") if isinstance(event, dict) else None
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            problem = f"the server reported an error in its stream: {self._error_text(data)}"
            if isinstance(code, int) and 400 <= code < 500 and code != 429:
                raise EngineRefusal(problem, status=code)
            raise _Lost(problem)

    def _error_text(self, answer: bytes) -> str:
        text = self._hide(answer.decode("utf-8", "replace"))
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            for name in ("error", "message", "detail"):
                if isinstance(value, dict) and value.get(name):
                    value = value[name]
            text = value if isinstance(value, str) else text
        text = " ".join(text.split())
        return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Prefix error messages with the address."""
    try:
        yield
    except EngineError as error:
        if not str(error).startswith(where):
            error.args = (f"{where}: {error}",)
        raise


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    with suppress(TimeoutError, _Lost):
        async with asyncio.timeout(_LINGER):
            async for _ in chunks:
                pass


def _retry_after(value: str) -> float:
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError, OSError):
        return 0.0


def public_address(address: str) -> str:
    """Return an address for errors: without user, password, query and fragment."""
    public = re.split(r"[?#]", address.rpartition("@")[2])[0]
    scheme = address.partition("://")[0]
    return f"{scheme}://{public}" if "@" in address and scheme in ("http", "https") else public


def _address(address: Any) -> tuple[str, str | None]:
    """Split an address into the address without credentials and the credentials (``user:password``)."""
    if not isinstance(address, str):
        raise EngineError(f"the address of a server is a str such as 'http://127.0.0.1:8000', not {brief(address)}")
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # its message may contain the password
        is_valid = False
    public = public_address(address)
    if not is_valid:
        raise EngineError(f"{public!r} is not the address of a server, such as 'http://host:port'")
    if parts.query or parts.fragment:
        raise EngineError(f"{public!r}: an address must have no query or fragment; send keys in HTTPSettings.headers")
    user, at, host = parts.netloc.rpartition("@")
    user = user if ":" in user else f"{user}:"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), user if at else None


def _secrets(headers: Mapping[str, str], user: str | None) -> tuple[str, ...]:
    secrets = [*headers.values(), *(value.partition(" ")[2] for value in headers.values())]
    for text in (user, unquote(user)) if user else ():
        secrets += [text.rstrip(":"), text.partition(":")[2]]
    return tuple(sorted({one for one in secrets if len(one) >= _SECRET_LENGTH}, key=len, reverse=True))
