"""Samples to batches: padded rows, rows packed with several samples, and how old their tokens are."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, TrajectoryError, brief
from ..settings import whole
from ..tokens.tokenizer import Ids
from .sample import IGNORE, Sample, as_samples

Tensors: TypeAlias = Literal["numpy", "torch"]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""Per-token arrays by name."""

UNSAMPLED: Final = -1
"""The version and the staleness of a token that nothing sampled, or whose version is not recorded."""
_DIGITS: Final = re.compile("[0-9]{1,19}")
_PADDING: Final[dict[str, Any]] = {
    **{"attention_mask": 0, "labels": IGNORE, "loss_mask": 0, "position_ids": 0},
    **{"logprobs": np.nan, "advantages": 0.0},
    **{"version_ids": -1, "token_versions": UNSAMPLED, "staleness": UNSAMPLED},
}
_COLUMNS: Final = {"input_ids", *_PADDING, "rewards", "versions", "max_staleness", "mean_staleness"}
MOST_TOKENS: Final = 1 << 27
"""The most tokens of one batch, padding included: more comes from a wrong length, and would take gigabytes."""

_index = functools.partial(whole, most=2**31 - 1, error=SampleError)
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
    rows, fills = _Rows(samples, pad_id, tensors, version), dict(channels or {})
    for name in _COLUMNS & fills.keys():
        raise SampleError(f"channels: {name!r} is a column of the batch itself; give the channel another name")
    if not isinstance(side, str) or side not in ("right", "left"):
        raise SampleError(f"side is 'right' or 'left', not {brief(side)}")
    width = rows.width(length, multiple_of)
    numbers = range(len(rows.samples))
    columns = [
        rows.columns(number) | {name: rows.channel(number, name, fill) for name, fill in fills.items()}
        for number in numbers
    ]
    batch: Columns = {}
    for name in columns[0]:
        values = [column[name] for column in columns]
        shapes = {one.shape[1:] for one in values}
        if len(shapes) > 1:
            raise SampleError(f"channel {name!r} has entries of shape {' and of '.join(map(str, shapes))}")
        fill = fills[name] if name in fills else rows.fill(name)
        batch[name] = np.full((len(values), width, *shapes.pop()), fill, np.result_type(*values))
        for row, one in zip(batch[name], values, strict=True):
            row[slice(0, len(one)) if side == "right" else slice(width - len(one), width)] = one
    tensors_by_name = rows.as_tensors(batch | rows.per_row(numbers))
    return tensors_by_name | {"versions": list(rows.versions)} if rows.versions else tensors_by_name


class _Rows:
    """Samples that are batched or packed together: checked, and as the arrays that a trainer takes."""

    def __init__(self, samples: Sequence[Sample], pad_id: int, tensors: Tensors, version: int | None = None) -> None:
        self._to_tensor = _converter(tensors)
        self.samples = as_samples(samples)
        self.lengths = [len(sample) for sample in self.samples]
        self._pad_id = _index("pad_id", pad_id, least=0)
        self._optional = [name for name in ("logprobs", "advantages") if self._all_have(name)]
        self._rewarded = self._all_have("reward")
        self._version = None if version is None else _trained_version(version)
        versions = dict.fromkeys(span.version for sample in self.samples for span in sample.versions)
        self.versions: dict[str | int, int] = {version: number for number, version in enumerate(versions)}
        """The versions of the weights that sampled something, and the number of each in `version_ids`."""

    def width(self, length: int | None, multiple_of: int | None, count: int | None = None) -> int:
        """The length of rows of a batch of `count` rows: one for each sample by default."""
        least = max(self.lengths) if length is None else _index("length", length, least=1)
        width = _rounded_up(least, length, multiple_of)
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
            at = int(missing.argmax())
            raise SampleError(f"{self._label(number)} has no {what} for token {at}, which carries loss")

    def _all_have(self, name: str) -> bool:
        having = [getattr(sample, name) is not None for sample in self.samples]
        if any(having) and not all(having):
            one, other = self._label(having.index(True)), self._label(having.index(False))
            raise SampleError(f"{one} has {name} and {other} has none: give it to all or to none")
        return all(having)

    def _label(self, number: int) -> str:
        name = self.samples[number].name
        return f"sample {number} ({name!r})" if name else f"sample {number}"


def _rounded_up(width: int, length: int | None, multiple_of: int | None) -> int:
    """The next multiple; a `length` that was asked for has to be one already."""
    step = 1 if multiple_of is None else _index("multiple_of", multiple_of, least=1)
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


# -- several samples in one row


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """One row that holds several samples, each a document of its own.

    The first token of each document carries no loss: nothing precedes it. Padding comes last, and is a sequence of its
    own, so that kernels for varying lengths see each token in exactly one sequence.
    """

    input_ids: Any
    labels: Any
    """The id where a token carries loss, else -100; not shifted."""
    loss_mask: Any
    """1 where `labels` is not -100."""
    attention_mask: Any
    """1 on tokens, 0 on padding. It does not keep documents apart."""
    position_ids: Any
    """From 0 in each document, and on the padding."""
    document_ids: Any
    """0, 1, … for each document in the row, -1 on padding."""
    cu_seqlens: Any
    """int32: 0, and where each sequence ends; the last is the length of the row."""
    max_seqlen: int
    """The length of the longest sequence, padding included."""
    samples: tuple[int, ...]
    """Which of the samples each document is."""
    logprobs: Any = None
    """NaN on padding and wherever nothing was sampled, never 0."""
    advantages: Any = None
    """0 wherever `loss_mask` is 0."""
    rewards: Any = None
    """One for each document."""
    version_ids: Any = None
    """Which of `versions` sampled a token; -1 on padding and where it is unknown. None if no sample has versions."""
    versions: tuple[str | int, ...] = ()
    """The versions of the weights that sampled the samples, each once; the same for all rows."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each document begins and ends."""
        return list(pairwise(self.cu_seqlens.tolist()))[: len(self.samples)]

    def __len__(self) -> int:
        """The length of the row, padding included."""
        return len(self.input_ids)

    def __repr__(self) -> str:
        return f"Pack({len(self.samples)} samples, {self.spans[-1][1]} of {len(self)} tokens)"


def pack(
    samples: Sequence[Sample],
    length: int,
    *,
    pad_id: int,
    multiple_of: int | None = None,
    pad_to_length: bool = True,
    tensors: Tensors = "numpy",
) -> list[Pack]:
    """Rows of at most `length` tokens that hold every sample once, by `first_fit_decreasing`.

    Rows are padded to `length`; with ``pad_to_length=False`` only up to a multiple of `multiple_of`, or not at all.
    In a row, samples are in their own order. dtypes and refusals are those of `collate`; a sample longer than `length`
    is a `SampleError`.
    """
    rows = _Rows(samples, pad_id, tensors)
    capacity = rows.width(_index("length", length), multiple_of, 1)
    packs = []
    for members in first_fit_decreasing(rows.lengths, capacity):
        used = sum(rows.lengths[number] for number in members)
        packs.append(_pack(rows, members, capacity if pad_to_length else _rounded_up(used, None, multiple_of)))
    return packs


def flatten(samples: Sequence[Sample], *, tensors: Tensors = "numpy") -> Pack:
    """All samples one after another in a single row without padding, for trainers that are padding-free."""
    rows = _Rows(samples, 0, tensors)
    return _pack(rows, range(len(rows.samples)), sum(rows.lengths))


def unpack(row: Pack) -> list[Ids]:
    """The ids of each document of a row, in the order of `Pack.samples`."""
    if not isinstance(row, Pack):
        raise SampleError(f"unpack takes a Pack, not {brief(row)}")
    ids = np.asarray(row.input_ids).astype(np.int32)
    return [ids[start:stop] for start, stop in row.spans]


def _pack(rows: _Rows, members: Sequence[int], width: int) -> Pack:
    """These samples one after another in a row of `width` tokens."""
    lengths = [rows.lengths[number] for number in members]
    used = sum(lengths)
    documents = [rows.columns(number) for number in members]
    row: Columns = {}
    for name, first in documents[0].items():
        row[name] = np.full(width, rows.fill(name), first.dtype)
        np.concatenate([document[name] for document in documents], out=row[name][:used])
    row["position_ids"][used:] = np.arange(width - used)
    row["document_ids"] = np.full(width, -1, np.int64)
    row["document_ids"][:used] = np.repeat(np.arange(len(members)), lengths)
    sequences = [*lengths, width - used] if used < width else lengths
    row["cu_seqlens"] = np.cumsum([0, *sequences], dtype=np.int32)
    tensors = rows.as_tensors(row | rows.per_row(members))
    return Pack(**tensors, max_seqlen=max(sequences), samples=tuple(members), versions=tuple(rows.versions))


def first_fit_decreasing(lengths: Sequence[int] | npt.NDArray[Any], capacity: int) -> list[list[int]]:
    """Indices of `lengths` in bins whose sum is at most `capacity`.

    The longest go first, the earlier of equals before the later, each into the first bin that has room, or into a
    new one. Bins come in the order in which they were opened, and indices in a bin in growing order. Raises SampleError
    for a length that is negative, or larger than a bin.

    >>> first_fit_decreasing([3, 5, 4, 2, 1], 8)
    [[0, 1], [2, 3, 4]]
    """
    room = _index("capacity", capacity, least=1)
    sizes = [_index(f"lengths[{at}]", size, least=0) for at, size in enumerate(lengths)]
    if too_long := [at for at, size in enumerate(sizes) if size > room]:
        raise SampleError(f"lengths[{too_long[0]}] is {sizes[too_long[0]]}: a bin takes 0 to {room}")
    bins: list[list[int]] = []
    free = np.full(len(sizes), room, np.int64)  # of bins that are not open yet, too
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        first = int((free[: len(bins) + 1] >= sizes[at]).argmax())
        if first == len(bins):
            bins.append([])
        bins[first].append(at)
        free[first] -= sizes[at]
    return [sorted(members) for members in bins]


# -- staleness: versions between the weights that sampled a token and those that are trained


def token_versions(sample: Sample) -> npt.NDArray[np.int64]:
    """The version that sampled each token; -1 if none did, or it is not recorded. Text of digits is its number.

    Raises SampleError for other text, and for negative versions.
    """
    versions = np.full(len(sample), UNSAMPLED, np.int64)
    for version, start, stop in sample.versions:
        number = int(version) if isinstance(version, str) and _DIGITS.fullmatch(version) else version
        if isinstance(number, str) or not 0 <= number < 2**63:
            raise SampleError(f"{sample!r} has version {brief(version)}: name versions by integers from 0 on")
        versions[start:stop] = number
    return versions


def token_staleness(sample: Sample, version: int) -> npt.NDArray[np.int64]:
    """How many versions lie between those that sampled each token and `version`, which is trained; -1 if none did.

    Raises SampleError if a token carries loss and has no version, or has a later one.
    """
    trained = _trained_version(version)
    versions = token_versions(sample)
    missing = sample.mask & (versions == UNSAMPLED)
    if missing.any():
        raise SampleError(f"{sample!r}: token {int(missing.argmax())} carries loss and has no version")
    if len(versions) and int(versions.max()) > trained:
        raise SampleError(f"{sample!r} was sampled by version {int(versions.max())}, and {trained} is trained")
    return np.where(versions == UNSAMPLED, UNSAMPLED, trained - versions)


def _trained_version(version: int) -> int:
    return whole("version, the integer that names the weights,", version, least=0, error=SampleError)


def row_staleness(sample: Sample, version: int) -> tuple[int, float]:
    """The largest and the mean staleness of the tokens that carry loss; -1 and NaN if there are none."""
    values = token_staleness(sample, version)[sample.mask]
    return (int(values.max()), float(values.mean())) if len(values) else (UNSAMPLED, float("nan"))


def fresh_samples(samples: Sequence[Sample], version: int, *, max_staleness: int) -> tuple[list[Sample], list[Sample]]:
    """The rows whose trained tokens are at most `max_staleness` versions old, and the other rows."""
    most = whole("max_staleness", max_staleness, least=0, error=SampleError)
    fresh: list[Sample] = []
    stale: list[Sample] = []
    for sample in as_samples(samples):
        (stale if row_staleness(sample, version)[0] > most else fresh).append(sample)
    return fresh, stale
