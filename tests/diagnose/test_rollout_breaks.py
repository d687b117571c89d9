"""Planted breaks of every cause, in dumps of every shape, are found and named; clean dumps have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conversations import SYS, assistant, user
from tests.diagnose.planted import SHAPES, Told, clean, rollouts
from tests.diagnose.two_requests import renderer_of
from tokentrace.diagnose.breaks import explain_break
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.record_files import read_rollouts
from tokentrace.diagnose.records import Rollout
from tokentrace.diagnose.rollouts import CheckedRollout, Relation, check_rollout


def write(path: Path, shape: str, told: list[Told], messages: bool = False) -> Path:
    file = path / "dump.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in SHAPES[shape](told, messages)), encoding="utf-8")
    return file


def inspected(file: Path, family: str) -> dict[str, CheckedRollout]:
    found = {}
    for one in read_rollouts([str(file)]):
        assert isinstance(one, Rollout), one
        found[one.name] = check_rollout(one, renderer_of(family))
    return found


@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        (Cause.BOS_MISSING, lambda ids: ids[1:]),
        (Cause.BOS_ADDED, lambda ids: [ids[0], *ids]),
        (Cause.NO_TOKEN, lambda ids: [*ids[:3], 999_999, *ids[4:]]),
    ],
)
def test_ids_of_a_prompt_that_were_made_otherwise_are_named(cause: Cause, changed: Callable[[Any], list[int]]) -> None:
    renderer = renderer_of("pocket")
    stream = renderer.render_ids([SYS, user("Go."), assistant("Gone.")])
    found = explain_break(stream, changed(renderer.render_ids([SYS, user("Go."), assistant("Gone.")])), renderer)
    assert found is not None
    assert found.cause is cause
    assert "None" not in found.words


FAMILIES = [
    *(("pocket", shape, messages) for shape in SHAPES for messages in (False, True)),
    *(("qwen3", shape, False) for shape in list(SHAPES)[::6]),
]


@pytest.mark.parametrize(("family", "shape", "messages"), FAMILIES)
def test_planted_breaks_are_found_and_named(tmp_path: Path, shape: str, family: str, messages: bool) -> None:
    told = rollouts(family)
    file = write(tmp_path, shape, told, messages)
    found = inspected(file, family)
    assert list(found) == [one.name for one in told]
    causes = {name: [str(one.cause) for one in rollout.breaks] for name, rollout in found.items()}
    assert causes == {one.name: [] if one.cause is None else [str(one.cause)] for one in told}
    assert not any(rollout.findings for rollout in found.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_clean_dumps_have_no_break(tmp_path: Path, shape: str) -> None:
    told = clean("pocket")
    found = inspected(write(tmp_path, shape, told), "pocket")
    for one in told:
        rollout = found[one.name]
        repeated = one.name == "retried"
        assert rollout.steps == [
            Relation.FIRST,
            *[Relation.EXTENDS] * (len(one.calls) - 1 - repeated),
            *[Relation.REPEATS] * repeated,
        ]
        assert not rollout.breaks
        assert not rollout.findings
        assert rollout.sampled == sum(len(call.completion) for call in one.calls)
        assert len(rollout.tips) == 1 + repeated
        assert rollout.tokens == len(one.calls[-1].prompt) + sum(
            len(call.completion) for call in one.calls[-1 - repeated :]
        )
