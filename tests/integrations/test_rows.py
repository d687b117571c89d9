"""Rows as prompt and response."""

from __future__ import annotations

import pytest

from tokentrace import Trajectory
from tokentrace.errors import SampleError
from tokentrace.integrations.rows import only_sample, prompt_response
from tokentrace.tokens.kinds import Kind


def test_response_goes_from_the_first_sampled_token_to_the_last() -> None:
    record = Trajectory(name="one")
    record.begin([1, 2, 3], messages=1)
    record.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    record.append_context([4, 5], [Kind.CONTEXT, Kind.CONTEXT], messages=1)
    record.append_completion([9], [-0.125], finish_reason="stop")
    record.append_context([6], [Kind.CONTEXT], messages=1)  # a tool result that nobody answered
    row = prompt_response(only_sample(record))
    assert row.prompt_ids == [1, 2, 3]
    assert row.response_ids == [7, 8, 4, 5, 9]
    assert row.response_mask == [1, 1, 0, 0, 1]
    assert row.response_logprobs == [-0.5, -0.25, 0.0, 0.0, -0.125]


def test_trajectory_without_a_completion_has_no_row() -> None:
    record = Trajectory(name="one")
    record.begin([1, 2, 3], messages=1)
    with pytest.raises(SampleError, match="one: nothing was sampled"):
        only_sample(record)
