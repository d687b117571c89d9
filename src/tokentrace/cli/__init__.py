"""The command line. Commands are imported when they are called, so that ``--help`` is quick."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import click

COMMANDS: Final = {
    "render": "Render a conversation to tokens that know their origin.",
    "histories": "Show where production, rollout and training differ.",
    "explain": "Say where and why a prompt does not extend a stream.",
    "grammar": "Show what a model writes in its turn.",
    "tokenize": "Turn files of conversations into training rows.",
    "rollout": "Run agents on an engine and keep exact training rows.",
    "check": "Hold rows of ids against a model's template.",
    "families": "Show what is known of each family of models.",
    "demo": "Run rollouts by three client paths and compare them.",
}
"""The name of each command (also that of its module and function), and what it does."""


class Commands(click.Group):
    """A group whose commands live in modules of their own, and whose errors are one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f".{cmd_name}", __package__), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        from ..errors import TokentraceError

        try:
            return super().invoke(ctx)
        except (TokentraceError, OSError) as error:
            if ctx.meta.get(_DEBUG) or isinstance(error, BrokenPipeError):
                raise
            said = " ".join(str(error).split())
            click.secho(f"error: {said}", fg="red", err=True)
            ctx.exit(2)


_DEBUG: Final = "tokentrace.debug"


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--debug``: a traceback where there would be one line."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_DEBUG] = True

    option = click.option(
        "--debug", is_flag=True, expose_value=False, callback=remember, help="Show the traceback of an error."
    )
    return option(command)


def tokenizer_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--tokenizer``, by default the embedded model."""
    option = click.option(
        "-t", "--tokenizer", metavar="PATH", help="A model's folder or hub name.  [default: the embedded pocket model]"
    )
    return option(command)


def template_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a conversation is rendered with: tokenizer, tools, template and its variables."""
    options = (
        tokenizer_option,
        click.option(
            "--tools", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Tool schemas as JSON."
        ),
        click.option(
            "--kwargs", multiple=True, metavar="KEY=VALUE", help="A template variable, or a JSON object of them."
        ),
        click.option(
            "--renderer", default="auto", show_default=True, metavar="NAME", help="A family, auto or default."
        ),
        click.option(
            "--chat-template",
            metavar="FILE",
            help="A Jinja file instead of the tokenizer's own template, or the name of one that it carries.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def supervision_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What carries loss, how the past is shown, and what a control token in a user's text becomes."""
    options = (
        click.option(
            "--turns",
            type=click.Choice(["all", "last", "flagged"]),
            default="all",
            show_default=True,
            help='Which assistant turns carry loss; flagged: all but those with "train": false or "weight": 0.',
        ),
        click.option(
            "--parts",
            default="reasoning,content,tool_calls,stop",
            show_default=True,
            metavar="LIST",
            help="What of a turn carries loss.",
        ),
        click.option("--roles", default="assistant", show_default=True, metavar="LIST", help="Whose messages do."),
        click.option(
            "--past",
            type=click.Choice(["template", "preserve", "expand"]),
            help="How earlier turns are shown: as the template writes them, with all reasoning kept, or in a row for "
            "every turn as the model would have seen it.  [default: template, with a warning where it matters]",
        ),
        click.option(
            "--final-stop", is_flag=True, help="Add the stop token where the template leaves the last turn without it."
        ),
        click.option("--use-patched", is_flag=True, help="Show past turns as they stood when they were sampled."),
        click.option(
            "--control-tokens",
            type=click.Choice(["literal", "reject", "hf_compat"]),
            default="literal",
            show_default=True,
            help="What becomes of a control token that a user or a tool spells out.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def show_view(
    coloured: Callable[..., Any], plain: Callable[..., str], shown: Any, *, fold: bool = False, **options: Any
) -> None:
    """Print a view: in colours where the terminal has them, else as plain lines. `fold` breaks long lines."""
    from rich.console import Console

    console = Console()
    if console.is_terminal and not console.no_color and console.color_system:
        console.print(coloured(shown, **options), soft_wrap=not fold)
    else:
        click.echo(plain(shown, **options))


def one_blas_thread() -> None:
    """Have NumPy multiply in one thread, unless the environment says otherwise.

    The model's matrices are small: threads that wait for each other in between cost more than they do, and many times
    more where cores are shared. NumPy reads this when it is imported, so there is nothing to do once it is.
    """
    if "numpy" not in sys.modules:
        for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tokentrace", prog_name="tokentrace")
@debug_option
def main() -> None:
    """Train on the exact tokens the model saw and sampled.

    tokentrace renders conversations with a model's own chat template, run with traced values: every token
    knows its message, its field, and whether the model samples it.

    \b
    Examples:
      tokentrace demo
      tokentrace render chat.json --tokenizer ./Qwen3-8B
      tokentrace render chat.json --format html -o report.html --open
      tokentrace histories chat.json --tokenizer ./Qwen3-8B
      tokentrace explain rollout.tt next_prompt.json --tokenizer ./Qwen3-8B
      tokentrace tokenize chats.jsonl -o rows.parquet --tokenizer ./Qwen3-8B
      tokentrace families
    """


__all__ = ["main"]
