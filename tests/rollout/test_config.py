"""Configurations: the runs they define, and errors that name the line, the key and the fix."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tokentrace.demo.questions import FollowUps, question_reward, question_tasks
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.pocket import POCKET
from tokentrace.rollout.loading import ConfigError, load_interactions, load_tools
from tokentrace.rollout.loop import Budget
from tokentrace.rollout.setup import Run
from tokentrace.rollout.setup import read_run as read_any_run
from tokentrace.rollout.tools import Keep

TOOLS = '''
from tokentrace.rollout.interactions import BaseInteraction
from tokentrace.rollout.tools import BaseTool

def add(a: int, b: int) -> int:
    """Add."""
    return a + b

def judge(rollout):
    return 0.5

class Table(BaseTool):
    def __init__(self, config, tool_schema):
        self.size = config["size"]
        super().__init__(config, tool_schema)

class User(BaseInteraction):
    pass
'''
SCHEMA = "{type: function, function: {name: table, description: A table., parameters: {type: object, properties: {}}}}"
POCKET_RUN = """\
engine: {kind: embedded}
data:
  questions: {count: 2}
output: out
"""
FILE_RUN = """\
engine: {kind: embedded}
data: {file: rows.jsonl}
output: out
"""


def read_run(path: Path, **options: Any) -> Run:
    """Read a configuration as the command line does, with the demo's questions."""
    return read_any_run(path, questions=question_tasks, **options)


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    (folder / "own_tools.py").write_text(TOOLS, encoding="utf-8")
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_pockets_own_questions_need_four_lines(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, POCKET_RUN))
    assert [task.name for task in run.tasks] == ["held_back-0-107", "held_back-0-1"]
    agent = run.agent(EmbeddedEngine())
    assert agent.reward is question_reward
    assert isinstance(agent.interactions[""], FollowUps)
    assert (run.output, run.concurrency, run.seed, run.advantages) == (Path("out"), 64, None, None)


def test_all_settings_of_a_configuration_are_applied(tmp_path: Path) -> None:
    text = f"""\
        engine: {{kind: embedded}}
        renderer: {{control_tokens: reject, kwargs: {{}}}}
        tools:
          - function: own_tools:add
            name: plus
          - class_name: own_tools.Table
            config: {{size: 3}}
            tool_schema: {SCHEMA}
        interaction: {{class_name: "./own_tools.py:User", config: {{name: someone}}}}
        data: {{file: rows.jsonl, limit: 2}}
        sampling: {{temperature: 0.5, top_p: 0.9, top_k: 20, seed: 7, max_tokens: 99, min_p: 0.1,
          presence_penalty: 1, stop: ["Q:", "\\n\\n"]}}
        budget: {{turns: 3, seconds: 900, tool_seconds: 2, result_keep: tail, context: null, reward_timeout: null}}
        reward: own_tools:judge
        rollouts_per_task: 3
        advantages: group
        concurrency: 5
        output: out
        """
    rows = [
        '{"prompt": "one?", "answer": 1, "reward": 9, "tools_kwargs": {"table": {"create_kwargs": {"k": 1}}}}',
        '{"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}], '
        '"extra_info": {"interaction_kwargs": {"mood": "good"}}}',
        '{"prompt": "never read", "completion": "x"}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    run = read_run(write(tmp_path, text), concurrency=6)
    agent = run.agent(EmbeddedEngine())
    assert [tool.name for tool in agent.tools] == ["plus", "table"]
    assert agent.interactions[""].name == "someone"
    sampling = agent.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 20, 0.1)
    assert (sampling.penalties, sampling.stop) == ({"presence_penalty": 1.0}, ("Q:", "\n\n"))
    assert (sampling.seed, run.seed) == (None, 7), "one seed for all would make the rollouts of a group the same"
    limits: Any = {"seconds": 900, "tool_seconds": 2, "reward_timeout": None}
    assert agent.budget == Budget(turns=3, turn_tokens=99, result_keep=Keep.TAIL, **limits)
    assert (run.concurrency, run.advantages) == (6, "group")
    assert [task.name for task in run.tasks] == [f"row-00000{row}-{at}" for row in (0, 1) for at in range(3)]
    first, second = run.tasks[0], run.tasks[3]
    assert first.messages == [{"role": "user", "content": "one?"}]
    assert first.tool_settings == {"table": {"create_kwargs": {"k": 1}}}
    assert first.metadata == {"answer": 1, "data_reward": 9, "group": "row-000000", "member": 0}
    assert second.messages == [{"role": "user", "content": "two?"}]
    assert second.interaction_settings == {"mood": "good"}


def test_settings_that_may_change_on_resume_are_not_recorded(tmp_path: Path) -> None:
    for line, patience in (("", 600.0), ("patience: 30\n", 30.0), ("patience: null\n", None)):
        run = read_run(write(tmp_path, f"{POCKET_RUN}resume_aborted: true\n{line}"))
        assert (run.file.patience, run.agent(EmbeddedEngine()).resume_aborted) == (patience, True)
        assert run.settings.keys().isdisjoint({"patience", "resume_aborted", "concurrency", "output"})


BESIDE_POCKET = {
    "sampelling: {}": "line 5: sampelling: there is no such setting; there are engine, .*sampling",
    "advantages: gruop": "line 5: advantages: must be one of group, none, not 'gruop'",
    "budget:\n  turns: many": "line 6: budget.turns: Expected `int`",
    "budget: {turns: 0}": "line 5: budget: turns must be at least 1, not 0",
    "concurrency: 0": "line 5: concurrency: .*>= 1",
    "sampling:\n  top_k: 3\n  top_p: 2": "line 5: sampling: top_p must be",
    "budget: {turn_tokens: 1}\nsampling: {max_tokens: 2}": "line 6: sampling.max_tokens",
    "resume_aborted: true\nsampling: {presence_penalty: 1}": "line 5: resume_aborted: .*presence_penalty",
    "seed: 1\nsampling: {seed: 2}": "line 6: sampling.seed: there is a seed",
    "output: x": "line 5, .*'output' is set twice",
    "seed: 2024-13-45": "line 5, .*'2024-13-45' cannot be read",
    "budget: {max_tool_response_length: 5}": "line 5: budget.max_tool_response_length: .*result_tokens",
    "budget: {turns: 1, max_assistant_turns: 2}": "turns is the same",
    "reward: own_tools:jugde": "line 5: reward: own_tools has no jugde",
    "reward: nowhere:judge": "line 5: reward: nowhere cannot be imported",
    "tools:\n  - class_name: own_tools.User": "line 6: tools.0.class_name: is not a class with an execute method",
    "tools:\n  - class_name: own_tools.Table": "class_name: KeyError: 'size'",
    "tools: [{function: own_tools.add}, {function: own_tools.add}]": "two tools are called",
    "tools: [{function: own_tools.add}]": "line 5: tools: data.questions brings",
    "tools_file: none.yaml": "line 5: tools_file: there is no file",
    "interaction: {class_name: own_tools.Table}": "line 5: .*BaseInteraction",
    "renderer: {control_tokens: odd}": "line 5: renderer: .*control_tokens",
}
HTTP = "embedded}", f"vllm, url: 'http://x', http: {{retry: 3}}}}\ntokenizer: {POCKET}"
BAD = {
    **{f"{POCKET_RUN}{text}\n": problem for text, problem in BESIDE_POCKET.items()},
    "engine: {kind: embedded\ndata: [\n": "line 2, column 5: not valid YAML",
    "- 1\n": "must be a mapping of settings",
    "engine: &a {kind: *a}\n": "nested too deeply, or an anchor",
    "? [engine]\n: 1\n": "line 1, .*the name of a setting must be text",
    "data: {questions: {count: 1}}\n": "required field `engine`",
    POCKET_RUN.replace("embedded", "vlm"): "line 1: engine.kind: must be one of embedded, .*'vlm'",
    POCKET_RUN.replace("embedded", "vllm") + f"tokenizer: {POCKET}\n": "line 1: engine: .*address of vllm",
    POCKET_RUN.replace("embedded", "sglang"): "'tokenizer' is missing: .* that sglang serves",
    POCKET_RUN.replace("embedded", "embedded, url: x"): "line 1: engine: .*no settings",
    POCKET_RUN.replace(*HTTP): "line 1: engine.http.retry: there is no such setting",
    POCKET_RUN.replace("output: out\n", ""): "'output' is missing",
    POCKET_RUN.replace("2}", "2, split: train}"): "line 3: data.questions.split: there is no such setting",
    FILE_RUN: "line 2: data.file: there is no file or folder 'rows.jsonl'",
    FILE_RUN.replace("file: rows.jsonl", "limit: 2"): "line 2: data: 'file' is missing",
}


def test_errors_name_the_line(tmp_path: Path) -> None:
    for text, problem in BAD.items():
        with pytest.raises(ConfigError, match=problem) as raised:
            read_run(write(tmp_path, text))
        assert "run.yaml" in str(raised.value)


def test_unusable_rows_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, FILE_RUN)
    for row, problem in {
        '{"prompt": "x"}\n{"text": 1}': "rows.jsonl, row 2: .*has no conversation",
        '{"prompt": "x"}\n{"prompt"': "rows.jsonl, row 2: not valid JSON",
        '{"messages": [{"role": "assistant", "content": "x"}]}': "no message that a model could answer",
        '{"prompt": "x", "tools_kwargs": [1]}': "tools_kwargs",
        '{"prompt": "x", "tools_kwargs": "{"}': "not valid JSON",
        '{"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}': "there is no tool 'f'",
        '{"prompt": "x", "chat_template_kwargs": {"a": 1}}': "renderer.kwargs",
    }.items():
        (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8")
        with pytest.raises(ConfigError, match=f"line 2: data.file: .*{problem}"):
            read_run(path)


def test_tools_and_interactions_can_have_their_own_files(tmp_path: Path) -> None:
    text = f"""\
        tools:
          - class_name: "own_tools.Table"
            config: {{size: 3}}
            tool_schema: {SCHEMA}
        """
    tools = load_tools(write(tmp_path, text, "tools.yaml"))
    assert (tools[0].name, tools[0].config) == ("table", {"size": 3})
    for section in ("{class_name: own_tools.User, config: {}}", "[{class_name: own_tools.User}]"):
        users = load_interactions(write(tmp_path, f"interaction: {section}\n", "user.yaml"))
        assert users[""].name == "User"
    write(tmp_path, "interaction: []\n", "none.yaml")
    with pytest.raises(ConfigError, match=r"none.yaml, line 1: interaction: there must be"):
        load_interactions(tmp_path / "none.yaml")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}', encoding="utf-8")
    run = read_run(write(tmp_path, FILE_RUN + "tools_file: tools.yaml\ninteraction_file: user.yaml\n"))
    assert [tool.name for tool in run.tools] == ["table"]
    assert run.settings["tools_file"]["tools"][0]["config"] == {"size": 3}, "what the file says, not its name alone"


def test_questions_are_only_accepted_if_the_caller_provides_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3: data.questions: there is no such setting"):
        read_any_run(write(tmp_path, POCKET_RUN))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 4: reward: 'questions' must be module:name"):
        read_run(write(tmp_path, FILE_RUN + "reward: questions\n"))


def test_addresses_and_secrets_are_neither_shown_nor_recorded(tmp_path: Path) -> None:
    http = "{retries: 0, headers: {X-Key: hush}}"
    engine = f"engine: {{kind: vllm, url: 'http://me:hush@127.0.0.1:9/v1', http: {http}}}\ntokenizer: {POCKET}\n"
    run = read_run(write(tmp_path, engine + POCKET_RUN.partition("\n")[2]))
    assert run.settings["engine"] == {"kind": "vllm"}
    with pytest.raises(ConfigError, match=r"line 1: engine.url: http://127.0.0.1:9/v1/v1/models: ") as raised:
        asyncio.run(run.connect())
    assert "hush" not in str(raised.value)
