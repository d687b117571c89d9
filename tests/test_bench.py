"""The histories of `bench`: what it measures must be what a model is given."""

from __future__ import annotations

import itertools

import pytest

from bench.bridge import RESULT_BYTES, grow, memory, mostly_sampled, results
from bench.conversations import sources, tools
from tests.oracle import hf_ids
from tests.support import make_renderer


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_a_rollout_grown_by_bridges_is_what_transformers_renders(family: str) -> None:
    renderer = make_renderer(family)
    rollout = grow(6_000, renderer, itertools.cycle(sources()), tools())
    result = rollout.result(next(results(["<|im_end|>"])))
    bridge = renderer.bridge_to_next_turn(*rollout.stream, [result], tools=tools())
    assert len(result["content"]) == RESULT_BYTES
    assert bridge == hf_ids(family, [*rollout.messages, result], tools(), add_generation_prompt=True)
    assert 6_000 <= len(rollout.trajectory) < 8_000
    rollout.trajectory.check()


def test_a_token_takes_at_most_ten_bytes_though_nearly_all_are_sampled() -> None:
    trajectory = mostly_sampled(100_000)
    assert trajectory.num_sampled > 0.95 * len(trajectory)
    found = memory(trajectory)
    assert found.record <= found.most <= 10
    assert found.record <= found.traced <= 10
