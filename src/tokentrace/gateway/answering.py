"""One request on its way to a stored turn: sampling, telling what arrives, storing what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from ..diagnose.conversation_diff import text_of
from ..engines.protocol import (
    Delta,
    EngineError,
    EngineRefusal,
    EngineUnavailable,
    FinishReason,
    SamplingParams,
    add_version,
    joined,
)
from ..parsing.events import Done, Event
from ..parsing.messages import CallId, openai_message
from ..parsing.response import ParsedResponse, PartKind
from ..store.store import Closed, Conflict, Missing, StoreError, Taken
from ..trajectory.turns import VersionSpan
from .dialect import AgentDialect, Head, Replied
from .dialect import told as told_response
from .names import call_ids_of, response_name, written_ids
from .requests import Request, RequestError
from .stops import StopTexts, cut_response
from .turns import Message, Placement, Recorded

if TYPE_CHECKING:
    from .gateway import Gateway

_ATTEMPTS: Final = 100
"""How often a turn is written where others write to the same session at the same time."""
Result = TypeVar("Result")
_FIRST = 8
"""After each of so many pieces others get their turn: as many as it takes to open a stream."""
Feed = Callable[[int, Sequence[Event], Delta | None], None]
"""Takes what a choice says, as it arrives."""
Answered: TypeAlias = tuple[Head, list[Replied]]


@dataclass(slots=True, eq=False)
class Claim:
    """A request, from when it is admitted until it is answered or given up. Whoever makes a claim must `end` it."""

    gateway: Gateway
    session: str
    key: tuple[str, str] | None = None
    """Where others wait for its answer: its session and its name."""

    def __post_init__(self) -> None:
        self.gateway.claims.add(self)

    def take(self, name: str) -> None:
        """Answer the request of this name: whoever sends it again waits for this answer."""
        self.key = (self.session, name)
        self.gateway.under_way[self.key] = asyncio.get_running_loop().create_future()

    def end(self, answered: Answered | None = None) -> None:
        """Give the answer to those who wait; without one, one of them is answered anew. Only the first end counts."""
        self.gateway.claims.discard(self)
        self.gateway.ended.set()
        if self.key is not None:
            self.gateway.under_way.pop(self.key).set_result(answered)
            self.key = None


@dataclass(slots=True, eq=False)
class Answer:
    """One request on its way: its prompt is made, or it was answered before."""

    gateway: Gateway
    session: str
    dialect: AgentDialect
    request: Request
    head: Head
    placed: Placement | None = None
    sampling: SamplingParams | None = None
    version: str | int | None = None
    """Which weights sample, as the session's settings had it when the request came."""
    name: str = ""
    """What identifies the request if it is sent again."""
    replies: list[Replied] | None = None
    """The answer, where the request was answered before."""
    turns: list[Recorded] = field(default_factory=list)
    sampled: int = 0
    """How many tokens were sampled for it so far, whatever became of them."""
    claim: Claim | None = None
    """Where it is being answered, for those who ask the same again."""

    @property
    def call_ids(self) -> list[CallId]:
        """For each choice, the ids of calls for which the model writes none."""
        return [call_ids_of(self.head.id, choice) for choice in range(self.request.n)]

    async def run(self, feed: Feed) -> list[Replied]:
        """Sample, and store what was sampled. `feed` is told what arrives, in order."""
        if self.replies is not None:
            self._tell_again(feed)
            return self.replies
        assert self.sampling is not None
        reserving = self.gateway.within_budget(self.session, self.request.n, self.sampling.max_tokens)
        try:
            async with reserving as max_tokens, self.gateway.slot():
                if max_tokens < self.sampling.max_tokens:
                    self.sampling = replace(self.sampling, max_tokens=max_tokens)
                self.replies = await self._sampled(feed)
            if self.claim is not None:
                self.claim.end((self.head, self.replies))
            return self.replies
        finally:
            self.gateway.metrics.tokens.labels("sampled").inc(self.sampled)
            self.give_up()

    def give_up(self) -> None:
        """Let those who wait for this answer look for themselves, if there is none yet."""
        if self.claim is not None:
            self.claim.end()

    def _tell_again(self, feed: Feed) -> None:
        """What a stored answer said, at once."""
        for choice, reply in enumerate(self.replies or ()):
            tools = None if self.request.tools is None else list(self.request.tools)
            parser = self.gateway.renderer_with(self.request.variables).streaming_parser(
                tools=tools, prompt_ids=self.head.prompt_ids
            )
            stops = StopTexts([reply.stopped_by] if reply.stopped_by else ())
            events = [*parser.feed(reply.completion.ids.tolist()), *parser.finish()]
            told = stops.feed(event for event in events if not isinstance(event, Done))
            feed(choice, [*told, *([] if stops.found else stops.flush())], reply.completion)

    async def _sampled(self, feed: Feed) -> list[Replied]:
        store, request_id = self.gateway.store, self.head.id
        assert self.placed is not None
        about = {"dialect": self.dialect.name, "prompt_tokens": len(self.placed.ids), "time": time.time()}
        if self.name:
            about["names"] = [self.name]
        beginning = asyncio.ensure_future(store.begin(self.session, request_id, about))
        began = time.perf_counter()
        try:
            with self.gateway.tracing.stage("engine", prompt_tokens=len(self.placed.ids), reused=self.placed.reused):
                sampled = await self._sample_all(feed)
            await asyncio.shield(beginning)  # it may be in the store's queue: whoever goes away does not take it back
            storing = asyncio.ensure_future(self._store(sampled, time.perf_counter() - began))
            with self.gateway.tracing.stage("store", sampled=sum(len(reply.completion.ids) for reply in sampled)):
                await unhurried(storing)
        except BaseException as error:
            reason = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            why = "the agent went away" if isinstance(error, asyncio.CancelledError) else str(reason)[:500]
            with contextlib.suppress(StoreError):
                await asyncio.shield(asyncio.ensure_future(self._abandon(beginning, why)))
            raise request_error(reason) if isinstance(reason, EngineError | StoreError) else reason from error
        return sampled

    async def _abandon(self, beginning: asyncio.Future[None], why: str) -> None:
        """End the request in the store, after its beginning was written: in any other order it stays under way."""
        with contextlib.suppress(StoreError):
            await beginning
        await self.gateway.store.abandon(self.session, self.head.id, why)

    async def _sample_all(self, feed: Feed) -> list[Replied]:
        if self.request.n == 1:
            return [await self._sample(0, feed)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._sample(choice, feed)) for choice in range(self.request.n)]
        return [task.result() for task in tasks]

    async def _sample(self, choice: int, feed: Feed) -> Replied:
        """One completion, as it arrives."""
        gateway, request, placed = self.gateway, self.request, self.placed
        assert placed is not None
        assert self.sampling is not None
        sampling = self.sampling
        if choice and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
        parser = placed.asked.renderer.streaming_parser(tools=placed.asked.tools, prompt_ids=placed.ids)
        stops = StopTexts(request.stop)
        pieces: list[Delta] = []
        versions: list[VersionSpan] = []
        last: Delta | None = None
        labelled = self._weights is not None  # a version that is set later says nothing of the tokens before
        count, began = 0, time.perf_counter()
        async with contextlib.aclosing(self._deltas(choice, placed, sampling)) as stream:
            async for delta in stream:
                if not count and request.stream:
                    gateway.metrics.first_token.observe(time.perf_counter() - began)
                events, kept = [], len(delta.ids)
                if not request.stop:
                    events = list(parser.feed(delta.ids.tolist()))
                else:
                    for at, token in enumerate(delta.ids.tolist(), 1):
                        events += stops.feed(parser.feed([token]))
                        if stops.found is not None:
                            kept = at
                            break
                count += kept
                self.sampled += kept
                if labelled and self._weights is not None and kept:
                    add_version(versions, self._weights, count)
                piece = delta if kept == len(delta.ids) else _cut(delta, kept)
                pieces.append(piece)
                feed(choice, events, piece)
                if stops.found is not None:
                    last = await self._ended(choice, stream, delta)
                    break
                if request.stream and len(pieces) <= _FIRST:
                    await asyncio.sleep(0)  # of pieces that arrive together the first is sent before the rest is read
        rest = [event for event in parser.finish() if not isinstance(event, Done)]
        response = parser.response
        if stops.found is None:
            told = stops.feed(rest)
            feed(choice, told if stops.found is not None else [*told, *stops.flush()], None)
        if stops.found is not None:
            response = cut_response(response, stops.length)
            pieces[-1] = _cut_end(pieces[-1], last, count)
        completion = joined(pieces)
        if not completion.versions and versions:
            completion = replace(completion, versions=tuple(versions))
        gateway.metrics.engine.observe(time.perf_counter() - began)
        call_id = call_ids_of(self.head.id, choice)
        return Replied(response, completion, call_id, reasoning_tokens(response), stops.found)

    async def _ended(self, choice: int, stream: AsyncGenerator[Delta], delta: Delta) -> Delta | None:
        """The last piece of a completion that is not wanted any more: it says what is true of the whole."""
        engine = self.gateway.engine
        if delta.finish_reason is not None or not engine.capabilities.aborts:
            return delta if delta.finish_reason is not None else None
        with contextlib.suppress(EngineError):
            await engine.abort(f"{self.head.id}-{choice}")
            async for more in stream:
                if more.finish_reason is not None:
                    return more
        return None

    def _deltas(self, choice: int, placed: Placement, sampling: SamplingParams) -> AsyncGenerator[Delta]:
        """The completion in pieces; in one where nobody looks at the pieces, which costs much less."""
        engine, request = self.gateway.engine, self.request
        name = f"{self.head.id}-{choice}"
        asking: dict[str, Any] = {"request_id": name, "session": self.session, "wire": placed.wire}
        labelled = self._weights is not None and not engine.capabilities.versions
        if request.stream or request.stop or labelled:  # which weights sampled a token is known when it arrives
            return engine.stream(placed.ids, sampling, **asking)

        async def whole() -> AsyncGenerator[Delta]:
            yield await engine.generate(placed.ids, sampling, **asking)

        return whole()

    @property
    def _weights(self) -> str | int | None:
        """Which weights sample now, where the engine does not say."""
        return self.version if self.gateway.version is None else self.gateway.version

    # -- storing

    async def _store(self, replies: Sequence[Replied], seconds: float) -> None:
        for choice, reply in enumerate(replies):
            await self._store_one(choice, reply, seconds)

    async def _store_one(self, choice: int, reply: Replied, seconds: float) -> None:
        gateway, placed = self.gateway, self.placed
        assert placed is not None
        assert self.sampling is not None
        told = openai_message(told_response(self.head, reply), call_id=reply.call_id)
        message = _continued(self.request.messages[-1], told) if self.request.continued else told
        notes = {
            "response": self.head.id,
            "choice": choice,
            "dialect": self.dialect.name,
            "model": self.head.model,
            "tokenizer": placed.asked.renderer.tokenizer.digest[:16],
            "template": ",".join(digest[:16] for digest in placed.asked.renderer.template_digests().values()),
            "created": self.head.created,
            "time": time.time(),
            "seconds": round(seconds, 4),
            "instructions": self.request.instructions,
            "stopped_by": reply.stopped_by,
            "told": len(reply.response.content),
            "calls": [str(call.status) for call in reply.response.tool_calls],
            "ignored": list(self.request.ignored),
            "wishes": list(self.request.wishes),
            "echo": dict(self.request.echo),
        }
        if late := written_ids(reply.response, reply.call_id):
            notes["written_ids"] = late
        names = [f"{self.name}#{choice}"] if self.name else []
        if self.request.stored:
            names.append(response_name(self.head.id))
        for attempt in range(_ATTEMPTS):
            await asyncio.sleep(random.random() * 0.01 * min(attempt, 10))
            async with gateway.sessions.held(self.session) as live:
                try:
                    turn, record = live.session.commit(
                        replace(placed, choice=choice),
                        reply.completion,
                        message,
                        notes=notes,
                        sampling=self.sampling.described(),
                    )
                    began = time.perf_counter()
                    last = choice == self.request.n - 1  # only then is the request ended
                    request = self.head.id if last else f"{self.head.id}#{choice}"
                    await gateway.store.append(self.session, record, request=request, names=names)
                except BaseException as error:
                    gateway.sessions.forget(live)
                    if isinstance(error, Conflict):
                        gateway.metrics.conflicts.inc()
                        continue
                    raise
                gateway.metrics.stored(self.dialect.name, turn, time.perf_counter() - began)
                live.info = live.info.grown(record)
                self.turns.append(turn)
                return
        raise StoreError(f"session {self.session} is written to by too many at once; nothing was recorded")


async def unhurried(work: asyncio.Future[Result]) -> Result:
    """The result of some work that is not cancelled: whoever goes away waits until it is done."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


def request_error(error: EngineError | StoreError) -> RequestError:
    """What an agent is told when an engine or the store fails."""
    match error:
        case EngineUnavailable():
            return RequestError(f"the engine is not available: {error}", status=503, code="engine", retry_after=2)
        case EngineRefusal():
            status = error.status if error.status in (400, 413, 422, 429) else 400
            return RequestError(f"the engine refused the request: {error}", status=status, code="engine_refusal")
        case Missing():
            return RequestError(str(error), status=404, code="no_session")
        case Closed() | Taken():
            return RequestError(str(error), status=409, code="closed" if isinstance(error, Closed) else "exists")
        case StoreError():
            return RequestError(f"the store failed: {error}", status=503, code="store", retry_after=2)
    return RequestError(f"the engine failed: {error}", status=502, code="engine")


def _cut_end(piece: Delta, last: Delta | None, count: int) -> Delta:
    """The last piece of a completion that was cut after `count` tokens, with what the engine said of the whole."""
    if piece is last:
        return piece
    if last is None:
        return replace(piece, finish_reason=FinishReason.ABORT)
    versions = tuple(span._replace(stop=min(span.stop, count)) for span in last.versions if span.start < count)
    # a channel that only the last piece has is of the whole completion
    whole = {name: values[:count] for name, values in last.channels.items() if name not in piece.channels}
    return replace(
        piece,
        finish_reason=FinishReason.ABORT,
        versions=versions,
        cached_tokens=last.cached_tokens,
        logprobs_kind=last.logprobs_kind,
        channels={**piece.channels, **whole},
    )


def _cut(delta: Delta, kept: int) -> Delta:
    gone = len(delta.ids) - kept  # a channel may be of this piece, or, in the last one, of the whole completion
    channels = {name: values[: len(values) - gone] for name, values in delta.channels.items()}
    return Delta(
        delta.ids[:kept],
        delta.logprobs[:kept],
        None,
        (),
        delta.cached_tokens,
        delta.logprobs_kind,
        channels,
    )


def _continued(start: Message, told: Message) -> dict[str, Any]:
    """The message that an agent has when it joined a reply to the beginning that it gave."""
    joined_up = {**start, **told, "content": text_of(start) + text_of(told)}
    reasoning = (start.get("reasoning_content") or "") + (told.get("reasoning_content") or "")
    return {**joined_up, "reasoning_content": reasoning} if reasoning else joined_up


def reasoning_tokens(response: ParsedResponse) -> int:
    """How many tokens of a completion are reasoning."""
    span = response.span(PartKind.REASONING)
    return 0 if span is None else span.stop - span.start
