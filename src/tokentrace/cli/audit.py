"""``tokentrace audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import InputError
from . import command
from .options import (
    OneOf,
    ResultFile,
    audit_options,
    complete_dialects,
    complete_folders,
    index_option,
    json_option,
    page_option,
    together,
    tools_option,
)
from .output import ProgressBars, make_console, note, show_view, working, write_file

if TYPE_CHECKING:
    from ..diagnose.audit_report import AuditReport
    from ..rendering.renderer import Renderer

_on_options = together(
    click.option(
        "--on",
        type=click.Path(exists=True, dir_okay=False, allow_dash=True),
        metavar="FILE",
        help="Compare what production, rollout and training show of this conversation instead.",
    ),
    index_option,
    tools_option,
    click.option("--step", type=click.IntRange(min=0), metavar="N", help="With --on: all that differs at step N only."),
    click.option(
        "--history",
        type=OneOf(["train", "inference"]),
        default="train",
        show_default=True,
        help="With --on: what the rollout does where the template would rewrite the past: keep it, or break.",
    ),
    click.option("--preserve-all-thinking", is_flag=True, help="With --on: training keeps all reasoning."),
    click.option("--preserve-thinking-between-tool-calls", is_flag=True, help="With --on: that after the last user."),
    click.option("--use-patched", is_flag=True, help="With --on: training shows past turns as they were sampled."),
)
_grammar_options = together(
    click.option("--grammar", is_flag=True, help="Show what the model writes in its turn instead."),
    click.option(
        "--tool-parser",
        metavar="NAME",
        shell_complete=complete_dialects,
        help="With --grammar: the dialect of tool calls, instead of the template's own.",
    ),
    click.option("--reasoning-parser", metavar="NAME", help="With --grammar: how reasoning is set off."),
)


@command
@click.argument("tokenizers", nargs=-1, metavar="TOKENIZER...", shell_complete=complete_folders)
@click.option("-t", "--tokenizer", "more", multiple=True, metavar="PATH", help="Another way to name one.")
@audit_options
@_on_options
@_grammar_options
@click.option(
    "--require",
    metavar="USES",
    help="Exit with 1 unless these hold: sft-one-row, sft-per-turn, rl-append-only, rl-user-turns, production-parity.",
)
@click.option("--allow-partly", is_flag=True, help="What holds for some turns meets --require.")
@click.option("--against", metavar="OTHER", help="Another tokenizer or template: say what differs from it.")
@json_option("Print the reports as JSON.")
@page_option("Write a page as well.")
@click.option("--markdown", type=ResultFile(), metavar="FILE", help="Write a table as well.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but what is not met.")
@click.pass_context
def audit(
    ctx: click.Context,
    /,
    *,
    tokenizers: tuple[str, ...],
    more: tuple[str, ...],
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    on: str | None,
    grammar: bool,
    require: str | None,
    allow_partly: bool,
    against: str | None,
    as_json: bool,
    html: Path | None,
    markdown: Path | None,
    quiet: bool,
    **given: Any,
) -> None:
    """Certify each TOKENIZER: does its template only append, what does it lose, and what is it safe for?

    The first line says what to do, and is followed by commands to type.

    Every append (a tool's result, several, a user, a system message, another turn) is rendered after every kind of
    turn and compared, id for id, with what a rollout holds. Where that breaks, the smallest conversation that shows it
    and the line of the template that does it are named. What else is known of the template follows, and a verdict for
    each use.

    TOKENIZER is a model's folder or hub name (name@revision for one of its revisions), or a .jinja file in a model's
    folder. Without one, the embedded pocket model is audited.

    With --on, one conversation is compared instead, turn by turn: what the shipped template shows in production, the
    stream of a rollout that is only appended to, and one training row. With --grammar, what the model writes in its
    turn is shown: how reasoning, content and calls are set off, and which delimiters are control tokens.

    The exit code is 0, 1 if problems were found (a use that does not hold, or that --require names and is not met; a
    difference that --against or --on shows), 2 on errors.

    \b
    Examples:
      tokentrace audit ./Qwen3-8B
      tokentrace audit ./Qwen3-8B --kwargs enable_thinking=false
      tokentrace audit ./Qwen3-8B --require rl-append-only,sft-per-turn
      tokentrace audit ./Qwen3-8B --against ./my-finetune
      tokentrace audit ./Qwen3-8B --against mine.jinja
      tokentrace audit models/* --html report.html
      tokentrace audit ./Qwen3-8B --on chat.json --step 2
      tokentrace audit ./Qwen3-8B --grammar --json | jq .stop_token_ids
      tokentrace audit ./Qwen3-8B --json | jq '.[].verdicts[] | {use, grade}'
    """
    from ..diagnose import audit_document as views
    from ..diagnose.audit_differences import differences
    from ..diagnose.verdicts import Use
    from ..settings import choose
    from ..show.page import page_html
    from .inputs import chosen_tokenizer, split_list

    tokenizers += more
    _check_used(ctx, given, on is not None, grammar)
    if on is not None or grammar:
        if grammar and on is not None:
            raise click.UsageError("--on and --grammar show two things: give one of them")
        if len(tokenizers) > 1 or require is not None or against is not None or markdown is not None:
            raise click.UsageError(f"{'--grammar' if grammar else '--on'} is about one tokenizer, and says no verdict")
        name, source = _named(tokenizers[0], chat_template) if tokenizers else (None, chat_template)
        template = {"tokenizer": name, "kwargs": kwargs, "renderer": renderer, "chat_template": source}
        ctx.exit(
            _show_grammar(template, given, as_json)
            if on is None
            else _show_conversation(template, on, given, html, as_json)
        )
    if not tokenizers and (require is not None or quiet):
        raise click.UsageError("--require and --quiet do not audit the embedded model by default: name the tokenizer")
    uses = [choose(Use, "--require", use) for use in split_list(require or "")]
    if require is not None and not uses:
        raise click.UsageError(f"--require {require!r} names no use: name some of {', '.join(Use)}, or leave it out")
    names = tokenizers or (chosen_tokenizer(None),)
    options = {"kwargs": kwargs, "renderer": renderer, "chat_template": chat_template}
    if against is not None and len(names) != 1:
        raise click.UsageError("--against compares one tokenizer with another")
    with ProgressBars(transient=True, quiet=quiet) as bars:
        second = None if against is None else _other(against, names[0], options, bars)
        reports = []
        for at, name in enumerate(names, 1):
            label = f"{at}/{len(names)}"
            reports.append(_audited(*_loaded(name, options, bars, label), bars, label))
        other = None if second is None else _audited(*second, bars, "against")
    changed = [] if other is None else list(differences(other, reports[0]))
    if html is not None:
        write_file(html, page_html(views.audit_document(reports)))
    if markdown is not None:
        write_file(markdown, views.markdown(reports))
    if as_json:
        data: Any = [report.to_json() for report in reports]
        if other is not None:
            told = [{"what": what, "before": before, "now": now} for what, before, now in changed]
            data = {"audit": data[0], "against": other.to_json(), "differences": told}
        click.echo(json.dumps(data, ensure_ascii=False))
    elif other is not None:
        show_view(views.differences_view, views.plain_differences, (other, reports[0], changed))
    elif not quiet:
        show_view(views.text_view, views.plain_view, reports, fold=True)
    unmet = [(report, one) for report in reports for one in report.unmet(uses or Use, partly=allow_partly)]
    for report, one in unmet if uses or quiet else ():
        click.secho(f"{report.name}: {one.use}{' is required, and' if uses else ''} {one.grade}", fg="red", err=True)
        for words in one.against:
            click.echo(f"  {words}", err=True)
    ctx.exit(1 if changed or (unmet and (uses or other is None)) else 0)


def _show_grammar(template: dict[str, Any], given: dict[str, Any], as_json: bool) -> int:
    from ..diagnose.grammar_sheet import make_sheet
    from ..diagnose.grammar_view import json_view, plain_view, text_view
    from .inputs import make_renderer, read_tools

    parsers = {name: given[name] for name in ("tool_parser", "reasoning_parser")}
    renderer = make_renderer(template, **parsers)
    with working("reading the template"):
        sheet = make_sheet(renderer, read_tools(given["tools"]))
    if as_json:
        click.echo(json.dumps(json_view(sheet), indent=2, ensure_ascii=False))
    else:
        show_view(text_view, plain_view, sheet, width=make_console().width)
    return 0


def _show_conversation(
    template: dict[str, Any], conversation: str, given: dict[str, Any], html: Path | None, as_json: bool
) -> int:
    """Show what production, rollout and training hold of a conversation; 1 where they differ."""
    from ..diagnose.history_document import history_document, plain_view, text_view
    from ..diagnose.history_walk import compare_histories
    from ..show.page import page_html
    from .inputs import conversation_title, make_renderer, read_conversation, read_tools

    names = ("history", "preserve_all_thinking", "preserve_thinking_between_tool_calls", "use_patched")
    messages, own_tools = read_conversation(conversation, given["index"])
    renderer = make_renderer(template, **{name: given[name] for name in names})
    with working("comparing"):
        report = compare_histories(renderer, messages, tools=read_tools(given["tools"], own_tools))
    step = given["step"]
    if step is not None and step >= len(report.steps):
        raise InputError(f"--step: there is no step {step}; there are {len(report.steps)}, counted from 0")
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        show_view(text_view, plain_view, report, step=step)
    if html is not None:
        write_file(html, page_html(history_document(report, conversation_title(conversation), step=step)))
    return 0 if report.equal else 1


def _check_used(ctx: click.Context, given: dict[str, Any], on: bool, grammar: bool) -> None:
    """Refuse options of --on and --grammar without these."""
    for name in given:
        used = (on or grammar) if name == "tools" else grammar if name.endswith("_parser") else on
        if not used and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            needs = "--grammar" if name.endswith("_parser") else "--on"
            raise click.UsageError(f"--{name.replace('_', '-')} goes with {needs}")


def _named(name: str, template: str | None) -> tuple[str, str | None]:
    """The tokenizer and the template that a name stands for: a template's file is that of the model beside it."""
    path = Path(name)
    if path.suffix != ".jinja":
        return name, template
    if template is not None:
        raise InputError(f"{name} is a template, and --chat-template names another one; give the model's folder")
    if not path.is_file():
        raise InputError(f"there is no file {name}")
    if not _has_tokenizer(path):
        raise InputError(
            f"{name} has no tokenizer.json beside it: name the model whose template it is to be, as in "
            f"tokentrace audit MODEL --chat-template {name}"
        )
    return str(path.parent), name


def _loaded(name: str, options: dict[str, Any], bars: ProgressBars, label: str) -> tuple[Renderer, str]:
    """The renderer of what is audited, and what to call it."""
    from ..rendering.factory import create_renderer
    from .inputs import parse_kwargs

    path = Path(name)
    name, template = _named(name, options["chat_template"])
    audited = path.absolute().name if template is None else f"{Path(template).name} of {Path(name).absolute().name}"
    bars.show(label, 0, 1, f"loading {name}", f"{label}: loading {name}")
    renderer = create_renderer(name, options["renderer"], chat_template=template, **parse_kwargs(options["kwargs"]))
    return renderer, audited


def _audited(renderer: Renderer, name: str, bars: ProgressBars, label: str) -> AuditReport:
    from ..diagnose.certify import audit_template

    def progress(what: str, done: int, total: int) -> None:
        bars.show(label, done, total, f"{name}: {what}", f"{label} {name}: {what}, {done} of {total}")

    return audit_template(renderer, name=name, progress=progress)


def _other(name: str, first: str, options: dict[str, Any], bars: ProgressBars) -> tuple[Renderer, str]:
    """What ``--against`` names: another tokenizer, or another template for the same one."""
    path = Path(name)
    if path.suffix == ".jinja" and path.is_file() and not _has_tokenizer(path):
        note(f"{name} has no tokenizer beside it: it is audited with that of {first}")
        folder = str(Path(first).parent) if first.endswith(".jinja") else first
        return _loaded(folder, {**options, "chat_template": name}, bars, "against")[0], path.name
    return _loaded(name, options, bars, "against")


def _has_tokenizer(template: Path) -> bool:
    return (template.parent / "tokenizer.json").is_file()
