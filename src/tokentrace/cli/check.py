"""``tokentrace check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from . import command
from .options import (
    ResultFile,
    complete_files,
    json_option,
    messages_column_option,
    page_option,
    parse_arguments_option,
    split_option,
    supervision_options,
    template_options,
)
from .output import ProgressBars, show_view, write_file, write_page


@command
@click.argument("rows", nargs=-1, required=True, metavar="ROWS...", shell_complete=complete_files)
@template_options
@supervision_options
@click.option("--source", "sources", multiple=True, metavar="FILE", help="A file that the rows were made from.")
@click.option("--ids-column", metavar="NAME", help="The column with the ids.  [default: detected]")
@click.option("--mask-column", metavar="NAME", help="The column with the mask, or labels.  [default: detected]")
@messages_column_option
@parse_arguments_option
@click.option("--pad-token", metavar="TOKEN", help="What rows are padded with.  [default: the tokenizer's own]")
@split_option
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Look at the first N rows only.")
@click.option("--allow-unchecked", is_flag=True, help="Exit with 0 even if some rows could not be checked.")
@page_option("Write a page as well.")
@json_option("Print the report as JSON.")
@click.option("-o", "--output", type=ResultFile(), help="Write the report; .json: as JSON.")
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
    html: Path | None,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Compare ROWS, which have ids already, with what the model's template makes of their conversations.

    ROWS are JSON Lines, JSON, Parquet, a folder of them, or a dataset saved to disk, made by "tokentrace tokenize" or
    by any other script. They have "input_ids" and perhaps "loss_mask" (or "assistant_masks", "completion_mask",
    "labels") and "attention_mask". The conversation stands beside them ("messages", or "prompt" and "completion"), or
    in the file that the row names. Rows without one are checked for consistency only.

    Files that tokentrace wrote record their settings and sources; options given here take precedence. Name a source
    that has moved with --source; one that has changed since is reported.

    The exit code is 0 if every row is the same, 1 if some differ, are bad or cannot be checked, 2 on errors.

    \b
    Examples:
      tokentrace check rows.parquet -t ./Qwen3-8B
      tokentrace check rows.parquet --source moved/chats.jsonl -t ./Qwen3-8B
      tokentrace check theirs.jsonl -t ./Qwen3-8B --mask-column assistant_masks
      tokentrace check theirs.jsonl -t ./Qwen3-8B --json | jq .causes
      tokentrace check ./saved_dataset -t ./Qwen3-8B --limit 1000 -o report.txt
    """
    from click.core import ParameterSource

    from ..data.check.columns import RowColumns
    from ..data.check.dataset import check_dataset
    from ..show.checks import plain_view, text_view
    from .inputs import chosen_tokenizer, row_settings

    name = chosen_tokenizer(tokenizer)
    given = [option for option in options if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE]
    with ProgressBars(transient=True) as bars:
        report = check_dataset(
            rows,
            tokenizer=name,
            changes=row_settings({option: options[option] for option in given}),
            sources=sources,
            columns=RowColumns(ids_column, mask_column),
            pad_token=pad_token,
            split=split,
            limit=limit,
            progress=lambda done, total: bars.show("checking", done, total),
        )
    if output is not None:
        text = json.dumps(report.to_json(), indent=1) if output.suffix == ".json" else plain_view(report)
        write_file(output, text + "\n")
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        show_view(text_view, plain_view, report)
    if html is not None:
        write_page(html, report)
    allowed = report.rows and allow_unchecked and not report.differing
    ctx.exit(0 if (report.rows and report.clean) or allowed else 1)
