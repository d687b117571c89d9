"""The training script: the same rows again, noise that changes tokens and never text, a model that is Qwen3."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.lazy import lazy
from tokentrace import create_renderer
from tokentrace.pocket import NOISE, POCKET
from tokentrace.pocket.model import load_pocket, log_softmax
from training.pocket.expert import solve
from training.pocket.questions import make_questions

torch = lazy("torch")

FOLDER = Path(__file__).parents[2] / "training" / "pocket"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    from training.pocket import train

    return train


@pytest.fixture(scope="module")
def trained(train: Any) -> Any:
    model = train.Pocket(train.Shape())
    model.load_state_dict(lazy("safetensors.torch").load_file(POCKET / "model.safetensors"))
    return model.float().eval()


def test_resegmenting_changes_tokens_and_no_text(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "RESEGMENTED", 1.0)
    renderer = create_renderer(POCKET)
    for question in make_questions(1, 24):
        rendered = renderer.render(solve(question), tools=question.tools)
        ids, mask = train.resegment(rendered.ids, np.asarray(rendered.mask, np.bool_), train.random.Random(0))
        assert len(ids) > len(rendered.ids)
        assert renderer.tokenizer.decode(ids.tolist()) == rendered.text
        assert renderer.tokenizer.decode(ids[mask].tolist()) == rendered.decode(rendered.mask)


def test_the_torch_model_is_the_numpy_model(train: Any, trained: Any) -> None:
    renderer, ours = create_renderer(POCKET), load_pocket()
    rows = [renderer.render_ids(solve(question), tools=question.tools)[:300] for question in make_questions(2, 3)]
    with torch.inference_mode():
        for row in rows:
            (expected,) = ours.extend([ours.new_cache()], [row], every=True)
            found = trained.logits(trained(torch.tensor([row])))[0].numpy()
            likely = log_softmax(expected) > -20
            assert np.abs(log_softmax(found) - log_softmax(expected))[likely].max() < 1e-4


def test_the_report_is_of_the_model_that_ships(train: Any, trained: Any) -> None:
    report = json.loads((FOLDER / "report.json").read_text(encoding="utf-8"))
    assert report["parameters"] == sum(weight.numel() for weight in trained.parameters())
    assert report["bytes"] == (POCKET / "model.safetensors").stat().st_size
    assert report["greedy"]["solved"] >= 0.8
    assert report["noise"] == asdict(NOISE)
    assert tuple(report["noise"].values()) == (train.UNTHINKING, train.SLIPS, train.RESEGMENTED, train.COMPACT)
    assert (FOLDER / "loss.svg").read_text(encoding="utf-8") == train.loss_curve(report["loss"])
    config = json.loads((POCKET / "config.json").read_text(encoding="utf-8"))
    assert config == trained.shape.config(config["bos_token_id"], config["eos_token_id"], config["pad_token_id"])
