"""The views of a history report: for terminals, for browsers, for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from ..compare.histories.differences import PAIRS, Comparison, Difference, Run, Shown, View
from ..errors import counted, listed
from ..rendering.rendered import RenderedTokens
from ..template.chat_template import REASONING_FIELDS
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.visible import visible
from .html import _asset, _text, _token, framed
from .pieces import _BY_ROLE, KINDS, Kind, token_texts

if TYPE_CHECKING:
    from rich.text import Text

    from ..compare.histories.report import HistoryReport, Step

PAGE_LIMIT: Final = 6_000
FRAGMENT_LIMIT: Final = 1_500
"""Tokens shown of one step before a view stops and says so."""

_AROUND: Final = 24
"""Equal tokens shown before and after a difference."""
_PART: Final = 48
"""Tokens shown of one part of a difference in a terminal."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A comparison that is worth showing: who holds its left side, who its right."""

    left: tuple[View, ...]
    right: tuple[View, ...]
    compared: Comparison


def contrasts(step: Step) -> list[Contrast]:
    """The fewest comparisons that tell all that differs at a step; views that are equal stand together."""
    pairs = {(found.left, found.right): found for found in step.comparisons}
    equal = {pair for pair, found in pairs.items() if found.equal}
    production, rollout, training = View
    if not [pair for pair in pairs if pair not in equal]:
        return []
    if (production, rollout) in equal:
        return [Contrast((production, rollout), (training,), pairs[production, training])]
    if (production, training) in equal:
        return [Contrast((production, training), (rollout,), pairs[production, rollout])]
    if (rollout, training) in equal:
        return [Contrast((production,), (rollout, training), pairs[production, rollout])]
    return [Contrast((left,), (right,), pairs[left, right]) for left, right in pairs if rollout in (left, right)]


# -- for programs


def json_view(report: HistoryReport) -> dict[str, Any]:
    """A report as plain data. See `HistoryReport.to_json`."""
    return {
        "equal": report.equal,
        "summary": report.sentences(),
        "settings": dict(report.settings),
        "roles": list(report.roles),
        "branches": [ids.tolist() for ids in report.branches],
        "row": report.row.token_ids,
        "steps": [_json_step(step) for step in report.steps],
        "findings": [
            {
                "views": [str(view) for view in found.views],
                "agrees": [str(view) for view in found.agrees],
                "verb": str(found.verb),
                "what": found.what,
                "in": "turn" if found.in_turn else "prompt",
                "once": found.once,
                "messages": list(found.messages),
                "tokens": found.tokens,
                "scaffold": found.scaffold,
                "steps": list(found.steps),
                "text": str(found),
            }
            for found in report.findings
        ],
        "notes": list(report.notes),
    }


def _json_step(step: Step) -> dict[str, Any]:
    refusal = step.refusal
    shown = {view: step.shown(view) for view in View}
    return {
        "step": step.index,
        "message": step.message,
        "equal": step.equal,
        "branch": step.branch,
        "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
        "prompt_tokens": {str(view): None if found is None else found.prompt for view, found in shown.items()},
        "tokens": {str(view): None if found is None else len(found) for view, found in shown.items()},
        "comparisons": [
            {
                "left": str(found.left),
                "right": str(found.right),
                "equal": found.equal,
                "first": found.first,
                "left_tokens": found.left_tokens,
                "right_tokens": found.right_tokens,
                "fields": found.lines(),
                "differences": [
                    {
                        "in": "turn" if difference.in_turn else "prompt",
                        "left": _json_run(difference.left),
                        "right": _json_run(difference.right),
                    }
                    for difference in found.differences
                ],
            }
            for found in step.comparisons
        ],
    }


def _json_run(run: Run) -> dict[str, Any]:
    parts = [
        {
            "start": part.start,
            "stop": part.stop,
            "message": part.message,
            "role": part.role,
            "field": part.field,
            "text": part.text,
        }
        for part in run.parts
    ]
    return {"start": run.start, "stop": run.stop, "token_ids": list(run.ids), "text": run.text, "parts": parts}


# -- for terminals

_Line = list[tuple[str, str]]
"""Pieces of text with their styles."""


def plain_view(report: HistoryReport, *, step: int | None = None) -> str:
    """A report as plain lines: what it comes to, a table of the steps, and what differs at each, or at one."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in _lines(report, step))


def text_view(report: HistoryReport, *, step: int | None = None) -> Text:
    """The same in colours."""
    from rich.text import Text

    return Text("\n").join(Text.assemble(*line) for line in _lines(report, step))


def _lines(report: HistoryReport, only: int | None) -> Iterator[_Line]:
    if only is None:
        for sentence in report.sentences():
            yield [("• ", "dim"), (_flat(sentence), "bold")]
        for note in report.notes:
            yield [(f"note: {_flat(note)}", "yellow")]
        if report.steps:
            yield []
            yield from _table(report)
    before: set[tuple[View, View, Run, Run]] = set()
    for step in report.steps:
        seen = set()
        for contrast in contrasts(step):
            compared = contrast.compared
            keys = [(compared.left, compared.right, d.left, d.right) for d in compared.differences]
            seen.update(keys)
            fresh = [
                d for d, key in zip(compared.differences, keys, strict=True) if only is not None or key not in before
            ]
            if only in (None, step.index) and fresh:
                yield []
                yield from _contrast(report, step, contrast, fresh)
        before = seen
        if only == step.index and step.equal:
            yield [
                (
                    f"step {step.index}, {report.place(step)}: all hold the same {counted(len(step.rollout), 'token')}",
                    "",
                )
            ]


def _table(report: HistoryReport) -> Iterator[_Line]:
    heads = ["step", "asks for", *(str(view) for view in View), *(f"{left} → {right}" for left, right in PAIRS)]
    rows = []
    for step in report.steps:
        asked = "the turn to come" if step.message is None else f"message {step.message}"
        sizes = [f"{len(found):,}" if (found := step.shown(view)) is not None else "none" for view in View]
        rows.append([str(step.index), asked, *sizes, *(_delta(step.compare(*pair)) for pair in PAIRS)])
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    yield [("  ".join(f"{head:<{width}}" for head, width in zip(heads, widths, strict=True)), "dim")]
    for row, step in zip(rows, report.steps, strict=True):
        line: _Line = []
        for at, (cell, width) in enumerate(zip(row, widths, strict=True)):
            right = at == 0 or 2 <= at <= 4
            style = "" if at < 5 else "dim" if cell == "=" else "red"
            line.append(((f"{cell:>{width}}" if right else f"{cell:<{width}}") + "  ", style))
        if step.refusal is not None:
            line.append((f"break: {step.refusal.reason}", "yellow"))
        yield line


def _delta(compared: Comparison | None) -> str:
    if compared is None:
        return "?"
    return "=" if compared.equal else f"−{compared.left_tokens:,} +{compared.right_tokens:,}"


def _contrast(report: HistoryReport, step: Step, contrast: Contrast, fresh: Sequence[Difference]) -> Iterator[_Line]:
    known = len(contrast.compared.differences) - len(fresh)
    yield [
        (f"step {step.index}, {report.place(step)}: ", "bold"),
        (f"− {listed(contrast.left)}", "red"),
        ("   ", ""),
        (f"+ {listed(contrast.right)}", "green"),
        (f"   and {known} as at the step before" if known else "", "dim"),
    ]
    width = max((len(part.field) for d in fresh for run in (d.left, d.right) for part in run.parts), default=0)
    for difference in fresh:
        for sign, run, style in (("−", difference.left, "red"), ("+", difference.right, "green")):
            texts = _texts(report.tokenizer, run.ids)
            for part in run.parts:
                shown = texts[part.start - run.start : part.stop - run.start]
                said = "│".join(repr(visible(text))[1:-1] for text in shown[:_PART])
                more = f" … {len(shown) - _PART} more" if len(shown) > _PART else ""
                who = "-" if part.role is None else f"{part.message} {part.role}"
                where = "turn" if difference.in_turn else ""
                yield [
                    (f"{part.start:>7} {sign} ", style),
                    (f"{_flat(who):<12} {_flat(part.field):<{min(width, 32)}}  {where:<4}  ", "dim"),
                    (said + more, style),
                ]


def _flat(text: str) -> str:
    return visible(text).replace("\n", "⏎")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Ids that can be read: as much of a rendering as `token_texts` needs."""

    ids: Any
    tokenizer: Tokenizer

    def decode(self, chosen: slice) -> str:
        return self.tokenizer.decode(self.ids[chosen].tolist())


def _texts(tokenizer: Tokenizer, ids: Sequence[int] | Ids) -> list[str]:
    import numpy as np

    return token_texts(cast(RenderedTokens, _Tokens(np.asarray(ids, np.int32), tokenizer)))


# -- for browsers

_THEME: Final = """
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.querySelector(".tt-theme").addEventListener("click", () => {
    const page = document.documentElement;
    page.dataset.theme = (page.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
  });
})();
"""


def html_fragment(report: HistoryReport, *, limit: int = FRAGMENT_LIMIT) -> str:
    """A report for a notebook's cell: styles inline, no scripts."""
    styles = _asset("report.css") + _asset("histories.css")
    return f'<style>{styles}</style><div class="tt tt-fragment">{_body(report, limit, None)}</div>'


def html_page(
    report: HistoryReport, title: str = "Histories", *, step: int | None = None, limit: int = PAGE_LIMIT
) -> str:
    """A report as a page of its own: no link to anything outside, every text escaped. `step` is shown unfolded."""
    button = '<button class="tt-theme" title="Light or dark" aria-label="Light or dark">◐</button>'
    styles = ("report.css", "histories.css")
    return framed(title, "tokentrace histories", button, _body(report, limit, step), styles=styles, script=_THEME)


def _body(report: HistoryReport, limit: int, step: int | None) -> str:
    said = "".join(f"<li>{_text(sentence)}</li>" for sentence in report.sentences())
    notes = "".join(f"<li>{_text(note)}</li>" for note in report.notes)
    if notes:
        notes = f'<details class="tt-notes"><summary>Notes</summary><ul>{notes}</ul></details>'
    first = next((found.index for found in report.steps if not found.equal), None) if step is None else step
    steps = "".join(_step(report, found, limit, found.index == first) for found in report.steps)
    return f'{_cards(report)}<ul class="tt-said">{said}</ul>{_html_table(report)}{notes}{steps}'


def _cards(report: HistoryReport) -> str:
    breaks = f"{len(report.breaks)} break{'' if len(report.breaks) == 1 else 's'}" if report.breaks else "no breaks"
    cards = [f'<div class="tt-card"><p>Steps</p><strong>{len(report.steps)}</strong><small>{breaks}</small></div>']
    for left, right in PAIRS:
        differ = report.differing(left, right)
        name = f"{str(left).capitalize()} and {right}"
        value, how = ("equal", "same") if not differ else ("differ", "differs")
        more = f"at {len(differ)} of {len(report.steps)} steps" if differ else "at every step"
        cards.append(
            f'<div class="tt-card"><p>{name}</p><strong class="{how}">{value}</strong><small>{more}</small></div>'
        )
    return f'<div class="tt-cards tt-four">{"".join(cards)}</div>'


def _html_table(report: HistoryReport) -> str:
    if not report.steps:
        return ""
    heads = ["Step", *(str(view).capitalize() for view in View), *(f"{left} → {right}" for left, right in PAIRS)]
    rows = []
    for step in report.steps:
        broken = f'<span class="break">break: {_text(step.refusal.reason)}</span>' if step.refusal is not None else ""
        cells = [f"<td>{step.index} · {report.place(step)}{broken}</td>"]
        for view in View:
            found = step.shown(view)
            cells.append(f"<td>{'none' if found is None else f'{len(found):,}'}</td>")
        cells += [f"<td>{_html_delta(step.compare(*pair))}</td>" for pair in PAIRS]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<div class="tt-wide"><table class="tt-steps"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _html_delta(compared: Comparison | None) -> str:
    if compared is None:
        return "?"
    if compared.equal:
        return '<span class="same">equal</span>'
    out = f'<span class="out">−{compared.left_tokens:,}</span>' if compared.left_tokens else ""
    return out + (f'<span class="in">+{compared.right_tokens:,}</span>' if compared.right_tokens else "")


def _step(report: HistoryReport, step: Step, limit: int, unfolded: bool) -> str:
    found = contrasts(step)
    state = (
        "all equal"
        if step.equal
        else "; ".join(f"{listed(contrast.left)} against {listed(contrast.right)}" for contrast in found)
    )
    body = f"<p>The rollout breaks here: {_text(str(step.refusal))}</p>" if step.refusal is not None else ""
    if step.training is None:
        body += "<p>The training row holds no such turn.</p>"
    if not found:
        body += f"<p>{counted(len(step.rollout), 'token')}, the same in all that hold them.</p>"
    for contrast in found:
        compared = contrast.compared
        left, right = step.shown(compared.left), step.shown(compared.right)
        if left is None or right is None:
            continue
        lines = "".join(f"<li>{_text(line)}</li>" for line in compared.lines())
        body += (
            f'<p class="tt-sides"><span class="out">− {listed(contrast.left)}</span> '
            f'<span class="in">+ {listed(contrast.right)}</span></p>{_band(compared, len(left))}'
            f'<div class="tt-rows">{_merged(report, compared, left, right, limit)}</div>'
            f"<details><summary>By field</summary><ul>{lines}</ul></details>"
        )
    return (
        f'<details class="tt-step"{" open" if unfolded else ""}><summary>Step {step.index}: {report.place(step)}'
        f"<small>{state}</small></summary>{body}</details>"
    )


def _band(compared: Comparison, left: int) -> str:
    """Both sides as one band, in order: what they share, what only the left has, what only the right has."""
    rects, at, x = [], 0, 0
    total = left + compared.right_tokens
    for found in compared.differences:
        shared = found.left.start - at
        for width, name in ((shared, ""), (len(found.left), "out"), (len(found.right), "in")):
            if width:
                rects.append(f'<rect{f" class={name!r}" if name else ""} x="{x}" width="{width}"/>')
                x += width
        at = found.left.stop
    rects.append(f'<rect x="{x}" width="{left - at}"/>')
    return (
        f'<svg class="tt-band" viewBox="0 0 {total} 16" preserveAspectRatio="none" role="img" '
        f'aria-label="Where the two differ, from the first token to the last">{"".join(rects)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens of one side to show, or a number of equal ones left out."""

    tag: str
    shown: Shown
    start: int
    stop: int


def _merged(report: HistoryReport, compared: Comparison, left: Shown, right: Shown, limit: int) -> str:
    """Both sides in one text, message by message, with equal tokens far from a difference left out."""
    rows: list[tuple[int, list[str]]] = []
    used = 0
    control = report.tokenizer.vocabulary.is_control
    for stretch in _stretches(compared, left, right):
        if stretch.tag == "skip":
            rows = rows or [(int(left.messages[stretch.start]), [])]
            count = stretch.stop - stretch.start
            rows[-1][1].append(f'<span class="tt-skip">{count:,} equal token{"" if count == 1 else "s"}</span>')
            continue
        stop = min(stretch.stop, stretch.start + limit - used)
        texts = _texts(report.tokenizer, stretch.shown.ids[stretch.start : stop])
        for start, end, message, name in stretch.shown.parts(stretch.start, stop):
            if not rows or rows[-1][0] != message:
                rows.append((message, []))
            role = report.roles[message] if message >= 0 else None
            tokens = "".join(
                _token(texts[at - stretch.start], bool(control[stretch.shown.ids[at]])) for at in range(start, end)
            )
            kind = KINDS.index(_kind(role, name))
            whose = "no message" if role is None else f"message {message} ({role})"
            title = _text(f"{whose} · {name} · tokens {start}–{end - 1}")
            odd = " o" if start % 2 else ""
            piece = f'<s class="k{kind}{odd}" title="{title}">{tokens}</s>'
            rows[-1][1].append(f"<{stretch.tag}>{piece}</{stretch.tag}>" if stretch.tag else piece)
        used += stop - stretch.start
        if stop < stretch.stop:
            rows.append((-2, [f"Showing the first {limit:,} tokens. The table and the band above cover all of them."]))
            break
    return "".join(_row(report, message, "".join(body)) for message, body in rows)


def _row(report: HistoryReport, message: int, body: str) -> str:
    if message == -2:
        return f'<p class="tt-cut">{body}</p>'
    number = "" if message < 0 else f"<b>{message}</b>"
    whose = "template" if message < 0 else report.roles[message]
    return (
        f'<section class="tt-row"><div class="tt-gutter"><p>{number}{_text(whose)}</p></div>'
        f'<div class="tt-tokens">{body}</div></section>'
    )


def _stretches(compared: Comparison, left: Shown, right: Shown) -> Iterator[_Stretch]:
    at = 0
    for number, found in enumerate(compared.differences):
        yield from _shared(left, at, found.left.start, before=number > 0, after=True)
        if len(found.left):
            yield _Stretch("del", left, found.left.start, found.left.stop)
        if len(found.right):
            yield _Stretch("ins", right, found.right.start, found.right.stop)
        at = found.left.stop
    yield from _shared(left, at, len(left), before=True, after=False)


def _shared(shown: Shown, start: int, stop: int, *, before: bool, after: bool) -> Iterator[_Stretch]:
    """Equal tokens: those next to a difference, and how many were left out."""
    head = start + _AROUND if before else start
    tail = stop - _AROUND if after else stop
    while after and head < tail and stop - tail < 2 * _AROUND and shown.messages[tail - 1] == shown.messages[tail]:
        tail -= 1  # back to where the message begins, if that is near
    if tail - head <= 8:
        yield _Stretch("", shown, start, stop)
        return
    yield _Stretch("", shown, start, head)
    yield _Stretch("skip", shown, head, tail)
    yield _Stretch("", shown, tail, stop)


def _kind(role: str | None, name: str) -> Kind:
    first = name.split(".", maxsplit=1)[0]
    if first in REASONING_FIELDS:
        return Kind.REASONING
    known = {
        "generation_prompt": Kind.PROMPT,
        "scaffold": Kind.SCAFFOLD,
        "synthetic_close": Kind.SCAFFOLD,
        "role": Kind.SCAFFOLD,
        "tool_calls": Kind.CALLS,
        "tools": Kind.TOOLS,
        "kwargs": Kind.VARIABLES,
        "unknown": Kind.UNKNOWN,
    }
    return known.get(first) or _BY_ROLE.get(role or "", Kind.USER)
