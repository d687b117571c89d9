"""The gateway: from a request to a stored turn. It knows no HTTP and no dialect's words.

`Gateway.begin` finds the session and makes the prompt. `Answer.run` samples, and stores what was sampled: it returns
when the turn is on disk, so whoever sends the end of an answer after it acknowledges only what is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from ..diagnose.message_keys import Key, root_key
from ..engines.protocol import Completion, Engine, EngineError, FinishReason, SamplingParams
from ..rendering.factory import OF_RENDER, unread_variable
from ..rendering.renderer import Renderer
from ..store.store import State, Store
from ..study.memory import Memory
from .answering import Answer, Answered, Claim, reasoning_tokens, unhurried
from .dialect import AgentDialect, Head, Replied
from .late_system import with_late_instructions
from .metrics import Metrics
from .names import call_ids_of, random_id, response_name
from .references import with_references
from .requests import Request, RequestError
from .sessions import Live, Sessions
from .stops import cut_response
from .telemetry import Tracing
from .turns import Asked, Placement, Recorded

_INLINE: Final = 20_000
"""Up to so many new characters a prompt is made at once; more of them, or a whole one, in a thread of its own."""

_ELSEWHERE: Final = 10.0
"""How many seconds a request that comes again waits for the gateway that it came to first, and…"""
_POLL: Final = 0.1
"""…how often it looks."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a gateway takes on."""

    body_bytes: int = 64 * 2**20
    max_tokens: int = 32_768
    """The most tokens of one completion."""
    turns: int = 100_000
    """The most turns of a session."""
    concurrent: int = 512
    """How many requests are answered at once."""
    waiting: int = 2_048
    """How many more may wait for that; others are told to come back later."""


@dataclass(slots=True)
class Gateway:
    """Answers requests with an engine, and records every turn."""

    engine: Engine
    renderer: Renderer
    store: Store
    sessions: Sessions
    metrics: Metrics
    tracing: Tracing = field(default_factory=Tracing)
    limits: Limits = field(default_factory=Limits)
    model: str = "tokentrace"
    version: str | int | None = None
    """Which weights sample, where neither engine nor session say so."""
    draining: bool = False
    in_flight: int = 0
    """How many requests are being sampled."""
    claims: set[Claim] = field(default_factory=set)
    """The requests that were admitted and have not ended."""
    under_way: dict[tuple[str, str], asyncio.Future[Answered | None]] = field(default_factory=dict)
    """The answers to requests that have a name, by session and name; None for one that was given up."""
    _open: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a request has ended."""
    _slots: asyncio.Semaphore = field(init=False)
    _renderers: Memory = field(default_factory=lambda: Memory(most=64))
    _turns_reserved: Counter[str] = field(default_factory=Counter)
    _tokens_reserved: Counter[str] = field(default_factory=Counter)
    """What requests under way may still add to each session."""
    _tools: Memory = field(default_factory=lambda: Memory(most=64))

    def __post_init__(self) -> None:
        self.renderer = self.renderer.silent()
        self._slots = asyncio.Semaphore(self.limits.concurrent)
        self._open.set()

    # -- answering

    async def begin(self, id: str, dialect: AgentDialect, request: Request, name: str = "") -> Answer:
        """Make the prompt of a request. RequestError says what is wrong with it.

        `name` identifies the request: if it was answered before, or is being answered, this is that answer.
        """
        claim = self._admit(id)
        try:
            live = await self.sessions.get(id)
            earlier = await self._earlier(live, request, name, claim) if name else None
            if earlier is not None:
                claim.end(earlier)
                return Answer(self, id, dialect, request, earlier[0], replies=earlier[1])
            self._check_open(live)
            request = await self._with_previous(live, request)
            asked = self._asked(request)
            began = time.perf_counter()
            with self.tracing.stage("prompt", messages=len(asked.messages)):
                placed = await self._place(live, asked)
            self.metrics.placed(placed, time.perf_counter() - began)
            sampling = self._sampling(live, request, len(placed.ids))
            head = self._head(request, placed.ids, random_id())
        except BaseException:
            claim.end()
            raise
        return Answer(self, id, dialect, request, head, placed, sampling, live.settings.version, name, claim=claim)

    async def count(self, id: str, request: Request) -> int:
        """How long the prompt of a request is."""
        live = await self.sessions.get(id)
        request = await self._with_previous(live, request)
        return len((await self._place(live, self._asked(request))).ids)

    async def _place(self, live: Live, asked: Asked) -> Placement:
        async with self.sessions.held(live.info.id, live) as now:
            known = now.session.turns[-1].depth if now.session.turns else 0
            size = sum(len(str(message.get("content") or "")) for message in asked.messages[known:])
            if known and size < _INLINE:
                return now.session.place(asked)
            return await unhurried(asyncio.ensure_future(asyncio.to_thread(now.session.place, asked)))

    def _asked(self, request: Request) -> Asked:
        self._check_variables(request)
        variables = {**request.variables, **self._hints(request)}
        renderer = self.renderer_with(variables)
        digests = ",".join(f"{name}={digest}" for name, digest in sorted(renderer.template_digests().items()))
        if request.prompt_ids is not None:
            digests = "ids"
        tools = request.tools
        return Asked(
            with_late_instructions(renderer, request.messages, request.instructions if request.stored else 0),
            tools,
            renderer,
            self._root(tools, variables, digests),
            variables,
            request.continued,
            request.prompt_ids,
        )

    def _root(self, tools: Any, variables: Mapping[str, Any], digests: str) -> Key:
        """The key of tools, variables and template, which are the same in every request of a session."""
        try:
            key = (json.dumps(tools), repr(sorted(variables.items())), digests)
        except (TypeError, ValueError, RecursionError):
            return root_key(tools, variables, digests)
        return self._tools.once(key, lambda: root_key(tools, variables, digests))

    def _check_variables(self, request: Request) -> None:
        """RequestError for a template variable that the template does not read: it would be set in vain."""
        template = self.renderer.study(request.tools or None).template
        control = self.renderer.tokenizer.vocabulary.control_pattern
        for name, value in request.variables.items():
            field = f"chat_template_kwargs.{name[:80]}"
            if name in OF_RENDER or name in self.renderer.tokenizer.variables:
                raise RequestError("is not a request's to set", field=field, code="unsupported_parameter")
            if control is not None and control.search(json.dumps(value, ensure_ascii=False)):
                problem = "spells a control token, which a request's variables may not"
                raise RequestError(problem, field=field, code="invalid_value")
            if problem := unread_variable(name, [template]):
                raise RequestError(problem, field=field, code="unsupported_parameter")

    def _hints(self, request: Request) -> dict[str, Any]:
        """Of what a request would like the template to know, what the template reads."""
        if not request.hints:
            return {}
        read = self.renderer.study(request.tools).template.variables
        return {name: value for name, value in request.hints.items() if name in read and name not in request.variables}

    def renderer_with(self, variables: Mapping[str, Any]) -> Renderer:
        """The renderer with more template variables; made once for each set of them."""
        if not variables:
            return self.renderer
        key = repr(sorted(variables.items(), key=lambda item: item[0]))
        return self._renderers.once(key, lambda: self.renderer.with_variables(variables).silent())

    async def _with_previous(self, live: Live, request: Request) -> Request:
        """A request with the conversation of the response that it goes on from, and the items that it refers to."""
        request = await with_references(self.store, self.sessions, live.info.id, request)
        if request.previous is None:
            return request
        number = await self.store.turn_named(live.info.id, response_name(request.previous))
        if number is None:
            raise RequestError(
                f"there is no stored response {request.previous!r} in this session",
                field="previous_response_id",
                status=404,
                code="previous_response_not_found",
            )
        async with self.sessions.held(live.info.id) as now:
            first = int(now.session.turns[number].notes.get("instructions") or 0)
            past = now.session.conversation(number)[first:]
        own, new = request.messages[: request.instructions], request.messages[request.instructions :]
        return replace(request, messages=[*own, *past, *new])

    def _check_open(self, live: Live, turns: int = 1) -> None:
        """Raises RequestError if no turn can be added to a session, or not so many: it is closed, or a budget is spent.

        What requests under way have reserved is not looked at: it may become free again.
        """
        info, budget = live.info, live.settings.max_sampled_tokens
        if info.state is not State.OPEN:
            raise RequestError(f"session {info.id} is {info.state}: no turn can be added", status=409, code="closed")
        budgets = {"turns": (self._max_turns(live), info.turns)}
        if budget is not None:
            budgets["sampled tokens"] = (budget, info.sampled)
        for what, (most, used) in budgets.items():
            if most - used < turns:
                problem = f"session {info.id} has had its {most} {what}"
                if most > used:
                    problem = f"n={turns} does not fit into the {what} that session {info.id} has left: {most - used}"
                raise RequestError(problem, status=403, code="budget_exhausted")

    def _max_turns(self, live: Live) -> int:
        most = live.settings.max_turns
        return self.limits.turns if most is None else min(self.limits.turns, most)

    def _sampling(self, live: Live, request: Request, length: int) -> SamplingParams:
        settings, forced = live.settings, dict(live.settings.sampling)
        if settings.max_prompt_tokens is not None and length > settings.max_prompt_tokens:
            budget = f"of {length} tokens, and the session allows {settings.max_prompt_tokens}"
            raise RequestError(f"the prompt is {budget}", status=400, code="context_length_exceeded")
        room = self.engine.capabilities.max_length
        if room is not None and length >= room:
            raise RequestError(
                f"This model's maximum context length is {room} tokens, and the messages come to {length} tokens.",
                field="messages",
                code="context_length_exceeded",
            )
        limits = [self.limits.max_tokens, request.max_tokens, forced.pop("max_tokens", None)]
        limits.append(None if room is None else room - length)
        chosen = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": None if request.seed is None else request.seed & (2**63 - 1),
            **request.shaping,
        } | forced
        try:
            sampling = SamplingParams(
                max_tokens=max(1, min(limit for limit in limits if limit is not None)),
                stop_token_ids=request.stop_token_ids or tuple(self.renderer.get_stop_token_ids()),
                allow_raw_logprobs=True,
                top_logprobs=request.logprobs or 0,
                structure=request.structure,
                **{name: value for name, value in chosen.items() if value is not None},
            )
        except EngineError as error:
            raise RequestError(str(error), code="invalid_value") from error
        for name in sampling.optional:
            if name not in self.engine.capabilities.sampling:
                problem = f"{self.engine.capabilities.engine} does not have this setting; leave it out"
                raise RequestError(problem, field=name, code="unsupported_parameter")
        return sampling

    def _head(self, request: Request, prompt_ids: Any, id: str, created: float | None = None) -> Head:
        token_bytes = self.renderer.tokenizer.vocabulary.token_bytes
        moment = int(time.time() if created is None else created)
        return Head(request, id, moment, request.model or self.model, prompt_ids, token_bytes)

    # -- requests that come again

    async def _earlier(self, live: Live, request: Request, name: str, claim: Claim) -> Answered | None:
        """The answer to the request of this name, if it came before, here or elsewhere; if not, the claim takes it."""
        while (under_way := self.under_way.get((live.info.id, name))) is not None:
            answered = await asyncio.shield(under_way)
            if answered is not None:
                return answered
        claim.take(name)
        numbers = await self._turns_named(live.info.id, name, request.n)
        if not numbers:
            await self._elsewhere(live.info.id, name)
            numbers = await self._turns_named(live.info.id, name, request.n)
        if not numbers:
            return None
        async with self.sessions.held(live.info.id) as now:
            turns = [now.session.turns[number] for number in numbers]
            replies = [self._reply_of(now, turn) for turn in turns]
            head = self._head_of(now, turns[0], request)
        self.metrics.replayed.inc()
        return head, replies

    async def _turns_named(self, id: str, name: str, choices: int) -> list[int]:
        """The turns that answered the request of this name, one for each choice; none if one of them is missing."""
        numbers = [await self.store.turn_named(id, f"{name}#{choice}") for choice in range(choices)]
        return [] if None in numbers else [number for number in numbers if number is not None]

    async def _elsewhere(self, id: str, name: str) -> None:
        """Wait while another gateway answers a request of this name; but not for long, for it may have died."""
        for _ in range(round(_ELSEWHERE / _POLL)):
            noted = await self.store.incomplete(id)
            if not any(each["ended"] is None and name in each.get("names", ()) for each in noted):
                return
            await asyncio.sleep(_POLL)

    def _head_of(self, live: Live, turn: Recorded, request: Request) -> Head:
        """What was known of a recorded answer before its first token."""
        prompt_ids = live.session.trajectory.stream(turn.branch)[: turn.start]
        return self._head(request, prompt_ids, str(turn.notes["response"]), turn.notes.get("created"))

    def _reply_of(self, live: Live, turn: Recorded) -> Replied:
        """A reply, read again from its tokens."""
        trajectory, written = live.session.trajectory, live.session.written(turn)
        completion = Completion(
            np.array(trajectory.completion(written)),
            np.array(trajectory.completion_logprobs(written)),
            FinishReason(written.finish_reason),
            written.versions,
            written.cached_tokens,
            written.logprobs_kind,
        )
        tools, variables = live.session.roots[turn.root]
        prompt_ids = trajectory.stream(turn.branch)[: turn.start]
        response = self.renderer_with(variables).parse_response(completion.ids, tools=tools, prompt_ids=prompt_ids)
        stopped_by = turn.notes.get("stopped_by")
        if stopped_by is not None:
            response = cut_response(response, int(turn.notes["told"]))
        call_id = call_ids_of(str(turn.notes["response"]), int(turn.notes.get("choice") or 0))
        return Replied(response, completion, call_id, reasoning_tokens(response), stopped_by)

    async def stored(self, id: str, response: str) -> tuple[Head, list[Replied]]:
        """An answer that was stored, by the id of its response; RequestError where there is none."""
        number = await self.store.turn_named(id, response_name(response))
        if number is None:
            raise RequestError(f"there is no stored response {response!r} in this session", status=404)
        async with self.sessions.held(id) as live:
            turn = live.session.turns[number]
            tools, variables = live.session.roots[turn.root]
            notes = turn.notes
            request = Request(
                live.session.conversation(number)[:-1],
                tools,
                str(notes["model"]),
                variables=variables,
                instructions=int(notes.get("instructions") or 0),
                echo=notes.get("echo") or {},
            )
            return self._head_of(live, turn, request), [self._reply_of(live, turn)]

    # -- admission

    def _admit(self, id: str) -> Claim:
        """Take on a request. RequestError if too many are waiting, or if the gateway is shutting down."""
        if self.draining:
            raise RequestError("the gateway is shutting down", status=503, code="draining", retry_after=5)
        if len(self.claims) >= self.limits.concurrent + self.limits.waiting:
            raise RequestError("too many requests are waiting", status=429, code="overloaded", retry_after=1)
        return Claim(self, id)

    @property
    def waiting(self) -> int:
        """How many requests were admitted and are not being sampled yet."""
        return len(self.claims) - self.in_flight

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place among the requests that are sampled at once, and while the gateway is paused."""
        while True:
            await self._open.wait()
            await self._slots.acquire()
            if not self.paused:
                break
            self._slots.release()  # it was paused while this request waited for a place
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            self._slots.release()
            self.ended.set()

    async def _end_of(self, under_way: Callable[[], bool]) -> None:
        """Wait until no request is `under_way` any more."""
        while under_way():
            self.ended.clear()
            await self.ended.wait()

    @contextlib.asynccontextmanager
    async def within_budget(self, id: str, turns: int, max_tokens: int) -> AsyncIterator[int]:
        """Reserve some turns of a session and their tokens; yields how many tokens each may sample.

        That is `max_tokens`, or what is left. If requests under way have reserved what is left, it waits until one of
        them ends: what they do not use is free again. RequestError if the budget is used up.
        """
        while True:
            live = self.sessions.peek(id) or await self.sessions.get(id)
            self._check_open(live, turns)
            tokens, budget = max_tokens, live.settings.max_sampled_tokens
            if budget is not None:
                tokens = min(tokens, (budget - live.info.sampled - self._tokens_reserved[id]) // turns)
            if tokens > 0 and live.info.turns + self._turns_reserved[id] + turns <= self._max_turns(live):
                break
            self.ended.clear()
            await self.ended.wait()
        self._turns_reserved[id] += turns
        self._tokens_reserved[id] += turns * tokens
        try:
            yield tokens
        finally:
            self._turns_reserved[id] -= turns
            self._tokens_reserved[id] -= turns * tokens
            if not self._turns_reserved[id]:
                del self._turns_reserved[id], self._tokens_reserved[id]

    # -- weights, shutting down

    @property
    def paused(self) -> bool:
        """Whether new requests wait for `resume`."""
        return not self._open.is_set()

    def standing(self) -> dict[str, Any]:
        """How the gateway is, as administrators are told it."""
        busy = {"in_flight": self.in_flight, "waiting": self.waiting}
        return {"paused": self.paused, "draining": self.draining, **busy, "version": self.version}

    async def pause(self, *, wait: bool = False) -> None:
        """Let no request begin until `resume`. Those under way pause if the engine can; otherwise `wait` for them."""
        self._open.clear()
        if self.engine.capabilities.pauses:
            await self.engine.pause()
        elif wait:
            await self._end_of(lambda: self.in_flight > 0)

    async def resume(self, version: str | int | None = None) -> None:
        """Let requests go on, with new weights if a version is given."""
        if version is not None:
            if self.engine.capabilities.weights:
                await self.engine.set_version(version)
            self.version = version
        if self.engine.capabilities.pauses and self.paused:
            await self.engine.resume()
        self._open.set()

    async def drain(self, patience: float | None = None) -> bool:
        """Admit no request; True when those that were admitted have ended. While paused, none of them can begin."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._end_of(lambda: self.in_flight > 0 or (bool(self.claims) and not self.paused))
        return not self.in_flight


def described(recorded: Recorded) -> dict[str, Any]:
    """A turn as the session's state shows it."""
    cause = recorded.cause
    return {
        "turn": recorded.number,
        "goes_on_from": recorded.base,
        "branch": recorded.branch,
        "start": recorded.start,
        "stop": recorded.stop,
        "finish_reason": recorded.finish_reason,
        "cause": cause and {**asdict(cause), "meaning": cause.cause.meaning},
        **recorded.notes,
    }
