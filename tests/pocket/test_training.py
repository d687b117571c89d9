"""Pocket's training: disjoint splits of questions, an expert, noise that changes no text, and the shipped model."""

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.lazy import lazy
from tokentrace import build_supervised_sample, create_renderer
from tokentrace.demo.questions import Question, all_questions, reward
from tokentrace.pocket import NOISE, POCKET
from tokentrace.pocket.model import load_pocket, log_softmax
from training.pocket.expert import solve
from training.pocket.questions import SHIPPED, SPLITS, make_questions, shipped

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
            actual = trained.logits(trained(torch.tensor([row])))[0].numpy()
            likely = log_softmax(expected) > -20
            assert np.abs(log_softmax(actual) - log_softmax(expected))[likely].max() < 1e-4


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


def test_training_the_tokenizer_is_deterministic_and_gives_the_shipped_shape() -> None:
    from training.pocket import make_tokenizer as make

    texts = list(make.dialogues(make.random.Random(make.SEED), 200))
    assert texts == list(make.dialogues(make.random.Random(make.SEED), 200))
    first = make.written(make.train(texts, 600))
    assert first == make.written(make.train(texts, 600))
    trained, shipped = json.loads(first), json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8"))
    assert [row["content"] for row in trained["added_tokens"]] == [row["content"] for row in shipped["added_tokens"]]
    assert trained["pre_tokenizer"] == shipped["pre_tokenizer"]
    assert json.loads(make.config()) == json.loads((POCKET / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert make.written(shipped) == (POCKET / "tokenizer.json").read_text(encoding="utf-8")


# -- questions


def text_of(question: Question) -> str:
    return "\n".join([question.prompt[-1]["content"], *question.follow_ups])


def test_the_shipped_questions_are_the_generated_ones() -> None:
    rows = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert rows == json.loads(json.dumps(shipped()))
    assert [question.id for question in all_questions()] == [row["id"] for row in rows]


def test_the_two_splits_share_no_question() -> None:
    train, held_back = (make_questions(3, 1200, split) for split in SPLITS)
    assert not {text_of(question) for question in train} & {text_of(question) for question in held_back}
    seen = {name for question in train for name in question.table}
    assert not [question.id for question in held_back if seen & set(question.table)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", [{}, {"seed": 3}, {"think": False}, {"slips": 0.5}])
def test_the_expert_solves_every_question(split: str, how: dict[str, Any]) -> None:
    for question in make_questions(11, 360, split):
        assert reward(question, solve(question, **how)) == 1.0, question.id


def test_slips_carry_no_loss() -> None:
    slipped = 0
    for question in make_questions(2, 60):
        talk = solve(question, slips=1.0)
        sample = build_supervised_sample(create_renderer(POCKET), talk, tools=question.tools, turns="flagged")
        trained = {int(index) for index in sample.messages[sample.mask]}
        expected = {
            at for at, message in enumerate(talk) if message["role"] == "assistant" and message.get("train", True)
        }
        assert trained == expected
        slipped += sum(message.get("train") is False for message in talk)
    assert slipped > 60
