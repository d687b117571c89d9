"""Batches: rows are unchanged, padding carries no loss, and staleness is never guessed."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.errors import SampleError
from tokentrace.samples.batches import collate, row_staleness, token_staleness, token_versions
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory import VersionSpan

INTEGERS = ("input_ids", "attention_mask", "position_ids", "labels", "loss_mask")
SIDES = pytest.mark.parametrize("side", ["right", "left"])


def sample_of(ids: list[int], loss: list[int], full: bool = True, **changes: Any) -> Sample:
    mask = np.array(loss, np.bool_)
    kinds = np.where(mask, Kind.SAMPLED, Kind.PROMPT).astype(np.uint8)
    extra: dict[str, Any] = {}
    if full:
        extra = {
            "logprobs": np.where(mask, -0.5 - np.arange(len(ids)), np.nan).astype(np.float32),
            "advantages": np.where(mask, 1.5 + np.arange(len(ids)), 0).astype(np.float32),
            "reward": 0.25 * len(ids),
        }
    return Sample(np.array(ids, np.int32), mask, np.where(mask, 1, 0).astype(np.int32), kinds, **(extra | changes))


@st.composite
def many(draw: st.DrawFn) -> list[Sample]:
    full = draw(st.booleans())
    token = st.tuples(st.integers(0, 9) | st.integers(0, 2**31 - 1), st.integers(0, 1))
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=8))
    return [sample_of([one for one, _ in row], [loss for _, loss in row], full) for row in rows]


@settings(deadline=None, max_examples=examples(200))
@given(many(), st.sampled_from(["right", "left"]), st.integers(0, 9), st.sampled_from([None, 1, 4, 8]))
def test_each_row_is_its_sample_and_padding(
    samples: list[Sample], side: Any, pad_id: int, multiple_of: int | None
) -> None:
    batch = collate(samples, pad_id=pad_id, side=side, multiple_of=multiple_of)
    width, step, longest = batch["input_ids"].shape[1], multiple_of or 1, max(map(len, samples))
    assert longest <= width < longest + step
    assert width % step == 0
    rewards = batch.pop("rewards", None)
    for name, array in batch.items():
        assert array.dtype == (np.int64 if name in INTEGERS else np.float32)
        assert array.shape == (len(samples), width)
    assert ((batch["labels"] != -100) == (batch["loss_mask"] == 1)).all()
    assert ("logprobs" in batch) == ("advantages" in batch) == (rewards is not None)
    for number, sample in enumerate(samples):
        inside = np.zeros(width, np.bool_)
        inside[slice(0, len(sample)) if side == "right" else slice(width - len(sample), width)] = True
        assert batch["attention_mask"][number].tolist() == inside.astype(int).tolist()
        values = {name: array[number][inside] for name, array in batch.items()}
        assert values["input_ids"].tolist() == sample.token_ids
        assert values["position_ids"].tolist() == [*range(len(sample))]
        assert values["labels"].tolist() == [-100, *sample.labels[1:].tolist()], "nothing precedes the first token"
        padding = {name: array[number][~inside] for name, array in batch.items()}
        assert (padding["input_ids"] == pad_id).all()
        assert (padding["labels"] == -100).all()
        if sample.logprobs is not None and sample.advantages is not None:
            assert values["logprobs"].tobytes() == sample.logprobs.tobytes()
            assert values["advantages"].tolist() == [0, *sample.advantages[1:].tolist()]
            assert np.isnan(padding["logprobs"]).all()
            assert (padding["advantages"] == 0).all()
        assert rewards is None or rewards[number] == sample.reward


@SIDES
def test_a_causal_model_learns_from_a_padded_batch_what_it_learns_from_single_rows(side: Any) -> None:
    torch = pytest.importorskip("torch")
    samples = [sample_of([5, 6, 7, 8], [1, 0, 1, 1]), sample_of([1, 2], [0, 1]), sample_of([9, 9, 3], [1, 1, 1])]
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(batch: dict[str, Any]) -> Any:
        """Loss of a bigram model, shifted by one token as trainers do."""
        logits = table[batch["input_ids"]][:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, 10), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )

    padded = collate(samples, pad_id=0, side=side, length=6, tensors="torch")
    for name, array in collate(samples, pad_id=0, side=side, length=6).items():
        assert (padded[name].numpy().dtype, padded[name].numpy().tobytes()) == (array.dtype, array.tobytes())
    single = sum(loss(collate([sample], pad_id=0, tensors="torch")) for sample in samples)
    assert torch.allclose(loss(padded), single)


def test_a_missing_logprob_is_an_error_and_never_zero() -> None:
    sample = sample_of([1, 2, 3], [0, 1, 1], logprobs=np.array([np.nan, -1, np.nan], np.float32), name="x")
    with pytest.raises(SampleError, match=r"sample 0 \('x'\) has no logprob for token 2, which carries loss"):
        collate([sample], pad_id=0)


@pytest.mark.parametrize("name", ["logprobs", "advantages", "reward"])
def test_fields_that_only_some_samples_have_are_refused(name: str) -> None:
    full, bare = sample_of([1, 2], [0, 1]), sample_of([1, 2], [0, 1]).replace(**{name: None})
    with pytest.raises(SampleError, match=f"sample 1 has {name} but sample 0 has none"):
        collate([bare, full], pad_id=0)
    assert (name if name != "reward" else "rewards") not in collate([bare, bare], pad_id=0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"length": 2}, r"sample 1 \('long'\) has 3 tokens, but length is 2: truncate"),
        ({"length": 6, "multiple_of": 4}, "length is 6, which is not a multiple of 4"),
        ({"length": 0}, "length must be"),
        ({"multiple_of": 0}, "multiple_of must be"),
        ({"multiple_of": True}, "multiple_of must be"),
        ({"pad_id": -1}, "pad_id must be"),
        ({"pad_id": None}, "pad_id must be"),
        ({"side": "up"}, "side must be 'right' or 'left'"),
        ({"tensors": "jax"}, "tensors must be 'numpy' or 'torch'"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    samples = [sample_of([1, 2], [0, 1]), sample_of([1, 2, 3], [0, 1, 1], name="long")]
    with pytest.raises(SampleError, match=problem):
        collate(samples, **({"pad_id": 0, "length": 8} | settings))


# -- versions and staleness


def row(*spans: tuple[Any, int, int], length: int = 8, name: str = "one") -> Sample:
    loss = [int(any(start <= at < stop for _, start, stop in spans)) for at in range(length)]
    versions = tuple(VersionSpan(*span) for span in spans if span[0] is not None)
    return sample_of([*range(length)], loss, full=False, versions=versions, name=name)


TWO = row((5, 2, 4), (5, 5, 6), (7, 6, 7))


@SIDES
def test_a_batch_has_the_version_and_the_staleness_of_each_token(side: Any) -> None:
    assert token_versions(TWO).tolist() == [-1, -1, 5, 5, -1, 5, 7, -1]
    assert token_staleness(TWO, 8).tolist() == [-1, -1, 3, 3, -1, 3, 1, -1]
    assert row_staleness(TWO, 8) == (3, 2.5)
    assert row_staleness(TWO.slice(0, 2), 8)[0] == -1
    assert math.isnan(row_staleness(TWO.slice(0, 2), 8)[1])
    rows = [TWO, row(("8", 1, 3), length=4)]
    batch = collate(rows, pad_id=0, side=side, version=8)
    assert batch["versions"] == [5, 7, "8"]
    for at, sample in enumerate(rows):
        place = slice(0, len(sample)) if side == "right" else slice(-len(sample), None)
        assert batch["token_versions"][at, place].tolist() == token_versions(sample).tolist()
        assert batch["staleness"][at, place].tolist() == token_staleness(sample, 8).tolist()
        spans = [(batch["versions"].index(version), stop - start) for version, start, stop in sample.versions]
        ids = batch["version_ids"][at]
        assert ids[ids >= 0].tolist() == [number for number, count in spans for _ in range(count)]
    padding = batch["attention_mask"] == 0
    for name in ("version_ids", "token_versions", "staleness"):
        assert (batch[name][padding] == -1).all()
    assert (batch["max_staleness"].tolist(), batch["mean_staleness"].tolist()) == ([3, 0], [2.5, 0.0])
    assert not {"staleness", "token_versions", "max_staleness"} & set(collate(rows, pad_id=0))


@pytest.mark.parametrize(
    ("versions", "now", "why"),
    [
        (["step-7"], 8, "version 'step-7': versions must be integers"),
        ([-3], 8, "version -3"),
        (["9" * 19], 8, "versions must be integers"),
        (["9"], 8, "sampled by version 9, but 8 is being trained"),
        ([5, None], 8, "token 3 carries loss but has no version"),
        ([5], "8", "integer that names the weights"),
        ([5], True, "integer that names the weights"),
        ([5], -1, "integer that names the weights"),
    ],
)
def test_staleness_that_cannot_be_computed_is_refused(versions: Any, now: Any, why: str) -> None:
    sample = row(*((version, 2 * at + 1, 2 * at + 3) for at, version in enumerate(versions)))
    with pytest.raises(SampleError, match=why):
        token_staleness(sample, now)
    with pytest.raises(SampleError, match=why):
        collate([sample], pad_id=0, version=now)
