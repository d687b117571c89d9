"""Seams: what a template writes after an assistant's turn when more messages follow.

The bridge renders ``[a small context, a stand-in for the assistant's turn, the new messages]``
and keeps what follows the turn. That is right only if it does not depend on the context:

- *values*: by the trace, no text of the context or the stand-in may appear after the turn,
  unless it is known to be the true one (the name of the called function).
- *control flow*: for each shape of new messages, several contexts and stand-ins must agree.
- *order*: no text of the new messages may come before the turn's end.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from ..conversation.messages import RESULT_ROLES, Messages
from ..errors import InputError, TemplateError
from ..template.origin import Origin
from ..tokens.encoding import Encoded
from .endings import TurnEndings
from .probes import ANSWER, INLINE_THOUGHT, ONE_ARGUMENT, SYSTEM, USER, call, calling, result
from .sampling import turn_end
from .turns import TurnSpan, shows_field


class RefusalReason(StrEnum):
    """Why the bridge cannot prove that a prompt extends the stream."""

    EMPTY_STREAM = "empty_stream"
    """There is no prompt to extend: its ids were lost."""
    TEMPLATE_REFUSED = "template_refused"
    """The template refuses the new messages after an assistant's turn."""
    NO_TURN_END = "no_turn_end"
    """It is unclear where the assistant's turn ends."""
    MOVED = "moved"
    """The template writes a new message before the assistant's turn."""
    CONTEXT_DEPENDENT = "context_dependent"
    """What follows depends on earlier messages, which the bridge does not see."""
    MOVES_PAST = "moves_past"
    """The template moves text of an earlier message behind the assistant's turn."""
    UNKNOWN_VALUE = "unknown_value"
    """The template repeats a value of the assistant's message that is not known."""
    TRUNCATED = "truncated"
    """The completion was cut off, and the policy is to refuse."""
    REWRITES_PAST = "rewrites_past"
    """The shipped template would rewrite the past (``past="inference"``)."""


@dataclass(frozen=True, slots=True, repr=False)
class BridgeRefusal:
    """Why there is no bridge; false in a condition. `message` is the new one at fault."""

    reason: RefusalReason
    detail: str
    message: int | None = None

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return f"BridgeRefusal({self})"

    def __str__(self) -> str:
        where = f"new message {self.message}: " if self.message is not None else ""
        return f"{self.reason}: {where}{self.detail}"


@dataclass(frozen=True, slots=True)
class Continuation:
    """A rendering of ``[context, assistant, new messages]``. The turn ends before token `stop`."""

    encoded: Encoded
    conversation: Messages
    first_new: int
    stop: int
    stop_token: int | None
    span: TurnSpan

    @property
    def tail(self) -> str:
        return self.encoded.rendering.text[self.cut :]

    @property
    def cut(self) -> int:
        return self.encoded.position(self.stop)

    def shows(self, *fields: str) -> bool:
        return shows_field(self.encoded.rendering, fields, self.first_new - 1)

    @property
    def shows_tools(self) -> bool:
        """Whether the template writes tool schemas after the turn."""
        after = self.encoded.rendering.spans(self.cut)
        return any(origin is not None and origin.source == "tools" for _, _, origin in after)


EncodedTurns = tuple[Encoded, list[TurnSpan]]


def find_continuation(
    conversation: Messages, first_new: int, encode: Callable[[], EncodedTurns], endings: TurnEndings
) -> Continuation | BridgeRefusal:
    at = first_new - 1
    try:
        encoded, turns = encode()
    except TemplateError as error:
        return BridgeRefusal(RefusalReason.TEMPLATE_REFUSED, error.problem)
    except InputError as error:
        raise error.renumbered(first_new) from None
    turn = next((turn for turn in turns if turn.message == at and turn.start < turn.end), None)
    if turn is None:
        problem = "the template does not show where the assistant's turn is"
        return BridgeRefusal(RefusalReason.NO_TURN_END, problem)
    stop, stop_token = turn_end(encoded, turn, endings)
    if stop_token is None and stop and encoded.position(stop) != turn.end:
        problem = "a token crosses the end of the assistant's turn"
        return BridgeRefusal(RefusalReason.NO_TURN_END, problem)
    return Continuation(encoded, conversation, first_new, stop, stop_token, turn)


Context = tuple[Mapping[str, Any], ...]
LONG = "question " * 120


def _with_call(before: Context, after: Context, text: str = "") -> tuple[Context, ...]:
    ways = itertools.product((False, True), (text,) if text else ("", None))
    calls = (calling(call(9, {}, as_text=as_text), content=content) for as_text, content in ways)
    return tuple((*before, message, result(9, content=text or "result"), *after) for message in calls)


CONTEXTS: tuple[tuple[Context, ...], ...] = (
    ((USER,),),
    ((SYSTEM, USER),),
    ((USER, ANSWER, USER),),
    _with_call((USER,), ()),
    _with_call((SYSTEM, USER), ()),
    _with_call((SYSTEM, USER), (ANSWER, USER)),
)
"""Conversations before the turn, in all forms that a template may need."""


DEVELOPER: tuple[Context, ...] = (({**SYSTEM, "role": "developer"}, USER),)


def contexts_saying(text: str) -> tuple[tuple[Context, ...], ...]:
    """Contexts with messages of this text."""
    system, user, answer = ({**message, "content": text} for message in (SYSTEM, USER, ANSWER))
    plain = ((system, USER), (user,), (system, user, answer, user))
    return (*((context,) for context in plain), _with_call((user,), (), text))


def lengthened(context: Messages) -> Iterator[Messages]:
    """Longer contexts, for templates that count messages, calls or characters."""
    first = 1 if context[0] is SYSTEM else 0
    more = [{**USER, "content": LONG}, *(ANSWER, USER) * 16, ANSWER]
    yield [*({**SYSTEM, "content": LONG},)[:first], *more, *context[first:]]
    for at in (at for at, message in enumerate(context, 2) if message.get("tool_calls")):
        yield [*context[:at], *context[at - 2 :]]  # the call and its result twice


class CalledFunction(NamedTuple):
    """A call of the turn, as far as it is known, and the number of its result."""

    id: str | None = None
    name: str | None = None
    result: int = -1


def called_functions(new: Messages, call_ids: Sequence[str]) -> list[CalledFunction]:
    """The calls with these ids or, if they are unknown, those that the results answer."""
    if not isinstance(call_ids, (list, tuple)) or not all(type(id) is str for id in call_ids):
        raise InputError("must be a list of strings", field="call_ids")
    calls = [CalledFunction(id) for id in call_ids]
    after = itertools.takewhile(lambda message: message["role"] != "assistant", new)
    results = (message for message in after if message["role"] in RESULT_ROLES)
    for number, answer in enumerate(results):
        id, name = (value if type(value) is str else None for value in map(answer.get, _OF_RESULT))
        at = number if id is None or not call_ids else call_ids.index(id) if id in call_ids else -1
        calls += [CalledFunction()] * (at >= len(calls) and not call_ids)
        if 0 <= at < len(calls) and calls[at].result < 0:
            calls[at] = CalledFunction(calls[at].id or id, name, number)
    return calls


_OF_RESULT = ("tool_call_id", "name")
_UNKNOWN = "unknown_function"


@dataclass(frozen=True, slots=True)
class StandIn:
    """A way to write the assistant's turn, whose words the bridge does not know."""

    content: str | None = "answer"
    reasoning: bool = False
    calls: bool = False
    text_arguments: bool = False
    single: bool = False
    """One call only, however many results follow: for templates that allow no more."""
    has_arguments: bool = False

    def message(self, called: Sequence[CalledFunction]) -> Mapping[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = "thought"
        if self.calls:
            arguments: Any = ONE_ARGUMENT if self.has_arguments else {}
            arguments = json.dumps(arguments) if self.text_arguments else arguments
            message["tool_calls"] = []
            answered = [one for one in called if one.result == 0] if self.single else called
            for at, one in enumerate(answered or [CalledFunction()], 1):
                function = {"name": one.name or _UNKNOWN, "arguments": arguments}
                entry = {"id": one.id or f"none{at:05}", "type": "function", "function": function}
                message["tool_calls"].append(entry)
        return message


def base_stand_ins(after_call: bool) -> Iterator[StandIn]:
    """Ways to write the turn, likeliest first."""
    if not after_call:
        yield StandIn()
        return
    ways = itertools.product((False, True), (False, True), ("", None, "answer"))
    for single, text_arguments, content in ways:
        yield StandIn(content, calls=True, text_arguments=text_arguments, single=single)


INLINE = StandIn(str(INLINE_THOUGHT["content"]))


def variants(form: StandIn) -> Iterator[StandIn]:
    """Other ways the turn could have gone: with reasoning and arguments, words, a call."""
    contents, all_calls = dict.fromkeys((form.content, "answer")), (True,) if form.calls else (False, True)
    for calls, content, reasoning in itertools.product(all_calls, contents, (False, True)):
        yield StandIn(content, reasoning, calls, form.text_arguments, form.single, reasoning)


def check_continuation(
    continuation: Continuation | BridgeRefusal, true_context: bool
) -> BridgeRefusal | None:
    """Refuse if new text precedes the turn, or old text follows it (a true context may repeat)."""
    if isinstance(continuation, BridgeRefusal):
        return continuation
    rendering = continuation.encoded.rendering
    cut = continuation.cut
    first = continuation.first_new
    calls = continuation.conversation[first - 1].get("tool_calls", ())
    names, stop = [call["function"]["name"] for call in calls], 0
    before: set[Origin] = set()
    for end, origin in zip(rendering.ends, rendering.origins, strict=True):
        start, stop = stop, end
        if origin is None or origin.source != "messages" or origin.is_role:
            continue
        message = origin.message if origin.message is not None else -1
        if start >= cut if message >= first else stop <= cut:
            before.add(origin)
            continue
        path = ".".join(map(str, origin.path)) or "text"
        if message >= first:
            problem = f"the template writes its {path} before the assistant's turn, so the past changes"
            return BridgeRefusal(RefusalReason.MOVED, problem, message - first)
        if message < first - 1:
            problem = f"the template writes {path} of an earlier message after the assistant's turn"
            if origin not in before:
                return BridgeRefusal(RefusalReason.MOVES_PAST, problem)
            if not true_context:
                problem += "; pass messages=, the conversation so far"
                return BridgeRefusal(RefusalReason.CONTEXT_DEPENDENT, problem)
        elif origin.field != "tool_calls":
            problem = f"the template writes {path} of the assistant's message after the answers to it"
            reason = RefusalReason.UNKNOWN_VALUE if origin in before else RefusalReason.MOVES_PAST
            return BridgeRefusal(reason, problem)
        elif origin[-1] != "id" and (origin[-1] != "name" or names[int(origin.path[1])] == _UNKNOWN):
            problem = f"the template repeats {path} of the assistant's message after its turn"
            advice = "give tool results the name of the function they answer"
            return BridgeRefusal(RefusalReason.UNKNOWN_VALUE, f"{problem}; {advice}")
    return None
