"""Rows to batches, for what takes a collator: TRL's `SFTTrainer`, transformers' `Trainer`, a loop of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import SampleError, brief
from ..samples.collation import collate
from ..samples.sample import Sample
from .rows import ids_and_mask

_EXTRAS: Final = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows to a batch of tensors, padded on the right: that of `SFTTrainer`'s collator, with positions.

    A row is a `Sample`, or a mapping of columns; `logprobs` and `advantages` are kept for a loss of your own.
    """

    pad_id: int
    multiple_of: int | None = None

    def __call__(self, rows: Sequence[Sample | Mapping[str, Any]]) -> dict[str, Any]:
        """A batch: `input_ids`, `attention_mask`, `position_ids`, `labels`, and what else all rows have."""
        samples = [row if isinstance(row, Sample) else _sample(row) for row in rows]
        batch = collate(samples, pad_id=self.pad_id, multiple_of=self.multiple_of, tensors="torch")
        keys = ("input_ids", "attention_mask", "position_ids", "labels", *_EXTRAS)
        return {key: batch[key] for key in keys if key in batch}


def _sample(row: Mapping[str, Any]) -> Sample:
    """A row of a file as a sample."""
    if not isinstance(row, Mapping):
        raise SampleError(f"a row is a Sample or a mapping of columns, not {brief(row)}")
    if "seq_lengths" in row:
        raise SampleError("these rows are packed: leave SFTTrainer's own collator in place")
    ids, mask = ids_and_mask(row)
    extras: dict[str, Any] = {name: _floats(row, name) for name in _EXTRAS if row.get(name) is not None}
    return Sample(ids, mask, np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.uint8), **extras)


def _floats(row: Mapping[str, Any], name: str) -> Any:
    """A column of numbers, one for each token; None is NaN."""
    try:
        return np.asarray(row[name], np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"the {name} of a row are not numbers, one for each token: {error}") from error
