"""What commands print and write: views, files, notes, progress."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn, TaskID

SOON: Final = 2.0
"""Seconds that anything may take without a word."""


def is_plain() -> bool:
    """Whether colours and other styles are not wanted: https://no-color.org."""
    return bool(os.environ.get("NO_COLOR"))


def make_console(*, stderr: bool = False) -> Console:
    """A console of rich's: every view and every bar is printed by one of these."""
    from rich.console import Console

    return Console(stderr=stderr, color_system=None if is_plain() else "auto")


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
    from ..show.page import show

    write_file(path, show(result, title=title, tokenizer=tokenizer).html, launch=launch)


def show_advice(trainer: str, path: Path, longest: int) -> None:
    """Print what to write into a trainer's configuration to train on a file."""
    from ..data.trainers import find_trainer

    target = find_trainer(trainer)
    click.secho(f"  for {target.title}:", bold=True)
    click.echo("".join(f"    {line}\n" for line in target.advised(path, longest).splitlines()), nl=False)


def advice_json(trainer: str | None, path: Path, longest: int) -> dict[str, str]:
    """The same for JSON; nothing where no trainer is named."""
    from ..data.trainers import find_trainer

    return {} if trainer is None else {"advice": find_trainer(trainer).advised(path, longest)}


def print_result(value: Any, *, fold: bool = False) -> None:
    """Print any result: in colours on a terminal that has them, else as plain lines. `fold` breaks long lines."""
    from ..show.terminal import plain_view, text_view

    show_view(text_view, plain_view, value, fold=fold)


def show_view(
    coloured: Callable[..., Any], plain: Callable[..., str], value: Any, *, fold: bool = False, **options: Any
) -> None:
    """Print a view: in colours on a terminal that has them, else as plain lines. `fold` breaks long lines."""
    console = make_console()
    if console.is_terminal and console.color_system:
        console.print(coloured(value, **options), soft_wrap=not fold)
    else:
        click.echo(plain(value, **options))


def short_number(number: float) -> str:
    """A number with a suffix.

    >>> short_number(950), short_number(1_234_000)
    ('950', '1.2M')
    """
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Say on stderr that something is under way, if it takes a while: on a terminal as long as it does."""
    context = click.get_current_context(silent=True)
    if context is not None and context.params.get("quiet"):
        yield
        return
    with _Patience(what):
        yield


class _Patience:
    """Speaks up when something has not ended soon."""

    def __init__(self, what: str) -> None:
        self._console = make_console(stderr=True)
        self._what, self._status = what, self._console.status(f"{what} …")
        self._lock, self._ended = threading.Lock(), False
        self._timer = threading.Timer(SOON, self._speak)
        self._timer.daemon = True

    def _speak(self) -> None:
        with self._lock:
            if self._ended:
                return
            if self._console.is_terminal:
                self._status.start()
            else:
                click.echo(f"{self._what} …", err=True)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            self._timer.cancel()
            self._status.stop()


class ProgressBars:
    """Progress on stderr: on a terminal a bar for each label, elsewhere a line now and then; nothing if `quiet`.

    What comes before the first thing that is shown, loading most of all, is said to be under way if it takes long.
    """

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
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as TimeColumn

        self._console = make_console(stderr=True)
        self._quiet = quiet
        self._began = time.monotonic()
        self._said = self._began - max(0.0, self._EVERY - SOON)
        self._loading = None if quiet else _Patience("loading")
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
        if self._loading is not None:
            self._loading.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._loaded()
        if self._bars is not None:
            self._bars.stop()

    def _loaded(self) -> None:
        if self._loading is not None:
            self._loading.__exit__()
            self._loading = None
            if self._bars is not None:
                self._bars.start()

    def show(self, label: str, done: float, total: float, said: str = "", line: str | None = None) -> None:
        """How far something is: a bar with `said` beside it, or a line if it is time for one."""
        self._loaded()
        if self._bars is not None:
            if label not in self._tasks:
                self._tasks[label] = self._bars.add_task(label, total=total, said="")
            self._bars.update(self._tasks[label], total=total, completed=done, said=said)
        elif not self._quiet and done < total and time.monotonic() - self._said >= self._EVERY:
            self._said = time.monotonic()
            click.echo(line or f"{label}: {done:,.0f} of {total:,.0f}", err=True)
