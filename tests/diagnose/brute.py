"""The oracle of audits: every append is rendered by transformers' own Jinja, and compared as text."""

import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from tests.assets import family_dir
from tests.oracle import Refusal, hf_jinja
from tests.support import SPECIAL, over_bytes
from tokentrace.diagnose import AuditReport, audit_template
from tokentrace.pocket import POCKET

Messages = Sequence[Mapping[str, Any]]


def source_of(family: str) -> str:
    return (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")


def audited(source: str, name: str = "made up") -> AuditReport:
    return audit_template(over_bytes(source, name))


@cache
def audit_of(family: str) -> AuditReport:
    return audited(source_of(family), family)


def rendered(source: str, messages: Messages, tools: Any, prompt: bool) -> str | None:
    """The text that transformers renders; None if the template refuses the conversation. Results are cached."""
    return _rendered(source, json.dumps([list(map(dict, messages)), list(tools) if tools else None]), prompt)


@lru_cache(maxsize=1_000)
def _rendered(source: str, conversation: str, prompt: bool) -> str | None:
    result = hf_jinja(source, *json.loads(conversation), add_generation_prompt=prompt, **SPECIAL)
    return None if isinstance(result, Refusal) else result[0]


def breaks(source: str, past: Messages, reply: Mapping[str, Any], appended: Messages, tools: Any) -> bool | None:
    """Whether the next prompt does not begin with the prompt and the turn before it; None if the template refuses."""
    before = rendered(source, past, tools, True)
    turn = rendered(source, [*past, reply], tools, False)
    after = rendered(source, [*past, reply, *appended], tools, appended[-1]["role"] != "assistant")
    if before is None or turn is None or after is None:
        return None
    return not turn.startswith(before) or not after.startswith(turn.rstrip())


WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "über", "雨", "naïve")
TEXT = re.compile(r"(?<![<\w/|])[^\W\d_][^<>\n|]*[^\W\d_](?![\w>|])")
"""Text outside of tags, without surrounding white space."""
NAMES = ("role", "type", "name", "id", "tool_call_id", "arguments")
"""Fields that stay as they are, and arguments given as JSON text."""


def reworded(messages: Messages, rng: random.Random) -> list[dict[str, Any]]:
    """The same conversation with other texts; tags and surrounding white space stay."""

    def reword(value: Any, field: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: reword(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [reword(inner, field) for inner in value]
        if not isinstance(value, str) or field in NAMES:
            return value
        return TEXT.sub(lambda _: " ".join(rng.choices(WORDS, k=rng.randint(1, 6))), value)

    return [reword(message) for message in messages]


def write_dropping(folder: Path) -> None:
    """Copy the embedded model, with a template that rewrites turns with reasoning once another message follows."""
    shutil.copytree(POCKET, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    template, loop = folder / "chat_template.jinja", "{%- for message in messages -%}"
    source = template.read_text(encoding="utf-8")
    assert loop in source
    mark = "{%- if not loop.last and message.reasoning_content -%}<i>{%- endif -%}"
    template.write_text(source.replace(loop, loop + mark), encoding="utf-8")
