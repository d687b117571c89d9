"""Instructions keep their role if the template renders it; else they become system or user messages."""

from typing import Any

import pytest

from tests.assets import FAMILIES
from tests.conversations import GET_WEATHER, assistant, developer, system, user
from tests.parsing.forms import families
from tests.support import make_renderer
from tokentrace import Renderer, create_renderer
from tokentrace.gateway.adapting import with_readable_roles
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
IN_PLACE = "{% if message.role != 'system' or loop.first %}" + TURN + "{% endif %}"
DROPS = "{% for message in messages %}" + IN_PLACE + "{% endfor %}" + PROMPT
NO_DEVELOPER = "{% for message in messages if message.role != 'developer' %}" + TURN + "{% endfor %}" + PROMPT
NO_INSTRUCTIONS = NO_DEVELOPER.replace("!= 'developer'", "in ('user', 'assistant')")
LATE = [system("1A"), user("2b"), system("3C"), assistant("4d"), user("5e"), system("6F")]
AS_USER = [system("1A"), user("2b"), user("3C"), assistant("4d"), user("5e"), user("6F")]
PARTS = system([{"type": "text", "text": "C"}, {"type": "text", "text": "D"}])
CASES: list[tuple[str | None, Any, Any]] = [
    # in the middle: unchanged if the template renders them, else as user messages
    (None, LATE, LATE),
    *((template, LATE, AS_USER) for template in (REFUSES, HOISTS, DROPS)),
    # at the beginning: unchanged, joined to the first, as system messages, or not rendered at all
    *((None, [*begin, user("c")], [*begin, user("c")])
      for begin in ([system("A")], [developer("A")], [system("A"), developer("B")])),
    (HOISTS, [system("A"), system("B"), user("d")], [system("A"), system("B"), user("d")]),
    *((template, [system("A"), system("B"), PARTS, user("d"), system("E")],
       [system("A\n\nB\n\nC\nD"), user("d"), user("E")]) for template in (REFUSES, DROPS)),
    (NO_DEVELOPER, [developer("A"), user("b")], [system("A"), user("b")]),
    (NO_DEVELOPER, [system("A"), developer("B"), user("d")], [system("A"), system("B"), user("d")]),
    (NO_INSTRUCTIONS, [developer("A"), system("B"), user("c")], [developer("A"), system("B"), user("c")]),
]  # fmt: skip


def renderer_of(template: str | None) -> Renderer:
    more: dict[str, Any] = {} if template is None else {"chat_template": template}
    return create_renderer(POCKET, "default", lost="ignore", **more)


@pytest.mark.parametrize(("template", "messages", "expected"), CASES)
def test_instructions_are_rendered_in_their_place(template: str | None, messages: Any, expected: Any) -> None:
    adapted = with_readable_roles(renderer_of(template), messages)
    assert adapted == expected
    assert (adapted is messages) == (expected == messages)
    if expected is AS_USER:
        text = renderer_of(template).render(expected, add_generation_prompt=True).text
        assert [int(digit) for digit in text if digit.isdigit()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("begin", ["d", "s d", "s s", "d d", "d s", "s d s d"])
@pytest.mark.parametrize("template", [None, REFUSES, HOISTS, DROPS, NO_DEVELOPER, NO_INSTRUCTIONS])
def test_later_messages_change_no_earlier_ones_and_adapting_is_idempotent(template: str | None, begin: str) -> None:
    renderer = renderer_of(template)
    roles = {"s": system, "d": developer}
    first = [*(roles[role](f"{at}A") for at, role in enumerate(begin.split())), user("9b")]
    adapted = with_readable_roles(renderer, first)
    more = [assistant("c"), user("d"), system("E"), developer("F")]
    assert with_readable_roles(renderer, [*first, *more])[: len(adapted)] == adapted
    assert with_readable_roles(renderer, adapted) == adapted


@families(FAMILIES)
def test_instructions_are_in_the_prompt_of_every_family_in_order(any_family: str) -> None:
    renderer = make_renderer(any_family)
    first, second, third = "Apples1 are red.", "Bananas2 are not.", "Grapes3 may be."
    for begin in (
        [developer(first)],
        [system(first), developer(second)],
        [system(first), system(second)],
        [developer(first), developer(second), system(third)],
    ):
        adapted = with_readable_roles(renderer, [*begin, user("Which?4")])
        for tools in (None, [GET_WEATHER]):
            rendered = renderer.render(adapted, tools=tools, add_generation_prompt=True)
            text = renderer.tokenizer.decode(rendered.ids)
            places = [text.find(word) for word in (*(message["content"] for message in begin), "Which?4")]
            assert -1 not in places, (adapted, text)
            assert places == sorted(places), (adapted, text)
