"""Engines from functions: a trainer's own sampler, or a script for tests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Final

import numpy as np

from ..settings import items
from ..tokens.ids import INT32_MAX, check_ids
from ..tokens.tokenizer import Ids
from ..trajectory.turns import IdsLike, LogprobKind, VersionSpan
from . import protocol
from .answers import AnswerReader, EngineReply, checked_request
from .errors import EngineAnswerError
from .protocol import OPTIONAL, Capabilities, Delta, Engine, GenerateRequest, SamplingParams


class CallbackEngine(Engine):
    """Samples with a function: a request in, an `EngineReply` out, which is checked.

    >>> from tokentrace.engines import SamplingParams
    >>> async def sample(request):
    ...     return EngineReply([7, 8], [-0.5, -0.25], "stop")
    >>> engine = CallbackEngine(sample, Capabilities("mine", vocab_size=10))
    >>> asyncio.run(engine.generate([1, 2], SamplingParams(4))).ids.tolist()
    [7, 8]
    """

    def __init__(
        self, sample: Callable[[GenerateRequest], Awaitable[EngineReply]], capabilities: Capabilities
    ) -> None:
        super().__init__(capabilities)
        self._sample = sample

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        reader = AnswerReader(request, self.capabilities)
        reader.feed(await self._sample(request))
        yield reader.close()


Script = Callable[[Ids, SamplingParams], IdsLike | EngineReply]
"""Returns the ids that follow a prompt, or a reply with logprobs and routed experts."""


class ScriptedEngine(Engine):
    """Answers with the ids that `script` returns, up to the first stop token.

    Missing logprobs are ``-1.0``; top logprobs are invented. A stream has `piece` ids per piece (0:
    all) and awaits `latency` before each. `requests` records all requests.

    >>> engine = ScriptedEngine(lambda prompt, sampling: [7, 8, 9])
    >>> asyncio.run(engine.generate([1, 2], SamplingParams(10, stop_token_ids=(8,)))).ids.tolist()
    [7, 8]
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int | None = None,
        piece: int = 0,
        latency: Callable[[int], Awaitable[None]] | None = None,
        version: str | int | None = None,
    ) -> None:
        super().__init__(
            Capabilities(
                engine="scripted",
                vocab_size=vocab_size,
                logprobs=LogprobKind.PROCESSED,
                aborts=True,
                pauses=True,
                versions=version is not None,
                top_logprobs=20,
                sampling=frozenset(OPTIONAL) - {"stop"},
                weights=True,
            )
        )
        self.requests: Final[list[GenerateRequest]] = []
        self.version = version
        self._script, self._size, self._latency = script, piece, latency
        self._resumed: Final = asyncio.Event()
        self._resumed.set()
        self._running: Final[set[str]] = set()
        self._aborted: Final[set[str]] = set()

    async def abort(self, request_id: str) -> None:
        self._aborted.update({request_id} & self._running)

    async def pause(self) -> None:
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

    async def update_weights(self, weights: protocol.Weights, *, version: str | int) -> None:
        await self.set_version(version)

    async def set_version(self, version: str | int) -> None:
        self.version = protocol.checked_version(version)

    async def reset_prefix_cache(self) -> None:
        """There is no cache."""

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        prompt = np.asarray(request.prompt_ids, np.int32)
        self.requests.append(replace(request, prompt_ids=prompt.copy()))
        name, reply = request.request_id or "", self._reply(prompt, request.sampling)
        reader, spans, count = AnswerReader(request, self.capabilities), list[VersionSpan](), len(reply.ids)
        size = self._size or count or 1
        if name:
            self._running.add(name)
        try:
            for start in range(0, count or 1, size):
                end = min(start + size, count)
                if self._latency is not None:
                    await self._latency(end - start)
                await self._resumed.wait()
                if name in self._aborted:
                    reader.feed(EngineReply([], [], "abort", spans))
                    break
                if self.version is not None and end:
                    protocol.add_version(spans, self.version, end)
                logprobs = (reply.logprobs or ())[start:end]
                piece = EngineReply(reply.ids[start:end], logprobs, None, spans, top=reply.top[start:end])
                if end == count:
                    piece = replace(piece, finish_reason=reply.finish_reason, experts=reply.experts)
                if (delta := reader.feed(piece)) is not None:
                    yield delta
            yield reader.close()
        finally:
            self._running.discard(name)
            self._aborted.discard(name)

    def _reply(self, prompt: Ids, sampling: SamplingParams) -> EngineReply:
        result = self._script(prompt, sampling)
        reply = result if isinstance(result, EngineReply) else EngineReply(result, None)
        ids = check_ids(reply.ids, "ids", error=EngineAnswerError).tolist()
        logprobs = [-1.0] * len(ids)
        if reply.logprobs is not None:
            logprobs = items("the script's logprobs", reply.logprobs, EngineAnswerError)
        protocol.check_channels({"logprobs": logprobs}, len(ids))
        ends = (at for at, one in enumerate(ids, 1) if one in sampling.stop_token_ids)
        end = min(next(ends, len(ids)), sampling.max_tokens)
        is_stopped = end and (ids[end - 1] in sampling.stop_token_ids or end < sampling.max_tokens)
        size = self.capabilities.vocab_size or INT32_MAX
        ranks = range(min(sampling.top_logprobs, size))
        pairs = zip(ids[:end], logprobs, strict=False)
        experts = reply.experts
        if experts is not None and len(experts) == len(prompt) + len(ids) - 1:  # also those of the prompt
            experts = experts[len(prompt) - 1 :]
        return EngineReply(
            ids[:end],
            logprobs[:end],
            "stop" if is_stopped else "length",
            top=reply.top[:end]
            or [
                [((one + rank) % size, float(value or 0) - rank) for rank in ranks] for one, value in pairs
            ],
            experts=None if experts is None else experts[:end],
        )
