"""The derived grammar is the expected one, and reads back what the template writes: small templates, then TRL's."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Final

import pytest

from tests.conversations import Message, tool, user
from tests.formats.small import made_up_renderer
from tests.parsing.test_streaming import check
from tests.study import cases
from tests.study.cases import BESIDE, BOTH, CALLED, CASES, CONTROLS, HELLO, THOUGHT, TWICE, as_text, completion
from tests.support import rotating, templates_of_trl, trl_renderer
from tokentrace import Renderer, TokentraceError
from tokentrace.formats.grammar import NO_CALLS, Value
from tokentrace.formats.writing import write_calls
from tokentrace.parsing.readback import MISREAD
from tokentrace.parsing.response import Finish


@cache
def case_renderer(name: str) -> Renderer:
    """The renderer of a case, as its messages are rendered."""
    return made_up_renderer(CASES[name].source, *CONTROLS, **dict(CASES[name].variables))


MISREAD_CASES: Final = {
    "reasoning that the prompt opens and the turn closes",  # its past turns do not show the opening
    "a prompt in the turn before it", "an answer that is written where the prompt opens reasoning",
    "calls after content in a turn of their own", "reasoning that nothing opens",
    "reasoning that nothing closes", "several messages in a turn", "Python calls with nothing around them",
    "calls that cannot be taken apart",
}  # fmt: skip
BARE: Final = "Python calls with nothing around them"
TOOL: Final = tool("look_up", "", {name: {"type": kind} for name, kind in cases.TYPES.items()}, [])


@pytest.mark.parametrize("name", CASES)
def test_derivation_finds_out(name: str) -> None:
    """A grammar that does not read its template back has a note about it."""
    grammar = made_up_renderer(CASES[name].source, *CONTROLS).grammar()
    misread = [note for note in grammar.notes if MISREAD in note]
    assert grammar.replace(notes=tuple(note for note in grammar.notes if note not in misread)) == CASES[name].grammar
    assert bool(misread) == (name in MISREAD_CASES)
    if name == BARE:
        assert misread == [f"{MISREAD}: content, calls"]


def test_calls_that_are_written_only_beside_tools_are_looked_for_there() -> None:
    turn = "{% if tools %}" + cases.called(cases.TAG) + "{% else %}{{ m.content }}{% endif %}"
    renderer = made_up_renderer(cases.template(turn), *CONTROLS)
    assert (renderer.grammar().calls, renderer.grammar().notes) == (None, (NO_CALLS,))
    assert (renderer.grammar([TOOL]).calls, renderer.grammar([TOOL]).notes) == (cases.TAGGED, ())


@pytest.mark.parametrize(
    ("name", "value", "quoted"),
    [
        ("braces with quotes of their own", "{% else %}{{ v | tojson }}", "{% else %}<|q|>{{ v | tojson }}<|q|>"),
        ("Python calls", "{{ v | tojson }}", '"{{ v if v is string else v | tojson }}"'),
    ],
)
def test_where_all_values_are_quoted_the_schema_says_what_they_are(name: str, value: str, quoted: str) -> None:
    renderer = made_up_renderer(CASES[name].source.replace(value, quoted), *CONTROLS)
    calls = renderer.grammar().calls
    assert calls is not None
    assert calls.others is Value.QUOTED
    arguments = {"place": "Paris", "days": 3, "exact": True}
    function = {"name": "look_up", "arguments": arguments}
    messages = [user("Hi."), {**CALLED, "tool_calls": [{**cases.LOOK, "function": function}]}]
    prompt, ids = completion(renderer, messages[1])
    assert renderer.tokenizer.decode(ids) == write_calls(calls, [function]) + "<|end|>"
    assert renderer.parse_response(ids, tools=[TOOL], prompt_ids=prompt).tool_calls[0].arguments == arguments
    texts = {"place": "Paris", "days": "3", "exact": "true"}
    assert renderer.parse_response(ids, prompt_ids=prompt).tool_calls[0].arguments == texts
    unreadable = {one.field for one in renderer.find_unreadable(messages)} - {"tool_calls.0.id"}
    assert unreadable == {f"tool_calls.0.function.arguments.{key}" for key in ("days", "exact")}
    assert [one.field for one in renderer.find_unreadable(messages, tools=[TOOL])] == ["tool_calls.0.id"]


@pytest.mark.parametrize(
    ("name", "message", "fields"),
    [
        (BARE, BESIDE, {"content", "tool_calls"}), (BARE, CALLED, {"tool_calls.0.id"}),
        ("a prompt in the turn before it", HELLO, set()),
        ("a prompt in the turn before it", THOUGHT, {"content", "reasoning_content"}),
    ],
)  # fmt: skip
def test_what_a_grammar_does_not_read_back_is_unreadable(name: str, message: Message, fields: set[str]) -> None:
    assert {one.field for one in case_renderer(name).find_unreadable([user("Hi."), message])} == fields


# -- what a template writes is read back, whole and cut anywhere


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.messages])
def test_what_a_template_writes_is_read_back_and_every_cut_streams_to_the_same(name: str) -> None:
    case, renderer = CASES[name], case_renderer(name)
    for message in case.messages:
        prompt, ids = completion(renderer, as_text(message) if cases.AS_TEXT in case.source else message)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        assert cases.summary(response) == cases.expected_summary(message)
        assert (response.finish, response.open) == (Finish.STOP, None)
        for stop in range(0, len(ids) + 1, 7):
            check(renderer, ids[:stop], [], prompt_ids=prompt)


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
    renderer = case_renderer(name)
    response = renderer.parse_response(completion(renderer, TWICE)[1])
    assert [parsed.id for parsed in response.tool_calls] == ids


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("reasoning that only the prompt opens", "Well.</think>Hello.", "Well.", "Hello."),
        ("reasoning that the prompt opens and the turn closes", "Well.</think>Hello.", "Well.", "Hello."),
        ("an answer that is written where the prompt opens reasoning", "Well.</think>Hello.", "Well.", "Hello."),
        ("a prompt in the turn before it", "Well. So: Hello.", "Well.", "Hello."),
        ("reasoning that nothing opens", "Well.</think>Hello.", None, "Well.</think>Hello."),
        ("several messages in a turn", " user<|sep|>Hello.", None, " user<|sep|>Hello."),
    ],
)
def test_completions_that_the_template_itself_would_not_show(
    name: str, text: str, reasoning: str | None, content: str
) -> None:
    renderer = case_renderer(name)
    response = renderer.parse_response(renderer.tokenizer.encode(text + "<|end|>"))
    assert (response.reasoning_content, response.content) == (reasoning, content)
    assert response.finish is Finish.STOP


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
"""Templates (and their variants for training) that lose a part of the messages, or write what cannot be read back."""


def visible(renderer: Renderer, message: Message) -> Message | None:
    """The part of a message that its turn shows; None if the template refuses it."""
    try:
        rendered = renderer.render([user("Hi."), message])
    except TokentraceError:
        return None
    text = rendered.decode(slice(0, rendered.turns[-1].stop))
    fields = {key: value for key, value in message.items() if key != "reasoning_content" or value in text}
    calls = [one for one in message.get("tool_calls", []) if one["function"]["name"] in text]
    return {**fields, "content": message["content"] if message["content"] in text else "", "tool_calls": calls}


def losses(renderer: Renderer) -> Iterator[str]:
    """How messages differ from what is read back after rendering."""
    for message in (HELLO, THOUGHT, CALLED, BESIDE, TWICE, BOTH):
        form, calls = message, message.get("tool_calls", [])
        if (seen := visible(renderer, form)) is None:
            seen = visible(renderer, form := as_text(message))
        if seen is None or seen["content"] != message["content"]:
            yield "refused"
            continue
        if len(seen["tool_calls"]) not in (0, len(calls)):
            yield "calls are lost"
        prompt, ids = completion(renderer, form)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        expected = cases.expected_summary(seen | {"tool_calls": calls if seen["tool_calls"] else []})
        if cases.summary(response) != expected:
            yield f"{cases.summary(response)} != {expected}"


def test_every_template_of_trl_is_read_back_or_listed() -> None:
    problems = {name: list(losses(trl_renderer(name))) for name in rotating(sorted(templates_of_trl()), "read back", 6)}
    lossy = {name: some for name, some in problems.items() if some}
    listed = {name for name in problems if re.sub("_training$", "", name) in TRL_NOT_READ_BACK}
    assert set(lossy) == listed, {name: lossy.get(name) for name in set(lossy) ^ listed}
