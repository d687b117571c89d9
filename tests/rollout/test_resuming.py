"""Resuming: a rollout that is interrupted anywhere and resumed equals an uninterrupted one."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.rollout.support import RENDERER
from tests.support import FULL
from tests.trajectory.model import check_trajectory
from tokentrace import EmbeddedEngine, Trajectory, trajectory_samples
from tokentrace.engines.protocol import Completion, Delta, GenerateRequest, SamplingParams, joined
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.errors import ContinuationError
from tokentrace.pocket import POCKET
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import ToolResult
from tokentrace.samples.trajectories import owned_turns
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Turn
from tokentrace.trajectory.storage import replay_records, write_records

TASK = Task([{"role": "user", "content": "What is 17 * 23?"}], name="one")
GREEDY = SamplingParams(200, temperature=0.0)
T = TypeVar("T")


def calculator(expression: str) -> ToolResult:
    """Compute an expression."""
    return ToolResult(str(eval(expression, {"__builtins__": {}})), reward=0.25)


class Twice(BaseInteraction):
    """Asks a second question, and is done after its answer."""

    async def generate_response(self, instance_id: str, messages: Sequence[Any], **kwargs: Any) -> Reply:
        questions = sum(message["role"] == "user" for message in messages)
        return Reply("And what is 3 + 4?", reward=0.5) if questions == 1 else Reply(done=True, reward=1.0)


class Aborting(EmbeddedEngine):
    """Aborts each request after the next of `places` tokens; each abort is followed by a new weight version."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places = iter(places)
        self.received: list[GenerateRequest] = []

    async def _generate(self, request: GenerateRequest) -> Completion:
        self.received.append(request)
        place = next(self.places, 10**6)
        pieces: list[Delta] = []
        if not place:
            await self.pause()
        stream = self._stream(request)
        if not place:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await self.abort(request.request_id or "")
            pieces.append(await waiting)
            await self.resume()
        async for piece in stream:
            pieces.append(piece)
            if len(pieces) == place and piece.finish_reason is None:
                await self.abort(request.request_id or "")
        completion = joined(pieces)
        if completion.finish_reason == "abort":
            await self.update_weights(POCKET, version=int(self.version) + 1)
        return completion


def agent(engine: Any, **options: Any) -> Agent:
    settings = {"sampling": GREEDY, "tools": [calculator], "interaction": Twice(), "budget": Budget(turns=8)}
    return Agent(engine, RENDERER, **(settings | options))


def on(engine: Any, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run work on an engine, then close the engine."""

    async def run() -> T:
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def whole() -> Rollout:
    """An uninterrupted rollout with tool calls and two questions."""
    rollout = on(EmbeddedEngine(), lambda engine: agent(engine).run(TASK))
    assert (rollout.end, rollout.tool_calls > 0) == (End.USER, True)
    assert sum(message["role"] == "user" for message in rollout.messages) == 2
    return rollout


def metrics(rollout: Rollout) -> list[Any]:
    names = ("end", "reward", "turns", "tokens", "sampled", "samples", "tool_calls", "malformed_turns")
    return [rollout.metrics()[name] for name in names]


def rewards(trajectory: Trajectory) -> list[Any]:
    return [trajectory.reward, *((turn.message, turn.reward) for turn in trajectory.turns() if turn.reward)]


def check_same(rollout: Rollout, whole: Rollout) -> None:
    """Checks for equal tokens, messages, turns and rewards, and that exactly the sampled tokens are trained."""
    one, other = rollout.trajectory, whole.trajectory
    assert one.stream().tolist() == other.stream().tolist()
    assert one.table().kinds.tolist() == other.table().kinds.tolist()
    np.testing.assert_allclose(one.logprobs(), other.logprobs(), rtol=0, atol=1e-4)
    assert one.table().messages.tolist() == other.table().messages.tolist()
    assert rollout.messages == whole.messages
    assert metrics(rollout) == metrics(whole)
    assert rewards(one) == rewards(other)
    assert len(one.turns()) == len(rollout.per_turn)
    check_trajectory(one)
    (sample,) = trajectory_samples(one)
    assert sample.mask.tolist() == (other.table().kinds == Kind.SAMPLED).tolist()


@pytest.mark.parametrize("seed", range(4 if FULL else 2))
def test_an_aborted_turn_continues_where_it_stopped(whole: Rollout, seed: int) -> None:
    chance = random.Random(seed)
    engine = Aborting([chance.choice([0, 1, 2, 5, 17]) for _ in range(12)])
    rollout = on(engine, lambda engine: agent(engine, resume_aborted=True).run(TASK))
    check_same(rollout, whole)
    pieces = rollout.trajectory.turns()
    assert any(turn.continues for turn in pieces)
    stream = rollout.trajectory.stream()
    for request in engine.received:
        assert np.array_equal(request.prompt_ids, stream[: len(request.prompt_ids)])
    versions = [turn.version for turn in pieces]
    assert versions == sorted(versions), "the weights that sampled each part"
    assert len(set(versions)) > 1
    assert all(before.finish_reason == "abort" for before, turn in pairwise(pieces) if turn.continues)


def test_an_aborted_rollout_can_be_resumed_later(whole: Rollout) -> None:
    async def run(engine: Aborting) -> Rollout:
        rollout = await agent(engine).run(TASK)
        assert (rollout.end, rollout.reward) == (End.ABORT, None)
        for _ in range(20):
            if rollout.end is End.ABORT:
                rollout = await agent(engine).run(TASK, resumed=rollout)
        return rollout

    chance = random.Random(7)
    rollout = on(Aborting([chance.choice([1, 3, 9]) for _ in range(9)]), run)
    check_same(rollout, whole)
    assert rollout.trajectory.turns()[-1].version == 9


def repeating(stream: Trajectory) -> ScriptedEngine:
    """An engine that continues every prefix of a recorded stream as recorded."""
    ids, turns = stream.stream().tolist(), stream.turns()

    def script(prompt: Any, _: SamplingParams) -> Any:
        assert prompt.tolist() == ids[: len(prompt)]
        return ids[len(prompt) : next(turn.stop for turn in turns if turn.stop > len(prompt))]

    return ScriptedEngine(script, vocab_size=RENDERER.tokenizer.vocabulary.size)


def cut(whole: Rollout, writes: int, tokens: int | None = None) -> Rollout:
    """The rollout after some writes; with `tokens`, the last one is a completion aborted after that many tokens."""
    trajectory = whole.trajectory
    out = Trajectory(name=trajectory.name, vocab_size=trajectory.vocab_size, metadata=trajectory.metadata)
    count, turns = 0, 0
    for number, (write, record) in enumerate(zip(trajectory.writes(), write_records(trajectory), strict=True)):
        if number >= writes:
            break
        turns += isinstance(write, Turn)
        count = count + 1 if isinstance(write, Turn) else write.messages
        if number == writes - 1 and tokens is not None:
            assert isinstance(write, Turn)
            table = write.tokens.slice(0, tokens)
            out.append_completion(table.ids, table.logprobs, finish_reason="abort", sampling=write.sampling)
        else:
            replay_records(out, [record])
    for turn in owned_turns(out):
        out.set_reward(trajectory.writes()[turn.write].reward, turn)  # type: ignore[union-attr]
    per_turn = [replace(turn) for turn in whole.per_turn[:turns]]
    return Rollout(TASK, out, whole.tools, list(whole.messages[:count]), per_turn=per_turn)


def test_a_rollout_can_be_resumed_from_any_point_of_its_record(whole: Rollout) -> None:
    trajectory = whole.trajectory
    starts: list[tuple[int, int | None]] = [(count, None) for count in range(1, trajectory.num_writes + 1)]
    starts += [(turn.write + 1, tokens) for turn in trajectory.turns() for tokens in (0, 1, 4)]
    for writes, tokens in starts:
        rollout = asyncio.run(agent(repeating(trajectory)).run(TASK, resumed=cut(whole, writes, tokens)))
        assert metrics(rollout) == metrics(whole)
        assert rollout.trajectory.stream().tolist() == trajectory.stream().tolist()
        assert rollout.messages == whole.messages
        assert rollout.notes == []


def test_a_resumed_turn_has_the_remaining_budget(whole: Rollout) -> None:
    first = whole.trajectory.turns()[0]
    engine = repeating(whole.trajectory)
    budget = Budget(turn_tokens=len(first) - 1)
    rollout = asyncio.run(agent(engine, budget=budget).run(TASK, resumed=cut(whole, 2, 3)))
    assert engine.requests[0].sampling.max_tokens == len(first) - 1 - 3
    assert (rollout.end, rollout.turns) == (End.LENGTH, 1)


def test_rollouts_of_another_task_cannot_be_resumed(whole: Rollout) -> None:
    other = Task([{"role": "user", "content": "What is 1 + 1?"}], name="one")
    for task, resumed in ((other, cut(whole, 2)), (replace(TASK, name="two"), cut(whole, 2))):
        with pytest.raises(ContinuationError):
            asyncio.run(agent(repeating(whole.trajectory)).run(task, resumed=resumed))


@pytest.mark.parametrize("place", [4, 5, 6])
def test_a_stop_text_across_the_cut_ends_the_turn(whole: Rollout, place: int) -> None:
    start = whole.trajectory.turns()[0].start
    sampled = whole.trajectory.stream()[start:]
    text = RENDERER.tokenizer.decode(sampled[3:7])
    settings = GREEDY.described() | {"stop": (text,), "stop_token_ids": (), "top_logprobs": 2}
    options: Any = {"sampling": SamplingParams(**settings), "budget": Budget(turns=1), "resume_aborted": True}

    def run(places: Sequence[int], resumed: Rollout | None = None) -> Rollout:
        return on(Aborting(places), lambda engine: agent(engine, **options).run(TASK, resumed=resumed))

    uncut, resumed, later = run([]), run([place]), run([], cut(whole, 2, place))
    assert len(uncut.trajectory.turns()[0]) == 7
    for rollout in (resumed, later):
        assert rollout.trajectory.stream().tolist() == uncut.trajectory.stream().tolist()
        first, continuation = rollout.trajectory.turns()
        assert (first.finish_reason, continuation.finish_reason, continuation.continues) == ("abort", "stop", True)
        assert continuation.versions[-1].stop == len(continuation) == 7 - place
        assert all(isinstance(turn.engine_seconds, float) for turn in rollout.per_turn)
        check_trajectory(rollout.trajectory)


@pytest.mark.parametrize(
    "setting", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"structure": {"type": "json_object"}}]
)
def test_settings_that_depend_on_the_start_of_a_request_prevent_resuming(whole: Rollout, setting: Any) -> None:
    engine, sampling = repeating(whole.trajectory), replace(GREEDY, **setting)
    with pytest.raises(ContinuationError, match=next(iter(setting))):
        agent(engine, sampling=sampling, resume_aborted=True)
    with pytest.raises(ContinuationError, match=next(iter(setting))):
        asyncio.run(agent(engine, sampling=sampling).run(TASK, resumed=cut(whole, 2, 3)))
    assert engine.requests == []
    agent(engine, sampling=replace(GREEDY, repetition_penalty=1.2), resume_aborted=True)


def run_stored(folder: Path, places: Sequence[int], tasks: list[Task], **options: Any) -> tuple[Any, Any, Aborting]:
    """The summary of a run, its finished rollouts, and the engine."""
    engine, store = Aborting(places), RolloutStore(folder)
    running = run_rollouts(agent(engine), tasks, store=store, concurrency=1, **options)
    summary = on(engine, lambda _: running)
    finished = {row["name"]: (row["notes"], one.stream().tolist()) for row, one in store.trajectories()}
    store.close()
    return summary, finished, engine


def test_aborted_rollouts_of_a_store_continue_in_the_next_run(tmp_path: Path, whole: Rollout) -> None:
    tasks = [Task(TASK.messages, name=name) for name in ("a", "b", "c")]
    summary, before, _ = run_stored(tmp_path, [4, 10**6, 2, 10**6, 10**6, 10**6, 10**6, 3], tasks)
    assert summary.ends["abort"] == 2
    summary, after, second = run_stored(tmp_path, [], tasks, continue_aborted=True)
    assert summary.ends == {"user": 3}
    assert summary.resumed == 1
    assert all(stream == whole.trajectory.stream().tolist() for _, stream in after.values())
    prompts = {request.request_id: len(request.prompt_ids) for request in second.received}
    aborted = {name: len(stream) for name, (_, stream) in before.items() if len(stream) < len(whole.trajectory)}
    assert len(aborted) == 2
    for name, length in aborted.items():
        assert min(count for id, count in prompts.items() if id and id.startswith(name)) == length


def test_rollouts_that_cannot_be_resumed_start_over_with_a_note(tmp_path: Path) -> None:
    summary, _, _ = run_stored(tmp_path, [4], [TASK])
    assert summary.ends == {"abort": 1}
    other = Task([{"role": "user", "content": "What is 2 + 2?"}], name="one")
    summary, finished, _ = run_stored(tmp_path, [], [other], continue_aborted=True)
    assert summary.ends == {"user": 1}
    assert finished["one"][0][-1].startswith("started over: ")
