"""Pocket's template gives the ids and masks of transformers, and its renderings only ever grow at the end."""

import copy
import itertools
import os
from functools import cache
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: no request leaves the machine

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, Conversation
from tests.lazy import lazy
from tokentrace import Renderer, create_renderer
from tokentrace.conversation.messages import REASONING_FIELDS, conversation_remarks
from tokentrace.pocket import POCKET

THINKING = [None, False, True]
"""Values of enable_thinking; None leaves it out."""
REJECTED = {"content_image_part", "result_object"}
"""Conversations that pocket refuses: images, and results that are not text."""


@cache
def transformers_tokenizer() -> Any:
    return lazy("transformers").AutoTokenizer.from_pretrained(str(POCKET), local_files_only=True)


@cache
def renderer(thinking: bool | None = None, control_tokens: str = "literal") -> Renderer:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    return create_renderer(POCKET, control_tokens=control_tokens, **kwargs)


NAMES = [name for name in CONVERSATIONS if name not in REJECTED]


# -- parity


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_mask_are_those_of_transformers(name: str) -> None:
    messages, tools = copy.deepcopy(CONVERSATIONS[name].messages), CONVERSATIONS[name].tools
    template = transformers_tokenizer().apply_chat_template
    for thinking, prompt in itertools.product(THINKING, [False, True]):
        options = {} if thinking is None else {"enable_thinking": thinking}
        expected = template(messages, tools=tools, add_generation_prompt=prompt, return_dict=False, **options)
        actual = renderer(thinking, "hf_compat").render(messages, tools=tools, add_generation_prompt=prompt)
        assert actual.token_ids == expected
        assert "unknown" not in actual.fields
    tagged = template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    rendered = renderer().render(messages, tools=tools)
    if rendered.token_ids == list(tagged["input_ids"]):
        assert [int(sampled) for sampled in rendered.sampled] == list(tagged["assistant_masks"])
        assert rendered.notes == list(conversation_remarks(messages))
    else:  # control tokens that a user typed
        assert rendered.notes
        assert all("which stays text" in note for note in rendered.notes)


# -- append only


def assert_append_only(conversation: Conversation, thinking: bool | None) -> None:
    whole = renderer(thinking).render_ids(conversation.messages, tools=conversation.tools)
    for stop, message in enumerate(conversation.messages[:-1], 1):
        if message["role"] == "assistant":
            part = renderer(thinking).render_ids(conversation.messages[:stop], tools=conversation.tools)
            assert whole[: len(part)] == part


@pytest.mark.parametrize("thinking", THINKING)
def test_renderings_are_append_only_and_turns_start_after_their_prompt(thinking: bool | None) -> None:
    for name in NAMES:
        assert_append_only(CONVERSATIONS[name], thinking)
        messages, tools = CONVERSATIONS[name].messages, CONVERSATIONS[name].tools
        rendered = renderer(thinking).render(messages, tools=tools)
        for turn in rendered.turns:
            if turn.message == 0:
                continue  # nothing to prompt with
            if thinking is False and any(messages[turn.message].get(key) for key in REASONING_FIELDS):
                continue  # reasoning where the prompt forbade it
            prompt = renderer(thinking).render_ids(messages[: turn.message], tools=tools, add_generation_prompt=True)
            assert rendered.token_ids[: turn.start] == prompt, name


PARTS = [
    *("Hello", "\n", " ", "4", "2", "<|end|>", "<|turn|>user\n", "</think>", "<tool_call>", "é", "🗼", '"', "{}", "\t")
]
text = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
incoming = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": text})
reply = st.fixed_dictionaries({"role": st.just("assistant"), "content": text}, optional={"reasoning_content": text})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(incoming, reply), min_size=1, max_size=6), st.sampled_from([None, False, True]))
def test_rendering_any_messages_is_append_only(messages: list[dict[str, Any]], thinking: bool | None) -> None:
    assert_append_only(Conversation(messages), thinking)
