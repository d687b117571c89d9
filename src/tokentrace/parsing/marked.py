"""Completions as bytes in which control tokens cannot be mistaken for text.

A control token is the byte FF, which UTF-8 never contains, and four bytes that say which one. Ordinary tokens are the
bytes they spell, a lone FF as FE: both decode to U+FFFD. So delimiters can be searched for as bytes.
"""

import functools
import operator
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary

_MARK: Final = re.compile(b"(\xff[\x80-\xbf]{4})")
_MARKS: Final = re.compile(b"(?:\xff[\x80-\xbf]{4})+")
_TAG: Final = re.compile(b"</?[^\\s<>=\"'/\xff]+(?:>|(?=[\\s=]))|\xff[\x80-\xbf]{4}")
_UNKNOWN: Final = "\ufffd".encode()
_FEW: Final = 128
"""So many tokens are looked up one by one; more are picked from a table."""


def mark(index: int) -> bytes:
    """The bytes that stand for a control token."""
    return bytes((0xFF, *(0x80 | (index >> shift) & 0x3F for shift in (18, 12, 6, 0))))


class _Table(dict[int, bytes]):
    """The bytes of tokens: one by one, cached, or many without a step for each of them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        control = [token.id for token in vocabulary.control.values()]
        super().__init__({index: mark(index) for index in control})
        spelled, self._unknown = vocabulary.spelled, len(vocabulary.spelled_ends)
        starts = np.concatenate([[0], vocabulary.spelled_ends]).astype(np.int32)
        lengths = np.diff(starts, append=starts[-1])
        starts[lengths == 0], lengths[lengths == 0] = len(spelled), len(_UNKNOWN)
        starts[control], lengths[control] = len(spelled) + len(_UNKNOWN) + 5 * np.arange(len(control)), 5
        self._bytes = spelled.replace(b"\xff", b"\xfe") + _UNKNOWN + b"".join(map(mark, control))
        self._array = np.frombuffer(self._bytes, np.uint8)
        self._starts, self._lengths = starts, lengths
        self._places = starts.data, lengths.data

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


class PlainTexts(dict[int, str | None]):
    """Tokens as text, cached: None if one has a special byte, empty if it does not end where a character does."""

    def __init__(self, table: Mapping[int, bytes], special: re.Pattern[bytes]) -> None:
        super().__init__()
        self._table, self._special = table, special

    def __missing__(self, index: int) -> str | None:
        piece = self._table[index]
        try:
            text = piece.decode() if self._special.search(piece) is None else None
        except UnicodeDecodeError:
            text = ""
        self[index] = text
        return text


class MarkedBytes:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self.table = _Table(vocabulary)
        self._control, self._pattern = vocabulary.control, vocabulary.control_pattern
        self._tokens = {mark(token.id): token for token in vocabulary.control.values()}
        self.plain_texts = functools.cache(functools.partial(PlainTexts, self.table))

    def spelled(self, ids: Ids, base: int) -> tuple[bytes, list[int]]:
        """Tokens as bytes, and where each begins after `base` others."""
        if len(ids) > _FEW:
            spelled, starts = self.table.many(ids)
            return spelled, (starts + base).tolist()
        pieces = list(map(self.table.__getitem__, ids.tolist()))
        return b"".join(pieces), list(accumulate(map(len, pieces), initial=base))[:-1]

    def scaffold(self, text: str) -> bytes:
        """Text as the template would write it: names of control tokens are the tokens."""
        out, at = b"", 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            out += text[at : match.start()].encode("utf-8", "surrogatepass") + mark(self._control[match[0]].id)
            at = match.end()
        return out + text[at:].encode("utf-8", "surrogatepass")

    def ids(self, data: bytes, tokenizer: Tokenizer) -> list[int]:
        """The ids of marked bytes, as the template would write them."""
        ids: list[int] = []
        for piece in _MARK.split(data):
            if piece[:1] == b"\xff":
                ids.append(self._tokens[piece].id)
            elif piece:
                ids += tokenizer.encode_plain(piece.decode("utf-8", "surrogatepass")).tolist()
        return ids

    def visible(self, data: bytes | bytearray) -> bytes:
        """Marked bytes as people read them: control tokens by their names."""
        return (
            bytes(data)
            if 0xFF not in data
            else _MARK.sub(lambda match: self._tokens[match[0]].text.encode("utf-8", "surrogatepass"), data)
        )

    def text(self, data: bytes | bytearray) -> str:
        """Marked bytes as text, what is not UTF-8 as U+FFFD."""
        return self.visible(data).decode("utf-8", "replace")


def tags(data: bytes) -> list[re.Match[bytes]]:
    """The control tokens in marked bytes and the tags spelled out in them, in order."""
    return list(_TAG.finditer(data))


def unforgeable(piece: bytes) -> bool:
    """True if marked bytes hold a control token, so that text cannot spell them."""
    return 0xFF in piece


def pieces(data: bytes) -> tuple[bytes, ...]:
    """The pieces of a delimiter, without the white space in and around it.

    Control tokens that begin a word are a piece by themselves, but not in a tag (``</｜DSML｜invoke>``).
    """
    out: list[bytes] = []
    for word in data.split():
        match = _MARKS.match(word)
        after = word[match.end() :] if match is not None else b""
        out += [word] if not after or after.startswith((b"<", b">")) else [word[: len(word) - len(after)], after]
    return tuple(out)


def parts(data: bytes) -> tuple[bytes, ...]:
    """The pieces of a delimiter, each leading control token by itself."""
    split = (_MARK.findall(piece) if _MARKS.fullmatch(piece) else [piece] for piece in pieces(data))
    return tuple(part for some in split for part in some)
