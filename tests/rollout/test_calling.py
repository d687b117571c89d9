"""Code that is not ours: whatever it raises, cancels or returns concerns one call or one rollout, never the run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokentrace import InputError, create_renderer
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.pocket import POCKET
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.calling import TooLong, called, within
from tokentrace.rollout.checks import metrics
from tokentrace.rollout.interactions import BaseInteraction, Reply, as_reply, choose_interaction
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import BaseTool, ToolResult, as_result, function_schema

RENDERER = create_renderer(POCKET)
QUESTION = ({"role": "user", "content": "What is 6 * 7?"},)
ANSWER = "It is 42.<|end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def look() -> str:
    """Look."""
    return "42"


class Returns(BaseTool):
    """Its calls return, or raise, one thing after another."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(tool_schema=function_schema(look))
        self._answers = list(answers)
        self.released = False

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return await answer() if callable(answer) else answer

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released = True


def agent(*turns: str, **options: Any) -> Agent:
    """Says these turns of each rollout; those of several rollouts alike."""
    said = [RENDERER.tokenizer.encode(f"{turn.removesuffix('<|end|>')}<|end|>") for turn in turns or (ANSWER,)]

    class Engine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: SamplingParams, **about: Any) -> Completion:
            turn = int(str(about["request_id"]).rpartition("-")[2])
            self._script = lambda *_: said[min(turn, len(said) - 1)]
            return await super().generate(prompt_ids, sampling, **about)

    return Agent(Engine(lambda *_: (), vocab_size=RENDERER.tokenizer.vocabulary.size), RENDERER, **options)


def run(*turns: str, **options: Any) -> Rollout:
    return asyncio.run(agent(*turns, **options).run(Task(QUESTION, name="one")))


async def cancelled(*_: Any) -> Any:
    """Waits for something that somebody cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    return await task


async def exits(*_: Any) -> Any:
    raise SystemExit(3)


async def cancels_itself(*_: Any) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


# -- what ends a task or a process


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (cancelled, "error: RuntimeError: look was cancelled"),
        (exits, "error: RuntimeError: SystemExit: 3"),
        (cancels_itself, "error: CancelledError"),
    ],
)
def test_a_tool_that_is_cancelled_or_exits_is_a_result_like_any_other(does: Callable[[], Any], said: str) -> None:
    rollout = run(CALL, ANSWER, tools=[Returns(does)])
    assert (rollout.end, rollout.use.failed) == (End.ANSWER, 1)
    assert rollout.messages[2]["content"] == said


@pytest.mark.parametrize(("does", "said"), [(cancelled, "was cancelled"), (exits, "SystemExit: 3")])
@pytest.mark.parametrize("step", ["reward", "generate_response", "finalize_interaction", "engine", "create", "release"])
def test_nothing_that_is_cancelled_elsewhere_drops_a_rollout(
    step: str, does: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, tool = BaseInteraction(), Returns("42")
    monkeypatch.setattr(user, "generate_response", lambda *_: asyncio.sleep(0))
    made = agent(
        interaction=None if step == "reward" else user, tools=[tool], reward=does if step == "reward" else None
    )
    if step != "reward":
        there = made.engine if step == "engine" else tool if step in ("create", "release") else user
        monkeypatch.setattr(there, "generate" if step == "engine" else step, lambda *_, **__: does())
    ended: list[Rollout] = []
    tasks = [Task(QUESTION, name=f"q{number}") for number in range(4)]
    summary = asyncio.run(run_rollouts(made, tasks, concurrency=2, done=ended.append))
    is_noted = step in ("finalize_interaction", "release")
    assert summary.ends == {"user" if is_noted else "failed": 4}
    assert all(said in rollout.notes[-1] for rollout in ended)


def test_a_rollout_that_cancels_the_task_that_runs_it_is_not_passed_over() -> None:
    tasks = [Task(QUESTION, name=f"q{number}") for number in range(3)]
    with pytest.raises(InputError, match=r"3 rollouts did not end, .* cancelled their tasks: 'q0', 'q1', 'q2'"):
        asyncio.run(run_rollouts(agent(reward=cancels_itself), tasks))


def test_work_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def go() -> None:
        task = asyncio.create_task(within(asyncio.Event().wait(), 60, "work"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TooLong, match=r"work took longer than 0\.001 s"):
            await within(asyncio.Event().wait(), 0.001, "work")

    asyncio.run(go())


def test_a_parameter_may_be_called_function() -> None:
    def derive(function: str) -> str:
        """Derive."""
        return f"{function}'"

    assert asyncio.run(called(derive, function="f")) == "f'"
    call = CALL.replace("look", "derive").replace("{}", '{"function": "f"}')
    rollout = run(call, ANSWER, tools=[derive])
    assert rollout.messages[2]["content"] == "f'"


# -- what they return


def circular() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["self"] = made
    return made


class Unsayable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("odd", "kept"),
    [
        ({("a", "b"): 1}, {"('a', 'b')": 1}),
        (circular(), {"self": "an object with self"}),
        ({"a": {("b",): 1}}, {"a": "an object with tuple"}),
        ({"a": Unsayable()}, {"a": "an object of type Unsayable"}),
        ({"a": 10**5000}, {"a": "an integer of 16610 bits"}),
        (5, {}),
    ],
)
@pytest.mark.parametrize("by", ["tool", "interaction"])
def test_metrics_that_json_cannot_hold_become_text_with_a_note(odd: Any, kept: Any, by: str, tmp_path: Path) -> None:
    class User(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return Reply(done=True, metrics=odd)

    if by == "tool":
        made = agent(CALL, ANSWER, tools=[Returns(ToolResult("42", metrics=odd))])
    else:
        made = agent(interaction=User())
    store = RolloutStore(tmp_path)
    asyncio.run(run_rollouts(made, [Task(QUESTION, name="one")], store=store))
    (row,) = store.finished
    store.close()
    (measured,) = row["turns"][0]["metrics"]
    assert {key: value for key, value in measured.items() if key != by} == kept
    assert json.loads((tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()[-1]) == row
    assert any("metrics" in note for note in row["notes"])
    assert "metrics" in metrics(odd, "look")[1]


def test_metrics_that_json_can_hold_are_kept_as_they_are() -> None:
    assert metrics({"a": [1, {"b": None}], "c": "d"}, "look") == ({"a": [1, {"b": None}], "c": "d"}, "")


@pytest.mark.parametrize("content", [None, 5, b"42"])
def test_a_result_whose_content_is_no_text_is_a_call_that_failed(content: Any) -> None:
    async def answer() -> ToolResult:
        return ToolResult(content)

    rollout = run(CALL, ANSWER, tools=[Returns(answer)])
    assert (rollout.end, rollout.use.failed) == (End.ANSWER, 1)
    assert "the content of a ToolResult must be text" in rollout.messages[2]["content"]


def test_three_values_are_text_reward_and_metrics_or_a_result() -> None:
    assert as_result(("x", 0.5, {"a": 1}), "look") == ToolResult("x", 0.5, {"a": 1})
    assert as_result(("x", None, None), "look").reward is None
    assert as_result(({"a": 1}, 0.25, None), "look") == ToolResult('{"a": 1}', 0.25)
    assert as_result((12.5, 41.0, None), "look") == ToolResult("[12.5, 41.0, null]")
    assert as_result(("Paris", "France", None), "look") == ToolResult('["Paris", "France", null]')
    assert as_result((1, 2, {"a": 3}), "look") == ToolResult('[1, 2, {"a": 3}]')


@pytest.mark.parametrize("odd", [(False, "next", 0.5), [False, "next", 0.5, {}], 7, (False, 5, 0.5, {})])
def test_what_is_no_reply_is_refused(odd: Any) -> None:
    with pytest.raises(InputError, match=r"generate_response returned|content of a Reply must be text"):
        as_reply(odd)
    assert as_reply((False, "next", 0.5, None)) == Reply("next", False, 0.5)
    assert as_reply((True, None, None, None)) == Reply(done=True)


def test_a_name_of_a_simulated_user_that_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="there is no simulated user"):
        choose_interaction({"a": BaseInteraction(), "b": BaseInteraction()}, {"name": ["x"]})


def test_a_simulated_user_cannot_change_the_record() -> None:
    class Rewrites(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            messages[-1]["content"] = "changed"
            messages.clear()

    rollout = run(interaction=Rewrites())
    assert [message["content"] for message in rollout.messages] == ["What is 6 * 7?", "It is 42."]


# -- rewards


@pytest.mark.parametrize("rewards", [(1e39,), (-1e39,), (3e38, 3e38)])
def test_a_reward_that_no_row_can_hold_fails_its_rollout_and_the_rows_are_written(rewards: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    calls = CALL * len(rewards)
    made = agent(calls, ANSWER, tools=[Returns(*(ToolResult("42", one) for one in rewards))])
    store = RolloutStore(tmp_path)
    summary = asyncio.run(run_rollouts(made, [Task(QUESTION, name="one")], store=store))
    assert summary.ends == {"failed": 1}
    assert "float32" in store.finished[0]["notes"][-1]
    assert store.write_rows(advantages="group").is_file()
    store.close()


def test_a_sum_of_rewards_that_no_row_can_hold_fails_its_rollout() -> None:
    rollout = run(CALL, CALL, ANSWER, tools=[Returns(ToolResult("42", 3e38))])
    assert (rollout.end, rollout.reward) == (End.FAILED, None)
    assert "the sum of all rewards" in rollout.notes[-1]


def test_calls_beside_one_with_a_bad_reward_are_over_when_tools_are_released() -> None:
    ended: list[bool] = []
    tool = Returns()

    async def slow() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(tool.released)
        return "42"

    tool._answers = [ToolResult("42", math.nan), slow]
    rollout = run(CALL * 2, ANSWER, tools=[tool], budget=Budget(turns=2))
    assert (rollout.end, ended, tool.released) == (End.FAILED, [False], True)
