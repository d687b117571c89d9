"""Logprobs of a dump compared with those that an engine gives the same tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..engines.protocol import Engine
from .inspect_calls import InspectedRollout


@dataclass(slots=True)
class Scores:
    """Differences: an engine's logprob less the one in the dump, over sampled tokens. Four bytes are kept of each."""

    differences: array[float] = field(default_factory=lambda: array("f"))
    completions: int = 0
    skipped: int = 0
    """Completions sampled at another temperature than 1: an engine scores at 1."""

    async def add(self, found: InspectedRollout, engine: Engine) -> None:
        """Score the streams of a rollout, each once."""
        for tip in found.tips:
            told = [one for one in tip.logprobs if one[2] in (None, 1.0) and np.isfinite(one[1]).all()]
            self.skipped += len(tip.logprobs) - len(told)
            if not told:
                continue
            scored = await engine.score(tip.stream)
            for start, logprobs, _ in told:
                own = np.asarray(scored[start : start + len(logprobs)], np.float64)
                self.differences.extend((own - logprobs).astype(np.float32).tolist())
            self.completions += len(told)

    def to_json(self) -> dict[str, Any]:
        """How far they are apart: the absolute difference, the difference, and the mean ratio of probabilities."""
        out: dict[str, Any] = {
            "tokens": len(self.differences),
            "completions": self.completions,
            "skipped": self.skipped,
        }
        if self.differences:
            values = np.asarray(self.differences, np.float64)
            away = np.abs(values)
            middle, most95, most99 = np.percentile(away, [50, 95, 99]).tolist()
            out |= {"mean": float(away.mean()), "median": middle, "p95": most95, "p99": most99}
            out |= {"most": float(away.max()), "mean_difference": float(values.mean())}
            out["mean_ratio"] = float(np.exp(np.clip(values, -60, 60)).mean())
        return out
