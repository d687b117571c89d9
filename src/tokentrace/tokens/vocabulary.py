"""A ``tokenizer.json`` as tables over token ids, and as a tokenizer without control tokens."""

import copy
import functools
import json
import operator
import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..computed import computed

_UNREACHABLE = f"\x00{secrets.token_hex(16)}"
"""A random prefix for control tokens in the plain tokenizer's vocabulary: no text can spell it."""

TOKEN_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
"""Flags of an added token in ``tokenizer.json``."""

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _nodes(part: Any) -> Iterator[dict[str, Any]]:
    """All components inside a normalizer, pre-tokenizer or decoder."""
    if isinstance(part, dict):
        yield part
        part = list(part.values())
    for value in part if isinstance(part, list) else []:
        yield from _nodes(value)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level BPE spells bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(unprintable)
    }


class ControlToken:
    __slots__ = ("id", "text", *TOKEN_FLAGS)
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool
    """tokenizers searches for it in normalized text, after all others."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.id = int(row["id"])
        self.text = str(row["content"])
        for flag in TOKEN_FLAGS:
            setattr(self, flag, bool(row.get(flag)))


class Vocabulary:
    """Tables over the token ids of a ``tokenizer.json``.

    A control token is any added token, special or not, that is not mere white space (Gemma's
    newlines are text).
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        spec = self.spec
        model = spec["model"]
        pieces = _pieces(model)
        self.parts = {**spec, "model": {key: model[key] for key in model if key not in ("vocab", "merges")}}
        """The file without the model's vocabulary and merges."""
        added = spec.get("added_tokens") or []
        self.white_space = [row for row in added if not _is_control(str(row["content"]))]
        """Added tokens of mere white space: plain text has them too."""
        rows = [ControlToken(row) for row in added]
        self.added: dict[int, ControlToken] = {token.id: token for token in rows}
        self.control: dict[str, ControlToken] = {
            token.text: token for token in rows if _is_control(token.text)
        }
        self.size: int = 1 + max(max(pieces.values(), default=-1), max(self.added, default=-1))
        normalizers = list(_nodes(spec.get("normalizer")))
        splitters = list(_nodes(spec.get("pre_tokenizer")))
        parts = [*_nodes(spec.get("decoder")), *splitters]
        self.byte_level = any(node.get("type") == "ByteLevel" for node in parts)
        self.byte_fallback = bool(model.get("byte_fallback"))
        typed = [str(node) for node in parts + normalizers if "type" in node]
        self.spaced = not self.byte_level and any("▁" in node for node in typed)
        """Whether ``▁`` spells a space."""
        unknown = model.get("unk_id")
        self.unknown: int | None = (
            pieces.get(model.get("unk_token") or "") if unknown is None else int(unknown)
        )
        """The id for text that the vocabulary cannot spell, if any."""
        self.plain_model = self._is_plain_model(model, pieces)
        """Whether the model never makes a control token by itself."""
        kinds = [node["type"] for node in normalizers if "type" in node]
        self.nfc = "NFC" in kinds
        """Whether the tokenizer composes Unicode (NFC) first."""
        strips = any(token.lstrip or token.rstrip for token in rows)
        prefixed = any(node.get("add_prefix_space") for node in splitters)
        self.exact = self.byte_level and not strips and not prefixed and set(kinds) <= {"NFC", "Sequence"}
        """Whether tokens spell the (composed) text byte for byte: equal lengths are proof enough."""
        self.first_prefixed = any(node.get("prepend_scheme") == "first" for node in splitters)
        spelled = self._spell(pieces)
        self.byte_lengths: npt.NDArray[np.int32] = np.fromiter(map(len, spelled), np.int32, self.size)
        """How many bytes each token spells; 0 for unknown ids."""
        self.spelled = b"".join(spelled)
        self.spelled_ends: npt.NDArray[np.int32] = np.cumsum(self.byte_lengths, dtype=np.int32)
        """Where the bytes of each token end in `spelled`."""
        self._bytes: dict[int, bytes] = {}

    @property
    def spec(self) -> dict[str, Any]:
        """The whole file, parsed on each access, because it is large."""
        spec: dict[str, Any] = json.loads(self._raw.decode("utf-8", "surrogatepass"))
        return spec

    def _spell(self, pieces: dict[str, int]) -> list[bytes]:
        spelled = [b""] * self.size
        names = list(pieces)
        if self.byte_level:
            texts = _byte_level(names)
        else:
            matches = [_BYTE_FALLBACK.fullmatch(name) if self.byte_fallback else None for name in names]
            literals = [name.replace("▁", " ") if self.spaced else name for name in names]
            texts = [
                bytes([int(match[1], 16)]) if match else name.encode("utf-8", "surrogatepass")
                for name, match in zip(literals, matches, strict=True)
            ]
        for index, text in zip(pieces.values(), texts, strict=True):
            spelled[index] = text
        for index, token in self.added.items():
            # white space may be spelled as in ordinary tokens (Gemma's runs of ``▁``)
            spaced = self.spaced and token.text not in self.control
            literal = token.text.replace("▁", " ") if spaced else token.text
            spelled[index] = literal.encode("utf-8", "surrogatepass")
        return spelled

    def _is_plain_model(self, model: dict[str, Any], pieces: dict[str, int]) -> bool:
        if any(pieces.get(row["content"]) != row["id"] for row in self.white_space):
            return False  # tokenizers would give it another id
        hidden = {name for name in self.control if name in pieces}
        if hidden and (model.get("type") != "BPE" or model.get("ignore_merges") or 1 in map(len, hidden)):
            return False
        return not hidden or all(_merged(merge)[2] not in hidden for merge in model.get("merges") or [])

    @computed
    def is_control(self) -> npt.NDArray[np.bool_]:
        table = np.zeros(self.size, np.bool_)
        table[[token.id for token in self.control.values()]] = True
        return table

    @computed
    def signed_lengths(self) -> npt.NDArray[np.signedinteger[Any]]:
        """`byte_lengths`, negative for control tokens: both in one look-up."""
        lengths = np.where(self.is_control, -self.byte_lengths, self.byte_lengths)
        return lengths.astype(np.int16) if self.byte_lengths.max(initial=0) < 2**15 else lengths

    @computed
    def control_pattern(self) -> re.Pattern[str] | None:
        return longest_first(self.control)

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token; ``b""`` for an unknown id."""
        cached = self._bytes.get(index)
        if cached is None:
            at = operator.index(index)
            exists = 0 <= at < self.size
            start = int(self.spelled_ends[at - 1]) if exists and at else 0
            cached = self._bytes[index] = (
                self.spelled[start : int(self.spelled_ends[at])] if exists else b""
            )
        return cached

    def spells(self, ids: Iterable[int], raw: bytes) -> bool:
        return b"".join(map(self.token_bytes, ids)) == raw

    def plain_parts(self, *, first: bool = True, normalized: bool = False) -> dict[str, Any]:
        """`plain_spec` without the model and without added tokens."""
        spec = {key: value for key, value in self.parts.items() if key != "model"}
        spec |= {"added_tokens": [], "post_processor": None}
        if normalized:
            spec["normalizer"] = None
        if not first:
            spec["pre_tokenizer"] = copy.deepcopy(spec.get("pre_tokenizer"))
            for node in _nodes(spec["pre_tokenizer"]):
                if node.get("prepend_scheme") == "first":
                    node["prepend_scheme"] = "never"
        return spec

    def plain_spec(self, *, first: bool = True, normalized: bool = False) -> dict[str, Any]:
        """The same tokenizer without control tokens: all text stays text.

        `first`: it begins the input, where some tokenizers add a space. `normalized`: already so.
        """
        spec, whole = self.plain_parts(first=first, normalized=normalized), self.spec
        if self.white_space:  # rows keep their places: tokenizers counts ids and ignores those in the file
            spec["added_tokens"] = whole["added_tokens"]
            for row in spec["added_tokens"]:
                if row["content"] in self.control:
                    row |= {"content": _UNREACHABLE + row["content"], "normalized": False}
        model = whole["model"]
        pieces = _pieces(model)
        hidden = {name: _UNREACHABLE + name for name in self.control if name in pieces}
        if hidden and isinstance(model["vocab"], dict):
            model["vocab"] = {hidden.get(name, name): at for name, at in pieces.items()}
            merges = model.get("merges") or []
            model["merges"] = [merge for merge in merges if hidden.keys().isdisjoint(_merged(merge))]
        elif hidden:
            model["vocab"] = [[hidden.get(name, name), score] for name, score in model["vocab"]]
        if model.get("unk_token") in self.control:
            model["unk_token"] = _UNREACHABLE + model["unk_token"]
        spec["model"] = model
        return spec


def longest_first(names: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds the longest name at a place. None without names."""
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _is_control(text: str) -> bool:
    return bool(text) and not text.replace("▁", " ").isspace()


def _pieces(model: dict[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab") or {}
    return vocab if isinstance(vocab, dict) else {row[0]: index for index, row in enumerate(vocab)}


def _merged(merge: Any) -> tuple[str, str, str]:
    """The two tokens of a merge, and the one that they become."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _byte_level(names: list[str]) -> list[bytes]:
    """The bytes of byte-level BPE tokens; names outside its alphabet spell themselves."""
    alphabet = byte_alphabet()
    table = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    if not set("".join(names)).difference(alphabet):
        whole, sizes = "".join(names).translate(table).encode("latin-1"), list(map(len, names))
        return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [
        name.encode("utf-8", "surrogatepass")
        if set(name).difference(alphabet)
        else name.translate(table).encode("latin-1")
        for name in names
    ]
