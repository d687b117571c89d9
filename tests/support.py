"""What tests share: loaded tokenizers, renderers made of them, and small tokenizers made up on the spot."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from tests.assets import FAMILIES, family_dir, trl_templates
from tests.conversations import CONVERSATIONS, Conversation
from tokentrace import RenderedTokens, Renderer, Tokenizer, TokentraceError, create_renderer
from tokentrace.formats.deepseek import DEEPSEEK_V4, DEEPSEEK_V32
from tokentrace.tokens.loading import load_tokenizer
from tokentrace.tokens.vocabulary import byte_alphabet

JINJA_FAMILIES = [name for name, row in FAMILIES.items() if row.template is not None]
"""Families that ship a chat template."""

PYTHON_FORMATS = {"deepseek-v3.2": DEEPSEEK_V32, "deepseek-v4": DEEPSEEK_V4}
"""The others, whose format is written in Python."""


templates_of_trl = cache(trl_templates)
"""Every template of the pinned TRL release, by name."""

# -- tokenizers


@cache
def vocabulary_digest(family: str) -> str:
    """Which tokenizer.json a family has; several families share one. Pocket is itself."""
    if family not in FAMILIES:
        return family
    return hashlib.sha256((family_dir(family) / "tokenizer.json").read_bytes()).hexdigest()


Result = TypeVar("Result")

_MADE: OrderedDict[str, dict[Any, Any]] = OrderedDict()
"""What was made of the vocabularies that were asked for last."""

_VOCABULARIES = 2
"""How many are held: each is some hundred MB, and tests of one vocabulary run together."""


def per_vocabulary(make: Callable[..., Result]) -> Callable[..., Result]:
    """A cache of a function of a family (its first argument) that forgets when other vocabularies are asked for."""

    @wraps(make)
    def made(family: str, *rest: Any, **named: Any) -> Result:
        digest = vocabulary_digest(family)
        _MADE.setdefault(digest, {})
        _MADE.move_to_end(digest)
        while len(_MADE) > _VOCABULARIES:
            _MADE.popitem(last=False)
        found = _MADE[digest]
        key = (make, family, rest, tuple(sorted(named.items())))
        if key not in found:
            found[key] = make(family, *rest, **named)
        result: Result = found[key]
        return result

    return made


def _vocabulary(family: str) -> Tokenizer:
    """The family's tokenizer.json, with both its encoders made: some seconds, so families share it."""
    held = _MADE[vocabulary_digest(family)]
    if _vocabulary not in held:
        held[_vocabulary] = load_tokenizer(family_dir(family))
        held[_vocabulary].encode_plain(["x"])
    loaded: Tokenizer = held[_vocabulary]
    return loaded


@per_vocabulary
def load_family(family: str) -> Tokenizer:
    """The family's tokenizer. Families with one vocabulary share its encoders; the rest is each family's own."""
    folder = family_dir(family)
    shared = copy.copy(_vocabulary(family))
    with tempfile.TemporaryDirectory() as stub:
        for path in folder.glob("*"):
            if path.name != "tokenizer.json":
                shutil.copy(path, stub)
        (Path(stub) / "tokenizer.json").write_text(byte_tokenizer_json(()), encoding="utf-8")
        own = load_tokenizer(stub)
    shared.name = family
    shared.templates, shared.variables, shared.eos_ids = own.templates, own.variables, own.eos_ids
    return shared


@per_vocabulary
def _renderer(family: str, settings: str) -> Renderer:
    given = json.loads(settings)
    template = PYTHON_FORMATS.get(family)
    return create_renderer(load_family(family), "default", **{"chat_template": template, "lost": "ignore", **given})


def make_renderer(family: str, **settings: Any) -> Renderer:
    """A renderer with the family's shipped template; equal settings give the same one.

    Lost text is nobody's concern here unless `lost` says so: most templates have something that they do not write.
    """
    return _renderer(family, json.dumps(settings, sort_keys=True))


@dataclass(frozen=True, slots=True)
class Case:
    """One way to render one conversation of the matrix."""

    name: str
    conversation: Conversation
    prompt: bool

    def render(self, renderer: Renderer) -> RenderedTokens | TokentraceError:
        """What the renderer makes of it, refusals included."""
        return rendered(renderer, self.conversation, prompt=self.prompt)


def matrix() -> Iterator[Case]:
    """Every conversation, without and with a generation prompt."""
    for name, conversation in CONVERSATIONS.items():
        for prompt in (False, True):
            yield Case(name, conversation, prompt)


def rendered(renderer: Renderer, conversation: Conversation, *, prompt: bool = False) -> Any:
    """The rendered conversation, or the error with which it was refused."""
    try:
        return renderer.render(conversation.messages, tools=conversation.tools, add_generation_prompt=prompt)
    except TokentraceError as error:
        return error


def variable_choices(family: str) -> list[dict[str, Any]]:
    """No template variables, then each documented value of each variable on its own."""
    return [{}, *({name: value} for name, values in FAMILIES[family].kwargs.items() for value in values)]


def some(failures: Sequence[Any], shown: int = 5) -> str:
    """The first failures, one a line, for the message of an assertion."""
    lines = [str(failure)[:600] for failure in failures[:shown]]
    return f"{len(failures)} failures:\n" + "\n".join(lines)


# -- tokenizers made up on the spot


def byte_tokenizer_json(controls: Iterable[str]) -> str:
    """A tokenizer.json with one token per byte and the given control tokens."""
    added = [
        {
            "id": 256 + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(controls)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": byte_alphabet(),
        "merges": [],
    }
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return json.dumps(spec)


CONTROL = re.compile(
    r"<\|[^\s<>|]+\|?>"  # <|im_start|>, <|turn>
    r"|<[^\s<>|]+\|>"  # <turn|>
    r"|<｜[^｜]+｜>"
    r"|</?(?:s|bos|eos|think|start_of_turn|end_of_turn|end_of_utterance|tool_call|tool_calls)>"
    r"|\[/?[A-Z_]+\]"
)
"""What looks like a control token in the source of a template."""


def tokenizer_json_for(*templates: str) -> str:
    """A tokenizer.json of bytes in which whatever looks like a control token in the templates is one."""
    found = {match for source in templates for match in CONTROL.findall(source)}
    return byte_tokenizer_json(sorted(found | {"<s>", "</s>"}))


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
"""Template variables of made-up tokenizers."""
