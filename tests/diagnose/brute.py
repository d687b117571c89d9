"""The oracle of audits: every append rendered by transformers' own Jinja, and compared as text.

Nothing of tokentrace decides here. Tokenizers are made up of the templates' control tokens: what a template does to
text does not depend on the vocabulary.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from tests.assets import family_dir
from tests.lazy import lazy
from tests.support import SPECIAL, tokenizer_json_for
from tokentrace.diagnose import AuditReport, audit_template
from tokentrace.tokens import Tokenizer

chat_template_utils = lazy("transformers.utils.chat_template_utils")

Messages = Sequence[Mapping[str, Any]]


def source_of(family: str) -> str:
    return (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")


def audited(source: str, name: str = "made up") -> AuditReport:
    """An audit of a template, with a tokenizer that has its control tokens."""
    tokenizer = Tokenizer(tokenizer_json_for(source), name=name, variables=SPECIAL, fast=False)
    return audit_template(tokenizer, chat_template=source)


@cache
def audit_of(family: str) -> AuditReport:
    return audited(source_of(family), family)


def rendered(source: str, messages: Messages, tools: Any, prompt: bool) -> str | None:
    """What transformers makes of a conversation; None where the template refuses it.

    Audits try many turns after one past, and many appends after one turn: each text is written once.
    """
    given = json.dumps([[dict(message) for message in messages], list(tools) if tools else None])
    return _written(source, given, prompt)


@lru_cache(maxsize=1_000)
def _written(source: str, given: str, prompt: bool) -> str | None:
    messages, tools = json.loads(given)
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **SPECIAL
        )
    except Exception:
        return None
    return str(texts[0])


def breaks(source: str, past: Messages, said: Mapping[str, Any], appended: Messages, tools: Any) -> bool | None:
    """Whether the next prompt does not begin with the prompt before it and the turn that followed; None: refused."""
    asked = rendered(source, past, tools, True)
    turned = rendered(source, [*past, said], tools, False)
    prompt = appended[-1]["role"] != "assistant"
    after = rendered(source, [*past, said, *appended], tools, prompt)
    if asked is None or turned is None or after is None:
        return None
    return not turned.startswith(asked) or not after.startswith(turned.rstrip())


WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "über", "雨", "naïve")


def reworded(messages: Messages, chance: random.Random) -> list[dict[str, Any]]:
    """The same conversation with other texts; tags in them, and white space around them, stay."""

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))

    def value(given: Any) -> Any:
        if isinstance(given, dict):
            return {key: value(inner) for key, inner in given.items()}
        if isinstance(given, list):
            return [value(inner) for inner in given]
        return text() if isinstance(given, str) else given

    out = []
    for message in copy.deepcopy([dict(message) for message in messages]):
        content = message.get("content")
        if isinstance(content, str) and content:
            message["content"] = re.sub(r"(?<![<\w/|])[^\W\d_][^<>\n|]*[^\W\d_](?![\w>|])", lambda _: text(), content)
        elif isinstance(content, list):
            message["content"] = [{**part, "text": text()} for part in content]
        if message.get("reasoning_content"):
            message["reasoning_content"] = text()
        for call in message.get("tool_calls") or ():
            if isinstance(call["function"]["arguments"], dict):
                call["function"]["arguments"] = value(call["function"]["arguments"])
        out.append(message)
    return out
