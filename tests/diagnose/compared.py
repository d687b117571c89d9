"""Histories to compare, and renderers to compare them with."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.assets import family_dir
from tests.conversations import CONVERSATIONS
from tests.support import SPECIAL, make_renderer, tokenizer_json_for
from tokentrace import Renderer, create_renderer
from tokentrace.diagnose import HistoryReport, compare_histories
from tokentrace.diagnose.history_differences import Shown
from tokentrace.tokens import Tokenizer

REAL = {"qwen3", "qwen3.5"}
"""Families that are tried with their own vocabularies."""
LAST_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and "
    "m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""QwQ-like: reasoning is shown in the last message only."""


def made_up(source: str, **settings: Any) -> Renderer:
    tokenizer = Tokenizer(tokenizer_json_for(source), variables=SPECIAL, fast=False)
    return create_renderer(tokenizer, "default", chat_template=source, **settings)


@cache
def spelled(family: str, **settings: Any) -> Renderer:
    """The family's template over one token a byte and its control tokens: no vocabulary to load."""
    return made_up((family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8"), **settings)


def renderer_of(family: str, **settings: Any) -> Renderer:
    return (make_renderer if family in REAL else spelled)(family, **settings)


def compare(family: str, name: str, **settings: Any) -> HistoryReport:
    conversation = CONVERSATIONS[name]
    return compare_histories(renderer_of(family, **settings), conversation.messages, tools=conversation.tools)


def ids(shown: Shown | None) -> list[int]:
    assert shown is not None
    found: list[int] = shown.ids.tolist()
    return found
