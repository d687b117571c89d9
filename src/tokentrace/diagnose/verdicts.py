"""Verdicts: what the matrix and the facts mean for each use of a template."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ..show.visible import listed
from .appends import ALTERED, AppendBreak, AppendCell, AppendOutcome, Where
from .cases import Append, Arguments, Style, TurnForm
from .facts import Changes, Prompting, Reading, Stops
from .field_texts import Altered


class Use(StrEnum):
    """What a template is used for."""

    SFT_ONE_ROW = "sft-one-row"
    """Fine-tuning on one row for a whole conversation."""
    SFT_PER_TURN = "sft-per-turn"
    """Fine-tuning on a row for each turn, with the prompt that asks for it."""
    RL_APPEND_ONLY = "rl-append-only"
    """Rollouts in which tools answer, rendered again at each turn."""
    RL_USER_TURNS = "rl-user-turns"
    """Rollouts in which users speak again, too."""
    PRODUCTION_PARITY = "production-parity"
    """Training shows what production shows, at every turn and on every day."""


USES: Final[Mapping[Use, str]] = {
    Use.SFT_ONE_ROW: "SFT, one row a conversation",
    Use.SFT_PER_TURN: "SFT, one row a turn",
    Use.RL_APPEND_ONLY: "RL, tools only",
    Use.RL_USER_TURNS: "RL, with user turns",
    Use.PRODUCTION_PARITY: "Production parity",
}
"""The name of each use."""

_TOOLS: Final = (Append.TOOL, Append.PARALLEL)
_ALL: Final = (*_TOOLS, Append.TOOL_USER, Append.USER)
_APPENDS: Final[Mapping[Use, Sequence[Append]]] = {
    Use.SFT_ONE_ROW: _ALL,
    Use.SFT_PER_TURN: (Append.USER, *_TOOLS),
    Use.RL_APPEND_ONLY: _TOOLS,
    Use.RL_USER_TURNS: _ALL,
    Use.PRODUCTION_PARITY: _ALL,
}
_FLAWS: Final = frozenset({"refused", "turn", "past", "lost", "lost after"})
_TURN_FLAWS: Final = frozenset({"refused", "turn", "lost", "end"})
"""Flaws of a turn itself, whatever follows."""
_WHOLE_MESSAGES: Final = (Use.SFT_ONE_ROW, Use.SFT_PER_TURN, Use.PRODUCTION_PARITY)
"""Uses that need all messages unchanged."""
_NO_END: Final = "the row ends before the token that the model stops with (final_stop=True adds it)"
_RANDOM: Final = "the template draws at random: the same conversation is not always written the same"


class Grade(StrEnum):
    """How far a use is safe."""

    HOLDS = "holds"
    PARTLY = "partly"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a template is safe for a use as it is, and what speaks against it."""

    use: Use
    grade: Grade
    against: tuple[str, ...]
    holds_with: tuple[str, ...] = ()
    """Settings of the template, each on its own, with which it holds."""

    def __str__(self) -> str:
        return f"{USES[self.use]}: {self.grade}"

    def weaker(self, *against: str, grade: Grade = Grade.PARTLY) -> Verdict:
        """Add reasons against it. The grade becomes no better than `grade`; without reasons nothing changes."""
        order = list(Grade)
        worse = max(self.grade, grade, key=order.index) if against else self.grade
        return replace(self, grade=worse, against=(*self.against, *against))


def judged(cells: Iterable[AppendCell], reading: Reading, prompting: Prompting) -> list[AppendCell]:
    """Return the cells that verdicts count.

    Skips reasoning that the template never writes and never asks for, and reasoning after a prompt that has closed it.
    """
    closed = bool(prompting.prefill.strip()) and not prompting.opens_reasoning
    thinks = (reading.reasoning or prompting.opens_reasoning) and not closed
    return [
        cell
        for cell in cells
        if (thinks or not cell.turn.reasoning) and not (closed and cell.turn.style is Style.INLINE)
    ]


def verdicts_of(
    cells: Sequence[AppendCell], changes: Changes, altered: Sequence[Altered], stops: Stops
) -> list[Verdict]:
    """Return the verdict on each use."""
    verdicts = []
    for use in Use:
        verdict = _verdict(use, cells)
        if changes.clock and use is Use.PRODUCTION_PARITY:
            verdict = verdict.weaker(f"the prompt holds the date of the day it is rendered on{changes.by}")
        if changes.random:
            verdict = verdict.weaker(_RANDOM)
        # The assistant's text counts everywhere: rendered again, it is not what was sampled.
        verdict = verdict.weaker(*(str(one) for one in altered if one.of_turns or use in _WHOLE_MESSAGES))
        if use is Use.SFT_ONE_ROW and stops.untrained_inside:
            words = "a turn ends without a token that stops generation, whatever follows it"
            verdict = verdict.weaker(words, grade=Grade.FAILS)
        elif use is Use.SFT_ONE_ROW and stops.untrained_end:
            verdict = verdict.weaker(f"the last turn: {_NO_END}")
        verdicts.append(verdict)
    return verdicts


def _verdict(use: Use, cells: Sequence[AppendCell]) -> Verdict:
    """Judge a use by its appends.

    It fails if some append goes wrong silently for every turn, or if nothing holds. A refused append raises an error
    that somebody sees: if other turns hold, the use holds partly.
    """
    per_turn = use is Use.SFT_PER_TURN
    flaws = _TURN_FLAWS if per_turn else _FLAWS

    def counts(cell: AppendCell) -> bool:
        """Lost white space around content matters only to those who render again."""
        return cell.turn.style is not Style.SPACED or use not in (Use.SFT_ONE_ROW, Use.SFT_PER_TURN)

    def partly_fits(cell: AppendCell) -> bool:
        """True if at worst it is refused, after some histories only."""
        rendered = cell.outcome is not AppendOutcome.REFUSED or cell.elsewhere
        return flaws & cell.all_flaws <= {"refused"} and rendered

    groups = {append: [cell for cell in cells if cell.append is append and counts(cell)] for append in _APPENDS[use]}
    good = {append: any(map(partly_fits, plain(group))) for append, group in groups.items()}
    silent = [
        append for append, group in groups.items() if any(cell.outcome is not AppendOutcome.REFUSED for cell in group)
    ]
    against = tuple(_against(groups, flaws, per_turn))
    if not any(flaws & cell.all_flaws for group in groups.values() for cell in group):
        return Verdict(use, Grade.HOLDS, against)
    fails = not any(good.values()) or not all(good[append] for append in silent)
    return Verdict(use, Grade.FAILS if fails else Grade.PARTLY, against)


def grade(cells: Sequence[AppendCell]) -> Grade | None:
    """Grade some turns; None if the template refuses them after every history."""
    if all(cell.outcome is AppendOutcome.REFUSED and not cell.elsewhere for cell in cells):
        return None
    if all(cell.outcome is AppendOutcome.HOLDS for cell in cells):
        return Grade.HOLDS
    holding = (AppendOutcome.HOLDS, AppendOutcome.REFUSED)
    some = any(cell.outcome in holding and (cell.outcome is holding[0] or cell.elsewhere) for cell in plain(cells))
    return Grade.PARTLY if some else Grade.FAILS


def plain(cells: Sequence[AppendCell]) -> Sequence[AppendCell]:
    """Return the turns with plain content, if any: another style that works makes up for nothing."""
    return [cell for cell in cells if cell.turn.style is Style.PLAIN] or cells


# -- what speaks against a use, in words


def _against(groups: Mapping[Append, Sequence[AppendCell]], flaws: frozenset[str], per_turn: bool) -> Iterator[str]:
    """Yield a sentence for each way in which appends go wrong."""
    ways: dict[tuple[str, str], list[Append]] = {}
    for append, cells in groups.items():
        causes: dict[str, list[AppendCell]] = {}
        for cell in cells:
            if flaws & cell.all_flaws:
                causes.setdefault(cause(cell, per_turn), []).append(cell)
        for why, wrong in causes.items():
            ways.setdefault((common_form(wrong, cells), why), []).append(append)
    for (turns, why), appends in ways.items():
        yield sentence(() if per_turn else appends, turns, why)


_FOLLOWS: Final[Mapping[Append, str]] = {
    Append.TOOL: "a tool's result",
    Append.PARALLEL: "two results",
    Append.TOOL_USER: "a result with a user after it",
    Append.USER: "a user",
    Append.SYSTEM: "a system message",
    Append.ASSISTANT: "another turn",
}


def sentence(appends: Sequence[Append], turns: str, why: str) -> str:
    """Say what goes wrong where these are appended to these turns."""
    if appends:
        follows = listed((_FOLLOWS[append] for append in appends), "or")
        return f"where {f'{turns} are' if turns else 'a turn is'} followed by {follows}: {why}"
    return f"{turns}: {why}" if turns else why


def cause(cell: AppendCell, in_turn: bool = False) -> str:
    """Say what goes wrong with a cell: the same words for cells that go wrong in the same way."""
    refused = [one for one in cell.also if one.outcome is AppendOutcome.REFUSED]
    cells = [one for one in (cell, *cell.also) if _TURN_FLAWS & one.flaws] if in_turn else [cell, *refused]
    return "; ".join(dict.fromkeys(_cause(one, in_turn) for one in cells))


def _cause(cell: AppendCell, in_turn: bool) -> str:
    after = f", {cell.case.history}" if cell.case.history else ""
    if cell.outcome is AppendOutcome.REFUSED:
        return f"refused: {cell.reason}{after}"
    words = [_break_words(one) for one in cell.breaks if one.at_turn or not in_turn]
    if words:
        words[-1] += after
    lost = dict.fromkeys([*_lost_fields(cell.lost), *(() if in_turn else cell.lost_after)])
    gone = [field for field in lost if not field.endswith(ALTERED)]
    words += [field for field in lost if field.endswith(ALTERED)]
    words += [f"{', '.join(gone)} reaches no token"] if gone else []
    words += [_NO_END] * (in_turn and not cell.ends)
    return "; ".join(dict.fromkeys(words))


def _lost_fields(fields: Sequence[str]) -> list[str]:
    """Name lost fields of a turn; calls are one, unless the first is not lost."""
    if "tool_calls.0" in fields:
        return list(dict.fromkeys("tool_calls" if field.startswith("tool_calls.") else field for field in fields))
    return ["the second call" if field == "tool_calls.1" else field for field in fields]


_BREAKS: Final[Mapping[Where, str]] = {
    Where.PAST: "earlier turns are rewritten",
    Where.PROMPT: "the turn is not written after the prompt that asks for it",
    Where.SEAM: "a token reaches over the end of the prompt",
}


def _break_words(one: AppendBreak) -> str:
    gone = sorted({field.split(" of ")[0] for field in one.fields if field.endswith("gone")})
    dropped = f", without {', '.join(gone)}" if gone else ""
    blame = one.blame
    condition = f": `{blame.condition}`" if blame is not None and blame.condition else ""
    return f"{_BREAKS[one.where]}{dropped}{'' if blame is None else f' (line {blame.line}{condition})'}"


_FEATURES: Final[Mapping[str, Callable[[TurnForm], bool]]] = {
    f"with {Style.SPACED}": lambda turn: turn.style is Style.SPACED,
    f"with {Style.INLINE}": lambda turn: turn.style is Style.INLINE,
    "with reasoning": lambda turn: turn.reasoning,
    "without reasoning": lambda turn: not turn.reasoning and turn.style is not Style.INLINE,
    "with content": lambda turn: turn.content,
    "without content": lambda turn: not turn.content,
    "with empty arguments": lambda turn: turn.arguments is Arguments.EMPTY,
    "with nested arguments": lambda turn: turn.arguments is Arguments.NESTED,
    "with arguments": lambda turn: turn.arguments is not Arguments.EMPTY,
}


def common_form(wrong: Sequence[AppendCell], cells: Sequence[AppendCell]) -> str:
    """Say what the wrong turns have in common: ``"turns without reasoning"``; empty if all are wrong.

    Turns with plain content are told apart among themselves.
    """
    if {cell.turn.style for cell in wrong} == {Style.PLAIN}:
        cells = [cell for cell in cells if cell.turn.style is Style.PLAIN]
    if len(wrong) == len(cells):
        return ""
    chosen = {id(cell) for cell in wrong}
    for count in (1, 2, 3):
        for names in itertools.combinations(_FEATURES, count):
            if {id(cell) for cell in cells if all(_FEATURES[name](cell.turn) for name in names)} == chosen:
                return f"turns {' and '.join(names)}"
    return f"{len(wrong)} of {len(cells)} kinds of turns"
