"""``tokentrace rollout``: from a configuration to rows, resumed and interrupted runs, and errors."""

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.engines.faults import UNAVAILABLE, FaultyEngine
from tests.servers import json_server
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.cli.rollout import _Display
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.engines.protocol import SamplingParams
from tokentrace.engines.routing import Router
from tokentrace.pocket import POCKET
from tokentrace.rollout.loop import Agent, Task
from tokentrace.rollout.store import RolloutStore

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "configs" / "pocket.yaml"
RUN = """\
engine: {kind: embedded}
data: {questions: {count: 2}}
sampling: {temperature: 0.8, max_tokens: 32}
concurrency: 1
rollouts_per_task: 2
reward: judge.py:judge
seed: 4
"""
JUDGE = """\
import os, signal
from pathlib import Path

calls = 0

def judge(rollout):
    global calls
    calls += 1
    folder = Path(__file__).parent
    if (folder / "interrupt").exists() and calls == 3:
        os.kill(os.getpid(), signal.SIGINT)
    if (folder / "fail").exists() and rollout.task.metadata["member"] == 1:
        raise RuntimeError("the judge is ill")
    return float(rollout.task.metadata["member"])
"""


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["rollout", *map(str, args)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(JUDGE, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    return tmp_path / "run.yaml"


def test_the_example_makes_a_row_of_exactly_the_sampled_tokens_for_each_rollout(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(CONFIG, "-o", out, "--json", "--limit", "3")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert metrics == json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    assert (metrics["rollouts"], metrics["samples"], metrics["breaks"]) == (6, 6, 0)
    assert "sampled tokens" in result.stderr
    with closing(RolloutStore(out)) as store:
        trajectories = {row["name"]: trajectory for row, trajectory in store.trajectories()}
    samples = list(read_samples(out / "rows.parquet"))
    renderer = create_renderer(POCKET)
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        trajectory = trajectories[sample.name]
        np.testing.assert_array_equal(sample.ids, trajectory.stream())
        sampled = np.concatenate([turn.tokens.ids for turn in trajectory.turns()])
        np.testing.assert_array_equal(sample.ids[sample.mask], sampled)
        assert sample.logprobs is not None
        assert (sample.logprobs[sample.mask] <= 0).all()
        assert sample.advantages is not None
        assert not sample.advantages[~sample.mask].any()
        groups[sample.name.rpartition("-")[0]].append(float(sample.advantages[sample.mask][0]))
        assert renderer.tokenizer.decode(sample.ids).startswith("<|bos|>")
    assert sum(sample.trained for sample in samples) == metrics["sampled"]
    assert all(abs(sum(values)) < 1e-4 for values in groups.values())
    metadata = read_metadata(out / "rows.parquet")
    assert {group: len(names) for group, names in metadata["groups"].items()} == dict.fromkeys(groups, 2)
    assert metadata["settings"]["sampling"] == {"temperature": 1.0, "max_tokens": 256}


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run(config, "-o", out)
    assert first.exit_code == 0, first.output
    assert "rollouts          4\n" in first.stdout
    again = run(config, "-o", out)
    assert again.exit_code == 0
    assert "rollouts          4 (4 by an earlier run)" in again.stdout
    assert "continuing: 4 of 4 rollouts finished" in again.stderr
    other = run(config, "-o", out, "--seed", "5")
    assert other.exit_code == 2
    assert "seed was 4 and is 5 now; --fresh discards that run" in other.stderr
    fresh = run(config, "-o", out, "--seed", "5", "--fresh", "-q")
    assert (fresh.exit_code, fresh.output) == (0, "")
    assert json.loads((out / "metrics.json").read_text(encoding="utf-8"))["resumed"] == 0
    fewer = run(config, "-o", out, "--seed", "5", "--limit", "1")
    assert "tasks was 2 and is 1 now" in fewer.stderr
    (out / "run.json").write_text("its settings", encoding="utf-8")
    with closing(RolloutStore(out)):
        second = run(config, "-o", out)
    assert second.exit_code == 2
    assert "another process is writing rollouts to" in second.stderr
    assert (out / "run.json").read_text(encoding="utf-8") == "its settings"


def test_ctrl_c_keeps_finished_rollouts_and_prints_how_to_continue(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flag = tmp_path / "interrupt"
    flag.touch()
    setup = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # shells' jobs ignore it
    program = f"{setup}; from tokentrace.cli import main; main()"
    command = [sys.executable, "-c", program, "rollout", str(config), "-o", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 130, result.stderr
    assert "of 4 rollouts finished and kept; the same command continues" in result.stderr
    assert "Traceback" not in result.stderr
    flag.unlink()
    with closing(RolloutStore(out)) as store:
        finished, unfinished = len(store.finished), len(store.unfinished)
    assert 2 <= finished <= 3
    resumed = run(config, "-o", out, "--json", "-q")
    metrics = json.loads(resumed.stdout)
    assert (metrics["rollouts"], metrics["resumed"], metrics["unfinished_before"]) == (4, finished, unfinished)
    assert len(list(read_samples(out / "rows.parquet"))) == 4


def test_rollouts_that_fail_are_exit_code_1_and_can_be_tried_again(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flag = tmp_path / "fail"
    flag.touch()
    config.write_text(RUN + "advantages: group\n", encoding="utf-8")
    failed = run(config, "-o", out)
    assert failed.exit_code == 1
    assert "failed 2" in failed.stdout
    assert "2 rollouts without a reward: no advantages for their rows" in failed.stdout
    assert sum(sample.advantages is None for sample in read_samples(out / "rows.parquet")) == 2
    assert "--retry runs them again" in failed.stdout
    assert "advantage 0 for groups of one rollout" in failed.stdout
    with closing(RolloutStore(out)) as store:
        assert "RuntimeError: the judge is ill" in [note for row in store.finished for note in row["notes"]]
    flag.unlink()
    assert run(config, "-o", out).exit_code == 1, "finished is finished"
    retried = run(config, "-o", out, "--retry", "--json")
    assert retried.exit_code == 0, retried.output
    metrics = json.loads(retried.stdout)
    assert (metrics["retried"], metrics["resumed"], metrics["reward"]) == (2, 2, 0.5)


def test_without_pyarrow_everything_but_the_rows_is_written(config: Path, tmp_path: Path, monkeypatch: Any) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as without:
        for name in ("pyarrow", "pyarrow.parquet"):
            without.setitem(sys.modules, name, None)
        result = run(config, "-o", out)
    assert result.exit_code == 2
    assert "install tokentrace[data]; the trajectories are kept" in result.stderr
    assert json.loads((out / "metrics.json").read_text(encoding="utf-8"))["rollouts"] == 4
    assert not (out / "rows.parquet").exists()
    assert run(config, "-o", out).exit_code == 0
    assert len(list(read_samples(out / "rows.parquet"))) == 4


# -- servers, a data file and tools

RENDERER = create_renderer(POCKET)
CALL = RENDERER.tokenizer.encode('<tool_call>\n{"name": "secret", "arguments": {}}\n</tool_call><|end|>').tolist()
ANSWER = RENDERER.tokenizer.encode("It is 42.<|end|>").tolist()
TOOL = """\
from tokentrace.rollout.tools import BaseTool

class Secret(BaseTool):
    async def create(self, instance_id, **kwargs):
        self.known = {**getattr(self, "known", {}), instance_id: kwargs["word"]}

    async def execute(self, instance_id, parameters, **kwargs):
        return self.config["before"] + self.known[instance_id], 0.25, None

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0

    async def release(self, instance_id, **kwargs):
        del self.known[instance_id]
"""
TOOLS_FILE = """\
tools:
  - class_name: secret_tool.Secret
    config: {before: "the word is "}
    tool_schema:
      type: function
      function: {name: secret, description: Tell., parameters: {type: object, properties: {}}}
"""


class LlamaCpp:
    """A llama.cpp server that samples a call, then an answer. If `broken`, every completion is a 500."""

    url = ""
    broken = False

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/props":
            return 200, {"default_generation_settings": {"n_ctx": 4096}, "model_alias": "fake"}
        if body is None:
            return 404, {}
        if self.broken:
            return 500, {"error": {"message": "out of order"}}
        prompt = body["prompt"]
        self.prompts.append(prompt)
        ids = ANSWER if "the word is" in RENDERER.tokenizer.decode(prompt) else CALL
        return 200, {
            "tokens": ids,
            "timings": {"cache_n": len(prompt) - 1},
            "tokens_evaluated": len(prompt),
            "stop_type": "eos",
            "completion_probabilities": [{"id": one, "prob": 0.5} for one in ids],
        }


@pytest.fixture
def servers() -> Iterator[list[LlamaCpp]]:
    fakes = [LlamaCpp(), LlamaCpp()]
    with json_server(fakes[0]) as fakes[0].url, json_server(fakes[1]) as fakes[1].url:
        yield fakes


def test_two_servers_a_file_of_rows_and_a_tool_from_yaml(tmp_path: Path, servers: list[LlamaCpp]) -> None:
    config = tmp_path / "run.yaml"
    (tmp_path / "secret_tool.py").write_text(TOOL, encoding="utf-8")
    (tmp_path / "tools.yaml").write_text(TOOLS_FILE, encoding="utf-8")
    rows = [
        {"prompt": f"What is the word {number}?", "level": number, "tools_kwargs": {"secret": {"word": f"w{number}"}}}
        for number in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    urls = ", ".join(server.url for server in servers)
    config.write_text(
        f"engine: {{kind: llama.cpp, urls: [{urls}], http: {{retries: 0}}}}\ntokenizer: {POCKET}\n"
        "tools_file: tools.yaml\ndata: {file: rows.jsonl}\noutput: out\npatience: 0\n",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    for server in servers:
        server.broken = True
    stopped = run(config, "-o", out)
    assert stopped.exit_code == 3, stopped.output
    assert "stopped: the engine did not answer for 0 s: no endpoint answered" in stopped.stderr
    assert "0 of 4 rollouts finished and kept; the same command continues with the rest" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    servers[0].broken = False
    result = run(config, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    metrics = json.loads(result.stdout)
    assert [one["name"] for one in metrics["circuits"]] == [server.url for server in servers]
    assert [one["state"] for one in metrics["circuits"]] == ["closed", "open"]
    assert metrics["circuits"][1]["failed"] >= 1
    assert f"{servers[0].url} closed; {servers[1].url} open for" in result.stderr
    assert (metrics["ends"], metrics["tool_calls"], metrics["reward"]) == ({"answer": 4}, 4, 1.25)
    assert metrics["prompt_tokens"] - metrics["cached_tokens"] == 8, "all but one token of each prompt"
    assert "cached tokens" in result.stderr
    with closing(RolloutStore(out)) as store:
        rollouts = list(store.trajectories())
    streams = [trajectory.stream().tolist() for _, trajectory in rollouts]
    finished = {row["metadata"]["level"]: row["messages"] for row, _ in rollouts}
    assert [finished[number][2]["content"] for number in range(4)] == [f"the word is w{number}" for number in range(4)]
    servers[1].broken = False
    both = run(config, "-o", tmp_path / "both", "--json", "-q")
    assert {one["failed"] for one in json.loads(both.stdout)["circuits"]} == {0}
    assert all(server.prompts for server in servers), "both were used"
    for prompt in [prompt for server in servers for prompt in server.prompts]:
        assert any(stream[: len(prompt)] == prompt for stream in streams), "what was sent is what is kept"
    trained = [sample.ids[sample.mask].tolist() for sample in read_samples(out / "rows.parquet")]
    assert trained == [CALL + ANSWER] * 4


def test_progress_shows_circuits_and_outages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Display, "_EVERY", 0.0)
    engines = [FaultyEngine(lambda *_: ANSWER, vocab_size=RENDERER.tokenizer.vocabulary.size) for _ in range(2)]
    engines[1].faults.append(UNAVAILABLE)
    router = Router(engines, names=["http://a", "http://b"])
    asyncio.run(router.generate([1], SamplingParams(1), session="x"))
    asyncio.run(router.generate([1], SamplingParams(1), session="y"))
    with closing(RolloutStore(tmp_path)) as store, _Display(2, store, False, router) as display:
        display.outage("asking again in 1 s")
        display.outage("asking again in 2 s")
        display.outage(None)
        display.update(asyncio.run(Agent(router, RENDERER).run(Task([{"role": "user", "content": "?"}]))))
    output = " ".join(capsys.readouterr().err.split())
    assert output.count("asking again in 1 s") == 1
    assert "asking again in 2 s" not in output, "now and then, not each time"
    assert "the engine answers again" in output
    assert "engines: 1 closed, http://b open for" in output
    assert "1 of 2 rollouts" in output
