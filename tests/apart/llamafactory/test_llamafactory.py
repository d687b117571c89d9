"""LLaMA-Factory: the labels that reach the loss of its trainer are those of our rows, element by element."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.data.generate import write_conversations
from tokentrace.cli import main
from tokentrace.data import read_samples
from tokentrace.pocket import POCKET

os.environ["DISABLE_VERSION_CHECK"] = "1"
AUDIO = types.ModuleType("torchaudio")  # imported for sound alone; its wheel needs CUDA
AUDIO.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)

SETTINGS = {
    "model_name_or_path": str(POCKET),
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "full",
    "template": "empty",
    "per_device_train_batch_size": 3,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "learning_rate": 1e-4,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
}


def test_labels_that_reach_the_loss_are_those_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchaudio", AUDIO)
    from llamafactory.hparams import get_train_args
    from llamafactory.train.sft import workflow

    write_conversations(tmp_path / "chats.jsonl", 12, seed=4)
    runner = CliRunner()
    done = runner.invoke(
        main, ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "lf"), "--for", "llama-factory"]
    )
    assert done.exit_code == 0, done.output
    runner.invoke(main, ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(tmp_path / "all.parquet")])
    said = yaml.safe_load(done.stdout.partition("for LLaMA-Factory:\n")[2])

    seen: list[tuple[list[int], list[int]]] = []
    loss = workflow.CustomSeq2SeqTrainer.compute_loss

    def watched(self: Any, model: Any, inputs: dict[str, Any], *options: Any, **more: Any) -> Any:
        attended = inputs["attention_mask"].bool()
        for ids, labels, there in zip(inputs["input_ids"], inputs["labels"], attended, strict=True):
            seen.append((ids[there].tolist(), labels[there].tolist()))
            assert (labels[~there] == -100).all()
        return loss(self, model, inputs, *options, **more)

    monkeypatch.setattr(workflow.CustomSeq2SeqTrainer, "compute_loss", watched)
    model, data, training, finetuning, generating = get_train_args(
        {**SETTINGS, **said, "output_dir": str(tmp_path / "out")}
    )
    workflow.run_sft(model, data, training, finetuning, generating)
    samples = read_samples(tmp_path / "all.parquet")
    assert sorted(seen) == sorted((sample.token_ids, sample.labels.tolist()) for sample in samples)
