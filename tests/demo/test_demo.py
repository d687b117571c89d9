"""The demo's client paths: tokentrace keeps one stream without a break; the breaks of the others are counted."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pages import assert_only_its_own_code_runs, columns, read_page, said
from tests.support import FULL
from tests.trajectory.model import check_trajectory
from tokentrace import create_renderer
from tokentrace.demo.paths import (
    MEASURES,
    TRIALS,
    ClientPath,
    PathAgent,
    PathReport,
    Trial,
    demo_document,
    demo_json,
    path_row,
    remarks,
    run_demo,
    run_path,
    score_row,
    trial_renderer,
)
from tokentrace.demo.questions import pick_questions, question_task
from tokentrace.diagnose.finding import Cause
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.protocol import Completion, SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.pocket import NOISE, POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.rollout.loop import Rollout, Task
from tokentrace.rollout.tools import as_tools
from tokentrace.samples.trajectories import owned_turns
from tokentrace.show import plain_view, show
from training.pocket.expert import solve
from training.pocket.questions import make_questions

RENDERER = create_renderer(POCKET)
MODEL = load_pocket()
ROLLOUTS = 12 if FULL else 2


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return asyncio.run(run_demo(rollouts=ROLLOUTS))


def test_two_rollouts_show_a_break_of_every_cause(trials: list[Trial]) -> None:
    """``--rollouts 2`` is enough to see every kind of break."""
    sampled, greedy, dropped = (trial.reports[0] for trial in trials)
    assert set(sampled.causes) == {Cause.BPE_REMERGE, Cause.JSON_FORMAT}
    assert greedy.causes == {}
    assert dropped.causes == {Cause.STRIPPED_REASONING: dropped.numbers()["later_user_turns"]}
    assert dropped.numbers()["later_user_turns"] > 0
    assert trials[2].reports[1].breaks == []


def test_tokentrace_has_no_break_and_one_sample_a_rollout(trials: list[Trial]) -> None:
    for trial in trials:
        report = trial.reports[-1]
        assert (report.numbers()["breaks"], report.numbers()["samples"], report.causes) == (0, ROLLOUTS, {})
    report, numbers = trials[0].reports[-1], trials[0].reports[-1].numbers()
    assert (numbers["mismatched_tokens"], numbers["never_sampled_tokens"]) == (0, 0)
    assert numbers["largest_logprob_gap"] < 1e-4
    assert sum(len(one.gaps) for one in report.scored) == numbers["sampled_tokens"] > 0
    for rollout in report.rollouts:
        mask = rollout.trajectory.loss_mask()
        again = np.concatenate(([0.0], MODEL.score(rollout.trajectory.stream())))
        np.testing.assert_allclose(rollout.trajectory.logprobs()[mask], again[mask], atol=1e-4)


def test_counts_are_those_of_the_trajectories(trials: list[Trial]) -> None:
    for report in trials[0].reports[:2]:
        breaks = report.numbers()["breaks"]
        assert breaks > 0
        assert report.numbers()["samples"] == ROLLOUTS + breaks
        assert sum(report.causes.values()) == breaks
        for rollout, scored in zip(report.rollouts, report.scored, strict=True):
            actual = [broken for name, broken in report.breaks if name == rollout.task.name]
            branches = rollout.trajectory.branches[1:]
            assert [(one.position, str(one.cause)) for one in actual] == [(one.start, one.cause) for one in branches]
            _, mask = path_row(report.path, RENDERER, rollout)
            assert scored.sampled == rollout.trajectory.num_sampled
            assert scored.mismatched + len(scored.gaps) == scored.sampled
            assert scored.foreign + len(scored.gaps) == np.count_nonzero(mask)


class Recording(EmbeddedEngine):
    """The embedded engine, which records every prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[list[int]]] = {}

    async def generate(self, prompt_ids: Any, sampling: SamplingParams, **more: Any) -> Completion:
        self.prompts.setdefault(more["session"], []).append([int(index) for index in prompt_ids])
        return await super().generate(prompt_ids, sampling, **more)


@pytest.mark.parametrize("path", ClientPath)
def test_engines_see_the_prompts_that_are_recorded(trials: list[Trial], path: ClientPath) -> None:
    """Also: a path that runs alone samples what it did beside the others, and a seed is reproducible."""
    engine = Recording()

    async def alone() -> Any:
        try:
            return await run_path(path, [question_task(one) for one in pick_questions(2)], TRIALS[0], engine)
        finally:
            await engine.close()

    expected_report = next(report for report in trials[0].reports if report.path is path)
    for rollout, expected in zip(asyncio.run(alone()).rollouts, expected_report.rollouts, strict=False):
        trajectory = rollout.trajectory
        check_trajectory(trajectory)
        assert trajectory.stream().tolist() == expected.trajectory.stream().tolist()
        turns = sorted(owned_turns(trajectory), key=lambda turn: turn.write)
        prompts = [trajectory.stream(turn.branch)[: turn.start].tolist() for turn in turns]
        assert prompts == engine.prompts[rollout.task.name]


# -- counts, on scripted turns


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return f"{a * b} <script>alert(2)</script>"


def scripted(path: ClientPath, *turns: str | Sequence[int], name: str = "one") -> tuple[Rollout, list[Any]]:
    """Run a rollout with these turns."""
    texts = iter(turns)

    def script(_: Any, __: SamplingParams) -> Any:
        turn = next(texts)
        return RENDERER.tokenizer.encode(turn) if isinstance(turn, str) else turn

    engine = ScriptedEngine(script, vocab_size=RENDERER.tokenizer.vocabulary.size)
    settings: dict[str, Any] = {"tools": as_tools([multiply]), "reward": lambda _: 1.0}
    agent = PathAgent(engine, RENDERER, path, **settings)
    task = Task([{"role": "user", "content": "6 * 7? <script>alert(1)</script>"}], name=name)
    rollout = asyncio.run(agent.run(task))
    assert rollout.notes == []
    return rollout, agent.breaks


CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call><|end|>'
WIDE = '<tool_call>\n{"name": "multiply", "arguments": {"a":  6, "b": 7}}\n</tool_call><|end|>'
ANSWER = "It is 42.<|end|>"


@pytest.mark.parametrize("path", ClientPath)
@pytest.mark.parametrize("call", [CALL, WIDE], ids=["as rendered", "other spacing"])
def test_other_spacing_breaks_the_paths_that_keep_messages(path: ClientPath, call: str) -> None:
    rollout, breaks = scripted(path, call, ANSWER)
    scored = score_row(rollout, path_row(path, RENDERER, rollout), MODEL.score)
    if call == CALL or path is ClientPath.TOKENTRACE:
        assert (breaks, rollout.trajectory.num_samples, scored.mismatched, scored.foreign) == ([], 1, 0, 0)
        return
    assert [(name, one.cause) for name, one in breaks] == [("one", Cause.JSON_FORMAT)]
    assert rollout.trajectory.num_samples == 2
    wide, narrow = (RENDERER.tokenizer.encode(text) for text in (WIDE, CALL))
    assert scored.mismatched - scored.foreign == len(wide) - len(narrow)
    assert scored.mismatched > 0


# -- the second template


def test_a_template_that_forgets_differs_only_in_reasoning_before_the_last_user_message() -> None:
    other, follow_ups = trial_renderer(TRIALS[2]), 0
    for question in make_questions(0, 48, "held_back"):
        messages = solve(question)
        last = max(at for at, message in enumerate(messages) if message["role"] == "user")
        without = [
            {key: value for key, value in message.items() if at > last or key != "reasoning_content"}
            for at, message in enumerate(messages)
        ]
        expected = RENDERER.render_ids(without, tools=question.tools, add_generation_prompt=True)
        assert other.render_ids(messages, tools=question.tools, add_generation_prompt=True) == expected
        whole = RENDERER.render_ids(messages, tools=question.tools, add_generation_prompt=True)
        assert (whole != expected) == bool(question.follow_ups)
        follow_ups += bool(question.follow_ups)
    assert follow_ups == 4


# -- views: the meaning of every number, the noise beside the breaks, and no content that can act


def test_every_view_has_the_noise_and_the_meaning_of_every_number(trials: list[Trial]) -> None:
    document, data = demo_document(trials, 0), demo_json(trials, 0)
    text, page = plain_view(document), show(document).html
    assert (data["noise"], data["remarks"]) == (asdict(NOISE), remarks(trials))
    paths = trials[0].reports
    broken, count = paths[0].numbers()["broken_rollouts"], len(paths[0].rollouts)
    for part in ("1 % of the assistant's tokens", "2 % of its calls", "6 of 384", f"{broken} of {count} rollouts"):
        assert part in " ".join(remarks(trials))
    labels = {one.label: one.about for one in MEASURES} | {one.name: one.about for one in trials}
    for words in [*remarks(trials), *(f"{label}: {about}" for label, about in labels.items())]:
        assert words in text
    assert all(words in said(page) for words in [*remarks(trials), *labels.values()])
    assert all(measure.cell(report).text in text for measure in MEASURES for report in paths)
    tables = read_page(page)["tables"]
    for row, trial in zip(data["trials"], trials, strict=True):
        for report in trial.reports:
            values = row["paths"][str(report.path)]
            assert sum(values["causes"].values()) == values["breaks"] == report.numbers()["breaks"]
        for cause in trial.reports[0].causes:
            numbers = [f"{one.causes.get(cause, 0)}" for one in trial.reports]
            assert any(line.split() == [*str(cause).split(), *numbers] for line in text.splitlines())
            assert any(row[0][0] == str(cause) and row[1:] == numbers for row in tables[1]["rows"])
    names = [contrast["name"] for contrast in read_page(page)["contrasts"]]
    assert any(name.startswith("stripped reasoning") for name in names), "an example of it is shown, too"


def test_the_page_escapes_every_text() -> None:
    name = "<img src=x onerror=alert(3)>\x1b[31mred"
    turns = ("\x1b[31mred <script>alert(4)</script>\n" + WIDE, "<b onclick=alert(5)>42</b><|end|>")
    reports = []
    for path in ClientPath:
        rollout, breaks = scripted(path, *turns, name=name)
        scored = score_row(rollout, path_row(path, RENDERER, rollout), MODEL.score)
        reports.append(PathReport(path, [rollout], breaks, [scored]))
    document = demo_document([replace(trial, reports=reports) for trial in TRIALS], 0)
    page = show(document).html
    assert_only_its_own_code_runs(page)
    assert "\x1b[31mred" not in plain_view(document)
    payload = read_page(page)
    assert all(name in contrast["name"] for contrast in payload["contrasts"])
    assert "<|end|>" in "".join(columns(payload, 0)["text"])


def test_the_docs_give_the_current_settings() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "demo.md").read_text(encoding="utf-8").split())
    for part in (
        f"{100 * NOISE.resegmented:g} % of",
        f"{100 * NOISE.compact:g} % of its calls",
        "6 of 384 rollouts",
        "SmolLM2-135M",
    ):
        assert part in text
