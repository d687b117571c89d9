"""The assets are what their rows say: pinned, loadable, equal to independent readings of the same data."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest
import tiktoken
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

from tests.assets import FAMILIES, AssetError, convert, family_dir, package_member, specials, trl_templates
from tests.assets.__main__ import main
from tests.assets.build import built_path, named_path, recipe_digest, sha256
from tests.assets.pins import PINS
from tests.assets.templates import KIMI_K2_EDITS, kimi_k2
from tests.conversations import CODE, CONVERSATIONS
from tests.diagnose.brute import rendered, source_of
from tests.oracle import hf_text, hf_tokenizer
from tests.support import rotating

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
KNOWN_IDS = [
    ("qwen3", "<|im_end|>", 151645),
    ("qwen3", "<tool_call>", 151657),
    ("qwen3", "<think>", 151667),
    ("qwen3.5", "<|im_end|>", 248046),
    ("glm-4.5", "<|user|>", 151336),
    ("glm-5", "<|user|>", 154827),
    ("deepseek-v3", "<｜end▁of▁sentence｜>", 1),
    ("kimi-k2", "<|im_end|>", 163586),
    ("kimi-k2.5", "<think>", 163606),
    ("minimax-m2", "]~b]", 200019),
    ("gpt-oss", "<|channel|>", 200005),
    ("gpt-oss", "<|return|>", 200002),
    ("llama-3.1", "<|eot_id|>", 128009),
    ("llama-3.2", "<|python_tag|>", 128010),
    ("mistral-nemo", "[TOOL_CALLS]", 9),
    ("nemotron-3-nano", "<think>", 12),
    ("nemotron-3-nano", "</think>", 13),
    ("gemma-3", "<start_of_turn>", 105),
    ("gemma-3", "<end_of_turn>", 106),
]


TEMPLATED = [name for name, row in FAMILIES.items() if row.template]
VOCABULARIES = list({PINS[name][0]: name for name in reversed(FAMILIES)}.values())
"""One family for each distinct tokenizer.json."""


def load(family: str) -> Tokenizer:
    """The family's tokenizer.json as transformers holds it, which leaves it as it is (a test is below)."""
    return hf_tokenizer(family).backend_tokenizer


def ids(family: str, text: str) -> list[int]:
    """Ids of raw text, with nothing put in front."""
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


@pytest.mark.parametrize(("family", "token", "token_id"), KNOWN_IDS)
def test_known_ids(family: str, token: str, token_id: int) -> None:
    assert load(family).token_to_id(token) == token_id
    assert ids(family, token) == [token_id]


def test_newline_of_nemotron() -> None:
    assert ids("nemotron-3-nano", "\n") == [1010]


@pytest.mark.parametrize("family", rotating(VOCABULARIES, "transformers", 5))
def test_transformers_leaves_the_vocabulary_alone(family: str) -> None:
    alone = Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
    for sample in SAMPLES:
        expected = alone.encode(sample, add_special_tokens=False).ids
        assert hf_tokenizer(family).encode(sample, add_special_tokens=False) == expected
        assert ids(family, sample) == expected


@pytest.mark.parametrize("family", VOCABULARIES)
def test_decoding_gives_the_normalised_text_back(family: str) -> None:
    composes = isinstance(load(family).normalizer, NFC)
    for sample in SAMPLES:
        expected = unicodedata.normalize("NFC", sample) if composes else sample
        assert load(family).decode(ids(family, sample), skip_special_tokens=False) == expected


@pytest.mark.parametrize(
    ("family", "member", "pattern", "names"),
    [
        ("gpt-oss", ("o200k", "o200k_base"), convert.O200K_PATTERN, specials.HARMONY),
        ("llama-3.1", ("llama3", "llama3"), convert.LLAMA3_PATTERN, specials.LLAMA3),
        ("kimi-k2", ("kimi", "kimi"), convert.KIMI_PATTERN, specials.KIMI_K2),
        ("kimi-k2.5", ("kimi", "kimi"), convert.KIMI_PATTERN, specials.KIMI_K25),
    ],
)
def test_converted_ranks_encode_as_tiktoken(
    family: str, member: tuple[str, str], pattern: str, names: dict[int, str]
) -> None:
    ranks = convert.read_ranks(package_member("splintr", RANKS.format(*member)))
    control = {name: token_id for token_id, name in names.items()}
    reference = tiktoken.Encoding(family, pat_str=pattern, mergeable_ranks=ranks, special_tokens=control)
    assert load(family).get_vocab_size() > max(*ranks.values(), *names)
    for sample in [*SAMPLES, "".join(f"{name}between" for name in names.values())]:
        assert ids(family, sample) == reference.encode(sample, allowed_special="all")


@pytest.mark.parametrize(
    ("member", "published"),
    [
        (("o200k", "o200k_base"), "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"),
        (("llama3", "llama3"), "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"),
    ],
)
def test_ranks_are_the_publishers_own_file(member: tuple[str, str], published: str) -> None:
    assert sha256(package_member("splintr", RANKS.format(*member))) == published


def test_mistral_nemo_encodes_as_mistral_common(tmp_path: Path) -> None:
    path = tmp_path / "tekken.json"
    path.write_bytes(package_member("mistral-common", "mistral_common/data/tekken_240718.json"))
    reference = Tekkenizer.from_file(path)
    assert load("mistral-nemo").get_vocab_size() == reference.n_words
    for sample in SAMPLES:
        assert ids("mistral-nemo", sample) == reference.encode(sample, bos=False, eos=False)
    for name in list(specials.NEMO.values())[1:10]:
        assert load("mistral-nemo").token_to_id(name) == reference.get_special_token(name)


def test_nemotron_is_mistral_nemo_outside_its_control_tokens() -> None:
    nemotron, nemo = ([ids(family, sample) for sample in SAMPLES] for family in ("nemotron-3-nano", "mistral-nemo"))
    assert nemotron == nemo


def test_gemma_merges_reach_every_ordinary_piece() -> None:
    """A piece that no merge makes is a single character, a byte, or one that is set apart."""
    model = json.loads((family_dir("gemma-3") / "tokenizer.json").read_bytes())
    apart = {token["content"] for token in model["added_tokens"]}
    made = {left + right for left, right in model["model"]["merges"]}
    unreached = model["model"]["vocab"].keys() - made - apart
    assert {piece for piece in unreached if len(piece) > 1 and not piece.startswith("<0x")} == set()


@pytest.mark.parametrize(
    ("family", "encoder"), [("deepseek-v3.2", "deepseek_v32_encoding"), ("deepseek-v4", "encoding_dsv4")]
)
def test_reference_encoders_run_and_speak_the_vocabulary(family: str, encoder: str) -> None:
    reference = module(family_dir(family) / f"{encoder}.py")
    text = reference.encode_messages([{"role": "user", "content": "Hello"}], thinking_mode="chat")
    tokens = [load(family).id_to_token(token_id) for token_id in ids(family, text)]
    assert tokens[0] == "<｜begin▁of▁sentence｜>"
    assert {"<｜User｜>", "<｜Assistant｜>", "</think>"} <= set(tokens)


def test_kimi_template_refuses_a_source_without_the_known_edits() -> None:
    path = "thirdparty/llama.cpp/models/templates/Kimi-K2-Instruct.jinja"
    member = package_member("xllamacpp", path)
    assert "tool_call_counter" not in kimi_k2(member)
    for edited, _ in KIMI_K2_EDITS:
        with pytest.raises(AssetError, match="exactly one"):
            kimi_k2(member.replace(edited.encode(), b""))


def test_trl_templates_are_all_there() -> None:
    templates = trl_templates()
    assert len(templates) == 72
    assert templates["qwen3"] == (family_dir("qwen3") / "chat_template.jinja").read_text()
    training = [text for name, text in templates.items() if name.endswith("_training")]
    assert training
    assert all("generation" in text for text in training)


def test_a_changed_row_is_built_elsewhere() -> None:
    family = FAMILIES["qwen3"]
    changed = dataclasses.replace(family, note="changed")
    assert recipe_digest(changed) != recipe_digest(family)
    assert built_path(changed) != built_path(family)


def test_a_family_has_a_name_that_stays_the_same() -> None:
    folder, family = family_dir("qwen3"), FAMILIES["qwen3"]
    named = named_path(family)
    assert (named.name, named.resolve()) == ("qwen3", folder.resolve())
    draft = named.with_name(".other")
    draft.symlink_to(folder.parent, target_is_directory=True)
    draft.replace(named)  # as an earlier recipe would have left it
    family_dir("qwen3")
    assert named.resolve() == folder.resolve()


@pytest.mark.parametrize("name", rotating([name for name in TEMPLATED if FAMILIES[name].kwargs], "kwargs", 3))
def test_documented_kwargs_change_what_is_rendered(name: str) -> None:
    """Of each documented variable, some value makes some conversation differ from leaving it out."""
    for variable, values in FAMILIES[name].kwargs.items():
        assert any(
            hf_text(name, case.messages, case.tools, True)
            != hf_text(name, case.messages, case.tools, True, **{variable: value})
            for value in values
            for case in CONVERSATIONS.values()
        ), variable


def test_every_conversation_is_rendered_by_some_family() -> None:
    """By transformers' own Jinja, with no vocabulary: whether a template refuses does not depend on one."""
    refused = dict(CONVERSATIONS)
    for name in TEMPLATED:
        for label, case in list(refused.items()):
            if rendered(source_of(name), case.messages, case.tools, False) is not None:
                del refused[label]
        if not refused:
            break
    assert not refused


@pytest.mark.parametrize("name", [name for name in TEMPLATED if name != "gemma-3"])
def test_every_family_with_tools_prints_a_call_of_the_matrix(name: str) -> None:
    """The unit is said by an argument alone, once the tools are not declared."""
    cases = CONVERSATIONS["agentic_json_arguments_content_none"], CONVERSATIONS["agentic_after_result"]
    answers = [hf_text(name, case.messages) for case in cases]
    assert any("celsius" in answer for answer in answers if isinstance(answer, str))


@pytest.mark.parametrize("name", TEMPLATED)
def test_families_whose_template_ignores_tools_are_known(name: str) -> None:
    bare, declared = CONVERSATIONS["user"], CONVERSATIONS["tools_unused"]
    ignored = hf_text(name, bare.messages) == hf_text(name, declared.messages, declared.tools)
    assert ignored == (name in {"deepseek-v3", "deepseek-r1", "deepseek-v3.1", "gemma-3"})


def test_command_lists_and_refuses(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--list"]) == 0
    listing = capsys.readouterr().out
    assert all(name in listing for name in FAMILIES)
    assert main(["no-such-family"]) == 1
    assert "no family 'no-such-family'" in capsys.readouterr().out
