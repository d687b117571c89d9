"""Which control tokens a text holds: found as ``tokenizers`` finds them, but only where the text may hold them.

``tokenizers`` goes over a text twice. First it looks for the added tokens that are not normalized, then it normalizes
each piece between them and looks there for the others, by what the normalizer made of their own text.
"""

from __future__ import annotations

import bisect
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, overload

import numpy as np

from ..template.origin import Origin
from ..template.spans import Rendering
from .positions import Positions
from .vocabulary import ControlToken, Vocabulary

_SPACES: Final = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""What ``tokenizers`` counts as white space; Python counts more."""
_SPACE: Final = re.compile(f"[{_SPACES}]*")


class Trust(IntEnum):
    """Which control tokens a span may hold."""

    NONE = 0
    """None: they stay text."""
    INNER = 1
    """Those that live inside an assistant's turn, not those that end it or begin another."""
    ANY = 2
    """All."""


class SpanTrust(Sequence[Trust]):
    """What each span may hold, by its origin. Found out where it is asked for: few spans are touched by a token.

    Scaffold, which has no origin, may hold anything.
    """

    def __init__(self, rendering: Rendering, trust_of: Callable[[Origin], Trust]) -> None:
        self._rendering = rendering
        self._of = trust_of

    def __len__(self) -> int:
        return len(self._rendering.origins)

    @overload
    def __getitem__(self, span: int) -> Trust: ...
    @overload
    def __getitem__(self, span: slice) -> list[Trust]: ...

    def __getitem__(self, span: int | slice) -> Trust | list[Trust]:
        if isinstance(span, slice):
            return [Trust.ANY if origin is None else self._of(origin) for origin in self._rendering.origins[span]]
        origin = self._rendering.origins[span]
        return Trust.ANY if origin is None else self._of(origin)

    def doubtful(self, spans: Iterable[int]) -> dict[int, Trust]:
        """Those of the spans that may not hold anything, and what they may hold."""
        origins = self._rendering.origins
        given = {span: origin for span in spans if (origin := origins[span]) is not None}
        return {span: held for span, origin in given.items() if (held := self._of(origin)) is not Trust.ANY}


@dataclass(frozen=True, slots=True)
class TrustedSpans:
    """Where each span of a text ends, what it may hold, and which tokens live inside a turn."""

    ends: Sequence[int]
    trust: Sequence[Trust]
    inner: frozenset[int] = frozenset()

    def stretches(self, least: Trust) -> list[tuple[int, int]]:
        """The longest stretches of text that is trusted so far at least."""
        out: list[tuple[int, int]] = []
        start = 0
        for end, trust in zip(self.ends, self.trust, strict=True):
            if trust >= least:
                if out and out[-1][1] == start:
                    out[-1] = (out[-1][0], end)
                else:
                    out.append((start, end))
            start = end
        return out

    def least(self, found: FoundToken) -> Trust:
        """What the least trusted of the spans may hold that a token touches."""
        return min(self.trust[span] for span in self._touched(found))

    def first_forbidding(self, found: FoundToken) -> int | None:
        """The first span that a token touches and that may not hold it."""
        least = Trust.INNER if found.token.id in self.inner else Trust.ANY
        return next((span for span in self._touched(found) if self.trust[span] < least), None)

    def _touched(self, found: FoundToken) -> range:
        first, last = bisect.bisect_right(self.ends, found.text_start), bisect.bisect_left(self.ends, found.text_end)
        return range(first, last + 1)


class Pattern:
    """Finds control tokens by what they look like, the longest first where several begin."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self.tokens = dict(tokens)
        names = sorted(self.tokens, key=lambda name: (-len(name), name))
        self.regex = re.compile("|".join(map(re.escape, names))) if names else None

    def only(self, allowed: frozenset[int]) -> Pattern:
        """The same for some of the tokens."""
        return Pattern({text: token for text, token in self.tokens.items() if token.id in allowed})


class ControlPatterns:
    """The control tokens of a vocabulary: `raw` ones as they stand in text, the others as they are `normalized`."""

    def __init__(self, vocabulary: Vocabulary, normalize: Callable[[str], str]) -> None:
        tokens = vocabulary.control.values()
        self.raw = Pattern({token.text: token for token in tokens if not token.normalized})
        late = ((normalize(token.text), token) for token in tokens if token.normalized)
        self.normalized = Pattern({text: token for text, token in late if text})
        self._only: dict[frozenset[int], tuple[Pattern, Pattern]] = {}

    def only(self, allowed: frozenset[int]) -> tuple[Pattern, Pattern]:
        """Both patterns, for some of the tokens."""
        if allowed not in self._only:
            self._only[allowed] = (self.raw.only(allowed), self.normalized.only(allowed))
        return self._only[allowed]


@dataclass(frozen=True, slots=True)
class FoundToken:
    """A control token in a text: where it stands with the white space it absorbs, and where its own text does."""

    start: int
    end: int
    text_start: int
    text_end: int
    token: ControlToken


@dataclass(frozen=True, slots=True)
class PlainPiece:
    """A piece of text between control tokens, perhaps normalized already."""

    text: str
    start: int
    """Where it begins in the whole text."""
    places: tuple[Positions, Positions] | None = None
    """Normalized: where each of its characters begins and ends in the whole text."""


Normalize = Callable[[str], tuple[str, Sequence[tuple[int, int]] | None]]
"""A normalized text, and where each of its characters comes from (None: it is as it was)."""


def split(
    text: str, spans: TrustedSpans, patterns: ControlPatterns, normalize: Normalize
) -> list[FoundToken | PlainPiece]:
    """A text as control tokens and the pieces between them."""
    raw, late = patterns.only(spans.inner) if spans.inner else (Pattern({}), Pattern({}))
    out: list[FoundToken | PlainPiece] = []
    at = 0
    for found in [*_search(text, spans, patterns.raw, raw), None]:
        end = len(text) if found is None else found.start
        if at < end:
            out += _late(text, at, end, spans, patterns.normalized, late, normalize)
        if found is not None:
            out.append(found)
            at = found.end
    return out


def _late(
    text: str, start: int, end: int, spans: TrustedSpans, pattern: Pattern, inner: Pattern, normalize: Normalize
) -> list[FoundToken | PlainPiece]:
    """The same for a piece between raw tokens, with the tokens that are looked for in normalized text."""
    whole: list[FoundToken | PlainPiece] = [PlainPiece(text[start:end], start)]
    if pattern.regex is None:
        return whole
    normal, offsets = normalize(text[start:end])
    if pattern.regex.search(normal) is None:
        return whole
    if offsets is None:
        starts = np.arange(start, end, dtype=np.int64)
        ends = starts + 1
    elif len(offsets) == len(normal):
        starts, ends = (np.asarray(offsets, np.int64).reshape(-1, 2) + start).T
    else:  # nothing is known but that it comes from here
        starts, ends = np.full(len(normal), start, np.int64), np.full(len(normal), end, np.int64)
    out: list[FoundToken | PlainPiece] = []
    at = 0
    for found in [*_search(normal, _moved(spans, starts, ends), pattern, inner), None]:
        stop = len(normal) if found is None else found.start
        if at < stop:
            out.append(PlainPiece(normal[at:stop], int(starts[at]), (starts[at:stop], ends[at:stop])))
        if found is not None:
            own = (found.start, found.end - 1, found.text_start, found.text_end - 1)
            begin, last, own_begin, own_last = own
            places = (int(starts[begin]), int(ends[last]), int(starts[own_begin]), int(ends[own_last]))
            out.append(FoundToken(*places, found.token))
            at = found.end
    return out


def _moved(spans: TrustedSpans, starts: Positions, ends: Positions) -> TrustedSpans:
    """What the characters of a normalized text may hold: what all may that they come from."""
    bounds = np.asarray(spans.ends, np.int64)
    first = np.searchsorted(bounds, starts, "right").tolist()
    last = np.searchsorted(bounds, np.maximum(ends - 1, starts), "right").tolist()
    trust = [min(spans.trust[a : b + 1], default=Trust.ANY) for a, b in zip(first, last, strict=True)]
    return TrustedSpans(range(1, len(trust) + 1), trust, spans.inner)


def _search(text: str, spans: TrustedSpans, pattern: Pattern, inner: Pattern) -> Iterator[FoundToken]:
    """Control tokens in a text, leftmost and longest first, wherever they may stand."""
    hunts = [_Hunt(pattern, text, spans.stretches(Trust.ANY))]
    if inner.regex is not None:
        hunts.append(_Hunt(inner, text, spans.stretches(Trust.INNER)))
    at = position = 0
    while matches := [match for match in (hunt.after(position) for hunt in hunts) if match is not None]:
        match = min(matches, key=lambda match: (match.start(), -match.end()))
        start, position = match.span()
        token = pattern.tokens[match[0]]
        if token.single_word and not _stands_alone(text, start, position):
            continue
        end = position
        if token.lstrip:
            start = at + len(text[at:start].rstrip(_SPACES))
        if token.rstrip:
            end = _SPACE.match(text, end).end()  # type: ignore[union-attr]
        yield FoundToken(start, end, *match.span(), token)
        at = position = end


class _Hunt:
    """The matches of a pattern that lie inside stretches of text, asked for from left to right."""

    def __init__(self, pattern: Pattern, text: str, stretches: Sequence[tuple[int, int]]) -> None:
        self._regex = pattern.regex
        self._text = text
        self._stretches = stretches
        self._at = 0
        self._last: re.Match[str] | None = None

    def after(self, position: int) -> re.Match[str] | None:
        """The first match at a position or behind it."""
        if self._last is not None and self._last.start() >= position:
            return self._last
        while self._regex is not None and self._at < len(self._stretches):
            begin, stop = self._stretches[self._at]
            self._last = self._regex.search(self._text, max(begin, position), stop) if position < stop else None
            if self._last is not None:
                return self._last
            self._at += 1
        return None


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start] if start else "", text[end : end + 1]
    return not (before and is_word(before)) and not (after and is_word(after))


@functools.lru_cache(maxsize=4096)
def is_word(character: str) -> bool:
    """Whether a character belongs to a word: ``tokenizers`` itself is asked, whose Unicode is not Python's."""
    return _word_asker().token_to_id("x") not in _word_asker().encode(f"{character}x", add_special_tokens=False).ids


@functools.cache
def _word_asker() -> Any:
    import tokenizers

    asker = tokenizers.Tokenizer(tokenizers.models.WordLevel({"unknown": 0}, unk_token="unknown"))
    asker.add_tokens([tokenizers.AddedToken("x", single_word=True, normalized=False)])
    return asker
