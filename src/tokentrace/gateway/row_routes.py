"""The routes that rows are read by: of one session, and of many."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Final

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from ..errors import shown
from .export import Format, export_rows
from .keys import Caller
from .requests import RequestError
from .sessions import ID
from .store import SessionInfo, State, Store

Endpoint = Callable[[HTTPRequest, Caller], Awaitable[Response]]
_FORMAT: Final = ("format", "keep_state")
_CHOICE: Final = ("state", "search")


class RowRoutes:
    """Rows of a store's sessions over HTTP."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Paths, methods and what answers them."""
        return {"/sessions/{session}/rows": {"GET": self._one}, "/rows": {"GET": self._many}}

    async def _one(self, request: HTTPRequest, caller: Caller) -> Response:
        query = _query(request, _FORMAT)
        id = request.path_params["session"]
        info = await self._store.session(id) if ID.fullmatch(id) else None
        if info is None:
            raise RequestError(f"there is no session {shown(id)}", status=404, code="no_session")
        if info.state is State.DROPPED:
            raise RequestError(f"session {id} was dropped: its tokens are gone", status=404, code="no_session")
        return await self._rows(query, [info], id)

    async def _many(self, request: HTTPRequest, caller: Caller) -> Response:
        query = _query(request, (*_FORMAT, *_CHOICE))
        state = read_state(query["state"]) if "state" in query else None
        return await self._rows(query, self._store.sessions(state=state, search=query.get("search", "")), "rows")

    async def _rows(
        self, query: Mapping[str, str], sessions: AsyncIterable[SessionInfo] | Iterable[SessionInfo], name: str
    ) -> Response:
        format = read_format(query.get("format", Format.JSONL))
        rows = export_rows(self._store, sessions, format, keep_state=_flag(query, "keep_state"))
        first = await anext(rows, b"")  # what goes wrong before it still has a status of its own

        async def body() -> AsyncIterator[bytes]:
            try:
                yield first
                async for piece in rows:
                    yield piece
            finally:
                await rows.aclose()

        headers = {"content-disposition": f'attachment; filename="{name}.{format}"'}
        return StreamingResponse(body(), headers=headers, media_type=format.media_type)


def read_format(text: str) -> Format:
    """The format of this name; RequestError with those that there are."""
    try:
        return Format(text)
    except ValueError:
        raise RequestError(f"must be one of {', '.join(Format)}, not {shown(text)}", field="format") from None


def read_state(text: str) -> State:
    """The state of this name, which sessions with rows can be in; RequestError with those that there are."""
    states = [state for state in State if state is not State.DROPPED]
    if text not in states:
        raise RequestError(f"must be one of {', '.join(states)}, not {shown(text)}", field="state")
    return State(text)


def _query(request: HTTPRequest, known: tuple[str, ...]) -> Mapping[str, str]:
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"the address may have {', '.join(known)}, not {shown(name)}", field=name[:80])
    return request.query_params


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise RequestError(f"must be true or false, not {shown(value)}", field=name)
    return value in ("true", "1")
