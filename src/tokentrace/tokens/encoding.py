"""Spans to ids, each token knowing its span, and the one door through which control tokens are made.

The whole text is encoded in one call, as transformers does it, so merges equal the template's. Bytes per token
then tell which span each token begins in, and whether a control token touches text that is not trusted.
Only if one does, or if bytes do not add up (Unicode normalization, byte-fallback prefixes), the text is taken
apart: control tokens are looked for in trusted text alone, and the runs between them are encoded with a
tokenizer that has no control tokens at all.
"""

from __future__ import annotations

import bisect
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from ..errors import TokenizerError
from ..template.trace import Rendering
from .control import Found, Plain, Positions, Spans, Trust, split
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


@dataclass(slots=True)
class Encoded:
    """Ids, the span in which each begins, and where each stands in the text (in bytes or characters)."""

    ids: Ids
    spans: npt.NDArray[np.int32]
    starts: Positions
    ends: Positions
    control: npt.NDArray[np.bool_]
    rendering: Rendering
    span_units: list[int] | None
    """Where each span ends, in the units of `starts`; None if units are characters."""

    def unit(self, position: int) -> int:
        """The unit position of a character position of the text."""
        if self.span_units is None:
            return position
        ends = self.rendering.ends
        span = bisect.bisect_left(ends, position)
        if span >= len(ends):
            return self.span_units[-1] if self.span_units else 0
        if ends[span] == position:
            return self.span_units[span]
        start = ends[span - 1] if span else 0
        base = self.span_units[span - 1] if span else 0
        return base + len(self.rendering.text[start:position].encode("utf-8", "surrogatepass"))

    def position(self, token: int) -> int:
        """Where a token begins, as a character position of the text; one past the last is where the text ends."""
        if token >= len(self.ids):
            return len(self.rendering.text)
        unit = int(self.starts[token])
        if self.span_units is None:
            return unit
        span = bisect.bisect_left(self.span_units, unit)
        if self.span_units[span] == unit:
            return self.rendering.ends[span]
        start, base = (self.rendering.ends[span - 1], self.span_units[span - 1]) if span else (0, 0)
        raw = self.rendering.text[start : self.rendering.ends[span]].encode("utf-8")
        return start + len(raw[: unit - base].decode("utf-8", "ignore"))

    def first_touching(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that ends after it."""
        return np.searchsorted(self.ends, self._units(positions), "right").tolist()  # type: ignore[no-any-return]

    def first_after(self, positions: Sequence[int]) -> list[int]:
        """For each character position, the first token that begins at it or later."""
        return np.searchsorted(self.starts, self._units(positions), "left").tolist()  # type: ignore[no-any-return]

    def _units(self, positions: Sequence[int]) -> Positions:
        units = positions if self.span_units is None else [self.unit(position) for position in positions]
        return np.asarray(units, self.ends.dtype)  # of one type with what is searched, which is else copied

    def tokens_touching(self, start: int, end: int) -> tuple[int, int]:
        """The half-open range of tokens that hold a character of ``text[start:end]``."""
        first = self.first_touching([start])[0]
        return first, max(first, self.first_after([end])[0])


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
    vocabulary = tokenizer.vocabulary
    units, is_normal = _byte_ends(rendering, vocabulary.nfc)
    if not is_normal:
        return _encode_apart(tokenizer, rendering, trust, policy, inner)
    ids = tokenizer.encode(rendering.text)
    signed = vocabulary.signed_lengths.take(ids)
    control = signed < 0
    lengths = np.abs(signed)
    ends = np.cumsum(lengths, dtype=np.int32)  # a rendering is far shorter than 2 GiB: MAX_OUTPUT
    if (ends[-1] if len(ends) else 0) != (units[-1] if units else 0) or not (
        vocabulary.exact or vocabulary.spells(ids.tolist(), rendering.text.encode("utf-8"))
    ):
        return _encode_apart(tokenizer, rendering, trust, policy, inner)
    starts = ends - lengths
    span_ends = np.asarray(units, np.int32)
    if policy is not ControlPolicy.HF_COMPAT and min(trust, default=Trust.ANY) < Trust.ANY:
        at = np.flatnonzero(control)
        first = np.searchsorted(span_ends, starts[at], "right")
        last = np.searchsorted(span_ends, ends[at] - 1, "right")
        if _forbidden(np.asarray(trust, np.int8), first, last, ids[at], inner):
            return _encode_apart(tokenizer, rendering, trust, policy, inner)
    span_starts = np.concatenate((np.zeros(min(1, len(units)), np.int32), span_ends[:-1]))
    counts = np.diff(np.searchsorted(starts, span_starts, "left"), append=len(ids))
    spans = np.repeat(np.arange(len(units), dtype=np.int32), counts)
    return Encoded(ids, spans, starts, ends, control, rendering, None if units is rendering.ends else units)


def _forbidden(
    trust: npt.NDArray[np.int8],
    first: npt.NDArray[np.intp],
    last: npt.NDArray[np.intp],
    tokens: Ids,
    inner: Callable[[], frozenset[int]],
) -> bool:
    """Whether one of the tokens touches a span, from its `first` to its `last`, that may not hold it."""

    def touching(spans: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        before = np.concatenate(([0], np.cumsum(spans)))
        return np.asarray(before[last + 1] > before[first])

    if touching(trust == Trust.NONE).any():
        return True
    careful = touching(trust == Trust.INNER)
    return bool(careful.any()) and not np.isin(tokens[careful], list(inner())).all()


def _byte_ends(rendering: Rendering, nfc: bool) -> tuple[list[int], bool]:
    """Where each span ends, in bytes of UTF-8, and whether the text is normalized as the tokenizer will have it."""
    text, ends = rendering.text, rendering.ends
    if text.isascii():
        return ends, True
    lengths = np.diff(np.asarray(ends, np.int64), prepend=0)
    is_normal = True
    for span in range(len(ends)) if rendering.wide is None else sorted(set(rendering.wide)):
        start, end = ends[span - 1] if span else 0, ends[span]
        lengths[span] = len(text[start:end].encode("utf-8"))
        # a few characters more, because marks compose with what stands before them
        is_normal = is_normal and (not nfc or unicodedata.is_normalized("NFC", text[max(0, start - 8) : end]))
    return np.cumsum(lengths).tolist(), is_normal


# -- the careful way


def _encode_apart(
    tokenizer: Tokenizer,
    rendering: Rendering,
    trust: Sequence[Trust],
    policy: ControlPolicy,
    inner: Callable[[], frozenset[int]],
) -> Encoded:
    text = rendering.text
    everything = split(text, Spans([len(text)], [Trust.ANY]), tokenizer.patterns, tokenizer.normalize)
    parts = everything
    if policy is not ControlPolicy.HF_COMPAT and min(trust, default=Trust.ANY) < Trust.ANY:
        spans = Spans(rendering.ends, trust)
        if Trust.INNER in trust and any(spans.least(found) is Trust.INNER for found in _tokens(everything)):
            spans = Spans(rendering.ends, trust, inner())
        if policy is ControlPolicy.REJECT:
            _reject_forged(everything, spans)
        parts = split(text, spans, tokenizer.patterns, tokenizer.normalize)
    nowhere = (np.zeros(0, np.int32), *(np.zeros(0, np.int64) for _ in range(3)))
    pieces = _encode_pieces(tokenizer, parts, checked=policy is not ControlPolicy.HF_COMPAT)
    ids, starts, ends, begins = map(np.concatenate, zip(nowhere, *pieces, strict=True))
    if _tokens(parts) == _tokens(everything) and not np.array_equal(ids, tokenizer.encode(text)):
        # nothing was kept from being a control token: the ids are those of the tokenizer, however it comes to them
        ids, offsets = tokenizer.reference(text)
        starts, ends = _ordered(offsets)
        begins = starts
    last = max(len(rendering.ends) - 1, 0)
    places = np.minimum(np.searchsorted(np.asarray(rendering.ends, np.int64), begins, "right"), last).astype(np.int32)
    return Encoded(ids, places, starts, ends, tokenizer.vocabulary.is_control[ids], rendering, None)


def _tokens(parts: Sequence[Found | Plain]) -> list[Found]:
    return [part for part in parts if isinstance(part, Found)]


_Piece = tuple[Ids, Positions, Positions, Positions]
"""Tokens, where they start and end in the text, and where what they spell begins, without white space they absorb."""


def _encode_pieces(tokenizer: Tokenizer, parts: Sequence[Found | Plain], *, checked: bool) -> list[_Piece]:
    """Control tokens, and the ids of the text between them. `checked`: there must be no control token in that."""
    encoded: dict[int, Ids] = {}
    for normalized in (False, True):
        plain = [part for part in parts if isinstance(part, Plain) and (part.places is not None) == normalized]
        first = bool(plain) and plain[0].start == 0
        some = tokenizer.encode_plain([part.text for part in plain], first=first, normalized=normalized)
        encoded |= zip(map(id, plain), some, strict=True)
    out: list[_Piece] = []
    for part in parts:
        if isinstance(part, Found):
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


def _reject_forged(everything: Sequence[Found | Plain], spans: Spans) -> None:
    """Raise ForgedControl for the first control token that touches a span that may not hold it."""
    for found in _tokens(everything):
        span = spans.first_forbidding(found)
        if span is not None:
            raise ForgedControl(span, found.token.text)


def _check_plain(tokenizer: Tokenizer, ids: Ids) -> None:
    """The last lock on the door: text that was to stay text holds no control id."""
    vocabulary = tokenizer.vocabulary
    forged = [int(i) for i in ids[vocabulary.is_control[ids]] if i != vocabulary.unknown]
    if forged:
        raise TokenizerError(
            f"this tokenizer makes control token {vocabulary.added[forged[0]].text!r} out of plain text in a "
            "way that cannot be switched off; pass control_tokens='reject' or 'hf_compat'"
        )


def _align(tokenizer: Tokenizer, part: Plain, ids: Ids) -> tuple[Ids, Positions, Positions]:
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


def _align_by_offsets(tokenizer: Tokenizer, part: Plain) -> tuple[Ids, Positions, Positions]:
    """The last resort: the offsets that the reference implementation reports for this piece."""
    ids, offsets = tokenizer.offsets(part.text, first=part.start == 0, normalized=part.places is not None)
    return ids, *_ordered(offsets)


def _ordered(offsets: Sequence[tuple[int, int]]) -> tuple[Positions, Positions]:
    """Reported offsets, put in order where tokens share a character."""
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    starts = np.maximum.accumulate(pairs[:, 0]) if len(pairs) else pairs[:, 0]
    return starts, np.maximum(pairs[:, 1], starts)
