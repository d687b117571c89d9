"""Completions as bytes in which control tokens cannot be mistaken for text.

A control token is the byte FF, which UTF-8 never contains, and four bytes that say which one. Ordinary tokens are the
bytes they spell; a lone FF in one of them is written as FE: both decode to U+FFFD, as every broken byte does. So
delimiters can be searched for as bytes, and only a control token matches a control token.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary
from .lanes import Lanes

_MARK: Final = re.compile(b"\xff[\x80-\xbf]{4}")
_MARKS: Final = re.compile(b"(?:\xff[\x80-\xbf]{4})+")
Starts = list[int] | npt.NDArray[np.int64]
"""Where tokens begin."""

_UNKNOWN: Final = "\ufffd".encode()
_FEW: Final = 256
"""So many tokens are looked up one by one; more are picked from a table."""


def mark(index: int) -> bytes:
    """The bytes that stand for a control token."""
    return bytes((0xFF, *(0x80 | (index >> shift) & 0x3F for shift in (18, 12, 6, 0))))


class _Known(dict[int, bytes]):
    """Tokens that have been asked for, and control tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__({token.id: mark(token.id) for token in vocabulary.control.values()})
        self._vocabulary = vocabulary

    def __missing__(self, index: int) -> bytes:
        spelled = self._vocabulary.token_bytes(index) if 0 <= index < self._vocabulary.size else b""
        found = self[int(index)] = spelled.replace(b"\xff", b"\xfe") or _UNKNOWN
        return found


class _Table:
    """The bytes of tokens one after another in one array, to be picked from without a step for each token.

    It holds those that have been asked for. What is in it stays where it is, so that threads can share it.
    """

    def __init__(self, piece: Callable[[int], bytes], size: int) -> None:
        self._piece = piece
        self._unknown = size
        self._starts = np.full(size + 1, -1, np.int64)
        self._lengths = np.zeros(size + 1, np.int64)
        self._bytes = np.zeros(0, np.uint8)
        self._lock = threading.Lock()

    def many(self, ids: Ids) -> tuple[bytes, npt.NDArray[np.int64]]:
        index = np.minimum(ids.astype(np.int64), self._unknown)
        index[index < 0] = self._unknown
        starts = self._starts[index]
        if (starts < 0).any():
            self._learn(np.unique(index))
            starts = self._starts[index]
        lengths = self._lengths[index]
        ends = np.cumsum(lengths)
        begins = ends - lengths
        places = np.repeat(starts - begins, lengths)
        places += np.arange(len(places))
        return self._bytes[places].tobytes(), begins

    def _learn(self, index: npt.NDArray[np.int64]) -> None:
        with self._lock:
            new = index[self._starts[index] < 0]
            pieces = [self._piece(one if one < self._unknown else -1) for one in new.tolist()]
            lengths = np.array([len(piece) for piece in pieces], np.int64)
            begins = len(self._bytes) + np.cumsum(lengths) - lengths
            self._bytes = np.concatenate([self._bytes, np.frombuffer(b"".join(pieces), np.uint8)])
            self._lengths[new] = lengths
            self._starts[new] = begins  # last: who finds a start finds the rest


class MarkedBytes:
    """Tokens and scaffold as marked bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._known = _Known(vocabulary)
        self._texts: dict[bytes, bytes] = {
            mark(token.id): token.text.encode("utf-8", "surrogatepass") for token in vocabulary.control.values()
        }
        self._table = _Table(self.token, vocabulary.size)
        self.lanes = Lanes(self.token)

    def token(self, index: int) -> bytes:
        """One token. An id that the vocabulary does not have is U+FFFD."""
        return self._known[index]

    def spelled(self, ids: Iterable[int] | Ids, base: int) -> tuple[bytes, Starts]:
        """Many tokens: their bytes, and where each of them begins after `base` others."""
        if isinstance(ids, np.ndarray):
            if len(ids) > _FEW and ids.dtype.kind in "iu":
                spelled, starts = self._table.many(ids)
                starts += base
                return spelled, starts
            ids = ids.tolist()
        known = self._known
        pieces = [known[index] for index in ids]
        return b"".join(pieces), list(accumulate(map(len, pieces[:-1]), initial=base)) if pieces else []

    def scaffold(self, text: str) -> bytes:
        """Text as the template would write it: names of control tokens are the tokens."""
        pattern = self._vocabulary.control_pattern
        if pattern is None:
            return text.encode("utf-8", "surrogatepass")
        out, at = b"", 0
        for match in pattern.finditer(text):
            out += text[at : match.start()].encode("utf-8", "surrogatepass")
            out += mark(self._vocabulary.control[match[0]].id)
            at = match.end()
        return out + text[at:].encode("utf-8", "surrogatepass")

    def visible(self, data: bytes | bytearray) -> bytes:
        """Marked bytes as people read them: control tokens by their names."""
        return _MARK.sub(lambda match: self._texts[match[0]], data) if 0xFF in data else bytes(data)


def unforgeable(piece: bytes) -> bool:
    """Whether marked bytes hold a control token, so that text cannot spell them."""
    return 0xFF in piece


def marks_of(piece: bytes) -> frozenset[bytes]:
    """The control tokens in marked bytes."""
    return frozenset(_MARK.findall(piece))


def pieces(data: bytes) -> tuple[bytes, ...]:
    """What has to be there of a delimiter: its pieces, without the white space in and around it.

    Control tokens at the beginning of a word are a piece by themselves, so that white space may stand after them;
    not so before a tag, or inside of one (``</｜DSML｜invoke>``).
    """
    out: list[bytes] = []
    for word in data.split():
        match = _MARKS.match(word)
        rest = word[match.end() :] if match is not None else b""
        out += [word] if not rest or rest.startswith((b"<", b">")) else [word[: len(word) - len(rest)], rest]
    return tuple(out)


def parts(data: bytes) -> tuple[bytes, ...]:
    """The pieces of a delimiter, each control token that leads a word by itself: white space may stand between any."""
    out: list[bytes] = []
    for piece in pieces(data):
        match = _MARKS.match(piece)
        marks = match[0] if match is not None else b""
        whole = len(marks) == len(piece)
        out += [marks[at : at + 5] for at in range(0, len(marks), 5)] if whole else [piece]
    return tuple(part for part in out if part)
