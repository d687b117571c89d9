"""What a vocabulary says of its tokens: how many bytes each covers, and which are control tokens."""

from __future__ import annotations

import copy
import functools
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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


class Vocabulary:
    """A parsed ``tokenizer.json``: tables over token ids, and the tokenizer for text that makes no control token.

    A control token is any added token, special or not, that is not mere white space (Gemma lists runs of
    newlines as added tokens; they are ordinary text).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        model = spec["model"]
        vocab = model.get("vocab") or {}
        self._pieces: dict[str, int] = (
            vocab if isinstance(vocab, dict) else {row[0]: index for index, row in enumerate(vocab)}
        )
        rows = [ControlToken(row) for row in spec.get("added_tokens") or []]
        self.added: dict[int, ControlToken] = {token.id: token for token in rows}
        self.control: dict[str, ControlToken] = {
            token.text: token for token in rows if token.text and not token.text.replace("▁", " ").isspace()
        }
        self.size = 1 + max(max(self._pieces.values(), default=-1), max(self.added, default=-1))
        decoders = list(_nodes(spec.get("decoder"))) + list(_nodes(spec.get("pre_tokenizer")))
        self.byte_level = any(node.get("type") == "ByteLevel" for node in decoders)
        self.byte_fallback = bool(model.get("byte_fallback"))
        normalizers = list(_nodes(spec.get("normalizer")))
        self.spaced = not self.byte_level and any(
            "▁" in str(node) for node in (*normalizers, *decoders) if "type" in node
        )
        self.unknown = self._unknown(model)
        self._bytes: dict[int, bytes] = {}
        kinds = [node["type"] for node in normalizers if "type" in node]
        self.nfc = "NFC" in kinds
        """Whether text is put into Unicode's composed form before it is encoded."""
        strips = any(token.lstrip or token.rstrip for token in rows)
        prefixed = any(node.get("add_prefix_space") for node in _nodes(spec.get("pre_tokenizer")))
        self.exact = self.byte_level and not strips and not prefixed and set(kinds) <= {"NFC", "Sequence"}
        """Whether tokens spell the (composed) text byte for byte, so that lengths which add up are proof enough."""
        self.first_prefixed = any(node.get("prepend_scheme") == "first" for node in _nodes(spec.get("pre_tokenizer")))

    def _unknown(self, model: dict[str, Any]) -> int | None:
        """The id that stands for text the vocabulary cannot spell, where there is one."""
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        return self._pieces.get(model.get("unk_token") or "")

    @functools.cached_property
    def _names(self) -> list[str | None]:
        names: list[str | None] = [None] * self.size
        for name, index in self._pieces.items():
            names[index] = name
        for index, token in self.added.items():
            names[index] = token.text
        return names

    @functools.cached_property
    def byte_lengths(self) -> npt.NDArray[np.int32]:
        """Bytes of text that each token stands for (-1 where the vocabulary does not say)."""
        lengths = np.full(self.size, -1, np.int32)
        names: Iterable[str | bytes] = self._pieces if self.byte_level else map(self._spelled, self._pieces)
        places = np.fromiter(self._pieces.values(), np.int64, len(self._pieces))
        lengths[places] = np.fromiter(map(len, names), np.int32, len(self._pieces))
        for token in self.added.values():
            lengths[token.id] = len(self._added_bytes(token))
        return lengths

    @functools.cached_property
    def short_lengths(self) -> npt.NDArray[np.int16]:
        """The same in half the memory, which all look-ups go through; 0 where the vocabulary does not say."""
        return np.clip(self.byte_lengths, 0, np.iinfo(np.int16).max).astype(np.int16)

    @functools.cached_property
    def small_lengths(self) -> bytes:
        """The same to be looked up one by one; 0 for those above 255 too."""
        lengths = self.byte_lengths
        return np.where((lengths > 0) & (lengths < 256), lengths, 0).astype(np.uint8).tobytes()

    @functools.cached_property
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

    @functools.cached_property
    def _control_ids(self) -> tuple[int, int] | None:
        """The first and the last of the ids of control tokens, if no other token has an id between them."""
        own = {token.id for token in self.control.values()}
        if not own:
            return None
        first, last = min(own), max(own)
        others = (index for index in (*self._pieces.values(), *self.added) if index not in own)
        return None if any(first < index < last for index in others) else (first, last)

    @functools.cached_property
    def control_pattern(self) -> re.Pattern[str] | None:
        """Finds control tokens in text, the longest first where several begin."""
        names = sorted(self.control, key=lambda name: (-len(name), name))
        return re.compile("|".join(map(re.escape, names))) if names else None

    def _spelled(self, name: str) -> bytes:
        """The bytes of an ordinary token."""
        if self.byte_level:
            alphabet = byte_alphabet()
            if all(char in alphabet for char in name):
                return bytes(alphabet[char] for char in name)
            return name.encode("utf-8", "surrogatepass")
        if self.byte_fallback:
            match = _BYTE_FALLBACK.fullmatch(name)
            if match:
                return bytes([int(match[1], 16)])
        return (name.replace("▁", " ") if self.spaced else name).encode("utf-8", "surrogatepass")

    def token_bytes(self, index: int) -> bytes:
        """The bytes of a token; ``b""`` for an id the vocabulary does not have."""
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._token_bytes(index)
        return known

    def _token_bytes(self, index: int) -> bytes:
        token = self.added.get(index)
        if token is not None:
            return self._added_bytes(token)
        name = self._names[index] if 0 <= index < self.size else None
        return b"" if name is None else self._spelled(name)

    def _added_bytes(self, token: ControlToken) -> bytes:
        """The bytes of an added token. White space may be spelled as in ordinary tokens (Gemma's runs of ``▁``)."""
        text = token.text if token.text in self.control or not self.spaced else token.text.replace("▁", " ")
        return text.encode("utf-8", "surrogatepass")

    def spells(self, ids: Iterable[int], raw: bytes) -> bool:
        """Whether the tokens, one after another, spell these very bytes."""
        return b"".join(map(self.token_bytes, ids)) == raw

    @property
    def white_space(self) -> list[dict[str, Any]]:
        """Added tokens that are not control tokens, but runs of white space: they are found in plain text as well."""
        return [row for row in self.spec.get("added_tokens") or [] if row["content"] not in self.control]

    @functools.cached_property
    def plain_model(self) -> bool:
        """Whether the model itself, without added tokens, makes no control token of any text.

        Where it does not, a plain tokenizer can have the very same model; else it needs one of its own.
        """
        hidden = {name for name in self.control if name in self._pieces}
        model = self.spec["model"]
        if any(self._pieces.get(row["content"]) != row["id"] for row in self.white_space):
            return False  # tokenizers would give it another id than it has
        if not hidden:
            return True
        if model.get("type") != "BPE" or model.get("ignore_merges") or any(len(name) == 1 for name in hidden):
            return False
        merges = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
        return all(left + right not in hidden for left, right in merges)

    def plain_parts(self, *, first: bool = True, normalized: bool = False) -> dict[str, Any]:
        """`plain_spec` without the model and without added tokens."""
        spec = {key: value for key, value in self.spec.items() if key != "model"}
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
        spec = self.plain_parts(first=first, normalized=normalized)
        if self.white_space:  # in their places: ids are counted, whatever the file says of them
            spec["added_tokens"] = [
                row
                if row["content"] not in self.control
                else {**row, "content": _UNREACHABLE + row["content"], "normalized": False}
                for row in self.spec["added_tokens"]
            ]
        model = dict(self.spec["model"])
        hidden = [name for name in self.control if name in self._pieces]
        if hidden:
            if isinstance(model["vocab"], dict):
                model["vocab"] = dict(model["vocab"])
                for name in hidden:
                    model["vocab"][_UNREACHABLE + name] = model["vocab"].pop(name)
                model["merges"] = self._merges_without(set(hidden))
            else:
                model["vocab"] = [
                    [_UNREACHABLE + name if name in self.control else name, score] for name, score in model["vocab"]
                ]
        if model.get("unk_token") in self.control:
            model["unk_token"] = _UNREACHABLE + model["unk_token"]
        spec["model"] = model
        return spec

    def _merges_without(self, hidden: set[str]) -> list[Any]:
        """The merges that neither use nor make a hidden token."""
        kept = []
        for merge in self.spec["model"].get("merges") or []:
            left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
            if not (hidden & {left, right, left + right}):
                kept.append(merge)
        return kept
