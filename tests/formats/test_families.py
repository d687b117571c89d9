"""Families are recognised by what their templates do, not by name, class or hash."""

import pytest

from tests.assets import FAMILIES, family_dir
from tests.support import byte_tokenizer_json
from tokentrace import create_renderer
from tokentrace.errors import RendererError
from tokentrace.formats.families import FAMILIES as KNOWN
from tokentrace.study.outline import recognise
from tokentrace.study.study import TemplateStudy, study_of
from tokentrace.template import ChatTemplate
from tokentrace.tokens import Tokenizer
from tokentrace.tokens.loading import load_tokenizer

EXPECTED = {
    "qwen2.5": "qwen2.5", "qwq-32b": "qwq", "qwen3": "qwen3", "qwen3-instruct-2507": "qwen2.5",
    "qwen3-thinking-2507": "qwen3", "qwen3-vl": "qwen3_vl", "qwen3-coder": "qwen3_coder", "qwen3.5": "qwen3.5",
    "qwen3.5-nothink": "qwen3.5", "qwen3.6": "qwen3.5", "glm-4.5": "glm4.5", "glm-4.6": "glm4.5",
    "glm-4.7": "glm5", "glm-4.7-flash": "glm5", "glm-5": "glm5", "glm-5.1": "glm5", "glm-5.2": "glm5",
    "minimax-m2": "minimax-m2", "minimax-m3": "minimax-m3", "deepseek-v3": "deepseek_v3",
    "deepseek-r1": "deepseek_r1", "deepseek-v3.1": "deepseek_v3.1", "deepseek-v3.2": "deepseek_v3.2",
    "deepseek-v4": "deepseek_v4", "kimi-k2": "kimi_k2", "kimi-k2.5": "kimi_k25", "llama-3.1": "llama3",
    "llama-3.2": "llama3", "gpt-oss": "gpt_oss", "mistral-nemo": "mistral", "nemotron-3-nano": "nemotron3",
    "gemma-3": "gemma3",
}  # fmt: skip
TOKENIZER = Tokenizer(byte_tokenizer_json(()), variables={"bos_token": "<s>", "eos_token": "</s>"}, fast=False)


def study(source: str) -> TemplateStudy:
    return study_of(ChatTemplate(source), TOKENIZER)


def template(family: str) -> TemplateStudy:
    return study((family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8"))


def test_the_table_covers_the_asset_list_and_every_family_has_an_asset() -> None:
    assert set(EXPECTED) == set(FAMILIES)
    assert {family.name for family in KNOWN} == set(EXPECTED.values())


@pytest.mark.parametrize("family", [name for name in EXPECTED if name not in ("deepseek-v3.2", "deepseek-v4")])
def test_a_template_is_recognised_and_can_be_pinned(family: str) -> None:
    assert recognise(template(family), "auto") == EXPECTED[family]
    assert recognise(template(family), EXPECTED[family]) == EXPECTED[family]


def test_comments_and_spelling_do_not_matter() -> None:
    source = "{# a fine-tune's own note #}" + template("qwen3").template.source.replace("message", "msg_")
    assert recognise(study(source.replace("msg_s", "messages")), "auto") == "qwen3"


def test_a_wrong_name_fails_and_says_where() -> None:
    with pytest.raises(RendererError, match=r"does not behave like glm4\.5: its answer is .*im_start"):
        recognise(template("qwen3"), "glm4.5")
    with pytest.raises(RendererError, match=r"there is no renderer 'qwen9'; there are auto, default, .*qwen3"):
        recognise(template("qwen3"), "qwen9")


def test_a_template_like_no_other_is_rendered_all_the_same() -> None:
    source = "{% for m in messages %}({{ m.role }}) {{ m.content }} ;{% endfor %}"
    assert recognise(study(source), "auto") == "default"


@pytest.mark.xdist_group("deepseek-v3.2")
@pytest.mark.parametrize("family", ["deepseek-v3.2", "deepseek-v4"])
def test_formats_without_a_template_are_found_by_their_vocabulary(family: str) -> None:
    tokenizer = load_tokenizer(family_dir(family))
    assert create_renderer(tokenizer).family == EXPECTED[family]
    assert create_renderer(tokenizer, renderer=EXPECTED[family]).family == EXPECTED[family]
