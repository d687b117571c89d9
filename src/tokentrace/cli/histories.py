"""``tokentrace histories``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from . import command
from .options import OneOf, index_option, json_option, page_option, template_options
from .output import note, show_view, working, write_file


@command
@click.argument("conversation", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@template_options
@click.option(
    "--history",
    type=OneOf(["train", "inference"]),
    default="train",
    show_default=True,
    help="What the rollout does where the template would rewrite the past: keep it, or break.",
)
@click.option("--preserve-all-thinking", is_flag=True, help="Training keeps reasoning that the template drops.")
@click.option(
    "--preserve-thinking-between-tool-calls", is_flag=True, help="The same, for turns after the last user message."
)
@click.option("--use-patched", is_flag=True, help="Training shows past turns as they stood when they were sampled.")
@index_option
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Show all that differs at step N only.")
@page_option("Write a page as well.")
@json_option("Print the report as JSON.")
@click.option("--open", "open_", is_flag=True, help="Show the page in a browser; with --html.")
@click.pass_context
def histories(
    ctx: click.Context,
    /,
    *,
    conversation: str | None,
    index: int | None,
    step: int | None,
    html: Path | None,
    as_json: bool,
    open_: bool,
    tokenizer: str | None,
    tools: str | None,
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    **settings: Any,
) -> None:
    """Show where production, rollout and training hold different tokens for CONVERSATION.

    Production is what the shipped template shows at each turn, rollout the stream that is only appended to, training
    one row over the whole conversation. CONVERSATION is read as by "tokentrace render"; without one, the shipped
    example is.

    The exit code is 0 if all three agree at every turn, 1 if they differ or the rollout breaks, 2 on errors.

    \b
    Examples:
      tokentrace histories chat.json -t ./Qwen3-8B
      tokentrace histories chat.json -t ./Qwen3-8B --preserve-all-thinking --html report.html
      tokentrace histories chat.json -t ./Qwen3-8B --history inference --step 2
      tokentrace histories rollouts.jsonl --index 3 --json | jq .summary
    """
    from ..compare.histories import compare_histories
    from ..pocket import EXAMPLE
    from ..show.histories import history_document, plain_view, text_view
    from ..viewer.page import page_html
    from .inputs import conversation_title, make_renderer, read_conversation, read_tools

    if open_ and html is None:
        raise click.UsageError("--open shows the page; name its file with --html")
    if conversation is None:
        note("no conversation given: using the shipped example")
    messages, own_tools = read_conversation(conversation or str(EXAMPLE), index)
    template = {"tokenizer": tokenizer, "kwargs": kwargs, "renderer": renderer, "chat_template": chat_template}
    made = make_renderer(template, **settings)
    with working("comparing"):
        report = compare_histories(made, messages, tools=read_tools(tools, own_tools))
    if step is not None and step >= len(report.steps):
        raise InputError(f"--step: there is no step {step}; there are {len(report.steps)}, counted from 0")
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        show_view(text_view, plain_view, report, step=step)
    if html is not None:
        page = page_html(history_document(report, conversation_title(conversation), step=step))
        write_file(html, page, launch=open_)
    ctx.exit(0 if report.equal else 1)
