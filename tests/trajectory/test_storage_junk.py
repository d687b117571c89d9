"""Bytes that are no trajectory are refused by name, whatever they are."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory.checker import check_trajectory
from tests.trajectory.stored import payload, record, small
from tokentrace.errors import TrajectoryError
from tokentrace.trajectory import (
    from_bytes,
    to_bytes,
)
from tokentrace.trajectory.storage import MAGIC, VERSION, RecordType


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
FRONT = MAGIC + struct.pack("<I", VERSION) + record(RecordType.HEADER, payload(HEADER))
BEGUN = FRONT + record(RecordType.OPEN, payload(OPEN, OPEN_ARRAYS))


def test_the_parts_of_hostile_files_are_fine_by_themselves() -> None:
    turn = record(RecordType.COMPLETION, payload(TURN, struct.pack("<if", 3, -1.0)))
    fork = record(RecordType.OPEN, payload(FORK))
    context = record(RecordType.CONTEXT, payload(CONTEXT, struct.pack("<i", 3) + b"\2"))
    assert from_bytes(BEGUN + fork + turn).trajectory.num_writes == 3
    assert from_bytes(BEGUN + context).trajectory.num_writes == 2
    told = from_bytes(BEGUN + record(RecordType.COMPLETION, payload(TURN | {"channels": [EXPERTS]}, TOLD)))
    assert told.trajectory.channels()["experts"].entries() == [None, None, 258]
    told = from_bytes(BEGUN + turn + record(RecordType.REWARD, payload({"write": 1, "reward": 3})))
    assert told.trajectory.turns()[0].reward == 3.0


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
        check_trajectory(loaded.trajectory)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40])
def test_a_huge_length_is_a_cut_and_costs_nothing(length: int) -> None:
    head = struct.pack("<QB", length, 3)
    loaded = from_bytes(BEGUN + head + struct.pack("<I", zlib.crc32(head)) + b"abc")
    assert (loaded.truncated, loaded.trajectory.num_writes) == (True, 1)
