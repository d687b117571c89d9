"""``tokentrace render``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from . import command
from .options import (
    OneOf,
    ResultFile,
    control_tokens_option,
    flag,
    index_option,
    json_option,
    messages_option,
    template_options,
)
from .output import print_result, working, write_file


@command
@click.argument("conversation", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@template_options
@flag("-g", "--generation-prompt", text="End with the prompt for the next reply.")
@control_tokens_option
@messages_option
@flag("--fail-on-lost", text="Fail if text reaches no token.")
@flag("--preserve-all-thinking", text="Keep reasoning that the template drops.")
@flag("--use-patched", text="Show past turns as they were sampled.")
@index_option
@click.option("-f", "--format", "form", type=OneOf(["text", "json", "html"]), help="[default: text]")
@json_option("The same as --format json.")
@click.option("-o", "--output", type=ResultFile(), help="Write to this file.")
@flag("--open", "open_", text="Open the page in a browser.")
def render(
    *,
    conversation: str,
    generation_prompt: bool,
    fail_on_lost: bool,
    index: int | None,
    form: str | None,
    as_json: bool,
    output: Path | None,
    open_: bool,
    **options: Any,
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
        raise click.UsageError(f"--json and --format {form} exclude each other")
    form = "json" if as_json else form or ("html" if open_ else "text")
    if open_ and form != "html":
        raise click.UsageError("--open needs --format html")
    messages, tools = read_conversation(conversation, index)
    names = ("preserve_all_thinking", "use_patched", "control_tokens", "messages")
    settings = {name: options[name] for name in names} | {"lost": "error" if fail_on_lost else "ignore"}
    renderer = make_renderer(options, **settings)
    with working("rendering"):
        tools = read_tools(options["tools"], tools)
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=generation_prompt)
    if form == "text" and output is None:
        print_result(rendered, fold=True)
        return
    from ..show import json_view, plain_view, show

    if form == "html":
        text = show(rendered, title=conversation_title(conversation)).html
        output = output or (Path(tempfile.mkdtemp(prefix="tokentrace-")) / "report.html" if open_ else None)
    else:
        text = (json.dumps(json_view(rendered)) if form == "json" else plain_view(rendered)) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text, launch=open_)
