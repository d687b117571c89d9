"""The routes of the page: its files, the list of sessions, tokens and turns. All of them are for administrators.

The page loads nothing from elsewhere, and its policy lets a browser run nothing but its own files. Whatever comes from
agents gets there as JSON and is put into the page as text.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from importlib import resources
from typing import Any, Final

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from ...errors import shown
from ...show.page import SHARED, asset
from ...store.store import SessionInfo, State
from ..gateway import Gateway
from ..http import Endpoint, json_response, read_state
from ..problems import RequestError
from .views import TOKENS, brief_metadata, tokens_view, turn_view

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_LISTED: Final = 200
_MOST: Final = 5_000


class PageRoutes:
    """Serves the page of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Endpoints by path and method."""
        return {
            "/": {"GET": self._index},
            "/page/sessions": {"GET": self._sessions},
            "/page/{file}": {"GET": self._file},
            "/sessions/{session}/tokens": {"GET": self._tokens},
            "/sessions/{session}/turns/{turn}": {"GET": self._turn},
        }

    # -- files

    async def _index(self, request: HTTPRequest) -> Response:
        return _served("index.html")

    async def _file(self, request: HTTPRequest) -> Response:
        name = request.path_params["file"]
        if name not in page_files():
            raise RequestError(f"the page has no file {shown(name)}", status=404, code="not_found")
        return _served(name)

    # -- what it shows

    async def _sessions(self, request: HTTPRequest) -> Response:
        """The newest sessions, and how the gateway is. ``session`` names one that is always included."""
        query, store = request.query_params, self._gateway.store
        state = read_state(request)
        limit = _whole(query.get("limit", str(_LISTED)), "limit", _MOST)
        infos: list[SessionInfo] = []
        async for info in store.sessions(state=state, search=query.get("search", "")):
            infos.append(info)
            if len(infos) > limit:
                break
        more = len(infos) > limit
        infos = infos[:limit]
        chosen = await self._gateway.sessions.find(query.get("session", ""))
        visible = [*infos, *([] if chosen is None else [chosen])]
        rewards = await store.values("reward", [info.id for info in visible])
        under_way = Counter(claim.session for claim in self._gateway.admission.claims)
        listed = [self._glance(info, rewards.get(info.id), under_way[info.id]) for info in visible]
        value = {
            "sessions": listed[: len(infos)],
            "more": more,
            "chosen": None if chosen is None else await self._counters(chosen, listed[-1]),
            "counts": {str(each): await store.count(each) for each in State},
            "gateway": self._state(),
        }
        return json_response(value, headers={"x-content-type-options": "nosniff"})

    async def _counters(self, info: SessionInfo, glance: dict[str, Any]) -> dict[str, Any]:
        """Numbers that change when there is something new to show of a session."""
        store = self._gateway.store
        labels, incomplete = await store.labels(info.id), await store.incomplete(info.id)
        return {**glance, "labels": len(labels), "incomplete": len(incomplete)}

    def _glance(self, info: SessionInfo, reward: Any, under_way: int) -> dict[str, Any]:
        glance = {
            "id": info.id,
            "state": str(info.state),
            "created": info.created,
            "metadata": brief_metadata(info.metadata),
            "turns": info.turns,
            "sampled": info.sampled,
            "reward": reward,
            "under_way": under_way,
        }
        live = self._gateway.sessions.peek(info.id)
        if live is None:
            return glance
        if live.session.turns and not live.lock.locked():  # else it may have a turn that is not stored yet
            trajectory = live.session.trajectory
            live.numbers = {
                "tokens": trajectory.num_tokens,
                "rows": trajectory.num_samples,
                "branches": trajectory.num_branches,
                "last": live.session.turns[-1].time,
            }
        return {**glance, **live.numbers}

    def _state(self) -> dict[str, Any]:
        gateway = self._gateway
        about = {"model": gateway.model, "engine": gateway.engine.capabilities.engine}
        return {**gateway.state(), **about, "store": gateway.store.where, "temporary": gateway.store.temporary}

    async def _tokens(self, request: HTTPRequest) -> Response:
        id = (await self._gateway.sessions.existing(request.path_params["session"])).id
        query, most = request.query_params, 2**53
        async with self._gateway.sessions.locked(id) as live:
            session = live.session
            branches = session.trajectory.num_branches if session.turns else 0
            branch = _whole(query.get("branch", "0"), "branch", most)
            if branch >= branches:
                raise RequestError(f"the session has {branches} branches, and none is {branch}", field="branch")
            start = _whole(query.get("start", "0"), "start", most)
            stop = _whole(query.get("stop", str(start + TOKENS)), "stop", most)
            tokenizer = self._gateway.renderer.tokenizer
            view = await asyncio.to_thread(tokens_view, session, tokenizer, branch, start, stop)
        return json_response(view, headers={"x-content-type-options": "nosniff"})

    async def _turn(self, request: HTTPRequest) -> Response:
        id = (await self._gateway.sessions.existing(request.path_params["session"])).id
        labels = await self._gateway.store.labels(id)
        async with self._gateway.sessions.locked(id) as live:
            turns = len(live.session.turns)
            number = _whole(request.path_params["turn"], "turn", 2**53)
            if number >= turns:
                raise RequestError(f"the session has {turns} turns, and none is {number}", status=404, code="no_turn")
            view = await asyncio.to_thread(turn_view, live.session, number, labels)
        return json_response(view, headers={"x-content-type-options": "nosniff"})


@functools.cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name: its own, and those of the viewer that shows its tokens."""
    folder = resources.files(__package__).iterdir()
    files = {file.name: file.read_bytes() for file in folder if file.name.rpartition(".")[2] in _TYPES}
    return files | {name: asset(name).encode() for name in SHARED}


def _served(name: str) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(page_files()[name], 200, HEADERS, f"{kind}; charset=utf-8")


def _whole(value: str, field: str, most: int) -> int:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
    if not 0 <= number <= most:
        raise RequestError(f"must be a whole number from 0 to {most}, not {shown(value)}", field=field)
    return number
