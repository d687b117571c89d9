"""torchtune: what its datasets and collators make of our rows is our mask, element by element."""

import types
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchtune import config
from torchtune.data import padded_collate_packed, padded_collate_sft

from tests.apart.shared import rows_for
from tokentrace.errors import SampleError
from tokentrace.integrations.torchtune import tokenized_rows
from tokentrace.samples.sample import Sample


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Sample]]:
    return rows_for("torchtune", tmp_path_factory.mktemp("rows"))


def tokenizer(said: dict[str, Any]) -> Any:
    """What a recipe hands to a dataset; only the length and the padding are read."""
    return types.SimpleNamespace(max_seq_len=said["tokenizer"]["max_seq_len"], pad_id=0)


def test_labels_of_a_batch_are_those_of_the_rows(made: Any) -> None:
    said, samples = made
    dataset = config.instantiate(OmegaConf.create(said["dataset"]), tokenizer(said))
    assert len(dataset) == len(samples) == 12
    for row, sample in zip((dataset[at] for at in range(12)), samples, strict=True):
        assert row["mask"] == (~sample.mask).tolist(), "torchtune's mask is True where nothing is trained"
    batch = padded_collate_sft([dataset[at] for at in range(12)], padding_idx=0, ignore_idx=-100)
    for ids, labels, sample in zip(batch["tokens"], batch["labels"], samples, strict=True):
        size = len(sample)
        assert ids[:size].tolist() == sample.token_ids
        assert labels[:size].tolist() == sample.labels.tolist()
        assert set(labels[size:].tolist()) <= {-100}


def test_packed_labels_are_those_of_the_rows(made: Any) -> None:
    said, samples = made
    packed = config.instantiate(OmegaConf.create({**said["dataset"], "packed": True}), tokenizer(said))
    batch = padded_collate_packed([packed[at] for at in range(len(packed))])
    left = [(sample.token_ids, sample.labels.tolist()) for sample in samples]
    for ids, labels, positions in zip(batch["tokens"], batch["labels"], batch["input_pos"], strict=True):
        at = 0
        while left and ids[at : at + len(left[0][0])].tolist() == left[0][0]:
            size = len(left[0][0])
            assert labels[at : at + size].tolist() == left[0][1]
            assert positions[at : at + size].tolist() == list(range(size))
            left.pop(0)
            at += size
        assert (labels[at:] == -100).all()
    assert not left


def test_a_row_that_is_too_long_is_an_error_and_not_cut(made: Any) -> None:
    said, samples = made
    short = types.SimpleNamespace(max_seq_len=max(map(len, samples)) - 1)
    dataset = tokenized_rows(short, data_files=said["dataset"]["data_files"])
    with pytest.raises(SampleError, match="--max-length"):
        [dataset[at] for at in range(len(samples))]
    with pytest.raises(SampleError, match="needs a length"):
        tokenized_rows(types.SimpleNamespace(), data_files=said["dataset"]["data_files"], packed=True)
