"""A template that prints its output through a buffer (a set, filter or call block, a macro) has the same spans."""

from typing import Any

import pytest

from tests.assets import family_dir
from tests.conversations import CONVERSATIONS, Conversation, assistant, user
from tests.support import JINJA_FAMILIES, SPECIAL, byte_tokenizer_json, rotating
from tokentrace import Renderer, TemplateError, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.template import ChatTemplate, wrap_tools
from tokentrace.tokens import Tokenizer

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
        wrapped = None if tools is None else wrap_tools(tools)
        rendering = template.render(messages, wrapped, add_generation_prompt=prompt, variables=SPECIAL)
    except TemplateError as error:
        return str(error).partition(" (line")[0]
    return rendering.spans(), rendering.tail


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_a_buffer_changes_no_span(family: str) -> None:
    source = (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")
    direct = ChatTemplate(source)
    first = JINJA_FAMILIES.index(family)
    for number, (name, conversation) in rotating(enumerate(CONVERSATIONS.items(), first), f"buffers {family}", 5):
        buffer = list(BUFFERS)[number % len(BUFFERS)]
        through = ChatTemplate(buffered(source, buffer))
        for prompt in (False, True):
            arguments = conversation.messages, conversation.tools, prompt
            assert spans(through, *arguments) == spans(direct, *arguments), (name, buffer)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_a_buffer_changes_no_mask_and_no_bridge(buffer: str) -> None:
    direct = create_renderer(POCKET, lost="ignore")
    source = direct.study().template.source.replace("endgeneration", "endif")  # type: ignore[attr-defined]
    source = source.replace("generation -%}", "if true -%}")  # a tag covers what is printed next, so a buffer moves it
    through = create_renderer(direct.tokenizer, "default", chat_template=buffered(source, buffer), lost="ignore")
    for conversation in list(CONVERSATIONS.values())[::3]:
        assert outcome(through, conversation) == outcome(direct, conversation)


def outcome(renderer: Renderer, conversation: Conversation) -> Any:
    try:
        rendered = renderer.render(conversation.messages, tools=conversation.tools)
    except TemplateError:
        return None
    new = [user("And <|im_end|> then?")]
    bridges = [
        renderer.bridge(rendered.ids[: turn.start], rendered.ids[turn.start : turn.stop - cut], new)
        for turn in rendered.turns[-1:]
        for cut in (0, 1, 3)
    ]
    bridged = [
        (one.new_ids.tolist(), one.kinds.tolist(), one.messages.tolist()) if one else str(one) for one in bridges
    ]
    return rendered.token_ids, rendered.mask.tolist(), rendered.turns, bridged, rendered.notes


TURN = "'<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n'"
COLLECTED = {
    "text": "{% set ns.s = ns.s ~ TURN %}{% endfor %}{{ ns.s }}",
    "text, piece by piece": (
        "{% set ns.s = ns.s ~ '<|im_start|>' ~ m.role ~ '\\n' %}{% set ns.s = ns.s ~ m.content %}"
        "{% set ns.s = ns.s ~ '<|im_end|>\\n' %}{% endfor %}{{ ns.s }}"
    ),
    "list": "{% set ns.l = ns.l + [TURN] %}{% endfor %}{{ ns.l | join }}",
    "list in the last turn": "{% set ns.l = ns.l + [TURN] %}{% if loop.last %}{{ ns.l | join }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("way", COLLECTED)
def test_text_that_a_namespace_collects_belongs_to_the_turn_that_built_it(way: str) -> None:
    ask = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    loop = "{% set ns = namespace(s='', l=[]) %}{% for m in messages %}"
    bodies = [COLLECTED[way], "{{ TURN }}{% endfor %}"]
    tokenizer = Tokenizer(byte_tokenizer_json(["<|im_start|>", "<|im_end|>"]), fast=False)
    messages = [user("hi"), assistant("yes"), user("q"), assistant("no")]
    results: list[Any] = []
    for body in bodies:
        source = f"{loop}{body.replace('TURN', TURN)}{ask}"
        renderer = create_renderer(tokenizer, "default", chat_template=source, lost="ignore")
        prompt = renderer.render(messages[:3], add_generation_prompt=True).ids
        bridges = [renderer.bridge_to_next_turn(prompt, list(text), [user("next")]) for text in (b"no", b"")]
        rendered = [renderer.render(messages, add_generation_prompt=prompt) for prompt in (False, True)]
        facts = [(one.mask.tolist(), one.message_indices, one.rendering.spans()) for one in rendered]
        results.append((facts, [None if bridge is None else bridge.token_ids for bridge in bridges]))
    assert results[0] == results[1]
