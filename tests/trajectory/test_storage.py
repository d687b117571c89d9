"""Trajectories in files: exact, whole up to where they were cut off, and never a surprise."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory.model import assert_same
from tests.trajectory.walk import Walk
from tokentrace.errors import TrajectoryError
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import (
    Ending,
    LogprobKind,
    Trajectory,
    TrajectoryFile,
    from_bytes,
    load_trajectory,
    save_trajectory,
    to_bytes,
)
from tokentrace.trajectory import storage as storage_module
from tokentrace.trajectory.storage import MAGIC, VERSION, RecordType, preamble, replay_records, write_records


def walked(seed: int, steps: int, *, rewards: bool = True) -> Walk:
    walk = Walk(seed, rewards=rewards)
    for _ in range(steps):
        walk.step()
    return walk


def small() -> Trajectory:
    trajectory = Trajectory(name="small", metadata={"task": 3})
    trajectory.begin([1, 2, 3], messages=2, message_spans=[(0, 1, 0), (1, 3, 1)])
    trajectory.append_completion([4, 5], [-0.5, -1.5], finish_reason="stop", version=[("a", 0, 1), (2, 1, 2)])
    trajectory.append_context([6], Kind.CONTEXT, messages=1, message_spans=[(0, 1, 0)])
    trajectory.branch([1, 2, 3, 4, 9], cause="rewritten")
    trajectory.append_completion([7], [-0.25], finish_reason="length", sampling={"temperature": 1.0})
    return trajectory


def record(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<QB", len(payload), kind)
    return head + struct.pack("<I", zlib.crc32(head)) + payload + struct.pack("<I", zlib.crc32(payload))


def payload(value: Any, rest: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(text)) + text + rest


# -- exact


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 80))
def test_what_is_saved_is_loaded_exactly(seed: int, steps: int) -> None:
    walk = walked(seed, steps)
    loaded = from_bytes(to_bytes(walk.trajectory))
    assert (loaded.ending, loaded.problem, loaded.writes) == (Ending.WHOLE, None, walk.trajectory.num_writes)
    assert_same(walk.model, loaded.trajectory)
    assert loaded.trajectory.metadata == walk.trajectory.metadata
    assert (loaded.trajectory.name, loaded.trajectory.vocab_size) == (walk.trajectory.name, walk.trajectory.vocab_size)
    assert to_bytes(loaded.trajectory) == to_bytes(walk.trajectory)
    loaded.trajectory.check()


def test_an_empty_trajectory_and_every_float_come_back() -> None:
    empty = from_bytes(to_bytes(Trajectory(name="é\ud800", logprobs=False)))
    assert (empty.trajectory.name, empty.trajectory.has_logprobs, empty.truncated) == ("é\ud800", False, False)
    trajectory = Trajectory()
    trajectory.begin([2**31 - 1])
    bits = np.random.default_rng(0).integers(0x80000000, 0xFF7FFFFF, 5_000, dtype=np.uint32)
    trajectory.append_completion(np.arange(5_000), bits.view(np.float32), finish_reason="stop")
    loaded = from_bytes(to_bytes(trajectory)).trajectory
    assert loaded.completion_logprobs(loaded.turns()[0]).tobytes() == bits.tobytes()


def test_the_form_is_the_documented_one() -> None:
    trajectory = Trajectory(name="n", vocab_size=9)
    trajectory.begin([1, 2], messages=1)
    trajectory.append_completion(
        [7], [-0.5], finish_reason="stop", version=4, logprobs_kind=LogprobKind.RAW, cached_tokens=1
    )
    expected = MAGIC + struct.pack("<I", 3)
    expected += record(1, payload(b'{"name":"n","vocab_size":9,"logprobs":true,"metadata":{}}'))
    opening = b'{"branch":0,"start":0,"tokens":2,"messages":1,"spans":[],"parent":-1,"cause":""}'
    expected += record(2, payload(opening, struct.pack("<ii", 1, 2) + b"\0\0"))
    turn = b'{"branch":0,"start":2,"tokens":1,"finish_reason":"stop","version":4,"continues":false,"sampling":null,'
    turn += b'"logprobs_kind":"raw","cached_tokens":1}'
    expected += record(4, payload(turn, struct.pack("<if", 7, -0.5)))
    assert to_bytes(trajectory) == expected
    trajectory.append_context([3], Kind.CONTEXT)
    told = {"experts": [[[1, 300]]], "top": (((5, -0.5),),)}
    last = trajectory.append_completion([8], [-1.0], finish_reason="stop", channels=told)
    trajectory.set_reward(0.5, last)
    trajectory.set_reward(2)
    context = b'{"branch":0,"start":3,"tokens":1,"messages":2,"spans":[]}'
    expected += record(3, payload(context, struct.pack("<i", 3) + b"\2"))
    top = zlib.compress(b"[[[5,-0.5]]]", 1)
    rows = f'[{{"name":"experts","bytes":4,"dtype":"<u2","shape":[1,2]}},{{"name":"top","bytes":{len(top)},'
    rows += '"dtype":null,"shape":[]}]'
    turn = b'{"branch":0,"start":4,"tokens":1,"finish_reason":"stop","version":null,"continues":false,"sampling":null,'
    turn += b'"logprobs_kind":"unknown","cached_tokens":null,"channels":' + rows.encode() + b"}"
    expected += record(4, payload(turn, struct.pack("<ifHH", 8, -1.0, 1, 300) + top))
    expected += record(5, payload(b'{"write":3,"reward":0.5}')) + record(5, payload(b'{"write":-1,"reward":2.0}'))
    assert to_bytes(trajectory) == expected


def old_form() -> bytes:
    """A trajectory of version 1, as it was written before logprobs had a kind."""
    data = MAGIC + struct.pack("<I", 1)
    data += record(1, payload(b'{"name":"old","vocab_size":9,"logprobs":true,"metadata":{}}'))
    opening = b'{"branch":0,"start":0,"tokens":2,"messages":1,"spans":[],"parent":-1,"cause":""}'
    data += record(2, payload(opening, struct.pack("<ii", 1, 2) + b"\0\0"))
    turn = b'{"branch":0,"start":2,"tokens":1,"finish_reason":"stop","version":4,"continues":false,"sampling":null}'
    return data + record(4, payload(turn, struct.pack("<if", 7, -0.5)))


def test_an_old_file_is_read_and_does_not_know_what_its_logprobs_are() -> None:
    loaded = from_bytes(old_form())
    (turn,) = loaded.trajectory.turns()
    assert (loaded.version, loaded.ending) == (1, Ending.WHOLE)
    assert (turn.logprobs_kind, turn.cached_tokens) == (LogprobKind.UNKNOWN, None)
    assert from_bytes(to_bytes(loaded.trajectory)).version == VERSION
    new = to_bytes(loaded.trajectory)
    with pytest.raises(TrajectoryError, match="its JSON must have"):
        from_bytes(MAGIC + struct.pack("<I", 1) + new[12:])
    with pytest.raises(TrajectoryError, match="its JSON must have"):
        from_bytes(MAGIC + struct.pack("<I", 2) + old_form()[12:])


def test_an_old_file_that_is_gone_on_with_is_of_one_version(tmp_path: Path) -> None:
    path = tmp_path / "old.tt"
    path.write_bytes(old_form())
    with TrajectoryFile.resume(path) as file:
        file.trajectory.append_context([3], Kind.CONTEXT)
        file.trajectory.append_completion([4], [-1.0], finish_reason="stop", logprobs_kind="processed", cached_tokens=3)
    loaded = load_trajectory(path)
    assert (loaded.version, loaded.ending) == (VERSION, Ending.WHOLE)
    kinds = [(turn.logprobs_kind, turn.cached_tokens) for turn in loaded.trajectory.turns()]
    assert kinds == [(LogprobKind.UNKNOWN, None), (LogprobKind.PROCESSED, 3)]


@pytest.mark.parametrize("junk", [None, "text", 5, [1], object()])
def test_what_is_no_bytes_is_no_trajectory(junk: Any) -> None:
    with pytest.raises(TrajectoryError, match="read from bytes"):
        from_bytes(junk)


def test_the_documented_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "trajectory.md"
    code = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, str(page), "exec"), names)
    assert names["trajectory"].loss_mask().nonzero()[0].tolist() == [3, 4, 5, 8, 9]


# -- cut off


def test_every_cut_off_gives_everything_up_to_the_last_whole_record() -> None:
    trajectory = small()
    data = to_bytes(trajectory)
    ends = [len(preamble(trajectory))]
    for one in write_records(trajectory):
        ends.append(ends[-1] + len(one))
    assert ends[-1] == len(data)
    for length in range(len(data) + 1):
        loaded = from_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        assert loaded.writes == max(whole - 1, 0)
        assert loaded.truncated == (length not in ends)
        assert loaded.total_bytes == length
        assert loaded.good_bytes == (ends[whole - 1] if whole else 0)
        assert (loaded.problem is None) == (length in ends)
        loaded.trajectory.check()
        if whole:
            assert to_bytes(loaded.trajectory) == data[: ends[whole - 1]]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_flipped_bit_is_never_loaded(seed: int, data: st.DataObject) -> None:
    original = to_bytes(walked(seed, 12).trajectory)
    position = data.draw(st.integers(len(MAGIC) + 4, len(original) - 1))
    spoilt = bytearray(original)
    spoilt[position] ^= 1 << data.draw(st.integers(0, 7))
    loaded = from_bytes(spoilt)
    assert loaded.ending is Ending.DAMAGED
    assert original.startswith(to_bytes(loaded.trajectory)) or loaded.good_bytes == 0
    assert loaded.good_bytes <= position


def test_zeros_that_were_never_written_over_are_a_cut() -> None:
    data = to_bytes(small())
    loaded = from_bytes(data + bytes(4096))
    assert (loaded.ending, loaded.good_bytes) == (Ending.CUT_OFF, len(data))


# -- what is no trajectory


def test_another_magic_and_another_version_are_named() -> None:
    data = to_bytes(small())
    with pytest.raises(TrajectoryError, match=r"begins with b'PK.*TTRJ"):
        from_bytes(b"PK\x03\x04" + data)
    with pytest.raises(TrajectoryError, match="begins with b'x'"):
        from_bytes(b"x")
    with pytest.raises(TrajectoryError, match=f"version 7; this tokentrace reads versions 1 to {VERSION}"):
        from_bytes(MAGIC + struct.pack("<I", 7) + data[12:])


HEADER = {"name": "", "vocab_size": 10, "logprobs": True, "metadata": {}}
OPEN = {"branch": 0, "start": 0, "tokens": 2, "messages": 1, "spans": [[0, 1, 0]], "parent": -1, "cause": ""}
TURN = {
    "branch": 0,
    "start": 2,
    "tokens": 1,
    "finish_reason": "stop",
    "version": None,
    "continues": False,
    "sampling": None,
    "logprobs_kind": "raw",
    "cached_tokens": None,
}
CONTEXT = {"branch": 0, "start": 2, "tokens": 1, "messages": 1, "spans": []}
FORK = {"branch": 1, "start": 1, "tokens": 0, "messages": 0, "spans": [], "parent": 0, "cause": "x"}
EXPERTS = {"name": "experts", "bytes": 2, "dtype": "<u2", "shape": []}
OPEN_ARRAYS = struct.pack("<ii", 1, 2) + b"\0\0"
TOLD = struct.pack("<ifH", 3, -1.0, 258)
DEEP = b"[" * 100_000
FRONT = MAGIC + struct.pack("<I", VERSION) + record(RecordType.HEADER, payload(HEADER))
BEGUN = FRONT + record(RecordType.OPEN, payload(OPEN, OPEN_ARRAYS))


def test_the_parts_of_hostile_files_are_fine_by_themselves() -> None:
    turn = record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, -1.0)))
    fork = record(RecordType.OPEN, payload(FORK))
    context = record(RecordType.CONTEXT, payload(CONTEXT, struct.pack("<i", 3) + b"\2"))
    assert from_bytes(BEGUN + fork + turn).writes == 3
    assert from_bytes(BEGUN + context).writes == 2
    told = from_bytes(BEGUN + record(RecordType.COMPLETION, payload(TURN | {"channels": [EXPERTS]}, TOLD)))
    assert told.trajectory.channels()["experts"].entries() == [None, None, 258]
    told = from_bytes(BEGUN + turn + record(RecordType.REWARD, payload({"write": 1, "reward": 3})))
    assert told.trajectory.turns()[0].reward == 3.0


def test_rewards_and_channels_are_of_version_3() -> None:
    turn = record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, -1.0)))
    channels = record(RecordType.COMPLETION, payload(TURN | {"channels": [EXPERTS]}, TOLD))
    reward = record(RecordType.REWARD, payload({"write": 1, "reward": 3}))
    version_2 = MAGIC + struct.pack("<I", 2) + BEGUN[12:]
    assert from_bytes(version_2 + turn).version == 2
    for rest in (channels, turn + reward):
        with pytest.raises(TrajectoryError, match="whole but wrong"):
            from_bytes(version_2 + rest)


@pytest.mark.parametrize(
    "data",
    [
        MAGIC + struct.pack("<I", VERSION) + record(RecordType.OPEN, payload(OPEN, OPEN_ARRAYS)),
        *(
            MAGIC + struct.pack("<I", VERSION) + record(RecordType.HEADER, payload(HEADER | change))
            for change in (
                {"name": 5},
                {"vocab_size": -1},
                {"vocab_size": 1e30},
                {"logprobs": 1},
                {"metadata": 3},
                {"more": 1},
            )
        ),
        *(
            MAGIC + struct.pack("<I", VERSION) + record(RecordType.HEADER, bad)
            for bad in (
                b"",
                b"\xff\xff\xff\xff{}",
                payload(b"{"),
                payload(b"\xff\xfe"),
                payload(b"[]"),
                payload(DEEP),
                payload({}),
                payload(HEADER, b"x"),
                payload(b'{"name":"","vocab_size":null,"logprobs":true,"metadata":{"x":NaN}}'),
                payload(b'{"name":"","vocab_size":null,"logprobs":true,"metadata":{"x":1e999}}'),
                payload(b'{"name":"","vocab_size":' + b"9" * 5000 + b',"logprobs":true,"metadata":{}}'),
            )
        ),
        *(
            FRONT + record(RecordType.OPEN, payload(OPEN | change, OPEN_ARRAYS))
            for change in (
                {"tokens": -1},
                {"tokens": 2**40},
                {"tokens": 2**31 - 1},
                {"tokens": 1},
                {"tokens": True},
                {"tokens": 2.0},
                {"tokens": None},
                {"branch": 1},
                {"branch": -1},
                {"start": 1},
                {"parent": 0},
                {"parent": -2},
                {"parent": "x"},
                {"messages": -1},
                {"spans": [[0, 3, 0]]},
                {"spans": [[0, 1]]},
                {"spans": [[0, 1, 2**40]]},
                {"spans": [[0, 1, 1]]},
                {"spans": {}},
                {"cause": None},
            )
        ),
        FRONT + record(RecordType.OPEN, payload(OPEN, struct.pack("<ii", 1, 10) + b"\0\0")),
        FRONT + record(RecordType.OPEN, payload(OPEN, struct.pack("<ii", 1, -2) + b"\0\0")),
        FRONT + record(RecordType.OPEN, payload(OPEN, struct.pack("<ii", 1, 2) + b"\0\1")),
        FRONT + record(RecordType.OPEN, payload(OPEN, struct.pack("<ii", 1, 2) + b"\0\x63")),
        FRONT + record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, -1.0))),
        FRONT + record(RecordType.HEADER, payload(HEADER)),
        FRONT + record(9, payload({})),
        *(
            BEGUN + record(RecordType.COMPLETION, payload(TURN | change, struct.pack("<if", 3, -1.0)))
            for change in (
                {"branch": 1},
                {"start": 1},
                {"finish_reason": ""},
                {"finish_reason": 3},
                {"version": 1.5},
                {"version": [["a", 0, 2]]},
                {"version": {}},
                {"continues": True},
                {"continues": 0},
                {"sampling": []},
                {"sampling": 1},
                {"logprobs_kind": "cooked"},
                {"logprobs_kind": None},
                {"cached_tokens": -1},
                {"cached_tokens": 1.0},
                {"cause": ""},
            )
        ),
        *(
            BEGUN + record(RecordType.COMPLETION, payload(TURN | {"channels": change}, TOLD))
            for change in (
                {},
                [EXPERTS, EXPERTS],
                [EXPERTS, EXPERTS | {"name": "more"}],
                [None],
                *(
                    [EXPERTS | one]
                    for one in (
                        {"name": 3},
                        {"name": ""},
                        {"bytes": 1},
                        {"bytes": 3},
                        {"bytes": -1},
                        {"dtype": "<i4"},
                        {"dtype": "O"},
                        {"dtype": None},
                        {"dtype": 2},
                        {"shape": [2]},
                        {"shape": [-1]},
                        {"shape": ["a"]},
                        {"shape": None},
                        {"more": 1},
                    )
                ),
            )
        ),
        *(
            BEGUN
            + record(
                RecordType.COMPLETION,
                payload(TURN | {"channels": [EXPERTS | {"dtype": None, "bytes": len(bad)}]}, TOLD[:8] + bad),
            )
            for bad in (
                zlib.compress(b"[1,2]"),
                zlib.compress(b"{}"),
                zlib.compress(b"[NaN]"),
                zlib.compress(DEEP),
                zlib.compress(b"[1]") + b"x",
                zlib.compress(b"[1]")[:-1],
            )
        ),
        *(
            BEGUN
            + record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, -1.0)))
            + record(RecordType.REWARD, bad)
            for bad in (
                payload({"write": 0, "reward": 1.0}),
                payload({"write": 2, "reward": 1.0}),
                payload({"write": -2, "reward": 1.0}),
                payload({"write": True, "reward": 1.0}),
                payload({"write": 1, "reward": "1"}),
                payload({"write": 1, "reward": True}),
                payload({"write": 1}),
                payload({"write": 1, "reward": 1.0}, b"x"),
            )
        ),
        *(
            BEGUN + record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, bad)))
            for bad in (1.0, float("nan"), float("-inf"))
        ),
        BEGUN + record(RecordType.CONTEXT, payload(CONTEXT, struct.pack("<i", 3) + b"\1")),
        BEGUN + record(RecordType.CONTEXT, payload(CONTEXT | {"messages": 0}, struct.pack("<i", 3) + b"\2")),
        BEGUN + record(RecordType.CONTEXT, payload(CONTEXT | {"tokens": 0})),
        *(
            BEGUN + record(RecordType.OPEN, payload(FORK | change))
            for change in (
                {"start": 0},
                {"start": 2},
                {"start": 2**31 - 1},
                {"parent": 1},
                {"parent": -1},
                {"branch": 0},
                {"branch": 2},
            )
        ),
        BEGUN
        + record(RecordType.OPEN, payload(FORK | {"tokens": 1}, struct.pack("<i", 3) + b"\2"))
        + record(RecordType.OPEN, payload(FORK | {"branch": 2, "parent": 1})),
    ],
)
def test_a_whole_record_that_no_trajectory_wrote_is_refused(data: bytes) -> None:
    with pytest.raises(TrajectoryError, match=r"record \d+ at byte \d+ is whole but"):
        from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 255))
def test_any_bytes_give_a_trajectory_or_an_error(data: bytes, fitting: bool, kind: int) -> None:
    for front in (b"", MAGIC, FRONT, BEGUN):
        try:
            loaded = from_bytes(front + (record(kind % 6, data) if fitting else data))
        except TrajectoryError:
            continue
        loaded.trajectory.check()


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40])
def test_a_huge_length_is_a_cut_and_costs_nothing(length: int) -> None:
    head = struct.pack("<QB", length, 3)
    loaded = from_bytes(BEGUN + head + struct.pack("<I", zlib.crc32(head)) + b"abc")
    assert (loaded.ending, loaded.writes) == (Ending.CUT_OFF, 1)


# -- files


def test_save_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "one.trajectory"
    path.write_bytes(b"old")
    save_trajectory(small(), path)
    assert to_bytes(load_trajectory(path).trajectory) == path.read_bytes() == to_bytes(small())
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.trajectory"
    save_trajectory(small(), path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(storage_module.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_trajectory(Trajectory(), path)
    with pytest.raises(OSError, match="no space"):
        TrajectoryFile.create(tmp_path / "two", small())
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(TrajectoryError, match=r"notes\.txt: not a trajectory"):
        load_trajectory(path)


def test_a_file_follows_a_growing_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    walk = Walk(3, rewards=False)
    walk.begin()
    with TrajectoryFile.create(path, walk.trajectory) as file:
        for _ in range(60):
            before, size = walk.trajectory.num_writes, path.stat().st_size
            walk.step()
            assert file.write() == walk.trajectory.num_writes - before
            assert (path.stat().st_size == size) == (walk.trajectory.num_writes == before)
            assert path.read_bytes() == to_bytes(walk.trajectory)
        walk.context()
    assert path.read_bytes() == to_bytes(walk.trajectory)
    with pytest.raises(FileExistsError):
        TrajectoryFile.create(path, walk.trajectory)


def test_rewards_are_written_when_they_are_said(tmp_path: Path) -> None:
    path = tmp_path / "rewards.tt"
    trajectory = small()
    with TrajectoryFile.create(path, trajectory) as file:
        (turn, *_) = trajectory.turns()
        trajectory.set_reward(1.0, turn)
        assert file.write() == 0
        assert load_trajectory(path).trajectory.turns()[0].reward == 1.0
        trajectory.set_reward(0.25, turn)
    with TrajectoryFile.resume(path) as file:
        file.trajectory.set_reward(7)
    loaded = load_trajectory(path).trajectory
    assert (loaded.turns()[0].reward, loaded.reward) == (0.25, 7.0)
    assert loaded.rewarded == ((turn.write, 1.0), (turn.write, 0.25), (-1, 7.0))


def test_a_file_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    trajectory = small()
    data = to_bytes(trajectory)
    start = len(preamble(trajectory))
    for length in random.Random(0).sample(range(start, len(data)), 40):
        path.write_bytes(data[:length])
        with TrajectoryFile.resume(path) as file:
            kept = file.trajectory.num_writes
            for write in trajectory.writes(kept):
                file.trajectory.replay(write)
        assert path.read_bytes() == data


def test_a_damaged_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    spoilt = bytearray(to_bytes(small()))
    spoilt[len(preamble(small())) + 30] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(TrajectoryError, match="another name"):
        TrajectoryFile.resume(path)
    path.write_bytes(b"")
    with pytest.raises(TrajectoryError, match="another name"):
        TrajectoryFile.resume(path)


def test_a_write_that_failed_half_way_is_made_good_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "torn"
    trajectory = Trajectory()
    trajectory.begin([1])
    file = TrajectoryFile.create(path, trajectory)
    with path.open("ab") as other:
        other.write(b"half a record" * 100)
    trajectory.append_context([2], Kind.CONTEXT)
    assert file.write() == 1
    file.close()
    assert path.read_bytes() == to_bytes(trajectory)


# -- records on their own, as a store keeps them


@pytest.mark.parametrize("seed", range(5))
def test_a_trajectory_is_what_its_records_say_in_whatever_batches_they_come(seed: int) -> None:
    walk = walked(seed, 40, rewards=False)
    rest = list(write_records(walk.trajectory))
    assert len(rest) > 5
    again = Trajectory(
        name=walk.trajectory.name,
        vocab_size=walk.trajectory.vocab_size,
        logprobs=walk.trajectory.has_logprobs,
        metadata=walk.trajectory.metadata,
    )
    while rest:
        count = walk.random.randint(1, 3)
        assert replay_records(again, rest[:count]) == len(rest[:count])
        rest = rest[count:]
    assert to_bytes(again) == to_bytes(walk.trajectory)
    assert_same(walk.model, again)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda record: record[:-1], "not one whole record: it ends inside"),
        (lambda record: b"", "not one whole record"),
        (lambda record: record + b"x", "not one whole record: more bytes follow"),
        (lambda record: record[:20] + bytes([record[20] ^ 1]) + record[21:], "does not fit its checksum"),
        (lambda _: record(RecordType.CONTEXT, payload(b"{")), "its JSON is not valid"),
        (lambda _: record(RecordType.HEADER, payload({})), "cannot stand here"),
    ],
)
def test_a_record_that_is_not_whole_is_refused_after_those_before_it(spoil: Any, problem: str) -> None:
    first, second, *_ = write_records(small())
    again = Trajectory()
    with pytest.raises(TrajectoryError, match=problem):
        replay_records(again, [first, spoil(second)])
    assert again.num_writes == 1
    with pytest.raises(TrajectoryError):
        replay_records(again, [first])
    assert replay_records(again, [second]) == 1
