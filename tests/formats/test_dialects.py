"""Dialects written by hand read what derived grammars read; and how a dialect is chosen."""

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import assistant, call
from tests.formats.small import made_up_renderer, small_renderer
from tests.parsing.test_robustness import delimiter_ids
from tests.parsing.test_streaming import QUIET, TOOLS, completion, messages, mutated, renderer_of
from tests.support import FULL, per_family
from tokentrace import Renderer
from tokentrace.formats.dialects import DIALECTS, REASONING, Dialect, dialect_of
from tokentrace.formats.grammar import Frame
from tokentrace.parsing.compiled import Compiled
from tokentrace.parsing.marked import MarkedBytes
from tokentrace.parsing.parser import StreamingParser
from tokentrace.parsing.response import CallStatus, ParsedResponse
from tokentrace.values.schema import Tools

EXAMPLES: Final = 30 if FULL else 12
WITH_DIALECT: Final = [family for family in FAMILIES if family != "gemma-3"]
"""Families whose calls are written in a dialect: all but the one whose template has none."""

# -- by hand and derived


@per_family
def compiled(family: str) -> tuple[Compiled, Compiled]:
    """The derived grammar, and the same grammar with the calls or channels of its dialect.

    The dialect takes over nothing but white space of the template: around and between calls, and between two control
    tokens of one delimiter, which are matched as one if the template writes none between them.
    """
    renderer = renderer_of(family)
    grammar = renderer.grammar()
    name = dialect_of(grammar.calls, grammar.channels)
    assert name is not None
    dialect = DIALECTS[name]
    if dialect.calls is not None and grammar.calls is not None:
        calls = grammar.calls
        by_hand = replace(dialect.calls, before=calls.before, after=calls.after)
        if not (calls.separator.strip() or by_hand.separator.strip()):
            by_hand = replace(by_hand, separator=calls.separator)
        if "".join(calls.value_open.split()) == "".join(by_hand.value_open.split()):
            by_hand = replace(by_hand, value_open=calls.value_open)
        other = grammar.replace(calls=by_hand)
    else:
        other = grammar.replace(channels=dialect.channels)
    stops = renderer.get_stop_token_ids()
    marked = MarkedBytes(renderer.tokenizer.vocabulary)
    return Compiled(grammar, marked, stops), Compiled(other, marked, stops)


@pytest.mark.parametrize("any_family", WITH_DIALECT, indirect=True)
def test_a_dialect_by_hand_reads_what_the_derived_grammar_reads(any_family: str) -> None:
    derived, by_hand = compiled(any_family)
    seen: set[CallStatus] = set()

    def agree(ids: list[int], tools: Any, prompt: list[int] | None) -> None:
        prompt_bytes = None if prompt is None else derived.prompt_bytes(prompt)
        parsers = [StreamingParser(some, Tools(tools), prompt_bytes) for some in (derived, by_hand)]
        for parser in parsers:
            parser.feed(ids)
        one, other = (parser.response for parser in parsers)
        assert one == other
        seen.update(parsed.status for parsed in one.tool_calls)

    @settings(max_examples=EXAMPLES, **QUIET)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        tools = data.draw(st.sampled_from([None, TOOLS]))
        prompt, ids = completion(any_family, data.draw(messages(any_family)))
        agree(ids, tools, prompt)
        agree(data.draw(mutated(any_family, ids)), tools, data.draw(st.sampled_from([None, prompt])))
        loose = data.draw(st.lists(st.sampled_from(delimiter_ids(any_family)), max_size=25))
        agree([index for piece in loose for index in piece], tools, None)

    law()
    agree(completion(any_family, assistant("", call("look_up", {"place": "Rome"}, "call00001")))[1], None, None)
    assert CallStatus.OK in seen


# -- choosing one

CALL_TEXT: Final = 'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"place": "Rome"}}\n</tool_call>'
PLAIN: Final = (
    "{% for m in messages %}<|{{ 'a' if m.role == 'assistant' else 'u' }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


def plain(**parsers: Any) -> Renderer:
    """A renderer for a template that shows neither reasoning nor calls."""
    return made_up_renderer(PLAIN, "<|a|>", "<|u|>", "<|end|>", **parsers)


def read(renderer: Renderer, text: str) -> ParsedResponse:
    """Parse this text with a stop token after it; control tokens are written by name."""
    return renderer.parse_response([*renderer.tokenizer.encode(text).tolist(), renderer.get_stop_token_ids()[0]])


def called(response: ParsedResponse) -> list[tuple[str | None, Any, CallStatus]]:
    return [(parsed.name, parsed.arguments, parsed.status) for parsed in response.tool_calls]


EXPECTED: Final = [("look_up", {"place": "Rome"}, CallStatus.OK)]


@pytest.mark.parametrize(
    "parser",
    ["hermes", "qwen25", DIALECTS["hermes"], DIALECTS["hermes"].calls, Dialect("mine", DIALECTS["hermes"].calls)],
    ids=["name", "server's name", "dialect", "calls", "own dialect"],
)
def test_a_dialect_is_chosen_by_name_or_by_itself(parser: Any) -> None:
    renderer = plain(tool_parser=parser)
    assert renderer.grammar().calls == DIALECTS["hermes"].calls
    assert called(read(renderer, CALL_TEXT)) == EXPECTED


@pytest.mark.parametrize("parser", ["think", "deepseek_r1", Frame("<think>", close="</think>")])
def test_a_template_without_reasoning_can_be_given_some(parser: Any) -> None:
    text = "<think>Hm.</think>Hello."
    assert read(plain(), text).content == text
    renderer = plain(reasoning_parser=parser)
    assert renderer.grammar() == plain().grammar().replace(reasoning=REASONING["think"])
    response = read(renderer, text)
    assert (response.reasoning_content, response.content) == ("Hm.", "Hello.")


def test_reasoning_that_the_prompt_opens_is_read_with_a_given_parser() -> None:
    renderer = made_up_renderer(
        PLAIN.replace("<|a|>{% endif %}", "<|a|>[THINK]{% endif %}"),
        *("<|a|>", "<|u|>", "<|end|>", "[THINK]", "[/THINK]"),
        reasoning_parser="brackets",
    )
    assert renderer.grammar().opens_reasoning
    response = read(renderer, "Hm.[/THINK]Hello.")
    assert (response.reasoning_content, response.content) == ("Hm.", "Hello.")


@pytest.mark.parametrize(
    ("family", "tool_parser", "reasoning_parser"),
    [("qwen3", "hermes", "qwen3"), ("glm-4.7", "glm47", "glm45"), ("nemotron-3-nano", "qwen3_coder", "nemotron_v3")],
)
def test_the_template_knows_its_own_white_space_better(family: str, tool_parser: str, reasoning_parser: str) -> None:
    chosen = small_renderer(family, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    assert chosen.grammar() == small_renderer(family).grammar()
