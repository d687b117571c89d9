"""Packing: every sample once, in a document of its own, and nothing of one learnt from another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.errors import SampleError
from tokentrace.samples.batches import Pack, collate, first_fit_decreasing, flatten, pack, unpack
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind

ARRAYS = ("input_ids", "labels", "loss_mask", "attention_mask", "position_ids", "document_ids")


def sample_of(ids: list[int], loss: list[bool], full: bool = True) -> Sample:
    mask = np.array(loss, np.bool_)
    extra: dict[str, Any] = {}
    if full:
        extra = {
            "logprobs": np.where(mask, -0.5 - np.arange(len(ids)), np.nan).astype(np.float32),
            "advantages": np.where(mask, 1.5 + np.arange(len(ids)), 0).astype(np.float32),
            "reward": float(sum(ids)),
        }
    kinds = np.where(mask, Kind.SAMPLED, Kind.PROMPT).astype(np.uint8)
    return Sample(np.array(ids, np.int32), mask, mask.astype(np.int32), kinds, **extra)


@st.composite
def many(draw: st.DrawFn) -> list[Sample]:
    full = draw(st.booleans())
    row = st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8)
    rows = draw(st.lists(row, min_size=1, max_size=8))
    return [sample_of([one for one, _ in row], [loss for _, loss in row], full) for row in rows]


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


# -- bins


@settings(deadline=None, max_examples=examples(500))
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c), max_size=60), st.just(c))))
def test_bins_are_those_of_the_plain_first_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    bins = first_fit_decreasing(lengths, capacity)
    assert bins == naive(lengths, capacity)
    assert sorted(index for members in bins for index in members) == [*range(len(lengths))]
    assert all(sum(lengths[index] for index in members) <= capacity for members in bins)
    assert bins == first_fit_decreasing(np.array(lengths, np.int32), capacity)


# -- rows


def assert_holds(row: Pack, samples: list[Sample], pad_id: int) -> None:
    """The row is its documents one after another, and padding; all its arrays say the same of where they are."""
    assert row.samples == tuple(sorted(row.samples))
    ends = row.cu_seqlens.tolist()
    assert row.cu_seqlens.dtype == np.int32
    assert ends[0] == 0
    assert ends[-1] == len(row)
    assert row.max_seqlen == max(b - a for a, b in pairwise(ends))
    assert np.flatnonzero(np.asarray(row.position_ids) == 0).tolist() == ends[:-1]
    for number, (start, stop) in enumerate(pairwise(ends)):
        assert row.position_ids[start:stop].tolist() == [*range(stop - start)]
        document = number if number < len(row.samples) else -1
        assert (row.document_ids[start:stop] == document).all()
        assert (row.attention_mask[start:stop] == (document >= 0)).all()
    used = row.spans[-1][1]
    assert len(ends) == len(row.samples) + 1 + (used < len(row))
    for (start, stop), index, ids in zip(row.spans, row.samples, unpack(row), strict=True):
        sample = samples[index]
        assert ids.tolist() == sample.token_ids == row.input_ids[start:stop].tolist()
        assert row.labels[start] == -100
        assert row.labels[start + 1 : stop].tolist() == sample.labels[1:].tolist()
        if sample.logprobs is not None and sample.advantages is not None:
            assert row.logprobs[start:stop].tobytes() == sample.logprobs.tobytes()
            assert row.advantages[start] == 0
            assert row.advantages[start + 1 : stop].tolist() == sample.advantages[1:].tolist()
    assert (row.input_ids[used:] == pad_id).all()
    assert (row.labels[used:] == -100).all()
    assert ((row.labels != -100) == (row.loss_mask == 1)).all()
    if samples[0].reward is None:
        assert row.logprobs is row.advantages is row.rewards is None
    else:
        assert np.isnan(row.logprobs[used:]).all()
        assert (row.advantages[used:] == 0).all()
        assert row.rewards.tolist() == [samples[index].reward for index in row.samples]
    for name in ARRAYS:
        assert getattr(row, name).dtype == np.int64
        assert getattr(row, name).shape == (len(row),)


@settings(deadline=None, max_examples=examples(300))
@given(many(), st.integers(2, 6), st.sampled_from([None, 2, 4]), st.booleans())
def test_packing_loses_and_duplicates_nothing(
    samples: list[Sample], quarters: int, multiple_of: int | None, pad_to_length: bool
) -> None:
    length = 4 * quarters
    if max(map(len, samples)) > length:
        length = 8
    rows = pack(samples, length, pad_id=7, multiple_of=multiple_of, pad_to_length=pad_to_length)
    assert sorted(index for row in rows for index in row.samples) == [*range(len(samples))]
    for row in rows:
        assert_holds(row, samples, 7)
        assert len(row) <= length
        used = row.spans[-1][1]
        if pad_to_length:
            assert len(row) == length
        else:
            assert used <= len(row) < used + (multiple_of or 1)
            assert len(row) % (multiple_of or 1) == 0
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    assert trained == sum(sample.trained - int(sample.mask[0]) for sample in samples)
    assert trained == int(collate(samples, pad_id=7)["loss_mask"].sum())


@settings(deadline=None, max_examples=examples(100))
@given(many())
def test_a_flat_row_holds_all_samples_in_order_without_padding(samples: list[Sample]) -> None:
    row = flatten(samples)
    assert row.samples == tuple(range(len(samples)))
    assert len(row) == sum(map(len, samples))
    assert_holds(row, samples, -1)


@settings(deadline=None, max_examples=30)
@given(many())
def test_torch_gives_the_same_numbers(samples: list[Sample]) -> None:
    torch = pytest.importorskip("torch")
    for array, tensor in zip(
        [*pack(samples, 12, pad_id=1), flatten(samples)],
        [*pack(samples, 12, pad_id=1, tensors="torch"), flatten(samples, tensors="torch")],
        strict=True,
    ):
        assert (array.samples, array.max_seqlen, array.spans) == (tensor.samples, tensor.max_seqlen, tensor.spans)
        assert [ids.tolist() for ids in unpack(array)] == [ids.tolist() for ids in unpack(tensor)]
        for name in (*ARRAYS, "cu_seqlens", "logprobs", "advantages", "rewards"):
            one, other = getattr(array, name), getattr(tensor, name)
            if one is None:
                assert other is None
            else:
                assert isinstance(other, torch.Tensor)
                assert other.numpy().dtype == one.dtype
                assert other.numpy().tobytes() == one.tobytes()


def test_a_model_sees_in_a_packed_row_what_it_sees_in_single_rows() -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(3)
    samples = [sample_of(random.integers(0, 20, count).tolist(), [True] * count) for count in (5, 1, 7, 3, 4, 2, 6)]
    seeded = torch.Generator().manual_seed(0)
    tokens, places, *weights, head = (
        torch.randn(*shape, generator=seeded, dtype=torch.float64)
        for shape in [(20, 8), (16, 8), (8, 8), (8, 8), (8, 8), (8, 20)]
    )

    def logits(ids: Any, positions: Any, allowed: Any) -> Any:
        states = tokens[ids] + places[positions]
        query, key, value = (states @ weight for weight in weights)
        seen = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], allowed[None])
        return seen[0] @ head

    def loss(output: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(output[:-1], labels[1:], ignore_index=-100, reduction="sum")

    alone = {
        number: logits(torch.from_numpy(sample.ids).long(), torch.arange(len(sample)), causal(torch, len(sample)))
        for number, sample in enumerate(samples)
    }
    alone_loss = sum(
        loss(alone[number], torch.from_numpy(sample.labels)) for number, sample in enumerate(samples) if len(sample) > 1
    )
    packed_loss = 0.0
    rows = pack(samples, 12, pad_id=0, tensors="torch")
    assert any(len(row.samples) > 2 for row in rows)
    for row in rows:
        allowed = torch.zeros(len(row), len(row), dtype=torch.bool)
        for start, stop in pairwise(row.cu_seqlens.tolist()):
            allowed[start:stop, start:stop] = causal(torch, stop - start)
        output = logits(row.input_ids, row.position_ids, allowed)
        for (start, stop), number in zip(row.spans, row.samples, strict=True):
            assert torch.allclose(output[start:stop], alone[number])
        packed_loss += loss(output, row.labels)
    assert torch.allclose(packed_loss, alone_loss)


def causal(torch: Any, count: int) -> Any:
    return torch.ones(count, count, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"length": 2}, "sample 1 has 3 tokens, and length is 2: truncate"),
        ({"length": 0}, "length must be"),
        ({"length": 6, "multiple_of": 4}, "length is 6, which is not a multiple of 4"),
        ({"pad_id": -1}, "pad_id must be"),
        ({"tensors": "jax"}, "tensors is"),
    ],
)
def test_settings_that_make_no_rows_are_refused(settings: dict[str, Any], problem: str) -> None:
    samples = [sample_of([1, 2], [False, True]), sample_of([1, 2, 3], [False, True, True])]
    with pytest.raises(SampleError, match=problem):
        pack(samples, **({"length": 8, "pad_id": 0} | settings))
