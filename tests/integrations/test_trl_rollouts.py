"""What `RolloutFunction` refuses and says, and what a batch of rows may hold; no trainer is needed for that."""

from __future__ import annotations

import asyncio
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.trl_config import trainer
from tokentrace import Agent, InputError, Task, Trajectory, create_renderer
from tokentrace.engines import SamplingParams, ScriptedEngine
from tokentrace.errors import SampleError
from tokentrace.integrations.rows import FinishedRollout
from tokentrace.integrations.trl import BackgroundLoop, Collator, RolloutFunction, rollout_reward, unless_failed
from tokentrace.pocket import POCKET
from tokentrace.samples.trajectories import trajectory_samples

PROMPT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    made = BackgroundLoop()
    yield made
    made.close()


class Recorded:
    """Runs nothing: every rollout is one that was recorded."""

    def __init__(self, *finished: FinishedRollout) -> None:
        self._left = list(finished)

    async def run(self, task: Task, **_: Any) -> FinishedRollout:
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


@pytest.mark.parametrize(
    ("rollout", "settings", "error", "problem"),
    [
        ({"branches": 2}, {}, SampleError, "has 2 rows: its history was rewritten"),
        ({"sampling": {"temperature": 0.5}}, {}, SampleError, r"at temperature 0\.5, and the trainer's is 1"),
        ({"logprobs": None}, {}, SampleError, "has no logprobs"),
        ({}, {"tools": [print]}, InputError, "TRL would run the tools of tools="),
        *(
            ({}, {name: value}, InputError, f"{name} of the trainer's config")
            for name, value in {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}.items()
        ),
    ],
)
def test_what_would_train_something_else_is_refused(
    rollout: dict[str, Any], settings: dict[str, Any], error: Any, problem: str, loop: BackgroundLoop
) -> None:
    function = RolloutFunction(Recorded(finished(**rollout)), weights_to=None, loop=loop)
    with pytest.raises(error, match=problem):
        function([PROMPT], trainer(**settings))


def test_one_of_several_rows_can_be_chosen(loop: BackgroundLoop) -> None:
    last = RolloutFunction(Recorded(finished(branches=2)), weights_to=None, loop=loop, one_of=lambda rows: rows[-1])
    assert last([PROMPT], trainer())["prompt_ids"] == [[1, 2, 4]]


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
