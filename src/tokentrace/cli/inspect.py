"""``tokentrace inspect``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from . import command, one_blas_thread
from .options import (
    OneOf,
    audit_options,
    complete_files,
    complete_folders,
    json_option,
    page_option,
    quiet_option,
)
from .output import ProgressBars, note, show_view, write_page

SHAPES: Final = ("verifiers", "nemo-gym", "openenv", "trl", "verl", "rows", "calls")
FAIL_ON: Final = ("breaks", "masks", "logprobs", "ids", "any")


@command
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...", shell_complete=complete_files)
@click.option(
    "-t",
    "--tokenizer",
    metavar="PATH",
    shell_complete=complete_folders,
    help="A model's folder or hub name: causes are found with it.  [default: what the folder of a run names, or none]",
)
@audit_options
@click.option("--shape", type=OneOf(SHAPES), help="Whose shape a dump has.  [default: recognised]")
@click.option(
    "--engine", metavar="URL", help='Compare logprobs with those of this engine; "embedded": the pocket model.'
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Look at the first N rollouts only.")
@click.option("--fail-on", multiple=True, type=OneOf(FAIL_ON), help="Exit with 1 if there are any; may be repeated.")
@page_option("Write a page as well.")
@json_option("Print the report as JSON.")
@quiet_option
@click.pass_context
def inspect(
    ctx: click.Context,
    /,
    *,
    inputs: tuple[str, ...],
    shape: str | None,
    engine: str | None,
    limit: int | None,
    fail_on: tuple[str, ...],
    html: Path | None,
    as_json: bool,
    quiet: bool,
    **template: Any,
) -> None:
    """Check what happened to the tokens of rollouts, whoever recorded them.

    FILE is a trajectory (.tt), a folder of them, the output folder of "tokentrace rollout", the store of a gateway
    (a file, or postgresql://user@host/database), rows of ids (Parquet, JSON lines), or a dump of another framework:
    prompt and completion ids of each call, as verifiers and prime-rl, NeMo Gym, TRL, verl and OpenEnv have them, or
    plainly {"rollout_id", "prompt_ids", "completion_ids", "logprobs"}. docs/inspect.md has the shapes.

    For each prompt: does it begin with the stream so far, id for id? Where not, why, in how many rollouts, and what it
    costs. Masks, logprobs and lengths are checked as well. Causes need --tokenizer.

    The exit code is 0, or 1 if something of --fail-on was found or a line could not be read, 2 on errors.

    \b
    Examples:
      tokentrace inspect runs/7
      tokentrace inspect rollouts/step_10/train/all/traces.jsonl -t ./Qwen3-8B
      tokentrace inspect dump.jsonl -t ./Qwen3-8B --fail-on breaks --json | jq .causes
      tokentrace inspect store.db -t ./Qwen3-8B --engine http://127.0.0.1:8000
    """
    one_blas_thread()
    from ..audit.inspect import inspect_rollouts
    from ..show.inspections import plain_view, text_view

    known = _known(inputs, template)
    with ProgressBars(transient=True, quiet=quiet) as bars:
        report = inspect_rollouts(
            inputs,
            known,
            shape=shape,
            limit=limit,
            engine=None if engine is None else lambda: _connected(engine, known),
            progress=lambda done, total: bars.show("inspecting", done, total, line=f"inspected {done / total:.0%}"),
        )
    failed = report.unreadable or not report.rollouts or any(map(report.failing, fail_on))
    if as_json:
        click.echo(json.dumps(report.to_json()))
    elif not quiet:
        show_view(text_view, plain_view, report)
    elif failed:
        unread = f"; {report.unreadable:,} could not be read" if report.unreadable else ""
        click.echo(f"{report.verdict}{unread}", err=True)
    if html is not None:
        write_page(html, report, tokenizer=known)
    ctx.exit(1 if failed else 0)


def _known(inputs: tuple[str, ...], template: dict[str, Any]) -> Any:
    """The renderer of the model, or its tokenizer where it has no template; None where nobody says which it is."""
    from ..audit.inspect import recorded_tokenizer
    from ..errors import RendererError, TemplateError
    from ..tokens.loading import load_tokenizer
    from .inputs import make_renderer

    name = template["tokenizer"] or recorded_tokenizer(inputs)
    if name is None:
        note("no --tokenizer given: breaks are found, and not explained")
        return None
    try:
        return make_renderer({**template, "tokenizer": name})
    except (RendererError, TemplateError) as error:
        if template["renderer"] != "auto" or template["chat_template"] is not None or template["kwargs"]:
            raise
        note(f"{' '.join(str(error).split())}: the tokenizer alone is used")
        return load_tokenizer(name)


def _connected(engine: str, known: Any) -> Any:
    from ..engines.embedded import EmbeddedEngine
    from ..engines.servers import connect

    if engine == "embedded":
        return EmbeddedEngine()
    tokenizer = getattr(known, "tokenizer", known)
    size = None if tokenizer is None else tokenizer.vocabulary.size
    return connect(engine, vocab_size=size) if size is not None else connect(engine)
