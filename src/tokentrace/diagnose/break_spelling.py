"""Evidence that the same is written another way: other tokens, booleans, JSON, white space."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from .break_case import Case, Evidence, counted
from .finding import Cause
from .texts import quoted, spelled_alike, text_of

# -- JSON values in text

_DECODER: Final = json.JSONDecoder()
_OPENERS: Final = 64
"""Braces and brackets before a character that are tried as the beginning of a JSON value."""


def openers(text: str, at: int) -> Iterator[int]:
    """Where a JSON value may begin that holds this character, the nearest first."""
    found = (index for index in range(min(at, len(text) - 1), -1, -1) if text[index] in "{[")
    return islice(found, _OPENERS)


def value_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins here and its end; also as Python's repr() writes it."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    written = text[start : start + 4096]
    stop = max(written.find("}\n"), written.find("}<"), written.find("]\n"), written.find("]<")) + 1
    written = written[: stop or None]
    if "'" not in written or "\\" in written:  # a warning about escapes is not ours to print
        return None
    try:
        return ast.literal_eval(written), start + len(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


def value_of(given: Any) -> Any:
    """The value that a string of JSON writes; anything else as it is."""
    found = value_at(given, 0) if isinstance(given, str) else None
    return given if found is None else found[0]


def same_value(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same. ``1`` and ``1.0`` are, ``1`` and ``true`` are not; nor does order count
    among keys. A string that holds the JSON of the other value is the same, written twice.
    """
    pairs = [(one, other)]
    while pairs:
        a, b = pairs.pop()
        if isinstance(a, str) != isinstance(b, str):
            text, value = (a, b) if isinstance(a, str) else (b, a)
            parsed = value_at(text, 0) if isinstance(value, (dict, list)) else None
            if parsed is None or parsed[1] != len(text):
                return False
            pairs.append((parsed[0], value))
        elif isinstance(a, dict) and isinstance(b, dict):
            if a.keys() != b.keys():
                return False
            pairs += [(a[key], b[key]) for key in a]
        elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            if len(a) != len(b):
                return False
            pairs += zip(a, b, strict=True)
        elif isinstance(a, bool) != isinstance(b, bool) or a != b:
            return False
    return True


# -- the checks


def remerge(case: Case) -> Evidence | None:
    """Other tokens that spell the same bytes."""
    hunk = spelled_alike(case.vocabulary, case.stream, case.prompt, case.hunk)
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
    return Evidence(Cause.BPE_REMERGE, detail, hunk)


_NAMES_OF_VALUES: Final = {frozenset(pair) for pair in (("true", "True"), ("false", "False"), ("null", "None"))}
_WORD_BEFORE: Final = re.compile(r"[A-Za-z]*\Z")
_WORD: Final = re.compile(r"[A-Za-z]*")
_VALUE_FOLLOWS: Final = re.compile(r"(?:[>:\[,=({]\s*|\n)\Z")
_VALUE_ENDS: Final = re.compile(r"\s*(?:[<,\]})]|\Z)|[ \t]*\n")


def boolean(case: Case) -> Evidence | None:
    """A word of JSON on one side and one of Python on the other, in the place of a value."""
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
    return Evidence(Cause.BOOLEAN_CASE, f"the stream has `{one[0]}`, the next prompt `{other[0]}`: {how}")


def json_format(case: Case) -> Evidence | None:
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
        return Evidence(Cause.JSON_FORMAT, f"the same JSON is written {how}: {said}", until=one[1])
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


def whitespace(case: Case) -> Evidence | None:
    """White space alone, as far as the next few characters tell."""
    one, other = case.text.stream[case.text.shared :], case.text.prompt[case.text.shared :]
    rest, others = one.lstrip(), other.lstrip()
    if len(rest) == len(one) and len(others) == len(other):
        return None
    size = min(8, len(_dense(rest))) if case.text.ended else 8
    if _dense(rest)[:size] != _dense(others)[:size]:
        return None
    a, b = one[: len(one) - len(rest)], other[: len(other) - len(others)]
    return Evidence(
        Cause.WHITESPACE, f"only white space differs: the stream has {quoted(a)}, the next prompt {quoted(b)}"
    )


def _dense(text: str) -> str:
    return "".join(text[:256].split())
