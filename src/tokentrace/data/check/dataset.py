"""The delta check: rows that hold ids already, compared with what the template makes of their conversations.

A row's conversation is in the row itself or, for files that tokentrace wrote, in the source that the row names.
What is expected is what `RowTokenizer` makes of it. Without a conversation, the row is checked by itself, and its mask
against the turns that its ids show.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...diagnose.finding import Cause
from ...diagnose.resync import hunks
from ...errors import InputError
from ...samples.supervised import TRAINED_PARTS, Turns
from ...settings import whole
from ...tokens.ids import common_prefix
from ..rows import BATCH_ROWS, ROW_BYTES, Row, read_rows
from ..sources import Format, Source, find_sources
from ..tables import read_metadata
from ..tokenizing import RowResult, RowTokenizer, TokenizeSettings
from .columns import FOUND_OUT, ReadyRow, RowColumns, has_conversation, ready_row, without_padding
from .deviations import Explainer
from .masks import Expected, MaskDifference, mask_differences, padding_differences, read_differences, shift
from .report import CheckedRow, CheckReport, Outcome
from .source_rows import RecordedSources, SourceRows
from .turn_marks import TurnMarks

_OURS: Final = frozenset({"source", "row", "sample"})
"""Columns by which rows that tokentrace wrote name where they come from."""

_ROW_BYTES: Final = 1 << 28
"""A longer row is bad. Ids take more room than the text that they were."""

Progress = Callable[[int, int], None]
"""Is told how much is done, and of how much, in the units of `Source.size`."""


def check_dataset(
    inputs: Sequence[str],
    settings: TokenizeSettings | None = None,
    *,
    tokenizer: str | None = None,
    changes: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
    columns: RowColumns = FOUND_OUT,
    pad_token: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    assumed: bool = False,
) -> CheckReport:
    """Compare rows of ids with what the template makes of their conversations.

    - `inputs`: files, folders and datasets as `find_sources` takes them.
    - `settings`: what the rows should have been made with. None: what a Parquet file of ours says of itself, else the
      defaults; then `tokenizer` is needed, and `changes` (names as in `TokenizeSettings.described`) go before both.
    - `sources`: the files that rows name in their columns ``source`` and ``row``. Not needed where the rows' file says
      what it was made from and these files are still there; findings tell of those that are gone or changed.
    - `columns`: where rows hold ids and mask. `pad_token`: what rows are padded with; by default the tokenizer's own.
    - `limit`: look at so many rows only.
    - `assumed`: nobody chose the tokenizer. Raises InputError if the rows were made with another one.

    Memory does not grow with the number of rows. InputError where nothing can be read, TokentraceError where there is
    no working template; what is wrong with a row is in the report.
    """
    with tempfile.TemporaryDirectory(prefix="tokentrace-check-") as spool:
        given = find_sources(inputs, Path(spool) / "rows", split=split)
        known = [(source, metadata) for source in given if (metadata := _metadata(source))]
        if settings is None:
            settings = _settings(known, tokenizer, changes or {})
        limit = None if limit is None else whole("limit", limit, least=1, error=InputError)
        origins = find_sources(sources, Path(spool) / "sources") if sources else []
        recorded = [RecordedSources(source, metadata) for source, metadata in known]
        names = {name for one in recorded for name in one.names}
        if len(origins) == len(names) == 1:  # the only source, whatever its name is now
            origins = [replace(origins[0], name=names.pop())]
        gone: list[str] = []
        if not sources:
            for at, one in enumerate(recorded):
                found, missing = one.find(Path(spool) / f"found-{at}")
                origins += [origin for origin in found if origin not in origins]
                gone += missing
        checker = RowChecker(settings, sources=origins, columns=columns, pad_token=pad_token)
        report = CheckReport(settings=checker.tokenizer.described())
        others = list(_made_otherwise(known, report.settings))
        if assumed and others:
            raise InputError(f"{others[0]}: name the one they were made with (--tokenizer, -t)")
        report.findings += [*others, *_other_settings(known, report.settings), *gone]
        changed = [said for one in recorded for said in one.changed(origins)]
        report.findings += changed
        is_whole = len(given) == len(recorded) == 1 and "counts" in known[0][1] and not gone and not changed
        in_order = checker.samples_of(origins) if is_whole else None
        _check_all(given, checker, report, limit, progress, in_order)
    return report


def _check_all(
    given: Sequence[Source],
    checker: RowChecker,
    report: CheckReport,
    limit: int | None,
    progress: Progress | None,
    in_order: Iterator[RowResult] | None,
) -> None:
    """Check every row. `in_order` gives the sample of each row of a file whose rows do not name theirs."""
    done, total = 0, sum(source.size for source in given)
    for source in given:
        for row in read_rows(source, row_bytes=_ROW_BYTES):
            if limit is not None and report.rows >= limit:
                report.stopped = True
                return
            names_it = in_order is None or (isinstance(row.value, Mapping) and "source" in row.value)
            made = None if names_it or in_order is None else next(in_order, None)
            report.add(checker.check(row, source.name, source.format, made))
            if progress is not None and not report.rows % BATCH_ROWS:
                progress(done + row.end, total)
        done += source.size
        if progress is not None:
            progress(done, total)


# -- what files say of themselves


def _metadata(source: Source) -> dict[str, Any]:
    """What a file of samples says of how it was made; other files say nothing."""
    if source.format is Format.PARQUET:
        return read_metadata(source.path)
    return read_metadata(source.origin) if source.format is Format.LINES and source.origin else {}


def _settings(
    known: Sequence[tuple[Source, Mapping[str, Any]]], tokenizer: str | None, changes: Mapping[str, Any]
) -> TokenizeSettings:
    if tokenizer is None:
        raise InputError("rows do not carry their tokenizer: give settings, or tokenizer=")
    recorded = known[0][1] if known else {}
    made = recorded.get("settings")
    if not made or "engine" in made:  # rows of others, or of rollouts, whose ids were sampled
        made = {"lost": "ignore"}
    return TokenizeSettings.read({**made, **changes}, tokenizer)


_Known = Sequence[tuple[Source, Mapping[str, Any]]]


def _made_otherwise(known: _Known, now: Mapping[str, Any]) -> Iterator[str]:
    """Which files were made with another tokenizer or template."""
    for source, metadata in known:
        for key, what in (("tokenizer_sha256", "tokenizer"), ("template_sha256", "template")):
            if key in metadata and metadata[key] != now[key]:
                yield f"{source.name} was made with another {what} ({_hash(metadata[key])}, here {_hash(now[key])})"


def _other_settings(known: _Known, now: Mapping[str, Any]) -> Iterator[str]:
    """Which files were made with other settings."""
    for source, metadata in known:
        before, current = metadata.get("settings", {}), now["settings"]
        other = sorted(name for name in before if name in current and before[name] != current[name])
        if other:
            yield f"{source.name} was made with other settings: {', '.join(other)}"


def _hash(value: Any) -> str:
    text = value if isinstance(value, str) else next(iter(value.values()), "") if len(value) == 1 else json.dumps(value)
    return text[:12]


# -- rows


class RowChecker:
    """Checks rows, one at a time. What is wrong with a row is its own: nothing but a bad setting is raised."""

    def __init__(
        self,
        settings: TokenizeSettings,
        *,
        sources: Sequence[Source] = (),
        columns: RowColumns = FOUND_OUT,
        pad_token: str | None = None,
    ) -> None:
        self.tokenizer = RowTokenizer(settings)
        renderer = self.tokenizer.renderer
        self.marks = TurnMarks(renderer)
        self._explainer = Explainer(renderer, self.marks)
        self._columns = columns
        self._rows = SourceRows(sources, row_bytes=max(settings.row_bytes, ROW_BYTES))
        named = pad_token or renderer.tokenizer.variables.get("pad_token", "")
        self._pad = renderer.tokenizer.token_id(named)
        if pad_token and self._pad is None:
            raise InputError(f"{pad_token!r} is not a control token of {renderer.tokenizer.name or 'the tokenizer'}")

    def samples_of(self, sources: Sequence[Source]) -> Iterator[RowResult]:
        """Each sample that the files give, one after the other: files for trainers hold them in this order."""
        for source in sources:
            for row in read_rows(source, row_bytes=ROW_BYTES):
                made = self.tokenizer.tokenize(row, source.name, source.format)
                yield from (replace(made, samples=(sample,)) for sample in made.samples)

    def check(
        self, row: Row, source: str = "rows", form: Format = Format.LINES, made: RowResult | None = None
    ) -> CheckedRow:
        """What became of a row. `made` is what its conversation gives, where the row does not name it."""
        if row.problem is not None:
            return CheckedRow(source, row.number, row.line, Outcome.BAD, row.problem)
        try:
            ready = ready_row(row.value, self._columns)
        except InputError as error:
            return CheckedRow(source, row.number, row.line, Outcome.BAD, " ".join(str(error).split()))
        trained = None if ready.mask is None else int(ready.mask.sum())
        checked = CheckedRow(
            source, row.number, row.line, tokens=len(ready.ids), trained=trained, padding=ready.padding
        )
        expected = made or self._made(row, ready, source, form)
        if isinstance(expected, str):
            return self._alone(ready, expected, checked)
        if expected.bad is not None:
            said = f"its conversation gives no row: {expected.bad.reason}"
            return replace(checked, outcome=Outcome.BAD, reason=said)
        return self._compared(ready, expected, checked)

    def _made(self, row: Row, ready: ReadyRow, source: str, form: Format) -> RowResult | str:
        """What the row's conversation gives, or why there is none."""
        rest = ready.rest or {}
        if has_conversation(rest, self.tokenizer.settings.columns):
            return self.tokenizer.tokenize(Row(row.number, row.line, dict(rest)), source, form)
        if not (rest.keys() >= _OURS and isinstance(rest["source"], str) and isinstance(rest["row"], int)):
            return "the row holds no conversation and does not say where it is"
        found = self._rows.row(rest["source"], rest["row"])
        if isinstance(found, str):
            return found
        origin, conversation = found
        return self.tokenizer.tokenize(conversation, origin.name, origin.format)

    # -- with a conversation

    def _compared(self, ready: ReadyRow, made: RowResult, checked: CheckedRow) -> CheckedRow:
        expected, asked = self._best(ready, made)
        row = without_padding(ready, self._pad, expected.ids)
        differing = list(hunks(expected.ids, row.ids))
        deviations = self._explainer.explain(expected, row.ids, row.start) if differing else []
        wrong: list[MaskDifference] = []
        moved = 0
        if row.mask is not None:
            wrong = mask_differences(expected, row.ids, row.mask, differing, row.start)
            moved = shift(expected.mask, row.mask) if not differing else 0
            wrong += padding_differences(row.trained_padding)
        return replace(
            checked,
            outcome=_outcome([found.cause for found in deviations], bool(wrong)),
            reason=asked,
            deviations=tuple(deviations),
            mask=tuple(wrong),
            shifted=moved,
            tokens=len(row.ids),
            padding=row.padding,
            expected_tokens=len(expected.ids),
            expected_trained=expected.sample.trained,
        )

    def _best(self, ready: ReadyRow, made: RowResult) -> tuple[Expected, str | None]:
        """The sample that the row says it is, or that it has most in common with."""
        samples = made.samples
        rest = ready.rest or {}
        number = rest.get("sample") if rest.keys() >= _OURS else None
        if isinstance(number, int) and 0 <= number < len(samples):
            return Expected(samples[number]), None
        best = max(samples, key=lambda sample: _likeness(sample.ids, ready.ids))
        said = None
        if isinstance(number, int):
            count = f"{len(samples)} sample{'s' if len(samples) > 1 else ''}"
            said = f"it is sample {number} of its conversation, which gives {count} with these settings"
        return Expected(best), said

    # -- without one

    def _alone(self, ready: ReadyRow, reason: str, checked: CheckedRow) -> CheckedRow:
        size = self.tokenizer.renderer.tokenizer.vocabulary.size
        outside = np.flatnonzero((ready.ids < 0) | (ready.ids >= size))
        if len(outside):
            at = int(outside[0])
            said = f"token {ready.start + at} is {ready.ids[at]}, and the vocabulary has {size:,} ids"
            return replace(checked, outcome=Outcome.BAD, reason=said)
        if ready.mask is None:
            return replace(checked, outcome=Outcome.UNCHECKED, reason=reason)
        problem = self._unreadable(ready)
        if problem is not None:
            said = f"{reason}; its mask cannot be read from the ids either: {problem}"
            return replace(checked, outcome=Outcome.UNCHECKED, reason=said)
        last = self.tokenizer.settings.samples.turns is Turns.LAST
        wrong = read_differences(self.marks, ready.ids, ready.mask, ready.start, last=last)
        wrong += padding_differences(ready.trained_padding)
        said = f"{reason}; its mask was compared with the turns that its ids show"
        outcome = Outcome.MASK if wrong else Outcome.UNCHECKED
        return replace(checked, outcome=outcome, reason=said, mask=tuple(wrong))

    def _unreadable(self, ready: ReadyRow) -> str | None:
        """Why the mask cannot be read from the ids; None where it can."""
        chosen = self.tokenizer.settings.samples
        if chosen.turns is Turns.FLAGGED:
            return "which turns are flagged is not in them"
        if chosen.parts != frozenset(TRAINED_PARTS) or chosen.roles != {"assistant"}:
            return "they do not show parts of turns, or which other roles are trained"
        if self.marks.problem is not None:
            return self.marks.problem
        return None if next(self.marks.turns(ready.ids), None) is not None else "no assistant's turn is found in them"


def _likeness(expected: Any, found: Any) -> tuple[int, int]:
    return common_prefix(expected, found), -abs(len(expected) - len(found))


def _outcome(causes: Sequence[Cause], mask: bool) -> Outcome:
    if not causes:
        return Outcome.MASK if mask else Outcome.SAME
    if mask:
        return Outcome.BOTH
    return Outcome.CUT if set(causes) == {Cause.CUT} else Outcome.IDS
