"""Samples to batches: padded rows, and how old their tokens are."""

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, TrajectoryError, brief
from ..settings import whole
from .sample import IGNORE, Sample, as_samples

Tensors = Literal["numpy", "torch"]
Columns = dict[str, npt.NDArray[Any]]
UNSAMPLED = -1  # the version and the staleness of a token without a recorded version
_DIGITS = re.compile("[0-9]{1,19}")
_PADDING: dict[str, Any] = {
    **{"attention_mask": 0, "labels": IGNORE, "loss_mask": 0, "position_ids": 0},
    **{"logprobs": np.nan, "advantages": 0.0},
    **{"version_ids": -1, "token_versions": UNSAMPLED, "staleness": UNSAMPLED},
}
_COLUMNS = {"input_ids", *_PADDING, "rewards", "versions", "max_staleness", "mean_staleness"}
MOST_TOKENS = 1 << 27  # in one batch, padding included

_index = functools.partial(whole, most=2**31 - 1, error=SampleError)


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

    docs/samples.md lists its columns. With the `version` of the weights being trained, it has
    ``token_versions`` and staleness; with `channels`, an array for each name, in which tokens
    without an entry get the given value: ``channels={"routed_experts": -1}``. A row's first
    token never carries loss: nothing could predict it.

    Raises SampleError if there are no samples, one is empty or longer than `length`, only some
    have logprobs, advantages or a reward, or a token that carries loss lacks a value that the
    batch needs.

    >>> kinds = np.array([0, 1, 1], np.uint8)
    >>> sample = Sample(np.array([5, 6, 7], np.int32), kinds == 1, np.array([0, 1, 1], np.int32), kinds)
    >>> batch = collate([sample], pad_id=0, length=4)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, 7, -100]])
    """
    if not isinstance(side, str) or side not in ("right", "left"):
        raise SampleError(f"side must be 'right' or 'left', not {brief(side)}")
    if not isinstance(tensors, str) or tensors not in ("numpy", "torch"):
        raise SampleError(f"tensors must be 'numpy' or 'torch', not {brief(tensors)}")
    for name in _COLUMNS & (channels or {}).keys():
        raise SampleError(
            f"channels: {name!r} is a column of the batch itself; give the channel another name"
        )
    rows = _Rows(as_samples(samples), version, channels or {})
    width = rows.width(length, multiple_of)
    columns = [rows.columns(number) for number in range(len(rows.samples))]
    fills = {"input_ids": _index("pad_id", pad_id, least=0), **_PADDING, **(channels or {})}
    batch: Columns = {}
    for name in columns[0]:
        values = [column[name] for column in columns]
        shapes = {one.shape[1:] for one in values}
        if len(shapes) > 1:
            raise SampleError(f"channel {name!r} has entries of shape {' and of '.join(map(str, shapes))}")
        batch[name] = np.full((len(values), width, *shapes.pop()), fills[name], np.result_type(*values))
        for row, one in zip(batch[name], values, strict=True):
            row[slice(0, len(one)) if side == "right" else slice(width - len(one), width)] = one
    batch |= rows.per_row()
    tensors_by_name = batch if tensors == "numpy" else _as_torch(batch)
    return tensors_by_name | {"versions": list(rows.versions)} if rows.versions else tensors_by_name


class _Rows:
    def __init__(self, samples: list[Sample], version: int | None, channels: Mapping[str, float]) -> None:
        self.samples = samples
        self._version, self._channels = version, channels
        self._optional = [name for name in ("logprobs", "advantages") if self._all_have(name)]
        self._rewarded = self._all_have("reward")
        versions = dict.fromkeys(span.version for sample in samples for span in sample.versions)
        self.versions: dict[str | int, int] = {version: number for number, version in enumerate(versions)}
        """The number of each version in `version_ids`."""

    def width(self, length: int | None, multiple_of: int | None) -> int:
        lengths = list(map(len, self.samples))
        width = max(lengths) if length is None else _index("length", length, least=1)
        step = 1 if multiple_of is None else _index("multiple_of", multiple_of, least=1)
        if length is not None and width % step:
            raise SampleError(f"length is {length}, which is not a multiple of {step}")
        width = -(-width // step) * step
        if len(lengths) * width > MOST_TOKENS:
            counts = f"{len(lengths)} rows, length {width}"
            raise SampleError(f"{counts}: a batch has at most {MOST_TOKENS} tokens, padding included")
        for number, size in enumerate(lengths):
            if size > width:
                label = self._label(number)
                raise SampleError(f"{label} has {size} tokens, but length is {width}: truncate() it")
        return width

    def columns(self, number: int) -> Columns:
        """New, checked per-token arrays of a sample."""
        sample = self.samples[number]
        if not len(sample):
            raise SampleError(f"{self._label(number)} has no tokens: leave it out")
        labels, loss = sample.labels, sample.mask.astype(np.int64)
        labels[0], loss[0] = IGNORE, 0
        columns: Columns = {
            "input_ids": sample.ids.astype(np.int64),
            "attention_mask": np.ones(len(sample), np.int64),
            "position_ids": np.arange(len(sample), dtype=np.int64),
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
        for name, fill in self._channels.items():
            channel = sample.channels.get(name)
            if channel is None:
                raise SampleError(f"{self._label(number)} has no channel {name!r}")
            self._require(number, channel.present, f"{name} entry")
            try:
                columns[name] = channel.array(fill)
            except TrajectoryError as error:
                raise SampleError(f"{self._label(number)}, {name}: {error}") from error
        return columns

    def per_row(self) -> Columns:
        columns: Columns = {}
        if self._rewarded:
            columns["rewards"] = np.array([sample.reward for sample in self.samples], np.float32)
        if self._version is not None:
            ages = (row_staleness(sample, self._version) for sample in self.samples)
            oldest, means = zip(*ages, strict=True)
            columns["max_staleness"] = np.array(oldest, np.int64)
            columns["mean_staleness"] = np.array(means, np.float32)
        return columns

    def _require(self, number: int, present: npt.NDArray[np.bool_], what: str) -> None:
        missing = self.samples[number].mask & ~present
        if missing.any():
            at = int(missing.argmax())
            raise SampleError(f"{self._label(number)} has no {what} for token {at}, which carries loss")

    def _all_have(self, name: str) -> bool:
        having = [getattr(sample, name) is not None for sample in self.samples]
        if any(having) and not all(having):
            one, other = self._label(having.index(True)), self._label(having.index(False))
            raise SampleError(f"{one} has {name} but {other} has none: give it to all or to none")
        return all(having)

    def _label(self, number: int) -> str:
        name = self.samples[number].name
        return f"sample {number} ({name!r})" if name else f"sample {number}"


def _as_torch(columns: Columns) -> dict[str, Any]:
    try:
        convert = importlib.import_module("torch").from_numpy
    except ImportError as error:
        raise SampleError("tensors='torch' needs torch: install it, or use 'numpy'") from error
    return {name: convert(values) for name, values in columns.items()}


def token_versions(sample: Sample) -> npt.NDArray[np.int64]:
    """The version that sampled each token, an integer or text of digits; -1 if none is recorded.

    Raises SampleError for other text, and for negative versions.
    """
    versions = np.full(len(sample), UNSAMPLED, np.int64)
    for version, start, stop in sample.versions:
        number = int(version) if isinstance(version, str) and _DIGITS.fullmatch(version) else version
        if isinstance(number, str) or not 0 <= number < 2**63:
            raise SampleError(
                f"{sample!r} has version {brief(version)}: versions must be integers from 0 on"
            )
        versions[start:stop] = number
    return versions


def token_staleness(sample: Sample, version: int) -> npt.NDArray[np.int64]:
    """How many versions each token is behind `version`, the weights being trained; -1 without a version.

    Raises SampleError if a token that carries loss has no version, or any token a later one.
    """
    trained = whole("version, the integer that names the weights,", version, least=0, error=SampleError)
    versions = token_versions(sample)
    missing = sample.mask & (versions == UNSAMPLED)
    if missing.any():
        raise SampleError(f"{sample!r}: token {int(missing.argmax())} carries loss but has no version")
    newest = int(versions.max(initial=UNSAMPLED))
    if newest > trained:
        raise SampleError(f"{sample!r} was sampled by version {newest}, but {trained} is being trained")
    return np.where(versions == UNSAMPLED, UNSAMPLED, trained - versions)


def row_staleness(sample: Sample, version: int) -> tuple[int, float]:
    """The largest and the mean staleness of tokens that carry loss; -1 and NaN if there are none."""
    values = token_staleness(sample, version)[sample.mask]
    return (int(values.max()), float(values.mean())) if len(values) else (UNSAMPLED, float("nan"))
