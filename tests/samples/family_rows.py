"""Rows of every conversation by family, shared by the tests of supervised samples."""

import functools
from typing import Any

from tests import support
from tests.conversations import CONVERSATIONS, Conversation
from tests.support import per_family, rendered
from tokentrace import RenderedTokens, Renderer, Sample, build_supervised_sample
from tokentrace.samples.supervised import SampleBuilder, SampleSettings

make_renderer = functools.partial(support.make_renderer, messages="as_given")
"""Renderers that pass the conversations of the matrix to the template unchanged."""
SHAPES = {
    name: conversation
    for name, conversation in CONVERSATIONS.items()
    if not name.startswith(("arguments_", "content_", "tools_"))
    or name in ("content_none_alone", "content_one_text_part", "content_text_parts")
}
"""The matrix without the variants that differ in text only, for tests that build several rows per conversation."""


@per_family
def rows(family: str) -> dict[str, tuple[Conversation, RenderedTokens, Sample]]:
    renderer = make_renderer(family)
    builder = SampleBuilder(renderer)
    out = {}
    for name, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            (sample,) = builder.build(conversation.messages, conversation.tools)
            out[name] = (conversation, tokens, sample)
    return out


@per_family
def expanded(family: str) -> dict[str, list[Sample]]:
    builder = SampleBuilder(make_renderer(family), SampleSettings(past="expand"))
    out = {}
    for name, (conversation, _, _) in rows(family).items():
        if name in SHAPES and name != "assistant_first":  # some templates refuse it if nothing follows
            out[name] = builder.build(conversation.messages, conversation.tools)
    return out


def sample_of(renderer: Renderer, conversation: Conversation, **settings: Any) -> Sample:
    return build_supervised_sample(
        renderer, conversation.messages, tools=conversation.tools, **{"past": "template"} | settings
    )


def assistants(conversation: Conversation) -> list[int]:
    return [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def warnings_of(sample: Sample, kind: type[Warning]) -> list[str]:
    return [str(warning) for warning in sample.warnings if isinstance(warning, kind)]
