"""Control tokens known by counting: where those of the scaffold are all there are, the k-th is the k-th.

What the template writes itself comes again and again, so the control tokens of each such piece of text are found once,
by encoding it. If an encoded text has exactly those of its scaffold, in order, then none came from a field, and it is
known where in the text each of them stands. Nothing has to be added up over all tokens for that.

Why this is proof: added tokens are found from left to right, by their own text alone. So a piece has its own ones
wherever it is written, unless one lies across either of its ends, and for that certain text has to stand there
(`KnownPiece.before`, `KnownPiece.after`). Where it does not, the control tokens of each piece are in the ids, in order.
As many as that is all there are. All added tokens are looked at here, white space too: what they take is lost to
others.
"""

from __future__ import annotations

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

Found = tuple[tuple[int, int, int], ...]
"""The control tokens of a text: where each begins and ends, and its id."""


class KnownPiece(NamedTuple):
    """A text whose control tokens are known unless it stands after, or before, one of these."""

    found: Found
    before: tuple[str, ...]
    after: tuple[str, ...]


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
        self._known: dict[str, Found] = {}
        """Those that what stands around them cannot change."""
        self._others: dict[str, KnownPiece | None] = {}
        added = vocabulary.added.values()
        late = vocabulary.nfc and any(token.normalized for token in added)
        self._is_provable = vocabulary.exact and not late and not any(token.single_word for token in added)
        """Whether an added token is found by its own text alone, whatever stands around it."""

    def count(self, rendering: Rendering, ids: npt.NDArray[np.int32]) -> Counted | None:
        """The control tokens of a text and its ids, if they are those of its scaffold; None where that is not so."""
        if not self._is_provable:
            return None
        named: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        known, text, begin = self._known, rendering.text, 0
        for end, origin in zip(rendering.ends, rendering.origins, strict=True):
            if origin is None:
                found = known.get(text[begin:end])
                if found is None:
                    found = self._find_between(text, begin, end)
                    if found is None:
                        return None
                for start, stop, token in found:
                    starts.append(begin + start)
                    ends.append(begin + stop)
                    named.append(token)
            begin = end
        at = self._vocabulary.find_control(ids)
        if len(at) != len(named) or ids[at].tolist() != named:
            return None
        return Counted(at.tolist(), named, starts, ends)

    def _find_between(self, text: str, begin: int, end: int) -> Found | None:
        """The control tokens of a piece of text that is not known, or that neighbours may change; None if they may."""
        name = text[begin:end]
        piece = self._others[name] if name in self._others else self._learn(name)
        if piece is None or text.endswith(piece.before, 0, begin) or text.startswith(piece.after, end):
            return None
        return piece.found

    def piece(self, text: str) -> KnownPiece | None:
        """A piece of scaffold; None where more than its own text decides about its control tokens."""
        return self._learn(text) if self._is_provable else None

    def _learn(self, name: str) -> KnownPiece | None:
        piece = self._find(name)
        if len(name) <= _LONGEST:
            if len(self._known) + len(self._others) >= _MOST:
                self._known.clear()
                self._others.clear()
            if piece is None or piece.before or piece.after:
                self._others[name] = piece
            else:
                self._known[name] = piece.found
        return piece

    def _find(self, text: str) -> KnownPiece | None:
        """A piece, if its tokens spell it."""
        ids, raw = self._encode(text), text.encode("utf-8")
        stops = self._vocabulary.byte_lengths[ids].cumsum().tolist()
        if stops and stops[-1] != len(raw):
            return None
        bounds = [len(raw[:stop].decode("utf-8", "ignore")) for stop in (0, *stops)]
        at = self._vocabulary.find_control(ids).tolist()
        found = tuple((bounds[one], bounds[one + 1], int(ids[one])) for one in at)
        if not found:
            return KnownPiece((), (), ())
        before: set[str] = set()
        after: set[str] = set()
        for token in self._vocabulary.added.values():
            name = token.text
            for cut in range(1, len(name)):
                head, tail = name[:cut], name[cut:]
                if text.startswith(tail[: len(text)]):
                    before.add(head)
                if text.endswith(head):
                    after.add(tail)
        return KnownPiece(found, tuple(sorted(before)), tuple(sorted(after)))
