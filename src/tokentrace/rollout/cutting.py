"""Tool results that are too long: cut by tokens, with a marker that the model can see."""

from __future__ import annotations

import functools
from enum import StrEnum

import numpy as np

from ..tokens.tokenizer import Tokenizer
from ..tokens.vocabulary import Vocabulary


class Keep(StrEnum):
    """Which part of a long text stays."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"
    """The beginning and the end."""


def cut_text(text: str, limit: int, tokenizer: Tokenizer, keep: Keep | str = Keep.MIDDLE) -> str:
    """Return a text, cut to about `limit` tokens, with a marker. Encodes only what is near the part that stays.

    >>> from tokentrace import load_tokenizer
    >>> from tokentrace.pocket import POCKET
    >>> cut_text("one two three four five six", 4, load_tokenizer(POCKET), "head").splitlines()[-1]
    '[… 12 more characters]'
    """
    text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
    keep = Keep(keep)
    most = limit * _longest_token(tokenizer.vocabulary)
    if len(text) <= 2 * most and len(tokenizer.encode_plain(text)) <= limit:
        return text
    head = limit if keep is Keep.HEAD else 0 if keep is Keep.TAIL else limit - limit // 2
    front = _part(text[:most], head, tokenizer) if head else ""
    back = _part(text[-most:], limit - head, tokenizer, last=True) if limit - head else ""
    marker = f"[… {len(text) - len(front) - len(back):,} more characters]"
    return "\n".join(part for part in (front, marker, back) if part)


@functools.lru_cache(8)
def _longest_token(vocabulary: Vocabulary) -> int:
    return int(vocabulary.byte_lengths.max())


def _part(text: str, count: int, tokenizer: Tokenizer, *, last: bool = False) -> str:
    raw = text.encode("utf-8")
    lengths = np.abs(tokenizer.vocabulary.byte_lengths[tokenizer.encode_plain(text)])
    size = int((lengths[-count:] if last else lengths[:count]).sum())
    return (raw[len(raw) - size :] if last else raw[:size]).decode("utf-8", "ignore")
