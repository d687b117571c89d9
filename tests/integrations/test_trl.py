"""TRL's own trainers on pocket: the inputs of the loss equal the recorded data, element by element."""

import dataclasses
import itertools
import json
import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversation.test_shapes import JSON
from tests.integrations.trl_pocket import PROMPTS, QUIET, grpo, pocket_agent
from tests.lazy import lazy
from tokentrace import Agent, Budget, EmbeddedEngine, Task
from tokentrace.cli import main as cli
from tokentrace.data.conversations import without_nulls
from tokentrace.data.tables import read_samples
from tokentrace.integrations.rows import FinishedRollout
from tokentrace.integrations.trl import Collator, RolloutFunction, rollout_reward, unless_failed
from tokentrace.pocket import POCKET
from tokentrace.rollout import Rollout
from tokentrace.samples.sample import Sample

torch, trl, datasets = lazy("torch"), lazy("trl"), lazy("datasets")
async_grpo = lazy("trl.experimental.async_grpo")

pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDING = 1e-4
"""NumPy and torch sum in different orders: measured 2e-6 in float32 logprobs."""


class Run:
    """Two steps of GRPO on pocket, with their rollouts and reward inputs."""

    def __init__(self, folder: Path) -> None:
        self.finished: list[FinishedRollout] = []
        self.reward_inputs: list[dict[str, Any]] = []
        self.engine = EmbeddedEngine()
        rollouts = RolloutFunction(pocket_agent(self.engine), weights_to=self.engine, done=self.finished.extend, seed=3)
        self.trainer = grpo(folder, rollouts, [rollout_reward, self.see], learning_rate=1e-3)
        try:
            self.trainer.train()
        finally:
            rollouts.close()

    def see(self, **inputs: Any) -> list[float]:
        """A reward function that records its arguments."""
        self.reward_inputs.append(inputs)
        return [0.0] * len(inputs["prompts"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("grpo"))


def rows_in_loss(batch: dict[str, torch.Tensor]) -> Iterator[tuple[Any, ...]]:
    """Each row of a batch without its padding: prompt, completion, mask, logprobs of the engine."""
    for at in range(len(batch["prompt_ids"])):
        prompt, completion = batch["prompt_mask"][at].bool(), batch["completion_mask"][at].bool()
        yield (
            batch["prompt_ids"][at][prompt].tolist(),
            batch["completion_ids"][at][completion].tolist(),
            batch["tool_mask"][at][completion].tolist(),
            batch["sampling_per_token_logps"][at][completion].tolist(),
        )


def rows_recorded(samples: Sequence[Sample]) -> Iterator[tuple[Any, ...]]:
    for sample in samples:
        first = sample.completions[0].start
        logprobs = np.where(sample.mask, sample.logprobs, 0)[first:]
        ids, mask = sample.ids, sample.mask.astype(int)
        yield ids[:first].tolist(), ids[first:].tolist(), mask[first:].tolist(), logprobs.tolist()


def test_ids_masks_and_logprobs_in_the_loss_are_the_trajectorys(run: Run) -> None:
    assert len(run.trainer.batches) == 2
    for step, batch in enumerate(run.trainer.batches):
        finished = run.finished[4 * step : 4 * step + 4]
        recorded = sorted(rows_recorded([one.samples[0] for one in finished]))  # TRL shuffles the rows of a batch
        assert sorted(rows_in_loss(batch)) == recorded
        assert any(0 in mask for _, _, mask, _ in recorded), "no rollout called a tool"


def test_a_failed_rollout_is_left_out_and_a_second_run_has_the_new_weights(tmp_path: Path) -> None:
    """Two runs of one step. In each, the judge fails for one of four rollouts."""
    judged, sent = itertools.count(), []

    def judge(rollout: Rollout) -> float:
        number = next(judged) % 4
        if number == 0:
            raise RuntimeError("the judge is down")
        return float(2**number)

    @unless_failed
    def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [0.5] * len(completion_ids)

    class Engine(EmbeddedEngine):
        async def update_weights(self, weights: Any, /, *, version: int) -> None:
            sent.append({name: value.clone() for name, value in weights.items()})
            await super().update_weights(weights, version=version)

    engine, finished = Engine(), []
    agent = pocket_agent(engine, reward=judge, budget=Budget(turns=1, turn_tokens=4))
    rollouts = RolloutFunction(agent, weights_to=engine, done=finished.extend, seed=0)
    trainer = grpo(tmp_path, rollouts, [rollout_reward, brief], num_generations=4, max_steps=1, learning_rate=1e-2)
    for _ in range(2):
        trainer.train()
    rollouts.close()
    assert [one.failed for one in finished].count(True) == 2
    for batch in trainer.batches:
        assert (batch["advantages"] == 0).sum() == 1
        assert batch["advantages"].sum().item() == pytest.approx(0, abs=1e-5)
    first, second = sent
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_importance_ratios_are_one_before_each_step(run: Run) -> None:
    """Also before the second step: the engine has the weights of the first."""
    for step, batch in enumerate(run.trainer.batches):
        trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
        ratios = torch.exp(batch["logps"] - batch["sampling_per_token_logps"])[trained]
        assert len(ratios) > 50
        assert (ratios - 1).abs().max() < ROUNDING
        finished = run.finished[4 * step : 4 * step + 4]
        assert {span.version for one in finished for span in one.samples[0].versions} == {step}


def test_reward_functions_see_real_messages_and_the_agents_reward(run: Run) -> None:
    for step, inputs in enumerate(run.reward_inputs):
        finished = run.finished[4 * step : 4 * step + 4]
        assert inputs["rollout"] == finished
        assert inputs["messages"] == [one.messages for one in finished]
        assert all(messages[2]["role"] == "tool" for messages in inputs["messages"])
        logged = run.trainer.state.log_history[step]["rewards/rollout_reward/mean"]
        assert logged == pytest.approx(np.mean([one.reward for one in finished]))


# -- AsyncGRPO


def varlen_attention(q: Any, k: Any, v: Any, q_ends: Any, k_ends: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """A CPU version of the kernel that TRL fetches: causal attention within each sequence."""
    outputs = []
    groups = q.shape[1] // k.shape[1]
    for at in range(len(q_ends) - 1):
        rows = q[q_ends[at] : q_ends[at + 1]].transpose(0, 1)
        keys, values = (one[k_ends[at] : k_ends[at + 1]].repeat_interleave(groups, 1).transpose(0, 1) for one in (k, v))
        later = torch.ones(rows.shape[1], keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - rows.shape[1] + 1)
        scores = (rows @ keys.transpose(1, 2) * softmax_scale).masked_fill(later, float("-inf"))
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


class Forgetful:
    """Runs each rollout twice and joins both in one trajectory, as if the history had been rewritten."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def run(self, task: Task, *, seed: int | None = None, patience: Any = None) -> Rollout:
        rollout = await self.agent.run(task, seed=seed, patience=patience)
        again = await self.agent.run(
            dataclasses.replace(task, messages=[*task.messages, {"role": "user", "content": "Go on."}]), seed=seed
        )
        record, other = rollout.trajectory, again.trajectory
        first = other.turns(0)[0]
        record.branch(other.stream()[: first.start], cause="compaction")
        record.append_completion(
            first.tokens.ids,
            other.logprobs()[first.start : first.stop],
            finish_reason=first.finish_reason,
            version=first.versions,
            sampling=first.sampling,
            logprobs_kind=first.logprobs_kind,
        )
        return rollout


def test_async_grpo_trains_all_branches_with_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of TRL's trainer, with stand-ins for what needs a GPU: the attention kernel and the device name."""
    kernel = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: kernel)
    monkeypatch.setattr("trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None)
    seen: list[dict[str, Any]] = []
    queued: list[Any] = []
    groups: list[Sequence[FinishedRollout]] = []

    class Hooked(async_grpo.AsyncGRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            seen.append({name: value.clone() for name, value in inputs.items()})
            return super().compute_loss(model, inputs, *args, **more)

    engine = EmbeddedEngine()
    worker = lazy("tokentrace.integrations.trl_async").RolloutWorker(
        Forgetful(pocket_agent(engine, budget=Budget(turns=2, turn_tokens=48))),
        [Task(prompt) for prompt in PROMPTS],
        weights_to=engine,
        num_generations=2,
        groups=1,
        waiting=4,
        seed=0,
        done=groups.append,
    )
    put = worker.rollout_buffer.put
    worker.rollout_buffer.put = lambda one: (queued.append(one), put(one))  # type: ignore[method-assign, assignment]
    config = async_grpo.AsyncGRPOConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=4, num_generations=2, token_budget=0, **QUIET
    )
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = Hooked(str(POCKET), args=config, train_dataset=data, rollout_worker=worker, weight_transfer=worker)
    trainer.train()

    assert len(seen) == 2
    assert trainer.state.log_history[0]["rollout/rows"] == 2.0
    for step, batch in enumerate(seen):
        trained = queued[4 * step : 4 * step + 4]
        rows = [row for one in groups[step] for row in one.samples]
        assert [sample.group_id for sample in trained] == [step] * 4
        for number, (sample, row) in enumerate(zip(trained, rows, strict=True)):
            np.testing.assert_array_equal(sample.input_ids, row.ids)
            np.testing.assert_array_equal(sample.completion_mask, row.mask)
            terms = (batch["segment_id"][0] == number) & (batch["token_index"][0] >= 0)
            places = batch["token_index"][0][terms]
            np.testing.assert_array_equal(batch["shift_labels"][0][places], row.ids[row.mask])
            np.testing.assert_array_equal(batch["old_log_probs"][0][terms], row.logprobs[row.mask])
            assert sample.model_version == min(span.version for span in row.versions)
    assert queued[0].model_version == 1  # TRL's first weights have version 1
    ratios = [log["ratio"] for log in trainer.state.log_history if "ratio" in log]
    assert abs(ratios[0] - 1) < ROUNDING


@pytest.mark.long
def test_the_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[2] / "examples" / "trl" / "grpo_pocket.py"
    monkeypatch.setattr("sys.argv", [script.name, "--steps=1", "--rollouts=8", f"--output={tmp_path / 'out'}"])
    runpy.run_path(str(script), run_name="__main__")
    steps = re.findall(r"^step +(\d+)  reward (0\.\d+)  tokens (\d+\.\d)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _, _ in steps] == [1]
    for _, reward, tokens in steps:  # equal if all answers were right
        assert 0 < float(reward) <= 1 - float(tokens) / 100 + 1e-3
    assert (tmp_path / "out" / "model.safetensors").exists()


# -- SFT


CONVERSATIONS = [
    [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "reasoning_content": "Easy.", "content": "4"},
        {"role": "user", "content": "And 3 + 3? " * (1 + at)},
        {"role": "assistant", "content": "It is 6. " * (1 + 2 * at)},
    ]
    for at in range(4)
]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with the command's default settings."""
    folder = tmp_path_factory.mktemp("sft")
    chats = "".join(json.dumps({"messages": messages}) + "\n" for messages in CONVERSATIONS)
    (folder / "chats.jsonl").write_text(chats, encoding="utf-8")
    command = ["tokenize", str(folder / "chats.jsonl"), "-o", str(folder / "rows.parquet"), "--tokenizer", str(POCKET)]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    return folder / "rows.parquet"


def sft_inputs(
    parquet: Path, folder: Path, data_collator: Any = None, *, trains: bool = False, **settings: Any
) -> list[Any]:
    """The inputs of the loss in an epoch of SFTTrainer; the loss is computed only with `trains`."""
    seen: list[dict[str, Any]] = []

    class Hooked(trl.SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            seen.append(dict(inputs))
            loss: Any = super().compute_loss(model, inputs, *args, **more) if trains else model.lm_head.weight.sum() * 0
            return loss

    config = trl.SFTConfig(
        str(folder), num_train_epochs=1, per_device_train_batch_size=4, **{**QUIET, "logging_steps": 100, **settings}
    )
    rows = datasets.load_dataset("parquet", data_files=str(parquet), split="train", cache_dir=str(folder / "cache"))
    Hooked(str(POCKET), args=config, train_dataset=rows, data_collator=data_collator).train()
    return seen


def documents(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """The ids and labels of each document in a padded or packed batch."""
    if "attention_mask" in batch:
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True):
            yield ids[mask].tolist(), labels[mask].tolist()
        return
    for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
        starts = (positions == 0).nonzero().flatten().tolist()
        for start, stop in itertools.pairwise([*starts, len(ids)]):
            yield ids[start:stop].tolist(), labels[start:stop].tolist()


def expected(parquet: Path, longest: int | None = None) -> list[tuple[list[int], list[int]]]:
    """The ids and the labels of each row."""
    rows = [(sample.ids[:longest], sample.mask[:longest]) for sample in read_samples(parquet)]
    assert all(0 < mask.sum() < len(mask) for _, mask in rows)
    return sorted((ids.tolist(), np.where(mask, ids, -100).tolist()) for ids, mask in rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"trains": True},
        {"padding_free": True, "max_length": None},
        {"packing": True, "max_length": 256},
        {"data_collator": Collator(4064)},
        {"max_length": 48},  # ids and labels are cut together
    ],
    ids=["padded", "padding-free", "packed", "our collator", "cut"],
)
def test_sft_trains_exactly_the_assistants_tokens(parquet: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    trained = [one for batch in sft_inputs(parquet, tmp_path, **settings) for one in documents(batch)]
    assert sorted(trained) == expected(parquet, settings.get("max_length"))
    assert trl.SFTConfig(str(tmp_path), **QUIET).max_length == 1024, "as the guide says"


def test_collator_matches_trls_collator(parquet: Path) -> None:
    rows = datasets.load_dataset("parquet", data_files=str(parquet), split="train").to_list()
    theirs = lazy("trl.trainer.sft_trainer").DataCollatorForLanguageModeling(
        4064, return_position_ids=True, pad_to_multiple_of=8
    )([{name: row[name] for name in ("input_ids", "labels")} for row in rows])
    ours = Collator(4064, multiple_of=8)(rows)
    assert {name: value.tolist() for name, value in ours.items()} == {
        name: value.tolist() for name, value in theirs.items()
    }


@given(value=st.lists(JSON) | st.dictionaries(st.text(max_size=3), JSON))
@settings(deadline=None)
def test_nulls_are_dropped_as_trl_drops_them(value: Any) -> None:
    assert repr(without_nulls(value)) == repr(lazy("trl.trainer.utils").remove_none_values(value))
