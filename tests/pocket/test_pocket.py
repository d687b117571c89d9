"""The pocket model: its template says the same under transformers, only ever appends, and its vocabulary is sound."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: nothing is ever looked up

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, Conversation
from tests.lazy import lazy
from tokentrace import Renderer, create_renderer
from tokentrace.conversation.remarks import conversation_remarks
from tokentrace.pocket import POCKET
from tokentrace.template.chat_template import REASONING_FIELDS

THINKING = [None, False, True]
"""What enable_thinking can be; None: not given."""
CONTROL = ["<|pad|>", "<|bos|>", "<|end|>", "<|turn|>"]
REFUSED = {"content_image_part", "result_object"}
"""What pocket does not take: images, and results that are no text (refused before any template sees them)."""


@cache
def transformers_tokenizer() -> Any:
    return lazy("transformers").AutoTokenizer.from_pretrained(str(POCKET), local_files_only=True)


@cache
def renderer(thinking: bool | None = None, control_tokens: str = "literal") -> Renderer:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    return create_renderer(POCKET, control_tokens=control_tokens, **kwargs)


def taken() -> list[str]:
    return [name for name in CONVERSATIONS if name not in REFUSED]


# -- parity


@pytest.mark.parametrize("name", taken())
def test_ids_are_those_of_transformers(name: str) -> None:
    given = copy.deepcopy(CONVERSATIONS[name])
    for thinking, prompt in itertools.product(THINKING, [False, True]):
        options = {} if thinking is None else {"enable_thinking": thinking}
        expected = transformers_tokenizer().apply_chat_template(
            given.messages, tools=given.tools, add_generation_prompt=prompt, return_dict=False, **options
        )
        found = renderer(thinking, "hf_compat").render(given.messages, tools=given.tools, add_generation_prompt=prompt)
        assert found.token_ids == expected
        assert "unknown" not in found.fields


@pytest.mark.parametrize("name", taken())
def test_the_mask_is_that_of_the_generation_tags(name: str) -> None:
    conversation = copy.deepcopy(CONVERSATIONS[name])
    expected = transformers_tokenizer().apply_chat_template(
        conversation.messages, tools=conversation.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    found = renderer().render(conversation.messages, tools=conversation.tools)
    if found.token_ids == list(expected["input_ids"]):
        assert [int(drawn) for drawn in found.sampled] == list(expected["assistant_masks"])
        assert found.notes == list(conversation_remarks(conversation.messages))
    else:  # control tokens that a user typed
        assert found.notes
        assert all("which stays text" in note for note in found.notes)


# -- append only


def assert_append_only(conversation: Conversation, thinking: bool | None) -> None:
    whole = renderer(thinking).render_ids(conversation.messages, tools=conversation.tools)
    for stop, message in enumerate(conversation.messages[:-1], 1):
        if message["role"] == "assistant":
            part = renderer(thinking).render_ids(conversation.messages[:stop], tools=conversation.tools)
            assert whole[: len(part)] == part


@pytest.mark.parametrize("thinking", THINKING)
def test_what_was_rendered_stays_a_prefix(thinking: bool | None) -> None:
    for name in taken():
        assert_append_only(CONVERSATIONS[name], thinking)


@pytest.mark.parametrize("thinking", THINKING)
def test_a_turn_begins_with_its_generation_prompt(thinking: bool | None) -> None:
    """What a model was asked with is what stands before its reply ever after."""
    for name in taken():
        messages, tools = CONVERSATIONS[name].messages, CONVERSATIONS[name].tools
        rendered = renderer(thinking).render(messages, tools=tools)
        for turn in rendered.turns:
            if turn.message == 0:
                continue  # nothing to prompt with
            if thinking is False and any(messages[turn.message].get(key) for key in REASONING_FIELDS):
                continue  # reasoning where the prompt forbade it
            asked = renderer(thinking).render_ids(messages[: turn.message], tools=tools, add_generation_prompt=True)
            assert rendered.token_ids[: turn.start] == asked, name


PARTS = [
    "Hello",
    "\n",
    " ",
    "4",
    "2",
    "<|end|>",
    "<|turn|>user\n",
    "</think>",
    "<tool_call>",
    "é",
    "🗼",
    '"',
    "{}",
    "\t",
]
text = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
said = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool", "system"]), "content": text})
replied = st.fixed_dictionaries({"role": st.just("assistant"), "content": text}, optional={"reasoning_content": text})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(said, replied), min_size=1, max_size=6), st.sampled_from([None, False, True]))
def test_any_text_in_any_order_is_only_ever_appended(messages: list[dict[str, Any]], thinking: bool | None) -> None:
    assert_append_only(Conversation(messages), thinking)


# -- vocabulary


# -- training


def script() -> Any:
    path = Path(__file__).parents[2] / "training" / "pocket" / "make_tokenizer.py"
    spec = importlib.util.spec_from_file_location("make_tokenizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_is_deterministic_and_shaped_like_the_shipped_file() -> None:
    make = script()
    texts = list(make.dialogues(make.random.Random(make.SEED), 200))
    assert texts == list(make.dialogues(make.random.Random(make.SEED), 200))
    first = make.written(make.train(texts, 600))
    assert first == make.written(make.train(texts, 600))
    made, shipped = json.loads(first), json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8"))
    assert [row["content"] for row in made["added_tokens"]] == [row["content"] for row in shipped["added_tokens"]]
    assert made["pre_tokenizer"] == shipped["pre_tokenizer"]
    assert json.loads(make.config()) == json.loads((POCKET / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert make.written(shipped) == (POCKET / "tokenizer.json").read_text(encoding="utf-8")
