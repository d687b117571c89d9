"""Text that people are shown: nothing in it that a terminal or a browser would act upon."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any, Final

_UNSEEN: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def visible(text: str) -> str:
    """Text with nothing in it that a terminal or a browser would act upon; newlines and tabs stay.

    Control characters become their pictures (``␛``), marks that reorder or hide text their numbers, halves
    of surrogate pairs U+FFFD.
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


def counted(count: int, noun: str = "token") -> str:
    """A number with its noun.

    >>> counted(1), counted(2000, "row")
    ('1 token', '2,000 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(items: Iterable[Any], last: str = "and") -> str:
    """``"a, b and c"``."""
    names = [str(item) for item in items]
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else "".join(names)
