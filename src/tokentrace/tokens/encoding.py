"""Spans to ids, each token knowing its span, and the one door through which control tokens are made.

The whole text is encoded in one call, as transformers does it, so merges equal the template's. Bytes per token
then tell which span each token begins in, and whether a control token touches text that nobody vouches for.
Only if one does, or if bytes do not add up (Unicode normalization, byte-fallback prefixes), the text is taken
apart: control tokens are looked for in trusted text alone, and the runs between them are encoded with a
tokenizer that has no control tokens at all.
"""

from __future__ import annotations

import bisect
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import TokenizerError
from ..template.trace import Rendering
from .tokenizer import Ids, Tokenizer
from .vocabulary import ControlToken

Positions = npt.NDArray[np.signedinteger[Any]]


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


def encode_spans(tokenizer: Tokenizer, rendering: Rendering, trusted: Sequence[bool], policy: ControlPolicy) -> Encoded:
    """The ids of a rendering. `trusted[k]` says whether span k may hold control tokens."""
    vocabulary = tokenizer.vocabulary
    units, is_normal = _byte_ends(rendering, vocabulary.nfc)
    if not is_normal:
        return _encode_apart(tokenizer, rendering, trusted, policy)
    ids = tokenizer.encode(rendering.text)
    signed = vocabulary.signed_lengths.take(ids)
    control = signed < 0
    lengths = np.abs(signed)
    ends = np.cumsum(lengths, dtype=np.int32)  # a rendering is far shorter than 2 GiB: MAX_OUTPUT
    if (ends[-1] if len(ends) else 0) != (units[-1] if units else 0) or not (
        vocabulary.exact or vocabulary.spells(ids.tolist(), rendering.text.encode("utf-8"))
    ):
        return _encode_apart(tokenizer, rendering, trusted, policy)
    starts = ends - lengths
    span_ends = np.asarray(units, np.int32)
    if policy is not ControlPolicy.HF_COMPAT and not all(trusted):
        at = np.flatnonzero(control)
        first = np.searchsorted(span_ends, starts[at], "right")
        last = np.searchsorted(span_ends, ends[at] - 1, "right")
        distrusted = np.concatenate(([0], np.cumsum(~np.asarray(trusted, np.bool_))))
        if (distrusted[last + 1] > distrusted[first]).any():
            return _encode_apart(tokenizer, rendering, trusted, policy)
    span_starts = np.concatenate((np.zeros(min(1, len(units)), np.int32), span_ends[:-1]))
    counts = np.diff(np.searchsorted(starts, span_starts, "left"), append=len(ids))
    spans = np.repeat(np.arange(len(units), dtype=np.int32), counts)
    return Encoded(ids, spans, starts, ends, control, rendering, None if units is rendering.ends else units)


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
    tokenizer: Tokenizer, rendering: Rendering, trusted: Sequence[bool], policy: ControlPolicy
) -> Encoded:
    text = rendering.text
    if policy is ControlPolicy.REJECT:
        _reject_forged(tokenizer, rendering, trusted)
    everything = policy is ControlPolicy.HF_COMPAT
    found = _find_control(tokenizer, text, [(0, len(text))] if everything else _stretches(rendering, trusted))
    runs: list[tuple[int, int]] = []
    at = 0
    for control in found:
        runs.append((at, control.start))
        at = control.end
    runs.append((at, len(text)))
    filled = [run for run in runs if run[0] < run[1]]
    begins = bool(filled) and filled[0][0] == 0
    encoded = dict(zip(filled, tokenizer.encode_plain([text[a:b] for a, b in filled], first=begins), strict=True))
    parts: list[Ids] = []
    starts: list[Positions] = []
    ends: list[Positions] = []
    begins_at: list[Positions] = []
    for index, run in enumerate(runs):
        if run in encoded:
            ids, run_starts, run_ends = _align(tokenizer, text[run[0] : run[1]], encoded[run], first=run[0] == 0)
            if not everything:
                _check_plain(tokenizer, ids)
            parts.append(ids)
            starts.append(run_starts + run[0])
            ends.append(run_ends + run[0])
            begins_at.append(starts[-1])
        if index < len(found):
            control = found[index]
            parts.append(np.asarray([control.token.id], np.int32))
            starts.append(np.asarray([control.start], np.int64))
            ends.append(np.asarray([control.end], np.int64))
            begins_at.append(np.asarray([control.text_start], np.int64))
    ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    all_starts = np.concatenate(starts) if starts else np.zeros(0, np.int64)
    all_ends = np.concatenate(ends) if ends else np.zeros(0, np.int64)
    span_ends = np.asarray(rendering.ends, np.int64)
    last = max(len(span_ends) - 1, 0)
    own = np.concatenate(begins_at) if begins_at else all_starts
    spans = np.minimum(np.searchsorted(span_ends, own, "right"), last).astype(np.int32)
    return Encoded(ids, spans, all_starts, all_ends, tokenizer.vocabulary.is_control[ids], rendering, None)


def _stretches(rendering: Rendering, trusted: Sequence[bool]) -> list[tuple[int, int]]:
    """The longest stretches of trusted text."""
    out: list[tuple[int, int]] = []
    start = 0
    for end, ok in zip(rendering.ends, trusted, strict=True):
        if ok:
            if out and out[-1][1] == start:
                out[-1] = (out[-1][0], end)
            else:
                out.append((start, end))
        start = end
    return out


@dataclass(frozen=True, slots=True)
class _Found:
    """A control token in a text: where it stands with the white space it absorbs, and where its own text does."""

    start: int
    end: int
    text_start: int
    text_end: int
    token: ControlToken


def _find_control(tokenizer: Tokenizer, text: str, stretches: Sequence[tuple[int, int]]) -> list[_Found]:
    """Control tokens inside the stretches, leftmost and longest first."""
    pattern = tokenizer.vocabulary.control_pattern
    found: list[_Found] = []
    if pattern is None:
        return found
    at = 0
    for begin, stop in stretches:
        position = max(begin, at)
        while match := pattern.search(text, position, stop):
            start, end = match.span()
            own_start, own_end = match.span()
            token = tokenizer.vocabulary.control[match[0]]
            position = end
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                position = start + 1
                continue
            if token.lstrip:
                start = at + len(text[at:start].rstrip())
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            found.append(_Found(start, end, own_start, own_end, token))
            at = position = end
    return found


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def _reject_forged(tokenizer: Tokenizer, rendering: Rendering, trusted: Sequence[bool]) -> None:
    """Raise ForgedControl for the first control token that touches an untrusted span."""
    text, ends = rendering.text, rendering.ends
    for found in _find_control(tokenizer, text, [(0, len(text))]):
        for span in range(bisect.bisect_right(ends, found.text_start), bisect.bisect_left(ends, found.text_end) + 1):
            if not trusted[span]:
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


def _align(tokenizer: Tokenizer, run: str, ids: Ids, *, first: bool) -> tuple[Ids, Positions, Positions]:
    """Where each token of a run stands, in characters of the run. `first`: the run begins the text."""
    vocabulary = tokenizer.vocabulary
    normal = unicodedata.normalize("NFC", run) if vocabulary.nfc else run
    lengths = vocabulary.byte_lengths[ids].astype(np.int64)
    raw = normal.encode("utf-8")
    total = int(lengths.sum()) if (lengths >= 0).all() else -1
    spelled = raw
    if total == len(raw) + 1 and vocabulary.spaced and len(ids):
        spelled = b" " + raw
        lengths[0] -= 1  # a space that the tokenizer put before the first word
    if total != len(spelled) or not (vocabulary.exact or vocabulary.spells(ids.tolist(), spelled)):
        return _align_by_offsets(tokenizer, run, first=first)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if len(raw) != len(normal):  # bytes to characters
        is_start = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
        character = np.concatenate((np.cumsum(is_start) - 1, [len(normal)]))
        starts, ends = character[starts], character[np.maximum(ends - 1, 0)] + 1
    if normal is not run and normal != run:
        origin = _origins_of_normal(run, normal)
        if origin is None:
            return _align_by_offsets(tokenizer, run, first=first)
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


def _align_by_offsets(tokenizer: Tokenizer, run: str, *, first: bool) -> tuple[Ids, Positions, Positions]:
    """The last resort: the offsets that the reference implementation reports for this run."""
    ids, offsets = tokenizer.offsets(run, first=first)
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    starts = np.maximum.accumulate(pairs[:, 0]) if len(pairs) else pairs[:, 0]
    return ids, starts, np.maximum(pairs[:, 1], starts)
