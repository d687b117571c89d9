"""``tokentrace tokenize``."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ..show.visible import counted
from . import command, options
from .output import ProgressBars, note, print_result, print_rows, write_page

if TYPE_CHECKING:
    from ..data.job import Finished
    from ..data.tokenizing import Counts, TokenizeSettings
    from ..samples.sample import Sample

_OF_JOB = (
    *("tokenizer", "output", "trainer", "workers", "ray", "split", "overwrite"),
    *("stats", "show", "html", "as_json", "quiet"),
)


@command
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.rows_option()
@options.trainer_option
@options.template_options
@options.supervision_options
@options.one_of(
    "--lost",
    ["error", "warn", "ignore"],
    "Rows with text that reaches no token: reject them, note it, or keep them silently.",
    "error",
)
@options.number("--max-length", text="The maximum number of tokens in a row.")
@options.one_of(
    "--overlong",
    ["drop", "turns", "right", "left"],
    "Longer rows: leave them out, or cut them after whole turns, on the right, or on the left.",
    "drop",
)
@click.option("--labels/--no-labels", default=True, help="Write the column of labels that trainers read.")
@options.messages_column_option
@options.value("--prompt-column", "NAME", "The column of the prompt; the completion is in another.")
@options.value("--completion-column", "NAME", "The column of the completion.")
@options.value("--system-column", "NAME", "The column of a system prompt.")
@options.value("--tools-column", "NAME", "The column of tool schemas.")
@options.messages_option
@options.parse_arguments_option
@options.split_option
@options.number("-j", "--workers", text="Processes.  [default: all cores, fewer for small inputs]")
@options.ray_option
@options.overwrite_option
@options.flag("--stats", text="Show how long the rows are.")
@options.number("--show", text="Show the first N rows; without -o only that.")
@options.page_option("Show these rows as a page.")
@options.json_option("Print the summary, and with --stats the statistics, as JSON.")
@options.quiet_option
@click.pass_context
def tokenize(ctx: click.Context, /, *, inputs: tuple[str, ...], **chosen: Any) -> None:
    """Turn conversations into training rows: ids, an exact loss mask, and where each token came from.

    INPUT is JSON Lines, JSON, Parquet, a folder of them, a name on the hub, or "-" for stdin; .gz files are
    unpacked. Rows have "messages" or "conversations" (OpenAI's, ShareGPT's or Anthropic's shape), or "prompt" and
    "completion"; and perhaps "tools". See docs/rows.md.

    An existing file is replaced only with --overwrite, and never by one without rows. Rows are for one model, so
    -o needs -t; the default is for --show.

    Unusable rows go to OUT.bad.jsonl with their line and the reason. An interrupted run writes nothing. The
    result is the same for any number of workers.

    The exit code is 0 if every row was used, 1 if some were not, 2 on errors.

    \b
    Examples:
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --stats
      tokentrace tokenize chats.jsonl -t ./Qwen3-8B --show 3
      tokentrace tokenize data/*.parquet -o rows.parquet -t ./Qwen3-8B --past expand --max-length 32768
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --for axolotl
      tokentrace tokenize big/ -o /shared/rows.parquet -t /shared/Qwen3-8B --ray
    """
    from ..data.tokenizing import TokenizeSettings
    from .inputs import chosen_tokenizer, row_settings

    job = SimpleNamespace(inputs=inputs, **{name: chosen.pop(name) for name in _OF_JOB})
    if job.output is None and job.show is None and job.html is None:
        raise click.UsageError("name the file to write with -o, or look at rows with --show")
    if job.output is None and (job.stats or job.as_json or job.trainer is not None or job.ray is not None):
        raise click.UsageError("--stats, --json, --for and --ray need a file to write: name it with -o")
    if job.output is not None and job.tokenizer is None:
        raise click.UsageError("rows are for one model: name it with -t (pocket: the embedded toy model)")
    settings = TokenizeSettings.read(row_settings(chosen), chosen_tokenizer(job.tokenizer))
    try:
        bad = 0 if job.output is None else _write(job, settings)
    except KeyboardInterrupt:
        click.secho("\ninterrupted: nothing was written", fg="yellow", err=True)
        ctx.exit(130)
    if job.show is not None or job.html is not None:
        samples = list(itertools.islice(_samples(job, settings), job.show or 10))
        if not samples:
            note("there is no row to show")
        elif job.html is not None:
            write_page(job.html, samples, title=f"{counted(len(samples), 'row')} of {Path(inputs[0]).name}")
        else:
            print_result(samples)
    ctx.exit(1 if bad else 0)


def _write(job: SimpleNamespace, settings: TokenizeSettings) -> int:
    from ..data.job import tokenize_files

    how = {name: getattr(job, name) for name in ("workers", "split", "overwrite", "trainer", "ray")}
    began = time.monotonic()
    with _Display(quiet=job.quiet) as display:
        finished = tokenize_files(job.inputs, job.output, settings, progress=display.update, **how)
    seconds, bad = time.monotonic() - began, finished.bad_rows
    data: dict[str, Any] = {
        "output": str(finished.output),
        "bad_rows_file": None if bad is None else str(bad),
    }
    data |= {**finished.counts.described(), "longest": finished.longest, "seconds": seconds}
    if job.stats:
        numbers = finished.quantiles()
        data["statistics"] = {"lengths": numbers["tokens"], "trained_lengths": numbers["trained"]}
    print_rows(data, "\n".join(_summary(finished, seconds)), job, finished.longest)
    if job.stats and not job.as_json:
        print_result(finished)
    return finished.counts.bad.total() + finished.counts.left_out


class _Display(ProgressBars):
    def update(self, counts: Counts, done: int, total: int) -> None:
        seconds, count = max(time.monotonic() - self._began, 1e-9), counts.bad.total()
        bad = f", {count:,} bad" if count else ""
        rates = f"{counts.rows / seconds:,.0f} rows/s · {counts.tokens / seconds:,.0f} tokens/s"
        status = f"{counted(counts.rows, 'row')}{bad} · {rates}"
        left = seconds * (total - done) / done if done else 0
        line = f"{100 * done / max(total, 1):.0f} % · {status} · {left:.0f} s left"
        self.show("tokenizing", done, total, status, line)


def _summary(finished: Finished, seconds: float) -> Iterator[str]:
    counts = finished.counts
    share = 100 * counts.trained / max(counts.tokens, 1)
    yield click.style(f"wrote {finished.output}", bold=True)
    rows = f"{counted(counts.samples, 'sample')} of {counted(counts.rows, 'row')}"
    rate = f"{seconds:.1f} s, {counts.tokens / max(seconds, 1e-9):,.0f} tokens/s"
    yield f"  {rows} · {counted(counts.tokens)}, {counts.trained:,} trained ({share:.1f} %) · {rate}"
    for text, samples in sorted(counts.notes.items(), key=lambda item: (-item[1], item[0])):
        words = re.sub(r"\b(\w+)='(\w+)'", lambda match: f"--{match[1].replace('_', '-')} {match[2]}", text)
        yield click.style(f"  {counted(samples, 'sample')}: {words}", fg="yellow")
    if finished.bad_rows is None:
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.bad.most_common()) or "none"
    more = f"; {counted(counts.left_out, 'sample')} of other rows left out" if counts.left_out else ""
    bad = f"{counted(counts.bad.total(), 'row')} gave no sample ({kinds}){more}"
    yield click.style(f"  {bad}: see {finished.bad_rows}", fg="red")
    # the five most frequent reasons, without numbers and quotes
    alike: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, finished.bad_rows.read_text(encoding="utf-8").splitlines()):
        alike.setdefault(re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", row["reason"]), []).append(row)
    for group in sorted(alike.values(), key=len, reverse=True)[:5]:
        yield f"    {len(group):,} × {group[0]['reason']} (first: {group[0]['source']}, row {group[0]['row']})"


def _samples(job: SimpleNamespace, settings: TokenizeSettings) -> Iterator[tuple[str, Sample]]:
    from ..data.sources import find_sources, read_rows
    from ..data.tokenizing import RowTokenizer

    tokenizer, sources = RowTokenizer(settings), find_sources(job.inputs, split=job.split)
    for row in itertools.chain.from_iterable(map(read_rows, sources)):
        result, place = tokenizer.tokenize(row), f"{row.source}, row {row.number}"
        if result.bad is not None:
            click.secho(f"{place}: {result.bad.kind}: {result.bad.reason}", fg="red", err=True)
        for at, sample in enumerate(result.samples, 1):
            which = f", sample {at} of {len(result.samples)}" if len(result.samples) > 1 else ""
            yield f"{place}{which}: {counted(len(sample))}, {sample.trained:,} trained", sample
