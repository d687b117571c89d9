"""The columns that trainers read, and their configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, brief

ATTENTION: Final = "attention_mask"
"""The column with 1 for each token that is not padding."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer: its name for people, the columns that it reads, and advice.

    `advice` is what to write into its configuration: ``{path}`` is the file, ``{form}`` what `datasets` calls its form,
    ``{longest}`` the length of the longest row.
    """

    title: str
    columns: tuple[str, ...]
    advice: str

    def advice_for(self, path: Path, longest: int) -> str:
        """What to write into its configuration to train on a file."""
        if not longest:
            return "# there are no rows to train on"
        form = "json" if path.suffix == ".jsonl" else path.suffix.removeprefix(".")
        quoted = json.dumps(path.as_posix(), ensure_ascii=False)  # escapes of half a character are not YAML's
        return self.advice.format(path=quoted, form=form, longest=longest)


_IDS_AND_LABELS: Final = ("input_ids", "labels")
_WITH_ATTENTION: Final = ("input_ids", ATTENTION, "labels")

_TRL: Final = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
rows = load_dataset("{form}", data_files={path}, split="train")
SFTTrainer(model, args=SFTConfig(max_length={longest}), train_dataset=rows)  # max_length cuts: by default 1024"""

_UNSLOTH: Final = f"""\
import unsloth  # before trl
{_TRL}
# without train_on_responses_only: the labels mark what is trained"""

_AXOLOTL: Final = """\
datasets:
  - path: {path}
    ds_type: {form}
    type:  # empty: the rows are tokenized
sequence_len: {longest}  # longer rows would be dropped or cut"""

_LLAMA_FACTORY: Final = """\
# once: load_dataset("{form}", data_files={path}).save_to_disk("rows"), with datasets
tokenized_path: rows
dataset: tokenized  # is required, and not read
# cutoff_len does not apply: the longest row has {longest} tokens"""

_TORCHTUNE: Final = """\
dataset:
  _component_: tokentrace.integrations.torchtune.tokenized_rows
  source: {form}
  data_files: {path}
tokenizer:
  max_seq_len: {longest}  # a longer row is an error"""

TRAINERS: Final = {
    "trl": Trainer("TRL", _IDS_AND_LABELS, _TRL),
    "axolotl": Trainer("axolotl", _WITH_ATTENTION, _AXOLOTL),
    "llama-factory": Trainer("LLaMA-Factory", _WITH_ATTENTION, _LLAMA_FACTORY),
    "torchtune": Trainer("torchtune", _IDS_AND_LABELS, _TORCHTUNE),
    "unsloth": Trainer("Unsloth", _IDS_AND_LABELS, _UNSLOTH),
}
"""The trainers that rows can be written for, by the name that `--for` takes."""


def find_trainer(name: Any) -> Trainer:
    """The trainer of a name. Raises InputError that lists all names."""
    if not isinstance(name, str) or name not in TRAINERS:
        raise InputError(f"rows can be written for {', '.join(TRAINERS)}, not for {brief(name)}")
    return TRAINERS[name]
