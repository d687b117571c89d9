"""``tokentrace check``: anything that was recorded."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import click

from ..errors import InputError
from . import command, one_blas_thread
from .options import (
    OneOf,
    complete_files,
    json_option,
    messages_column_option,
    page_option,
    parse_arguments_option,
    quiet_option,
    split_option,
    supervision_options,
    template_options,
)
from .output import ProgressBars, note, show_view, working, write_page

SHAPES: Final = ("verifiers", "nemo-gym", "openenv", "trl", "verl", "rows", "calls")
ALLOWED: Final = ("unchecked", "breaks", "masks", "logprobs", "ids")


class Recorded(StrEnum):
    """What a file holds, by which it is checked."""

    ROWS = "rows of ids"
    ROLLOUTS = "rollouts"
    STREAM = "a stream and its next prompt"


_OWN: Final = {"shape": Recorded.ROLLOUTS, "engine": Recorded.ROLLOUTS, "branch": Recorded.STREAM}
"""Options of one kind; those that are not named in `_EVERY` are of rows."""
_EVERY: Final = frozenset(
    {"inputs", "tokenizer", "kwargs", "renderer", "chat_template", "tools", "prompt", "limit", "allow"}
    | {"html", "as_json", "quiet"}
)


@command
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...", shell_complete=complete_files)
@template_options
@click.option("--prompt", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Ids of the next prompt.")
@click.option("--branch", type=int, metavar="N", help="With --prompt: the branch of a trajectory.  [default: the last]")
@click.option("--shape", type=OneOf(SHAPES), help="Whose shape a dump of rollouts has.  [default: recognised]")
@click.option(
    "--engine", metavar="URL", help='Compare logprobs with those of this engine; "embedded": the pocket model.'
)
@supervision_options
@click.option("--source", "sources", multiple=True, metavar="FILE", help="A file that the rows were made from.")
@click.option("--ids-column", metavar="NAME", help="The column with the ids.  [default: detected]")
@click.option("--mask-column", metavar="NAME", help="The column with the mask, or labels.  [default: detected]")
@messages_column_option
@parse_arguments_option
@click.option("--pad-token", metavar="TOKEN", help="What rows are padded with.  [default: the tokenizer's own]")
@split_option
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Look at the first N rows or rollouts only.")
@click.option("--allow", multiple=True, type=OneOf(ALLOWED), help="What does not count as a problem; may be repeated.")
@page_option("Write a page as well.")
@json_option("Print the report as JSON.")
@quiet_option
@click.pass_context
def check(ctx: click.Context, /, *, inputs: tuple[str, ...], **options: Any) -> None:
    """Check the tokens in FILE, whoever recorded them.

    Rows of ids (JSON Lines, Parquet, a folder, a saved dataset) are compared with what the template makes of their
    conversations: in the row, or in the file that the row names. Without one, masks are compared with the turns that
    the ids show.

    Rollouts are a trajectory (.tt) or a folder of them, the output of "tokentrace rollout", a gateway's store (a file,
    or postgresql://user@host/database), their rows, or a dump of another framework. Does each prompt begin with the
    stream so far, id for id? Where not, why, and what does it cost? Masks, logprobs and lengths are checked as well.

    With --prompt, FILE is a stream (a trajectory, or a JSON list of ids) that the prompt must begin with. JSON with
    "stream" and "next_prompt" needs no second file. docs/check.md has all of it.

    The exit code is 0, 1 if problems were found (also rows that could not be checked), 2 on errors.

    \b
    Examples:
      tokentrace check rows.parquet -t ./Qwen3-8B
      tokentrace check theirs.jsonl -t ./Qwen3-8B --mask-column assistant_masks --html report.html
      tokentrace check runs/7
      tokentrace check dump.jsonl -t ./Qwen3-8B --json | jq .causes
      tokentrace check store.db -t ./Qwen3-8B --engine http://127.0.0.1:8000
      tokentrace check rollout.tt --prompt next.json -t ./Qwen3-8B
    """
    from click.core import ParameterSource

    one_blas_thread()
    given = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    kind = Recorded.STREAM if options["prompt"] is not None else _recorded(inputs, options["shape"])
    if other := sorted(name for name in given - _EVERY if _OWN.get(name, Recorded.ROWS) is not kind):
        raise click.UsageError(f"{inputs[0]} holds {kind}, for which --{other[0].replace('_', '-')} says nothing")
    checks = {Recorded.ROWS: _check_rows, Recorded.ROLLOUTS: _check_rollouts, Recorded.STREAM: _check_prompt}
    ctx.exit(1 if checks[kind](inputs, options, given) else 0)


def _recorded(inputs: tuple[str, ...], shape: str | None) -> Recorded:
    from ..audit.dumps.reading import is_of_engines

    kinds = {Recorded.ROLLOUTS if is_of_engines(given, shape) else Recorded.ROWS for given in inputs}
    if kinds == {Recorded.ROWS} and len(inputs) == 1 and _is_stream(inputs[0]):
        return Recorded.STREAM
    if len(kinds) > 1:
        raise click.UsageError("rows and rollouts are checked by themselves: name files of one kind")
    return kinds.pop()


def _show(report: Any, options: dict[str, Any], views: Any, known: Any = None) -> None:
    if options["as_json"]:
        click.echo(json.dumps(report.to_json()))
    elif not options["quiet"]:
        show_view(views.text_view, views.plain_view, report)
    if options["html"] is not None:
        write_page(options["html"], report, tokenizer=known)


# -- rows


def _check_rows(inputs: tuple[str, ...], options: dict[str, Any], given: set[str]) -> bool:
    from ..data.check import document as checks
    from ..data.check.columns import RowColumns
    from ..data.check.dataset import check_dataset
    from .inputs import chosen_tokenizer, row_settings

    own = _EVERY - {"tools", "kwargs", "renderer", "chat_template"} | set(_OWN)
    own |= {"sources", "ids_column", "mask_column", "pad_token", "split"}
    with ProgressBars(transient=True, quiet=options["quiet"]) as bars:
        report = check_dataset(
            inputs,
            tokenizer=chosen_tokenizer(options["tokenizer"]),
            changes=row_settings({name: options[name] for name in options if name in given - own}),
            sources=options["sources"],
            columns=RowColumns(options["ids_column"], options["mask_column"]),
            pad_token=options["pad_token"],
            split=options["split"],
            limit=options["limit"],
            progress=lambda done, total: bars.show("checking", done, total),
            assumed=options["tokenizer"] is None and options["chat_template"] is None,
        )
    _show(report, options, checks)
    return not report.rows or not (report.clean or ("unchecked" in options["allow"] and not report.differing))


# -- rollouts


def _check_rollouts(inputs: tuple[str, ...], options: dict[str, Any], _: set[str]) -> bool:
    from ..audit import inspection_document as inspections
    from ..audit.inspect import inspect_rollouts

    known, engine, quiet = _known(inputs, options), options["engine"], options["quiet"]
    with ProgressBars(transient=True, quiet=quiet) as bars:
        report = inspect_rollouts(
            inputs,
            known,
            shape=options["shape"],
            limit=options["limit"],
            engine=None if engine is None else lambda: _connected(engine, known),
            progress=lambda done, total: bars.show("checking", done, total, line=f"checked {done / total:.0%}"),
        )
    _show(report, options, inspections, known)
    kinds = {"breaks", "masks", "logprobs", "ids", "unreadable"}
    found = not report.rollouts or any(map(report.failing, kinds.difference(options["allow"])))
    if quiet and found:
        unread = f"; {report.unreadable:,} could not be read" if report.unreadable else ""
        click.echo(f"{report.verdict}{unread}", err=True)
    return found


def _known(inputs: tuple[str, ...], options: dict[str, Any]) -> Any:
    """The renderer of the model, or its tokenizer where it has no template; None where nobody says which it is."""
    from ..audit.dumps.reading import highest_id
    from ..audit.inspect import recorded_tokenizer
    from ..errors import RendererError, TemplateError
    from ..tokens.loading import load_tokenizer
    from .inputs import make_renderer

    name = options["tokenizer"] or recorded_tokenizer(inputs)
    if name is None and highest_id(inputs, options["shape"]) >= load_tokenizer("pocket").vocabulary.size:
        note("no --tokenizer given: breaks are found, and not explained")
        return None
    try:
        return make_renderer({**options, "tokenizer": name})
    except (RendererError, TemplateError) as error:
        if options["renderer"] != "auto" or options["chat_template"] is not None or options["kwargs"]:
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


# -- a prompt against a stream


def _check_prompt(inputs: tuple[str, ...], options: dict[str, Any], _: set[str]) -> bool:
    import numpy as np

    from ..diagnose.breaks import explain_break
    from .inputs import make_renderer

    if len(inputs) != 1:
        raise click.UsageError("--prompt is compared with one stream")
    stream, prompt = Path(inputs[0]), options["prompt"]
    ids, known = _read_stream(stream, options["branch"])
    following = _ids(known["next_prompt"], stream) if prompt is None else _ids(_read_json(Path(prompt)), Path(prompt))
    sampled = known.get("sampled")
    if sampled is None and "prompt_length" in known:
        sampled = np.arange(len(ids)) >= int(known["prompt_length"])
    renderer = make_renderer(options)
    with working("comparing"):
        found = explain_break(ids, following, renderer, sampled=sampled)
    if options["as_json"]:
        click.echo(json.dumps({"extends": found is None} | ({} if found is None else found.to_json())))
    elif found is not None:
        click.echo(str(found))
    elif not options["quiet"]:
        click.echo(f"the prompt extends the stream: {len(ids):,} ids, and {len(following) - len(ids):,} new ones")
    if options["html"] is not None and found is not None:
        write_page(options["html"], found, tokenizer=renderer)
    return found is not None


def _is_stream(given: str) -> bool:
    """Whether a file is JSON with a stream and its next prompt."""
    path = Path(given)
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        value = _read_json(path)
    except InputError:
        return False
    return isinstance(value, dict) and {"stream", "next_prompt"} <= value.keys()


def _read_stream(path: Path, branch: int | None) -> tuple[list[int], dict[str, Any]]:
    """The ids of a stream, and what else its file says."""
    from ..audit.dumps.records import is_trajectory
    from ..trajectory import load_trajectory

    if is_trajectory(path):
        trajectory = load_trajectory(path).trajectory
        return trajectory.stream(branch).tolist(), {"sampled": trajectory.loss_mask(branch, once=False)}
    found = _read_json(path)
    return (_ids(found.get("stream"), path), found) if isinstance(found, dict) else (_ids(found, path), {})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path.name} is neither a trajectory file nor JSON: {error}") from None


def _ids(found: Any, path: Path) -> list[int]:
    from ..tokens.ids import check_ids

    if not isinstance(found, list):
        raise InputError(f"{path.name} must hold a list of token ids")
    return check_ids(found, path.name).tolist()  # type: ignore[no-any-return]
