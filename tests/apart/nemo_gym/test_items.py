"""NeMo Gym's items, which NeMo RL trains on, have the ids, mask and logprobs of the trajectory."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nemo_gym.openai_utils import (
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessageForTraining,
)
from nemo_gym.token_id_capture import (
    CaptureContext,
    assert_prefix_contiguity,
    capture_tokens,
    project_chain_to_output_items,
    reset_token_sink,
    run_builder,
    set_token_sink,
    trajectories_from_source,
)
from pydantic import TypeAdapter

from tests.apart.shared import pocket_rollout
from tests.guides import run_guide
from tokentrace import Trajectory, trajectory_samples
from tokentrace.engines import EmbeddedEngine
from tokentrace.errors import SampleError, TrajectoryError
from tokentrace.integrations.nemo_gym import TokenStore
from tokentrace.integrations.nemo_items import captured_trajectory, chat_messages, output_items
from tokentrace.rollout import BaseInteraction, Rollout
from tokentrace.tokens.kinds import Kind

ITEM: TypeAdapter[Any] = TypeAdapter(NeMoGymResponseOutputItem)


class AsksOnce(BaseInteraction):
    """A user with a second question."""

    name = "asks once"

    async def generate_response(self, instance_id: str, messages: Any) -> Any:
        questions = sum(message["role"] == "user" for message in messages)
        return None if questions > 1 else "And what is 8 * 9?"


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """A rollout with calls, results and a second question, on the embedded model."""

    engine = EmbeddedEngine(seed=1)
    result = pocket_rollout(engine, engine.close, interaction=AsksOnce())
    assert result.turns >= 3
    assert {"tool", "user"} <= {message["role"] for message in result.messages[1:]}
    return result


def as_nemo_rl_reads(items: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """Ids, mask and logprobs by NeMo RL's rule (`_postprocess_nemo_gym_to_nemo_rl_result`, then its GRPO masks).
    It reads the items with generated ids in order. Each prompt must begin with all previous ids; new prompt ids have no
    loss and logprob 0.0, and generated ids have loss and their logprobs."""
    seen: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in items:
        if not item.get("generation_token_ids"):
            continue
        prompt, generated = item["prompt_token_ids"], item["generation_token_ids"]
        assert prompt[: len(seen)] == seen, "Non-contiguous messages found!"
        new = prompt[len(seen) :]
        assert new, "a message without ids would be a float tensor there"
        seen += new + generated
        mask += [0] * len(new) + [1] * len(generated)
        logprobs += [0.0] * len(new) + item["generation_log_probs"]
    return seen, mask, logprobs


def assert_is_the_row(items: list[dict[str, Any]], trajectory: Trajectory, branch: int = 0) -> None:
    row = trajectory_samples(trajectory)[branch]
    ids, mask, logprobs = as_nemo_rl_reads(items)
    assert ids == row.ids.tolist()[: len(ids)]
    assert not row.mask[len(ids) :].any()
    assert mask == row.mask[: len(ids)].astype(int).tolist()
    assert row.logprobs is not None
    trained = row.mask[: len(ids)]
    np.testing.assert_array_equal(np.float32(logprobs)[trained], row.logprobs[: len(ids)][trained])
    assert not np.array(logprobs)[~trained].any()


def test_items_are_nemo_gyms_and_carry_the_row(rollout: Rollout) -> None:
    items = output_items(rollout.trajectory, rollout.messages)
    parsed = [ITEM.validate_python(item) for item in items]
    generated = [one for one in parsed if hasattr(one, "generation_token_ids")]
    assert len(generated) == rollout.turns
    for_training = (NeMoGymResponseFunctionToolCallForTraining, NeMoGymResponseOutputMessageForTraining)
    assert all(isinstance(one, for_training) for one in generated)
    assert_prefix_contiguity({"output": items})
    assert_is_the_row([one.model_dump() for one in parsed], rollout.trajectory)
    outputs = [item["output"] for item in items if item["type"] == "function_call_output"]
    assert outputs == [message["content"] for message in rollout.messages if message["role"] == "tool"]


def test_chat_messages_carry_the_row(rollout: Rollout) -> None:
    messages = chat_messages(rollout.trajectory, rollout.messages)
    for message in messages:
        if message["role"] == "assistant":
            NeMoGymChatCompletionMessageForTraining.model_validate(message)
    assert_is_the_row(messages, rollout.trajectory)
    assert [message["content"] for message in messages] == [message.get("content") for message in rollout.messages]


async def captured(rollout: Rollout, place: str, deltas: bool) -> tuple[dict[str, Any], Trajectory]:
    """Send the turns of a rollout through NeMo Gym's capture into our store. Returns what NeMo Gym builds of them for
    a trainer, and the trajectory of its records."""
    store = TokenStore(place)
    history: list[dict[str, Any]] = [dict(rollout.task.messages[0])]
    output: list[dict[str, Any]] = []
    for item in output_items(rollout.trajectory, rollout.messages):
        if item["type"] == "function_call_output" or item.get("role") == "user":
            history.append(item)
            continue
        output.append(item)
        if "prompt_token_ids" not in item:
            continue
        number = f"call-{len(history)}"
        token = set_token_sink(CaptureContext("one", number, store, store, delta_records=deltas))
        try:
            await capture_tokens({"id": number, "output": output}, history)
        finally:
            reset_token_sink(token)
        history = [*history, *output]
        output = []
    built = await trajectories_from_source("one", store)
    snapshot = await store.freeze("one")
    await store.close()
    assert built is not None
    assert not snapshot.incomplete
    return built, captured_trajectory(snapshot.entries, name="one")


@pytest.mark.parametrize("deltas", [False, True], ids=["whole prompts", "delta records"])
def test_captures_in_our_store_equal_the_trajectory(rollout: Rollout, deltas: bool, tmp_path: Path) -> None:
    built, restored = asyncio.run(captured(rollout, str(tmp_path / "captures.db"), deltas))
    assert not built.get("mask_sample")
    assert_is_the_row(built["rebuilt_response"]["output"], rollout.trajectory)
    assert_prefix_contiguity(built["rebuilt_response"])
    length = len(restored.stream())
    assert restored.stream().tolist() == rollout.trajectory.stream()[:length].tolist()
    np.testing.assert_array_equal(restored.loss_mask(), rollout.trajectory.loss_mask()[:length])
    np.testing.assert_array_equal(restored.logprobs(), rollout.trajectory.logprobs()[:length])
    assert not rollout.trajectory.loss_mask()[length:].any()


def rewritten() -> Trajectory:
    """Two branches: the second answer is sampled from a history in which the first is rewritten."""
    trajectory = Trajectory()
    trajectory.begin([1, 2], messages=1)
    trajectory.append_completion([3, 4], [-0.5, -0.25], finish_reason="stop")
    trajectory.append_context([5], Kind.CONTEXT, messages=1)
    trajectory.append_completion([6], [-1.0], finish_reason="stop")
    trajectory.branch([1, 2, 9, 5], messages=3)
    trajectory.append_completion([7, 8], [-2.0, -3.0], finish_reason="stop")
    return trajectory


TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d", "reasoning_content": "r"},
]


def test_every_branch_is_a_separate_response() -> None:
    trajectory = rewritten()
    with pytest.raises(SampleError, match="2 rows"):
        output_items(trajectory, TALK)
    for branch in (0, 1):
        items = output_items(trajectory, TALK, branch=branch)
        assert_is_the_row(items, trajectory, branch)
        assert [item["type"] for item in items][-2:] == ["reasoning", "message"]


def test_branches_and_retries_are_restored_from_captured_records() -> None:
    from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

    def call(id: str, prompt: list[int], generated: list[int], parent: str | None = None) -> TokenEntry:
        entry = TokenEntry(
            rollout_id="one",
            model_call_id=id,
            prompt_token_ids=prompt,
            generation_token_ids=generated,
            generation_log_probs=[-0.5] * len(generated),
        )
        status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
        return stamp_lineage(entry, parent, parent_resolution=status)

    first, retry = call("a", [1, 2], [3]), call("b", [1, 2], [4])
    second = call("c", [1, 2, 4, 5], [6], "b")
    silent = call("d", [1, 2, 4, 5, 6, 7], [])
    trajectory = captured_trajectory([silent, second, retry, first])
    assert [trajectory.stream(one.index).tolist() for one in trajectory.branches] == [[1, 2, 3], [1, 2, 4, 5, 6]]
    assert [trajectory.loss_mask(one.index).tolist() for one in trajectory.branches] == [
        [False, False, True],
        [False, False, True, False, True],
    ]
    chain = next(chain for chain in run_builder([first, retry, second]).chains)
    ids, mask, _ = as_nemo_rl_reads(project_chain_to_output_items(chain))
    assert (ids, mask) == (trajectory.stream(1).tolist(), trajectory.loss_mask(1).astype(int).tolist())
    on = call("e", [1, 2, 4, 5, 6], [8], "c")
    continued = captured_trajectory([first, retry, second, on])
    assert continued.stream(1).tolist() == [1, 2, 4, 5, 6, 8]
    assert continued.loss_mask(1).tolist() == [False, False, True, False, True, True]
    assert continued.turns(1)[-1].continues
    torn = second.model_copy(update={"prompt_token_ids": [5], "prompt_is_delta": True})
    assert captured_trajectory([first, retry, torn]).stream(1).tolist() == [1, 2, 4, 5, 6]
    with pytest.raises(TrajectoryError, match=r"'c'.*missing"):
        captured_trajectory([first, torn])


def test_the_guide_runs(tmp_path: Path) -> None:
    run_guide("nemo", tmp_path)
