"""The views for browsers: a fragment for notebooks, and a page that needs nothing but itself.

A token is one ``<i>`` (a control token one ``<b>``) inside the ``<s>`` of its piece. What a tooltip says is not
written beside each token: the page carries it once, as arrays. All text is escaped here, in `_text` and `_data`,
and nowhere else. Should some slip through all the same, the page's policy lets a browser run and apply nothing but
the script and the style sheet of the page, by their hashes, and load nothing at all.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import numpy as np

from ..errors import counted
from ..rendering.rendered import RenderedTokens
from ..tokens.visible import visible
from .pieces import KINDS, Block, Piece, blocks, counts, edited, listed, message_count, pieces, stops, token_texts

PAGE_LIMIT: Final = 20_000
FRAGMENT_LIMIT: Final = 4_000
"""Tokens shown before a view stops and says so."""

_STRIP_COLUMNS: Final = 600
_HUES: Final = 12
"""Colours that messages take in turn: the classes ``h0``, ``h1``, … of report.css."""


def html_fragment(rendered: RenderedTokens, *, limit: int = FRAGMENT_LIMIT) -> str:
    """A rendering for a notebook's cell: styles inline, no scripts, a title on every piece."""
    name = f"tt-{len(rendered)}-{int(np.sum(rendered.ids, dtype=np.int64)) % 1_000_003}"
    return (
        f"<style>{_asset('report.css')}</style>"
        f'<div class="tt tt-fragment">{view_controls(name)}{_cards(rendered)}{_legend(rendered)}{_strip(rendered)}'
        f"{_remarks(rendered)}{_rows(rendered, limit, titles=True)}</div>"
    )


def html_page(rendered: RenderedTokens, title: str = "Rendered conversation", *, limit: int = PAGE_LIMIT) -> str:
    """A rendering as a page of its own: no link to anything outside, every text escaped."""
    body = f"""{_cards(rendered)}
{_strip(rendered)}
{_legend(rendered)}
{_remarks(rendered)}
{_rows(rendered, limit, titles=False)}"""
    tooltips = f"""<div class="tt-tip" hidden></div>
<script type="application/json" id="tt-data">{_data(_lookups(rendered, limit))}</script>"""
    controls = view_controls("tt-view")
    return framed(title, "tokentrace", controls, body + tooltips, styles=("report.css",), script=_asset("report.js"))


def row_body(rendered: RenderedTokens, limit: int = FRAGMENT_LIMIT) -> str:
    """The parts of a rendering, to stand on a page among others."""
    return (
        f"{_cards(rendered)}{_strip(rendered)}{_legend(rendered)}{_remarks(rendered)}"
        f"{_rows(rendered, limit, titles=True)}"
    )


def framed(title: str, brand: str, controls: str, body: str, *, styles: Sequence[str], script: str = "") -> str:
    """A page that needs nothing but itself. Only `title` is escaped here; `script` runs when the page is there."""
    style = "".join(map(_asset, styles))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<title>{_text(title)}</title>
<style>{style}</style>
</head>
<body class="tt-page">
<main class="tt">
<header class="tt-top">
<div><p class="tt-brand">{brand}</p><h1>{_text(title)}</h1></div>
{controls}
</header>
{body}
</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def _policy(style: str, script: str) -> str:
    """What a browser may do for a page: apply this style sheet, run this script, nothing else.

    Handlers and styles in attributes have no hash here, so they do nothing: pages must not need them. A script element
    of data is not run, and needs no leave.
    """
    styles, scripts = _source(style), _source(script) if script else "'none'"
    return f"default-src 'none'; style-src {styles}; script-src {scripts}; base-uri 'none'; form-action 'none'"


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(visible(text), quote=True)


def _data(value: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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


# -- parts


def view_controls(name: str, means: str = "sampled") -> str:
    """Buttons that choose what colours mean, for all renderings of a page."""
    choices = (("field", "By field"), ("message", "By message"), ("sampled", f"{means.capitalize()} only"))
    radios = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" if value == "field" else ""}>'
        f"<span>{label}</span></label>"
        for value, label in choices
    )
    return f'<div class="tt-views" role="radiogroup" aria-label="Colours">{radios}</div>'


def _cards(rendered: RenderedTokens) -> str:
    total, sampled, means = len(rendered), int(rendered.mask.sum()), rendered.mask_means
    share = f"{100 * sampled / total:.0f} % of the tokens" if total else "no tokens"
    control = int(rendered.control.sum())
    cards = [
        ("Tokens", f"{total:,}", counted(control, "control token")),
        (means.capitalize(), f"{sampled:,}", share),
        ("Messages", f"{message_count(rendered):,}", counted(len(rendered.turns), f"{means} turn")),
    ]
    small = "".join(
        f'<div class="tt-card"><p>{label}</p><strong>{value}</strong><small>{more}</small></div>'
        for label, value, more in cards
    )
    ends = "".join(
        f"<li>{'<em>none: the turn is open</em>' if text is None else f'<b>{_text(text)}</b>'} "
        f"× {len(ended)}<small>message{'s' if len(ended) > 1 else ''} {listed(ended)}</small></li>"
        for text, ended in stops(rendered).items()
    )
    ends = ends or f"<li><small>nothing is {means} here</small></li>"
    return f'<div class="tt-cards">{small}<div class="tt-card tt-stops"><p>Stop tokens</p><ul>{ends}</ul></div></div>'


def _legend(rendered: RenderedTokens) -> str:
    items = "".join(
        f'<li class="k{KINDS.index(kind)}" data-k="{KINDS.index(kind)}"><span></span>{kind} <b>{tokens:,}</b>'
        + (f"<small>{drawn:,} {rendered.mask_means}</small>" if drawn else "")
        + "</li>"
        for kind, (tokens, drawn) in counts(rendered).items()
    )
    return (
        f'<ul class="tt-legend">{items}</ul><p class="tt-key"><s class="k3 on"><i>under</i><i>lined</i></s> '
        f'{_meaning(rendered)} <s class="k3"><i>shades</i><i> alternate</i></s> at token boundaries '
        '<s class="k8"><b>boxed</b></s> control token</p>'
    )


def _meaning(rendered: RenderedTokens) -> str:
    """What the mask says of a token, for people."""
    return "sampled by the model" if rendered.mask_means == "sampled" else "carries loss"


def _strip(rendered: RenderedTokens) -> str:
    """The whole conversation as a band: origins above, sampled tokens below."""
    total = len(rendered)
    if not total:
        return ""
    runs = _runs(rendered)
    bands = "".join(f'<rect class="k{kind}" x="{start}" width="{stop - start}"/>' for start, stop, kind in runs)
    edges = np.flatnonzero(np.diff(rendered.mask, prepend=False, append=False)).tolist()
    lit = "".join(
        f'<rect class="on" x="{start}" y="12" width="{stop - start}"/>'
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    )
    return (
        f'<svg class="tt-strip" viewBox="0 0 {total} 16" preserveAspectRatio="none" role="img" '
        f'aria-label="Origins of the tokens in order; {rendered.mask_means} ones are marked below">{bands}{lit}</svg>'
    )


def _runs(rendered: RenderedTokens) -> list[tuple[int, int, int]]:
    """Stretches of one kind as (start, stop, kind); at most one per column of the band."""
    kinds = np.zeros(len(rendered), np.int8)
    for piece in pieces(rendered):
        kinds[piece.start : piece.stop] = KINDS.index(piece.kind)
    cuts = np.flatnonzero(np.diff(kinds)) + 1
    if len(cuts) > _STRIP_COLUMNS:
        bounds = np.linspace(0, len(kinds), _STRIP_COLUMNS + 1).astype(np.int64)
        columns = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        return [(a, b, int(np.bincount(kinds[a:b]).argmax())) for a, b in columns if a < b]
    starts = [0, *cuts.tolist()]
    return [(a, b, int(kinds[a])) for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True)]


def _remarks(rendered: RenderedTokens) -> str:
    """Notes and changes, where there are any."""
    said = [*(f"lost: {one}" for one in rendered.lost), *rendered.notes]
    notes = "".join(f"<li>{_text(note)}</li>" for note in said)
    changes = "".join(
        f"<li><b>message {made.message}</b> {_text(made.what)}{_change(made.before, made.after)}</li>"
        for made in rendered.changes
    )
    out = f'<details class="tt-notes" open><summary>Notes</summary><ul>{notes}</ul></details>' if notes else ""
    if changes:
        out += f'<details class="tt-changes" open><summary>Changes</summary><ul>{changes}</ul></details>'
    return out


def _change(before: str, after: str) -> str:
    lead, out, new, rest = edited(before, after)
    return (
        f"<pre>{_text(lead)}{f'<del>{_text(out)}</del>' if out else ''}{f'<ins>{_text(new)}</ins>' if new else ''}"
        f"{_text(rest)}</pre>"
    )


def _rows(rendered: RenderedTokens, limit: int, *, titles: bool) -> str:
    texts = token_texts(rendered, limit)
    control = rendered.control[:limit].tolist()
    means = rendered.mask_means
    rows = "".join(_row(block, texts, control, titles, means) for block in blocks(rendered, limit))
    if len(rendered) > limit:
        rows += (
            f'<p class="tt-cut">Showing the first {limit:,} of {len(rendered):,} tokens. '
            "The counts and the band above cover all of them.</p>"
        )
    return f'<div class="tt-rows">{rows}</div>'


def _row(block: Block, texts: list[str], control: list[bool], titles: bool, means: str) -> str:
    number = "" if block.message < 0 else f"<b>{block.message}</b>"
    drawn = f"<small>{block.sampled:,} {means}</small>" if block.sampled else ""
    body = "".join(_piece(piece, texts, control, titles, means) for piece in block.pieces)
    hue = f"h{block.message % _HUES}" if block.message >= 0 else "h"
    return (
        f'<section class="tt-row {hue}"><div class="tt-gutter"><p>{number}{_text(block.title)}</p>'
        f"<small>{counted(block.tokens, 'token')}</small>{drawn}</div>"
        f'<div class="tt-tokens">{body}</div></section>'
    )


def _piece(piece: Piece, texts: list[str], control: list[bool], titles: bool, means: str) -> str:
    title = ""
    if titles:
        whose = "no message" if piece.message < 0 else f"message {piece.message} ({piece.role})"
        said = f"{whose} · {piece.field} · {'' if piece.sampled else 'not '}{means}"
        title = f' title="{_text(f"{said} · tokens {piece.start}–{piece.stop - 1}")}"'
    tokens = "".join(_token(texts[at], control[at]) for at in range(piece.start, piece.stop))
    odd = " o" if piece.start % 2 else ""
    return f'<s class="k{KINDS.index(piece.kind)}{" on" if piece.sampled else ""}{odd}"{title}>{tokens}</s>'


def _token(text: str, is_control: bool) -> str:
    if not text:
        return '<i class="c"></i>'
    if is_control:
        return f"<b>{_text(text)}</b>"
    shown = _text(text).replace("\n", "<u>⏎</u>\n").replace("\t", "<u>⇥</u>\t")
    return f"<i>{shown}</i>"
