"""Engines made from functions: a trainer's own sampler, or a script for tests and benchmarks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from ..settings import items
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.turns import LogprobKind, VersionSpan
from . import protocol
from .answers import AnswerReader, EngineReply, StopFinder, TokenBytes, answered_ids, checked_request
from .channels import TOP_LOGPROBS
from .errors import EngineAnswerError
from .protocol import OPTIONAL, Capabilities, Delta, Engine, GenerateRequest, SamplingParams

_TOP_LOGPROBS: Final = 20


class CallbackEngine(Engine):
    """Samples with a function: a request in, an `EngineReply` out, checked like a server's answer.

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
        request = checked_request(request, self.capabilities)
        reader = AnswerReader(request, self.capabilities)
        reader.add(await self._sample(request))
        yield reader.close()


Script: TypeAlias = Callable[[Ids, SamplingParams], Sequence[int] | Ids | EngineReply]
"""Returns the ids that follow a prompt, or a reply with logprobs and channels."""


class ScriptedEngine(Engine):
    """Answers with the ids that `script` returns, up to the first stop token or stop text, and at most ``max_tokens``.

    Ids without logprobs get ``-1.0`` each; missing top logprobs are made up. Streams have `piece` ids per piece, or all
    ids in one piece if it is 0. Awaits `latency` before each piece. `version` names the weights. `token_bytes` returns
    the bytes of an id, for stop texts. `requests` records all requests.

    >>> engine = ScriptedEngine(lambda prompt, sampling: [7, 8, 9])
    >>> asyncio.run(engine.generate([1, 2], SamplingParams(10, stop_token_ids=(8,)))).ids.tolist()
    [7, 8]
    """

    def __init__(
        self,
        script: Script,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        piece: int = 0,
        latency: Callable[[int], Awaitable[None]] | None = None,
        version: str | int | None = None,
        logprobs: LogprobKind | str = LogprobKind.PROCESSED,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        super().__init__(
            Capabilities(
                engine="scripted",
                max_length=max_length,
                vocab_size=vocab_size,
                logprobs=LogprobKind(logprobs),
                aborts=True,
                pauses=True,
                versions=version is not None,
                top_logprobs=_TOP_LOGPROBS,
                sampling=frozenset(OPTIONAL) - (frozenset() if token_bytes else {"stop"}),
                weights=version is not None,
            )
        )
        self.requests: Final[list[GenerateRequest]] = []
        self.version = version
        self._token_bytes, self._script, self._size = token_bytes, script, piece
        self._latency = latency
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
        if not self.capabilities.weights:
            await super().set_version(version)
        self.version = protocol.checked_version(version)

    async def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        prompt = np.asarray(request.prompt_ids, np.int32)
        self.requests.append(replace(request, prompt_ids=prompt.copy()))
        name, reply = request.request_id or "", self._answer(prompt, request.sampling)
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
                    reader.add(EngineReply([], [], "abort", spans))
                    break
                if self.version is not None and end:
                    protocol.add_version(spans, self.version, end)
                part = _slice(reply, start, end)
                if end == count:
                    part = replace(part, finish_reason=reply.finish_reason, stop=reply.stop, versions=spans)
                delta = reader.add(part)
                if delta is not None:
                    yield delta
            yield reader.close()
        finally:
            self._running.discard(name)
            self._aborted.discard(name)

    def _answer(self, prompt: Ids, sampling: SamplingParams) -> EngineReply:
        result = self._script(prompt, sampling)
        reply = result if isinstance(result, EngineReply) else EngineReply(result, None)
        ids, channels, count = answered_ids(reply.ids, None).tolist(), dict(reply.channels), sampling.top_logprobs
        logprobs = [-1.0] * len(ids)
        if reply.logprobs is not None:
            logprobs = items("the script's logprobs", reply.logprobs, EngineAnswerError)
        protocol.check_channels({**channels, "logprobs": logprobs}, len(ids))
        if count and TOP_LOGPROBS not in channels:
            size = self.capabilities.vocab_size or INT32_MAX
            channels[TOP_LOGPROBS] = [
                tuple(((one + rank) % size, float(logprob) - rank) for rank in range(min(count, size)))
                for one, logprob in zip(ids, logprobs, strict=True)
            ]
        reply = EngineReply(ids, logprobs, channels=channels)
        finder = StopFinder(sampling.stop, self._token_bytes or bytes)
        for at, one in enumerate(ids[: sampling.max_tokens], 1):
            text = finder.feed(one)
            if text is not None or one in sampling.stop_token_ids:
                stop = None if one in sampling.stop_token_ids else text
                return replace(_slice(reply, 0, at), finish_reason="stop", stop=stop)
        reason = "stop" if 0 < len(ids) < sampling.max_tokens else "length"
        return replace(_slice(reply, 0, sampling.max_tokens), finish_reason=reason)


def _slice(reply: EngineReply, start: int, end: int) -> EngineReply:
    channels = {name: entries[start:end] for name, entries in reply.channels.items()}
    return EngineReply(reply.ids[start:end], (reply.logprobs or ())[start:end], channels=channels)
