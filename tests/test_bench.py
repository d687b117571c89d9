"""The histories of `bench`: what it measures must be what a model is given."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench import gateway
from bench.bridge import RESULT_BYTES, grow, memory, mostly_sampled, results
from bench.conversations import sources, tools
from bench.parse import TOOL, completion, story
from bench.rollout import Shape, Watch, check, grown, renderer_of
from tests.oracle import hf_ids
from tests.support import make_renderer
from tokentrace.rollout.batch import Summary
from tokentrace.rollout.loop import End, Rollout, Task
from tokentrace.trajectory import Trajectory


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


@pytest.mark.parametrize("family", ["qwen3", "pocket"])
def test_rollouts_side_by_side_are_exact(family: str) -> None:
    shape = Shape(first=600, result=200, length=2_500)
    renderer = renderer_of(family) if family == "pocket" else make_renderer(family)
    found = grown(renderer, shape, 3)  # compares each prompt that the engine saw with the stream that was recorded
    assert found.summary.ends == {"turns": 3}
    assert found.summary.turns == found.summary.tool_calls == 3 * shape.turns
    assert (found.summary.breaks, found.summary.samples, found.summary.tool_errors) == (0, 3, 0)
    assert len(found.rounds) == shape.turns - 1
    lengths = [one.tokens for one in found.rounds]
    assert lengths == sorted(lengths)
    assert 1_800 < found.summary.tokens / 3 < 3_200
    assert all(0 < one.rest < one.own < one.total for one in found.rounds)
    assert all(one.stages[stage] > 0 for one in found.rounds for stage in ("parse", "bridge", "record"))


def test_a_prompt_that_is_not_the_recorded_stream_is_found() -> None:
    watch = Watch(1)
    trajectory = Trajectory()
    trajectory.begin([1, 2, 3], messages=1)
    trajectory.append_completion([4], [-0.5], finish_reason="stop")
    rollout = Rollout(Task([]), trajectory, [], [], end=End.TURNS)
    summary = Summary()
    summary.add(rollout.metrics())
    watch.see(np.array([1, 2, 3], np.int32))
    check(summary, [rollout], watch.seen)
    watch.seen.clear()
    watch.see(np.array([1, 2, 9], np.int32))
    with pytest.raises(AssertionError, match="1 of 1 prompts"):
        check(summary, [rollout], watch.seen)


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of another process is read from /proc")
@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_a_gateway_are_measured_and_their_prompts_are_exact(stream: bool, tmp_path: Path) -> None:
    found = asyncio.run(gateway.turns("qwen3", tmp_path / "store.db", 1_500, stream))
    lengths = [turn.tokens for turn in found]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] >= 1_500 > lengths[-2]
    assert all(turn.gateway > 0 and turn.raw > 0 and turn.seconds > 0 for turn in found)
    with pytest.raises(AssertionError, match="1 of 1 prompts are not what is stored"):
        asyncio.run(gateway.check(tmp_path / "store.db", Counter({(1_500, 7): 1})))


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of another process is read from /proc")
def test_many_sessions_of_a_gateway_are_exact(tmp_path: Path) -> None:
    found = asyncio.run(gateway.many("qwen3", tmp_path / "store.db", 3))
    assert found.turns == len(found.times) == 3 * gateway.TURNS
    assert found.tokens > found.turns * 100
    assert found.stored > 0
