"""Views of an inspection: a verdict, why prompts broke and how often, what that costs, and what else is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..diagnose.break_document import Differences
from ..show.document import Card, Cell, Document, Table
from ..show.terminal import counts_view, flat, layout, plain
from ..tokens.tokenizer import Tokenizer
from ..tokens.visible import counted, visible
from .dumps.calls import DumpFault
from .inspect_calls import FoundBreak, Relation
from .inspect_report import Inspection


def _tables(report: Inspection) -> list[Table]:
    """What was counted, as far as there is something to count."""
    causes = [
        [
            Cell(str(cause), small=cause.advice) if report.explained else "not looked into: no tokenizer was given",
            f"{count.places:,}",
            f"{count.rollouts:,}",
            f"{100 * count.rollouts / report.rollouts:.1f} %",
        ]
        for cause, count in report.ranked_causes()
    ]
    histories = [[f"messages: {name.replace('_', ' ')}", f"{n:,}"] for name, n in report.histories.most_common()]
    histories += [[f"recorded: {name}", f"{n:,}"] for name, n in report.recorded.most_common()]
    faults, unchecked = (
        [
            [str(fault), fault.group, f"{n.places:,}", f"{n.tokens:,}", f"{n.rollouts:,}"]
            for fault, n in report.faults.items()
            if (fault is DumpFault.NO_LOGPROBS) is missing
        ]
        for missing in (False, True)
    )
    scores = [] if report.scores is None else list(_scores(report.scores.to_json()))
    tables = [
        Table("What there is", ["", ""], list(figures(report)) if report.rollouts else [], words=2),
        Table("Why prompts broke off", ["", "breaks", "rollouts", "of all"], causes),
        Table("What became of the history", ["", "breaks"], histories),
        Table("What was trained", ["", "", "tokens"], list(_trained(report)), words=2),
        Table("What else is wrong", ["", "in", "places", "tokens", "rollouts"], faults, words=2),
        Table("Not checked", ["", "in", "places", "tokens", "rollouts"], unchecked, words=2),
        Table("Logprobs beside an engine's", ["", ""], scores, words=2),
    ]
    return [table for table in tables if table.rows]


def figures(report: Inspection) -> Iterator[tuple[str, str]]:
    """What there is, in words and numbers."""
    yield "rollouts", f"{report.rollouts:,}, {report.broken:,} with a break"
    steps = ", ".join(f"{step} {report.steps[step]:,}" for step in Relation if report.steps[step])
    yield "calls", f"{report.calls:,} ({steps})"
    yield "samples", f"{report.samples:,} ({report.samples_per_rollout:.2f} a rollout)"
    yield "tokens", f"{report.tokens:,} recorded, {report.sampled:,} sampled, {report.row_tokens:,} in rows"
    if report.breaks:
        yield "cost of breaks", f"{counted(report.reprefilled)} read again, {report.repeated:,} repeated in rows"
    for name, lengths in (("calls a rollout", report.turns), ("prompt", report.prompts), ("row", report.streams)):
        if found := lengths.to_json():
            spread = f"{found['least']:,} to {found['most']:,}, median {found['median']:,}, p95 {found['p95']:,}"
            yield name, spread if found["least"] < found["most"] else f"{found['most']:,}"


def _trained(report: Inspection) -> Iterator[tuple[str, str, str]]:
    """What masks train, rightly and wrongly, and what training on the later prompt of a break would."""
    if report.masked:
        yield "trained", "by the masks of the dump", f"{report.trained:,}"
        for fault in (DumpFault.TRAINED_UNSAMPLED, DumpFault.SAMPLED_UNTRAINED):
            count = report.faults.get(fault)
            told = count is not None or report.witnessed == report.masked
            known = (
                "not known" if not report.witnessed else f"not known of {report.masked - report.witnessed:,} rollouts"
            )
            yield str(fault), "by the masks of the dump", f"{count.tokens if count else 0:,}" if told else known
    if report.breaks:
        later = "if the later prompt is trained on"
        yield "sampled tokens that are gone", later, f"{report.lost:,}"
        yield "the same text in other tokens", later, f"{report.respelled:,}"
        yield "other text in their place", later, f"{report.rewritten:,}"


def _scores(scores: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """How far logprobs are from an engine's."""
    skipped = f", {scores['skipped']:,} left out: sampled at another temperature" if scores["skipped"] else ""
    yield "compared", f"{counted(scores['tokens'])} of {counted(scores['completions'], 'completion')}{skipped}"
    if scores["tokens"]:
        yield "absolute", ", ".join(f"{name} {scores[name]:.4g}" for name in ("mean", "median", "p95", "p99", "most"))
        yield "engine less dump", f"{scores['mean_difference']:+.4g} on average, ratio {scores['mean_ratio']:.4f}"


def _examples(report: Inspection) -> list[FoundBreak]:
    return [one for _, count in report.ranked_causes() for one in count.examples]


# -- for terminals


def text_view(report: Inspection) -> Text:
    """A report for a terminal."""
    return layout(*_parts(report))


plain_view = plain(text_view)


def _parts(report: Inspection) -> Iterator[RenderableType]:
    fine = report.compared > 0 and not report.failing("any")
    more = [Text(f"  {visible(note)}", "dim") for note in report.notes]
    if report.stopped:
        more.append(Text(f"  stopped after {counted(report.rollouts, 'rollout')}, as the limit says", "yellow"))
    yield from counts_view(report.verdict, fine, report.breaks > 0, more, _tables(report))
    for one in _examples(report):
        yield from _example(one)
    for fault, found in report.faults.items():
        for finding in found.examples:
            yield Text(f"\n{visible(finding.where)}: ", "bold").append(str(fault), "bold yellow")
            yield Text(f"  {visible(finding.detail)}")
    if report.unreadable:
        yield Text(f"\n{report.unreadable:,} could not be read", "bold red")
        for lost in report.unread:
            yield Text(f"  {visible(lost.where)}: {flat(lost.problem)}")
        if report.unreadable > len(report.unread):
            yield Text(f"  and {report.unreadable - len(report.unread):,} more", "dim")


def _example(one: FoundBreak) -> Iterator[Text]:
    yield Text(f"\n{visible(one.where)}, call {one.call} of {visible(one.rollout)}:", "bold")
    if one.explained is None:
        yield Text(f"  break at token {one.position:,} of {len(one.stream):,}")
    else:
        for line in str(one.explained).splitlines():
            yield Text(f"  {line}")
    if one.history is not None:
        yield Text(f"  messages: {str(one.history.cause).replace('_', ' ')}: {flat(one.history.words)}")
    if one.recorded:
        yield Text(f"  recorded: {flat(one.recorded)}")
    cost = f"{counted(one.reprefilled)} read again, {counted(one.lost, 'sampled token')} gone"
    yield Text(f"  costs {cost}", "dim")


# -- for browsers


def inspection_document(report: Inspection, tokenizer: Tokenizer | None = None) -> Document:
    """A report as a document: the same tables, and each example of a break as a difference."""
    differences = Differences()
    examples: list[list[str | Cell]] = []
    for one in _examples(report):
        name, link, why = f"{one.where}, call {one.call} of {one.rollout}", "", f"at token {one.position:,}"
        if one.explained is not None:
            link = differences.add_break(f"{one.cause}: {name}", one.explained, tokenizer)
            why = one.explained.detail
        told = "; ".join(filter(None, [one.history.words if one.history is not None else "", one.recorded]))
        examples.append([Cell(name, link=link), Cell(why, small=told), f"{one.reprefilled:,}", f"{one.lost:,}"])
    wrong = [
        [str(fault), finding.where, finding.detail] for fault, n in report.faults.items() for finding in n.examples
    ]
    tables = [
        Table("What was read", [""], [[note] for note in report.notes]),
        *_tables(report),
        Table(
            "Examples", ["where", "what", "read again", "sampled, gone"], examples, "Tokens; a few of each cause.", 2
        ),
        Table("Where", ["fault", "where", "what"], wrong, words=3),
        Table("Could not be read", ["where", "why"], [[lost.where, lost.problem] for lost in report.unread], words=2),
    ]
    tone = "bad" if report.failing("any") else "good" if report.compared else ""
    return Document(
        "What happened to the tokens",
        "tokentrace check",
        summary=[report.verdict],
        cards=[
            Card("Rollouts", f"{report.rollouts:,}", f"{report.broken:,} with a break", "" if report.breaks else tone),
            Card("Breaks", f"{report.breaks:,}", f"of {counted(report.calls, 'call')}", "bad" if report.breaks else ""),
            Card("Rows", f"{report.samples:,}", f"{report.samples_per_rollout:.2f} a rollout"),
            Card("Tokens", f"{report.tokens:,}", f"{report.sampled:,} sampled"),
            Card("Read again", f"{report.reprefilled:,}", f"{report.repeated:,} repeated in rows"),
        ],
        tables=[table for table in tables if table.rows],
        **differences.content(),
    )
