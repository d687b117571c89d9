"""An engine whose completions come from a function, for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..settings import items
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan
from .answers import AnswerReader, answered_ids, answered_logprobs, checked_request
from .protocol import (
    NO_CHANNELS,
    OPTIONAL,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Completion,
    Delta,
    Engine,
    EngineAnswerError,
    GenerateRequest,
    LogprobKind,
    Logprobs,
    SamplingParams,
    Weights,
    add_version,
    check_channels,
    checked_version,
    collected,
)
from .stopping import StopFinder, TokenBytes

_TOP_LOGPROBS: Final = 20
"""As many as the APIs of servers allow."""


class Sampled(NamedTuple):
    """What a script returns where it tells logprobs."""

    ids: Sequence[int] | Ids
    logprobs: Sequence[float] | Logprobs
    channels: Channels = NO_CHANNELS
    """What is told of each id beside its logprob."""


Script: TypeAlias = Callable[[Ids, SamplingParams], Sequence[int] | Ids | Sampled]
"""The ids that follow a prompt, or those and their logprobs."""


class ScriptedEngine(Engine):
    """Answers with what `script` returns, up to and including its first stop token, and at most ``max_tokens``.

    A completion that ends short of ``max_tokens`` without a stop token ends with its last id as one. Ids without
    logprobs get ``-1.0`` each. Top logprobs that are asked for and not told are made up: the sampled id is the best,
    and each of the ids after it is less likely by 1. Pieces of a stream have `piece` ids, 0 for all in one; `latency`
    is awaited before each with its number of ids. `version` is which weights sample, and may be set at any time; other
    weights that it is given are kept in `updates`. Penalties and min-p are the script's to heed; stop texts end a
    completion where `token_bytes` tells what each id spells. `logprobs` is of which kind they are said to be. Requests
    are kept in `requests` unless `record` is off.

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
        record: bool = True,
        logprobs: LogprobKind | str = LogprobKind.PROCESSED,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        super().__init__(
            Capabilities(
                engine="scripted",
                max_length=max_length,
                vocab_size=vocab_size,
                logprobs=LogprobKind(logprobs),
                streams=True,
                aborts=True,
                pauses=True,
                versions=version is not None,
                top_logprobs=_TOP_LOGPROBS,
                sampling=frozenset(OPTIONAL) - (frozenset() if token_bytes else {"stop"}),
                weights=version is not None,
            )
        )
        self.requests: Final[list[GenerateRequest]] = []
        """What was asked; wire texts are not kept."""
        self.left: Final[list[GenerateRequest]] = []
        """The requests whose reader went away before they ended; kept as `requests` are."""
        self.running = 0
        """How many requests are under way."""
        self.updates: Final[list[tuple[Weights, str | int]]] = []
        """The weights that it was given, and what they are called."""
        self.resets = 0
        """How often its cache was emptied."""
        self.version = version
        self._token_bytes: Final = token_bytes
        self._script: Final = script
        self._piece: Final = piece
        self._latency: Final = latency
        self._record: Final = record
        self._going: Final = asyncio.Event()
        self._going.set()
        self._names: Final[set[str]] = set()
        self._aborted: Final[set[str]] = set()

    async def abort(self, request_id: str) -> None:
        """End a request before its next piece."""
        if request_id and request_id in self._names:
            self._aborted.add(request_id)

    async def pause(self) -> None:
        """Let no request go on past its next piece."""
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        await self.set_version(version)
        self.updates.append((weights, version))
        await self.reset_prefix_cache()

    async def set_version(self, version: str | int) -> None:
        if not self.capabilities.weights:
            await super().set_version(version)
        self.version = checked_version(version)

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def _generate(self, request: GenerateRequest) -> Completion:
        return await collected(self._pieces(request, streamed=False))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        return self._pieces(request, streamed=True)

    async def _pieces(self, request: GenerateRequest, *, streamed: bool) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        prompt = np.asarray(request.prompt_ids, np.int32)
        kept = replace(request, prompt_ids=prompt.copy(), wire=None)
        if self._record:
            self.requests.append(kept)
        name = request.request_id or ""
        ids, logprobs, channels, reason, text = self._answer(prompt, request.sampling)
        self._names.add(name)
        self.running += 1
        try:
            reader, spans = AnswerReader(request, self.capabilities), list[VersionSpan]()
            size = self._piece or len(ids) or 1
            for start in range(0, len(ids) or 1, size):
                stop = min(start + size, len(ids))
                told = {channel: entries[start:stop] for channel, entries in channels.items()}
                if self._latency is not None:
                    await self._latency(stop - start)
                await self._going.wait()
                if name in self._aborted:
                    reader.end(ids[:0], logprobs[:0], "abort", versions=_told(spans))
                    break
                if self.version is not None and stop:
                    add_version(spans, self.version, stop)
                if stop == len(ids):
                    reader.end(ids[start:], logprobs[start:], reason, text, _told(spans), told)
                    break
                delta = reader.take(ids[start:stop], logprobs[start:stop], told)
                if delta is not None:
                    yield delta
            yield reader.close()
        except (GeneratorExit, asyncio.CancelledError):
            if self._record and not reader.finished:
                self.left.append(kept)
            raise
        finally:
            self.running -= 1
            self._names.discard(name)
            self._aborted.discard(name)

    def _answer(self, prompt: Ids, sampling: SamplingParams) -> tuple[Ids, Logprobs, Channels, str, str | None]:
        """The ids, their logprobs and channels, why they end, and the stop text that they end with."""
        given = self._script(prompt, sampling)
        told = given if isinstance(given, Sampled) else None
        sampled = items("the script's ids", given if told is None else told.ids, EngineAnswerError)
        sampled = answered_ids(sampled, "ids", None).tolist()
        values = [-1.0] * len(sampled)
        if told is not None:
            values = items("the script's logprobs", told.logprobs, EngineAnswerError)
        if len(values) != len(sampled):
            raise EngineAnswerError(f"the script returned {len(sampled)} ids with {len(values)} logprobs")
        channels = dict(told.channels) if told is not None else {}
        check_channels(channels, len(sampled))
        if sampling.top_logprobs and TOP_LOGPROBS not in channels:
            channels[TOP_LOGPROBS] = self._made_up(sampled, values, sampling.top_logprobs)
        ends = [at + 1 for at, one in enumerate(sampled) if one in sampling.stop_token_ids][:1]
        text, reached = self._text(sampled, sampling)
        end = min([*ends, reached, len(sampled), sampling.max_tokens])
        text = text if end == reached and end not in ends else None
        stops = bool(end) and (end in ends or text is not None or end < sampling.max_tokens)
        sampled, values = sampled[:end], values[:end]
        channels = {name: entries[:end] for name, entries in channels.items()}
        ids = answered_ids(sampled, "ids", self.capabilities.vocab_size)
        return ids, answered_logprobs(values, ids, "logprobs"), channels, "stop" if stops else "length", text

    def _text(self, ids: list[int], sampling: SamplingParams) -> tuple[str | None, int]:
        """The first stop text, and how many ids there are up to its end."""
        if sampling.stop and self._token_bytes is not None:
            finder = StopFinder(sampling.stop, self._token_bytes)
            for at, one in enumerate(ids, 1):
                if (text := finder.feed(one)) is not None:
                    return text, at
        return None, len(ids)

    def _made_up(self, ids: list[int], logprobs: list[float], count: int) -> list[tuple[tuple[int, float], ...]]:
        size = self.capabilities.vocab_size or INT32_MAX
        count = min(count, size)
        return [
            tuple(((one + rank) % size, float(logprob) - rank) for rank in range(count))
            for one, logprob in zip(ids, logprobs, strict=True)
        ]


def _told(spans: list[VersionSpan]) -> list[dict[str, Any]] | None:
    """Spans of versions as servers tell them."""
    return [{"version": version, "start": start, "end": stop} for version, start, stop in spans] or None
