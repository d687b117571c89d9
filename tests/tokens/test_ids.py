"""A list of ids is checked all at once and a tuple item by item, with the same outcome."""

import enum
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokentrace.errors import InputError
from tokentrace.tokens.ids import check_ids


class Odd(enum.IntEnum):
    ONE = 1


IDS = st.integers(0, 2**31 - 1) | st.sampled_from([0, 105, 2**31 - 1])
ODD = st.sampled_from(
    [-1, 2**31, 2**63, -(2**31) - 1, True, None, 1.0, "i", b"iiiii", Odd.ONE, np.int64(7), [105], (), 1j]
)


def outcome(value: Any, vocab_size: int | None) -> tuple[Any, ...]:
    try:
        ids = check_ids(value, "ids", vocab_size=vocab_size)
    except InputError as error:
        return (str(error),)
    return (ids.dtype, ids.tolist())


@settings(deadline=None)
@given(
    st.lists(IDS, max_size=8)
    | st.lists(IDS | ODD, max_size=8)
    | ODD.map(lambda odd: [*[105] * 200, odd, *[105] * 100]),
    st.sampled_from([None, 106]),
)
def test_a_list_has_the_same_outcome_as_a_tuple(value: list[Any], vocab_size: int | None) -> None:
    assert outcome(value, vocab_size) == outcome(tuple(value), vocab_size)
