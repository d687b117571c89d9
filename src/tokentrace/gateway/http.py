"""HTTP bodies in and out, and the log. Refuses bodies that are too long, too deep or not JSON."""

from __future__ import annotations

import itertools
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..conversation.values import MAX_DEPTH, finite, no_constant
from ..errors import TokentraceError, brief
from ..store.store import State
from .problems import RequestError, request_error
from .requests import NO_PAST, Past
from .requests import Request as AgentRequest
from .turns import shared_prefix

if TYPE_CHECKING:
    from .gateway import Gateway

LOGGER: Final = logging.getLogger("tokentrace.gateway")
Endpoint: TypeAlias = "Callable[[Gateway, Request], Awaitable[Response]]"
Routes: TypeAlias = Mapping[str, Mapping[str, Endpoint]]
"""What answers administrators, by path and method."""
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS: Final = msgspec.json.Decoder(list[msgspec.Raw])


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. Raises RequestError if it is longer than `most` bytes."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise RequestError(f"the body is longer than {most} bytes", status=413, code="request_too_large")
        pieces.append(piece)
    return b"".join(pieces)


async def read_json(request: Request, most: int) -> Any:
    """The value of a body; an empty object if it is empty."""
    raw = await read_body(request, most)
    return parse_json(raw) if raw.strip() else {}


def parse_json(raw: bytes | msgspec.Raw) -> Any:
    """The value of JSON text. Raises RequestError if it is not valid, or nested too deeply."""
    try:
        value = _decode(raw)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH):
        items = itertools.chain.from_iterable(each.values() if type(each) is dict else each for each in level)
        level = [item for item in items if type(item) is dict or type(item) is list]
        if not level:
            return value
    raise RequestError(f"the body is nested more than {MAX_DEPTH} deep")


def _decode(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # half of a surrogate pair, which agents send, is not an error
        return json.loads(bytes(raw), parse_constant=no_constant, parse_float=finite)


@dataclass(frozen=True, slots=True)
class Body:
    """The value of a request's body, whose history lacks what is `past`."""

    value: Any
    past: Past = NO_PAST
    texts: Sequence[msgspec.Raw] = ()
    """The items of the history as JSON."""
    tools: msgspec.Raw | None = None


def parse_body(raw: bytes, history: str, earlier: tuple[Body, AgentRequest] | None) -> Body:
    """Parse a body, of whose `history` only what an `earlier` one with the same tools does not have."""
    try:
        fields = _FIELDS.decode(raw)
        texts = _TEXTS.decode(fields.pop(history))
    except (KeyError, ValueError, RecursionError):
        return Body(parse_json(raw))
    tools, past = fields.get("tools"), NO_PAST
    if earlier is not None and earlier[0].tools == tools:
        past = earlier[1].past(shared_prefix(texts, earlier[0].texts))
    value = {name: parse_json(text) for name, text in fields.items()}
    value[history] = parse_json(b"[" + b",".join(texts[past.items :]) + b"]")
    return Body(value, past, texts, tools)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON. Escapes half surrogate pairs, which UTF-8 cannot encode."""
    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        data = json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(data, status, dict(headers or {}), "application/json")


def read_state(request: Request) -> State | None:
    """The state that the address names, if any."""
    value = request.query_params.get("state")
    if not value:
        return None
    if value not in tuple(State):
        raise RequestError(f"must be one of {', '.join(State)}, not {brief(value)}", field="state")
    return State(value)


def log_request(method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
    """Write a line of JSON for a request whose response has ended."""
    line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
    level = logging.INFO if status < 500 else logging.WARNING
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))


def as_problem(error: BaseException) -> RequestError:
    """The error that a client gets. Of an unforeseen one the log has type and place, and nobody its message."""
    if isinstance(error, TokentraceError):
        return request_error(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rsplit('/tokentrace/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    LOGGER.error(json.dumps({"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}))
    return RequestError("the gateway failed; its log says how", status=500, code="internal")
