"""The routes for administrators: sessions, their rows and rewards, weights, shutting down, metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from ..errors import shown
from ..settings import as_float, is_number
from ..store.store import Label, SessionInfo, State, is_storable
from .export import ExportFormat, export_rows
from .gateway import Gateway, described
from .keys import hash_key, new_key
from .reading import Endpoint, json_response, read_json, read_state
from .requests import Body, RequestError, one_of
from .sessions import ID, Live, SessionSettings, read_version

_LISTED: Final = 200
_FORMAT: Final = ("format", "keep_state")
_CHOICE: Final = ("state", "search")
_WITH_ROWS: Final = tuple(state for state in State if state is not State.DROPPED)


class AdminRoutes:
    """What an administrator may ask of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Paths, methods and what answers them."""
        return {
            "/sessions": {"GET": self._list, "POST": self._create},
            "/sessions/{session}": {"GET": self._state, "DELETE": self._drop, "PATCH": self._update},
            "/sessions/{session}/rewards": {"POST": self._reward},
            "/sessions/{session}/seal": {"POST": self._seal},
            "/admin/pause": {"POST": self._pause},
            "/admin/resume": {"POST": self._resume},
            "/admin/drain": {"POST": self._drain},
            "/metrics": {"GET": self._metrics},
            "/sessions/{session}/rows": {"GET": self._rows_of_one},
            "/rows": {"GET": self._rows_of_many},
        }

    async def _body(self, request: HTTPRequest) -> Body:
        return Body(await read_json(request, self._gateway.limits.body_bytes, {}))

    async def _existing(self, request: HTTPRequest) -> Live:
        return await self._gateway.sessions.existing(request.path_params["session"])

    # -- sessions

    async def _create(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        id = body.get("id", str, "a string") or uuid.uuid4().hex
        if not ID.fullmatch(id):
            raise RequestError(
                "letters, digits and . _ : @ ~ -, at most 128, the first a letter or a digit", field="id"
            )
        metadata = body.get("metadata", Mapping, "an object", {})
        settings = body.get("settings", Mapping, "an object", {})
        SessionSettings.read(settings)
        _only(body, "a session has id, metadata and settings")
        if await self._gateway.store.session(id) is not None:
            raise RequestError(f"there is a session {id} already", field="id", status=409, code="exists")
        key = new_key()
        wanted = SessionInfo(id, State.OPEN, time.time(), metadata, settings)
        info = await self._gateway.store.create(wanted, key=hash_key(key))
        base = str(request.base_url).rstrip("/") + f"/sessions/{id}"
        return json_response({**_described(info), "key": key, "base_url": base, "openai_base_url": base + "/v1"}, 201)

    async def _list(self, request: HTTPRequest) -> Response:
        query = request.query_params
        state = read_state(query.get("state"))
        after = await self._gateway.store.session(query["after"]) if "after" in query else None
        if "after" in query and after is None:
            raise RequestError(f"there is no session {shown(query['after'])}", field="after", status=404)
        listed: list[dict[str, Any]] = []
        more = False
        found = self._gateway.store.sessions(state=state, search=query.get("search", ""), after=after)
        async for info in found:
            if len(listed) == _LISTED:
                more = True
                break
            listed.append(_described(info))
        return json_response({"sessions": listed, "more": more})

    async def _state(self, request: HTTPRequest) -> Response:
        id, store = (await self._existing(request)).info.id, self._gateway.store
        async with self._gateway.sessions.held(id) as live:  # no turn that is not stored yet is shown
            trajectory = live.session.trajectory
            state = {
                **_described(live.info),
                "tokens": trajectory.num_tokens,
                "rows": trajectory.num_samples,
                "branches": [asdict(branch) for branch in trajectory.branches] if trajectory.num_writes else [],
                "tree": [described(turn) for turn in live.session.turns],
            }
        state["incomplete"] = await store.incomplete(id)
        state["labels"] = [asdict(label) for label in await store.labels(id)]
        return json_response(state)

    async def _update(self, request: HTTPRequest) -> Response:
        live = await self._existing(request)
        body = await self._body(request)
        metadata = body.get("metadata", Mapping, "an object")
        settings = body.get("settings", Mapping, "an object")
        _only(body, "metadata and settings can be changed")
        if settings is not None:
            SessionSettings.read(settings)
        await self._gateway.store.update(live.info.id, metadata=metadata, settings=settings)
        self._gateway.sessions.forget(live)
        return json_response(_described((await self._existing(request)).info))

    async def _seal(self, request: HTTPRequest) -> Response:
        live = await self._existing(request)
        if live.info.state is State.OPEN:
            await self._gateway.store.set_state(live.info.id, State.SEALED)
        return json_response(_described((await self._existing(request)).info))

    async def _drop(self, request: HTTPRequest) -> Response:
        id = (await self._gateway.sessions.known(request.path_params["session"])).id
        await self._gateway.store.set_state(id, State.DROPPED)
        live = self._gateway.sessions.peek(id)
        if live is not None:
            self._gateway.sessions.forget(live)
        return json_response({"id": id, "state": str(State.DROPPED)})

    async def _reward(self, request: HTTPRequest) -> Response:
        live = await self._existing(request)
        labels = _labels(await read_json(request, self._gateway.limits.body_bytes, {}), live.info.turns)
        await self._gateway.store.label(live.info.id, labels)
        stored = await self._gateway.store.labels(live.info.id)
        return json_response({"labels": [asdict(label) for label in stored]})

    # -- rows

    async def _rows_of_one(self, request: HTTPRequest) -> Response:
        query = _query(request, _FORMAT)
        id = request.path_params["session"]
        info = await self._gateway.sessions.known(id)
        if info.state is State.DROPPED:
            raise RequestError(f"session {id} was dropped: its tokens are gone", status=404, code="no_session")
        return await self._rows(query, [info], id)

    async def _rows_of_many(self, request: HTTPRequest) -> Response:
        query = _query(request, (*_FORMAT, *_CHOICE))
        state = read_state(query.get("state"), _WITH_ROWS)
        found = self._gateway.store.sessions(state=state, search=query.get("search", ""))
        return await self._rows(query, found, "rows")

    async def _rows(
        self, query: Mapping[str, str], sessions: AsyncIterable[SessionInfo] | Iterable[SessionInfo], name: str
    ) -> Response:
        format = ExportFormat(one_of("format", query.get("format", ExportFormat.JSONL), tuple(ExportFormat)))
        rows = export_rows(self._gateway.store, sessions, format, keep_state=_flag(query, "keep_state"))
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

    # -- weights, shutting down, metrics

    async def _pause(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        wait = body.flag("wait")
        _only(body, "there is wait to say here")
        await self._gateway.pause(wait=wait)
        return json_response(self._gateway.standing())

    async def _resume(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        version = read_version(body)
        _only(body, "there is version to say here")
        await self._gateway.resume(version)
        return json_response(self._gateway.standing())

    async def _drain(self, request: HTTPRequest) -> Response:
        body = await self._body(request)
        patience = body.number("seconds", 0, 86_400)
        _only(body, "there is seconds to say here")
        await self._gateway.drain(patience)
        return json_response(self._gateway.standing())

    async def _metrics(self, request: HTTPRequest) -> Response:
        gateway = self._gateway
        gateway.metrics.in_flight.set(gateway.in_flight)
        gateway.metrics.waiting.set(gateway.waiting)
        gateway.metrics.live.set(len(gateway.sessions))
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _described(info: SessionInfo) -> dict[str, Any]:
    return {**asdict(info), "state": str(info.state)}


def _only(body: Body, known: str) -> None:
    if body.unread:
        raise RequestError(f"{known}, not {', '.join(body.unread)}")


def _labels(value: Any, turns: int) -> list[Label]:
    """Rewards and labels: ``{"reward": 1.0}``, with a ``turn`` if it is a turn's; several as a list, ``rewards``."""
    given = value.get("rewards") if isinstance(value, Mapping) and "rewards" in value else [value]
    if not isinstance(given, list) or not given:
        raise RequestError("must be a list of rewards", field="rewards")
    labels: list[Label] = []
    for at, each in enumerate(given):
        if not isinstance(each, Mapping):
            raise RequestError(f"must be an object, not {shown(each)}", field=f"rewards.{at}")
        turn = each.get("turn")
        if turn is not None and (not isinstance(turn, int) or isinstance(turn, bool) or not 0 <= turn < turns):
            raise RequestError(f"must be a turn from 0 to {turns - 1}, not {shown(turn)}", field=f"rewards.{at}.turn")
        named = {name: value for name, value in each.items() if name != "turn"}
        if not named:
            raise RequestError('has no value: {"reward": 1.0}, or another name', field=f"rewards.{at}")
        for name, label in named.items():
            if not is_storable(name):
                raise RequestError(f"the name {shown(name)} has a NUL or a lone surrogate", field=f"rewards.{at}")
            if name == "reward" and not (is_number(label) and as_float(label) is not None):
                raise RequestError(f"must be a number, not {shown(label)}", field=f"rewards.{at}.reward")
            labels.append(Label(name[:200], label, turn))
    return labels


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
