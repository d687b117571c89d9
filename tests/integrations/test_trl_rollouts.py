"""What `RolloutFunction` refuses and says, and what a batch of rows may hold; no trainer is needed for that."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.trl_config import Config
from tokentrace import Agent, InputError, Task, Trajectory, create_renderer
from tokentrace.engines import SamplingParams, ScriptedEngine
from tokentrace.errors import SampleError
from tokentrace.integrations.background import BackgroundLoop
from tokentrace.integrations.rows import FinishedRollout
from tokentrace.integrations.trl import Collator, RolloutFunction, rollout_reward, unless_failed
from tokentrace.pocket import POCKET
from tokentrace.samples.trajectories import trajectory_samples

PROMPT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    made = BackgroundLoop()
    yield made
    made.close()


def trainer(**settings: Any) -> Any:
    """What a rollout function reads of a trainer."""
    known = {"temperature": 1.0, "step": 0, "processes": 1, "rank": 0, "weights": 0, **settings}
    rewards = known.get("rewards", [rollout_reward])
    return SimpleNamespace(
        reward_funcs=rewards,
        reward_func_names=[reward.__name__ for reward in rewards],
        args=Config(**{one.name: known[one.name] for one in dataclasses.fields(Config) if one.name in known}),
        tools=known.get("tools"),
        state=SimpleNamespace(global_step=known["step"]),
        processing_class=SimpleNamespace(pad_token_id=4064),
        accelerator=SimpleNamespace(
            num_processes=known["processes"], process_index=known["rank"], unwrap_model=lambda model: model
        ),
        model=SimpleNamespace(state_dict=lambda: {"weights": known["weights"]}),
    )


class Recorded:
    """Runs nothing: every rollout is one that was recorded."""

    def __init__(self, *finished: FinishedRollout) -> None:
        self._left = list(finished)
        self.tasks: list[Task] = []
        self.seeds: list[int | None] = []

    async def run(self, task: Task, *, seed: int | None = None, **_: Any) -> FinishedRollout:
        self.tasks.append(task)
        self.seeds.append(seed)
        return self._left.pop(0)


def finished(
    *, branches: int = 1, sampled: bool = True, logprobs: Any = (-0.5, -0.25), **about: Any
) -> FinishedRollout:
    record = Trajectory(name="one", logprobs=logprobs is not None)
    record.begin([1, 2, 3], messages=1)
    for branch in range(branches if sampled else 0):
        if branch:
            record.branch([1, 2, 3 + branch], cause="compaction")
        record.append_completion([7, 8], logprobs, finish_reason="stop", **about)
    rows = trajectory_samples(record) if sampled else []
    return FinishedRollout(
        rows, PROMPT, 1, 1.0 if sampled else None, {"end": "answer" if sampled else "engine"}, ["it is down"]
    )


def test_a_rollout_of_which_nothing_was_sampled_carries_no_loss(loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished(sampled=False), finished()), weights_to=None, loop=loop)
    with pytest.warns(UserWarning, match="it is down"):
        rows = function([PROMPT, PROMPT], trainer())
    assert [rows[key][0] for key in ("prompt_ids", "completion_ids", "env_mask")] == [[4064], [4064], [0]]
    assert [rows[key][1] for key in ("prompt_ids", "completion_ids", "env_mask")] == [[1, 2, 3], [7, 8], [1, 1]]
    assert rows["logprobs"] == [[0.0], [-0.5, -0.25]]
    assert rollout_reward(**rows) == [None, 1.0]


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


async def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.25] * len(completion_ids)


def test_reward_functions_that_leave_out_what_failed_say_none_for_it(loop: BackgroundLoop) -> None:
    judged = dataclasses.replace(finished(), reward=None, metrics={"end": "failed"})
    function = RolloutFunction(Recorded(finished(), judged), weights_to=None, loop=loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = function([PROMPT, PROMPT], trainer(rewards=[rollout_reward, unless_failed(brief), unless_failed(slow)]))
    assert rollout_reward(**rows) == [1.0, None]
    assert unless_failed(brief)(**rows) == [0.5, None]
    assert asyncio.run(unless_failed(slow)(**rows)) == [0.25, None]
    assert unless_failed(brief).__name__ == "brief", "as TRL's logs call it"
    with pytest.raises(InputError, match="takes a reward function"):
        unless_failed("judge")  # type: ignore[arg-type]


def test_a_function_that_scores_what_failed_is_warned_of(loop: BackgroundLoop) -> None:
    for failed in (finished(sampled=False), dataclasses.replace(finished(), metrics={"end": "failed"})):
        function = RolloutFunction(Recorded(finished(), failed), weights_to=None, loop=loop)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function([PROMPT, PROMPT], trainer(rewards=[rollout_reward, brief]))
        (text,) = [str(one.message) for one in said if "nothing was sampled" not in str(one.message)]
        assert text.startswith("1 of 2 rollouts failed")
        assert "score them: brief; wrap them in unless_failed" in text


def test_several_rows_of_a_rollout_are_refused_unless_one_is_chosen(loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished(branches=2)), weights_to=None, loop=loop)
    with pytest.raises(SampleError, match="has 2 rows: its history was rewritten"):
        function([PROMPT], trainer())
    last = RolloutFunction(Recorded(finished(branches=2)), weights_to=None, loop=loop, one_of=lambda rows: rows[-1])
    assert last([PROMPT], trainer())["prompt_ids"] == [[1, 2, 4]]


def test_another_temperature_than_the_trainers_is_refused(loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished(sampling={"temperature": 0.5})), weights_to=None, loop=loop)
    with pytest.raises(SampleError, match=r"sampled at temperature 0\.5, and the trainer's is 1"):
        function([PROMPT], trainer())


@pytest.mark.parametrize("setting", [{"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_sampling_settings_of_the_trainer_are_refused(setting: dict[str, Any], loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished()), weights_to=None, loop=loop)
    with pytest.raises(InputError, match=rf"{next(iter(setting))} of the trainer's config"):
        function([PROMPT], trainer(**setting))
    with pytest.raises(InputError, match="TRL would run the tools of tools="):
        function([PROMPT], trainer(tools=[print]))


def test_missing_logprobs_are_refused(loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished(logprobs=None)), weights_to=None, loop=loop)
    with pytest.raises(SampleError, match="has no logprobs"):
        function([PROMPT], trainer())


class Told:
    """Takes weights and remembers them."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, int]] = []

    async def update_weights(self, weights: Any, /, *, version: int) -> None:
        self.told.append((dict(weights), version))

    async def close(self) -> None:
        self.told.append(("closed", -1))


def test_weights_are_sent_once_a_step_and_by_one_process() -> None:
    engine = Told()
    function = RolloutFunction(Recorded(*[finished() for _ in range(4)]), weights_to=engine)
    one = trainer()
    for step in (0, 0, 1):
        one.state.global_step = step
        function([PROMPT], one)
    with pytest.raises(InputError, match="one process"):
        function([PROMPT], trainer(step=2, processes=2))
    function.close()
    assert [version for _, version in engine.told] == [0, 1, -1]


def test_an_agent_that_fails_is_a_row_without_loss(loop: BackgroundLoop) -> None:
    """The engine refuses: nothing was sampled, and nothing is raised."""

    def script(*_: Any) -> list[int]:
        raise AssertionError("not asked")

    engine = ScriptedEngine(script)
    agent = Agent(engine, create_renderer(POCKET), sampling=SamplingParams(8), reward=lambda rollout: 1.0)
    function = RolloutFunction(agent, weights_to=None, loop=loop)
    with pytest.warns(UserWarning, match="nothing was sampled"):
        rows = function([[{"role": "user", "content": 7}]], trainer())
    assert rows["env_mask"] == [[0]]
    assert rollout_reward(**rows) == [None]


# -- batches


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input_ids": [1, 2]}, "neither labels nor loss_mask"),
        ({"input_ids": [1, 2], "labels": [-100]}, "2 ids, and 1 entries in labels"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "must not be shifted"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [0, 0]}, "do not agree"),
        ({"input_ids": [1, 2], "loss_mask": [0.0, 0.5]}, "must be 0 or 1"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "seq_lengths": [1, 1]}, "packed"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "logprobs": [-0.5]}, "logprobs has 1 entries"),
        (
            {"input_ids": [1, 2], "labels": [-100, 2], "logprobs": ["x", "y"]},
            "logprobs or advantages of a row are not numbers",
        ),
        ({"labels": [1, 2]}, "has no input_ids"),
        ({"input_ids": [1.7, 2], "labels": [-100, 2]}, r"input_ids\[0\] is 1.7"),
        ({"input_ids": [2**31, 2], "labels": [-100, 2]}, "not a token id"),
        ({"input_ids": [2**70, 2], "labels": [-100, 2]}, "larger than any token id"),
        ({"input_ids": [1, 2], "labels": [-100, None]}, r"labels\[1\] is None"),
        (5, "mapping of columns, not 5"),
    ],
)
def test_rows_that_would_train_something_else_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(SampleError, match=said):
        Collator(0)([row])
