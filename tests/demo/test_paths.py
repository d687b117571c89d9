"""Client paths: one stream without a break by tokentrace; what the others do is counted as it is recorded."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.demo.few import ROLLOUTS, few_tasks
from tests.pages import assert_only_its_own_code_runs, columns, read_page, said
from tokentrace import create_renderer
from tokentrace.compare.breaks import Cause
from tokentrace.demo.paths import (
    CLIENTS,
    ClientPath,
    MessageAgent,
    PathReport,
    compare_paths,
    path_samples,
    roll_out,
    sampled_turns,
    score_path,
    score_row,
    trained_row,
)
from tokentrace.demo.trials import Demo, Trial
from tokentrace.demo.views import MEASURES, demo_json, demo_page, demo_text
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.loop import Agent, Rollout, Task
from tokentrace.rollout.tools import as_tools

RENDERER = create_renderer(POCKET)
MODEL = load_pocket()


class Recording(EmbeddedEngine):
    """The embedded engine, with every prompt that it was given."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.prompts: dict[str, list[list[int]]] = {}

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **more: Any) -> Completion:
        self.prompts.setdefault(more["session"], []).append([int(index) for index in prompt_ids])
        return await super().generate(prompt_ids, sampling, **more)


async def record(path: ClientPath) -> tuple[PathReport, Recording]:
    engine = Recording()
    try:
        report = await roll_out(path, few_tasks(1), seed=1, renderer=RENDERER, engine=engine)
    finally:
        await engine.close()
    return await score_path(report, RENDERER, MODEL), engine


@pytest.fixture(scope="module")
def recorded() -> dict[ClientPath, tuple[PathReport, Recording]]:
    return {path: asyncio.run(record(path)) for path in ClientPath}


def test_tokentrace_has_no_break_and_one_sample_a_rollout(recorded: Any) -> None:
    report, _ = recorded[ClientPath.TOKENTRACE]
    assert (report.num_breaks, report.samples, report.mismatched, report.foreign) == (0, ROLLOUTS, 0, 0)
    assert report.causes == report.examples == {}
    rows = path_samples(report)
    assert len(rows) == ROLLOUTS
    assert sum(row.trained for row in rows) == report.sampled > 0


def test_logprobs_of_tokentrace_are_those_of_a_re_score(recorded: Any) -> None:
    report, _ = recorded[ClientPath.TOKENTRACE]
    for rollout in report.rollouts:
        trajectory = rollout.trajectory
        mask = trajectory.loss_mask()
        again = np.concatenate(([0.0], MODEL.score(trajectory.stream())))
        np.testing.assert_allclose(trajectory.logprobs()[mask], again[mask], atol=1e-4)
    assert report.largest_gap < 1e-4
    assert len(report.gaps) == report.sampled


@pytest.mark.parametrize("path", ClientPath)
def test_engines_see_the_prompts_that_are_recorded(recorded: Any, path: ClientPath) -> None:
    report, engine = recorded[path]
    for rollout in report.rollouts:
        trajectory = rollout.trajectory
        trajectory.check()
        turns = [turn for k in range(trajectory.num_branches) for turn in trajectory.turns(k) if turn.branch == k]
        turns.sort(key=lambda turn: turn.write)
        assert [trajectory.stream(turn.branch)[: turn.start].tolist() for turn in turns] == engine.prompts[
            rollout.task.name
        ]


@pytest.mark.parametrize("path", CLIENTS)
def test_counts_are_those_of_the_trajectories(recorded: Any, path: ClientPath) -> None:
    report, _ = recorded[path]
    assert report.num_breaks > 0, "at temperature 1 some turns are not spelled as the tokenizer would"
    assert report.samples == ROLLOUTS + report.num_breaks
    assert sum(report.causes.values()) == report.num_breaks == sum(map(len, report.breaks.values()))
    for rollout, scored in zip(report.rollouts, report.scored, strict=True):
        found = report.breaks.get(rollout.task.name, [])
        branches = rollout.trajectory.branches[1:]
        assert [(one.position, str(one.cause)) for one in found] == [(one.start, one.cause) for one in branches]
        sampled = np.concatenate([ids for ids, _ in sampled_turns(rollout)])
        assert scored.sampled == len(sampled) == rollout.trajectory.num_sampled
        assert scored.mismatched + len(scored.positions) == scored.sampled
        assert scored.foreign + len(scored.positions) == np.count_nonzero(scored.mask)
        assert scored.mask[scored.positions].all()
        kept = iter(sampled.tolist())
        assert all(index in kept for index in scored.ids[scored.positions].tolist()), "in order, of what was sampled"


def test_the_first_turns_are_the_same_by_every_path(recorded: Any) -> None:
    reports = [recorded[path][0] for path in ClientPath]
    for rollouts in zip(*(report.rollouts for report in reports), strict=True):
        first = [sampled_turns(rollout)[0][0].tolist() for rollout in rollouts]
        assert first[0] == first[1] == first[2]


def shown(reports: list[PathReport], seed: int) -> Demo:
    """What the views are given, with these rollouts for every trial."""
    return Demo(seed, reports, [Trial(f"trial {at}", "", 0.0, at == 2, reports) for at in range(3)])


def test_what_is_remembered_is_what_each_path_would_have_sampled_alone(recorded: Any, demo: Demo) -> None:
    for report in demo.paths:
        alone, _ = recorded[report.path]
        for one, other in zip(report.rollouts, alone.rollouts, strict=True):
            assert one.trajectory.stream().tolist() == other.trajectory.stream().tolist()
        assert report.causes == alone.causes
        assert (report.mismatched, report.foreign) == (alone.mismatched, alone.foreign)


def test_a_seed_gives_one_table_and_another_seed_another() -> None:
    def table(seed: int) -> tuple[dict[str, Any], list[list[int]]]:
        reports = asyncio.run(compare_paths(RENDERER, rollouts=2, seed=seed, model=MODEL))
        found = demo_json(shown(reports, seed))["paths"]
        for row in found.values():
            for name in ("mean_logprob_gap", "largest_logprob_gap"):
                row[name] = round(row[name], 4)
        return found, [one.trajectory.stream().tolist() for report in reports for one in report.rollouts]

    first = table(1)
    assert table(1) == first
    assert table(2)[1] != first[1]


# -- what is counted, on turns that are known


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return f"{a * b} <script>alert(2)</script>"


def scripted(path: ClientPath, *turns: str | Sequence[int], name: str = "one") -> tuple[Rollout, dict[str, Any]]:
    """A rollout with these turns."""
    said = iter(turns)

    def script(_: Any, __: SamplingParams) -> Any:
        turn = next(said)
        return RENDERER.tokenizer.encode(turn) if isinstance(turn, str) else turn

    engine = ScriptedEngine(script, vocab_size=RENDERER.tokenizer.vocabulary.size)
    settings: dict[str, Any] = {"tools": as_tools([multiply]), "reward": lambda _: 1.0}
    agent = Agent(engine, RENDERER, **settings)
    if path in CLIENTS:
        agent = MessageAgent(engine, RENDERER, CLIENTS[path], **settings)
    task = Task([{"role": "user", "content": "6 * 7? <script>alert(1)</script>"}], name=name)
    rollout = asyncio.run(agent.run(task))
    assert rollout.notes == []
    return rollout, agent.breaks if isinstance(agent, MessageAgent) else {}


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call><|end|>'
WIDE = '<tool_call>\n{"name": "multiply", "arguments": {"a":  6, "b": 7}}\n</tool_call><|end|>'
ANSWER = "It is 42.<|end|>"


@pytest.mark.parametrize("path", ClientPath)
def test_turns_that_are_spelled_as_rendered_do_not_break(path: ClientPath) -> None:
    rollout, breaks = scripted(path, CALL, ANSWER)
    assert breaks == {}
    assert rollout.trajectory.num_branches == 1
    scored = score_row(rollout, trained_row(rollout, path, RENDERER), MODEL)
    assert (scored.mismatched, scored.foreign) == (0, 0)


@pytest.mark.parametrize("path", CLIENTS)
def test_other_spacing_breaks_where_messages_are_kept(path: ClientPath) -> None:
    rollout, breaks = scripted(path, WIDE, ANSWER)
    (found,) = breaks["one"]
    assert found.cause is Cause.JSON_FORMAT
    assert rollout.trajectory.num_samples == 2
    scored = score_row(rollout, trained_row(rollout, path, RENDERER), MODEL)
    wide, narrow = (RENDERER.tokenizer.encode(text) for text in (WIDE, CALL))
    assert scored.mismatched - scored.foreign == len(wide) - len(narrow)
    assert scored.mismatched > 0
    kept, _ = scripted(ClientPath.TOKENTRACE, WIDE, ANSWER)
    assert kept.trajectory.num_samples == 1
    assert score_row(kept, trained_row(kept, ClientPath.TOKENTRACE, RENDERER), MODEL).mismatched == 0


def test_a_turn_that_is_not_in_the_row_is_mismatched_as_a_whole() -> None:
    rollout, _ = scripted(ClientPath.TOKENTRACE, CALL, ANSWER)
    ids, mask = rollout.trajectory.stream(), rollout.trajectory.loss_mask()
    (call, _), (answer, _) = sampled_turns(rollout)
    without = len(ids) - len(answer)
    scored = score_row(rollout, (ids[:without], mask[:without]), MODEL)
    assert (scored.sampled, scored.mismatched, scored.foreign) == (len(call) + len(answer), len(answer), 0)
    nothing = score_row(rollout, (ids[:1], mask[:1]), MODEL)
    assert (nothing.mismatched, len(nothing.gaps)) == (len(call) + len(answer), 0)


def test_the_page_escapes_whatever_was_said() -> None:
    name = "<img src=x onerror=alert(3)>\x1b[31mred"
    turns = ("\x1b[31mred <script>alert(4)</script>\n" + WIDE, "<b onclick=alert(5)>42</b><|end|>")
    reports = []
    for path in ClientPath:
        rollout, breaks = scripted(path, *turns, name=name)
        scored = score_row(rollout, trained_row(rollout, path, RENDERER), MODEL)
        reports.append(PathReport(path, [rollout], breaks, [scored]))
    page = demo_page(shown(reports, 0), RENDERER)
    assert_only_its_own_code_runs(page)
    plain = Console(width=200, record=True, file=io.StringIO())
    plain.print(demo_text(shown(reports, 0)))
    assert "\x1b[31mred" not in plain.export_text(styles=False)
    assert "alert(" not in page.replace("alert(3)\\u003e", "").partition('id="document">')[0]
    document = read_page(page)
    texts = ["".join(columns(document, at)["text"]) for at in range(len(document["tracks"]))]
    assert any("<b onclick=alert(5)>" in text for text in texts)
    assert any(name in track["name"] for track in document["tracks"])
    assert all(measure.label in said(page) for measure in MEASURES)
