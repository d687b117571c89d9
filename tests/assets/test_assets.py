"""The assets match their rows: pinned, loadable, and equal to independent readings of the same data."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer

from tests.assets import FAMILIES, convert, family_dir, package_member, trl_templates
from tests.assets.build import sha256
from tests.assets.lock import CONTROL, PINS
from tests.conversations import CODE, CONVERSATIONS
from tests.diagnose.brute import rendered, source_of
from tests.lazy import lazy
from tests.oracle import hf_text, hf_tokenizer
from tests.support import FULL, rotating

tekken = lazy("mistral_common.tokens.tokenizers.tekken")


RANKS = "crates/vocab-{0}/vocabs/{1}.tiktoken"
SAMPLES = [
    "Hello, world! It's 2026; we'll see what they've DONE, I'M sure.",
    "  leading, trailing  \n\n\t tabs\r\nand   runs    of spaces",
    CODE,
    "你好，世界。東京タワー 안녕하세요 한국어 混ぜるmix混ぜる",
    "Быстрая лиса; الثعلب السريع; שועל מהיר; สุนัขจิ้งจอก; αλεπού",
    "👩\u200d👩\u200d👧\u200d👦 🇫🇷 👍🏽 ☕ e\u0301 \u1112\u1161\u11ab",
    '{"a": [1, 22, 333, 4444], "b": "x\\ny", "c": null}',
    "https://example.org/a/b?c=d&e=f#g //// ////\n/* comment */",
    "camelCaseWords HTTPServer snake_case_words x1y2z3 12345678901234567890",
    "a" * 300 + " " + "ab" * 200,
]
TEMPLATED = [name for name, row in FAMILIES.items() if row.template]


def load(family: str) -> Tokenizer:
    """The family's tokenizer.json as loaded by transformers, which does not change it."""
    return hf_tokenizer(family).backend_tokenizer


def ids(family: str, text: str) -> list[int]:
    """Ids of raw text, without special tokens."""
    encoded: list[int] = load(family).encode(text, add_special_tokens=False).ids
    return encoded


def module(path: Path) -> ModuleType:
    """A reference encoder, imported from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_holds_the_pinned_files(family: str) -> None:
    folder, (tokenizer, template) = family_dir(family), PINS[family]
    assert sha256((folder / "tokenizer.json").read_bytes()) == tokenizer
    path = folder / "chat_template.jinja"
    assert (sha256(path.read_bytes()) if path.exists() else None) == template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"chat_template", "auto_map"} & config.keys()
    assert set(FAMILIES[family].extras) <= {file.name for file in folder.iterdir()}


@pytest.mark.parametrize(
    ("family", "member", "pattern", "names"),
    rotating(
        [
            ("gpt-oss", ("o200k", "o200k_base"), convert.O200K_PATTERN, CONTROL["harmony"]),
            ("llama-3.1", ("llama3", "llama3"), convert.LLAMA3_PATTERN, CONTROL["llama3"]),
            ("kimi-k2", ("kimi", "kimi"), convert.KIMI_PATTERN, CONTROL["kimi_k2"]),
            ("kimi-k2.5", ("kimi", "kimi"), convert.KIMI_PATTERN, CONTROL["kimi_k25"]),
        ],
        "ranks",
        4,
    ),
)
def test_converted_ranks_encode_as_tiktoken(
    family: str, member: tuple[str, str], pattern: str, names: dict[int, str]
) -> None:
    ranks = convert.read_ranks(package_member("splintr", RANKS.format(*member)))
    control = {name: token_id for token_id, name in names.items()}
    reference = lazy("tiktoken").Encoding(family, pat_str=pattern, mergeable_ranks=ranks, special_tokens=control)
    assert load(family).get_vocab_size() > max(*ranks.values(), *names)
    for sample in [*SAMPLES, "".join(f"{name}between" for name in names.values())]:
        assert ids(family, sample) == reference.encode(sample, allowed_special="all")


@pytest.mark.skipif(not FULL, reason="long: make test-long")
def test_mistral_nemo_encodes_as_mistral_common(tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    path.write_bytes(package_member("mistral-common", "mistral_common/data/tekken_240718.json"))
    reference = tekken.Tekkenizer.from_file(path)
    assert load("mistral-nemo").get_vocab_size() == reference.n_words
    for sample in SAMPLES:
        assert ids("mistral-nemo", sample) == reference.encode(sample, bos=False, eos=False)
    for name in list(CONTROL["nemo"].values())[1:10]:
        assert load("mistral-nemo").token_to_id(name) == reference.get_special_token(name)


@pytest.mark.parametrize(
    ("family", "encoder"),
    rotating([("deepseek-v3.2", "deepseek_v32_encoding"), ("deepseek-v4", "encoding_dsv4")], "encoder", 2),
)
def test_reference_encoders_run_and_speak_the_vocabulary(family: str, encoder: str) -> None:
    reference = module(family_dir(family) / f"{encoder}.py")
    text = reference.encode_messages([{"role": "user", "content": "Hello"}], thinking_mode="chat")
    tokens = [load(family).id_to_token(token_id) for token_id in ids(family, text)]
    assert tokens[0] == "<｜begin▁of▁sentence｜>"
    assert {"<｜User｜>", "<｜Assistant｜>", "</think>"} <= set(tokens)


def test_trl_templates_are_all_there() -> None:
    templates = trl_templates()
    assert len(templates) == 72
    assert templates["qwen3"] == (family_dir("qwen3") / "chat_template.jinja").read_text()
    training = [text for name, text in templates.items() if name.endswith("_training")]
    assert training
    assert all("generation" in text for text in training)


@pytest.mark.parametrize("name", rotating([name for name in TEMPLATED if FAMILIES[name].kwargs], "kwargs", 8))
def test_documented_kwargs_change_what_is_rendered(name: str) -> None:
    """For each documented variable, some value changes some conversation."""
    for variable, values in FAMILIES[name].kwargs.items():
        assert any(
            hf_text(name, case.messages, case.tools, True)
            != hf_text(name, case.messages, case.tools, True, **{variable: value})
            for value in values
            for case in CONVERSATIONS.values()
        ), variable


def test_every_conversation_is_rendered_by_some_family() -> None:
    """Rendered by transformers' own Jinja: whether a template refuses does not depend on a vocabulary."""
    refused = dict(CONVERSATIONS)
    for name in TEMPLATED:
        for label, case in list(refused.items()):
            if rendered(source_of(name), case.messages, case.tools, False) is not None:
                del refused[label]
        if not refused:
            break
    assert not refused
