"""The oracle of audits: every append rendered by transformers' own Jinja, and compared as text.

Nothing of tokentrace decides here. Tokenizers are made up of the templates' control tokens: what a template does to
text does not depend on the vocabulary.
"""

import copy
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from tests.assets import family_dir
from tests.oracle import Refusal, hf_jinja
from tests.support import SPECIAL, over_bytes
from tokentrace.diagnose import AuditReport, audit_template

Messages = Sequence[Mapping[str, Any]]


def source_of(family: str) -> str:
    return (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")


def audited(source: str, name: str = "made up") -> AuditReport:
    return audit_template(over_bytes(source, name))


@cache
def audit_of(family: str) -> AuditReport:
    return audited(source_of(family), family)


def rendered(source: str, messages: Messages, tools: Any, prompt: bool) -> str | None:
    """What transformers makes of a conversation; None where the template refuses it. Each text is rendered once."""
    return _rendered(source, json.dumps([list(map(dict, messages)), list(tools) if tools else None]), prompt)


@lru_cache(maxsize=1_000)
def _rendered(source: str, conversation: str, prompt: bool) -> str | None:
    result = hf_jinja(source, *json.loads(conversation), add_generation_prompt=prompt, **SPECIAL)
    return None if isinstance(result, Refusal) else result[0]


def breaks(source: str, past: Messages, reply: Mapping[str, Any], appended: Messages, tools: Any) -> bool | None:
    """Whether the next prompt does not begin with the prompt before it and the turn that followed; None: refused."""
    before = rendered(source, past, tools, True)
    turn = rendered(source, [*past, reply], tools, False)
    after = rendered(source, [*past, reply, *appended], tools, appended[-1]["role"] != "assistant")
    if before is None or turn is None or after is None:
        return None
    return not turn.startswith(before) or not after.startswith(turn.rstrip())


WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "über", "雨", "naïve")


def reworded(messages: Messages, chance: random.Random) -> list[dict[str, Any]]:
    """The same conversation with other texts; tags in them, and white space around them, stay."""

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))

    def reword(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reword(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [reword(inner) for inner in value]
        return text() if isinstance(value, str) else value

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
                call["function"]["arguments"] = reword(call["function"]["arguments"])
        out.append(message)
    return out
