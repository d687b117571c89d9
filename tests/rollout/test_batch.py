"""Many rollouts: groups, and seeds that depend only on the run's seed and the position."""

import asyncio
import math
from pathlib import Path

import pytest

from tests.engines.faults import GARBAGE
from tests.rollout.support import QUESTION, RENDERER, Turns, look
from tokentrace import InputError
from tokentrace.rollout.batch import Summary, grouped, row_task, run_rollouts
from tokentrace.rollout.loop import Agent, End, Task
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import as_tools

TASKS = [Task(QUESTION, name=f"q{number}", metadata={"level": number}) for number in range(5)]


def test_members_of_a_group_share_a_prompt_and_have_their_own_names() -> None:
    tasks = list(grouped([*TASKS[:2], Task(QUESTION)], 3))
    assert [task.name for task in tasks] == [f"{name}-{at}" for name in ("q0", "q1", "task-00002") for at in range(3)]
    assert tasks[4].metadata == {"level": 1, "group": "q1", "member": 1}
    assert [task.name for task in grouped(TASKS, 1)] == [task.name for task in TASKS]


def test_a_row_selects_among_the_tools_by_name() -> None:
    def shout() -> str:
        """Shout."""
        return "!"

    tools = as_tools([look, shout])
    for column in ({"tool_selection": ["shout"]}, {"tools": [tools[1].tool_schema]}):
        assert row_task({"prompt": "?", **column}, tools).tools == tools[1:]
    assert row_task({"prompt": "?"}, tools).tools is None
    with pytest.raises(InputError, match="there is no tool 'sing'"):
        row_task({"prompt": "?", "tool_selection": ["sing"]}, tools)


def seeds(concurrency: int, store: RolloutStore | None = None) -> dict[str, list[int | None]]:
    """The sampling seeds of each rollout; also checks the limit on concurrency."""
    running = peak = 0

    async def latency(_: int) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        for _ in range(1 + len(engine.requests) % 3):  # some requests take longer
            await asyncio.sleep(0)
        running -= 1

    engine = Turns(latency=latency)
    tasks = grouped(TASKS, 3)
    asyncio.run(run_rollouts(Agent(engine, RENDERER), tasks, concurrency=concurrency, seed=11, store=store))
    assert peak <= concurrency
    assert store or peak >= min(2, concurrency)  # with a store, its thread decides when the next one starts
    out: dict[str, list[int | None]] = {}
    for request in engine.requests:
        out.setdefault(str(request.session), []).append(request.sampling.seed)
    return out


def test_seeds_do_not_depend_on_concurrency_or_on_earlier_runs(tmp_path: Path) -> None:
    sequential = seeds(1)
    assert len({seed for values in sequential.values() for seed in values}) == 15, "no two sample alike"
    assert sequential == seeds(4) == seeds(64)
    store = RolloutStore(tmp_path)
    agent = Agent(Turns(), RENDERER)
    asyncio.run(run_rollouts(agent, list(grouped(TASKS, 3))[:7], store=store, seed=11))
    remaining = seeds(2, store)
    assert remaining == {name: sequential[name] for name in list(sequential)[7:]}
    store.close()


def test_failures_are_counted_and_other_rollouts_continue() -> None:
    engine = Turns()
    engine.faults.extend([None, GARBAGE, None])
    summary = asyncio.run(run_rollouts(Agent(engine, RENDERER, reward=lambda _: 1.0), TASKS, concurrency=1))
    assert summary.ends == {End.ANSWER: 4, End.ENGINE: 1}
    assert summary.reward == 1.0
    assert summary.described()["samples_per_rollout"] == 0.8, "the one that died had sampled nothing"
    assert math.isnan(Summary().reward)
    assert Summary().described()["tokens_per_second"] is None
