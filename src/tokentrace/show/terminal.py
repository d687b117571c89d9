"""A document in a terminal: `text_view` in colours, `plain_view` as plain lines."""

import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from .alignment import Hunk
from .document import HUES, ORIGINS, Cell, Contrast, Document, Piece, Table, Track
from .results import document_of
from .visible import counted, visible

COLOURS: dict[str, tuple[str, str]] = {
    "system": ("#a78bfa", "#8b6cf0"),
    "user": ("#60a5fa", "#3b82f6"),
    "reasoning": ("#fbbf24", "#d99a0b"),
    **dict.fromkeys(("assistant", "sampled"), ("#34d399", "#12b07c")),
    "calls": ("#f472b6", "#e04c99"),
    **dict.fromkeys(("result", "context"), ("#22d3ee", "#0ba5be")),
    "variables": ("#d6a56b", "#b98848"),
    "scaffold": ("#8a8a8a", "#737373"),
    "generation": ("#c4b5fd", "#a592f5"),
    "unknown": ("#f87171", "#ef4444"),
}
"""Two shades of each hue, which neighbouring tokens alternate."""
_OTHER_COLOURS = ("#94a3b8", "#7688a1")

CONTROL = "#1c1c1c on #8f959e"
CONTROL_SAMPLED = "bold underline #ffffff on #3d5a80"
TONES = {"": "", "good": "green", "bad": "red", "poor": "yellow", "dim": "dim"}
SIGNS = {"good": "✓", "bad": "✗", "poor": "•"}

LIMIT = 20_000  # tokens per track
_PLACES = 3  # differences per contrast
_CONTRASTS = 20
_AROUND = 6  # equal tokens before and after a difference
_HUNK = 48  # tokens per side of a difference
_WIDE = 100_000  # no line wraps


def text_view(value: Any, *, limit: int = LIMIT) -> RenderableType:
    """Any result for a terminal: tokens coloured by origin, sampled ones bold and underlined."""
    document = document_of(value)
    parts = list(_report(document))
    for track in _printed(document):
        parts += [*([Text()] if parts else []), *_track_head(document, track), _track_rows(track, limit)]
        if len(track.ids) > limit:
            parts.append(Text(f"… {len(track.ids) - limit:,} more tokens", "yellow"))
    return Group(*parts)


def plain_view(value: Any, *, limit: int = LIMIT) -> str:
    """Any result as plain lines: one for each piece of equal origin, sampled ones marked ``*``."""
    document = document_of(value)
    parts = []
    if report := list(_report(document)):
        console = Console(width=_WIDE, file=io.StringIO(), highlight=False, markup=False, emoji=False)
        segments = [segment for part in report for segment in console.render(part) if not segment.control]
        text = "".join(segment.text for segment in segments).removesuffix("\n")
        parts.append("\n".join(line.rstrip() for line in text.split("\n")))
    parts += ["\n".join(_plain_track(document, track, limit)) for track in _printed(document)]
    return "\n\n".join(parts)


def _printed(document: Document) -> Sequence[Track]:
    """The tracks to print. A report prints its summary and differences."""
    return () if document.summary or document.contrasts else document.tracks


def flat(text: str) -> str:
    """Untrusted text on one line."""
    return visible(text).replace("\n", "⏎")


def _grid(table: Table) -> Grid:
    out = Grid(box=None, padding=(0, 0, 0, 2), header_style="bold")
    title = f"{table.title[:1].lower()}{table.title[1:]}"
    for at, head in enumerate([table.head[0] or title, *table.head[1:]]):
        text = head.text if isinstance(head, Cell) else head
        out.add_column(text, justify="left" if at < table.words else "right")
    for row in table.rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
        heading = " bold" if len(cells) == 1 < len(table.head) else ""
        out.add_row(*(Text(flat(cell.text), f"{TONES[cell.tone]}{heading}".strip()) for cell in cells))
    return out


def _report(document: Document) -> Iterator[RenderableType]:
    for at, sentence in enumerate(document.summary):
        if at == 0 and document.tone:
            yield Text(f"{SIGNS[document.tone]} {flat(sentence)}", f"bold {TONES[document.tone]}")
        else:
            yield Text(f"• {flat(sentence)}")
    if document.lead:
        yield Text(flat(document.lead), "dim")
    if document.cards:
        figures = (
            f"{one.label.lower()} {one.value}" + (f" ({one.more})" if one.more else "")
            for one in document.cards
        )
        yield Text("  " + flat(" · ".join(figures)), "dim")
    for table in document.tables:
        yield Text()
        yield _grid(table)
        for cell in (row[0] for row in table.rows if row):
            if isinstance(cell, Cell) and cell.small:
                yield Text(f"  {flat(cell.text)}: {flat(cell.small)}", "dim")
        if table.about:
            yield Text(f"  {flat(table.about)}", "dim")
    for note in document.notes:
        yield Text(f"note: {flat(note)}", "yellow")
    for contrast in document.contrasts[:_CONTRASTS]:
        yield from _contrast(contrast)
    if len(document.contrasts) > _CONTRASTS:
        yield Text(
            f"\nand {len(document.contrasts) - _CONTRASTS:,} more differences; --html shows all", "dim"
        )


def _contrast(contrast: Contrast) -> Iterator[Text]:
    base, other = contrast.base, contrast.other
    yield Text(f"\n{flat(contrast.name)}", "bold")
    if contrast.about:
        yield Text(f"  {flat(contrast.about)}")
    width = max(map(len, contrast.names))
    for place in _places(contrast.hunks[:_PLACES]):
        for side, (name, style) in enumerate(zip(contrast.names, ("green", "red"), strict=True)):
            line, at = Text(f"  {name:<{width}}  ", "dim"), max(0, place[0].start - _AROUND)
            for hunk in place:
                before = _joined(base, at, hunk.start)
                line.append(f"{before}│" if before else "")
                changed = _joined(other, *hunk[2:]) if side else _joined(base, *hunk[:2])
                line.append(f"⟦{changed}⟧", style).append("│" if hunk is not place[-1] else "")
                at = hunk.stop
            after = _joined(base, at, min(contrast.stop or len(base.ids), at + _AROUND))
            yield line.append(f"│{after}" if after else "")
    if len(contrast.hunks) > _PLACES:
        yield Text(f"  and {len(contrast.hunks) - _PLACES:,} more places", "dim")


def _places(hunks: Sequence[Hunk]) -> Iterator[list[Hunk]]:
    """Group hunks that share a line: they are in each other's context."""
    near: list[Hunk] = []
    for hunk in hunks:
        if near and hunk.start - near[-1].stop >= _AROUND:
            yield near
            near = []
        near.append(hunk)
    if near:
        yield near


def _joined(track: Track, start: int, stop: int) -> str:
    texts = _texts(track, start, min(stop, start + _HUNK))
    return "│".join(map(flat, texts)) + ("│…" if stop - start > _HUNK else "")


def _texts(track: Track, start: int, stop: int) -> list[str]:
    if track.texts is None:
        return [str(index) for index in track.ids[start:stop].tolist()]
    return list(track.texts[start:stop])


def _role(track: Track, piece: Piece) -> str:
    if 0 <= piece.message < len(track.roles):
        return track.roles[piece.message]
    if piece.message >= 0:
        return f"message {piece.message}"
    return "prompt" if piece.hue in (HUES["generation"], HUES["prompt"]) else "template"


def _track_head(document: Document, track: Track) -> Iterator[RenderableType]:
    if len(document.tracks) > 1:
        yield Text(f"── {visible(track.name)} ──", "bold")
    if (track.ids < 0).any():  # texts, not tokens
        yield Text(f"{track.about}\n", "bold")
        return
    tokens, marked, *messages = _size(track)
    yield Text(f"{tokens}   ", "bold").append(marked, "underline").append("   ".join(["", *messages]))
    for card in track.cards:
        line = Text(f"{card.label.lower()} ", "dim")
        yield line.append(visible(card.value), CONTROL).append(f" {card.more}", "dim")
    yield Columns(list(_legend(track)), padding=(0, 3))
    meaning = "sampled by the model" if track.means == "sampled" else "carries loss"
    key = Text("underlined", "bold underline").append(f" = {meaning}   ", "dim")
    yield key.append("boxed", CONTROL).append(" = control token   shades alternate token by token", "dim")
    for one in track.edits:
        line = Text(f"changed  {flat(one.what)}: ", "yellow").append(flat(one.before), "dim")
        line.append(flat(one.old), "red strike").append(flat(one.new), "green")
        yield line.append(flat(one.after), "dim")
    for note in track.notes:
        yield Text(flat(note) if note.startswith("lost") else f"note     {flat(note)}", "yellow")
    yield Text()


def _size(track: Track) -> list[str]:
    marked = 0 if track.mask is None else int(track.mask.sum())
    messages = [counted(len(track.roles), "message")] if track.roles else []
    return [counted(len(track.ids)), f"{marked:,} {track.means}", *messages]


def _legend(track: Track) -> Iterator[Text]:
    tokens, marked = Counter[int](), Counter[int]()
    for piece in track.pieces():
        tokens[piece.hue] += piece.stop - piece.start
        marked[piece.hue] += (piece.stop - piece.start) * piece.marked
    for hue in sorted(tokens):
        size = f"{tokens[hue]:,}" + (f" ({marked[hue]:,} {track.means})" if marked[hue] else "")
        yield Text(f"■ {ORIGINS[hue].label} ", _shades(hue)[0]).append(size, "dim")


def _shades(hue: int) -> tuple[str, str]:
    return COLOURS.get(ORIGINS[hue].name, _OTHER_COLOURS)


def _track_rows(track: Track, limit: int) -> Grid:
    rows = Grid.grid(padding=(0, 1))
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for message, pieces in itertools.groupby(track.pieces(limit), key=lambda piece: piece.message):
        group = list(pieces)
        label = "" if message < 0 else str(message)
        rows.add_row(
            Text(label, "dim"), Text(visible(_role(track, group[0])), "bold"), _coloured(track, group)
        )
    return rows


def _coloured(track: Track, pieces: Sequence[Piece]) -> Text:
    out = Text()
    for piece in pieces:
        shades = [
            Style(color=shade, bold=piece.marked, underline=piece.marked) for shade in _shades(piece.hue)
        ]
        for at, text in enumerate(_texts(track, piece.start, piece.stop), piece.start):
            if track.control is not None and track.control[at]:
                out.append(visible(text), CONTROL_SAMPLED if piece.marked else CONTROL)
            else:
                out.append(visible(text).replace("\t", "⇥   ").replace("\n", "⏎\n"), shades[at % 2])
    if out.plain.endswith("\n"):
        out.right_crop(1)
    return out


def _plain_track(document: Document, track: Track, limit: int) -> Iterator[str]:
    if len(document.tracks) > 1:
        yield f"## {flat(track.name)}"
    yield f"# {track.about if (track.ids < 0).any() else ', '.join(_size(track))}"
    for card in track.cards:
        yield f"# {card.label.lower()} {flat(card.value)}: {flat(card.more)}"
    for one in track.edits:
        change = f"[-{flat(one.old)}-]{{+{flat(one.new)}+}}"
        yield f"# changed: {flat(one.what)}: {flat(one.before)}{change}{flat(one.after)}"
    for note in track.notes:
        yield f"# {'' if note.startswith('lost') else 'note: '}{flat(note)}"
    pieces = list(track.pieces(limit))
    width = min(max((len(piece.field) for piece in pieces), default=0), 32)
    for piece in pieces:
        who = "-" if piece.message < 0 else f"{piece.message} {_role(track, piece)}"
        text = "│".join(repr(visible(text))[1:-1] for text in _texts(track, piece.start, piece.stop))
        mark = "*" if piece.marked else " "
        yield f"{piece.start:>6} {mark} {flat(who):<12} {flat(piece.field):<{width}}  {text}"
    if len(track.ids) > limit:
        yield f"# {len(track.ids) - limit:,} more tokens"
