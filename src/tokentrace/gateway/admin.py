"""The routes for administrators: sessions, their rows and rewards, weights, shutting down, metrics."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from ..errors import shown
from .gateway import Gateway, described
from .keys import Caller, hash_key, new_key
from .reading import json_response, read_json
from .requests import Body, RequestError
from .row_routes import RowRoutes
from .sessions import ID, Live, SessionSettings
from .store import Label, SessionInfo, State

Endpoint = Callable[[HTTPRequest, Caller], Awaitable[Response]]
_LISTED: Final = 200


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
            **RowRoutes(self._gateway.store).routes(),
        }

    # -- sessions

    async def _create(self, request: HTTPRequest, caller: Caller) -> Response:
        body = Body(await read_json(request, self._gateway.limits.body_bytes, {}))
        id = body.get("id", str, "a string", None) or uuid.uuid4().hex
        if not ID.fullmatch(id):
            raise RequestError(
                "letters, digits and . _ : @ ~ -, at most 128, the first a letter or a digit", field="id"
            )
        metadata = body.get("metadata", Mapping, "an object", {})
        settings = body.get("settings", Mapping, "an object", {})
        SessionSettings.read(settings)
        if body.unread:
            raise RequestError(f"a session has id, metadata and settings, not {', '.join(body.unread)}")
        if await self._gateway.store.session(id) is not None:
            raise RequestError(f"there is a session {id} already", field="id", status=409, code="exists")
        key = new_key()
        wanted = SessionInfo(id, State.OPEN, time.time(), metadata, settings)
        info = await self._gateway.store.create(wanted, key=hash_key(key))
        base = str(request.base_url).rstrip("/") + f"/sessions/{id}"
        return json_response({**_described(info), "key": key, "base_url": base, "openai_base_url": base + "/v1"}, 201)

    async def _list(self, request: HTTPRequest, caller: Caller) -> Response:
        query = request.query_params
        try:
            state = State(query["state"]) if "state" in query else None
        except ValueError:
            states = ", ".join(State)
            raise RequestError(f"must be one of {states}, not {shown(query['state'])}", field="state") from None
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

    async def _state(self, request: HTTPRequest, caller: Caller) -> Response:
        id = (await self._existing(request)).info.id
        store = self._gateway.store
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

    async def _existing(self, request: HTTPRequest) -> Live:
        """The session of the path, which is not made by asking for it."""
        id = request.path_params["session"]
        if not ID.fullmatch(id) or await self._gateway.store.session(id) is None:
            raise RequestError(f"there is no session {shown(id)}", status=404, code="no_session")
        return await self._gateway.sessions.get(id)

    async def _update(self, request: HTTPRequest, caller: Caller) -> Response:
        live = await self._existing(request)
        body = Body(await read_json(request, self._gateway.limits.body_bytes, {}))
        metadata = body.get("metadata", Mapping, "an object")
        settings = body.get("settings", Mapping, "an object")
        if body.unread:
            raise RequestError(f"metadata and settings can be changed, not {', '.join(body.unread)}")
        if settings is not None:
            SessionSettings.read(settings)
        await self._gateway.store.update(live.info.id, metadata=metadata, settings=settings)
        self._gateway.sessions.forget(live)
        return json_response(_described((await self._existing(request)).info))

    async def _seal(self, request: HTTPRequest, caller: Caller) -> Response:
        live = await self._existing(request)
        if live.info.state is State.OPEN:
            await self._gateway.store.set_state(live.info.id, State.SEALED)
        return json_response(_described((await self._existing(request)).info))

    async def _drop(self, request: HTTPRequest, caller: Caller) -> Response:
        id = request.path_params["session"]
        info = await self._gateway.store.session(id) if ID.fullmatch(id) else None
        if info is None:
            raise RequestError(f"there is no session {shown(id)}", status=404, code="no_session")
        await self._gateway.store.set_state(id, State.DROPPED)
        live = self._gateway.sessions.peek(id)
        if live is not None:
            self._gateway.sessions.forget(live)
        return json_response({"id": id, "state": str(State.DROPPED)})

    async def _reward(self, request: HTTPRequest, caller: Caller) -> Response:
        live = await self._existing(request)
        labels = _labels(await read_json(request, self._gateway.limits.body_bytes, {}), live.info.turns)
        await self._gateway.store.label(live.info.id, labels)
        stored = await self._gateway.store.labels(live.info.id)
        return json_response({"labels": [asdict(label) for label in stored]})

    # -- weights, shutting down, metrics

    async def _pause(self, request: HTTPRequest, caller: Caller) -> Response:
        body = Body(await read_json(request, self._gateway.limits.body_bytes, {}))
        wait = body.flag("wait")
        _only(body, "wait")
        await self._gateway.pause(wait=wait)
        return json_response(self._standing())

    async def _resume(self, request: HTTPRequest, caller: Caller) -> Response:
        body = Body(await read_json(request, self._gateway.limits.body_bytes, {}))
        version = body.get("version", (str, int), "a string or an integer")
        _only(body, "version")
        await self._gateway.resume(version)
        return json_response(self._standing())

    async def _drain(self, request: HTTPRequest, caller: Caller) -> Response:
        body = Body(await read_json(request, self._gateway.limits.body_bytes, {}))
        patience = body.number("seconds", 0, 86_400)
        _only(body, "seconds")
        await self._gateway.drain(patience)
        return json_response(self._standing())

    def _standing(self) -> dict[str, Any]:
        gateway = self._gateway
        standing = {"paused": gateway.paused, "draining": gateway.draining, "in_flight": gateway.in_flight}
        return {**standing, "waiting": gateway.waiting, "version": gateway.version}

    async def _metrics(self, request: HTTPRequest, caller: Caller) -> Response:
        gateway = self._gateway
        gateway.metrics.in_flight.set(gateway.in_flight)
        gateway.metrics.waiting.set(gateway.waiting)
        gateway.metrics.live.set(len(gateway.sessions))
        return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _described(info: SessionInfo) -> dict[str, Any]:
    return {**asdict(info), "state": str(info.state)}


def _only(body: Body, names: str) -> None:
    if body.unread:
        raise RequestError(f"there is {names} to say here, not {', '.join(body.unread)}")


def _is_reward(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False


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
            if name == "reward" and not _is_reward(label):
                raise RequestError(f"must be a number, not {shown(label)}", field=f"rewards.{at}.reward")
            labels.append(Label(str(name)[:200], label, turn))
    return labels
