"""What differs, pair by pair, on a page: breaks, and whatever else is told part by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..diagnose.alignment import Hunk
from ..diagnose.breaks import Break
from ..diagnose.texts import DiffOp
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted
from ..viewer.document import HUES, Card, Contrast, Document, Track, token_columns

Tokens = Sequence[tuple[int, str]]
"""Ids and texts."""


@dataclass(slots=True)
class Differences:
    """The differences that a page shows: two tracks each."""

    tracks: list[Track] = field(default_factory=list)
    contrasts: list[Contrast] = field(default_factory=list)

    def add(
        self, name: str, base: Track, other: Track, hunks: Iterable[Hunk], names: tuple[str, str], about: str
    ) -> str:
        """One more; what a link to it says."""
        at = len(self.tracks)
        self.tracks += [base, other]
        self.contrasts.append(Contrast(name, at, len(base.ids), at + 1, list(hunks), names, about=about))
        return f"diff={len(self.contrasts) - 1}"

    def add_parts(
        self,
        name: str,
        parts: Iterable[tuple[Tokens, Tokens | None]],
        names: tuple[str, str],
        about: str,
        first: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> str:
        """One of which what each side has is told part by part, None for the other side of what both have."""
        rows: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
        hunks: list[Hunk] = []
        for left, right in parts:
            start, other_start = len(rows[0]), len(rows[1])
            rows[0].extend(left)
            rows[1].extend(right or ())
            if right is None:
                continue
            if hunks and hunks[-1].stop == start:
                start, _, other_start, _ = hunks.pop()
            hunks.append(Hunk(start, len(rows[0]), other_start, len(rows[1])))
        base, other = (_told_track(row, at, tokenizer) for row, at in zip(rows, (first, 0), strict=True))
        return self.add(name, base, other, hunks, names, about)

    def add_break(self, name: str, found: Break, tokenizer: Tokenizer | None = None) -> str:
        """A break."""
        first = found.tokens[0].start if found.tokens else 0
        return self.add_parts(name, _parts(found), ("stream", "next prompt"), found.detail, first, tokenizer)

    def shown(self) -> dict[str, Any]:
        """What a document has of them: the first is shown at once."""
        return {"tracks": self.tracks, "contrasts": self.contrasts, "start": "diff=0" if self.contrasts else ""}


def _told_track(row: Tokens, first: int, tokenizer: Tokenizer | None) -> Track:
    """Tokens with texts of their own."""
    ids = np.array([index for index, _ in row], np.int32)
    control = None if tokenizer is None else token_columns(tokenizer, ids)["control"]
    hues = np.full(len(row), HUES["plain"], np.uint8)
    return Track("", ids, hues, texts=[text for _, text in row], control=control, first=first)


def _parts(found: Break) -> Iterable[tuple[Tokens, Tokens | None]]:
    """The rows of a break. What is skipped belongs to the row before it."""
    op = DiffOp.EQUAL
    for part in found.tokens:
        tokens: Tokens = list(zip(part.ids, part.texts, strict=True))
        if part.op is DiffOp.SKIPPED:
            tokens = [(-1, f" … {counted(part.count)} … ")]
        else:
            op = part.op
        yield ([], tokens) if op is DiffOp.ADDED else (tokens, None if op is DiffOp.EQUAL else [])


def break_document(value: Break, tokenizer: Tokenizer | None = None) -> Document:
    """A break: what was there, what came instead, why, and what to do."""
    differences = Differences()
    differences.add_break("stream → next prompt", value, tokenizer)
    return Document(
        f"Break: {value.cause}",
        "tokentrace check",
        said=[value.detail, f"To do: {value.advice}"],
        cards=[
            Card("At token", f"{value.position:,}", f"of {value.stream_length:,}"),
            Card("Next prompt", f"{value.prompt_length:,}", "tokens"),
            Card("Where", value.region or "–"),
            Card("Further on", f"{len(value.later)}", ", ".join(dict.fromkeys(map(str, value.later)))),
        ],
        **differences.shown(),
    )
