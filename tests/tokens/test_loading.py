"""Loading tokenizers, and the errors if that fails."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import byte_tokenizer_json
from tokentrace import create_renderer, load_tokenizer
from tokentrace.errors import TokenizerError
from tokentrace.tokens import Tokenizer

CONTROLS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
CONFIG = {
    "bos_token": {"content": "<|im_start|>", "lstrip": False},
    "eos_token": "<|im_end|>",
    "pad_token": None,
    "extra_special_tokens": {"image_token": "<image>"},
    "chat_template": TEMPLATE,
    "model_max_length": 10,
}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer_json(CONTROLS), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def test_a_folder(folder: Path) -> None:
    for source in (folder, str(folder), folder / "tokenizer.json", str(folder / "tokenizer.json")):
        loaded = load_tokenizer(source)
        assert loaded.templates == {"default": TEMPLATE}
        assert loaded.variables == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "image_token": "<image>"}
        assert loaded.encode("<|im_start|>a").tolist() == [256, 97]
        assert loaded.token_id("<|im_end|>") == 257
        assert loaded.token_id("nothing") is None
    assert load_tokenizer(loaded) is loaded
    assert create_renderer(folder, "default").render_ids(USER) == [256, *b"hi"]


def test_files_beside_the_tokenizer(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 256, 257]}', encoding="utf-8")
    config = CONFIG | {"chat_template": [{"name": "old", "template": "old"}], "extra_special_tokens": {"boi": "<|b|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "eos_token": "old"}', encoding="utf-8")
    loaded = load_tokenizer(folder)
    assert loaded.templates == {"default": "from the file", "tool_use": "tools"}
    assert loaded.eos_ids == (257, 256)
    assert (loaded.variables["unk_token"], loaded.variables["boi"]) == ("<unk>", "<|b|>")
    assert loaded.variables["eos_token"] == "<|im_end|>"


def test_a_transformers_tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = CONFIG | {"bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(plain), encoding="utf-8")
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    loaded = load_tokenizer(theirs)
    assert loaded.templates == {"default": TEMPLATE}
    assert loaded.variables["bos_token"] == "<|im_start|>"
    renderer = create_renderer(theirs, "default")
    assert renderer.render_ids(USER) == theirs.apply_chat_template(USER, tokenize=True, return_dict=False)
    processor = types.SimpleNamespace(tokenizer=theirs, chat_template="{{ 1 }}", apply_chat_template=print)
    assert load_tokenizer(processor).templates == {"default": "{{ 1 }}"}


# -- the hub


def install_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_a_hub_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        requests.append((name, revision, allow_patterns))
        return str(folder)

    install_hub(monkeypatch, download)
    loaded = load_tokenizer("someone/something")
    assert loaded.name == "someone/something"
    load_tokenizer("someone/something@v1.0")
    (name, revision, patterns), other = requests
    assert (name, revision) == ("someone/something", None)
    assert other[:2] == ("someone/something", "v1.0")
    assert "tokenizer.json" in patterns
    assert not any("safetensors" in pattern or pattern == "*" for pattern in patterns)


HUB = {
    **dict.fromkeys(("Error", "LocalEntryNotFoundError", "OfflineModeIsEnabled"), "the hub could not be reached"),
    "RepositoryNotFoundError": "the hub has no such model, or it needs a login",
    "GatedRepoError": "the hub requires a login for it",
    "RevisionNotFoundError": "the hub has no such revision of it",
    "HFValidationError": "that is not the name of a model on the hub",
}
"""The message for each of the hub's errors."""
NOWHERE = ("./nowhere", "/no/such/folder", "~/nowhere", "", "a/b/c", "~nobody-at-all/x", "x" * 5_000, "\0")


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        *(("a/b", error, f"^'a/b' is not a folder here, and {words}$") for error, words in HUB.items()),
        *((name, "Error", ".") for name in NOWHERE),
    ],
)
def test_unknown_names_are_refused(source: str, error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: Any) -> str:
        raise type(error, (ConnectionError,), {})("Got: Name or service not known\nand a page of advice")

    install_hub(monkeypatch, download)
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(source)


# -- files that are no tokenizer


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"found tokenizer\.model; convert"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "5", '"x"', "{}", '{"model": 5}', '{"model": {"type": "BPE", "vocab": 5}}'),
        *('{"model": {"type": "Nope", "vocab": {}}}', '{"model": {"vocab": {"a": "b"}}}', '{"model": null}'),
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [5]}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": [{"id": "x", "content": "y"}]}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}',
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": {"type": "Nope"}}',
    ],
)
@pytest.mark.filterwarnings("ignore:fastokens cannot be used")
def test_files_that_are_no_tokenizer(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path).encode("a")
    assert "untagged enum" not in str(caught.value)


# -- the two encoders


@pytest.mark.parametrize("answer", [[1, 2, 3], ValueError("cannot do that"), []])
def test_a_fast_encoder_that_differs_is_not_used(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(text: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return types.SimpleNamespace(ids=answer)

    liar = types.SimpleNamespace(encode=encode, no_truncation=lambda: None, no_padding=lambda: None)
    monkeypatch.setattr("fastokens.Tokenizer", types.SimpleNamespace(from_json_str=lambda text: liar))
    spec = byte_tokenizer_json(["<only-here>", repr(answer)])  # a vocabulary that no other test has loaded
    loaded = Tokenizer(spec)
    with pytest.warns(RuntimeWarning, match="fastokens cannot be used"):
        loaded.warm_up()
    assert loaded.backend == "tokenizers"
    assert loaded.encode("a<only-here>").tolist() == [97, 256]
    assert [loaded.encode_plain(text).tolist() for text in ("a", "", "<only-here>")] == [[97], [], [*b"<only-here>"]]


def test_the_fast_encoder_is_used_where_it_agrees() -> None:
    loaded = Tokenizer(byte_tokenizer_json([*CONTROLS, "<fast>"]))
    assert loaded.backend == "tokenizers"
    for _ in range(3):
        loaded.encode("x" * 9_000)
    assert loaded.backend == "fastokens"
    assert Tokenizer(byte_tokenizer_json(CONTROLS), fast=False).backend == "tokenizers"
    assert loaded.encode("").tolist() == []
    assert [loaded.encode_plain(text).tolist() for text in ("", "a", "<|im_end|>")] == [[], [97], [*b"<|im_end|>"]]


def test_bytes_and_text_of_tokens() -> None:
    loaded = Tokenizer(byte_tokenizer_json(CONTROLS), name="bytes")
    assert loaded.decode([*"é<|im_end|>x".encode()]) == "é<|im_end|>x"
    assert loaded.decode([257, 0xC3]) == "<|im_end|>\ufffd"
    assert loaded.decode([999_999, -1]) == ""
    assert "bytes" in repr(loaded)
    assert loaded.vocabulary.is_control[[255, 256, 257]].tolist() == [False, True, True]
    assert loaded.encode("abc").dtype == np.int32


def test_a_tokenizer_that_pads_and_truncates_does_neither() -> None:
    spec = json.loads(byte_tokenizer_json(CONTROLS))
    spec["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    spec["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    loaded = Tokenizer(json.dumps(spec))
    assert loaded.encode("abcdef").tolist() == [*b"abcdef"]
    assert loaded.encode_plain("abcdef").tolist() == [*b"abcdef"]
