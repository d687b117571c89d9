"""``tokentrace tokenize``."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..show.visible import counted
from . import command
from .options import (
    OneOf,
    json_option,
    messages_column_option,
    messages_option,
    page_option,
    parse_arguments_option,
    quiet_option,
    ray_option,
    split_option,
    supervision_options,
    template_options,
    trainer_option,
)
from .output import ProgressBars, print_advice, print_result, short_number, trainer_advice, write_page

if TYPE_CHECKING:
    from ..data.job import Finished, Progress
    from ..data.tokenizing import RowResult, TokenizeSettings
    from ..samples.sample import Sample

_REASONS: Final = 5
"""Reasons of rejected rows that the summary tells."""


@command
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The file to write: .parquet or .jsonl.",
)
@trainer_option
@template_options
@supervision_options
@click.option(
    "--lost",
    type=OneOf(["error", "warn", "ignore"]),
    default="error",
    show_default=True,
    help="Rows with text that reaches no token: reject them, keep them with a note, or keep them silently.",
)
@click.option("--max-length", type=click.IntRange(1), metavar="N", help="The most tokens that a row may have.")
@click.option(
    "--overlong",
    type=OneOf(["drop", "turns", "right", "left"]),
    default="drop",
    show_default=True,
    help="What becomes of longer rows: reported and left out, or cut: after whole turns, on the right, on the left.",
)
@click.option(
    "--labels/--no-labels", default=True, help="Without the column of labels, which trainers look for by that name."
)
@messages_column_option
@click.option("--prompt-column", metavar="NAME", help="The column with the prompt, beside one with the completion.")
@click.option("--completion-column", metavar="NAME", help="The column with the completion.")
@click.option("--system-column", metavar="NAME", help="The column with a system prompt.")
@click.option("--tools-column", metavar="NAME", help="The column with tool schemas.")
@messages_option
@parse_arguments_option
@split_option
@click.option(
    "--max-row-bytes", type=click.IntRange(1), default=8 << 20, show_default=True, help="Longer rows are reported."
)
@click.option("-j", "--workers", type=click.IntRange(1), metavar="N", help="Worker processes.  [default: all cores]")
@ray_option
@click.option("--overwrite", is_flag=True, help="Replace an output that already exists.")
@click.option("--stats", is_flag=True, help="Show how long the rows are.")
@click.option("--show", type=click.IntRange(1), metavar="N", help="Show the first N rows; without -o only that.")
@page_option("Show these rows as a page.")
@json_option("Print the summary, and with --stats the statistics, as JSON.")
@quiet_option
@click.pass_context
def tokenize(
    ctx: click.Context,
    /,
    *,
    inputs: tuple[str, ...],
    output: Path | None,
    trainer: str | None,
    workers: int | None,
    ray: str | None,
    split: str | None,
    overwrite: bool,
    stats: bool,
    show: int | None,
    html: Path | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Turn conversations into training rows: ids, an exact loss mask, and where each token came from.

    INPUT is JSON Lines, JSON, Parquet, a folder of them, a name on the hub, or "-" for stdin; .gz files are
    unpacked. Rows have "messages" or "conversations" (OpenAI's, ShareGPT's or Anthropic's
    shape), or "prompt" and "completion"; and perhaps "tools". See docs/rows.md.

    A file that already exists is replaced only with --overwrite, and never by one without rows. There is no default
    tokenizer for a file of rows: "-t pocket" is the embedded toy model.

    Rows that cannot be used go to OUT.bad.jsonl with their line and the reason, and the run goes on. The output has its
    name only when it is whole: a run that was interrupted writes nothing. The result is the same for any number of
    workers.

    The exit code is 0 if every row was used, 1 if some were not, 2 on errors.

    \b
    Examples:
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --stats
      tokentrace tokenize chats.jsonl -t ./Qwen3-8B --show 3
      tokentrace tokenize data/*.parquet -o rows.parquet -t ./Qwen3-8B --past expand --max-length 32768
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --turns last --parts content,stop
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --for axolotl
      tokentrace tokenize big/ -o /shared/rows.parquet -t /shared/Qwen3-8B --ray
    """
    from ..data.tokenizing import TokenizeSettings
    from .inputs import chosen_tokenizer, row_settings

    if output is None and show is None and html is None:
        raise click.UsageError("name the file to write with -o, or look at rows with --show")
    if output is None and (stats or as_json or ray is not None):
        raise click.UsageError("--stats, --json and --ray are about the file that -o names")
    if trainer is not None and (output is None or stats):
        what = "it has no columns for --stats" if stats else "name it with -o"
        raise click.UsageError(f"--for {trainer} is about the file that is written: {what}")
    tokenizer = options.pop("tokenizer")
    if output is not None and tokenizer is None:
        raise click.UsageError("rows are for one model: name it with -t (-t pocket is the embedded toy model)")
    name = chosen_tokenizer(tokenizer)
    job = TokenizeSettings.read(row_settings(options), name)
    bad = 0
    if output is not None:
        how = {"workers": workers, "split": split, "overwrite": overwrite, "trainer": trainer}
        try:
            finished, seconds = _run(inputs, output, job, ray, how, quiet)
        except KeyboardInterrupt:
            click.secho("\ninterrupted: nothing was written", fg="yellow", err=True)
            ctx.exit(130)
        bad = finished.counts.bad_rows + finished.counts.left_out
        if as_json:
            summary = _as_json(finished, seconds, output if stats else None)
            if trainer is not None:
                summary["advice"] = trainer_advice(trainer, finished.output, finished.longest)
            click.echo(json.dumps(summary))
        elif not quiet:
            _summarize(finished, seconds)
            if trainer is not None:
                print_advice(trainer, finished.output, finished.longest)
        if stats and not as_json:
            from ..data.statistics import statistics

            click.echo()
            print_result(statistics(output))
    if show is not None or html is not None:
        _show_rows(inputs, split, job, show or 10, html)
    ctx.exit(1 if bad else 0)


def _run(
    inputs: tuple[str, ...],
    output: Path,
    job: TokenizeSettings,
    ray: str | None,
    how: dict[str, Any],
    quiet: bool,
) -> tuple[Finished, float]:
    from ..data.job import tokenize_files

    began = time.monotonic()
    with _Display(quiet=quiet) as display:
        if ray is not None:
            from ..data.cluster import tokenize_on_ray

            finished = tokenize_on_ray(inputs, output, job, address=ray or None, progress=display.update, **how)
        else:
            finished = tokenize_files(inputs, output, job, progress=display.update, **how)
    return finished, time.monotonic() - began


class _Display(ProgressBars):
    """Progress of a run, with rate and time left."""

    def update(self, progress: Progress) -> None:
        """Show how far the run is."""
        counts, seconds = progress.counts, max(time.monotonic() - self._began, 1e-9)
        bad = f", {counts.bad_rows:,} bad" if counts.bad_rows else ""
        rates = f"{counts.rows / seconds:,.0f} rows/s · {short_number(counts.tokens / seconds)} tokens/s"
        summary = f"{counts.rows:,} rows{bad} · {rates}"
        left = seconds * (progress.total - progress.done) / progress.done if progress.done else 0
        share = 100 * progress.done / max(progress.total, 1)
        line = f"{share:.0f} % · {summary} · {left:.0f} s left"
        self.show("tokenizing", progress.done, progress.total, summary, line)


def _as_json(finished: Finished, seconds: float, stats: Path | None) -> dict[str, Any]:
    """The summary of a run, and the statistics of a file."""
    from ..data.statistics import statistics

    bad_rows = None if finished.bad_rows is None else str(finished.bad_rows)
    summary = {"output": str(finished.output), "bad_rows_file": bad_rows, **finished.counts.described()}
    summary |= {"longest": finished.longest, "seconds": seconds}
    if stats is not None:
        read = statistics(stats)
        lengths = {"lengths": read.lengths, "trained_lengths": read.trained_lengths}
        summary["statistics"] = {name: {str(at): one for at, one in of.items()} for name, of in lengths.items()}
    return summary


def _summarize(finished: Finished, seconds: float) -> None:
    counts = finished.counts
    share = 100 * counts.trained / counts.tokens if counts.tokens else 0
    click.secho(f"wrote {finished.output}", bold=True)
    made = f"{counted(counts.samples, 'sample')} of {counted(counts.rows, 'row')}"
    rate = f"{seconds:.1f} s, {short_number(counts.tokens / max(seconds, 1e-9))} tokens/s"
    click.echo(f"  {made} · {counts.tokens:,} tokens, {counts.trained:,} trained ({share:.1f} %) · {rate}")
    for note, samples in sorted(counts.notes.items(), key=lambda item: (-item[1], item[0])):
        click.secho(f"  {counted(samples, 'sample')}: {_as_options(note)}", fg="yellow")
    if finished.bad_rows is not None:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.bad.most_common())
        more = f"; {counted(counts.left_out, 'sample')} of other rows left out" if counts.left_out else ""
        rows = counted(counts.bad_rows, "row")
        click.secho(f"  {rows} gave no sample ({kinds or 'none'}){more}: see {finished.bad_rows}", fg="red")
        for reason, count, place in _reasons(finished.bad_rows):
            click.echo(f"    {count:,} × {_as_options(reason)} (first: {place})")


def _reasons(bad_rows: Path) -> list[tuple[str, int, str]]:
    """The most frequent reasons of rejected rows: the first of its kind, how many there are, and where that one is.

    Reasons that differ in numbers alone, or in what is quoted, are one.
    """
    counts: Counter[str] = Counter()
    first: dict[str, tuple[str, str]] = {}
    with bad_rows.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", row["reason"])
            counts[kind] += 1
            first.setdefault(kind, (row["reason"], f"{row['source']}, row {row['row']}"))
    return [(first[kind][0], count, first[kind][1]) for kind, count in counts.most_common(_REASONS)]


def _as_options(note: str) -> str:
    """A note of the library, as the command line says it."""
    for name in ("past", "turns"):
        note = note.replace(f"{name}='", f"--{name} '")
    note = re.sub(
        r"\b([Ss]et) (\w+)=(True|False)", lambda found: f"{found[1]} --kwargs {found[2]}={found[3].lower()}", note
    )
    return note.replace("final_stop=True", "--final-stop")


def _show_rows(
    inputs: tuple[str, ...], split: str | None, job: TokenizeSettings, count: int, html: Path | None
) -> None:
    """Show the first samples, and report rows before them that give none."""
    import tempfile

    from ..data.rows import read_rows
    from ..data.sources import find_sources
    from ..data.tokenizing import RowTokenizer

    tokenizer = RowTokenizer(job)
    with tempfile.TemporaryDirectory(prefix="tokentrace-") as folder:
        sources = find_sources(inputs, Path(folder), split=split)
        rows = (
            _titled(source.name, tokenizer.tokenize(row, source.name, source.format))
            for source in sources
            for row in read_rows(source, row_bytes=job.row_bytes)
        )
        samples = list(itertools.islice(itertools.chain.from_iterable(rows), count))
    if html is not None:
        write_page(html, samples, title=f"{len(samples)} rows of {Path(inputs[0]).name}")
    else:
        print_result(samples, fold=True)


def _titled(name: str, result: RowResult) -> list[tuple[str, Sample]]:
    """Return a row's samples with titles; report a bad row."""
    if result.bad is not None:
        click.secho(f"{name}, row {result.bad.row}: {result.bad.kind}: {result.bad.reason}", fg="red", err=True)
    titled = []
    for at, sample in enumerate(result.samples):
        which = f", sample {at + 1} of {len(result.samples)}" if len(result.samples) > 1 else ""
        title = f"{name}, row {result.row.number}{which}: {len(sample):,} tokens, {sample.trained:,} trained"
        titled.append((title, sample))
    return titled
