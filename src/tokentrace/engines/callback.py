"""An engine made of a function: whatever a trainer samples with, as an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from ..trajectory.turns import VersionSpan
from .answers import AnswerReader, VersionRow, checked_request
from .protocol import Capabilities, Completion, Delta, Engine, EngineAnswerError, GenerateRequest, joined


@dataclass(frozen=True, slots=True)
class EngineReply:
    """A callback's answer to a request, in plain lists."""

    ids: Sequence[int]
    logprobs: Sequence[float] | None
    """One per id. None is an error."""
    finish_reason: str
    """``"stop"``, ``"length"`` or ``"abort"``."""
    versions: Sequence[VersionSpan] = ()
    cached_tokens: int | None = None


class CallbackEngine(Engine):
    """Samples with a function: a request in, an `EngineReply` out.

    Checks the request before it calls the function, and the reply as it checks servers. Raises EngineAnswerError if ids
    or logprobs are missing, invalid or too many. The function may raise any `EngineError`.

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
        if reply.logprobs is None and len(reply.ids):
            raise EngineAnswerError(f"{self.capabilities.engine} returned no logprobs: ids without them cannot be used")
        reader = AnswerReader(request, self.capabilities)
        versions = [VersionRow(*span) for span in reply.versions] or None
        reader.cached_tokens = reply.cached_tokens
        reader.end(list(reply.ids), list(reply.logprobs or ()), "logprobs", reply.finish_reason, versions=versions)
        return joined([reader.close()])
