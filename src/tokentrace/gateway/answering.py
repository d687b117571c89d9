"""Answer one request: sample, report pieces, store the turn."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..diagnose.conversation_diff import text_of
from ..engines.answers import completion_kind
from ..engines.errors import EngineError
from ..engines.protocol import Completion, Delta, FinishReason, SamplingParams, add_version, joined
from ..parsing.parser import StreamingParser
from ..parsing.response import Finish
from ..store.store import Conflict, StoreError
from ..trajectory.turns import VersionSpan
from .admission import Claim
from .dialect import Dialect, Head, ItemChange, ItemStream, Reply, call_ids_of, changes_of, response_name
from .requests import Request, request_error
from .sessions import LiveSession
from .turns import Placement, RecordedTurn

if TYPE_CHECKING:
    from .gateway import Gateway

_ATTEMPTS = 100
_AT_ONCE_SECONDS = 0.05
_FIRST_PIECES = 8
"""Other tasks run after each of these, so that a stream opens without delay."""
Result = TypeVar("Result")
Feed = Callable[[int, Sequence[ItemChange], Delta | None], None]


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to one request: sampled after `placed`, or stored `replies`."""

    gateway: Gateway
    session_id: str
    dialect: type[Dialect]
    request: Request
    head: Head
    claim: Claim
    placed: Placement | None = None
    sampling: SamplingParams | None = None
    live: LiveSession | None = None
    name: str = ""
    replies: Sequence[Reply] | None = None
    turns: list[RecordedTurn] = field(default_factory=list)
    sampled: int = 0

    async def run(self, feed: Feed) -> Sequence[Reply]:
        if self.replies is not None:
            for choice, reply in enumerate(self.replies):
                feed(choice, changes_of(reply.items), reply.completion)
            return self.replies
        assert self.sampling is not None
        assert self.placed is not None
        admission = self.gateway.admission
        reserving = admission.budget(self.session_id, self.request.n, self.sampling.max_tokens)
        try:
            async with reserving as max_tokens, admission.slot():
                if max_tokens < self.sampling.max_tokens:
                    self.sampling = replace(self.sampling, max_tokens=max_tokens)
                self.replies = await self._sample_and_store(self.placed, feed)
            self.claim.end((self.head, self.replies))
            return self.replies
        finally:
            self.gateway.metrics.sampled.inc(self.sampled)
            self.claim.end()  # if there is no answer, a waiting request samples one

    async def _sample_and_store(self, placed: Placement, feed: Feed) -> list[Reply]:
        about = {"dialect": self.dialect.name, "prompt_tokens": len(placed.ids), "time": time.time()}
        about |= {"name": self.name} if self.name else {}
        notes: list[asyncio.Future[None]] = []
        store = self.gateway.store
        began = time.perf_counter()
        tracing = self.gateway.tracing

        def record_start() -> None:
            notes.append(asyncio.ensure_future(store.begin(self.session_id, self.head.id, about)))

        async def abandon(why: str) -> None:
            if len(self.turns) == self.request.n:  # it went away while the turns were stored
                return
            with contextlib.suppress(StoreError):
                await store.begin(self.session_id, self.head.id, about)
            await store.abandon(self.session_id, self.head.id, why)

        # record it at once if the request may be repeated at another gateway
        timer = asyncio.get_running_loop().call_later(0 if self.name else _AT_ONCE_SECONDS, record_start)
        try:
            with tracing.span("tokentrace.engine", prompt_tokens=len(placed.ids), reused=placed.reused):
                if self.request.n == 1:
                    replies = [await self._sample(0, placed, feed)]
                else:
                    async with asyncio.TaskGroup() as group:
                        choices = (self._sample(at, placed, feed) for at in range(self.request.n))
                        tasks = [group.create_task(choice) for choice in choices]
                    replies = [task.result() for task in tasks]
            timer.cancel()
            for noted in notes:
                await asyncio.shield(noted)
            with tracing.span("tokentrace.store", sampled=self.sampled):
                seconds = time.perf_counter() - began
                await finish_uncancelled(self._store(placed, replies, seconds))
        except BaseException as error:
            timer.cancel()
            for noted in notes:
                noted.cancel()
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            why = "the agent went away" if isinstance(error, asyncio.CancelledError) else str(cause)[:500]
            with contextlib.suppress(StoreError):
                await asyncio.shield(abandon(why))
            raise request_error(cause) if isinstance(cause, EngineError | StoreError) else cause from error
        return replies

    async def _sample(self, choice: int, placed: Placement, feed: Feed) -> Reply:
        request = self.request
        metrics = self.gateway.metrics
        conversation = placed.conversation
        parser = conversation.renderer.streaming_parser(tools=conversation.tools, prompt_ids=placed.ids)
        stream = ItemStream(call_ids_of(self.head.id, choice), request.answer, request.stop)
        pieces: list[Delta] = []
        versions: list[VersionSpan] = []
        # a version that is set later says nothing about earlier tokens
        is_labelled = self._version is not None
        count, began = 0, time.perf_counter()
        async with contextlib.aclosing(self._deltas(choice, placed)) as deltas:
            async for delta in deltas:
                if not pieces and request.stream:
                    metrics.first_token.observe(time.perf_counter() - began)
                pieces.append(delta)
                piece = delta
                ids = delta.ids.tolist()
                changes = list[ItemChange]()
                if not request.stop:
                    changes = stream.feed(parser.feed(ids))
                for at, id in enumerate(ids if request.stop else (), 1):
                    changes += stream.feed(parser.feed([id]))
                    if stream.stopped_by is not None:
                        piece = delta.head(at)
                        break
                count += len(piece.ids)
                self.sampled += len(piece.ids)
                if is_labelled and self._version is not None and len(piece.ids):
                    add_version(versions, self._version, count)
                feed(choice, changes, piece)
                if stream.stopped_by is not None:
                    pieces += [] if delta.finish_reason else await self._last_pieces(choice, deltas, delta)
                    break
                if request.stream and len(pieces) <= _FIRST_PIECES:
                    await asyncio.sleep(0)  # send each piece before reading the next
        completion = pieces[0] if pieces and isinstance(pieces[0], Completion) else joined(pieces)
        if stream.stopped_by is not None and (len(completion.ids) > count or delta.finish_reason is None):
            completion = replace(completion.head(count), finish_reason=FinishReason.ABORT)
        if not completion.versions and versions:
            completion = replace(completion, versions=tuple(versions))
        reply, changes = finish_reply(parser, stream, completion)
        feed(choice, changes, None)
        metrics.engine.observe(time.perf_counter() - began)
        return reply

    def _deltas(self, choice: int, placed: Placement) -> AsyncGenerator[Delta]:
        """The completion in pieces, or whole if nobody needs pieces."""
        engine = self.gateway.engine
        request = self.request
        sampling = self.sampling
        assert sampling is not None
        if choice and sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + choice) % 2**63)
        about: dict[str, Any] = {"request_id": f"{self.head.id}-{choice}", "session": self.session_id}
        is_labelled = self._version is not None and not engine.capabilities.versions
        # the version is read as each piece arrives
        if request.stream or request.stop or is_labelled:
            return engine.stream(placed.ids, sampling, **about)

        async def whole() -> AsyncGenerator[Delta]:
            yield await engine.generate(placed.ids, sampling, **about)

        return whole()

    async def _last_pieces(self, choice: int, deltas: AsyncGenerator[Delta], delta: Delta) -> list[Delta]:
        """End a completion at its stop text. Returns the remaining pieces."""
        engine, pieces = self.gateway.engine, list[Delta]()
        if engine.capabilities.aborts:
            with contextlib.suppress(EngineError):
                await engine.abort(f"{self.head.id}-{choice}")
                async for more in deltas:
                    pieces.append(more)
                    if more.finish_reason is not None:
                        return pieces
        assert self.sampling is not None
        kind = completion_kind(self.sampling, engine.capabilities)
        return [Delta(delta.ids[:0], delta.logprobs[:0], FinishReason.ABORT, logprobs_kind=kind)]

    @property
    def _version(self) -> str | int | None:
        live = self.gateway.sessions.live.get(self.session_id, self.live)
        version = None if live is None else live.settings.version
        return version if self.gateway.version is None else self.gateway.version

    async def _store(self, placed: Placement, replies: Sequence[Reply], seconds: float) -> None:
        conversation, request = placed.conversation, self.request
        reports_versions = self.gateway.engine.capabilities.versions
        for choice, reply in enumerate(replies):
            details = {
                "response": self.head.id,
                "choice": choice,
                "dialect": self.dialect.name,
                "model": self.head.model,
                "tokenizer": conversation.renderer.tokenizer.digest[:16],
                "template": conversation.template,
                "created": self.head.created,
                "time": time.time(),
                "seconds": round(seconds, 4),
                "instructions": request.instructions,
                "stopped_by": reply.stopped_by,
                "calls": [str(status) for status in reply.statuses],
                "ignored": list(request.ignored),
                "unenforced": list(request.unenforced),
                "late_ids": dict(reply.late_ids),
                "options": request.answer,
            }
            chosen = replace(placed, choice=choice) if choice else placed
            if reply.stopped_by and reports_versions and not reply.completion.versions:
                note = "a stop text ended the turn before the engine reported its weight versions"
                chosen = replace(chosen, notes=(*placed.notes, note))
            await self._store_turn(chosen, reply, details)

    async def _store_turn(self, placed: Placement, reply: Reply, details: Mapping[str, Any]) -> None:
        """Store a turn, again if another gateway was first, and add it to the session."""
        gateway, id, choice = self.gateway, self.session_id, placed.choice
        assert self.sampling is not None
        message = reply.message
        if self.request.continued:  # the agent joins the reply to its prefilled message
            start = self.request.messages[-1]
            thought = (start.get("reasoning_content") or "") + (message.get("reasoning_content") or "")
            message = {**start, **message, "content": text_of(start) + text_of(message)}
            message |= {"reasoning_content": thought} if thought else {}
        names = [f"{self.name}#{choice}"] if self.name else []
        names += [response_name(self.head.id)] if self.request.stored else []
        is_last = choice == self.request.n - 1  # ends the request
        request = self.head.id if is_last else f"{self.head.id}#{choice}"
        sampling = self.sampling.described()
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(random.random() * 0.01 * min(attempt, 10))
            # first the session in memory; if it is old, the store raises Conflict
            async with gateway.sessions.locked(id, None if attempt else self.live) as live:
                prepared = live.session.prepare(placed, reply.completion, message, details, sampling)
                began = time.perf_counter()
                try:
                    await gateway.store.append(id, prepared.record, request=request, names=names)
                except Conflict:
                    gateway.metrics.conflicts.inc()
                    continue
                live.session.apply(prepared)
                live.info = live.info.grown(prepared.record)
                gateway.metrics.stored(self.dialect.name, prepared.turn, time.perf_counter() - began)
                self.turns.append(prepared.turn)
                return
        raise StoreError(f"too many gateways write to session {id} at once; nothing was recorded")


def finish_reply(
    parser: StreamingParser, stream: ItemStream, completion: Completion
) -> tuple[Reply, list[ItemChange]]:
    events = parser.finish()
    changes = stream.finish(events, cut_off=parser.response.finish is Finish.LENGTH)
    about = (stream.stopped_by, stream.statuses, stream.late_ids)
    return Reply(stream.items, completion, parser.response, *about), changes


async def finish_uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work that must not be cancelled; a cancelled caller waits, too."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
