"""Code that is not ours: whatever it raises, cancels or returns concerns one call or one rollout, never the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.support import ANSWER, CALL, TASK, agent, look, run
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction
from tokentrace.rollout.loop import End
from tokentrace.rollout.record import checked_metrics
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import BaseTool, ToolResult, function_schema


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


async def cancelled(*_: Any) -> Any:
    """Waits for something that somebody cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    return await task


async def exits(*_: Any) -> Any:
    raise SystemExit(3)


# -- what ends a task or a process


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (cancelled, "error: RuntimeError: look was cancelled"),
        (exits, "error: RuntimeError: SystemExit: 3"),
    ],
)
def test_a_tool_that_is_cancelled_or_exits_is_a_result_like_any_other(does: Callable[[], Any], said: str) -> None:
    rollout = run(CALL, ANSWER, tools=[Returns(does)])
    assert (rollout.end, rollout.tool_errors) == (End.ANSWER, 1)
    assert rollout.messages[2]["content"] == said


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
def test_metrics_that_json_cannot_hold_become_text_with_a_note(odd: Any, kept: Any) -> None:
    metrics, note = checked_metrics(odd, "look")
    assert metrics == kept
    assert "metrics" in note


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
    summary = asyncio.run(run_rollouts(made, [TASK], store=store))
    assert summary.ends == {"failed": 1}
    assert "float32" in store.finished[0]["notes"][-1]
    assert store.write_rows(advantages="group").is_file()
    store.close()
