"""Completions as bytes in which control tokens cannot be mistaken for text.

A control token is the byte FF, which UTF-8 never contains, and four bytes that say which one. Ordinary tokens are the
bytes they spell; a lone FF in one of them is written as FE: both decode to U+FFFD, as every broken byte does. So
delimiters can be searched for as bytes, and only a control token matches a control token.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary

_MARK: Final = re.compile(b"\xff[\x80-\xbf]{4}")
_TAG: Final = re.compile(b"</?[^\\s<>=\"'/\xff]+(?:>|(?=[\\s=]))|\xff[\x80-\xbf]{4}")
_MARKS: Final = re.compile(b"(?:\xff[\x80-\xbf]{4})+")
Starts = list[int] | memoryview
"""Where tokens begin: numbers to look for one after another, for which an array would be slow."""

_UNKNOWN: Final = "\ufffd".encode()
_FEW: Final = 128
"""So many tokens are looked up one by one; more are picked from a table."""


def mark(index: int) -> bytes:
    """The bytes that stand for a control token."""
    return bytes((0xFF, *(0x80 | (index >> shift) & 0x3F for shift in (18, 12, 6, 0))))


class _Table(dict[int, bytes]):
    """The bytes of tokens: one by one, kept when they have been asked for, or many without a step for each of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        control = vocabulary.control.values()
        super().__init__({token.id: mark(token.id) for token in control})
        spelled, ends = vocabulary.spelled, vocabulary.spelled_ends
        starts = np.concatenate([[0], ends])
        lengths = np.diff(starts, append=starts[-1])
        starts[lengths == 0], lengths[lengths == 0] = len(spelled), len(_UNKNOWN)
        controls = [token.id for token in control]
        starts[controls], lengths[controls] = len(spelled) + len(_UNKNOWN) + 5 * np.arange(len(controls)), 5
        self._unknown = len(ends)
        self._bytes = spelled.replace(b"\xff", b"\xfe") + _UNKNOWN + b"".join(map(mark, controls))
        self._array = np.frombuffer(self._bytes, np.uint8)
        self._starts, self._lengths = starts.astype(np.int32), lengths.astype(np.int32)
        self._places = self._starts.data, self._lengths.data

    def __missing__(self, index: int) -> bytes:
        starts, lengths = self._places
        at = operator.index(index) if 0 <= index < self._unknown else self._unknown
        piece = self[int(index)] = self._bytes[starts[at] : starts[at] + lengths[at]]
        return piece

    def many(self, ids: npt.NDArray[Any]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """The bytes of many tokens, and where each begins."""
        index = np.minimum(ids.astype(np.uint64), np.uint64(self._unknown)).view(np.int64)  # negative ones are large
        lengths = self._lengths.take(index)
        begins = np.cumsum(lengths) - lengths
        places = np.repeat(self._starts.take(index) - begins, lengths)
        places += np.arange(len(places))
        return self._array.take(places).tobytes(), begins


class MarkedBytes:
    """Tokens and scaffold as marked bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.table = _Table(vocabulary)
        """The bytes of each token."""
        self._ids = {mark(token.id): token.id for token in vocabulary.control.values()}
        self._texts: dict[bytes, bytes] = {
            mark(token.id): token.text.encode("utf-8", "surrogatepass") for token in vocabulary.control.values()
        }

    def spelled(self, ids: Iterable[int] | Ids, base: int) -> tuple[bytes, Starts]:
        """Tokens as bytes, and where each of them begins after `base` others. One that is unknown is U+FFFD."""
        if isinstance(ids, np.ndarray):
            if len(ids) > _FEW and ids.dtype.kind in "iu":
                spelled, starts = self.table.many(ids)
                starts += base
                return spelled, starts.data
            ids = ids.tolist()
        table = self.table
        if type(ids) is list and len(ids) == 1:  # as streams bring them
            return table[ids[0]], [base]
        pieces = [table[index] for index in ids]
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

    def ids(self, data: bytes, tokenizer: Tokenizer) -> list[int]:
        """The ids of marked bytes, as the template would write them."""
        ids: list[int] = []
        for piece in re.split(b"(\xff[\x80-\xbf]{4})", data):
            if piece[:1] == b"\xff":
                ids.append(self._ids[piece])
            elif piece:
                ids += tokenizer.encode_plain(piece.decode("utf-8", "surrogatepass")).tolist()
        return ids

    def visible(self, data: bytes | bytearray) -> bytes:
        """Marked bytes as people read them: control tokens by their names."""
        return _MARK.sub(lambda match: self._texts[match[0]], data) if 0xFF in data else bytes(data)


def tags(data: bytes) -> list[re.Match[bytes]]:
    """The control tokens in marked bytes and the tags spelled out in them, in order."""
    return list(_TAG.finditer(data))


def unforgeable(piece: bytes) -> bool:
    """Whether marked bytes hold a control token, so that text cannot spell them."""
    return 0xFF in piece


def pieces(data: bytes) -> tuple[bytes, ...]:
    """What has to be there of a delimiter: its pieces, without the white space in and around it.

    Control tokens at the beginning of a word are a piece by themselves, so that white space may stand after them;
    not so before a tag, or inside of one (``</｜DSML｜invoke>``).
    """
    out: list[bytes] = []
    for word in data.split():
        match = _MARKS.match(word)
        after = word[match.end() :] if match is not None else b""
        out += [word] if not after or after.startswith((b"<", b">")) else [word[: len(word) - len(after)], after]
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
