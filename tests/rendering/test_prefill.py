"""Prefill: a last message that is left open for the model to continue.

- The ids are those of transformers' ``continue_final_message``, or both refuse.
- The open turn belongs to the prompt: nothing of it counts as sampled; turns before it do.
- It renders to a prefix of the whole message, unless the template strips white space.
"""

from typing import Any

import pytest

from tests.conversations import ASK, HI, SIMPLE, SUNNY, SYS, assistant, call, text, user
from tests.oracle import Refusal, hf_ids
from tests.support import load_family, make_renderer, some
from tokentrace import InputError, TemplateError, TokentraceError, create_renderer
from tokentrace.pocket import POCKET

PREFILLS = {
    "a word": [HI, assistant("The answer is")],
    "white space": [HI, assistant("The answer is: ")],
    "newlines": [HI, assistant("Line\n\n")],
    "white space before": [HI, assistant("  Well")],
    "nothing yet": [HI, assistant("")],
    "after others": [SYS, HI, assistant("A model."), user("Which?"), assistant("A small")],
    "parts": [HI, assistant(text("The answer", " is"))],
    "after a result": [ASK, assistant("", call("get_weather", {"city": "Paris"})), SUNNY, assistant("It is")],
    "with reasoning": [HI, assistant("The answer is", reasoning="Let me see.")],
}


def test_ids_are_those_of_transformers(family: str) -> None:
    renderer = make_renderer(family, messages="as_given")
    failures = []
    compared = 0
    for name, messages in PREFILLS.items():
        for tools in (None, SIMPLE):
            theirs = hf_ids(family, messages, tools, continue_final_message=True)
            try:
                ours: Any = renderer.render(messages, tools=tools, continue_final_message=True).token_ids
            except TokentraceError as error:
                ours = error
            if isinstance(theirs, Refusal) and isinstance(ours, TokentraceError):
                continue
            compared += 1
            if ours != theirs:
                decode = load_family(family).decode
                texts = [decode(one) if isinstance(one, list) else one for one in (ours, theirs)]
                failures.append(f"{name}: {texts[0]!r} is not {texts[1]!r}")
    assert not failures, some(failures)
    assert compared > 4


def test_nothing_of_the_open_turn_is_sampled(any_family: str) -> None:
    renderer = make_renderer(any_family)
    rendered = renderer.render(PREFILLS["after others"], continue_final_message=True)
    assert {turn.message for turn in rendered.turns} == {2}
    assert not rendered.mask[rendered.messages == 4].any()
    assert rendered.decode(rendered.select(message=4, field="content")).strip() == "A small"
    assert rendered.text.endswith("A small")
    whole = renderer.render(PREFILLS["after others"])
    assert rendered.lost == whole.lost  # Mistral writes the system message only with the last user message
    assert whole.text.startswith(rendered.text)
    assert any(turn.message == 4 for turn in whole.turns)


def test_parts_are_continued_where_the_template_reads_strings() -> None:
    renderer = make_renderer("qwen3")
    rendered = renderer.render([HI, assistant(text("The answer", "is"))], continue_final_message=True)
    assert rendered.text.endswith("The answer\nis")


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([HI], "the last one has role user", 0),
        ([ASK, assistant("Wait", call("now", {}))], "tool calls come after it", 1),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: list[Any], error: str, message: int) -> None:
    with pytest.raises(InputError, match=error) as caught:
        create_renderer(POCKET).render(messages, continue_final_message=True)
    assert caught.value.message == message


def test_a_template_that_does_not_show_the_content_cannot_continue_it() -> None:
    renderer = create_renderer(POCKET, chat_template="{% for m in messages %}{{ m.role }}{% endfor %}", lost="ignore")
    with pytest.raises(TemplateError, match="could be continued"):
        renderer.render([HI, assistant("Well")], continue_final_message=True)
