"""What a template writes is read back by the grammar derived from it, whole and cut anywhere."""

from __future__ import annotations

import pytest

from tests.formats.small import made_up_renderer
from tests.study.cases import CASES
from tests.study.pieces import AS_TEXT, BESIDE, CONTROLS, TWICE, as_text, completion, meant, summary
from tokentrace.parsing.events import ArgumentsDelta, ContentDelta
from tokentrace.parsing.response import Finish

SPEAKING = [name for name, case in CASES.items() if case.says]

# -- what derivation has to find out, each on a template of its own


@pytest.mark.parametrize("name", SPEAKING)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    case = CASES[name]
    renderer = made_up_renderer(case.source, *CONTROLS, **dict(case.variables))
    for message in case.says:
        given = as_text(message) if AS_TEXT in case.source else message
        prompt, ids = completion(renderer, given)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        assert summary(response) == meant(message)
        assert (response.finish, response.open) == (Finish.STOP, None)


@pytest.mark.parametrize("name", SPEAKING)
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
        ("an answer that is written where the prompt opens reasoning", "Well.</think>Hello.", "Well.", "Hello."),
        ("a prompt in the turn before it", "Well. So: Hello.", "Well.", "Hello."),
        ("reasoning that nothing opens", "Well.</think>Hello.", None, "Well.</think>Hello."),
        ("several messages in a turn", " user<|sep|>Hello.", None, " user<|sep|>Hello."),
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
