"""The embedded engine: the pocket model in this process, many requests in one batch, prefixes kept by session.

Logprobs are those of the distribution that was sampled from, temperature, top-k and top-p included. Greedy decoding
(temperature 0) samples from nothing; its logprobs are the model's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..pocket.model import Cache, Floats, PocketModel, load_pocket, log_softmax
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan
from .answers import checked_prompt, collected, completion_kind
from .protocol import Capabilities, Completion, Delta, EngineError, FinishReason, LogprobKind, SamplingParams

KEPT_TOKENS: Final = 200_000
"""How many tokens of idle sessions stay cached."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request under way: its sequence, and what was sampled of it."""

    prompt: Ids
    sampling: SamplingParams
    name: str
    session: str | None
    random: np.random.Generator
    pieces: asyncio.Queue[Delta | Exception]
    cache: Cache | None = None
    cached: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False

    @property
    def pending(self) -> Any:
        """The ids that the cache has not seen: what is new of the prompt, then the last id sampled."""
        return self.prompt[self.cached :] if not self.ids else self.ids[-1:]


class EmbeddedEngine:
    """The pocket model as an engine. Make it and use it in one event loop; `close` ends its work.

    `version` is which weights sample, as completions tell it. Requests that name a seed depend on it alone.
    """

    def __init__(self, model: PocketModel | None = None, *, seed: int | None = None, version: str | int = 0) -> None:
        self._model = model or load_pocket()
        self._seeds = np.random.default_rng(seed)
        self.version = version
        self._waiting: list[_Request] = []
        self._active: list[_Request] = []
        self._sessions: OrderedDict[str, tuple[Ids, Cache]] = OrderedDict()
        self._wake = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self._numbers = itertools.count()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        self._capabilities = Capabilities(
            engine="embedded",
            model="pocket",
            max_length=self._model.longest,
            vocab_size=self._model.vocabulary_size,
            logprobs=LogprobKind.PROCESSED,
            streams=True,
            aborts=True,
            pauses=True,
            versions=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def generate(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> Completion:
        """Sample a completion; many at once share each step of the model."""
        return await collected(self.stream(prompt_ids, sampling, request_id=request_id, session=session))

    async def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> AsyncGenerator[Delta]:
        """As `generate`, a token at a time."""
        if self._closed:
            raise EngineError("the engine was closed")
        prompt = checked_prompt(prompt_ids, sampling, self._capabilities)
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(1 << 62))
        name = request_id or f"request-{next(self._numbers)}"
        request = _Request(prompt, sampling, name, session, np.random.default_rng(seed), asyncio.Queue())
        self._waiting.append(request)
        self._wake.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        try:
            while True:
                piece = await request.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            request.aborted = True

    async def abort(self, request_id: str) -> None:
        """End a request after the step that is under way."""
        for request in (*self._waiting, *self._active):
            if request.name == request_id:
                request.aborted = True

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
        for request in (*self._waiting, *self._active):
            request.pieces.put_nowait(EngineError("the engine was closed"))
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
            for request in new:
                self._begin(request)
            self._active += new
            self._end_aborted()
            # prompts first, in one batch: what they add then goes on together with the others
            steps = [some for some in (new, [one for one in self._active if one not in new]) if some]
            for batch in steps:
                batch = [request for request in batch if not request.aborted]
                if not batch:
                    continue
                try:
                    logits = await asyncio.to_thread(self._step, batch)
                except Exception as error:
                    for request in batch:
                        request.pieces.put_nowait(EngineError(f"the embedded model failed: {error}"))
                    self._active = [request for request in self._active if request not in batch]
                    continue
                for request, row in zip(batch, logits, strict=True):
                    self._take(request, row)
            await asyncio.sleep(0)

    def _begin(self, request: _Request) -> None:
        """Give a request the cache of its session, as far as the prompt goes on with it."""
        kept = self._sessions.pop(request.session, None) if request.session is not None else None
        if kept is not None:
            ids, cache = kept
            limit = min(len(ids), cache.length, len(request.prompt) - 1)
            same = ids[:limit] == request.prompt[:limit]
            shared = limit if same.all() else int(np.argmin(same))
            cache.truncate(shared)
            request.cache, request.cached = cache, shared
        else:
            request.cache = self._model.new_cache(len(request.prompt) + request.sampling.max_tokens)

    def _step(self, batch: Sequence[_Request]) -> Floats:
        caches = [request.cache for request in batch if request.cache is not None]
        return self._model.extend(caches, [request.pending for request in batch])

    def _take(self, request: _Request, logits: Floats) -> None:
        """Sample one token of a request, and hand it out."""
        index, logprob = sample(logits, request.sampling, request.random)
        at = len(request.ids)
        request.ids.append(index)
        request.logprobs.append(logprob)
        if request.versions and request.versions[-1].version == self.version:
            request.versions[-1] = request.versions[-1]._replace(stop=at + 1)
        else:
            request.versions.append(VersionSpan(self.version, at, at + 1))
        reason = None
        if index in request.sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(request.ids) >= request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            request.pieces.put_nowait(Delta(np.asarray([index], np.int32), np.asarray([logprob], np.float32)))
        else:
            self._finish(request, reason, [index], [logprob])

    def _finish(self, request: _Request, reason: FinishReason, ids: list[int], logprobs: list[float]) -> None:
        self._active = [other for other in self._active if other is not request]
        request.pieces.put_nowait(
            Delta(
                np.asarray(ids, np.int32),
                np.asarray(logprobs, np.float32),
                reason,
                tuple(request.versions),
                request.cached,
                completion_kind(request.sampling, self._capabilities),
            )
        )
        if request.session is not None and request.cache is not None:
            known = np.concatenate((request.prompt, np.asarray(request.ids, np.int32)))
            self._sessions[request.session] = known[: request.cache.length], request.cache
            while sum(len(ids) for ids, _ in self._sessions.values()) > KEPT_TOKENS:
                self._sessions.popitem(last=False)

    def _end_aborted(self) -> None:
        for request in [one for one in self._active if one.aborted]:
            self._finish(request, FinishReason.ABORT, [], [])


def sample(logits: Floats, sampling: SamplingParams, random: np.random.Generator) -> tuple[int, float]:
    """One token, and its log-probability under the distribution that it was drawn from."""
    if sampling.temperature == 0:
        index = int(logits.argmax())
        return index, float(log_softmax(logits)[index])
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
    index = int(np.searchsorted(np.cumsum(weights), random.random(), side="right"))
    index = min(index, len(weights) - 1)
    while not weights[index]:  # the sum may end a hair below 1
        index -= 1
    return index, float(np.log(weights[index]))
