"""A template that writes the conversation into a buffer and prints that at once writes the same spans.

A buffer is a set block, a macro, a filter block or a call block.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.assets import family_dir
from tests.conversations import CONVERSATIONS
from tests.support import JINJA_FAMILIES, SPECIAL
from tokentrace import TemplateError, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.template import ChatTemplate, wrap_tools

BUFFERS = {
    "set block": "{% set all %}SOURCE{%+ endset %}{{ all }}",
    "macro": "{% macro all() %}SOURCE{%+ endmacro %}{{ all() }}",
    "filter block": "{% filter replace('\x00', '') %}SOURCE{%+ endfilter %}",
    "call block": "{% macro all() %}{{ caller() }}{% endmacro %}{% call all() %}SOURCE{%+ endcall %}",
    "buffer in a buffer": "{% set all %}{% filter string %}SOURCE{%+ endfilter %}{% endset %}{{ all ~ '' }}",
}


def buffered(source: str, buffer: str) -> str:
    """`source`, written into a buffer. Jinja drops a newline at the end of a template, and one after a block's tag."""
    source = source.removesuffix("\n")
    return BUFFERS[buffer].replace("SOURCE", "\n" + source if source.startswith("\n") else source)


def spans(template: ChatTemplate, messages: Any, tools: Any, prompt: bool) -> Any:
    try:
        shown = None if tools is None else wrap_tools(tools)
        rendering = template.render(messages, shown, add_generation_prompt=prompt, variables=SPECIAL)
    except TemplateError as error:
        return str(error).partition(" (line")[0]
    return rendering.spans(), rendering.tail


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_a_buffer_changes_no_span(family: str) -> None:
    source = (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")
    direct = ChatTemplate(source)
    first = JINJA_FAMILIES.index(family)
    for number, (name, conversation) in list(enumerate(CONVERSATIONS.items(), first))[first % 3 :: 3]:
        buffer = list(BUFFERS)[number % len(BUFFERS)]
        through = ChatTemplate(buffered(source, buffer))
        for prompt in (False, True):
            given = conversation.messages, conversation.tools, prompt
            assert spans(through, *given) == spans(direct, *given), (name, buffer)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_buffer_changes_no_mask_and_no_bridge(buffer: str) -> None:
    direct = create_renderer(POCKET, lost="ignore")
    source = direct.study().template.source  # type: ignore[attr-defined]
    through = create_renderer(direct.tokenizer, "default", chat_template=buffered(source, buffer), lost="ignore")
    for conversation in list(CONVERSATIONS.values())[::3]:
        seen: list[Any] = []
        for renderer in (direct, through):
            try:
                rendered = renderer.render(conversation.messages, tools=conversation.tools)
            except TemplateError:
                seen.append(None)
                continue
            new = [{"role": "user", "content": "And <|im_end|> then?"}]
            bridges = [
                renderer.bridge(rendered.ids[: turn.start], rendered.ids[turn.start : turn.stop - cut], new)
                for turn in rendered.turns[-1:]
                for cut in (0, 1, 3)
            ]
            results = [
                (one.new_ids.tolist(), one.kinds.tolist(), one.messages.tolist()) if one else str(one)
                for one in bridges
            ]
            seen.append((rendered.token_ids, rendered.mask.tolist(), rendered.turns, results, rendered.notes))
        assert seen[0] == seen[1]
