"""What differs, as contrasts on a page: breaks, and whatever else is told part by part."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compare.breaks import Break
from ..compare.texts import DiffOp
from ..tokens.alignment import Hunk
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted
from ..viewer.document import HUES, Card, Contrast, Document, Track, token_columns


def break_document(value: Break, tokenizer: Tokenizer | None = None) -> Document:
    """A break: what was there, what came instead, why, and what to do."""
    tracks, contrast = break_contrast(value, 0, "stream → next prompt", tokenizer)
    return Document(
        f"Break: {value.cause}",
        "tokentrace explain",
        said=[value.detail, f"To do: {value.advice}"],
        cards=[
            Card("At token", f"{value.position:,}", f"of {value.stream_length:,}"),
            Card("Next prompt", f"{value.prompt_length:,}", "tokens"),
            Card("Where", value.region or "–"),
            Card("Further on", f"{len(value.later)}", ", ".join(dict.fromkeys(map(str, value.later)))),
        ],
        tracks=tracks,
        contrasts=[contrast],
        start="diff=0",
    )


def break_contrast(
    found: Break, track: int, name: str, tokenizer: Tokenizer | None = None
) -> tuple[list[Track], Contrast]:
    """A break as two tracks, the first of them number `track`, and what differs between them."""
    sides = Sides(found.tokens[0].start if found.tokens else 0)
    last = DiffOp.EQUAL
    for part in found.tokens:
        op = last if part.op is DiffOp.SKIPPED else part.op
        last = op
        ids, texts = list(part.ids), list(part.texts)
        if part.op is DiffOp.SKIPPED:
            ids, texts = [-1], [f" … {counted(part.count)} … "]
        sides.add(
            op is DiffOp.EQUAL, [] if op is DiffOp.ADDED else (ids, texts), (ids, texts) if op is DiffOp.ADDED else []
        )
    return sides.tracks(tokenizer), sides.contrast(name, track, ("stream", "next prompt"), found.detail)


class Sides:
    """Two short rows of tokens, told part by part."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._rows: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
        self._hunks: list[Hunk] = []

    def add(self, equal: bool, left: Any, right: Any) -> None:
        """Tokens, as ids and texts, that are on both sides, or on one."""
        base, other = self._rows
        start, other_start = len(base), len(other)
        base.extend(zip(*left, strict=True) if left else ())
        other.extend(zip(*right, strict=True) if right else ())
        if equal:
            return
        hunk = Hunk(start, len(base), other_start, len(other))
        before = self._hunks[-1] if self._hunks else None
        if before is not None and before.stop == start:
            self._hunks[-1] = Hunk(before.start, hunk.stop, before.other_start, hunk.other_stop)
        else:
            self._hunks.append(hunk)

    def tracks(self, tokenizer: Tokenizer | None = None) -> list[Track]:
        made = []
        for row, first in zip(self._rows, (self._first, 0), strict=True):
            ids = np.array([index for index, _ in row], np.int32)
            texts = [text for _, text in row]
            control = None if tokenizer is None else token_columns(tokenizer, ids)["control"]
            made.append(
                Track("", ids, np.full(len(row), HUES["plain"], np.uint8), texts=texts, control=control, first=first)
            )
        return made

    def contrast(self, name: str, track: int, names: tuple[str, str], about: str) -> Contrast:
        return Contrast(name, track, len(self._rows[0]), track + 1, self._hunks, names, about=about)
