"""Several conversations at once: each as it is rendered alone, and errors say which one it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversations import ADD, ASK, GET_WEATHER, HI, SYS, assistant
from tokentrace import InputError, create_renderer
from tokentrace.pocket import POCKET

RENDERER = create_renderer(POCKET)
SEVERAL: list[list[dict[str, Any]]] = [[HI], [SYS, ASK], [HI, assistant("I am a model.")]]


def alone(conversations: list[Any], tools: list[Any], prompt: bool = False) -> list[list[int]]:
    return [
        RENDERER.render_ids(one, tools=own, add_generation_prompt=prompt)
        for one, own in zip(conversations, tools, strict=True)
    ]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    ("given", "each"),
    [
        (None, [None] * 3),
        ([], [[]] * 3),
        ([GET_WEATHER], [[GET_WEATHER]] * 3),
        ([[GET_WEATHER], None, [ADD]], [[GET_WEATHER], None, [ADD]]),
    ],
)
def test_each_is_rendered_as_if_alone(given: Any, each: list[Any], prompt: bool) -> None:
    rendered = RENDERER.render_batch(SEVERAL, tools=given, add_generation_prompt=prompt)
    assert [one.token_ids for one in rendered] == alone(SEVERAL, each, prompt)


def test_an_error_says_which_conversation() -> None:
    with pytest.raises(InputError, match=r"^conversation 1: message 0, content: is None") as caught:
        RENDERER.render_batch([[HI], [{"role": "user", "content": None}]])
    assert (caught.value.conversation, caught.value.message, caught.value.field) == (1, 0, "content")


def test_tools_for_each_have_to_be_as_many() -> None:
    with pytest.raises(InputError, match="one for each of 3 conversations, not 2"):
        RENDERER.render_batch(SEVERAL, tools=[[ADD], None])


@pytest.mark.parametrize("given", ["hi", {"role": "user"}, None, 5])
def test_what_is_no_list_of_conversations_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="must be a list of conversations"):
        RENDERER.render_batch(given)
