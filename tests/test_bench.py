"""The histories of `bench`: what it measures must be what a model is given."""

from __future__ import annotations

import itertools

import pytest

from bench.bridge import RESULT_BYTES, grow, memory, mostly_sampled, results
from bench.conversations import sources, tools
from bench.parse import TOOL, completion, story
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


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_a_completion_to_be_parsed_holds_all_that_is_measured(family: str) -> None:
    renderer = make_renderer(family)
    prompt, ids = completion(renderer, 500, sources(), 3)
    parsed = renderer.parse_response(ids, tools=[TOOL], prompt_ids=prompt)
    content, reasoning, calls = story(parsed)
    assert content
    assert reasoning
    assert [(name, arguments["line"]) for name, arguments in calls] == [("edit_file", 0), ("edit_file", 1)]
    assert len(calls[0][1]["text"]) > 200
    assert 250 < len(ids) < 1_500
