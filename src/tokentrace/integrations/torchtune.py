"""torchtune: rows of ids as a dataset of its recipes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SampleError
from ..samples.sample import IGNORE

try:
    from torchtune.datasets import PackedDataset, SFTDataset
except ImportError as error:
    raise ImportError("this needs torchtune: pip install torchtune torchao") from error


def tokenized_rows(tokenizer: Any, *, source: str = "parquet", packed: bool = False, **load_dataset: Any) -> Any:
    """Rows as torchtune's dataset. Raises SampleError if one is too long."""
    longest = getattr(tokenizer, "max_seq_len", None)
    load_dataset.setdefault("split", "train")
    rows = SFTDataset(source=source, message_transform=None, model_transform=_Row(longest), **load_dataset)
    if not packed:
        return rows
    if longest is None:
        raise SampleError("packing needs a length: set max_seq_len of the tokenizer")
    return PackedDataset(rows, max_seq_len=longest)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as torchtune's tokenizers give it."""

    longest: int | None

    def __call__(self, row: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        ids, labels = row["input_ids"], row["labels"]
        if self.longest is not None and len(ids) > self.longest:
            problem = f"a row has {len(ids):,} tokens, and max_seq_len is {self.longest:,}"
            raise SampleError(f"{problem}: make it longer, or tokenize with --max-length")
        return {"tokens": list(ids), "mask": [label == IGNORE for label in labels]}
