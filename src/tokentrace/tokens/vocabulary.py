"""What a vocabulary says of its tokens: how many bytes each covers, and which are control tokens."""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
import secrets
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..computed import computed

_UNREACHABLE: Final = f"\x00{secrets.token_hex(16)}"
"""Put before the name of a control token that also stands in the model's vocabulary, so that plain text
cannot reach it: nobody can spell what is drawn anew in each process."""

TOKEN_FLAGS: Final = ("special", "lstrip", "rstrip", "single_word", "normalized")
"""What ``tokenizer.json`` says of an added token beside its id and its text."""

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _nodes(part: Any) -> Iterator[dict[str, Any]]:
    """Every component inside a normalizer, pre-tokenizer or decoder."""
    if isinstance(part, dict):
        yield part
        for value in part.values():
            yield from _nodes(value)
    elif isinstance(part, list):
        for value in part:
            yield from _nodes(value)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level BPE spells bytes with."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


class ControlToken:
    """An added token: its id, its text, and how it treats its neighbours."""

    __slots__ = ("id", "text", *TOKEN_FLAGS)
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool
    """Whether it is looked for in text that the normalizer has been over, after all others have been found."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.id = int(row["id"])
        self.text = str(row["content"])
        for flag in TOKEN_FLAGS:
            setattr(self, flag, bool(row.get(flag)))


class Tables(NamedTuple):
    """What a ``tokenizer.json`` comes to: small facts, as JSON has them, and tables over token ids."""

    facts: dict[str, Any]
    lengths: npt.NDArray[np.int32]
    """Bytes of text that each token stands for (-1 where the vocabulary does not say)."""
    ends: npt.NDArray[np.int32]
    """Where the bytes of each token end in `spelled`."""
    spelled: bytes


class Vocabulary:
    """A ``tokenizer.json``: tables over token ids, and the tokenizer for text that makes no control token.

    A control token is any added token, special or not, that is not mere white space (Gemma lists runs of
    newlines as added tokens; they are ordinary text). The file itself is not kept parsed: it is large, and hardly ever
    needed again. `tables` are those of the same file, where they are known (`tokens.checks`).
    """

    def __init__(self, raw: bytes, tables: Tables | None = None) -> None:
        self._raw = raw
        facts, self.byte_lengths, self._spelled_ends, self._spelled = tables or _tables_of(self.spec)
        self.tables = Tables(facts, self.byte_lengths, self._spelled_ends, self._spelled)
        self.parts: dict[str, Any] = facts["parts"]
        """All but the model's vocabulary and merges."""
        rows = [ControlToken(row) for row in self.parts.get("added_tokens") or []]
        self.added: dict[int, ControlToken] = {token.id: token for token in rows}
        self.control: dict[str, ControlToken] = {token.text: token for token in rows if _is_control(token.text)}
        self.size: int = facts["size"]
        self.byte_level: bool = facts["byte_level"]
        self.byte_fallback = bool(self.parts["model"].get("byte_fallback"))
        normalizers = list(_nodes(self.parts.get("normalizer")))
        self.spaced: bool = facts["spaced"]
        self.unknown: int | None = facts["unknown"]
        """The id that stands for text the vocabulary cannot spell, where there is one."""
        self.plain_model: bool = facts["plain_model"]
        """Whether the model itself, without added tokens, makes no control token of any text.

        Where it does not, a plain tokenizer can have the very same model; else it needs one of its own.
        """
        between: list[int] | None = facts["control_ids"]
        self._control_ids = (between[0], between[1]) if between else None
        """The first and the last of the ids of control tokens, if no other token has an id between them."""
        self._bytes: dict[int, bytes] = {}
        kinds = [node["type"] for node in normalizers if "type" in node]
        self.nfc = "NFC" in kinds
        """Whether text is put into Unicode's composed form before it is encoded."""
        strips = any(token.lstrip or token.rstrip for token in rows)
        prefixed = any(node.get("add_prefix_space") for node in _nodes(self.parts.get("pre_tokenizer")))
        self.exact = self.byte_level and not strips and not prefixed and set(kinds) <= {"NFC", "Sequence"}
        """Whether tokens spell the (composed) text byte for byte, so that lengths which add up are proof enough."""
        self.first_prefixed = any(
            node.get("prepend_scheme") == "first" for node in _nodes(self.parts.get("pre_tokenizer"))
        )

    @property
    def spec(self) -> dict[str, Any]:
        """The whole file, parsed anew."""
        spec: dict[str, Any] = json.loads(self._raw.decode("utf-8", "surrogatepass"))
        return spec

    @computed
    def short_lengths(self) -> npt.NDArray[np.int16]:
        """The same in half the memory, which all look-ups go through; 0 where the vocabulary does not say."""
        return np.clip(self.byte_lengths, 0, np.iinfo(np.int16).max).astype(np.int16)

    @computed
    def small_lengths(self) -> bytes:
        """The same to be looked up one by one; 0 for those above 255 too."""
        lengths = self.byte_lengths
        return np.where((lengths > 0) & (lengths < 256), lengths, 0).astype(np.uint8).tobytes()

    @computed
    def is_control(self) -> npt.NDArray[np.bool_]:
        table = np.zeros(self.size, np.bool_)
        table[[token.id for token in self.control.values()]] = True
        return table

    def find_control(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """Which of some tokens are control tokens: by one comparison where their ids are all in one place."""
        if self._control_ids is None:
            return self.is_control.take(ids).nonzero()[0]
        first, last = self._control_ids
        if last == self.size - 1:
            return (ids >= first).nonzero()[0]
        return (ids.view(np.uint32) - np.uint32(first) <= np.uint32(last - first)).nonzero()[0]

    def has_control(self, ids: npt.NDArray[np.int32]) -> bool:
        """Whether there is a control token among some tokens."""
        if self._control_ids is None or self._control_ids[1] != self.size - 1:
            return len(self.find_control(ids)) > 0
        return bool(len(ids)) and int(np.maximum.reduce(ids)) >= self._control_ids[0]

    @computed
    def control_pattern(self) -> re.Pattern[str] | None:
        """Finds control tokens in text, the longest first where several begin."""
        names = sorted(self.control, key=lambda name: (-len(name), name))
        return re.compile("|".join(map(re.escape, names))) if names else None

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token; ``b""`` for an id the vocabulary does not have."""
        known = self._bytes.get(index)
        if known is None:
            at = operator.index(index)
            has_it = 0 <= at < self.size
            start = int(self._spelled_ends[at - 1]) if has_it and at else 0
            known = self._bytes[index] = self._spelled[start : int(self._spelled_ends[at])] if has_it else b""
        return known

    def spells(self, ids: Iterable[int], raw: bytes) -> bool:
        """Whether the tokens, one after another, spell these very bytes."""
        return b"".join(map(self.token_bytes, ids)) == raw

    @property
    def white_space(self) -> list[dict[str, Any]]:
        """Added tokens that are not control tokens, but runs of white space: they are found in plain text as well."""
        return _white_space(self.parts)

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
        """The same tokenizer without control tokens: whatever text it is given stays text.

        `first` is False for text that does not stand at the beginning of the input, which matters where the
        tokenizer puts a space before the first word only. `normalized` says that the text has been normalized.
        """
        spec, whole = self.plain_parts(first=first, normalized=normalized), self.spec
        if self.white_space:  # in their places: ids are counted, whatever the file says of them
            spec["added_tokens"] = [
                row
                if row["content"] not in self.control
                else {**row, "content": _UNREACHABLE + row["content"], "normalized": False}
                for row in whole["added_tokens"]
            ]
        model = whole["model"]
        pieces = _pieces(model)
        hidden = dict.fromkeys(name for name in self.control if name in pieces)
        if hidden:
            if isinstance(model["vocab"], dict):
                for name in hidden:
                    model["vocab"][_UNREACHABLE + name] = model["vocab"].pop(name)
                model["merges"] = [merge for merge in model.get("merges") or [] if not hidden.keys() & _made(merge)]
            else:
                model["vocab"] = [
                    [_UNREACHABLE + name if name in self.control else name, score] for name, score in model["vocab"]
                ]
        if model.get("unk_token") in self.control:
            model["unk_token"] = _UNREACHABLE + model["unk_token"]
        spec["model"] = model
        return spec


# -- reading a tokenizer.json


def _is_control(text: str) -> bool:
    return bool(text) and not text.replace("▁", " ").isspace()


def _white_space(parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in parts.get("added_tokens") or [] if not _is_control(str(row["content"]))]


def _pieces(model: dict[str, Any]) -> dict[str, int]:
    vocab = model.get("vocab") or {}
    return vocab if isinstance(vocab, dict) else {row[0]: index for index, row in enumerate(vocab)}


def _made(merge: Any) -> set[str]:
    """The tokens of a merge, and the one that it makes."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return {left, right, left + right}


def _tables_of(spec: dict[str, Any]) -> Tables:
    """What a parsed file comes to."""
    model = spec["model"]
    pieces = _pieces(model)
    kept = {key: value for key, value in model.items() if key not in ("vocab", "merges")}
    parts = {**spec, "model": kept}
    added = {int(row["id"]): str(row["content"]) for row in spec.get("added_tokens") or []}
    size = 1 + max(max(pieces.values(), default=-1), max(added, default=-1))
    own = {index for index, text in added.items() if _is_control(text)}
    first, last = min(own, default=-1), max(own, default=-1)
    alone = own and not any(first < index < last and index not in own for index in (*pieces.values(), *added))
    unknown = model.get("unk_id")
    nodes = [*_nodes(spec.get("decoder")), *_nodes(spec.get("pre_tokenizer"))]
    byte_level = any(node.get("type") == "ByteLevel" for node in nodes)
    nodes += _nodes(spec.get("normalizer"))
    spaced = not byte_level and any("▁" in str(node) for node in nodes if "type" in node)
    facts = {
        "parts": parts,
        "byte_level": byte_level,
        "spaced": spaced,
        "size": size,
        "unknown": pieces.get(model.get("unk_token") or "") if unknown is None else int(unknown),
        "control_ids": [first, last] if alone else None,
        "plain_model": _is_plain_model(spec, pieces, {added[index] for index in own}),
    }
    spelled = [b""] * size
    if byte_level:
        sizes = list(map(len, pieces))
        names = _bytes_of(list(pieces), sizes)
    else:
        names = [_spelled(name, spaced, bool(model.get("byte_fallback"))) for name in pieces]
        sizes = list(map(len, names))
    for index, name in zip(pieces.values(), names, strict=True):
        spelled[index] = name
    lengths = np.full(size, -1, np.int32)
    lengths[np.fromiter(pieces.values(), np.int64, len(pieces))] = sizes
    for index, text in added.items():
        # white space may be spelled as in ordinary tokens (Gemma's runs of ``▁``)
        shown = text.replace("▁", " ") if spaced and index not in own else text
        spelled[index] = shown.encode("utf-8", "surrogatepass")
        lengths[index] = len(spelled[index])
    ends = np.cumsum(np.fromiter(map(len, spelled), np.int32, size), dtype=np.int32)
    return Tables(facts, lengths, ends, b"".join(spelled))


def _bytes_of(names: list[str], sizes: list[int]) -> list[bytes]:
    """The bytes of tokens of byte-level BPE; what is not spelled in its alphabet is as it is written."""
    alphabet = byte_alphabet()
    table = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    if not set("".join(names)).difference(alphabet):
        whole = "".join(names).translate(table).encode("latin-1")
        return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return [
        name.encode("utf-8", "surrogatepass")
        if set(name).difference(alphabet)
        else name.translate(table).encode("latin-1")
        for name in names
    ]


def _spelled(name: str, spaced: bool, fallback: bool) -> bytes:
    match = _BYTE_FALLBACK.fullmatch(name) if fallback else None
    if match:
        return bytes([int(match[1], 16)])
    return (name.replace("▁", " ") if spaced else name).encode("utf-8", "surrogatepass")


def _is_plain_model(spec: dict[str, Any], pieces: dict[str, int], control: set[str]) -> bool:
    model, hidden = spec["model"], {name for name in control if name in pieces}
    if any(pieces.get(row["content"]) != row["id"] for row in _white_space(spec)):
        return False  # tokenizers would give it another id than it has
    if not hidden:
        return True
    if model.get("type") != "BPE" or model.get("ignore_merges") or any(len(name) == 1 for name in hidden):
        return False
    merges = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return all(left + right not in hidden for left, right in merges)
