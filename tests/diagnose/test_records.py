"""A malformed line is listed with its field, and the others are read; lengths that do not fit are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.rollout_report import RolloutReport, check_rollouts
from tokentrace.errors import InputError

Line = dict[str, Any]
HUGE = 10**400


def looked_at(folder: Path, *made: Line) -> RolloutReport:
    file = folder / "dump.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    return check_rollouts([str(file)])


CALL: Line = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1, -1]}
ROW: Line = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -1, -1]}


def node(**more: Any) -> Line:
    return {
        "message": {"role": "user", "content": "x"},
        "parent": None,
        "token_ids": [1, 2],
        "mask": [False, False],
    } | more


def trace(calls: list[Line] | None = None, **more: Any) -> Line:
    answer = node(parent=0, sampled=True, token_ids=[3, 4], mask=[True, True], logprobs=[-1, -1])
    return {"id": "t", "nodes": [node(), answer | more], "calls": calls or []}


def captured(name: str | None, prompt: list[int], **more: Any) -> Line:
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": [3, 4], "generation_log_probs": [-1, -1]}
    return {"rollout_id": "r", "model_call_id": name, **tokens, **more}


MALFORMED = {
    "logprobs in lists": (ROW, ROW | {"logprobs": [[0], [0], [0], [0]]}, "logprobs: must be one list of numbers"),
    "logprobs in two lists": (ROW, ROW | {"logprobs": [[0], [0]]}, "logprobs: must be one list of numbers"),
    "a huge logprob of a row": (ROW, ROW | {"logprobs": [0, 0, HUGE, -1]}, "logprobs: must be one list of numbers"),
    "a huge logprob of a call": (CALL, CALL | {"logprobs": [HUGE, -1]}, "logprobs: must be one list of numbers"),
    "a huge temperature": (CALL, CALL | {"temperature": HUGE}, "too large"),
    "ragged kinds": (ROW, ROW | {"kinds": [[1], [1, 2], 3, 4]}, "kinds: entry 0 is [1]"),
    "kinds of text": (ROW, ROW | {"kinds": "abcd"}, "kinds: must be a list"),
    "labels of text": (ROW, {"input_ids": [1, 2, 3], "labels": [1, "b", 3]}, "labels: entry 1 is 'b'"),
    "logprobs that are a number": (trace(), trace(logprobs=3, mask=None), "no len()"),
    "a huge time": (captured("a", [1]), captured("b", [1], created_at=HUGE), "too large"),
    "a delta of two": (captured("a", [1]), captured("b", [1], parent_call_id="c", prompt_is_delta=True),
                       "call 'b' is stored as what it adds to call 'c', which is not there"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_line_is_listed_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    good, bad, said = MALFORMED[name]
    report = looked_at(tmp_path, good, bad, good | ({"model_call_id": "z"} if "model_call_id" in good else {}))
    assert report.unreadable == 1
    assert said in report.unread[0].problem
    assert report.unread[0].where.endswith("line 2")
    assert report.calls == 2


WRONG = {
    "labels too few": ({"input_ids": [1, 2, 3], "labels": [-100, 3]}, Cause.BAD_LABELS, "2 labels for 3 tokens"),
    "labels shifted": ({"input_ids": [1, 2, 3, 4], "labels": [-100, 3, 4, -100]}, Cause.BAD_LABELS,
                       "label 1 is 3, which is not the id there"),
    "nine logprobs": (trace(mask=None, logprobs=[-1] * 9), Cause.BAD_LOGPROBS,
                      "9 logprobs for 2 sampled tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_said(tmp_path: Path, name: str) -> None:
    line, fault, said = WRONG[name]
    report = looked_at(tmp_path, line)
    assert said in report.faults[fault].examples[0].words
    assert fault.group in report.problems()
    assert report.prompted >= 0


def test_labels_that_fit_are_no_fault(tmp_path: Path) -> None:
    report = looked_at(tmp_path, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "logprobs": [0, -1, -1]})
    assert (report.trained, report.faults) == (2, {})


def test_a_node_without_a_mask_has_as_many_sampled_tokens_as_logprobs(tmp_path: Path) -> None:
    report = looked_at(tmp_path, trace(mask=None, logprobs=[-1]))
    assert (report.sampled, report.prompted) == (1, 3)


@pytest.mark.parametrize("name", ["a", None])
def test_captured_calls_that_have_one_name_keep_their_own_prompts(tmp_path: Path, name: str | None) -> None:
    report = looked_at(tmp_path, captured(name, [1, 2]), captured(name, [9, 2, 3, 4, 5]))
    assert (report.calls, report.prompted, report.breaks) == (2, 7, 1)


def test_what_goes_on_from_one_of_two_calls_of_a_name_is_not_read(tmp_path: Path) -> None:
    delta = captured("b", [5], parent_call_id="a", prompt_is_delta=True)
    report = looked_at(tmp_path, captured("a", [1, 2]), captured("a", [1, 9]), delta)
    assert (report.calls, report.unreadable) == (2, 1)
    assert report.unread[0].problem.endswith("what it adds to call 'a', of which there are 2")


def test_lines_without_a_name_and_lines_with_one_keep_their_order(tmp_path: Path) -> None:
    """Lines before the first that names a rollout are read at once, the others when all are known."""
    named = CALL | {"rollout_id": "r"}
    bad = CALL | {"logprobs": "x"}
    report = looked_at(tmp_path, CALL, bad, named, CALL, named, bad)
    assert (report.rollouts, report.calls) == (3 + 0, 4)
    assert [one.where.rpartition(" ")[2] for one in report.unread] == ["2", "6"]


def test_a_first_line_that_cannot_be_read_is_listed_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "dump.jsonl"
    first = {"rollout_id": "r", "completion_ids": [3, 4]}
    file.write_text("".join(json.dumps(line) + "\n" for line in (first, CALL, CALL)), encoding="utf-8")
    found = check_rollouts([str(file)])
    assert (found.calls, found.unreadable) == (2, 1)
    assert "line 1" in found.unread[0].where
    file.write_text(json.dumps(first) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1"):
        check_rollouts([str(file)])
