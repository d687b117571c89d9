"""Options that several commands share, each declared once."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from ..errors import InputError
from ..files import unwritable

Option = Callable[[Any], Any]
Completer = Callable[[click.Context, click.Parameter, str], list[Any]]
DEBUG = "tokentrace.debug"
INPUT_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


def together(*options: Option) -> Option:
    """Combine options into a decorator; ``--help`` keeps their order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class ResultFile(click.Path):
    """An output file. Raises InputError before the work if it cannot be written."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if problem := unwritable(path):
            raise InputError(f"{path} cannot be written: {problem}")
        return path


def value(name: str, metavar: str, text: str, **more: Any) -> Option:
    return click.option(name, metavar=metavar, help=text, show_default=True, **more)


def one_of(name: str, choices: list[str], text: str, default: str | None = None) -> Option:
    return click.option(name, type=click.Choice(choices), default=default, show_default=True, help=text)


def flag(*names: str, text: str) -> Option:
    return click.option(*names, is_flag=True, help=text)


def number(*names: str, text: str, least: int = 1, **more: Any) -> Option:
    return click.option(
        *names, type=click.IntRange(least), metavar="N", help=text, show_default=True, **more
    )


def input_file(name: str, text: str) -> Option:
    """An option for a file to read; "-" is stdin."""
    return value(name, "FILE", text, type=INPUT_FILE)


def rows_option(required: bool = False) -> Option:
    kind, text = click.Path(path_type=Path), "The file to write: .parquet or .jsonl."
    return click.option("-o", "--output", type=kind, metavar="FILE", required=required, help=text)


def folder_option(text: str, **more: Any) -> Option:
    kind = click.Path(file_okay=False, path_type=Path)
    return click.option("-o", "--output", type=kind, metavar="FOLDER", help=text, show_default=True, **more)


def json_option(text: str) -> Option:
    return flag("--json", "as_json", text=text)


def page_option(text: str) -> Option:
    return value("--html", "FILE", text, type=ResultFile())


def _complete_names(module: str, *more: str) -> Completer:
    def complete(_ctx: click.Context, _parameter: click.Parameter, text: str) -> list[Any]:
        rows = getattr(importlib.import_module(f"..formats.{module}", __package__), module.upper())
        return [name for row in (*more, *rows) if (name := getattr(row, "name", row)).startswith(text)]

    return complete


complete_families = _complete_names("families")
complete_dialects = _complete_names("dialects")


def _address(_: click.Context, __: click.Parameter, address: str | None) -> str | None:
    if address and Path(address).exists():
        raise click.UsageError(f"--ray takes an address; {address} is a file: name it before --ray")
    return address


debug_option: Final[Option] = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=lambda ctx, _, value: ctx.meta.update({DEBUG: True} if value else {}),
    help="Show the traceback of an error.",
)
ray_option = click.option(
    "--ray",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    is_eager=True,
    callback=_address,
    help="Work on a Ray cluster (if there is none, a local one).",
)
overwrite_option = flag("--overwrite", text="Replace an output that already exists.")
trainer_option = click.option(
    "--for",
    "trainer",
    type=click.Choice(["trl", "axolotl", "llama-factory", "unsloth"]),
    help="Write what this trainer reads, and print its configuration.",
)
tokenizer_option = click.option(
    "-t",
    "--tokenizer",
    metavar="PATH",
    type=click.Path(),
    help="A model's folder or hub name.  [default: the embedded pocket model]",
)
index_option = value("--index", "N", "Take conversation N of JSON Lines (-1: the last).", type=int)
messages_option = one_of(
    "--messages",
    ["adapt", "as_given"],
    "Convert messages to a form that the template reads, or not.",
    "adapt",
)
past_option = partial(one_of, "--past", ["template", "inference", "tool_calls", "preserve", "patched"])
control_tokens_option = one_of(
    "--control-tokens",
    ["literal", "reject", "hf_compat"],
    "How to treat control tokens in the text of users and tools.",
    "literal",
)
messages_column_option = value("--messages-column", "NAME", "The column of messages.  [default: detected]")
parse_arguments_option = flag("--parse-arguments", text="Parse JSON arguments, as servers do.")
split_option = value("--split", "NAME", "The split of a dataset.  [default: train, or the only one]")
quiet_option = flag("-q", "--quiet", text="No progress, no summary.")
tools_option = input_file("--tools", "Tool schemas as JSON.")
audit_options = together(
    value("--kwargs", "KEY=VALUE", "A template variable, or a JSON object of them.", multiple=True),
    value(
        "--renderer",
        "NAME",
        "A family, auto or default.",
        default="auto",
        shell_complete=_complete_names("families", "auto", "default"),
    ),
    value("--chat-template", "FILE", "A Jinja file, or another template's name.", type=click.Path()),
)
renderer_options = together(tokenizer_option, audit_options)
template_options = together(tokenizer_option, tools_option, audit_options)
"""See `inputs.make_renderer`."""

supervision_options = together(
    one_of(
        "--turns",
        ["all", "last", "flagged"],
        'Which turns carry loss; flagged: all but those with "train": false or "weight": 0.',
        "all",
    ),
    value(
        "--parts", "LIST", "Which parts of a turn carry loss.", default="reasoning,content,tool_calls,stop"
    ),
    value("--roles", "LIST", "Whose messages carry loss.", default="assistant"),
    one_of(
        "--past",
        ["template", "preserve", "expand"],
        "Earlier turns: as the template writes them, with all reasoning, or a row per turn as the model saw it."
        "  [default: template, with a warning where it matters]",
    ),
    flag("--final-stop", text="Add the stop token if the template ends the last turn without it."),
    flag("--use-patched", text="Show past turns as they were sampled."),
    control_tokens_option,
)
