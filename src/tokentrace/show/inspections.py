"""The view of an inspection: a verdict, why prompts broke and how often, what that costs, and what else is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..audit.dumps.calls import Fault
from ..audit.inspect_calls import FoundBreak, Step
from ..audit.inspect_report import Inspection
from ..tokens.visible import visible
from .checks import word_table
from .terminal import flat, laid_out, plain_lines


def text_view(report: Inspection) -> Text:
    """A report for a terminal."""
    return laid_out(*_parts(report))


def plain_view(report: Inspection) -> str:
    """The same without colours."""
    return plain_lines(text_view(report))


def _parts(report: Inspection) -> Iterator[RenderableType]:
    fine = report.rollouts and not report.failing("any")
    tone = "green" if fine else "red" if report.breaks else "yellow"
    yield Text(f"{'✓' if fine else '✗' if report.breaks else '•'} {report.verdict}", f"bold {tone}")
    for note in report.notes:
        yield Text(f"  {visible(note)}", "dim")
    if report.stopped:
        yield Text(f"  only the first {report.rollouts:,} rollouts were looked at", "yellow")
    if report.rollouts:
        yield Text()
        yield _figures(report)
    if report.causes:
        yield Text()
        yield _causes(report)
    if report.histories or report.recorded:
        yield Text()
        said = [(f"messages: {name.replace('_', ' ')}", f"{count:,}") for name, count in report.histories.most_common()]
        said += [(f"recorded: {visible(name)}", f"{count:,}") for name, count in report.recorded.most_common()]
        yield word_table(["what became of the history"], ["breaks"], said)
    if report.breaks or report.masked:
        yield Text()
        yield word_table(["what was trained wrongly", ""], ["tokens"], list(training_rows(report)))
    if report.faults:
        yield Text()
        yield _faults(report)
    if report.scores is not None:
        yield Text()
        yield _scores(report.scores.to_json())
    for _, count in report.ranked_causes():
        for one in count.examples:
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


def figures(report: Inspection) -> Iterator[tuple[str, str]]:
    """What there is, in words and numbers."""
    yield "rollouts", f"{report.rollouts:,}, {report.broken:,} with a break"
    steps = ", ".join(f"{report.steps[step]:,} {step}" for step in Step if report.steps[step])
    yield "calls", f"{report.calls:,} ({steps})"
    yield "samples", f"{report.samples:,} ({report.samples_per_rollout:.2f} a rollout)"
    yield "tokens", f"{report.tokens:,} recorded, {report.sampled:,} sampled, {report.row_tokens:,} in rows"
    if report.breaks:
        yield "cost of breaks", f"{report.reprefilled:,} tokens read again, {report.repeated:,} repeated in rows"
    for name, lengths in (("calls a rollout", report.turns), ("prompt", report.prompts), ("row", report.streams)):
        if found := lengths.to_json():
            most = f"{found['least']:,} to {found['most']:,}"
            yield name, f"{most}, {found['median']:,} in the middle, {found['p95']:,} at 95 %"


def _figures(report: Inspection) -> RenderableType:
    return word_table(["what there is", ""], [], list(figures(report)))


def _causes(report: Inspection) -> RenderableType:
    rows = [
        (
            str(cause) if report.explained else "not looked into: no tokenizer was given",
            f"{count.breaks:,}",
            f"{count.rollouts:,}",
            f"{100 * count.rollouts / report.rollouts:.1f} %",
        )
        for cause, count in report.ranked_causes()
    ]
    return word_table(["why prompts broke off"], ["breaks", "rollouts", "of all"], rows)


def training_rows(report: Inspection) -> Iterator[tuple[str, str, str]]:
    """What masks train wrongly, and what training on the later prompt of a break would."""
    if report.masked:
        yield "trained", "by the masks of the dump", f"{report.trained:,}"
        for fault in (Fault.TRAINED_UNSAMPLED, Fault.SAMPLED_UNTRAINED):
            count = report.faults.get(fault)
            yield str(fault), "by the masks of the dump", f"{count.tokens if count else 0:,}"
    if report.breaks:
        later = "if the later prompt is trained on"
        yield "sampled tokens that are gone", later, f"{report.lost:,}"
        yield "the same text in other tokens", later, f"{report.respelled:,}"
        yield "other text in their place", later, f"{report.rewritten:,}"


def _faults(report: Inspection) -> RenderableType:
    rows = [
        (str(fault), fault.group, f"{count.places:,}", f"{count.tokens:,}", f"{count.rollouts:,}")
        for fault, count in report.faults.items()
    ]
    return word_table(["what else is wrong", "in"], ["places", "tokens", "rollouts"], rows)


def score_rows(scores: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """How far logprobs are from an engine's."""
    skipped = f", {scores['skipped']:,} left out: sampled at another temperature" if scores["skipped"] else ""
    yield "compared", f"{scores['tokens']:,} tokens of {scores['completions']:,} completions{skipped}"
    if scores["tokens"]:
        yield "absolute", ", ".join(f"{name} {scores[name]:.4g}" for name in ("mean", "median", "p95", "p99", "most"))
        yield "engine less dump", f"{scores['mean_difference']:+.4g} on average, ratio {scores['mean_ratio']:.4f}"


def _scores(scores: dict[str, Any]) -> RenderableType:
    return word_table(["logprobs beside an engine's", ""], [], list(score_rows(scores)))


def _example(one: FoundBreak) -> Iterator[Text]:
    yield Text(f"\n{visible(one.where)}, call {one.call} of {visible(one.rollout)}:", "bold")
    if one.explained is None:
        yield Text(f"  break at token {one.position:,} of {len(one.stream):,}")
    else:
        for line in str(one.explained).splitlines():
            yield Text(f"  {line}")
    if one.history is not None:
        yield Text(f"  messages: {str(one.history.cause).replace('_', ' ')}: {flat(one.history.detail)}")
    if one.recorded:
        yield Text(f"  recorded: {flat(one.recorded)}")
    cost = f"{one.reprefilled:,} tokens read again, {one.lost:,} sampled tokens gone"
    yield Text(f"  costs {cost}", "dim")
