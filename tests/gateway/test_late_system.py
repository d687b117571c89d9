"""Instructions stay as they are where the template writes them; else they are the system's, or a user's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.assets import FAMILIES
from tests.conversations import GET_WEATHER, assistant, developer, system, user
from tests.parsing.forms import families
from tests.support import make_renderer
from tokentrace import Renderer, create_renderer
from tokentrace.gateway.adapting import with_late_instructions
from tokentrace.pocket import POCKET

TURN = "{{ '<|turn|>' + message.role + '\\n' + message.content + '<|end|>' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
REFUSES = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + TURN + "{% endfor %}" + PROMPT
)
HOISTS = (
    "{% for message in messages if message.role == 'system' %}" + TURN + "{% endfor %}"
    "{% for message in messages if message.role != 'system' %}" + TURN + "{% endfor %}" + PROMPT
)
DROPS = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + PROMPT
)
NO_DEVELOPER = "{% for message in messages if message.role != 'developer' %}" + TURN + "{% endfor %}" + PROMPT
NO_INSTRUCTIONS = (
    "{% for message in messages if message.role in ('user', 'assistant') %}" + TURN + "{% endfor %}" + PROMPT
)
LATE = [system("1A"), user("2b"), system("3C"), assistant("4d"), user("5e"), system("6F")]


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def renderer(template: str | None) -> Renderer:
    given: dict[str, Any] = {} if template is None else {"chat_template": template}
    return create_renderer(POCKET, "default", lost="ignore", **given)


def test_a_template_that_writes_them_gets_them() -> None:
    assert with_late_instructions(renderer(None), LATE) is LATE


@pytest.mark.parametrize("template", [REFUSES, HOISTS, DROPS], ids=["refuses", "hoists", "drops"])
def test_others_get_them_as_a_users(template: str) -> None:
    made = renderer(template)
    shown = with_late_instructions(made, LATE)
    assert shown == [system("1A"), user("2b"), user("3C"), assistant("4d"), user("5e"), user("6F")]
    text = made.render(shown, add_generation_prompt=True).text
    assert [int(digit) for digit in text if digit.isdigit()] == [1, 2, 3, 4, 5, 6]


# -- at the beginning


def test_instructions_at_the_beginning_stay_where_they_are_written() -> None:
    for messages in ([system("A"), user("c")], [developer("A"), user("c")], [system("A"), developer("B"), user("c")]):
        assert with_late_instructions(renderer(None), messages) is messages
    messages = [system("A"), system("B"), system("C"), user("d")]
    assert with_late_instructions(renderer(HOISTS), messages) is messages


@pytest.mark.parametrize("template", [REFUSES, DROPS], ids=["refuses", "drops"])
def test_further_ones_are_joined_to_the_first(template: str) -> None:
    made = renderer(template)
    messages = [system("A"), system("B"), system([text("C"), text("D")]), user("d"), system("E")]
    assert with_late_instructions(made, [*messages[:2], user("d")]) == [system("A\n\nB"), user("d")]
    assert with_late_instructions(made, messages) == [system("A\n\nB\n\nC\nD"), user("d"), user("E")]


def test_a_developer_is_the_system_where_it_is_not_written() -> None:
    made = renderer(NO_DEVELOPER)
    assert with_late_instructions(made, [developer("A"), user("b")]) == [system("A"), user("b")]
    shown = with_late_instructions(made, [system("A"), developer("B"), developer("C"), user("d")])
    assert shown == [system("A"), system("B"), system("C"), user("d")]


def test_what_has_no_place_stays() -> None:
    messages = [developer("A"), system("B"), user("c")]
    assert with_late_instructions(renderer(NO_INSTRUCTIONS), messages) is messages


@pytest.mark.parametrize("begin", ["d", "s d", "s s", "d d", "d s", "s d s d"])
@pytest.mark.parametrize("template", [None, REFUSES, HOISTS, DROPS, NO_DEVELOPER, NO_INSTRUCTIONS])
def test_later_messages_change_nothing_and_what_was_shown_is_shown_again(template: str | None, begin: str) -> None:
    made = renderer(template)
    roles = {"s": system, "d": developer}
    first = [*(roles[role](f"{at}A") for at, role in enumerate(begin.split())), user("9b")]
    shown = with_late_instructions(made, first)
    more = [assistant("c"), user("d"), system("E"), developer("F")]
    assert with_late_instructions(made, [*first, *more])[: len(shown)] == shown
    assert with_late_instructions(made, shown) == shown


@families(FAMILIES)
def test_the_words_reach_every_family(any_family: str) -> None:
    made = make_renderer(any_family)
    first, second, third = "Apples1 are red.", "Bananas2 are not.", "Grapes3 may be."
    for begin in (
        [developer(first)],
        [system(first), developer(second)],
        [system(first), system(second)],
        [developer(first), developer(second), system(third)],
    ):
        shown = with_late_instructions(made, [*begin, user("Which?4")])
        for tools in (None, [GET_WEATHER]):
            wrote = made.render(shown, tools=tools, add_generation_prompt=True)
            said = made.tokenizer.decode(wrote.ids)
            places = [said.find(word) for word in (*(message["content"] for message in begin), "Which?4")]
            assert -1 not in places, (shown, said)
            assert places == sorted(places), (shown, said)


# -- in the middle
