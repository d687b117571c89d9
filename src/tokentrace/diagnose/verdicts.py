"""Verdicts: what the matrix and the facts mean for each use of a template."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ..show.visible import listed
from .appends import NO_END, Append, AppendCell, AppendOutcome, Style, TurnForm
from .facts import TemplateFacts
from .finding import WordedEnum

FLAWS: Final = frozenset({"refused", "turn", "past", "lost", "lost after"})
_TURN_FLAWS: Final = frozenset({"refused", "turn", "lost", "end"})
"""Flaws of a turn itself, whatever follows."""
_TOOLS: Final = (Append.TOOL, Append.PARALLEL)
_BOTH: Final = (*_TOOLS, Append.TOOL_USER, Append.USER)


class Use(WordedEnum):
    """A use of a template. It needs `appends` without `flaws`, and perhaps all `messages` unchanged.

    Lost white space around content matters only if a use `renders` again, as rollouts do at each turn.
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
    """How far a use is safe."""

    HOLDS = "holds"
    PARTLY = "partly"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a template is safe for a use as it is, and the reasons against it.

    With any one of the settings in `holds_with`, it holds.
    """

    use: Use
    grade: Grade
    against: tuple[str, ...]
    holds_with: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.use.label}: {self.grade}"


def judged(cells: Iterable[AppendCell], facts: TemplateFacts) -> list[AppendCell]:
    """Return the cells that count. Leaves out cells with reasoning that the template does not ask for."""
    closed = bool(facts.prefill.strip()) and not facts.opens_reasoning
    thinks = (facts.reasoning or facts.opens_reasoning) and not closed
    return [
        cell
        for cell in cells
        if (thinks or not cell.turn.reasoning) and not (closed and cell.turn.style is Style.INLINE)
    ]


def judge(cells: Iterable[AppendCell], facts: TemplateFacts) -> tuple[Verdict, ...]:
    """Return the verdict on each use."""
    counted = judged(cells, facts)
    return tuple(_judge(use, counted, facts) for use in Use)


def _judge(use: Use, cells: Sequence[AppendCell], facts: TemplateFacts) -> Verdict:
    """Return the verdict on a use. It fails if an append goes wrong for every turn, or nothing holds.

    A refused append raises an error. If other appends hold, the use still holds partly.
    """
    cells = [cell for cell in cells if use.renders or cell.turn.style is not Style.SPACED]
    groups = {append: [cell for cell in cells if cell.append is append] for append in use.appends}
    against = [finding.why for finding in find_flaws(groups, use.flaws)]
    good = {append for append, group in groups.items() if _some_fit(group, use.flaws)}
    refused = {append for append, group in groups.items() if all("refused" in cell.flaws for cell in group)}
    fails = bool(against) and (not good or not groups.keys() <= good | refused)
    if facts.date and use is Use.PRODUCTION_PARITY:
        against.append(f"the prompt contains the current date ({facts.date})")
    if facts.random:
        against.append("the template uses randomness: it does not always write the same conversation the same way")
    # The assistant's text counts for every use: an altered text is not what was sampled.
    against += [str(one) for one in facts.altered if use.messages or one.roles == ("assistant",)]
    if use is Use.SFT_ONE_ROW and facts.past_turn_without_stop:
        against.append("a past turn ends without a stop token")
        fails = True
    elif use is Use.SFT_ONE_ROW and facts.last_turn_without_stop:
        against.append(f"the last turn: {NO_END}")
    return Verdict(use, Grade.FAILS if fails else Grade.PARTLY if against else Grade.HOLDS, tuple(against))


def grade(cells: Sequence[AppendCell]) -> Grade | None:
    """Grade some turns; None if the template refuses them after every history."""
    if all("refused" in cell.flaws and not cell.elsewhere for cell in cells):
        return None
    if all(cell.outcome is AppendOutcome.HOLDS for cell in cells):
        return Grade.HOLDS
    return Grade.PARTLY if _some_fit(cells, FLAWS) else Grade.FAILS


def _some_fit(cells: Sequence[AppendCell], flaws: frozenset[str]) -> bool:
    """True if some plain turn is refused at worst, and only after some histories."""
    return any(
        flaws & cell.all_flaws <= {"refused"} and ("refused" not in cell.flaws or cell.elsewhere)
        for cell in _plain(cells)
    )


def _plain(cells: Sequence[AppendCell]) -> Sequence[AppendCell]:
    return [cell for cell in cells if cell.turn.style is Style.PLAIN] or cells


@dataclass(frozen=True, slots=True)
class AppendFinding:
    """One way in which appends go wrong, and the smallest conversation that shows it."""

    why: str
    smallest: AppendCell


def find_flaws(groups: Mapping[Append, Sequence[AppendCell]], flaws: frozenset[str]) -> list[AppendFinding]:
    """Return each way in which appends go wrong, by cause and kind of turn."""
    in_turn = flaws is _TURN_FLAWS
    ways: dict[tuple[str, str], dict[Append, list[AppendCell]]] = {}
    for append, cells in groups.items():
        causes: dict[str, list[AppendCell]] = {}
        for cell in (cell for cell in cells if flaws & cell.all_flaws):
            refused = [cell, *(one for one in cell.also if "refused" in one.flaws)]
            turns = [one for one in (cell, *cell.also) if _TURN_FLAWS & one.flaws]
            words = dict.fromkeys(one.cause(in_turn) for one in (turns if in_turn else refused))
            causes.setdefault("; ".join(words), []).append(cell)
        for why, wrong in causes.items():
            ways.setdefault((_common_form(wrong, cells), why), {})[append] = wrong
    findings = []
    for (form, why), by_append in ways.items():
        where = f"{form}: " if form else ""
        if not in_turn:
            follows = listed((append.words for append in by_append), "or")
            where = f"where {f'{form} are' if form else 'a turn is'} followed by {follows}: "
        cases = itertools.chain(*by_append.values())
        smallest = min(cases, key=lambda cell: (len(cell.messages), len(str(cell.messages))))
        findings.append(AppendFinding(f"{where}{why}", smallest))
    return findings


_FEATURES: Final[Mapping[str, Callable[[TurnForm], bool]]] = {
    f"with {Style.SPACED}": lambda turn: turn.style is Style.SPACED,
    f"with {Style.INLINE}": lambda turn: turn.style is Style.INLINE,
    "with reasoning": lambda turn: turn.reasoning,
    "without reasoning": lambda turn: not turn.reasoning and turn.style is not Style.INLINE,
    "with content": lambda turn: turn.content,
    "without content": lambda turn: not turn.content,
    "with empty arguments": lambda turn: turn.arguments == "empty",
    "with nested arguments": lambda turn: turn.arguments == "nested",
    "with arguments": lambda turn: turn.arguments != "empty",
}


def _common_form(wrong: Sequence[AppendCell], cells: Sequence[AppendCell]) -> str:
    """Say what wrong turns have in common: ``"turns without reasoning"``."""
    if {cell.turn.style for cell in wrong} == {Style.PLAIN}:
        cells = _plain(cells)
    turns, chosen = {cell.turn for cell in cells}, {cell.turn for cell in wrong}
    if turns == chosen:
        return ""
    for names in itertools.chain(*(itertools.combinations(_FEATURES, count) for count in (1, 2, 3))):
        if {turn for turn in turns if all(_FEATURES[name](turn) for name in names)} == chosen:
            return f"turns {' and '.join(names)}"
    return f"{len(wrong)} of {len(cells)} kinds of turns"
