"""``tokentrace check``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import debug_option, show_view, supervision_options, template_options

if TYPE_CHECKING:
    from ..data.check.report import CheckReport


@click.command(short_help="Hold rows of ids against a model's template.")
@click.argument("rows", nargs=-1, required=True, metavar="ROWS...")
@template_options
@supervision_options
@click.option("--source", "sources", multiple=True, metavar="FILE", help="A file that rows say they were made of.")
@click.option("--ids-column", metavar="NAME", help="The column with the ids.  [default: found out]")
@click.option("--mask-column", metavar="NAME", help="The column with the mask, or labels.  [default: found out]")
@click.option("--messages-column", metavar="NAME", help="The column with the messages.  [default: found out]")
@click.option("--parse-arguments", is_flag=True, help="Parse arguments that are JSON strings, as inference servers do.")
@click.option("--pad-token", metavar="TOKEN", help="What rows are padded with.  [default: the tokenizer's own]")
@click.option("--split", metavar="NAME", help="The split of a dataset.  [default: train, or the only one]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Look at the first N rows only.")
@click.option("--allow-unchecked", is_flag=True, help="Exit with 0 though rows could not be held against anything.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the report; .json: as JSON."
)
@debug_option
@click.pass_context
def check(
    ctx: click.Context,
    /,
    *,
    rows: tuple[str, ...],
    tokenizer: str | None,
    sources: tuple[str, ...],
    ids_column: str | None,
    mask_column: str | None,
    pad_token: str | None,
    split: str | None,
    limit: int | None,
    allow_unchecked: bool,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Hold ROWS, which have ids already, against what the model's template makes of their conversations.

    ROWS are JSON Lines, JSON, Parquet, a folder of them, or a dataset saved to disk, made by "tokentrace tokenize" or
    by any other script. They have "input_ids" and perhaps "loss_mask" (or "assistant_masks", "completion_mask",
    "labels") and "attention_mask". The conversation stands beside them ("messages", or "prompt" and "completion"), or
    in the file that the row names. Rows without one are held against themselves.

    Files that tokentrace wrote say with which settings and of which files; options that are given go before that. A
    source that is not where it was is given with --source, and one that has changed since is told.

    The exit code is 0 if every row is the same, 1 if some differ, are bad or cannot be checked, 2 on errors.

    \b
    Examples:
      tokentrace check rows.parquet -t ./Qwen3-8B
      tokentrace check rows.parquet --source moved/chats.jsonl -t ./Qwen3-8B
      tokentrace check theirs.jsonl -t ./Qwen3-8B --mask-column assistant_masks
      tokentrace check theirs.jsonl -t ./Qwen3-8B --json | jq .causes
      tokentrace check ./saved_dataset -t ./Qwen3-8B --limit 1000 -o report.txt
    """
    from ..data.check.columns import RowColumns
    from ..data.check.dataset import check_dataset
    from ..pocket import POCKET

    if tokenizer is None:
        click.secho("no --tokenizer given: using the embedded pocket model", dim=True, err=True)
    with _progress() as progress:
        report = check_dataset(
            rows,
            tokenizer=str(POCKET) if tokenizer is None else tokenizer,
            changes=_changes(ctx, options),
            sources=sources,
            columns=RowColumns(ids_column, mask_column),
            pad_token=pad_token,
            split=split,
            limit=limit,
            progress=progress,
        )
    _write(report, output, as_json)
    allowed = report.rows and allow_unchecked and not report.differing
    ctx.exit(0 if (report.rows and report.clean) or allowed else 1)


def _changes(ctx: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """What options say that were given, by the names of the settings."""
    from click.core import ParameterSource

    from ..conversation.messages import check_tools
    from .inputs import parse_kwargs, read_tools
    from .render import _template
    from .tokenize import _listed

    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "parts": ("parts", _listed),
        "roles": ("roles", _listed),
        "kwargs": ("template_kwargs", parse_kwargs),
        "chat_template": ("chat_template", _template),
        "tools": ("tools", lambda path: check_tools(read_tools(path))),
        "messages_column": ("columns", lambda name: {"messages": name}),
    }
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            setting, read = readers.get(name, (name, lambda given: given))
            changes[setting] = read(value)
    return changes


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("checking"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write(report: CheckReport, output: Path | None, as_json: bool) -> None:
    from ..show.checks import plain_view, text_view

    if output is not None:
        text = json.dumps(report.to_json(), indent=1) if output.suffix == ".json" else plain_view(report)
        output.write_text(text + "\n", encoding="utf-8")
        click.secho(f"wrote {output}", dim=True, err=True)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        show_view(text_view, plain_view, report)
