"""What commands print and write: views, files, notes, progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID


def note(text: str) -> None:
    """Something to know that is not the result: on stderr."""
    click.secho(text, dim=True, err=True)


def write_file(path: Path, text: str, *, launch: bool = False) -> None:
    """Write a result to a file, say so, and perhaps show it in a browser."""
    path.write_text(text, encoding="utf-8")
    note(f"wrote {path}")
    if launch:
        click.launch(str(path))


def write_page(path: Path, result: Any, *, title: str = "", tokenizer: Any = None, launch: bool = False) -> None:
    """Write a result as a page that needs nothing but itself."""
    from ..show.viewing import html_page

    write_file(path, html_page(result, title, tokenizer=tokenizer), launch=launch)


def show_advice(trainer: str, path: Path, longest: int) -> None:
    """Print what to write into a trainer's configuration to train on a file."""
    from ..data.trainers import find_trainer

    target = find_trainer(trainer)
    click.secho(f"  for {target.title}:", bold=True)
    click.echo("".join(f"    {line}\n" for line in target.advised(path, longest).splitlines()), nl=False)


def show_view(
    coloured: Callable[..., Any], plain: Callable[..., str], shown: Any, *, fold: bool = False, **options: Any
) -> None:
    """Print a view: in colours where the terminal has them, else as plain lines. `fold` breaks long lines."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and not console.no_color and console.color_system:
        console.print(coloured(shown, **options), soft_wrap=not fold)
    else:
        click.echo(plain(shown, **options))


def short_number(number: float) -> str:
    """A number with a suffix.

    >>> short_number(950), short_number(1_234_000)
    ('950', '1.2M')
    """
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


class ProgressBars:
    """Progress on stderr: on a terminal a bar for each label, elsewhere a line now and then; nothing if `quiet`."""

    _EVERY = 15.0
    """Seconds between two lines."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        transient: bool = False,
        counts: bool = False,
        columns: Sequence[ProgressColumn] = (),
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as TimeColumn

        self._console = Console(stderr=True)
        self._quiet = quiet
        self._began = self._said = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if not quiet and self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn() if counts else TaskProgressColumn(),
                TextColumn("{task.fields[said]}"),
                *columns,
                TimeColumn(elapsed_when_finished=True),
                console=self._console,
                transient=transient,
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, label: str, done: float, total: float, said: str = "", line: str | None = None) -> None:
        """How far something is: a bar with `said` beside it, or `line` if it is time for one."""
        if self._bars is not None:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=total, said="")
            self._bars.update(self._tasks[label], total=total, completed=done, said=said)
        elif line is not None and not self._quiet and time.monotonic() - self._said >= self._EVERY:
            self._said = time.monotonic()
            click.echo(line, err=True)
