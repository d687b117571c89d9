"""Dialects: that those written by hand read what the derived ones read, and how one is chosen."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import Message, assistant, call, tool, user
from tests.formats.small import made_up_renderer, small_renderer
from tests.support import FULL
from tokentrace import Renderer, TokentraceError
from tokentrace.formats.dialects import DIALECTS, REASONING, Dialect, dialect_of
from tokentrace.formats.grammar import Frame, TurnGrammar
from tokentrace.parsing.compiled import Compiled
from tokentrace.parsing.marked import MarkedBytes
from tokentrace.parsing.parser import parse
from tokentrace.parsing.response import CallStatus, ParsedResponse
from tokentrace.parsing.values import Tools

EXAMPLES: Final = 30 if FULL else 12
QUIET: Final[dict[str, Any]] = {"deadline": None, "suppress_health_check": list(HealthCheck)}
WITH_DIALECT: Final = [family for family in FAMILIES if family != "gemma-3"]
"""Families whose calls are written in a dialect: all but the one whose template has none."""

TOOLS: Final = [
    tool(
        "look_up",
        "Looks up.",
        {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": "object", "properties": {"tags": {"type": "array"}}},
        },
        ["place"],
    ),
    tool("stop", "Stops.", {}, []),
]

# -- by hand and derived


@cache
def renderer(family: str) -> Renderer:
    """The family's renderer, with nobody trusted: text that spells a control token stays text."""
    return small_renderer(family, trusted=[])


@cache
def compiled(family: str) -> tuple[Compiled, Compiled]:
    """The derived grammar, and the same with the dialect as it is written by hand.

    White space around and between calls is the template's, so the dialect takes it over; and that between two control
    tokens of one delimiter, which are looked for as one where the template writes none. Nothing else.
    """
    made = renderer(family)
    grammar = made.grammar()
    name = dialect_of(grammar.calls, grammar.channels)
    assert name is not None
    dialect = DIALECTS[name]
    if dialect.calls is not None and grammar.calls is not None:
        own = grammar.calls
        by_hand = replace(dialect.calls, before=own.before, after=own.after)
        if not (own.separator.strip() or by_hand.separator.strip()):
            by_hand = replace(by_hand, separator=own.separator)
        if "".join(own.value_open.split()) == "".join(by_hand.value_open.split()):
            by_hand = replace(by_hand, value_open=own.value_open)
        other = grammar.replace(calls=by_hand)
    else:
        other = grammar.replace(channels=dialect.channels)
    stops = made.get_stop_token_ids()
    marked = MarkedBytes(made.tokenizer.vocabulary)
    return Compiled(grammar, marked, stops), Compiled(other, marked, stops)


def texts_of(grammar: TurnGrammar) -> list[str]:
    """What a grammar is made of."""
    found: list[str] = [grammar.head]
    for part in (grammar.reasoning, grammar.content, grammar.calls, grammar.channels):
        for field in fields(part) if part is not None else ():
            value = getattr(part, field.name)
            if type(value) is str:
                found.append(value)
            elif field.name == "head":
                found += itertools.chain.from_iterable(value)
    return sorted({text for text in found if text})


@cache
def pieces(family: str) -> list[list[int]]:
    """Delimiters, as tokens and spelled out, stop tokens, and words."""
    made = renderer(family)
    grammar = made.grammar()
    delimiters = texts_of(grammar)
    words = ["look_up", "place", "days", "é🙂", " ", "\n", "\n\n", "{", "}", '"', ":", ",", '{"place": "Rome"}', "7"]
    encoded = [made.tokenizer.encode(text).tolist() for text in (*delimiters, *words)]
    spelled = [made.tokenizer.encode_plain(text).tolist() for text in delimiters]
    return [*encoded, *spelled, *([stop] for stop in made.get_stop_token_ids())]


@cache
def texts(family: str) -> st.SearchStrategy[str]:
    words = ["Hello", " ", "\n", "日本語", "🙂", "e\u0301", '"', "\\", "<", ">", "{", "}", "[", "]", "true", "12"]
    piece = st.sampled_from(words) | st.sampled_from(texts_of(renderer(family).grammar())) | st.text(max_size=3)
    encodable = piece.filter(lambda text: text.encode("utf-8", "replace").decode() == text)
    return st.lists(encodable, max_size=4).map("".join)


@st.composite
def messages(draw: st.DrawFn, family: str) -> Message:
    """What an assistant may have said."""
    text = texts(family)
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | text,
        lambda some: st.lists(some, max_size=2) | st.dictionaries(st.sampled_from(["a", "é", "x y"]), some, max_size=2),
        max_leaves=4,
    )
    some = st.dictionaries(st.sampled_from(["place", "days", "where", "other"]), text | value, max_size=3)
    calls = []
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["look_up", "stop", "unheard_of"]))
        calls.append(call(name, draw(some), f"functions.{name}:{index}"))
    return assistant(draw(text), *calls, reasoning=draw(st.none() | text))


def completion(made: Renderer, message: Message) -> tuple[list[int], list[int]]:
    """The prompt and the completion that say a message, or as much of it as the template agrees to write."""
    calls = message.get("tool_calls") or []
    short = [one | {"id": f"call0000{index}"} for index, one in enumerate(calls)]
    as_text = [one | {"function": one["function"] | {"arguments": json.dumps(arguments(one))}} for one in calls]
    kinds: Sequence[Any] = [calls, short, as_text, calls[:1], as_text[:1], []]
    for some, content in itertools.product(kinds, (message["content"], None, "x")):
        said = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}
        try:
            rendered = made.render([user("Hi."), said | {"tool_calls": some} if some else said])
        except TokentraceError:
            continue
        turn = rendered.turns[-1]
        if all(one["function"]["name"] in rendered.decode(slice(turn.start, turn.stop)) for one in some):
            return rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]
    raise AssertionError("the template renders no answer")


def arguments(one: dict[str, Any]) -> Any:
    return one["function"]["arguments"]


@st.composite
def mutated(draw: st.DrawFn, family: str, ids: list[int]) -> list[int]:
    """A completion with something wrong: cut off, pieces lost, doubled, or put in."""
    out = list(ids)
    for kind in draw(st.lists(st.sampled_from(["cut", "drop", "double", "put"]), max_size=3)):
        first, stop = sorted((draw(st.integers(0, len(out))), draw(st.integers(0, len(out)))))
        if kind == "cut":
            out = out[:stop]
        elif kind == "drop":
            out = out[:first] + out[min(stop, first + 9) :]
        elif kind == "double":
            out = out[:stop] + out[first:]
        else:
            out[stop:stop] = draw(st.sampled_from(pieces(family)))
    return out


@pytest.mark.parametrize("family", WITH_DIALECT)
def test_a_dialect_by_hand_reads_what_the_derived_grammar_reads(family: str) -> None:
    derived, by_hand = compiled(family)
    seen: set[CallStatus] = set()

    def agree(ids: list[int], tools: Any, prompt: list[int] | None) -> None:
        asked = None if prompt is None else derived.prompt_bytes(prompt)
        one, other = (parse(some, ids, Tools(tools), asked) for some in (derived, by_hand))
        assert one == other
        seen.update(parsed.status for parsed in one.tool_calls)

    @settings(max_examples=EXAMPLES, **QUIET)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        tools = data.draw(st.sampled_from([None, TOOLS]))
        prompt, ids = completion(renderer(family), data.draw(messages(family)))
        agree(ids, tools, prompt)
        agree(data.draw(mutated(family, ids)), tools, data.draw(st.sampled_from([None, prompt])))
        loose = data.draw(st.lists(st.sampled_from(pieces(family)), max_size=25))
        agree([index for piece in loose for index in piece], tools, None)

    law()
    agree(completion(renderer(family), assistant("", call("look_up", {"place": "Rome"}, "call00001")))[1], None, None)
    assert CallStatus.OK in seen


# -- names


# -- choosing one

CALL_TEXT: Final = 'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"place": "Rome"}}\n</tool_call>'
PLAIN: Final = (
    "{% for m in messages %}<|{{ 'a' if m.role == 'assistant' else 'u' }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


def plain(**parsers: Any) -> Renderer:
    """A renderer for a template that shows neither reasoning nor calls."""
    return made_up_renderer(PLAIN, "<|a|>", "<|u|>", "<|end|>", **parsers)


def read(made: Renderer, text: str) -> ParsedResponse:
    """A completion that is written so and then stops; control tokens are written by name."""
    return made.parse_response([*made.tokenizer.encode(text).tolist(), made.get_stop_token_ids()[0]])


def called(response: ParsedResponse) -> list[tuple[str | None, Any, CallStatus]]:
    return [(parsed.name, parsed.arguments, parsed.status) for parsed in response.tool_calls]


LOOKED: Final = [("look_up", {"place": "Rome"}, CallStatus.OK)]


@pytest.mark.parametrize(
    "parser",
    ["hermes", "qwen25", DIALECTS["hermes"], DIALECTS["hermes"].calls, Dialect("mine", DIALECTS["hermes"].calls)],
    ids=["name", "server's name", "dialect", "calls", "own dialect"],
)
def test_a_dialect_is_chosen_by_name_or_by_itself(parser: Any) -> None:
    made = plain(tool_parser=parser)
    assert made.grammar().calls == DIALECTS["hermes"].calls
    assert called(read(made, CALL_TEXT)) == LOOKED


@pytest.mark.parametrize("parser", ["think", "deepseek_r1", Frame("<think>", close="</think>")])
def test_a_template_without_reasoning_can_be_given_some(parser: Any) -> None:
    said = "<think>Hm.</think>Hello."
    assert read(plain(), said).content == said
    made = plain(reasoning_parser=parser)
    assert made.grammar() == plain().grammar().replace(reasoning=REASONING["think"])
    response = read(made, said)
    assert (response.reasoning_content, response.content) == ("Hm.", "Hello.")


def test_reasoning_that_the_prompt_opens_is_read_with_a_given_parser() -> None:
    made = made_up_renderer(
        PLAIN.replace("<|a|>{% endif %}", "<|a|>[THINK]{% endif %}"),
        *("<|a|>", "<|u|>", "<|end|>", "[THINK]", "[/THINK]"),
        reasoning_parser="brackets",
    )
    assert made.grammar().opens_reasoning
    response = read(made, "Hm.[/THINK]Hello.")
    assert (response.reasoning_content, response.content) == ("Hm.", "Hello.")


@pytest.mark.parametrize(
    ("family", "tool_parser", "reasoning_parser"),
    [("qwen3", "hermes", "qwen3"), ("glm-4.7", "glm47", "glm45"), ("nemotron-3-nano", "qwen3_coder", "nemotron_v3")],
)
def test_the_template_knows_its_own_white_space_better(family: str, tool_parser: str, reasoning_parser: str) -> None:
    chosen = small_renderer(family, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    assert chosen.grammar() == small_renderer(family).grammar()
