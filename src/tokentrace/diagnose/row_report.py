"""`check_dataset`: counts over rows of ids, compared with what the template gives."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..data.sources import BATCH_ROWS, Format, Row, Source, find_sources, read_rows
from ..data.tables import read_metadata
from ..data.tokenizing import RowResult, RowTokenizer, TokenizeSettings
from ..errors import InputError
from ..settings import whole
from ..show.document import Card, Cell, Contrasts, Document, Table
from ..show.visible import counted
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .finding import Cause
from .rows import CheckedRow, Outcome, RowChecker, RowColumns, origin_of

_EXAMPLES: Final = 5
"""Rows kept of each outcome."""
_ROW_BYTES: Final = 1 << 28
"""A longer row is bad. Ids take more room than their text."""
_HOW: Final = "give it with --source, in Python with sources= (a .metadata file beside JSON Lines says where it is)"
_TONES: Final = {Outcome.SAME: "good", Outcome.CUT: "poor", Outcome.UNCHECKED: "poor"}

Progress = Callable[[int, int], None]
"""Gets how much is done, and of how much, in the units of `Source.size`."""


@dataclass(slots=True)
class CheckReport(ShowsItself):
    """Counts over all rows, and the first few rows of each outcome.

    `settings` is what the rows were compared with, `notes` are about the dataset as a whole,
    `reasons` say why rows are bad or unchecked. `causes` counts rows, `mask` tokens and rows by
    role, part and cause. `masks` are rows with a mask, `compared` those with a conversation.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    causes: Counter[Cause] = field(default_factory=Counter)
    mask: dict[tuple[str, str, Cause], Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: dict[Outcome, list[CheckedRow]] = field(default_factory=dict)
    rows: int = 0
    masks: int = 0
    tokens: int = 0
    trained: int = 0
    expected_tokens: int = 0
    expected_trained: int = 0
    compared: int = 0
    padding: int = 0
    stopped: bool = False

    def add(self, row: CheckedRow) -> None:
        self.rows += 1
        self.outcomes[row.outcome] += 1
        self.causes.update(row.causes)
        self.masks += row.trained is not None
        self.compared += row.expected_tokens is not None
        for name in ("tokens", "padding", "trained", "expected_tokens", "expected_trained"):
            setattr(self, name, getattr(self, name) + (getattr(row, name) or 0))
        for one in row.mask:
            count = self.mask.setdefault((one.where, one.field, one.cause), Counter())
            count.update(tokens=one.tokens, rows=1)
        if row.reason is not None and (row.reason in self.reasons or len(self.reasons) < 1000):
            self.reasons[row.reason] += 1
        examples = self.examples.setdefault(row.outcome, [])
        examples += [row] if len(examples) < _EXAMPLES else []

    @property
    def differing(self) -> int:
        """Rows that are neither the same nor unchecked."""
        return self.rows - self.outcomes[Outcome.SAME] - self.outcomes[Outcome.UNCHECKED]

    @property
    def clean(self) -> bool:
        """True if every row is the one that its conversation gives."""
        return self.rows == self.outcomes[Outcome.SAME]

    @property
    def verdict(self) -> str:
        unchecked, same = self.outcomes[Outcome.UNCHECKED], self.outcomes[Outcome.SAME]
        what = "ids and mask" if self.masks == self.rows else "ids" if self.masks else "ids (there is no mask)"
        if not self.rows:
            return "there are no rows"
        if self.clean:
            return f"all {self.rows:,} rows are what the template gives: {what}"
        if not self.differing:
            more = f", {same:,} are the same" if same else ""
            return f"{unchecked:,} of {self.rows:,} rows have no conversation to compare them with{more}"
        more = f"; {unchecked:,} have no conversation" if unchecked else ""
        return f"{self.differing:,} of {self.rows:,} rows are not what the template gives{more}"

    def to_json(self) -> dict[str, Any]:
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return plain | {
            "verdict": self.verdict,
            "clean": self.clean,
            "mask": [{"role": role, "part": part, "cause": why, **n} for (role, part, why), n in self.mask.items()],
            "reasons": dict(self.reasons.most_common(20)),
            "examples": {one: [asdict(row) for row in rows] for one, rows in self.examples.items()},
        }

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        contrasts = Contrasts()
        different = [one for one in Outcome if one not in (Outcome.SAME, Outcome.UNCHECKED)]
        examples = [_example(row, contrasts) for one in different for row in self.examples.get(one, ())]
        outcomes: list[list[str | Cell]] = [
            [Cell(str(one), _tone(one)), f"{self.outcomes[one]:,}", f"{100 * self.outcomes[one] / self.rows:.1f} %"]
            for one in Outcome
            if self.outcomes[one]
        ]
        masks = [
            [role, part, str(why), f"{n['tokens']:,}", f"{n['rows']:,}"]
            for (role, part, why), n in sorted(self.mask.items(), key=lambda item: -item[1]["tokens"])
        ]
        tables = [
            Table("Outcomes", ["outcome", "rows", ""], outcomes),
            Table("Why", ["", "rows"], [[str(cause), f"{n:,}"] for cause, n in self.causes.most_common()]),
            Table("Masks", ["role", "part", "mask", "tokens", "rows"], masks, words=3),
            Table("Remarks", ["", "rows"], [[why, f"{n:,}"] for why, n in self.reasons.most_common(20)]),
            Table("Rows that differ", ["row", "outcome", "what"], examples, "A few of each outcome.", words=3),
        ]
        expected = [f"{n:,} expected" if self.compared else "" for n in (self.expected_tokens, self.expected_trained)]
        return Document(
            "Rows against their template",
            "tokentrace check",
            summary=[self.verdict],
            tone="good" if self.rows and self.clean else "bad" if self.differing else "poor",
            cards=[
                Card("Tokens", f"{self.tokens:,}", expected[0]),
                Card("Trained", f"{self.trained:,}" if self.masks else "–", expected[1]),
                *([Card("Padding", f"{self.padding:,}")] if self.padding else ()),
            ],
            notes=[*self.notes, *([f"stopped after {counted(self.rows, 'row')}"] if self.stopped else [])],
            tables=[table for table in tables if table.rows],
            **contrasts.content(),
        )


def _example(row: CheckedRow, contrasts: Contrasts) -> list[str | Cell]:
    name = f"{row.source}, row {row.row}"
    links = [
        contrasts.add_parts(f"{name}: {finding.cause}", parts, ("expected", "found"), str(finding))
        for finding, parts in zip(row.findings, row.contrasts, strict=False)
    ]
    mask = (f"token {finding.position:,}: {finding.words}" for finding in row.mask)
    words = row.reason or "; ".join([*map(str, row.findings[: len(links)]), *mask])
    return [Cell(name, link=links[0] if links else ""), Cell(str(row.outcome), _tone(row.outcome)), words]


def _tone(outcome: Outcome) -> str:
    return _TONES.get(outcome, "bad")


# -- the files that rows were made of


class SourceConversations:
    """Files of conversations, read forwards: rows in the order of their source cost one pass."""

    def __init__(self, sources: Sequence[Source], tokenizer: RowTokenizer) -> None:
        self.sources, self._tokenizer = sources, tokenizer
        self._reading: dict[str, tuple[Iterator[Row], int]] = {}

    def find(self, name: str) -> list[Source]:
        """The files of this name, or of this base name if there is none."""
        base = PurePosixPath(name).name
        exact = [source for source in self.sources if source.name == name]
        return exact or [source for source in self.sources if PurePosixPath(source.name).name == base]

    def result(self, row: Any) -> RowResult | str | None:
        """What the conversation gives that a row of ours names, or why there is none."""
        origin = origin_of(row) if isinstance(row, Mapping) else None
        if origin is None:
            return None
        name, number, _ = origin
        sources = self.find(name)
        if len(sources) != 1:
            several = f"several sources are named {PurePosixPath(name).name!r}"
            return several if sources else f"its source {name!r} was not found: {_HOW}"
        source = sources[0]
        rows, last = self._reading.get(source.path, (iter(()), 0))
        if number <= last or not last:
            rows = self._rows(source)
        line = next((one for one in rows if one.number >= number), None)
        self._reading[source.path] = rows, 0 if line is None else line.number
        if line is None or line.number != number:
            return f"{source.name} has no row {number}"
        return self._tokenizer.tokenize(line, source.name, source.format)

    def _rows(self, source: Source) -> Iterator[Row]:
        return read_rows(source, row_bytes=self._tokenizer.settings.row_bytes)

    def in_order(self) -> Iterator[RowResult]:
        for source in self.sources:
            for row in self._rows(source):
                result = self._tokenizer.tokenize(row, source.name, source.format)
                yield from (replace(result, samples=(sample,)) for sample in result.samples)


@dataclass(frozen=True, slots=True)
class _RowFile:
    """A file of rows that tokentrace wrote, its metadata, and the files that it was made of."""

    source: Source
    metadata: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]

    def find(self, entry: Mapping[str, Any], spool: Path) -> list[Source]:
        """A file that the rows were made of, seen from the rows or from here; the unchanged one first."""
        sources: list[Source] = []
        beside = Path(self.source.origin).absolute().parent
        for place in (beside / entry["path"], Path(entry["name"])) if entry.get("path") else ():
            with suppress(InputError):  # no longer readable
                sources += find_sources([str(place)], spool / str(len(sources))) if place.is_file() else []
        return sorted(sources, key=lambda source: source.digest != entry.get("digest"))

    def other_models(self, now: Mapping[str, Any]) -> Iterator[str]:
        """A note for tokenizer and template, if the rows were made with another."""
        for what in ("tokenizer", "template"):
            before, here = (metadata.get(f"{what}_sha256") for metadata in (self.metadata, now))
            if before is not None and before != here:
                yield f"{self.source.name} was made with another {what}"

    def changed_sources(self, origins: SourceConversations) -> Iterator[str]:
        """A note for each file that changed since the rows were made of it."""
        name = self.source.name
        for entry in self.entries:
            sources, digest = origins.find(entry["name"]), entry.get("digest")
            if len(sources) == 1 and isinstance(digest, str) and sources[0].digest != digest:
                yield f"{entry['name']} has changed since {name} was made of it"


def _row_files(sources: Sequence[Source]) -> Iterator[_RowFile]:
    for source in sources:
        path = {Format.PARQUET: source.path, Format.LINES: source.origin}.get(source.format)
        if metadata := read_metadata(path) if path else {}:
            entries = metadata.get("sources")
            entries = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
            yield _RowFile(source, metadata, [one for one in entries if isinstance(one.get("name"), str)])


def check_dataset(
    inputs: Sequence[str],
    settings: TokenizeSettings | None = None,
    *,
    tokenizer: str | None = None,
    changes: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
    columns: RowColumns = RowColumns(),  # noqa: B008 (frozen)
    pad_token: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    assumed: bool = False,
) -> CheckReport:
    """Compare rows of ids with what the template gives for their conversations.

    - `inputs`: files, folders and datasets as `find_sources` takes them.
    - `settings`: what the rows should have been made with. None uses what our files say of themselves, else the
      defaults; it needs `tokenizer`, and `changes` (named as in `TokenizeSettings.described`) override both.
    - `sources`: the files that rows name in their columns ``source`` and ``row``, unless the rows' file says where they
      are. The notes list files that are missing or have changed.
    - `columns`: where rows hold ids and mask. `pad_token`: what they are padded with; by default the tokenizer's own.
    - `limit`: stop after so many rows.
    - `assumed`: nobody chose the tokenizer. Raises InputError if the rows were made with another one.

    Raises InputError if nothing can be read, TokentraceError without a working template.
    """
    limit = None if limit is None else whole("limit", limit, least=1, error=InputError)
    with tempfile.TemporaryDirectory(prefix="tokentrace-check-") as spool:
        files = find_sources(inputs, Path(spool) / "rows", split=split)
        ours = list(_row_files(files))
        if settings is None and tokenizer is None:
            raise InputError("rows do not carry their tokenizer: give settings, or tokenizer=")
        if settings is None:
            recorded = ours[0].metadata.get("settings") if ours else None
            if not recorded or "engine" in recorded:  # rows of another script, or of rollouts
                recorded = {"lost": "ignore"}
            settings = TokenizeSettings.read({**recorded, **(changes or {})}, str(tokenizer))
        checker = RowChecker(settings, columns=columns, pad_token=pad_token)
        report = CheckReport(settings=checker.tokenizer.described())
        conversations, missing = _conversations(sources, ours, Path(spool))
        origins = SourceConversations(conversations, checker.tokenizer)
        other = [note for one in ours for note in one.other_models(report.settings)]
        if assumed and other:
            raise InputError(f"{other[0]}: name the one they were made with (--tokenizer, -t)")
        changed = [note for one in ours for note in one.changed_sources(origins)]
        report.notes += [*other, *changed, *missing]
        is_whole = len(files) == len(ours) == 1 and "counts" in ours[0].metadata
        follows_sources = is_whole and not changed and not missing
        in_order = origins.in_order() if follows_sources else iter(())
        done, total = 0, sum(source.size for source in files)
        for source in files:
            for row in read_rows(source, row_bytes=_ROW_BYTES):
                if limit is not None and report.rows >= limit:
                    report.stopped = True
                    return report
                # files for trainers do not name their sources: their rows are compared in order
                names_source = isinstance(row.value, Mapping) and "source" in row.value
                origin = origins.result(row.value) if names_source else next(in_order, None)
                report.add(checker.check(row, source.name, source.format, origin))
                if progress is not None and not report.rows % BATCH_ROWS:
                    progress(done + row.end, total)
            done += source.size
            if progress is not None:
                progress(done, total)
    return report


def _conversations(sources: Sequence[str], ours: Sequence[_RowFile], spool: Path) -> tuple[list[Source], list[str]]:
    origins = find_sources(sources, spool / "sources") if sources else []
    names = {entry["name"] for one in ours for entry in one.entries}
    if len(origins) == len(names) == 1:  # the only source, whatever its name is now
        return [replace(origins[0], name=names.pop())], []
    missing: list[str] = []
    for file, entry in ((one, entry) for one in ours if not sources for entry in one.entries):
        name, places = entry["name"], file.find(entry, spool / f"recorded-{len(origins)}")
        if not places:
            missing.append(f"{name}, which {file.source.name} was made of, is not there any more: {_HOW}")
        origins += [replace(place, name=name) for place in places[:1]]
    return list(dict.fromkeys(origins)), missing
