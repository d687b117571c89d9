"""Which call goes on from which: forks extend, breaks are breaks, and the tree finds what comparing with all finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrace.diagnose.records import Call, Rollout
from tokentrace.diagnose.rollouts import CheckedRollout, Relation, check_rollout


def looked_at(*calls: tuple[list[int], list[int]]) -> CheckedRollout:
    made = [
        Call(np.asarray(prompt + done, np.int32), len(prompt), f"call {at}") for at, (prompt, done) in enumerate(calls)
    ]
    return check_rollout(Rollout("r", "here", made))


FIRST = ([1, 2], [3, 4])
SECOND = ([1, 2, 3, 4, 5], [6, 7])
LATER = {
    "a fork": ([1, 2, 3, 4, 8], Relation.EXTENDS),
    "a fork of the stream alone": ([1, 2, 3, 4], Relation.EXTENDS),
    "a fork that shares more": ([1, 2, 3, 4, 5, 5], Relation.BREAKS),  # what was sampled after 5 is another token here
    "the same prompt": ([1, 2, 3, 4, 5], Relation.REPEATS),
    "the tip": ([1, 2, 3, 4, 5, 6, 7, 8], Relation.EXTENDS),
    "what was sampled is other tokens": ([1, 2, 3, 4, 5, 6, 9, 8], Relation.BREAKS),
    "the prompt of an answer was rewritten": ([1, 2, 3, 4, 8, 6, 7, 9], Relation.BREAKS),
    "the first answer is other tokens": ([1, 2, 3, 9, 5], Relation.BREAKS),
}


@pytest.mark.parametrize("name", LATER)
def test_a_prompt_that_begins_with_an_earlier_stream_extends_it(name: str) -> None:
    prompt, step = LATER[name]
    found = looked_at(FIRST, SECOND, (prompt, [9, 9]))
    assert found.steps == [Relation.FIRST, Relation.EXTENDS, step]
    assert len(found.tips) == (1 if name == "the tip" else 2)
    assert len(found.breaks) == (step is Relation.BREAKS)


def test_a_fork_counts_shared_tokens_once_and_keeps_what_was_sampled() -> None:
    found = looked_at(FIRST, SECOND, ([1, 2, 3, 4, 8], [9, 9]), ([1, 2, 3, 4, 8, 9, 9, 1], [2]))
    assert found.steps == [Relation.FIRST, Relation.EXTENDS, Relation.EXTENDS, Relation.EXTENDS]
    assert (found.tokens, [len(tip.stream) for tip in found.tips]) == (7 + 5, [7, 9])
    assert found.tips[1].sampled.tolist() == [False, False, True, True, False, True, True, False, True]


@given(st.permutations(range(6)))
def test_calls_whose_order_nobody_knows_are_taken_as_their_prompts_go_on(order: list[int]) -> None:
    """A chain of four calls, a fork of its second, and a second answer to its third prompt."""
    chain = [FIRST, SECOND, ([1, 2, 3, 4, 5, 6, 7, 8], [9]), ([1, 2, 3, 4, 5, 6, 7, 8, 9, 5], [6])]
    made = [*chain, ([1, 2, 3, 4, 5, 6, 7, 5], [5]), ([1, 2, 3, 4, 5, 6, 7, 8], [2])]
    calls = [Call(np.asarray(prompt + done, np.int32), len(prompt), f"{at}") for at, (prompt, done) in enumerate(made)]
    shuffled = Rollout("r", "here", [calls[at] for at in order], ordered=False)
    found = check_rollout(shuffled)
    assert not found.breaks
    assert (len(found.tips), found.steps.count(Relation.FIRST)) == (3, 1)


def test_a_break_is_the_same_whatever_the_order_of_lines() -> None:
    other = ([1, 2, 3, 9, 5], [6, 7])
    for calls in ([FIRST, other], [other, FIRST]):
        made = [Call(np.asarray(prompt + done, np.int32), len(prompt), "") for prompt, done in calls]
        (found,) = check_rollout(Rollout("r", "here", made, ordered=False)).breaks
        assert (found.position, found.stream_length) == (3, 4)
        assert "call 2" in found.where
