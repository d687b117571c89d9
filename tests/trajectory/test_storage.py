"""Trajectories in files: exact, and complete up to a cut; bytes that are no trajectory are refused."""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tests.trajectory.model import check_trajectory
from tests.trajectory.walk import Walk
from tokentrace.errors import TrajectoryError
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import LogprobKind, Trajectory, from_bytes, load_trajectory, to_bytes
from tokentrace.trajectory.storage import MAGIC, VERSION, replay_records, write_records


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


def payload(value: Any, arrays: bytes = b"") -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<I", len(text)) + text + arrays


def test_an_empty_trajectory_and_every_float_come_back() -> None:
    empty = from_bytes(to_bytes(Trajectory(name="é\ud800", logprobs=False)))
    assert (empty.trajectory.name, empty.trajectory.has_logprobs, empty.truncated) == ("é\ud800", False, False)
    trajectory = Trajectory()
    trajectory.begin([2**31 - 1])
    bits = np.random.default_rng(0).integers(0x80000000, 0xFF7FFFFF, 5_000, dtype=np.uint32)
    trajectory.append_completion(np.arange(5_000), bits.view(np.float32), finish_reason="stop")
    loaded = from_bytes(to_bytes(trajectory)).trajectory
    assert loaded.logprobs()[-len(bits) :].tobytes() == bits.tobytes()


def test_the_format_is_the_documented_one() -> None:
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
    channels = {"experts": [[[1, 300]]], "top": (((5, -0.5),),)}
    last = trajectory.append_completion([8], [-1.0], finish_reason="stop", channels=channels)
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


def test_every_cut_off_gives_everything_up_to_the_last_whole_record() -> None:
    trajectory = small()
    data = to_bytes(trajectory)
    ends = [len(to_bytes(Trajectory(name="small", metadata={"task": 3})))]
    for one in write_records(trajectory):
        ends.append(ends[-1] + len(one))
    assert ends[-1] == len(data)
    for length in range(len(data) + 1):
        loaded = from_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        assert loaded.trajectory.num_writes == max(whole - 1, 0)
        assert loaded.truncated == (length not in ends)
        assert loaded.good_bytes == (ends[whole - 1] if whole else 0)
        check_trajectory(loaded.trajectory)
        if whole:
            assert to_bytes(loaded.trajectory) == data[: ends[whole - 1]]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_a_flipped_bit_is_never_loaded(seed: int, data: st.DataObject) -> None:
    walk = Walk(seed)
    for _ in range(12):
        walk.step()
    original = to_bytes(walk.trajectory)
    position = data.draw(st.integers(len(MAGIC) + 4, len(original) - 1))
    corrupted = bytearray(original)
    corrupted[position] ^= 1 << data.draw(st.integers(0, 7))
    loaded = from_bytes(corrupted)
    assert loaded.truncated
    assert original.startswith(to_bytes(loaded.trajectory)) or loaded.good_bytes == 0
    assert loaded.good_bytes <= position


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda record: record[:-1], "not one whole record: it ends inside"),
        (lambda record: b"", "not one whole record"),
        (lambda record: record + b"x", "not one whole record"),
        (lambda record: record[:20] + bytes([record[20] ^ 1]) + record[21:], "does not match its checksum"),
        (lambda _: record(3, payload(b"{")), "its JSON is not valid"),
        (lambda _: record(1, payload({})), "cannot appear here"),
    ],
)
def test_a_record_that_is_not_whole_is_refused_after_those_before_it(spoil: Any, problem: str) -> None:
    first, second, *_ = write_records(small())
    replayed = Trajectory()
    with pytest.raises(TrajectoryError, match=problem):
        replay_records(replayed, [first, spoil(second)])
    assert replayed.num_writes == 1
    with pytest.raises(TrajectoryError):
        replay_records(replayed, [first])
    replay_records(replayed, [second])
    assert replayed.num_writes == 2


def test_save_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "one.trajectory"
    path.write_bytes(b"old")
    small().save(path)
    assert to_bytes(load_trajectory(path).trajectory) == path.read_bytes() == to_bytes(small())
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.trajectory"
    small().save(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        Trajectory().save(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["one.trajectory"]


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    for wrong, problem in ((path, "not a trajectory"), (tmp_path / "none", "No such file"), (5, "not int")):
        with pytest.raises(TrajectoryError, match=f"{wrong}: .*{problem}"):
            load_trajectory(wrong)


def test_another_magic_and_another_version_are_named() -> None:
    data = to_bytes(small())
    with pytest.raises(TrajectoryError, match=r"begins with b'PK.*TTRJ"):
        from_bytes(b"PK\x03\x04" + data)
    with pytest.raises(TrajectoryError, match="begins with b'x'"):
        from_bytes(b"x")
    for version in (*range(VERSION), VERSION + 1):
        with pytest.raises(TrajectoryError, match=f"version {version}; this tokentrace reads version {VERSION}"):
            from_bytes(MAGIC + struct.pack("<I", version) + data[12:])


HEADER = {"name": "", "vocab_size": 10, "logprobs": True, "metadata": {}}
OPEN = {"branch": 0, "start": 0, "tokens": 2, "messages": 1, "spans": [[0, 1, 0]], "parent": -1, "cause": ""}
TURN = {
    **{"branch": 0, "start": 2, "tokens": 1, "finish_reason": "stop", "version": None, "continues": False},
    **{"sampling": None, "logprobs_kind": "raw", "cached_tokens": None},
}
CONTEXT = {"branch": 0, "start": 2, "tokens": 1, "messages": 1, "spans": []}
FORK = {"branch": 1, "start": 1, "tokens": 0, "messages": 0, "spans": [], "parent": 0, "cause": "x"}
EXPERTS = {"name": "experts", "bytes": 2, "dtype": "<u2", "shape": []}
OPEN_ARRAYS = struct.pack("<ii", 1, 2) + b"\0\0"
CHANNEL_ARRAYS = struct.pack("<ifH", 3, -1.0, 258)
DEEP = b"[" * 100_000
FRONT = MAGIC + struct.pack("<I", VERSION) + record(1, payload(HEADER))
OPENED = FRONT + record(2, payload(OPEN, OPEN_ARRAYS))


def test_the_parts_of_hostile_files_are_valid_on_their_own() -> None:
    turn = record(4, payload(TURN, struct.pack("<if", 3, -1.0)))
    fork = record(2, payload(FORK))
    context = record(3, payload(CONTEXT, struct.pack("<i", 3) + b"\2"))
    assert from_bytes(OPENED + fork + turn).trajectory.num_writes == 3
    assert from_bytes(OPENED + context).trajectory.num_writes == 2
    loaded = from_bytes(OPENED + record(4, payload(TURN | {"channels": [EXPERTS]}, CHANNEL_ARRAYS)))
    assert loaded.trajectory.channels()["experts"].entries() == [None, None, 258]
    channels = {"big": np.array([7], ">i4"), "bools": [[True, 2]], "mapping": [MappingProxyType({"a": 1})]}
    trajectory = Trajectory()
    trajectory.begin([1])
    trajectory.append_completion([2], [-1.0], finish_reason="stop", channels=channels)
    entries = {name: channel.entries()[1] for name, channel in trajectory.channels().items()}
    assert entries == {"big": 7, "bools": [True, 2], "mapping": {"a": 1}}
    assert entries["bools"][0] is True
    loaded = from_bytes(OPENED + turn + record(5, payload({"write": 1, "reward": 3})))
    assert loaded.trajectory.turns()[0].reward == 3.0


def hostile() -> Iterator[bytes]:
    start = MAGIC + struct.pack("<I", VERSION)
    ids = struct.pack("<ii", 1, 2)
    turn_arrays = struct.pack("<if", 3, -1.0)

    def each(front: bytes, kind: int, base: dict[str, Any], arrays: bytes, **changes: Any) -> Iterator[bytes]:
        for name, values in changes.items():
            for value in values:
                yield front + record(kind, payload(base | {name: value}, arrays))

    yield start + record(2, payload(OPEN, OPEN_ARRAYS))
    bad_header = {"name": [5], "vocab_size": [-1, 1e30], "logprobs": [1], "metadata": [3], "more": [1]}
    yield from each(start, 1, HEADER, b"", **bad_header)
    empty = b'{"name":"","vocab_size":null,"logprobs":true,"metadata":'
    for bad in (b"", b"\xff\xff\xff\xff{}", payload({}), payload(HEADER, b"x")):
        yield start + record(1, bad)
    for text in (b"{", b"\xff\xfe", b"[]", DEEP, empty + b'{"x":NaN}}', empty + b'{"x":1e999}}'):
        yield start + record(1, payload(text))
    bad_open = {
        "tokens": [-1, 2**40, 2**31 - 1, 1, True, 2.0, None],
        "branch": [1, -1],
        "start": [1],
        "parent": [0, -2, "x"],
        "messages": [-1],
        "spans": [[[0, 3, 0]], [[0, 1]], [[0, 1, 2**40]], [[0, 1, 1]], {}],
        "cause": [None],
    }
    yield from each(FRONT, 2, OPEN, OPEN_ARRAYS, **bad_open)
    for arrays in (
        struct.pack("<ii", 1, 10) + b"\0\0",
        struct.pack("<ii", 1, -2) + b"\0\0",
        ids + b"\0\1",
        ids + b"\0c",
    ):
        yield FRONT + record(2, payload(OPEN, arrays))
    yield FRONT + record(4, payload(TURN, turn_arrays))
    yield FRONT + record(1, payload(HEADER))
    yield FRONT + record(9, payload({}))
    bad_turn = {
        "branch": [1],
        "start": [1],
        "finish_reason": ["", 3],
        "version": [1.5, [["a", 0, 2]], {}],
        "continues": [True, 0],
        "sampling": [[], 1],
        "logprobs_kind": ["cooked", None],
        "cached_tokens": [-1, 1.0],
        "cause": [""],
    }
    yield from each(OPENED, 4, TURN, turn_arrays, **bad_turn)
    bad_rows = {"name": [3, ""], "bytes": [1, 3, -1], "dtype": ["<i4", "O", None, 2], "more": [1]}
    bad_rows["shape"] = [[2], [-1], ["a"], None]
    rows = [[EXPERTS | {name: value}] for name, values in bad_rows.items() for value in values]
    tables = [{}, [EXPERTS, EXPERTS], [EXPERTS, EXPERTS | {"name": "more"}], [None], *rows]
    yield from each(OPENED, 4, TURN, CHANNEL_ARRAYS, channels=tables)
    packed = [zlib.compress(text) for text in (b"[1,2]", b"{}", b"[NaN]", DEEP)]
    for data in (*packed, zlib.compress(b"[1]") + b"x", zlib.compress(b"[1]")[:-1]):
        table = [EXPERTS | {"dtype": None, "bytes": len(data)}]
        yield OPENED + record(4, payload(TURN | {"channels": table}, CHANNEL_ARRAYS[:8] + data))
    with_turn = OPENED + record(4, payload(TURN, turn_arrays))
    reward = {"write": 1, "reward": 1.0}
    yield from each(with_turn, 5, reward, b"", write=[0, 2, -2, True], reward=["1", True])
    yield with_turn + record(5, payload({"write": 1}))
    yield with_turn + record(5, payload(reward, b"x"))
    for logprob in (1.0, float("nan"), float("-inf")):
        yield OPENED + record(4, payload(TURN, struct.pack("<if", 3, logprob)))
    yield OPENED + record(3, payload(CONTEXT, struct.pack("<i", 3) + b"\1"))
    yield OPENED + record(3, payload(CONTEXT | {"messages": 0}, struct.pack("<i", 3) + b"\2"))
    yield OPENED + record(3, payload(CONTEXT | {"tokens": 0}))
    bad_fork = {"start": [0, 2, 2**31 - 1], "parent": [1, -1], "branch": [0, 2]}
    yield from each(OPENED, 2, FORK, b"", **bad_fork)
    forked = OPENED + record(2, payload(FORK | {"tokens": 1}, struct.pack("<i", 3) + b"\2"))
    yield forked + record(2, payload(FORK | {"branch": 2, "parent": 1}))


@pytest.mark.parametrize("data", list(hostile()))
def test_a_whole_record_with_invalid_content_is_refused(data: bytes) -> None:
    with pytest.raises(TrajectoryError, match=r"record \d+ at byte \d+ is invalid"):
        from_bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.integers(0, 255))
def test_any_bytes_give_a_trajectory_or_an_error(data: bytes, fitting: bool, kind: int) -> None:
    for front in (b"", MAGIC, FRONT, OPENED):
        try:
            loaded = from_bytes(front + (record(kind % 6, data) if fitting else data))
        except TrajectoryError:
            continue
        check_trajectory(loaded.trajectory)


def test_a_huge_length_and_zeros_are_a_cut_and_cost_nothing() -> None:
    heads = [struct.pack("<QB", length, 3) for length in (2**63, 2**64 - 1, 2**40)]
    for tail in (*(head + struct.pack("<I", zlib.crc32(head)) + b"abc" for head in heads), bytes(4096)):
        loaded = from_bytes(OPENED + tail)
        assert (loaded.truncated, loaded.trajectory.num_writes, loaded.good_bytes) == (True, 1, len(OPENED))
