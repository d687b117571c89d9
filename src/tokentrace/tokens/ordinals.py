"""Control tokens known by counting: where those of the scaffold are all there are, the k-th is the k-th.

What the template writes itself comes again and again, so the control tokens of each such piece of text are found once,
by encoding it. If an encoded text has exactly those of its scaffold, in order, then none came from a field, and it is
known where in the text each of them stands. Nothing has to be added up over all tokens for that.

Why this is proof: a piece counts only if no control token can reach over either of its ends, whatever stands there
(`_stands_alone`). So the control tokens of each piece are in the ids wherever it is written, in order. As many as that
is all there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..template.spans import Rendering
from .vocabulary import Vocabulary

_MOST: Final = 4096
"""How many pieces of scaffold are kept; templates have some dozen."""
_LONGEST: Final = 16_384
"""Characters of a piece that may be kept."""

Piece = tuple[tuple[int, int, int], ...]
"""The control tokens of a text: where each begins and ends, and its id."""


class Counted(NamedTuple):
    """The control tokens of a text: which tokens they are, their ids, and where they begin and end, in characters."""

    at: list[int]
    named: list[int]
    starts: list[int]
    ends: list[int]


class ScaffoldTokens:
    """The control tokens of pieces of scaffold, under one tokenizer."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], npt.NDArray[np.int32]]) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self._known: dict[str, Piece] = {}
        self._unproven: set[str] = set()
        late = vocabulary.nfc and any(token.normalized for token in vocabulary.control.values())
        alone = any(token.single_word for token in vocabulary.control.values())
        self._is_provable = vocabulary.exact and not late and not alone
        """Whether a control token is found by its own text alone, whatever stands around it."""

    def count(self, rendering: Rendering, ids: npt.NDArray[np.int32]) -> Counted | None:
        """The control tokens of a text and its ids, if they are those of its scaffold; None where that is not so."""
        if not self._is_provable:
            return None
        named: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        known, text, begin = self._known, rendering.text, 0
        for end, origin in zip(rendering.closed.ends, rendering.closed.origins, strict=True):
            if origin is None:
                piece = known.get(text[begin:end])
                if piece is None:
                    piece = self._learn(text[begin:end])
                    if piece is None:
                        return None
                for start, stop, token in piece:
                    starts.append(begin + start)
                    ends.append(begin + stop)
                    named.append(token)
            begin = end
        at = self._vocabulary.find_control(ids)
        if len(at) != len(named) or ids[at].tolist() != named:
            return None
        return Counted(at.tolist(), named, starts, ends)

    def _learn(self, piece: str) -> Piece | None:
        if piece in self._unproven:
            return None
        found = self._find(piece)
        if len(piece) <= _LONGEST:
            if len(self._known) + len(self._unproven) >= _MOST:
                self._known.clear()
                self._unproven.clear()
            if found is None:
                self._unproven.add(piece)
            else:
                self._known[piece] = found
        return found

    def _find(self, piece: str) -> Piece | None:
        """The control tokens of a text wherever it is written; None if what stands around it may change them."""
        ids, raw = self._encode(piece), piece.encode("utf-8")
        stops = self._vocabulary.byte_lengths[ids].cumsum()
        if len(stops) and stops[-1] != len(raw):
            return None
        at = self._vocabulary.find_control(ids).tolist()
        if at and not self._stands_alone(piece):
            return None
        bounds = [len(raw[:stop].decode("utf-8", "ignore")) for stop in (0, *stops.tolist())]
        return tuple((bounds[one], bounds[one + 1], int(ids[one])) for one in at)

    def _stands_alone(self, piece: str) -> bool:
        """Whether no control token can lie in this text with a part of it only, whatever comes before and after."""
        heads, tails, longest = self._halves
        lengths = range(1, min(longest, len(piece)) + 1)
        return not (
            any(piece[-length:] in heads or piece[:length] in tails for length in lengths)
            or any(piece in name and piece != name for name in self._vocabulary.control)
        )

    @functools.cached_property
    def _halves(self) -> tuple[frozenset[str], frozenset[str], int]:
        """All that control tokens begin with and end with, but for the whole of them; the length of the longest."""
        cuts = [(name, at) for name in self._vocabulary.control for at in range(1, len(name))]
        heads, tails = frozenset(name[:at] for name, at in cuts), frozenset(name[at:] for name, at in cuts)
        return heads, tails, max(map(len, self._vocabulary.control), default=0)
