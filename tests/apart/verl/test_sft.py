"""The SFT dataset compared with verl's: equal where verl's is right, and equal to the template where it is wrong."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.dataset_utils import SFTTensorCollator
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.workers.utils.losses import sft_loss

from tokentrace import build_supervised_sample, create_renderer
from tokentrace.data.tables import write_samples
from tokentrace.errors import SampleError
from tokentrace.integrations.verl_sft import SFTDataset
from tokentrace.pocket import POCKET

PLAIN = [
    [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 * 3?"},
        {"role": "assistant", "content": "It is 9."},
        {"role": "user", "content": "And 4 * 4?"},
        {"role": "assistant", "content": "16."},
    ],
]
THOUGHT = [
    {"role": "user", "content": "2+2?", "reasoning_content": None},
    {"role": "assistant", "content": "4", "reasoning_content": "Easy."},
    {"role": "user", "content": "3+3?", "reasoning_content": None},
    {"role": "assistant", "content": "6", "reasoning_content": "Easy, too."},
]
FORGETS = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% endif %}{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""A template that drops the reasoning of past turns, like Qwen3's, and writes a line feed after each turn."""


def tokenizer(template: str | None = None) -> Any:
    pocket = AutoTokenizer.from_pretrained(POCKET)
    pocket.chat_template = template or pocket.chat_template
    return pocket


def parquet(folder: Path, conversations: list[Any], **columns: list[Any]) -> str:
    pq.write_table(pa.table({"messages": conversations, **columns}), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def settings(**data: Any) -> Any:
    return OmegaConf.create({"max_length": 64, "pad_mode": "right", "truncation": "error", **data})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"pad_mode": "no_padding"},
        {"max_length": 40, "truncation": "right"},
        {"max_length": 40, "truncation": "left"},
        {"max_length": 40, "truncation": "right", "pad_mode": "no_padding"},
    ],
    ids=str,
)
def test_where_verls_rows_are_right_ours_are_the_same(data: dict[str, Any], tmp_path: Path) -> None:
    file = parquet(tmp_path, PLAIN)
    verls = MultiTurnSFTDataset([file], tokenizer(), settings(**data))
    ours = SFTDataset([file], tokenizer(), settings(**data))
    assert len(ours) == len(verls) == 2
    for at in range(2):
        assert ours[at].keys() == verls[at].keys()
        for key, value in verls[at].items():
            assert ours[at][key].dtype == value.dtype, key
            assert torch.equal(ours[at][key], value), key


def test_where_verls_rows_are_wrong_ours_equal_the_template(tmp_path: Path) -> None:
    file = parquet(tmp_path, [THOUGHT])
    tok = tokenizer(FORGETS)
    whole = tok.apply_chat_template(THOUGHT, tokenize=True, return_dict=True)["input_ids"]
    with pytest.raises(AssertionError, match="may not equal to apply_chat_template to whole messages"):
        MultiTurnSFTDataset([file], tok, settings(pad_mode="no_padding"))[0]
    forced = MultiTurnSFTDataset([file], tok, settings(pad_mode="no_padding", ignore_input_ids_mismatch=True))[0]
    assert forced["input_ids"].tolist() != whole, "it shows the past reasoning, which the template drops"
    trained = tok.decode(forced["input_ids"][forced["loss_mask"].bool()])
    assert trained.endswith("<|end|>\n"), "and trains the line feed after the turn, which no model samples"

    row = SFTDataset([file], tok, settings(pad_mode="no_padding", tokentrace={"past": "template"}))[0]
    assert row["input_ids"].tolist() == whole
    assert tok.decode(row["input_ids"][row["loss_mask"].bool()]) == "4<|end|><think>\nEasy, too.\n</think>\n6<|end|>"


def test_past_turns_and_parts_can_be_selected(tmp_path: Path) -> None:
    file, tok = parquet(tmp_path, [THOUGHT]), tokenizer(FORGETS)
    row = SFTDataset(file, tok, settings(pad_mode="no_padding", tokentrace={"past": "preserve"}))[0]
    assert "Easy.\n" in tok.decode(row["input_ids"])
    last = SFTDataset(file, tok, settings(pad_mode="no_padding", tokentrace={"turns": "last", "parts": ["content"]}))[0]
    assert tok.decode(last["input_ids"][last["loss_mask"].bool()]) == "6"


def test_rows_written_by_tokentrace_reach_verls_loss_unchanged(tmp_path: Path) -> None:
    renderer = create_renderer(POCKET)
    samples = [build_supervised_sample(renderer, one) for one in PLAIN]
    write_samples(tmp_path / "ids.parquet", samples)
    data = settings(
        pad_mode="no_padding", custom_cls={"path": "pkg://tokentrace.integrations.verl_sft", "name": "SFTDataset"}
    )
    dataset = create_sft_dataset(str(tmp_path / "ids.parquet"), data, tokenizer(), None)
    batch = SFTTensorCollator("no_padding")([dataset[at] for at in range(2)])
    for at, sample in enumerate(samples):
        assert batch["input_ids"][at].tolist() == sample.ids.tolist()
        assert batch["loss_mask"][at].bool().tolist() == sample.mask.tolist()
    # verl's own loss, with each token's index as its logprob: it sums those in the mask
    logprobs = torch.arange(batch["input_ids"].values().numel(), dtype=torch.float32)
    nested = torch.nested.nested_tensor_from_jagged(logprobs, batch["input_ids"].offsets())
    trained = int(batch["loss_mask"].values().sum())
    inputs = TensorDict({"loss_mask": batch["loss_mask"]}, batch_size=2)
    inputs.set_non_tensor("dp_size", 1)
    inputs.set_non_tensor("batch_num_tokens", trained)
    loss, _ = sft_loss(None, {"log_probs": nested}, inputs)
    # the logprob at a position is that of the next token
    flat = torch.cat([torch.tensor(sample.mask) for sample in samples])
    expected = -float(logprobs[torch.nonzero(flat).flatten() - 1].sum()) / trained
    assert float(loss) == pytest.approx(expected)
    assert trained == sum(sample.trained for sample in samples)


@pytest.mark.parametrize("pad_mode", ["right", "no_padding"])
def test_rows_with_shifted_labels_are_refused(pad_mode: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2, 3, 4]], "labels": [[2, 3, 4, -100]]}), file)
    with pytest.raises(SampleError, match="must not be shifted"):
        SFTDataset(str(file), tokenizer(), settings(pad_mode=pad_mode))[0]


def test_too_long_rows_are_an_error_that_names_the_setting(tmp_path: Path) -> None:
    file = parquet(tmp_path, PLAIN)
    with pytest.raises(SampleError, match=r"row 1 has \d+ tokens, more than data.max_length, 12.*truncation"):
        SFTDataset(file, tokenizer(), settings(max_length=12))[1]
    with pytest.warns(UserWarning, match="row 1: truncation removed everything"):
        SFTDataset(file, tokenizer(), settings(max_length=8, truncation="right"))[1]
