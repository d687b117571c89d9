"""Tests of `bench`: it measures exactly the ids that a model gets, and rejects wrong ones."""

import asyncio
import itertools
import random
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from rich.progress import Progress

from bench import gateway, render, report, rows
from bench.__main__ import PARTS
from bench.bridge import RESULT_BYTES, grow, results
from bench.conversations import sources, tools, varied
from bench.parse import TOOL, completion, parsed_fields
from bench.timing import IN_A_ROW
from tests.oracle import hf_ids
from tests.support import FULL, make_renderer
from tests.trajectory.model import check_trajectory


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_a_rollout_grown_by_bridges_is_what_transformers_renders(family: str) -> None:
    renderer = make_renderer(family)
    rollout = grow(6_000, renderer, itertools.cycle(sources()), tools())
    result = rollout.result(next(results(["<|im_end|>"])))
    bridge = renderer.bridge_to_next_turn(*rollout.stream, [result], tools=tools())
    assert len(result["content"]) == RESULT_BYTES
    assert bridge == hf_ids(family, [*rollout.messages, result], tools(), add_generation_prompt=True)
    assert 6_000 <= len(rollout.trajectory) < 8_000
    check_trajectory(rollout.trajectory)


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_the_parsed_completion_has_reasoning_content_and_calls(family: str) -> None:
    renderer = make_renderer(family)
    prompt, ids = completion(renderer, 500, sources(), 3)
    parsed = renderer.parse_response(ids, tools=[TOOL], prompt_ids=prompt)
    content, reasoning, calls = parsed_fields(parsed)
    assert content
    assert reasoning
    assert [(name, arguments["line"]) for name, arguments in calls] == [("edit_file", 0), ("edit_file", 1)]
    assert len(calls[0][1]["text"]) > 200
    assert 250 < len(ids) < 1_500


def test_only_libraries_with_the_ids_of_the_template_get_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "native_renderer", lambda _: None)  # installed by `make bench` alone
    with Progress(disable=True) as progress:
        contenders = render.Contenders("qwen3")
        make = partial(varied, 1_000, itertools.cycle(sources()), random.Random(0))
        row = render.measure(contenders, "varied", make, tools(), 2, 1, progress)
        assert set(row.spent) == {*render.RIVALS, render.OURS, render.LIMIT} - {"tml-renderers"}
        assert [len(row.spent[name].values) for name in ("transformers", render.OURS)] == [IN_A_ROW, 2 * IN_A_ROW]
        assert not row.differ
        calls = contenders.calls(make(), tools())

        def spoil(name: str) -> render.Row:
            wrong = {**calls, name: lambda: calls[name]()[:-1]}
            monkeypatch.setattr(contenders, "calls", lambda *_: wrong)
            return render.measure(contenders, "wrong", make, tools(), 1, 1, progress)

        assert spoil("renderers").figure("renderers") is None
        with pytest.raises(SystemExit, match="tokentrace has other ids"):
            spoil(render.OURS)


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_rows_are_equal_to_trls_before_they_count() -> None:
    with Progress(disable=True) as progress:
        measured = rows.measure(rows.Contenders("qwen3"), "TRL's", 2, 4, itertools.cycle(sources()), progress)
    assert set(measured.spent) == {"TRL", "tokentrace", "limit"}
    assert measured.differ == {"TRL": 0}


def test_tables_are_written_between_their_markers(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/benchmarks.md").write_text("a\n<!-- bench:x -->\nold\n<!-- /bench:x -->\nb\n")
    (tmp_path / "README.md").write_text("<!-- bench:y -->\n<!-- /bench:y -->\n")
    report.write([report.Block("x", "new \\1"), report.Block("y", "short")], tmp_path)
    assert (tmp_path / "docs/benchmarks.md").read_text() == "a\n<!-- bench:x -->\nnew \\1\n<!-- /bench:x -->\nb\n"
    assert (tmp_path / "README.md").read_text() == "<!-- bench:y -->\nshort\n<!-- /bench:y -->\n"
    with pytest.raises(ValueError, match="bench:z"):
        report.write([report.Block("z", "")], tmp_path)


def test_the_docs_have_a_place_for_every_table() -> None:
    texts = "".join((report.ROOT / name).read_text(encoding="utf-8") for name in report.FILES)
    marked = set(re.findall(r"<!-- bench:(\S+) -->", texts))
    assert marked == {*PARTS, *(f"{part}-short" for part in ("render", "bridge", "rows"))}
    assert marked == set(re.findall(r"<!-- /bench:(\S+) -->", texts))


@pytest.mark.skipif(sys.platform != "linux", reason="CPU time of another process is read from /proc")
@pytest.mark.parametrize("stream", [False, True] if FULL else [True])
def test_gateway_turns_are_measured_and_their_prompts_are_exact(stream: bool, tmp_path: Path) -> None:
    measured = asyncio.run(gateway.turns("qwen3", tmp_path / "store.db", 1_500, stream))
    lengths = [turn.tokens for turn in measured]
    assert lengths == sorted(set(lengths)) * 3  # three sessions
    assert lengths[-1] >= 1_500 > lengths[-2]
    assert all(turn.gateway > 0 and turn.raw > 0 and turn.seconds > 0 for turn in measured)
    with pytest.raises(AssertionError, match="1 of 1 prompts differ from the store"):
        asyncio.run(gateway.check(tmp_path / "store.db", Counter({(1_500, 7): 1})))
