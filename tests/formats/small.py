"""Families with small vocabularies: a token for every byte, and the family's own control tokens."""

import json
from functools import cache
from typing import Any

from tests.assets import family_dir
from tests.support import PYTHON_FORMATS, SPECIAL, byte_tokenizer_json
from tokentrace import Renderer, create_renderer
from tokentrace.tokens import Tokenizer


@cache
def control_tokens(family: str) -> tuple[str, ...]:
    """The names of a family's control tokens, without the many that are reserved."""
    text = (family_dir(family) / "tokenizer.json").read_text(encoding="utf-8")
    key = '"added_tokens":'
    start = text.index("[", text.index(key) + len(key))
    rows = json.JSONDecoder().raw_decode(text, start)[0]
    names = [row["content"] for row in rows]
    idle = ("unused", "reserved", "holder", "control_", "SPECIAL_")
    return tuple(name for name in names if name.strip() and not any(word in name for word in idle))


@cache
def small_tokenizer(family: str) -> Tokenizer:
    """The family's control tokens, template and configuration on a vocabulary of bytes."""
    folder = family_dir(family)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items() if value}
    template = folder / "chat_template.jinja"
    return Tokenizer(
        byte_tokenizer_json(control_tokens(family)),
        name=family,
        templates={"default": template.read_text(encoding="utf-8")} if template.exists() else {},
        variables={key: value for key, value in texts.items() if isinstance(value, str)},
    )


@cache
def _renderer(family: str, renderer: str, settings: str) -> Renderer:
    options = {"chat_template": PYTHON_FORMATS.get(family), **json.loads(settings)}
    return create_renderer(small_tokenizer(family), renderer, **options)


def small_renderer(family: str, renderer: str = "default", **settings: Any) -> Renderer:
    """A renderer with the family's shipped template; equal settings give the same one."""
    return _renderer(family, renderer, json.dumps(settings, sort_keys=True))


@cache
def made_up_tokenizer(*controls: str) -> Tokenizer:
    """A vocabulary of bytes and some control tokens, ``</s>`` among them, which ends turns."""
    names = dict.fromkeys(("<s>", "</s>", *controls))
    return Tokenizer(byte_tokenizer_json(names), variables=dict(SPECIAL))


def made_up_renderer(template: str, *controls: str, **settings: Any) -> Renderer:
    """A renderer for a template that no model has."""
    return create_renderer(made_up_tokenizer(*controls), "default", chat_template=template, **settings)
