"""Nothing is computed twice: the paths make many of the same requests, and get many of the same rows.

Greedy decoding, and sampling with a seed, depend on the prompt and the parameters alone. So a path that makes the
request of an earlier one is given its completion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from ..engines.embedded import EmbeddedEngine
from ..engines.protocol import Completion, GenerateRequest, SamplingParams
from ..pocket.model import Floats, PocketModel, TokenIds


class RememberingEngine(EmbeddedEngine):
    """The embedded engine; a request with the prompt and parameters of an earlier one is answered from memory."""

    def __init__(self, model: PocketModel) -> None:
        super().__init__(model)
        self._known: dict[tuple[bytes, SamplingParams], Completion] = {}

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion, or return the known one, with no count of cached tokens."""
        if request.sampling.seed is None and request.sampling.temperature > 0:
            return await super()._generate(request)
        key = _bytes(request.prompt_ids), request.sampling
        if key in self._known:
            return replace(self._known[key], cached_tokens=None)
        self._known[key] = found = await super()._generate(request)
        return found


class Scorer(Protocol):
    """What gives ids their logprobs, as `PocketModel` does."""

    def score(self, ids: TokenIds) -> Floats: ...


class RememberingScorer:
    """A model's scores; those of a row that was scored before come from memory."""

    def __init__(self, model: PocketModel) -> None:
        self._model = model
        self._known: dict[bytes, Floats] = {}

    def score(self, ids: TokenIds) -> Floats:
        """The log-probability of each id given all before it."""
        key = _bytes(ids)
        if key not in self._known:
            self._known[key] = self._model.score(ids)
        return self._known[key]


def _bytes(ids: TokenIds) -> bytes:
    return np.asarray(ids, np.int32).tobytes()
