"""A strict reading reports calls outside their place as attempts; a lenient one counts them, as servers do."""

import contextlib
from typing import Any, NamedTuple

import pytest

from tests.conversations import assistant, call, user
from tests.parsing.forms import TOOLS, answered, ids_of
from tests.support import make_renderer
from tokentrace.errors import RendererError, TemplateError
from tokentrace.parsing.response import CallStatus, ParsedResponse, PartKind

LOOK = {"place": "a"}
HERMES = '<tool_call>\n{"name": "look", "arguments": {"place": "a"}}\n</tool_call>'
XML = "<function=look>\n<parameter=place>\na\n</parameter>\n</function>"
LLAMA = '{"name": "look", "parameters": {"place": "a"}}'
DSML = "<｜DSML｜"
INVOKE = f'{DSML}invoke name="look">\n{DSML}parameter name="place" string="true">a</{DSML[1:]}parameter>\n'
LONE = f"{DSML}function_calls>\n{INVOKE}</{DSML[1:]}invoke>\n</{DSML[1:]}function_calls>"


class Case(NamedTuple):
    """A completion, and the calls and content that servers hand to an agent."""

    family: str
    text: str
    calls: list[dict[str, Any]]
    content: str
    problem: str
    """A part of the first attempt's `problem` in the strict reading."""
    opened: bool = False
    """Whether the prompt opens reasoning, which the completion does not close."""


CASES = {
    "a call inside reasoning that is not closed": Case(
        "qwen3", f"Hm {HERMES}", [LOOK], "", "inside reasoning that is not closed", opened=True
    ),
    "a call without its opener": Case(
        "qwen3-coder", f"Sure.\n{XML}\n</tool_call>", [LOOK], "Sure.\n", "'<tool_call>' is missing"
    ),
    "a call without opener and closer": Case("qwen3-coder", XML, [LOOK], "", "'<tool_call>' is missing"),
    "a control token before JSON": Case("llama-3.1", f"<|python_tag|>{LLAMA}", [LOOK], "", "after something else"),
    "text before JSON": Case("llama-3.1", f"I look: {LLAMA}", [LOOK], "I look: ", "after something else"),
    "several after text": Case(
        "llama-3.1", f"Both: {LLAMA}; {LLAMA}", [LOOK, LOOK], "Both: ; ", "after something else"
    ),
    "arguments under the other key": Case(
        "llama-3.1", LLAMA.replace("parameters", "arguments"), [LOOK], "", "its arguments are under"
    ),
    "a way that the template does not show": Case(
        "gemma-3", 'functools[{"name": "look", "arguments": {"place": "a"}}]', [LOOK], "", "tool_parser='functools'"
    ),
}
"""Recorded from vLLM 0.32.0's own parsers (qwen3, hermes, llama3_json, phi4_mini_json), which find these calls.

Content is the text beside them; for Llama vLLM drops it, SGLang 0.5.23 keeps it.
"""

UNCLOSED = [("qwen3", HERMES.removesuffix("\n</tool_call>")), ("qwen3-coder", f"<tool_call>\n{XML}")]
"""Calls that servers run although they are not closed (vLLM's hermes and qwen3)."""


def read(family: str, text: str, *, opened: bool = False, **options: Any) -> ParsedResponse:
    renderer = make_renderer(family)
    prompt = answered(renderer) + (ids_of(renderer, ("<think>\n",)) if opened else [])
    ids = ids_of(renderer, (text,)) + renderer.get_stop_token_ids()[:1]
    return renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=[f"{case.family}-{name}" for name, case in CASES.items()])
def test_a_lenient_reading_has_what_servers_hand_an_agent_and_a_strict_one_reports_it(case: Case) -> None:
    lenient, strict = (read(case.family, case.text, opened=case.opened, calls=one) for one in ("lenient", "strict"))
    expected = [("look", some) for some in case.calls]
    assert [(call.name, call.arguments) for call in lenient.calls] == expected
    assert (lenient.content, lenient.attempts, lenient.finish_reason) == (case.content, [], "tool_calls")
    assert strict.tool_calls == []
    assert (strict.reasoning_content if case.opened else strict.content) == case.text
    assert [(call.name, call.arguments) for call in strict.attempts] == expected
    assert [(call.index, call.status) for call in strict.attempts] == [
        (at, CallStatus.MALFORMED) for at in range(len(expected))
    ]
    assert case.problem in strict.attempts[0].problem
    renderer = make_renderer(case.family)
    assert "look" in renderer.tokenizer.decode(ids_of(renderer, (case.text,))[slice(*strict.attempts[0].span)])


@pytest.mark.parametrize(("family", "text"), UNCLOSED)
def test_the_server_reading_does_without_a_closing(family: str, text: str) -> None:
    strict, served = read(family, text), read(family, text, calls="lenient")
    assert [(call.status, call.arguments) for call in strict.tool_calls] == [(CallStatus.UNCLOSED, LOOK)]
    assert [(call.status, call.arguments) for call in served.tool_calls] == [(CallStatus.OK, LOOK)]
    assert strict.attempts == []


@pytest.mark.parametrize("reading", ["strict", "lenient"])
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", f"Hm {HERMES}\n</think>\n\nNo need."),  # drafted: reasoning that is closed is reasoning
        ("llama-3.1", 'As {"b": {"name": "look", "parameters": {}}} says.'),
        ("llama-3.1", "A set {a, b}, a brace {, and {1}."),
        ("qwen3-coder", "Write functions as <function name>."),
    ],
)
def test_neither_reading_makes_up_a_call(family: str, text: str, reading: str) -> None:
    parsed = read(family, text, opened="</think>" in text, calls=reading)
    assert (parsed.tool_calls, parsed.attempts) == ([], [])
    assert (parsed.reasoning_content or "") + parsed.content != ""


def test_what_is_in_order_is_read_the_same(any_family: str) -> None:
    renderer, compared = make_renderer(any_family), 0
    function = {**TOOLS[0]["function"], "description": "Looks."}  # gpt-oss's template needs one
    for reply in (assistant("Fine."), assistant("", call("look", LOOK, "functions.look:0"), reasoning="Hm.")):
        with contextlib.suppress(TemplateError):
            rendered = renderer.render([user("Go."), reply], tools=[{**TOOLS[0], "function": function}])
            compared, turn = compared + 1, rendered.turns[-1]
            ids, prompt = rendered.token_ids[turn.start : turn.stop], rendered.token_ids[: turn.start]
            strict = renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
            assert strict.attempts == []
            assert renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt, calls="lenient") == strict
    assert compared


def test_an_unknown_reading_is_refused_and_a_stream_is_read_strictly() -> None:
    renderer = make_renderer("qwen3")
    with pytest.raises(RendererError, match="calls must be one of 'strict', 'lenient', not 'lax'"):
        renderer.parse_response([1], calls="lax")
    parser = renderer.streaming_parser(tools=TOOLS, prompt_ids=ids_of(renderer, ("<|im_start|>assistant\n<think>\n",)))
    for index in ids_of(renderer, (f"Hm {HERMES}",)):
        parser.feed([index])
    assert parser.response.open is PartKind.REASONING
    assert [call.name for call in parser.response.attempts] == ["look"]


# -- calls outside of their section


@pytest.mark.parametrize("reading", ["strict", "lenient"])
def test_a_call_in_a_section_of_another_name_is_no_call_of_the_grammar(reading: str) -> None:
    """DeepSeek V4 renamed V3.2's section: vLLM runs such a call all the same, SGLang does not."""
    (call,) = read("deepseek-v4", LONE, calls=reading).tool_calls
    assert (call.name, call.arguments, call.ok) == ("look", LOOK, reading == "lenient")
    if not call.ok:
        assert (call.status, call.problem) == (CallStatus.MALFORMED, f"the call is outside of '{DSML}tool_calls>'")
    assert read("deepseek-v3.2", LONE, calls=reading).tool_calls[0].ok


# -- elements inside elements


M3 = "]<]minimax[>["


def nested(inside: str) -> str:
    section = f'<tool_call>\n$<invoke name="write">$<code>{inside}$</code>$</invoke>\n$</tool_call>'
    return M3 + section.replace("$", M3).replace("@", M3)


def test_white_space_between_elements_is_nothing_and_as_a_value_it_stays() -> None:
    elements = ["", "@<a>x@</a>", "@<l>", "@<item>1@</item>", "@<item>2@</item>", "@</l>", ""]
    texts = {space.join(elements): {"a": "x", "l": [1, 2]} for space in ("", "\n", " \n\t ")}
    for inside, value in (texts | {"@<a>\n x \n@</a>": {"a": "\n x \n"}}).items():
        (call,) = read("minimax-m3", nested(inside)).tool_calls
        assert (call.status, call.arguments) == (CallStatus.OK, {"code": value})


def test_of_elements_with_one_name_none_is_lost() -> None:
    """Both vLLM's and SGLang's parsers make a list of them."""
    text = nested("@<k>x@</k>@<m>y@</m>@<k>z@</k>")
    (call,) = read("minimax-m3", text).tool_calls
    assert call.arguments == {"code": {"k": ["x", "z"], "m": "y"}}
    assert (call.status, call.problem) == (CallStatus.DUPLICATE_ARGUMENT, "'k' is given more than once in 'code'")
    assert read("minimax-m3", text, calls="lenient").calls[0].arguments == call.arguments
