"""What a page shows: a document of token tracks, in columns, written as JSON whose size grows with the tokens alone.

A `Track` is tokens in a row with what is known of each. A branch of a tree has its own tokens and names the track that
it shares its beginning with; a `Contrast` holds where two tracks differ, not both of them again. Texts are written once
for each distinct token, what does not change from one token to the next once for each run, and a place that differs
once for all the contrasts that have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..diagnose.alignment import Hunk
from ..tokens.ids import runs
from ..tokens.kinds import Kind
from ..tokens.spelling import spelled
from ..tokens.tokenizer import Ids, Tokenizer
from ..trajectory.turns import Branch, Turn


class Hue(NamedTuple):
    """A kind of token: its colour (``k-name`` in viewer.css), its name for people, and what it means."""

    name: str
    label: str
    about: str = ""


ORIGINS: Final = (
    Hue("system", "system", "what a system or developer message says"),
    Hue("user", "user", "what a user says"),
    Hue("reasoning", "reasoning", "what an assistant thinks"),
    Hue("assistant", "assistant", "what an assistant says"),
    Hue("calls", "tool calls", "names and arguments of calls"),
    Hue("result", "tool results", "what a tool answers"),
    Hue("tools", "tool schemas", "the tools that are declared"),
    Hue("variables", "template variables", "values that were given to the template"),
    Hue("scaffold", "scaffold", "written by the template around it"),
    Hue("generation", "generation prompt", "asks the model for its turn"),
    Hue("unknown", "unknown", "nobody vouches for where it is from"),
    Hue("prompt", "prompt", "rendered whole: the first prompt, or a rewritten one"),
    Hue("sampled", "sampled", "returned by the engine: these carry loss"),
    Hue("context", "context", "text of messages that came later: results, the user's words"),
    Hue("synthetic", "synthetic", "put in to close a turn that was cut off"),
    Hue("plain", "tokens", "it was not said where they are from"),
)
"""Every kind that a token of any track can have; tracks hold positions in it."""

HUES: Final = {hue.name: at for at, hue in enumerate(ORIGINS)}
OF_KIND: Final = np.array([HUES[kind.name.lower()] for kind in Kind], np.uint8)
"""The hue of each `Kind` of a stream."""


class Card(NamedTuple):
    """A figure at the top. `tone` is ``"good"``, ``"bad"`` or nothing."""

    label: str
    value: str
    more: str = ""
    tone: str = ""


class Cell(NamedTuple):
    """A cell of a table. `link` is what a click shows: ``"track=1&at=20"``, ``"diff=3"``."""

    text: str
    tone: str = ""
    small: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title. The first `words` columns are words, the others numbers; a row of one cell is a heading.

    With `code`, what stands between backticks in a cell is shown as code; small lines are shown as they are.
    """

    title: str
    head: Sequence[str | Cell]
    rows: Sequence[Sequence[str | Cell]]
    about: str = ""
    words: int = 1
    code: bool = False


@dataclass(frozen=True, slots=True)
class StreamBars:
    """Streams drawn as bars, one below the other: the length of each, what was sampled of it, where it broke."""

    title: str
    about: str
    streams: Sequence[tuple[int, Sequence[tuple[int, int]], Sequence[int]]]


class Edit(NamedTuple):
    """A change of text: what it is, a little text before it, what was taken out and put in, a little after."""

    what: str
    lead: str
    out: str
    new: str
    rest: str


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Tokens in a row. All columns have one entry per token; those that are None are not known.

    `texts` is None where there is no tokenizer: ids are shown then. An id of -1 is none: a piece of text, or a remark.
    With a `parent`, the first `shared` tokens are those of that track, and the columns begin after them.
    """

    name: str
    ids: npt.NDArray[Any]
    hues: npt.NDArray[np.uint8]
    """Positions in `ORIGINS`."""
    messages: npt.NDArray[Any] | None = None
    """-1 for none."""
    texts: Sequence[str] | None = None
    control: npt.NDArray[np.bool_] | None = None
    fields: Iterable[str] | None = None
    mask: npt.NDArray[np.bool_] | None = None
    logprobs: npt.NDArray[Any] | None = None
    """NaN where there is none."""
    turns: npt.NDArray[Any] | None = None
    """-1 for none."""
    versions: Sequence[tuple[Any, int, int]] = ()
    """Version, start and stop, positions those of the columns."""
    roles: Sequence[str] = ()
    """By message. Those of its first parent, where a track has none of its own."""
    means: str = "sampled"
    """What the mask says of a token."""
    about: str = ""
    cards: Sequence[Card] = ()
    notes: Sequence[str] = ()
    edits: Sequence[Edit] = ()
    parent: int = -1
    shared: int = 0
    first: int = 0
    """The position of the first token in what it is a part of."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """Two tracks side by side: the first `stop` tokens of `base`, with `hunks` where the other has other tokens.

    A hunk is a place in `base`, and one in `other`, which need not hold more than what differs. `names` are those of
    what is marked as removed and as added; with `flipped` it is `base` that adds.
    """

    name: str
    base: int
    stop: int
    other: int
    hunks: Sequence[Hunk]
    names: tuple[str, str]
    flipped: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """All that one page shows."""

    title: str
    brand: str = ""
    template: str = ""
    """The name of the tokenizer whose template it is about; the page's title names both."""
    lead: str = ""
    said: Sequence[str] = ()
    """What it comes to, a sentence each."""
    cards: Sequence[Card] = ()
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    lanes: Sequence[StreamBars] = ()
    tracks: Sequence[Track] = ()
    contrasts: Sequence[Contrast] = ()
    branches: Sequence[Branch] = ()
    """Those of a tree; the track of each has the same number."""
    turns: Sequence[Turn] = ()
    start: str = ""
    """What is shown first, as in a link; the first track by default."""

    @property
    def heading(self) -> str:
        """The title of the page: what is shown, and the template."""
        return " · ".join(filter(None, (self.title, self.template)))

    @property
    def tokens(self) -> int:
        return sum(len(track.ids) for track in self.tracks)

    def to_json(self) -> dict[str, Any]:
        """The document as plain data, which ``tracks.js`` reads."""
        words, fields, versions, hunks = _Numbers(), _Numbers(), _Numbers(), _Numbers()
        tracks = [_track(track, words, fields, versions) for track in self.tracks]
        known = [list(word) for word in words.found]
        for one in sorted(self.contrasts, key=lambda one: (one.base, one.other)):  # so that ranges of them are long
            hunks.of(one.hunks)
        return {
            "title": self.heading,
            **{name: getattr(self, name) for name in ("brand", "lead", "start")},
            **{name: list(getattr(self, name)) for name in ("said", "notes", "cards")},
            "branches": [(one.parent, one.start, one.stop, one.cause) for one in self.branches],
            "turns": [(one.branch, one.start, one.stop, one.finish_reason) for one in self.turns],
            "hues": ORIGINS,
            "words": [[word[0] for word in known], [word[1] for word in known]],
            "control": [at for at, word in enumerate(known) if word[2]],
            "fields": list(fields.found),
            "versions": [str(version) for version in versions.found],
            "tracks": tracks,
            "contrasts": [_named(one) | {"hunks": _ranges(hunks.of(one.hunks))} for one in self.contrasts],
            "hunks": list(itertools.chain.from_iterable(hunks.found)),
            "tables": [
                _named(one) | {"head": list(map(_cell, one.head)), "rows": [list(map(_cell, row)) for row in one.rows]}
                for one in self.tables
            ],
            "lanes": list(map(_named, self.lanes)),
        }


def _named(value: Contrast | Table | StreamBars) -> dict[str, Any]:
    """The fields of a part by their names."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


class _Numbers:
    """Values with a number each, in the order in which they come."""

    def __init__(self) -> None:
        self.found: dict[Any, int] = {}

    def of(self, values: Iterable[Any]) -> list[int]:
        found = self.found
        return [found.setdefault(value, len(found)) for value in values]


def _cell(cell: str | Cell) -> str | list[str]:
    if isinstance(cell, Cell):
        full = [cell.text, cell.tone, cell.small, cell.link]
        return full if any(full[1:]) else cell.text
    return cell


def _track(track: Track, words: _Numbers, fields: _Numbers, versions: _Numbers) -> dict[str, Any]:
    count = len(track.ids)
    texts = [None] * count if track.texts is None else track.texts
    control = [False] * count if track.control is None else track.control.tolist()
    weights = np.full(count, -1, np.int64)
    for version, start, stop in track.versions:
        weights[start:stop] = versions.of([version])[0]
    columns = [
        _column(track.messages, count),
        track.hues.astype(np.int64),
        np.zeros(count, np.int64) if track.fields is None else np.array(fields.of(track.fields), np.int64),
        np.zeros(count, np.int64) if track.mask is None else track.mask.astype(np.int64),
        _column(track.turns, count),
        weights,
    ]
    return {
        **{name: getattr(track, name) for name in ("name", "means", "about", "parent", "shared", "first")},
        **{name: list(getattr(track, name)) for name in ("roles", "cards", "notes", "edits")},
        "fielded": track.fields is not None,
        "tokens": words.of(zip(track.ids.tolist(), texts, control, strict=True)),
        "runs": _runs(columns),
        "logprobs": [] if track.logprobs is None else _stretches(track.logprobs),
    }


def _column(values: npt.NDArray[Any] | None, count: int) -> npt.NDArray[np.int64]:
    return np.full(count, -1, np.int64) if values is None else values.astype(np.int64)


def _runs(columns: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Where nothing changes: the length of each run and its value in each column, one after the other."""
    table = np.stack(columns, axis=1)
    if not len(table):
        return []
    cuts = np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1
    starts = np.concatenate([[0], cuts])
    lengths = np.diff(starts, append=len(table))
    flat: list[int] = np.concatenate([lengths[:, None], table[starts]], axis=1).ravel().tolist()
    return flat


def _ranges(numbers: Sequence[int]) -> list[int]:
    """Numbers as first and count of those that follow each other: steps of a rollout differ where those before did."""
    cuts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)] if numbers else []
    return [value for start, stop in itertools.pairwise(cuts) for value in (numbers[start], stop - start)]


def _stretches(values: npt.NDArray[Any]) -> list[list[Any]]:
    """The numbers that are there: where each stretch of them begins, and the stretch. Infinite ones are null."""
    return [
        [start, [round(value, 4) if np.isfinite(value) else None for value in values[start:stop].tolist()]]
        for start, stop in runs(~np.isnan(values))
    ]


def token_columns(tokenizer: Tokenizer, ids: Ids) -> dict[str, Any]:
    """`texts` and `control` of a track. Where several tokens spell one character, the first shows it."""
    vocabulary = tokenizer.vocabulary
    table = vocabulary.is_control
    known = (ids >= 0) & (ids < len(table))
    texts = spelled(map(vocabulary.token_bytes, ids.tolist()))
    for at in np.flatnonzero((ids < 0) | (ids >= vocabulary.size)).tolist():
        texts[at] = f"⟨no token {ids[at]}⟩"
    return {"texts": texts, "control": table[np.where(known, ids, 0)] & known}
