"""ms-swift: a rollout in its own type, and what its trainer puts in the place of the assistant's message."""

from __future__ import annotations

import pytest
from swift.infer_engine.protocol import RolloutOutput
from swift.rlhf_trainers.utils import replace_assistant_response_with_ids

from tests.integrations.rollouts import QUESTION, check_rows, pocket_rollout, random_tree
from tokentrace import Budget
from tokentrace.errors import SampleError
from tokentrace.integrations.trainers import check_swift_prompt, swift_output
from tokentrace.rollout import Rollout, Task
from tokentrace.rollout.ends import End


def test_a_rollout_is_one_turn_of_exact_ids() -> None:
    rollout = pocket_rollout()
    made = swift_output(rollout)
    assert isinstance(made, RolloutOutput)
    prompt = made.rollout_infos["prompt_ids"]
    [ids], [mask], [logprobs] = made.response_token_ids, made.response_loss_mask, made.rollout_logprobs
    zeros = [0] * len(prompt)
    check_rows(rollout.trajectory, [(0, prompt + ids, zeros + mask, zeros + logprobs)])
    assert made.rollout_infos["messages"] == [dict(message) for message in rollout.messages]
    assert made.rollout_infos["reward"] == float(rollout.turns)
    again = RolloutOutput.model_validate_json(made.model_dump_json())
    assert again.response_token_ids == made.response_token_ids, "swift's server sends it as JSON"


def test_the_trainer_puts_exactly_these_ids_and_this_mask_into_the_conversation() -> None:
    made = swift_output(pocket_rollout())
    messages = [dict(message) for message in made.messages]
    [*before, last] = replace_assistant_response_with_ids(messages, made.response_token_ids, made.response_loss_mask)
    assert before == QUESTION
    assert last["content"] == {"token_ids": made.response_token_ids[0], "loss_scale": made.response_loss_mask[0]}


def test_the_text_is_what_the_model_said() -> None:
    rollout = pocket_rollout(budget=Budget(turns=1))
    assert rollout.last["role"] == "tool"
    made = swift_output(rollout)
    assert made.messages[-1]["content"] == made.response.choices[0].message.content == rollout.answer


def test_another_prompt_than_the_model_saw_is_found() -> None:
    made = swift_output(pocket_rollout())
    whole = made.rollout_infos["prompt_ids"] + made.response_token_ids[0]
    check_swift_prompt(made, [*whole, 5])
    for at, part in ((0, "prompt"), (len(whole) - 1, "response")):
        other = list(whole)
        other[at] += 1
        with pytest.raises(SampleError, match=f"token {at}, in the {part}"):
            check_swift_prompt(made, other)
    with pytest.raises(SampleError, match="in the response"):
        check_swift_prompt(made, whole[:-1])


def test_what_swift_cannot_take_is_refused() -> None:
    tree = Rollout(Task(QUESTION, name="x"), random_tree(1), [], QUESTION, end=End.ANSWER)
    with pytest.raises(SampleError, match="takes one row"):
        swift_output(tree)
    tree.end = End.ENGINE
    with pytest.raises(SampleError, match="failed"):
        swift_output(tree)
