"""The routes for administrators. Each returns a response, or a value for JSON."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from ..errors import brief
from ..settings import as_float32
from ..store.store import Label, SessionInfo, State, is_storable
from .access import hash_key, new_key
from .gateway import Gateway
from .http import json_response, parse_json, read_body
from .requests import RequestError, convert
from .rows import ExportFormat, export_rows
from .sessions import ID, ID_RULE, Count, LiveSession, SessionSettings, Version, dropped

Routes = Mapping[str, Callable[[Gateway, HTTPRequest], Awaitable[Any]]]


class Query(Struct, forbid_unknown_fields=True):
    state: State | None = None
    search: str = ""
    after: str = ""
    limit: Annotated[int, Meta(ge=0, le=5_000)] = 200
    session: str = ""
    format: ExportFormat = ExportFormat.JSONL
    keep_state: bool = False
    branch: Count = 0
    start: Count = 0
    stop: Count | None = None


class _Changes(Struct, forbid_unknown_fields=True):
    metadata: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None


class _NewSession(_Changes):
    id: str | None = None


class _Control(Struct, forbid_unknown_fields=True):
    wait: bool = False
    version: Version | None = None
    seconds: Annotated[float, Meta(ge=0, le=86_400)] | None = None


class _Rewards(Struct, forbid_unknown_fields=True):
    rewards: Annotated[list[dict[str, Any]], Meta(min_length=1)]


def read_query(http: HTTPRequest) -> Query:
    values = {name: value for name, value in http.query_params.items() if value}
    return convert(values, Query, strict=False)


async def read_json(gateway: Gateway, http: HTTPRequest) -> Any:
    raw = await read_body(http, gateway.admission.limits.body_bytes)
    return parse_json(raw) if raw.strip() else {}


async def named_session(gateway: Gateway, http: HTTPRequest) -> SessionInfo:
    return await gateway.sessions.info(http.path_params["session"])


async def _live(gateway: Gateway, http: HTTPRequest) -> LiveSession:
    return await gateway.sessions.get((await named_session(gateway, http)).id)


async def find_sessions(gateway: Gateway, query: Query) -> list[SessionInfo]:
    """The newest sessions, plus one beyond the limit if there are more."""
    after = await gateway.store.session(query.after) if query.after else None
    if query.after and after is None:
        raise RequestError(f"there is no session {brief(query.after)}", field="after", status=404)
    infos: list[SessionInfo] = []
    async for info in gateway.store.sessions(state=query.state, search=query.search, after=after):
        infos.append(info)
        if len(infos) > query.limit:
            break
    return infos


async def _create(gateway: Gateway, http: HTTPRequest) -> Response:
    body = convert(await read_json(gateway, http), _NewSession)
    store = gateway.store
    id = body.id or uuid.uuid4().hex
    settings = body.settings or {}
    key = new_key()
    if not ID.fullmatch(id):
        raise RequestError(f"must be {ID_RULE}", field="id")
    SessionSettings.read(settings)
    if await store.session(id) is not None:
        raise RequestError(f"session {id} already exists", field="id", status=409, code="exists")
    info = SessionInfo(id, State.OPEN, time.time(), body.metadata or {}, settings)
    info = await store.create(info, key=hash_key(key))
    base = str(http.base_url).rstrip("/") + f"/sessions/{id}"
    urls = {"base_url": base, "openai_base_url": base + "/v1"}
    return json_response({**asdict(info), "key": key, **urls}, 201)


async def _list(gateway: Gateway, http: HTTPRequest) -> Any:
    query = read_query(http)
    infos = await find_sessions(gateway, query)
    return {"sessions": [asdict(info) for info in infos[: query.limit]], "more": len(infos) > query.limit}


async def _state(gateway: Gateway, http: HTTPRequest) -> Any:
    id, store = (await _live(gateway, http)).info.id, gateway.store
    async with gateway.sessions.locked(id) as live:
        trajectory = live.session.trajectory
        state = {
            **asdict(live.info),
            "tokens": trajectory.num_tokens,
            "rows": trajectory.num_samples,
            "branches": [asdict(branch) for branch in trajectory.branches] if trajectory.num_writes else [],
            "tree": [turn.summary() for turn in live.session.turns],
        }
    labels = [asdict(label) for label in await store.labels(id)]
    return {**state, "incomplete": await store.incomplete(id), "labels": labels}


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """With changes, of which null removes one; None without any."""
    kept = {name: value for name, value in before.items() if name not in (changes or {})}
    return {**kept, **{name: one for name, one in changes.items() if one is not None}} if changes else None


async def _update(gateway: Gateway, http: HTTPRequest) -> Any:
    live = await _live(gateway, http)
    body = convert(await read_json(gateway, http), _Changes)
    if body.settings is not None:
        SessionSettings.read(body.settings)
    info = live.info
    metadata, settings = _merged(info.metadata, body.metadata), _merged(info.settings, body.settings)
    info = await gateway.store.update(info.id, metadata=metadata, settings=settings)
    gateway.sessions.forget(live)
    await _live(gateway, http)  # running answers see its settings
    return asdict(info)


async def _seal(gateway: Gateway, http: HTTPRequest) -> Any:
    live = await _live(gateway, http)
    if live.info.state is State.OPEN:
        await gateway.store.set_state(live.info.id, State.SEALED)
    return asdict((await _live(gateway, http)).info)


async def _drop(gateway: Gateway, http: HTTPRequest) -> Any:
    id = (await named_session(gateway, http)).id
    await gateway.store.set_state(id, State.DROPPED)
    if (live := gateway.sessions.live.get(id)) is not None:
        gateway.sessions.forget(live)
    return {"id": id, "state": State.DROPPED}


async def _reward(gateway: Gateway, http: HTTPRequest) -> Any:
    live = await _live(gateway, http)
    store = gateway.store
    body = await read_json(gateway, http)
    rewards = body if isinstance(body, dict) and "rewards" in body else {"rewards": [body]}
    where = "rewards." if rewards is body else ""
    await store.label(live.info.id, _labels(convert(rewards, _Rewards).rewards, live.info.turns, where))
    return {"labels": [asdict(label) for label in await store.labels(live.info.id)]}


def _labels(rewards: list[dict[str, Any]], turns: int, where: str) -> list[Label]:
    labels: list[Label] = []
    for at, reward in enumerate(rewards):
        path, turn = f"{where}{at}." if where else "", reward.pop("turn", None)
        if turn is not None and (type(turn) is not int or not 0 <= turn < turns):
            problem = f"must be one of {turns} turns, from 0, not {brief(turn)}"
            raise RequestError(problem, field=f"{path}turn")
        if not reward:
            raise RequestError('has no value; send {"reward": 1.0}, or another name', field=path[:-1])
        for name, value in reward.items():
            if not is_storable(name):
                raise RequestError(f"name {brief(name)} has a NUL or a lone surrogate", field=path[:-1])
            if name == "reward" and as_float32(value) is None:
                problem = f"must be a finite number (float32), not {brief(value)}"
                raise RequestError(problem, field=f"{path}reward", code="invalid_value")
            labels.append(Label(name[:200], value, turn))
    return labels


async def _rows(gateway: Gateway, http: HTTPRequest) -> Response:
    query = read_query(http)
    id, name = http.path_params.get("session"), "rows"
    if query.state is State.DROPPED:
        raise RequestError("dropped sessions have no rows", field="state")
    sessions: Any = gateway.store.sessions(state=query.state, search=query.search)
    if id is not None:
        info = await gateway.sessions.info(id)
        if info.state is State.DROPPED:
            raise dropped(info.id)
        if query.state or query.search:
            raise RequestError("the path names one session; leave out state and search", field="state")
        sessions, name = [info], info.id
    keeps = query.keep_state or http.method == "HEAD"
    rows = export_rows(gateway.store, sessions, query.format, keep_state=keeps)
    first = await anext(rows, b"")  # an error before it still sets the status

    async def body() -> AsyncIterator[bytes]:
        try:
            yield first
            async for piece in rows:
                yield piece
        finally:
            await rows.aclose()

    headers = {"content-disposition": f'attachment; filename="{name}.{query.format}"'}
    return StreamingResponse(body(), headers=headers, media_type=query.format.media_type)


async def _control(gateway: Gateway, http: HTTPRequest) -> Any:
    body = convert(await read_json(gateway, http), _Control)
    match http.url.path:
        case "/admin/pause":
            await gateway.pause(wait=body.wait)
        case "/admin/resume":
            await gateway.resume(body.version)
        case _:
            await gateway.admission.drain(body.seconds)
    return gateway.state()


async def _metrics(gateway: Gateway, http: HTTPRequest) -> Response:
    metrics, admission = gateway.metrics, gateway.admission
    metrics.in_flight.set(admission.in_flight)
    metrics.waiting.set(admission.waiting)
    metrics.live.set(len(gateway.sessions.live))
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


ADMIN_ROUTES: Routes = {
    "GET /sessions": _list,
    "POST /sessions": _create,
    "GET /sessions/{session}": _state,
    "PATCH /sessions/{session}": _update,
    "DELETE /sessions/{session}": _drop,
    "POST /sessions/{session}/rewards": _reward,
    "POST /sessions/{session}/seal": _seal,
    "GET /sessions/{session}/rows": _rows,
    "GET /rows": _rows,
    "POST /admin/pause": _control,
    "POST /admin/resume": _control,
    "POST /admin/drain": _control,
    "GET /metrics": _metrics,
}
