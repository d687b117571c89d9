"""Spans to ids: each token knows its span, and only trusted text becomes control tokens.

The whole text is encoded in one call, as in transformers, so the merges are the same. If a control
token touches untrusted text, or the byte lengths of tokens do not add up (normalization,
byte-fallback prefixes), the text is split: control tokens are found only in trusted text, and a
tokenizer without any encodes the rest.
"""

import bisect
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..errors import TokenizerError
from ..template.origin import Origin
from ..template.trace import Rendering
from .control import ControlMatch, PlainPiece, Positions, Trust, TrustedSpans, split
from .tokenizer import Ids, Tokenizer, with_offsets

Number = TypeVar("Number", bound=np.generic)

_NEAR = 64
"""Non-ASCII bytes at most this far apart are checked as one piece."""

TrustOf = Callable[[Origin], Trust]
"""Which control tokens a span of an origin may contain. Scaffold may contain all."""


class ControlPolicy(StrEnum):
    """What happens to a control token's text in a field that is not trusted."""

    LITERAL = "literal"
    """It stays text, spelled in ordinary tokens."""
    REJECT = "reject"
    """The conversation is rejected."""
    HF_COMPAT = "hf_compat"
    """It becomes the control token, as in transformers."""


class ForgedControl(Exception):  # noqa: N818
    """Untrusted text spells a control token (policy ``reject``)."""

    def __init__(self, span: int, token: str) -> None:
        super().__init__(token)
        self.span = span
        self.token = token


class ControlTokens(NamedTuple):
    """The control tokens of a text: indices, ids, and the characters where they start and end."""

    at: list[int]
    ids: list[int]
    starts: list[int]
    ends: list[int]


@dataclass(eq=False)
class Encoded:
    """Ids, and the characters at which each token starts and ends. Tokens may share a character."""

    ids: Ids
    rendering: Rendering
    control: npt.NDArray[np.bool_]
    """True where a token is a control token."""
    starts: Positions
    ends: Positions
    begins: Positions | None = None
    """Where each token's text starts, after white space that it absorbs (None: `starts`)."""
    forged: Sequence[tuple[int, str]] = ()
    """Control tokens that stayed text as their span is not trusted: span and token."""

    @computed
    def spans(self) -> npt.NDArray[np.int32]:
        """The span in which each token begins."""
        return self.per_token(np.arange(len(self.rendering.ends), dtype=np.int32))

    def per_token(self, of_spans: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """The value of each span, for each token that begins in it."""
        return np.repeat(of_spans, self._tokens_in_spans)

    @computed
    def _tokens_in_spans(self) -> npt.NDArray[np.intp]:
        ends, begins = self.rendering.ends, self.starts if self.begins is None else self.begins
        bounds = np.zeros(len(ends) + 1, np.intp)
        bounds[1:] = begins.searchsorted(np.asarray(ends, begins.dtype), "left")
        bounds[-1] = len(self.ids) if ends else 0
        return bounds[1:] - bounds[:-1]

    @computed
    def control_tokens(self) -> ControlTokens:
        at = self.control.nonzero()[0]
        return ControlTokens(
            at.tolist(), *(column.take(at).tolist() for column in (self.ids, self.starts, self.ends))
        )

    def position(self, token: int) -> int:
        """The character at which a token starts; past the last, the end of the text."""
        return int(self.starts[token]) if token < len(self.ids) else len(self.rendering.text)

    def first_touching(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that ends after it."""
        tokens = self.ends.searchsorted(np.asarray(positions, self.ends.dtype), "right")
        return cast(list[int], tokens.tolist())

    def first_after(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that starts at it or later."""
        tokens = self.starts.searchsorted(np.asarray(positions, self.starts.dtype), "left")
        return cast(list[int], tokens.tolist())

    def tokens_touching(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that contain a character of ``text[start:end]``."""
        first = self.first_touching([start])[0]
        return first, max(first, self.first_after([end])[0])


def encode_spans(
    tokenizer: Tokenizer,
    rendering: Rendering,
    trust_of: TrustOf,
    policy: ControlPolicy,
    inner: Callable[[], frozenset[int]] = frozenset,
    stand_ins: int = 0,
) -> Encoded:
    """The ids of a rendering, and where each token is.

    `inner` returns the control tokens inside a turn. Raises ForgedControl under `REJECT`, but not
    for the first `stand_ins` messages, and UnicodeEncodeError for a lone surrogate.
    """
    text, raw = rendering.text, rendering.text.encode("utf-8")
    is_checked = policy is not ControlPolicy.HF_COMPAT
    if len(raw) == len(text) or not tokenizer.vocabulary.nfc or _is_composed(raw):
        encoded = _encode_whole(tokenizer, rendering, raw)
        if encoded is not None and not (is_checked and _is_forged(encoded, trust_of, inner)):
            return encoded
    core = tokenizer.core
    parts = unlimited = split(text, TrustedSpans([len(text)], [Trust.ANY]), core.patterns, core.normalize)
    forged: list[tuple[int, str]] = []
    if is_checked:
        trust = [Trust.ANY if origin is None else trust_of(origin) for origin in rendering.origins]
        spans = TrustedSpans(rendering.ends, trust)
        forged = _forged(unlimited, spans)
        if forged and Trust.INNER in trust:
            spans = TrustedSpans(rendering.ends, trust, inner())
            forged = _forged(unlimited, spans)
        for span, token in forged if policy is ControlPolicy.REJECT else ():
            origin = rendering.origins[span]
            message = None if origin is None or not stand_ins else origin.message
            if message is None or message >= stand_ins:
                raise ForgedControl(span, token)
        parts = split(text, spans, core.patterns, core.normalize)
    nothing = (np.zeros(0, np.int32), *(np.zeros(0, np.int64) for _ in range(3)))
    pieces = (_encode_part(tokenizer, part, is_checked) for part in parts)
    ids, starts, ends, begins = map(np.concatenate, zip(nothing, *pieces, strict=True))
    if _matches(parts) == _matches(unlimited) and not np.array_equal(ids, tokenizer.encode(text)):
        # all control tokens were allowed: the ids are the tokenizer's, however it computes them
        ids, starts, ends = _ordered(core.slow, text)
        begins = starts
    return Encoded(ids, rendering, tokenizer.vocabulary.is_control.take(ids), starts, ends, begins, forged)


def _is_composed(raw: bytes) -> bool:
    """Whether text is in Unicode's composed form."""
    at = np.flatnonzero(np.frombuffer(raw, np.int8) < 0)
    gaps = np.flatnonzero(np.diff(at) > _NEAR)
    bounds = zip(at[np.append(0, gaps + 1)].tolist(), at[np.append(gaps, -1)].tolist(), strict=True)
    pieces = (raw[max(start - 1, 0) : end + 1].decode() for start, end in bounds)
    return all(unicodedata.is_normalized("NFC", piece) for piece in pieces)


def _encode_whole(tokenizer: Tokenizer, rendering: Rendering, raw: bytes) -> Encoded | None:
    """The text in one call; None if its tokens do not spell it."""
    vocabulary, ids = tokenizer.vocabulary, tokenizer.encode(rendering.text)
    lengths = vocabulary.signed_lengths.take(ids)
    bounds = np.zeros(len(ids) + 1, np.int32)
    np.add.accumulate(np.abs(lengths, out=bounds[1:]), out=bounds[1:])
    if bounds[-1] != len(raw) or not (vocabulary.exact or vocabulary.spells(ids.tolist(), raw)):
        return None
    return Encoded(ids, rendering, lengths < 0, *_characters(raw, len(rendering.text), bounds))


def _characters(raw: bytes, length: int, bounds: Positions) -> tuple[Positions, Positions]:
    """Where tokens start and end, in characters, from their `bounds` in bytes."""
    if len(raw) == length:
        return bounds[:-1], bounds[1:]
    is_inside = np.frombuffer(raw, np.int8) < -64  # continuation bytes: 10xxxxxx
    inside = is_inside.nonzero()[0]
    if len(inside) * 4 >= len(bounds):
        before = np.append(0, np.cumsum(is_inside, dtype=np.int32)).take(bounds)
        return (bounds - before - np.append(is_inside, False).take(bounds))[:-1], (bounds - before)[1:]

    def shifted(side: Literal["left", "right"]) -> Positions:
        """The bounds, less the continuation bytes before each."""
        counts = np.zeros(len(bounds), np.int32)
        np.add.at(counts, bounds.searchsorted(inside, side), -1)
        return bounds + np.add.accumulate(counts, out=counts)

    return shifted("left")[:-1], shifted("right")[1:]


def _is_forged(encoded: Encoded, trust_of: TrustOf, inner: Callable[[], frozenset[int]]) -> bool:
    """True if a control token touches a span that may not contain it."""
    control = encoded.control_tokens
    ends = encoded.rendering.ends
    origins = encoded.rendering.origins
    span = 0
    allowed: frozenset[int] = frozenset()
    for token, start, end in zip(control.ids, control.starts, control.ends, strict=True):
        span = bisect.bisect_right(ends, start, span)
        if end <= ends[span] and origins[span] is None:
            continue
        for origin in origins[span : bisect.bisect_left(ends, end, span) + 1]:
            trust = Trust.ANY if origin is None else trust_of(origin)
            if trust is Trust.INNER:
                allowed = allowed or inner()
            if trust is Trust.NONE or (trust is Trust.INNER and token not in allowed):
                return True
    return False


def _matches(parts: Sequence[ControlMatch | PlainPiece]) -> list[ControlMatch]:
    return [part for part in parts if isinstance(part, ControlMatch)]


def _forged(parts: Sequence[ControlMatch | PlainPiece], spans: TrustedSpans) -> list[tuple[int, str]]:
    """The control tokens in text that may not contain them, each with the first such span."""
    matches = _matches(parts)
    touched = (
        (spans.forbidding(match.token, match.text_start, match.text_end), match) for match in matches
    )
    return [(span, match.token.text) for span, match in touched if span is not None]


def _encode_part(
    tokenizer: Tokenizer, part: ControlMatch | PlainPiece, is_checked: bool
) -> tuple[Ids, Positions, Positions, Positions]:
    """Tokens, where each starts and ends in the text, and where the text that it spells begins.

    Raises TokenizerError if `is_checked` and plain text becomes a control token.
    """
    if isinstance(part, ControlMatch):
        start, end, begin = (np.asarray([at], np.int64) for at in (part.start, part.end, part.text_start))
        return np.asarray([part.token.id], np.int32), start, end, begin
    vocabulary, (ids, starts, ends) = tokenizer.vocabulary, _encode_plain(tokenizer, part)
    if is_checked and (
        forged := [int(i) for i in ids[vocabulary.is_control[ids]] if i != vocabulary.unknown]
    ):
        raise TokenizerError(
            f"this tokenizer makes control token {vocabulary.added[forged[0]].text!r} out of plain text in a "
            "way that cannot be switched off; pass control_tokens='reject' or 'hf_compat'"
        )
    if part.places is None:
        return ids, starts + part.start, ends + part.start, starts + part.start
    size, (first, last) = len(part.text), part.places
    starts = np.append(first, last[-1])[np.minimum(starts, size)]
    return ids, starts, last[np.clip(ends - 1, 0, size - 1)], starts


def _encode_plain(tokenizer: Tokenizer, part: PlainPiece) -> tuple[Ids, Positions, Positions]:
    """The tokens of a piece, and where each is, in characters of the piece."""
    vocabulary, text = tokenizer.vocabulary, part.text
    is_first, is_normalized = part.start == 0, part.places is not None
    if is_normalized or not vocabulary.nfc or unicodedata.is_normalized("NFC", text):
        ids, raw = tokenizer.core.encode_plain(text, is_first, is_normalized), text.encode("utf-8")
        bounds = np.append(0, np.cumsum(vocabulary.byte_lengths[ids], dtype=np.int64))
        spelled = raw
        if bounds[-1] == len(raw) + 1 and vocabulary.spaced:
            spelled = b" " + raw
            bounds[1:] -= 1  # a space that the tokenizer writes before the first word
        if bounds[-1] == len(raw) and (vocabulary.exact or vocabulary.spells(ids.tolist(), spelled)):
            return ids, *_characters(raw, len(text), bounds)
    return _ordered(tokenizer.core.plain(is_first, is_normalized), text)


def _ordered(tokenizer: Any, text: str) -> tuple[Ids, Positions, Positions]:
    """Ids and reported offsets, made monotonic where tokens share a character."""
    ids, offsets = with_offsets(tokenizer, text)
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    starts = np.maximum.accumulate(pairs[:, 0])
    return ids, starts, np.maximum(pairs[:, 1], starts)
