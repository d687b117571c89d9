"""Formats of calls, written by hand, and helpers that parse them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conversations import user
from tests.parsing.test_streaming import check, renderer_of
from tokentrace import Renderer
from tokentrace.parsing.response import ParsedResponse, ParsedToolCall


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


# -- formats of calls


@dataclass(frozen=True)
class Form:
    """How a family writes calls: `begin` (with NAME), arguments, `end`; all of them between `open` and `close`."""

    begin: str
    end: str
    pair: str = ""
    """One argument, with KEY and VALUE; if empty, the arguments are one JSON object."""
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
"""The arguments, or the whole call, as one JSON object."""
FORMS = {**TAGGED, **OBJECTS}
BLOCKS = [name for name in FORMS if name != "llama-3.1"]
"""Families in which several calls can be written, anywhere in a turn."""


def families(names: Any) -> Callable[..., Any]:
    return pytest.mark.parametrize("any_family", list(names), indirect=True)


def ids_of(renderer: Renderer, pieces: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        plain = isinstance(piece, Plain)
        ids += (renderer.tokenizer.encode_plain(piece) if plain else renderer.tokenizer.encode(piece)).tolist()
    return ids


def answered(renderer: Renderer) -> list[int]:
    """A prompt that opens an answer, with its reasoning closed."""
    grammar = renderer.grammar()
    prompt = renderer.render([user("Hi.")], add_generation_prompt=True).token_ids
    if grammar.opens_reasoning:
        assert grammar.reasoning is not None
        closing = f"{grammar.reasoning.trail}{grammar.reasoning.close}{grammar.reasoning.after}"
        prompt += renderer.tokenizer.encode(closing).tolist()
    return prompt


@dataclass(frozen=True)
class Way:
    """A family and its format of calls."""

    family: str

    @property
    def renderer(self) -> Renderer:
        return renderer_of(self.family)

    @property
    def form(self) -> Form:
        return FORMS[self.family]

    def ids(self, *pieces: str) -> list[int]:
        return ids_of(self.renderer, pieces)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """A call of a tool, as the family writes it."""
        if not self.form.pair:
            return self.form.call(name, json.dumps(arguments))
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        kinds = {key: "true" if isinstance(value, str) else "false" for key, value in arguments.items()}
        return self.form.call(name, *(self.form.argument(key, texts[key], kinds[key]) for key in arguments))

    def single(self, name: str, arguments: dict[str, Any]) -> str:
        return self.form.calls(self.call(name, arguments))

    def write_call(self, text: str, kind: str = "false", key: str = "items") -> str:
        """A call of `write` with one argument, whose value is this text as it is."""
        argument = self.form.argument(key, text, kind) if self.form.pair else f'{{"{key}": {text}}}'
        return self.form.calls(self.form.call("write", argument))

    def check(self, ids: list[int], **options: Any) -> ParsedResponse:
        """Parse ids whole and token by token."""
        return check(self.renderer, ids, [], **{"tools": TOOLS, "prompt_ids": answered(self.renderer), **options})

    def parse(self, *pieces: str, ends: bool = True, **options: Any) -> ParsedResponse:
        """Parse an answer made of these pieces; a stop token follows if it `ends`."""
        return self.check(self.ids(*pieces) + self.renderer.get_stop_token_ids()[:1] * ends, **options)

    def read(self, *pieces: str, **options: Any) -> ParsedToolCall:
        """Parse these pieces, which have one call, and return the call."""
        [call] = self.parse(*pieces, **options).tool_calls
        return call
