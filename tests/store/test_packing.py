"""What is kept of a turn comes back byte for byte, and what was damaged is an error and no other turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrace.store.packing import pack, pack_records, unpack, unpack_records
from tokentrace.store.store import StoreError

PIECES = st.binary(max_size=300) | st.binary(max_size=20).map(lambda piece: piece * 50)


@given(PIECES)
def test_bytes_come_back(data: bytes) -> None:
    assert unpack(pack(data)) == data
    assert len(pack(data)) <= len(data) + 1


@given(st.lists(PIECES, max_size=6))
def test_records_come_back(records: list[bytes]) -> None:
    assert unpack_records(pack_records(records)) == tuple(records)


def test_what_repeats_is_made_small() -> None:
    assert len(pack(b"the same words " * 1000)) < 300


@given(st.lists(PIECES, min_size=1, max_size=3), st.data())
def test_a_record_that_lost_its_end_is_an_error(records: list[bytes], data: st.DataObject) -> None:
    packed = pack_records(records)
    with pytest.raises(StoreError, match="damaged"):
        unpack_records(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_bytes_of_an_unknown_form_are_an_error() -> None:
    with pytest.raises(StoreError, match="it begins with b'x'"):
        unpack(b"xyz")
