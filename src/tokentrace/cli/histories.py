"""``tokentrace histories``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import debug_option, show_view, template_options

if TYPE_CHECKING:
    from ..compare.histories import HistoryReport


@click.command(short_help="Show where production, rollout and training differ.")
@click.argument("conversation", required=False, type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@template_options
@click.option(
    "--history",
    type=click.Choice(["train", "inference"]),
    default="train",
    show_default=True,
    help="What the rollout does where the template would rewrite the past: keep it, or break.",
)
@click.option("--preserve-all-thinking", is_flag=True, help="Training keeps reasoning that the template drops.")
@click.option(
    "--preserve-thinking-between-tool-calls", is_flag=True, help="The same, for turns after the last user message."
)
@click.option("--use-patched", is_flag=True, help="Training shows past turns as they stood when they were sampled.")
@click.option("--index", type=int, metavar="N", help="Take conversation N of a JSON Lines file (0 is the first).")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Show all that differs at step N only.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--open", "open_", is_flag=True, help="Show the page in a browser; with --html.")
@debug_option
@click.pass_context
def histories(
    ctx: click.Context,
    *,
    conversation: str | None,
    tokenizer: str | None,
    tools: str | None,
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    history: str,
    preserve_all_thinking: bool,
    preserve_thinking_between_tool_calls: bool,
    use_patched: bool,
    index: int | None,
    step: int | None,
    html: Path | None,
    as_json: bool,
    open_: bool,
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
    from ..errors import InputError
    from ..pocket import EXAMPLE, POCKET
    from ..rendering.factory import create_renderer
    from .inputs import parse_kwargs, read_conversation, read_tools
    from .render import _template

    if open_ and html is None:
        raise click.UsageError("--open shows the page; name its file with --html")
    if conversation is None:
        click.secho("no conversation given: using the shipped example", dim=True, err=True)
    messages, own_tools = read_conversation(conversation or str(EXAMPLE), index)
    if tokenizer is None:
        click.secho("no --tokenizer given: using the embedded pocket model", dim=True, err=True)
    made = create_renderer(
        POCKET if tokenizer is None else tokenizer,
        renderer,
        preserve_all_thinking=preserve_all_thinking,
        preserve_thinking_between_tool_calls=preserve_thinking_between_tool_calls,
        use_patched=use_patched,
        chat_template=_template(chat_template),
        history=history,
        **parse_kwargs(kwargs),
    )
    report = compare_histories(made, messages, tools=read_tools(tools) if tools else own_tools)
    if step is not None and step >= len(report.steps):
        raise InputError(f"--step: there is no step {step}; there are {len(report.steps)}, counted from 0")
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        _write_text(report, step)
    if html is not None:
        _write_page(report, html, conversation, step, open_)
    ctx.exit(0 if report.equal else 1)


def _write_text(report: HistoryReport, step: int | None) -> None:

    from ..show.histories import plain_view, text_view

    show_view(text_view, plain_view, report, step=step)


def _write_page(report: HistoryReport, path: Path, conversation: str | None, step: int | None, open_: bool) -> None:
    from ..show.histories import html_page

    name = "example" if conversation is None else "stdin" if conversation == "-" else Path(conversation).name
    path.write_text(html_page(report, name, step=step), encoding="utf-8")
    click.secho(f"wrote {path}", dim=True, err=True)
    if open_:
        click.launch(str(path))
