"""The columns that trainers read, and their configuration, from trainers.toml."""

import json
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError, brief

ATTENTION = "attention_mask"


@dataclass(frozen=True, slots=True)
class Trainer:
    title: str
    columns: list[str]
    advice: str

    def advice_for(self, path: Path, longest: int) -> str:
        """How to configure the trainer for a file."""
        if not longest:
            return "# there are no rows to train on"
        form = "json" if path.suffix == ".jsonl" else "parquet"
        # YAML does not read escaped surrogate pairs
        quoted = json.dumps(path.as_posix(), ensure_ascii=False)
        return self.advice.format(path=quoted, form=form, longest=longest)


_FILE = resources.files(__package__).joinpath("trainers.toml").read_text(encoding="utf-8")
TRAINERS = {name: Trainer(**entry) for name, entry in tomllib.loads(_FILE).items()}


def find_trainer(name: Any) -> Trainer | None:
    """A trainer; None for None. Raises an InputError that lists all names."""
    if name is not None and (not isinstance(name, str) or name not in TRAINERS):
        raise InputError(f"rows can be written for {', '.join(TRAINERS)}, not for {brief(name)}")
    return None if name is None else TRAINERS[name]
