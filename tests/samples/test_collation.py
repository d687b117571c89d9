"""A batch holds each row as it is, and padding that no model learns from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.errors import SampleError
from tokentrace.samples.batches import collate
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind
from tokentrace.trajectory.turns import VersionSpan

INTEGERS = ("input_ids", "attention_mask", "position_ids", "labels", "loss_mask")


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
def batches(draw: st.DrawFn) -> list[Sample]:
    full = draw(st.booleans())
    rows = draw(
        st.lists(
            st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=9),
            min_size=1,
            max_size=5,
        )
    )
    return [sample_of([one for one, _ in row], [loss for _, loss in row], full) for row in rows]


@settings(deadline=None, max_examples=examples(200))
@given(batches(), st.sampled_from(["right", "left"]), st.integers(0, 9), st.sampled_from([None, 1, 4, 8]))
def test_each_row_is_its_sample_and_the_rest_is_padding(
    samples: list[Sample], side: Any, pad_id: int, multiple_of: int | None
) -> None:
    batch = collate(samples, pad_id=pad_id, side=side, multiple_of=multiple_of)
    width = batch["input_ids"].shape[1]
    step = multiple_of or 1
    longest = max(map(len, samples))
    assert longest <= width < longest + step
    assert width % step == 0
    for name in INTEGERS:
        assert batch[name].dtype == np.int64
        assert batch[name].shape == (len(samples), width)
    for number, sample in enumerate(samples):
        count = len(sample)
        there = np.zeros(width, np.bool_)
        there[slice(0, count) if side == "right" else slice(width - count, width)] = True
        assert batch["attention_mask"][number].tolist() == there.astype(int).tolist()
        assert batch["input_ids"][number][there].tolist() == sample.token_ids
        assert (batch["input_ids"][number][~there] == pad_id).all()
        assert batch["position_ids"][number][there].tolist() == [*range(count)]
        labels = batch["labels"][number]
        assert labels[there][1:].tolist() == sample.labels[1:].tolist()
        assert labels[there][0] == -100
        assert (labels[~there] == -100).all()
        assert ((labels != -100) == (batch["loss_mask"][number] == 1)).all()
        assert ("logprobs" in batch) == ("advantages" in batch) == ("rewards" in batch) == (sample.reward is not None)
        if sample.logprobs is None or sample.advantages is None:
            continue
        assert batch["logprobs"].dtype == batch["advantages"].dtype == batch["rewards"].dtype == np.float32
        assert batch["logprobs"][number][there].tobytes() == sample.logprobs.tobytes()
        assert np.isnan(batch["logprobs"][number][~there]).all()
        assert batch["advantages"][number][there][1:].tolist() == sample.advantages[1:].tolist()
        assert (batch["advantages"][number][batch["loss_mask"][number] == 0] == 0).all()
        assert batch["rewards"][number] == sample.reward


@settings(deadline=None, max_examples=30)
@given(batches(), st.sampled_from(["right", "left"]))
def test_torch_gives_the_same_numbers(samples: list[Sample], side: Any) -> None:
    torch = pytest.importorskip("torch")
    arrays = collate(samples, pad_id=3, side=side, multiple_of=4)
    tensors = collate(samples, pad_id=3, side=side, multiple_of=4, tensors="torch")
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert isinstance(tensor, torch.Tensor)
        assert tensor.numpy().dtype == arrays[name].dtype
        assert tensor.numpy().tobytes() == arrays[name].tobytes()


@pytest.mark.parametrize("side", ["right", "left"])
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
    with pytest.raises(SampleError, match=problem):
        collate(samples, **({"pad_id": 0} | settings))


def versioned(*spans: VersionSpan, length: int = 4) -> Sample:
    kinds = np.ones(length, np.uint8)
    return Sample(np.arange(length, dtype=np.int32), kinds == 1, kinds.astype(np.int32), kinds, versions=spans)


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_says_which_weights_sampled_each_token(side: Any) -> None:
    rows = [versioned(VersionSpan("a", 1, 2), VersionSpan(7, 2, 4)), versioned(VersionSpan(7, 0, 1), length=3)]
    batch = collate(rows, pad_id=0, side=side, length=5)
    assert batch["versions"] == ["a", 7]
    assert batch["version_ids"].dtype == np.int64
    expected = [[-1, 0, 1, 1, -1], [1, -1, -1, -1, -1]] if side == "right" else [[-1, -1, 0, 1, 1], [-1, -1, 1, -1, -1]]
    assert batch["version_ids"].tolist() == expected
