"""``tokentrace grammar``."""

from __future__ import annotations

import json
from typing import Any

import click

from . import command
from .options import complete_dialects, json_option, template_options
from .output import make_console, show_view, working


@command
@template_options
@click.option(
    "--tool-parser",
    metavar="NAME",
    shell_complete=complete_dialects,
    help="The dialect of tool calls, instead of the template's own.",
)
@click.option("--reasoning-parser", metavar="NAME", help="How reasoning is set off, instead of the template's own.")
@json_option("Print the grammar as JSON.")
def grammar(*, tool_parser: str | None, reasoning_parser: str | None, as_json: bool, **template: Any) -> None:
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
    from ..show.grammar import json_view, plain_view, text_view
    from ..show.sheet import make_sheet
    from .inputs import make_renderer, read_tools

    renderer = make_renderer(template, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    with working("reading the template"):
        sheet = make_sheet(renderer, read_tools(template["tools"]))
    if as_json:
        click.echo(json.dumps(json_view(sheet), indent=2, ensure_ascii=False))
    else:
        show_view(text_view, plain_view, sheet, width=make_console().width)
