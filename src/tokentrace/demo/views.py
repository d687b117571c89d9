"""The views of the comparison of client paths: a table for terminals, a page for browsers, numbers for programs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..compare.breaks import Break
from ..compare.token_diff import DiffOp, token_text
from ..rendering.renderer import Renderer
from ..rollout.loop import Rollout
from ..samples.trajectories import report_rollouts
from ..show.html import _counted, _text, _token, framed
from ..show.pieces import _BY_ROLE, KINDS, Kind
from ..tokens.differences import unequal
from ..tokens.kinds import Kind as Origin
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import visible
from .paths import ABOUT, ClientPath, PathReport

_EXAMPLES: Final = 4
"""Breaks shown on the page."""

NO_GAP: Final = 1e-4
"""Below this, two logprobs of one token are one number, computed in another order."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table."""

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
        "engine against trainer with the same weights, over the sampled tokens that the row still has",
        lambda one: _gap(one.mean_gap),
        True,
        lambda one: one.mean_gap < NO_GAP,
    ),
    Measure(
        "logprob gap, largest",
        "of one token",
        lambda one: _gap(one.largest_gap),
        True,
        lambda one: one.largest_gap < NO_GAP,
    ),
    Measure("rollouts with a break", "", lambda one: f"{one.broken:,} of {len(one.rollouts):,}"),
    Measure("tokens in the samples", "what a trainer has to go through", lambda one: f"{_in_rows(one):,}"),
    Measure(
        "cache lost", "tokens of streams that an engine had to read again after a break", lambda one: f"{_lost(one):,}"
    ),
    Measure("solved", "questions answered rightly", lambda one: f"{100 * one.solved:.1f} %"),
    Measure("turns", "", lambda one: f"{one.turns:,}"),
    Measure("sampled tokens", "", lambda one: f"{one.sampled:,}"),
    Measure("tokens a second", "of the rollouts alone, on this machine", lambda one: f"{one.speed:,.0f}"),
)


def _in_rows(report: PathReport) -> int:
    return report_rollouts(rollout.trajectory for rollout in report.rollouts).tokens_in_rows


def _lost(report: PathReport) -> int:
    return sum(found.stream_length - found.position for some in report.breaks.values() for found in some)


# -- for programs


def demo_json(reports: Sequence[PathReport], seed: int) -> dict[str, Any]:
    """The table as plain data."""
    return {
        "seed": seed,
        "paths": {
            str(one.path): {
                "rollouts": len(one.rollouts),
                "breaks": one.num_breaks,
                "broken_rollouts": one.broken,
                "causes": one.causes,
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
                "seconds": one.seconds,
            }
            for one in reports
        },
    }


# -- for terminals


def demo_text(reports: Sequence[PathReport]) -> RenderableType:
    """The table, why streams broke, and a break of the most frequent kind."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("")
    for one in reports:
        table.add_column(str(one.path), justify="right")
    for measure in MEASURES:
        cells = [Text(measure.value(one), _style(measure, one)) for one in reports]
        table.add_row(Text(measure.label, "bold" if measure.key else "dim"), *cells)
    parts: list[RenderableType] = [table]
    told = [one for one in reports if one.causes]
    if told:
        parts += [Text(), Text("Why streams broke", "bold")]
        for one in told:
            why = ", ".join(f"{cause}: {count}" for cause, count in one.causes.items())
            parts.append(Text(f"  {one.path}: {visible(why)}"))
        cause, (name, found) = next(iter(told[0].examples.items()))
        parts += [Text(), Text(f"For example, {cause} ({told[0].path}, {visible(name)})", "bold")]
        parts += [Text(f"  {line}") for line in str(found).splitlines()]
    return Group(*parts)


def _style(measure: Measure, report: PathReport) -> str:
    if measure.good is None:
        return ""
    return "bold green" if measure.good(report) else "bold red"


# -- for browsers


def demo_page(reports: Sequence[PathReport], renderer: Renderer, seed: int) -> str:
    """The comparison as a page that needs nothing but itself; every text escaped."""
    count = len(reports[0].rollouts)
    body = "".join(
        [
            f'<p class="tt-lead">{_counted(count, "rollout")} of the pocket model on held-back questions, at '
            f"temperature 1, by {len(reports)} client paths: the same questions, tools, weights and seeds (--seed "
            f"{seed}). Everything below was measured in this run.</p>",
            _table(reports),
            "<h2>Where streams broke</h2>"
            '<p class="tt-lead">One line for each rollout: the last prompt and what was sampled after it. A history '
            "that was encoded anew does not hold sampled tokens any more: what was green has turned grey.</p>",
            _streams(reports),
            _examples(reports, renderer.tokenizer),
            _whole(reports, renderer),
        ]
    )
    return framed(
        "Three ways to the next turn",
        "tokentrace demo",
        "",
        body,
        "",
        styles=("report.css", "histories.css", "demo.css"),
    )


def _table(reports: Sequence[PathReport]) -> str:
    heads = "".join(f"<th>{_text(one.path)}<small>{_text(ABOUT[one.path])}</small></th>" for one in reports)
    lines = []
    for measure in MEASURES:
        cells = "".join(f"<td{_class(measure, one)}>{_text(measure.value(one))}</td>" for one in reports)
        about = f"<small>{_text(measure.about)}</small>" if measure.about else ""
        key = ' class="key"' if measure.key else ""
        lines.append(f"<tr{key}><td>{_text(measure.label)}{about}</td>{cells}</tr>")
    causes = "".join(
        f"<td>{'<br>'.join(f'{_text(cause)}: {number:,}' for cause, number in one.causes.items()) or 'none'}</td>"
        for one in reports
    )
    lines.append(f'<tr class="why"><td>causes of breaks</td>{causes}</tr>')
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
        f"<figure><figcaption>{_text(report.path)}<small>{_counted(report.num_breaks, 'break')}, "
        f"{_counted(report.samples, 'sample')}</small></figcaption>"
        f'<svg viewBox="-{wide:.1f} 0 {longest + 2 * wide:.1f} {high}" preserveAspectRatio="none" '
        f'style="height:{max(60, min(420, 6 * len(report.rollouts)))}px" role="img" '
        f'aria-label="Streams of the path {_text(report.path)}">{"".join(rows)}</svg></figure>'
    )


def _examples(reports: Sequence[PathReport], tokenizer: Tokenizer) -> str:
    shown: dict[str, tuple[ClientPath, str, Break]] = {}
    for report in reports:
        for cause, (name, found) in report.examples.items():
            shown.setdefault(cause, (report.path, name, found))
    if not shown:
        return ""
    parts = [_example(path, name, found, tokenizer) for path, name, found in list(shown.values())[:_EXAMPLES]]
    return (
        "<h2>What a break looks like</h2>"
        '<p class="tt-lead">The shortest one of each cause. Above what the model sampled, below what the client sent '
        "for the next turn in its place.</p>" + "".join(parts)
    )


def _example(path: ClientPath, name: str, found: Break, tokenizer: Tokenizer) -> str:
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
                body += f'<span class="tt-skip">{_counted(row.count, "token")}</span>'
            elif row.op is own:
                body += f'<{tag}><s class="k8">{tokens}</s></{tag}>'
            last = last if row.op is DiffOp.SKIPPED else row.op
        rows.append(
            f'<section class="tt-row"><div class="tt-gutter"><p>{label}</p></div><div class="tt-tokens">{body}</div>'
            "</section>"
        )
    where = f"{path}, {name}, token {found.position:,} of {found.stream_length:,}"
    return (
        f'<div class="tt-example"><p><b>{_text(found.cause)}</b><small>{_text(where)}</small><br>{_text(found.detail)}'
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
        f"{_counted(chosen.turns, 'turn')}. Underlined tokens were sampled and carry loss; their titles tell id and "
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
            f"<small>{_counted(last - first, 'token')}</small>{more}</div>"
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
