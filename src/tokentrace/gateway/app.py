"""The gateway over HTTP: its routes, and what each of them may be asked by whom."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..engines.protocol import EngineError
from ..errors import InputError, TokentraceError, shown
from ..store.store import StoreError
from .access import Access, require_admin
from .admin import AdminRoutes
from .answering import Answer, request_error
from .chat import CHAT
from .dialect import AgentDialect, Replied
from .gateway import Gateway
from .keys import Caller, Role
from .messages import MESSAGES, count_answer, read_count
from .names import random_id
from .page.routes import PageRoutes
from .reading import Endpoint, json_response, parse_json, read_body
from .requests import RequestError, refused_input
from .responses import RESPONSES
from .sending import StreamedAnswer, unless_gone
from .telemetry import log_failure, log_request
from .tokens import TOKENS

Answering = Callable[[HTTPRequest, Caller], Awaitable[Response]]
DIALECTS: Final[Mapping[str, AgentDialect]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}
PREFIXES: Final = ("", "/sessions/{session}")
"""Where the dialects' routes are: with the session in the key or in a header, or in the path."""


class App:
    """The routes of one gateway."""

    def __init__(self, gateway: Gateway, access: Access, *, public_health: bool = False) -> None:
        self.gateway, self.access, self._public_health = gateway, access, public_health
        self.server: Any = None
        """What serves it; `should_exit` ends it."""
        self._admin = AdminRoutes(gateway)
        self._page = PageRoutes(gateway)

    def starlette(self) -> Starlette:
        """The application that a server runs."""
        routes: list[Route] = []
        for prefix in PREFIXES:
            for path, dialect in DIALECTS.items():
                routes.append(self._route(prefix + path, self._sampling(dialect), "POST", dialect))
            routes += [
                self._route(f"{prefix}/v1/messages/count_tokens", self._count, "POST", MESSAGES),
                self._route(f"{prefix}/v1/responses/{{response}}", self._stored_response, "GET", RESPONSES),
                self._route(f"{prefix}/v1/models", self._models, "GET", CHAT),
                self._route(f"{prefix}/v1/models/{{model:path}}", self._models, "GET", CHAT),
            ]
        for path, methods in {**self._admin.routes(), **self._page.routes()}.items():
            for method, endpoint in methods.items():
                routes.append(self._route(path, _admin_only(endpoint), method, CHAT))
        routes += [
            self._route("/healthz", self._health, "GET", CHAT, public=self._public_health),
            self._route("/readyz", self._ready, "GET", CHAT, public=self._public_health),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: self._not_found})

    def _route(self, path: str, endpoint: Answering, method: str, dialect: AgentDialect, public: bool = False) -> Route:
        return Route(path, _Handler(self, path, endpoint, method, dialect, public), methods=[method])

    async def respond(self, request: HTTPRequest, handler: _Handler, details: dict[str, Any]) -> Response:
        """The response of an endpoint. Checks who asks before anything else; an error is in the dialect's shape."""
        try:
            caller = await self._caller(request, handler.public)
            return await handler.endpoint(request, caller)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            known = self._failed(error)
            details["problem"] = known.code or type(error).__name__
            details |= {"field": known.field} if known.field else {}
            details |= {"session": request.path_params["session"]} if "session" in request.path_params else {}
            return self._error(known, handler.dialect, request)

    async def _caller(self, request: HTTPRequest, public: bool) -> Caller:
        return Caller(Role.AGENT) if public else await self.access.caller(_headers(request))

    async def _session(self, request: HTTPRequest, caller: Caller) -> str:
        return await self.access.session(caller, request.path_params.get("session"), _headers(request))

    # -- the dialects' routes

    def _sampling(self, dialect: AgentDialect) -> Answering:
        async def endpoint(request: HTTPRequest, caller: Caller) -> Response:
            headers, session = _headers(request), await self._session(request, caller)
            raw = await read_body(request, self.gateway.limits.body_bytes)
            asked = dialect.read(parse_json(raw), headers)
            name = _request_name(dialect, raw, headers)
            about = request.scope["tokentrace"]

            async def answered() -> tuple[Answer, list[Replied]]:
                answer = await self.gateway.begin(session, dialect, asked, name)
                about.update(_about(session, answer))
                if asked.stream:
                    return answer, []
                try:
                    return answer, await answer.run(lambda *_: None)
                finally:
                    about["sampled"] = answer.sampled

            answer, replies = await unless_gone(request.receive, answered())
            told = _told(session, answer)
            if asked.stream:
                try:
                    return await StreamedAnswer.begin(answer, told, request.receive, self._failed, about)
                except BaseException:
                    answer.give_up()
                    raise
            if answer.turns and answer.turns[0].cause is not None:
                told["x-tokentrace-branch"] = answer.turns[0].cause.cause.value
            return json_response(dialect.answer(answer.head, replies), headers=told)

        return endpoint

    async def _count(self, request: HTTPRequest, caller: Caller) -> Response:
        session = await self._session(request, caller)
        body = parse_json(await read_body(request, self.gateway.limits.body_bytes))
        asked = read_count(body, _headers(request))
        return json_response(count_answer(await self.gateway.count(session, asked)))

    async def _stored_response(self, request: HTTPRequest, caller: Caller) -> Response:
        session = await self._session(request, caller)
        head, replies = await self.gateway.stored(session, request.path_params["response"])
        return json_response(RESPONSES.answer(head, replies))

    async def _models(self, request: HTTPRequest, caller: Caller) -> Response:
        model = {"id": self.gateway.model, "object": "model", "created": 0, "owned_by": "tokentrace"}
        model |= {"type": "model", "display_name": self.gateway.model, "created_at": "1970-01-01T00:00:00Z"}
        model["max_model_len"] = self.gateway.engine.capabilities.max_length
        wanted = request.path_params.get("model")
        if wanted is None:
            listed = {"object": "list", "data": [model], "has_more": False}
            return json_response({**listed, "first_id": model["id"], "last_id": model["id"]})
        if wanted != self.gateway.model:
            raise RequestError(f"there is no model {shown(wanted)}, only {self.gateway.model}", status=404)
        return json_response(model)

    # -- health

    async def _health(self, request: HTTPRequest, caller: Caller) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, request: HTTPRequest, caller: Caller) -> Response:
        gateway = self.gateway
        state = {"draining": gateway.draining, "paused": gateway.paused, "store": "ok", "engine": "ok"}
        try:
            await gateway.store.session("readyz")
        except StoreError:
            state["store"] = "unavailable"
        try:
            if not gateway.paused:  # an engine that is paused may not answer, and will again
                await gateway.engine.check()
        except EngineError:
            state["engine"] = "unavailable"
        return json_response(state, 200 if state["store"] == state["engine"] == "ok" and not gateway.draining else 503)

    # -- errors

    def _failed(self, error: BaseException) -> RequestError:
        """What is told of an error. What nobody foresaw is logged, and told without details."""
        match error:
            case RequestError():
                return error
            case InputError():
                return refused_input(error)
            case StoreError() | EngineError():
                return request_error(error)
            case TokentraceError():
                return RequestError(str(error), code="invalid_value")
        log_failure(error)
        return RequestError("the gateway failed; its log says how", status=500, code="internal")

    def _error(self, error: RequestError, dialect: AgentDialect, request: HTTPRequest) -> Response:
        id = random_id()
        headers = {"x-request-id": id, "request-id": id}
        if error.retry_after is not None:
            headers["retry-after"] = f"{error.retry_after:g}"
        if error.is_final:
            headers["x-should-retry"] = "false"
        if error.status == 401:
            headers["www-authenticate"] = 'Basic realm="tokentrace", charset="UTF-8"'
        body = dialect.error(error)
        if "request_id" in body:
            body["request_id"] = id
        return json_response(body, error.status, headers)

    async def _not_found(self, request: HTTPRequest, error: Exception) -> Response:
        """Paths and methods that are none: said only to those who may ask."""
        assert isinstance(error, HTTPException)
        try:
            await self._caller(request, public=False)
            known = RequestError(
                f"there is no {request.method} {request.url.path[:200]}{_hint(request.url.path)}",
                status=error.status_code,
                code="no_route",
            )
        except TokentraceError as problem:
            known = self._failed(problem)
        response = self._error(known, CHAT, request)
        response.headers.update(error.headers or {})
        return response


@dataclass(frozen=True, slots=True)
class _Handler:
    """What answers the requests of a route (ASGI). A request is logged and counted when its response has ended."""

    app: App
    path: str
    endpoint: Answering
    method: str
    dialect: AgentDialect
    public: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPRequest(scope, receive, send)
        gateway, details = self.app.gateway, scope.setdefault("tokentrace", {})
        began, status = time.perf_counter(), 500
        try:
            with gateway.tracing.request(f"{self.method} {self.path}", request.headers):
                response = await self.app.respond(request, self, details)
                await response(scope, receive, send)
                status = response.status_code  # of a stream, what became of it
                gateway.tracing.note(status=status, **details)
        except ClientDisconnect:
            status = 499
        finally:
            gateway.metrics.requests.labels(self.path, str(status)).inc()
            log_request(self.method, self.path, status, time.perf_counter() - began, details)


def _hint(path: str) -> str:
    """What somebody who asked for this path probably wanted."""
    if "/v1/v1/" in path:
        return ": the base URL has /v1 twice; Anthropic's clients add it themselves, OpenAI's want it in the base URL"
    if path.endswith("/v1/completions"):
        return ": only chat is served; prompts of ids go to /inference/v1/generate"
    if path.endswith(("/chat/completions", "/responses", "/messages")):
        return ": is /v1 missing from the base URL? It is http://…/sessions/ID/v1 for OpenAI's clients"
    return ""


def _admin_only(endpoint: Endpoint) -> Answering:
    async def checked(request: HTTPRequest, caller: Caller) -> Response:
        require_admin(caller)
        return await endpoint(request)

    return checked


def _headers(request: HTTPRequest) -> dict[str, str]:
    return dict(request.headers.items())


def _request_name(dialect: AgentDialect, raw: bytes, headers: Mapping[str, str]) -> str:
    """What identifies a request if it is sent again: its `Idempotency-Key` and its body. Empty without a key."""
    key = headers.get("idempotency-key")
    if not key:
        return ""
    digest, body = (hashlib.sha256(each).hexdigest()[:32] for each in (key.encode("utf-8", "surrogatepass"), raw))
    return f"key:{digest}:{dialect.name}:{body}"


def _about(session: str, answer: Answer) -> dict[str, Any]:
    """What the log has of a request."""
    placed = answer.placed
    about = {"session": session, "dialect": answer.dialect.name, "response": answer.head.id}
    if placed is None:
        return {**about, "replayed": True}
    return {**about, "prompt": len(placed.ids), "reused": placed.reused, "stream": answer.request.stream}


def _told(session: str, answer: Answer) -> dict[str, str]:
    """Headers that say what an answer's body has no place for."""
    told = {"x-tokentrace-session": session, "x-request-id": answer.head.id, "request-id": answer.head.id}
    if answer.placed is None:
        told["x-tokentrace-replayed"] = "true"
    else:
        told["x-tokentrace-reused-tokens"] = str(answer.placed.reused)
    if answer.request.wishes:
        told["x-tokentrace-not-enforced"] = ", ".join(answer.request.wishes)
    if answer.request.ignored:
        told["x-tokentrace-ignored"] = ", ".join(answer.request.ignored)
    return {name: _header(value) for name, value in told.items()}


def _header(value: str) -> str:
    """A text as a header can have it: one line of printable ASCII, not too long. Any other character is a ``?``."""
    line = " ".join(value.split())
    return "".join(each if " " <= each <= "~" else "?" for each in line)[:1000]
