"""The view for terminals. `text_view` speaks in colours, `plain_view` says the same without any."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, ParamSpec

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from ..rendering.rendered import RenderedTokens
from ..tokens.visible import counted, visible
from ..viewer.document import Cell, Table
from .pieces import (
    MessageBlock,
    Piece,
    PieceKind,
    blocks,
    counts,
    edited,
    listed,
    meaning,
    message_count,
    pieces,
    stops,
    token_texts,
)

COLOURS: Final[dict[PieceKind, tuple[str, str]]] = {
    PieceKind.SYSTEM: ("#a78bfa", "#8b6cf0"),
    PieceKind.USER: ("#60a5fa", "#3b82f6"),
    PieceKind.REASONING: ("#fbbf24", "#d99a0b"),
    PieceKind.ASSISTANT: ("#34d399", "#12b07c"),
    PieceKind.CALLS: ("#f472b6", "#e04c99"),
    PieceKind.RESULT: ("#22d3ee", "#0ba5be"),
    PieceKind.TOOLS: ("#94a3b8", "#7688a1"),
    PieceKind.VARIABLES: ("#d6a56b", "#b98848"),
    PieceKind.SCAFFOLD: ("#8a8a8a", "#737373"),
    PieceKind.PROMPT: ("#c4b5fd", "#a592f5"),
    PieceKind.UNKNOWN: ("#f87171", "#ef4444"),
}
"""Two shades each: neighbouring tokens take turns, which makes boundaries visible."""

CONTROL: Final = "#1c1c1c on #8f959e"
CONTROL_SAMPLED: Final = "bold underline #ffffff on #3d5a80"

LIMIT: Final = 20_000
"""Tokens shown before a view stops and says so."""


_UNBROKEN: Final = 100_000
"""A width at which no line is broken."""


def laid_out(*parts: RenderableType) -> Text:
    """Parts of a view one below the other, as one text with its styles; no line of it is broken."""
    console = Console(width=_UNBROKEN, file=io.StringIO(), highlight=False, markup=False, emoji=False)
    segments = [segment for part in parts for segment in console.render(part)]
    text = Text.assemble(*((segment.text, segment.style or "") for segment in segments if not segment.control))
    text.right_crop(1)
    return text


def plain_lines(text: Text) -> str:
    """A text without its styles, nor the spaces at the ends of its lines."""
    return "\n".join(line.rstrip() for line in text.plain.split("\n"))


Given = ParamSpec("Given")


def plain(view: Callable[Given, Text]) -> Callable[Given, str]:
    """The same view without colours."""

    def plain_view(*given: Given.args, **named: Given.kwargs) -> str:
        return plain_lines(view(*given, **named))

    return plain_view


TONES: Final = {"": "", "good": "green", "bad": "red", "poor": "yellow", "dim": "dim"}
"""The tones of a page's cells in a terminal."""


def grid(table: Table, *, of_signs: bool = False) -> Grid:
    """A table of a page for a terminal: its first column is headed by its title where it has no heading of its own.

    Signs stand in the middle of their columns, and have no title. What small lines and links say is left to the page.
    """
    made = Grid(box=None, padding=(0, 0, 0, 2), header_style="dim" if of_signs else "bold")
    title = "" if of_signs else f"{table.title[:1].lower()}{table.title[1:]}"
    for at, head in enumerate([table.head[0] or title, *table.head[1:]]):
        label = head.text if isinstance(head, Cell) else head
        made.add_column(label, justify="left" if at < table.words else "center" if of_signs else "right")
    for row in table.rows:
        cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]
        heading = " bold" if len(cells) == 1 < len(table.head) else ""
        made.add_row(*(Text(flat(cell.text), f"{TONES[cell.tone]}{heading}".strip()) for cell in cells))
    return made


def counts_view(
    verdict: str, fine: bool, failed: bool, more: Iterable[Text], tables: Iterable[Table]
) -> Iterator[RenderableType]:
    """How a report of counts begins: what it came to, other remarks, and its tables."""
    sign, tone = ("✓", "green") if fine else ("✗", "red") if failed else ("•", "yellow")
    yield Text(f"{sign} {verdict}", f"bold {tone}")
    yield from more
    for table in tables:
        yield Text()
        yield grid(table)


def flat(text: str) -> str:
    """A text that others wrote, on one line."""
    return visible(text).replace("\n", "⏎")


def text_view(rendered: RenderedTokens, *, limit: int = LIMIT) -> RenderableType:
    """A rendering for a terminal: tokens coloured by origin, sampled ones bold and underlined."""
    texts = token_texts(rendered, limit)
    rows = Grid.grid(padding=(0, 1))
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for block in blocks(rendered, limit):
        label = "" if block.message < 0 else str(block.message)
        rows.add_row(Text(label, "dim"), Text(visible(block.title), "bold"), _tokens(rendered, block, texts))
    parts: list[RenderableType] = [*_head(rendered), Text(), rows]
    if len(rendered) > limit:
        parts.append(Text(f"… {len(rendered) - limit:,} more tokens are not shown", "yellow"))
    return Group(*parts)


def _tokens(rendered: RenderedTokens, block: MessageBlock, texts: list[str]) -> Text:
    out = Text()
    control = rendered.control
    for piece in block.pieces:
        shades = [Style(color=shade, bold=piece.sampled, underline=piece.sampled) for shade in COLOURS[piece.kind]]
        for at in range(piece.start, piece.stop):
            style = shades[at % 2]
            if control[at]:
                out.append(visible(texts[at]), CONTROL_SAMPLED if piece.sampled else CONTROL)
            else:
                out.append(visible(texts[at]).replace("\t", "⇥   ").replace("\n", "⏎\n"), style)
    if out.plain.endswith("\n"):
        out.right_crop(1)
    return out


def _head(rendered: RenderedTokens) -> Iterator[RenderableType]:
    total, sampled = len(rendered), int(rendered.mask.sum())
    head = Text()
    head.append(counted(total), "bold")
    head.append("   ").append(f"{sampled:,} {rendered.mask_means}", "bold underline")
    head.append(f"   {message_count(rendered)} messages")
    yield head
    for text, ended in stops(rendered).items():
        if text is None:
            yield Text(f"no stop token: messages {listed(ended)}", "yellow")
        else:
            line = Text("stop token ", "dim").append(visible(text), CONTROL)
            yield line.append(f" × {len(ended)} (messages {listed(ended)})", "dim")
    legend = []
    for kind, (tokens, drawn) in counts(rendered).items():
        size = f"{tokens:,}" if not drawn else f"{tokens:,} ({drawn:,} {rendered.mask_means})"
        legend.append(Text().append(f"■ {kind} ", COLOURS[kind][0]).append(size, "dim"))
    yield Columns(legend, padding=(0, 3))
    key = Text().append("underlined", "bold underline").append(f" = {meaning(rendered)}   ", "dim")
    yield key.append("boxed", CONTROL).append(" = control token   the shade changes token by token", "dim")
    for made in rendered.changes:
        lead, out, new, rest = edited(visible(made.before), visible(made.after))
        field = f", {made.field}" if made.field else ""
        line = Text(f"changed  message {made.message}{field}: {made.what}: ", "yellow")
        line.append(repr(lead)[1:-1], "dim").append(repr(out)[1:-1], "red strike")
        yield line.append(repr(new)[1:-1], "green").append(repr(rest)[1:-1], "dim")
    for one in rendered.lost:
        yield Text(f"lost     {visible(str(one))}", "bold red")
    for note in rendered.notes:
        yield Text(f"note     {visible(note)}", "yellow")


def _whole_schemas(found: Iterable[Piece]) -> list[Piece]:
    """The pieces, with those of one tool's schema as a single one: nobody reads its fields line by line."""
    out: list[Piece] = []
    for piece in found:
        if piece.kind is PieceKind.TOOLS:
            piece = replace(piece, field=".".join(piece.field.split(".")[:2]))
            if out and replace(out[-1], start=piece.start, stop=piece.stop) == piece:
                out[-1] = replace(out[-1], stop=piece.stop)
                continue
        out.append(piece)
    return out


def plain_view(rendered: RenderedTokens, *, limit: int = LIMIT) -> str:
    """A rendering as plain lines, for pipes and files: one line per piece, tokens parted by ``│``.

    A ``*`` marks what is sampled. Text is escaped as in Python.
    """
    texts = token_texts(rendered, limit)
    shown = _whole_schemas(pieces(rendered, limit))
    width = min(max((len(piece.field) for piece in shown), default=0), 32)
    marked = f"{int(rendered.mask.sum())} {rendered.mask_means}"
    lines = [f"# {len(rendered)} tokens, {marked}, {message_count(rendered)} messages"]
    for text, ended in stops(rendered).items():
        said = "no stop token" if text is None else f"stop token {visible(text)}"
        lines.append(f"# {said}: messages {listed(ended)}")
    lines += [f"# changed: {visible(str(made))}" for made in rendered.changes]
    lines += [f"# lost: {visible(str(one))}" for one in rendered.lost]
    lines += [f"# note: {visible(note)}" for note in rendered.notes]
    for piece in shown:
        who = "-" if piece.role is None else f"{piece.message} {piece.role}"
        text = "│".join(repr(visible(text))[1:-1] for text in texts[piece.start : piece.stop])
        mark = "*" if piece.sampled else " "
        lines.append(f"{piece.start:>6} {mark} {visible(who):<12} {visible(piece.field):<{width}}  {text}")
    if len(rendered) > limit:
        lines.append(f"# {len(rendered) - limit} more tokens are not shown")
    return "\n".join(line.replace("\n", "⏎") for line in lines)
