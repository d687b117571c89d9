"""torchtune: rows that `tokentrace tokenize --for torchtune` wrote, as a dataset of its recipes.

In a recipe's configuration::

    dataset:
      _component_: tokentrace.integrations.torchtune.tokenized_rows
      source: parquet
      data_files: rows.parquet
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SampleError
from ..samples.sample import IGNORE

try:
    from torchtune.datasets import PackedDataset, SFTDataset
except ImportError as error:
    raise ImportError("this needs torchtune: pip install torchtune torchao") from error


def tokenized_rows(tokenizer: Any, *, source: str = "parquet", packed: bool = False, **load_dataset: Any) -> Any:
    """Rows of ids and labels as torchtune's `SFTDataset`, or with `packed` as its `PackedDataset`.

    `source` and `load_dataset` are what ``datasets.load_dataset`` takes: ``data_files``, ``split`` ("train" unless it
    is given). The recipe gives the tokenizer, of which only `max_seq_len` is used: a longer row is a SampleError
    when it is read, as it would have to be cut.
    """
    longest = getattr(tokenizer, "max_seq_len", None)
    load_dataset.setdefault("split", "train")
    rows = SFTDataset(source=source, message_transform=None, model_transform=TokenizedRow(longest), **load_dataset)
    if not packed:
        return rows
    if longest is None:
        raise SampleError("packing needs a length: set max_seq_len of the tokenizer")
    return PackedDataset(rows, max_seq_len=longest)


class TokenizedRow:
    """A row as torchtune's tokenizers give it: ``tokens``, and a ``mask`` that is True where nothing is trained."""

    def __init__(self, longest: int | None = None) -> None:
        self.longest = longest

    def __call__(self, row: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        ids, labels = row["input_ids"], row["labels"]
        if self.longest is not None and len(ids) > self.longest:
            raise SampleError(
                f"a row has {len(ids):,} tokens, and max_seq_len is {self.longest:,}: make it longer, or tokenize with "
                "--max-length"
            )
        return {"tokens": list(ids), "mask": [label == IGNORE for label in labels]}
