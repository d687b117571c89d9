"""Samples to a batch: padded rows, as numpy arrays or as torch tensors."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, TrajectoryError, shown
from ..settings import whole
from .sample import IGNORE, Sample, as_samples
from .staleness import UNSAMPLED, checked_version, row_staleness, token_staleness, token_versions

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
    "token_versions": UNSAMPLED,
    "staleness": UNSAMPLED,
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

    ====================  ==========  ============================================================
    ``input_ids``         int64       `pad_id` on padding
    ``attention_mask``    int64       1 on tokens, 0 on padding
    ``position_ids``      int64       from 0 over the tokens of a row, wherever they are; 0 on padding
    ``labels``            int64       the id where a token carries loss, else -100; not shifted
    ``loss_mask``         int64       1 where `labels` is not -100
    ``logprobs``          float32     NaN on padding and wherever nothing was sampled, never 0
    ``advantages``        float32     0 wherever `loss_mask` is 0
    ``version_ids``       int64       which of `versions` sampled a token; -1 on padding and where it is not known
    ``rewards``           float32     one for each row
    ``versions``          list        the versions of the weights, each once, in the order in which they occur
    ====================  ==========  ============================================================

    The last five are there if the samples have them. With the `version` of the weights that are trained there are also

    ====================  ==========  ============================================================
    ``token_versions``    int64       the version that sampled a token; -1 on padding and where none did
    ``staleness``         int64       how many versions ago that was; -1 likewise
    ``max_staleness``     int64       one for each row, of its tokens that carry loss; -1 where none does
    ``mean_staleness``    float32     likewise; NaN where none does
    ====================  ==========  ============================================================

    and with `channels` one array for each that is named, with the value given there for tokens that nothing was told
    of, and on padding: ``channels={"routed_experts": -1}``. Its shape is that of the batch and of one token's entry.

    The first token of a row never carries loss: nothing before it
    could predict it. `SampleError` where there is no sample or an empty one, where one is longer than
    `length`, where some have logprobs, advantages or a reward and others do not, and where a token carries loss and
    has no logprob in a sample that has them. With `version`, versions that are no numbers, and tokens that carry
    loss and have none, are errors too; with `channels`, a sample that has not the channel, or not on every token with
    loss, and a channel that is called as a column above.

    >>> kinds = np.array([0, 1, 1], np.uint8)
    >>> sample = Sample(np.array([5, 6, 7], np.int32), kinds == 1, np.array([0, 1, 1], np.int32), kinds)
    >>> batch = collate([sample], pad_id=0, length=4)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6, 7, 0]], [[-100, 6, 7, -100]])
    """
    rows = Rows(samples, pad_id, tensors, version)
    for name in _COLUMNS & set(channels or ()):
        raise SampleError(f"channels: {name!r} is a column of the batch itself; give the channel another name")
    if not isinstance(side, str) or side not in ("right", "left"):
        raise SampleError(f"side is 'right' or 'left', not {shown(side)}")
    width = max(rows.lengths) if length is None else index("length", length, least=1)
    width = rounded_up(width, length, multiple_of)
    if len(rows.samples) * width > MOST_TOKENS:
        raise SampleError(
            f"{len(rows.samples)} rows of {width} tokens: a batch has at most {MOST_TOKENS}, padding included"
        )
    rows.check_fit(width)
    batch: Columns = {}
    for number, count in enumerate(rows.lengths):
        place = slice(0, count) if side == "right" else slice(width - count, width)
        for name, values in rows.columns(number).items():
            if name not in batch:
                batch[name] = rows.padding(name, (len(rows.samples), width), values.dtype)
            batch[name][number, place] = values
        for name, fill in (channels or {}).items():
            told = rows.channel(number, name, fill)
            kept = batch.get(name)
            if kept is None:
                kept = batch[name] = np.full((len(rows.samples), width, *told.shape[1:]), fill, told.dtype)
            elif kept.shape[2:] != told.shape[1:]:
                raise SampleError(f"channel {name!r} has entries of shape {kept.shape[2:]} and of {told.shape[1:]}")
            batch[name] = kept = kept.astype(np.result_type(kept, told), copy=False)
            kept[number, place] = told
    made = rows.as_tensors(batch | rows.rewards(range(len(rows.samples))))
    return made | {"versions": list(rows.versions)} if rows.versions else made


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
        found = dict.fromkeys(span.version for sample in self.samples for span in sample.versions)
        self.versions: dict[Version, int] = {version: number for number, version in enumerate(found)}
        """The versions of the weights that sampled something, and the number of each in `version_ids`."""

    def columns(self, number: int) -> Columns:
        """The per-token arrays of a sample: new ones, checked."""
        sample = self.samples[number]
        if not len(sample):
            raise SampleError(f"{self._called(number)} has no tokens: leave it out")
        labels, loss = sample.labels, sample.mask.astype(np.int64)
        labels[0], loss[0] = IGNORE, 0
        columns: Columns = {
            "input_ids": sample.ids.astype(np.int64),
            "attention_mask": sample.attention_mask,
            "position_ids": sample.position_ids,
            "labels": labels,
            "loss_mask": loss,
        }
        for name in self._optional:
            columns[name] = getattr(sample, name).astype(np.float32)
        if "logprobs" in columns:
            missing = sample.mask & ~np.isfinite(columns["logprobs"])
            if missing.any():
                raise SampleError(
                    f"{self._called(number)} has no logprob for token {int(missing.argmax())}, which carries loss"
                )
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
        """What is told of the tokens of a sample, with a value of the caller's for the others."""
        sample = self.samples[number]
        channel = sample.channels.get(name)
        if channel is None:
            raise SampleError(f"{self._called(number)} has no channel {name!r}; it has {sorted(sample.channels)}")
        missing = sample.mask & ~channel.present
        if missing.any():
            raise SampleError(
                f"{self._called(number)}: {name} tells nothing of token {int(missing.argmax())}, which carries loss"
            )
        try:
            return channel.array(fill)
        except TrajectoryError as error:
            raise SampleError(f"{self._called(number)}, {name}: {error}") from error

    def rewards(self, numbers: Sequence[int]) -> Columns:
        """What there is one of for each of these samples: its reward, and how old it is."""
        made: Columns = {}
        if self._rewarded:
            made["rewards"] = np.array([self.samples[number].reward for number in numbers], np.float32)
        if self._version is not None:
            ages = [row_staleness(self.samples[number], self._version) for number in numbers]
            made["max_staleness"] = np.array([oldest for oldest, _ in ages], np.int64)
            made["mean_staleness"] = np.array([mean for _, mean in ages], np.float32)
        return made

    def padding(self, name: str, shape: int | tuple[int, int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of what a column holds where there is no token."""
        return np.full(shape, self._pad_id if name == "input_ids" else _PADDING[name], dtype)

    def as_tensors(self, columns: Columns) -> dict[str, Any]:
        return {name: self._to_tensor(values) for name, values in columns.items()}

    def check_fit(self, width: int) -> None:
        for number, count in enumerate(self.lengths):
            if count > width:
                raise SampleError(f"{self._called(number)} has {count} tokens, and length is {width}: truncate() it")

    def _all_have(self, name: str) -> bool:
        having = [getattr(sample, name) is not None for sample in self.samples]
        if any(having) and not all(having):
            some, others = self._called(having.index(True)), self._called(having.index(False))
            raise SampleError(f"{some} has {name} and {others} has none: give it to all or to none")
        return all(having)

    def _called(self, number: int) -> str:
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
