"""What differs, as contrasts on a page: breaks, and the rows that a check found."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compare.breaks import Break
from ..compare.texts import DiffOp
from ..data.check.report import CheckedRow, CheckReport, Outcome
from ..tokens.alignment import Hunk
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted
from ..viewer.document import HUES, Card, Cell, Contrast, Document, Table, Track, token_columns


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
    sides = _Sides(found.tokens[0].start if found.tokens else 0)
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


class _Sides:
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


# -- checks


def check_document(value: CheckReport) -> Document:
    """A check: outcomes, causes, and a few rows of each."""
    tracks: list[Track] = []
    contrasts: list[Contrast] = []
    rows: list[list[str | Cell]] = []
    for outcome, examples in value.examples.items():
        for row in examples if outcome not in (Outcome.SAME, Outcome.UNCHECKED) else ():
            first = len(contrasts)
            for found in row.deviations:
                sides = _Sides()
                for equal, left, right in (
                    (True, found.lead, ()),
                    (False, found.expected, found.found),
                    (True, found.rest, ()),
                ):
                    sides.add(equal, ([-1] * len(left), left), ([-1] * len(right), right))
                contrasts.append(
                    sides.contrast(f"{_row(row)}: {found.cause}", len(tracks), ("expected", "found"), found.detail)
                )
                tracks += sides.tracks()
            link = f"diff={first}" if len(contrasts) > first else ""
            said = row.reason or "; ".join(map(str, (*row.deviations, *row.mask)))
            rows.append([Cell(_row(row), link=link), Cell(str(outcome), "bad"), said])
    shares = [(one, value.outcomes[one]) for one in Outcome if value.outcomes[one]]
    tables = [
        Table(
            "Outcomes",
            ["outcome", "rows", ""],
            [[str(one), f"{n:,}", f"{100 * n / value.rows:.1f} %"] for one, n in shares],
        ),
        Table("Why", ["cause", "rows"], [[str(cause), f"{n:,}"] for cause, n in value.causes.most_common()]),
        Table(
            "Bad, unchecked, and what else is to be known",
            ["reason", "rows"],
            [[why, f"{n:,}"] for why, n in value.reasons.most_common(20)],
        ),
        Table("Rows that differ", ["row", "outcome", "what"], rows, "A few of each outcome.", words=3),
    ]
    return Document(
        "Rows against their template",
        "tokentrace check",
        said=[value.verdict, *value.findings, *value.mask_words()],
        cards=[
            Card("Rows", f"{value.rows:,}", "clean" if value.clean else "", "good" if value.clean else ""),
            *(
                [Card("Differ", f"{value.differing:,}", f"of {counted(value.rows, 'row')}", "bad")]
                if value.differing
                else ()
            ),
            Card("Tokens", f"{value.tokens:,}", f"{value.expected_tokens:,} expected" if value.compared else ""),
            Card(
                "Trained",
                f"{value.trained:,}" if value.masks else "–",
                f"{value.expected_trained:,} expected" if value.compared else "",
            ),
            Card("Padding", f"{value.padding:,}", "taken off"),
        ],
        tables=[table for table in tables if table.rows],
        tracks=tracks,
        contrasts=contrasts,
        start="diff=0" if contrasts else "",
    )


def _row(row: CheckedRow) -> str:
    return f"{row.source}, row {row.row}"
