"""Signs of a rewritten text, in linear time. Pure."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any

from ..study.turns import common_prefix

_END = 10_000
_QUOTED = 80
_SHORT_NOTE = 300
_NAMES = (
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)(?:day)?|tue|wed|thu|sat|jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?"
    r"|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_WORD = rf"(?<![^\W_])(?:[^\W_]*\d[^\W_]*|[0-9a-f]{{4,}}|am|pm|utc|gmt|{_NAMES})(?![^\W_])"
_INCIDENTAL = re.compile(rf"{_WORD}(?:[\W_]{{1,2}}{_WORD})*", re.IGNORECASE)
_LEFT_OUT = (
    r"(?:cleared|omitted|removed|truncated|elided|hidden|pruned|trimmed|compacted|redacted|dropped|discarded"
    r"|skipped|deleted|condensed|compressed|summari[sz]ed|no longer (?:available|shown))"
)
_SUMMARY = re.compile(
    r"\A\W*(?:\w+\W+){0,3}summary\W*[:\n]|summary (?:so far|to date|until now)"
    r"|summar(?:y|ies|i[sz]ation) of (?:the|our|your|this|all|its|what|previous|prior|earlier|past|older)\b"
    r"|(?:conversation|context|session|history|chat|progress|handoff|compaction) summary"
    r"|</?(?:summary|state_snapshot|compressed_chat|conversation_summary|context_summary|compaction)>"
    rf"|\b(?:conversation|messages|history|context|turns|steps)[^.\n]{{0,60}}\b{_LEFT_OUT}"
    rf"|\b{_LEFT_OUT} \d+ (?:\w+ )?(?:messages|turns|steps)"
    r"|continued? from (?:a|the) previous (?:conversation|session)|ran out of context|produced a summary"
    r"|(?:conversation|discussion|history) (?:so far|to date|up to (?:this|now))",
    re.IGNORECASE,
)
"""How agents begin a summary, or say that they left something out."""
_BLANK = re.compile(rf"\b{_LEFT_OUT}\b|^\W*$", re.IGNORECASE)
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
    texts = ["".join(side) for side in words]
    stripped = [text.strip() for text in texts]
    texts = texts if stripped[0] == stripped[1] else stripped
    one, other = (repr(f"{text[:60]}…{text[-20:]}" if len(text) > _QUOTED else text) for text in texts)
    if not texts[1]:
        return f"{one} is new"
    return f"{one} in place of {other}" if texts[0] else f"{other} was left out"


def _ends(text: str) -> str:
    return text if len(text) <= 2 * _END else f"{text[:_END]}\n{text[-_END:]}"


def is_summary(text: str) -> bool:
    return _SUMMARY.search(_ends(text)) is not None


def is_similar(one: str, other: str) -> bool:
    """True if two texts share at least half of their pairs of words."""
    texts = (_ends(text).split() for text in (one, other))
    ours, theirs = (Counter[Any](pairwise(words) if len(words) >= 4 else words) for words in texts)
    total = ours.total() + theirs.total()
    return total > 0 and 4 * (ours & theirs).total() >= total


def is_nonce(one: str, other: str) -> bool:
    """True if two texts differ only in numbers, dates or ids."""
    return one != other and _INCIDENTAL.sub("#", one) == _INCIDENTAL.sub("#", other)


def is_cut(new: str, old: str) -> bool:
    """True if a text is shortened or blanked."""
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
    """True if a text names a tool and most of its values."""
    word = re.escape(name)
    form = rf"\b{word}\s*\(|[\"'`]{word}[\"'`]"
    if not name or not re.search(form if by_user else rf"{form}|\b{word}\b", text):
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
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"\\[nrt]|[\s\\\"']+", "", text)
