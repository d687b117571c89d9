"""Spans to ids, each token knowing its span, and the one door through which control tokens are made.

The whole text is encoded in one call, as transformers does it, so merges equal the template's. Nearly always its
control tokens are those of the scaffold, which counting shows (`tokens.ordinals`). Else bytes per token tell which span
each token begins in, and whether a control token touches text that is not trusted. Only if one does, or if bytes do not
add up (Unicode normalization, byte-fallback prefixes), the text is taken apart: control tokens are looked for in
trusted text alone, and the runs between them are encoded with a tokenizer that has no control tokens at all.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from ..errors import TokenizerError
from ..template.trace import Rendering
from .control import FoundToken, PlainPiece, SpanTrust, Trust, TrustedSpans, split
from .encoded import Encoded, TokenPlaces
from .positions import BytePositions, Positions
from .tokenizer import Ids, Tokenizer


class ControlPolicy(StrEnum):
    """What becomes of a control token's text in a field that is not trusted."""

    LITERAL = "literal"
    """It stays text, spelled in ordinary tokens."""
    REJECT = "reject"
    """The conversation is refused."""
    HF_COMPAT = "hf_compat"
    """It becomes the control token, as in transformers."""


class ForgedControl(Exception):  # noqa: N818
    """Untrusted text spells a control token (policy ``reject``)."""

    def __init__(self, span: int, token: str) -> None:
        super().__init__(token)
        self.span = span
        self.token = token


def encode_spans(
    tokenizer: Tokenizer,
    rendering: Rendering,
    trust: Sequence[Trust],
    policy: ControlPolicy,
    inner: Callable[[], frozenset[int]] = frozenset,
) -> Encoded:
    """The ids of a rendering. `trust[k]` says which control tokens span k may hold.

    `inner` gives those that live inside a turn; it is asked only if text that may hold no others spells one.
    """
    vocabulary, text = tokenizer.vocabulary, rendering.text
    units = None if text.isascii() else BytePositions(rendering)
    if units is not None and vocabulary.nfc and not units.is_composed():
        return _encode_apart(tokenizer, rendering, trust, policy, inner)
    ids = tokenizer.encode(text)
    if isinstance(trust, SpanTrust):  # by which scaffold may hold anything
        counted = tokenizer.scaffold.count(rendering, ids)
        if counted is not None:
            layout = functools.partial(_spelled_or_reported, tokenizer, rendering, ids, units)
            return Encoded(ids, rendering, vocabulary, layout, counted)
    spelled = _spelled(tokenizer, rendering, ids, units)
    if spelled is None:
        return _encode_apart(tokenizer, rendering, trust, policy, inner)
    encoded = Encoded(ids, rendering, vocabulary, spelled)
    if policy is not ControlPolicy.HF_COMPAT and _is_forged(encoded, trust, inner):
        return _encode_apart(tokenizer, rendering, trust, policy, inner)
    return encoded


def _spelled(tokenizer: Tokenizer, rendering: Rendering, ids: Ids, units: BytePositions | None) -> TokenPlaces | None:
    """Where tokens stand that spell a text byte for byte, one after another; None where they do not."""
    vocabulary, text = tokenizer.vocabulary, rendering.text
    ends = vocabulary.short_lengths.take(ids).cumsum(dtype=np.int32)  # far shorter than 2 GiB: MAX_OUTPUT
    if (ends[-1] if len(ends) else 0) != (len(text) if units is None else units.total):
        return None
    if not vocabulary.exact and not vocabulary.spells(ids.tolist(), text.encode("utf-8")):
        return None
    return TokenPlaces(ends, units)


def _spelled_or_reported(
    tokenizer: Tokenizer, rendering: Rendering, ids: Ids, units: BytePositions | None
) -> TokenPlaces:
    """The same; where they do not, as ``tokenizers`` reports it."""
    spelled = _spelled(tokenizer, rendering, ids, units)
    if spelled is not None:
        return spelled
    known, offsets = tokenizer.reference(rendering.text)
    if not np.array_equal(known, ids):
        raise TokenizerError("fastokens and tokenizers disagree on this text; it cannot be said where its tokens stand")
    starts, ends = _ordered(offsets)
    return TokenPlaces(ends, starts=starts, begins=starts)


def _is_forged(encoded: Encoded, trust: Sequence[Trust], inner: Callable[[], frozenset[int]]) -> bool:
    """Whether a control token touches a span that may not hold it."""
    _, named, starts, stops = encoded.counted
    if not named:
        return False
    span_ends = np.asarray(encoded.rendering.ends, np.int64)
    first = span_ends.searchsorted(starts, "right").tolist()
    last = span_ends.searchsorted([stop - 1 for stop in stops], "right").tolist()
    touched = set(first)
    if first != last:
        touched.update(*(range(one, other + 1) for one, other in zip(first, last, strict=True)))
    if isinstance(trust, SpanTrust):
        doubtful = trust.doubtful(touched)
    else:
        doubtful = {span: trust[span] for span in touched if trust[span] is not Trust.ANY}
    if not doubtful:
        return False
    if Trust.NONE in doubtful.values():
        return True
    allowed = inner()
    return any(
        token not in allowed and not doubtful.keys().isdisjoint(range(one, other + 1))
        for token, one, other in zip(named, first, last, strict=True)
    )


# -- the careful way


def _encode_apart(
    tokenizer: Tokenizer,
    rendering: Rendering,
    trust: Sequence[Trust],
    policy: ControlPolicy,
    inner: Callable[[], frozenset[int]],
) -> Encoded:
    text, trust = rendering.text, list(trust)
    kept: list[tuple[int, str]] = []
    everything = split(text, TrustedSpans([len(text)], [Trust.ANY]), tokenizer.patterns, tokenizer.normalize)
    parts = everything
    if policy is not ControlPolicy.HF_COMPAT and min(trust, default=Trust.ANY) < Trust.ANY:
        spans = TrustedSpans(rendering.ends, trust)
        if Trust.INNER in trust and any(spans.least(found) is Trust.INNER for found in _tokens(everything)):
            spans = TrustedSpans(rendering.ends, trust, inner())
        kept = _forged(everything, spans)
        if kept and policy is ControlPolicy.REJECT:
            raise ForgedControl(*kept[0])
        parts = split(text, spans, tokenizer.patterns, tokenizer.normalize)
    nowhere = (np.zeros(0, np.int32), *(np.zeros(0, np.int64) for _ in range(3)))
    pieces = _encode_pieces(tokenizer, parts, checked=policy is not ControlPolicy.HF_COMPAT)
    ids, starts, ends, begins = map(np.concatenate, zip(nowhere, *pieces, strict=True))
    if _tokens(parts) == _tokens(everything) and not np.array_equal(ids, tokenizer.encode(text)):
        # nothing was kept from being a control token: the ids are those of the tokenizer, however it comes to them
        ids, offsets = tokenizer.reference(text)
        starts, ends = _ordered(offsets)
        begins = starts
    return Encoded(ids, rendering, tokenizer.vocabulary, TokenPlaces(ends, starts=starts, begins=begins), kept=kept)


def _tokens(parts: Sequence[FoundToken | PlainPiece]) -> list[FoundToken]:
    return [part for part in parts if isinstance(part, FoundToken)]


_Piece = tuple[Ids, Positions, Positions, Positions]
"""Tokens, where they start and end in the text, and where what they spell begins, without white space they absorb."""


def _encode_pieces(tokenizer: Tokenizer, parts: Sequence[FoundToken | PlainPiece], *, checked: bool) -> list[_Piece]:
    """Control tokens, and the ids of the text between them. `checked`: there must be no control token in that."""
    encoded: dict[int, Ids] = {}
    for normalized in (False, True):
        plain = [part for part in parts if isinstance(part, PlainPiece) and (part.places is not None) == normalized]
        first = bool(plain) and plain[0].start == 0
        some = tokenizer.encode_plain([part.text for part in plain], first=first, normalized=normalized)
        encoded |= zip(map(id, plain), some, strict=True)
    out: list[_Piece] = []
    for part in parts:
        if isinstance(part, FoundToken):
            where = (part.start, part.end, part.text_start)
            start, end, begin = (np.asarray([at], np.int64) for at in where)
            out.append((np.asarray([part.token.id], np.int32), start, end, begin))
            continue
        ids, starts, ends = _align(tokenizer, part, encoded[id(part)])
        if checked:
            _check_plain(tokenizer, ids)
        if part.places is None:
            starts, ends = starts + part.start, ends + part.start
        else:
            size = len(part.text)
            starts, ends = (
                np.append(part.places[0], part.places[1][-1])[np.minimum(starts, size)],
                part.places[1][np.clip(ends - 1, 0, size - 1)],
            )
        out.append((ids, starts, ends, starts))
    return out


def _forged(everything: Sequence[FoundToken | PlainPiece], spans: TrustedSpans) -> list[tuple[int, str]]:
    """The control tokens that text spells which may not hold them, each with the first such span that it touches."""
    touched = ((spans.first_forbidding(found), found.token.text) for found in _tokens(everything))
    return [(span, token) for span, token in touched if span is not None]


def _check_plain(tokenizer: Tokenizer, ids: Ids) -> None:
    """The last lock on the door: text that was to stay text holds no control id."""
    vocabulary = tokenizer.vocabulary
    forged = [int(i) for i in ids[vocabulary.is_control[ids]] if i != vocabulary.unknown]
    if forged:
        raise TokenizerError(
            f"this tokenizer makes control token {vocabulary.added[forged[0]].text!r} out of plain text in a "
            "way that cannot be switched off; pass control_tokens='reject' or 'hf_compat'"
        )


def _align(tokenizer: Tokenizer, part: PlainPiece, ids: Ids) -> tuple[Ids, Positions, Positions]:
    """Where each token of a piece stands, in characters of the piece."""
    vocabulary, run = tokenizer.vocabulary, part.text
    normal = unicodedata.normalize("NFC", run) if vocabulary.nfc and part.places is None else run
    lengths = vocabulary.byte_lengths[ids].astype(np.int64)
    raw = normal.encode("utf-8")
    total = int(lengths.sum()) if (lengths >= 0).all() else -1
    spelled = raw
    if total == len(raw) + 1 and vocabulary.spaced and len(ids):
        spelled = b" " + raw
        lengths[0] -= 1  # a space that the tokenizer put before the first word
    if total != len(spelled) or not (vocabulary.exact or vocabulary.spells(ids.tolist(), spelled)):
        return _align_by_offsets(tokenizer, part)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if len(raw) != len(normal):  # bytes to characters
        is_start = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
        character = np.concatenate((np.cumsum(is_start) - 1, [len(normal)]))
        starts, ends = character[starts], character[np.maximum(ends - 1, 0)] + 1
    if normal is not run and normal != run:
        origin = _origins_of_normal(run, normal)
        if origin is None:
            return _align_by_offsets(tokenizer, part)
        starts, ends = origin[starts], origin[ends]
    return ids, starts, ends


def _origins_of_normal(run: str, normal: str) -> Positions | None:
    """For each character of the normalized run, where it begins in the run itself."""
    positions: list[int] = []
    pieces: list[str] = []
    begin = 0
    bounds = [i for i, char in enumerate(run) if i and not unicodedata.combining(char)]
    for end in (*bounds, len(run)):
        piece = unicodedata.normalize("NFC", run[begin:end])
        positions += [begin] * len(piece)
        pieces.append(piece)
        begin = end
    if "".join(pieces) != normal:  # Hangul and the few other letters that compose without a mark
        return None
    return np.asarray([*positions, len(run)], np.int64)


def _align_by_offsets(tokenizer: Tokenizer, part: PlainPiece) -> tuple[Ids, Positions, Positions]:
    """The last resort: the offsets that the reference implementation reports for this piece."""
    ids, offsets = tokenizer.offsets(part.text, first=part.start == 0, normalized=part.places is not None)
    return ids, *_ordered(offsets)


def _ordered(offsets: Sequence[tuple[int, int]]) -> tuple[Positions, Positions]:
    """Reported offsets, put in order where tokens share a character."""
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    starts = np.maximum.accumulate(pairs[:, 0]) if len(pairs) else pairs[:, 0]
    return starts, np.maximum(pairs[:, 1], starts)
