"""Rows to batches, for what takes a collator: TRL's `SFTTrainer`, transformers' `Trainer`, a loop of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..errors import SampleError
from ..samples.collation import collate
from ..samples.sample import IGNORE, Sample

_EXTRAS: Final = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows to a batch of tensors, padded on the right: what `SFTTrainer`'s own collator gives, and positions.

    A row is a `Sample`, or a mapping with the columns of a file of rows: `input_ids`, `labels`, and if all rows have
    them `logprobs` (NaN where nothing was sampled) and `advantages`, for a loss of your own. Rows that TRL packed are
    for TRL's own collator.
    """

    pad_id: int
    multiple_of: int | None = None

    def __call__(self, rows: Sequence[Sample | Mapping[str, Any]]) -> dict[str, Any]:
        """A batch: `input_ids`, `attention_mask`, `position_ids`, `labels`, and those of the others that rows have."""
        samples = [row if isinstance(row, Sample) else _sample(row) for row in rows]
        batch = collate(samples, pad_id=self.pad_id, multiple_of=self.multiple_of, tensors="torch")
        keys = ("input_ids", "attention_mask", "position_ids", "labels", *_EXTRAS)
        return {key: batch[key] for key in keys if key in batch}


def _sample(row: Mapping[str, Any]) -> Sample:
    """A row of a file: its ids, where they carry loss, and what else there is for each token."""
    if "seq_lengths" in row:
        raise SampleError("these rows are packed: leave SFTTrainer's own collator in place")
    if row.get("labels") is None:
        raise SampleError(f"a row has no labels; it has {', '.join(row)}: every token would be trained")
    ids, labels = np.asarray(row["input_ids"], np.int32), np.asarray(row["labels"], np.int64)
    if ids.shape != labels.shape:
        raise SampleError(f"a row has {len(ids)} ids and {len(labels)} labels")
    mask = labels != IGNORE
    if (labels[mask] != ids[mask]).any():
        raise SampleError("the labels of a row are not its ids: they must not be shifted")
    extras: dict[str, Any] = {name: np.asarray(row[name], np.float32) for name in _EXTRAS if row.get(name) is not None}
    return Sample(ids, mask, np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.uint8), **extras)
