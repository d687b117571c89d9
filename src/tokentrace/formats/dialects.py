"""Dialects: ways of writing tool calls and reasoning, by name."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, RendererError, brief
from ..settings import instance, items
from .grammar import NO_CALLS, ONE_CALL, CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from .writing import write_calls, write_messages


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way of writing tool calls. `served_as` are its names in inference servers."""

    name: str
    calls: CallGrammar | None = None
    channels: Channels | None = None
    served_as: tuple[str, ...] = ()

    def format(self, calls: Sequence[Mapping[str, Any]], *, content: str = "") -> str:
        """Calls (``{"name": …, "arguments": {…}}``, with an ``id`` if the dialect writes one) after content.

        Raises InputError naming a call that lacks a field.
        """
        instance("content", content, str, InputError)
        checked = items("calls", calls, InputError)
        try:
            if self.calls is None:
                assert self.channels is not None
                return write_messages(self.channels, checked, content)
            return content + write_calls(self.calls, checked, beside=bool(content))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"cannot be written: {error}", field="tool_calls") from None


_NAME_AND_ARGUMENTS = (("name", ("name",)), ("arguments", ("arguments",)))
_DEEPSEEK = CallGrammar(
    Style.JSON_ARGUMENTS,
    section_open="<｜tool▁calls▁begin｜>", section_close="<｜tool▁calls▁end｜>",
    open="<｜tool▁call▁begin｜>", head=(("", "name"),), begin="<｜tool▁sep｜>", close="<｜tool▁call▁end｜>",
)  # fmt: skip
_DSML = CallGrammar(
    Style.PAIRS, before="\n\n", separator="\n",
    section_open="<｜DSML｜function_calls>\n", section_close="\n</｜DSML｜function_calls>",
    open='<｜DSML｜invoke name="', head=(("", "name"),), begin='">\n', close="</｜DSML｜invoke>",
    key_open='<｜DSML｜parameter name="', value_open='" string="false">', string_open='" string="true">',
    value_close="</｜DSML｜parameter>\n",
)  # fmt: skip

_DIALECTS = (
    Dialect("hermes", CallGrammar(
        Style.JSON_CALL, before="\n", separator="\n",
        open="<tool_call>\n", keys=_NAME_AND_ARGUMENTS, close="\n</tool_call>",
    ), served_as=("qwen", "qwen25")),
    Dialect("qwen-xml", CallGrammar(
        Style.PAIRS, before="\n\n", separator="\n", others=Value.PYTHON,
        open="<tool_call>\n", head=(("<function=", "name"),), begin=">\n", end="</function>\n",
        close="</tool_call>", key_open="<parameter=", value_open=">\n", value_close="\n</parameter>\n",
    ), served_as=("qwen3_coder", "qwen3_xml", "qwen3coder")),
    Dialect("glm-xml", CallGrammar(
        Style.PAIRS, before="\n", separator="\n",
        open="<tool_call>", head=(("", "name"),), begin="\n", close="</tool_call>",
        key_open="<arg_key>", value_open="</arg_key>\n<arg_value>", value_close="</arg_value>\n",
    ), served_as=("glm45", "glm47", "glm")),
    Dialect("minimax-xml", CallGrammar(
        Style.PAIRS, before="\n", separator="\n",
        section_open="<minimax:tool_call>\n", section_close="\n</minimax:tool_call>",
        open='<invoke name="', head=(("", "name"),), begin='">\n', close="</invoke>",
        key_open='<parameter name="', value_open='">', value_close="</parameter>\n",
    ), served_as=("minimax_m2", "minimax-m2")),
    Dialect("minimax-tree", CallGrammar(
        Style.TREE, separator="\n", item="item",
        section_open="]<]minimax[>[<tool_call>\n", section_close="\n]<]minimax[>[</tool_call>",
        open=']<]minimax[>[<invoke name="', head=(("", "name"),), begin='">', close="]<]minimax[>[</invoke>",
        key_open="]<]minimax[>[<", value_open=">", value_close="]<]minimax[>[</",
    ), served_as=("minimax_m3", "minimax-m3")),
    Dialect("deepseek", dataclasses.replace(
        _DEEPSEEK, separator="\n", head=(("function<｜tool▁sep｜>", "name"),), begin="\n```json\n", end="\n```",
    ), served_as=("deepseek_v3", "deepseekv3")),
    Dialect("deepseek-v3.1", _DEEPSEEK, served_as=("deepseek_v31", "deepseekv31")),
    Dialect("dsml", _DSML, served_as=("deepseek_v32", "deepseekv32")),
    Dialect("dsml-v4", dataclasses.replace(
        _DSML, section_open="<｜DSML｜tool_calls>\n", section_close="\n</｜DSML｜tool_calls>",
    ), served_as=("deepseek_v4", "deepseekv4")),
    Dialect("kimi", CallGrammar(
        Style.JSON_ARGUMENTS, id_is_name=True, open="<|tool_call_begin|>", close="<|tool_call_end|>",
        section_open="<|tool_calls_section_begin|>", section_close="<|tool_calls_section_end|>",
        head=(("", "id"),), begin="<|tool_call_argument_begin|>",
    ), served_as=("kimi_k2",)),
    Dialect("harmony", channels=Channels(), served_as=("openai", "gpt-oss", "gpt_oss")),
    Dialect("llama-json", CallGrammar(
        Style.JSON_CALL, separator="; ", keys=(("name", ("name",)), ("arguments", ("parameters",))),
    ), served_as=("llama3_json", "llama4_json", "llama3")),
    Dialect("mistral", CallGrammar(
        Style.JSON_CALL, separator=", ", section_open="[TOOL_CALLS][", section_close="]",
        keys=(*_NAME_AND_ARGUMENTS, ("id", ("id",))),
    )),
    Dialect("mistral-args", CallGrammar(
        Style.JSON_ARGUMENTS, open="[TOOL_CALLS]", head=(("", "name"),), begin="[ARGS]",
    )),
    Dialect("functools", CallGrammar(
        Style.JSON_CALL, section_open="functools[", section_close="]", separator=", ", keys=_NAME_AND_ARGUMENTS,
    ), served_as=("phi4_mini_json",)),
    Dialect("pythonic", CallGrammar(
        Style.PYTHON, section_open="[", section_close="]", separator=", ", others=Value.PYTHON,
    ), served_as=("llama4_pythonic",)),
)  # fmt: skip

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in _DIALECTS}

REASONING: Mapping[str, Frame | None] = {
    "think": Frame("<think>", close="</think>"),
    "mm-think": Frame("<mm:think>", close="</mm:think>"),
    "seed-think": Frame("<seed:think>", close="</seed:think>"),
    "brackets": Frame("[THINK]", close="[/THINK]"),
    "none": None,
}

_THINKERS = ("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3")
_SERVED_AS = dict.fromkeys(_THINKERS, "think") | {"mistral": "brackets", "seed_oss": "seed-think"}
_BY_ANY_NAME = {**{name: dialect for dialect in _DIALECTS for name in dialect.served_as}, **DIALECTS}


def dialect_of(calls: CallGrammar | None, channels: Channels | None) -> str | None:
    """The name of the dialect that a grammar writes, ignoring white space."""
    for dialect in _DIALECTS:
        if calls is not None and dialect.calls is not None and _core(calls) == _core(dialect.calls):
            return dialect.name
        if channels is not None and channels == dialect.channels:
            return dialect.name
    return None


def _core(calls: CallGrammar) -> CallGrammar:
    texts = {one.name: getattr(calls, one.name) for one in dataclasses.fields(calls)}
    unspaced: dict[str, Any] = {
        name: "".join(text.split()) for name, text in texts.items() if type(text) is str
    }
    head = tuple(("".join(lead.split()), field) for lead, field in calls.head)
    ignored = {"before": "", "after": "", "separator": "", "others": Value.JSON, "ascii": False}
    return dataclasses.replace(calls, **(unspaced | ignored | {"head": head}))


def with_parsers(grammar: TurnGrammar, tool_parser: Any, reasoning_parser: Any) -> TurnGrammar:
    """A grammar with another dialect or other reasoning delimiters. Raises RendererError."""
    if reasoning_parser is not None:
        grammar = _with_reasoning(grammar, reasoning_parser)
    return grammar if tool_parser is None else _with_calls(grammar, tool_parser)


def _with_calls(grammar: TurnGrammar, parser: Any) -> TurnGrammar:
    if isinstance(parser, str):
        if parser not in _BY_ANY_NAME:
            names = ", ".join(sorted(_BY_ANY_NAME))
            raise RendererError(f"there is no tool parser {parser!r}; choose from {names}")
        parser = _BY_ANY_NAME[parser]
    if isinstance(parser, Dialect):
        parser = parser.calls or parser.channels
    notes = tuple(note for note in grammar.notes if note != NO_CALLS)
    if isinstance(parser, Channels):
        head = grammar.head or grammar.prompt
        return grammar.replace(channels=parser, calls=None, head=head, notes=notes)
    if not isinstance(parser, CallGrammar) or not isinstance(parser.style, Style):
        raise RendererError(
            f"tool_parser must be a name, a Dialect or a CallGrammar with a Style, not {brief(parser)}"
        )
    if lacking := _lacking(parser):
        raise RendererError(f"a CallGrammar of style {parser.style.value!r} needs {', '.join(lacking)}")
    current = grammar.calls
    if current is not None and _core(current) == _core(parser):
        one_call = ONE_CALL in grammar.notes
        parser = dataclasses.replace(current, separator=parser.separator) if one_call else current
    elif current is not None:
        parser = dataclasses.replace(parser, before=current.before, after=current.after)
    return grammar.replace(calls=parser, channels=None, notes=notes)


def _lacking(calls: CallGrammar) -> list[str]:
    fields = {field for field, _ in calls.keys} | {field for _, field in calls.head}
    named = "name" in fields or (calls.id_is_name and "id" in fields)
    parts: dict[str, Any] = {}
    if calls.style is Style.JSON_CALL:
        parts["a name among its keys"] = calls.named_key or named
        parts["arguments among its keys"] = calls.named_key or "arguments" in fields
    elif calls.style is not Style.PYTHON:
        parts |= {"a name in its head": named, "open or section_open": calls.open or calls.section_open}
    if calls.style is Style.BRACES:
        parts |= {"begin='{'": calls.begin.strip() == "{", "quote": calls.quote}
    if calls.style in (Style.PAIRS, Style.TREE):
        parts |= {part: getattr(calls, part).strip() for part in ("key_open", "value_open", "value_close")}
    return [part for part, value in parts.items() if not value]


def _with_reasoning(grammar: TurnGrammar, parser: Any) -> TurnGrammar:
    frame = parser
    if isinstance(parser, str):
        name = _SERVED_AS.get(parser, parser)
        if name not in REASONING:
            names = ", ".join(sorted({*REASONING, *_SERVED_AS}))
            raise RendererError(f"there is no reasoning parser {parser!r}; choose from {names}")
        frame = REASONING[name]
    if frame is None:
        return grammar.replace(reasoning=None)
    if not isinstance(frame, Frame):
        raise RendererError(f"reasoning_parser must be a name or a Frame, not {brief(parser)}")
    if {type(frame.open), type(frame.close)} != {str} or not (frame.open and frame.close):
        raise RendererError(f"a reasoning_parser needs open and close; {frame!r} lacks one of them")
    current = grammar.reasoning
    if current is not None and (current.open, current.close) == (frame.open, frame.close):
        return grammar
    head = grammar.head.partition(frame.open)[0]  # the prompt may open it
    return grammar.replace(reasoning=frame, after_empty=frame.after, head=head)
