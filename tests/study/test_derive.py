"""The grammar that is read off a template: what it is for each family, and that it finds out what it has to.

Families are written out here as a person would read them off the template. What derivation must be able to find out is
tested one by one, on small templates that no model has.
"""

from __future__ import annotations

import pytest

from tests.conversations import user
from tests.formats.small import made_up_renderer
from tests.study.cases import CASES
from tests.study.pieces import (
    BESIDE,
    BRACES,
    CALLED,
    CONTROLS,
    LOOK,
    OBJECT,
    PYTHON,
    SAID,
    TAGGED,
    THOUGHT,
    called,
    template,
)
from tokentrace.formats.grammar import NO_CALLS, Value
from tokentrace.formats.writing import write_calls
from tokentrace.parsing.readback import MISREAD

# -- what derivation has to find out, each on a template of its own


@pytest.mark.parametrize("name", CASES)
def test_derivation_finds_out(name: str) -> None:
    found = made_up_renderer(CASES[name].source, *CONTROLS).grammar()
    notes = tuple(note for note in found.notes if MISREAD not in note)
    assert found.replace(notes=notes) == CASES[name].grammar


def test_a_grammar_that_does_not_read_its_template_back_says_so() -> None:
    notes = {name: made_up_renderer(case.source, *CONTROLS).grammar().notes for name, case in CASES.items()}
    assert {name for name, said in notes.items() if any(MISREAD in note for note in said)} == {
        "reasoning that the prompt opens and the turn closes",  # its own past turns do not show the opening
        "a prompt in the turn before it",
        "an answer that is written where the prompt opens reasoning",
        "calls after content in a turn of their own",
        "reasoning that nothing opens",
        "reasoning that nothing closes",
        "several messages in a turn",
        "Python calls with nothing around them",
        "calls that cannot be taken apart",
    }
    said = notes["Python calls with nothing around them"][-1]
    assert said == f"{MISREAD}: content of an answer and a call, calls of an answer and a call"


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
        },
    },
}


def test_calls_that_are_written_only_beside_tools_are_looked_for_there() -> None:
    written = "{% if tools %}" + called("<call>" + OBJECT + "</call>") + "{% else %}{{ m.content }}{% endif %}"
    renderer = made_up_renderer(template(written), *CONTROLS)
    assert (renderer.grammar().calls, renderer.grammar().notes) == (None, (NO_CALLS,))
    assert (renderer.grammar([TOOL]).calls, renderer.grammar([TOOL]).notes) == (TAGGED, ())


@pytest.mark.parametrize(
    "written",
    [
        BRACES.replace("{% else %}{{ v | tojson }}", "{% else %}<|q|>{{ v | tojson }}<|q|>")
        + template(called("<|call|>call:{{ f.name }}{{ braces(f.arguments) }}<|done|>")),
        template(called(PYTHON.replace("{{ v | tojson }}", '"{{ v if v is string else v | tojson }}"'), "<|call|>")),
    ],
    ids=["braces", "python"],
)
def test_where_all_values_are_quoted_the_schema_says_what_they_are(written: str) -> None:
    renderer = made_up_renderer(written, *CONTROLS)
    calls = renderer.grammar().calls
    assert calls is not None
    assert calls.others is Value.QUOTED
    arguments = {"place": "Paris", "days": 3, "exact": True}
    function = {"name": "look_up", "arguments": arguments}
    messages = [user("Hi."), {**CALLED, "tool_calls": [{**LOOK, "function": function}]}]
    rendered = renderer.render(messages)
    said = rendered.turns[-1]
    ids = rendered.token_ids[said.start : said.stop]
    assert renderer.tokenizer.decode(ids) == write_calls(calls, [function]) + "<|end|>"
    prompt = rendered.token_ids[: said.start]
    assert renderer.parse_response(ids, tools=[TOOL], prompt_ids=prompt).tool_calls[0].arguments == arguments
    assert renderer.parse_response(ids, prompt_ids=prompt).tool_calls[0].arguments == {
        "place": "Paris",
        "days": "3",
        "exact": "true",
    }
    unreadable = {one.field for one in renderer.find_unreadable(messages)} - {"tool_calls.0.id"}
    assert unreadable == {f"tool_calls.0.function.arguments.{key}" for key in ("days", "exact")}
    assert [one.field for one in renderer.find_unreadable(messages, tools=[TOOL])] == ["tool_calls.0.id"]


def test_what_a_grammar_does_not_read_back_is_unreadable() -> None:
    bare = made_up_renderer(CASES["Python calls with nothing around them"].source, *CONTROLS)
    assert {one.field for one in bare.find_unreadable([user("Hi."), BESIDE])} == {"content", "tool_calls"}
    assert {one.field for one in bare.find_unreadable([user("Hi."), CALLED])} == {"tool_calls.0.id"}
    prompted = made_up_renderer(CASES["a prompt in the turn before it"].source, *CONTROLS)
    assert prompted.find_unreadable([user("Hi."), SAID]) == []
    found = prompted.find_unreadable([user("Hi."), THOUGHT])
    assert {one.field for one in found} == {"content", "reasoning_content"}
    ids = prompted.tokenizer.encode("Well. So: Hello.<|end|>")
    response = prompted.parse_response(ids, prompt_ids=prompted.render_ids([user("Hi.")], add_generation_prompt=True))
    assert (response.reasoning_content, response.content) == ("Well.", "Hello.")
