"""Tools and simulated users, ours and those of other libraries: a fault in foreign code affects one rollout only."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.rollout.support import ANSWER, CALL, QUESTION, TASK, agent, call, results, run
from tokentrace import EmbeddedEngine
from tokentrace.rollout import Budget, ConfigError, End, Task, load_interactions, load_tools, read_run
from tokentrace.rollout.batch import run_rollouts
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.record import TurnMetrics
from tokentrace.rollout.store import RolloutStore
from tokentrace.rollout.tools import FunctionTool, ToolResult, as_result
from tokentrace.values.functions import function_schema


def test_results_are_in_the_order_of_the_calls() -> None:
    gate, order = asyncio.Event(), list[str]()

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

    rollout = run(call("slow") + call("quick"), ANSWER, tools=[slow, quick])
    assert order == ["quick", "slow"]
    assert results(rollout) == ["slow", "quick"]
    assert rollout.tool_calls == 2


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def boom() -> str:
    """Raise."""
    raise ValueError("out of order")


async def hang() -> None:
    """Never come back."""
    await asyncio.Event().wait()


def odd() -> Any:
    """Return what is no JSON."""
    return {1}


async def cancelled() -> Any:
    """Wait for something that somebody cancelled."""
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    return await task


async def exits() -> Any:
    """Exit."""
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("tool", "text", "result", "errors"),
    [
        (boom, call("boom"), "error: ValueError: out of order", 1),
        (add, call("add", a=1, c=2), "error: TypeError: add() got an unexpected keyword argument 'c'", 1),
        (hang, call("hang"), "error: hang took longer than 0.1 s", 1),
        (add, call("subtract"), "error: there is no tool 'subtract'; there are: add", 1),
        (add, call("add").replace("}}", ""), "error: ", 1),
        (add, call("add").replace("name", "nam"), "error: ", 1),
        (add, call("add", a=2), "3", 0),
        (odd, call("odd"), "{1}", 0),
        (cancelled, call("cancelled"), "error: RuntimeError: cancelled was cancelled", 1),
        (exits, call("exits"), "error: RuntimeError: SystemExit: 3", 1),
    ],
)
def test_all_outcomes_of_calls_become_results(tool: Callable[..., Any], text: str, result: str, errors: int) -> None:
    rollout = run(text, ANSWER, tools=[tool], budget=Budget(tool_timeout=0.1 if tool is hang else 60.0))
    assert results(rollout)[0].startswith(result)
    assert (rollout.end, rollout.tool_errors) == (End.ANSWER, errors)


def test_a_tool_without_settings_refuses_them() -> None:
    rollout = run(tools=[add], task=Task(QUESTION, tool_settings={"add": {"depth": 1}}))
    assert (rollout.end, rollout.notes) == (End.FAILED, ["there are settings for tool 'add', which takes none"])


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


class Unsayable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({("a", "b"): 1}, {"('a', 'b')": 1}),
        (circular(), {"self": "an object with self"}),
        ({"a": {("b",): 1}}, {"a": "an object with tuple"}),
        ({"a": Unsayable()}, {"a": "an object of type Unsayable"}),
        ({"a": 10**5000}, {"a": "an integer of 16610 bits"}),
        (5, {"value": 5}),
    ],
)
def test_metrics_that_json_cannot_hold_become_text(odd: Any, expected: Any) -> None:
    turn = TurnMetrics()
    turn.add("tool", "look", None, odd)
    assert turn.metrics == [{"tool": "look", **expected}]


def test_a_simulated_user_cannot_change_the_record() -> None:
    class Rewrites(BaseInteraction):
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            messages[-1]["content"] = "changed"
            messages.clear()

    rollout = run(interaction=Rewrites())
    assert [message["content"] for message in rollout.messages] == ["What is 6 * 7?", "It is 42."]


# -- rewards


@pytest.mark.parametrize("rewards", [(1e39,), (-1e39,), (3e38, 3e38)])
def test_a_reward_outside_float32_fails_its_rollout_but_rows_are_written(rewards: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    tool_results = iter([ToolResult("42", one) for one in rewards])
    rollout_agent = agent(CALL * len(rewards), ANSWER, tools=[FunctionTool(lambda: next(tool_results), name="look")])
    with closing(RolloutStore(tmp_path)) as store:
        summary = asyncio.run(run_rollouts(rollout_agent, [TASK], store=store))
        assert summary.ends == {"failed": 1}
        assert "float32" in store.finished[0]["notes"][-1]
        assert store.write_rows(advantages="group").is_file()


def look_at(a: int) -> str:
    """Look at a number."""
    return str(a)


SCHEMA = function_schema(look_at, "look")
LOOK = call("look", a=1)


@dataclass
class Response:
    """Like verl's ToolResponse."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class Schema(BaseModel):
    """Like verl's schema: a model that drops unknown fields."""

    type: str
    function: dict[str, Any]


class Foreign:
    """A tool with verl's interface that records its calls."""

    def __init__(self, config: dict[str, Any], tool_schema: Schema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.diary: list[Any] = []
        print("made")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Response]:
        self.diary.append(("create", instance_id, kwargs))
        return f"own-{instance_id}", Response()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
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


def test_every_step_gets_its_own_arguments_and_the_id_from_create() -> None:
    tool = Foreign({}, Schema(**SCHEMA))
    settings = {
        "create_kwargs": {"ground_truth": "42"},
        "execute_kwargs": {"deep": True},
        "calc_reward_kwargs": {"gives": 2.0},
        "release_kwargs": {"keep": 1},
    }
    task = Task(QUESTION, name="one", tool_settings={"look": settings})
    rollout = run(LOOK + LOOK, LOOK, "42", tools=[tool], task=task)
    assert tool.diary == [
        ("create", "one", {"ground_truth": "42", "create_kwargs": {"ground_truth": "42"}}),
        ("execute", "own-one", {"a": 1}, {"deep": True}, ["user", "assistant"], 1),
        ("execute", "own-one", {"a": 1}, {"deep": True}, ["user", "assistant"], 2),
        ("execute", "own-one", {"a": 1}, {"deep": True}, ["user", "assistant", "tool", "tool", "assistant"], 3),
        ("calc_reward", "own-one", {"gives": 2.0}),
        ("release", "own-one", {"keep": 1}),
    ]
    assert [turn.reward for turn in rollout.per_turn] == [0.5, 0.25, None]
    assert (rollout.end, rollout.reward, rollout.notes) == (End.ANSWER, 2.0 + 0.75, [])
    assert results(rollout) == ["seen"] * 3
    assert rollout.per_turn[0].metrics == [{"tool": "look", "depth": 1}] * 2
    assert rollout.schemas == [SCHEMA]


def test_results_in_verls_shapes() -> None:
    assert as_result(Response("x"), "look") == ToolResult("x")
    assert as_result((Response("x"), 0.5), "look") == ToolResult("x", 0.5)
    assert as_result((Response(None), None, None), "look") == ToolResult("")
    assert as_result((Response("x"),), "look") == ToolResult("x")
    assert as_result((1, 2), "look") == ToolResult("[1, 2]"), "two values are a result"
    note = "look returned 2 images and 1 video, which cannot be shown here"
    camera = as_result((Response("a cat", image=[1, 2], video=[3]), 0.0, {}), "look")
    assert camera == ToolResult(f"a cat\nerror: {note}", 0.0, failed=True, note=note)


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


def write(folder: Path, name: str, value: Any) -> Path:
    (folder / "theirs.py").write_text(TOOLS, encoding="utf-8")
    (folder / name).write_text(json.dumps(value), encoding="utf-8")
    return folder / name


def tool(**config: Any) -> dict[str, Any]:
    schema = json.loads(json.dumps(SCHEMA)) | {"strict": True}
    return {"class_name": "./theirs.py:Tool", "config": {"type": "native", **config}, "tool_schema": schema}


def test_foreign_classes_load_with_the_schema_type_they_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (loaded,) = load_tools(write(tmp_path, "tools.yaml", {"tools": [tool(word="hello")]}))
    assert capsys.readouterr().out == "", "what a constructor prints does not end up among results"
    assert loaded.tool_schema["strict"] is True, "the model is shown what the file says, not what the class kept"
    rollout = run(LOOK, "42", tools=[loaded])
    assert rollout.messages[2]["content"] == "hello"
    with pytest.raises(ConfigError, match="is an OmegaConf placeholder"):
        load_tools(write(tmp_path, "tools.yaml", {"tools": [tool(word=["${oc.env:WORD}"])]}))


def users(*sections: dict[str, Any]) -> dict[str, Any]:
    return {"interaction": [{"class_name": "./theirs.py:TalkInteraction", "config": {}, **one} for one in sections]}


def test_several_simulated_users_are_chosen_by_name(tmp_path: Path) -> None:
    two = users({"name": "loud"}, {"class_name": "./theirs.py:HushInteraction"})
    interactions = load_interactions(write(tmp_path, "users.yaml", two))
    assert {name: user.name for name, user in interactions.items()} == {"loud": "loud", "hush": "hush"}
    task = Task(QUESTION, name="one", interaction_settings={"name": "loud", "mood": 1})
    rollout = run("42", interaction=interactions, task=task)
    assert (rollout.end, rollout.reward) == (End.USER, 0.5)
    assert rollout.per_turn[0].metrics == [{"interaction": "loud", "kwargs": ["mood", "name"]}]
    rollout = run("42", interaction=interactions, task=Task(QUESTION, interaction_settings={"name": "lod"}))
    assert rollout.end is End.FAILED
    assert rollout.notes == ["there is no simulated user 'lod': interaction_kwargs.name is loud or hush"]
    assert "no simulated user None" in run("42", interaction=interactions).notes[0]
    with pytest.raises(ConfigError, match="two simulated users are called 'loud'"):
        load_interactions(write(tmp_path, "users.yaml", users({"name": "loud"}, {"name": "loud"})))


def test_a_row_that_names_an_unknown_user_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    write(tmp_path, "users.yaml", users({"name": "loud"}))
    config = {"engine": {"kind": "embedded"}, "data": {"file": "rows.jsonl"}, "output": "out"}
    file = write(tmp_path, "run.yaml", {**config, "interaction_config_path": "users.yaml"})
    for name in ("x", ["x"]):
        write(tmp_path, "rows.jsonl", {"prompt": "?", "interaction_kwargs": {"name": name}})
        with pytest.raises(ConfigError, match=re.escape(f"there is no simulated user {name!r}")):
            read_run(file)
    write(tmp_path, "rows.jsonl", {"prompt": "?"})
    assert list(read_run(file).agent(EmbeddedEngine()).interactions) == ["loud"]
    both = {**config, "interaction_config_path": "users.yaml", "interaction_file": "users.yaml"}
    with pytest.raises(ConfigError, match="interaction_config_path: interaction_file is the same"):
        read_run(write(tmp_path, "run.yaml", both))


def test_user_turns_limit_the_replies_and_allow_one_more_model_turn() -> None:
    class Asks(BaseInteraction):
        async def generate_response(self, *_: Any, **__: Any) -> Reply:
            return Reply("And?")

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


def test_calls_beyond_the_limit_get_an_error_as_their_result() -> None:
    tool = FunctionTool(look_at, name="look")
    rollout = run(f"{LOOK}\n{LOOK}\n{LOOK}", "42", tools=[tool], budget=Budget(parallel_calls=2))
    first, second, third = results(rollout)
    assert (first, second, third.startswith("error:")) == ("1", "1", True)
    assert "1 of 3 calls" in rollout.notes[0]
    assert (rollout.tool_calls, rollout.tool_errors) == (3, 1)
