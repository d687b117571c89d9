"""How the embedded engine samples a token: penalties, temperature, min-p, top-k, top-p, in vLLM's order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..pocket.model import Floats, log_softmax
from ..tokens.tokenizer import Ids
from .protocol import SamplingParams


def penalized(logits: Floats, sampling: SamplingParams, prompt: Ids, sampled: Sequence[int]) -> Floats:
    """Apply penalties: repetition counts prompt and completion, presence and frequency only the completion."""
    if not sampling.penalties:
        return logits
    changed = logits.copy()
    counts = np.bincount(np.asarray(sampled, np.intp), minlength=len(logits))
    present = counts > 0
    present[prompt] = True
    factor = np.float32(sampling.repetition_penalty)
    changed[present] = np.where(changed[present] > 0, changed[present] / factor, changed[present] * factor)
    changed -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    changed -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return changed


def sample(logits: Floats, sampling: SamplingParams, random: np.random.Generator) -> tuple[int, float]:
    """Sample a token; return it with its logprob under the sampled distribution."""
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
    """Return the likeliest ids, best first, with their logprobs under the same distribution as `sample`."""
    if sampling.temperature == 0:
        logprobs = log_softmax(logits)
    else:
        with np.errstate(divide="ignore"):
            logprobs = np.log(_distribution(logits, sampling))
    best = np.argsort(-logprobs, kind="stable")[: sampling.top_logprobs]
    return tuple((int(index), float(logprobs[index])) for index in best if np.isfinite(logprobs[index]))


def _distribution(logits: Floats, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    scaled = logits.astype(np.float64) / sampling.temperature
    scaled -= scaled.max()
    if sampling.min_p:
        scaled[scaled < np.log(sampling.min_p)] = -np.inf
    if sampling.top_k and sampling.top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights = np.exp(scaled)
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        out = order[int(np.searchsorted(reached, sampling.top_p)) + 1 :]
        weights[out] = 0
        weights /= weights.sum()
    return weights
