"""The demo says what its breaks are made of: the noise in pocket's training, and what needs no noise at all."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.demo.few import ROLLOUTS
from tests.pages import assert_only_its_own_code_runs, read_page
from tests.pages import said as said_on
from tokentrace import create_renderer
from tokentrace.compare.breaks import Cause
from tokentrace.demo.paths import ClientPath, RememberingEngine, RememberingScorer
from tokentrace.demo.tasks import make_questions
from tokentrace.demo.trials import PRETRAINED, Demo, forgetful, forgetful_renderer, remarks, run_demo
from tokentrace.demo.views import MEASURES, demo_json, demo_page, demo_text
from tokentrace.engines.protocol import SamplingParams
from tokentrace.pocket import NOISE, POCKET
from tokentrace.pocket.model import PocketModel, load_pocket
from training.pocket.expert import solve

ROOT = Path(__file__).parents[2]
RENDERER = create_renderer(POCKET)


def printed(demo: Demo) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(demo_text(demo), soft_wrap=True)
    return console.file.getvalue()  # type: ignore[attr-defined]


# -- the second template


def test_a_template_that_forgets_differs_only_in_reasoning_before_the_last_user_message() -> None:
    other, went_on = forgetful_renderer(), 0
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
        went_on += bool(question.follow_ups)
    assert went_on == 4


def test_only_pockets_template_is_changed() -> None:
    with pytest.raises(ValueError, match="not pocket's template"):
        forgetful("{{ messages }}")


# -- the trials


def test_the_first_trial_is_the_comparison_itself(demo: Demo) -> None:
    assert demo.trials[0].reports is demo.paths
    assert demo.trials[0].of(ClientPath.RERENDER).num_breaks > 0
    assert set(demo.trials[0].causes) == {Cause.BPE_REMERGE, Cause.JSON_FORMAT}


def test_greedily_the_noise_does_not_show(demo: Demo) -> None:
    trial = demo.trials[1]
    assert not trial.drops_reasoning
    assert trial.causes == []
    streams = [[one.trajectory.stream().tolist() for one in report.rollouts] for report in trial.reports]
    assert streams[0] == streams[1] == streams[2]


def test_every_user_turn_breaks_the_path_that_renders_a_forgetful_template_again(demo: Demo) -> None:
    trial = demo.trials[2]
    assert trial.drops_reasoning
    report = trial.of(ClientPath.RERENDER)
    assert report.later_user_turns == 1
    assert report.causes == {Cause.STRIPPED_REASONING: 1}
    for found in (found for some in report.breaks.values() for found in some):
        assert found.cause is Cause.STRIPPED_REASONING
    for path in (ClientPath.FIXED_BASE, ClientPath.TOKENTRACE):
        assert trial.of(path).causes == {}


def test_the_other_paths_still_show_the_model_its_past_reasoning(demo: Demo) -> None:
    for path in ClientPath:
        (rollout,) = (
            one for one in demo.trials[2].of(path).rollouts if one.task.interaction_settings["question"].follow_ups
        )
        first = next(message["reasoning_content"] for message in rollout.messages if message["role"] == "assistant")
        shown = RENDERER.tokenizer.decode(rollout.trajectory.stream().tolist())
        assert (first in shown) == (path is not ClientPath.RERENDER)


# -- what is said


def test_every_view_says_the_noise_and_what_it_does(demo: Demo) -> None:
    text, page = printed(demo), said_on(demo_page(demo, RENDERER))
    found = demo_json(demo)
    assert found["noise"] == asdict(NOISE)
    assert found["remarks"] == remarks(demo)
    assert found["pretrained"]["broken_rollouts"] == PRETRAINED.broken
    for remark in remarks(demo):
        assert remark in text
        assert remark in page
    said = " ".join(remarks(demo))
    broken = demo.paths[0].broken
    for part in ("1 % of the assistant's tokens", "2 % of its calls", "6 of 384", f"{broken} of {ROLLOUTS} rollouts"):
        assert part in said
    assert "re-render broke at 1 of 1 user messages" in said


def test_every_number_has_its_meaning_beside_it(demo: Demo) -> None:
    text, page = printed(demo), said_on(demo_page(demo, RENDERER))
    for measure in MEASURES:
        assert measure.about
        assert f"{measure.label}: {measure.about}" in text
        assert measure.about in page
    for trial in demo.trials:
        for shown in (text, page):
            assert trial.name in shown
            assert trial.about in shown


def test_breaks_are_told_by_cause_for_every_trial(demo: Demo) -> None:
    page = demo_page(demo, RENDERER)
    assert_only_its_own_code_runs(page)
    for row, trial in zip(demo_json(demo)["trials"], demo.trials, strict=True):
        for report in trial.reports:
            told = row["paths"][str(report.path)]
            assert told["causes"] == report.causes
            assert sum(told["causes"].values()) == told["breaks"] == report.num_breaks
        for cause in trial.causes:
            numbers = [f"{one.causes.get(cause, 0)}" for one in trial.reports]
            assert any(line.split() == [*cause.split(), *numbers] for line in printed(demo).splitlines())
            assert any(row[0][0] == cause and row[1:] == numbers for row in read_page(page)["tables"][1]["rows"])
    shown = [contrast["name"] for contrast in read_page(page)["contrasts"]]
    assert any(name.startswith("stripped reasoning") for name in shown), "an example of it is shown, too"


def test_questions_that_never_go_on_are_said_to_show_nothing_of_reasoning() -> None:
    one = asyncio.run(run_demo(RENDERER, rollouts=1, seed=0))
    assert "none of these questions goes on after its first answer" in " ".join(remarks(one))


# -- the settings as they are


def test_the_noise_is_that_of_the_weights_that_ship() -> None:
    report = json.loads((ROOT / "training" / "pocket" / "report.json").read_text(encoding="utf-8"))
    assert report["noise"] == asdict(NOISE)


@pytest.mark.parametrize("name", ["README.md", "docs/demo.md"])
def test_the_docs_give_the_settings_as_they_are(name: str) -> None:
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    for part in (
        f"{100 * NOISE.resegmented:g} % of",
        f"{100 * NOISE.compact:g} % of its calls",
        f"{PRETRAINED.broken} of {PRETRAINED.rollouts} rollouts",
        PRETRAINED.model,
    ):
        assert part in text


# -- memory


class Counting(PocketModel):
    """Pocket, counting what it is asked."""

    calls = 0

    def score(self, ids: Any, cache: Any = None) -> Any:
        type(self).calls += 1
        return super().score(ids, cache)


def test_a_request_is_computed_once_and_only_where_it_is_the_same() -> None:
    prompt = RENDERER.render_ids([{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True)

    async def ask() -> None:
        engine = RememberingEngine(load_pocket())
        try:
            seeded = SamplingParams(max_tokens=8, seed=1)
            first, again = [await engine.generate(prompt, seeded) for _ in range(2)]
            assert again.ids is first.ids
            assert again.logprobs is first.logprobs
            assert again.cached_tokens is None
            others = [
                await engine.generate([*prompt, prompt[-1]], seeded),
                await engine.generate(prompt, SamplingParams(max_tokens=8, seed=2)),
                await engine.generate(prompt, SamplingParams(max_tokens=7, seed=1)),
            ]
            assert not any(other.ids is first.ids for other in others)
            unseeded = SamplingParams(max_tokens=8)
            one, two = [await engine.generate(prompt, unseeded) for _ in range(2)]
            assert one.ids is not two.ids
        finally:
            await engine.close()

    asyncio.run(ask())


def test_a_row_is_scored_once() -> None:
    model = Counting.load(POCKET)
    scorer = RememberingScorer(model)
    ids = RENDERER.render([{"role": "user", "content": "What is 2 + 2?"}]).ids
    first = scorer.score(ids)
    assert scorer.score(ids.tolist()) is first
    assert Counting.calls == 1
    np.testing.assert_array_equal(first, load_pocket().score(ids))
