"""Verdicts: what the matrix and the facts mean for each use of a template."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..show.visible import listed
from .appends import NO_END, Append, AppendCell, AppendOutcome, Style
from .facts import TemplateFacts
from .finding import WordedEnum

FLAWS = frozenset({"refused", "turn", "past", "lost", "lost after"})
_TURN_FLAWS = frozenset({"refused", "turn", "lost", "end"})
_TOOLS = (Append.TOOL, Append.PARALLEL)
_BOTH = (*_TOOLS, Append.TOOL_USER, Append.USER)


class Use(WordedEnum):
    """A use of a template. It needs `appends` without `flaws`, and perhaps all `messages` unchanged.

    Lost white space around content matters only if a use `renders` again, as rollouts do.
    """

    label: str
    appends: Sequence[Append]
    renders: bool
    messages: bool
    flaws: frozenset[str]

    SFT_ONE_ROW = "sft-one-row", "SFT, one row per conversation", _BOTH, False, True, FLAWS
    SFT_PER_TURN = "sft-per-turn", "SFT, one row per turn", (Append.USER, *_TOOLS), False, True, _TURN_FLAWS
    RL_APPEND_ONLY = "rl-append-only", "RL, tools only", _TOOLS, True, False, FLAWS
    RL_USER_TURNS = "rl-user-turns", "RL, with user turns", _BOTH, True, False, FLAWS
    PRODUCTION_PARITY = "production-parity", "Production parity", _BOTH, True, True, FLAWS


class Grade(StrEnum):
    HOLDS = "holds"
    PARTLY = "partly"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Is a template safe for a use? Reasons `against` it, and settings that it `holds_with`."""

    use: Use
    grade: Grade
    against: tuple[str, ...]
    holds_with: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.use.label}: {self.grade}"


def judged(cells: Sequence[AppendCell], facts: TemplateFacts) -> list[AppendCell]:
    """Leave out reasoning that the template does not ask for."""
    closed = bool(facts.prefill.strip()) and not facts.opens_reasoning
    if closed or not (facts.reasoning or facts.opens_reasoning):
        cells = [cell for cell in cells if not cell.turn.reasoning]
    return [cell for cell in cells if not (closed and cell.turn.style is Style.INLINE)]


def judge(cells: Sequence[AppendCell], facts: TemplateFacts) -> list[Verdict]:
    return [_judge(use, judged(cells, facts), facts) for use in Use]


def _judge(use: Use, cells: Sequence[AppendCell], facts: TemplateFacts) -> Verdict:
    """A use fails if an append goes wrong for every turn; a refusal is an error."""
    cells = [cell for cell in cells if use.renders or cell.turn.style is not Style.SPACED]
    groups = {append: [cell for cell in cells if cell.append is append] for append in use.appends}
    against = [finding.why for finding in find_flaws(groups, use.flaws)]
    unfit = [group for group in groups.values() if not _some_fit(group, use.flaws)]
    errors = all(cell.outcome is AppendOutcome.REFUSED for cell in itertools.chain(*unfit))
    fails = bool(against) and (len(unfit) == len(groups) or not errors)
    if facts.date and use is Use.PRODUCTION_PARITY:
        against.append(f"the prompt contains the current date ({facts.date})")
    if facts.random:
        against.append("the template uses randomness: it may write one conversation in several ways")
    # The assistant's text counts for every use: an altered text is not what was sampled.
    against += [str(one) for one in facts.altered if use.messages or one.roles == ("assistant",)]
    if use is Use.SFT_ONE_ROW:
        fails = fails or facts.past_turn_without_stop
        past = ["a past turn ends without a stop token"] * facts.past_turn_without_stop
        against += past or [f"the last turn: {NO_END}"] * facts.last_turn_without_stop
    return Verdict(use, Grade.FAILS if fails else Grade.PARTLY if against else Grade.HOLDS, tuple(against))


def grade(cells: Sequence[AppendCell]) -> Grade | None:
    """None if the template refuses all of these turns after every history."""
    if all(cell.outcome is AppendOutcome.REFUSED and not cell.holding for cell in cells):
        return None
    if all(cell.outcome is AppendOutcome.HOLDS for cell in cells):
        return Grade.HOLDS
    return Grade.PARTLY if _some_fit(cells, FLAWS) else Grade.FAILS


def _some_fit(cells: Sequence[AppendCell], flaws: frozenset[str]) -> bool:
    """True if some plain turn has no flaw, or is refused only after some histories."""
    plain = [cell for cell in cells if cell.turn.style is Style.PLAIN] or cells
    wrong = ((flaws.intersection(cell.flaws), cell.holding) for cell in plain)
    return any(not names or (holding and names == {"refused"}) for names, holding in wrong)


@dataclass(frozen=True, slots=True)
class AppendFinding:
    why: str
    smallest: AppendCell


def find_flaws(groups: Mapping[Append, Sequence[AppendCell]], flaws: frozenset[str]) -> list[AppendFinding]:
    """Each way to go wrong, and the smallest conversation that shows it."""
    in_turn = flaws is _TURN_FLAWS
    ways = defaultdict[str, list[AppendCell]](list)
    for cell in itertools.chain(*groups.values()):
        if flaws.intersection(cell.flaws):
            ways[cell.cause(in_turn)].append(cell)
    findings = []
    for why, wrong in ways.items():
        appends = dict.fromkeys(cell.append for cell in wrong)
        count = sum(len(groups[append]) for append in appends)
        where = "" if len(wrong) == count else f"{len(wrong)} of {count} kinds of turns"
        if not in_turn:
            follows = listed([append.words for append in appends], "or")
            where = f"where {f'{where} are' if where else 'a turn is'} followed by {follows}"
        smallest = min(wrong, key=lambda cell: (len(cell.messages), len(str(cell.messages))))
        findings.append(AppendFinding(f"{where}: {why}".removeprefix(": "), smallest))
    return findings
