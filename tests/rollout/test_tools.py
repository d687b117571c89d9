"""Tools: created once, released once, run in parallel; whatever foreign code does wrong concerns one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.rollout.support import ANSWER, CALL, TASK, agent, look, run
from tokentrace import Trajectory
from tokentrace.conversation.functions import function_schema
from tokentrace.parsing import CallStatus, ParsedToolCall
from tokentrace.parsing.response import TokenRange
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction
from tokentrace.rollout.loop import End
from tokentrace.rollout.record import Budget, Rollout, Task, TurnMetrics, checked_metrics
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.toolbox import Toolbox
from tokentrace.rollout.tools import BaseTool, ToolResult, as_tools


def call(
    name: str | None, arguments: dict[str, Any] | None, status: CallStatus = CallStatus.OK, index: int = 0
) -> ParsedToolCall:
    problem = "" if status is CallStatus.OK else "it is broken"
    return ParsedToolCall(index, name, arguments, "", None, status, problem, "", {}, TokenRange(0, 1))


def a_turn() -> TurnMetrics:
    return TurnMetrics(prompt_tokens=1, sampled=1, finish_reason="stop")


def toolbox(tools: list[Any], timeout: float = 60.0, **settings: Any) -> Toolbox:
    task = Task([], tool_settings=settings)
    return Toolbox(Rollout(task, Trajectory(), as_tools(tools), [], instance="t1"), Budget(tool_timeout=timeout))


def run_calls(tools: list[Any], calls: list[ParsedToolCall], **options: Any) -> tuple[list[ToolResult], TurnMetrics]:
    async def go() -> tuple[list[ToolResult], TurnMetrics]:
        turn = a_turn()
        async with toolbox(tools, **options) as box:
            return await box.run(calls, turn), turn

    return asyncio.run(go())


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b (int): The second, or one.
    """
    return a + b


async def shout(text: str, loud: bool = True, how: Literal["a", "b"] = "a", tags: list[str] | None = None) -> str:
    """Say it
    louder."""
    return text.upper() if loud else text


def test_a_schema_is_read_off_signature_and_docstring() -> None:
    made = function_schema(add)["function"]
    assert made["description"] == "Add two numbers."
    assert made["parameters"]["required"] == ["a"]
    assert made["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "The second, or one."},
    }
    other = function_schema(shout)["function"]["parameters"]["properties"]
    assert other == {
        "text": {"type": "string"},
        "loud": {"type": "boolean"},
        "how": {"type": "string", "enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"type": "string"}, "nullable": True},
    }


def test_results_come_in_the_order_of_the_calls_whoever_is_first() -> None:
    gate = asyncio.Event()
    order: list[str] = []

    async def slow() -> str:
        """Wait for the other."""
        await gate.wait()
        order.append("slow")
        return "slow"

    async def quick() -> str:
        """Let the other go on."""
        order.append("quick")
        gate.set()
        return "quick"

    results, turn = run_calls([slow, quick], [call("slow", {}), call("quick", {}, index=1)])
    assert order == ["quick", "slow"]
    assert [result.content for result in results] == ["slow", "quick"]
    assert turn.tool_calls == 2


class Table(BaseTool):
    """Keeps what it was told for each trajectory, and a diary."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tool_schema=function_schema(add, "table"), **options)
        self.diary: list[str] = []
        self.rows: dict[str, dict[str, Any]] = {}

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self.diary.append(f"create {instance_id}")
        self.rows[instance_id] = kwargs

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.diary.append("execute")
        return f"{self.rows[instance_id]}", 0.5, {"asked": parameters["a"]}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 2.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.diary.append(f"release {instance_id}")


def test_a_tool_is_created_and_released_once_for_each_trajectory() -> None:
    tool = Table()
    calls = [call("table", {"a": 1}), call("table", {"a": 2})]

    async def go() -> float | None:
        async with toolbox([tool], table={"key": "value"}) as box:
            turn = a_turn()
            results = await box.run(calls, turn)
            await box.run(calls[:1], turn)
            assert results[0].content == "{'key': 'value'}"
            assert turn.reward == 1.5
            assert turn.metrics[1] == {"tool": "table", "asked": 2}
            return await box.rewards()

    assert asyncio.run(go()) == 2.0
    assert tool.diary == ["create t1", "execute", "execute", "execute", "release t1"]


def boom() -> str:
    """Raise."""
    raise ValueError("out of order")


async def hang() -> str:
    """Never come back."""
    await asyncio.Event().wait()
    return ""


def odd() -> Any:
    """Return what is no JSON."""
    return {1, 2}


@pytest.mark.parametrize(
    ("tool", "made", "shown"),
    [
        (boom, call("boom", {}), "error: ValueError: out of order"),
        (add, call("add", {"a": 1, "c": 2}), "error: TypeError: add() got an unexpected keyword argument 'c'"),
        (hang, call("hang", {}), "error: hang took longer than 0.01 s"),
        (add, call("subtract", {}, CallStatus.UNKNOWN_TOOL), "error: there is no tool 'subtract'; there are: add"),
        (add, call("add", None, CallStatus.INVALID_JSON), "error: it is broken"),
        (add, call(None, None, CallStatus.MISSING_NAME), "error: it is broken"),
    ],
    ids=["raises", "wrong arguments", "hangs", "unknown", "invalid JSON", "no name"],
)
def test_what_goes_wrong_becomes_a_result(tool: Callable[..., Any], made: ParsedToolCall, shown: str) -> None:
    (result,), turn = run_calls([tool], [made], timeout=0.01 if tool is hang else 60.0)
    assert result.content == shown
    assert result.failed
    assert turn.tool_errors == 1


def test_anything_returned_becomes_text() -> None:
    (result,), _ = run_calls([odd], [call("odd", {})])
    assert result.content in ("{1, 2}", "{2, 1}")
    (result,), _ = run_calls([add], [call("add", {"a": 2})])
    assert result.content == "3"


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
