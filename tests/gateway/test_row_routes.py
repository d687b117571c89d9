"""Rows over HTTP: what the engine saw and said comes out, in three formats; what is asked wrongly is said."""

from __future__ import annotations

import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.gateway.server import Served, gateway_server
from tokentrace import create_renderer
from tokentrace.engines import Engine
from tokentrace.engines.scripted import Sampled, ScriptedEngine
from tokentrace.pocket import POCKET

RENDERER = create_renderer(POCKET)
STOP = RENDERER.get_stop_token_ids()[0]
SAID: list[Sampled] = []


def script(prompt: Any, sampling: Any) -> Sampled:
    """Something else each time, with logprobs and experts that can be told apart."""
    number = len(SAID)
    ids = [300 + number, 400 + number, STOP]
    experts = [[[number, at]] for at in range(3)]
    SAID.append(Sampled(ids, [-number - 0.25, -number - 0.5, -number - 0.75], {"routed_experts": experts}))
    return SAID[-1]


def engine() -> Engine:
    return ScriptedEngine(script, piece=1, version="v7", vocab_size=4096)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server(engine, RENDERER) as server:
        yield server


def ask(served: Served, session: str, messages: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "pocket", "messages": messages, **more}
    status, answer = served.call("POST", f"/sessions/{session}/v1/chat/completions", body)
    assert status == 200, answer
    reply: dict[str, Any] = answer["choices"][0]["message"]
    return reply


def fetched(served: Served, path: str) -> tuple[bytes, Any]:
    with urllib.request.urlopen(served.url + path, timeout=60) as answer:
        return answer.read(), answer.headers


def test_rows_are_what_the_engine_saw_and_said(served: Served) -> None:
    seen = len(served.prompts)
    messages: list[Any] = [{"role": "user", "content": "What is 17 * 23?"}]
    for text in ("And more?", "And then?"):
        messages += [ask(served, "exact", messages), {"role": "user", "content": text}]
    ask(served, "exact", messages)
    ask(served, "exact", messages, top_logprobs=2, logprobs=True)  # another reply to the same
    one, two = served.rows("exact")
    prompts, said = served.prompts[seen:], SAID[seen:]
    assert [turn["number"] for row in (one, two) for turn in row["turns"]] == [0, 1, 2, 3]
    for row in (one, two):
        for turn in row["turns"]:
            start, stop, number = turn["start"], turn["stop"], turn["number"]
            assert row["input_ids"][:start] == prompts[number]
            assert row["input_ids"][start:stop] == said[number].ids
            assert np.array_equal(row["logprobs"][start:stop], np.float32(said[number].logprobs))
            assert row["routed_experts"][start:stop] == said[number].channels["routed_experts"]
            assert row["loss_mask"][start:stop] == [True] * 3
            assert (turn["finish_reason"], turn["dialect"]) == ("stop", "chat")
        assert row["num_trained"] == 3 * len(row["turns"])
        assert {span["version"] for span in row["versions"]} == {'"v7"'}
    assert (one["cause"], two["cause"]) == ("", "retry")
    assert one["top_logprobs"] is None
    assert [len(entry) for entry in two["top_logprobs"][-3:]] == [2, 2, 2]
    assert json.loads(one["messages"])[0] == messages[0]


def test_formats_rewards_and_states(served: Served) -> None:
    for name in ("batch-a", "batch-b"):
        ask(served, name, [{"role": "user", "content": name}])
        assert served.call("POST", f"/sessions/{name}/rewards", {"reward": 0.5})[0] == 200
    assert served.call("POST", f"/sessions/{name}/rewards", {"rewards": [{"turn": 0, "reward": 1}]})[0] == 200
    assert served.call("POST", "/sessions/batch-a/seal")[0] == 200
    lines, headers = fetched(served, "/rows?format=jsonl&search=batch-&keep_state=true")
    assert headers["content-type"] == "application/x-ndjson"
    assert served.state("batch-a")["state"] == "sealed"
    rows = {row["session"]: row for row in map(json.loads, lines.splitlines())}
    assert [row["reward"] for row in rows.values()] == [0.5, 0.5]
    assert (rows["batch-a"]["turns"][0]["reward"], rows["batch-b"]["turns"][0]["reward"]) == (None, 1.0)
    raw, headers = fetched(served, "/rows?format=arrow&state=sealed")
    assert headers["content-type"] == "application/vnd.apache.arrow.stream"
    [row] = pyarrow.ipc.open_stream(raw).read_all().to_pylist()
    assert row["input_ids"] == rows["batch-a"]["input_ids"]
    assert served.state("batch-a")["state"] == "exported"
    raw, headers = fetched(served, "/sessions/batch-b/rows?format=parquet")
    assert headers["content-disposition"] == 'attachment; filename="batch-b.parquet"'
    [row] = pyarrow.parquet.read_table(io.BytesIO(raw)).to_pylist()
    assert row["input_ids"] == rows["batch-b"]["input_ids"]
    assert served.state("batch-b")["state"] == "open"
    assert fetched(served, "/rows?state=sealed")[0] == b""
