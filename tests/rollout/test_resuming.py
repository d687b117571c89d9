"""Going on: a rollout that was cut off anywhere and gone on with is the rollout that was not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trajectory.checker import check_trajectory
from tokentrace import EmbeddedEngine, InputError, Trajectory, create_renderer, trajectory_samples
from tokentrace.engines.protocol import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, joined
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.errors import ContinuationError
from tokentrace.pocket import POCKET
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import FunctionTool, ToolResult
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import Turn, from_bytes, to_bytes
from tokentrace.trajectory.storage import replay_records, write_records

RENDERER = create_renderer(POCKET)
TASK = Task([{"role": "user", "content": "What is 17 * 23?"}], name="one")
GREEDY = SamplingParams(200, temperature=0.0)


def calculator(expression: str) -> ToolResult:
    """Compute.

    Args:
        expression: what to compute.
    """
    return ToolResult(str(eval(expression, {"__builtins__": {}})), reward=0.25)


class Twice(BaseInteraction):
    """Asks a second question, and is content with the answer to it."""

    async def generate_response(self, instance_id: str, messages: Sequence[Any], **kwargs: Any) -> Reply:
        asked = sum(message["role"] == "user" for message in messages)
        return Reply("And what is 3 + 4?", reward=0.5) if asked == 1 else Reply(done=True, reward=1.0)


class Aborting(EmbeddedEngine):
    """Requests are told to end after so many tokens, one after another; after each the weights have a new version."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places = iter(places)
        self.asked: list[GenerateRequest] = []

    async def _generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
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
            await self.update_weights(self._model, version=int(self.version) + 1)
        return completion


def agent(engine: Any, **options: Any) -> Agent:
    settings = {"sampling": GREEDY, "tools": [calculator], "interaction": Twice(), "budget": Budget(turns=8)}
    return Agent(engine, RENDERER, **(settings | options))


@pytest.fixture(scope="module")
def whole() -> Rollout:
    """A rollout with calls and two questions that nothing interrupted."""

    async def run() -> Rollout:
        engine = EmbeddedEngine()
        try:
            return await agent(engine).run(TASK)
        finally:
            await engine.close()

    rollout = asyncio.run(run())
    assert (rollout.end, rollout.use.calls > 0) == (End.USER, True)
    assert sum(message["role"] == "user" for message in rollout.messages) == 2
    return rollout


def check_same(rollout: Rollout, whole: Rollout) -> None:
    """The same tokens, messages, turns and rewards; what trains is what was sampled."""
    one, other = rollout.trajectory, whole.trajectory
    assert one.stream().tolist() == other.stream().tolist()
    assert one.kinds().tolist() == other.kinds().tolist()
    np.testing.assert_allclose(one.logprobs(), other.logprobs(), rtol=0, atol=1e-4)
    assert one.message_indices().tolist() == other.message_indices().tolist()
    assert rollout.messages == whole.messages
    names = ("end", "reward", "turns", "tokens", "sampled", "samples", "tool_calls", "malformed_turns")
    assert {name: rollout.metrics()[name] for name in names} == {name: whole.metrics()[name] for name in names}
    by_message = [
        {turn.message: turn.reward for turn in trajectory.turns() if turn.reward} for trajectory in (one, other)
    ]
    assert by_message[0] == by_message[1]
    assert one.reward == other.reward
    assert len(one.turns()) == len(rollout.per_turn)
    assert [turn.continues for turn in one.turns()] == [turn.continues for turn in rollout.per_turn]
    check_trajectory(one)
    (sample,) = trajectory_samples(one)
    assert sample.mask.tolist() == (other.kinds() == Kind.SAMPLED).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_that_is_aborted_goes_on_where_it_was(whole: Rollout, seed: int) -> None:
    chance = random.Random(seed)
    places = [chance.choice([0, 1, 2, 5, 17]) for _ in range(12)]

    async def run() -> tuple[Rollout, Aborting]:
        engine = Aborting(places)
        try:
            return await agent(engine, resume_aborted=True).run(TASK), engine
        finally:
            await engine.close()

    rollout, engine = asyncio.run(run())
    check_same(rollout, whole)
    pieces = rollout.trajectory.turns()
    assert any(turn.continues for turn in pieces)
    stream = rollout.trajectory.stream()
    for request in engine.asked:
        assert np.array_equal(request.prompt_ids, stream[: len(request.prompt_ids)])
    versions = [turn.version for turn in pieces]
    assert versions == sorted(versions), "the weights that sampled each part"
    assert len(set(versions)) > 1
    assert all(before.finish_reason == "abort" for before, turn in pairwise(pieces) if turn.continues)


def test_an_aborted_rollout_is_gone_on_with_after_it_was_saved(whole: Rollout) -> None:
    chance = random.Random(7)

    async def run() -> Rollout:
        engine = Aborting([chance.choice([1, 3, 9]) for _ in range(9)])
        try:
            rollout = await agent(engine).run(TASK)
            assert rollout.end is End.ABORT
            assert rollout.reward is None
            for _ in range(20):
                if rollout.end is not End.ABORT:
                    break
                loaded = from_bytes(to_bytes(rollout.trajectory)).trajectory
                rollout = await agent(engine).run(TASK, trajectory=loaded)
            return rollout
        finally:
            await engine.close()

    rollout = asyncio.run(run())
    check_same(rollout, whole)
    assert rollout.trajectory.turns()[-1].version == 9


def repeating(stream: Trajectory) -> ScriptedEngine:
    """An engine that goes on with every prefix of a recorded stream as that did."""
    ids, turns = stream.stream().tolist(), stream.turns()

    def script(prompt: Any, _: SamplingParams) -> Any:
        assert prompt.tolist() == ids[: len(prompt)]
        return ids[len(prompt) : next(turn.stop for turn in turns if turn.stop > len(prompt))]

    return ScriptedEngine(script, vocab_size=RENDERER.tokenizer.vocabulary.size)


def cut(trajectory: Trajectory, writes: int, tokens: int | None = None) -> Trajectory:
    """The first writes of a trajectory; of the last of them, a completion, so many tokens, as if it was aborted."""
    out = Trajectory(name=trajectory.name, vocab_size=trajectory.vocab_size, metadata=trajectory.metadata)
    for number, (write, record) in enumerate(zip(trajectory.writes(), write_records(trajectory), strict=True)):
        if number >= writes:
            break
        if number == writes - 1 and tokens is not None:
            assert isinstance(write, Turn)
            ids, logprobs = trajectory.completion(write), trajectory.completion_logprobs(write)
            out.append_completion(ids[:tokens], logprobs[:tokens], finish_reason="abort", sampling=write.sampling)
        else:
            replay_records(out, [record])
    for number, reward in trajectory.rewarded:
        if 0 <= number < writes:
            out.replay_reward(number, reward)
    return out


def test_a_rollout_goes_on_from_wherever_its_record_ends(whole: Rollout) -> None:
    trajectory = whole.trajectory
    said = [turn.write for turn in trajectory.turns()]
    starts = [(count, None) for count in range(trajectory.num_writes + 1)]
    starts += [(write + 1, tokens) for write in said for tokens in (0, 1, 4)]
    for writes, tokens in starts:
        engine = repeating(trajectory)
        begun = cut(trajectory, writes, tokens)
        before = begun.num_sampled
        rollout = asyncio.run(agent(engine).run(TASK, trajectory=begun))
        names = ("end", "reward", "turns", "tokens", "sampled", "tool_calls")
        assert {name: rollout.metrics()[name] for name in names} == {name: whole.metrics()[name] for name in names}
        assert rollout.trajectory is begun
        assert begun.stream().tolist() == trajectory.stream().tolist()
        assert rollout.messages == whole.messages
        assert rollout.notes == []
        sampled = sum(len(turn) for turn in begun.turns()) - before
        assert sampled == sum(len(write) for write in begun.writes(writes) if isinstance(write, Turn))


def test_the_rest_of_a_turn_has_the_rest_of_its_budget(whole: Rollout) -> None:
    first = whole.trajectory.turns()[0]
    begun = cut(whole.trajectory, 2, 3)
    engine = repeating(whole.trajectory)
    budget = Budget(turn_tokens=len(first) - 1)
    rollout = asyncio.run(agent(engine, budget=budget).run(TASK, trajectory=begun))
    assert engine.requests[0].sampling.max_tokens == len(first) - 1 - 3
    assert (rollout.end, rollout.turns) == (End.LENGTH, 1)
    begun = cut(whole.trajectory, 2, 3)
    rollout = asyncio.run(agent(engine, budget=Budget(turn_tokens=3)).run(TASK, trajectory=begun))
    assert (rollout.end, begun.num_sampled, len(rollout.messages)) == (End.LENGTH, 3, 2)


def test_parts_of_a_turn_are_drawn_with_other_random_numbers(whole: Rollout) -> None:
    engine = repeating(whole.trajectory)
    sampling = SamplingParams(200)
    asyncio.run(agent(engine, sampling=sampling).run(TASK, trajectory=cut(whole.trajectory, 2, 3), seed=5))
    asyncio.run(agent(engine, sampling=sampling).run(TASK, seed=5))
    turns = len(engine.requests) // 2
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[1:turns] == seeds[turns + 1 :]
    assert seeds[0] != seeds[turns]


@pytest.mark.parametrize("place", [4, 5, 6])
def test_a_stop_text_that_the_cut_goes_through_ends_the_turn(whole: Rollout, place: int) -> None:
    start = whole.trajectory.turns()[0].start
    said = whole.trajectory.stream()[start:]
    text = RENDERER.tokenizer.decode(said[3:7])
    told = GREEDY.described() | {"stop": (text,), "stop_token_ids": (), "top_logprobs": 2}
    options: Any = {"sampling": SamplingParams(**told), "budget": Budget(turns=1), "resume_aborted": True}

    async def run(places: Sequence[int], trajectory: Trajectory | None = None) -> Rollout:
        engine = Aborting(places)
        try:
            return await agent(engine, **options).run(TASK, trajectory=trajectory)
        finally:
            await engine.close()

    uncut, resumed = asyncio.run(run([])), asyncio.run(run([place]))
    later = asyncio.run(run([], cut(whole.trajectory, 2, place)))
    assert len(uncut.trajectory.turns()[0]) == 7
    for rollout in (resumed, later):
        assert rollout.trajectory.stream().tolist() == uncut.trajectory.stream().tolist()
        first, rest = rollout.trajectory.turns()
        assert (first.finish_reason, rest.finish_reason, rest.continues) == ("abort", "stop", True)
        assert rest.versions[-1].stop == len(rest) == 7 - place
        assert all(isinstance(turn.engine_seconds, float) for turn in rollout.per_turn)
        check_trajectory(rollout.trajectory)


def test_a_stop_text_that_ended_no_turn_before_does_not_end_it_now(whole: Rollout) -> None:
    start = whole.trajectory.turns()[0].start
    text = RENDERER.tokenizer.decode(whole.trajectory.stream()[start + 1 : start + 3])
    engine = repeating(whole.trajectory)
    sampling = replace(GREEDY, stop=(text, text + "x" * 40))
    engine.capabilities = replace(engine.capabilities, sampling=frozenset(["stop"]))
    rollout = asyncio.run(agent(engine, sampling=sampling).run(TASK, trajectory=cut(whole.trajectory, 2, 3)))
    assert len(rollout.trajectory.turns()[1]) > 1


@pytest.mark.parametrize(
    "setting", [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"structure": {"type": "json_object"}}]
)
def test_what_is_counted_from_the_first_token_of_a_request_lets_no_turn_go_on(whole: Rollout, setting: Any) -> None:
    engine, sampling = repeating(whole.trajectory), replace(GREEDY, **setting)
    with pytest.raises(ContinuationError, match=next(iter(setting))):
        agent(engine, sampling=sampling, resume_aborted=True)
    with pytest.raises(ContinuationError, match=next(iter(setting))):
        asyncio.run(agent(engine, sampling=sampling).run(TASK, trajectory=cut(whole.trajectory, 2, 3)))
    assert engine.requests == []
    agent(engine, sampling=replace(GREEDY, repetition_penalty=1.2), resume_aborted=True)


def bad(change: str, whole: Rollout) -> Trajectory:
    trajectory = cut(whole.trajectory, 2)
    if change == "length":
        trajectory = cut(whole.trajectory, 1)
        trajectory.append_completion([5], [-1.0], finish_reason="length")
    elif change == "vocabulary":
        trajectory = Trajectory(name="one", vocab_size=10**6)
        trajectory.begin(whole.trajectory.stream()[:5])
    elif change == "logprobs":
        trajectory = Trajectory(name="one", logprobs=False)
        trajectory.begin(whole.trajectory.stream()[:5])
    elif change == "branches":
        trajectory.branch([*trajectory.stream()[:3].tolist(), 1], cause="compaction")
    elif change == "name":
        other = Trajectory(name="two")
        replay_records(other, write_records(trajectory))
        return other
    elif change == "context":
        trajectory.append_context([5], Kind.SCAFFOLD)
    return trajectory


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        ("length", {}, "ran out of tokens"),
        ("vocabulary", {}, "vocabulary of 1000000 ids"),
        ("logprobs", {}, "without logprobs"),
        ("branches", {}, "2 branches"),
        ("name", {}, "called 'two'"),
        ("context", {}, "tokens of no message"),
        ("tools", {"tools": []}, "begins with another prompt .* from token"),
    ],
)
def test_what_cannot_go_on_is_refused_with_why(whole: Rollout, change: str, options: Any, why: str) -> None:
    trajectory = bad(change, whole)
    before = to_bytes(trajectory)
    engine = repeating(whole.trajectory)
    with pytest.raises(ContinuationError, match=why):
        asyncio.run(agent(engine, **options).run(TASK, trajectory=trajectory))
    assert (to_bytes(trajectory), engine.requests) == (before, [])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "two"}, "called 'two'"),
        ({"name": "one", "logprobs": False}, "without logprobs"),
        ({"name": "one", "vocab_size": 10**6}, "vocabulary of 1000000 ids"),
    ],
)
def test_a_trajectory_in_which_nothing_is_recorded_must_fit_too(whole: Rollout, options: Any, why: str) -> None:
    engine = repeating(whole.trajectory)
    with pytest.raises(ContinuationError, match=why):
        asyncio.run(agent(engine).run(TASK, trajectory=Trajectory(**options)))
    assert engine.requests == []
    empty = Trajectory(name="one")
    assert asyncio.run(agent(engine).run(TASK, trajectory=empty)).trajectory is empty
    assert empty.stream().tolist() == whole.trajectory.stream().tolist()


def test_rewards_that_are_found_anew_are_taken_back(whole: Rollout) -> None:
    class Free(FunctionTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return replace(calculator(**parameters), reward=0.0)

    def fails(_: Rollout) -> float:
        raise RuntimeError("the judge is ill")

    trajectory = cut(whole.trajectory, 2)
    (turn,) = trajectory.turns()
    trajectory.set_reward(0.25, turn)
    trajectory.set_reward(1.0)
    going_on = agent(repeating(whole.trajectory), tools=[Free(calculator)], reward=fails)
    rollout = asyncio.run(going_on.run(TASK, trajectory=trajectory))
    assert (rollout.end, rollout.reward, trajectory.reward) == (End.FAILED, None, None)
    assert trajectory.turns()[0].reward is None, "the call was run again, and gave nothing"
    loaded = from_bytes(to_bytes(trajectory)).trajectory
    assert (loaded.reward, loaded.turns()[0].reward) == (None, None)
    assert loaded.rewarded == trajectory.rewarded


def test_what_is_no_trajectory_is_refused() -> None:
    with pytest.raises(InputError, match="trajectory"):
        asyncio.run(agent(EmbeddedEngine()).run(TASK, trajectory=7))  # type: ignore[arg-type]


def test_an_engine_that_only_ever_aborts_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrace.rollout.loop._ABORTS", 2)
    monkeypatch.setattr("tokentrace.rollout.loop._PAUSE", 0.0)

    class Never(ScriptedEngine):
        async def _generate(self, request: GenerateRequest) -> Completion:
            self.requests.append(request)
            nothing = Delta(np.zeros(0, np.int32), np.zeros(0, np.float32))
            return Completion(nothing.ids, nothing.logprobs, FinishReason.ABORT)

    engine = Never(lambda *_: [])
    rollout = asyncio.run(agent(engine, resume_aborted=True).run(TASK))
    assert (rollout.end, len(engine.requests), rollout.turns) == (End.ABORT, 3, 1)


def test_aborted_rollouts_of_a_store_go_on_in_the_next_run(tmp_path: Path, whole: Rollout) -> None:
    tasks = [Task(TASK.messages, name=name) for name in ("a", "b", "c")]

    async def run(places: Sequence[int], **options: Any) -> tuple[Any, RolloutStore, Aborting]:
        engine, store = Aborting(places), RolloutStore(tmp_path)
        try:
            return await run_rollouts(agent(engine), tasks, store=store, concurrency=1, **options), store, engine
        finally:
            store.close()
            await engine.close()

    summary, store, _ = asyncio.run(run([4, 10**6, 2, 10**6, 10**6, 10**6, 10**6, 3]))
    assert summary.ends["abort"] == 2
    kept = {row["name"]: trajectory.stream().tolist() for row, trajectory in store.trajectories()}
    summary, store, second = asyncio.run(run([], continue_aborted=True))
    assert summary.ends == {"user": 3}
    assert summary.resumed == 1
    for row, trajectory in store.trajectories():
        stream = trajectory.stream().tolist()
        assert stream == whole.trajectory.stream().tolist()
        assert stream[: len(kept[row["name"]])] == kept[row["name"]]
    prompts = {request.request_id: len(request.prompt_ids) for request in second.asked}
    begun = [name for name, stream in kept.items() if len(stream) < len(whole.trajectory)]
    assert len(begun) == 2
    for name in begun:
        assert min(length for id, length in prompts.items() if id and id.startswith(name)) == len(kept[name])


def test_what_the_store_has_and_cannot_go_on_is_run_anew(tmp_path: Path, whole: Rollout) -> None:
    store = RolloutStore(tmp_path)
    store.start("one")
    store.keep(Rollout(TASK, bad("length", whole), [], []))
    found: list[Rollout] = []
    engine = repeating(whole.trajectory)
    running = run_rollouts(agent(engine), [TASK], store=store, continue_aborted=True, done=found.append)
    assert asyncio.run(running).ends == {"user": 1}
    assert "run anew: trajectory 'one' ends with a turn that ran out of tokens" in found[0].notes[-1]
    store.close()
    for name, raw, why in (
        ("junk", b"no trajectory at all", "junk.partial.tt: "),
        ("short", to_bytes(whole.trajectory)[:-9], "short.partial.tt: "),
        ("other", to_bytes(whole.trajectory), "holds rollout 'one', and the journal says 'other'"),
    ):
        store = RolloutStore(tmp_path)
        store.start(name)
        (tmp_path / "trajectories" / f"{name}.partial.tt").write_bytes(raw)
        task = Task(TASK.messages, name=name)
        running = run_rollouts(agent(engine), [task], store=store, continue_aborted=True, done=found.append)
        assert asyncio.run(running).ends == {"user": 2 + ["junk", "short", "other"].index(name)}
        assert "run anew: " in found[-1].notes[-1]
        assert why in found[-1].notes[-1]
        store.close()
    with pytest.raises(InputError, match="needs a store"):
        asyncio.run(run_rollouts(agent(engine), [TASK], continue_aborted=True))
