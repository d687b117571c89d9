"""The embedded engine: the pocket model in this process, many requests in one batch, prefixes kept by session.

Logprobs are those of the distribution that was sampled from, temperature, top-k and top-p included. Greedy decoding
(temperature 0) samples from nothing; its logprobs are the model's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..pocket.model import Cache, Floats, PocketModel, load_pocket, log_softmax
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan
from .answers import checked_request, completion_kind
from .protocol import (
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Delta,
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    SamplingParams,
    add_version,
)

KEPT_TOKENS: Final = 200_000
"""How many tokens of idle sessions stay cached."""
READ_AT_ONCE: Final = 256
"""How many tokens of prompts are read in one step: between two steps others go on, and requests can be ended."""


class _Drawn(NamedTuple):
    """What was sampled of one request in one step."""

    token: int
    logprob: float
    channels: Channels


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request under way, and what was sampled of it."""

    request: GenerateRequest
    prompt: Ids
    random: np.random.Generator
    cache: Cache
    pieces: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    cached: int = 0
    """How many ids of the prompt were in the cache of its session."""
    read: int = 0
    """How many ids of the prompt are in the cache."""
    ids: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False

    @property
    def unread(self) -> int:
        """How many ids of the prompt the model has not seen."""
        return len(self.prompt) - self.read

    def pending(self, most: int) -> Any:
        """The ids that come next: at most so many of the prompt, then the last id that was sampled."""
        return self.prompt[self.read : self.read + most] if self.unread else self.ids[-1:]


class EmbeddedEngine(Engine):
    """The pocket model as an engine. Make it and use it in one event loop; `close` ends its work.

    `version` is which weights sample, as completions tell it. Requests that name a seed depend on it alone.
    """

    def __init__(self, model: PocketModel | None = None, *, seed: int | None = None, version: str | int = 0) -> None:
        self._model = model or load_pocket()
        super().__init__(
            Capabilities(
                engine="embedded",
                model="pocket",
                max_length=self._model.longest,
                vocab_size=self._model.vocabulary_size,
                logprobs=LogprobKind.PROCESSED,
                streams=True,
                aborts=True,
                pauses=True,
                versions=True,
                top_logprobs=self._model.vocabulary_size,
            )
        )
        self.version = version
        self._seeds = np.random.default_rng(seed)
        self._active: list[_Sequence] = []
        self._sessions: OrderedDict[str, tuple[Ids, Cache]] = OrderedDict()
        self._wake = asyncio.Event()
        """There is something new: a request, an end, or that work may go on."""
        self._paused = False
        self._stepping = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """A token at a time; many requests at once share each step of the model."""
        if self._closed:
            raise EngineError("the engine was closed")
        request = checked_request(request, self.capabilities)
        seed = request.sampling.seed
        random = np.random.default_rng(int(self._seeds.integers(1 << 62)) if seed is None else seed)
        sequence = self._begun(request, random)
        self._active.append(sequence)
        self._wake.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            while True:
                piece = await sequence.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            sequence.aborted = True
            self._wake.set()

    async def abort(self, request_id: str) -> None:
        """End a request after the step that is under way."""
        for sequence in self._active:
            if sequence.request.request_id == request_id:
                sequence.aborted = True
        self._wake.set()

    async def pause(self) -> None:
        """Take no further step until `resume`; the one that is under way has ended when this returns."""
        self._paused = True
        async with self._stepping:
            pass

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def update_weights(self, model: PocketModel, version: str | int) -> None:
        """Sample with other weights from the next step on. What is cached of idle sessions is forgotten.

        Requests under way go on with what the old weights left in their caches: pause and let them end before, where
        that matters.
        """
        self._model, self.version = model, version
        self._sessions.clear()

    async def close(self) -> None:
        """End all requests and the work."""
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        self._fail(self._active, EngineError("the engine was closed"))
        self._sessions.clear()

    # -- the work

    async def _work(self) -> None:
        """Step after step, as long as there is something to sample."""
        while True:
            self._wake.clear()
            self._end_aborted()
            if self._paused or not self._active:
                await self._wake.wait()
                continue
            # prompts first, a share of them; those that are read to their end then go on together with the others
            going = [sequence for sequence in self._active if not sequence.unread]
            for batch in (self._share(), [(sequence, 0) for sequence in going]):
                if batch and not self._paused:
                    async with self._stepping:
                        await self._advance(batch)
            await asyncio.sleep(0)

    def _share(self) -> list[tuple[_Sequence, int]]:
        """Requests whose prompt is to be read on, and how far: as much as is read at once, first come first served."""
        left, share = READ_AT_ONCE, []
        for sequence in self._active:
            if sequence.unread and left:
                share.append((sequence, min(sequence.unread, left)))
                left -= share[-1][1]
        return share

    async def _advance(self, batch: Sequence[tuple[_Sequence, int]]) -> None:
        """One step of the model, in a thread. What it samples is of the weights that it began with."""
        model, version = self._model, self.version
        try:
            drawn = await asyncio.to_thread(_step, model, batch)
        except Exception as error:
            self._fail([sequence for sequence, _ in batch], EngineError(f"the embedded model failed: {error}"))
            return
        for (sequence, _), one in zip(batch, drawn, strict=True):
            if one is not None:
                self._take(sequence, one, version)

    def _begun(self, request: GenerateRequest, random: np.random.Generator) -> _Sequence:
        """A request with the cache of its session, as far as the prompt goes on with it."""
        prompt, session = np.asarray(request.prompt_ids, np.int32), request.session
        kept = self._sessions.pop(session, None) if session is not None else None
        if kept is None:
            cache = self._model.new_cache(len(prompt) + request.sampling.max_tokens)
            return _Sequence(request, prompt, random, cache)
        ids, cache = kept
        limit = min(len(ids), cache.length, len(prompt) - 1)
        same = ids[:limit] == prompt[:limit]
        cached = limit if same.all() else int(np.argmin(same))
        cache.truncate(cached)
        return _Sequence(request, prompt, random, cache, cached=cached, read=cached)

    def _fail(self, sequences: Sequence[_Sequence], error: EngineError) -> None:
        for sequence in sequences:
            sequence.pieces.put_nowait(error)
        self._active = [sequence for sequence in self._active if sequence not in sequences]

    def _take(self, sequence: _Sequence, drawn: _Drawn, version: str | int) -> None:
        """Hand out what was sampled of a request."""
        sampling = sequence.request.sampling
        sequence.ids.append(drawn.token)
        add_version(sequence.versions, version, len(sequence.ids))
        ids, logprobs = np.asarray([drawn.token], np.int32), np.asarray([drawn.logprob], np.float32)
        piece = Delta(ids, logprobs, channels=drawn.channels)
        if drawn.token in sampling.stop_token_ids:
            self._finish(sequence, piece, FinishReason.STOP)
        elif len(sequence.ids) >= sampling.max_tokens:
            self._finish(sequence, piece, FinishReason.LENGTH)
        else:
            sequence.pieces.put_nowait(piece)

    def _finish(self, sequence: _Sequence, last: Delta, reason: FinishReason) -> None:
        self._active = [other for other in self._active if other is not sequence]
        kind = completion_kind(sequence.request.sampling, self.capabilities)
        versions, session = tuple(sequence.versions), sequence.request.session
        sequence.pieces.put_nowait(
            replace(last, finish_reason=reason, versions=versions, cached_tokens=sequence.cached, logprobs_kind=kind)
        )
        if session is not None:
            known = np.concatenate((sequence.prompt, np.asarray(sequence.ids, np.int32)))
            self._sessions[session] = known[: sequence.cache.length], sequence.cache
            while sum(len(ids) for ids, _ in self._sessions.values()) > KEPT_TOKENS:
                self._sessions.popitem(last=False)

    def _end_aborted(self) -> None:
        nothing = Delta(np.zeros(0, np.int32), np.zeros(0, np.float32))
        for sequence in [one for one in self._active if one.aborted]:
            self._finish(sequence, nothing, FinishReason.ABORT)


def _step(model: PocketModel, batch: Sequence[tuple[_Sequence, int]]) -> list[_Drawn | None]:
    """Read on, and sample of each request whose prompt is read to its end."""
    rows = model.extend([one.cache for one, _ in batch], [one.pending(most) for one, most in batch])
    drawn: list[_Drawn | None] = []
    for (sequence, most), logits in zip(batch, rows, strict=True):
        sequence.read += most
        sampling = sequence.request.sampling
        told = {TOP_LOGPROBS: [likeliest(logits, sampling)]} if sampling.top_logprobs and not sequence.unread else {}
        drawn.append(None if sequence.unread else _Drawn(*sample(logits, sampling, sequence.random), told))
    return drawn


def sample(logits: Floats, sampling: SamplingParams, random: np.random.Generator) -> tuple[int, float]:
    """One token, and its log-probability under the distribution that it was drawn from."""
    if sampling.temperature == 0:
        index = int(logits.argmax())
        return index, float(log_softmax(logits)[index])
    weights = _distribution(logits, sampling)
    index = int(np.searchsorted(np.cumsum(weights), random.random(), side="right"))
    index = min(index, len(weights) - 1)
    while not weights[index]:  # the sum may end a hair below 1
        index -= 1
    return index, float(np.log(weights[index]))


def likeliest(logits: Floats, sampling: SamplingParams) -> tuple[tuple[int, float], ...]:
    """The ids that `sampling` asks to be told, best first, with logprobs of the distribution that `sample`'s are of."""
    if sampling.temperature == 0:
        logprobs = log_softmax(logits)
    else:
        with np.errstate(divide="ignore"):
            logprobs = np.log(_distribution(logits, sampling))
    best = np.argsort(-logprobs, kind="stable")[: sampling.top_logprobs]
    return tuple((int(index), float(logprobs[index])) for index in best if np.isfinite(logprobs[index]))


def _distribution(logits: Floats, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """What is sampled from at a temperature above 0."""
    scaled = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k and sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    scaled -= scaled.max()
    weights = np.exp(scaled)
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        out = order[int(np.searchsorted(reached, sampling.top_p)) + 1 :]
        weights[out] = 0
        weights /= weights.sum()
    return weights
