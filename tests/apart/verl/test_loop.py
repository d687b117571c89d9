"""verl's batch and its loss have the ids, masks and logprobs of the trajectory, element by element."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from tests.apart.verl.servers import JUDGE, Done, PocketServers, rollouts
from tokentrace import InputError, trajectory_samples
from tokentrace.integrations.verl import RolloutFailed, row_output
from tokentrace.pocket import POCKET
from tokentrace.rollout import End, Rollout
from tokentrace.trajectory.turns import LogprobKind

ONE = ["What is 17 * 23 + 4?"]


def streams(done: Done) -> list[tuple[int, Rollout, np.ndarray[Any, Any]]]:
    """Each row of the batch with its rollout, and the positions of the sampled tokens in its stream."""
    rows = [(at, done.seen[uid]) for at, uid in enumerate(done.batch.non_tensor_batch["uid"])]
    return [(at, rollout, np.flatnonzero(rollout.trajectory.loss_mask())) for at, rollout in rows]


def test_ids_masks_and_logprobs_of_the_batch_are_those_of_the_trajectory(done: Done) -> None:
    rows = done.batch.batch
    prompt_length = rows["prompts"].shape[1]
    assert len(done.seen) == len(rows) == 4
    assert max(rollout.turns for rollout in done.seen.values()) > 1, "no rollout has a tool's result in it"
    for at, rollout, sampled in streams(done):
        stream, first = rollout.trajectory.stream(), int(sampled[0])
        ids = rows["input_ids"][at][rows["attention_mask"][at].bool()].numpy()
        assert ids.tolist() == stream.tolist()
        assert rows["prompts"][at][prompt_length - first :].tolist() == stream[:first].tolist()
        assert rows["attention_mask"][at].sum() == len(stream)
        # the positions of the stream that carry loss, and their unchanged logprobs
        trained = np.flatnonzero(rows["response_mask"][at].numpy()) + first
        assert trained.tolist() == sampled.tolist()
        logprobs = rows["rollout_log_probs"][at].numpy()
        assert np.array_equal(logprobs[sampled - first], rollout.trajectory.logprobs()[sampled])
        assert not logprobs[rows["response_mask"][at].numpy() == 0].any()
        assert rows["position_ids"][at][prompt_length - first :][: len(stream)].tolist() == list(range(len(stream)))


def test_the_reward_is_on_the_last_sampled_token(done: Done) -> None:
    for at, rollout, _ in streams(done):
        scores = done.batch.batch["rm_scores"][at]
        (place,) = torch.nonzero(scores).flatten().tolist()
        assert scores[place] == pytest.approx(rollout.reward)
        assert done.batch.batch["response_mask"][at][place] == 1
        assert not done.batch.batch["response_mask"][at][place + 1 :].any()


def test_every_prompt_of_the_servers_is_a_prefix_of_the_stream(done: Done) -> None:
    prompts = [request["prompt_ids"] for request in done.servers.requests]
    trajectories = [rollout.trajectory.stream().tolist() for rollout in done.seen.values()]
    assert len(prompts) == sum(rollout.turns for rollout in done.seen.values())
    assert all(any(stream[: len(prompt)] == prompt for stream in trajectories) for prompt in prompts)
    by_session = {request["request_id"] for request in done.servers.requests}
    assert len(by_session) == len(done.seen), "a rollout's requests go to one server"


def scored(done: Done, input_ids: torch.Tensor) -> torch.Tensor:
    """The logprobs of the responses from transformers' model, computed like verl's actor."""
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32).eval()
    rows = done.batch.batch
    with torch.no_grad():
        logits = model(
            input_ids=input_ids, attention_mask=rows["attention_mask"], position_ids=rows["position_ids"]
        ).logits
    width = rows["responses"].shape[1]
    logprobs = logits[:, -width - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, input_ids[:, -width:, None]).squeeze(-1)


def test_importance_ratios_in_verls_loss_are_1_at_the_first_step(done: Done) -> None:
    rows, actor = done.batch.batch, omega_conf_to_dataclass(done.config.actor_rollout_ref.actor)
    mask, new, old = rows["response_mask"], scored(done, rows["input_ids"]), rows["rollout_log_probs"]
    value, metrics = get_policy_loss_fn("vanilla")(
        old_log_prob=old,
        log_prob=new,
        advantages=mask.float(),
        response_mask=mask,
        loss_agg_mode="token-mean",
        config=actor,
    )
    ratios = (new - old)[mask.bool()].exp()
    assert len(ratios) == sum(rollout.trajectory.num_sampled for rollout in done.seen.values())
    assert float((ratios - 1).abs().max()) < 1e-3
    assert float(value) == pytest.approx(-1.0, abs=1e-4)
    assert metrics["actor/pg_clipfrac"] == 0
    assert abs(metrics["actor/ppo_kl"]) < 1e-4
    # changing one id per response changes the ratios: the check above can fail
    other = rows["input_ids"].clone()
    other[:, rows["prompts"].shape[1] + 2] += 1
    assert float(((scored(done, other) - old)[mask.bool()].exp() - 1).abs().max()) > 0.1


def test_rows_for_verls_newer_trainer_are_the_same(done: Done) -> None:
    for at, rollout, sampled in streams(done):
        (sample,) = trajectory_samples(rollout.trajectory)
        fields = row_output(sample, reward_score=rollout.reward).as_dict()
        width = len(fields["responses"])
        assert torch.cat((fields["prompts"], fields["responses"])).tolist() == rollout.trajectory.stream().tolist()
        assert torch.equal(fields["response_mask"], done.batch.batch["response_mask"][at][:width])
        assert torch.equal(fields["rollout_log_probs"], done.batch.batch["rollout_log_probs"][at][:width])
        assert fields["rm_scores"][-1] == pytest.approx(rollout.reward)
        assert int(fields["response_mask"].sum()) == len(sampled)


def test_versions_turns_and_messages_are_in_the_batch(done: Done) -> None:
    rows = done.batch.non_tensor_batch
    for at, rollout, _ in streams(done):
        assert {span.version for turn in rollout.trajectory.turns() for span in turn.versions} == {done.servers.step}
        assert (rows["min_global_steps"][at], rows["max_global_steps"][at]) == (done.servers.step, done.servers.step)
        assert rows["__num_turns__"][at] == 2 * rollout.turns
        assert rows["extras"][at]["messages"] == rollout.messages
        assert rows["extras"][at]["end"] == "answer"
        assert {turn.logprobs_kind for turn in rollout.trajectory.turns()} == {LogprobKind.PROCESSED}


# -- limits


@pytest.mark.parametrize(
    ("room", "end", "fills"),
    [(9, End.LENGTH, True), (60, End.CONTEXT, False), (75, End.CONTEXT, True)],
    ids=["within the first turn", "no second turn", "within the second turn"],
)
def test_a_rollout_ends_when_verls_row_is_full(room: int, end: End, fills: bool, tmp_path: Path) -> None:
    done = asyncio.run(rollouts(tmp_path, ONE, f"data.max_response_length={room}"))
    ((_, rollout, sampled),) = streams(done)
    assert rollout.end is end
    response = rollout.trajectory.stream()[sampled[0] : sampled[-1] + 1]
    assert (len(response) == room) is fills
    assert done.batch.batch["responses"][0][: len(response)].tolist() == response.tolist()
    assert done.batch.batch["response_mask"][0].sum() == len(sampled)


# -- settings


def test_rows_select_tools(tmp_path: Path) -> None:
    done = asyncio.run(rollouts(tmp_path, ONE, extra_info=[{"index": 0, "tool_selection": np.array(["reverse"])}]))
    ((_, rollout, _),) = streams(done)
    assert [tool.name for tool in rollout.tools] == ["reverse"]
    with pytest.raises(InputError, match="there is no tool 'search'"):
        asyncio.run(rollouts(tmp_path, ONE, extra_info=[{"index": 0, "tool_selection": ["search"]}]))


VERL_TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from tokentrace.demo.calculator import calculate


class Calculator(BaseTool):
    async def create(self, instance_id=None, create_kwargs=None, **kwargs):
        self.given = create_kwargs
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(calculate(parameters["expression"]))), 0.25, {"calls": 1}
"""
VERL_FUNCTION = """
from verl.tools.function_tool import function_tool


@function_tool
def reverse(text: str) -> str:
    \"\"\"Write a text backwards.

    Args:
        text: What to write.
    \"\"\"
    return text[::-1]
"""
VERL_YAML = """
tools:
  - class_name: calculator_of_verl.Calculator
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calculator
        description: Evaluate an arithmetic expression.
        parameters: {type: object, properties: {expression: {type: string}}, required: [expression]}
"""


def test_tools_that_verl_loads_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calculator_of_verl.py").write_text(VERL_TOOL, encoding="utf-8")
    (tmp_path / "functions.py").write_text(VERL_FUNCTION, encoding="utf-8")
    (tmp_path / "verl_tools.yaml").write_text(VERL_YAML, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    turns = "actor_rollout_ref.rollout.multi_turn"
    done = asyncio.run(
        rollouts(
            tmp_path,
            ONE,
            f"{turns}.tool_config_path={tmp_path}/verl_tools.yaml",
            f"{turns}.function_tool_path={tmp_path}/functions.py",
            loop=f"tools_file: null\n{JUDGE}",
            tools_kwargs=[{"calculator": {"create_kwargs": {"ground_truth": "395"}}}],
        )
    )
    ((at, rollout, _),) = streams(done)
    assert [tool.name for tool in rollout.tools] == ["calculator", "reverse"]
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["395"]
    assert done.batch.non_tensor_batch["tool_rewards"][at] == [0.25]
    assert rollout.tools[0].tool.given == {"ground_truth": "395"}


# -- servers


@pytest.mark.parametrize(
    ("change", "problem"), [({"log_probs": None}, "returned no logprobs"), ({"stop_reason": "aborted"}, "with abort")]
)
def test_an_unusable_answer_fails_the_rollout(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    class Answers(PocketServers):
        async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
            return (await super().generate(request_id, **kwargs)).model_copy(update=change)

    with pytest.raises(RolloutFailed, match=problem):
        asyncio.run(rollouts(tmp_path, ONE, servers=Answers()))


def test_routed_experts_are_at_their_positions_in_the_batch(tmp_path: Path) -> None:
    class Experts(PocketServers):
        async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
            answer = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
            seen = np.array([*prompt_ids, *answer.token_ids][:-1], np.int16)  # the last id is sampled and never read
            return answer.model_copy(update={"routed_experts": np.stack([seen, seen + 1], 1)[:, None, :]})

    done = asyncio.run(rollouts(tmp_path, ONE, servers=Experts()))
    ((_, rollout, sampled),) = streams(done)
    rows = done.batch.batch
    assert rollout.turns > 1
    start = rows["prompts"].shape[1] - int(sampled[0])
    stream = torch.tensor(rollout.trajectory.stream()[:-1].tolist())
    experts = rows["routed_experts"][0].long()
    assert torch.equal(experts[start : start + len(stream), 0, 0], stream)
    assert torch.equal(experts[start : start + len(stream), 0, 1], stream + 1)
    assert not experts[start + len(stream) :].any()
