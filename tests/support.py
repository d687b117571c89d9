"""Shared by tests: loaded tokenizers, renderers of them, and small synthetic tokenizers."""

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
"""Families without one, whose format is written in Python."""


templates_of_trl = cache(trl_templates)
"""Every template of the pinned TRL release, by name."""

# -- tokenizers


@cache
def vocabulary_digest(family: str) -> str:
    """Identifies a family's tokenizer.json, which families may share; for pocket, the name itself."""
    if family not in FAMILIES:
        return family
    return hashlib.sha256((family_dir(family) / "tokenizer.json").read_bytes()).hexdigest()


Result = TypeVar("Result")

_CACHE: OrderedDict[str, dict[Any, Any]] = OrderedDict()
"""Cached results of the families that were used last, and of their vocabularies, by digest."""

_MAX_FAMILIES = 2
_MAX_VOCABULARIES = 2
"""The size of the cache: a vocabulary takes some hundred MB, and tests of one vocabulary run together."""


def _cached(kind: str, key: str, limit: int) -> dict[Any, Any]:
    """The cache of a family or a vocabulary; the least recently used one is dropped."""
    entries = _CACHE.setdefault(f"{kind} {key}", {})
    _CACHE.move_to_end(f"{kind} {key}")
    names = [name for name in _CACHE if name.startswith(f"{kind} ")]
    for name in names[:-limit]:
        del _CACHE[name]
        if kind == "vocabulary":  # a family's cache is small, and dropped with its vocabulary
            _release_memory()
    return entries


def _release_memory() -> None:
    """Return freed memory to the system, which glibc otherwise keeps."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def per_family(make: Callable[..., Result]) -> Callable[..., Result]:
    """Cache a function of a family (its first argument) while that family is among the last ones used."""

    @wraps(make)
    def cached(family: str, *args: Any, **kwargs: Any) -> Result:
        _cached("vocabulary", vocabulary_digest(family), _MAX_VOCABULARIES)
        results = _cached("family", family, _MAX_FAMILIES)
        key = (make, args, tuple(sorted(kwargs.items())))
        if key not in results:
            results[key] = make(family, *args, **kwargs)
        result: Result = results[key]
        return result

    return cached


def _vocabulary(family: str) -> Tokenizer:
    """The family's tokenizer with its fast encoder loaded. This takes some seconds, so families share it."""
    cache = _cached("vocabulary", vocabulary_digest(family), _MAX_VOCABULARIES)
    if _vocabulary not in cache:
        cache[_vocabulary] = load_tokenizer(family_dir(family))
        cache[_vocabulary].warm_up()
        cache[_vocabulary].encode_plain("x")
    loaded: Tokenizer = cache[_vocabulary]
    return loaded


@per_family
def load_family(family: str) -> Tokenizer:
    """The family's tokenizer. Families with the same vocabulary share its encoders, but not templates and variables."""
    folder = family_dir(family)
    shared = copy.copy(_vocabulary(family))
    with tempfile.TemporaryDirectory() as stub:
        for path in folder.glob("*"):
            if path.name != "tokenizer.json" and path.is_file():
                shutil.copy(path, stub)
        (Path(stub) / "tokenizer.json").write_text(byte_tokenizer_json(()), encoding="utf-8")
        unshared = load_tokenizer(stub)
    shared.name = family
    shared.templates, shared.variables, shared.eos_ids = unshared.templates, unshared.variables, unshared.eos_ids
    return shared


@per_family
def _renderer(family: str, settings: str) -> Renderer:
    options = json.loads(settings)
    template = PYTHON_FORMATS.get(family)
    return create_renderer(load_family(family), "default", **{"chat_template": template, "lost": "ignore", **options})


def make_renderer(family: str, **settings: Any) -> Renderer:
    """A renderer with the family's template, the same for equal settings. It ignores lost text by default."""
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
    """The rendered conversation, or the error raised. Those of the matrix are cached, unless `again`."""
    key = (id(conversation), prompt)
    cache = _RENDERED.setdefault(renderer, {}) if id(conversation) in _MATRIX else {}
    if key not in cache or again:
        try:
            cache[key] = renderer.render(conversation.messages, tools=conversation.tools, add_generation_prompt=prompt)
        except TokentraceError as error:
            error.__cause__ = error.__context__ = None  # their frames hold the renderer
            cache[key] = error.with_traceback(None)
    return cache[key]


Item = TypeVar("Item")

FULL = os.environ.get("TOKENTRACE_FULL") == "1"
"""Whether all combinations of families and conversations are tested, as in `make test-long`."""


def rotating(items: Iterable[Item], key: str, every: int) -> list[Item]:
    """One in `every` items, from an offset by the key (the family, so each item meets some); all in a full run."""
    pool = list(items)
    return pool if FULL else pool[crc32(key.encode()) % every :: every]


def examples(many: int) -> int:
    """The number of Hypothesis examples for a stable property: a sixth of `many`, in a full run all."""
    return many if FULL else max(15, many // 6)


def variable_choices(family: str) -> list[dict[str, Any]]:
    """No template variables, then each documented value of each variable on its own."""
    return [{}, *({name: value} for name, values in FAMILIES[family].kwargs.items() for value in values)]


def some(failures: Sequence[Any], count: int = 5) -> str:
    """The first failures, one per line, for an assertion's message."""
    lines = [str(failure)[:600] for failure in failures[:count]]
    return f"{len(failures)} failures:\n" + "\n".join(lines)


# -- synthetic tokenizers


def byte_tokenizer_json(controls: Iterable[str]) -> str:
    """A tokenizer.json with one token per byte and the given control tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in controls])
    return str(tokenizer.to_str())


CONTROL = re.compile(
    r"<\|[^\s<>|]+\|?>"  # <|im_start|>, <|turn>
    r"|<[^\s<>|]+\|>"  # <turn|>
    r"|<｜[^｜]+｜>"
    r"|</?(?:s|bos|eos|think|start_of_turn|end_of_turn|end_of_utterance|tool_call|tool_calls)>"
    r"|\[/?[A-Z_]+\]"
)
"""Matches text that looks like a control token in a template's source."""


def tokenizer_json_for(*templates: str) -> str:
    """A tokenizer.json of bytes whose control tokens are all that look like one in the templates."""
    controls = {match for source in templates for match in CONTROL.findall(source)}
    return byte_tokenizer_json(sorted(controls | {"<s>", "</s>"}))


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
"""Template variables of synthetic tokenizers."""


def over_bytes(source: str, name: str = "made up", controls: str = "", **settings: Any) -> Renderer:
    """A renderer for a template, with a tokenizer of bytes that has the control tokens in its source."""
    tokenizer = Tokenizer(tokenizer_json_for(source, controls), name=name, variables=SPECIAL, fast=False)
    return create_renderer(tokenizer, "default", chat_template=source, **settings)


@lru_cache(maxsize=4)
def trl_renderer(name: str) -> Renderer:
    """A template of TRL on a tokenizer of bytes."""
    return over_bytes(templates_of_trl()[name], name)
