"""The gateway: from a request to a stored turn, whatever the dialect.

`Gateway.begin` makes the prompt. `Answer.run` samples, and returns once the turn is on disk.
"""

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..conversation.responses import response_of_item
from ..diagnose.conversation_diff import text_of
from ..diagnose.message_keys import root_key
from ..engines.errors import EngineError
from ..engines.protocol import Completion, Engine, FinishReason, SamplingParams
from ..errors import InputError, brief
from ..rendering.renderer import OF_RENDER, Renderer, unread_variable
from ..store.packing import unpack_channels
from ..store.store import Store
from ..study.memory import Memory
from ..tokens.tokenizer import Ids
from .adapting import with_readable_roles
from .admission import Admission, Answered, Claim
from .answering import Answer, finish_reply, finish_uncancelled
from .dialect import Dialect, Head, ItemStream, call_ids_of, response_name
from .metrics import Metrics
from .requests import Request, RequestError, placed_error
from .session import SessionRecord
from .sessions import LiveSession, Sessions
from .tracing import Tracing
from .turns import Conversation, Message, Placement, RecordedTurn

_INLINE = 20_000
_ELSEWHERE_SECONDS = 10.0
_POLL_SECONDS = 0.1
_ITEM_FIELDS = {"rs": "reasoning_content", "msg": "content"}


@dataclass(slots=True)
class Gateway:
    engine: Engine
    renderer: Renderer
    store: Store
    sessions: Sessions
    metrics: Metrics
    admission: Admission
    model: str = "tokentrace"
    version: str | int | None = None
    tracing: Tracing = field(default_factory=Tracing)
    _renderers: Memory = field(default_factory=lambda: Memory(most=64))

    def __post_init__(self) -> None:
        self.renderer = self.renderer.silent()

    async def begin(self, session_id: str, dialect: type[Dialect], request: Request, name: str) -> Answer:
        """Make a prompt, or repeat the answer to a request of the same `name`."""
        claim = self.admission.admit(session_id)
        try:
            live = await self.sessions.get(session_id)
            earlier = await self._earlier(session_id, request, name, claim) if name else None
            if earlier is not None:
                claim.end(earlier)
                head, replies = earlier
                return Answer(self, session_id, dialect, request, head, claim, replies=replies)
            self.admission.check_open(live)
            request = await self._with_previous(session_id, request)
            began = time.perf_counter()
            with self.tracing.span("tokentrace.prompt", messages=len(request.messages)):
                placed = await self._place(live, request, dialect.history)
            self.metrics.placed(placed, time.perf_counter() - began)
            sampling = self._sampling(live, dialect, request, len(placed.ids))
            head = self._head(request, placed.ids, secrets.token_hex(16), time.time())
        except BaseException:
            claim.end()
            raise
        return Answer(self, session_id, dialect, request, head, claim, placed, sampling, live, name)

    async def count(self, id: str, request: Request) -> int:
        live = await self.sessions.get(id)
        return len((await self._place(live, await self._with_previous(id, request))).ids)

    async def _place(self, live: LiveSession, request: Request, history: str = "messages") -> Placement:
        conversation = self._conversation(request)
        try:
            async with self.sessions.locked(live.info.id, live) as now:
                recorded = now.session.turns[-1].depth if now.session.turns else 0
                new = conversation.messages[recorded:] if recorded else ()
                if new and sum(len(str(message.get("content") or "")) for message in new) < _INLINE:
                    return now.session.place(conversation)
                return await finish_uncancelled(asyncio.to_thread(now.session.place, conversation))
        except InputError as error:  # opening instructions may be joined
            joined = len(request.messages) - len(conversation.messages)
            raise placed_error(error.renumbered(-joined), history, request.starts) from error

    def _conversation(self, request: Request) -> Conversation:
        self._check_variables(request)
        read = self.renderer.study(request.tools).template.variables if request.hints else ()
        variables = {name: value for name, value in request.hints.items() if name in read}
        variables |= request.variables
        renderer = self.renderer_with(variables)
        digests = sorted(renderer.template_digests().items())
        tools = request.tools
        template = ",".join(f"{name}={digest}" for name, digest in digests)
        root = root_key(tools, variables, template if request.prompt_ids is None else "ids")
        apart = request.instructions if request.stored else 0
        messages = with_readable_roles(renderer, request.messages, apart)
        more = (request.continued, request.prompt_ids, ",".join(digest[:16] for _, digest in digests))
        return Conversation(messages, tools, renderer, root, variables, *more)

    def _sampling(
        self, live: LiveSession, dialect: type[Dialect], request: Request, length: int
    ) -> SamplingParams:
        settings, able = live.settings, self.engine.capabilities
        room, most = able.max_length, settings.max_prompt_tokens
        if most is not None and length > most:
            raise _overflow(dialect, length, most, f"{most} tokens in this session (max_prompt_tokens)")
        if room is not None and length >= room:
            raise _overflow(dialect, length, room - 1, f"{room} tokens")
        values = {**request.sampling, **settings.sampling}
        limits = [self.admission.limits.max_tokens, request.max_tokens, values.pop("max_tokens", None)]
        limits.append(None if room is None else room - length)
        try:
            sampling = SamplingParams(
                max_tokens=max(1, min(limit for limit in limits if limit is not None)),
                stop_token_ids=request.stop_token_ids or tuple(self.renderer.get_stop_token_ids()),
                allow_raw_logprobs=True,
                top_logprobs=request.answer.logprobs or 0,
                structure=request.structure,
                **values,
            )
        except EngineError as error:
            raise RequestError(str(error), code="invalid_value") from error
        unsupported = [name for name in sampling.optional if name not in able.sampling]
        unsupported += [dialect.structure] if sampling.structure is not None and not able.structures else []
        if unsupported:
            problem = f"the engine ({able.engine}) does not support this setting; leave it out"
            raise RequestError(problem, field=unsupported[0], code="unsupported_parameter")
        return sampling

    def _head(self, request: Request, prompt_ids: Ids, id: str, created: float) -> Head:
        token_bytes = self.renderer.tokenizer.vocabulary.token_bytes
        return Head(request, id, int(created), request.model or self.model, prompt_ids, token_bytes)

    def renderer_with(self, variables: Mapping[str, Any]) -> Renderer:
        if not variables:
            return self.renderer
        key = repr(sorted(variables.items()))
        return self._renderers.once(key, lambda: self.renderer.with_variables(variables))

    def _check_variables(self, request: Request) -> None:
        if not request.variables:
            return
        template = self.renderer.study(request.tools).template
        tokenizer, unsupported = self.renderer.tokenizer, "unsupported_parameter"
        control = tokenizer.vocabulary.control_pattern
        for name, value in request.variables.items():
            field = f"chat_template_kwargs.{name[:80]}"
            if name in OF_RENDER or name in tokenizer.variables:
                raise RequestError("cannot be set by a request", field=field, code=unsupported)
            texts = re.findall(r'"(?:[^"\\]|\\.)*"', json.dumps(value))
            if control is not None and any(control.search(json.loads(text)) for text in texts):
                raise RequestError("must not spell a control token", field=field, code="invalid_value")
            if problem := unread_variable(name, [template]):
                raise RequestError(problem, field=field, code=unsupported)

    @contextlib.asynccontextmanager
    async def _named(self, id: str, *names: str) -> AsyncIterator[tuple[SessionRecord, list[RecordedTurn]]]:
        numbers = [await self.store.turn_named(id, name) for name in names]
        async with self.sessions.locked(id) as live:
            turns = [live.session.turns[number] for number in numbers if number is not None]
            yield live.session, turns if len(turns) == len(names) else []

    async def _with_previous(self, id: str, request: Request) -> Request:
        """Fill in the previous response and stored items."""
        if request.previous is None and not request.references:
            return request
        messages = list(request.messages)
        for at, items in request.references.items():
            async with self._named(id, response_name(response_of_item(items[0]) or "")) as (_, turns):
                if not turns:
                    raise _unknown_item(items[0])
                messages[at] = resolved(messages[at], turns[0].reply, items)
        if request.previous is not None:
            async with self._named(id, response_name(request.previous)) as (session, turns):
                if not turns:
                    problem = f"there is no stored response {brief(request.previous)} here"
                    code = "previous_response_not_found"
                    raise RequestError(problem, field="previous_response_id", status=404, code=code)
                past = session.conversation(turns[0].number)[turns[0].instructions :]
            messages[request.instructions : request.instructions] = past
        return replace(request, messages=messages)

    async def stored(self, id: str, dialect: type[Dialect], response: str) -> Answered:
        async with self._named(id, response_name(response)) as (session, turns):
            if not turns or turns[0].dialect != dialect.name:
                problem = f"there is no stored response {brief(response)} in this session"
                raise RequestError(problem, status=404)
            [turn] = turns
            past = session.conversation(turn.number)[:-1]
            tools = session.roots[turn.root][0]
            request = Request(past, tools, turn.model, instructions=turn.instructions, answer=turn.options)
            return await self._answered(session, turns, request)

    async def _answered(
        self, session: SessionRecord, turns: Sequence[RecordedTurn], request: Request
    ) -> Answered:
        """Parse turns, the choices of one answer, again from their tokens."""
        replies = []
        for turn in turns:
            record = await anext(self.store.turns(session.trajectory.name, turn.number))
            sampled = session.sampled_turn(turn)
            tools, variables = session.roots[turn.root]
            completion = Completion(
                np.array(sampled.tokens.ids),
                np.array(sampled.tokens.logprobs),
                FinishReason(sampled.finish_reason),
                sampled.versions,
                sampled.cached_tokens,
                sampled.logprobs_kind,
                unpack_channels(record.channels),
            )
            renderer = self.renderer_with(variables)
            prompt_ids = session.prompt_ids(turn)
            parser = renderer.streaming_parser(tools=tools, prompt_ids=prompt_ids)
            stop = [turn.stopped_by] if turn.stopped_by else ()
            stream = ItemStream(call_ids_of(turn.response, turn.choice), turn.options, stop)
            stream.feed(parser.feed(completion.ids.tolist()))
            replies.append(finish_reply(parser, stream, completion)[0])
        first = turns[0]
        return self._head(request, session.prompt_ids(first), first.response, first.created), replies

    async def _earlier(self, id: str, request: Request, name: str, claim: Claim) -> Answered | None:
        """The answer to a request of the same name. If none, claims the name."""
        names = [f"{name}#{choice}" for choice in range(request.n)]
        while (under_way := self.admission.under_way.get((id, name))) is not None:
            answered = await asyncio.shield(under_way)
            if answered is not None:
                return answered
        claim.take(name)
        for _ in range(round(_ELSEWHERE_SECONDS / _POLL_SECONDS)):
            requests = await self.store.incomplete(id)
            async with self._named(id, *names) as (session, turns):
                if turns:
                    self.metrics.replayed.inc()
                    return await self._answered(session, turns, request)
            if not any(each["ended"] is None and each.get("name") == name for each in requests):
                break
            # another gateway with the same store is answering it
            await asyncio.sleep(_POLL_SECONDS)
        return None

    def state(self) -> dict[str, Any]:
        names = ("paused", "draining", "in_flight", "waiting")
        return {**{name: getattr(self.admission, name) for name in names}, "version": self.version}

    async def pause(self, *, wait: bool = False) -> None:
        """Start no request. Running ones pause if the engine can, else `wait` waits."""
        self.admission.running.clear()
        if self.engine.capabilities.pauses:
            await self.engine.pause()
        elif wait:
            await self.admission.until(lambda: not self.admission.in_flight)

    async def resume(self, version: str | int | None = None) -> None:
        if version is not None:
            if self.engine.capabilities.weights:
                await self.engine.set_version(version)
            self.version = version
        if self.engine.capabilities.pauses and self.admission.paused:
            await self.engine.resume()
        self.admission.running.set()


def resolved(message: Message, reply: Message, items: Sequence[str]) -> dict[str, Any]:
    """Add stored items to a message. A call stands for all calls of the reply."""
    result = dict(message)
    for item in items:
        kind = item.partition("_")[0]
        # the recorded text, then any other text of the message
        if field := _ITEM_FIELDS.get(kind):
            sent = text_of(message) if kind == "msg" else message.get(field) or ""
            recorded = reply.get(field) or ""
            result[field] = recorded if sent in recorded else recorded + sent
        else:
            inline = {call["id"]: call for call in message.get("tool_calls") or ()}
            calls = [inline.pop(call["id"], call) for call in reply.get("tool_calls") or ()]
            field, result["tool_calls"] = "tool_calls", calls and [*calls, *inline.values()]
        if kind != "msg" and not result[field]:
            raise _unknown_item(item)
    return result


def _overflow(dialect: type[Dialect], length: int, most: int, context: str) -> RequestError:
    """Clients look for these words: Anthropic's first, then OpenAI's."""
    first = f"prompt is too long: {length} tokens > {most} maximum"
    second = f"This model's maximum context length is {context}"
    return RequestError(f"{first}. {second}", field=dialect.history, code="context_length_exceeded")


def _unknown_item(item: str) -> RequestError:
    return RequestError(f"item_reference: this session has no item {brief(item)}", field="input")
