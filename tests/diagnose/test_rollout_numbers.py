"""Masks, logprobs and lengths: what is wrong with them is found, counted, and named with line and field."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.planted import SHAPES, Told, clean, rollouts
from tests.diagnose.two_requests import renderer_of
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.rollout_report import RolloutReport, check_rollouts
from tokentrace.errors import InputError, TokentraceError
from tokentrace.show.terminal import plain_view

Line = dict[str, Any]


def lines(shape: str, told: list[Told] | None = None) -> list[Line]:
    return json.loads(json.dumps(list(SHAPES[shape](told or clean("pocket")[:1], False))))  # type: ignore[no-any-return]


def looked_at(folder: Path, made: list[Line] | str, **more: Any) -> RolloutReport:
    file = folder / "dump.jsonl"
    text = made if isinstance(made, str) else "".join(json.dumps(line) + "\n" for line in made)
    file.write_text(text, encoding="utf-8")
    return check_rollouts([str(file)], more.pop("known", None), **more)


def change(path: str, edit: Callable[[Any], Any]) -> Callable[[list[Line]], None]:
    """Change what is at a path such as ``0.turns.1.output_ids``."""

    def changed(made: list[Line]) -> None:
        at: Any = made
        *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        for name in names:
            at = at[name]
        at[last] = edit(at[last])

    return changed


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda given: [value, *given[1:]]


def zeros(given: list[Any]) -> list[Any]:
    return [0.0] * len(given)


EMPTY = {"completion_ids": [], "logprobs": [], "loss_mask": None}
WRONG = {
    "no logprobs": ("calls lines", change("1.logprobs", lambda _: None), Cause.NO_LOGPROBS, "line 2"),
    "one too few": ("trl rollout", change("0.turns.1.output_log_probs", lambda one: one[1:]), Cause.BAD_LOGPROBS,
                    "turns[1].output_log_probs"),
    "above 0": ("calls lines", change("2.logprobs", first(0.5)), Cause.BAD_LOGPROBS, "line 3, logprobs"),
    "a hole": ("verifiers steps", change("0.trajectory.0.tokens.completion_logprobs", first(None)),
               Cause.BAD_LOGPROBS, "trajectory[0].tokens.completion_logprobs"),
    "padded": ("nemo-gym rollout", change("0.response.output.0.generation_log_probs", zeros), Cause.ZERO_LOGPROBS,
               "response.output[0].generation_log_probs"),
    "short mask": ("calls lines", change("0.loss_mask", lambda one: one[1:]), Cause.BAD_MASK, "loss_mask"),
    "odd mask": ("openenv training", change("0.turns.0.loss_mask", first(2)), Cause.BAD_MASK,
                 "turns[0].loss_mask"),
    "prompt trained": ("calls lines", change("0.loss_mask", first(1)), Cause.TRAINED_UNSAMPLED, "line 1"),
    "node trained": ("verifiers trace", change("0.nodes.1.mask", first(True)), Cause.TRAINED_UNSAMPLED, "nodes[2]"),
    "row trained": ("trl rollout", change("0.samples.0.completion_mask", first(1)), Cause.TRAINED_UNSAMPLED,
                    "samples[0]"),
    "not trained": ("calls lines", change("0.loss_mask", lambda one: [*one[:-2], 0, 0]), Cause.SAMPLED_UNTRAINED,
                    "line 1"),
    "nothing sampled": ("calls lines", change("3", lambda one: one | EMPTY), Cause.NOTHING_SAMPLED,
                        "line 4"),
    "no token": ("calls lines", change("0.prompt_ids", first(1 << 30)), Cause.NO_TOKEN, "line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found_and_named(tmp_path: Path, name: str) -> None:
    shape, edit, fault, where = WRONG[name]
    assert not looked_at(tmp_path, lines(shape), known=renderer_of("pocket")).faults
    made = lines(shape)
    edit(made)
    report = looked_at(tmp_path, made, known=renderer_of("pocket"))
    assert fault in report.faults, report.faults
    example = report.faults[fault].examples[0]
    assert where in example.where
    assert (fault.group in report.problems()) == (fault is not Cause.NO_LOGPROBS)
    assert str(fault) in plain_view(report)


UNREADABLE = {
    "not JSON": ("calls lines", lambda made: json.dumps(made[0]) + '\n{"prompt_ids": [1,\n', "line 2: not valid JSON"),
    "a text": ("calls lines", change("1.prompt_ids", lambda _: "1 2 3"), "line 2: prompt_ids: must be a list of token"),
    "a float": ("calls lines", change("1.completion_ids", first(1.5)), "line 2: completion_ids: entry 0 is 1.5"),
    "missing": ("trl rollout", change("0.turns.1", lambda one: {"prompt_ids": one["prompt_ids"]}),
                "line 1: turns[1].completion_ids: is missing"),
    "no parent": ("verifiers trace", change("0.nodes.2.parent", lambda _: 77), "nodes[2].parent: is 77"),
    "other line": ("calls lines", change("1", lambda _: {"score": 1}), "line 2: this is not like the other lines"),
    "lost delta": ("nemo-gym captured", lambda made: "".join(json.dumps(one) + "\n" for one in made[1:]),
                   "parent_call_id: call 'clean-1' is stored as what it adds to call 'clean-0', which is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_said_with_line_and_field(tmp_path: Path, name: str) -> None:
    shape, edit, said = UNREADABLE[name]
    made = lines(shape)
    text = edit(made)  # type: ignore[operator]
    report = looked_at(tmp_path, text if isinstance(text, str) else made)
    assert report.unreadable == (3 if name == "lost delta" else 1)
    assert said in f"{report.unread[0].where}: {report.unread[0].problem}"


def test_a_file_of_no_known_shape_is_refused_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: this is an object with a, which has no known shape"):
        looked_at(tmp_path, [{"a": 1}])
    with pytest.raises(InputError, match="holds no rows"):
        looked_at(tmp_path, "")


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dump.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"dmp.jsonl"):
        check_rollouts([str(tmp_path / "dmp.jsonl")])
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\n1\n")
    with pytest.raises(InputError, match=r"model.bin, line 1: not UTF-8"):
        check_rollouts([str(tmp_path / "model.bin")])


def test_counts_are_those_of_the_planted_breaks(tmp_path: Path) -> None:
    told = rollouts("pocket")
    report = looked_at(tmp_path, lines("calls lines", told), known=renderer_of("pocket"))
    broken = [one for one in told if one.cause is not None]
    assert (report.rollouts, report.broken, report.breaks) == (len(told), len(broken), len(broken))
    assert report.samples == len(told) + len(broken) + 1  # one was asked twice
    assert report.sampled == report.trained == sum(len(call.completion) for one in told for call in one.calls)
    again = repeated = lost = 0
    for one in told:
        stream: list[int] = []
        for call in one.calls:
            shared = next((at for at, pair in enumerate(zip(stream, call.prompt, strict=False)) if pair[0] != pair[1]),
                          min(len(stream), len(call.prompt)))  # fmt: skip
            if one.cause is not None and stream:
                again += min(len(stream), len(call.prompt)) - shared
                lost += shared < len(stream)
            if stream and shared < len(stream):
                repeated += shared
            stream = call.prompt + call.completion
    assert report.reprefilled == again
    assert report.row_tokens - report.tokens == repeated
    assert report.lost > 0
    named = {one["cause"]: one["places"] for one in report.to_json()["causes"]}
    assert named == {one.cause: 1 for one in broken}


def test_breaks_without_a_tokenizer_have_a_place_and_no_cause(tmp_path: Path) -> None:
    told = [one for one in rollouts("pocket") if one.name == "json_format"]
    report = looked_at(tmp_path, lines("calls lines", told))
    (row,) = report.to_json()["causes"]
    assert row["cause"] is None
    assert row["examples"][0]["position"] > len(told[0].calls[0].prompt)
    assert row["examples"][0]["explained"] is None


@pytest.mark.parametrize(("name", "compared"), [("conversation_id", 1), ("uid", 1), ("episode_id", 1), ("mine", 0)])
def test_calls_of_no_rollout_are_not_called_fine(tmp_path: Path, name: str, compared: int) -> None:
    calls = [{"prompt_ids": [1, 2], "completion_ids": [3]}, {"prompt_ids": [1, 2, 9, 4], "completion_ids": [5]}]
    report = looked_at(tmp_path, [{name: "a", **call} for call in calls])
    assert (report.compared, report.breaks) == (compared, compared)
    assert ("no prompt was compared" in report.verdict) == (not compared)
    assert "✓" not in plain_view(report)


JUNK = [None, True, -1, 2**40, 1.5, "x", [], {}, [[]], [None], ["a"], {"a": 1}, [{}], [{"role": 1}], float("nan")]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a dump can be damaged: everything but the far ends of lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_damaged_dump_is_read_or_refused_and_nothing_else(tmp_path: Path, shape: str) -> None:
    told = [one for one in rollouts("pocket") if one.name in ("clean", "json_format")]
    whole = json.dumps(list(SHAPES[shape](told, True)))
    for seed in range(6):
        chance = random.Random(f"{shape} {seed}")
        made = json.loads(whole)
        *path, last = chance.choice(places(made)[1:])
        at: Any = made
        for key in path:
            at = at[key]
        if chance.random() < 0.3:
            del at[last]
        else:
            at[last] = chance.choice(JUNK)
        report, refused = None, ""
        try:
            report = looked_at(tmp_path, made, known=renderer_of("pocket"))
        except TokentraceError as error:
            refused = str(error)
        if report is None:
            assert "dump.jsonl" in refused
            continue
        assert report.rollouts + report.unreadable > 0
        assert json.loads(json.dumps(report.to_json()))["calls"] == report.calls


# -- rows: mask and labels, and what tells beside them


def row(**more: Any) -> Line:
    """A row of one turn, trained as it should be."""
    rendered = renderer_of("pocket").render(
        [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Gone."}]
    )
    ids, mask = rendered.ids.tolist(), rendered.mask.astype(int).tolist()
    labels = [index if trained else -100 for index, trained in zip(ids, mask, strict=True)]
    made = {"input_ids": ids, "loss_mask": mask, "labels": labels, "logprobs": [-0.5] * len(ids)}
    return made | {name: edit(made[name]) for name, edit in more.items()}


def test_what_no_engine_sampled_is_not_known_by_a_mask_alone(tmp_path: Path) -> None:
    trained = row(loss_mask=lambda given: [1] * len(given), labels=lambda given: row()["input_ids"])
    alone = looked_at(tmp_path, [trained])
    assert alone.to_json()["unproven"] == 1
    assert "not known" in plain_view(alone)


def test_a_line_that_is_there_twice_is_said_and_makes_no_sample(tmp_path: Path) -> None:
    once = looked_at(tmp_path, lines("calls lines"))
    doubled = [line for line in lines("calls lines") for _ in range(2)]
    twice = looked_at(tmp_path, doubled)
    for name in ("samples", "tokens", "sampled", "prompted", "breaks", "trained"):
        assert getattr(twice, name) == getattr(once, name)
    count = twice.faults[Cause.DUPLICATE_CALL]
    assert (count.places, count.examples[0].where, count.examples[0].words) == (
        once.calls,
        f"{tmp_path / 'dump.jsonl'}, line 2",
        f"the same as {tmp_path / 'dump.jsonl'}, line 1",
    )
    assert "ids" in twice.problems()
    others = [line | {"logprobs": [one - 1 for one in line["logprobs"]]} for line in lines("calls lines")]
    assert Cause.DUPLICATE_CALL not in looked_at(tmp_path, [*lines("calls lines"), *others]).faults  # sampled again
