"""Names, limits and rewards: no two rollouts share an instance, nothing hangs for ever, what failed has no reward."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.faults import Fault
from tests.rollout.support import ANSWER, CALL, QUESTION, RENDERER, TASK, Turns, agent, look, run
from tests.trajectory.model import check_trajectory
from tokentrace import InputError
from tokentrace.rollout.batch import grouped, run_rollouts
from tokentrace.rollout.ends import FAILED_ENDS
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.store import RolloutStore, group_advantages
from tokentrace.rollout.tools import BaseTool, FunctionTool, function_schema

# -- names


class Table(BaseTool):
    """Remembers a value of each instance."""

    def __init__(self) -> None:
        super().__init__(tool_schema=function_schema(look))
        self.values: dict[str, Any] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        assert instance_id not in self.values, "two trajectories share an instance"
        self.values[instance_id] = kwargs["value"]

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return f"{self.values[instance_id]}"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.values[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.values[instance_id]


def valued(count: int, name: str = "") -> list[Task]:
    return [Task(QUESTION, name=name, tool_settings={"look": {"value": number}}) for number in range(count)]


@pytest.mark.parametrize("name", ["", "same"])
def test_rollouts_of_one_name_that_are_under_way_together_are_told_apart(name: str) -> None:
    """A group made by hand: the same task many times over, or tasks without names."""
    one = agent(CALL, ANSWER, tools=[Table()])

    async def go() -> list[Rollout]:
        return await asyncio.gather(*(one.run(task) for task in valued(8, name)))

    rollouts = asyncio.run(go())
    assert [rollout.reward for rollout in rollouts] == list(range(8))
    assert len({rollout.instance for rollout in rollouts}) == 8
    assert len(one.engine.counts) == 8  # what the engine is told, too
    again = asyncio.run(one.run(valued(1, "same")[0]))
    assert again.instance == "same", "a name is free again when its rollout is over"


def test_a_name_that_is_there_twice_is_refused_before_anything_runs() -> None:
    one = agent()
    tasks = [Task(QUESTION, name="a"), Task(QUESTION, name="b"), Task(QUESTION, name="a")]
    for given in (tasks, list(grouped(tasks, 2))):
        with pytest.raises(InputError, match=r"are both called 'a.*grouped\(tasks, n\)"):
            asyncio.run(run_rollouts(one, given))
    assert not one.engine.requests
    with pytest.raises(InputError, match="tasks 0 and 2"):
        asyncio.run(run_rollouts(one, iter(tasks)))
    with pytest.raises(InputError, match=r"task 1 is an object with prompt.*row_task"):
        asyncio.run(run_rollouts(one, [tasks[0], {"prompt": "?"}]))


# -- limits


async def never(*_: Any, **__: Any) -> None:
    await asyncio.Event().wait()


class User(BaseInteraction):
    """Asks on once, with what it measured."""

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        asked = sum(message["role"] == "user" for message in messages)
        return Reply("Sure?", reward=0.25, metrics={"mood": "good"}) if asked == 1 else None


@pytest.mark.parametrize("step", ["start_interaction", "generate_response", "calculate_score", "finalize_interaction"])
def test_a_simulated_user_that_hangs_is_given_up(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, step, never)
    rollout = run(interaction=User(), budget=Budget(interaction_timeout=0.01, reward_timeout=0.01))
    assert rollout.notes == [f"{step} took longer than 0.01 s"]
    if step == "finalize_interaction":  # nothing is left to fail by then: it is told
        assert (rollout.end, rollout.reward) == (End.USER, 0.25)
    else:
        assert (rollout.end, rollout.reward) == (End.HUNG, None)


@pytest.mark.parametrize("blocks", [False, True], ids=["coroutine", "function"])
def test_a_reward_that_hangs_is_given_up_and_what_was_sampled_is_kept(blocks: bool) -> None:
    gate = threading.Event()

    def hang(_: Rollout) -> float:
        gate.wait()
        return 1.0

    rollout = run(reward=hang if blocks else never, budget=Budget(reward_timeout=0.01))
    gate.set()
    assert (rollout.end, rollout.reward, rollout.notes) == (End.HUNG, None, ["the reward took longer than 0.01 s"])
    assert rollout.trajectory.num_sampled == len(RENDERER.tokenizer.encode(ANSWER))


@pytest.mark.parametrize("where", ["engine", "tool", "user"])
def test_a_rollout_that_takes_too_long_ends_with_what_was_sampled(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    asked = 0

    def loop() -> asyncio.AbstractEventLoop:
        made = asyncio.new_event_loop()
        made.time = lambda: now
        return made

    async def hang(*_: Any, **__: Any) -> None:
        nonlocal now
        now += 100
        await asyncio.Event().wait()

    async def latency(_: int) -> None:
        nonlocal asked
        asked += 1
        if where == "engine" and asked == 2:
            await hang()

    async def slow() -> str:
        """Look."""
        if where == "tool":
            await hang()
        return "42"

    monkeypatch.setattr(User, "generate_response", hang)
    made = Agent(
        Turns(ANSWER if where == "user" else CALL, latency=latency),
        RENDERER,
        tools=[FunctionTool(slow, name="look")],
        interaction=User() if where == "user" else None,
        reward=lambda rollout: float(rollout.turns),
        budget=Budget(seconds=10, tool_timeout=None, interaction_timeout=None),
    )
    with asyncio.Runner(loop_factory=loop) as runner:
        rollout = runner.run(made.run(TASK))
    assert (rollout.end, rollout.notes) == (End.TIME, ["the rollout took longer than 10 s"])
    assert rollout.reward == rollout.turns == 1, "a budget has ended it: it is judged like any other"
    check_trajectory(rollout.trajectory)


# -- rewards


class Broken(Table):
    async def create(self, instance_id: str, **kwargs: Any) -> None:
        raise OSError("no room")


def failing_engine() -> Rollout:
    made = agent(CALL, ANSWER, tools=[look], reward=lambda _: 1.0)
    made.engine.faults.extend([None, Fault.GARBAGE])
    return asyncio.run(made.run(Task(QUESTION, name="one", metadata={"reward": 5.0})))


def aborted() -> Rollout:
    async def latency(_: int) -> None:
        await engine.abort("one-0")

    engine = Turns(ANSWER, latency=latency)
    return asyncio.run(Agent(engine, RENDERER, reward=lambda _: 0.0).run(TASK))


FAILURES: dict[str, Callable[[], Rollout]] = {
    "engine": failing_engine,
    "reward": lambda: run(reward=lambda _: 1 / 0),
    "a tool cannot be made": lambda: run(tools=[Broken()]),
    "abort": aborted,
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=list(FAILURES))
def test_what_failed_has_no_reward_anywhere(fail: Callable[[], Rollout], tmp_path: Path) -> None:
    rollout = fail()
    assert rollout.end in FAILED_ENDS
    assert rollout.reward is None
    rollout.reward = 3.0  # whoever says so
    assert rollout.metrics()["reward"] is None
    store = RolloutStore(tmp_path)
    store.finish(rollout)
    (row,) = store.finished
    row["metrics"]["reward"] = 0.0  # as an older journal might
    assert group_advantages([row]) == {}
    assert all(sample.reward is None and sample.advantages is None for sample in store.samples(advantages="group"))
    store.close()


def test_advantages_are_those_of_the_rollouts_that_succeeded(tmp_path: Path) -> None:
    def reward(rollout: Rollout) -> float:
        return [1.0, 1 / 0 if rollout.task.metadata["member"] == 1 else 3.0][min(rollout.task.metadata["member"], 1)]

    store = RolloutStore(tmp_path)
    asyncio.run(run_rollouts(agent(reward=reward), grouped([Task(QUESTION)], 3), store=store, concurrency=1))
    found = group_advantages(store.finished)
    assert found == {
        "task-00000-0": pytest.approx(-1 / math.sqrt(2), rel=1e-5),
        "task-00000-2": pytest.approx(1 / math.sqrt(2), rel=1e-5),
    }, "the mean of 1 and 3, not of 1, 0 and 3"
    with pytest.raises(InputError, match="advantages are 'group' or None, not 'grop'"):
        list(store.samples(advantages="grop"))
    store.close()


@pytest.mark.parametrize("odd", [math.nan, math.inf, "1", b"1", [1.0], 10**400, object])
def test_a_reward_that_is_no_number_fails_the_rollout(odd: Any) -> None:
    rollout = run(reward=lambda _: odd)
    assert (rollout.end, rollout.reward) == (End.FAILED, None)
    assert "it must be a finite number" in rollout.notes[-1]


# -- odd settings

ODD_BUDGETS: dict[str, Any] = {
    "turns": [0, -1, 1.5, True, "3", math.nan, None, 10**30, np.float64(3)],
    "turn_tokens": [0, "many", 2**31],
    "tokens": [0, -5, 1.5],
    "context": [0, [1]],
    "seconds": [0, -1, math.nan, math.inf, "1", True, 10**400],
    "tool_timeout": [0, math.nan, "60"],
    "tool_seconds": [-1, math.nan],
    "interaction_timeout": [0, math.inf],
    "reward_timeout": [-0.5, object],
    "result_tokens": [0, None],
    "result_keep": ["haed", 3, None],
}


@pytest.mark.parametrize("name", ODD_BUDGETS)
def test_an_odd_budget_is_refused_by_name(name: str) -> None:
    for value in ODD_BUDGETS[name]:
        with pytest.raises(InputError, match=name):
            Budget(**{name: value})
