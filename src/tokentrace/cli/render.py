"""``tokentrace render``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import command
from .options import (
    OneOf,
    ResultFile,
    control_tokens_option,
    index_option,
    json_option,
    messages_option,
    template_options,
)
from .output import print_result, working, write_file

if TYPE_CHECKING:
    from ..rendering.rendered import RenderedTokens


@command
@click.argument("conversation", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@template_options
@click.option("-g", "--generation-prompt", is_flag=True, help="End with the prompt for the next reply.")
@control_tokens_option
@messages_option
@click.option("--fail-on-lost", is_flag=True, help="Fail if given text reaches no token, instead of saying so.")
@click.option("--preserve-all-thinking", is_flag=True, help="Keep reasoning that the template drops.")
@click.option("--use-patched", is_flag=True, help="Show past turns as they stood when they were sampled.")
@index_option
@click.option("-f", "--format", "form", type=OneOf(["text", "json", "html"]), help="[default: text]")
@json_option("The same as --format json.")
@click.option("-o", "--output", type=ResultFile(), help="Write to this file.")
@click.option("--open", "open_", is_flag=True, help="Show the HTML in a browser.")
def render(
    *,
    conversation: str,
    generation_prompt: bool,
    control_tokens: str,
    messages: str,
    fail_on_lost: bool,
    preserve_all_thinking: bool,
    use_patched: bool,
    index: int | None,
    form: str | None,
    as_json: bool,
    output: Path | None,
    open_: bool,
    **template: Any,
) -> None:
    """Render CONVERSATION to tokens that know where they came from.

    CONVERSATION is a JSON file: a list of messages, or an object with "messages" and perhaps "tools". A .jsonl
    file has one of these per line. "-" reads from stdin.

    \b
    Examples:
      tokentrace render chat.json
      tokentrace render chat.json -t ./Qwen3-8B --kwargs enable_thinking=false -g
      tokentrace render rollouts.jsonl --index 3 --format html --open
      tokentrace render - --format json < chat.json | jq .token_ids
    """
    from .inputs import conversation_title, make_renderer, read_conversation, read_tools

    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} are two forms: give one of them")
    form = "json" if as_json else form or "text"
    if open_ and form == "json":
        raise click.UsageError("--open shows HTML; use it with --format html")
    given, own_tools = read_conversation(conversation, index)
    renderer = make_renderer(
        template,
        preserve_all_thinking=preserve_all_thinking,
        use_patched=use_patched,
        control_tokens=control_tokens,
        messages=messages,
        lost="error" if fail_on_lost else "ignore",  # what is lost is shown
    )
    tools = read_tools(template["tools"], own_tools)
    with working("rendering"):
        rendered = renderer.render(given, tools=tools, add_generation_prompt=generation_prompt)
    write(rendered, "html" if open_ else form, output, title=conversation_title(conversation), open_=open_)


def write(rendered: RenderedTokens, form: str, output: Path | None, *, title: str, open_: bool = False) -> None:
    """Show a rendering on the terminal, or write it to a file."""
    if form == "text":
        if output is None:
            print_result(rendered, fold=True)
            return
        from ..show.terminal import plain_view

        text = plain_view(rendered) + "\n"
    elif form == "json":
        from ..show.arrays import json_view

        text = json.dumps(json_view(rendered)) + "\n"
    else:
        from ..show.page import show

        text = show(rendered, title=title).html
    if open_ and output is None:
        output = Path(tempfile.mkdtemp(prefix="tokentrace-")) / "report.html"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text, launch=open_)
