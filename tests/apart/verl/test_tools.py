"""Tools of verl 0.9.1 in our loop: subclasses of its base class from its YAML, and its function tools.

The GSM8K and search tools and the simulated users left the package after 0.7.1: `tests/apart/verl_tools` tests those.
"""

import asyncio
import importlib.metadata
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.tools.base_tool import BaseTool
    from verl.tools.function_tool import FunctionTool, load_function_tools_from_path, normalize_function_tool_return
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.tools.tool_registry import initialize_tools_from_config, load_all_tools

from tests.apart.shared import RENDERER, call, scripted
from tokentrace.rollout import Agent, End, Rollout, Task, as_tools, load_tools
from tokentrace.rollout.tools import as_result

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "items": {"type": "string"}, "description": "Queries."}},
            "required": ["query_list"],
        },
    },
}


def stubs() -> Path:
    """The path of verl's own test tools, which its wheel installs."""
    files = importlib.metadata.files("verl") or []
    (stub,) = [one for one in files if one.name == "_stub_search_tools.py"]
    return Path(str(stub.locate()))


def run(tools: list[Any], *turns: str, **settings: Any) -> Rollout:
    task = Task([{"role": "user", "content": "Go."}], name="one", tool_settings=settings)
    return asyncio.run(Agent(scripted(*turns, "Done."), RENDERER, tools=tools).run(task))


def test_a_native_tool_loads_from_verls_yaml_as_verl_loads_it(tmp_path: Path) -> None:
    (tmp_path / "stubs.py").write_text(stubs().read_text(encoding="utf-8"), encoding="utf-8")
    section = {"class_name": "stubs.StubSearchTool", "config": {"type": "native", "depth": 2}, "tool_schema": SCHEMA}
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": [section]}), encoding="utf-8")
    (ours,) = load_tools(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (theirs,) = initialize_tools_from_config(str(file))
    assert isinstance(ours.tool, BaseTool)
    assert (ours.tool.tool_schema, ours.tool.config) == (theirs.tool_schema, theirs.config)
    assert ours.tool_schema == SCHEMA, "verl's schema class drops items; the model is shown what the file says"
    rollout = run([ours], call("search", query_list=["a", "b"]))
    expected, reward, metrics = asyncio.run(theirs.execute("x", {"query_list": ["a", "b"]}))
    assert rollout.messages[2]["content"] == expected.text == "hits-for:a; hits-for:b"
    assert rollout.per_turn[0].reward == reward
    assert rollout.per_turn[0].metrics == [{"tool": "search", **metrics}]
    assert (rollout.end, rollout.reward, rollout.notes) == (End.ANSWER, 0.0, [])


class Recorder(BaseTool):
    """Reads its settings and its history as verl 0.9 passes them."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.truth = kwargs["create_kwargs"]["ground_truth"]
        return "mine", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        data = kwargs["agent_data"]
        roles = [message["role"] for message in data.messages]
        return ToolResponse(text=f"{instance_id} {self.truth} {roles} {data.tools_kwargs}"), 0.5, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(kwargs["scale"])


def test_a_tool_gets_the_arguments_that_verl_passes() -> None:
    tool = Recorder({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    settings = {"create_kwargs": {"ground_truth": "42"}, "calc_reward_kwargs": {"scale": 3}}
    rollout = run([tool], call("search", query_list=[]), search=settings)
    assert rollout.messages[2]["content"] == f"mine 42 ['user', 'assistant'] { ({'search': settings}) }"
    assert (rollout.end, rollout.reward) == (End.ANSWER, 3.5)
    assert as_tools([tool])[0].tool_schema == tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)


def test_images_of_a_tool_response_are_refused_by_name() -> None:
    class Camera(Recorder):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return ToolResponse(text="a cat", image=[object()]), 0.0, {}

    tool = Camera({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    settings = {"create_kwargs": {"ground_truth": "42"}, "calc_reward_kwargs": {"scale": 3}}
    rollout = run([tool], call("search", query_list=[]), search=settings)
    assert rollout.messages[2]["content"] == "a cat\nerror: search returned 1 image, which cannot be shown here"
    assert rollout.notes == ["search returned 1 image, which cannot be shown here"]


FUNCTIONS = '''
from verl.tools.function_tool import function_tool

@function_tool("look_up")
def look(word: str, times: int = 1) -> dict:
    """Look a word up.

    Args:
        word: The word.
        times: How often.
    """
    return {"word": word * times}

@function_tool
async def shout(word: str) -> tuple:
    """Say it louder.

    Args:
        word: The word.
    """
    return word.upper(), 0.5, {"loud": True}
'''


def test_function_tools_are_tools(tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS, encoding="utf-8")
    theirs = load_all_tools(None, str(file))
    assert theirs == load_function_tools_from_path(str(file))
    assert all(isinstance(tool, FunctionTool) for tool in theirs)
    rollout = run(theirs, call("look_up", word="ab", times=2), call("shout", word="ab"))
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == [
        '{"word": "abab"}',
        "AB",
    ]
    assert [turn.reward for turn in rollout.per_turn] == [None, 0.5, None]
    assert rollout.schemas == [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in theirs], (
        "what verl shows the model"
    )


TEXT = ToolResponse(text="x")


@pytest.mark.parametrize(
    "returned",
    [
        *("text", {"a": "ü"}, TEXT, ToolResponse(), (TEXT,), (TEXT, 0.5), (TEXT, None, None)),
        *(("x", 1, {"m": 1}), ({"a": 1}, 0.25, None), 3),
    ],
    ids=str,
)
def test_results_of_tools_are_read_as_in_verl(returned: Any) -> None:
    """Except for the reward of an ungraded call: verl's is 0.0, ours is None."""
    response, reward, metrics = normalize_function_tool_return(returned)
    ours = as_result(returned, "tool")
    assert (ours.content, ours.reward or 0.0, dict(ours.metrics)) == (response.text or "", reward, metrics)
