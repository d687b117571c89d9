"""`audit_template`: run every check on a template, and report the results."""

import itertools
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from jinja2 import nodes

from ..errors import TemplateLimitError, TokentraceError
from ..formats.dialects import dialect_of
from ..formats.grammar import TurnGrammar
from ..rendering.bridged import BridgedTokens
from ..rendering.factory import create_renderer
from ..rendering.renderer import Renderer
from ..settings import choose
from ..show.document import Cell, Document, Table
from ..show.visible import counted, listed
from ..showing import ShowsItself
from ..study.probes import SYSTEM, USER
from ..study.study import TemplateStudy
from ..template.chat_template import ChatTemplate, parse_template
from .appends import NO_END, TOOLS, Append, AppendCell, AppendMatrix, turns
from .facts import TemplateFacts, find_facts, probe_renderings
from .verdicts import FLAWS, AppendFinding, Grade, Use, Verdict, find_flaws, grade, judge, judged

_MAX_TEXT = 200_000
_MAX_VARIABLES = 12
_VALUE = "PROBEVALUE"
_BRIDGED = "bridged"
SIGNS = {
    Grade.HOLDS: Cell("✓", "good"),
    Grade.PARTLY: Cell("◐", "poor"),
    Grade.FAILS: Cell("✗", "bad"),
    None: Cell("−", "dim"),
}
_Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class AuditReport(ShowsItself):
    """The certificate of a template: its matrix, facts, and a verdict for each use.

    `conclusion` says what to do, then what to type. `grades`: by append (None if refused) and use.
    `findings`: what does not hold, once per cause. `switches`: verdicts with other settings.
    `bridging`: breaks that can be bridged, and why others cannot.
    """

    name: str
    family: str
    digest: str
    settings: Mapping[str, Any]
    conclusion: Sequence[str]
    verdicts: Sequence[Verdict]
    grades: Sequence[Grade | None]
    findings: Sequence[AppendFinding]
    facts: TemplateFacts
    dialect: str | None
    grammar: TurnGrammar
    cells: Sequence[AppendCell]
    switches: Mapping[str, Sequence[Verdict]]
    bridging: Mapping[str, int]
    notes: Sequence[str]

    def verdict(self, use: str) -> Verdict:
        return self.verdicts[list(Use).index(choose(Use, "use", use))]

    def unmet(self, uses: Iterable[str], *, partly: bool = False) -> list[Verdict]:
        """The verdicts that do not hold; with `partly`, only those that fail."""
        good = {Grade.HOLDS, Grade.PARTLY} if partly else {Grade.HOLDS}
        return [one for use in uses if (one := self.verdict(use)).grade not in good]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def document(self, _: Any = None) -> Document:
        verdicts: list[_Row] = []
        for one in self.verdicts:
            sign = SIGNS[one.grade]
            verdicts.append([sign._replace(text=f"{sign.text} {one.use}"), str(one)])
            verdicts += [["", words] for words in one.against]
            verdicts += [["", Cell(f"holds with {words}", "good")] for words in one.holds_with]
        findings = [row for number, one in enumerate(self.findings, 1) for row in _finding(number, one)]
        calls = f": {self.grammar.calls.outline()}" if self.grammar.calls is not None else ""
        facts: dict[str, Any] = {
            **{one.name.replace("_", " "): getattr(self.facts, one.name) for one in fields(self.facts)},
            "dialect of calls": f"{self.dialect or 'none known'}{calls}",
            "notes on the grammar": self.grammar.notes,
            "appends that break": self.bridging,
        }
        for name, each in self.switches.items():
            facts[f"with {name}"] = {one.use: one.grade for one in each}
        known = [(name, _words(value)) for name, value in facts.items()]
        settings = [f"{name}={value!r}" for name, value in self.settings.items()]
        return Document(
            f"Audit of {self.name}",
            "tokentrace audit",
            lead=" · ".join([f"family {self.family}", f"template {self.digest[:12]}", *settings]),
            summary=self.conclusion,
            notes=self.notes,
            tables=[
                Table("What it is safe for", ["", " "], verdicts, words=2, code=True),
                _overview([self]),
                *[Table("What goes wrong", ["", " "], findings, words=2, code=True)] * bool(findings),
                Table("What else is known", ["", " "], known, words=2),
            ],
        )

    def __repr__(self) -> str:
        grades = ", ".join(f"{one.use}: {one.grade}" for one in self.verdicts)
        return f"AuditReport({self.name!r}, {grades})"


def audits_document(reports: Sequence[AuditReport]) -> Document:
    if len(reports) == 1:
        return reports[0].document()
    names = [report.name for report in reports]
    title = f"Audit of {counted(len(names), 'template') if len(names) > 3 else listed(names)}"
    findings: list[_Row] = []
    for one in reports:
        findings += [[one.name], one.conclusion[:1], *([finding.why] for finding in one.findings)]
    tables = [_overview(reports), Table("What goes wrong", ["", " "], findings, words=2, code=True)]
    return Document(title, "tokentrace audit", tables=tables)


def _overview(reports: Iterable[AuditReport]) -> Table:
    rows: list[_Row] = [[report.name, *(SIGNS[one] for one in report.grades)] for report in reports]
    about = "✓ holds   ◐ for some turns   ✗ for none   − refused by the template"
    return Table("Each append after a turn, and each use", ["", *Append, *Use], rows, about)


def _finding(number: int, finding: AppendFinding) -> Iterator[_Row]:
    yield [f"{number}.", finding.why]
    cell = finding.smallest
    for one in cell.breaks:
        if (blame := one.blame) is not None:
            yield f"line {blame.line}", blame.source
            words = f"a condition in it is {'true, then false' if blame.before else 'false, then true'}"
            yield from [("", words)] * (blame.before is not None)
        yield from (("had", repr(one.before)), ("has", repr(one.after)))
    yield ["", Cell("the smallest conversation that shows it:", "dim")]
    for at, message in enumerate(cell.messages):
        texts = (f"{name} {value!r}" for name, value in message.items() if value and name != "role")
        appended = at > cell.index
        yield [f"{' +'[appended]} {message['role']}", Cell(", ".join(texts), "good" * appended)]


def _words(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return "; ".join(f"{key}: {_words(one)}" for key, one in value.items()) or "none"
        case tuple() | list():
            return ", ".join(map(str, value)) or "none"
    return (str(value) or "none") if str(value).isprintable() else repr(value)


def _conclude(
    name: str, cells: Sequence[AppendCell], facts: TemplateFacts, bridging: Mapping[str, int]
) -> list[str]:
    """Say what to do; without calls, for conversations without tools."""
    scope = "" if facts.calls else " for conversations without tools"
    if scope:
        cells = [cell for cell in cells if not cell.append.calls]
        pairs = [(one, tuple(role for role in one.roles if role != "tool")) for one in facts.altered]
        facts = replace(facts, altered=tuple(replace(one, roles=roles) for one, roles in pairs if roles))
    row, turn, tools, users, _ = judge(cells, facts)
    broken = sum(bridging.values())
    options = ["--past expand"] * bool(broken) + ["--final-stop"] * facts.last_turn_without_stop
    with_them = f" with {listed(options)}" if options else ""
    only_ends = all(NO_END in words and "; " not in words for words in turn.against)
    lines = sorted({one.line for one in facts.altered if one.line is not None and not one.dropped})
    if row.grade is Grade.HOLDS:
        sft, options = f"safe{scope or ' as it is'}", []
    elif turn.grade is Grade.HOLDS or (facts.last_turn_without_stop and only_ends):
        sft = f"safe{with_them}{scope}"
    elif lines:
        sft = f"not safe until you stop line{'s' * (len(lines) > 1)} {listed(lines)} from altering texts"
    elif turn.grade is Grade.PARTLY:
        sft = f"safe{with_them} for some turns only: {turn.against[0]}"
    else:
        sft = f"not safe{f', even{with_them}' if options else ''}: {turn.against[0]}"
    tokenize = f"tokenize chats.jsonl -o rows.parquet -t {' '.join([name, *options])}"
    commands = [] if sft.startswith("not") else [tokenize]
    rl = f"safe{scope}, every prompt only appends"
    if against := (*tools.against, *users.against):
        refused = broken - bridging.get(_BRIDGED, 0)
        only = "safe with tools alone; otherwise " * (tools.grade is Grade.HOLDS and not scope)
        but = f" (it refuses {refused} of {broken} cases)" if refused else ""
        rl = f"{only}use the bridge{but}; {against[0]}"
        commands.append(f"serve --dev --engine http://127.0.0.1:8000 -t {name} --store runs.db")
        commands.append(f"audit {name} --on chat.json")
    date = f" The prompt contains the current date ({facts.date.partition(':')[0]})." if facts.date else ""
    return [f"SFT: {sft}. RL: {rl}.{date}", *(f"$ tokentrace {command}" for command in commands)]


def audit_template(tokenizer: Any, *, name: str | None = None, **settings: Any) -> AuditReport:
    """Certify a `Renderer`, or anything that `create_renderer` takes, with its settings.

    Raises the errors of `create_renderer`, and TemplateLimitError if a single question exceeds
    the limits.

    >>> from tokentrace.pocket import POCKET
    >>> audit_template(POCKET).verdict("rl-append-only").grade
    <Grade.HOLDS: 'holds'>
    """
    renderer = tokenizer if isinstance(tokenizer, Renderer) else create_renderer(tokenizer, **settings)
    renderer = renderer.silent()
    study, matrix = renderer.study(TOOLS), AppendMatrix(renderer)
    question = study.probe((USER,), prompt=True)
    if question is not None and len(question.text) > _MAX_TEXT:
        problem = f"the template writes {len(question.text):,} characters around one question"
        limit = f"an audit renders hundreds of questions and allows {_MAX_TEXT:,}"
        raise TemplateLimitError(f"{problem}; {limit}")
    cells = [matrix.blamed(matrix.cell(form)) for form in turns()]
    facts = find_facts(renderer)
    asked = judged(cells, facts)
    groups = {append: [cell for cell in asked if cell.append is append] for append in Append}
    broken = [cell for cell in asked if cell.breaks and cell.append is not Append.ASSISTANT]
    bridging = dict(Counter(_bridge(renderer, cell) for cell in broken).most_common())
    switches, refused = _run_switches(renderer, study)
    verdicts = judge(cells, facts)
    for at, one in enumerate(verdicts):
        holding = (setting for setting, each in switches.items() if each[at].grade is Grade.HOLDS)
        verdicts[at] = replace(one, holds_with=() if one.grade is Grade.HOLDS else tuple(holding))
    skipped = "variables not tried, since the template fails on a plain question with them"
    grammar, kwargs = renderer.grammar(TOOLS), dict(renderer.template_kwargs)
    name = name or PurePath(renderer.tokenizer.name).name or renderer.family
    typed = [f"--kwargs {shlex.quote(f'{key}={value}')}" for key, value in kwargs.items()]
    model = " ".join([shlex.quote(renderer.tokenizer.name or name), *typed])
    return AuditReport(
        name,
        renderer.family,
        study.template.digest,
        kwargs,
        conclusion=_conclude(model, cells, facts, bridging),
        verdicts=verdicts,
        grades=[*map(grade, groups.values()), *(one.grade for one in verdicts)],
        findings=find_flaws(groups, FLAWS),
        facts=facts,
        dialect=dialect_of(grammar.calls, grammar.channels),
        grammar=grammar,
        cells=cells,
        switches=switches,
        bridging=bridging,
        notes=[f"{skipped}: {listed(refused)}"] * bool(refused),
    )


def _bridge(renderer: Renderer, cell: AppendCell) -> str:
    """`_BRIDGED`, or why a cell cannot be bridged."""
    (before, tools, _), (until, *_), _ = cell.requests
    try:
        prompt = renderer.render(before, tools=tools, add_generation_prompt=True)
        answered = renderer.render(until, tools=tools)
        for turn in (turn for turn in answered.turns if turn.message == cell.index):
            sampled, new = answered.ids[turn.start : turn.stop], cell.messages[cell.index + 1 :]
            bridged = renderer.bridge(prompt.ids, sampled, new, tools=tools)
            return _BRIDGED if isinstance(bridged, BridgedTokens) else str(bridged.reason)
        return "the template writes no turn"
    except TokentraceError as error:
        return str(error)


def _run_switches(renderer: Renderer, study: TemplateStudy) -> tuple[dict[str, list[Verdict]], list[str]]:
    """The verdicts with settings that change a probe; and variables that fail."""
    audits: dict[str, list[Verdict]] = {}
    refused, plain = [], _texts(study)
    forms = [form for form in turns() if form.arguments == "object"]
    writes = [tools for tools in (False, True) if study.readable((SYSTEM, USER), tools, True) is not None]
    for name, values in _variables(renderer, study).items():
        switched = {f"{name}={value!r}": renderer.with_variables({name: value}) for value in values}
        studies = [other.study(TOOLS) for other in switched.values()]
        if any(one.readable((SYSTEM, USER), tools, True) is None for one in studies for tools in writes):
            refused.append(name)
            continue
        for setting, other in switched.items():
            if _texts(other.study(TOOLS)) != plain:
                audits[setting] = judge([*map(AppendMatrix(other).cell, forms)], find_facts(other))
    return audits, refused


def _texts(study: TemplateStudy) -> list[str]:
    return ["" if one is None else one.text for one in probe_renderings(study)]


def _variables(renderer: Renderer, study: TemplateStudy) -> dict[str, list[Any]]:
    """Each switch, and the texts that it is compared with, or false and true."""
    template, settings = study.template, renderer.template_kwargs
    tree = parse_template(template.source) if isinstance(template, ChatTemplate) else nodes.Template([])
    compared = defaultdict[str, list[Any]](list)
    for compare in tree.find_all(nodes.Compare):
        sides = [compare.expr, *(one.expr for one in compare.ops)]
        items = [item for side in sides for item in (getattr(side, "items", None) or [side])]
        texts = [one.value for one in items if isinstance(one, nodes.Const) and isinstance(one.value, str)]
        for side in sides:
            if isinstance(side, nodes.Name) and texts:
                compared[side.name] += texts
    stored = (name for loop in tree.find_all(nodes.For) for name in loop.find_all(nodes.Name))
    names = template.variables - {*renderer.tokenizer.variables}
    names -= {name.name for name in stored if name.ctx == "store"}
    probes = itertools.product(names, (False, True))
    renderings = ((name, study.probe((USER,), tools, True, {name: _VALUE})) for name, tools in probes)
    printed = {name for name, one in renderings if one is not None and _VALUE in one.text}
    names -= printed - compared.keys()
    choices = {name: dict.fromkeys(compared.get(name, (False, True))) for name in sorted(names)}
    chosen = itertools.islice(choices.items(), _MAX_VARIABLES)
    return {name: [one for one in each if repr(settings.get(name)) != repr(one)] for name, each in chosen}
