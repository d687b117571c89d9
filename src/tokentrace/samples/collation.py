"""Samples to a batch: padded rows, as numpy arrays or as torch tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, shown
from .sample import IGNORE, Sample, as_samples

Tensors: TypeAlias = Literal["numpy", "torch"]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""Per-token arrays by name."""
Version: TypeAlias = str | int

_PADDING: Final[dict[str, Any]] = {
    "attention_mask": 0,
    "labels": IGNORE,
    "loss_mask": 0,
    "position_ids": 0,
    "logprobs": np.nan,
    "advantages": 0.0,
    "version_ids": -1,
}
MOST_TOKENS: Final = 1 << 27
"""Of one batch, padding included: more is a mistake in a length, and takes gigabytes to make."""


def collate(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    side: Literal["right", "left"] = "right",
    length: int | None = None,
    multiple_of: int | None = None,
    tensors: Tensors = "numpy",
) -> dict[str, Any]:
    """A batch of rows, padded to the longest, to `length`, or up to a multiple of `multiple_of`.

    ====================  ==========  ============================================================
    ``input_ids``         int64       `pad_id` on padding
    ``attention_mask``    int64       1 on tokens, 0 on padding
    ``position_ids``      int64       from 0 over the tokens of a row, wherever they stand; 0 on padding
    ``labels``            int64       the id where a token carries loss, else -100; not shifted
    ``loss_mask``         int64       1 where `labels` is not -100
    ``logprobs``          float32     NaN on padding and wherever nothing was sampled, never 0
    ``advantages``        float32     0 wherever `loss_mask` is 0
    ``version_ids``       int64       which of `versions` sampled a token; -1 on padding and where nobody said
    ``rewards``           float32     one for each row
    ``versions``          list        the versions of the weights, each once, in the order in which they are met
    ====================  ==========  ============================================================

    The last five are there if the samples have them. The first token of a row never carries loss: nothing precedes
    it that could predict it. `SampleError` where there is no sample or an empty one, where one is longer than
    `length`, where some have logprobs, advantages or a reward and others do not, and where a token carries loss and
    has no logprob in a sample that has them.

    >>> kinds = np.array([0, 1, 1], np.uint8)
    >>> sample = Sample(np.array([5, 6, 7], np.int32), kinds == 1, np.array([0, 1, 1], np.int32), kinds)
    >>> batch = collate([sample], pad_id=0, length=4)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, 7, -100]])
    """
    to_tensor = converter(tensors)
    samples = as_samples(samples)
    as_index(pad_id, "pad_id", 0)
    if not isinstance(side, str) or side not in ("right", "left"):
        raise SampleError(f"side is 'right' or 'left', not {shown(side)}")
    optional, versions = optional_columns(samples), known_versions(samples)
    width = max(map(len, samples)) if length is None else as_index(length, "length", 1)
    width = rounded_up(width, length, multiple_of)
    if len(samples) * width > MOST_TOKENS:
        raise SampleError(f"{len(samples)} rows of {width} tokens: a batch has at most {MOST_TOKENS}, padding included")
    batch: Columns = {}
    for number, sample in enumerate(samples):
        count = len(sample)
        if count > width:
            raise SampleError(f"{called(samples, number)} has {count} tokens, and length is {width}: truncate() it")
        place = slice(0, count) if side == "right" else slice(width - count, width)
        for name, values in columns_of(samples, number, optional, versions).items():
            if name not in batch:
                batch[name] = np.full((len(samples), width), padding_of(name, pad_id), values.dtype)
            batch[name][number, place] = values
    if has_all(samples, "reward"):
        batch["rewards"] = np.array([sample.reward for sample in samples], np.float32)
    converted: dict[str, Any] = {name: to_tensor(values) for name, values in batch.items()}
    return converted | {"versions": list(versions)} if versions else converted


def known_versions(samples: Sequence[Sample]) -> dict[Version, int]:
    """The versions of the weights that sampled something, by the number that stands for each in `version_ids`."""
    found = dict.fromkeys(span.version for sample in samples for span in sample.versions)
    return {version: number for number, version in enumerate(found)}


def optional_columns(samples: Sequence[Sample]) -> list[str]:
    """Which of logprobs and advantages the samples have: all of them, or none."""
    return [name for name in ("logprobs", "advantages") if has_all(samples, name)]


def columns_of(samples: Sequence[Sample], number: int, optional: list[str], versions: Mapping[Version, int]) -> Columns:
    """The per-token arrays of a sample as a trainer takes them: new ones, checked."""
    sample = samples[number]
    if not len(sample):
        raise SampleError(f"{called(samples, number)} has no tokens: leave it out")
    labels, loss = sample.labels, sample.mask.astype(np.int64)
    labels[0], loss[0] = IGNORE, 0
    columns: Columns = {
        "input_ids": sample.ids.astype(np.int64),
        "attention_mask": sample.attention_mask,
        "position_ids": sample.position_ids,
        "labels": labels,
        "loss_mask": loss,
    }
    for name in optional:
        columns[name] = getattr(sample, name).astype(np.float32)
    if "logprobs" in optional:
        missing = sample.mask & ~np.isfinite(columns["logprobs"])
        if missing.any():
            raise SampleError(
                f"{called(samples, number)} has no logprob for token {int(missing.argmax())}, which carries loss"
            )
    if "advantages" in optional:
        columns["advantages"][loss == 0] = 0
    if versions:
        columns["version_ids"] = np.full(len(sample), -1, np.int64)
        for version, start, stop in sample.versions:
            columns["version_ids"][start:stop] = versions[version]
    return columns


def has_all(samples: Sequence[Sample], name: str) -> bool:
    """Whether all samples have it; `SampleError` where only some do."""
    having = [getattr(sample, name) is not None for sample in samples]
    if any(having) and not all(having):
        with_it, without = having.index(True), having.index(False)
        raise SampleError(
            f"{called(samples, with_it)} has {name} and {called(samples, without)} has none: give it to all or to none"
        )
    return all(having)


def padding_of(name: str, pad_id: int) -> Any:
    """What a per-token array holds where there is no token."""
    return pad_id if name == "input_ids" else _PADDING[name]


def rounded_up(width: int, length: int | None, multiple_of: int | None) -> int:
    """The next multiple, which a `length` that was asked for has to be already."""
    if multiple_of is None:
        return width
    step = as_index(multiple_of, "multiple_of", 1)
    if length is not None and length % step:
        raise SampleError(f"length is {length}, which is no multiple of {step}")
    return -(-width // step) * step


def called(samples: Sequence[Sample], number: int) -> str:
    name = samples[number].name
    return f"sample {number} ({name!r})" if name else f"sample {number}"


def as_index(value: Any, what: str, least: int) -> int:
    """An integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**31:
        raise SampleError(f"{what} must be an integer of at least {least}, below 2**31, not {shown(value)}")
    return int(value)


def converter(tensors: Any) -> Any:
    """Makes what was asked for of a numpy array; torch is imported here and nowhere else."""
    if isinstance(tensors, str) and tensors == "numpy":
        return np.asarray
    if not isinstance(tensors, str) or tensors != "torch":
        raise SampleError(f"tensors is 'numpy' or 'torch', not {shown(tensors)}")
    try:
        return importlib.import_module("torch").from_numpy
    except ImportError as error:
        raise SampleError(
            "tensors='torch' needs torch, which is not installed: install it, or ask for numpy"
        ) from error
