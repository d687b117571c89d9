"""Whether a template only appends: every case of the matrix rendered, and compared id for id.

What a rollout holds after a turn is the prompt and what was sampled, up to and including its stop token. An append
holds if the next prompt begins with exactly those ids. Two things break it: the template rewrites earlier turns once
something follows, or it writes a turn otherwise than after the prompt that asks for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..conversation.forms import adapt
from ..conversation.messages import Messages
from ..errors import TemplateError, TokentraceError
from ..rendering.lost import find_lost
from ..study.sampling import turn_end
from ..study.study import TemplateStudy
from ..study.turns import common_prefix, find_turns
from ..template.chat_template import wrap_tools
from ..template.trace import Rendering
from ..tokens.encoded import Encoded
from .blame import Blame, find_blame, find_writers
from .cases import ANSWER, THOUGHT, TOOLS, Append, AppendCase, Arguments, Said, TurnForm, cases
from .facts import reasoning_tags
from .field_texts import call_ids, is_of, is_written
from .lines import LineTracer

_EXCERPT: Final = 48
"""Characters of a text that are quoted."""


class AppendOutcome(StrEnum):
    """What becomes of an append."""

    HOLDS = "holds"
    BREAKS = "breaks"
    LOSES = "loses"
    """Nothing is rewritten, but some of what was given reaches no token."""
    REFUSED = "refused"


class Where(StrEnum):
    """What is not as it was."""

    PAST = "past"
    """The template writes what the stream holds anew."""
    PROMPT = "prompt"
    """The turn is not written after the generation prompt that asks for it."""
    SEAM = "seam"
    """It is, but a token reaches over the end of the prompt: the ids are others."""


@dataclass(frozen=True, slots=True)
class AppendBreak:
    """How the next prompt does not begin with the stream."""

    where: Where
    had: str
    """What the stream has from there on."""
    has: str
    """What the next prompt has instead."""
    at: int
    """The character at which they part."""
    message: int | None
    fields: tuple[str, ...]
    """Fields of messages of the past that are written no more, or otherwise."""
    blame: Blame | None = None
    at_turn: bool = False
    """Whether it is there as soon as the turn is written, before anything is appended."""
    ids: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """All ids before, and now."""

    def __str__(self) -> str:
        told = f"{self.had!r} becomes {self.has!r}"
        return f"{told}; {self.blame}" if self.blame is not None else told


@dataclass(frozen=True, slots=True)
class AppendCell:
    """What became of one kind of turn and append: the smallest conversation that shows it."""

    turn: TurnForm
    outcome: AppendOutcome
    case: AppendCase
    messages: Messages
    """The conversation, in the form that the template reads."""
    breaks: tuple[AppendBreak, ...] = ()
    lost: tuple[str, ...] = ()
    """What of the turn itself reached no token."""
    lost_after: tuple[str, ...] = ()
    """What of the messages that were appended reached no token."""
    reason: str = ""
    """Why it was refused."""
    ends: bool = True
    """Whether the turn, where it is the last, has the token that the model stops with."""
    also: tuple[AppendCell, ...] = ()
    """The same turn and append after other pasts: the smallest of each other way in which they go wrong."""
    elsewhere: bool = False
    """Whether it holds after some other past."""

    @property
    def append(self) -> Append:
        return self.turn.append

    @property
    def flaws(self) -> frozenset[str]:
        """The ways in which it goes wrong."""
        found = {
            "refused": self.outcome is AppendOutcome.REFUSED,
            "turn": any(one.at_turn for one in self.breaks),
            "past": any(not one.at_turn for one in self.breaks),
            "lost": bool(self.lost),
            "lost after": bool(self.lost_after),
            "end": not self.ends,
        }
        return frozenset(name for name, there in found.items() if there)


class _Written(NamedTuple):
    """A conversation as the template writes it; `encoded` may be cut where a turn ends."""

    messages: Messages
    tools: bool
    prompt: bool
    """Whether it ends with the prompt for a reply."""
    encoded: Encoded


class AppendMatrix:
    """The matrix of one template with one set of variables."""

    def __init__(self, study: TemplateStudy, tracer: LineTracer) -> None:
        self._study = study
        self._tracer = tracer
        self._tools = wrap_tools(TOOLS)
        self._ids = call_ids(study)
        self._tags = reasoning_tags(study)
        self._rendered: dict[str, Encoded | TokentraceError] = {}

    def cell(self, turn: TurnForm) -> AppendCell:
        """What becomes of a kind of turn: the first case that breaks, else that loses something, else that is refused.

        A past that the template refuses by itself is left out: the cell in which it was appended says so, or, of a
        system message, what is known of roles.
        """
        if turn.arguments is Arguments.TEXT and not self._study.forms.calls.text:
            return self._unread(next(cases(turn, self._ids)))
        every = list(cases(turn, self._ids, self._tags))
        found = [self._tried(case) for case in [case for case in every if self._asks(case)] or every[:1]]
        worst = (AppendOutcome.BREAKS, AppendOutcome.LOSES, AppendOutcome.REFUSED, AppendOutcome.HOLDS)
        shown = min(found, key=lambda cell: worst.index(cell.outcome))
        flaws, also = shown.flaws, []
        for cell in found:
            if cell.flaws - flaws:
                also.append(self._named(cell))
                flaws |= cell.flaws
        holds = any(cell.outcome is AppendOutcome.HOLDS for cell in found if cell is not shown)
        return replace(self._named(shown), also=tuple(also), elsewhere=holds)

    def _asks(self, case: AppendCase) -> bool:
        """Whether the template writes the prompt that the case begins with."""
        try:
            self._encoded(self._adapted(case)[: len(case.past)], case.tools, True)
        except TokentraceError:
            return False
        return True

    def _named(self, cell: AppendCell) -> AppendCell:
        """A cell whose breaks name their lines; which costs too much for those that are not told."""
        return self._tried(cell.case, named=True) if cell.breaks and self._tracer.has_lines else cell

    def _adapted(self, case: AppendCase) -> Messages:
        """The conversation of a case in the form that the template reads."""
        as_is = case.turn.arguments is Arguments.TEXT
        return case.messages if as_is else tuple(adapt(case.messages, self._study.forms).messages)

    def _tried(self, case: AppendCase, *, named: bool = False) -> AppendCell:
        study = self._study
        try:
            messages = self._adapted(case)
            before = len(case.past)
            asked = self._written(messages[:before], case.tools, True)
            turn = self._written(messages[: before + 1], case.tools, False)
            appended = self._written(messages, case.tools, case.turn.append is not Append.ASSISTANT)
        except TokentraceError as error:
            return AppendCell(case.turn, AppendOutcome.REFUSED, case, case.messages, reason=_refusal(error))
        turned = turn.encoded
        lost = find_lost(turned.rendering, messages[: before + 1], study.forms, first=before).lost
        missing = _missing(turned.rendering, case, [one.field for one in lost])
        after = find_lost(appended.encoded.rendering, messages, study.forms, first=before + 1).lost
        stop, ends = self._stop(case, messages[: before + 1], turned)
        if stop < len(turned.ids):
            turn = turn._replace(encoded=study.encode(turned.rendering.until(turned.position(stop))))
        breaks = tuple(self._breaks(asked, turn, appended, named))
        outcome = AppendOutcome.BREAKS if breaks else AppendOutcome.LOSES if missing or after else AppendOutcome.HOLDS
        gone_after = tuple(_lost_words(one, messages) for one in after)
        return AppendCell(case.turn, outcome, case, messages, breaks, missing, gone_after, ends=ends)

    def _unread(self, case: AppendCase) -> AppendCell:
        """Arguments that are JSON text, given to a template that does not read them as arguments."""
        cell = self._named(self._tried(case))
        if cell.outcome not in (AppendOutcome.HOLDS, AppendOutcome.LOSES):
            return cell
        reason = "arguments that are JSON text are not read as arguments; tokentrace parses them first"
        return replace(cell, outcome=AppendOutcome.LOSES, reason=reason)

    def _written(self, messages: Messages, tools: bool, prompt: bool) -> _Written:
        return _Written(messages, tools, prompt, self._encoded(messages, tools, prompt))

    def _encoded(self, messages: Messages, tools: bool, prompt: bool) -> Encoded:
        """A conversation's text and ids, made once. Raises what the template raises, each time."""
        key = json.dumps([messages, tools, prompt])
        if key not in self._rendered:
            study = self._study
            try:
                self._rendered[key] = study.encode(study.run(messages, self._tools if tools else None, prompt))
            except TokentraceError as error:
                self._rendered[key] = error.with_traceback(None)
        found = self._rendered[key]
        if isinstance(found, TokentraceError):
            raise found
        return found

    # -- comparing

    def _breaks(self, asked: _Written, stream: _Written, appended: _Written, named: bool) -> Iterator[AppendBreak]:
        at = _parting(asked.encoded, stream.encoded)
        if at is not None:
            prompt = asked.encoded.rendering
            same = common_prefix(prompt.text, stream.encoded.rendering.text)
            where = Where.SEAM if same == len(prompt.text) else Where.PROMPT if same >= prompt.tail else Where.PAST
            yield replace(self._parted(where, asked, stream, at, named), at_turn=True)
        at = _parting(stream.encoded, appended.encoded)
        if at is not None:
            yield self._parted(Where.PAST, stream, appended, at, named)

    def _stop(self, case: AppendCase, messages: Messages, encoded: Encoded) -> tuple[int, bool]:
        """How many tokens the stream has: all up to the end of the turn, its stop token included, if it has one."""
        study, at = self._study, len(messages) - 1
        render = functools.partial(study.run_with, self._tools if case.tools else None)
        found, _ = find_turns(encoded.rendering, messages, render, study.tokenizer, wanted=lambda index: index == at)
        own = [turn for turn in found if turn.message == at]
        if not own:
            return len(encoded.ids), True
        end = turn_end(encoded, own[-1], study.endings(case.tools))
        return end.stop, end.stop_token is not None

    def _parted(self, where: Where, first: _Written, second: _Written, token: int, named: bool) -> AppendBreak:
        one, other = first.encoded, second.encoded
        texts = one.rendering, other.rendering
        fields = tuple(_changed_fields(*texts)) if where is Where.PAST else ()
        at = common_prefix(texts[0].text, texts[1].text)
        blame = self._blame(where, at, first, second) if named and where is not Where.SEAM else None
        message = next((turn for end, turn in zip(texts[0].ends, texts[0].turns, strict=True) if end > at), None)
        starts = one.position(token), other.position(token)
        had, has = (text.text[start : start + _EXCERPT] for text, start in zip(texts, starts, strict=True))
        ids = tuple(one.ids.tolist()), tuple(other.ids.tolist())
        return AppendBreak(where, had, has, starts[0], message, fields, blame, ids=ids)

    def _blame(self, where: Where, at: int, first: _Written, second: _Written) -> Blame | None:
        """The line, told of the second without a generation prompt if that parts at the same place."""
        one = self._encoded(*first[:3]).rendering.text
        for prompt in dict.fromkeys((False, second.prompt)):
            other = self._encoded(second.messages, second.tools, prompt).rendering.text
            if common_prefix(one, other) == at:
                find = find_blame if where is Where.PAST else find_writers
                left, right = self._given(first), self._given(second._replace(prompt=prompt))
                return find(self._tracer, left, right, at, (one, other))
        return None

    def _given(self, written: _Written) -> dict[str, Any]:
        """A conversation as the instrumented copy takes it."""
        return {
            "messages": written.messages,
            "tools": TOOLS if written.tools else None,
            "add_generation_prompt": written.prompt,
            "variables": self._study.variables,
        }


def _missing(rendering: Rendering, case: AppendCase, lost: Sequence[str]) -> tuple[str, ...]:
    """What of a turn is not written, in words: fields that are `lost`, and texts that are not as they were given."""
    found, turn, at = list(lost), case.turn.said, len(case.past)
    for name in ("content", "reasoning_content"):
        given = case.said.get(name)
        if not given:
            continue
        own = "".join(text for text, _, origin in rendering.spans() if is_of(origin, at, name))
        parts = (THOUGHT, ANSWER) if turn is Said.INLINE else (given.strip(),)
        if turn is Said.INLINE and name in found and is_written(ANSWER, own):
            found[found.index(name)] = str(Said.INLINE)
        elif name not in found and not all(is_written(part, own) for part in parts):
            found.append(f"{name}{ALTERED}")
        elif name not in found and turn is Said.SPACED and not is_written(given, own):
            found.append(f"white space around {name}")
    return tuple(found)


ALTERED: Final = " is not written as it was given"
"""Follows the name of a field that is written otherwise."""


def _parting(one: Encoded, other: Encoded) -> int | None:
    """The first token of `one` that `other` does not have at the same place; None if it begins with all of them."""
    ids, others = one.ids, other.ids[: len(one.ids)]
    same = np.flatnonzero(ids[: len(others)] != others)
    return int(same[0]) if len(same) else len(others) if len(others) < len(ids) else None


def _changed_fields(one: Rendering, other: Rendering) -> Iterator[str]:
    """Fields whose text in the first is not what it is in the second."""
    texts: list[dict[Any, str]] = []
    for rendering in (one, other):
        found: dict[Any, str] = {}
        for text, _, origin in rendering.spans():
            if origin is not None and origin.message is not None and not origin.is_role:
                found[origin] = found.get(origin, "") + text
        texts.append(found)
    for origin, text in texts[0].items():
        now = texts[1].get(origin, "")
        if now != text:
            yield f"{'.'.join(map(str, origin.path))} of message {origin.message} is {'gone' if not now else 'changed'}"


def _refusal(error: TokentraceError) -> str:
    """Why a template refuses, in its own words where it has some."""
    if not isinstance(error, TemplateError):
        return str(error)
    line = f" (line {error.line})" if error.line is not None else ""
    return f"{error.problem.removeprefix('the template refused the conversation: ')}{line}"


def _lost_words(lost: Any, messages: Messages) -> str:
    role = messages[lost.message]["role"] if lost.message is not None else "tool schema"
    return f"{lost.field} of the {role} message that follows"
