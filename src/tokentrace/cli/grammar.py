"""``tokentrace grammar``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from . import debug_option, show_view, template_options

if TYPE_CHECKING:
    from ..show.sheet import Sheet


@click.command(short_help="Show what a model writes in its turn.")
@template_options
@click.option("--tool-parser", metavar="NAME", help="The dialect of tool calls, instead of the template's own.")
@click.option("--reasoning-parser", metavar="NAME", help="How reasoning is set off, instead of the template's own.")
@click.option("--json", "as_json", is_flag=True, help="Print the grammar as JSON.")
@debug_option
def grammar(
    *,
    tokenizer: str | None,
    tools: str | None,
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
    as_json: bool,
) -> None:
    """Show what a model writes in its turn, as derived from its chat template.

    How reasoning, content and tool calls are set off, where names and arguments stand, what ends the turn; which
    delimiters are control tokens, and which are text that could be spelled by accident. Notes say what the template
    leaves open: name a dialect there.

    \b
    Examples:
      tokentrace grammar -t ./Qwen3-8B
      tokentrace grammar -t ./Qwen3-8B --kwargs enable_thinking=false
      tokentrace grammar -t ./Qwen3-8B --chat-template mine.jinja
      tokentrace grammar -t ./gemma-3-4b-it --tool-parser pythonic
      tokentrace grammar -t ./Qwen3-8B --json | jq .stop_token_ids
    """
    from ..pocket import POCKET
    from ..rendering.factory import create_renderer
    from ..show.grammar import json_view
    from ..show.sheet import make_sheet
    from .inputs import parse_kwargs, read_tools
    from .render import _template

    if tokenizer is None:
        click.secho("no --tokenizer given: using the embedded pocket model", dim=True, err=True)
    made = create_renderer(
        POCKET if tokenizer is None else tokenizer,
        renderer,
        chat_template=_template(chat_template),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        **parse_kwargs(kwargs),
    )
    sheet = make_sheet(made, read_tools(tools) if tools else None)
    if as_json:
        click.echo(json.dumps(json_view(sheet), indent=2, ensure_ascii=False))
    else:
        _write_text(sheet)


def _write_text(sheet: Sheet) -> None:
    from rich.console import Console

    from ..show.grammar import plain_view, text_view

    show_view(text_view, plain_view, sheet, width=Console().width)
