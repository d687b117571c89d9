"""``tokentrace audit``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import command
from .options import ResultFile, audit_options, complete_folders, complete_uses, json_option, page_option
from .output import ProgressBars, note, show_view, write_file

if TYPE_CHECKING:
    from ..audit.report import AuditReport
    from ..rendering.renderer import Renderer


@command
@click.argument("tokenizers", nargs=-1, metavar="TOKENIZER...", shell_complete=complete_folders)
@audit_options
@click.option(
    "--require",
    metavar="USES",
    shell_complete=complete_uses,
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
    kwargs: tuple[str, ...],
    renderer: str,
    chat_template: str | None,
    require: str | None,
    allow_partly: bool,
    against: str | None,
    as_json: bool,
    html: Path | None,
    markdown: Path | None,
    quiet: bool,
) -> None:
    """Certify each TOKENIZER: does its template only append, what does it lose, and what is it safe for?

    Every append (a tool's result, several, a user, a system message, another turn) is rendered after every kind of
    turn and compared, id for id, with what a rollout holds. Where that breaks, the smallest conversation that shows it
    and the line of the template that does it are named. What else is known of the template follows, and a verdict for
    each use.

    TOKENIZER is a model's folder or hub name (name@revision for one of its revisions), or a .jinja file in a model's
    folder. Without one, the embedded pocket model is audited.

    The exit code is 0, or 1 if a use that --require names is not met, or --against finds a difference; 2 on errors.

    \b
    Examples:
      tokentrace audit ./Qwen3-8B
      tokentrace audit ./Qwen3-8B --kwargs enable_thinking=false
      tokentrace audit ./Qwen3-8B --require rl-append-only,sft-per-turn
      tokentrace audit ./Qwen3-8B --against ./my-finetune
      tokentrace audit ./Qwen3-8B --against mine.jinja
      tokentrace audit models/* --html report.html
      tokentrace audit ./Qwen3-8B --json | jq '.[].verdicts[] | {use, grade}'
    """
    from ..audit.differences import differences
    from ..audit.verdicts import Use
    from ..settings import choose
    from ..show import audit as views
    from ..viewer.page import page_html
    from .inputs import chosen_tokenizer, split_list

    if quiet and require is None and against is None:
        raise click.UsageError("--quiet says nothing but what is not met: name that with --require or --against")
    if require is not None and not tokenizers:
        raise click.UsageError("--require needs to know of what: name the tokenizer")
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
    unmet = [(report, one) for report in reports for one in report.unmet(uses, partly=allow_partly)]
    for report, one in unmet:
        click.secho(f"{report.name}: {one.use} is required, and {one.grade}", fg="red", err=True)
        for words in one.against:
            click.echo(f"  {words}", err=True)
    ctx.exit(1 if unmet or changed else 0)


def _loaded(name: str, options: dict[str, Any], bars: ProgressBars, label: str) -> tuple[Renderer, str]:
    """The renderer of what is audited, and what to call it."""
    from ..rendering.factory import create_renderer
    from .inputs import parse_kwargs

    path = Path(name)
    template = options["chat_template"]
    if path.suffix == ".jinja":
        if template is not None:
            raise InputError(f"{name} is a template, and --chat-template names another one; give the model's folder")
        if not path.is_file():
            raise InputError(f"there is no file {name}")
        if not _has_tokenizer(path):
            raise InputError(
                f"{name} has no tokenizer.json beside it: name the model whose template it is to be, as in "
                f"tokentrace audit MODEL --chat-template {name}"
            )
        template, name = name, str(path.parent)
    audited = Path(name).absolute().name
    if template is not None:
        audited = f"{Path(template).name} of {audited}"
    bars.show(label, 0, 1, f"loading {name}", f"{label}: loading {name}")
    renderer = create_renderer(name, options["renderer"], chat_template=template, **parse_kwargs(options["kwargs"]))
    return renderer, audited


def _audited(renderer: Renderer, name: str, bars: ProgressBars, label: str) -> AuditReport:
    from ..audit.certify import audit_template

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
