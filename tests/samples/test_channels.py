"""Side channels reach rows, files and batches as the engine sent them; other tokens have no values."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokentrace import Agent, Task, collate, create_renderer, trajectory_samples, truncate
from tokentrace.data.tables import read_samples, write_samples
from tokentrace.engines import Delta, GenerateRequest, ScriptedEngine
from tokentrace.errors import SampleError, TrajectoryError
from tokentrace.pocket import POCKET
from tokentrace.rollout.store import RolloutStore
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Channel, Trajectory, from_bytes, to_bytes

RENDERER = create_renderer(POCKET)


def channels(ids: list[int]) -> dict[str, Any]:
    return {
        "routed_experts": [[[one % 60, one % 7], [1, 2], [300, 0]] for one in ids],
        "top_logprobs": [((one, -0.5), (one + 1, -1.25)) for one in ids],
        "top_p_ids": [list(range(one % 3 + 1)) for one in ids],
    }


def plain(name: str, entry: Any) -> Any:
    return [list(pair) for pair in entry] if name == "top_logprobs" else entry


def recorded() -> Trajectory:
    trajectory = Trajectory(name="one")
    trajectory.begin([1, 2, 3], messages=1, message_spans=[(0, 3, 0)])
    trajectory.append_completion([10, 11], [-0.1, -0.2], finish_reason="abort", version=1, channels=channels([10, 11]))
    trajectory.append_completion([12], [-0.1], finish_reason="stop", version=2, continues=True, channels=channels([12]))
    trajectory.append_context([4], Kind.CONTEXT, messages=1, message_spans=[(0, 1, 0)])
    trajectory.append_completion([13, 14], [-0.3, -0.4], finish_reason="stop", version=2, channels=channels([13, 14]))
    return trajectory


def check(sample: Sample, ids: list[int], sampled: list[bool]) -> None:
    for name, channel in sample.channels.items():
        expected = [plain(name, channels([one])[name][0]) if on else None for one, on in zip(ids, sampled, strict=True)]
        assert channel.entries() == expected
        assert channel.present.tolist() == sampled


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_channels_survive_the_trajectorys_file_and_files_of_rows(tmp_path: Path, suffix: str) -> None:
    trajectory = from_bytes(to_bytes(recorded())).trajectory
    (sample,) = trajectory_samples(trajectory)
    assert sorted(sample.channels) == ["routed_experts", "top_logprobs", "top_p_ids"]
    check(sample, sample.token_ids, sample.mask.tolist())
    bare = sample.replace(channels={})
    write_samples(tmp_path / f"rows{suffix}", [sample, bare, sample.slice(2, 5)])
    first, second, third = read_samples(tmp_path / f"rows{suffix}")
    check(first, sample.token_ids, sample.mask.tolist())
    check(third, sample.token_ids[2:5], sample.mask.tolist()[2:5])
    assert (second.channels, sorted(first.channels)) == ({}, sorted(sample.channels))


@pytest.mark.parametrize("bad", [np.array([np.nan, 1.0]), np.array([[1.0], [np.inf]], np.float32), [float("nan"), 1]])
def test_values_that_json_cannot_hold_are_refused_when_recorded_and_when_written(tmp_path: Path, bad: Any) -> None:
    trajectory = Trajectory()
    trajectory.begin([1])
    with pytest.raises(TrajectoryError, match=r"channels\['entropy'\]"):
        trajectory.append_completion([7, 8], [-1.0, -1.0], finish_reason="stop", channels={"entropy": bad})
    trajectory.append_completion([7, 8], [-1.0, -1.0], finish_reason="stop", channels={"entropy": [None, 1.5]})
    (sample,) = trajectory_samples(trajectory)
    write_samples(tmp_path / "rows.parquet", [sample])
    (restored,) = read_samples(tmp_path / "rows.parquet")
    assert restored.channels["entropy"].entries() == [None, None, 1.5]
    with pytest.raises(SampleError, match=r"'entropy'.* cannot be written as JSON"):
        write_samples(tmp_path / "odd.parquet", [sample.replace(channels={"entropy": Channel(3, ((1, bad),))})])


def test_channels_are_cut_with_their_tokens() -> None:
    (sample,) = trajectory_samples(recorded())
    for start in range(len(sample)):
        for stop in range(start, len(sample) + 1):
            cut = sample.slice(start, stop)
            check(cut, sample.token_ids[start:stop], sample.mask.tolist()[start:stop])
    truncated = truncate(sample, 6, "right").sample
    assert truncated is not None
    check(truncated, sample.token_ids[:6], sample.mask.tolist()[:6])


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_has_the_callers_fill_where_a_token_has_no_value(side: Any) -> None:
    (sample,) = trajectory_samples(recorded())
    batch = collate([sample, sample.slice(0, 6)], pad_id=0, side=side, channels={"routed_experts": -1})
    experts, loss = batch["routed_experts"], batch["loss_mask"].astype(bool)
    assert experts.shape == (*loss.shape, 3, 2)
    assert experts[loss].tolist() == channels(batch["input_ids"][loss].tolist())["routed_experts"]
    assert (experts[~loss] == -1).all()
    assert "routed_experts" not in collate([sample], pad_id=0)


@pytest.mark.parametrize(
    ("channels", "change", "why"),
    [
        ({"experts": -1}, {}, "has no channel 'experts'"),
        ({"top_p_ids": -1}, {}, "not numbers of one shape"),
        ({"routed_experts": 0.5}, {}, "fill is 0.5"),
        ({"routed_experts": -1}, {"channels": {"routed_experts": Channel(9, ((3, [[1]]),))}}, "for token 4, which"),
    ],
)
def test_a_batch_of_missing_channels_is_refused(channels: Any, change: Any, why: str) -> None:
    (sample,) = trajectory_samples(recorded())
    with pytest.raises(SampleError, match=why):
        collate([sample.replace(**change)], pad_id=0, channels=channels)


def test_the_loop_records_the_engines_channels_and_the_store_writes_them(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")

    class ChannelEngine(ScriptedEngine):
        async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
            async for delta in super()._stream(request):
                yield replace(delta, channels=channels(delta.ids.tolist()))

    answer = RENDERER.tokenizer.encode("It is 42.<|end|>")
    engine = ChannelEngine(lambda *_: answer, vocab_size=RENDERER.tokenizer.vocabulary.size)
    task = Task([{"role": "user", "content": "6 * 7?"}], name="one")
    rollout = asyncio.run(Agent(engine, RENDERER).run(task))
    (sample,) = trajectory_samples(rollout.trajectory)
    check(sample, sample.token_ids, sample.mask.tolist())
    store = RolloutStore(tmp_path)
    store.start("one")
    store.finish(rollout)
    (row,) = read_samples(store.write_rows())
    assert sorted(row.channels) == sorted(sample.channels)
    check(row, sample.token_ids, sample.mask.tolist())
    store.close()
