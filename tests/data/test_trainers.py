"""Files for trainers: each has the columns and the format that its trainer reads, with the labels of the samples."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from tests.data.generate import SETTINGS, write_conversations
from tests.lazy import lazy
from tokentrace import InputError
from tokentrace.cli import main
from tokentrace.data.job import tokenize_files
from tokentrace.data.tables import read_metadata, read_samples, write_samples
from tokentrace.data.trainers import TRAINERS
from tokentrace.pocket import POCKET
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.trajectory import Trajectory

datasets = lazy("datasets")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("chats") / "chats.jsonl", 12, seed=3)


def loaded(path: Path, folder: Path) -> Any:
    """Read a file with `datasets`."""
    form = {".parquet": "parquet"}.get(path.suffix, "json")
    return datasets.load_dataset(form, data_files=str(path), split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(("name", "file"), [*((name, "rows.parquet") for name in TRAINERS), ("trl", "rows.jsonl")])
def test_a_file_for_a_trainer_has_exactly_the_columns_it_reads(
    name: str, file: str, chats: Path, tmp_path: Path
) -> None:
    plain = tokenize_files([str(chats)], tmp_path / "plain.parquet", SETTINGS, workers=1)
    done = tokenize_files([str(chats)], tmp_path / file, SETTINGS, workers=1, trainer=name)
    rows, samples = loaded(done.output, tmp_path), list(read_samples(plain.output))
    assert rows.column_names == list(TRAINERS[name].columns)
    assert len(samples) == 12
    for row, sample in zip(rows, samples, strict=True):
        assert row["input_ids"] == sample.token_ids
        assert row["labels"] == sample.labels.tolist()
        assert row.get("attention_mask", [1] * len(sample)) == [1] * len(sample)
    assert done.longest == max(map(len, samples))
    assert read_metadata(done.output)["tokenizer_sha256"] == read_metadata(plain.output)["tokenizer_sha256"]


@pytest.mark.parametrize("name", TRAINERS)
def test_rows_of_rollouts_can_be_written_for_a_trainer(name: str, tmp_path: Path) -> None:
    trajectory = Trajectory(name="t")
    trajectory.begin([1, 2, 3], messages=1)
    trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    trajectory.branch([1, 2, 4], cause="edit")
    trajectory.append_completion([9], [-0.75], finish_reason="stop")
    write_samples(tmp_path / "rows.parquet", trajectory_samples(trajectory), trainer=name)
    rows = loaded(tmp_path / "rows.parquet", tmp_path)
    assert rows["input_ids"][:] == [[1, 2, 3, 7, 8], [1, 2, 4, 9]]
    assert rows["labels"][:] == [[-100, -100, -100, 7, 8], [-100, -100, -100, 9]]


@pytest.mark.parametrize("file", ["a.jsonl.parquet", "b.jsonl", "Straße 😀.parquet"])
def test_advice_names_the_file_and_its_format(file: str) -> None:
    advice = yaml.safe_load(TRAINERS["axolotl"].advice_for(Path(file), 7))
    form = "json" if file.endswith(".jsonl") else "parquet"
    assert advice == {"datasets": [{"path": file, "ds_type": form, "type": None}], "sequence_len": 7}
    assert json.dumps(file, ensure_ascii=False) in TRAINERS["trl"].advice_for(Path(file), 7)
    assert TRAINERS["trl"].advice_for(Path(file), 0) == "# there are no rows to train on"


@pytest.mark.parametrize(
    ("name", "file", "labels", "problem"),
    [
        ("axolotl", "rows", True, "'rows' is neither"),
        ("llamafactory", "rows", True, "rows can be written for trl, axolotl, llama-factory"),
        ("trl", "x.parquet", False, "reads labels"),
    ],
)
def test_a_format_that_the_trainer_does_not_read_is_refused(
    name: str, file: str, labels: bool, problem: str, chats: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        tokenize_files([str(chats)], tmp_path / file, replace(SETTINGS, labels=labels), workers=1, trainer=name)
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_trainers_configuration(chats: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")

    def advice(file: str, trainer: str) -> str:
        arguments = ["tokenize", "-t", str(POCKET), str(chats), "-o", str(tmp_path / file), "--for", trainer]
        return CliRunner().invoke(main, arguments, catch_exceptions=False).stdout.partition(f"for {trainer}:\n")[2]

    axolotl = yaml.safe_load(advice("a.jsonl", "axolotl"))
    longest = max(len(json.loads(line)["input_ids"]) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    source = {"path": (tmp_path / "a.jsonl").as_posix(), "ds_type": "json", "type": None}
    assert axolotl == {"datasets": [source], "sequence_len": longest}
    compile("if 1:\n" + advice("t.parquet", "trl"), "advice", "exec")
