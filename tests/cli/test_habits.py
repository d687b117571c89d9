"""Names that commands and library share, and short errors."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tokentrace import create_renderer, load_tokenizer
from tokentrace.cli import main
from tokentrace.errors import TokenizerError
from tokentrace.pocket import EXAMPLE, POCKET


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


RENDERER = create_renderer(POCKET)


# -- names


def test_pocket_is_a_name_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket").mkdir()  # a folder of that name without a tokenizer is not meant
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("pocket").digest == load_tokenizer(POCKET).digest
    assert run("render", EXAMPLE, "-t", "pocket").stdout == run("render", EXAMPLE).stdout


# -- errors


def install_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LocalEntryNotFoundError", "the hub could not be reached"),
        ("OfflineModeIsEnabled", "the hub could not be reached"),
        ("RepositoryNotFoundError", "the hub has no such model, or it needs a login"),
        ("GatedRepoError", "the hub requires a login for it"),
        ("RevisionNotFoundError", "the hub has no such revision of it"),
        ("HFValidationError", "that is not the name of a model on the hub"),
    ],
)
def test_a_model_that_cannot_be_fetched(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "Got: ConnectError: [Errno -2] Name or service not known\nand a page of advice"
    install_hub(monkeypatch, type(error, (Exception,), {})(long))
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("someone/something")
    assert str(caught.value) == f"'someone/something' is not a folder here, and {words}"


def test_a_tokenizer_that_the_library_does_not_know(tmp_path: Path) -> None:
    spec = json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8")) | {"pre_tokenizer": {"type": "Nope"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path).encode("x")
    assert "untagged enum" not in str(caught.value)
    assert "tokenizers" in str(caught.value)
