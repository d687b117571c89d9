"""What HTTP engines share: a connection pool, timeouts, retries and typed errors.

- Lost before a byte of the body arrived, 429 or 5xx: sent again, after a pause that doubles.
- An answer lost after its first byte, a stream after its first token: `EngineError`, never sent
  again. The second sample would be another draw.
- A timeout after connecting: `EngineUnavailable` at once, as it would take as long again.

Answers are bounded; compressed ones are not read. No error, repr or log contains a secret.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from ..errors import brief
from ..settings import limit, whole
from .answers import AnswerReader, decode
from .errors import EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable, backoff
from .protocol import Delta

if TYPE_CHECKING:
    import httpx2

_QUOTED = 300
_ERROR_BYTES = 1 << 16
_EVENT_BYTES = 16 << 20
_CONNECTIONS = 1000
_CONNECT_SECONDS = 10.0
_PAUSES = (0.5, 30.0)
_LONGEST_RETRY_AFTER = 120.0
"""A server that asks for a longer pause counts as unavailable."""
_LINGER = 1.0
"""How long to wait for the end of a body, to use the connection again."""
_HEALTH_SECONDS = 5.0
_HeaderName = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")]
_Headers = dict[_HeaderName, Annotated[str, Meta(pattern=r"^[ -~\t]*\Z")]]
_SECRET_LENGTH = 4
"""Shorter header values are not hidden: they would match everywhere."""
_NO_RESEND = "the request is not sent again: that would be another sample"


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """How to talk to a server. Times are seconds; None is no limit."""

    read_timeout: float | None = 600.0
    """The longest silence. Unless it streams, a server is silent until the last token."""
    total_timeout: float | None = 3600.0
    """For one try, including the wait for a free connection."""
    retries: int = 5
    longest_answer: int | None = 64 << 20
    """In bytes: about 100 per sampled token, and 7 per id of an echoed prompt."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("read_timeout", "total_timeout"):
            limit(name, getattr(self, name), error=EngineError)
        limit("longest_answer", self.longest_answer, unit="bytes", error=EngineError)
        whole("retries", self.retries, least=0, most=2**31, error=EngineError)
        headers = self.headers if isinstance(self.headers, Mapping) else {"": self.headers}
        for name, value in headers.items():
            try:
                msgspec.convert({name: value}, _Headers)
            except msgspec.ValidationError as error:  # names the header, but not its value
                raise EngineError(f"headers, {brief(name)}: {error}") from error


class EventReader:
    r"""Reads server-sent events, with a line of data each, from bytes in any pieces.

    >>> reader = EventReader()
    >>> reader.feed(b"data: 1\n\nda"), reader.feed(b"ta: 2\r\n"), reader.feed(b"\r\n")
    ([b'1'], [b'2'], [])
    """

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end here. Raises EngineAnswerError if one is too long."""
        *lines, self._tail = (self._tail + piece).split(b"\n")
        if len(self._tail) > _EVENT_BYTES:
            raise EngineAnswerError(f"an event of the stream has more than {_EVENT_BYTES} bytes")
        data = (line[5:].removesuffix(b"\r") for line in lines if line.startswith(b"data:"))
        return [one.removeprefix(b" ") for one in data]


class _Lost(Exception):  # noqa: N818
    """A try failed. The next may succeed after `wait` seconds, if `again`."""

    def __init__(self, reason: str, *, wait: float = 0.0, again: bool = True) -> None:
        self.wait, self.again = wait, again
        super().__init__(reason)


class Connection:
    """A server and a pool of connections. `transport`, `sleep`, `jitter` are for tests."""

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
            if "authorization" in map(str.lower, headers):
                raise EngineError(f"{self.base_url}: use a password or an Authorization header, not both")
            headers["Authorization"] = f"Basic {base64.b64encode(unquote(user).encode()).decode('ascii')}"
        self._secrets: Final = _secrets(headers, user)
        self._sleep, self._jitter, self._httpx = sleep, jitter, httpx2
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
        return await self.post(path, None, kind, method="GET")

    async def find(self, path: str, kind: Any = Any) -> Any | None:
        """Like `get`, but None if the server refuses the path."""
        with suppress(EngineRefusal):
            return await self.get(path, kind)
        return None

    async def post(self, path: str, body: bytes | None, kind: Any, *, method: str = "POST") -> Any:
        """The answer to a JSON body, decoded as `kind`; with None, ignore it."""
        longest, tries = self.settings.longest_answer or math.inf, 0
        with errors_at(f"{self.base_url}{path}"):
            while True:
                tries, answer = tries + 1, bytearray()
                try:
                    async with aclosing(self._chunks(method, path, body)) as chunks:
                        async for chunk in chunks:
                            answer += chunk
                            if len(answer) > longest:
                                raise EngineAnswerError(
                                    f"the answer exceeds longest_answer, {longest} bytes"
                                )
                    return None if kind is None else decode(bytes(answer), kind, self._hide)
                except _Lost as lost:
                    if answer:
                        raise EngineError(f"{lost}, after part of the answer; {_NO_RESEND}") from lost
                    await self._pause(tries, lost)

    async def reach(self, path: str) -> None:
        """Request a path once. Raises EngineUnavailable, also for 429 and 5xx."""
        try:
            async with (
                asyncio.timeout(_HEALTH_SECONDS),
                aclosing(self._chunks("GET", path, None)) as chunks,
            ):
                await anext(chunks, None)
        except (EngineRefusal, EngineAnswerError):  # it answers
            return
        except (TimeoutError, _Lost) as error:
            problem = str(error) or f"no answer in {_HEALTH_SECONDS:g} s"
            raise EngineUnavailable(f"{self.base_url}{path}: {problem}") from error

    async def stream(
        self, path: str, body: bytes, kind: Any, new_reader: Callable[[], AnswerReader]
    ) -> AsyncGenerator[Delta]:
        """Yield pieces of a stream of `kind`. Closing the iterator ends the request."""
        with errors_at(f"{self.base_url}{path}"):
            for tries in count(1):
                reader, events, started = new_reader(), EventReader(), False
                try:
                    async with aclosing(self._chunks("POST", path, body)) as chunks:
                        async for chunk in chunks:
                            started = True
                            for data in events.feed(chunk):
                                if data.strip() == b"[DONE]":
                                    with suppress(TimeoutError, _Lost):
                                        async with asyncio.timeout(_LINGER):
                                            async for _ in chunks:
                                                pass
                                    break
                                self._check_event(data)
                                if (delta := reader.feed(decode(data, kind, self._hide))) is not None:
                                    yield delta
                    if not started:
                        raise _Lost("the stream ended before its first byte")
                except _Lost as lost:
                    if reader.last is None and reader.count:
                        raise EngineError(f"{lost}, after {reader.count} tokens; {_NO_RESEND}") from lost
                    if reader.last is None:
                        await self._pause(tries, lost)
                        continue
                yield reader.close()
                return

    async def close(self) -> None:
        await self._client.aclose()

    async def _chunks(self, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes]:
        """Yield the body of a successful answer, in one try."""
        errors, total = self._httpx, self.settings.total_timeout
        deadline = None if total is None else asyncio.get_running_loop().time() + total
        headers = {} if body is None else {"content-type": "application/json"}
        request = self._client.build_request(
            method, f"{self.base_url}{path}", content=body, headers=headers
        )
        response: httpx2.Response | None = None
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._client.send(request, stream=True)
                encoding = response.headers.get("content-encoding", "").strip().lower()
                is_packed = encoding not in ("", "identity")
                if not response.is_success:
                    raise await self._problem(response, readable=not is_packed)
            if is_packed:
                raise EngineAnswerError("the answer is compressed: turn compression off")
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
        """Wait for the next try. Raises EngineUnavailable if there is none."""
        too_long = lost.wait > _LONGEST_RETRY_AFTER
        if not lost.again or tries > self.settings.retries or too_long:
            later = f"; it asks for a pause of {lost.wait:g} s" if too_long else ""
            raise EngineUnavailable(f"{lost} (try {tries}){later}") from lost
        await self._sleep(max(backoff(tries, *_PAUSES) * (1 - self._jitter() / 2), lost.wait))

    async def _problem(self, response: httpx2.Response, *, readable: bool) -> Exception:
        body, status = bytearray(), response.status_code
        if readable:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _ERROR_BYTES:
                    break
        problem = f"the server answered {status}: {self._error_text(bytes(body))}"
        if status == 429 or status >= 500:
            seconds = response.headers.get("retry-after", "").strip()
            return _Lost(problem, wait=float(seconds) if seconds.isdecimal() else 0.0)
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
        if error is None:
            return
        code = error.get("code") if isinstance(error, dict) else None
        problem = f"the server's stream reports an error: {self._error_text(data)}"
        if isinstance(code, int) and 400 <= code < 500 and code != 429:
            raise EngineRefusal(problem, status=code)
        raise _Lost(problem)

    def _error_text(self, answer: bytes) -> str:
        text = self._hide(answer.decode("utf-8", "replace"))
        with suppress(ValueError, RecursionError):
            value = json.loads(text)
            for name in ("error", "message", "detail"):
                value = value[name] if isinstance(value, dict) and value.get(name) else value
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


def public_address(address: str) -> str:
    """An address without credentials, query and fragment, for errors."""
    public = re.split(r"[?#]", address.rpartition("@")[2])[0]
    scheme = address.partition("://")[0]
    return f"{scheme}://{public}" if "@" in address and scheme in ("http", "https") else public


def _address(address: Any) -> tuple[str, str | None]:
    """Split credentials (``user:password``) off an address."""
    if not isinstance(address, str):
        raise EngineError(f"the address of a server must be text, not {brief(address)}")
    try:
        parts = urlsplit(address)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:  # its message may contain the password
        is_valid = False
    public = public_address(address)
    if not is_valid:
        raise EngineError(f"{public!r} is not the address of a server, such as 'http://host:port'")
    if parts.query or parts.fragment:
        raise EngineError(f"{public!r}: an address has no query or fragment; send keys in headers")
    user, at, host = parts.netloc.rpartition("@")
    user = user if ":" in user else f"{user}:"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), user if at else None


def _secrets(headers: Mapping[str, str], user: str | None) -> tuple[str, ...]:
    secrets = [*headers.values(), *(value.partition(" ")[2] for value in headers.values())]
    for text in (user, unquote(user)) if user else ():
        secrets += [text.rstrip(":"), text.partition(":")[2]]
    return tuple(sorted({one for one in secrets if len(one) >= _SECRET_LENGTH}, key=len, reverse=True))
