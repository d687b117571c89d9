"""torchtune: rows of ids as a dataset for its recipes."""

import functools
from collections.abc import Mapping
from typing import Any

from ..errors import SampleError
from ..samples.sample import IGNORE

try:
    from torchtune.datasets import PackedDataset, SFTDataset
except ImportError as error:
    raise ImportError("this needs torchtune: pip install torchtune torchao") from error


def tokenized_rows(
    tokenizer: Any, *, source: str = "parquet", packed: bool = False, **load_dataset: Any
) -> Any:
    """Rows as torchtune's dataset. Raises SampleError if one is too long."""
    longest = getattr(tokenizer, "max_seq_len", None)
    load_dataset.setdefault("split", "train")
    convert = functools.partial(_row, longest)
    rows = SFTDataset(source=source, message_transform=None, model_transform=convert, **load_dataset)
    if not packed:
        return rows
    if longest is None:
        raise SampleError("packing needs a length: set max_seq_len of the tokenizer")
    return PackedDataset(rows, max_seq_len=longest)


def _row(longest: int | None, row: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
    ids, labels = row["input_ids"], row["labels"]
    if longest is not None and len(ids) > longest:
        problem = f"a row has {len(ids):,} tokens, but max_seq_len is {longest:,}"
        raise SampleError(f"{problem}: raise it, or tokenize with --max-length")
    return {"tokens": list(ids), "mask": [label == IGNORE for label in labels]}
