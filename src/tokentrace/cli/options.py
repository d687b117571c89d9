"""Options that several commands share, each declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from ..errors import InputError
from ..files import unwritable

Command = TypeVar("Command", bound=Callable[..., Any])
DEBUG: Final = "tokentrace.debug"
"""The context key of --debug."""


def together(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Combine options into one decorator; ``--help`` lists them in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


OneOf = click.Choice


class ResultFile(click.Path):
    """An output file. Raises InputError before the work starts if it cannot be written."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if problem := unwritable(path):
            raise InputError(f"{path} cannot be written: {problem}")
        return path


def _remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[DEBUG] = True


def _one_of(name: str, choices: list[str], text: str, default: str | None = None) -> Callable[[Any], Any]:
    return click.option(name, type=OneOf(choices), default=default, show_default=True, help=text)


def _address(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value and Path(value).exists():
        raise click.UsageError(f"--ray takes the address of a cluster, and {value} is a file: name it before --ray")
    return value


ray_option: Final = click.option(
    "--ray",
    is_flag=False,
    flag_value="",
    metavar="[ADDRESS]",
    is_eager=True,
    callback=_address,
    help="Work on a Ray cluster (a local one if none).",
)


Completer = Callable[[click.Context, click.Parameter, str], list[Any]]


def _complete_names(names: Callable[[], Iterable[str]]) -> Completer:
    """Complete names that start like the text so far."""
    return lambda _ctx, _parameter, text: [name for name in names() if name.startswith(text)]


def _family_names() -> list[str]:
    from ..formats.families import FAMILIES

    return [family.name for family in FAMILIES]


def _dialect_names() -> Iterable[str]:
    from ..formats.dialects import DIALECTS

    return DIALECTS


def _complete_path(kind: str) -> Completer:
    """Let the shell complete a path."""
    return lambda _ctx, _parameter, text: [CompletionItem(text, type=kind)]


complete_families: Final = _complete_names(_family_names)
complete_dialects: Final = _complete_names(_dialect_names)
complete_folders: Final = _complete_path("dir")
complete_files: Final = _complete_path("file")


def json_option(text: str) -> Callable[[Any], Any]:
    """Return the option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def page_option(text: str) -> Callable[[Any], Any]:
    """Return the option ``--html FILE``."""
    return click.option("--html", type=ResultFile(), metavar="FILE", help=text)


debug_option: Final = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_remember, help="Show the traceback of an error."
)
trainer_option: Final = click.option(
    "--for",
    "trainer",
    type=OneOf(["trl", "axolotl", "llama-factory", "torchtune", "unsloth"]),
    help="Write what this trainer reads, and say what to put into its configuration.",
)
tokenizer_option: Final = click.option(
    "-t",
    "--tokenizer",
    metavar="PATH",
    shell_complete=complete_folders,
    help="A model's folder or hub name.  [default: the embedded pocket model]",
)
index_option: Final = click.option(
    "--index", type=int, metavar="N", help="Take conversation N of a JSON Lines file (0 is the first)."
)
messages_option: Final = _one_of(
    "--messages",
    ["adapt", "as_given"],
    "Convert messages to a form that the template reads, or leave them as they are.",
    "adapt",
)
control_tokens_option: Final = _one_of(
    "--control-tokens",
    ["literal", "reject", "hf_compat"],
    "How to treat a control token in the text of a user or a tool.",
    "literal",
)
messages_column_option: Final = click.option(
    "--messages-column", metavar="NAME", help="The column with the messages.  [default: detected]"
)
parse_arguments_option: Final = click.option(
    "--parse-arguments", is_flag=True, help="Parse arguments that are JSON strings, as inference servers do."
)
split_option: Final = click.option(
    "--split", metavar="NAME", help="The split of a dataset.  [default: train, or the only one]"
)
quiet_option: Final = click.option("-q", "--quiet", is_flag=True, help="No progress, no summary.")

_kwargs_option: Final = click.option(
    "--kwargs", multiple=True, metavar="KEY=VALUE", help="A template variable, or a JSON object of them."
)
_renderer_option: Final = click.option(
    "--renderer",
    default="auto",
    show_default=True,
    metavar="NAME",
    shell_complete=_complete_names(lambda: ["auto", "default", *_family_names()]),
    help="A family, auto or default.",
)
_chat_template_option: Final = click.option(
    "--chat-template",
    metavar="FILE",
    shell_complete=complete_files,
    help="A Jinja file instead of the tokenizer's own template, or the name of one that it carries.",
)
tools_option: Final = click.option(
    "--tools", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Tool schemas as JSON."
)
audit_options: Final = together(_kwargs_option, _renderer_option, _chat_template_option)
renderer_options: Final = together(tokenizer_option, audit_options)

template_options: Final = together(
    tokenizer_option, tools_option, _kwargs_option, _renderer_option, _chat_template_option
)
"""See `inputs.make_renderer`."""

supervision_options: Final = together(
    _one_of(
        "--turns",
        ["all", "last", "flagged"],
        'Which assistant turns carry loss; flagged: all but those with "train": false or "weight": 0.',
        "all",
    ),
    click.option(
        "--parts",
        default="reasoning,content,tool_calls,stop",
        show_default=True,
        metavar="LIST",
        help="What of a turn carries loss.",
    ),
    click.option("--roles", default="assistant", show_default=True, metavar="LIST", help="Whose messages carry loss."),
    _one_of(
        "--past",
        ["template", "preserve", "expand"],
        "Earlier turns: as the template writes them, with all reasoning, or a row per turn as the model saw it.  "
        "[default: template, with a warning where it matters]",
    ),
    click.option(
        "--final-stop", is_flag=True, help="Add the stop token where the template leaves the last turn without it."
    ),
    click.option("--use-patched", is_flag=True, help="Show past turns as they stood when they were sampled."),
    control_tokens_option,
)
