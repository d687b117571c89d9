"""An engine that is down: the run waits and continues without a difference, or stops without losing anything."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rollout.support import CALL, RENDERER, look, run_at
from tokentrace.engines.errors import EngineRefusal, EngineUnavailable
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.rollout.batch import grouped, run_rollouts
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.patience import EngineDown, Patience
from tokentrace.rollout.store import RolloutStore

TASKS = [Task([{"role": "user", "content": f"Question {number}?"}], name=f"q{number}") for number in range(4)]


class Clock:
    """Time that passes only during sleeps, with a callback for each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        self.meanwhile()
        await asyncio.sleep(0)


class Engine(ScriptedEngine):
    """Samples a call, then an answer that depends on the seed. `refuses` decides which requests fail."""

    def __init__(self) -> None:
        super().__init__(self._say, vocab_size=RENDERER.tokenizer.vocabulary.size)
        self.refuses: Callable[[Any, str | None], Exception | None] = lambda *_: None
        self.attempts = 0

    def _say(self, prompt: Any, sampling: SamplingParams) -> Any:
        if "42" not in RENDERER.tokenizer.decode(prompt):
            return RENDERER.tokenizer.encode(f"{CALL}<|end|>")
        (stop, *_) = RENDERER.get_stop_token_ids()
        return [*np.random.default_rng(sampling.seed).integers(300, 4000, 20).tolist(), stop]

    async def generate(self, prompt_ids: Any, sampling: Any, **options: Any) -> Completion:
        self.attempts += 1
        problem = self.refuses(prompt_ids, options.get("session"))
        if problem is not None:
            raise problem
        return await super().generate(prompt_ids, sampling, **options)


def agent(engine: Engine, **options: Any) -> Agent:
    return Agent(engine, RENDERER, tools=[look], reward=lambda _: 1.0, **options)


def run(engine: Engine, patience: Patience, store: RolloutStore | None = None, **options: Any) -> list[Rollout]:
    done: list[Rollout] = []
    settings: Any = {"concurrency": 3, "seed": 5, "patience": patience, "store": store, "done": done.append}
    asyncio.run(run_rollouts(agent(engine, **options), grouped(TASKS, 2), **settings))
    return done


def streams(rollouts: list[Rollout]) -> dict[str, list[int]]:
    return {one.task.name: one.trajectory.stream().tolist() for one in rollouts}


def test_a_run_waits_for_an_engine_that_is_down_and_loses_nothing() -> None:
    whole = streams(run(Engine(), Patience()))
    clock, engine, notices = Clock(), Engine(), list[str | None]()
    down = EngineUnavailable("connection refused")
    engine.refuses = lambda *_: down if engine.attempts > 4 and clock.now < 20 else None
    rollouts = run(engine, Patience(60, notice=notices.append, clock=clock, sleep=clock.sleep))
    assert {one.end for one in rollouts} == {End.ANSWER}
    assert streams(rollouts) == whole, "nothing that was sampled is lost, and nothing is sampled differently"
    assert clock.pauses == [1, 2, 4, 8, 16], "one asks, less and less often, and the others wait for it"
    assert "all rollouts wait: asking again in 1 s, the run stops in 60 s; connection refused" in str(notices[0])
    assert notices[-1] is None


def test_a_run_whose_patience_runs_out_stops_and_can_be_resumed(tmp_path: Path) -> None:
    whole = streams(run(Engine(), Patience()))
    clock, engine = Clock(), Engine()
    engine.refuses = lambda *_: EngineUnavailable("503") if engine.attempts > 9 else None
    store = RolloutStore(tmp_path)
    with pytest.raises(EngineDown, match="did not answer for 100 s: 503"):
        run(engine, Patience(100, clock=clock, sleep=clock.sleep), store)
    assert sum(clock.pauses) == 100
    finished = {row["name"] for row in store.finished}
    assert finished
    assert {row["metrics"]["end"] for row in store.finished} == {"answer"}, "no rollout pays for it"
    partial = [one for name in store.unfinished if (one := store.recorded(Task([], name))) is not None]
    assert partial, "what was sampled until then is on the disk"
    for one in partial:
        assert whole[one.task.name][: len(one.trajectory)] == one.trajectory.stream().tolist()
    store.close()
    store = RolloutStore(tmp_path)
    run(Engine(), Patience(), store)
    assert {row["name"]: trajectory.stream().tolist() for row, trajectory in store.trajectories()} == whole
    assert store.unfinished == []
    store.close()


@pytest.mark.parametrize("problem", [EngineRefusal("400: too long", status=400), EngineUnavailable("500: it crashed")])
def test_a_rollout_that_the_engine_refuses_fails_alone(problem: Exception) -> None:
    clock, engine = Clock(), Engine()
    engine.refuses = lambda _, session: problem if session == "q1-0" else None
    ends = {one.task.name: one for one in run(engine, Patience(60, clock=clock, sleep=clock.sleep))}
    assert len(ends) == 8
    assert {name for name, one in ends.items() if one.end is not End.ANSWER} == {"q1-0"}
    assert (ends["q1-0"].end, ends["q1-0"].reward, ends["q1-0"].notes) == (End.ENGINE, None, [str(problem)])
    assert clock.pauses == [], "an engine that answers others is not waited for"


def test_waiting_for_the_engine_does_not_count_as_the_rollouts_time() -> None:
    clock, engine = Clock(), Engine()
    engine.refuses = lambda *_: EngineUnavailable("down") if engine.attempts > 1 and clock.now < 99 else None
    patience = Patience(600, clock=clock, sleep=clock.sleep)
    rollout = run_at(clock, agent(engine, budget=Budget(seconds=10)).run(TASKS[0], patience=patience))
    assert clock.now > 99
    assert (rollout.end, rollout.turns) == (End.ANSWER, 2)


def test_a_request_that_crashes_the_engine_is_not_retried_forever() -> None:
    clock, engine, down = Clock(), Engine(), [False]

    def refuses(_: Any, session: str | None) -> Exception | None:
        if session == "q1-0" or (session is None and down[0]):
            down[0] = session is not None
            return EngineUnavailable("it crashed")
        return None

    engine.refuses = refuses
    rollouts = run(engine, Patience(600, clock=clock, sleep=clock.sleep))
    assert {one.task.name for one in rollouts if one.end is not End.ANSWER} == {"q1-0"}
    assert clock.pauses == [1] * 9
