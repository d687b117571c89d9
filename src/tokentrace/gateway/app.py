"""The gateway over HTTP: its routes, and who may use which.

The way of a request: `App._answer` reads it (`Dialect.read`), `Gateway.begin` makes its prompt, `Answer.run` samples
and stores its turn, and `Dialect.answer` or a `StreamedAnswer` writes what the client gets.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..engines.protocol import EngineError
from ..errors import TokentraceError, brief
from ..store.store import StoreError
from .access import Access, Caller, Role
from .admin import ADMIN_ROUTES
from .answering import Answer
from .chat import CHAT
from .dialect import Dialect, random_id
from .gateway import Gateway
from .http import Endpoint, as_problem, json_response, log_request, parse_body, parse_json, read_body
from .messages import MESSAGES, read_count
from .page.routes import PAGE_ROUTES
from .problems import RequestError, request_error
from .responses import RESPONSES
from .streaming import StreamedAnswer, unless_gone
from .tokens import TOKENS

AgentEndpoint: TypeAlias = Callable[[HTTPRequest, Caller], Awaitable[Response]]
DIALECTS: Final[Mapping[str, Dialect]] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/inference/v1/generate": TOKENS,
}
PREFIXES: Final = ("", "/sessions/{session}")
"""Where the dialects' routes are: with the session in the key or a header, or in the path."""


class App:
    """The routes of one gateway."""

    def __init__(self, gateway: Gateway, access: Access, *, public_health: bool = False) -> None:
        self.gateway, self.access, self._public_health = gateway, access, public_health
        self.server: Any = None
        """Serves the app; its `should_exit` ends that."""

    def starlette(self) -> Starlette:
        """The application that a server runs."""
        routes: list[Route] = []

        def add(path: str, method: str, endpoint: AgentEndpoint, dialect: Dialect = CHAT, public: bool = False) -> None:
            routes.append(Route(path, _Handler(self, path, endpoint, method, dialect, public), methods=[method]))

        for prefix in PREFIXES:
            for path, dialect in DIALECTS.items():
                add(prefix + path, "POST", partial(self._answer, dialect), dialect)
            add(f"{prefix}/v1/messages/count_tokens", "POST", self._count, MESSAGES)
            add(f"{prefix}/v1/responses/{{response}}", "GET", self._stored, RESPONSES)
            add(f"{prefix}/v1/models", "GET", self._models)
            add(f"{prefix}/v1/models/{{model:path}}", "GET", self._models)
        for path, methods in {**ADMIN_ROUTES, **PAGE_ROUTES}.items():
            for method, endpoint in methods.items():
                add(path, method, partial(self._administer, endpoint))
        add("/healthz", "GET", self._health, public=self._public_health)
        add("/readyz", "GET", self._ready, public=self._public_health)
        return Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})

    async def respond(self, http: HTTPRequest, handler: _Handler, details: dict[str, Any]) -> Response:
        """Check who asks, then run the endpoint. An error has the dialect's shape."""
        try:
            caller = Caller(Role.AGENT) if handler.public else await self.access.caller(http.headers)
            return await handler.endpoint(http, caller)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            problem = as_problem(error)
            details["problem"] = problem.code or type(error).__name__
            details |= {"field": problem.field} if problem.field else {}
            details |= {"session": http.path_params["session"]} if "session" in http.path_params else {}
            return _error(problem, handler.dialect)

    async def _session(self, http: HTTPRequest, caller: Caller) -> str:
        return await self.access.session(caller, http.path_params.get("session"), http.headers)

    # -- agents

    async def _answer(self, dialect: Dialect, http: HTTPRequest, caller: Caller) -> Response:
        """A request of an agent, from its body to its answer."""
        session = await self._session(http, caller)
        raw = await read_body(http, self.gateway.admission.limits.body_bytes)
        live = self.gateway.sessions.peek(session)
        body = parse_body(raw, dialect.history, None if live is None else live.last.get(dialect.name))
        request = dialect.read(body.value, http.headers, body.past)
        name, details = _request_name(dialect, raw, http.headers), http.scope["tokentrace"]

        async def sample() -> Answer:
            answer = await self.gateway.begin(session, dialect, request, name)
            details.update(session=session, dialect=dialect.name, response=answer.head.id)
            if answer.placed is None:
                details["replayed"] = True
            else:
                placed = answer.placed
                details.update(prompt=len(placed.ids), reused=placed.reused, stream=request.stream)
            if answer.live is not None and request.previous is None and not request.references:
                answer.live.last[dialect.name] = (body, request)
            if not request.stream:
                try:
                    await answer.run(lambda choice, changes, delta: None)
                finally:
                    details["sampled"] = answer.sampled
            return answer

        answer = await unless_gone(http.receive, sample())
        headers = _answer_headers(session, answer)
        if not request.stream:
            return json_response(dialect.answer(answer.head, answer.replies or ()), headers=headers)
        try:
            return await StreamedAnswer(answer, headers, details).opened(http.receive)
        except BaseException:
            answer.give_up()
            raise

    async def _count(self, http: HTTPRequest, caller: Caller) -> Response:
        session = await self._session(http, caller)
        body = parse_json(await read_body(http, self.gateway.admission.limits.body_bytes))
        return json_response({"input_tokens": await self.gateway.count(session, read_count(body, http.headers))})

    async def _stored(self, http: HTTPRequest, caller: Caller) -> Response:
        session = await self._session(http, caller)
        stored = await self.gateway.stored(session, RESPONSES, http.path_params["response"])
        return json_response(RESPONSES.answer(*stored))

    async def _models(self, http: HTTPRequest, caller: Caller) -> Response:
        name, requested = self.gateway.model, http.path_params.get("model")
        model = {"id": name, "object": "model", "created": 0, "owned_by": "tokentrace"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        model["max_model_len"] = self.gateway.engine.capabilities.max_length
        if requested is None:
            page = {"object": "list", "data": [model], "has_more": False}
            return json_response({**page, "first_id": name, "last_id": name})
        if requested != name:
            raise RequestError(f"there is no model {brief(requested)}, only {name}", status=404)
        return json_response(model)

    # -- others

    async def _administer(self, endpoint: Endpoint, http: HTTPRequest, caller: Caller) -> Response:
        caller.require_admin()
        return await endpoint(self.gateway, http)

    async def _health(self, http: HTTPRequest, caller: Caller) -> Response:
        return json_response({"status": "ok"})

    async def _ready(self, http: HTTPRequest, caller: Caller) -> Response:
        gateway, admission = self.gateway, self.gateway.admission
        state = {"draining": admission.draining, "paused": admission.paused, "store": "ok", "engine": "ok"}
        try:
            await gateway.store.session("readyz")
        except StoreError:
            state["store"] = "unavailable"
        try:
            if not admission.paused:  # a paused engine may not answer, and will again
                await gateway.engine.check()
        except EngineError:
            state["engine"] = "unavailable"
        is_ready = state["store"] == state["engine"] == "ok" and not admission.draining
        return json_response(state, 200 if is_ready else 503)

    async def _unknown(self, http: HTTPRequest, error: Exception) -> Response:
        """Send 404 and 405 only after the key was checked."""
        assert isinstance(error, HTTPException)
        try:
            await self.access.caller(http.headers)
            what, fix = (
                f"there is no {http.method} {http.url.path[:200]}",
                "is /v1 missing from the base URL, or twice?",
            )
            problem = RequestError(what, fix=fix, status=error.status_code, code="no_route")
        except TokentraceError as denied:
            problem = request_error(denied)
        response = _error(problem, CHAT)
        response.headers.update(error.headers or {})
        return response


@dataclass(frozen=True, slots=True)
class _Handler:
    """Answers the requests of a route (ASGI). A request is logged and counted when its response has ended."""

    app: App
    path: str
    endpoint: AgentEndpoint
    method: str
    dialect: Dialect
    public: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HTTPRequest(scope, receive, send)
        details = scope.setdefault("tokentrace", {})
        began, status = time.perf_counter(), 500
        try:
            with self.app.gateway.tracing.span(f"{self.method} {self.path}", http.headers) as attributes:
                response = await self.app.respond(http, self, details)
                await response(scope, receive, send)
                status = response.status_code  # a stream may have failed meanwhile
                attributes.update(details, status=status)
        except ClientDisconnect:
            status = 499
        finally:
            self.app.gateway.metrics.requests.labels(self.path, str(status)).inc()
            log_request(self.method, self.path, status, time.perf_counter() - began, details)


def _error(error: RequestError, dialect: Dialect) -> Response:
    id = random_id()
    headers = {"x-request-id": id, "request-id": id}
    if error.retry_after is not None:
        headers["retry-after"] = f"{error.retry_after:g}"
    if error.is_final:
        headers["x-should-retry"] = "false"
    if error.status == 401:
        headers["www-authenticate"] = 'Basic realm="tokentrace", charset="UTF-8"'
    body = dialect.error(error)
    body |= {"request_id": id} if "request_id" in body else {}
    return json_response(body, error.status, headers)


def _request_name(dialect: Dialect, raw: bytes, headers: Mapping[str, str]) -> str:
    """Identifies a repeated request by its `Idempotency-Key` and its body. Empty without a key."""
    key = headers.get("idempotency-key")
    if not key:
        return ""
    digest, body = (hashlib.sha256(each).hexdigest()[:32] for each in (key.encode("utf-8", "surrogatepass"), raw))
    return f"key:{digest}:{dialect.name}:{body}"


def _answer_headers(session: str, answer: Answer) -> dict[str, str]:
    """What the body of an answer has no place for, as printable ASCII of one line each."""
    request, id = answer.request, answer.head.id
    headers = {"x-tokentrace-session": session, "x-request-id": id, "request-id": id}
    if answer.placed is None:
        headers["x-tokentrace-replayed"] = "true"
    else:
        headers["x-tokentrace-reused-tokens"] = str(answer.placed.reused)
    if answer.turns and answer.turns[0].cause is not None:
        headers["x-tokentrace-branch"] = answer.turns[0].cause.cause.value
    for name, values in (("not-enforced", request.wishes), ("ignored", request.ignored)):
        if values:
            line = " ".join(", ".join(values).split())
            headers[f"x-tokentrace-{name}"] = "".join(each if " " <= each <= "~" else "?" for each in line)[:1000]
    return headers
