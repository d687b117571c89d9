"""The gateway over HTTP: its routes, and who may use which. `_answer` answers agents."""

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from ..engines.errors import EngineError
from ..errors import TokentraceError, brief
from ..store.store import StoreError
from .access import Access, Role
from .admin import ADMIN_ROUTES
from .answering import Answer
from .chat import Chat
from .dialect import Dialect
from .gateway import Gateway
from .http import (
    StreamedAnswer,
    as_problem,
    json_response,
    log_request,
    parse_body,
    parse_json,
    read_body,
    unless_gone,
)
from .messages import Messages, read_count
from .page.routes import PAGE_ROUTES
from .requests import RequestError, request_error
from .responses import Responses
from .tokens import Tokens

DIALECTS: Mapping[str, type[Dialect]] = {
    "/v1/chat/completions": Chat,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/inference/v1/generate": Tokens,
}
PREFIXES = ("", "/sessions/{session}")


async def _answer(dialect: type[Dialect], gateway: Gateway, http: HTTPRequest) -> Response:
    session_id, details = http.state.session_id, http.scope["tokentrace"]
    raw = await read_body(http, gateway.admission.limits.body_bytes)
    live, name = gateway.sessions.live.get(session_id), ""
    body = parse_body(raw, dialect.history, None if live is None else live.last.get(dialect.name))
    request = dialect.read(body.value, http.headers, body.past)
    if key := http.headers.get("idempotency-key"):
        parts = (key.encode("utf-8", "surrogatepass"), raw)
        hashes = [hashlib.sha256(each).hexdigest()[:32] for each in parts]
        name = f"key:{hashes[0]}:{dialect.name}:{hashes[1]}"

    async def begin() -> Answer:
        answer = await gateway.begin(session_id, dialect, request, name)
        details.update(session=session_id, dialect=dialect.name, response=answer.head.id)
        if (placed := answer.placed) is None:
            details["replayed"] = True
        else:
            details.update(prompt=len(placed.ids), reused=placed.reused, stream=request.stream)
        if answer.live is not None and request.previous is None and not request.references:
            answer.live.last[dialect.name] = (body, request)
        if not request.stream:
            try:
                await answer.run(lambda choice, changes, delta: None)
            finally:
                details["sampled"] = answer.sampled
        return answer

    answer = await unless_gone(http.receive, begin())
    headers = _answer_headers(session_id, answer)
    if request.stream:
        return await StreamedAnswer(answer, headers, details).opened(http.receive)
    return json_response(dialect(answer.head).whole(answer.replies or ()), headers=headers)


def _answer_headers(session_id: str, answer: Answer) -> dict[str, str]:
    """What the body has no place for, in printable ASCII."""
    request, id = answer.request, answer.head.id
    headers = {"x-tokentrace-session": session_id, "x-request-id": id, "request-id": id}
    if answer.placed is None:
        headers["x-tokentrace-replayed"] = "true"
    else:
        headers["x-tokentrace-reused-tokens"] = str(answer.placed.reused)
    if answer.turns and answer.turns[0].cause is not None:
        headers["x-tokentrace-branch"] = answer.turns[0].cause.cause.value
    for name, values in (("not-enforced", request.unenforced), ("ignored", request.ignored)):
        if values:
            line = " ".join(", ".join(values).split())
            printable = (each if " " <= each <= "~" else "?" for each in line[:1000])
            headers[f"x-tokentrace-{name}"] = "".join(printable)
    return headers


async def _count(gateway: Gateway, http: HTTPRequest) -> Any:
    raw = await read_body(http, gateway.admission.limits.body_bytes)
    request = read_count(parse_json(raw), http.headers)
    return {"input_tokens": await gateway.count(http.state.session_id, request)}


async def _stored(gateway: Gateway, http: HTTPRequest) -> Any:
    id = http.path_params["response"]
    head, replies = await gateway.stored(http.state.session_id, Responses, id)
    return Responses(head).whole(replies)


async def _models(gateway: Gateway, http: HTTPRequest) -> Any:
    name, requested = gateway.model, http.path_params.get("model")
    model = {"id": name, "object": "model", "created": 0, "owned_by": "tokentrace"}
    model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    model["max_model_len"] = gateway.engine.capabilities.max_length
    if requested is None:
        return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}
    if requested != name:
        raise RequestError(f"there is no model {brief(requested)}, only {name}", status=404)
    return model


async def _health(gateway: Gateway, http: HTTPRequest) -> Any:
    return {"status": "ok"}


async def _ready(gateway: Gateway, http: HTTPRequest) -> Response:
    admission = gateway.admission
    state = {"draining": admission.draining, "paused": admission.paused, "store": "ok", "engine": "ok"}
    try:
        await gateway.store.session("readyz")
    except StoreError:
        state["store"] = "unavailable"
    try:
        if not admission.paused:  # a paused engine may not answer until it resumes
            await gateway.engine.check()
    except EngineError:
        state["engine"] = "unavailable"
    is_ready = state["store"] == state["engine"] == "ok" and not admission.draining
    return json_response(state, 200 if is_ready else 503)


@dataclass(frozen=True, slots=True)
class Endpoint:
    answer: Callable[[Gateway, HTTPRequest], Awaitable[Any]]
    method: str
    path: str
    key: str = "admin"
    """The key that it needs: ``admin``, ``any``, ``session`` or ``health`` (perhaps none)."""
    dialect: type[Dialect] = Chat


_AGENTS = [
    *(Endpoint(partial(_answer, each), "POST", path, "session", each) for path, each in DIALECTS.items()),
    Endpoint(_count, "POST", "/v1/messages/count_tokens", "session", Messages),
    Endpoint(_stored, "GET", "/v1/responses/{response}", "session", Responses),
    Endpoint(_models, "GET", "/v1/models", "any"),
    Endpoint(_models, "GET", "/v1/models/{model:path}", "any"),
]
ENDPOINTS = [
    *(replace(each, path=prefix + each.path) for each in _AGENTS for prefix in PREFIXES),
    *(Endpoint(one, *route.partition(" ")[::2]) for route, one in {**ADMIN_ROUTES, **PAGE_ROUTES}.items()),
    Endpoint(_health, "GET", "/healthz", "health"),
    Endpoint(_ready, "GET", "/readyz", "health"),
]


class App:
    def __init__(self, gateway: Gateway, access: Access, *, public_health: bool = False) -> None:
        self.gateway = gateway
        self.access = access
        self._public_health = public_health
        self.server: Any = None
        routes = [Route(each.path, _Handler(self, each), methods=[each.method]) for each in ENDPOINTS]
        self.router = Router(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # the router then raises HTTPException
        try:
            await self.router(scope, receive, send)
        except HTTPException as error:
            await (await self._unknown(HTTPRequest(scope), error))(scope, receive, send)

    async def respond(self, http: HTTPRequest, endpoint: Endpoint, details: dict[str, Any]) -> Response:
        details |= {"session": http.path_params["session"]} if "session" in http.path_params else {}
        try:
            if not (endpoint.key == "health" and self._public_health):
                caller = await self.access.caller(http.headers)
                if endpoint.key == "admin" and caller.role is not Role.ADMIN:
                    raise RequestError("this needs an admin key", status=403, code="forbidden")
                if endpoint.key == "session":
                    id = http.path_params.get("session")
                    http.state.session_id = await self.access.session(caller, id, http.headers)
            answer = await endpoint.answer(self.gateway, http)
            return answer if isinstance(answer, Response) else json_response(answer)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            problem = as_problem(error)
            details["problem"] = problem.code or type(error).__name__
            details |= {"field": problem.field} if problem.field else {}
            return _error(problem, endpoint.dialect)

    async def _unknown(self, http: HTTPRequest, error: HTTPException) -> Response:
        """Send 404 and 405 only after checking the key."""
        try:
            await self.access.caller(http.headers)
            route = f"{http.method} {http.url.path[:200]}"
            hint = "; is /v1 missing from the base URL, or repeated?" if error.status_code == 404 else ""
            message = f"there is no {route}{hint}"
            problem = RequestError(message, status=error.status_code, code="no_route")
        except TokentraceError as denied:
            problem = request_error(denied)
        response = _error(problem, Chat)
        response.headers.update(error.headers or {})
        return response


@dataclass(frozen=True, slots=True)
class _Handler:
    app: App
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HTTPRequest(scope, receive, send)
        endpoint = self.endpoint
        gateway = self.app.gateway
        details = scope.setdefault("tokentrace", {})
        began, status = time.perf_counter(), 500
        try:
            with gateway.tracing.span(f"{endpoint.method} {endpoint.path}", http.headers) as attributes:
                response = await self.app.respond(http, endpoint, details)
                await response(scope, receive, send)
                status = response.status_code  # a stream may have failed meanwhile
                attributes.update(details, status=status)
        except ClientDisconnect:
            status = 499
        finally:
            gateway.metrics.requests.labels(endpoint.path, str(status)).inc()
            log_request(endpoint.method, endpoint.path, status, time.perf_counter() - began, details)


def _error(error: RequestError, dialect: type[Dialect]) -> Response:
    id = secrets.token_hex(16)
    headers = {"x-request-id": id, "request-id": id}
    if error.retry:
        headers["retry-after"] = f"{error.retry:g}"
    if error.status == 409 or error.code == "matcher_failed":  # clients would retry these in vain
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = 'Basic realm="tokentrace", charset="UTF-8"'
    body = dialect.error(error)
    body |= {"request_id": id} if "request_id" in body else {}
    return json_response(body, error.status, headers)
