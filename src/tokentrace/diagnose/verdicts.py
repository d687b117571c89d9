"""Verdicts: what the matrix and the facts come to, for each use that people make of a template."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ..tokens.visible import listed
from .appends import ALTERED, AppendCell, AppendOutcome
from .cases import Append, Arguments, Said, TurnForm
from .facts import Prompting, Reading, Stops
from .field_texts import Altered
from .running import STEADY, Changes


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
"""What each use is called."""

_TOOLS: Final = (Append.TOOL, Append.PARALLEL)
_ALL: Final = (*_TOOLS, Append.TOOL_USER, Append.USER)
_APPENDS: Final[Mapping[Use, Sequence[Append]]] = {
    Use.SFT_ONE_ROW: _ALL,
    Use.SFT_PER_TURN: (Append.USER, *_TOOLS),
    Use.RL_APPEND_ONLY: _TOOLS,
    Use.RL_USER_TURNS: _ALL,
    Use.PRODUCTION_PARITY: _ALL,
}


class Grade(StrEnum):
    """How far a use is safe."""

    HOLDS = "holds"
    PARTLY = "partly"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a template serves a use as it is, what stands against it, and what tokentrace does about that."""

    use: Use
    grade: Grade
    against: tuple[str, ...]
    remedy: str = ""
    holds_with: tuple[str, ...] = ()
    """Settings of the template, each on its own, with which it holds."""

    def __str__(self) -> str:
        return f"{USES[self.use]}: {self.grade}"


def judged(cells: Iterable[AppendCell], reading: Reading, prompting: Prompting) -> list[AppendCell]:
    """The cells that verdicts are about.

    Arguments are taken to be in the form that the template reads. Reasoning that a template never writes, and never
    asks for, is not part of its turns; neither is reasoning after a prompt that has closed it.
    """
    closed = bool(prompting.prefill.strip()) and not prompting.opens_reasoning
    thinks = (reading.reasoning or prompting.opens_reasoning) and not closed
    return [
        cell
        for cell in cells
        if cell.turn.arguments is not Arguments.TEXT
        if (thinks or not cell.turn.reasoning) and not (closed and cell.turn.said is Said.INLINE)
    ]


def verdict(use: Use, cells: Sequence[AppendCell], itself: Changes = STEADY) -> Verdict:
    """The verdict on a use; `itself` says whether what is written depends on the day, or on luck.

    It fails where some append goes wrong, unseen, for every turn, or where nothing holds at all. An append that the
    template refuses is an error that somebody sees: if others hold, the use holds partly.
    """
    counted = _IN_TURN if use is Use.SFT_PER_TURN else _IN_APPEND

    def fits(cell: AppendCell) -> bool:
        return not counted & _flaws(cell)

    def fits_somewhere(cell: AppendCell) -> bool:
        """Whether the worst is that it is refused, and that only after some pasts."""
        written = cell.outcome is not AppendOutcome.REFUSED or cell.elsewhere
        return counted & _flaws(cell) <= {"refused"} and written

    by_append = {
        append: [cell for cell in cells if cell.append is append and _counts(use, cell)] for append in _APPENDS[use]
    }
    good = [fits(cell) for own in by_append.values() for cell in own]
    some = {append: any(map(fits_somewhere, plain(own))) for append, own in by_append.items()}
    silent = [
        append for append, own in by_append.items() if any(cell.outcome is not AppendOutcome.REFUSED for cell in own)
    ]
    against = _against(by_append, fits, named=use is not Use.SFT_PER_TURN)
    if all(good):
        grade = Grade.HOLDS
    elif not any(some.values()) or any(not some[append] for append in silent):
        grade = Grade.FAILS
    else:
        grade = Grade.PARTLY
    unsteady = [f"the prompt holds the date of the day it is rendered on{itself.by}"] if itself.clock else []
    unsteady = unsteady if use is Use.PRODUCTION_PARITY else []
    unsteady += [_BY_CHANCE] if itself.random else []
    if unsteady and grade is Grade.HOLDS:
        grade = Grade.PARTLY
    return Verdict(use, grade, (*against, *unsteady))


_BY_CHANCE: Final = "the template draws at random: the same conversation is not always written the same"


_GIVEN: Final = (Use.SFT_ONE_ROW, Use.SFT_PER_TURN, Use.PRODUCTION_PARITY)
"""Uses for which it counts that all messages reach the model as they were given."""


def with_texts(found: Verdict, altered: Sequence[Altered]) -> Verdict:
    """A verdict that also counts texts which the template leaves out, or writes otherwise.

    Those of others count where messages are to reach the model as they were given; those of the assistant everywhere:
    what was sampled is not what is rendered again.
    """
    against = [str(one) for one in altered if one.of_turns or found.use in _GIVEN]
    if not against:
        return found
    grade = Grade.PARTLY if found.grade is Grade.HOLDS else found.grade
    return replace(found, grade=grade, against=(*found.against, *against))


def with_ends(found: Verdict, stops: Stops) -> Verdict:
    """A verdict on one row for a conversation that also counts turns which train no stop."""
    if found.use is not Use.SFT_ONE_ROW:
        return found
    if stops.untrained_inside:
        said = "a turn ends without a token that stops generation, whatever follows it"
        return replace(found, grade=Grade.FAILS, against=(*found.against, said))
    if stops.untrained_end:
        grade = Grade.PARTLY if found.grade is Grade.HOLDS else found.grade
        return replace(found, grade=grade, against=(*found.against, f"the last turn: {_NO_END}"))
    return found


_NO_END: Final = "the row ends before the token that the model stops with (final_stop=True adds it)"


def verdicts_of(
    cells: Sequence[AppendCell], itself: Changes, altered: Sequence[Altered], stops: Stops
) -> Iterator[Verdict]:
    """The verdict on each use."""
    for use in Use:
        yield with_ends(with_texts(verdict(use, cells, itself), altered), stops)


def plain(cells: Sequence[AppendCell]) -> Sequence[AppendCell]:
    """The turns whose content is given plainly, if there are some: another way that goes well makes up for nothing."""
    return [cell for cell in cells if cell.turn.said is Said.PLAIN] or cells


def _counts(use: Use, cell: AppendCell) -> bool:
    """Whether a use is about such turns: white space around content is lost on those alone who render again."""
    return cell.turn.said is not Said.SPACED or use not in (Use.SFT_ONE_ROW, Use.SFT_PER_TURN)


def _against(
    by_append: Mapping[Append, Sequence[AppendCell]], fits: Callable[[AppendCell], bool], named: bool
) -> list[str]:
    """What stands against a use: a line for each way in which appends go wrong, with the appends that it is."""
    found: dict[tuple[str, str], list[Append]] = {}
    for append, cells in by_append.items():
        ways: dict[str, list[AppendCell]] = {}
        for cell in cells:
            if not fits(cell):
                ways.setdefault(cause(cell, not named), []).append(cell)
        for why, wrong in ways.items():
            found.setdefault((which_turns(wrong, cells), why), []).append(append)
    return [sentence(appends if named else (), turns, why) for (turns, why), appends in found.items()]


_FOLLOWS: Final[Mapping[Append, str]] = {
    Append.TOOL: "a tool's result",
    Append.PARALLEL: "two results",
    Append.TOOL_USER: "a result with a user after it",
    Append.USER: "a user",
    Append.SYSTEM: "a system message",
    Append.ASSISTANT: "another turn",
}


def sentence(appends: Sequence[Append], turns: str, why: str) -> str:
    """What goes wrong, where these are appended to these turns."""
    if appends:
        follows = listed((_FOLLOWS[append] for append in appends), "or")
        return f"where {f'{turns} are' if turns else 'a turn is'} followed by {follows}: {why}"
    return f"{turns}: {why}" if turns else why


_IN_APPEND: Final = frozenset({"refused", "turn", "past", "lost", "lost after"})
_IN_TURN: Final = frozenset({"refused", "turn", "lost", "end"})
"""What goes wrong in a turn itself, whatever follows."""


def _flaws(cell: AppendCell) -> frozenset[str]:
    """The ways in which a cell goes wrong, after whatever past."""
    return cell.flaws.union(*(one.flaws for one in cell.also))


def cause(cell: AppendCell, in_turn: bool = False) -> str:
    """What goes wrong with a cell, in a few words: the same for cells that go wrong in the same way."""
    if in_turn:
        return "; ".join(dict.fromkeys(_cause(one, True) for one in (cell, *cell.also) if _IN_TURN & one.flaws))
    refused = [one for one in cell.also if one.outcome is AppendOutcome.REFUSED]
    return "; ".join(dict.fromkeys(_cause(one, False) for one in (cell, *refused)))


def _cause(cell: AppendCell, in_turn: bool) -> str:
    if cell.outcome is AppendOutcome.REFUSED:
        return f"refused: {cell.reason}{f', {cell.case.given}' if cell.case.given else ''}"
    said = [_broken(one.where, one.blame, one.fields) for one in cell.breaks if one.at_turn or not in_turn]
    if said and cell.case.given:
        said[-1] += f", {cell.case.given}"
    lost = dict.fromkeys([*_lost(cell.lost), *(() if in_turn else cell.lost_after)])
    gone = [field for field in lost if not field.endswith(ALTERED)]
    said += [field for field in lost if field.endswith(ALTERED)]
    said += [f"{', '.join(gone)} reaches no token"] if gone else []
    said += [_NO_END] * (in_turn and not cell.ends)
    return "; ".join(dict.fromkeys(said))


def _lost(fields: Sequence[str]) -> list[str]:
    """Fields of a turn that are lost: calls are told apart only where the first is not lost."""
    if "tool_calls.0" in fields:
        return list(dict.fromkeys("tool_calls" if field.startswith("tool_calls.") else field for field in fields))
    return ["the second call" if field == "tool_calls.1" else field for field in fields]


def _broken(where: str, blame: object, fields: Sequence[str]) -> str:
    what = {
        "past": "earlier turns are rewritten",
        "prompt": "the turn is not written after the prompt that asks for it",
        "seam": "a token reaches over the end of the prompt",
    }[where]
    gone = sorted({field.split(" of ")[0] for field in fields if field.endswith("gone")})
    dropped = f", without {', '.join(gone)}" if gone else ""
    line = getattr(blame, "line", None)
    condition = getattr(blame, "condition", "")
    by = "" if line is None else f" (line {line}: `{condition}`)" if condition else f" (line {line})"
    return f"{what}{dropped}{by}"


_FEATURES: Final[Mapping[str, Callable[[TurnForm], bool]]] = {
    f"with {Said.SPACED}": lambda turn: turn.said is Said.SPACED,
    f"with {Said.INLINE}": lambda turn: turn.said is Said.INLINE,
    "with reasoning": lambda turn: turn.reasoning,
    "without reasoning": lambda turn: not turn.reasoning and turn.said is not Said.INLINE,
    "with content": lambda turn: turn.content,
    "without content": lambda turn: not turn.content,
    "with empty arguments": lambda turn: turn.arguments is Arguments.EMPTY,
    "with nested arguments": lambda turn: turn.arguments is Arguments.NESTED,
    "with arguments": lambda turn: turn.arguments is not Arguments.EMPTY,
}


def which_turns(found: Sequence[AppendCell], cells: Sequence[AppendCell]) -> str:
    """Which turns it are, if they have something in common: ``"turns without reasoning"``.

    Turns whose content is given plainly are told apart among themselves.
    """
    said = {cell.turn.said for cell in found}
    if said == {Said.PLAIN}:
        cells = [cell for cell in cells if cell.turn.said is Said.PLAIN]
    if len(found) == len(cells):
        return ""
    chosen = {id(cell) for cell in found}
    for count in (1, 2, 3):
        for names in itertools.combinations(_FEATURES, count):
            if {id(cell) for cell in cells if all(_FEATURES[name](cell.turn) for name in names)} == chosen:
                return f"turns {' and '.join(names)}"
    return f"{len(found)} of {len(cells)} kinds of turns"
