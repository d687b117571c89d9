"""`audit_template`: everything that is asked of a template, one thing after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Final

from ..errors import TemplateLimitError, TokentraceError
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..study.probes import USER
from ..study.study import TemplateStudy
from ..template.chat_template import ChatTemplate
from .appends import AppendCell, AppendMatrix, AppendOutcome
from .audit_report import AuditReport, SettingAudit
from .cases import Arguments, turns
from .facts import find_forging, find_prompting, find_reading, find_stops
from .field_texts import Altered, find_altered, find_indent
from .lines import LineTracer
from .readback import find_writing
from .remedies import Remedies, remedy, try_remedies
from .running import Defaults, changes_by_itself, find_cost, find_defaults
from .template_settings import find_settings, other_than_truths
from .verdicts import Grade, Verdict, judged, verdicts_of

_MOST_TEXT: Final = 200_000
"""Characters that a template may write around one question."""

Progress = Callable[[str, int, int], None]
"""Called with what is being looked at, how much of it is done, and how much there is."""


def audit_template(
    tokenizer: Any, *, name: str | None = None, progress: Progress | None = None, **settings: Any
) -> AuditReport:
    """Certify a tokenizer and its template: a `Renderer`, or whatever `create_renderer` takes, with its settings.

    Every append of the matrix is rendered and compared id for id; everything else that the report says is found out by
    running the template as well. Raises what `create_renderer` raises, and TemplateLimitError where one question is too
    much work for the template already.

    >>> from tokentrace.pocket import POCKET
    >>> audit_template(POCKET).verdict("rl-append-only").grade
    <Grade.HOLDS: 'holds'>
    """
    renderer = tokenizer if isinstance(tokenizer, Renderer) else create_renderer(tokenizer, **settings)
    return _Audit(renderer.silent(), name, progress or (lambda *_: None)).report()


class _Audit:
    """One audit. Calls and results are rendered with the template for tools, where a model has one."""

    def __init__(self, renderer: Renderer, name: str | None, progress: Progress) -> None:
        self.renderer = renderer
        self.name = name or PurePath(renderer.tokenizer.name).name or renderer.family
        self.progress = progress
        self.study = _study(renderer)
        template = self.study.template
        self.tracer = LineTracer(template.source if isinstance(template, ChatTemplate) else None)

    def _check_size(self) -> None:
        """Refuse a template that is too much work for one question: an audit asks hundreds of them."""
        try:
            rendering = self.study.run((USER,), None, True)
        except TemplateLimitError:
            raise
        except TokentraceError:
            return  # what it refuses is part of the report
        if len(rendering.text) > _MOST_TEXT:
            problem = f"the template writes {len(rendering.text):,} characters around one question"
            raise TemplateLimitError(f"{problem}; an audit renders hundreds of them, and takes up to {_MOST_TEXT:,}")

    def report(self) -> AuditReport:
        self._check_size()
        renderer, study, tracer = self.renderer, self.study, self.tracer
        cells = tuple(self._cells())
        self.progress("facts", 0, 1)
        reading, prompting = find_reading(study), find_prompting(study)
        defaults = find_defaults(study, tracer)
        remedies = try_remedies(renderer, judged(cells, reading, prompting))
        stops, writing = find_stops(renderer), replace(find_writing(renderer), indent=find_indent(study, tracer))
        altered = find_altered(study, tracer, writing.altered)
        facts = {
            "stops": stops,
            "forging": find_forging(study, tracer),
            "writing": writing,
            "altered": altered,
            "cost": find_cost(renderer, tracer),
        }
        self.progress("facts", 1, 1)
        itself = defaults.changes
        switches, unchanged = self._switches(cells, defaults, (prompting, itself, altered, stops))
        found = verdicts_of(judged(cells, reading, prompting), itself, altered, stops)
        verdicts = [_with_remedies(one, remedies, switches, altered) for one in found]
        return AuditReport(
            name=self.name,
            family=renderer.family,
            digest=study.template.digest,
            settings=dict(renderer.template_kwargs),
            cells=cells,
            switches=tuple(switches),
            without_effect=tuple(unchanged),
            prompting=prompting,
            reading=reading,
            defaults=defaults,
            remedies=remedies,
            verdicts=tuple(verdicts),
            notes=tuple(self._notes(cells, defaults.variables)),
            tokenizer=renderer.tokenizer,
            **facts,  # type: ignore[arg-type]
        )

    def _cells(self) -> Iterator[AppendCell]:
        matrix, kinds = AppendMatrix(self.study, self.tracer), list(turns())
        for done, turn in enumerate(kinds):
            self.progress("appends", done, len(kinds))
            yield matrix.cell(turn)
        self.progress("appends", len(kinds), len(kinds))

    def _switches(
        self, cells: tuple[AppendCell, ...], defaults: Defaults, facts: tuple[Any, ...]
    ) -> tuple[list[SettingAudit], list[str]]:
        """Each setting that changes an outcome or the prompt, with calls of one shape; and the names of the others."""
        found: list[SettingAudit] = []
        unchanged: list[str] = []
        given = find_settings(self.renderer, defaults.variables)
        plain = {cell.turn: (cell.outcome, cell.lost) for cell in cells}
        for done, setting in enumerate(given):
            self.progress("settings", done, len(given))
            renderer = self.renderer.with_variables(setting).silent()
            study = _study(renderer)
            matrix = AppendMatrix(study, LineTracer(None))  # the lines of each setting would cost too much
            own = tuple(matrix.cell(turn) for turn in turns((Arguments.OBJECT,)))
            if all(cell.outcome is AppendOutcome.REFUSED for cell in own):
                found.append(SettingAudit(setting, None, None))
                continue
            now, itself = find_prompting(study), changes_by_itself(study, self.tracer)
            altered, stops = find_altered(study, self.tracer, find_writing(renderer).altered), find_stops(renderer)
            same = (now, itself, altered, stops) == facts
            if same and all(plain[cell.turn] == (cell.outcome, cell.lost) for cell in own):
                unchanged.append(SettingAudit(setting, own, now).name)
                continue
            told = verdicts_of(judged(own, find_reading(study), now), itself, altered, stops)
            found.append(SettingAudit(setting, own, now, tuple(told)))
        self.progress("settings", len(given), len(given))
        return found, unchanged

    def _notes(self, cells: tuple[AppendCell, ...], printed: Mapping[str, str]) -> Iterator[str]:
        names = sorted(other_than_truths(self.renderer) - printed.keys())
        if names:
            yield f"not tried, because the template fails where they are true or false: {', '.join(names)}"
        if not self.tracer.has_lines:
            yield "the format is written in Python: there are no template lines to name"
        elif any(one.blame is None and one.where != "seam" for cell in cells for one in cell.breaks):
            yield "plain Jinja writes some conversations otherwise than the tracing engine; their lines are not named"


def _with_remedies(
    found: Verdict, remedies: Remedies, switches: Sequence[SettingAudit], altered: Sequence[Altered]
) -> Verdict:
    """A verdict with what tokentrace does about it, and the settings with which it holds."""
    with_them = [
        one.name
        for one in switches
        for other in one.verdicts
        if other.use is found.use and other.grade is Grade.HOLDS and found.grade is not Grade.HOLDS
    ]
    return Verdict(found.use, found.grade, found.against, remedy(found, remedies, altered), tuple(with_them))


def _study(renderer: Renderer) -> TemplateStudy:
    try:
        return renderer.study()
    except TokentraceError:
        return renderer.study([])
