"""Tools and simulated users, ours and those of other libraries: what foreign code does wrong concerns one rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.rollout.support import ANSWER, CALL, QUESTION, TASK, agent, look, results, run
from tokentrace import EmbeddedEngine, Trajectory
from tokentrace.conversation.functions import function_schema
from tokentrace.parsing import CallStatus, ParsedToolCall
from tokentrace.parsing.response import TokenRange
from tokentrace.rollout import Budget, ConfigError, End, Task, load_interactions, load_tools, read_run
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.record import Rollout, TurnMetrics
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import BaseTool, FunctionTool, Toolbox, ToolResult, as_result, as_tools


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

    async def go() -> dict[str, Any]:
        async with toolbox([tool], table={"key": "value"}) as box:
            turn = a_turn()
            results = await box.run(calls, turn)
            await box.run(calls[:1], turn)
            assert results[0].content == "{'key': 'value'}"
            assert turn.reward == 1.5
            assert turn.metrics[1] == {"tool": "table", "asked": 2}
            return await box.rewards()

    assert asyncio.run(go()) == {"table: calc_reward": 2.0}
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
        (5, {"value": 5}),
    ],
)
def test_metrics_that_json_cannot_hold_become_text(odd: Any, kept: Any) -> None:
    turn = a_turn()
    turn.add("tool", "look", None, odd)
    assert turn.metrics == [{"tool": "look", **kept}]


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


def look_at(a: int) -> str:
    """Look at a number."""
    return str(a)


SCHEMA = function_schema(look_at, "look")
LOOK = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


@dataclass
class Response:
    """As verl's ToolResponse."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class Schema(BaseModel):
    """As verl's schema: a model that keeps less than it is given."""

    type: str
    function: dict[str, Any]


class Foreign:
    """A tool in verl's shape, with a diary."""

    def __init__(self, config: dict[str, Any], tool_schema: Schema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.diary: list[Any] = []
        print("made")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Response]:
        self.diary.append(("create", instance_id, kwargs))
        return f"own-{instance_id}", Response()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[Response, float, dict]:
        data = kwargs.pop("agent_data")
        data.extra_fields["calls"] = data.extra_fields.get("calls", 0) + 1
        seen = [message["role"] for message in data.messages]
        self.diary.append(("execute", instance_id, parameters, kwargs, seen, data.extra_fields["calls"]))
        return Response("seen"), 0.25, {"depth": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        self.diary.append(("calc_reward", instance_id, kwargs))
        return kwargs.get("gives", 1.0)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.diary.append(("release", instance_id, kwargs))


def foreign() -> Foreign:
    return Foreign({}, Schema(**SCHEMA))


def test_every_step_gets_its_own_arguments_and_the_id_that_create_gave() -> None:
    tool = foreign()
    settings = {
        "create_kwargs": {"ground_truth": "42"},
        "execute_kwargs": {"deep": True},
        "calc_reward_kwargs": {"gives": 2.0},
        "release_kwargs": {"keep": 1},
    }
    task = Task(QUESTION, name="one", tool_settings={"look": settings})
    rollout = run(LOOK, LOOK, "42", tools=[tool], task=task)
    assert tool.diary == [
        ("create", "one", {"ground_truth": "42", "create_kwargs": {"ground_truth": "42"}}),
        ("execute", "own-one", {"a": 1}, {"deep": True}, ["user", "assistant"], 1),
        ("execute", "own-one", {"a": 1}, {"deep": True}, ["user", "assistant", "tool", "assistant"], 2),
        ("calc_reward", "own-one", {"gives": 2.0}),
        ("release", "own-one", {"keep": 1}),
    ]
    assert (rollout.end, rollout.reward, rollout.notes) == (End.ANSWER, 2.5, [])
    assert results(rollout) == ["seen", "seen"]
    assert rollout.per_turn[0].metrics == [{"tool": "look", "depth": 1}]
    assert rollout.schemas == [SCHEMA]


def test_images_are_refused_by_name_and_text_beside_them_is_kept() -> None:
    class Camera(Foreign):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return Response("a cat", image=[1, 2], video=[3]), 0.0, {}

    rollout = run(LOOK, "42", tools=[Camera({}, Schema(**SCHEMA))])
    assert rollout.messages[2]["content"] == (
        "a cat\nerror: look returned 2 images and 1 video, which cannot be shown here"
    )
    assert rollout.tool_errors == 1


def test_what_tools_return_in_verls_shapes() -> None:
    assert as_result(Response("x"), "look") == ToolResult("x")
    assert as_result((Response("x"), 0.5), "look") == ToolResult("x", 0.5)
    assert as_result((Response(None), None, None), "look") == ToolResult("")
    assert as_result((Response("x"),), "look") == ToolResult("x")
    assert as_result((1, 2), "look") == ToolResult("[1, 2]"), "two values are a result"


TOOLS = """
from __future__ import annotations
from typing import Optional
from pydantic import BaseModel

class Schema(BaseModel):
    type: str
    function: dict

class Base:
    def __init__(self, config, tool_schema: Optional[Schema]):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function["name"]
        print("made", self.name)

    async def execute(self, instance_id, parameters, **kwargs):
        return self.config["word"]

class Tool(Base):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

class TalkInteraction:
    def __init__(self, config):
        self.name = config["name"]

    async def generate_response(self, instance_id, messages, **kwargs):
        return True, "bye", 0.5, {"kwargs": sorted(kwargs)}

class HushInteraction(TalkInteraction):
    pass
"""


def written(folder: Path, name: str, value: Any) -> Path:
    (folder / "theirs.py").write_text(TOOLS, encoding="utf-8")
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder / name


def tool(**config: Any) -> dict[str, Any]:
    schema = json.loads(json.dumps(SCHEMA)) | {"strict": True}
    return {"class_name": "./theirs.py:Tool", "config": {"type": "native", **config}, "tool_schema": schema}


def test_classes_of_others_load_with_the_schema_that_they_want(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made,) = load_tools(written(tmp_path, "tools.yaml", {"tools": [tool(word="hello")]}))
    assert capsys.readouterr().out == "", "what a constructor prints does not end up among results"
    assert made.tool_schema["strict"] is True, "the model is shown what the file says, not what the class kept"
    rollout = run(LOOK, "42", tools=[made])
    assert rollout.messages[2]["content"] == "hello"
    with pytest.raises(ConfigError, match="is a placeholder of OmegaConf"):
        load_tools(written(tmp_path, "tools.yaml", {"tools": [tool(word=["${oc.env:WORD}"])]}))


def users(*sections: dict[str, Any]) -> dict[str, Any]:
    return {"interaction": [{"class_name": "./theirs.py:TalkInteraction", "config": {}, **one} for one in sections]}


def test_several_simulated_users_are_chosen_by_name(tmp_path: Path) -> None:
    two = users({"name": "loud"}, {"class_name": "./theirs.py:HushInteraction"})
    found = load_interactions(written(tmp_path, "users.yaml", two))
    assert {name: user.name for name, user in found.items()} == {"loud": "loud", "hush": "hush"}
    task = Task(QUESTION, name="one", interaction_settings={"name": "loud", "mood": 1})
    rollout = run("42", interaction=found, task=task)
    assert (rollout.end, rollout.reward) == (End.USER, 0.5)
    assert rollout.per_turn[0].metrics == [{"interaction": "loud", "kwargs": ["mood", "name"]}]
    rollout = run("42", interaction=found, task=Task(QUESTION, interaction_settings={"name": "lod"}))
    assert (rollout.end, rollout.notes) == (
        End.FAILED,
        ["there is no simulated user 'lod': interaction_kwargs.name is loud or hush"],
    )
    rollout = run("42", interaction=found)
    assert rollout.notes == ["there is no simulated user None: interaction_kwargs.name is loud or hush"]
    with pytest.raises(ConfigError, match="two simulated users are called 'loud'"):
        load_interactions(written(tmp_path, "users.yaml", users({"name": "loud"}, {"name": "loud"})))


def test_a_run_refuses_a_row_that_names_nobody_before_it_begins(tmp_path: Path) -> None:
    written(tmp_path, "users.yaml", users({"name": "loud"}))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "interaction_kwargs": {"name": "x"}}\n', encoding="utf-8")
    config = {"engine": {"kind": "embedded"}, "data": {"file": "rows.jsonl"}, "output": "out"}
    file = written(tmp_path, "run.yaml", {**config, "interaction_config_path": "users.yaml"})
    with pytest.raises(ConfigError, match="there is no simulated user 'x'"):
        read_run(file)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "interaction_kwargs": {"name": ["x"]}}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there is no simulated user \['x'\]"):
        read_run(file)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n', encoding="utf-8")
    assert list(read_run(file).agent(EmbeddedEngine()).interactions) == ["loud"]
    both = {**config, "interaction_config_path": "users.yaml", "interaction_file": "users.yaml"}
    with pytest.raises(ConfigError, match="interaction_config_path: interaction_file is the same"):
        read_run(written(tmp_path, "run.yaml", both))


class Asks(BaseInteraction):
    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return Reply("And?")


def test_the_model_is_answered_so_often_and_then_has_one_more_turn() -> None:
    rollout = run("42", interaction=Asks(), budget=Budget(user_turns=2))
    assert (rollout.end, rollout.turns) == (End.TURNS, 3)
    ran: list[int] = []

    def look(a: int) -> str:
        """Look at a number."""
        ran.append(a)
        return "seen"

    rollout = run(LOOK, tools=[look], budget=Budget(user_turns=1))
    assert (rollout.end, rollout.turns, ran) == (End.TURNS, 2, [1])
    assert run("42", tools=[look], budget=Budget(user_turns=1)).end is End.ANSWER


def test_calls_beyond_the_limit_are_told_that_they_were_not_run() -> None:
    rollout = run(
        f"{LOOK}\n{LOOK}\n{LOOK}", "42", tools=[FunctionTool(look_at, name="look")], budget=Budget(parallel_calls=2)
    )
    first, second, third = results(rollout)
    assert (first, second, third.startswith("error:")) == ("1", "1", True)
    assert "1 of 3 calls" in rollout.notes[0]
    assert (rollout.tool_calls, rollout.tool_errors) == (3, 1)
