"""Does each next prompt begin with the stream so far, id for id?"""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ..conversation.forms import MessageForm
from ..conversation.messages import REASONING_FIELDS, Messages
from ..errors import TokentraceError
from ..rendering.lost import Lost
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.memory import Memory
from ..study.probes import SYSTEM, USER, Message, call, calling, result
from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from ..template.origin import UNKNOWN
from ..template.trace import Rendering
from ..tokens.encoding import ControlPolicy
from ..tokens.ids import common_prefix as common_ids
from .blame import Blame, Request, find_blame
from .finding import WordedEnum

ANSWER = "An Answer, naïve"
THOUGHT = "A Thought, naïve"
"""Capitals and the ï reveal a template that alters texts."""
_PROPERTIES = {"key": {"type": ["string", "object"]}, "number": {"type": "number"}}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": []}
TOOLS: Sequence[Message] = [
    {"type": "function", "function": {"name": name, "description": "a probe", "parameters": _SCHEMA}}
    for name in ("probe1", "probe2")
]
_CALLING = (
    *((reasoning, content, "object") for reasoning in (False, True) for content in (False, True)),
    *((False, True, "empty"), (True, False, "empty"), (False, False, "nested"), (True, True, "nested")),
)
NO_END = "the row ends before the model's stop token (final_stop=True adds it)"
_ALTERED = " is not written verbatim"
_EXCERPT = 48
_DECLARED = "with declared tools"
_LONG = 6
_SPACED = f"\n {ANSWER} \n"
_ARGUMENTS = {
    "object": {"key": "value"},
    "empty": {},
    "nested": {"key": {"inner": ["one", 2, True, None], "more": {}}, "number": 2.5},
}


class Append(WordedEnum):
    """What follows an assistant turn: results of its `calls`, then `messages`."""

    words: str
    calls: int
    messages: tuple[Message, ...]

    TOOL = "tool", "a tool result", 1, ()
    PARALLEL = "parallel tools", "two parallel results", 2, ()
    TOOL_USER = "tool, then user", "a result plus a user message", 1, (USER,)
    USER = "user", "a user message", 0, (USER,)
    SYSTEM = "system", "a system message", 0, (SYSTEM,)
    ASSISTANT = "assistant", "another assistant turn", 0, ({"role": "assistant", "content": ANSWER},)


class Style(StrEnum):
    PLAIN = ""
    SPACED = "white space around content"
    INLINE = "reasoning inside content"
    """As sent by clients that do not separate reasoning."""


@dataclass(frozen=True, slots=True)
class TurnForm:
    append: Append
    reasoning: bool = False
    content: bool = True
    arguments: str = "object"
    style: Style = Style.PLAIN


def turns() -> Iterator[TurnForm]:
    for append in Append:
        forms = _CALLING if append.calls else ((False, True, "object"), (True, True, "object"))
        yield from (TurnForm(append, *form) for form in forms)
        yield from (TurnForm(append, style=style) for style in (Style.SPACED, Style.INLINE))


class AppendOutcome(StrEnum):
    """The outcome of an append, worst first. Lost text reaches no token."""

    BREAKS = "breaks"
    LOSES = "loses"
    REFUSED = "refused"
    HOLDS = "holds"


class Where(WordedEnum):
    words: str

    PAST = "past", "earlier turns are rewritten"
    PROMPT = "prompt", "the turn does not begin with its generation prompt"
    SEAM = "seam", "a token spans the end of the prompt"


@dataclass(frozen=True, slots=True)
class AppendBreak:
    """The next prompt, or the turn (`at_turn`), has `after` where the stream has `before`."""

    where: Where
    before: str
    after: str
    gone: tuple[str, ...]
    blame: Blame | None = None
    at_turn: bool = False

    def __str__(self) -> str:
        words = self.where.words + (f", without {', '.join(self.gone)}" if self.gone else "")
        return words if self.blame is None else f"{words} ({self.blame})"


@dataclass(frozen=True, slots=True)
class AppendCell:
    """A conversation for one kind of turn, and its outcome.

    The turn is message `index`, after a `history`. `lost` and `lost_after` name fields of the
    turn and of appended messages. `flaws` are those after any history; the append holds after
    `holding` of them.
    """

    turn: TurnForm
    messages: Messages
    index: int
    tools: bool
    history: str = ""
    outcome: AppendOutcome = AppendOutcome.HOLDS
    breaks: tuple[AppendBreak, ...] = ()
    lost: tuple[str, ...] = ()
    lost_after: tuple[str, ...] = ()
    reason: str = ""
    flaws: tuple[str, ...] = ()
    holding: int = 0

    @property
    def append(self) -> Append:
        return self.turn.append

    @property
    def requests(self) -> tuple[Request, Request, Request]:
        """For the turn's prompt, the turn, and the next prompt."""
        tools, until = TOOLS if self.tools else None, self.messages[: self.index + 1]
        whole = Request(self.messages, tools, self.append is not Append.ASSISTANT)
        return Request(until[:-1], tools, True), Request(until, tools), whole

    def cause(self, in_turn: bool = False) -> str:
        """Say what goes wrong; with `in_turn`, in the turn itself."""
        after = f", {self.history}" if self.history else ""
        if self.outcome is AppendOutcome.REFUSED:
            return f"refused: {self.reason}{after}"
        words = [str(one) for one in self.breaks if one.at_turn or not in_turn]
        words[-1:] = [f"{one}{after}" for one in words[-1:]]
        lost = [*self.lost, *(() if in_turn else self.lost_after)]
        whole = "tool_calls.0" in lost
        lost = ["tool_calls" if whole and field.startswith("tool_calls.") else field for field in lost]
        lost = ["the second call" if field == "tool_calls.1" else field for field in dict.fromkeys(lost)]
        words += [field for field in lost if field.endswith(_ALTERED)]
        gone = ", ".join(field for field in lost if not field.endswith(_ALTERED))
        words += [f"{gone} reaches no token"] * bool(gone) + [NO_END] * (in_turn and "end" in self.flaws)
        return "; ".join(dict.fromkeys(words)) or "it goes wrong after another history"


def cases(turn: TurnForm, study: TemplateStudy) -> Iterator[AppendCell]:
    """Conversations, smallest first. Only plain turns get the longest."""
    tags, thought = study.grammar(True).reasoning, f"<think>\n{THOUGHT}\n</think>\n\n"
    if tags and tags.open and tags.close:
        thought = f"{tags.open}{THOUGHT}{tags.close}"
    contents = {Style.SPACED: _SPACED, Style.INLINE: thought + ANSWER}

    def reply(turn: TurnForm) -> Message:
        fields = {"role": "assistant", "content": contents.get(turn.style, ANSWER) if turn.content else ""}
        if turn.reasoning:
            fields["reasoning_content"] = THOUGHT
        calls = [call(at + 1, _ARGUMENTS[turn.arguments]) for at in range(turn.append.calls)]
        return calling(*calls, **fields) if calls else fields

    results = [result(at + 1) for at in range(turn.append.calls)]
    tools = (reply(replace(turn, append=Append.TOOL, style=Style.PLAIN)), result())
    answer = (USER, reply(TurnForm(Append.USER, turn.reasoning)))
    histories: dict[str, tuple[Message, ...]] = {
        "": (USER,),
        **({} if results else {_DECLARED: (USER,)}),
        "with a system message": (SYSTEM, USER),
        "after a round of tools": (USER, *tools),
        "after an earlier answer": (*answer, USER),
        "after an earlier answer and a round of tools": (*answer, USER, *tools),
    }
    if turn.style is Style.PLAIN and turn.arguments == "object":
        histories[f"after {_LONG} rounds of tools"] = (USER, *tools * _LONG)
        histories[f"after {_LONG} earlier answers"] = (*answer * _LONG, USER)
    for words, past in histories.items():
        messages = with_ids((*past, reply(turn), *results, *turn.append.messages), study)
        declared = words == _DECLARED or any("tool_calls" in message for message in messages)
        yield AppendCell(turn, messages, len(past), declared, words)


class AppendMatrix:
    def __init__(self, renderer: Renderer) -> None:
        policy, form = ControlPolicy.HF_COMPAT, MessageForm.ADAPT
        self._renderer = replace(renderer, past=Past.TEMPLATE, control_tokens=policy, messages=form)
        self._cache = Memory()

    def cell(self, turn: TurnForm) -> AppendCell:
        """The worst case, without histories that the template refuses on their own."""
        every = [self._try(case) for case in cases(turn, self._renderer.study(TOOLS))]
        accepted = [one for one in every if one.outcome is not AppendOutcome.REFUSED or self._accepts(one)]
        cells = accepted or every[:1]
        worst = min(cells, key=lambda cell: (list(AppendOutcome).index(cell.outcome), -len(cell.flaws)))
        flaws = tuple(sorted({flaw for cell in cells for flaw in cell.flaws}))
        outcomes = [cell.outcome for cell in cells]
        return replace(worst, flaws=flaws, holding=outcomes.count(AppendOutcome.HOLDS))

    def blamed(self, cell: AppendCell) -> AppendCell:
        """Add the template's lines behind the breaks. This is slow."""
        breaks = (replace(one, blame=self._blame(cell, one)) for one in cell.breaks)
        return replace(cell, breaks=tuple(breaks))

    def _blame(self, cell: AppendCell, one: AppendBreak) -> Blame | None:
        """The line of a break, best without the next prompt."""
        if one.where is Where.SEAM:
            return None
        first, second = cell.requests[:2] if one.at_turn else cell.requests[1:]
        at = common_prefix(self._render(first).text, self._render(second).text)
        study, rewrites = self._renderer.study(first.tools), one.where is Where.PAST
        find = functools.partial(find_blame, study, first, at=at, rewrites=rewrites)
        return find(second._replace(prompt=False)) or find(second)

    def _accepts(self, case: AppendCell) -> bool:
        with contextlib.suppress(TokentraceError):
            return bool(self._render(case.requests[0]).text)
        return False

    def _render(self, request: Request) -> RenderedTokens:
        messages, tools, prompt = request
        render = functools.partial(self._renderer.render, messages, tools=tools)
        return self._cache.once(json.dumps(request), lambda: render(add_generation_prompt=prompt))

    def _try(self, case: AppendCell) -> AppendCell:
        try:
            adapted = self._renderer.adapt_messages(case.messages, tools=case.requests[0].tools)
            cell = replace(case, messages=tuple(adapted.messages))
            rendered = [*map(self._render, cell.requests)]
        except TokentraceError as error:
            line, problem = getattr(error, "line", None), getattr(error, "problem", str(error))
            reason = problem.removeprefix("the template refused the conversation: ")
            reason += "" if line is None else f" (line {line})"
            return replace(case, outcome=AppendOutcome.REFUSED, reason=reason, flaws=("refused",))
        _, turn, after = rendered
        lost, breaks = tuple(_missing(turn, cell)), tuple(self._breaks(cell, rendered))
        follows = tuple(
            f"{one.field} of the {cell.messages[one.message]['role']} message that follows"
            for one in after.lost
            if one.message is not None and one.message > cell.index
        )
        outcome = AppendOutcome.LOSES if lost or follows else AppendOutcome.HOLDS
        outcome = AppendOutcome.BREAKS if breaks else outcome
        flaws = ["turn" if one.at_turn else "past" for one in breaks]
        flaws += ["lost"] * bool(lost) + ["lost after"] * bool(follows)
        flaws += ["end" for one in turn.turns[-1:] if one.message == cell.index and one.stop_token is None]
        cell = replace(cell, outcome=outcome, breaks=breaks, lost=lost, lost_after=follows)
        return replace(cell, flaws=tuple(dict.fromkeys(flaws)))

    def _breaks(self, cell: AppendCell, rendered: Sequence[RenderedTokens]) -> Iterator[AppendBreak]:
        encoded = [one.encoded for one in rendered]
        turn = encoded[1]
        for end in rendered[1].turns[-1:]:
            if end.message == cell.index and end.stop < len(turn.ids):
                spans = turn.rendering.spans(0, turn.position(end.stop))
                encoded[1] = self._renderer.study().encode(Rendering.of(spans))
        for at, (one, other) in enumerate(itertools.pairwise(encoded)):
            token = common_ids(one.ids, other.ids)
            if token == len(one.ids):
                continue
            text, where = one.rendering.text, Where.PAST
            same = common_prefix(text, other.rendering.text)
            if at == 0 and same >= one.rendering.tail:
                where = Where.SEAM if same == len(text) else Where.PROMPT
            texts = (side.rendering.text[side.position(token) :] for side in (one, other))
            before, after = (text[:_EXCERPT] for text in texts)
            old, new = ([*one.lost, *one.dropped] for one in rendered[at : at + 2])
            lost = [one for one in new if one not in old and (one.message or 0) < cell.index + at]
            gone = sorted({_field(one, cell) for one in lost})
            yield AppendBreak(where, before, after, tuple(gone), at_turn=at == 0)


def _field(lost: Lost, cell: AppendCell) -> str:
    is_content = lost.message == cell.index and lost.field == "content" and ANSWER not in lost.text
    return str(Style.INLINE) if is_content and cell.turn.style is Style.INLINE else lost.field


def _missing(turn: RenderedTokens, cell: AppendCell) -> Iterator[str]:
    lost = [one for one in turn.lost if one.message == cell.index]
    yield from (_field(one, cell) for one in lost)
    style = cell.turn.style
    contents = (THOUGHT, ANSWER) if style is Style.INLINE else (ANSWER,) * cell.turn.content
    for name, texts in (("content", contents), ("reasoning_content", (THOUGHT,) * cell.turn.reasoning)):
        if name in {one.field for one in lost}:
            continue
        output = text_from(turn.rendering, cell.index, name)
        if not all(contains_text(text, output) for text in texts):
            yield f"{name}{_ALTERED}"
        elif style is Style.SPACED and name == "content" and not contains_text(_SPACED, output):
            yield f"white space around {name}"


def with_ids(messages: Messages, study: TemplateStudy) -> tuple[Message, ...]:
    """Give each call another id that the template accepts."""
    grammar = study.grammar(True).calls
    form = "functions.{}:{}" if grammar is not None and grammar.id_is_name else "call{1:05}"
    numbers, ids, numbered = itertools.count(), list[str](), list[Message]()
    for message in messages:
        if message["role"] == "tool":
            message = {**message, "tool_call_id": ids.pop(0)}
        elif calls := message.get("tool_calls"):
            ids = [form.format(one["function"]["name"], next(numbers)) for one in calls]
            message = {**message, "tool_calls": [{**one, "id": ids[at]} for at, one in enumerate(calls)]}
        numbered.append(message)
    return tuple(numbered)


def text_from(rendering: Rendering, message: int, field: str) -> str:
    """A field's text, and all text of unknown origin."""
    names = {*REASONING_FIELDS} if field in REASONING_FIELDS else {field.replace("arguments", "tool_calls")}
    fields = {("messages", message, name) for name in names} | {UNKNOWN}
    return "".join(text for text, _, origin in rendering.spans() if origin and origin[:3] in fields)


def contains_text(text: str, output: str) -> bool:
    """True if the output contains a text as it is or as JSON."""
    quoted = (json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
    return any(one in output for one in (text, *quoted))
