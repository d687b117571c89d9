"""The views of the comparison of client paths: a table for terminals, a page for browsers, numbers for programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.breaks import Break, BreakCause
from ..compare.token_diff import DiffOp, token_text
from ..errors import counted
from ..pocket import NOISE
from ..rendering.renderer import Renderer
from ..rollout.loop import Rollout
from ..samples.trajectories import report_rollouts
from ..show.html import _text, _token, framed
from ..show.pieces import _BY_ROLE, KINDS, Kind
from ..tokens.differences import unequal
from ..tokens.kinds import Kind as Origin
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import visible
from .paths import ABOUT, TEMPERATURE, ClientPath, PathReport
from .trials import PRETRAINED, WORDS, Demo, Trial, remarks

_EXAMPLES: Final = 4
"""Breaks shown on the page."""

NO_GAP: Final = 1e-4
"""Below this, two logprobs of one token are one number, computed in another order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table, and what it counts."""

    label: str
    about: str
    value: Callable[[PathReport], str]
    key: bool = False
    good: Callable[[PathReport], bool] | None = None


def _gap(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-4 else f"{value:.4f}"


MEASURES: Final = (
    Measure(
        "breaks",
        "prompts that do not begin with the stream so far, id for id",
        lambda one: f"{one.num_breaks:,}",
        True,
        lambda one: one.num_breaks == 0,
    ),
    Measure(
        "samples",
        "rows that it takes to train each sampled token after the very prompt it was sampled from",
        lambda one: f"{one.samples:,} from {len(one.rollouts):,}",
        True,
        lambda one: one.samples == len(one.rollouts),
    ),
    Measure(
        "mismatched tokens",
        "sampled tokens that are not in the row, where a rollout is trained as one row",
        lambda one: f"{one.mismatched:,}",
        True,
        lambda one: one.mismatched == 0,
    ),
    Measure(
        "tokens never sampled",
        "tokens of those rows that carry loss, and that no engine returned",
        lambda one: f"{one.foreign:,}",
        False,
        lambda one: one.foreign == 0,
    ),
    Measure(
        "logprob gap, mean",
        "|engine's logprob - that of the same weights in one pass over the row|, over sampled tokens still in the row",
        lambda one: _gap(one.mean_gap),
        True,
        lambda one: one.mean_gap < NO_GAP,
    ),
    Measure(
        "logprob gap, largest",
        "the same, of the token where it is largest",
        lambda one: _gap(one.largest_gap),
        True,
        lambda one: one.largest_gap < NO_GAP,
    ),
    Measure("rollouts with a break", "those with at least one", lambda one: f"{one.broken:,} of {len(one.rollouts):,}"),
    Measure(
        "tokens in the samples",
        "the length of those rows together; what two rows share is in both",
        lambda one: f"{_in_rows(one):,}",
    ),
    Measure(
        "cache lost",
        "tokens of streams after the place of a break: what a prefix cache held and could not serve",
        lambda one: f"{_lost(one):,}",
    ),
    Measure(
        "solved",
        "questions answered rightly; one more or less is no finding",
        lambda one: f"{100 * one.solved:.1f} %",
    ),
    Measure("turns", "completions that were sampled, calls and answers alike", lambda one: f"{one.turns:,}"),
    Measure("sampled tokens", "of all turns, stop tokens among them", lambda one: f"{one.sampled:,}"),
)


def _in_rows(report: PathReport) -> int:
    return report_rollouts(rollout.trajectory for rollout in report.rollouts).tokens_in_rows


def _lost(report: PathReport) -> int:
    return sum(found.stream_length - found.position for some in report.breaks.values() for found in some)


# -- for programs


def demo_json(demo: Demo) -> dict[str, Any]:
    """The tables as plain data, and what has to be known to read them."""
    return {
        "seed": demo.seed,
        "remarks": remarks(demo),
        "noise": asdict(NOISE),
        "pretrained": {
            "model": PRETRAINED.model,
            "rollouts": PRETRAINED.rollouts,
            "broken_rollouts": PRETRAINED.broken,
            "cause": str(PRETRAINED.cause),
            "measured": "apart, not in this run",
        },
        "paths": {
            str(one.path): {
                **_json_breaks(one),
                "samples": one.samples,
                "tokens_in_samples": _in_rows(one),
                "cache_lost": _lost(one),
                "mismatched_tokens": one.mismatched,
                "never_sampled_tokens": one.foreign,
                "mean_logprob_gap": one.mean_gap,
                "largest_logprob_gap": one.largest_gap,
                "solved": one.solved,
                "turns": one.turns,
                "sampled_tokens": one.sampled,
            }
            for one in demo.paths
        },
        "trials": [
            {
                "name": trial.name,
                "about": trial.about,
                "temperature": trial.temperature,
                "drops_past_reasoning": trial.drops_reasoning,
                "paths": {str(one.path): _json_breaks(one) for one in trial.reports},
            }
            for trial in demo.trials
        ],
    }


def _json_breaks(report: PathReport) -> dict[str, Any]:
    return {
        "rollouts": len(report.rollouts),
        "later_user_turns": report.later_user_turns,
        "breaks": report.num_breaks,
        "broken_rollouts": report.broken,
        "causes": report.causes,
    }


# -- why streams broke: the same lines for terminals and browsers


def _cause_lines(trial: Trial) -> list[tuple[str, str, list[str]]]:
    """For each line of a trial its label, what it is, and a number for each path."""
    lines = [
        (cause, _words(cause), [f"{one.causes.get(cause, 0):,}" for one in trial.reports]) for cause in trial.causes
    ]
    if not lines:
        lines.append(("no break", "", ["0" for _ in trial.reports]))
    broken = [f"{one.broken:,} of {len(one.rollouts):,}" for one in trial.reports]
    lines.append(("rollouts with a break", "", broken))
    if trial.drops_reasoning:
        asked = [f"{one.later_user_turns:,}" for one in trial.reports]
        lines.append(("user messages after an answer", "where past reasoning is dropped", asked))
    return lines


def _words(cause: str) -> str:
    return WORDS.get(BreakCause(cause), "docs/breaks.md tells what that is")


# -- for terminals

_LABEL, _NUMBER = 32, 13
"""How wide the columns are, so that one table stands below the other."""


def demo_text(demo: Demo) -> RenderableType:
    """The table, what its lines are, why streams broke and one example, and what has to be known to read it."""
    table = _columns([str(one.path) for one in demo.paths])
    for measure in MEASURES:
        cells = [Text(measure.value(one), _style(measure, one)) for one in demo.paths]
        table.add_row(Text(measure.label, "bold" if measure.key else "dim"), *cells)
    parts: list[RenderableType] = [table, Text()]
    parts += [Text.assemble(f"  {measure.label}: ", (measure.about, "dim")) for measure in MEASURES]
    parts += [
        Text(),
        Text("Why streams broke: breaks by cause, with the noise in pocket's training and without", "bold"),
    ]
    for trial in demo.trials:
        parts += [Text(), Text.assemble(f"  {trial.name}", (f": {trial.about}", "dim")), _trial_table(trial)]
    told = {label: words for trial in demo.trials for label, words, _ in _cause_lines(trial) if words}
    parts += [Text(), *(Text.assemble(f"  {label}: ", (words, "dim")) for label, words in told.items())]
    shown = [(trial, *found) for trial in demo.trials for found in _examples_of(trial)]
    if shown:
        trial, path, name, found = shown[0]
        parts += [Text(), Text(f"For example, {found.cause} ({trial.name}, {path}, {visible(name)})", "bold")]
        parts += [Text(f"  {line}") for line in str(found).splitlines()]
    parts += [Text(), Text("What to know when reading this", "bold")]
    parts += [Text(f"- {remark}") for remark in remarks(demo)]
    return Group(*parts)


def _columns(heads: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    table.add_column("", width=_LABEL)
    for head in heads:
        table.add_column(head, justify="right", width=_NUMBER)
    return table


def _trial_table(trial: Trial) -> Table:
    table = _columns([str(one.path) for one in trial.reports])
    table.show_header = False
    for label, _, numbers in _cause_lines(trial):
        table.add_row(Text(f"  {label}"), *numbers)
    return table


def _style(measure: Measure, report: PathReport) -> str:
    if measure.good is None:
        return ""
    return "bold green" if measure.good(report) else "bold red"


# -- for browsers


def demo_page(demo: Demo, renderer: Renderer) -> str:
    """The demo as a page that needs nothing but itself; every text escaped."""
    reports = demo.paths
    said = "".join(f"<li>{_text(remark)}</li>" for remark in remarks(demo))
    body = "".join(
        [
            f'<p class="tt-lead">{counted(len(reports[0].rollouts), "rollout")} of the pocket model on held-back '
            f"questions, at temperature {TEMPERATURE:g}, by {len(reports)} client paths: the same questions, tools, "
            f"weights and seeds (--seed {demo.seed}). All numbers of the tables were counted in this run. A request "
            "that two paths make alike, same prompt and same seed, was computed once.</p>",
            f'<h2>What to know when reading this</h2><ul class="tt-said">{said}</ul>',
            "<h2>What each path comes to</h2>",
            _table(reports),
            "<h2>Why streams broke</h2>"
            '<p class="tt-lead">Breaks by cause, on the same questions: with the noise that pocket was trained on, '
            "without it, and under a template that drops past reasoning.</p>",
            _causes_table(demo),
            "<h2>Where streams broke</h2>"
            f'<p class="tt-lead">At temperature {TEMPERATURE:g}, one line for each rollout: the last prompt and what '
            "was sampled after it. A history that was encoded anew does not hold sampled tokens any more: what was "
            "green has turned grey.</p>",
            _streams(reports),
            _examples(demo, renderer.tokenizer),
            _whole(reports, renderer),
        ]
    )
    styles = ("report.css", "histories.css", "demo.css")
    return framed("Three ways to the next turn", "tokentrace demo", "", body, styles=styles)


def _table(reports: Sequence[PathReport]) -> str:
    heads = "".join(f"<th>{_text(one.path)}<small>{_text(ABOUT[one.path])}</small></th>" for one in reports)
    lines = []
    for measure in MEASURES:
        cells = "".join(f"<td{_class(measure, one)}>{_text(measure.value(one))}</td>" for one in reports)
        about = f"<small>{_text(measure.about)}</small>" if measure.about else ""
        key = ' class="key"' if measure.key else ""
        lines.append(f"<tr{key}><td>{_text(measure.label)}{about}</td>{cells}</tr>")
    return f'<div class="tt-wide"><table class="tt-paths"><tr><th></th>{heads}</tr>{"".join(lines)}</table></div>'


def _causes_table(demo: Demo) -> str:
    heads = "".join(f"<th>{_text(one.path)}</th>" for one in demo.paths)
    lines = []
    for trial in demo.trials:
        about = f"{_text(trial.name)}<small>{_text(trial.about)}</small>"
        lines.append(f'<tr class="trial"><th colspan="{len(trial.reports) + 1}">{about}</th></tr>')
        for label, words, numbers in _cause_lines(trial):
            cells = "".join(f"<td>{_text(number)}</td>" for number in numbers)
            more = f"<small>{_text(words)}</small>" if words else ""
            lines.append(f"<tr><td>{_text(label)}{more}</td>{cells}</tr>")
    return f'<div class="tt-wide"><table class="tt-paths"><tr><th></th>{heads}</tr>{"".join(lines)}</table></div>'


def _class(measure: Measure, report: PathReport) -> str:
    if measure.good is None:
        return ""
    return ' class="good"' if measure.good(report) else ' class="bad"'


def _streams(reports: Sequence[PathReport]) -> str:
    longest = max((len(one.trajectory) for report in reports for one in report.rollouts), default=1)
    figures = "".join(_figure(report, longest) for report in reports)
    return (
        f'<div class="tt-streams">{figures}</div><p class="tt-lights"><b><span class="s"></span></b>prompt, tool '
        'results, scaffold <b><span class="w"></span></b>sampled <b><span class="x"></span></b>break</p>'
    )


def _figure(report: PathReport, longest: int) -> str:
    rows = []
    step = 8
    wide = max(2.0, longest / 130)
    for at, rollout in enumerate(report.rollouts):
        trajectory, y = rollout.trajectory, at * step + 3
        rows.append(f'<rect class="s" x="0" y="{y}" width="{len(trajectory)}" height="5"/>')
        edges = np.flatnonzero(np.diff(trajectory.loss_mask(once=False), prepend=False, append=False)).tolist()
        rows += [
            f'<rect class="w" x="{start}" y="{y}" width="{stop - start}" height="5"/>'
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]
        rows += [
            f'<rect class="x" x="{branch.start - wide / 2:.1f}" y="{y - 1}" width="{wide:.1f}" height="7"/>'
            for branch in trajectory.branches[1:]
        ]
    high = len(report.rollouts) * step + 4
    return (
        f"<figure><figcaption>{_text(report.path)}<small>{counted(report.num_breaks, 'break')}, "
        f"{counted(report.samples, 'sample')}</small></figcaption>"
        f'<svg viewBox="-{wide:.1f} 0 {longest + 2 * wide:.1f} {high}" preserveAspectRatio="none" '
        f'height="{max(60, min(420, 6 * len(report.rollouts)))}" role="img" '
        f'aria-label="Streams of the path {_text(report.path)}">{"".join(rows)}</svg></figure>'
    )


def _examples_of(trial: Trial) -> list[tuple[ClientPath, str, Break]]:
    """For each cause the shortest break of the first path that has one, with the name of its rollout."""
    found: dict[str, tuple[ClientPath, str, Break]] = {}
    for report in trial.reports:
        for cause, (name, one) in report.examples.items():
            found.setdefault(cause, (report.path, name, one))
    return list(found.values())


def _examples(demo: Demo, tokenizer: Tokenizer) -> str:
    shown: dict[str, str] = {}
    for trial in demo.trials:
        for path, name, found in _examples_of(trial):
            if found.cause not in shown and len(shown) < _EXAMPLES:
                shown[found.cause] = _example(f"{trial.name}, {path}, {name}", found, tokenizer)
    if not shown:
        return ""
    return (
        "<h2>What a break looks like</h2>"
        '<p class="tt-lead">The shortest one of each cause. Above what the model sampled, below what the client sent '
        "for the next turn in its place.</p>" + "".join(shown.values())
    )


def _example(where: str, found: Break, tokenizer: Tokenizer) -> str:
    control = tokenizer.vocabulary.is_control
    sides = {"sampled": (DiffOp.REMOVED, "del"), "next prompt": (DiffOp.ADDED, "ins")}
    rows = []
    for label, (own, tag) in sides.items():
        body, last = "", DiffOp.EQUAL
        for row in found.tokens:
            tokens = "".join(_token(text, bool(control[index])) for text, index in zip(row.texts, row.ids, strict=True))
            if row.op is DiffOp.EQUAL:
                body += f'<s class="k8">{tokens}</s>'
            elif row.op is DiffOp.SKIPPED and last is own:
                body += f'<span class="tt-skip">{counted(row.count, "token")}</span>'
            elif row.op is own:
                body += f'<{tag}><s class="k8">{tokens}</s></{tag}>'
            last = last if row.op is DiffOp.SKIPPED else row.op
        rows.append(
            f'<section class="tt-row"><div class="tt-gutter"><p>{label}</p></div><div class="tt-tokens">{body}</div>'
            "</section>"
        )
    place = f"{where}, token {found.position:,} of {found.stream_length:,}"
    return (
        f'<div class="tt-example"><p><b>{_text(found.cause)}</b><small>{_text(place)}</small><br>{_text(found.detail)}'
        f'</p><div class="tt-rows">{"".join(rows)}</div></div>'
    )


# -- one rollout


def _whole(reports: Sequence[PathReport], renderer: Renderer) -> str:
    """A rollout of tokentrace; where some broke by another path, one of those."""
    ours = next((one for one in reports if one.path is ClientPath.TOKENTRACE), None)
    if ours is None or not ours.rollouts:
        return ""
    chosen, spans = min(
        ((one, _respelled(one, renderer)) for one in ours.rollouts),
        key=lambda pair: (not pair[1], pair[0].turns < 3, len(pair[0].trajectory)),
    )
    marks = (
        "Tokens in a frame are those that encoding the text again would have replaced."
        if spans
        else "Encoding its text again would give the same tokens."
    )
    return (
        "<h2>One rollout, whole</h2>"
        f'<p class="tt-lead">{_text(chosen.task.name)} by tokentrace: one stream, one row, '
        f"{counted(chosen.turns, 'turn')}. Underlined tokens were sampled and carry loss; their titles tell id and "
        f"logprob. {marks}</p>"
        f'<div class="tt-rows tt-whole">{_stream_rows(chosen, renderer.tokenizer, spans)}</div>'
    )


def _respelled(rollout: Rollout, renderer: Renderer) -> list[tuple[int, int]]:
    """Where the stream has other tokens than a render of its final messages."""
    stream = rollout.trajectory.stream()
    rendered = renderer.render(rollout.messages, tools=rollout.schemas)
    parts = unequal(stream.tolist(), rendered.token_ids)
    return [(start, stop) for start, stop, _, _ in parts if start < stop]


def _stream_rows(rollout: Rollout, tokenizer: Tokenizer, marked: Sequence[tuple[int, int]]) -> str:
    """The stream message by message, tokens coloured by who they are from."""
    trajectory = rollout.trajectory
    kinds, owners = trajectory.kinds(), trajectory.message_indices()
    frames = np.zeros(len(kinds), np.bool_)
    for start, stop in marked:
        frames[start:stop] = True
    tokens = _stream_tokens(rollout, tokenizer)
    cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(kinds)]
    out = []
    for first, last in itertools.pairwise(cuts):
        message = int(owners[first])
        role = str(rollout.messages[message]["role"]) if message >= 0 else "template"
        edges = np.flatnonzero(np.diff(kinds[first:last]) | np.diff(frames[first:last])) + first + 1
        body = ""
        for start, stop in itertools.pairwise([first, *edges.tolist(), last]):
            origin = Origin(int(kinds[start]))
            shown = _KINDS.get(origin) or _BY_ROLE.get(role, Kind.USER if role == "user" else Kind.SCAFFOLD)
            classes = f"k{KINDS.index(shown)}{' on' if origin is Origin.SAMPLED else ''}{' o' if start % 2 else ''}"
            piece = f'<s class="{classes}">{"".join(tokens[start:stop])}</s>'
            body += f"<mark>{piece}</mark>" if frames[start] else piece
        number = "" if message < 0 else f"<b>{message}</b>"
        drawn = int(np.count_nonzero(kinds[first:last] == Origin.SAMPLED))
        more = f"<small>{drawn:,} sampled</small>" if drawn else ""
        out.append(
            f'<section class="tt-row"><div class="tt-gutter"><p>{number}{_text(role)}</p>'
            f"<small>{counted(last - first, 'token')}</small>{more}</div>"
            f'<div class="tt-tokens">{body}</div></section>'
        )
    return "".join(out)


_KINDS: Final = {Origin.SCAFFOLD: Kind.SCAFFOLD, Origin.SYNTHETIC: Kind.UNKNOWN}


def _stream_tokens(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """Each token of the stream; a sampled one with a title."""
    trajectory = rollout.trajectory
    control = tokenizer.vocabulary.is_control
    out = []
    for index, logprob in zip(trajectory.stream().tolist(), trajectory.logprobs().tolist(), strict=True):
        made = _token(token_text(tokenizer.vocabulary, index), bool(control[index]))
        title = "" if math.isnan(logprob) else f' title="{index} · {logprob:.4f}"'
        out.append(made[:2] + title + made[2:])  # after the name of the element, <i or <b
    return out


__all__ = ["MEASURES", "Measure", "demo_json", "demo_page", "demo_text"]
