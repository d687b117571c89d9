"""An engine whose completions come from a function, for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..settings import items
from ..tokens.ids import INT32_MAX
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan
from .answers import AnswerReader, VersionRow, answered_ids, checked_request
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


class Sampled(NamedTuple):
    """Ids with their logprobs, and channels with one entry per id."""

    ids: Sequence[int] | Ids
    logprobs: Sequence[float] | Logprobs
    channels: Channels = NO_CHANNELS


Script: TypeAlias = Callable[[Ids, SamplingParams], Sequence[int] | Ids | Sampled]
"""Returns the ids that follow a prompt, or a `Sampled`."""


class _Reply(NamedTuple):
    ids: list[int]
    logprobs: list[float]
    channels: Channels
    finish_reason: str
    stop_text: str | None


class ScriptedEngine(Engine):
    """Answers with what `script` returns, up to its first stop token or stop text, and at most ``max_tokens``.

    A shorter completion without a stop token ends with ``STOP`` as well. Ids without logprobs get ``-1.0`` each;
    requested top logprobs that the script does not return are invented. A stream's pieces have `piece` ids, 0 for all
    in one; `latency` is awaited with the number of ids before each. `version` names the weights and may be set at any
    time. `token_bytes` spells each id, for stop texts. `requests` holds all requests, unless `record` is off.

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
        self.left: Final[list[GenerateRequest]] = []
        """Requests whose reader went away before they ended."""
        self.updates: Final[list[tuple[Weights, str | int]]] = []
        self.resets = 0
        """How often its cache was emptied."""
        self.version = version
        self._token_bytes: Final = token_bytes
        self._script: Final = script
        self._size: Final = piece
        self._latency: Final = latency
        self._record: Final = record
        self._resumed: Final = asyncio.Event()
        self._resumed.set()
        self._running_ids: Final[set[str]] = set()
        self._aborted: Final[set[str]] = set()

    async def abort(self, request_id: str) -> None:
        """End a request before its next piece."""
        if request_id and request_id in self._running_ids:
            self._aborted.add(request_id)

    async def pause(self) -> None:
        """Stop all requests before their next piece."""
        self._resumed.clear()

    async def resume(self) -> None:
        self._resumed.set()

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
        if self._record:
            self.requests.append(replace(request, prompt_ids=prompt.copy(), wire=None))
        name, reply = request.request_id or "", self._answer(prompt, request.sampling)
        self._running_ids.add(name)
        reader, spans, count = AnswerReader(request, self.capabilities), list[VersionSpan](), len(reply.ids)
        size = self._size or count or 1
        try:
            for start in range(0, count or 1, size):
                stop = min(start + size, count)
                if self._latency is not None:
                    await self._latency(stop - start)
                await self._resumed.wait()
                if name in self._aborted:
                    reader.end([], [], "logprobs", "abort", versions=_rows(spans))
                    break
                if self.version is not None and stop:
                    add_version(spans, self.version, stop)
                ids, logprobs = reply.ids[start:stop], reply.logprobs[start:stop]
                channels = {channel: entries[start:stop] for channel, entries in reply.channels.items()}
                if stop == count:
                    reason, text = reply.finish_reason, reply.stop_text
                    reader.end(ids, logprobs, "logprobs", reason, text, _rows(spans), channels)
                    break
                delta = reader.add(ids, logprobs, "logprobs", channels)
                if delta is not None:
                    yield delta
            yield reader.close()
        except (GeneratorExit, asyncio.CancelledError):
            if self._record and not reader.finished:
                self.left.append(replace(request, prompt_ids=prompt.copy(), wire=None))
            raise
        finally:
            self._running_ids.discard(name)
            self._aborted.discard(name)

    def _answer(self, prompt: Ids, sampling: SamplingParams) -> _Reply:
        result = self._script(prompt, sampling)
        sampled = result if isinstance(result, Sampled) else None
        ids = answered_ids(
            items("the script's ids", result if sampled is None else sampled.ids, EngineAnswerError), "ids", None
        ).tolist()
        logprobs, channels = [-1.0] * len(ids), dict[str, Sequence[object]]()
        if sampled is not None:
            logprobs = items("the script's logprobs", sampled.logprobs, EngineAnswerError)
            channels = dict(sampled.channels)
        if len(logprobs) != len(ids):
            raise EngineAnswerError(f"the script returned {len(ids)} ids with {len(logprobs)} logprobs")
        check_channels(channels, len(ids))
        if sampling.top_logprobs and TOP_LOGPROBS not in channels:
            channels[TOP_LOGPROBS] = self._invented(ids, logprobs, sampling.top_logprobs)
        token_end = next((at for at, one in enumerate(ids, 1) if one in sampling.stop_token_ids), None)
        text, text_end = self._stop_text(ids, sampling)
        end = min(at for at in (token_end, text_end, len(ids), sampling.max_tokens) if at is not None)
        text = text if end == text_end and end != token_end else None
        stops = bool(end) and (end == token_end or text is not None or end < sampling.max_tokens)
        channels = {name: entries[:end] for name, entries in channels.items()}
        return _Reply(ids[:end], logprobs[:end], channels, "stop" if stops else "length", text)

    def _stop_text(self, ids: list[int], sampling: SamplingParams) -> tuple[str | None, int | None]:
        """Return the first stop text, and how many ids there are up to its end."""
        if sampling.stop and self._token_bytes is not None:
            finder = StopFinder(sampling.stop, self._token_bytes)
            for at, one in enumerate(ids, 1):
                if (text := finder.feed(one)) is not None:
                    return text, at
        return None, None

    def _invented(self, ids: list[int], logprobs: list[float], count: int) -> list[tuple[tuple[int, float], ...]]:
        size = self.capabilities.vocab_size or INT32_MAX
        return [
            tuple(((one + rank) % size, float(logprob) - rank) for rank in range(min(count, size)))
            for one, logprob in zip(ids, logprobs, strict=True)
        ]


def _rows(spans: list[VersionSpan]) -> list[VersionRow] | None:
    return [VersionRow(*span) for span in spans] or None
