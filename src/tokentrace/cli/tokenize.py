"""``tokentrace tokenize``."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import counted
from . import debug_option, show_view, supervision_options, template_options

if TYPE_CHECKING:
    from ..data.job import Finished, Progress
    from ..data.tokenizing import Tokenized, TokenizeSettings


@click.command(short_help="Turn files of conversations into training rows.")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write: .parquet, .jsonl or .jsonl.gz.",
)
@template_options
@supervision_options
@click.option(
    "--lost",
    type=click.Choice(["error", "warn", "ignore"]),
    default="error",
    show_default=True,
    help="Rows of which some text reaches no token: bad rows, rows with a note, or nothing said.",
)
@click.option("--max-length", type=click.IntRange(1), metavar="N", help="The most tokens that a row may have.")
@click.option(
    "--overlong",
    type=click.Choice(["drop", "turns", "right", "left"]),
    default="drop",
    show_default=True,
    help="What becomes of longer rows: reported and left out, or cut: after whole turns, on the right, on the left.",
)
@click.option("--labels", is_flag=True, help="Write a column of labels too (-100 where there is no loss).")
@click.option("--messages-column", metavar="NAME", help="The column with the messages.  [default: found out]")
@click.option("--prompt-column", metavar="NAME", help="The column with the prompt, beside one with the completion.")
@click.option("--completion-column", metavar="NAME", help="The column with the completion.")
@click.option("--system-column", metavar="NAME", help="The column with a system prompt.")
@click.option("--tools-column", metavar="NAME", help="The column with tool schemas.")
@click.option(
    "--messages",
    type=click.Choice(["adapt", "as_given"]),
    default="adapt",
    show_default=True,
    help="Give the template the form of messages that it reads, or leave them as they are.",
)
@click.option("--parse-arguments", is_flag=True, help="Parse arguments that are JSON strings, as inference servers do.")
@click.option("--split", metavar="NAME", help="The split of a dataset.  [default: train, or the only one]")
@click.option(
    "--max-row-bytes", type=click.IntRange(1), default=8 << 20, show_default=True, help="Longer rows are reported."
)
@click.option("-j", "--workers", type=click.IntRange(1), metavar="N", help="Worker processes.  [default: all cores]")
@click.option(
    "--ray", is_flag=False, flag_value="", metavar="[ADDRESS]", help="Work on a Ray cluster (a local one if none)."
)
@click.option("--overwrite", is_flag=True, help="Replace an output that is there already.")
@click.option("--restart", is_flag=True, help="Discard what an unfinished run left behind instead of going on with it.")
@click.option("--stats", is_flag=True, help="Show lengths and a histogram.")
@click.option("--show", type=click.IntRange(1), metavar="N", help="Show the first N rows; without -o only that.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Show these rows as a page."
)
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary.")
@debug_option
@click.pass_context
def tokenize(
    ctx: click.Context,
    /,
    *,
    inputs: tuple[str, ...],
    output: Path | None,
    workers: int | None,
    ray: str | None,
    split: str | None,
    overwrite: bool,
    restart: bool,
    stats: bool,
    show: int | None,
    html: Path | None,
    quiet: bool,
    **settings: Any,
) -> None:
    """Turn conversations into training rows: ids, an exact loss mask, and where each token came from.

    INPUT is JSON Lines, JSON, Parquet, a folder of them, a dataset saved to disk, a name on the hub, or "-" for
    stdin; packed files are unpacked. Rows have "messages" or "conversations" (OpenAI's, ShareGPT's or Anthropic's
    shape), or "prompt" and "completion"; and perhaps "tools". See docs/rows.md.

    Rows that cannot be used go to OUT.bad.jsonl with their line and the reason, and the run goes on. A run that was
    interrupted goes on where it stopped. The result is the same for any number of workers.

    The exit code is 0 if every row was used, 1 if some were not, 2 on errors.

    \b
    Examples:
      tokentrace tokenize chats.jsonl -o rows.parquet -t ./Qwen3-8B --stats
      tokentrace tokenize chats.jsonl -t ./Qwen3-8B --show 3
      tokentrace tokenize data/*.parquet -o rows.parquet -t ./Qwen3-8B --past expand --max-length 32768
      tokentrace tokenize chats.jsonl -o rows.parquet --turns last --parts content,tool_calls,stop
      tokentrace tokenize big/ -o /shared/rows.parquet -t /shared/Qwen3-8B --ray
    """
    from ..errors import InputError

    if output is None and show is None and html is None:
        raise click.UsageError("name the file to write with -o, or look at rows with --show")
    if output is None and (stats or ray is not None):
        raise click.UsageError("--stats and --ray are about the file that -o names")
    job = tokenize_settings(**settings)
    bad = 0
    if output is not None:
        options = {"workers": workers, "split": split, "overwrite": overwrite, "restart": restart}
        try:
            finished, seconds = _run(inputs, output, job, ray, options, quiet)
        except InputError as error:
            raise _with_options(error) from error
        except KeyboardInterrupt:
            click.secho("\ninterrupted: what is done is kept; the same command goes on with it", fg="yellow", err=True)
            ctx.exit(130)
        bad = finished.counts.bad_rows + finished.counts.left_out
        if not quiet:
            _summarize(finished, seconds)
        if stats:
            _show_statistics(output)
    if show is not None or html is not None:
        _show_rows(inputs, split, job, show or 10, html)
    ctx.exit(1 if bad else 0)


def tokenize_settings(
    *,
    tokenizer: str | None,
    tools: str | None,
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    control_tokens: str,
    use_patched: bool,
    turns: str,
    parts: str,
    roles: str,
    past: str | None,
    final_stop: bool,
    lost: str = "error",
    max_length: int | None = None,
    overlong: str = "drop",
    labels: bool = False,
    messages_column: str | None = None,
    prompt_column: str | None = None,
    completion_column: str | None = None,
    system_column: str | None = None,
    tools_column: str | None = None,
    messages: str = "adapt",
    parse_arguments: bool = False,
    max_row_bytes: int = 8 << 20,
) -> TokenizeSettings:
    """What the options say, as settings."""
    from ..conversation.messages import check_tools
    from ..data.conversations import Columns
    from ..data.tokenizing import TokenizeSettings
    from ..pocket import POCKET
    from ..samples.supervised import Supervision
    from ..samples.truncation import Overlong
    from .inputs import parse_kwargs, read_tools
    from .render import _template

    if tokenizer is None:
        click.secho("no --tokenizer given: using the embedded pocket model", dim=True, err=True)
    given_tools = check_tools(read_tools(tools)) if tools else None
    return TokenizeSettings(
        tokenizer=str(POCKET) if tokenizer is None else tokenizer,
        renderer=renderer,
        chat_template=_template(chat_template),
        template_kwargs=parse_kwargs(kwargs),
        control_tokens=control_tokens,
        messages=messages,
        lost=lost,
        use_patched=use_patched,
        supervision=Supervision.of(
            turns=turns, parts=_listed(parts), roles=_listed(roles), past=past, final_stop=final_stop
        ),
        columns=Columns(messages_column, tools_column, system_column, prompt_column, completion_column),
        tools=None if given_tools is None else tuple(given_tools),
        parse_arguments=parse_arguments,
        max_length=max_length,
        overlong=Overlong(overlong),
        row_bytes=max_row_bytes,
        labels=labels,
    )


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _with_options(error: Exception) -> Exception:
    """The error with the options that help."""
    from ..errors import InputError

    said = str(error)
    said = said.replace("or overwrite it", "or replace it with --overwrite")
    return InputError(said.replace("restart to discard it", "--restart discards it"))


def _run(
    inputs: tuple[str, ...],
    output: Path,
    job: TokenizeSettings,
    ray: str | None,
    options: dict[str, Any],
    quiet: bool,
) -> tuple[Finished, float]:
    from ..data.job import tokenize_files

    began = time.monotonic()
    with _Display(quiet) as display:
        if ray is not None:
            from ..data.cluster import tokenize_on_ray

            finished = tokenize_on_ray(inputs, output, job, address=ray or None, progress=display.update, **options)
        else:
            finished = tokenize_files(inputs, output, job, progress=display.update, **options)
    return finished, time.monotonic() - began


class _Display:
    """Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

    _EVERY = 15.0

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._quiet = quiet
        self._bar: Any = None
        self._began = self._said = time.monotonic()
        self._before = (0, 0, 0)
        self._is_reading = False

    def __enter__(self) -> _Display:
        if not self._quiet and self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=None, said="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != "tokenizing":
            self._reading(progress, now)
            return
        if self._is_reading:
            self._is_reading, self._began = False, now
        counts = progress.counts
        if progress.resumed:  # what was there before says nothing about how fast this goes
            self._before = (progress.done, counts.rows, counts.tokens)
        seconds = max(now - self._began, 1e-9)
        rows, tokens = (counts.rows - self._before[1]) / seconds, (counts.tokens - self._before[2]) / seconds
        bad = f", {counts.bad_rows:,} bad" if counts.bad_rows else ""
        said = f"{counts.rows:,} rows{bad} · {rows:,.0f} rows/s · {_short(tokens)} tokens/s"
        if self._bar is not None:
            self._bar.update(
                self._task, description=str(progress.stage), total=progress.total, completed=progress.done, said=said
            )
        elif not self._quiet and now - self._said >= self._EVERY:
            self._said = now
            made = progress.done - self._before[0]
            left = seconds * (progress.total - progress.done) / made if made else 0
            share = 100 * progress.done / max(progress.total, 1)
            click.echo(f"{share:.0f} % · {said} · {left:.0f} s left", err=True)

    def _reading(self, progress: Progress, now: float) -> None:
        """The input is read once to tell its content; on many gigabytes that takes a while."""
        self._is_reading = True
        said = f"{_short(progress.done)}B of {_short(progress.total)}B"
        if self._bar is not None:
            self._bar.update(
                self._task, description=str(progress.stage), total=progress.total, completed=progress.done, said=said
            )
        elif not self._quiet and now - self._said >= self._EVERY:
            self._said = now
            click.echo(f"{progress.stage}: {said}", err=True)


def _short(number: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


def _summarize(finished: Finished, seconds: float) -> None:
    counts = finished.counts
    share = 100 * counts.trained / counts.tokens if counts.tokens else 0
    click.secho(f"wrote {finished.output}", bold=True)
    made = f"{counted(counts.samples, 'sample')} of {counted(counts.rows, 'row')}"
    rate = f"{seconds:.1f} s, {_short(counts.tokens / max(seconds, 1e-9))} tokens/s"
    click.echo(f"  {made} · {counts.tokens:,} tokens, {counts.trained:,} trained ({share:.1f} %) · {rate}")
    if finished.resumed_chunks:
        click.echo(f"  {finished.resumed_chunks} of {finished.chunks} chunks were done by an earlier run")
    for note, samples in sorted(counts.notes.items(), key=lambda item: (-item[1], item[0])):
        click.secho(f"  {counted(samples, 'sample')}: {_as_options(note)}", fg="yellow")
    if finished.bad_rows is not None:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.bad.most_common())
        more = f"; {counts.left_out:,} samples of other rows left out" if counts.left_out else ""
        rows = counted(counts.bad_rows, "row")
        click.secho(f"  {rows} gave no sample ({kinds or 'none'}){more}: see {finished.bad_rows}", fg="red")


def _as_options(note: str) -> str:
    """A note of the library, as the command line says it."""
    for name in ("past", "turns"):
        note = note.replace(f"{name}='", f"--{name} '")
    note = re.sub(
        r"\b([Ss]et) (\w+)=(True|False)", lambda found: f"{found[1]} --kwargs {found[2]}={found[3].lower()}", note
    )
    return note.replace("final_stop=True", "--final-stop")


def _show_statistics(path: Path) -> None:
    from rich.console import Console

    from ..data.statistics import statistics
    from ..show.rows import statistics_text

    click.echo()
    Console().print(statistics_text(statistics(path)))


def _show_rows(
    inputs: tuple[str, ...], split: str | None, job: TokenizeSettings, count: int, html: Path | None
) -> None:
    """The first rows that give samples, and what is wrong with those before that do not."""
    import tempfile

    from ..data.sources import find_sources, plan, read_rows
    from ..data.tokenizing import RowTokenizer
    from ..show.rows import rows_page, rows_plain, rows_text

    tokenizer = RowTokenizer(job)
    with tempfile.TemporaryDirectory(prefix="tokentrace-") as folder:
        sources = find_sources(inputs, Path(folder), split=split)
        rows = (
            (chunk.source.name, tokenizer.tokenize(row, chunk.source.name, chunk.source.format))
            for chunk in plan(sources, row_bytes=job.row_bytes)
            for row in read_rows(chunk, row_bytes=job.row_bytes)
        )
        shown = list(itertools.islice(itertools.chain.from_iterable(_shown(name, one) for name, one in rows), count))
    if html is not None:
        html.write_text(rows_page(shown, f"{len(shown)} rows of {Path(inputs[0]).name}"), encoding="utf-8")
        click.secho(f"wrote {html}", dim=True, err=True)
        return
    show_view(rows_text, rows_plain, shown, fold=True)


def _shown(name: str, one: Tokenized) -> list[tuple[str, Any]]:
    """A row's samples with titles; a bad row is said at once."""
    if one.bad is not None:
        click.secho(f"{name}, row {one.bad.row}: {one.bad.kind}: {one.bad.reason}", fg="red", err=True)
    out = []
    for at, (sample, made) in enumerate(zip(one.samples, one.made, strict=True)):
        which = f", sample {at + 1} of {len(one.samples)}" if len(one.samples) > 1 else ""
        start, stop = _range(sample.ids, made.rendered.ids)
        title = f"{name}, row {one.row.number}{which}: {len(sample):,} tokens, {sample.trained:,} trained"
        rendered = made.rendered.with_mask(_placed(sample.mask, start, len(made.rendered)))
        if (start, stop) != (0, len(made.rendered)):
            title += f" (tokens {start} to {stop - 1} of what is shown)"
        rendered.notes = list(sample.notes)
        out.append((title, rendered))
    return out


def _range(ids: Any, whole: Any) -> tuple[int, int]:
    """Where a sample that was cut stands in what it was cut from."""
    import numpy as np

    length = min(len(ids), len(whole))
    if np.array_equal(ids[:length], whole[:length]):
        return 0, length
    return len(whole) - length, len(whole)


def _placed(mask: Any, start: int, length: int) -> Any:
    import numpy as np

    placed = np.zeros(length, np.bool_)
    placed[start : start + len(mask)] = mask[: length - start]
    return placed
