"""Rollouts for tests of trainers' rows, and the check that all of these rows must pass."""

import asyncio
import functools
import random
import sys
import types
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.guides import GUIDES, blocks
from tokentrace import Agent, Budget, EmbeddedEngine, Task, Trajectory, create_renderer
from tokentrace.demo.calculator import calculate
from tokentrace.engines.protocol import Engine, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout import Rollout
from tokentrace.tokens.kinds import Kind

RENDERER = create_renderer(POCKET)
QUESTION = [{"role": "user", "content": "What is 17 * 23 + 4?"}]


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def make_agent(
    engine: Engine, sampling: SamplingParams | None = None, *, rollouts: list[Rollout] | None = None, **options: Any
) -> Agent:
    """An agent of pocket with a calculator, whose reward is the number of turns. Adds its rollouts to `rollouts`."""

    def reward(rollout: Rollout) -> float:
        if rollouts is not None:
            rollouts.append(rollout)
        return float(rollout.turns)

    options = {"reward": reward, "budget": Budget(turns=4, turn_tokens=64), **options}
    return Agent(engine, RENDERER, tools=[calculator], sampling=sampling or SamplingParams(64, seed=3), **options)


def with_engine(work: Callable[[Engine], Awaitable[Any]]) -> Any:
    """Run a coroutine function on an embedded engine, then close the engine."""

    async def run() -> Any:
        engine = EmbeddedEngine(seed=3)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def pocket_rollout(**options: Any) -> Rollout:
    """A rollout of pocket with a tool call and its result."""
    rollout: Rollout = with_engine(lambda engine: make_agent(engine, **options).run(Task(QUESTION, name="sum")))
    assert rollout.tool_calls, "a rollout with a tool's result between two completions"
    return rollout


def recipe(name: str, monkeypatch: pytest.MonkeyPatch, **agent: Any) -> dict[str, Any]:
    """Run a file of the guide with this agent in place of the guide's, and return what it defines."""
    code = next(block.code for block in blocks(GUIDES / "rows-for-trainers.md") if block.title == name)
    module = types.ModuleType("my_agent")
    module.make_agent = functools.partial(make_agent, **agent)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_agent", module)
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    return names


def random_tree(seed: int, *, logprobs: bool = True) -> Trajectory:
    """A trajectory whose history was rewritten several times."""
    rng = random.Random(seed)
    trajectory = Trajectory(name=f"tree-{seed}", logprobs=logprobs)
    trajectory.begin([rng.randrange(50) for _ in range(rng.randint(1, 6))], messages=1)
    for step in range(rng.randint(2, 7)):
        size = rng.randint(1, 5)
        scores = [-rng.random() for _ in range(size)] if logprobs else None
        trajectory.append_completion(
            [rng.randrange(50, 90) for _ in range(size)], scores, finish_reason="stop", version=step, sampling={}
        )
        if rng.random() < 0.5 or trajectory.num_branches == 1:
            stream = trajectory.stream().tolist()
            trajectory.branch([*stream[: rng.randrange(len(stream) - 1)], 90 + step, 91 + step], cause="edit")
        else:
            trajectory.append_context([rng.randrange(50) for _ in range(rng.randint(1, 4))], Kind.CONTEXT)
    trajectory.append_completion([99], [-0.5] if logprobs else None, finish_reason="stop", version=99)
    return trajectory


def check_rows(
    trajectory: Trajectory, rows: Sequence[tuple[int, Sequence[int], Sequence[int], Sequence[float]]]
) -> None:
    """Checks rows (branch, ids, mask, logprobs of whole sequences): ids are those of the streams, every sampled token
    carries loss exactly once over all rows, and its logprob is the engine's."""
    trained = 0
    for branch, ids, mask, logprobs in rows:
        assert list(ids) == trajectory.stream(branch).tolist()
        assert list(mask) == trajectory.loss_mask(branch).astype(int).tolist()
        recorded = trajectory.logprobs(branch)
        expected = np.where(np.isnan(recorded), 0.0, recorded)
        np.testing.assert_array_equal(np.asarray(logprobs, np.float32), expected.astype(np.float32))
        trained += sum(mask)
    assert trained == trajectory.num_sampled
    assert [branch for branch, *_ in rows] == [one.index for one in trajectory.branches if one.sampled]
