"""Bytes that are no trajectory are refused by name, whatever they are."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory.checker import check_trajectory
from tests.trajectory.stored import payload, record, small
from tokentrace.errors import TrajectoryError
from tokentrace.trajectory import from_bytes, to_bytes
from tokentrace.trajectory.storage import MAGIC, VERSION


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
FRONT = MAGIC + struct.pack("<I", VERSION) + record(1, payload(HEADER))
BEGUN = FRONT + record(2, payload(OPEN, OPEN_ARRAYS))


def test_the_parts_of_hostile_files_are_fine_by_themselves() -> None:
    turn = record(4, payload(TURN, struct.pack("<if", 3, -1.0)))
    fork = record(2, payload(FORK))
    context = record(3, payload(CONTEXT, struct.pack("<i", 3) + b"\2"))
    assert from_bytes(BEGUN + fork + turn).trajectory.num_writes == 3
    assert from_bytes(BEGUN + context).trajectory.num_writes == 2
    told = from_bytes(BEGUN + record(4, payload(TURN | {"channels": [EXPERTS]}, TOLD)))
    assert told.trajectory.channels()["experts"].entries() == [None, None, 258]
    told = from_bytes(BEGUN + turn + record(5, payload({"write": 1, "reward": 3})))
    assert told.trajectory.turns()[0].reward == 3.0


def hostile() -> Iterator[bytes]:
    """Files of whole records that no trajectory could have written."""
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
    yield from each(BEGUN, 4, TURN, turn_arrays, **bad_turn)
    bad_rows = {"name": [3, ""], "bytes": [1, 3, -1], "dtype": ["<i4", "O", None, 2], "more": [1]}
    bad_rows["shape"] = [[2], [-1], ["a"], None]
    rows = [[EXPERTS | {name: value}] for name, values in bad_rows.items() for value in values]
    tables = [{}, [EXPERTS, EXPERTS], [EXPERTS, EXPERTS | {"name": "more"}], [None], *rows]
    yield from each(BEGUN, 4, TURN, TOLD, channels=tables)
    packed = [zlib.compress(text) for text in (b"[1,2]", b"{}", b"[NaN]", DEEP)]
    for data in (*packed, zlib.compress(b"[1]") + b"x", zlib.compress(b"[1]")[:-1]):
        table = [EXPERTS | {"dtype": None, "bytes": len(data)}]
        yield BEGUN + record(4, payload(TURN | {"channels": table}, TOLD[:8] + data))
    turned = BEGUN + record(4, payload(TURN, turn_arrays))
    reward = {"write": 1, "reward": 1.0}
    yield from each(turned, 5, reward, b"", write=[0, 2, -2, True], reward=["1", True])
    yield turned + record(5, payload({"write": 1}))
    yield turned + record(5, payload(reward, b"x"))
    for logprob in (1.0, float("nan"), float("-inf")):
        yield BEGUN + record(4, payload(TURN, struct.pack("<if", 3, logprob)))
    yield BEGUN + record(3, payload(CONTEXT, struct.pack("<i", 3) + b"\1"))
    yield BEGUN + record(3, payload(CONTEXT | {"messages": 0}, struct.pack("<i", 3) + b"\2"))
    yield BEGUN + record(3, payload(CONTEXT | {"tokens": 0}))
    bad_fork = {"start": [0, 2, 2**31 - 1], "parent": [1, -1], "branch": [0, 2]}
    yield from each(BEGUN, 2, FORK, b"", **bad_fork)
    forked = BEGUN + record(2, payload(FORK | {"tokens": 1}, struct.pack("<i", 3) + b"\2"))
    yield forked + record(2, payload(FORK | {"branch": 2, "parent": 1}))


@pytest.mark.parametrize("data", list(hostile()))
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
        check_trajectory(loaded.trajectory)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40])
def test_a_huge_length_is_a_cut_and_costs_nothing(length: int) -> None:
    head = struct.pack("<QB", length, 3)
    loaded = from_bytes(BEGUN + head + struct.pack("<I", zlib.crc32(head)) + b"abc")
    assert (loaded.truncated, loaded.trajectory.num_writes) == (True, 1)
