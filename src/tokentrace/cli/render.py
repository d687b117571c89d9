"""``tokentrace render``."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import debug_option, show_view, template_options

if TYPE_CHECKING:
    from ..rendering.rendered import RenderedTokens


@click.command(short_help="Render a conversation to tokens that know their origin.")
@click.argument("conversation", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@template_options
@click.option("-g", "--generation-prompt", is_flag=True, help="End with the prompt for the next reply.")
@click.option(
    "--control-tokens",
    type=click.Choice(["literal", "reject", "hf_compat"]),
    default="literal",
    show_default=True,
    help="What becomes of a control token that a user or a tool spells out.",
)
@click.option(
    "--messages",
    type=click.Choice(["adapt", "as_given"]),
    default="adapt",
    show_default=True,
    help="Give the template the form of messages that it reads, or leave them as they are.",
)
@click.option("--fail-on-lost", is_flag=True, help="Fail if given text reaches no token, instead of saying so.")
@click.option("--preserve-all-thinking", is_flag=True, help="Keep reasoning that the template drops.")
@click.option("--use-patched", is_flag=True, help="Show past turns as they stood when they were sampled.")
@click.option("--index", type=int, metavar="N", help="Take conversation N of a JSON Lines file (0 is the first).")
@click.option("-f", "--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option("--open", "open_", is_flag=True, help="Show the HTML in a browser.")
@debug_option
def render(
    *,
    conversation: str,
    tokenizer: str | None,
    tools: str | None,
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    generation_prompt: bool,
    control_tokens: str,
    messages: str,
    fail_on_lost: bool,
    preserve_all_thinking: bool,
    use_patched: bool,
    index: int | None,
    form: str,
    output: Path | None,
    open_: bool,
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
    from ..pocket import POCKET
    from ..rendering.factory import create_renderer
    from .inputs import parse_kwargs, read_conversation, read_tools

    if open_ and form != "html":
        if form == "json":
            raise click.UsageError("--open shows HTML; use it with --format html")
        form = "html"
    given, own_tools = read_conversation(conversation, index)
    if tokenizer is None:
        click.secho("no --tokenizer given: using the embedded pocket model", dim=True, err=True)
    made = create_renderer(
        POCKET if tokenizer is None else tokenizer,
        renderer,
        preserve_all_thinking=preserve_all_thinking,
        use_patched=use_patched,
        control_tokens=control_tokens,
        messages=messages,
        lost="error" if fail_on_lost else "ignore",  # what is lost is shown
        chat_template=_template(chat_template),
        **parse_kwargs(kwargs),
    )
    rendered = made.render(
        given,
        tools=read_tools(tools) if tools else own_tools,
        add_generation_prompt=generation_prompt,
    )
    title = "stdin" if conversation == "-" else Path(conversation).name
    write(rendered, form, output, title=title, open_=open_)


def _template(given: str | None) -> str | None:
    """The source of a template, if a file is named; else the name of one that the tokenizer carries."""
    if given is None or not Path(given).is_file():
        return given
    return Path(given).read_text(encoding="utf-8")


def write(rendered: RenderedTokens, form: str, output: Path | None, *, title: str, open_: bool = False) -> None:
    """Show a rendering on the terminal, or write it to a file."""
    if form == "text":
        _write_text(rendered, output)
        return
    if form == "json":
        from ..show.arrays import json_view

        text = json.dumps(json_view(rendered)) + "\n"
    else:
        from ..show.html import html_page

        text = html_page(rendered, title)
    if open_ and output is None:
        output = Path(tempfile.mkdtemp(prefix="tokentrace-")) / "report.html"
    if output is None:
        click.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    click.secho(f"wrote {output}", dim=True, err=True)
    if open_:
        click.launch(str(output))


def _write_text(rendered: RenderedTokens, output: Path | None) -> None:

    from ..show.terminal import plain_view, text_view

    if output is not None:
        output.write_text(plain_view(rendered) + "\n", encoding="utf-8")
        click.secho(f"wrote {output}", dim=True, err=True)
        return
    show_view(text_view, plain_view, rendered, fold=True)
