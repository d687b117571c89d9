"""Ways of writing calls, by hand, and the parser that they are given to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conversations import user
from tests.parsing.test_streaming import check, renderer
from tokentrace import Renderer
from tokentrace.parsing.response import CallStatus, ParsedResponse, ParsedToolCall

OK, TRUNCATED, UNCLOSED = CallStatus.OK, CallStatus.TRUNCATED, CallStatus.UNCLOSED


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool(
        "write", code={"type": "string"}, path={"type": "string"}, count={"type": "integer"},
        flag={"type": "boolean"}, either={"anyOf": [{"type": "integer"}, {"type": "string"}]},
        maybe={"type": ["string", "null"]}, items={"type": "array"},
    ),
    tool("look", place={"type": "string"}),
]  # fmt: skip


class Plain(str):
    """Text in ordinary tokens, whatever it spells."""


# -- ways of writing calls


@dataclass(frozen=True)
class Form:
    """How a family writes calls: `begin` (with NAME), arguments, `end`; all of them between `open` and `close`."""

    begin: str
    end: str
    pair: str = ""
    """One argument, with KEY and VALUE; without it, arguments are one JSON."""
    open: str = ""
    close: str = ""
    between: str = ""

    def call(self, name: str, *arguments: str) -> str:
        return self.begin.replace("NAME", name) + "".join(arguments) + self.end

    def calls(self, *calls: str) -> str:
        return self.open + self.between.join(calls) + self.close

    def argument(self, key: str, value: str, kind: str = "true") -> str:
        return self.pair.replace("KEY", key).replace("KIND", kind).replace("VALUE", value)


FUNCTION = Form(
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    between="\n",
)
DSML = "<｜DSML｜"
M3 = "]<]minimax[>["
TAGGED = {
    "qwen3-coder": FUNCTION,
    "nemotron-3-nano": FUNCTION,
    "glm-4.5": Form(
        "<tool_call>NAME\n", "</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", between="\n"
    ),
    "minimax-m2": Form(
        '<invoke name="NAME">\n', "</invoke>\n", '<parameter name="KEY">VALUE</parameter>\n',
        "<minimax:tool_call>\n", "</minimax:tool_call>",
    ),
    "deepseek-v3.2": Form(
        f'{DSML}invoke name="NAME">\n',
        f"</{DSML[1:]}invoke>\n",
        f'{DSML}parameter name="KEY" string="KIND">VALUE</{DSML[1:]}parameter>\n',
        f"{DSML}function_calls>\n",
        f"</{DSML[1:]}function_calls>",
    ),
    "minimax-m3": Form(
        f'{M3}<invoke name="NAME">', f"{M3}</invoke>\n", f"{M3}<KEY>VALUE{M3}</KEY>", f"{M3}<tool_call>\n",
        f"{M3}</tool_call>",
    ),
}  # fmt: skip
"""Each argument between tags."""
OBJECTS = {
    "qwen3": Form('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n"),
    "mistral-nemo": Form('{"name": "NAME", "arguments": ', "}", open="[TOOL_CALLS][", close="]", between=", "),
    "llama-3.1": Form('{"name": "NAME", "parameters": ', "}"),
    "kimi-k2": Form(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>",
        open="<|tool_calls_section_begin|>", close="<|tool_calls_section_end|>",
    ),
    "deepseek-v3.1": Form(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", open="<｜tool▁calls▁begin｜>",
        close="<｜tool▁calls▁end｜>",
    ),
}  # fmt: skip
"""Arguments, or all of the call, as one JSON."""
FORMS = {**TAGGED, **OBJECTS}
BLOCKS = [name for name in FORMS if name != "llama-3.1"]
"""Those in which more than one call can be written, anywhere."""


def families(names: Any) -> Callable[..., Any]:
    return pytest.mark.parametrize("any_family", list(names), indirect=True)


tagged, objects, forms, blocks = families(TAGGED), families(OBJECTS), families(FORMS), families(BLOCKS)


def ids_of(made: Renderer, pieces: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        plain = isinstance(piece, Plain)
        ids += (made.tokenizer.encode_plain(piece) if plain else made.tokenizer.encode(piece)).tolist()
    return ids


def answered(made: Renderer) -> list[int]:
    """A prompt that opens an answer, with its reasoning over."""
    grammar = made.grammar()
    prompt = made.render([user("Hi.")], add_generation_prompt=True).token_ids
    if grammar.opens_reasoning:
        assert grammar.reasoning is not None
        rest = f"{grammar.reasoning.trail}{grammar.reasoning.close}{grammar.reasoning.after}"
        prompt += made.tokenizer.encode(rest).tolist()
    return prompt


def parse(family: str, *pieces: str, tools: Any = TOOLS, ends: bool = True, **given: Any) -> ParsedResponse:
    """An answer of these pieces, parsed whole and token by token; a stop token `ends` it."""
    made = renderer(family)
    ids = ids_of(made, pieces) + made.get_stop_token_ids()[:1] * ends
    return check(made, ids, [], **{"tools": tools, "prompt_ids": answered(made), **given})


def only(response: ParsedResponse) -> ParsedToolCall:
    assert len(response.tool_calls) == 1
    return response.tool_calls[0]


def one_call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A call of a tool, as the family writes it."""
    form = FORMS[family]
    if not form.pair:
        return form.call(name, json.dumps(arguments))
    written = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items())
    kinds = {key: "true" if isinstance(value, str) else "false" for key, value in arguments.items()}
    return form.call(name, *(form.argument(key, value, kinds[key]) for key, value in written))


def single(family: str, name: str, arguments: dict[str, Any]) -> str:
    return FORMS[family].calls(one_call(family, name, arguments))
