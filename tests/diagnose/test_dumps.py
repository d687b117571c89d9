"""Dumps of every shape: planted breaks are named, faults and malformed lines are listed with line and field."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.data.generate import write_lines
from tests.diagnose.planted import SHAPES, Planted, clean, rollouts
from tests.diagnose.two_requests import renderer_of
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.record_files import read_rollouts
from tokentrace.diagnose.rollouts import CheckedRollout, Relation, RolloutReport, check_rollouts
from tokentrace.errors import InputError, TokentraceError
from tokentrace.show.terminal import plain_view

Line = dict[str, Any]


def dump(folder: Path, lines: Iterable[Line | str]) -> str:
    return str(write_lines(folder / "dump.jsonl", lines))


def report_of(folder: Path, lines: Iterable[Line | str], model: Any = None) -> RolloutReport:
    return check_rollouts([dump(folder, lines)], model)


def unread(report: RolloutReport) -> list[str]:
    return [f"{one.where}: {one.words}" for tally in report.unread.values() for one in tally.examples]


def lines_of(shape: str, planted: list[Planted] | None = None, messages: bool = False) -> list[Line]:
    return json.loads(json.dumps(list(SHAPES[shape](planted or clean("pocket")[:1], messages))))  # type: ignore[no-any-return]


def checked(file: str, family: str) -> dict[str, CheckedRollout]:
    results = {}
    for one in read_rollouts([file]):
        assert not one.problem, one
        results[one.name] = CheckedRollout(one, renderer_of(family))
    return results


# -- breaks


FAMILIES = [
    *(("pocket", shape, messages) for shape in SHAPES for messages in (False, True)),
    *(("qwen3", shape, False) for shape in list(SHAPES)[::6]),
]


@pytest.mark.parametrize(("family", "shape", "messages"), FAMILIES)
def test_planted_breaks_are_found_and_named(tmp_path: Path, shape: str, family: str, messages: bool) -> None:
    planted = rollouts(family)
    results = checked(dump(tmp_path, lines_of(shape, planted, messages)), family)
    assert list(results) == [one.name for one in planted]
    causes = {name: [str(one.cause) for one in rollout.breaks] for name, rollout in results.items()}
    assert causes == {one.name: [] if one.cause is None else [str(one.cause)] for one in planted}
    assert not any(rollout.findings for rollout in results.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_clean_dumps_have_no_break(tmp_path: Path, shape: str) -> None:
    planted = clean("pocket")
    results = checked(dump(tmp_path, lines_of(shape, planted)), "pocket")
    for one in planted:
        rollout, repeated = results[one.name], one.name == "retried"
        extensions = [Relation.EXTENDS] * (len(one.calls) - 1 - repeated)
        assert rollout.steps == [Relation.FIRST, *extensions, *[Relation.REPEATS] * repeated]
        assert not rollout.breaks
        assert not rollout.findings
        assert rollout.counts["sampled"] == sum(len(call.completion) for call in one.calls)
        assert len(rollout.tips) == 1 + repeated
        last = sum(len(call.completion) for call in one.calls[-1 - repeated :])
        assert rollout.counts["tokens"] == len(one.calls[-1].prompt) + last


def test_counts_are_those_of_the_planted_breaks(tmp_path: Path) -> None:
    planted = rollouts("pocket")
    report = report_of(tmp_path, lines_of("calls lines", planted), renderer_of("pocket"))
    counts, broken = report.counts, [one for one in planted if one.cause is not None]
    assert (counts["rollouts"], counts["broken"], report.breaks) == (len(planted), len(broken), len(broken))
    assert counts["samples"] == len(planted) + len(broken) + 1  # one request was repeated
    assert counts["sampled"] == counts["trained"] == sum(len(call.completion) for one in planted for call in one.calls)
    again = repeated = 0
    for one in planted:
        stream: list[int] = []
        for call in one.calls:
            pairs = enumerate(zip(stream, call.prompt, strict=False))
            shared = next((at for at, pair in pairs if pair[0] != pair[1]), min(len(stream), len(call.prompt)))
            if one.cause is not None and stream:
                again += min(len(stream), len(call.prompt)) - shared
            if stream and shared < len(stream):
                repeated += shared
            stream = call.prompt + call.completion
    assert (counts["reprefilled"], counts["row_tokens"] - counts["tokens"]) == (again, repeated)
    assert counts["lost"] > 0
    assert {one["name"]: one["places"] for one in report.to_json()["causes"]} == {one.cause: 1 for one in broken}


def test_breaks_without_a_tokenizer_have_a_place_and_no_cause(tmp_path: Path) -> None:
    planted = [one for one in rollouts("pocket") if one.name == "json_format"]
    (row,) = report_of(tmp_path, lines_of("calls lines", planted)).to_json()["causes"]
    assert row["name"] == "unknown"
    assert row["examples"][0]["findings"][0]["position"] > len(planted[0].calls[0].prompt)


@pytest.mark.parametrize(("field", "compared"), [("conversation_id", 1), ("uid", 1), ("episode_id", 1), ("mine", 0)])
def test_calls_without_a_rollout_name_are_not_reported_as_clean(tmp_path: Path, field: str, compared: int) -> None:
    calls = [{"prompt_ids": [1, 2], "completion_ids": [3]}, {"prompt_ids": [1, 2, 9, 4], "completion_ids": [5]}]
    report = report_of(tmp_path, [{field: "a", **call} for call in calls])
    assert report.breaks == compared
    assert ("no prompt was compared" in report.verdict) == (not compared)
    assert "✓" not in plain_view(report)


def test_a_duplicate_line_is_reported_and_makes_no_sample(tmp_path: Path) -> None:
    lines = lines_of("calls lines")
    once, twice = report_of(tmp_path, lines), report_of(tmp_path, [line for line in lines for _ in range(2)])
    assert twice.counts == once.counts
    tally = twice.faults[Cause.DUPLICATE_CALL]
    example = tally.examples[0]
    assert (tally.places, example.where.rpartition(", ")[2]) == (once.calls, "line 2")
    assert example.words == f"the same as {tmp_path / 'dump.jsonl'}, line 1"
    assert "ids" in twice.problems()
    again = [line | {"logprobs": [one - 1 for one in line["logprobs"]]} for line in lines]
    assert Cause.DUPLICATE_CALL not in report_of(tmp_path, [*lines, *again]).faults  # sampled again


# -- masks, logprobs and lengths


def change(path: str, edit: Callable[[Any], Any]) -> Callable[[list[Line]], None]:
    """Change the value at a path such as ``0.turns.1.output_ids``."""

    def changed(lines: list[Line]) -> None:
        at: Any = lines
        *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
        for name in names:
            at = at[name]
        at[last] = edit(at.get(last) if isinstance(at, dict) else at[last])

    return changed


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


CALL: Line = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1, -1]}
ROW: Line = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1]}


def trace(**more: Any) -> Line:
    message = {"role": "user", "content": "x"}
    nodes = [{"message": message, "parent": None, "token_ids": [1, 2], "mask": [False, False]}]
    nodes.append({"message": message, "parent": 0, "sampled": True, "token_ids": [3, 4], "mask": [True, True]})
    return {"id": "t", "nodes": [nodes[0], nodes[1] | {"logprobs": [-1, -1]} | more], "calls": []}


def replaced(line: Line) -> Callable[[list[Line]], None]:
    return change("0", lambda _: line)


EMPTY = {"completion_ids": [], "logprobs": [], "loss_mask": None}
WRONG = {
    "no logprobs": ("calls lines", change("1.logprobs", lambda _: None), Cause.NO_LOGPROBS, "line 2"),
    "one too few": ("trl rollout", change("0.turns.1.output_log_probs", lambda one: one[1:]), Cause.BAD_LOGPROBS,
                    "turns[1].output_log_probs"),
    "above 0": ("calls lines", change("2.logprobs", first(0.5)), Cause.BAD_LOGPROBS, "line 3, logprobs"),
    "a hole": ("verifiers steps", change("0.trajectory.0.tokens.completion_logprobs", first(None)),
               Cause.BAD_LOGPROBS, "trajectory[0].tokens.completion_logprobs"),
    "padded": ("nemo-gym rollout", change("0.response.output.0.generation_log_probs", lambda one: [0.0] * len(one)),
               Cause.ZERO_LOGPROBS, "response.output[0].generation_log_probs"),
    "short mask": ("calls lines", change("0.loss_mask", lambda one: one[1:]), Cause.BAD_MASK, "loss_mask"),
    "odd mask": ("openenv training", change("0.turns.0.loss_mask", first(2)), Cause.BAD_MASK, "turns[0].loss_mask"),
    "prompt trained": ("calls lines", change("0.loss_mask", first(1)), Cause.TRAINED_UNSAMPLED, "line 1"),
    "node trained": ("verifiers trace", change("0.nodes.1.mask", first(True)), Cause.TRAINED_UNSAMPLED, "nodes[2]"),
    "row trained": ("trl rollout", change("0.samples.0.completion_mask", first(1)), Cause.TRAINED_UNSAMPLED,
                    "samples[0]"),
    "not trained": ("calls lines", change("0.loss_mask", lambda one: [*one[:-2], 0, 0]), Cause.SAMPLED_UNTRAINED,
                    "line 1"),
    "nothing sampled": ("calls lines", change("3", lambda one: one | EMPTY), Cause.NOTHING_SAMPLED, "line 4"),
    "no token": ("calls lines", change("0.prompt_ids", first(1 << 30)), Cause.NO_TOKEN, "line 1"),
    "labels too few": ("rows lines", replaced({"input_ids": [1, 2, 3], "labels": [-100, 3]}), Cause.BAD_LABELS,
                       "2 labels for 3 tokens"),
    "labels shifted": ("rows lines", replaced({"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, -100]}),
                       Cause.BAD_LABELS, "label 1 is 3, which is not the id there"),
    "nine logprobs": ("verifiers trace", replaced(trace(mask=None, logprobs=[-1] * 9)), Cause.BAD_LOGPROBS,
                      "9 logprobs for 2 tokens"),
    "gaps in a mask": (
        "verifiers trace", replaced(trace(token_ids=[3, 4, 5], mask=[True, False, True], logprobs=[0.5, -1])),
        Cause.BAD_LOGPROBS, "token 0 of the completion: 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_found_and_named(tmp_path: Path, name: str) -> None:
    shape, edit, fault, words = WRONG[name]
    lines = lines_of(shape)
    assert not report_of(tmp_path, lines, renderer_of("pocket")).faults
    edit(lines)
    report = report_of(tmp_path, lines, renderer_of("pocket"))
    example = report.faults[fault].examples[0]
    assert words in f"{example.where}: {example.words}"
    assert (fault.group in report.problems()) == (fault is not Cause.NO_LOGPROBS)
    assert str(fault) in plain_view(report)


def test_labels_and_logprobs_that_fit_are_no_faults(tmp_path: Path) -> None:
    fitting = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "logprobs": [0, -1, -1]}
    report = report_of(tmp_path, [fitting, trace(mask=None, logprobs=[-1])])
    assert (report.counts["trained"], report.counts["sampled"], report.faults) == (2, 3, {})


def test_a_mask_alone_does_not_prove_what_was_sampled(tmp_path: Path) -> None:
    report = report_of(tmp_path, [ROW | {"loss_mask": [1, 1, 1, 1], "labels": [1, 2, 3, 4]}])
    assert report.counts["unproven"] == 1
    assert "not known" in plain_view(report)


# -- lines that cannot be read


UNREADABLE = {
    "not JSON": ("calls lines", lambda some: [some[0], '{"prompt_ids": [1,'], "line 2: not valid JSON"),
    "a text": ("calls lines", change("1.prompt_ids", lambda _: "1 2 3"), "line 2: prompt_ids: must be a list of token"),
    "a float": ("calls lines", change("1.completion_ids", first(1.5)), "line 2: completion_ids: entry 0 is 1.5"),
    "missing": ("trl rollout", change("0.turns.1", lambda one: {"prompt_ids": one["prompt_ids"]}),
                "line 1: turns[1].completion_ids: is missing"),
    "no parent": ("verifiers trace", change("0.nodes.2.parent", lambda _: 77), "nodes[2].parent: is 77"),
    "other line": ("calls lines", change("1", lambda _: {"score": 1}), "line 2: this is an object with score"),
    "huge": ("calls lines", change("1.temperature", lambda _: 10**400), "too large"),
    "lists": ("rows lines", change("0.logprobs", lambda _: [[0]]), "logprobs: must be one list of numbers"),
    "kinds": ("rows lines", change("0.kinds", lambda _: "abcd"), "kinds: must be a list"),
    "lost delta": ("nemo-gym captured", lambda lines: lines[1:],
                   "parent_call_id: call 'clean-1' is stored as a delta on call 'clean-0', which is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_lines_are_listed_with_line_and_field(tmp_path: Path, name: str) -> None:
    shape, edit, words = UNREADABLE[name]
    lines = lines_of(shape)
    report = report_of(tmp_path, edit(lines) or lines)  # type: ignore[operator]
    assert report.counts["unreadable"] == (3 if name == "lost delta" else 1)
    assert words in unread(report)[0]


def test_each_line_without_a_name_is_a_rollout(tmp_path: Path) -> None:
    named, bad = CALL | {"rollout_id": "r"}, CALL | {"logprobs": "x"}
    report = report_of(tmp_path, [CALL, bad, named, CALL, named, bad])
    assert (report.total, report.calls) == (3, 4)
    assert [place.split(":")[0].rpartition(" ")[2] for place in unread(report)] == ["2", "6"]


def test_files_that_hold_no_rollouts_are_refused(tmp_path: Path) -> None:
    for lines in ([{"a": 1}], [{"rollout_id": "r", "completion_ids": [3, 4]}]):
        with pytest.raises(InputError, match=r"line 1: this is an object with .*, which has no known shape"):
            report_of(tmp_path, lines)
    with pytest.raises(InputError, match="holds no rows"):
        report_of(tmp_path, [])
    with pytest.raises(InputError, match=r"dmp.jsonl"):
        check_rollouts([str(tmp_path / "dmp.jsonl")])
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\n1\n")
    with pytest.raises(InputError, match=r"model.bin, line 1: not UTF-8"):
        check_rollouts([str(tmp_path / "model.bin")])


JUNK = [None, True, -1, 2**40, 1.5, '"x"', [], {}, [[]], [None], ["a"], {"a": 1}, [{}], [{"role": 1}], float("nan")]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths at which a dump is damaged: of each list, only the first three entries."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_damaged_dump_is_read_or_refused(tmp_path: Path, shape: str) -> None:
    planted = [one for one in rollouts("pocket") if one.name in ("clean", "json_format")]
    for seed in range(6):
        rng, lines = random.Random(f"{shape} {seed}"), lines_of(shape, planted, True)
        *path, last = rng.choice(places(lines)[1:])
        at: Any = lines
        for key in path:
            at = at[key]
        if rng.random() < 0.3:
            del at[last]
        else:
            at[last] = rng.choice(JUNK)
        report, message = None, ""
        try:
            report = report_of(tmp_path, lines, renderer_of("pocket"))
        except TokentraceError as error:
            message = str(error)
        if report is None:
            assert "dump.jsonl" in message
            continue
        assert report.total + report.counts["unreadable"] > 0
        assert json.loads(json.dumps(report.to_json()))["verdict"] == report.verdict
