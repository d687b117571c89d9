"""Text in which each control token is one private character, for tests that edit what a model wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokentrace.tokens import Tokenizer

_PLANE = 0xF0000
_CONTROL = "[\U000f0000-\U0010fffd]"


class MarkedText:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = sorted(tokenizer.vocabulary.control.values(), key=lambda token: token.id)
        self._ids = [token.id for token in tokens]
        self._chars = {token.id: chr(_PLANE + at) for at, token in enumerate(tokens)}

    def of_ids(self, ids: Sequence[int]) -> str:
        """What ids say. Ids that the vocabulary does not have say U+FFFD."""
        vocabulary = self._tokenizer.vocabulary
        out: list[str] = []
        text: list[bytes] = []
        for index in [*ids, -1]:
            char = self._chars.get(index)
            if char is None and index >= 0:
                text.append(vocabulary.token_bytes(index) if index < vocabulary.size else b"\xef\xbf\xbd")
                continue
            out += [re.sub(_CONTROL, "\ufffd", b"".join(text).decode("utf-8", "replace")), char or ""]
            text = []
        return "".join(out)

    def ids(self, marked: str) -> list[int]:
        """Ids of text that the template would have written itself."""
        out: list[int] = []
        for piece in re.split(f"({_CONTROL})", marked):
            if len(piece) == 1 and ord(piece) >= _PLANE:
                out.append(self._ids[ord(piece) - _PLANE])
            elif piece:
                out += self._tokenizer.encode_plain(piece).tolist()
        return out
