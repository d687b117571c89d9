"""Signs of a rewritten text. Pure.

Their cost is linear in the length of the texts.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any, Final

from ..study.turns import common_prefix

_END: Final = 10_000
"""Of a long text, only this many characters at either end are read."""
_QUOTED: Final = 80
_SHORT_NOTE: Final = 300

_WORD: Final = (
    r"(?<![^\W_])(?:[^\W_]*\d[^\W_]*|[0-9a-f]{4,}|am|pm|utc|gmt"
    r"|(?:mon|tues|wednes|thurs|fri|satur|sun)(?:day)?|tue|wed|thu|sat"
    r"|jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)(?![^\W_])"
)
_INCIDENTAL: Final = re.compile(rf"{_WORD}(?:[\W_]{{1,2}}{_WORD})*", re.IGNORECASE)
"""A number, a date or an id."""

_SUMMARY: Final = re.compile(
    r"\A\W*(?:\w+\W+){0,3}summary\W*[:\n]"
    r"|summar(?:y|ies|i[sz]ation) of (?:the|our|your|this|all|its|what|previous|prior|earlier|past|older)\b"
    r"|(?:conversation|context|session|history|chat|progress|handoff|compaction) summary"
    r"|summary (?:so far|to date|until now)"
    r"|(?:conversation|messages?|history|session|context|turns|steps)[^.\n]{0,60}"
    r"\b(?:summari[sz]ed|compacted|condensed|compressed)"
    r"|</?(?:summary|state_snapshot|compressed_chat|conversation_summary|context_summary|compaction)>"
    r"|continued? from (?:a|the) previous (?:conversation|session)"
    r"|ran out of context"
    r"|produced a summary"
    r"|(?:conversation|discussion|history) (?:so far|to date|up to (?:this|now))"
    r"|(?:\d+|some|earlier|older|previous|prior|past|old) (?:previous |earlier |older )?"
    r"(?:conversation history|messages|turns|steps|history)[^.\n]{0,60}"
    r"\b(?:removed|omitted|dropped|skipped|truncated|trimmed|hidden|deleted|elided)"
    r"|(?:skipped|omitted|removed|dropped) \d+ (?:earlier |older |previous )?(?:messages|turns|steps)",
    re.IGNORECASE,
)
"""How agents begin a summary, or say that they left something out."""

_BLANK: Final = re.compile(
    r"\b(?:cleared|omitted|removed|truncated|elided|hidden|pruned|trimmed|compacted|redacted|dropped|discarded"
    r"|no longer (?:available|shown))\b|^\W*$",
    re.IGNORECASE,
)
"""What agents leave in place of a result that they blank."""


def changed_words(new: str, old: str) -> str:
    """The words in which a text differs from its earlier version, quoted.

    >>> changed_words("It is 10:31 in Bern.", "It is 10:30 in Bern.")
    "'10:31' in place of '10:30'"
    >>> changed_words("Be brief.", "Be brief. Today is Monday.")
    "'Today is Monday.' was left out"
    """
    words = [re.findall(r"\s+|\S+", text) for text in (new, old)]
    for _ in range(2):  # drop what both begin with, then what both end with
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*words, strict=False)))
        words = [side[same:][::-1] for side in words]
    one, other = ("".join(side) for side in words)
    if one.strip() != other.strip():
        one, other = one.strip(), other.strip()
    ours, theirs = (
        repr(text if len(text) <= _QUOTED else f"{text[: _QUOTED - 20]}…{text[-20:]}") for text in (one, other)
    )
    return f"{ours} is new" if not other else f"{ours} in place of {theirs}" if one else f"{theirs} was left out"


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _END else f"{text[:_END]}\n{text[-_END:]}"


def is_summary(text: str) -> bool:
    """True if a text says that it replaces earlier messages."""
    return _SUMMARY.search(_ends(text)) is not None


def is_similar(one: str, other: str) -> bool:
    """True if two texts share at least half of their pairs of words."""
    pairs = []
    for words in (_ends(text).split() for text in (one, other)):
        pairs.append(Counter(pairwise(words) if len(words) >= 4 else ((word,) for word in words)))
    total = pairs[0].total() + pairs[1].total()
    return total > 0 and 4 * (pairs[0] & pairs[1]).total() >= total


def is_nonce(one: str, other: str) -> bool:
    """True if two texts differ only in numbers, dates or ids."""
    return one != other and _INCIDENTAL.sub("#", one) == _INCIDENTAL.sub("#", other)


def is_cut(new: str, old: str) -> bool:
    """True if a text is a shortened or blanked form of another."""
    if not old.strip() or new == old:
        return False
    noted = len(old) <= _SHORT_NOTE and _BLANK.search(old)
    if len(new) <= _SHORT_NOTE and _BLANK.search(new) and not noted:
        return True
    if len(new) >= len(old):
        return False
    head = common_prefix(new, old)
    tail = common_prefix(new[::-1], old[::-1]) if head < len(new) else 0
    shared = min(len(new), head + tail)
    return (len(old) >= 80 and 2 * len(new) <= len(old)) or (shared >= 16 and 2 * shared >= len(new))


def tells_of_call(text: str, name: str, arguments: Any, *, by_user: bool) -> bool:
    """True if a text names a tool and most values of its arguments.

    Users talk about tools, so their text must have the form of a call: ``name(`` or ``"name"``.
    """
    form = rf"\b{re.escape(name)}\s*\(|[\"'`]{re.escape(name)}[\"'`]"
    if not name or not re.search(form if by_user else rf"{form}|\b{re.escape(name)}\b", text):
        return False
    values = [_unquoted(value)[:200] for value in leaves(arguments)]
    if not any(values):
        return re.search(form if by_user else rf"{form}|\bcall|\btool", text, re.IGNORECASE) is not None
    bare = _unquoted(text)
    return sum(value in bare for value in values) * 2 > len(values)


def leaves(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments, strict=False)
    pending = [arguments]
    while pending:
        value = pending.pop()
        if isinstance(value, (Mapping, list)):
            pending += value.values() if isinstance(value, Mapping) else value
        elif value is not None:
            yield value


def _unquoted(value: Any) -> str:
    """A text without the characters that quoting changes."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"\\[nrt]|[\s\\\"']+", "", text)
