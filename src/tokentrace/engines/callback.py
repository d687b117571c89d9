"""An engine that is a function: whatever a trainer samples with, as an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..errors import shown
from ..trajectory.turns import VersionSpan
from .answers import answered_ids, answered_logprobs, checked_request, completion_kind
from .protocol import Capabilities, Completion, Delta, Engine, EngineAnswerError, FinishReason, GenerateRequest


@dataclass(frozen=True, slots=True)
class EngineReply:
    """What a callback returns for a request, in plain lists."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    """One for each id. None, where the other side returned none, is an error."""
    finish_reason: str
    """``"stop"``, ``"length"`` or ``"abort"``."""
    versions: Sequence[VersionSpan] = ()
    cached_tokens: int | None = None


class CallbackEngine(Engine):
    """Samples with a function: a request in, an `EngineReply` out, for one completion at a time.

    The request is checked before the function is called: see `Engine`. Raises EngineAnswerError if ids or logprobs are
    missing, are not ids or logprobs, or are more than were asked for. The function may raise any `EngineError` itself.

    >>> import asyncio
    >>> from tokentrace.engines import SamplingParams
    >>> async def sample(request):
    ...     return EngineReply([7, 8], [-0.5, -0.25], "stop")
    >>> engine = CallbackEngine(sample, Capabilities("mine", vocab_size=10))
    >>> asyncio.run(engine.generate([1, 2], SamplingParams(4))).ids.tolist()
    [7, 8]
    """

    def __init__(self, sample: Callable[[GenerateRequest], Awaitable[EngineReply]], capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self._sample = sample

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        yield await self._generate(request)

    async def _generate(self, request: GenerateRequest) -> Completion:
        request = checked_request(request, self.capabilities)
        reply = await self._sample(request)
        engine, most = self.capabilities.engine, request.sampling.max_tokens
        ids = answered_ids(list(reply.ids), "ids", self.capabilities.vocab_size)
        if reply.logprobs is None and len(ids):
            raise EngineAnswerError(f"{engine} returned no logprobs: ids without logprobs cannot be used")
        if len(ids) > most:
            raise EngineAnswerError(f"{engine} returned {len(ids)} ids, where {most} were asked for")
        if reply.finish_reason not in set(FinishReason):
            raise EngineAnswerError(f"{engine} stopped for {shown(reply.finish_reason)}, which is not known here")
        return Completion(
            ids,
            answered_logprobs([float(one) for one in reply.logprobs or ()], ids, "logprobs"),
            FinishReason(reply.finish_reason),
            tuple(reply.versions),
            reply.cached_tokens,
            completion_kind(request.sampling, self.capabilities),
        )
