"""A rendering for browsers: a fragment for notebooks, and a page that needs nothing but itself.

A token is one ``<i>`` (a control token one ``<b>``) inside the ``<s>`` of its piece. What a tooltip says is not
written beside each token: the page carries it once, as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..rendering.rendered import RenderedTokens
from ..tokens.visible import counted
from .page import Card, Row, Stretch, Token, make_fragment, make_page
from .pieces import KINDS, Piece, blocks, counts, edited, listed, meaning, message_count, pieces, stops, token_texts

PAGE_LIMIT: Final = 20_000
FRAGMENT_LIMIT: Final = 4_000
"""Tokens shown before a view stops and says so."""

_STRIP_COLUMNS: Final = 600


def html_fragment(rendered: RenderedTokens, *, limit: int = FRAGMENT_LIMIT) -> str:
    """A rendering for a notebook's cell: styles inline, no scripts, a title on every piece."""
    name = f"tt-{len(rendered)}-{int(np.sum(rendered.ids, dtype=np.int64)) % 1_000_003}"
    return make_fragment("fragment.html", name=name, shown=_contents(rendered, limit, titles=True))


def html_page(rendered: RenderedTokens, title: str = "Rendered conversation", *, limit: int = PAGE_LIMIT) -> str:
    """A rendering as a page of its own: no link to anything outside, every text escaped."""
    shown = _contents(rendered, limit, titles=False)
    return make_page("render.html", title, "tokentrace", shown=shown, data=_lookups(rendered, limit))


def rows_page(rows: Sequence[tuple[str, RenderedTokens]], title: str, *, limit: int = FRAGMENT_LIMIT) -> str:
    """Training rows, each with its title, on one page."""
    shown = [(name, _contents(rendered, limit, titles=True)) for name, rendered in rows]
    return make_page("rows.html", title, "tokentrace rows", scripted=False, rows=shown)


def _contents(rendered: RenderedTokens, limit: int, *, titles: bool) -> dict[str, Any]:
    """What ``rendering.html`` shows of a rendering."""
    total, sampled, means = len(rendered), int(rendered.mask.sum()), rendered.mask_means
    share = f"{100 * sampled / total:.0f} % of the tokens" if total else "no tokens"
    edges = np.flatnonzero(np.diff(rendered.mask, prepend=False, append=False)).tolist()
    cut = (
        f"Showing the first {limit:,} of {total:,} tokens. The counts and the band above cover all of them."
        if total > limit
        else ""
    )
    return {
        "total": total,
        "means": means,
        "meaning": meaning(rendered),
        "cards": [
            Card("Tokens", f"{total:,}", counted(int(rendered.control.sum()), "control token")),
            Card(means.capitalize(), f"{sampled:,}", share),
            Card("Messages", f"{message_count(rendered):,}", counted(len(rendered.turns), f"{means} turn")),
        ],
        "stops": [(text, ended, listed(ended)) for text, ended in stops(rendered).items()],
        "legend": [
            (KINDS.index(kind), kind, f"{tokens:,}", f"{marked:,}" if marked else "")
            for kind, (tokens, marked) in counts(rendered).items()
        ],
        "bands": _bands(rendered),
        "marked": list(zip(edges[::2], edges[1::2], strict=True)),
        "notes": [*(f"lost: {one}" for one in rendered.lost), *rendered.notes],
        "changes": [(made, *edited(made.before, made.after)) for made in rendered.changes],
        "rows": _rows(rendered, limit, titles),
        "cut": cut,
    }


def _rows(rendered: RenderedTokens, limit: int, titles: bool) -> list[Row]:
    tokens = list(map(Token, token_texts(rendered, limit), rendered.control[:limit].tolist()))
    means = rendered.mask_means
    rows = []
    for block in blocks(rendered, limit):
        notes = [counted(block.tokens), *([f"{block.sampled:,} {means}"] if block.sampled else [])]
        parts: list[Stretch | str] = [
            Stretch(
                piece.kind,
                piece.start,
                tokens[piece.start : piece.stop],
                marked=piece.sampled,
                title=_title(piece, means) if titles else "",
            )
            for piece in block.pieces
        ]
        rows.append(Row(block.message, block.title, notes, parts))
    return rows


def _title(piece: Piece, means: str) -> str:
    whose = "no message" if piece.message < 0 else f"message {piece.message} ({piece.role})"
    said = f"{whose} · {piece.field} · {'' if piece.sampled else 'not '}{means}"
    return f"{said} · tokens {piece.start}–{piece.stop - 1}"


def _bands(rendered: RenderedTokens) -> list[tuple[int, int, int]]:
    """The whole conversation as stretches of one colour, (start, stop, colour); at most one per column of the band."""
    kinds = np.zeros(len(rendered), np.int8)
    for piece in pieces(rendered):
        kinds[piece.start : piece.stop] = KINDS.index(piece.kind)
    cuts = np.flatnonzero(np.diff(kinds)) + 1
    if len(cuts) > _STRIP_COLUMNS:
        bounds = np.linspace(0, len(kinds), _STRIP_COLUMNS + 1).astype(np.int64)
        columns = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return [(a, b, int(np.bincount(kinds[a:b]).argmax())) for a, b in columns if a < b]
    starts = [0, *cuts.tolist()]
    return [(a, b, int(kinds[a])) for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True) if a < b]


def _lookups(rendered: RenderedTokens, limit: int) -> dict[str, Any]:
    """What tooltips say: per piece, and per distinct token."""
    shown = list(pieces(rendered, limit))
    fields = {name: at for at, name in enumerate(dict.fromkeys(piece.field for piece in shown))}
    ids = rendered.ids[:limit]
    unique, first = np.unique(ids, return_index=True)
    return {
        "ids": ids.tolist(),
        "texts": {
            int(index): rendered.decode(slice(at, at + 1))
            for index, at in zip(unique.tolist(), first.tolist(), strict=True)
        },
        "fields": list(fields),
        "kinds": list(KINDS),
        "roles": {piece.message: piece.role for piece in shown if piece.role is not None},
        "pieces": [
            [piece.start, piece.message, KINDS.index(piece.kind), fields[piece.field], int(piece.sampled)]
            for piece in shown
        ],
    }
