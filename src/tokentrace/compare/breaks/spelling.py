"""Evidence that the same is written another way: other tokens, booleans, JSON, white space."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from ..token_diff import remerged, text_of
from .case import Case, Finding, counted, quoted
from .causes import BreakCause
from .written import openers, same_value, value_at


def remerge(case: Case) -> Finding | None:
    """Other tokens that spell the same bytes."""
    hunk = remerged(case.vocabulary, case.stream, case.prompt, case.hunk)
    if hunk is None:
        return None
    spelled, respelled = hunk.sides(case.stream, case.prompt)
    text = quoted(text_of(case.vocabulary, spelled))
    ours, theirs = spelled.tolist(), respelled.tolist()
    detail = f"the same text {text} is {counted(len(ours))} in the stream and {counted(len(theirs))} in the next prompt"
    for one, other, where in ((ours, theirs, "stream"), (theirs, ours, "next prompt")):
        control = [index for index in one if index in case.vocabulary.added and index not in other]
        if control:
            name = case.vocabulary.added[control[0]].text
            detail += f": {name} is a control token in the {where} and plain text in the other"
            break
    else:
        detail += ": it was decoded and encoded again"
    return Finding(BreakCause.BPE_REMERGE, detail, hunk)


_NAMES_OF_VALUES: Final = {frozenset(pair) for pair in (("true", "True"), ("false", "False"), ("null", "None"))}
_WORD_BEFORE: Final = re.compile(r"[A-Za-z]*\Z")
_WORD: Final = re.compile(r"[A-Za-z]*")
_VALUE_FOLLOWS: Final = re.compile(r"(?:[>:\[,=({]\s*|\n)\Z")
_VALUE_ENDS: Final = re.compile(r"\s*(?:[<,\]})]|\Z)|[ \t]*\n")


def boolean(case: Case) -> Finding | None:
    """A word of JSON against one of Python, where a value stands."""
    ours, theirs, at = case.sides()
    tail = _WORD_BEFORE.search(ours[max(0, at - 16) : at])
    start = at - len(tail[0]) if tail else at
    one, other = (_WORD.match(text, start) for text in (ours, theirs))
    if one is None or other is None or frozenset((one[0], other[0])) not in _NAMES_OF_VALUES:
        return None
    if not _VALUE_FOLLOWS.search(ours[max(0, start - 64) : start]):
        return None
    if not (_VALUE_ENDS.match(ours, one.end()) and _VALUE_ENDS.match(theirs, other.end())):
        return None
    how = "the value went through Python's str()" if other[0][0].isupper() else "the value went through JSON"
    return Finding(BreakCause.BOOLEAN_CASE, f"the stream has `{one[0]}`, the next prompt `{other[0]}`: {how}")


def json_format(case: Case) -> Finding | None:
    """A JSON value around the difference that is whole on both sides, and the same."""
    ours, theirs, at = case.sides()
    for start in openers(ours, at):
        one, other = value_at(ours, start), value_at(theirs, start)
        if one is None or other is None or one[1] <= at or other[1] <= at:
            continue
        if not same_value(one[0], other[0]):
            return None
        written, rewritten = ours[start : one[1]], theirs[start : other[1]]
        how = _rewritten(written, rewritten, one[0], other[0])
        said = f"the stream has {quoted(written)}, the next prompt {quoted(rewritten)}"
        return Finding(BreakCause.JSON_FORMAT, f"the same JSON is written {how}: {said}", until=one[1])
    return None


_OUTSIDE_STRINGS: Final = re.compile(r'("(?:[^"\\]|\\.)*")|\s+', re.DOTALL)


def _rewritten(ours: str, theirs: str, one: Any, other: Any) -> str:
    """How the texts of two values that are the same differ."""
    squeezed = [_OUTSIDE_STRINGS.sub(lambda match: match[1] or "", text) for text in (ours, theirs)]
    if squeezed[0] == squeezed[1]:
        return "with other spacing"
    try:
        plain = json.dumps(one) == json.dumps(other)
        ordered = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        plain = ordered = False
    if plain and "'" in theirs and "'" not in ours:
        return "as Python writes it"
    if plain and "\\" in ours + theirs:
        return "with other escapes"
    if not plain and ('\\"' in ours) != ('\\"' in theirs):
        return "inside a string on one side"
    if not plain and ordered:
        return "with its keys in another order"
    return "with its values spelled another way"


def whitespace(case: Case) -> Finding | None:
    """White space alone, as far as the next few characters tell."""
    one, other = case.text.stream[case.text.shared :], case.text.prompt[case.text.shared :]
    rest, others = one.lstrip(), other.lstrip()
    if len(rest) == len(one) and len(others) == len(other):
        return None
    size = min(8, len(_dense(rest))) if case.text.ended else 8
    if _dense(rest)[:size] != _dense(others)[:size]:
        return None
    a, b = one[: len(one) - len(rest)], other[: len(other) - len(others)]
    return Finding(
        BreakCause.WHITESPACE, f"only white space differs: the stream has {quoted(a)}, the next prompt {quoted(b)}"
    )


def _dense(text: str) -> str:
    return "".join(text[:256].split())
