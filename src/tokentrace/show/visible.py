"""Text that is safe to show: nothing in it makes a terminal or a browser act."""

import re
import unicodedata
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

_HIDDEN = (
    r"\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f-\u1160\u17b4-\u17b5\u180e\u200b"
    r"\u200e-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U000e0fff"
)
"""Invisible characters, and those that hide or reorder their neighbours."""
_SELECTORS = r"\u180b-\u180d\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
"""Variation selectors, which belong to the character before."""
_JOINERS = r"\u200c-\u200d"
_LETTER = rf"[^\x00-\x7f{_HIDDEN}{_SELECTORS}{_JOINERS}]"
"""Characters that a selector or a joiner may follow."""
_UNSEEN = re.compile(
    rf"[{_HIDDEN}]|(?<!{_LETTER})[{_SELECTORS}]|(?<!{_LETTER})(?<!{_LETTER}[{_SELECTORS}])[{_JOINERS}]"
)


def visible(text: str) -> str:
    """Replace everything that a terminal or a browser would act on, except newlines and tabs.

    Control characters become pictures (``␛``), invisible or reordering ones numbers, halves of
    surrogate pairs U+FFFD. Joiners and variation selectors stay next to emoji or non-ASCII letters.
    """
    if text.isascii() and text.isprintable():
        return text
    text = _UNSEEN.sub(_pictured, text)
    return "".join("\ufffd" if unicodedata.category(char) == "Cs" else char for char in text)


def _pictured(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 32:
        return chr(0x2400 + code)
    return "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def spelled(pieces: Iterable[bytes]) -> list[str]:
    """The text of each token. Bytes that are not UTF-8 become numbers.

    If several tokens spell one character, the first shows it, the others nothing.

    >>> spelled([b"na", b"\\xc3", b"\\xafve", b"\\xff"])
    ['na', 'ï', 've', '⟨FF⟩']
    """
    tokens = list(pieces)
    texts, ends = [""] * len(tokens), list(accumulate(map(len, tokens)))
    token = at = 0
    for char in b"".join(tokens).decode("utf-8", "surrogateescape"):
        while ends[token] <= at:
            token += 1
        is_byte = "\udc80" <= char <= "\udcff"
        texts[token] += f"⟨{ord(char) - 0xDC00:02X}⟩" if is_byte else char
        at += 1 if is_byte else len(char.encode())
    return texts


def quoted(text: str, limit: int = 48) -> str:
    """Quote text for a sentence: on one line, and cut if it is long."""
    text = visible(text[: limit + 1]).replace("\n", "⏎").replace("\t", "⇥")
    if not text:
        return "nothing"
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…`"


def counted(count: int, noun: str = "token") -> str:
    """A number with its noun.

    >>> counted(1), counted(2000, "row")
    ('1 token', '2,000 rows')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def listed(items: Iterable[Any], last: str = "and") -> str:
    """``"a, b and c"``."""
    names = [str(item) for item in items]
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else "".join(names)
