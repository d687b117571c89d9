"""Finds the control tokens in a text as ``tokenizers`` does, but only where the text may contain them.

``tokenizers`` first searches for added tokens that are not normalized. Then it normalizes each
piece between them and searches there for the others, by their normalized text.
"""

import bisect
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .vocabulary import ControlToken, Vocabulary, longest_first

Positions = npt.NDArray[np.signedinteger[Any]]

_SPACES = "".join(
    char for char in map(chr, range(0x3001)) if char.isspace() and not "\x1c" <= char <= "\x1f"
)
"""White space according to ``tokenizers``; for Python there is more."""
_SPACE = re.compile(f"[{_SPACES}]*")


class Trust(IntEnum):
    """Which control tokens a span may contain."""

    NONE = 0
    """None: they stay text."""
    INNER = 1
    """Those inside an assistant's turn, not those that end it or begin another."""
    ANY = 2
    """All."""


class ControlPattern:
    """Finds control tokens by their text: at one place, the longest."""

    def __init__(self, tokens: dict[str, ControlToken]) -> None:
        self.tokens = tokens
        self.regex = longest_first(tokens)

    def at(self, match: re.Match[str]) -> Iterator[tuple[ControlToken, int]]:
        for length in range(len(match[0]), 0, -1):
            token = self.tokens.get(match[0][:length])
            if token is not None:
                yield token, length


ControlPatterns = tuple[ControlPattern, ControlPattern]
"""The control tokens of a vocabulary, found by their text or their normalized text."""


def control_patterns(vocabulary: Vocabulary, normalize: Callable[[str], str]) -> ControlPatterns:
    tokens = vocabulary.control.values()
    late = {normalize(token.text): token for token in tokens if token.normalized}
    late.pop("", None)
    return ControlPattern({token.text: token for token in tokens if not token.normalized}), ControlPattern(
        late
    )


@dataclass(frozen=True, slots=True)
class ControlMatch:
    """A control token in a text: its range with absorbed white space, and that of its text."""

    start: int
    end: int
    text_start: int
    text_end: int
    token: ControlToken


@dataclass(frozen=True, slots=True)
class PlainPiece:
    """Text between control tokens, normalized or not."""

    text: str
    start: int
    """Where it begins in the whole text."""
    places: tuple[Positions, Positions] | None = None
    """If normalized: where its characters begin and end in the whole text."""


@dataclass(frozen=True, slots=True)
class TrustedSpans:
    """Where the spans of a text end, what each may contain, and the ids of tokens inside a turn."""

    ends: Sequence[int]
    trust: Sequence[Trust]
    inner: frozenset[int] = frozenset()

    def touched(self, start: int, end: int) -> range:
        return range(bisect.bisect_right(self.ends, start), bisect.bisect_left(self.ends, end) + 1)

    def forbidding(self, token: ControlToken, start: int, end: int) -> int | None:
        """The first span in a range that may not contain the token."""
        required = Trust.INNER if token.id in self.inner else Trust.ANY
        return next((span for span in self.touched(start, end) if self.trust[span] < required), None)


Normalize = Callable[[str], tuple[str, Sequence[tuple[int, int]] | None]]
"""Normalized text, and where its characters come from (None: unchanged)."""


def split(
    text: str, spans: TrustedSpans, patterns: ControlPatterns, normalize: Normalize
) -> list[ControlMatch | PlainPiece]:
    parts: list[ControlMatch | PlainPiece] = []
    at = 0
    for match in [*_search(text, spans, patterns[0]), None]:
        end = len(text) if match is None else match.start
        if at < end:
            parts += _split_normalized(text, at, end, spans, patterns[1], normalize)
        if match is not None:
            parts.append(match)
            at = match.end
    return parts


def _split_normalized(
    text: str, start: int, end: int, spans: TrustedSpans, pattern: ControlPattern, normalize: Normalize
) -> Iterator[ControlMatch | PlainPiece]:
    """Split a piece between raw tokens at the tokens that match its normalized text."""
    normal, offsets = normalize(text[start:end]) if pattern.regex is not None else ("", None)
    if pattern.regex is None or pattern.regex.search(normal) is None:
        yield PlainPiece(text[start:end], start)
        return
    if offsets is None:
        starts = np.arange(start, end, dtype=np.int64)
        ends = starts + 1
    elif len(offsets) == len(normal):
        starts, ends = (np.asarray(offsets, np.int64).reshape(-1, 2) + start).T
    else:  # all that is known is that it comes from this piece
        starts, ends = np.full(len(normal), start, np.int64), np.full(len(normal), end, np.int64)
    trust = [
        min(spans.trust[span] for span in spans.touched(first, max(last, first + 1)))
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    at = 0
    for match in [
        *_search(normal, TrustedSpans(range(1, len(trust) + 1), trust, spans.inner), pattern),
        None,
    ]:
        stop = len(normal) if match is None else match.start
        if at < stop:
            yield PlainPiece(normal[at:stop], int(starts[at]), (starts[at:stop], ends[at:stop]))
        if match is not None:
            firsts, lasts = [match.start, match.text_start], [match.end - 1, match.text_end - 1]
            (start, text_start), (end, text_end) = starts[firsts].tolist(), ends[lasts].tolist()
            yield ControlMatch(start, end, text_start, text_end, match.token)
            at = match.end


def _search(text: str, spans: TrustedSpans, pattern: ControlPattern) -> Iterator[ControlMatch]:
    """Control tokens, leftmost and longest first, where all spans allow them."""
    at = position = 0
    while pattern.regex is not None and (match := pattern.regex.search(text, position)):
        start = match.start()
        pairs = pattern.at(match)
        allowed = (pair for pair in pairs if spans.forbidding(pair[0], start, start + pair[1]) is None)
        token, length = next(allowed, (None, 0))
        if token is None:
            position = start + 1
            continue
        position = end = start + length
        around = (text[start - 1 : start] if start else "", text[end : end + 1])
        if token.single_word and any(one and is_word(one) for one in around):
            continue
        text_range = (start, end)
        if token.lstrip:
            start = at + len(text[at:start].rstrip(_SPACES))
        if token.rstrip:
            end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        yield ControlMatch(start, end, *text_range, token)
        at = position = end


@functools.lru_cache(maxsize=4096)
def is_word(character: str) -> bool:
    """Whether a character belongs to a word, by ``tokenizers``' own Unicode tables."""
    encoding = _word_finder().encode(f"{character}x", add_special_tokens=False)
    return _word_finder().token_to_id("x") not in encoding.ids


@functools.cache
def _word_finder() -> Any:
    import tokenizers

    finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"unknown": 0}, unk_token="unknown"))
    finder.add_tokens([tokenizers.AddedToken("x", single_word=True, normalized=False)])
    return finder
