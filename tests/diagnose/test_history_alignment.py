"""Histories: nothing is lost, over the whole matrix; columns of ids are aligned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS
from tests.diagnose.compared import ids, renderer_of
from tests.support import FULL, rotating, some
from tokentrace import Renderer, TokentraceError, create_renderer
from tokentrace.diagnose import HistoryReport, compare_histories
from tokentrace.diagnose.history_differences import Shown, Step, View, differing
from tokentrace.diagnose.history_document import contrasts
from tokentrace.pocket import POCKET

# -- the law: nothing is lost, over the whole matrix


def check_step(step: Step, report: HistoryReport, renderer: Renderer, messages: Sequence[Any], tools: Any) -> list[str]:
    wrong = []
    at = len(messages) if step.message is None else step.message
    prompt = renderer.render_ids(messages[:at], tools=tools, add_generation_prompt=True)
    if ids(step.production)[: step.production.prompt] != prompt:
        wrong.append("production is not the template's prompt")
    if ids(step.rollout) != report.branches[step.branch].tolist()[: len(step.rollout)]:
        wrong.append("rollout is not its branch")
    if ids(step.production)[step.production.prompt :] != ids(step.rollout)[step.rollout.prompt :]:
        wrong.append("what is sampled differs")
    if step.training is not None and ids(step.training) != report.row.token_ids[: len(step.training)]:
        wrong.append("training is not its row")
    for compared in step.comparisons:
        left, right = step.shown(compared.left), step.shown(compared.right)
        assert left is not None
        assert right is not None
        if compared.right_from(left.ids) != ids(right) or compared.left_from(right.ids) != ids(left):
            wrong.append(f"{compared.left} and {compared.right} cannot be rebuilt")
        if compared.equal is not (ids(left) == ids(right)):
            wrong.append("equal is wrong")
        for found in compared.differences:
            for run, shown in ((found.left, left), (found.right, right)):
                if list(run.ids) != ids(shown)[run.start : run.stop] or sum(map(len, run.parts)) != len(run):
                    wrong.append("a run is not its tokens")
                for part in run.parts:
                    where = slice(part.start, part.stop)
                    if set(shown.fields[where].tolist()) != {part.field}:
                        wrong.append("a part is not its field")
                    if set(shown.messages[where].tolist()) != {part.message}:
                        wrong.append("a part is not its message")
    return wrong


def rebuild(view: dict[str, Any]) -> list[dict[str, list[int]]]:
    """All three sides of every step, from the JSON alone."""
    out = []
    for step in view["steps"]:
        rollout = view["branches"][step["branch"]][: step["tokens"]["rollout"]]
        found = next(c for c in step["comparisons"] if (c["left"], c["right"]) == ("production", "rollout"))
        production, at = [], 0
        for change in found["differences"]:
            production += rollout[at : change["right"]["start"]] + change["left"]["token_ids"]
            at = change["right"]["stop"]
        sides = {"production": production + rollout[at:], "rollout": rollout}
        if step["tokens"]["training"] is not None:
            sides["training"] = view["row"][: step["tokens"]["training"]]
        out.append(sides)
    return out


@pytest.mark.parametrize("family", ["pocket", "qwen3", "qwen3.5", "gpt-oss", "glm-4.5", "deepseek-r1"])
def test_both_sides_can_be_rebuilt(family: str) -> None:
    renderer = create_renderer(POCKET) if family == "pocket" else renderer_of(family)
    wrong, steps, refused = [], 0, 0
    for name, conversation in rotating(CONVERSATIONS.items(), family, 3):
        try:
            report = compare_histories(renderer, conversation.messages, tools=conversation.tools)
        except TokentraceError:
            refused += 1
            continue
        steps += len(report.steps)
        for step in report.steps:
            said = check_step(step, report, renderer, conversation.messages, conversation.tools)
            wrong += [(name, step.index, problem) for problem in said]
        for earlier, later in pairwise(report.steps):
            if later.refusal is None and ids(later.rollout)[: len(earlier.rollout)] != ids(earlier.rollout):
                wrong.append((name, later.index, "not an extension"))
        sides = rebuild(json.loads(json.dumps(report.to_json())))
        if sides != [{str(v): ids(s) for v in View if (s := step.shown(v)) is not None} for step in report.steps]:
            wrong.append((name, -1, "JSON loses something"))
        if report.equal is not (not report.rows() and not report.breaks and all(s.training for s in report.steps)):
            wrong.append((name, -1, "rows"))
        if bool(report.findings) is not any(step.comparisons and contrasts(step) for step in report.steps):
            wrong.append((name, -1, "findings"))
    assert not wrong, some(wrong)
    assert steps > (100 if FULL else 25)
    assert refused < len(CONVERSATIONS) / (2 if FULL else 6)


def columns(one: list[int], other: list[int], prompts: tuple[int, int] = (0, 0), messages: Any = None) -> list[Shown]:
    out = []
    for side, (found, prompt) in enumerate(zip((one, other), prompts, strict=True)):
        owners = np.zeros(len(found), np.int32) if messages is None else np.asarray(messages[side], np.int32)
        out.append(Shown(np.asarray(found, np.int32), owners, np.full(len(found), "content", object), prompt))
    return out


def check_cuts(one: list[int], other: list[int], cuts: list[tuple[int, int, int, int]]) -> None:
    rebuilt, at, there = [], 0, 0
    for start, stop, other_start, other_stop in cuts:
        assert at <= start <= stop
        assert there <= other_start <= other_stop
        assert start - at == other_start - there
        assert stop > start or other_stop > other_start
        rebuilt += one[at:start] + other[other_start:other_stop]
        at, there = stop, other_stop
    assert rebuilt + one[at:] == other


SMALL = st.lists(st.integers(0, 4), max_size=30)


@given(SMALL, SMALL, st.data())
def test_any_two_columns_are_aligned_exactly(one: list[int], other: list[int], data: st.DataObject) -> None:
    owners = [data.draw(st.lists(st.integers(-1, 3), min_size=len(s), max_size=len(s))) for s in (one, other)]
    prompts = (data.draw(st.integers(0, len(one))), data.draw(st.integers(0, len(other))))
    found = list(differing(*columns(one, other, prompts, owners)))
    check_cuts(one, other, [cut for _, cut in found])
    for in_turn, (start, stop, other_start, other_stop) in found:
        if in_turn:
            assert (start, other_start) >= prompts
        else:
            assert stop <= prompts[0]
            assert other_stop <= prompts[1]


@given(SMALL, st.data())
def test_the_same_ids_never_differ_whoever_they_belong_to(same: list[int], data: st.DataObject) -> None:
    owners = [data.draw(st.lists(st.integers(-1, 3), min_size=len(same), max_size=len(same))) for _ in range(2)]
    prompt = data.draw(st.integers(0, len(same)))
    assert not list(differing(*columns(same, same, (prompt, prompt), owners)))


def test_a_message_that_begins_with_another_id_is_no_anchor() -> None:
    one, other = [1, 2, 9, 3, 4], [1, 7, 2, 9, 3, 5, 4]
    owners = [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]
    cuts = [cut for _, cut in differing(*columns(one, other, (5, 7), owners))]
    assert cuts == [(1, 1, 1, 2), (4, 4, 5, 6)]


def test_stretches_that_changed_places() -> None:
    one, other = list(range(4_000)), [*range(1_000, 4_000), *range(1_000)]
    cuts = [cut for _, cut in differing(*columns(one, other, (4_000, 4_000)))]
    assert cuts == [(0, 1_000, 0, 0), (4_000, 4_000, 3_000, 4_000)]


@pytest.mark.parametrize("vocabulary", [3, 50, 100_000])
def test_long_columns_are_aligned_closely(vocabulary: int) -> None:
    random = np.random.default_rng(7)
    one = random.integers(0, vocabulary, 60_000).tolist()
    other = [*one[:10_000], *one[10_500:30_000], *random.integers(0, vocabulary, 40).tolist(), *one[30_000:]]
    del other[-20_000:-19_000]
    cuts = [cut for _, cut in differing(*columns(one, other, (60_000, len(other))))]
    check_cuts(one, other, cuts)
    changed = sum(stop - start + other_stop - other_start for start, stop, other_start, other_stop in cuts)
    assert changed <= 2 * (500 + 40 + 1000)


def test_nothing_in_common_and_everything_twice() -> None:
    one, other = list(range(5_000)), list(range(5_000, 12_000))
    assert [cut for _, cut in differing(*columns(one, other, (5_000, 7_000)))] == [(0, 5_000, 0, 7_000)]
    same = [1, 2] * 5_000
    shorter = [*same[:4_000], 9, *same[5_001:]]
    check_cuts(same, shorter, [cut for _, cut in differing(*columns(same, shorter, (10_000, len(shorter))))])
