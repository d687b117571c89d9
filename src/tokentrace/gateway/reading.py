"""What comes in and goes out over HTTP: bodies too long, too deep or not JSON are refused, and answers are whole."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..conversation.values import finite, no_constant
from ..store.store import State
from .requests import RequestError, one_of

Endpoint = Callable[[Request], Awaitable[Response]]
"""What answers a route for administrators."""


async def read_body(request: Request, most: int) -> bytes:
    """The body, whole; RequestError where it is longer than `most` bytes."""
    problem = RequestError(f"the body is longer than {most} bytes", status=413, code="request_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and (len(length) > 18 or int(length) > most):
        raise problem
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise problem
        pieces.append(piece)
    return b"".join(pieces)


async def read_json(request: Request, most: int, default: Any) -> Any:
    """The value of a body; the default where it is empty."""
    raw = await read_body(request, most)
    return parse_json(raw) if raw.strip() else default


def parse_json(raw: bytes) -> Any:
    """The value of JSON text; RequestError where it is none."""
    try:
        return json.loads(raw, parse_constant=no_constant, parse_float=finite)
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {str(error)[:200]}") from None


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON. Half surrogate pairs, which UTF-8 cannot hold, are escaped."""
    try:
        raw = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError:
        raw = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    return Response(raw, status, dict(headers or {}), "application/json")


def read_state(value: str | None, states: Sequence[State] = tuple(State)) -> State | None:
    """The state that an address names; None where it names none."""
    return None if value is None else State(one_of("state", value, states))
