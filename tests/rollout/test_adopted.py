"""Tools and simulated users of other libraries: whatever has the methods is one, and is called as it expects."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.rollout.support import QUESTION, results, run
from tokentrace.conversation.functions import function_schema
from tokentrace.rollout import Budget, ConfigError, End, Task, load_interactions, load_tools, read_run
from tokentrace.rollout.interactions import BaseInteraction, Reply
from tokentrace.rollout.tools import ToolResult, as_result


def look(a: int) -> str:
    """Look at a number."""
    return str(a)


SCHEMA = function_schema(look)
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


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
    rollout = run(CALL, CALL, "42", tools=[tool], task=task)
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

    rollout = run(CALL, "42", tools=[Camera({}, Schema(**SCHEMA))])
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
    rollout = run(CALL, "42", tools=[made])
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
    assert (rollout.end, rollout.notes) == (End.FAILED, ["there is no simulated user 'lod'; there are loud, hush"])
    rollout = run("42", interaction=found)
    assert rollout.notes == ["interaction_kwargs must name one of the simulated users: loud, hush"]
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
    assert list(read_run(file).interactions) == ["loud"]
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

    rollout = run(CALL, tools=[look], budget=Budget(user_turns=1))
    assert (rollout.end, rollout.turns, ran) == (End.TURNS, 2, [1])
    assert run("42", tools=[look], budget=Budget(user_turns=1)).end is End.ANSWER


def test_calls_beyond_the_limit_are_told_that_they_were_not_run() -> None:
    rollout = run(f"{CALL}\n{CALL}\n{CALL}", "42", tools=[look], budget=Budget(parallel_calls=2))
    first, second, third = results(rollout)
    assert (first, second, third.startswith("error:")) == ("1", "1", True)
    assert "1 of 3 calls" in rollout.notes[0]
    assert (rollout.tool_calls, rollout.tool_errors) == (3, 1)
