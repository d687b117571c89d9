"""The grammar that is read off a template: what it is for each family, and that it finds out what it has to.

Families are written out here as a person would read them off the template. What derivation must be able to find out is
tested one by one, on small templates that no model has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from tests.assets import FAMILIES
from tests.conversations import Message, assistant, call, tool, user
from tests.formats.small import made_up_renderer, small_renderer, small_tokenizer
from tests.support import PYTHON_FORMATS, SPECIAL, make_renderer, templates_of_trl, tokenizer_json_for
from tokentrace import Renderer, Tokenizer, TokentraceError, create_renderer
from tokentrace.formats.dialects import dialect_of
from tokentrace.formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from tokentrace.parsing.events import ArgumentsDelta, ContentDelta
from tokentrace.parsing.proof import MISREAD
from tokentrace.parsing.response import CallStatus, Finish, ParsedResponse
from tokentrace.study.derive import BARE_CALLS, NO_CALLS, SEVERAL_MESSAGES

# -- families

HIDDEN: Final = "the template never shows reasoning; it prompts with <think> or looks for </think>"
NOT_BESIDE: Final = "the template shows no content before tool calls"
ONE_CALL: Final = "the template writes one call a turn"

IM: Final = "<|im_start|>assistant\n"
THINK_LINES: Final = Frame("<think>", "\n", "\n", "</think>", "\n\n")
THINK: Final = Frame("<think>", "", "", "</think>", "")
NAME_AND_ARGUMENTS: Final = (("name", ("name",)), ("arguments", ("arguments",)))

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


# -- what derivation has to find out, each on a template of its own

CONTROLS: Final = (
    *("<|a|>", "<|u|>", "<|end|>", "<|call|>", "<|sep|>", "<|args|>", "<|done|>", "<|calls|>", "<|q|>", "<|x|>"),
)
LOOK: Final = call("look_up", {"place": 'Paris <b> & "é"', "days": 3, "exact": True}, "call00001")
STOP: Final = call("stop", {"where": {"lat": 2.5, "tags": ["a", None]}, "why": "two\nlines"}, "call00002")
SAID: Final = assistant("Hello.")
THOUGHT: Final = assistant("Hello.", reasoning="Well.")
CALLED: Final = assistant("", LOOK)
BESIDE: Final = assistant("Hello.", LOOK)
TWICE: Final = assistant("Hello.", LOOK, STOP)
BOTH: Final = assistant("Hello.", LOOK, reasoning="Well.")
CALLS: Final = (SAID, CALLED, BESIDE, TWICE)

ARGUMENTS: Final = "{{ f.arguments | tojson }}"
OBJECT: Final = '{"name": {{ f.name | tojson }}, "arguments": ' + ARGUMENTS + "}"
VALUE: Final = "{{ v if v is string else v | tojson }}"
EACH: Final = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
COMMA: Final = "{{ '' if loop.last else ', ' }}"


def template(turn: str, prompt: str = "") -> str:
    """A template whose assistant writes `turn` between ``<|a|>`` and ``<|end|>``."""
    said = "{% if m.role == 'assistant' %}<|a|>" + turn + "<|end|>{% else %}<|u|>{{ m.content }}<|end|>{% endif %}"
    prompted = "{% if add_generation_prompt %}<|a|>" + prompt + "{% endif %}"
    return "{% for m in messages %}" + said + "{% endfor %}" + prompted


def called(one: str, before: str = "", after: str = "") -> str:
    """Content, then each call as `one`, all of them between `before` and `after`."""
    return "{{ m.content or '' }}{% if m.tool_calls %}" + before + EACH + one + "{% endfor %}" + after + "{% endif %}"


def pairs(one: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + one + "{% endfor %}"


def turn(calls: CallGrammar | None = None, *notes: str, **changes: Any) -> TurnGrammar:
    """A grammar with the head and the prompt that `template` gives it."""
    if calls is None and not notes:
        notes = (NO_CALLS,)
    return TurnGrammar(**{"head": "<|a|>", "prompt": "<|a|>", "calls": calls, "notes": notes, **changes})


def json_call(**changes: Any) -> CallGrammar:
    return CallGrammar(**{"style": Style.JSON_CALL, "keys": NAME_AND_ARGUMENTS, **changes})


TAGGED: Final = json_call(open="<call>", close="</call>")
NAMED_TAG: Final[dict[str, Any]] = {
    "open": '<call name="',
    "head": (("", "name"),),
    "begin": '">',
    "close": "</call>",
}
TREE: Final = (
    "{% macro tree(v) %}{% if v is mapping %}{% for k, w in v.items() %}<|x|><{{ k }}>{{ tree(w) }}<|x|></{{ k }}>"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for w in v %}<|x|><item>{{ tree(w) }}"
    "<|x|></item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
BRACES: Final = (
    "{% macro braces(v) %}{% if v is mapping %}{{ '{' }}{% for k, w in v.items() %}{{ k }}:{{ braces(w) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% elif v is string %}<|q|>{{ v }}<|q|>{% elif v is iterable %}"
    "[{% for w in v %}{{ braces(w) }}{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
)
PYTHON: Final = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}" + COMMA + "{% endfor %})" + COMMA
)
AS_TEXT: Final = "{% if f.arguments is not string %}{{ raise_exception('JSON text only') }}{% endif %}"


@dataclass(frozen=True, slots=True)
class Case:
    """A template, what is to be found out about it, and messages that it writes so that they are read back."""

    source: str
    grammar: TurnGrammar
    says: tuple[Message, ...] = (SAID,)
    variables: tuple[tuple[str, Any], ...] = ()
    """Template variables with which the messages are rendered."""


CASES: Final = {
    # content
    "content in tags": Case(
        template("<answer>\n{{ m.content }}\n</answer>"), turn(content=Frame("<answer>", "\n", "\n", "</answer>"))
    ),
    "content in tags after reasoning": Case(
        template(
            "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "<answer>{{ m.content }}</answer>"
        ),
        turn(reasoning=THINK, content=Frame("<answer>", close="</answer>")),
        (SAID, THOUGHT),
    ),
    "a turn closed in letters": Case(
        "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' else 'Human: ' }}{{ m.content }}{{ '\\nOver.\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}",
        TurnGrammar("Bot: ", "Bot: ", content=Frame(trail="\n", close="Over.", after="\n"), notes=(NO_CALLS,)),
    ),
    "no calls": Case(template("{{ m.content }}"), turn()),
    # reasoning
    "reasoning that only the prompt opens": Case(
        template("{{ m.content }}", prompt="<think>\n"),
        turn(None, HIDDEN, NO_CALLS, prompt="<|a|><think>\n", reasoning=Frame("<think>", "\n", "", "</think>", "")),
    ),
    "reasoning that the prompt opens and the turn closes": Case(
        template(
            "{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}", prompt="<think>"
        ),
        turn(prompt="<|a|><think>", reasoning=THINK),
    ),
    "reasoning behind a switch": Case(
        template(
            "{% if thinking and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ m.content }}"
        ),
        turn(reasoning=THINK),
        (SAID, THOUGHT),
        (("thinking", True),),
    ),
    "reasoning behind a switch that is on": Case(
        template(
            "{% if not hide | default(true) and m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]"
            "{% endif %}{{ m.content }}"
        ),
        turn(reasoning=Frame("[THINK]", "", "", "[/THINK]", "")),
        (SAID, THOUGHT),
        (("hide", False),),
    ),
    "reasoning beside calls only": Case(
        template(
            "{% if m.tool_calls and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{{ '\\n' }}"
            "{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, reasoning=Frame("<think>", "", "", "</think>", "\n"), after_empty="\n"),
        (*CALLS, BOTH),
    ),
    "reasoning between words": Case(
        template(
            "{% if m.reasoning_content %}Thinking: {{ m.reasoning_content }}{{ '\\nDone.\\n' }}{% endif %}"
            "{{ m.content }}"
        ),
        turn(reasoning=Frame("Thinking:", " ", "\n", "Done.", "\n"), after_empty="\n"),
        (SAID, THOUGHT),
    ),
    "reasoning closed by a word": Case(
        template("{% if m.reasoning_content %}<think>{{ m.reasoning_content }} # {% endif %}{{ m.content }}"),
        turn(reasoning=Frame("<think>", "", " ", "#", " "), after_empty=" "),
        (SAID, THOUGHT),
    ),
    "reasoning that nothing opens": Case(
        template("{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"),
        turn(
            None,
            "nothing opens the reasoning, so that it is not to be told from content",
            NO_CALLS,
        ),
    ),
    "reasoning that nothing closes": Case(
        template("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{{ '\\n' }}{% endif %}{{ m.content }}"),
        turn(None, "nothing that could be looked for closes the reasoning", NO_CALLS),
    ),
    "several messages in a turn": Case(
        template(
            "{% if m.reasoning_content %} to=self<|sep|>{{ m.reasoning_content }}<|done|><|a|>{% endif %}"
            " to=user<|sep|>{{ m.content }}"
        ),
        turn(None, SEVERAL_MESSAGES),
        (),
    ),
    # calls: JSON
    "an object": Case(template(called("<call>" + OBJECT + "</call>")), turn(TAGGED), CALLS),
    "an object in an object": Case(
        template(called('<call>{"type": "function", "function": ' + OBJECT + "}</call>")),
        turn(replace(TAGGED, keys=(("name", ("function", "name")), ("arguments", ("function", "arguments"))))),
        CALLS,
    ),
    "the call as it was given": Case(
        template(called("<call>{{ c | tojson }}</call>")),
        turn(
            replace(
                TAGGED,
                keys=(("id", ("id",)), ("name", ("function", "name")), ("arguments", ("function", "arguments"))),
            )
        ),
        CALLS,
    ),
    "arguments before the name": Case(
        template(called('<call>{"parameters": ' + ARGUMENTS + ', "tool": {{ f.name | tojson }}}</call>')),
        turn(replace(TAGGED, keys=(("arguments", ("parameters",)), ("name", ("tool",))))),
        CALLS,
    ),
    "the name as the only key": Case(
        template(called('<call>{"{{ f.name }}": ' + ARGUMENTS + "}</call>")),
        turn(json_call(open="<call>", close="</call>", keys=(), named_key=True)),
        CALLS,
    ),
    "arguments as JSON in a string": Case(
        template(
            called('<call>{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson | tojson }}}</call>')
        ),
        turn(TAGGED),
        CALLS,
    ),
    "arguments given as JSON text only": Case(
        template(called(AS_TEXT + "<|call|>{{ f.name }}<|args|>{{ f.arguments }}<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS, open="<|call|>", head=(("", "name"),), begin="<|args|>", close="<|done|>"
            )
        ),
        CALLS,
    ),
    "escaped JSON": Case(
        template(called("<call>" + OBJECT.replace("tojson }}}", "tojson(ensure_ascii=True) }}}") + "</call>")),
        turn(replace(TAGGED, ascii=True)),
        CALLS,
    ),
    # calls: fields before arguments
    "an id before the name": Case(
        template(called("<|call|>{{ c.id }}<|sep|>{{ f.name }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open="<|call|>",
                head=(("", "id"), ("<|sep|>", "name")),
                begin="<|args|>",
                close="<|done|>",
            )
        ),
        CALLS,
    ),
    "an id after the name": Case(
        template(called('<call name="{{ f.name }}" id="{{ c.id }}">' + ARGUMENTS + "</call>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open='<call name="',
                head=(("", "name"), ('" id="', "id")),
                begin='">',
                close="</call>",
            )
        ),
        CALLS,
    ),
    "an id made of name and number": Case(
        template(called("<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open="<|call|>",
                head=(("", "id"),),
                begin="<|args|>",
                close="<|done|>",
                id_is_name=True,
            )
        ),
        CALLS,
    ),
    # calls: arguments one by one
    "compact tags": Case(
        template(called("<call>{{ f.name }}" + pairs("<k>{{ k }}</k><v>" + VALUE + "</v>") + "</call>")),
        turn(
            CallGrammar(
                Style.PAIRS,
                open="<call>",
                head=(("", "name"),),
                close="</call>",
                key_open="<k>",
                value_open="</k><v>",
                value_close="</v>",
            )
        ),
        CALLS,
    ),
    "tags that say the type": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs("<p name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">" + VALUE + "</p>")
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='" string="false">',
                string_open='" string="true">',
                value_close="</p>",
            )
        ),
        CALLS,
    ),
    "strings in CDATA": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs(
                    "<p name=\"{{ k }}\">{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}"
                    + VALUE
                    + "{% endif %}</p>"
                )
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                strings=Value.CDATA,
            )
        ),
        CALLS,
    ),
    "strings as JSON": Case(
        template(
            called('<call name="{{ f.name }}">' + pairs('<p name="{{ k }}">{{ v | tojson }}</p>') + "</call>")
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                strings=Value.JSON,
            )
        ),
        (SAID,),
    ),
    "True and False": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs('<p name="{{ k }}">{{ v if v is string or v is boolean else v | tojson }}</p>')
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                others=Value.PYTHON,
            )
        ),
        CALLS,
    ),
    "tags named after the keys": Case(
        TREE + template(called('<|x|><call name="{{ f.name }}">{{ tree(f.arguments) }}<|x|></call>')),
        turn(
            CallGrammar(
                Style.TREE,
                open='<|x|><call name="',
                head=(("", "name"),),
                begin='">',
                close="<|x|></call>",
                key_open="<|x|><",
                value_open=">",
                value_close="<|x|></",
                item="item",
            )
        ),
        CALLS,
    ),
    "Python calls": Case(
        template(called(PYTHON, "<|calls|>[", "]<|done|>")),
        turn(
            CallGrammar(Style.PYTHON, section_open="<|calls|>[", section_close="]<|done|>", separator=", ")
        ),
        CALLS,
    ),
    "Python calls with nothing around them": Case(
        template(called(PYTHON, "[", "]")),
        turn(CallGrammar(Style.PYTHON, section_open="[", section_close="]", separator=", "), BARE_CALLS),
        (SAID, CALLED, assistant("", LOOK, STOP)),
    ),
    "braces with quotes of their own": Case(
        BRACES + template(called("<|call|>call:{{ f.name }}{{ braces(f.arguments) }}<|done|>")),
        turn(
            CallGrammar(
                Style.BRACES, open="<|call|>call:", head=(("", "name"),), begin="{", close="<|done|>", quote="<|q|>"
            )
        ),
        CALLS,
    ),
    # what stands around calls
    "a section": Case(
        template(called("<call>" + OBJECT + "</call>", "{{ '\\n' }}<calls>{{ '\\n' }}", "{{ '\\n' }}</calls>")),
        turn(replace(TAGGED, before="\n", section_open="<calls>\n", section_close="\n</calls>")),
        CALLS,
    ),
    "a section that is a list": Case(
        template(called(OBJECT + COMMA, "<|calls|>[", "]")),
        turn(json_call(section_open="<|calls|>[", section_close="]", separator=", ")),
        CALLS,
    ),
    "a separator of letters": Case(
        template(called("<call>" + OBJECT + "</call>{{ '' if loop.last else '; ' }}")),
        turn(replace(TAGGED, separator="; ")),
        CALLS,
    ),
    "white space everywhere": Case(
        template(
            called(
                "{{ '\\n' }}<call>{{ '\\n' }}" + OBJECT + "{{ '\\n' }}</call>{{ '' if loop.last else '\\n' }}",
                after="{{ '\\n' }}",
            )
        ),
        turn(json_call(before="\n", open="<call>\n", close="\n</call>", separator="\n\n", after="\n")),
        CALLS,
    ),
    "no closing delimiter": Case(
        template(called("<|call|>{{ f.name }}<|args|>" + ARGUMENTS)),
        turn(CallGrammar(Style.JSON_ARGUMENTS, open="<|call|>", head=(("", "name"),), begin="<|args|>")),
        CALLS,
    ),
    "no delimiter at all": Case(
        template("{% if m.tool_calls %}" + EACH + OBJECT + "{% endfor %}{% else %}{{ m.content }}{% endif %}"),
        turn(json_call(), NOT_BESIDE),
        (SAID, CALLED),
    ),
    "one call a turn": Case(
        template(
            "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, ONE_CALL),
        (SAID, CALLED, BESIDE),
    ),
    "calls or content": Case(
        template(
            "{% if m.tool_calls and m.content %}{{ raise_exception('either or') }}{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, NOT_BESIDE),
        (SAID, CALLED, assistant("", LOOK, STOP)),
    ),
    "content after calls": Case(
        template("{% if m.tool_calls %}" + EACH + "<call>" + OBJECT + "</call>{% endfor %}{% endif %}{{ m.content }}"),
        turn(TAGGED, NOT_BESIDE),
        CALLS,
    ),
    "one call is not closed as two are": Case(
        template(
            called(
                "<call>" + OBJECT + "</call>", "<calls>", "{% if m.tool_calls | length > 1 %}</calls>{% endif %}"
            )
        ),
        turn(
            replace(TAGGED, section_open="<calls>", section_close="</calls>"),
            "the template disagrees with itself: one call ends with '</call>', the last of two with '</call></calls>'",
        ),
        CALLS,
    ),
    "calls that cannot be taken apart": Case(
        template(called("<call>{{ f.name }}</call>")),
        turn(None, "calls were not understood: where the arguments stand is not to be seen; choose a tool_parser"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_derivation_finds_out(name: str) -> None:
    found = made_up_renderer(CASES[name].source, *CONTROLS).grammar()
    notes = tuple(note for note in found.notes if MISREAD not in note)
    assert found.replace(notes=notes) == CASES[name].grammar


def test_a_grammar_that_does_not_read_its_template_back_says_so() -> None:
    notes = {name: made_up_renderer(case.source, *CONTROLS).grammar().notes for name, case in CASES.items()}
    assert {name for name, said in notes.items() if any(MISREAD in note for note in said)} == {
        "reasoning that the prompt opens and the turn closes",  # its own past turns do not show the opening
        "reasoning that nothing opens",
        "reasoning that nothing closes",
        "several messages in a turn",
        "Python calls with nothing around them",
        "calls that cannot be taken apart",
    }
    said = notes["Python calls with nothing around them"][-1]
    assert said == f"{MISREAD}: content of an answer and a call, calls of an answer and a call"


def completion(renderer: Renderer, message: Message) -> tuple[list[int], list[int]]:
    """The prompt and the completion that say a message."""
    rendered = renderer.render([user("Hi."), message])
    said = rendered.turns[-1]
    return rendered.token_ids[: said.start], rendered.token_ids[said.start : said.stop]


def summary(response: ParsedResponse) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    calls = [(parsed.name, parsed.arguments, parsed.status) for parsed in response.tool_calls]
    return response.reasoning_content or "", response.content, calls


def meant(message: Message) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    """What a parser has to say of a message."""
    functions = [one["function"] for one in message.get("tool_calls", [])]
    calls: list[Any] = [(one["name"], one["arguments"], CallStatus.OK) for one in functions]
    return message.get("reasoning_content", ""), message["content"], calls


def as_text(message: Message) -> Message:
    """The same message with arguments as JSON text."""
    calls = [
        one | {"function": one["function"] | {"arguments": json.dumps(one["function"]["arguments"])}}
        for one in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls} if calls else message


@pytest.mark.parametrize("name", CASES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    case = CASES[name]
    renderer = made_up_renderer(case.source, *CONTROLS, **dict(case.variables))
    for message in case.says:
        given = as_text(message) if AS_TEXT in case.source else message
        prompt, ids = completion(renderer, given)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        assert summary(response) == meant(message)
        assert (response.finish, response.open) == (Finish.STOP, None)


@pytest.mark.parametrize("name", CASES)
def test_every_cut_of_what_a_template_writes_streams_to_the_same(name: str) -> None:
    case = CASES[name]
    renderer = made_up_renderer(case.source, *CONTROLS, **dict(case.variables))
    for message in case.says:
        prompt, ids = completion(renderer, as_text(message) if AS_TEXT in case.source else message)
        for stop in range(0, len(ids) + 1, 7):
            whole = renderer.parse_response(ids[:stop], prompt_ids=prompt)
            parser = renderer.streaming_parser(prompt_ids=prompt)
            events = [event for index in ids[:stop] for event in parser.feed([index])] + parser.finish()
            assert parser.response == whole
            assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == whole.content
            told = [event for event in events if isinstance(event, ArgumentsDelta)]
            for made in whole.tool_calls:
                text = "".join(event.text for event in told if event.index == made.index)
                assert made.name is None or text == made.arguments_text


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("an object", [None, None]),
        ("the call as it was given", ["call00001", "call00002"]),
        ("an id before the name", ["call00001", "call00002"]),
        ("an id after the name", ["call00001", "call00002"]),
        ("an id made of name and number", ["functions.look_up:0", "functions.stop:1"]),
    ],
)
def test_ids_are_read_where_the_template_writes_them(name: str, ids: list[str | None]) -> None:
    renderer = made_up_renderer(CASES[name].source, *CONTROLS)
    response = renderer.parse_response(completion(renderer, TWICE)[1])
    assert [parsed.id for parsed in response.tool_calls] == ids


@pytest.mark.parametrize(
    ("name", "written", "reasoning", "content"),
    [
        ("reasoning that only the prompt opens", "Well.</think>Hello.", "Well.", "Hello."),
        ("reasoning that the prompt opens and the turn closes", "Well.</think>Hello.", "Well.", "Hello."),
        ("reasoning that nothing opens", "Well.</think>Hello.", None, "Well.</think>Hello."),
        ("several messages in a turn", " to=user<|sep|>Hello.", None, " to=user<|sep|>Hello."),
    ],
)
def test_completions_that_the_template_itself_would_not_show(
    name: str, written: str, reasoning: str | None, content: str
) -> None:
    renderer = made_up_renderer(CASES[name].source, *CONTROLS)
    response = renderer.parse_response(renderer.tokenizer.encode(written + "<|end|>"))
    assert (response.reasoning_content, response.content) == (reasoning, content)
    assert response.finish is Finish.STOP


def test_content_hides_calls_that_nothing_sets_off() -> None:
    """What the note of that grammar says."""
    renderer = made_up_renderer(CASES["Python calls with nothing around them"].source, *CONTROLS)
    response = renderer.parse_response(completion(renderer, BESIDE)[1])
    assert response.tool_calls == []
    assert response.content.startswith("Hello.[look_up(")


# -- templates of TRL

TRL_NOT_READ_BACK: Final = {
    "gptoss": "writes content beside calls as reasoning, and the first call only",
    "muse_glimmer": "several messages a turn, which is not understood, and said so",
    "llama3_1": "writes one call a turn, and no content beside it",
    "llama3_2": "writes one call a turn, and no content beside it",
    "smolvlm": "takes content as a list only",
    "idefics3": "takes content as a list only",
    "llava_next": "takes content as a list only",
}
"""Templates (and those for training that go with them) that lose a part of the messages, or write what is not read."""

TRL_MESSAGES: Final = (SAID, THOUGHT, CALLED, BESIDE, TWICE, BOTH)


def trl_names() -> list[str]:
    return sorted(templates_of_trl())


def trl_renderer(name: str) -> Renderer:
    source = templates_of_trl()[name]
    tokenizer = Tokenizer(tokenizer_json_for(source), variables=dict(SPECIAL))
    return create_renderer(tokenizer, "default", chat_template=source)


def shown_by(renderer: Renderer, message: Message) -> Message | None:
    """What of a message stands in its turn, or None where the template refuses it."""
    try:
        rendered = renderer.render([user("Hi."), message])
    except TokentraceError:
        return None
    said = rendered.turns[-1]
    text = rendered.decode(slice(0, said.stop))
    shown = {key: value for key, value in message.items() if key != "reasoning_content" or value in text}
    calls = [one for one in message.get("tool_calls", []) if one["function"]["name"] in text]
    content = message["content"] if message["content"] in text else ""
    return {**shown, "content": content, "tool_calls": calls}


def losses(renderer: Renderer) -> Iterator[str]:
    """Where a rendered message is not what is read back."""
    for message in TRL_MESSAGES:
        given, shown = message, shown_by(renderer, message)
        if shown is None:
            given, shown = as_text(message), shown_by(renderer, as_text(message))
        if shown is None or shown["content"] != message["content"]:
            yield "refused"
            continue
        if len(shown["tool_calls"]) not in (0, len(message.get("tool_calls", []))):
            yield "calls are lost"
        prompt, ids = completion(renderer, given)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        expected = meant(shown | {"tool_calls": message.get("tool_calls", []) if shown["tool_calls"] else []})
        if summary(response) != expected:
            yield f"{summary(response)} != {expected}"


def test_every_template_of_trl_is_read_back_or_listed() -> None:
    found = {name: list(losses(trl_renderer(name))) for name in trl_names()}
    lossy = {name: problems for name, problems in found.items() if problems}
    listed = {name for name in found if re.sub("_training$", "", name) in TRL_NOT_READ_BACK}
    assert set(lossy) == listed, {name: lossy.get(name) for name in set(lossy) ^ listed}


def test_templates_for_training_write_as_those_they_are_made_of() -> None:
    names = trl_names()
    twins = [(name, f"{name}_training") for name in names if f"{name}_training" in names]
    assert len(twins) > 10
    for name, twin in twins:
        assert trl_renderer(name).grammar() == trl_renderer(twin).grammar(), name
