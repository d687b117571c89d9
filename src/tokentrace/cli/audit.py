"""``tokentrace audit``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InputError
from . import command, options
from .output import show_report, working

if TYPE_CHECKING:
    from ..diagnose.certify import AuditReport

_ON = ("index", "step", "past")
_PARSERS = ("tool_parser", "reasoning_parser")


@command
@click.argument("tokenizers", nargs=-1, metavar="[TOKENIZER]...", type=click.Path())
@click.option("-t", "--tokenizer", "more", multiple=True, metavar="PATH", help="Also names a TOKENIZER.")
@options.audit_options
@options.input_file("--on", "Instead, compare this conversation in production, rollout and training.")
@options.index_option
@options.tools_option
@options.number("--step", least=0, text="With --on: show only step N.")
@options.past_option("With --on: past in training; inference: a rollout breaks where production rewrites.")
@options.flag("--grammar", text="Show the grammar of the model's turn instead.")
@options.value(
    "--tool-parser",
    "NAME",
    "With --grammar: the dialect of tool calls.",
    shell_complete=options.complete_dialects,
)
@options.value("--reasoning-parser", "NAME", "With --grammar: the tags of reasoning.")
@options.value(
    "--require",
    "USES",
    "Exit with 1 unless these hold: sft-one-row, sft-per-turn, rl-append-only, rl-user-turns, production-parity.",
)
@options.flag("--allow-partly", text="Accept uses that hold for some turns only.")
@options.json_option("Print the reports as JSON.")
@options.page_option("Write a page as well.")
@options.flag("-q", "--quiet", text="Print only uses that are not met; nothing with --on.")
@click.pass_context
def audit(
    ctx: click.Context, /, *, tokenizers: tuple[str, ...], more: tuple[str, ...], **options: Any
) -> None:
    """Certify each TOKENIZER: does its template only append, what does it lose, and what is it safe for?

    The first lines say what to do. Each break comes with the smallest conversation that has it, and the template
    line that causes it. TOKENIZER is a model's folder or hub name (name@revision for a revision), or a .jinja
    file in a model's folder; without one, the embedded pocket model is audited.

    With --on, a conversation is compared instead, turn by turn: what production shows, the stream of an
    append-only rollout, and a training row. With --grammar, the grammar of the model's turn is shown instead.

    The exit code is 0; 1 if a use does not hold (with --require, only those that it names count) or --on shows a
    difference; 2 on errors.

    \b
    Examples:
      tokentrace audit ./Qwen3-8B
      tokentrace audit ./Qwen3-8B --kwargs enable_thinking=false
      tokentrace audit ./Qwen3-8B --require rl-append-only,sft-per-turn
      tokentrace audit models/* --html report.html
      tokentrace audit ./Qwen3-8B --on chat.json --step 2
      tokentrace audit ./Qwen3-8B --json | jq '.[].verdicts[] | {use, grade}'
    """
    tokenizers += more
    _check_options(ctx, options, tokenizers)
    if not options["grammar"] and options["on"] is None:
        ctx.exit(_certify(tokenizers, options))
    options |= _split_name(tokenizers[0] if tokenizers else None, options["chat_template"])
    ctx.exit(_show_grammar(options) if options["grammar"] else _show_conversation(options))


def _check_options(ctx: click.Context, options: dict[str, Any], tokenizers: tuple[str, ...]) -> None:
    on, grammar = options["on"] is not None, options["grammar"]
    used = {**dict.fromkeys(_ON, on), **dict.fromkeys(_PARSERS, grammar), "tools": on or grammar}
    for name, goes in used.items():
        if not goes and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            needs = "--grammar" if name in _PARSERS else "--on"
            raise click.UsageError(f"--{name.replace('_', '-')} goes with {needs}")
    if grammar and on:
        raise click.UsageError("--on and --grammar cannot be combined: give one of them")
    if (on or grammar) and (len(tokenizers) > 1 or options["require"] is not None):
        raise click.UsageError(
            f"{'--grammar' if grammar else '--on'} takes one tokenizer, gives no verdicts"
        )
    if not tokenizers and (options["require"] is not None or options["quiet"]):
        raise click.UsageError("--require and --quiet need a TOKENIZER (pocket: the embedded one)")


def _certify(tokenizers: tuple[str, ...], options: dict[str, Any]) -> int:
    """1 if something does not hold."""
    from ..diagnose.certify import audits_document
    from ..diagnose.verdicts import Use
    from ..settings import choose
    from .inputs import chosen_tokenizer, split_list

    require, partly = options["require"], options["allow_partly"]
    uses = [choose(Use, "--require", use) for use in split_list(require or "")]
    if require is not None and not uses:
        raise click.UsageError(f"--require {require!r} names no use: choose from {', '.join(Use)}")
    reports = [_run(name, options) for name in tokenizers or (chosen_tokenizer(None),)]
    show_report(audits_document(reports), [report.to_json() for report in reports], options)
    unmet = [(report, one) for report in reports for one in report.unmet(uses or Use, partly=partly)]
    for report, one in unmet if uses or options["quiet"] else ():
        required = " is required, and" if uses else ""
        click.secho(f"{report.name}: {one.use}{required} {one.grade}", fg="red", err=True)
        click.echo("\n".join(f"  {words}" for words in one.against), err=True)
    return 1 if unmet else 0


def _run(name: str, options: dict[str, Any]) -> AuditReport:
    from ..diagnose.certify import audit_template
    from .inputs import make_renderer

    files = _split_name(name, options["chat_template"])
    renderer = make_renderer(options | files)
    title, template = Path(files["tokenizer"]).absolute().name, files["chat_template"]
    title = title if template is None else f"{Path(template).name} of {title}"
    with working(f"auditing {title}"):
        return audit_template(renderer, name=title)


def _show_grammar(options: dict[str, Any]) -> int:
    from ..show.grammar import describe_grammar, grammar_document
    from .inputs import make_renderer, read_tools

    renderer, tools = make_renderer(options, **{name: options[name] for name in _PARSERS}), options["tools"]
    with working("reading the template"):
        document, data = (
            show(renderer, read_tools(tools)) for show in (grammar_document, describe_grammar)
        )
    show_report(document, data, options)
    return 0


def _show_conversation(options: dict[str, Any]) -> int:
    """1 if production, rollout and training differ."""
    from ..diagnose.histories import compare_histories
    from .inputs import conversation_title, make_renderer, read_conversation, read_tools

    messages, tools = read_conversation(options["on"], options["index"])
    renderer = make_renderer(options, past=options["past"])
    with working("comparing"):
        report = compare_histories(renderer, messages, tools=read_tools(options["tools"], tools))
    step = options["step"]
    steps = report.steps if step is None else report.steps[step : step + 1]
    if step is not None and not steps:
        raise InputError(f"--step: there is no step {step}; there are {len(report.steps)}, counted from 0")
    chosen = replace(report, steps=steps)
    show_report(chosen.document(), chosen.to_json(), options, title=conversation_title(options["on"]))
    return 0 if report.equal else 1


def _split_name(name: str | None, template: str | None) -> dict[str, Any]:
    """The tokenizer and template of a name. A .jinja file belongs to the model in its folder."""
    path = Path(name or "")
    if path.suffix != ".jinja":
        return {"tokenizer": name, "chat_template": template}
    if template is not None:
        raise InputError(
            f"{name} is a template, but --chat-template names another: give the model's folder"
        )
    if not path.is_file():
        raise InputError(f"there is no file {name}")
    if not path.with_name("tokenizer.json").is_file():
        advice = f"use tokentrace audit MODEL --chat-template {name}"
        raise InputError(f"there is no tokenizer.json next to {name}: {advice}")
    return {"tokenizer": str(path.parent), "chat_template": name}
