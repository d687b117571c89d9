"""The pocket model in this process, with batches and cached prefixes."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..pocket import POCKET
from ..pocket.model import Cache, Floats, PocketModel, load_pocket, weights_from
from ..tokens.ids import check_ids, common_prefix
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Ids
from ..trajectory.turns import IdsLike, LogprobKind, Logprobs, VersionSpan
from . import protocol
from .answers import StopFinder, TokenBytes, checked_request, completion_kind
from .channels import TOP_LOGPROBS
from .errors import EngineError
from .protocol import OPTIONAL, Capabilities, Delta, Engine, FinishReason, GenerateRequest, SamplingParams

CACHED_TOKENS = 200_000
"""How many tokens of idle sessions stay cached."""


@functools.cache
def _token_bytes() -> TokenBytes:
    return load_tokenizer(POCKET).vocabulary.token_bytes


@dataclass(slots=True, eq=False)
class _Sequence:
    request: GenerateRequest
    prompt: Ids
    random: np.random.Generator
    cache: Cache
    cached: int
    stops: StopFinder
    pieces: asyncio.Queue[Delta | Exception] = field(default_factory=asyncio.Queue)
    ids: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    def stream(self) -> Ids:
        return np.concatenate((self.prompt, np.asarray(self.ids, np.int32)))


class EmbeddedEngine(Engine):
    """The pocket model as an engine, for one event loop at a time."""

    version: str | int

    def __init__(self, *, seed: int | None = None, version: str | int = 0) -> None:
        self._model = load_pocket()
        super().__init__(
            Capabilities(
                engine="embedded",
                model="pocket",
                max_length=self._model.longest,
                vocab_size=self._model.vocabulary_size,
                logprobs=LogprobKind.PROCESSED,
                aborts=True,
                pauses=True,
                versions=True,
                top_logprobs=self._model.vocabulary_size,
                sampling=frozenset(OPTIONAL),
                weights=True,
            )
        )
        self.version = protocol.checked_version(version)
        self._seeds = np.random.default_rng(seed)
        self._active: list[_Sequence] = []
        self._sessions: OrderedDict[str, tuple[Ids, Cache]] = OrderedDict()
        """The caches of idle sessions, least recently used first."""
        self._paused = self._closed = False
        self._worker: asyncio.Task[None] | None = None

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Yield a token at a time. All requests share each step of the model."""
        if self._closed:
            raise EngineError("the engine was closed")
        sequence = self._start(checked_request(request, self.capabilities))
        self._begin_work()
        self._active.append(sequence)
        try:
            while True:
                piece = await sequence.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._abort([sequence])

    async def score(self, ids: IdsLike) -> Logprobs:
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        if not 0 < len(checked) <= self._model.longest:
            raise EngineError(f"the model reads 1 to {self._model.longest:,} ids, not {len(checked):,}")
        scored = await asyncio.to_thread(self._model.score, checked)
        return np.concatenate(([np.nan], scored)).astype(np.float32)

    async def abort(self, request_id: str) -> None:
        self._abort([one for one in self._active if one.request.request_id == request_id])

    async def pause(self) -> None:
        """Stop before the next step, when the current one has ended."""
        self._paused = True
        while self._paused and (worker := self._current_worker()):
            await asyncio.wait([worker], timeout=0.05)  # `resume` may come before it has ended

    async def resume(self) -> None:
        self._paused = False
        self._begin_work()

    async def update_weights(self, weights: protocol.Weights, *, version: str | int) -> None:
        """Load a folder or a copy of a state dict. The next step samples with it."""
        version = protocol.checked_version(version)
        try:
            model = self._model.with_weights(await asyncio.to_thread(weights_from, weights))
        except (InputError, OSError, ValueError, TypeError) as error:
            raise EngineError(f"the weights {version!r} cannot be used: {error}") from error
        await self.reset_prefix_cache()
        self._model, self.version = model, version

    async def set_version(self, version: str | int) -> None:
        self.version = protocol.checked_version(version)

    async def reset_prefix_cache(self) -> None:
        """Give all requests new caches: a step under way still writes to the old ones."""
        self._current_worker()  # raises if another event loop uses this engine
        self._sessions.clear()
        for sequence in self._active:
            sequence.cache, sequence.cached = self._model.new_cache(), 0

    async def close(self) -> None:
        self._closed = True
        self._fail(self._active, "the engine was closed")
        await self.pause()
        self._sessions.clear()

    def _current_worker(self) -> asyncio.Task[None] | None:
        worker = self._worker
        if worker is None or worker.done() or worker.get_loop().is_closed():
            return None
        if worker.get_loop() is not asyncio.get_running_loop():
            raise EngineError("another event loop uses this embedded engine: make one engine for each")
        return worker

    def _begin_work(self) -> None:
        if self._worker is not None and self._worker.get_loop().is_closed():
            self._active = []  # nobody is waiting for these any more
        if not self._current_worker():
            self._worker = asyncio.create_task(self._work())

    def _abort(self, sequences: Sequence[_Sequence]) -> None:
        nothing = Delta(np.zeros(0, np.int32), np.zeros(0, np.float32))
        for sequence in sequences:
            if sequence in self._active:
                self._finish(sequence, nothing, FinishReason.ABORT)

    def _start(self, request: GenerateRequest) -> _Sequence:
        prompt, sampling = np.asarray(request.prompt_ids, np.int32), request.sampling
        seed = int(self._seeds.integers(1 << 62)) if sampling.seed is None else sampling.seed
        stops = StopFinder(sampling.stop, _token_bytes() if sampling.stop else bytes)
        entry = self._sessions.pop(request.session or "", None)
        ids, cache = entry or (prompt[:0], self._model.new_cache(len(prompt) + sampling.max_tokens))
        cached = common_prefix(ids, prompt[:-1])  # the last id is always read
        cache.truncate(cached)
        return _Sequence(request, prompt, np.random.default_rng(seed), cache, cached, stops)

    async def _work(self) -> None:
        while self._active and not self._paused:
            model, version, batch = self._model, self.version, list(self._active)
            try:
                deltas = await asyncio.to_thread(_step, model, batch, [one.cache for one in batch])
            except Exception as error:
                self._fail(batch, f"the embedded model failed: {error}")
                continue
            if model is self._model:  # otherwise repeat the step with the new weights
                for sequence, delta in zip(batch, deltas, strict=True):
                    if sequence in self._active:
                        self._emit(sequence, delta, version)
            await asyncio.sleep(0)

    def _fail(self, sequences: Sequence[_Sequence], problem: str) -> None:
        for sequence in sequences:
            sequence.pieces.put_nowait(EngineError(problem))
        self._active = [sequence for sequence in self._active if sequence not in sequences]

    def _emit(self, sequence: _Sequence, delta: Delta, version: str | int) -> None:
        sampling, token = sequence.request.sampling, int(delta.ids[0])
        sequence.ids.append(token)
        protocol.add_version(sequence.versions, version, len(sequence.ids))
        text, is_stop = sequence.stops.feed(token), token in sampling.stop_token_ids
        if is_stop or text is not None:
            self._finish(sequence, replace(delta, stopped_by=None if is_stop else text), FinishReason.STOP)
        elif len(sequence.ids) >= sampling.max_tokens:
            self._finish(sequence, delta, FinishReason.LENGTH)
        else:
            sequence.pieces.put_nowait(delta)

    def _finish(self, sequence: _Sequence, last: Delta, reason: FinishReason) -> None:
        self._active = [other for other in self._active if other is not sequence]
        request, versions = sequence.request, tuple(sequence.versions)
        kind = completion_kind(request.sampling, self.capabilities)
        last = replace(last, finish_reason=reason, versions=versions, logprobs_kind=kind)
        sequence.pieces.put_nowait(replace(last, cached_tokens=sequence.cached))
        if request.session and reason is not FinishReason.ABORT:  # a step may still write to its cache
            self._sessions[request.session] = sequence.stream()[: sequence.cache.length], sequence.cache
        while sum(len(ids) for ids, _ in self._sessions.values()) > CACHED_TOKENS:
            self._sessions.popitem(last=False)


def _step(model: PocketModel, batch: Sequence[_Sequence], caches: Sequence[Cache]) -> list[Delta]:
    rows = model.extend(
        caches, [one.stream()[cache.length :] for one, cache in zip(batch, caches, strict=True)]
    )
    return [_sample(logits, sequence) for sequence, logits in zip(batch, rows, strict=True)]


def _sample(logits: Floats, sequence: _Sequence) -> Delta:
    sampling = sequence.request.sampling
    weights = _distribution(_penalized(logits, sequence), sampling)
    if sampling.temperature:
        index = int(np.searchsorted(np.cumsum(weights), sequence.random.random(), side="right"))
        index = min(index, len(weights) - 1)
        while not weights[index]:  # the sum may end a hair below 1
            index -= 1
    else:
        index = int(weights.argmax())
    channels = {}
    if sampling.top_logprobs:
        best = np.argsort(-weights, kind="stable")[: sampling.top_logprobs]
        likely = best[weights[best] > 0]
        logprobs = np.log(weights[likely]).astype(np.float32)
        channels[TOP_LOGPROBS] = [tuple(zip(likely.tolist(), logprobs.tolist(), strict=True))]
    return Delta(
        np.array([index], np.int32), np.log(weights[[index]]).astype(np.float32), channels=channels
    )


def _penalized(logits: Floats, sequence: _Sequence) -> Floats:
    sampling = sequence.request.sampling
    if not sampling.penalties:
        return logits
    changed = logits.copy()
    counts = np.bincount(np.asarray(sequence.ids, np.intp), minlength=len(logits))
    present = counts > 0
    present[sequence.prompt] = True  # for repetition alone
    factor = np.float32(sampling.repetition_penalty)
    changed[present] = np.where(changed[present] > 0, changed[present] / factor, changed[present] * factor)
    changed -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    changed -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return changed


def _distribution(logits: Floats, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """Apply temperature, min-p, top-k and top-p, in vLLM's order, unless it is greedy."""
    scaled = logits.astype(np.float64) / (sampling.temperature or 1.0)
    scaled -= scaled.max()
    if sampling.temperature and sampling.min_p:
        scaled[scaled < np.log(sampling.min_p)] = -np.inf
    if sampling.temperature and 0 < sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights = np.exp(scaled)
    weights /= weights.sum()
    if sampling.temperature and sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        weights[order[int(np.searchsorted(reached, sampling.top_p)) + 1 :]] = 0
        weights /= weights.sum()
    return weights
