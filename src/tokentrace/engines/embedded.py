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
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..pocket.model import Cache, Floats, PocketModel, load_pocket, log_softmax
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan
from .answers import checked_request, completion_kind
from .protocol import (
    TOP_LOGPROBS,
    Capabilities,
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


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request under way, and what was sampled of it."""

    request: GenerateRequest
    prompt: Ids
    random: np.random.Generator
    pieces: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    cache: Cache | None = None
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False

    @property
    def pending(self) -> Any:
        """The ids that the cache has not seen: what is new of the prompt, then the last id sampled."""
        return self.prompt[self.cached :] if not self.ids else self.ids[-1:]


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
        self._waiting: list[_Sequence] = []
        self._active: list[_Sequence] = []
        self._sessions: OrderedDict[str, tuple[Ids, Cache]] = OrderedDict()
        self._wake = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """A token at a time; many requests at once share each step of the model."""
        if self._closed:
            raise EngineError("the engine was closed")
        request = checked_request(request, self.capabilities)
        seed = request.sampling.seed
        random = np.random.default_rng(int(self._seeds.integers(1 << 62)) if seed is None else seed)
        sequence = _Sequence(request, np.asarray(request.prompt_ids, np.int32), random)
        self._waiting.append(sequence)
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

    async def abort(self, request_id: str) -> None:
        """End a request after the step that is under way."""
        for sequence in (*self._waiting, *self._active):
            if sequence.request.request_id == request_id:
                sequence.aborted = True

    async def pause(self) -> None:
        """Take no further step until `resume`."""
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

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
        for sequence in (*self._waiting, *self._active):
            sequence.pieces.put_nowait(EngineError("the engine was closed"))
        self._waiting, self._active = [], []
        self._sessions.clear()

    # -- the work

    async def _work(self) -> None:
        """Step after step, as long as there is something to sample."""
        while True:
            await self._going.wait()
            if not self._waiting and not self._active:
                self._wake.clear()
                await self._wake.wait()
                continue
            new, self._waiting = self._waiting, []
            for sequence in new:
                self._begin(sequence)
            old, self._active = self._active, [*self._active, *new]
            self._end_aborted()
            # prompts first, in one batch: what they add then goes on together with the others
            for batch in (new, old):
                batch = [sequence for sequence in batch if not sequence.aborted]
                if not batch:
                    continue
                try:
                    logits = await asyncio.to_thread(self._step, batch)
                except Exception as error:
                    for sequence in batch:
                        sequence.pieces.put_nowait(EngineError(f"the embedded model failed: {error}"))
                    self._active = [sequence for sequence in self._active if sequence not in batch]
                    continue
                for sequence, row in zip(batch, logits, strict=True):
                    self._take(sequence, row)
            await asyncio.sleep(0)

    def _begin(self, sequence: _Sequence) -> None:
        """Give a request the cache of its session, as far as the prompt goes on with it."""
        prompt, session = sequence.prompt, sequence.request.session
        kept = self._sessions.pop(session, None) if session is not None else None
        if kept is None:
            sequence.cache = self._model.new_cache(len(prompt) + sequence.request.sampling.max_tokens)
            return
        ids, sequence.cache = kept
        limit = min(len(ids), sequence.cache.length, len(prompt) - 1)
        same = ids[:limit] == prompt[:limit]
        sequence.cached = limit if same.all() else int(np.argmin(same))
        sequence.cache.truncate(sequence.cached)

    def _step(self, batch: Sequence[_Sequence]) -> Floats:
        caches = [sequence.cache for sequence in batch if sequence.cache is not None]
        return self._model.extend(caches, [sequence.pending for sequence in batch])

    def _take(self, sequence: _Sequence, logits: Floats) -> None:
        """Sample one token of a request, and hand it out."""
        sampling = sequence.request.sampling
        index, logprob = sample(logits, sampling, sequence.random)
        sequence.ids.append(index)
        add_version(sequence.versions, self.version, len(sequence.ids))
        told = {TOP_LOGPROBS: [likeliest(logits, sampling)]} if sampling.top_logprobs else {}
        piece = Delta(np.asarray([index], np.int32), np.asarray([logprob], np.float32), channels=told)
        if index in sampling.stop_token_ids:
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
        if session is not None and sequence.cache is not None:
            known = np.concatenate((sequence.prompt, np.asarray(sequence.ids, np.int32)))
            self._sessions[session] = known[: sequence.cache.length], sequence.cache
            while sum(len(ids) for ids, _ in self._sessions.values()) > KEPT_TOKENS:
                self._sessions.popitem(last=False)

    def _end_aborted(self) -> None:
        nothing = Delta(np.zeros(0, np.int32), np.zeros(0, np.float32))
        for sequence in [one for one in self._active if one.aborted]:
            self._finish(sequence, nothing, FinishReason.ABORT)


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
