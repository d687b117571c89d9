"""What tests share: loaded tokenizers, renderers made of them, and small tokenizers made up on the spot."""

import copy
import ctypes
import gc
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary
from zlib import crc32

import tokenizers

from tests.assets import FAMILIES, family_dir, trl_templates
from tests.conversations import CONVERSATIONS, Conversation
from tokentrace import Renderer, TokentraceError, create_renderer
from tokentrace.formats.deepseek import DEEPSEEK_V4, DEEPSEEK_V32
from tokentrace.tokens import Tokenizer
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
"""What was made of the families that were asked for last, and of their vocabularies, by digest."""

_FAMILIES = 2
_VOCABULARIES = 2
"""How many are held: a vocabulary is some hundred MB, and tests of one run together."""


def _held(kind: str, key: str, most: int) -> dict[Any, Any]:
    """What is held of a family or a vocabulary; the one that was not asked for longest is forgotten."""
    found = _MADE.setdefault(f"{kind} {key}", {})
    _MADE.move_to_end(f"{kind} {key}")
    of_kind = [name for name in _MADE if name.startswith(f"{kind} ")]
    for name in of_kind[:-most]:
        del _MADE[name]
        if kind == "vocabulary":  # the rest is small, and goes with it
            _give_back_memory()
    return found


def _give_back_memory() -> None:
    """glibc keeps what was freed piece by piece unless it is asked."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def per_family(make: Callable[..., Result]) -> Callable[..., Result]:
    """A cache of a function of a family (its first argument) that forgets when other families are asked for."""

    @wraps(make)
    def made(family: str, *rest: Any, **named: Any) -> Result:
        _held("vocabulary", vocabulary_digest(family), _VOCABULARIES)
        found = _held("family", family, _FAMILIES)
        key = (make, rest, tuple(sorted(named.items())))
        if key not in found:
            found[key] = make(family, *rest, **named)
        result: Result = found[key]
        return result

    return made


def _vocabulary(family: str) -> Tokenizer:
    """The family's tokenizer.json, with its quick encoder at work: some seconds, so families share it."""
    held = _held("vocabulary", vocabulary_digest(family), _VOCABULARIES)
    if _vocabulary not in held:
        held[_vocabulary] = load_tokenizer(family_dir(family))
        held[_vocabulary].warm_up()
        held[_vocabulary].encode_plain("x")
    loaded: Tokenizer = held[_vocabulary]
    return loaded


@per_family
def load_family(family: str) -> Tokenizer:
    """The family's tokenizer. Families with one vocabulary share its encoders; the rest is each family's own."""
    folder = family_dir(family)
    shared = copy.copy(_vocabulary(family))
    with tempfile.TemporaryDirectory() as stub:
        for path in folder.glob("*"):
            if path.name != "tokenizer.json" and path.is_file():
                shutil.copy(path, stub)
        (Path(stub) / "tokenizer.json").write_text(byte_tokenizer_json(()), encoding="utf-8")
        own = load_tokenizer(stub)
    shared.name = family
    shared.templates, shared.variables, shared.eos_ids = own.templates, own.variables, own.eos_ids
    return shared


@per_family
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


def matrix() -> Iterator[Case]:
    """Every conversation, without and with a generation prompt."""
    for name, conversation in CONVERSATIONS.items():
        for prompt in (False, True):
            yield Case(name, conversation, prompt)


_RENDERED: WeakKeyDictionary[Renderer, dict[tuple[int, bool], Any]] = WeakKeyDictionary()
_MATRIX = {id(conversation) for conversation in CONVERSATIONS.values()}


def rendered(renderer: Renderer, conversation: Conversation, *, prompt: bool = False, again: bool = False) -> Any:
    """The rendered conversation, or the error with which it was refused.

    A renderer renders a conversation of the matrix once, whichever tests ask for it; `again` renders it anew.
    """
    key = (id(conversation), prompt)
    known = _RENDERED.setdefault(renderer, {}) if id(conversation) in _MATRIX else {}
    if key not in known or again:
        try:
            known[key] = renderer.render(conversation.messages, tools=conversation.tools, add_generation_prompt=prompt)
        except TokentraceError as error:
            error.__cause__ = error.__context__ = None  # their frames hold the renderer
            known[key] = error.with_traceback(None)
    return known[key]


Item = TypeVar("Item")

FULL = os.environ.get("TOKENTRACE_FULL") == "1"
"""Whether every product of families and conversations is tried in full, as `make test-long` does."""


def rotating(items: Iterable[Item], key: str, every: int) -> list[Item]:
    """One of so many items, beginning at a place that depends on the key; in a full run all of them.

    Tests give the family as the key, so that each item is tried with some family.
    """
    given = list(items)
    return given if FULL else given[crc32(key.encode()) % every :: every]


def examples(many: int) -> int:
    """How many examples Hypothesis tries of a law that has found nothing for long: a sixth, in a full run all."""
    return many if FULL else max(15, many // 6)


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
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in controls])
    return str(made.to_str())


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


def over_bytes(source: str, name: str = "made up", controls: str = "", **settings: Any) -> Renderer:
    """A renderer for a template, with a tokenizer of bytes that has the control tokens in its source."""
    tokenizer = Tokenizer(tokenizer_json_for(source, controls), name=name, variables=SPECIAL, fast=False)
    return create_renderer(tokenizer, "default", chat_template=source, **settings)


@lru_cache(maxsize=4)
def trl_renderer(name: str) -> Renderer:
    """A template of TRL on a tokenizer of bytes."""
    return over_bytes(templates_of_trl()[name], name)
