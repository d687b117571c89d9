"""Which call continues which, and checks of tokentrace's own files: trajectories, folders, exported rows, stores."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnose.planted import Planted, clean, rollouts
from tests.diagnose.two_requests import renderer_of
from tests.gateway.recorded import Recording, user
from tokentrace import Trajectory, create_renderer
from tokentrace.data.tables import write_samples
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.records import Call, Rollout
from tokentrace.diagnose.rollouts import CheckedRollout, Relation, check_rollouts, recorded_tokenizer
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.gateway.rows import Export
from tokentrace.pocket import POCKET
from tokentrace.samples import trajectory_samples
from tokentrace.show import plain_view
from tokentrace.store.store import open_store

BROKEN = next(one for one in rollouts("pocket") if one.cause is Cause.JSON_FORMAT)


def recorded(planted: Planted, scores: Any = None) -> Trajectory:
    """A rollout as a trajectory: prompts that do not extend are branches."""
    trajectory = Trajectory(name=planted.name)
    for one in planted.calls:
        if not trajectory.num_branches:
            trajectory.begin(one.prompt)
        elif (extends := trajectory.shared_prefix(one.prompt).extends) >= 0:
            trajectory.extend_to(one.prompt, branch=extends)
        else:
            trajectory.branch(one.prompt, cause="rendered again")
        logprobs = one.logprobs if scores is None else scores([*one.prompt, *one.completion])[len(one.prompt) :]
        trajectory.append_completion(one.completion, logprobs, finish_reason="stop", sampling={"temperature": 1.0})
    return trajectory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    for planted in (*clean("pocket"), BROKEN):
        recorded(planted).save(run / "trajectories" / f"{planted.name}.tt")
    (run / "run.json").write_text(json.dumps({"engine": {"kind": "embedded"}}), encoding="utf-8")
    return run


def report_of(*inputs: Any, **more: Any) -> Any:
    return check_rollouts([str(one) for one in inputs], renderer_of("pocket"), **more)


def places(tallies: Any) -> dict[Any, int]:
    return {key: tally.places for key, tally in tallies.items()}


def test_trajectories_are_inspected_with_the_tokenizer_of_their_run(folder: Path) -> None:
    assert recorded_tokenizer([str(folder)]) == str(POCKET)
    report = report_of(folder)
    assert (report.total, report.counts["broken"], report.unread) == (4, 1, {})
    assert places(report.causes) == {Cause.JSON_FORMAT: 1}
    assert places(report.recorded) == {"rendered again": 1}
    assert report.outcomes[Relation.REPEATS].places == 1
    one = report_of(folder / "trajectories" / "clean.tt")
    assert (one.total, one.calls, one.breaks) == (1, 4, 0)


def test_a_trajectory_that_was_cut_off_is_read_as_far_as_it_goes(folder: Path) -> None:
    path = folder / "trajectories" / "clean.tt"
    path.write_bytes(path.read_bytes()[:-20])
    report = report_of(path)
    assert report.calls == 3
    assert any("clean.tt" in note for note in report.notes)
    path.write_bytes(path.read_bytes()[:12])
    assert report_of(path).counts["unreadable"] == 1


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_exported_rows_give_the_report_of_their_trajectories(tmp_path: Path, name: str) -> None:
    samples = [row for planted in (*clean("pocket"), BROKEN) for row in trajectory_samples(recorded(planted))]
    write_samples(tmp_path / name, samples)
    report = report_of(tmp_path / name)
    counts = report.counts
    assert (counts["rollouts"], counts["broken"], counts["samples"]) == (4, 1, 6)
    assert places(report.causes) == {Cause.JSON_FORMAT: 1}
    assert counts["trained"] == counts["sampled"] == sum(sample.trained for sample in samples)
    assert not report.faults
    size, sampled = len(samples[0]), samples[0].trained
    for mask, cause, count in ((1, Cause.TRAINED_UNSAMPLED, size - sampled), (0, Cause.SAMPLED_UNTRAINED, sampled)):
        write_samples(tmp_path / f"wrong-{name}", [samples[0].replace(mask=np.full(size, mask, np.bool_))])
        assert report_of(tmp_path / f"wrong-{name}").faults[cause].tokens == count


def test_an_exported_row_that_was_cut_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    samples = list(trajectory_samples(recorded(clean("pocket")[0])))
    write_samples(path, [samples[0].replace(name="a\u2028b\x85")])
    [line] = path.read_text(encoding="utf-8").splitlines()  # no character within a row ends a line
    row = json.loads(line)
    row |= {
        key: value[:-9] for key, value in row.items() if isinstance(value, list) and len(value) == row["num_tokens"]
    }
    path.write_text(json.dumps(row), encoding="utf-8")
    report = check_rollouts(str(path), renderer_of("pocket"))
    assert "num_tokens" in report.unread["could not be read"].examples[0].words


def test_sessions_of_a_store_are_inspected_with_their_requests(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    renderer = create_renderer(POCKET).silent()
    hello, digest = renderer.tokenizer.encode("Hello there.").tolist(), renderer.tokenizer.digest[:16]
    first = [user("a question, which is the first one")]
    second = [*first, {"role": "assistant", "content": "Hello there."}, user("and then?")]
    summary = [user("Summary of the conversation so far: one question, two answers. Go on.")]
    title = [user("Write a title for this chat, at most five words.")]
    exported: list[dict[str, Any]] = []

    async def fill() -> None:
        store = open_store(str(path))
        try:
            for name, requests in (("plain", [first, second]), ("compacted", [first, second, summary, title])):
                recording = await Recording(store, name, renderer).begin()
                for messages in requests:
                    await recording.turn(messages, hello, tokenizer=digest)
            async for table in Export(store, store.sessions()).tables():
                exported.extend(table.to_pylist())
        finally:
            await store.close()

    asyncio.run(fill())
    report = report_of(path)
    assert (report.total, report.calls, report.breaks) == (2, 6, 1)
    assert places(report.histories) == places(report.recorded) == {"compaction": 1}
    assert report.outcomes[Relation.OTHER].places == 1
    assert report.notes == [f"{path}: a store of sessions"]
    (example,) = report.causes[Cause.COMPACTION].examples
    assert example.words.count("Messages were left out") == 1
    assert plain_view(report).count(Cause.COMPACTION.advice) == 1
    for left_out in ((), ("messages",)):  # without messages, the recorded causes count
        rows = [{name: value for name, value in row.items() if name not in left_out} for row in exported]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        again = report_of(tmp_path / "rows.jsonl")
        assert (places(again.outcomes), places(again.causes)) == (places(report.outcomes), places(report.causes))
        assert again.counts["lost"] == report.counts["lost"] > 0
    other = check_rollouts([str(path)], renderer_of("qwen3").tokenizer)
    assert any("another tokenizer" in note for note in other.notes)


def test_a_lost_token_counts_once_and_the_record_names_the_cause() -> None:
    stream = np.arange(10, 20)
    calls = [Call(stream, 6, "a")]
    calls += [Call(np.append(stream[:at], [50, 51]), at + 1, "b", recorded="compaction") for at in (3, 4)]
    checked = CheckedRollout(Rollout("", "", calls))
    assert (checked.counts["lost"], [one.tokens for one in checked.breaks]) == (4, [4, 0])
    assert {one.cause for one in checked.breaks} == {Cause.COMPACTION}
    assert all(": recorded: compaction; " in one.words for one in checked.breaks)


def test_logprobs_are_compared_with_those_of_an_engine(tmp_path: Path) -> None:
    engine = EmbeddedEngine()

    async def connect() -> EmbeddedEngine:
        return EmbeddedEngine()

    planted = clean("pocket")[1]

    def scores(ids: list[int]) -> list[float]:
        return asyncio.run(engine.score(ids)).tolist()

    recorded(planted, scores).save(tmp_path / "same.tt")
    same = report_of(tmp_path / "same.tt", engine=connect).scores
    assert (same["completions"], same["tokens"]) == (5, sum(len(one.completion) for one in planted.calls))
    assert same["most"] < 1e-4
    recorded(planted, lambda ids: [one - 0.5 for one in scores(ids)]).save(tmp_path / "off.tt")
    shifted = report_of(tmp_path / "off.tt", engine=connect).scores
    assert shifted["mean"] == pytest.approx(0.5, abs=1e-4)
    assert shifted["mean_ratio"] == pytest.approx(np.exp(0.5), abs=1e-3)


# -- which call continues which


Pair = tuple[list[int], list[int]]


def rollout(*pairs: Pair, ordered: bool = True) -> CheckedRollout:
    """Check calls with these prompts and completions."""
    streams = [(np.asarray(prompt + completion, np.int32), len(prompt)) for prompt, completion in pairs]
    calls = [Call(stream, start, f"call {at}") for at, (stream, start) in enumerate(streams)]
    return CheckedRollout(Rollout("r", "here", calls, ordered=ordered))


FIRST: Pair = ([1, 2], [3, 4])
SECOND: Pair = ([1, 2, 3, 4, 5], [6, 7])
LATER = {
    "a fork": ([1, 2, 3, 4, 8], Relation.EXTENDS),
    "a fork of the stream alone": ([1, 2, 3, 4], Relation.EXTENDS),
    "a fork that shares more": ([1, 2, 3, 4, 5, 5], Relation.BREAKS),  # what was sampled after 5 is another token here
    "the same prompt": ([1, 2, 3, 4, 5], Relation.REPEATS),
    "the tip": ([1, 2, 3, 4, 5, 6, 7, 8], Relation.EXTENDS),
    "what was sampled is other tokens": ([1, 2, 3, 4, 5, 6, 9, 8], Relation.BREAKS),
    "the prompt of an answer was rewritten": ([1, 2, 3, 4, 8, 6, 7, 9], Relation.BREAKS),
    "the first answer is other tokens": ([1, 2, 3, 9, 5], Relation.BREAKS),
}


@pytest.mark.parametrize("name", LATER)
def test_a_prompt_that_begins_with_an_earlier_stream_extends_it(name: str) -> None:
    prompt, step = LATER[name]
    result = rollout(FIRST, SECOND, (prompt, [9, 9]))
    assert result.steps == [Relation.FIRST, Relation.EXTENDS, step]
    assert len(result.tips) == (1 if name == "the tip" else 2)
    assert len(result.breaks) == (step is Relation.BREAKS)


def test_a_fork_counts_shared_tokens_once_and_keeps_what_was_sampled() -> None:
    result = rollout(FIRST, SECOND, ([1, 2, 3, 4, 8], [9, 9]), ([1, 2, 3, 4, 8, 9, 9, 1], [2]))
    assert result.steps == [Relation.FIRST, *[Relation.EXTENDS] * 3]
    assert (result.counts["tokens"], [len(tip.stream) for tip in result.tips]) == (7 + 5, [7, 9])
    assert result.tips[1].sampled.tolist() == [False, False, True, True, False, True, True, False, True]


@given(st.permutations(range(6)))
def test_calls_in_any_order_are_sorted_by_their_prompts(order: list[int]) -> None:
    """A chain of four calls, a fork of its second, and a second answer to its third prompt."""
    chain = [FIRST, SECOND, ([1, 2, 3, 4, 5, 6, 7, 8], [9]), ([1, 2, 3, 4, 5, 6, 7, 8, 9, 5], [6])]
    pairs = [*chain, ([1, 2, 3, 4, 5, 6, 7, 5], [5]), ([1, 2, 3, 4, 5, 6, 7, 8], [2])]
    result = rollout(*(pairs[at] for at in order), ordered=False)
    assert not result.breaks
    assert (len(result.tips), result.steps.count(Relation.FIRST)) == (3, 1)


def test_a_break_is_the_same_whatever_the_order_of_lines() -> None:
    other: Pair = ([1, 2, 3, 9, 5], [6, 7])
    for pairs in ([FIRST, other], [other, FIRST]):
        (broken,) = rollout(*pairs, ordered=False).breaks
        assert (broken.position, "token 3 of 4" in broken.words) == (3, True)
        assert "call 2" in broken.where
