"""Samples to a batch: padded rows, as numpy arrays or as torch tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, TrajectoryError, brief
from ..settings import whole
from .sample import IGNORE, Sample, as_samples
from .staleness import UNSAMPLED, checked_version, row_staleness, token_staleness, token_versions

Tensors: TypeAlias = Literal["numpy", "torch"]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""Per-token arrays by name."""

_PADDING: Final[dict[str, Any]] = {
    **{"attention_mask": 0, "labels": IGNORE, "loss_mask": 0, "position_ids": 0},
    **{"logprobs": np.nan, "advantages": 0.0},
    **{"version_ids": -1, "token_versions": UNSAMPLED, "staleness": UNSAMPLED},
}
_COLUMNS: Final = {"input_ids", *_PADDING, "rewards", "versions", "max_staleness", "mean_staleness"}
MOST_TOKENS: Final = 1 << 27
"""The most tokens of one batch, padding included: more comes from a wrong length, and would take gigabytes."""

index = functools.partial(whole, most=2**31 - 1, error=SampleError)
"""A number of tokens, or an id."""


def collate(
    samples: Sequence[Sample],
    *,
    pad_id: int,
    side: Literal["right", "left"] = "right",
    length: int | None = None,
    multiple_of: int | None = None,
    tensors: Tensors = "numpy",
    version: int | None = None,
    channels: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A batch of rows, padded to the longest, to `length`, or up to a multiple of `multiple_of`.

    docs/samples.md lists its columns. With the `version` of the weights that are trained it has ``token_versions`` and
    staleness; with `channels` an array for each name, with its value for tokens without an entry:
    ``channels={"routed_experts": -1}``. The first token of a row never carries loss: nothing before it could predict
    it.

    Raises SampleError for no sample, for an empty one or one longer than `length`, if only some have logprobs,
    advantages or a reward, and for a token that carries loss without a logprob, a version or a channel entry, if these
    are asked for.

    >>> kinds = np.array([0, 1, 1], np.uint8)
    >>> sample = Sample(np.array([5, 6, 7], np.int32), kinds == 1, np.array([0, 1, 1], np.int32), kinds)
    >>> batch = collate([sample], pad_id=0, length=4)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, 7, -100]])
    """
    rows, fills = Rows(samples, pad_id, tensors, version), dict(channels or {})
    for name in _COLUMNS & fills.keys():
        raise SampleError(f"channels: {name!r} is a column of the batch itself; give the channel another name")
    if not isinstance(side, str) or side not in ("right", "left"):
        raise SampleError(f"side is 'right' or 'left', not {brief(side)}")
    width = rows.width(length, multiple_of)
    batch: Columns = {}
    for number, count in enumerate(rows.lengths):
        place = slice(0, count) if side == "right" else slice(width - count, width)
        columns = rows.columns(number) | {name: rows.channel(number, name, fill) for name, fill in fills.items()}
        for name, values in columns.items():
            if name not in batch:
                fill = fills[name] if name in fills else rows.fill(name)
                batch[name] = np.full((len(rows.samples), width, *values.shape[1:]), fill, values.dtype)
            if batch[name].shape[2:] != values.shape[1:]:
                shapes = f"{batch[name].shape[2:]} and of {values.shape[1:]}"
                raise SampleError(f"channel {name!r} has entries of shape {shapes}")
            batch[name] = batch[name].astype(np.result_type(batch[name], values), copy=False)
            batch[name][number, place] = values
    tensors_by_name = rows.as_tensors(batch | rows.per_row(range(len(rows.samples))))
    return tensors_by_name | {"versions": list(rows.versions)} if rows.versions else tensors_by_name


class Rows:
    """Samples that are batched or packed together: checked, and as the arrays that a trainer takes."""

    def __init__(self, samples: Sequence[Sample], pad_id: int, tensors: Tensors, version: int | None = None) -> None:
        self._to_tensor = _converter(tensors)
        self.samples = as_samples(samples)
        self.lengths = [len(sample) for sample in self.samples]
        self._pad_id = index("pad_id", pad_id, least=0)
        self._optional = [name for name in ("logprobs", "advantages") if self._all_have(name)]
        self._rewarded = self._all_have("reward")
        self._version = None if version is None else checked_version(version)
        versions = dict.fromkeys(span.version for sample in self.samples for span in sample.versions)
        self.versions: dict[str | int, int] = {version: number for number, version in enumerate(versions)}
        """The versions of the weights that sampled something, and the number of each in `version_ids`."""

    def width(self, length: int | None, multiple_of: int | None, count: int | None = None) -> int:
        """The length of rows of a batch of `count` rows: one for each sample by default."""
        least = max(self.lengths) if length is None else index("length", length, least=1)
        width = rounded_up(least, length, multiple_of)
        count = len(self.samples) if count is None else count
        if count * width > MOST_TOKENS:
            raise SampleError(f"{count} rows, length {width}: a batch has at most {MOST_TOKENS} tokens with padding")
        for number, size in enumerate(self.lengths):
            if size > width:
                raise SampleError(f"{self._label(number)} has {size} tokens, and length is {width}: truncate() it")
        return width

    def columns(self, number: int) -> Columns:
        """The per-token arrays of a sample: new ones, checked."""
        sample = self.samples[number]
        if not len(sample):
            raise SampleError(f"{self._label(number)} has no tokens: leave it out")
        labels, loss = sample.labels, sample.mask.astype(np.int64)
        labels[0], loss[0] = IGNORE, 0
        columns: Columns = {
            "input_ids": sample.ids.astype(np.int64),
            "attention_mask": sample.attention_mask,
            "position_ids": sample.position_ids,
            "labels": labels,
            "loss_mask": loss,
        }
        columns |= {name: getattr(sample, name).astype(np.float32) for name in self._optional}
        if "logprobs" in columns:
            self._require(number, np.isfinite(columns["logprobs"]), "logprob")
        if "advantages" in columns:
            columns["advantages"][loss == 0] = 0
        if self.versions:
            columns["version_ids"] = np.full(len(sample), -1, np.int64)
            for version, start, stop in sample.versions:
                columns["version_ids"][start:stop] = self.versions[version]
        if self._version is not None:
            columns["token_versions"] = token_versions(sample)
            columns["staleness"] = token_staleness(sample, self._version)
        return columns

    def channel(self, number: int, name: str, fill: float) -> npt.NDArray[Any]:
        """A channel of a sample, with `fill` for tokens without an entry."""
        sample = self.samples[number]
        channel = sample.channels.get(name)
        if channel is None:
            raise SampleError(f"{self._label(number)} has no channel {name!r}; it has {sorted(sample.channels)}")
        self._require(number, channel.present, f"{name} entry")
        try:
            return channel.array(fill)
        except TrajectoryError as error:
            raise SampleError(f"{self._label(number)}, {name}: {error}") from error

    def per_row(self, numbers: Sequence[int]) -> Columns:
        """One value for each of these samples: its reward, and how old it is."""
        columns: Columns = {}
        if self._rewarded:
            columns["rewards"] = np.array([self.samples[number].reward for number in numbers], np.float32)
        if self._version is not None:
            ages = [row_staleness(self.samples[number], self._version) for number in numbers]
            columns["max_staleness"] = np.array([oldest for oldest, _ in ages], np.int64)
            columns["mean_staleness"] = np.array([mean for _, mean in ages], np.float32)
        return columns

    def fill(self, name: str) -> Any:
        """The value of a column where there is no token."""
        return self._pad_id if name == "input_ids" else _PADDING[name]

    def as_tensors(self, columns: Columns) -> dict[str, Any]:
        return {name: self._to_tensor(values) for name, values in columns.items()}

    def _require(self, number: int, present: npt.NDArray[np.bool_], what: str) -> None:
        """Raise SampleError if a token that carries loss lacks a value."""
        missing = self.samples[number].mask & ~present
        if missing.any():
            raise SampleError(
                f"{self._label(number)} has no {what} for token {int(missing.argmax())}, which carries loss"
            )

    def _all_have(self, name: str) -> bool:
        having = [getattr(sample, name) is not None for sample in self.samples]
        if any(having) and not all(having):
            one, other = self._label(having.index(True)), self._label(having.index(False))
            raise SampleError(f"{one} has {name} and {other} has none: give it to all or to none")
        return all(having)

    def _label(self, number: int) -> str:
        name = self.samples[number].name
        return f"sample {number} ({name!r})" if name else f"sample {number}"


def rounded_up(width: int, length: int | None, multiple_of: int | None) -> int:
    """The next multiple; a `length` that was asked for has to be one already."""
    if multiple_of is None:
        return width
    step = index("multiple_of", multiple_of, least=1)
    if length is not None and length % step:
        raise SampleError(f"length is {length}, which is not a multiple of {step}")
    return -(-width // step) * step


def _converter(tensors: Any) -> Any:
    """What makes a tensor of a numpy array; torch is imported here and nowhere else."""
    if not isinstance(tensors, str) or tensors not in ("numpy", "torch"):
        raise SampleError(f"tensors is 'numpy' or 'torch', not {brief(tensors)}")
    try:
        return np.asarray if tensors == "numpy" else importlib.import_module("torch").from_numpy
    except ImportError as error:
        raise SampleError("tensors='torch' needs torch: install it, or ask for numpy") from error
