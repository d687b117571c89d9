"""Comparisons of the encoders that are remembered: when they are trusted, and that the ids are the same either way."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import family_dir
from tests.support import byte_tokenizer_json, load_family
from tokentrace.tokens import Tokenizer, checks, tokenizer, vocabulary
from tokentrace.tokens.loading import load_tokenizer

numbers = itertools.count()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(checks.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer, "_cores", {})
    return tmp_path / "cache"


def forget() -> None:
    """As in a new process: nothing is loaded, and what is in the folder is all that is known."""
    tokenizer._cores.clear()


@pytest.fixture
def spec() -> str:
    """A ``tokenizer.json`` that no other test has loaded."""
    return byte_tokenizer_json(["<|im_end|>", f"<only {next(numbers)} in {os.getpid()}>"])


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("checks/*"))


def is_compared(loaded: Tokenizer) -> bool:
    """Whether both libraries were loaded, and so compared."""
    encoder = loaded._core.encoder
    return encoder._fast is not None and "slow" in vars(encoder)


def load_twice(spec: str, between: Any = lambda: None) -> tuple[bool, bool]:
    """Whether the encoders were compared the first time, and the second."""
    first = is_compared(Tokenizer(spec))
    forget()
    between()
    return first, is_compared(Tokenizer(spec))


def test_a_comparison_is_remembered(folder: Path, spec: str) -> None:
    assert load_twice(spec) == (True, False)
    [record] = records(folder)
    assert json.loads(record.read_text())["verdict"] == {"fast": True, "ordinary": True, "problem": ""}


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "{}", '{"verdict": {}}', '{"verdict": {"fast": 1, "ordinary": 1, "problem": 0}}', "\ufffd"],
)
def test_a_damaged_record_is_ignored_and_written_anew(damage: str, folder: Path, spec: str) -> None:
    kept = ""

    def harm() -> None:
        nonlocal kept
        [record] = records(folder)
        kept = record.read_text()
        record.write_text(damage)

    assert load_twice(spec, harm) == (True, True)
    assert [record.read_text() for record in records(folder)] == [kept]


def test_a_record_for_something_else_is_not_taken(folder: Path, spec: str) -> None:
    def exchange() -> None:
        [record] = records(folder)
        record.write_text(record.read_text().replace(hashlib.sha256(spec.encode()).hexdigest(), "0" * 64))

    assert load_twice(spec, exchange) == (True, True)


@pytest.mark.parametrize("what", ["fastokens", "tokenizers", "the check"])
def test_other_versions_are_compared_anew(what: str, folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> None:
        if what == "the check":
            monkeypatch.setattr(checks, "_VERSION", 999)
        else:
            monkeypatch.setattr(checks, "version", lambda name: "0.0" if name == what else "1.0")

    assert load_twice(spec, change) == (True, True)
    assert len(records(folder)) == 2


@pytest.mark.parametrize("off", ["off", "OFF", "0", ""])
def test_switched_off(off: str, folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.FOLDER, off)
    assert load_twice(spec) == (True, True)
    assert checks.cache_folder() is None
    assert not folder.exists()


def test_a_folder_that_cannot_be_written(folder: Path, spec: str) -> None:
    folder.write_text("a file")
    assert load_twice(spec) == (True, True)


def test_that_it_cannot_be_used_is_remembered(folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str) -> Any:
        raise ValueError("cannot do that")

    with monkeypatch.context() as patch:
        patch.setattr("fastokens.Tokenizer.from_json_str", refuse, raising=False)
        patch.setattr("tokentrace.tokens.tokenizer._Encoder._load", refuse)
        with pytest.warns(RuntimeWarning, match="cannot do that"):
            Tokenizer(spec)
    forget()
    with pytest.warns(RuntimeWarning, match="cannot do that"):
        again = Tokenizer(spec)
    assert again.backend == "tokenizers"
    assert "slow" not in vars(again._core.encoder)
    assert again.encode("a<|im_end|>").tolist() == [97, 256]


def test_trouble_that_may_pass_is_not_remembered(folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("tokentrace.tokens.tokenizer._Encoder._load", fail)
        with pytest.warns(RuntimeWarning, match="MemoryError"):
            assert Tokenizer(spec).backend == "tokenizers"
    assert records(folder) == []
    forget()
    assert Tokenizer(spec).backend == "fastokens"


def test_fastokens_comes_when_it_is_worth_it(folder: Path, spec: str) -> None:
    Tokenizer(spec)
    forget()
    loaded = Tokenizer(spec)
    encoder = loaded._core.encoder
    assert loaded.backend == "fastokens"
    assert loaded.encode("a<|im_end|>").tolist() == [97, 256]
    assert encoder._fast is None
    text = "abc <|im_end|> " * (encoder.WORTH // 10)
    before = loaded.encode(text)  # begins to load it
    loaded.wait()
    assert encoder._fast is not None
    assert loaded.encode(text).tolist() == before.tolist()


def test_a_process_that_was_forked_loads_its_own(folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Tokenizer(spec)
    forget()
    loaded = Tokenizer(spec)
    encoder = loaded._core.encoder
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "_arrive", lambda: None)  # the thread that the fork did not take along
        loaded.wait()
    assert encoder._fast is None
    monkeypatch.setattr("os.getpid", lambda: -1)
    loaded.wait()
    assert encoder._fast is not None


@pytest.fixture(scope="module")
def remembered() -> Tokenizer:
    """Qwen3's tokenizer as it is loaded the second time: tokenizers stands in."""
    verdict = load_family("qwen3")._core.encoder.verdict
    assert verdict == checks.CheckResult(True, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.Check, "remembered", lambda _: verdict)
        patch.setattr("tokentrace.tokens.tokenizer._cores", {})
        return load_tokenizer(family_dir("qwen3"))


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.sampled_from(["<|im_end|>", "<think>", "\n", " a", "Ω e\u0301", "123", "'ſ", "<", "|>"])).map(
        "".join
    )
)
def test_the_ids_are_the_same_by_whichever_library(remembered: Tokenizer, text: str) -> None:
    full = load_family("qwen3")
    assert remembered._core.encoder._fast is None
    assert remembered.encode(text).tolist() == full.encode(text).tolist()
    [plain], [expected] = remembered.encode_plain([text]), full.encode_plain([text])
    assert plain.tolist() == expected.tolist()
    assert not full.vocabulary.is_control[expected].any()


# -- tables


def tables(folder: Path) -> list[Path]:
    return sorted(folder.glob("vocabularies/*"))


def told(loaded: Tokenizer) -> Any:
    """All that a vocabulary says."""
    facts, lengths, ends, spelled = loaded.vocabulary.tables
    return facts, lengths.tolist(), ends.tolist(), spelled, lengths.dtype, ends.dtype


@pytest.mark.parametrize("damage", [b"", b"{}", b"\n", None, b"more"])
def test_tables_are_the_same_from_memory_and_damaged_ones_are_written_anew(
    damage: bytes | None, folder: Path, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_LARGE", 0)
    expected = told(Tokenizer(spec))
    forget()
    [record] = tables(folder)
    kept = record.read_bytes()
    if damage is not None:
        record.write_bytes(kept + damage if damage == b"more" else damage)
    reads: list[Any] = []
    real = vocabulary._tables_of
    monkeypatch.setattr(vocabulary, "_tables_of", lambda spec: reads.append(1) or real(spec))
    assert told(Tokenizer(spec)) == expected
    assert len(reads) == (damage is not None)
    assert [record.read_bytes() for record in tables(folder)] == [kept]


@pytest.mark.parametrize("family", ["qwen3", "gemma-3"])
def test_tables_of_families_are_the_same_from_memory(family: str, folder: Path) -> None:
    own = load_family(family).vocabulary
    checks.remember_tables("some", own.tables)
    again = checks.remembered_tables("some")
    assert again is not None
    kept = vocabulary.Vocabulary(own._raw, again)
    assert (kept.byte_lengths == own.byte_lengths).all()
    assert all(kept.token_bytes(index) == own.token_bytes(index) for index in range(-1, own.size + 1))
    assert kept.tables.facts == own.tables.facts


def test_small_vocabularies_are_not_remembered(folder: Path, spec: str) -> None:
    Tokenizer(spec)
    assert not tables(folder)
