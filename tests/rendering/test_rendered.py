"""RenderedTokens: arrays, lists on request, selections."""

import pickle
from typing import Any

import numpy as np
import pytest

from tests.support import over_bytes
from tokentrace import RenderedTokens, create_renderer
from tokentrace.errors import RendererError
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import SampleBuilder

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "reasoning_content": "Add.", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.fixture(scope="module")
def rendered() -> RenderedTokens:
    return create_renderer(POCKET).render(MESSAGES, add_generation_prompt=True)


def test_arrays_and_lists_agree_and_have_one_entry_per_token(rendered: RenderedTokens) -> None:
    assert (rendered.ids.dtype, rendered.mask.dtype) == (np.int32, np.bool_)
    tokens = rendered[:]
    assert len(tokens) == len(rendered)
    ids, texts, messages, roles, fields, origins, sampled = map(list, zip(*tokens, strict=True))
    assert ids == rendered.token_ids == rendered.ids.tolist()
    assert messages == rendered.message_indices == rendered.messages.tolist()
    assert sampled == rendered.sampled == rendered.mask.tolist()
    assert (texts, fields, origins) == (rendered.tokens(), rendered.fields, rendered.origins)
    assert set(roles) == {*(message["role"] for message in MESSAGES), None}
    assert (list(rendered), rendered[-1], rendered[2:-2]) == (tokens, tokens[-1], tokens[2:-2])
    assert rendered.decode() == rendered.text
    with pytest.raises(IndexError):
        rendered[len(rendered)]


def test_what_belongs_to_no_message_has_minus_one(rendered: RenderedTokens) -> None:
    prompt = [i for i, field in enumerate(rendered.fields) if field == "generation_prompt"]
    assert prompt == list(range(prompt[0], len(rendered)))
    assert {rendered.message_indices[i] for i in prompt} == {-1}
    assert set(rendered.message_indices) == {-1, 0, 1, 2, 3, 4}


LLAMA = (
    "{{ bos }}{% if messages[0].role == 'system' %}"
    "{% set said = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set said = '' %}{% endif %}<s>system\nDate: {{ date }}\n{{ said }}</s>"
    "{% if tools %}<s>user\nTools: {{ tools | tojson }}{{ messages[0].content }}</s>{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
)
"""Like Llama 3's templates: always a system block, and tools in the first user message."""


@pytest.mark.parametrize(
    ("count", "tools", "owner"), [(0, None, 0), (0, [{"name": "f"}], 0), (1, None, -1), (1, [{"name": "f"}], -1)]
)
def test_a_system_block_belongs_whole_to_the_system_message_or_to_none(count: int, tools: Any, owner: int) -> None:
    renderer = create_renderer(POCKET, "default", chat_template=LLAMA, date="26 Jul 2024", bos="")
    tokens = renderer.render(MESSAGES[count:2], tools=tools)
    block = tokens.text.index("Date: 26 Jul 2024")
    first, stop = tokens.encoded.tokens_touching(block, block + len("Date: 26 Jul 2024"))
    assert {*tokens.message_indices[:first], *tokens.message_indices[first:stop]} == {owner}


def test_selections(rendered: RenderedTokens) -> None:
    assert rendered.decode(rendered.select(role="user", field="content")) == "1+1?"
    assert rendered.decode(rendered.select(message=2, field="reasoning_content")) == "Add."
    assert rendered.decode(rendered.select(field="tool_calls")).startswith("add")
    assert not (rendered.select(role="tool") & rendered.mask).any()
    assert rendered.select(sampled=True).tolist() == rendered.sampled
    assert rendered.decode(rendered.select(field="thinking")) == "Add."  # another name of the field


@pytest.mark.parametrize(
    ("selection", "error"),
    [
        ({"role": 5}, "there is no role 5; there are assistant"),
        ({"field": "contents"}, "there is no field"),
        ({"field": ["content"]}, "there is no field"),
        ({"message": 5}, "only 5, from 0 to 4"),
        ({"message": -2}, "only 5"),
        ({"message": True}, "whole number"),
        ({"message": "0"}, "whole number"),
    ],
)
def test_an_impossible_selection_is_refused(rendered: RenderedTokens, selection: Any, error: str) -> None:
    with pytest.raises(RendererError, match=error):
        rendered.select(**selection)


def test_the_generation_prompt_is_found_where_the_last_message_stands_outside_every_turn() -> None:
    """As in Llama 3.1, which writes tools and the first user message before its loop."""
    source = (
        "<|im_start|>user {{ messages[0].content }}<|im_end|>{% if add_generation_prompt %}<|im_start|>bot {% endif %}"
    )
    rendered = over_bytes(source).render(MESSAGES[1:2], add_generation_prompt=True)
    prompt = [token for token, field in zip(rendered.tokens(), rendered.fields, strict=True) if "prompt" in field]
    assert "".join(prompt) == "<|im_start|>bot "


def test_renderings_and_rows_can_be_pickled(rendered: RenderedTokens) -> None:
    (row,) = SampleBuilder(create_renderer(POCKET)).build(MESSAGES)
    assert row.rendered is not None
    for one in (
        rendered,
        row.rendered,
        create_renderer(POCKET, lost="ignore").render([*MESSAGES, {**MESSAGES[1], "x": "y"}]),
    ):
        twin = pickle.loads(pickle.dumps(one))
        for name in ("token_ids", "sampled", "message_indices", "fields", "origins", "notes", "lost", "dropped"):
            assert getattr(twin, name) == getattr(one, name), name
        assert twin.decode() == one.decode()
    twin = pickle.loads(pickle.dumps(row))
    assert (twin.notes, twin.rendered.token_ids) == (row.notes, row.token_ids)
    assert all(np.array_equal(column, twin.columns()[name]) for name, column in row.columns().items())
