"""Completions as bytes in which no text can be mistaken for a control token.

A control token is the byte FF, which UTF-8 never contains, and four bytes that say which one.
Ordinary tokens are the bytes they spell, a lone FF as FE: both decode to U+FFFD.
"""

import functools
import re
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary

_MARK = re.compile(b"(\xff[\x80-\xbf]{4})")
_MARKS = re.compile(b"(?:\xff[\x80-\xbf]{4})+")
_TAG = re.compile(b"</?[^\\s<>=\"'/\xff]+(?:>|(?=[\\s=]))|\xff[\x80-\xbf]{4}")
_UNKNOWN = "\ufffd".encode()
_FEW = 128


def mark(index: int) -> bytes:
    """The bytes that stand for a control token."""
    return bytes((0xFF, *(0x80 | (index >> shift) & 0x3F for shift in (18, 12, 6, 0))))


class MarkedBytes:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._control, self._pattern = vocabulary.control, vocabulary.control_pattern
        self._tokens = {mark(token.id): token for token in vocabulary.control.values()}
        self.token_bytes = functools.cache(self._token)
        control, spelled = [token.id for token in self._tokens.values()], vocabulary.spelled
        starts = np.concatenate([[0], vocabulary.spelled_ends]).astype(np.int32)
        lengths = np.diff(starts, append=starts[-1])
        starts[lengths == 0], lengths[lengths == 0] = len(spelled), len(_UNKNOWN)
        starts[control], lengths[control] = len(spelled) + len(_UNKNOWN) + 5 * np.arange(len(control)), 5
        table = spelled.replace(b"\xff", b"\xfe") + _UNKNOWN + b"".join(self._tokens)
        self._bytes, self._starts, self._lengths = np.frombuffer(table, np.uint8), starts, lengths

    def _token(self, index: int) -> bytes:
        last = len(self._starts) - 1
        index = index if 0 <= index < last else last
        start = self._starts[index]
        return self._bytes[start : start + self._lengths[index]].tobytes()

    def _table(self, ids: npt.NDArray[Any]) -> tuple[bytes, npt.NDArray[np.int64]]:
        """Tokens as bytes, and where each begins, without a loop."""
        unknown = np.uint64(len(self._starts) - 1)
        index = np.minimum(ids.astype(np.uint64), unknown).view(np.int64)  # negative ids become large
        lengths = self._lengths.take(index)
        begins = np.cumsum(lengths) - lengths
        places = np.repeat(self._starts.take(index) - begins, lengths)
        places += np.arange(len(places))
        return self._bytes.take(places).tobytes(), begins

    def spelled(self, ids: Ids, base: int) -> tuple[bytes, list[int]]:
        """Tokens as bytes, and where each begins after `base` earlier bytes."""
        if len(ids) > _FEW:
            spelled, starts = self._table(ids)
            return spelled, (starts + base).tolist()
        pieces = list(map(self.token_bytes, ids.tolist()))
        return b"".join(pieces), list(accumulate(map(len, pieces), initial=base))[:-1]

    def scaffold(self, text: str) -> bytes:
        """Text as the template would write it: names of control tokens are the tokens."""
        out, at = b"", 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            out += text[at : match.start()].encode("utf-8", "surrogatepass") + mark(
                self._control[match[0]].id
            )
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
        if 0xFF not in data:
            return bytes(data)
        return _MARK.sub(lambda match: self._tokens[match[0]].text.encode("utf-8", "surrogatepass"), data)

    def text(self, data: bytes | bytearray) -> str:
        """Marked bytes as text; invalid UTF-8 becomes U+FFFD."""
        return self.visible(data).decode("utf-8", "replace")


def tags(data: bytes) -> list[re.Match[bytes]]:
    """The control tokens and spelled-out tags in marked bytes, in order."""
    return list(_TAG.finditer(data))


def unforgeable(piece: bytes) -> bool:
    """True for marked bytes with a control token, which no text can spell."""
    return 0xFF in piece


def pieces(data: bytes) -> tuple[bytes, ...]:
    """The words of a delimiter.

    Control tokens that begin a word are a piece by themselves, but not in a tag
    (``</｜DSML｜invoke>``).
    """
    out: list[bytes] = []
    for word in data.split():
        marks = _MARKS.match(word)
        end = marks.end() if marks else 0
        in_tag = word[end : end + 1] in (b"<", b">")
        out += [word] if in_tag or not end else [word[:end], word[end:]]
    return tuple(filter(None, out))


def parts(data: bytes) -> tuple[bytes, ...]:
    """The pieces of a delimiter, each leading control token by itself."""
    split = (_MARK.findall(piece) if _MARKS.fullmatch(piece) else [piece] for piece in pieces(data))
    return tuple(part for some in split for part in some)
