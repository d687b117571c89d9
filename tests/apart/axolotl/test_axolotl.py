"""axolotl: the labels that reach the loss of its trainer are those of our rows, element by element."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.data.generate import write_conversations
from tests.guides import run_guide
from tokentrace.cli import main
from tokentrace.data import read_samples
from tokentrace.pocket import POCKET

os.environ.setdefault("AXOLOTL_DO_NOT_TRACK", "1")

SETTINGS = {
    "base_model": str(POCKET),
    "micro_batch_size": 3,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "learning_rate": 1e-4,
    "optimizer": "adamw_torch",
    "lr_scheduler": "constant",
    "bf16": False,
    "use_cpu": True,
    "save_strategy": "no",
    "seed": 1,
}


@pytest.fixture
def rows(tmp_path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The configuration that our command prints, and the samples that the file was made of."""
    write_conversations(tmp_path / "chats.jsonl", 12, seed=4)
    runner = CliRunner()
    done = runner.invoke(
        main, ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "ax.parquet"), "--for", "axolotl"]
    )
    assert done.exit_code == 0, done.output
    runner.invoke(main, ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "all.parquet")])
    said = yaml.safe_load(done.stdout.partition("for axolotl:\n")[2])
    return said, list(read_samples(tmp_path / "all.parquet"))


def configured(said: dict[str, Any], folder: Path, **more: Any) -> Any:
    from axolotl.cli.config import load_cfg

    places = {"output_dir": str(folder / "out"), "dataset_prepared_path": str(folder / "prepared")}
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, **said, **places, **more}))
    return load_cfg(str(folder / "config.yaml"))


def trained(cfg: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every row, as the loss of axolotl's trainer is given them."""
    from axolotl.common.datasets import load_datasets
    from axolotl.train import setup_model_and_trainer

    trainer, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg))
    seen: list[tuple[list[int], list[int]]] = []
    loss = trainer.compute_loss

    def watched(model: Any, inputs: dict[str, Any], *options: Any, **more: Any) -> Any:
        attended = inputs["attention_mask"].bool()
        for ids, labels, there in zip(inputs["input_ids"], inputs["labels"], attended, strict=True):
            seen.append((ids[there].tolist(), labels[there].tolist()))
            assert (labels[~there] == -100).all()
        return loss(model, inputs, *options, **more)

    trainer.compute_loss = watched
    trainer.train()
    return seen


def test_labels_that_reach_the_loss_are_those_of_the_rows(rows: Any, tmp_path: Path) -> None:
    said, samples = rows
    seen = trained(configured(said, tmp_path))
    expected = sorted((sample.token_ids, sample.labels.tolist()) for sample in samples)
    assert sorted(seen) == expected


def test_the_guide_runs(tmp_path: Path) -> None:
    run_guide("axolotl", tmp_path)
