"""Every template of TRL is read back by the grammar derived from it, or listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tests.conversations import Message, user
from tests.study.pieces import BESIDE, BOTH, CALLED, SAID, THOUGHT, TWICE, as_text, completion, meant, summary
from tests.support import SPECIAL, rotating, templates_of_trl, tokenizer_json_for
from tokentrace import Renderer, TokentraceError, create_renderer
from tokentrace.tokens import Tokenizer

# -- templates of TRL


TRL_NOT_READ_BACK: Final = {
    "gptoss": "writes content beside calls as reasoning, and the first call only",
    "muse_glimmer": "several messages a turn, which is not understood, and said so",
    "llama3_1": "writes one call a turn, and no content beside it",
    "llama3_2": "writes one call a turn, and no content beside it",
    "smolvlm": "takes content as a list only",
    "idefics3": "takes content as a list only",
    "llava_next": "takes content as a list only",
}
"""Templates (and those for training that go with them) that lose a part of the messages, or write what is not read."""
TRL_MESSAGES: Final = (SAID, THOUGHT, CALLED, BESIDE, TWICE, BOTH)


def trl_names() -> list[str]:
    return sorted(templates_of_trl())


def trl_renderer(name: str) -> Renderer:
    source = templates_of_trl()[name]
    tokenizer = Tokenizer(tokenizer_json_for(source), variables=dict(SPECIAL))
    return create_renderer(tokenizer, "default", chat_template=source)


def shown_by(renderer: Renderer, message: Message) -> Message | None:
    """What of a message stands in its turn, or None where the template refuses it."""
    try:
        rendered = renderer.render([user("Hi."), message])
    except TokentraceError:
        return None
    said = rendered.turns[-1]
    text = rendered.decode(slice(0, said.stop))
    shown = {key: value for key, value in message.items() if key != "reasoning_content" or value in text}
    calls = [one for one in message.get("tool_calls", []) if one["function"]["name"] in text]
    content = message["content"] if message["content"] in text else ""
    return {**shown, "content": content, "tool_calls": calls}


def losses(renderer: Renderer) -> Iterator[str]:
    """Where a rendered message is not what is read back."""
    for message in TRL_MESSAGES:
        given, shown = message, shown_by(renderer, message)
        if shown is None:
            given, shown = as_text(message), shown_by(renderer, as_text(message))
        if shown is None or shown["content"] != message["content"]:
            yield "refused"
            continue
        if len(shown["tool_calls"]) not in (0, len(message.get("tool_calls", []))):
            yield "calls are lost"
        prompt, ids = completion(renderer, given)
        response = renderer.parse_response(ids, prompt_ids=prompt)
        expected = meant(shown | {"tool_calls": message.get("tool_calls", []) if shown["tool_calls"] else []})
        if summary(response) != expected:
            yield f"{summary(response)} != {expected}"


def test_every_template_of_trl_is_read_back_or_listed() -> None:
    found = {name: list(losses(trl_renderer(name))) for name in rotating(trl_names(), "read back", 2)}
    lossy = {name: problems for name, problems in found.items() if problems}
    listed = {name for name in found if re.sub("_training$", "", name) in TRL_NOT_READ_BACK}
    assert set(lossy) == listed, {name: lossy.get(name) for name in set(lossy) ^ listed}


def test_templates_for_training_write_as_those_they_are_made_of() -> None:
    names = trl_names()
    twins = [(name, f"{name}_training") for name in names if f"{name}_training" in names]
    assert len(twins) > 10
    for name, twin in twins:
        assert trl_renderer(name).grammar() == trl_renderer(twin).grammar(), name
