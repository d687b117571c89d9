"""Does a template only append? Every case is rendered and compared id for id.

After a turn, a rollout holds the prompt and the sampled tokens. An append holds if the next prompt
begins with exactly those ids.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from ..conversation.forms import MessageForm
from ..conversation.messages import Messages
from ..errors import TemplateError, TokentraceError
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.turns import common_prefix
from ..template.trace import Rendering
from ..tokens.encoding import ControlPolicy, Encoded
from ..tokens.ids import common_prefix as common_ids
from .blame import Blame, find_blame
from .cases import ANSWER, THOUGHT, TOOLS, Append, AppendCase, Request, Style, TurnForm, call_ids, cases, reasoning_tags
from .facts import contains_text, text_from

_EXCERPT: Final = 48
"""Characters quoted of a text."""
ALTERED: Final = " is not written as it was given"
"""Follows the name of a field whose text the template changes."""


class AppendOutcome(StrEnum):
    """The outcome of an append, the worst first. Text that is lost reaches no token."""

    BREAKS = "breaks"
    LOSES = "loses"
    REFUSED = "refused"
    HOLDS = "holds"


class Where(StrEnum):
    """What differs: earlier text, the turn after its prompt, or a token at the seam of both."""

    PAST = "past"
    PROMPT = "prompt"
    SEAM = "seam"


@dataclass(frozen=True, slots=True)
class AppendBreak:
    """The next prompt has the text `after` where the stream has `before`.

    `fields` of past messages are gone or changed. `at_turn`: before anything is appended.
    """

    where: Where
    before: str
    after: str
    fields: tuple[str, ...]
    blame: Blame | None = None
    at_turn: bool = False


@dataclass(frozen=True, slots=True)
class AppendCell:
    """The outcome of one kind of turn, shown by the smallest conversation that has it.

    `messages` are in the form that the template reads. Fields of the turn (`lost`) and of the appended messages
    (`lost_after`) reach no token. `reason`: why the template refuses. `ends`: the turn alone ends with a stop token.
    `also` has the smallest conversation for each further flaw; `elsewhere`: after another history the append holds.
    """

    case: AppendCase
    outcome: AppendOutcome
    messages: Messages
    breaks: tuple[AppendBreak, ...] = ()
    lost: tuple[str, ...] = ()
    lost_after: tuple[str, ...] = ()
    reason: str = ""
    ends: bool = True
    also: tuple[AppendCell, ...] = ()
    elsewhere: bool = False

    @property
    def turn(self) -> TurnForm:
        return self.case.turn

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


class AppendMatrix:
    """Runs the cases of one template with one set of variables. Naming lines is slow."""

    def __init__(self, renderer: Renderer, *, names_lines: bool) -> None:
        policy, form = ControlPolicy.HF_COMPAT, MessageForm.ADAPT
        self._renderer = replace(renderer.silent(), past=Past.TEMPLATE, control_tokens=policy, messages=form)
        self._names_lines = names_lines
        study = renderer.study(TOOLS)
        self._ids, self._tags = call_ids(study), reasoning_tags(study)
        self._cache: dict[str, RenderedTokens] = {}

    def cell(self, turn: TurnForm) -> AppendCell:
        """Run all cases of a kind of turn and return the worst.

        Skips a history that is refused on its own: another cell, or the roles, report that.
        """
        every = [self._run(case) for case in cases(turn, self._ids, self._tags)]
        cells = [one for one in every if one.outcome is not AppendOutcome.REFUSED or self._accepts(one)] or every[:1]
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
        return self._run(cell.case, names_lines=True) if cell.breaks and self._names_lines else cell

    def _accepts(self, cell: AppendCell) -> bool:
        """True unless the template refuses the history of a case."""
        try:
            self._render(Request(cell.case.past, cell.case.tools, True))
        except TokentraceError:
            return False
        return True

    def _render(self, request: Request) -> RenderedTokens:
        """Render a conversation, once."""
        key, tools = json.dumps(request), TOOLS if request.tools else None
        if key not in self._cache:
            rendered = self._renderer.render(request.messages, tools=tools, add_generation_prompt=request.prompt)
            self._cache[key] = rendered
        return self._cache[key]

    def _run(self, case: AppendCase, *, names_lines: bool = False) -> AppendCell:
        at, tools = len(case.past), case.tools
        try:
            messages = tuple(self._renderer.adapt_messages(case.messages, tools=TOOLS if tools else None).messages)
            whole = Request(messages, tools, case.turn.append is not Append.ASSISTANT)
            requests = Request(messages[:at], tools, True), Request(messages[: at + 1], tools), whole
            prompt, turn, after = map(self._render, requests)
        except TokentraceError as error:
            return AppendCell(case, AppendOutcome.REFUSED, case.messages, reason=_refusal(error))
        missing = tuple(_missing(turn.rendering, case, [one.field for one in turn.lost if one.message == at]))
        gone = [(one.field, one.message) for one in after.lost if one.message is not None and one.message > at]
        lost_after = tuple(f"{field} of the {messages[index]['role']} message that follows" for field, index in gone)
        stream, end = turn.encoded, next((one for one in reversed(turn.turns) if one.message == at), None)
        if end is not None and end.stop < len(stream.ids):
            stream = self._renderer.study().encode(stream.rendering.until(stream.position(end.stop)))
        breaks = tuple(self._breaks(requests, (prompt.encoded, stream, after.encoded), names_lines))
        outcome = AppendOutcome.LOSES if missing or lost_after else AppendOutcome.HOLDS
        outcome = AppendOutcome.BREAKS if breaks else outcome
        ends = end is None or end.stop_token is not None
        return AppendCell(case, outcome, messages, breaks, missing, lost_after, ends=ends)

    def _breaks(
        self, requests: Sequence[Request], encoded: Sequence[Encoded], names_lines: bool
    ) -> Iterator[AppendBreak]:
        """Compare prompt with stream, and stream with next prompt."""
        for at, (one, other) in enumerate(itertools.pairwise(encoded)):
            token = common_ids(one.ids, other.ids)
            if token == len(one.ids):
                continue
            text, where = one.rendering.text, Where.PAST
            same = common_prefix(text, other.rendering.text)
            if at == 0 and same >= one.rendering.tail:
                where = Where.SEAM if same == len(text) else Where.PROMPT
            blame = self._blame(where, requests[at], requests[at + 1], same) if names_lines else None
            before, after = (side.rendering.text[side.position(token) :][:_EXCERPT] for side in (one, other))
            fields = _changed_fields(one.rendering, other.rendering) if where is Where.PAST else ()
            yield AppendBreak(where, before, after, tuple(fields), blame, at_turn=at == 0)

    def _blame(self, where: Where, first: Request, second: Request, at: int) -> Blame | None:
        """Find the line, without the second prompt if the texts differ at the same place."""
        text = self._render(first).text
        for prompt in (False, second.prompt) if where is not Where.SEAM else ():
            request = second._replace(prompt=prompt)
            other = self._render(request).text
            if common_prefix(text, other) == at:
                study = self._renderer.study(TOOLS if first.tools else None)
                return find_blame(study, first, request, at, (text, other), rewrites=where is Where.PAST)
        return None


def _missing(rendering: Rendering, case: AppendCase, lost: Sequence[str]) -> Iterator[str]:
    """Yield words for what is not written of a turn: lost fields, changed texts."""
    style, texts = case.turn.style, {name: case.reply.get(name) for name in ("content", "reasoning_content")}
    spans = {name: text_from(rendering, len(case.past), name) for name in texts}
    for field in lost:
        inline = style is Style.INLINE and field in texts and contains_text(ANSWER, spans[field])
        yield str(style) if inline else field
    for name, text in texts.items():
        if not text or name in lost:
            continue
        parts = (THOUGHT, ANSWER) if style is Style.INLINE else (text.strip(),)
        if not all(contains_text(part, spans[name]) for part in parts):
            yield f"{name}{ALTERED}"
        elif style is Style.SPACED and not contains_text(text, spans[name]):
            yield f"white space around {name}"


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
