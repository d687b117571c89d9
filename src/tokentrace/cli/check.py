"""``tokentrace check``."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..show.visible import counted
from . import command, options
from .output import ProgressBars, note, show_report, working

_TEMPLATE = frozenset({"tools", "kwargs", "renderer", "chat_template"})
_COMMON = _TEMPLATE | {"tokenizer", "prompt", "limit", "allow", "html", "as_json", "quiet"}
_CHECK_ONLY = frozenset({"sources", "ids_column", "mask_column", "pad_token", "split"})
ROWS, ROLLOUTS, STREAM = "rows of ids", "rollouts", "a stream and its next prompt"


@command
@click.argument("inputs", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@options.template_options
@options.input_file("--prompt", "Ids of the next prompt.")
@options.value("--branch", "N", "With --prompt: a trajectory's branch.  [default: the last]", type=int)
@options.value("--engine", "URL", 'Compare logprobs with this engine\'s; "embedded": the pocket model.')
@options.supervision_options
@click.option("--source", "sources", multiple=True, metavar="FILE", help="A file the rows were made from.")
@options.value("--ids-column", "NAME", "The column of ids.  [default: detected]")
@options.value("--mask-column", "NAME", "The column of the mask, or labels.  [default: detected]")
@options.messages_column_option
@options.parse_arguments_option
@options.value("--pad-token", "TOKEN", "What rows are padded with.  [default: the tokenizer's]")
@options.split_option
@options.number("--limit", text="Check the first N rows or rollouts only.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["unchecked", "breaks", "masks", "logprobs", "ids"]),
    help="Accept this problem; may be repeated.",
)
@options.page_option("Write a page as well.")
@options.json_option("Print the report as JSON.")
@options.quiet_option
@click.pass_context
def check(ctx: click.Context, /, *, inputs: tuple[str, ...], **options: Any) -> None:
    """Check the tokens in FILE, whoever recorded them.

    Rows of ids (JSON Lines, Parquet, or a folder of them) are compared with what the template gives for their
    conversations, in the row or in the file that it names.

    Rollouts are a trajectory (.tt) or a folder of them, the output of "tokentrace rollout", a gateway's store (a
    file, or postgresql://user@host/database), their rows, or a dump of another framework. Does each prompt begin
    with the stream so far, id for id? If not, why, and what does it cost? Masks and logprobs are checked, too.

    With --prompt, FILE is a stream (a trajectory, or a JSON list of ids) that the prompt must begin with.

    The exit code is 0; 1 if there are problems, including rows that could not be checked; 2 on errors.

    \b
    Examples:
      tokentrace check rows.parquet -t ./Qwen3-8B
      tokentrace check theirs.jsonl -t ./Qwen3-8B --mask-column assistant_masks --html report.html
      tokentrace check runs/7
      tokentrace check dump.jsonl -t ./Qwen3-8B --json | jq .causes
      tokentrace check store.db -t ./Qwen3-8B --engine http://127.0.0.1:8000
      tokentrace check rollout.tt --prompt next.json -t ./Qwen3-8B
    """
    from ..diagnose.record_files import holds_rollouts

    kinds = {ROLLOUTS if holds_rollouts(name) else ROWS for name in inputs if options["prompt"] is None}
    if len(kinds) > 1:
        raise click.UsageError("rows and rollouts are checked separately: name one kind of files")
    kind = kinds.pop() if kinds else STREAM
    chosen = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    kind_of = {"engine": ROLLOUTS, "branch": STREAM}
    flags = {param.name: param.opts[0] for param in ctx.command.params}
    useless = [flags[name] for name in sorted(chosen - _COMMON) if kind_of.get(name, ROWS) != kind]
    usable = {ROWS: {"unchecked"}, ROLLOUTS: {"breaks", "masks", "logprobs", "ids"}, STREAM: set()}[kind]
    useless += [f"--allow {one}" for one in sorted({*options["allow"]} - usable)]
    useless += ["--limit"] * (kind == STREAM and "limit" in chosen)
    if useless:
        where = "with --prompt" if kind == STREAM else f"for {kind}"
        raise click.UsageError(f"{useless[0]} cannot be used {where}")
    checks = {ROWS: _check_rows, ROLLOUTS: _check_rollouts, STREAM: _check_prompt}
    ctx.exit(1 if checks[kind](inputs, options, chosen) else 0)


def _check_rows(inputs: tuple[str, ...], options: dict[str, Any], chosen: set[str]) -> bool:
    from ..diagnose.row_files import check_dataset
    from .inputs import chosen_tokenizer, row_settings

    settings = chosen - (_COMMON - _TEMPLATE) - _CHECK_ONLY
    with ProgressBars(transient=True, quiet=options["quiet"]) as bars:
        report = check_dataset(
            inputs,
            tokenizer=chosen_tokenizer(options["tokenizer"]),
            changes=row_settings({name: options[name] for name in options if name in settings}),
            columns=(options["ids_column"], options["mask_column"]),
            **{name: options[name] for name in ("sources", "pad_token", "split", "limit")},
            progress=lambda done, total: bars.show("checking", done, total),
            assumed=options["tokenizer"] is None and options["chat_template"] is None,
        )
    show_report(report, report.to_json(), options)
    return not report.total or not (
        report.clean or ("unchecked" in options["allow"] and not report.differing)
    )


def _check_rollouts(inputs: tuple[str, ...], options: dict[str, Any], _: set[str]) -> bool:
    from ..diagnose.rollouts import check_rollouts
    from .inputs import connect_engine

    model, address, quiet = _model(inputs, options), options["engine"], options["quiet"]
    connect = partial(connect_engine, address, getattr(model, "tokenizer", model))
    with ProgressBars(transient=True, quiet=quiet) as bars:
        report = check_rollouts(
            inputs,
            model,
            limit=options["limit"],
            engine=None if address is None else connect,
            progress=lambda done, total: bars.show(
                "checking", done, total, line=f"checked {done / total:.0%}"
            ),
        )
    show_report(report, report.to_json(), options, tokenizer=model)
    failed = not report.total or bool(report.problems().difference(options["allow"]))
    if quiet and failed:
        unread = f"; {report.counts['unreadable']:,} could not be read" if report.unread else ""
        click.echo(f"{report.verdict}{unread}", err=True)
    return failed


def _model(inputs: tuple[str, ...], options: dict[str, Any]) -> Any:
    """The model's renderer, or its tokenizer; None if the model is unknown."""
    from ..diagnose.record_files import highest_id
    from ..diagnose.rollouts import recorded_tokenizer
    from ..errors import RendererError, TemplateError
    from ..tokens.loading import load_tokenizer
    from .inputs import make_renderer

    name = options["tokenizer"] or recorded_tokenizer(inputs)
    if name is None and highest_id(inputs) >= load_tokenizer("pocket").vocabulary.size:
        note("without --tokenizer, breaks are counted but not explained")
        return None
    try:
        return make_renderer({**options, "tokenizer": name})
    except (RendererError, TemplateError) as error:
        if options["renderer"] != "auto" or options["chat_template"] is not None or options["kwargs"]:
            raise
        note(f"{' '.join(str(error).split())}: using only the tokenizer")
        return load_tokenizer(name)


def _check_prompt(inputs: tuple[str, ...], options: dict[str, Any], _: set[str]) -> bool:
    from ..diagnose.breaks import explain_break
    from ..diagnose.record_files import is_trajectory
    from ..trajectory import load_trajectory
    from .inputs import make_renderer

    if len(inputs) != 1 or Path(inputs[0]).is_dir():
        raise click.UsageError("--prompt is compared with one stream: name one file")
    path, branch, sampled = Path(inputs[0]), options["branch"], None
    if is_trajectory(path):
        trajectory = load_trajectory(path).trajectory
        stream, sampled = trajectory.stream(branch), trajectory.table(branch).mask
    else:
        stream = _read_ids(inputs[0])
    prompt, renderer = _read_ids(options["prompt"]), make_renderer(options)
    with working("comparing"):
        broken = explain_break(stream, prompt, renderer, sampled=sampled)
    if broken is not None:
        show_report(broken, broken.to_json(), options, tokenizer=renderer)
        return True
    if options["html"] is not None:
        note(f"the prompt extends the stream, so {options['html']} was not written")
    if options["as_json"]:
        click.echo(json.dumps({"extends": True}))
    elif not options["quiet"]:
        new = counted(len(prompt) - len(stream), "new one")
        click.echo(f"the prompt extends the stream: {counted(len(stream), 'id')}, and {new}")
    return False


def _read_ids(source: str) -> Any:
    from ..tokens.ids import check_ids
    from .inputs import conversation_title, parse_json, read_text

    name = conversation_title(source)
    return check_ids(parse_json(read_text(source), name), name)
