"""System messages in the middle: as they are where the template writes them, else as a user's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversations import assistant, developer, system, user
from tokentrace import Renderer, create_renderer
from tokentrace.gateway.late_system import with_late_instructions
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
LATE = [system("1A"), user("2b"), system("3C"), assistant("4d"), user("5e"), system("6F")]


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


def test_instructions_at_the_beginning_stay() -> None:
    messages = [system("A"), system("B"), user("c")]
    assert with_late_instructions(renderer(REFUSES), messages) is messages


def test_roles_are_tried_one_by_one() -> None:
    shown = with_late_instructions(renderer(REFUSES), [user("a"), developer("B"), system("C")])
    assert shown == [user("a"), developer("B"), user("C")]
