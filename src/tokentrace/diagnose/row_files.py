"""`check_dataset`: files of rows, and their conversations."""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, ClassVar

from ..data.sources import Format, Row, Source, find_sources, read_rows
from ..data.tables import read_metadata
from ..data.tokenizing import RowResult, RowTokenizer, TokenizeSettings
from ..errors import InputError
from ..settings import whole
from .finding import Cause
from .record_files import Progress
from .report import Report, Tallies
from .rows import Outcome, RowChecker, origin_of

_END = Row(sys.maxsize, None)
_HOW = "pass it with --source, in Python with sources="
Metadata = Mapping[str, Any]
_OwnFile = tuple[Source, Metadata]


class CheckReport(Report):
    """Counts over all rows, compared with `settings`."""

    unit, title = "row", "Rows against their template"
    remedy = (
        "the rows come from another tokenizer, conversation or setting: tokenize the conversations again"
    )
    tables: ClassVar = {"outcomes": "Outcomes", "causes": "Why", "mask": "Masks", "reasons": "Remarks"}
    mask: Tallies
    reasons: Tallies
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def differing(self) -> int:
        return self.total - self.count(Outcome.SAME) - self.count(Outcome.UNCHECKED)

    @property
    def clean(self) -> bool:
        return self.total == self.count(Outcome.SAME)

    def judge(self) -> tuple[str, str]:
        rows, masks, unchecked = self.total, self.counts["masks"], self.count(Outcome.UNCHECKED)
        if not rows:
            return "poor", "there are no rows"
        if self.clean:
            what = "ids and mask" if masks == rows else "ids" if masks else "ids (there is no mask)"
            return "good", f"all {rows:,} rows match the template: {what}"
        if self.differing:
            more = f"; {unchecked:,} have no conversation" if unchecked else ""
            return "bad", f"{self.differing:,} of {rows:,} rows do not match the template{more}"
        more = f", {rows - unchecked:,} are the same" * (rows > unchecked)
        return "poor", f"{unchecked:,} of {rows:,} rows have no conversation to compare them with{more}"

    def figures(self) -> Iterator[str]:
        for name in ("tokens", "trained", "padding"):
            expected = f" ({self.counts[f'expected_{name}']:,} expected)" * (name != "padding")
            if self.counts[name]:
                yield f"{name} {self.counts[name]:,}{expected}"


class _Conversations:
    """Files of conversations: `names`, or where the metadata of `ours` says they are."""

    def __init__(self, names: Sequence[str], ours: Sequence[_OwnFile], tokenizer: RowTokenizer) -> None:
        self._tokenizer, self._reading = tokenizer, dict[str, tuple[Iterator[Row], Row, RowResult | None]]()
        recorded = [(file, entry) for file, metadata in ours for entry in _entries(metadata)]
        self.sources = find_sources(names) if names else []
        first_names = {entry["name"] for _, entry in recorded}
        if len(self.sources) == len(first_names) == 1:  # whatever its name is now
            self.sources = [replace(self.sources[0], name=first_names.pop())]
        self.notes = []
        for file, entry in recorded:
            name, source = entry["name"], None
            if not names and (source := _recorded_source(file, entry)) is None:
                self.notes.append(f"{name}, which {file.name} was made from, was not found: {_HOW}")
            if source is not None and source not in self.sources:
                self.sources.append(source)
            matches, digest = self.find(name), entry.get("digest")
            if isinstance(digest, str) and len(matches) == 1 and matches[0].digest != digest:
                self.notes.append(f"{name} has changed since {file.name} was made from it")

    def find(self, name: str) -> list[Source]:
        base = PurePosixPath(name).name
        exact = [source for source in self.sources if source.name == name]
        return exact or [source for source in self.sources if PurePosixPath(source.name).name == base]

    def result(self, row: Any) -> RowResult | str | None:
        """The result for the named conversation, or why there is none."""
        if (origin := origin_of(row)) is None:
            return None
        name, number, _ = origin
        sources = self.find(name)
        if len(sources) != 1:
            several = f"several sources are named {PurePosixPath(name).name!r}"
            return several if sources else f"its source {name!r} was not found: {_HOW}"
        source = sources[0]
        rows, line, result = self._reading.get(source.path, (iter(()), _END, None))
        if number < line.number:
            rows = read_rows(source)
        if number != line.number:
            line = next((one for one in rows if one.number >= number), _END)
            result = self._tokenizer.tokenize(line) if line.number == number else None
        self._reading[source.path] = rows, line, result
        return result or f"{source.name} has no row {number}"

    def in_order(self) -> Iterator[RowResult]:
        for row in itertools.chain.from_iterable(map(read_rows, self.sources)):
            result = self._tokenizer.tokenize(row)
            yield from (replace(result, samples=(sample,)) for sample in result.samples)


def _recorded_source(file: Source, entry: Metadata) -> Source | None:
    """The file of conversations, unchanged if possible."""
    if not entry.get("path"):
        return None
    places: list[Source] = []
    for path in (Path(file.origin).absolute().parent / entry["path"], Path(entry["name"])):
        with suppress(InputError):  # not there, or no longer readable
            places += find_sources([str(path)]) if path.is_file() else []
    places.sort(key=lambda source: source.digest != entry.get("digest"))
    return replace(places[0], name=entry["name"]) if places else None


def _entries(metadata: Metadata) -> list[Metadata]:
    entries = metadata.get("sources")
    entries = entries if isinstance(entries, list) else []
    return [one for one in entries if isinstance(one, dict) and isinstance(one.get("name"), str)]


def check_dataset(
    inputs: Sequence[str],
    settings: TokenizeSettings | None = None,
    *,
    tokenizer: str | None = None,
    changes: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
    columns: Sequence[str | None] = (),
    pad_token: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress = lambda *_: None,
    assumed: bool = False,
) -> CheckReport:
    """Compare rows of ids with what the template gives for their conversations.

    - `inputs`: files, folders and datasets as `find_sources` takes them.
    - `settings`: what rows should have been made with. None: what our files say, or the defaults,
      with this `tokenizer` and `changes`.
    - `sources`: the files that rows name, if our files do not say where they are.
    - `columns`: those of ids, and of mask or labels; None takes the first usual name.
    - `pad_token`: by default the tokenizer's own.
    - `assumed`: the tokenizer is a default, so rows of another one raise InputError.

    Raises InputError if nothing can be read, TokentraceError without a working template.
    """
    limit = None if limit is None else whole("limit", limit, least=1, error=InputError)
    files = find_sources(inputs, split=split)
    paths = [{Format.PARQUET: one.path, Format.LINES: one.origin}.get(one.format) for one in files]
    pairs = ((file, read_metadata(path)) for file, path in zip(files, paths, strict=True) if path)
    ours = [(file, metadata) for file, metadata in pairs if metadata]
    settings = settings or _recorded_settings(ours, tokenizer, changes or {})
    checker = RowChecker(settings, columns, pad_token)
    report = CheckReport()
    report.settings = checker.tokenizer.described()
    for file, metadata in ours:
        for what in ("tokenizer", "template"):
            if metadata.get(f"{what}_sha256") not in (None, report.settings[f"{what}_sha256"]):
                report.notes.append(f"{file.name} was made with another {what}")
    if assumed and report.notes:
        raise InputError(f"{report.notes[0]}: name the one they were made with (--tokenizer, -t)")
    for file, metadata in ours[1:]:
        if metadata.get("settings") != ours[0][1].get("settings"):
            report.notes.append(
                f"{file.name} was made with other settings than {ours[0][0].name}: check it alone"
            )
    conversations = _Conversations(sources, ours, checker.tokenizer)
    report.notes += conversations.notes
    is_whole = len(files) == len(ours) == 1 and "counts" in ours[0][1]
    in_order = conversations.in_order() if is_whole and not conversations.notes else iter(())
    done, total = 0, sum(source.size for source in files)
    for source in files:
        for row in read_rows(source):
            if limit is not None and report.total >= limit:
                report.stopped = True
                return report
            # files for trainers do not name their sources: their rows are compared in order
            names_source = isinstance(row.value, Mapping) and "source" in row.value
            result = conversations.result(row.value) if names_source else next(in_order, None)
            checked = checker.check(row, result)
            if assumed and Cause.NO_TOKEN in checked.causes:
                problem = "has ids that the embedded model does not have"
                raise InputError(f"{checked.where} {problem}: name the rows' tokenizer (--tokenizer, -t)")
            report.add(checked.counts, checked.entries())
            progress(done + row.end, total)
        done += source.size
        progress(done, total)
    return report


def _recorded_settings(
    ours: Sequence[_OwnFile], tokenizer: str | None, changes: Mapping[str, Any]
) -> TokenizeSettings:
    if tokenizer is None:
        raise InputError("rows do not name their tokenizer: pass settings, or tokenizer=")
    described = ours[0][1].get("settings") if ours else None
    if not described or "engine" in described:  # rows of another script, or of rollouts
        described = {"lost": "ignore"}
    return TokenizeSettings.read({**described, **changes}, tokenizer)
