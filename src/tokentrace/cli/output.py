"""What commands print and write: results, files, notes, progress."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that respects NO_COLOR."""
    from rich.console import Console

    return Console(stderr=stderr, color_system=None if os.environ.get("NO_COLOR") else "auto")


def note(text: str) -> None:
    """Print a remark to stderr."""
    click.secho(text, dim=True, err=True)


def write_file(path: Path, text: str, *, launch: bool = False) -> None:
    """Write a file, and perhaps open it in a browser."""
    path.write_text(text, encoding="utf-8")
    note(f"wrote {path}")
    if launch:
        click.launch(str(path))


def write_page(
    path: Path, result: Any, *, title: str = "", tokenizer: Any = None, launch: bool = False
) -> None:
    """Write a self-contained page."""
    from ..show.page import show

    write_file(path, show(result, title=title, tokenizer=tokenizer).html, launch=launch)


def print_result(value: Any) -> None:
    """Print any result, in colours on a terminal that has them."""
    from ..show.terminal import plain_view, text_view

    console = make_console()
    if console.is_terminal and console.color_system:
        console.print(text_view(value))
    else:
        click.echo(plain_view(value))


def show_report(result: Any, data: Any, options: Mapping[str, Any], **page: Any) -> None:
    """Print a result: with --json its data, with --quiet nothing; with --html, write a page."""
    if options["as_json"]:
        click.echo(json.dumps(data))
    elif not options["quiet"]:
        print_result(result)
    if options["html"] is not None:
        write_page(options["html"], result, **page)


def print_rows(data: dict[str, Any], summary: str, job: SimpleNamespace, longest: int) -> None:
    """Print the summary of a file of rows, or JSON, and a trainer's configuration."""
    from ..data.trainers import find_trainer

    trainer = find_trainer(job.trainer)
    advice = {} if trainer is None else {"advice": trainer.advice_for(job.output, longest)}
    if job.as_json:
        click.echo(json.dumps(data | advice))
    elif not job.quiet:
        click.echo(summary)
        for text in advice.values():
            click.echo(
                click.style(f"  for {job.trainer}:", bold=True) + "\n" + textwrap.indent(text, "    ")
            )


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, unless --quiet."""
    context, console = click.get_current_context(silent=True), make_console(stderr=True)
    quiet = not console.is_terminal or (context is not None and context.params.get("quiet"))
    with contextlib.nullcontext() if quiet else console.status(f"{what} …"):
        yield


class ProgressBars:
    """Progress on stderr: bars on a terminal, elsewhere a line every 15 seconds; none if `quiet`."""

    _EVERY = 15.0

    def __init__(self, *, quiet: bool = False, transient: bool = False, counts: bool = False) -> None:
        from rich import progress as rich

        self._console = make_console(stderr=True)
        self._quiet = quiet
        self._began = self._printed = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bars = rich.Progress(
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn() if counts else rich.TaskProgressColumn(),
            rich.TextColumn("{task.fields[status]}"),
            rich.TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            transient=transient,
            disable=quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(
        self, label: str, done: float, total: float, status: str = "", line: str | None = None
    ) -> None:
        """Update the bar of `label`, or print `line` from time to time."""
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total, status="")
        self._bars.update(self._tasks[label], total=total, completed=done, status=status)
        silent = self._quiet or not self._bars.disable
        if not silent and done < total and time.monotonic() - self._printed >= self._EVERY:
            self._printed = time.monotonic()
            click.echo(line or f"{label}: {done:,.0f} of {total:,.0f}", err=True)
