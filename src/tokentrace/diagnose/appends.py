"""Does a template only append? Every case is rendered and compared id for id.

After a turn, a rollout holds the prompt and the sampled tokens up to and including the stop token. An append holds if
the next prompt begins with exactly those ids. It breaks if the template rewrites earlier turns once something follows,
or writes a turn differently than after the prompt that asks for it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

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
from ..tokens.ids import common_prefix as common_ids
from .blame import Blame, find_blame, find_writer
from .cases import ANSWER, THOUGHT, TOOLS, Append, AppendCase, Style, TurnForm, cases
from .facts import reasoning_tags
from .field_texts import call_ids, contains_text, is_from
from .lines import LineTracer

_EXCERPT: Final = 48
"""Characters quoted of a text."""
ALTERED: Final = " is not written as it was given"
"""Follows the name of a field whose text the template changes."""


class AppendOutcome(StrEnum):
    """The outcome of an append, the worst first."""

    BREAKS = "breaks"
    LOSES = "loses"
    """Nothing is rewritten, but some text reaches no token."""
    REFUSED = "refused"
    HOLDS = "holds"


class Where(StrEnum):
    """What differs."""

    PAST = "past"
    """The template rewrites text of the stream."""
    PROMPT = "prompt"
    """The turn does not follow the generation prompt that asks for it."""
    SEAM = "seam"
    """The text is the same, but a token spans the end of the prompt."""


@dataclass(frozen=True, slots=True)
class AppendBreak:
    """The next prompt has the text `after` where the stream has `before`.

    `fields` are those of past messages that are gone or changed. `at_turn`: the turn alone breaks it, before anything
    is appended.
    """

    where: Where
    before: str
    after: str
    fields: tuple[str, ...]
    blame: Blame | None = None
    at_turn: bool = False


@dataclass(frozen=True, slots=True)
class AppendCell:
    """The outcome of one kind of turn, shown by the smallest conversation with that outcome.

    `messages` is the conversation in the form that the template reads. Fields of the turn (`lost`) and of the appended
    messages (`lost_after`) reach no token. `reason`: why the template refuses it. `ends`: the turn, as the last one,
    ends with a stop token. `also` has the smallest conversation for each further flaw, after other histories;
    `elsewhere`: after another history the append holds.
    """

    turn: TurnForm
    outcome: AppendOutcome
    case: AppendCase
    messages: Messages
    breaks: tuple[AppendBreak, ...] = ()
    lost: tuple[str, ...] = ()
    lost_after: tuple[str, ...] = ()
    reason: str = ""
    ends: bool = True
    also: tuple[AppendCell, ...] = ()
    elsewhere: bool = False

    @property
    def append(self) -> Append:
        return self.turn.append

    @property
    def flaws(self) -> frozenset[str]:
        """What goes wrong in this conversation."""
        flaws = {
            "refused": self.outcome is AppendOutcome.REFUSED,
            "turn": any(one.at_turn for one in self.breaks),
            "past": any(not one.at_turn for one in self.breaks),
            "lost": bool(self.lost),
            "lost after": bool(self.lost_after),
            "end": not self.ends,
        }
        return frozenset(name for name, present in flaws.items() if present)

    @property
    def all_flaws(self) -> frozenset[str]:
        """What goes wrong after any history."""
        return self.flaws.union(*(one.flaws for one in self.also))


class _Text(NamedTuple):
    """A rendered conversation; `encoded` may be cut at the end of a turn."""

    messages: Messages
    tools: bool
    prompt: bool
    encoded: Encoded


class AppendMatrix:
    """Runs the cases of one template with one set of variables."""

    def __init__(self, study: TemplateStudy, tracer: LineTracer) -> None:
        self._study = study
        self._tracer = tracer
        self._tools = wrap_tools(TOOLS)
        self._ids = call_ids(study)
        self._tags = reasoning_tags(study)
        self._cache: dict[str, Encoded | TokentraceError] = {}

    def cell(self, turn: TurnForm) -> AppendCell:
        """Run all cases of a kind of turn and return the worst.

        Skips a history that the template refuses on its own: the cell that appends it reports that, and for a system
        message the list of roles does.
        """
        every = list(cases(turn, self._ids, self._tags))
        cells = [cell for case in every if self._renders(cell := self._run(case))] or [self._run(every[0])]
        worst = min(cells, key=lambda cell: list(AppendOutcome).index(cell.outcome))
        flaws, also = worst.flaws, []
        for cell in cells:
            if cell.flaws - flaws:
                also.append(self._blamed(cell))
                flaws |= cell.flaws
        holds = any(cell.outcome is AppendOutcome.HOLDS for cell in cells if cell is not worst)
        return replace(self._blamed(worst), also=tuple(also), elsewhere=holds)

    def _blamed(self, cell: AppendCell) -> AppendCell:
        """Name the lines of a cell's breaks. Too slow for cells that nobody is shown."""
        return self._run(cell.case, blames=True) if cell.breaks and self._tracer.has_lines else cell

    def _renders(self, cell: AppendCell) -> bool:
        """True unless the template refuses the history of a case."""
        if cell.outcome is AppendOutcome.REFUSED:
            try:
                past = adapt(cell.case.messages, self._study.forms).messages[: len(cell.case.past)]
                self._encode(tuple(past), cell.case.tools, True)
            except TokentraceError:
                return False
        return True

    def _run(self, case: AppendCase, *, blames: bool = False) -> AppendCell:
        study, before = self._study, len(case.past)
        try:
            messages = tuple(adapt(case.messages, study.forms).messages)
            prompt = self._text(messages[:before], case.tools, True)
            turn = self._text(messages[: before + 1], case.tools, False)
            appended = self._text(messages, case.tools, case.turn.append is not Append.ASSISTANT)
        except TokentraceError as error:
            return AppendCell(case.turn, AppendOutcome.REFUSED, case, case.messages, reason=_refusal(error))
        encoded = turn.encoded
        lost = find_lost(encoded.rendering, messages[: before + 1], study.forms, first=before).lost
        missing = _missing(encoded.rendering, case, [one.field for one in lost])
        lost_after = find_lost(appended.encoded.rendering, messages, study.forms, first=before + 1).lost
        stop, ends = self._stop(case, messages[: before + 1], encoded)
        if stop < len(encoded.ids):
            turn = turn._replace(encoded=study.encode(encoded.rendering.until(encoded.position(stop))))
        breaks = tuple(self._breaks(prompt, turn, appended, blames))
        complete = not missing and not lost_after
        outcome = AppendOutcome.BREAKS if breaks else AppendOutcome.HOLDS if complete else AppendOutcome.LOSES
        words = tuple(_lost_words(one, messages) for one in lost_after)
        return AppendCell(case.turn, outcome, case, messages, breaks, missing, words, ends=ends)

    def _text(self, messages: Messages, tools: bool, prompt: bool) -> _Text:
        return _Text(messages, tools, prompt, self._encode(messages, tools, prompt))

    def _encode(self, messages: Messages, tools: bool, prompt: bool) -> Encoded:
        """Render and encode a conversation once. Raises the template's error each time."""
        key = json.dumps([messages, tools, prompt])
        if key not in self._cache:
            study = self._study
            try:
                self._cache[key] = study.encode(study.run(messages, self._tools if tools else None, prompt))
            except TokentraceError as error:
                self._cache[key] = error.with_traceback(None)
        encoded = self._cache[key]
        if isinstance(encoded, TokentraceError):
            raise encoded
        return encoded

    def _stop(self, case: AppendCase, messages: Messages, encoded: Encoded) -> tuple[int, bool]:
        """Return the length of the stream up to the end of its turn, and whether a stop token ends it."""
        study, last = self._study, len(messages) - 1
        render = functools.partial(study.run_with, self._tools if case.tools else None)
        turns, _ = find_turns(encoded.rendering, messages, render, study.tokenizer, only=last)
        turns = [turn for turn in turns if turn.message == last]
        if not turns:
            return len(encoded.ids), True
        end = turn_end(encoded, turns[-1], study.endings(case.tools))
        return end.stop, end.stop_token is not None

    def _breaks(self, prompt: _Text, stream: _Text, appended: _Text, blames: bool) -> Iterator[AppendBreak]:
        if _differ(prompt, stream):
            text = prompt.encoded.rendering
            same = common_prefix(text.text, stream.encoded.rendering.text)
            where = Where.SEAM if same == len(text.text) else Where.PROMPT if same >= text.tail else Where.PAST
            yield replace(self._break(where, prompt, stream, blames), at_turn=True)
        if _differ(stream, appended):
            yield self._break(Where.PAST, stream, appended, blames)

    def _break(self, where: Where, first: _Text, second: _Text, blames: bool) -> AppendBreak:
        encoded = first.encoded, second.encoded
        texts = [one.rendering for one in encoded]
        fields = tuple(_changed_fields(*texts)) if where is Where.PAST else ()
        at = common_prefix(texts[0].text, texts[1].text)
        blame = self._blame(where, at, first, second) if blames and where is not Where.SEAM else None
        token = common_ids(encoded[0].ids, encoded[1].ids)
        starts = [one.position(token) for one in encoded]
        before, after = (text.text[start : start + _EXCERPT] for text, start in zip(texts, starts, strict=True))
        return AppendBreak(where, before, after, fields, blame)

    def _blame(self, where: Where, at: int, first: _Text, second: _Text) -> Blame | None:
        """Find the line; `second` without a generation prompt if it differs at the same place."""
        one = self._encode(*first[:3]).rendering.text
        for prompt in dict.fromkeys((False, second.prompt)):
            other = self._encode(second.messages, second.tools, prompt).rendering.text
            if common_prefix(one, other) == at:
                find = find_blame if where is Where.PAST else find_writer
                changed = self._run_arguments(second._replace(prompt=prompt))
                return find(self._tracer, self._run_arguments(first), changed, at, (one, other))
        return None

    def _run_arguments(self, text: _Text) -> dict[str, Any]:
        return {
            "messages": text.messages,
            "tools": TOOLS if text.tools else None,
            "add_generation_prompt": text.prompt,
            "variables": self._study.variables,
        }


def _differ(first: _Text, second: _Text) -> bool:
    """True if the ids of `second` do not begin with all ids of `first`."""
    return common_ids(first.encoded.ids, second.encoded.ids) < len(first.encoded.ids)


def _missing(rendering: Rendering, case: AppendCase, lost: Sequence[str]) -> tuple[str, ...]:
    """Words for what the template does not write of a turn: lost fields, and texts that it changes."""
    missing, style = list(lost), case.turn.style
    for name in ("content", "reasoning_content"):
        text = case.reply.get(name)
        if not text:
            continue
        spans = "".join(span for span, _, origin in rendering.spans() if is_from(origin, len(case.past), name))
        parts = (THOUGHT, ANSWER) if style is Style.INLINE else (text.strip(),)
        if style is Style.INLINE and name in missing and contains_text(ANSWER, spans):
            missing[missing.index(name)] = str(Style.INLINE)
        elif name not in missing and not all(contains_text(part, spans) for part in parts):
            missing.append(f"{name}{ALTERED}")
        elif name not in missing and style is Style.SPACED and not contains_text(text, spans):
            missing.append(f"white space around {name}")
    return tuple(missing)


def _changed_fields(one: Rendering, other: Rendering) -> Iterator[str]:
    """Yield the fields whose text differs."""
    texts: tuple[dict[Any, str], dict[Any, str]] = ({}, {})
    for rendering, fields in zip((one, other), texts, strict=True):
        for text, _, origin in rendering.spans():
            if origin is not None and origin.message is not None and not origin.is_role:
                fields[origin] = fields.get(origin, "") + text
    for origin, text in texts[0].items():
        new = texts[1].get(origin, "")
        if new != text:
            yield f"{'.'.join(map(str, origin.path))} of message {origin.message} is {'changed' if new else 'gone'}"


def _refusal(error: TokentraceError) -> str:
    """Say why a template refuses, in its own words where it has some."""
    if not isinstance(error, TemplateError):
        return str(error)
    line = f" (line {error.line})" if error.line is not None else ""
    return f"{error.problem.removeprefix('the template refused the conversation: ')}{line}"


def _lost_words(lost: Any, messages: Messages) -> str:
    role = messages[lost.message]["role"] if lost.message is not None else "tool schema"
    return f"{lost.field} of the {role} message that follows"
