"""What a conversation is: shapes that pass, and pass unchanged. What does not pass: `test_bad_input.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conversations import CONVERSATIONS
from tokentrace import InputError
from tokentrace.conversation.messages import check_messages, check_tools


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_every_conversation_of_the_matrix_passes_unchanged(name: str) -> None:
    row = CONVERSATIONS[name]
    checked = check_messages(row.messages)
    assert all(mine is theirs for mine, theirs in zip(checked, row.messages, strict=True))
    assert check_tools(row.tools) == row.tools


@pytest.mark.parametrize("role", ["critic", "tool_response", "x-1", "a.b"])
def test_roles_that_the_template_knows(role: str) -> None:
    with pytest.raises(InputError, match="not a known role"):
        check_messages([{"role": role, "content": "x"}])
    assert check_messages([{"role": role, "content": "x"}], more_roles=frozenset({role}))


@pytest.mark.parametrize("role", ["</think>", "<|im_end|>", "a b", "x\n", ""])
def test_control_like_words_are_no_roles_even_if_the_template_has_them(role: str) -> None:
    with pytest.raises(InputError, match="not a known role"):
        check_messages([{"role": role, "content": "x"}], more_roles=frozenset({role}))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "", "tool_calls": ({"function": {"name": "f", "arguments": "{}"}},)},
        {"role": "assistant", "content": "", "reasoning_content": None, "thinking": ""},
        {"role": "tool", "content": {"any": "object"}},
        {"role": "user", "content": ["plain", {"type": "text", "text": "x"}, {"type": "image"}]},
        {"role": "user", "content": "", "more": object()},
    ],
)
def test_shapes_that_pass(message: dict[str, Any]) -> None:
    assert check_messages([message]) == [message]
