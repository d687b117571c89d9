"""`audit_template`: run everything that an audit asks of a template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

from jinja2 import nodes

from ..errors import TemplateLimitError, TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..study.probes import SYSTEM, USER
from ..study.study import TemplateStudy
from ..template.chat_template import ChatTemplate, parse_template
from .appends import AppendCell, AppendMatrix, AppendOutcome, Where
from .audit_report import AuditReport, Bridging, SettingAudit
from .cases import TOOLS, Append, turns
from .facts import TemplateFacts, find_facts, printed_variables, probe_renderings
from .verdicts import Grade, Use, Verdict, judge, judged

_MAX_TEXT: Final = 200_000
"""Characters that a template may write around one question."""
_MAX_SETTINGS: Final = 24

Progress = Callable[[str, int, int], None]
"""Called with a name, the number done and the total."""


def audit_template(
    tokenizer: Any, *, name: str | None = None, progress: Progress | None = None, **settings: Any
) -> AuditReport:
    """Certify a `Renderer`, or anything that `create_renderer` takes, with its settings.

    Raises the errors of `create_renderer`, and TemplateLimitError if one question is too much work.

    >>> from tokentrace.pocket import POCKET
    >>> audit_template(POCKET).verdict("rl-append-only").grade
    <Grade.HOLDS: 'holds'>
    """
    renderer = tokenizer if isinstance(tokenizer, Renderer) else create_renderer(tokenizer, **settings)
    renderer, progress = renderer.silent(), progress or (lambda *_: None)
    study = renderer.study(TOOLS)
    _check_size(study)
    forms, cells, matrix = list(turns()), [], AppendMatrix(renderer, names_lines=True)
    for done, form in enumerate(forms):
        progress("appends", done, len(forms))
        cells.append(matrix.cell(form))
    progress("facts", 0, 1)
    facts = find_facts(renderer)
    counted = judged(cells, facts)
    broken = [one for one in counted if one.outcome is AppendOutcome.BREAKS and one.append is not Append.ASSISTANT]
    refusals = Counter(reason for cell in broken if (reason := _refusal(renderer, cell)))
    switches, without_effect, refused = _run_switches(renderer, study, progress)
    return AuditReport(
        name=name or PurePath(renderer.tokenizer.name).name or renderer.family,
        tokenizer=renderer.tokenizer.name,
        family=renderer.family,
        digest=study.template.digest,
        settings=dict(renderer.template_kwargs),
        cells=tuple(cells),
        facts=facts,
        grammar=renderer.grammar(TOOLS),
        verdicts=tuple(_verdict(use, counted, facts, switches) for use in Use),
        switches=tuple(switches),
        without_effect=tuple(without_effect),
        bridging=Bridging(len(broken), len(broken) - refusals.total(), tuple(refusals.most_common())),
        notes=tuple(_notes(study, cells, refused)),
    )


def _check_size(study: TemplateStudy) -> None:
    """Raise TemplateLimitError if one question is too much work: an audit renders hundreds."""
    try:
        size = len(study.run(None, (USER,), True).text)
    except TemplateLimitError:
        raise
    except TokentraceError:
        return  # the report says what the template refuses
    if size > _MAX_TEXT:
        problem = f"the template writes {size:,} characters around one question"
        raise TemplateLimitError(f"{problem}; an audit renders hundreds of them, and takes up to {_MAX_TEXT:,}")


def _verdict(use: Use, cells: Sequence[AppendCell], facts: TemplateFacts, switches: Iterable[SettingAudit]) -> Verdict:
    """Judge a use; if it does not hold, name the settings with which it does."""
    verdict = judge(use, cells, facts)
    holding = (one.name for one in switches if Verdict(use, Grade.HOLDS, ()) in one.verdicts)
    return verdict if verdict.grade is Grade.HOLDS else replace(verdict, holds_with=tuple(holding))


def _notes(study: TemplateStudy, cells: Iterable[AppendCell], refused: Iterable[str]) -> Iterator[str]:
    if names := ", ".join(dict.fromkeys(refused)):
        yield f"not tried, because the template then fails on a plain question: {names}"
    if not isinstance(study.template, ChatTemplate):
        yield "the format is written in Python: there are no template lines to name"
    elif any(one.blame is None and one.where is not Where.SEAM for cell in cells for one in cell.breaks):
        yield "plain Jinja writes some conversations otherwise than the tracing engine; their lines are not named"


def _refusal(renderer: Renderer, cell: AppendCell) -> str:
    """Bridge a cell and say why that fails; empty if it does not."""
    tools, before = TOOLS if cell.case.tools else None, len(cell.case.past)
    try:
        prompt = renderer.render(cell.messages[:before], tools=tools, add_generation_prompt=True)
        answered = renderer.render(cell.messages[: before + 1], tools=tools)
        turn = next((turn for turn in answered.turns if turn.message == before), None)
        if turn is None:
            return "the template writes no turn"
        sampled = answered.ids[turn.start : turn.stop]
        bridged = renderer.bridge(prompt.ids, sampled, cell.messages[before + 1 :], tools=tools)
    except TokentraceError as error:
        return str(error)
    return "" if isinstance(bridged, BridgedTokens) else str(bridged.reason)


# -- switches: variables that the template reads


def _run_switches(
    renderer: Renderer, study: TemplateStudy, progress: Progress
) -> tuple[list[SettingAudit], list[str], list[str]]:
    """Audit settings that change a probe; name those that change none, and variables refused.

    A variable, a list say, is refused if the template then fails on a plain question.
    """
    audits: list[SettingAudit] = []
    without_effect: list[str] = []
    refused: list[str] = []
    plain, forms = _probe_texts(study), [form for form in turns() if form.arguments in ("", "object")]
    writes = [tools for tools in (False, True) if study.readable((SYSTEM, USER), tools, True) is not None]
    changed = [(setting, renderer.with_variables(setting).silent()) for setting in _settings(renderer, study)]
    for setting, other in changed:
        if any(other.study(TOOLS).readable((SYSTEM, USER), tools, True) is None for tools in writes):
            refused += setting
    changed = [(setting, other) for setting, other in changed if setting.keys().isdisjoint(refused)]
    for done, (setting, other) in enumerate(changed):
        progress("settings", done, len(changed))
        if _probe_texts(other.study(TOOLS)) == plain:
            without_effect.append(SettingAudit(setting).name)
            continue
        facts = find_facts(other)
        cells = tuple(map(AppendMatrix(other, names_lines=False).cell, forms))
        verdicts = tuple(judge(use, judged(cells, facts), facts) for use in Use)
        audits.append(SettingAudit(setting, cells, verdicts))
    return audits, without_effect, refused


def _probe_texts(study: TemplateStudy) -> list[str | None]:
    return [None if rendering is None else rendering.text for rendering in probe_renderings(study)]


def _settings(renderer: Renderer, study: TemplateStudy) -> list[dict[str, Any]]:
    """Return each switch with the texts that it is compared with, or with true and false.

    A variable that the template prints is no switch.
    """
    template = study.template
    tree = parse_template(template.source) if isinstance(template, ChatTemplate) else nodes.Template([])
    loops = (name for loop in tree.find_all(nodes.For) for name in loop.find_all(nodes.Name) if name.ctx == "store")
    assigned = {name.name for name in loops}
    compared: dict[str, dict[str, None]] = {}
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(one.expr for one in compare.ops)]
        items = [item for side in sides for item in (getattr(side, "items", None) or [side])]
        values = [one.value for one in items if isinstance(one, nodes.Const) and isinstance(one.value, str)]
        for side in sides:
            if isinstance(side, nodes.Name) and values:
                compared.setdefault(side.name, {}).update(dict.fromkeys(values))
    skipped = {*printed_variables(study), *compared, *assigned}
    settings: list[dict[str, Any]] = [{name: value} for name, value in renderer.switches() if name not in skipped]
    for name in sorted(compared.keys() & template.variables - set(renderer.tokenizer.variables) - assigned):
        settings += [{name: value} for value in compared[name] if renderer.template_kwargs.get(name) != value]
    return settings[:_MAX_SETTINGS]
