"""Tool results that are too long: cut by tokens, with a marker that the model can see."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from ..tokens.tokenizer import Tokenizer
from ..tokens.vocabulary import Vocabulary

_WIDEST: Final[WeakKeyDictionary[Vocabulary, int]] = WeakKeyDictionary()
"""The bytes of the longest token, of each vocabulary that was asked for: looking for it costs more than most texts."""


class Keep(StrEnum):
    """What is kept of a text that is too long."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"
    """The beginning and the end; what is between them goes."""


def cut_text(text: str, limit: int, tokenizer: Tokenizer, keep: Keep | str = Keep.MIDDLE) -> str:
    """`text`, or so much of it that it has about `limit` tokens, and a marker that says how much is gone.

    Half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD. However long the text is, the cost is that of the
    part that is kept: what is far from it is never encoded. What is gone is counted in characters.

    >>> from tokentrace import load_tokenizer
    >>> from tokentrace.pocket import POCKET
    >>> cut_text("one two three four five six", 4, load_tokenizer(POCKET), "head").splitlines()[-1]
    '[… 12 more characters]'
    """
    text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
    keep = Keep(keep)
    most = limit * _widest(tokenizer.vocabulary)
    if len(text) <= 2 * most:
        ids = tokenizer.encode_plain([text])[0]
        if len(ids) <= limit:
            return text
    head = limit if keep is Keep.HEAD else 0 if keep is Keep.TAIL else limit - limit // 2
    front = _kept(text[:most], head, tokenizer) if head else ""
    back = _kept(text[-most:], limit - head, tokenizer, last=True) if limit - head else ""
    gone = len(text) - len(front) - len(back)
    marker = f"[… {gone:,} more characters]"
    return "\n".join(part for part in (front, marker, back) if part)


def _widest(vocabulary: Vocabulary) -> int:
    found = _WIDEST.get(vocabulary)
    if found is None:
        found = _WIDEST[vocabulary] = int(vocabulary.byte_lengths.max())
    return found


def _kept(text: str, count: int, tokenizer: Tokenizer, *, last: bool = False) -> str:
    """The characters of the first `count` tokens, or of the last."""
    raw = text.encode("utf-8")
    lengths = np.abs(tokenizer.vocabulary.byte_lengths[tokenizer.encode_plain([text])[0]])
    kept = int((lengths[-count:] if last else lengths[:count]).sum())
    return (raw[len(raw) - kept :] if last else raw[:kept]).decode("utf-8", "ignore")
