"""Stop texts among ids: which id completes one of them. Compares bytes, since an id may be a part of a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

TokenBytes: TypeAlias = Callable[[int], bytes]
"""The bytes of an id, control tokens included: ``renderer.tokenizer.vocabulary.token_bytes``."""


class StopFinder:
    """Finds stop texts in a completion, an id at a time.

    >>> finder = StopFinder(["é!", "b"], lambda one: [b"a", b"\\xc3", b"\\xa9!"][one])
    >>> [finder.feed(one) for one in (0, 1, 2)]
    [None, None, 'é!']
    """

    def __init__(self, texts: Sequence[str], token_bytes: TokenBytes) -> None:
        self._texts = [(text, text.encode("utf-8")) for text in texts]
        self._token_bytes = token_bytes
        self._overlap = max((len(raw) for _, raw in self._texts), default=1) - 1
        """The most bytes of an incomplete text."""
        self._tail = b""

    def feed(self, token: int) -> str | None:
        """Return the text that this id completes; of several, the one that ends first."""
        if not self._texts:
            return None
        seen = self._tail + self._token_bytes(token)
        ends = [(at + len(raw), text) for text, raw in self._texts if (at := seen.find(raw)) >= 0]
        self._tail = seen[max(0, len(seen) - self._overlap) :]
        return min(ends, key=lambda end: end[0])[1] if ends else None
