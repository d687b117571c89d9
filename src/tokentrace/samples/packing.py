"""Packing: several samples in one row, and what keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..tokens.tokenizer import Ids
from .collation import Columns, Rows, Tensors, index, rounded_up
from .sample import Sample


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
    """Which of the samples given each document is."""
    logprobs: Any = None
    """NaN on padding and wherever nothing was sampled, never 0."""
    advantages: Any = None
    """0 wherever `loss_mask` is 0."""
    rewards: Any = None
    """One for each document."""
    version_ids: Any = None
    """Which of `versions` sampled a token; -1 on padding and where it is not known. None where no sample says."""
    versions: tuple[str | int, ...] = ()
    """The versions of the weights that sampled the samples given, each once; the same for all rows."""

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each document begins and ends."""
        ends = self.cu_seqlens.tolist()
        return list(pairwise(ends))[: len(self.samples)]

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
    In a row, samples are in the order in which they were given. dtypes and refusals are those of `collate`; a
    sample longer than `length` is a `SampleError`.
    """
    rows = Rows(samples, pad_id, tensors)
    capacity = rows.width(index("length", length), multiple_of, 1)
    packs = []
    for members in first_fit_decreasing(rows.lengths, capacity):
        used = sum(rows.lengths[number] for number in members)
        packs.append(_laid_out(rows, members, capacity if pad_to_length else rounded_up(used, None, multiple_of)))
    return packs


def flatten(samples: Sequence[Sample], *, tensors: Tensors = "numpy") -> Pack:
    """All samples one after another in a single row without padding, for trainers that are padding-free."""
    rows = Rows(samples, 0, tensors)
    return _laid_out(rows, range(len(rows.samples)), sum(rows.lengths))


def unpack(row: Pack) -> list[Ids]:
    """The ids of each document of a row, in the order of `Pack.samples`."""
    if not isinstance(row, Pack):
        raise SampleError(f"unpack takes a Pack, not {brief(row)}")
    ids = np.asarray(row.input_ids).astype(np.int32)
    return [ids[start:stop] for start, stop in row.spans]


def _laid_out(rows: Rows, members: Sequence[int], width: int) -> Pack:
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
    room = index("capacity", capacity, least=1)
    sizes = [index(f"lengths[{at}]", size, least=0) for at, size in enumerate(lengths)]
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
