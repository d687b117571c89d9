"""axolotl: after its data loading and collator, our rows have the same labels, element by element."""

import os
from pathlib import Path
from typing import Any

import yaml

from tests.apart.shared import rows_for
from tests.guides import run_guide
from tokentrace.pocket import POCKET

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")

SETTINGS = {
    **{"base_model": str(POCKET), "micro_batch_size": 3, "gradient_accumulation_steps": 1, "max_steps": 4, "seed": 1},
    **{"learning_rate": 1e-4, "optimizer": "adamw_torch", "lr_scheduler": "constant"},
    **{"bf16": False, "use_cpu": True, "save_strategy": "no"},
}


def configured(advice: dict[str, Any], folder: Path, **more: Any) -> Any:
    from axolotl.cli.config import load_cfg

    places = {"output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, **advice, **places, **more}))
    return load_cfg(str(folder / "config.yaml"))


def test_labels_of_its_batches_are_those_of_the_rows(tmp_path: Path) -> None:
    from axolotl.common.datasets import load_datasets
    from axolotl.utils.collators import DataCollatorForSeq2Seq
    from transformers import AutoTokenizer

    advice, samples = rows_for("axolotl", tmp_path)
    prepared = load_datasets(cfg=configured(advice, tmp_path)).train_dataset
    collate = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(POCKET), return_tensors="pt")
    names = ("input_ids", "attention_mask", "labels")
    batch = collate([{name: row[name] for name in names} for row in prepared])
    seen = []
    for ids, attended, labels in zip(*(batch[name] for name in names), strict=True):
        inside = attended.bool()
        seen.append((ids[inside].tolist(), labels[inside].tolist()))
        assert (labels[~inside] == -100).all()
    assert sorted(seen) == sorted((sample.token_ids, sample.labels.tolist()) for sample in samples)


def test_the_guide_runs(tmp_path: Path) -> None:
    run_guide("axolotl", tmp_path)
