"""Many rollouts: groups, and seeds that depend on nothing but the seed and the place."""

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


def test_groups_share_a_prompt_and_have_names_of_their_own() -> None:
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
    """The seeds that each rollout samples with; never more run at once than allowed."""
    under_way = most = 0

    async def latency(_: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(1 + len(engine.requests) % 3):  # some take longer than others
            await asyncio.sleep(0)
        under_way -= 1

    engine = Turns(latency=latency)
    tasks = grouped(TASKS, 3)
    asyncio.run(run_rollouts(Agent(engine, RENDERER), tasks, concurrency=concurrency, seed=11, store=store))
    assert most <= concurrency
    assert store or most >= min(2, concurrency)  # the thread of a store decides when the next one begins
    out: dict[str, list[int | None]] = {}
    for request in engine.requests:
        out.setdefault(str(request.session), []).append(request.sampling.seed)
    return out


def test_seeds_are_the_same_however_many_run_at_once_and_whatever_was_finished_before(tmp_path: Path) -> None:
    one = seeds(1)
    assert len({seed for all_ in one.values() for seed in all_}) == 15, "no two sample alike"
    assert one == seeds(4) == seeds(64)
    store = RolloutStore(tmp_path)
    agent = Agent(Turns(), RENDERER)
    asyncio.run(run_rollouts(agent, list(grouped(TASKS, 3))[:7], store=store, seed=11))
    rest = seeds(2, store)
    assert rest == {name: one[name] for name in list(one)[7:]}
    store.close()


def test_failures_are_counted_and_the_others_go_on() -> None:
    engine = Turns()
    engine.faults.extend([None, GARBAGE, None])
    summary = asyncio.run(run_rollouts(Agent(engine, RENDERER, reward=lambda _: 1.0), TASKS, concurrency=1))
    assert summary.ends == {End.ANSWER: 4, End.ENGINE: 1}
    assert summary.reward == 1.0
    assert summary.described()["samples_per_rollout"] == 0.8, "the one that died had sampled nothing"
    assert math.isnan(Summary().reward)
    assert Summary().described()["tokens_per_second"] is None
