"""The grammar that is derived from the template of every family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from tests.assets import FAMILIES
from tests.conversations import assistant, tool, user
from tests.formats.small import small_renderer, small_tokenizer
from tests.study.pieces import HIDDEN, NAME_AND_ARGUMENTS, NOT_BESIDE, ONE_CALL, THINK
from tests.support import PYTHON_FORMATS, make_renderer
from tokentrace import Renderer, create_renderer
from tokentrace.formats.dialects import dialect_of
from tokentrace.formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from tokentrace.study.derive import NO_CALLS

# -- families


IM: Final = "<|im_start|>assistant\n"
THINK_LINES: Final = Frame("<think>", "\n", "\n", "</think>", "\n\n")
HERMES: Final = CallGrammar(
    Style.JSON_CALL,
    before="\n",
    separator="\n",
    open="<tool_call>\n",
    close="\n</tool_call>",
    keys=NAME_AND_ARGUMENTS,
)
QWEN_XML: Final = CallGrammar(
    Style.PAIRS,
    before="\n\n",
    separator="\n",
    open="<tool_call>\n",
    head=(("<function=", "name"),),
    begin=">\n",
    end="</function>\n",
    close="</tool_call>",
    key_open="<parameter=",
    value_open=">\n",
    value_close="\n</parameter>\n",
    others=Value.PYTHON,
)
GLM_LINES: Final = CallGrammar(
    Style.PAIRS,
    before="\n",
    separator="\n",
    open="<tool_call>",
    head=(("", "name"),),
    begin="\n",
    close="</tool_call>",
    key_open="<arg_key>",
    value_open="</arg_key>\n<arg_value>",
    value_close="</arg_value>\n",
)
GLM: Final = CallGrammar(
    Style.PAIRS,
    open="<tool_call>",
    head=(("", "name"),),
    close="</tool_call>",
    key_open="<arg_key>",
    value_open="</arg_key><arg_value>",
    value_close="</arg_value>",
)
DEEPSEEK: Final = CallGrammar(
    Style.JSON_ARGUMENTS,
    section_open="<｜tool▁calls▁begin｜>",
    section_close="<｜tool▁calls▁end｜>",
    separator="\n",
    open="<｜tool▁call▁begin｜>",
    head=(("function<｜tool▁sep｜>", "name"),),
    begin="\n```json\n",
    end="\n```",
    close="<｜tool▁call▁end｜>",
)
DEEPSEEK_V31: Final = CallGrammar(
    Style.JSON_ARGUMENTS,
    section_open="<｜tool▁calls▁begin｜>",
    section_close="<｜tool▁calls▁end｜>",
    open="<｜tool▁call▁begin｜>",
    head=(("", "name"),),
    begin="<｜tool▁sep｜>",
    close="<｜tool▁call▁end｜>",
)
DSML: Final = CallGrammar(
    Style.PAIRS,
    before="\n\n",
    section_open="<｜DSML｜function_calls>\n",
    section_close="\n</｜DSML｜function_calls>",
    separator="\n",
    open='<｜DSML｜invoke name="',
    head=(("", "name"),),
    begin='">\n',
    close="</｜DSML｜invoke>",
    key_open='<｜DSML｜parameter name="',
    value_open='" string="false">',
    string_open='" string="true">',
    value_close="</｜DSML｜parameter>\n",
)
KIMI: Final = CallGrammar(
    Style.JSON_ARGUMENTS,
    section_open="<|tool_calls_section_begin|>",
    section_close="<|tool_calls_section_end|>",
    open="<|tool_call_begin|>",
    head=(("", "id"),),
    begin="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    id_is_name=True,
)
KIMI_HEAD: Final = "<|im_assistant|>assistant<|im_middle|>"
GRAMMARS: Final = {
    "qwen2.5": TurnGrammar(head=IM, prompt=IM, calls=HERMES),
    "qwq-32b": TurnGrammar(
        head=IM,
        prompt=IM + "<think>\n",
        reasoning=Frame("<think>", "\n", "", "</think>", ""),
        calls=HERMES,
        notes=(HIDDEN,),
    ),
    "qwen3": TurnGrammar(head=IM, prompt=IM, reasoning=THINK_LINES, after_empty="\n\n", calls=HERMES),
    "qwen3-thinking-2507": TurnGrammar(
        head=IM, prompt=IM + "<think>\n", reasoning=THINK_LINES, after_empty="\n\n", calls=HERMES
    ),
    "qwen3-coder": TurnGrammar(head=IM, prompt=IM, calls=QWEN_XML),
    "qwen3.5": TurnGrammar(
        head=IM, prompt=IM + "<think>\n", reasoning=THINK_LINES, after_empty="\n\n", calls=QWEN_XML
    ),
    "qwen3.5-nothink": TurnGrammar(
        head=IM, prompt=IM + "<think>\n\n</think>\n\n", reasoning=THINK_LINES, after_empty="\n\n", calls=QWEN_XML
    ),
    "qwen3.6": TurnGrammar(
        head=IM,
        prompt=IM + "<think>\n",
        reasoning=THINK_LINES,
        after_empty="\n\n",
        calls=replace(QWEN_XML, others=Value.JSON),
    ),
    "nemotron-3-nano": TurnGrammar(
        head=IM,
        prompt=IM + "<think>\n",
        reasoning=Frame("<think>", "\n", "\n", "</think>", "\n"),
        calls=replace(QWEN_XML, before="\n", after="\n"),
    ),
    "glm-4.5": TurnGrammar(
        head="<|assistant|>\n",
        prompt="<|assistant|>",
        reasoning=Frame("<think>", "", "", "</think>", "\n"),
        after_empty="\n",
        calls=GLM_LINES,
    ),
    "glm-4.7": TurnGrammar(head="<|assistant|>", prompt="<|assistant|><think>", reasoning=THINK, calls=GLM),
    "minimax-m2": TurnGrammar(
        head="]~b]ai\n",
        prompt="]~b]ai\n<think>\n",
        reasoning=THINK_LINES,
        after_empty="\n\n",
        calls=CallGrammar(
            Style.PAIRS,
            before="\n",
            section_open="<minimax:tool_call>\n",
            section_close="\n</minimax:tool_call>",
            separator="\n",
            open='<invoke name="',
            head=(("", "name"),),
            begin='">\n',
            close="</invoke>",
            key_open='<parameter name="',
            value_open='">',
            value_close="</parameter>\n",
        ),
    ),
    "minimax-m3": TurnGrammar(
        head="]~b]ai\n",
        prompt="]~b]ai\n",
        reasoning=Frame("<mm:think>", "", "", "</mm:think>", ""),
        calls=CallGrammar(
            Style.TREE,
            section_open="]<]minimax[>[<tool_call>\n",
            section_close="\n]<]minimax[>[</tool_call>",
            separator="\n",
            open=']<]minimax[>[<invoke name="',
            head=(("", "name"),),
            begin='">',
            close="]<]minimax[>[</invoke>",
            key_open="]<]minimax[>[<",
            value_open=">",
            value_close="]<]minimax[>[</",
            item="item",
        ),
    ),
    "deepseek-v3": TurnGrammar(
        head="<｜Assistant｜>",
        prompt="<｜Assistant｜>",
        calls=DEEPSEEK,
        notes=(
            NOT_BESIDE,
            "the template disagrees with itself: one call ends with '\\n```<｜tool▁call▁end｜>', "
            "the last of two with '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'",
        ),
    ),
    "deepseek-r1": TurnGrammar(
        head="<｜Assistant｜>",
        prompt="<｜Assistant｜><think>\n",
        reasoning=Frame("<think>", "\n", "", "</think>", ""),
        calls=DEEPSEEK,
        notes=(HIDDEN,),
    ),
    "deepseek-v3.1": TurnGrammar(
        head="<｜Assistant｜>",
        prompt="<｜Assistant｜></think>",
        reasoning=THINK,
        calls=DEEPSEEK_V31,
        notes=(HIDDEN,),
    ),
    "deepseek-v3.2": TurnGrammar(
        head="<｜Assistant｜>", prompt="<｜Assistant｜></think>", reasoning=THINK, calls=DSML
    ),
    "deepseek-v4": TurnGrammar(
        head="<｜Assistant｜>",
        prompt="<｜Assistant｜></think>",
        reasoning=THINK,
        calls=replace(
            DSML, section_open="<｜DSML｜tool_calls>\n", section_close="\n</｜DSML｜tool_calls>"
        ),
    ),
    "kimi-k2": TurnGrammar(head=KIMI_HEAD, prompt=KIMI_HEAD, calls=KIMI),
    "kimi-k2.5": TurnGrammar(head=KIMI_HEAD, prompt=KIMI_HEAD + "<think>", reasoning=THINK, calls=KIMI),
    "llama-3.1": TurnGrammar(
        head="<|start_header_id|>assistant<|end_header_id|>\n\n",
        prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
        calls=CallGrammar(Style.JSON_CALL, keys=(("name", ("name",)), ("arguments", ("parameters",)))),
        notes=(NOT_BESIDE, ONE_CALL),
    ),
    "gpt-oss": TurnGrammar(
        head="<|start|>assistant",
        prompt="<|start|>assistant",
        channels=Channels(
            start="<|start|>",
            channel="<|channel|>",
            message="<|message|>",
            end="<|end|>",
            reasoning="analysis",
            content="final",
            recipient="to=",
            namespace="functions.",
            call="commentary",
            content_type="json",
            call_end="<|call|>",
        ),
    ),
    "mistral-nemo": TurnGrammar(
        head="",
        prompt="",
        calls=CallGrammar(
            Style.JSON_CALL,
            section_open="[TOOL_CALLS][",
            section_close="]",
            separator=", ",
            keys=(*NAME_AND_ARGUMENTS, ("id", ("id",))),
        ),
        notes=(NOT_BESIDE,),
    ),
    "gemma-3": TurnGrammar(head="<start_of_turn>model\n", prompt="<start_of_turn>model\n", notes=(NO_CALLS,)),
}  # fmt: skip
"""What each kind of family writes in its turns."""
LIKE: Final = {
    "qwen3-instruct-2507": "qwen2.5",
    "qwen3-vl": "qwen2.5",
    "glm-4.6": "glm-4.5",
    "glm-4.7-flash": "glm-4.7",
    "glm-5": "glm-4.7",
    "glm-5.1": "glm-4.7",
    "glm-5.2": "glm-4.7",
    "llama-3.2": "llama-3.1",
}
"""Families that write as another one does, to the last newline."""
PROMPT_OPENS: Final = frozenset(
    {"qwq-32b", "qwen3-thinking-2507", "qwen3.5", "qwen3.6", "nemotron-3-nano", "glm-4.7", "minimax-m2", "deepseek-r1"}
    | {"kimi-k2.5"}
)
"""Families whose generation prompt ends inside reasoning."""
DIALECT_OF: Final = {
    "qwen2.5": "hermes",
    "qwq-32b": "hermes",
    "qwen3": "hermes",
    "qwen3-thinking-2507": "hermes",
    "qwen3-coder": "qwen-xml",
    "qwen3.5": "qwen-xml",
    "qwen3.5-nothink": "qwen-xml",
    "qwen3.6": "qwen-xml",
    "nemotron-3-nano": "qwen-xml",
    "glm-4.5": "glm-xml",
    "glm-4.7": "glm-xml",
    "minimax-m2": "minimax-xml",
    "minimax-m3": "minimax-tree",
    "deepseek-v3": "deepseek",
    "deepseek-r1": "deepseek",
    "deepseek-v3.1": "deepseek-v3.1",
    "deepseek-v3.2": "dsml",
    "deepseek-v4": "dsml-v4",
    "kimi-k2": "kimi",
    "kimi-k2.5": "kimi",
    "llama-3.1": "llama-json",
    "gpt-oss": "harmony",
    "mistral-nemo": "mistral",
    "gemma-3": None,
}
"""The name that the calls of each kind go by."""


def test_the_tables_cover_the_asset_list() -> None:
    assert {*GRAMMARS, *LIKE} == set(FAMILIES)
    assert set(DIALECT_OF) == set(GRAMMARS)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_writes_what_is_read_off_its_template(family: str) -> None:
    grammar = small_renderer(family).grammar()
    kind = LIKE.get(family, family)
    assert grammar == GRAMMARS[kind]
    assert grammar.opens_reasoning == (kind in PROMPT_OPENS)
    assert dialect_of(grammar.calls, grammar.channels) == DIALECT_OF[kind]


@pytest.mark.parametrize("family", ["qwen3", "llama-3.1"])
def test_the_grammar_is_the_same_with_the_whole_vocabulary(family: str) -> None:
    assert make_renderer(family).grammar() == GRAMMARS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_derivation_is_deterministic_and_does_not_look_at_tools(family: str) -> None:
    def fresh() -> Renderer:
        return create_renderer(small_tokenizer(family), "default", chat_template=PYTHON_FORMATS.get(family))

    known = GRAMMARS[LIKE.get(family, family)]
    declared = [tool("look_up", "Looks up.", {"place": {"type": "string"}}, ["place"])]
    assert fresh().grammar(declared) == known
    used = fresh()
    used.render([user("Hi."), assistant("Hello."), user("Again.")], add_generation_prompt=True)
    assert used.grammar() == used.grammar(declared) == known


@pytest.mark.parametrize(
    ("family", "variables", "written", "opens"),
    [
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n", False),
        ("qwen3.5", {"enable_thinking": False}, "<think>\n\n</think>\n\n", False),
        ("qwen3.5-nothink", {"enable_thinking": True}, "<think>\n", True),
        ("glm-4.7", {"enable_thinking": False}, "</think>", False),
        ("deepseek-v3.1", {"thinking": True}, "<think>", True),
        ("kimi-k2.5", {"thinking": False}, "<think></think>", False),
        ("minimax-m3", {"thinking_mode": "enabled"}, "<mm:think>", True),
        ("minimax-m3", {"thinking_mode": "disabled"}, "</mm:think>", False),
        ("nemotron-3-nano", {"enable_thinking": False}, "<think></think>", False),
    ],
)
def test_a_switch_changes_the_prompt_and_not_how_reasoning_is_written(
    family: str, variables: dict[str, Any], written: str, opens: bool
) -> None:
    grammar = small_renderer(family, **variables).grammar()
    known = GRAMMARS[family]
    assert (grammar.head, grammar.prompt) == (known.head, known.head + written)
    assert grammar.opens_reasoning == opens
    assert (grammar.reasoning, grammar.calls) == (known.reasoning, known.calls)


def test_a_known_family_brings_the_dialect_that_its_template_contradicts() -> None:
    """One call is not closed as two are: the dialect settles it, and it is what the template shows of two."""
    auto = small_renderer("deepseek-v3", "auto")
    assert (auto.family, auto.tool_parser) == ("deepseek_v3", "deepseek")
    assert auto.grammar() == GRAMMARS["deepseek-v3"]
    assert small_renderer("deepseek-v3", "default").tool_parser is None
