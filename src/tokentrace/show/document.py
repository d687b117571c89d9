"""One kind of document for every result, which terminals print and pages show.

A `Track` is a row of tokens with columns; a branch has only the tokens that its parent lacks.
`Document.to_json` writes distinct texts and runs of equal values once.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tokens.ids import runs
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from ..trajectory.turns import Branch, Turn
from .alignment import Column, Hunk
from .visible import spelled


class Hue(NamedTuple):
    """A kind of token: its colour (``k-name`` in viewer.css), its label, and what it means."""

    name: str
    label: str
    about: str = ""


ORIGINS = (
    Hue("system", "system", "text of a system or developer message"),
    Hue("user", "user", "text of a user message"),
    Hue("reasoning", "reasoning", "an assistant's reasoning"),
    Hue("assistant", "assistant", "an assistant's content"),
    Hue("calls", "tool calls", "names and arguments of calls"),
    Hue("result", "tool results", "text of a tool result"),
    Hue("tools", "tool schemas", "the declared tools"),
    Hue("variables", "template variables", "values passed to the template"),
    Hue("scaffold", "scaffold", "text that the template adds"),
    Hue("generation", "generation prompt", "the prompt for the next turn"),
    Hue("unknown", "unknown", "text whose origin is unknown"),
    Hue("prompt", "prompt", "the first prompt, or a rewritten one"),
    Hue("sampled", "sampled", "returned by the engine: these tokens carry loss"),
    Hue("context", "context", "text of later messages: tool results, user messages"),
    Hue("synthetic", "synthetic", "closes a turn that was cut off"),
    Hue("plain", "tokens", "tokens without a recorded origin"),
)
"""Every kind of token. Tracks store positions in this tuple."""
HUES = {hue.name: index for index, hue in enumerate(ORIGINS)}
KIND_HUES = np.array([HUES[kind.name.lower()] for kind in Kind], np.uint8)


class Card(NamedTuple):
    """A figure at the top of a page. `tone` is ``"good"``, ``"bad"`` or empty."""

    label: str
    value: str
    more: str = ""
    tone: str = ""


class Cell(NamedTuple):
    """A cell of a table. A click opens its `link`: ``"track=1&at=20"``, ``"diff=3"``."""

    text: str
    tone: str = ""
    small: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. The first `words` columns are left-aligned; a row of one cell is a heading.

    With `code`, text in backticks is code.
    """

    title: str
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    about: str = ""
    words: int = 1
    code: bool = False


@dataclass(frozen=True, slots=True)
class StreamBars:
    """Streams as bars: each has a length, sampled ranges, and positions of breaks."""

    title: str
    about: str
    streams: Sequence[tuple[int, Sequence[tuple[int, int]], Sequence[int]]]


class Edit(NamedTuple):
    """A change of text, with text around it."""

    what: str
    before: str
    old: str
    new: str
    after: str


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` with equal column values."""

    start: int
    stop: int
    hue: int
    message: int
    field: str
    marked: bool


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Tokens in a row. Each column has one entry per token, or is None if unknown.

    Without `texts`, ids are shown. An id of -1 is a piece of text. With a `parent`, the first
    `shared` tokens are that track's, and the columns start after them.
    """

    name: str
    ids: Column
    hues: npt.NDArray[np.uint8]
    """Positions in `ORIGINS`."""
    messages: Column | None = None
    """-1 for none."""
    texts: Sequence[str] | None = None
    control: npt.NDArray[np.bool_] | None = None
    fields: Sequence[str] | npt.NDArray[np.object_] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    logprobs: Column | None = None
    """NaN for none."""
    turns: Column | None = None
    """-1 for none."""
    versions: Sequence[tuple[Any, int, int]] = ()
    """Version, start and stop, as positions in the columns."""
    roles: Sequence[str] = ()
    """By message. A track without roles uses those of its first parent."""
    means: str = "sampled"
    """What the mask marks."""
    about: str = ""
    cards: Sequence[Card] = ()
    notes: Sequence[str] = ()
    edits: Sequence[Edit] = ()
    parent: int = -1
    shared: int = 0
    first: int = 0
    """The position of its first token in a longer sequence."""

    def pieces(self, limit: int | None = None) -> Iterator[Piece]:
        """The first `limit` tokens in pieces of equal hue, message, field and mask."""
        count = len(self.ids[:limit])
        names = [""] * count if self.fields is None else self.fields
        marks = [False] * count if self.mask is None else self.mask.tolist()
        messages = _column(self.messages, len(self.ids)).tolist()
        keys = zip(self.hues.tolist(), messages, names, marks, strict=False)
        start = 0
        for key, group in itertools.groupby(itertools.islice(keys, count)):
            stop = start + len(list(group))
            yield Piece(start, stop, *key)
            start = stop


@dataclass(frozen=True, slots=True, eq=False)
class Contrast:
    """Two tracks side by side, and `hunks` where `other` differs from the first `stop` tokens of `base`.

    `names` label the two sides: removed from `base`, added by `other`.
    """

    base: Track
    other: Track
    hunks: Sequence[Hunk]
    names: tuple[str, str]
    name: str = ""
    about: str = ""
    stop: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Everything that a page or a terminal shows of one result."""

    title: str
    brand: str = ""
    template: str = ""
    """The tokenizer's name, a part of the page's title."""
    lead: str = ""
    summary: Sequence[str] = ()
    """The conclusions, one sentence each."""
    tone: str = ""
    """Of the first sentence: ``"good"``, ``"bad"``, ``"poor"`` or neutral."""
    cards: Sequence[Card] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    bars: Sequence[StreamBars] = ()
    tracks: Sequence[Track] = ()
    contrasts: Sequence[Contrast] = ()
    branches: Sequence[Branch] = ()
    """The branches of a tree; branch `i` is track `i`."""
    turns: Sequence[Turn] = ()
    start: str = ""
    """The link that the page opens; by default the first contrast, or track."""

    @property
    def heading(self) -> str:
        return " · ".join(filter(None, (self.title, self.template)))

    @property
    def all_tracks(self) -> list[Track]:
        """The tracks, then those that only contrasts have."""
        sides = [track for one in self.contrasts for track in (one.base, one.other)]
        return list(dict.fromkeys([*self.tracks, *sides]))

    @property
    def tokens(self) -> int:
        return sum(len(track.ids) for track in self.all_tracks)

    def to_json(self) -> dict[str, Any]:
        """The document as plain data, as ``tracks.js`` reads it."""
        words, names, versions, hunks = _Index(), _Index(), _Index(), _Index()
        places = {track: at for at, track in enumerate(self.all_tracks)}
        tracks = [_track_json(track, words, names, versions) for track in places]
        contrasts = [
            _fields(one)
            | {"base": places[one.base], "stop": one.stop or len(one.base.ids), "other": places[one.other]}
            for one in self.contrasts
        ]
        for one in sorted(contrasts, key=itemgetter("base", "other")):  # equal hunks get adjacent numbers
            hunks.number(one["hunks"])
        return {
            "title": self.heading,
            **{name: getattr(self, name) for name in ("brand", "lead")},
            "start": self.start or ("diff=0" if contrasts else ""),
            **{name: list(getattr(self, name)) for name in ("summary", "notes", "cards")},
            "branches": [(one.parent, one.start, one.stop, one.cause) for one in self.branches],
            "turns": [(one.branch, one.start, one.stop, one.finish_reason) for one in self.turns],
            "hues": ORIGINS,
            "words": [[word[0] for word in words.values], [word[1] for word in words.values]],
            "control": [at for at, word in enumerate(words.values) if word[2]],
            "fields": list(names.values),
            "versions": [str(version) for version in versions.values],
            "tracks": tracks,
            "contrasts": [one | {"hunks": _ranges(hunks.number(one["hunks"]))} for one in contrasts],
            "hunks": list(itertools.chain.from_iterable(hunks.values)),
            "tables": [
                _fields(one)
                | {"head": list(map(_cell, one.head)), "rows": [list(map(_cell, row)) for row in one.rows]}
                for one in self.tables
            ],
            "bars": list(map(_fields, self.bars)),
        }


def _fields(value: Contrast | Table | StreamBars) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


class _Index:
    """Numbers distinct values in order of appearance."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def number(self, values: Iterable[Any]) -> list[int]:
        return [self.values.setdefault(value, len(self.values)) for value in values]


def _cell(cell: str | Cell) -> str | list[str]:
    return cell if isinstance(cell, str) else list(cell) if any(cell[1:]) else cell.text


def _track_json(track: Track, words: _Index, names: _Index, versions: _Index) -> dict[str, Any]:
    count = len(track.ids)
    texts = [None] * count if track.texts is None else track.texts
    control = [False] * count if track.control is None else track.control.tolist()
    zeros, weights = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    for version, start, stop in track.versions:
        weights[start:stop] = versions.number([version])[0]
    columns = [
        _column(track.messages, count),
        track.hues.astype(np.int64),
        zeros if track.fields is None else np.array(names.number(track.fields), np.int64),
        zeros if track.mask is None else track.mask.astype(np.int64),
        _column(track.turns, count),
        weights,
    ]
    return {
        **{name: getattr(track, name) for name in ("name", "means", "about", "parent", "shared", "first")},
        **{name: list(getattr(track, name)) for name in ("roles", "cards", "notes", "edits")},
        "fielded": track.fields is not None,
        "tokens": words.number(zip(track.ids.tolist(), texts, control, strict=True)),
        "runs": _run_lengths(columns),
        "logprobs": [] if track.logprobs is None else _logprob_runs(track.logprobs),
    }


def _column(values: Column | None, count: int) -> npt.NDArray[np.int64]:
    return np.full(count, -1, np.int64) if values is None else values.astype(np.int64)


def _run_lengths(columns: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Run-length encode columns: the length of each run, then its value in each column."""
    table = np.stack(columns, axis=1)
    if not len(table):
        return []
    starts = np.concatenate([[0], np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1])
    lengths = np.diff(starts, append=len(table))
    flat: list[int] = np.concatenate([lengths[:, None], table[starts]], axis=1).ravel().tolist()
    return flat


def _ranges(numbers: Sequence[int]) -> list[int]:
    """Encode runs of consecutive numbers as (first, count)."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)] if numbers else []
    return [value for start, stop in itertools.pairwise(cuts) for value in (numbers[start], stop - start)]


def _logprob_runs(values: Column) -> list[list[Any]]:
    """The start and the values of each run without NaN; infinities become None."""
    return [
        [start, [round(value, 4) if np.isfinite(value) else None for value in values[start:stop].tolist()]]
        for start, stop in runs(~np.isnan(values))
    ]


def token_columns(tokenizer: Tokenizer | None, ids: Ids) -> dict[str, Any]:
    """The `texts` and `control` of a track; nothing without a tokenizer."""
    if tokenizer is None:
        return {}
    vocabulary = tokenizer.vocabulary
    valid = (ids >= 0) & (ids < len(vocabulary.is_control))
    texts = spelled(map(vocabulary.token_bytes, ids.tolist()))
    for at in np.flatnonzero((ids < 0) | (ids >= vocabulary.size)).tolist():
        texts[at] = f"⟨no token {ids[at]}⟩"
    return {"texts": texts, "control": vocabulary.is_control[np.where(valid, ids, 0)] & valid}
