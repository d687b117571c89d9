"""The command line. Commands are imported when they are called, so that ``--help`` is quick."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from .options import DEBUG, debug_option

COMMANDS = {
    "render": "Render a conversation to tokens that know their origin.",
    "view": "Show trajectories or rows in a browser.",
    "audit": "Certify a tokenizer and its template.",
    "tokenize": "Turn files of conversations into training rows.",
    "rollout": "Run agents on an engine and keep exact training rows.",
    "serve": "Record agents that speak OpenAI's or Anthropic's API.",
    "export": "Write the rows of recorded sessions.",
    "keys": "Make keys for the gateway.",
    "check": "Check recorded tokens: rows, rollouts, dumps, a prompt.",
    "families": "Show what is known about each family of models.",
    "demo": "Run rollouts through three client paths and compare them.",
}
"""Each command, which is also the name of its function, and what it does."""
_MODULES = {"families": "render", "view": "render", "keys": "export"}


def command(function: Callable[..., Any]) -> click.Command:
    """Turn a function into the command of its name, with ``--debug`` as the last option."""
    result: click.Command = debug_option(click.command()(function))
    return result


class Commands(click.Group):
    """Imports a command when it is called, and prints an error as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{_MODULES.get(cmd_name, cmd_name)}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        from ..errors import TokentraceError

        for name in ("OPENBLAS", "OMP", "MKL"):
            if "numpy" not in sys.modules:  # the pocket model's matrices are too small for more threads
                os.environ.setdefault(f"{name}_NUM_THREADS", "1")
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except (TokentraceError, OSError) as error:
            if ctx.meta.get(DEBUG) or isinstance(error, BrokenPipeError):
                raise
            click.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
            ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tokentrace", prog_name="tokentrace")
@debug_option
def main() -> None:
    """Train on the exact tokens the model saw and sampled.

    tokentrace runs a model's own chat template on traced values: every token knows its message, its field, and
    whether the model samples it.

    \b
    Examples:
      tokentrace demo
      tokentrace render chat.json --tokenizer ./Qwen3-8B
      tokentrace render chat.json --format html --open
      tokentrace audit ./Qwen3-8B
      tokentrace check rows.parquet --tokenizer ./Qwen3-8B
      tokentrace tokenize chats.jsonl -o rows.parquet --tokenizer ./Qwen3-8B
      tokentrace serve --dev
      tokentrace families
    """
