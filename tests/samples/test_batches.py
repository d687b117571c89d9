"""Batches: each row as it is, whole samples in packed rows, padding that no model learns from, ages never guessed."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.errors import SampleError
from tokentrace.samples.batches import (
    Pack,
    collate,
    first_fit_decreasing,
    flatten,
    fresh_samples,
    pack,
    row_staleness,
    token_staleness,
    token_versions,
    unpack,
)
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


def assert_document(arrays: dict[str, Any], sample: Sample) -> None:
    """The arrays of one sample, wherever they were: its own, and no loss on the first token."""
    assert arrays["input_ids"].tolist() == sample.token_ids
    assert arrays["position_ids"].tolist() == [*range(len(sample))]
    assert arrays["labels"].tolist() == [-100, *sample.labels[1:].tolist()]
    if sample.logprobs is None or sample.advantages is None:
        return
    assert arrays["logprobs"].tobytes() == sample.logprobs.tobytes()
    assert arrays["advantages"].tolist() == [0, *sample.advantages[1:].tolist()]


def assert_padding(arrays: dict[str, Any], pad_id: int) -> None:
    assert (arrays["input_ids"] == pad_id).all()
    assert (arrays["labels"] == -100).all()
    if arrays.get("logprobs") is not None:
        assert np.isnan(arrays["logprobs"]).all()
        assert (arrays["advantages"] == 0).all()


# -- padded rows


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
        there = np.zeros(width, np.bool_)
        there[slice(0, len(sample)) if side == "right" else slice(width - len(sample), width)] = True
        assert batch["attention_mask"][number].tolist() == there.astype(int).tolist()
        assert_document({name: array[number][there] for name, array in batch.items()}, sample)
        assert_padding({name: array[number][~there] for name, array in batch.items()}, pad_id)
        assert rewards is None or rewards[number] == sample.reward


@SIDES
def test_a_causal_model_learns_from_a_padded_batch_what_it_learns_from_single_rows(side: Any) -> None:
    torch = pytest.importorskip("torch")
    samples = [sample_of([5, 6, 7, 8], [1, 0, 1, 1]), sample_of([1, 2], [0, 1]), sample_of([9, 9, 3], [1, 1, 1])]
    table = torch.randn(10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(batch: dict[str, Any]) -> Any:
        """Of a model that looks at the token before, as trainers shift it."""
        logits = table[batch["input_ids"]][:, :-1]
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, 10), batch["labels"][:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )

    whole = loss(collate(samples, pad_id=0, side=side, length=6, tensors="torch"))
    single = sum(loss(collate([sample], pad_id=0, tensors="torch")) for sample in samples)
    assert torch.allclose(whole, single)


def test_a_missing_logprob_is_an_error_and_never_zero() -> None:
    sample = sample_of([1, 2, 3], [0, 1, 1], logprobs=np.array([np.nan, -1, np.nan], np.float32), name="x")
    with pytest.raises(SampleError, match=r"sample 0 \('x'\) has no logprob for token 2, which carries loss"):
        collate([sample], pad_id=0)


@pytest.mark.parametrize("name", ["logprobs", "advantages", "reward"])
def test_what_only_some_samples_have_is_refused(name: str) -> None:
    full, bare = sample_of([1, 2], [0, 1]), sample_of([1, 2], [0, 1]).replace(**{name: None})
    with pytest.raises(SampleError, match=f"sample 1 has {name} and sample 0 has none"):
        collate([bare, full], pad_id=0)
    assert (name if name != "reward" else "rewards") not in collate([bare, bare], pad_id=0)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"length": 2}, r"sample 1 \('long'\) has 3 tokens, and length is 2: truncate"),
        ({"length": 6, "multiple_of": 4}, "length is 6, which is not a multiple of 4"),
        ({"length": 0}, "length must be"),
        ({"multiple_of": 0}, "multiple_of must be"),
        ({"multiple_of": True}, "multiple_of must be"),
        ({"pad_id": -1}, "pad_id must be"),
        ({"pad_id": None}, "pad_id must be"),
        ({"side": "up"}, "side is 'right' or 'left'"),
        ({"tensors": "jax"}, "tensors is 'numpy' or 'torch'"),
    ],
)
def test_settings_that_make_no_batch_are_refused(settings: dict[str, Any], problem: str) -> None:
    samples = [sample_of([1, 2], [0, 1]), sample_of([1, 2, 3], [0, 1, 1], name="long")]
    for make in (collate, pack) if "side" not in settings else (collate,):
        with pytest.raises(SampleError, match=problem):
            make(samples, **({"pad_id": 0, "length": 8} | settings))


# -- packed rows


def naive(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        for members in bins:
            if sum(lengths[one] for one in members) + lengths[index] <= capacity:
                members.append(index)
                break
        else:
            bins.append([index])
    return [sorted(members) for members in bins]


@settings(deadline=None, max_examples=examples(500))
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c), max_size=60), st.just(c))))
def test_bins_are_those_of_the_plain_first_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = first_fit_decreasing(lengths, capacity)
    assert bins == naive(lengths, capacity) == first_fit_decreasing(np.array(lengths, np.int32), capacity)
    assert sorted(index for members in bins for index in members) == [*range(len(lengths))]


def assert_holds(row: Pack, samples: list[Sample], pad_id: int) -> None:
    """The row is its documents one after another, and padding; all its arrays agree on where they are."""
    assert row.samples == tuple(sorted(row.samples))
    ends, used = row.cu_seqlens.tolist(), row.spans[-1][1]
    assert row.cu_seqlens.dtype == np.int32
    assert (ends[0], ends[-1]) == (0, len(row))
    assert len(ends) == len(row.samples) + 1 + (used < len(row))
    assert row.max_seqlen == max(b - a for a, b in pairwise(ends))
    for number, (start, stop) in enumerate(pairwise(ends)):
        assert row.position_ids[start:stop].tolist() == [*range(stop - start)]
        document = number if number < len(row.samples) else -1
        assert (row.document_ids[start:stop] == document).all()
        assert (row.attention_mask[start:stop] == (document >= 0)).all()
    arrays = {name: getattr(row, name) for name in (*INTEGERS, "document_ids")}
    assert {(array.dtype, array.shape) for array in arrays.values()} == {(np.dtype(np.int64), (len(row),))}
    assert ((row.labels != -100) == (row.loss_mask == 1)).all()
    if samples[0].reward is None:
        assert row.logprobs is row.advantages is row.rewards is None
    else:
        arrays |= {"logprobs": row.logprobs, "advantages": row.advantages}
        assert row.rewards.tolist() == [samples[index].reward for index in row.samples]
    for (start, stop), index, ids in zip(row.spans, row.samples, unpack(row), strict=True):
        assert ids.tolist() == samples[index].token_ids
        assert_document({name: array[start:stop] for name, array in arrays.items()}, samples[index])
    assert_padding({name: array[used:] for name, array in arrays.items()}, pad_id)


@settings(deadline=None, max_examples=examples(300))
@given(many(), st.integers(2, 6), st.sampled_from([None, 2, 4]), st.booleans())
def test_packing_loses_and_duplicates_nothing(
    samples: list[Sample], quarters: int, multiple_of: int | None, pad_to_length: bool
) -> None:
    length = 4 * quarters
    rows = pack(samples, length, pad_id=7, multiple_of=multiple_of, pad_to_length=pad_to_length)
    assert sorted(index for row in rows for index in row.samples) == [*range(len(samples))]
    for row in rows:
        assert_holds(row, samples, 7)
        used, step = row.spans[-1][1], multiple_of or 1
        assert len(row) == (length if pad_to_length else -(-used // step) * step)
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    assert trained == sum(sample.trained - int(sample.mask[0]) for sample in samples)
    flat = flatten(samples)
    assert (flat.samples, len(flat)) == (tuple(range(len(samples))), sum(map(len, samples)))
    assert_holds(flat, samples, -1)


@settings(deadline=None, max_examples=30)
@given(many(), st.sampled_from(["right", "left"]))
def test_torch_gives_the_same_numbers(samples: list[Sample], side: Any) -> None:
    torch = pytest.importorskip("torch")

    def assert_equal(one: Any, other: Any) -> None:
        if not isinstance(one, np.ndarray):
            assert one == other
            return
        assert isinstance(other, torch.Tensor)
        assert other.numpy().dtype == one.dtype
        assert other.numpy().tobytes() == one.tobytes()

    arrays = collate(samples, pad_id=3, side=side, multiple_of=4)
    tensors = collate(samples, pad_id=3, side=side, multiple_of=4, tensors="torch")
    assert arrays.keys() == tensors.keys()
    for name, array in arrays.items():
        assert_equal(array, tensors[name])
    packs = [*pack(samples, 12, pad_id=1), flatten(samples)]
    twins = [*pack(samples, 12, pad_id=1, tensors="torch"), flatten(samples, tensors="torch")]
    for row, twin in zip(packs, twins, strict=True):
        assert [ids.tolist() for ids in unpack(row)] == [ids.tolist() for ids in unpack(twin)]
        for name in Pack.__slots__:
            assert_equal(getattr(row, name), getattr(twin, name))


def test_a_model_sees_in_a_packed_row_what_it_sees_in_single_rows() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    samples = [sample_of(random.integers(0, 20, count).tolist(), [1] * count) for count in (5, 1, 7, 3, 4, 2, 6)]
    seeded = torch.Generator().manual_seed(0)
    tokens, places, *weights, head = (
        torch.randn(*shape, generator=seeded, dtype=torch.float64)
        for shape in [(20, 8), (16, 8), (8, 8), (8, 8), (8, 8), (8, 20)]
    )

    def causal(count: int) -> Any:
        return torch.ones(count, count, dtype=torch.bool).tril()

    def logits(ids: Any, positions: Any, allowed: Any) -> Any:
        states = tokens[ids] + places[positions]
        query, key, value = (states @ weight for weight in weights)
        seen = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], allowed[None])
        return seen[0] @ head

    def loss(output: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(output[:-1], labels[1:], ignore_index=-100, reduction="sum")

    alone = [
        logits(torch.from_numpy(sample.ids).long(), torch.arange(len(sample)), causal(len(sample)))
        for sample in samples
    ]
    pairs = zip(alone, samples, strict=True)
    alone_loss = sum(loss(one, torch.from_numpy(sample.labels)) for one, sample in pairs if len(sample) > 1)
    packed_loss = 0.0
    rows = pack(samples, 12, pad_id=0, tensors="torch")
    assert any(len(row.samples) > 2 for row in rows)
    for row in rows:
        allowed = torch.zeros(len(row), len(row), dtype=torch.bool)
        for start, stop in pairwise(row.cu_seqlens.tolist()):
            allowed[start:stop, start:stop] = causal(stop - start)
        output = logits(row.input_ids, row.position_ids, allowed)
        for (start, stop), number in zip(row.spans, row.samples, strict=True):
            assert torch.allclose(output[start:stop], alone[number])
        packed_loss += loss(output, row.labels)
    assert torch.allclose(packed_loss, alone_loss)


# -- versions and ages


def row(*spans: tuple[Any, int, int], length: int = 8, name: str = "one") -> Sample:
    """A row whose tokens were sampled by the versions of these spans, and no others."""
    loss = [int(any(start <= at < stop for _, start, stop in spans)) for at in range(length)]
    versions = tuple(VersionSpan(*span) for span in spans if span[0] is not None)
    return sample_of([*range(length)], loss, full=False, versions=versions, name=name)


TWO = row((5, 2, 4), (5, 5, 6), (7, 6, 7))


@SIDES
def test_a_batch_says_which_weights_sampled_each_token_and_how_old_they_are(side: Any) -> None:
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
    assert pack(rows, 16, pad_id=0)[0].version_ids.max() == 2


@pytest.mark.parametrize(
    ("versions", "now", "why"),
    [
        (["step-7"], 8, "version 'step-7': name versions by integers"),
        ([-3], 8, "version -3"),
        (["9" * 19], 8, "name versions by integers"),
        (["9"], 8, "sampled by version 9, and 8 is trained"),
        ([5, None], 8, "token 3 carries loss and has no version"),
        ([5], "8", "integer that names the weights"),
        ([5], True, "integer that names the weights"),
        ([5], -1, "integer that names the weights"),
    ],
)
def test_ages_that_cannot_be_computed_are_refused(versions: Any, now: Any, why: str) -> None:
    sample = row(*((version, 2 * at + 1, 2 * at + 3) for at, version in enumerate(versions)))
    with pytest.raises(SampleError, match=why):
        token_staleness(sample, now)
    with pytest.raises(SampleError, match=why):
        collate([sample], pad_id=0, version=now)


def test_rows_that_are_too_old_are_told_apart() -> None:
    ages = {"new": [8], "old": [4, 8], "middle": [6], "older": [1]}
    rows = [row(*((age, at, at + 1) for at, age in enumerate(one)), name=name) for name, one in ages.items()]
    fresh, stale = fresh_samples(rows, 8, max_staleness=2)
    assert [sample.name for sample in fresh] == ["new", "middle"]
    assert [sample.name for sample in stale] == ["old", "older"]
    with pytest.raises(SampleError, match="max_staleness"):
        fresh_samples(rows, 8, max_staleness=-1)
