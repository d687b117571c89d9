"""Files for trainers: the columns and the form that each reads, with the labels of the samples in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from click.testing import CliRunner

from tests.data.generate import conversations
from tests.data.job import SETTINGS, write_lines
from tokentrace import InputError
from tokentrace.cli import main
from tokentrace.cli.options import trainer_option
from tokentrace.data.job import tokenize_files
from tokentrace.data.tables import read_metadata, read_samples, write_samples
from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.data.trainers import TRAINERS
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Sample
from tokentrace.samples.trajectories import trajectory_samples
from tokentrace.trajectory import Trajectory

FORMS = [(name, "folder") if trainer.folder else (name, "rows.parquet") for name, trainer in TRAINERS.items()]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", list(conversations(12, seed=3)))


def loaded(path: Path, folder: Path) -> Any:
    """A file as `datasets` reads it."""
    if path.is_dir():
        return datasets.load_from_disk(str(path))
    form = {".parquet": "parquet"}.get(path.suffix, "json")
    return datasets.load_dataset(form, data_files=str(path), split="train", cache_dir=str(folder / "cache"))


@pytest.mark.parametrize(("name", "file"), [*FORMS, ("trl", "rows.jsonl")])
def test_a_file_for_a_trainer_has_what_it_reads_and_nothing_else(
    name: str, file: str, chats: Path, tmp_path: Path
) -> None:
    plain = tokenize_files([str(chats)], tmp_path / "plain.parquet", SETTINGS, workers=1)
    done = tokenize_files([str(chats)], tmp_path / file, SETTINGS, workers=1, trainer=name)
    rows = loaded(done.output, tmp_path)
    samples = list(read_samples(plain.output))
    assert rows.column_names == list(TRAINERS[name].columns)
    assert len(rows) == len(samples) == 12
    for row, sample in zip(rows, samples, strict=True):
        assert row["input_ids"] == sample.token_ids
        assert row["labels"] == sample.labels.tolist()
        assert row.get("attention_mask", [1] * len(sample)) == [1] * len(sample)
    assert done.longest == max(map(len, samples))
    if file.endswith(".parquet"):
        assert read_metadata(done.output)["tokenizer_sha256"] == read_metadata(plain.output)["tokenizer_sha256"]


def test_rows_of_rollouts_can_be_written_for_a_trainer(tmp_path: Path) -> None:
    trajectory = Trajectory(name="t")
    trajectory.begin([1, 2, 3], messages=1)
    trajectory.append_completion([7, 8], [-0.5, -0.25], finish_reason="stop")
    trajectory.branch([1, 2, 4], cause="edit")
    trajectory.append_completion([9], [-0.75], finish_reason="stop")
    for name, file in FORMS:
        path = tmp_path / name / file
        path.parent.mkdir()
        write_samples(path, trajectory_samples(trajectory), trainer=name)
        rows = loaded(path, tmp_path)
        assert rows["input_ids"][:] == [[1, 2, 3, 7, 8], [1, 2, 4, 9]]
        assert rows["labels"][:] == [[-100, -100, -100, 7, 8], [-100, -100, -100, 9]]


def test_a_saved_dataset_is_replaced_whole_and_nothing_else_is(chats: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    tokenize_files([str(chats)], folder, SETTINGS, workers=1, trainer="llama-factory")
    (folder / "cache-1.arrow").touch()  # what `datasets` leaves there
    with pytest.raises(InputError, match="already exists"):
        tokenize_files([str(chats)], folder, SETTINGS, workers=1, trainer="llama-factory")
    tokenize_files([str(chats)], folder, SETTINGS, workers=1, trainer="llama-factory", overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]
    (folder / "README.md").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        tokenize_files([str(chats)], folder, SETTINGS, workers=1, trainer="llama-factory", overwrite=True)
    assert (folder / "README.md").read_text() == "mine"
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("x")
    with pytest.raises(InputError, match="not a dataset that was saved"):
        tokenize_files([str(chats)], other, SETTINGS, workers=1, trainer="llama-factory", overwrite=True)
    assert (other / "chapter.tex").is_file()
    assert not list(tmp_path.glob("*.unfinished"))


def test_samples_replace_a_saved_dataset_only_if_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(id: int) -> list[Sample]:
        trajectory = Trajectory()
        trajectory.begin([1], messages=1)
        trajectory.append_completion([id], [-0.5], finish_reason="stop")
        return trajectory_samples(trajectory)

    folder = tmp_path / "rows"
    write_samples(folder, row(2), trainer="llama-factory")
    with pytest.raises(InputError, match="already exists"):
        write_samples(folder, row(3), trainer="llama-factory")
    assert loaded(folder, tmp_path)["input_ids"][:] == [[1, 2]]
    write_samples(folder, row(3), trainer="llama-factory", overwrite=True)
    assert loaded(folder, tmp_path)["input_ids"][:] == [[1, 3]]
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    replace = os.replace

    def crashing(source: Path, target: Path) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr("tokentrace.data.tables.os.replace", crashing)
    with pytest.raises(KeyboardInterrupt):
        write_samples(folder, row(4), trainer="llama-factory", overwrite=True)
    assert loaded(tmp_path / "rows.replaced", tmp_path)["input_ids"][:] == [[1, 3]], "the old rows are not lost"


@pytest.mark.parametrize("file", ["a.jsonl.parquet", "b.jsonl", "Straße 😀.parquet"])
def test_advice_names_the_file_and_its_form(file: str) -> None:
    said = yaml.safe_load(TRAINERS["axolotl"].advised(Path(file), 7))
    form = "json" if file.endswith(".jsonl") else "parquet"
    assert said == {"datasets": [{"path": file, "ds_type": form, "type": None}], "sequence_len": 7}
    assert json.dumps(file, ensure_ascii=False) in TRAINERS["trl"].advised(Path(file), 7)
    assert TRAINERS["trl"].advised(Path(file), 0) == "# there are no rows to train on"


@pytest.mark.parametrize(
    ("name", "file", "problem"),
    [
        ("llama-factory", "rows.parquet", "which is a folder: name one"),
        ("axolotl", "rows", "'rows' is none of these"),
        ("torchtune", "rows.csv", "'rows.csv' is none of these"),
        ("llamafactory", "rows", "rows can be written for trl, axolotl, llama-factory"),
    ],
)
def test_a_form_that_the_trainer_does_not_read_is_refused(
    name: str, file: str, problem: str, chats: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=problem):
        tokenize_files([str(chats)], tmp_path / file, SETTINGS, workers=1, trainer=name)
    assert not list(tmp_path.iterdir())


def test_a_trainer_reads_labels(chats: Path, tmp_path: Path) -> None:
    settings = TokenizeSettings(str(POCKET), labels=False)
    with pytest.raises(InputError, match="reads labels"):
        tokenize_files([str(chats)], tmp_path / "x.parquet", settings, workers=1, trainer="trl")


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["tokenize", "-t", str(POCKET), *map(str, arguments)])


def test_the_command_says_what_to_configure(chats: Path, tmp_path: Path) -> None:
    done = invoke(chats, "-o", tmp_path / "a.jsonl", "--for", "axolotl")
    assert done.exit_code == 0, done.output
    said = yaml.safe_load(done.stdout.partition("for axolotl:\n")[2])
    longest = max(len(json.loads(line)["input_ids"]) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert said == {
        "datasets": [{"path": (tmp_path / "a.jsonl").as_posix(), "ds_type": "json", "type": None}],
        "sequence_len": longest,
    }
    done = invoke(chats, "-o", tmp_path / "folder", "--for", "llama-factory")
    assert yaml.safe_load(done.stdout.partition("for LLaMA-Factory:\n")[2])["tokenized_path"].endswith("/folder")
    done = invoke(chats, "-o", tmp_path / "t.parquet", "--for", "trl")
    compile("if 1:\n" + done.stdout.partition("for TRL:\n")[2], "advice", "exec")


def test_the_command_refuses_what_makes_no_sense(chats: Path, tmp_path: Path) -> None:
    for options, problem in (
        (["--show", "1", "--for", "trl"], "name it with -o"),
        (["-o", tmp_path / "x.parquet", "--for", "trl", "--stats"], "no columns for --stats"),
        (["-o", tmp_path / "x.parquet", "--for", "trl", "--no-labels"], "reads labels"),
        (["-o", tmp_path / "x.parquet", "--for", "llama-factory"], "which is a folder"),
    ):
        done = invoke(chats, *options)
        assert done.exit_code == 2, options
        assert problem in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_the_option_names_every_trainer() -> None:
    @trainer_option
    def command() -> None: ...

    [option] = command.__click_params__  # type: ignore[attr-defined]
    assert list(option.type.choices) == list(TRAINERS)
