"""transformers as the oracle: conversations rendered and encoded by a model's own template and vocabulary."""

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported: no request leaves the machine

from tests.assets import family_dir
from tests.lazy import lazy
from tests.support import per_family

TEMPLATE = "chat_template.jinja"
_loaded: dict[str, Any] = {}
"""The tokenizer loaded last, by the digest of its files."""

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The template, or transformers itself, raised instead of rendering."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class GenerationMask:
    """Ids of a whole conversation, and for each 1 where the template's `generation` blocks cover it."""

    ids: list[int]
    mask: list[int]


@per_family
def hf_tokenizer(family: str) -> Any:
    """The family's tokenizer from transformers, shared by families that differ only in the template; read-only."""
    folder, template = family_dir(family), family_dir(family) / TEMPLATE
    files = [file for file in sorted(folder.iterdir()) if file.is_file() and file.name != TEMPLATE]
    digest = hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()
    if digest not in _loaded:
        _loaded.clear()
        _loaded[digest] = lazy("transformers").PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True
        )
    tokenizer = copy.copy(_loaded[digest])
    tokenizer.chat_template = template.read_text(encoding="utf-8") if template.exists() else None
    return tokenizer


def _apply(tokenizer: Any, messages: Messages, tools: Tools, options: dict[str, Any]) -> Any:
    """`apply_chat_template` on copies, since a template may change its input; any exception is a refusal."""
    declared = copy.deepcopy(list(tools)) if tools is not None else None
    try:
        return tokenizer.apply_chat_template(copy.deepcopy(list(messages)), tools=declared, **options)
    except Exception as error:
        return Refusal(type(error).__name__, str(error))


def hf_ids(
    family: str, messages: Messages, tools: Tools = None, add_generation_prompt: bool = False, **kwargs: Any
) -> list[int] | Refusal:
    """Ids of the rendered conversation, or the refusal."""
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": False}
    ids: list[int] | Refusal = _apply(hf_tokenizer(family), messages, tools, options | kwargs)
    return ids


def hf_text(
    family: str, messages: Messages, tools: Tools = None, add_generation_prompt: bool = False, **kwargs: Any
) -> str | Refusal:
    """Text of the rendered conversation, or the refusal."""
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    rendered: str | Refusal = _apply(hf_tokenizer(family), messages, tools, options | kwargs)
    return rendered


def hf_jinja(source: str, messages: Messages, tools: Tools = None, **options: Any) -> tuple[str, Any] | Refusal:
    """Text from transformers' own Jinja environment, and the ranges in `generation` blocks if requested."""
    utils = lazy("transformers.utils.chat_template_utils")
    try:
        texts, ranges = utils.render_jinja_template([messages], tools=tools, chat_template=source, **options)
    except Exception as error:
        return Refusal(type(error).__name__, str(error))
    return str(texts[0]), [*ranges, []][0]


def hf_generation_mask(
    tokenizer: Any, template: str, messages: Messages, tools: Tools = None, **kwargs: Any
) -> GenerationMask | Refusal:
    """The ids that a training template marks as generated; `template` must have `generation` blocks."""
    options = {"chat_template": template, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = _apply(tokenizer, messages, tools, options | kwargs)
    if isinstance(encoded, Refusal):
        return encoded
    return GenerationMask(list(encoded["input_ids"]), list(encoded["assistant_masks"]))
