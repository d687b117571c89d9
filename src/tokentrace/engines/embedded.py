"""The embedded engine: the pocket model in this process, many requests in one batch, prefixes kept.

Logprobs are those of the distribution that was sampled from, penalties, temperature, min-p, top-k and top-p included.
Greedy decoding (temperature 0) samples from nothing; its logprobs are the model's own, after penalties if there are
any. What was read is kept for the next request of a session, and for the others of a group.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import InputError
from ..pocket import POCKET
from ..pocket.model import Cache, PocketModel, load_pocket
from ..pocket.weights import weights_from
from ..tokens.ids import check_ids, common_prefix
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary
from ..trajectory.turns import VersionSpan
from .answers import checked_request, completion_kind
from .drawing import likeliest, penalized, sample
from .protocol import (
    OPTIONAL,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Delta,
    Engine,
    EngineError,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    Logprobs,
    add_version,
    checked_version,
)
from .stopping import StopFinder, TokenBytes

KEPT_TOKENS: Final = 200_000
"""How many tokens of idle sessions and of the prompts of groups stay cached."""
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
    """How many ids of the prompt were in the cache of its session or group."""
    ids: list[int] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    stops: StopFinder | None = None
    aborted: bool = False

    @property
    def unread(self) -> int:
        """How many ids the model has not seen: the rest of the prompt, or the one that was sampled last."""
        return len(self.prompt) + len(self.ids) - self.cache.length

    def pending(self, most: int) -> Any:
        """The ids that come next, at most so many."""
        read = self.cache.length - len(self.prompt)
        if read >= 0:
            return self.ids[read : read + most]
        chunk = self.prompt[self.cache.length : self.cache.length + most]
        return np.concatenate((chunk, np.asarray(self.ids[: most - len(chunk)], np.int32)))


class EmbeddedEngine(Engine):
    """The pocket model as an engine. Use it in one event loop at a time; `close` ends its work.

    A later event loop (another `asyncio.run`) finds the engine as it was left, its caches included; requests that the
    earlier one left under way are over. `EngineError` while another event loop is still running with it.

    `version` is which weights sample, as completions tell it. Requests that name a seed depend on it alone.
    `token_bytes` is what each id spells (``renderer.tokenizer.vocabulary.token_bytes``), for stop texts; that of pocket
    is known.
    """

    version: str | int

    def __init__(
        self,
        model: PocketModel | None = None,
        *,
        seed: int | None = None,
        version: str | int = 0,
        token_bytes: TokenBytes | None = None,
    ) -> None:
        self._model = model or load_pocket()
        if token_bytes is None and self._model is load_pocket():
            token_bytes = _pocket_bytes
        self._token_bytes = token_bytes
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
                sampling=frozenset(OPTIONAL) - (frozenset() if token_bytes else {"stop"}),
                weights=True,
            )
        )
        self.version = checked_version(version)
        self._seeds = np.random.default_rng(seed)
        self._active: list[_Sequence] = []
        self._kept: OrderedDict[tuple[str, str], tuple[Ids, Cache]] = OrderedDict()
        """What is cached of idle sessions and of the prompts of groups, that of the longest unused first."""
        self._paused = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the work is done in, which the following belong to."""
        self._wake = asyncio.Event()
        """There is something new: a request, an end, or that work may go on."""
        self._stepping = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """A token at a time; many requests at once share each step of the model."""
        if self._closed:
            raise EngineError("the engine was closed")
        self._enter_loop()
        request = checked_request(request, self.capabilities)
        seed = request.sampling.seed
        random = np.random.default_rng(int(self._seeds.integers(1 << 62)) if seed is None else seed)
        sequence = self._begun(request, random)
        self._active.append(sequence)
        self._wake.set()
        if self._worker is None or self._worker.done():
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

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """The model's logprob of each id given all before it, at temperature 1; NaN for the first."""
        given = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        if not 0 < len(given) <= self._model.longest:
            raise EngineError(f"{len(given):,} ids cannot be scored: the model reads 1 to {self._model.longest:,}")
        scored = await asyncio.to_thread(self._model.score, given)
        return np.concatenate(([np.nan], scored)).astype(np.float32)

    async def abort(self, request_id: str) -> None:
        """End a request after the step that is under way."""
        self._enter_loop()
        for sequence in self._active:
            if sequence.request.request_id == request_id:
                sequence.aborted = True
        self._wake.set()

    async def pause(self) -> None:
        """Take no further step until `resume`; the one that is under way has ended when this returns."""
        self._enter_loop()
        self._paused = True
        async with self._stepping:
            pass

    async def resume(self) -> None:
        self._enter_loop()
        self._paused = False
        self._wake.set()

    async def update_weights(
        self, weights: str | Path | Mapping[str, Any] | PocketModel, *, version: str | int
    ) -> None:
        """Sample with other weights from the next step on: a folder of safetensors, a state dict, or a model.

        All of the model's weights must be there. They are copied: what they came from may change later.
        """
        self._enter_loop()
        version = checked_version(version)
        try:
            model = weights if isinstance(weights, PocketModel) else await asyncio.to_thread(self._read, weights)
        except (InputError, OSError, ValueError, TypeError) as error:
            raise EngineError(f"the weights of {version!r} cannot be used: {error}") from error
        if (model.vocabulary_size, model.longest) != (self._model.vocabulary_size, self._model.longest):
            raise EngineError(f"the weights of {version!r} cannot be used: they are of another model")
        async with self._stepping:
            self._model, self.version = model, version
            self._forget()

    def _read(self, weights: str | Path | Mapping[str, Any]) -> PocketModel:
        return self._model.with_weights(weights_from(weights))

    async def set_version(self, version: str | int) -> None:
        self.version = checked_version(version)

    async def reset_prefix_cache(self) -> None:
        self._enter_loop()
        async with self._stepping:
            self._forget()

    def _forget(self) -> None:
        """Let all be computed anew, what requests under way have read as well."""
        self._kept.clear()
        for sequence in self._active:
            sequence.cache.truncate(0)
            sequence.cached = 0

    async def close(self) -> None:
        """End all requests and the work."""
        self._enter_loop()
        self._closed = True
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        self._fail(self._active, EngineError("the engine was closed"))
        self._kept.clear()

    # -- the work

    def _enter_loop(self) -> None:
        """Belong to the event loop that runs: what belongs to an earlier one would never wake up here."""
        earlier, now = self._loop, asyncio.get_running_loop()
        if earlier is now:
            return
        if earlier is not None and earlier.is_running():
            raise EngineError(
                "the embedded engine is in use by another event loop, which is still running: make one for each"
            )
        if earlier is not None and not earlier.is_closed():  # it may run again: whoever waits there is told
            self._fail(self._active, EngineError("the embedded engine was used in another event loop meanwhile"))
            if self._worker is not None:
                self._worker.cancel()
        self._loop, self._active, self._worker = now, [], None
        self._wake, self._stepping = asyncio.Event(), asyncio.Lock()

    async def _work(self) -> None:
        """Step after step, as long as there is something to sample."""
        while True:
            self._wake.clear()
            self._end_aborted()
            if self._paused or not self._active:
                await self._wake.wait()
                continue
            # prompts first, a share of them; those that are read to their end then go on together with the others
            ready = self._ready()
            going = [(sequence, 1) for sequence in ready if sequence.unread == 1]
            for batch in (_share(ready), going):
                if batch and not self._paused:
                    async with self._stepping:
                        await self._advance(batch)
            await asyncio.sleep(0)

    def _ready(self) -> list[_Sequence]:
        """The requests that can go on. While the first of a group reads its prompt, the others wait: then it is there
        for all of them."""
        ready, reading = [], set()
        for sequence in self._active:
            group = sequence.request.group
            if group is not None and not sequence.cache.length:
                if group in reading:
                    continue
                self._borrow(sequence, group)
            if group is not None and not sequence.cached and sequence.unread > 1:
                reading.add(group)
            ready.append(sequence)
        return ready

    def _borrow(self, sequence: _Sequence, group: str) -> None:
        """Begin with what the group has in common with a request."""
        kept = self._kept.get(("group", group))
        if kept is not None:
            ids, cache = kept
            self._kept.move_to_end(("group", group))
            sequence.cached = _shared(ids, sequence.prompt)
            sequence.cache = cache.copy(sequence.cached, sequence.cache.capacity)

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
                self._lend(sequence)
                self._take(sequence, one, version)

    def _lend(self, sequence: _Sequence) -> None:
        """Keep a prompt that was read from its beginning for the others of its group."""
        group = sequence.request.group
        if group is not None and not sequence.cached and ("group", group) not in self._kept:
            self._keep(("group", group), sequence.prompt, sequence.cache.copy(len(sequence.prompt)))

    def _begun(self, request: GenerateRequest, random: np.random.Generator) -> _Sequence:
        """A request with the cache of its session, as far as the prompt goes on with it."""
        prompt, session = np.asarray(request.prompt_ids, np.int32), request.session
        stops = None
        if request.sampling.stop and self._token_bytes is not None:
            stops = StopFinder(request.sampling.stop, self._token_bytes)
        kept = self._kept.pop(("session", session), None) if session is not None else None
        if kept is None:
            cache = self._model.new_cache(len(prompt) + request.sampling.max_tokens)
            return _Sequence(request, prompt, random, cache, stops=stops)
        ids, cache = kept
        cached = _shared(ids[: cache.length], prompt)
        cache.truncate(cached)
        return _Sequence(request, prompt, random, cache, cached=cached, stops=stops)

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
        text = None if sequence.stops is None else sequence.stops.feed(drawn.token)
        if drawn.token in sampling.stop_token_ids:
            self._finish(sequence, piece, FinishReason.STOP)
        elif text is not None:
            self._finish(sequence, replace(piece, stopped_by=text), FinishReason.STOP)
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
            self._keep(("session", session), known[: sequence.cache.length], sequence.cache)

    def _keep(self, name: tuple[str, str], ids: Ids, cache: Cache) -> None:
        self._kept[name] = ids, cache
        while sum(len(ids) for ids, _ in self._kept.values()) > KEPT_TOKENS:
            self._kept.popitem(last=False)

    def _end_aborted(self) -> None:
        nothing = Delta(np.zeros(0, np.int32), np.zeros(0, np.float32))
        for sequence in [one for one in self._active if one.aborted]:
            self._finish(sequence, nothing, FinishReason.ABORT)


def _share(ready: Sequence[_Sequence]) -> list[tuple[_Sequence, int]]:
    """Requests whose prompt is to be read on, and how far: as much as is read at once, first come first served."""
    left, share = READ_AT_ONCE, []
    for sequence in ready:
        if sequence.unread > 1 and left:
            share.append((sequence, min(sequence.unread, left)))
            left -= share[-1][1]
    return share


def _step(model: PocketModel, batch: Sequence[tuple[_Sequence, int]]) -> list[_Drawn | None]:
    """Read on, and sample of each request that is read to its end."""
    rows = model.extend([one.cache for one, _ in batch], [one.pending(most) for one, most in batch])
    drawn: list[_Drawn | None] = []
    for (sequence, _), logits in zip(batch, rows, strict=True):
        sampling = sequence.request.sampling
        if sequence.unread:
            drawn.append(None)
            continue
        logits = penalized(logits, sampling, sequence.prompt, sequence.ids)
        told = {TOP_LOGPROBS: [likeliest(logits, sampling)]} if sampling.top_logprobs else {}
        drawn.append(_Drawn(*sample(logits, sampling, sequence.random), told))
    return drawn


def _shared(ids: Ids, prompt: Ids) -> int:
    """How many ids a prompt begins with that are cached; its last one is read in any case."""
    return common_prefix(ids, prompt[:-1])


def _pocket_bytes(token: int) -> bytes:
    """What an id of pocket's spells."""
    return _pocket_vocabulary().token_bytes(token)


@functools.cache
def _pocket_vocabulary() -> Vocabulary:
    return load_tokenizer(POCKET).vocabulary
