"""One set of habits: the same names, the same exit codes, and short errors, whichever command it is."""

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
from tokentrace.errors import InputError, RendererError, TokenizerError
from tokentrace.pocket import EXAMPLE, POCKET
from tokentrace.trajectory import Trajectory, load_trajectory


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


RENDERER = create_renderer(POCKET)


# -- names


def test_pocket_is_a_name_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket").mkdir()  # a folder of that name without a tokenizer is not meant
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("pocket").digest == load_tokenizer(POCKET).digest
    assert run("render", EXAMPLE, "-t", "pocket").stdout == run("render", EXAMPLE).stdout


def test_a_renderer_decodes_ids() -> None:
    ids = RENDERER.render_ids([{"role": "user", "content": "Grüße"}])
    assert RENDERER.decode(ids) == "<|bos|><|turn|>user\nGrüße<|end|>"
    with pytest.raises(InputError, match="the vocabulary has 4096 ids"):
        RENDERER.decode([10**9])


def test_a_trajectory_saves_itself(tmp_path: Path) -> None:
    trajectory = Trajectory(name="one")
    trajectory.begin([1, 2])
    trajectory.save(tmp_path / "one.tt")
    assert load_trajectory(tmp_path / "one.tt").trajectory.stream().tolist() == [1, 2]


# -- errors


@pytest.mark.parametrize("ids", [[10**9], [8192], [10**10], [-1]])
def test_an_id_that_no_vocabulary_has_is_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match=rf"^token_ids: entry 0 is {ids[0]}, which is not a token id: "):
        RENDERER.parse_response(ids)


def test_an_object_in_place_of_messages_is_told_what_to_pass() -> None:
    with pytest.raises(InputError, match=r"not a dict; pass its \"messages\"$"):
        RENDERER.render({"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(InputError, match=r"not a dict; wrap a single message in a list$"):
        RENDERER.render({"role": "user", "content": "x"})


@pytest.mark.parametrize("text", ["\ud800", 5, None])
def test_what_is_no_text_is_refused_by_the_tokenizer(text: Any) -> None:
    with pytest.raises(InputError, match="text"):
        RENDERER.tokenizer.encode(text)


def test_a_template_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    for given in (file, str(file)):
        assert create_renderer(POCKET, chat_template=given).render_ids([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("given", ["nope.jinja", "/x/nope.jinja", "nope", Path("nope.jinja")])
def test_a_template_file_that_is_not_there(given: Any) -> None:
    with pytest.raises(RendererError) as caught:
        create_renderer(POCKET, chat_template=given)
    assert str(caught.value) == (
        f"chat_template: there is no file {str(given)!r}, and the tokenizer carries no template of that name "
        "(it carries default)"
    )
    result = run("render", EXAMPLE, "--chat-template", given)
    assert (result.exit_code, f"there is no file {str(given)!r}" in result.stderr) == (2, True)
    assert len(result.stderr.splitlines()) <= 2


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
        ("GatedRepoError", "the hub wants a login for it"),
        ("RevisionNotFoundError", "the hub has no such revision of it"),
        ("HFValidationError", "that is no name of a model on the hub"),
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
