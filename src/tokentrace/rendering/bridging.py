"""The bridge: from a stream to the next prompt, without rendering the past.

`Bridger` serves one template. What it learns it keeps: the facts of a template, and for each shape of new messages
which small context stands for all others. A bridge then costs one small render, whatever the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.memory import Memory
from ..study.probes import STAND_IN_TOOL
from ..study.seams import (
    CONTEXTS,
    INLINE,
    UNKNOWN_NAME,
    BridgeRefusal,
    Continuation,
    RefusalReason,
    StandIn,
    Written,
    base_stand_ins,
    check_continuation,
    find_continuation,
    leading_results,
    searched_words,
    shape,
    shows_earlier_call,
    shows_tools,
    tools_key,
    variants,
)
from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from ..template.chat_template import REASONING_FIELDS
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .bridged import BridgedTokens
from .closing import ReadTurn, SeamFinder, Tail, Truncation

_OF_CONTEXT: Final = (RefusalReason.CONTEXT_DEPENDENT, RefusalReason.REPEATS_PAST)


class History(StrEnum):
    """What becomes of the past when the next turn comes."""

    TRAIN = "train"
    """It stays as it is, all reasoning included."""
    INFERENCE = "inference"
    """It is what the shipped template would show in production; where that rewrites it, there is no bridge."""


Write = Callable[[Messages, int, Any, bool], Written]
"""Renders a conversation: messages, the message whose turn has to be found, tools, with a generation prompt or not."""


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """What a template would write anew: turns that have these markers, with reasoning or without any (None: either)."""

    markers: frozenset[str]
    reasoning: bool | None
    how: str


@dataclass(frozen=True, slots=True)
class _Request:
    """What is to be written: new messages, with these tools, after calls of functions of these names."""

    new: Messages
    tools: Any
    names: Sequence[str]
    known: int
    """How many of the names are known, from the first on."""
    tried: dict[Any, Continuation | BridgeRefusal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How to render new messages of one shape, proven not to depend on the rest."""

    context: Messages
    stand_in: StandIn
    real_tools: bool
    true_context: bool
    repeats_call: bool = False
    """Whether the template writes something of the turn's calls after it."""
    rewrites: tuple[_Rewrite, ...] = ()

    def tools_of(self, request: _Request) -> Any:
        """The tools that the template is shown: real ones only where they make a difference, as they take long."""
        return request.tools if self.real_tools or not request.tools else [STAND_IN_TOOL]


class Bridger:
    """Bridges for one template under the settings of one renderer. What it has proven it keeps."""

    def __init__(
        self,
        study: TemplateStudy,
        write: Write,
        read: ReadTurn,
        *,
        has_tools: bool,
        history: History,
        truncation: Truncation,
    ) -> None:
        self._study = study
        self._write = write
        self._read = read
        self._endings = study.endings(has_tools)
        self._markers = study.markers()
        self._words = searched_words(study.template)
        self._history = history
        self._proofs = Memory()
        self.seams = SeamFinder(study, self._endings, truncation, read)

    def bridge(
        self,
        prompt: Sequence[int] | Ids,
        completion: Ids,
        given: Any,
        new: Messages,
        tools: Any,
        messages: Messages | None = None,
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt, or why there is none. `given` is the completion as the caller gave it."""
        if not len(prompt):
            return BridgeRefusal(
                RefusalReason.EMPTY_STREAM, "there is no prompt to extend; keep the ids of every turn, cut-off ones too"
            )

        request = _Request(new, tools, *self._names(leading_results(new), prompt, completion))
        verdict = self._verdict(request, prompt, completion, messages)
        if isinstance(verdict, BridgeRefusal):
            return verdict
        continuation = self._run(verdict, request, prompt, completion)
        if isinstance(continuation, BridgeRefusal):
            return continuation
        return self.join(prompt, completion, given, continuation)

    def _run(
        self, verdict: _Verdict, request: _Request, prompt: Sequence[int] | Ids, completion: Ids
    ) -> Continuation | BridgeRefusal:
        """What the template writes after the turn, which is what it writes after any other."""
        refusal = self._rewritten(verdict.rewrites, prompt, completion)
        if refusal is not None:
            return refusal
        found = self._continue(verdict.context, verdict.stand_in, request, verdict.tools_of(request))
        if isinstance(found, BridgeRefusal):
            return found
        refusal = check_continuation(found, request.known, true_context=verdict.true_context)
        return found if refusal is None else refusal

    def join(
        self, prompt: Sequence[int] | Ids, completion: Ids, given: Any, found: Continuation
    ) -> BridgedTokens | BridgeRefusal:
        """The stream with what was written after its turn."""
        return self.seams.join(prompt, completion, given, Tail.of(found, self._study.forms))

    def written_after(self, conversation: Messages, at: int, tools: Any) -> Continuation | BridgeRefusal:
        """A whole conversation, cut after the turn of message `at`."""
        return find_continuation(
            conversation, at + 1, lambda some, index: self._write(some, index, tools, True), self._endings
        )

    # -- which context stands for all

    def _names(self, results: Messages, prompt: Sequence[int] | Ids, completion: Ids) -> tuple[list[str], int]:
        """The names of the functions that the results answer, and how many of them are known, from the first on."""
        given = [result.get("name") for result in results]
        if all(isinstance(name, str) and name for name in given):
            return [str(name) for name in given], len(given)
        called = [call.name for call in self._read(prompt, completion).tool_calls if call.name is not None]
        known = len(called) if len(called) <= len(results) else 0  # of more calls than results some went unanswered
        return [*called[:known], *[UNKNOWN_NAME] * (len(results) - known)], known

    def _verdict(
        self, request: _Request, prompt: Sequence[int] | Ids, completion: Ids, messages: Messages | None
    ) -> _Verdict | BridgeRefusal:
        verdict = self._proven(request, None, self._contexts(bool(request.tools)))
        if isinstance(verdict, BridgeRefusal) and verdict.reason in _OF_CONTEXT:  # then look at what there is
            has_call = self._markers.has_call(self._markers.marked.of_ids(completion.tolist()))
            if messages:
                return self._prove(request, has_call, (messages,), true_context=True)
            return self._proven(request, has_call, self._alike(prompt, bool(request.tools)))
        return verdict

    def _contexts(self, has_tools: bool) -> tuple[Messages, ...]:
        """Contexts to try; of those with a call the first that shows it, and one that does not if that comes first."""

        def find() -> tuple[Messages, ...]:
            taken: list[Messages] = []
            for ways in CONTEXTS:
                found: dict[bool, Messages] = {}
                for context in ways if len(ways) > 1 else ():
                    written = self._written_context(context, has_tools)
                    if written is not None:
                        found.setdefault(shows_earlier_call(written[0].rendering), context)
                    if True in found:
                        break
                taken += found.values() if len(ways) > 1 else ways
            return tuple(taken)

        return self._proofs.once(("contexts", has_tools), find)

    def _written_context(self, context: Messages, has_tools: bool) -> Written | None:
        try:
            return self._write(context, -1, [STAND_IN_TOOL] if has_tools else None, True)
        except TokentraceError:
            return None

    def _alike(self, prompt: Sequence[int] | Ids, has_tools: bool) -> tuple[Messages, ...]:
        """The contexts with the same control tokens as the prompt: with results in it, or without."""

        def find() -> list[tuple[Messages, frozenset[int]]]:
            written = [(context, self._written_context(context, has_tools)) for context in self._contexts(has_tools)]
            return [
                (context, frozenset(one[0].ids[one[0].control].tolist())) for context, one in written if one is not None
            ]

        taken = self._proofs.once(("controls", has_tools), find)
        telling = frozenset[int]().union(*(controls for _, controls in taken))
        ids = check_ids(prompt, "prev_prompt_ids")
        seen = frozenset(index for index in telling if (ids == index).any())
        return tuple(context for context, controls in taken if controls == seen) or self._contexts(has_tools)

    def _proven(
        self, request: _Request, has_call: bool | None, contexts: tuple[Messages, ...]
    ) -> _Verdict | BridgeRefusal:
        """The verdict for messages of this shape, remembered."""
        look = (shape(request.new, self._words), tools_key(request.tools), request.known)
        return self._proofs.once(
            (look, has_call, tuple(map(id, contexts))),  # contexts are constants
            lambda: self._prove(request, has_call, contexts),
            keep=lambda found: isinstance(found, _Verdict) or found.reason in _OF_CONTEXT,  # others are of these words
        )

    def _prove(
        self, request: _Request, has_call: bool | None, contexts: Sequence[Messages], *, true_context: bool = False
    ) -> _Verdict | BridgeRefusal:
        """Find a context and a stand-in, and see that no other gives another result."""
        base = self._base(request, has_call, contexts, true_context)
        if isinstance(base, BridgeRefusal):
            return base
        context, stand_in, found = base
        tools = request.tools
        real_tools = bool(tools) and (true_context or not self._same_without_tools(found, context, stand_in, request))
        used = tools if real_tools or not tools else [STAND_IN_TOOL]
        rewrites: dict[_Rewrite, None] = {}
        repeats_call = found.repeats_call
        production = self._history is History.INFERENCE
        inline = (INLINE,) if production and not stand_in.calls else ()
        for other in (*variants(stand_in), *inline):
            for around in contexts:
                again = self._continue(around, other, request, used)
                if isinstance(again, BridgeRefusal) or (has_call is not None and again.shows_call != found.shows_call):
                    continue
                problem = check_continuation(again, request.known, true_context=true_context)
                if problem is not None and problem.reason is RefusalReason.REPEATS_PAST:
                    # it moves what stands in the past to the new turn: to train, it stays where it is
                    rewrites[_Rewrite(frozenset(), None, problem.detail)] = None
                    continue
                if again.tail != found.tail or problem is not None:
                    return BridgeRefusal(
                        RefusalReason.CONTEXT_DEPENDENT,
                        f"what the template writes after {_described(other, around)} is not what it writes after "
                        f"{_described(stand_in, context)}: {again.tail[:60]!r} instead of {found.tail[:60]!r}; "
                        "pass messages=, the conversation so far",
                    )
                repeats_call = repeats_call or again.repeats_call
                if production:
                    change = self._change(around, other, request, used, again)
                    if change is not None:
                        rewrites[change] = None
        shown = tuple(rewrites) if production else ()
        return _Verdict(context, stand_in, real_tools, true_context, repeats_call, shown)

    def _base(
        self, request: _Request, has_call: bool | None, contexts: Sequence[Messages], true_context: bool
    ) -> tuple[Messages, StandIn, Continuation] | BridgeRefusal:
        """The first context and stand-in that the template takes; one that shows its call, unless there was none."""
        refusal: BridgeRefusal | None = None
        second: tuple[Messages, StandIn, Continuation] | None = None
        after_call = bool(leading_results(request.new))
        shows_calls = after_call and self._study.forms.calls.are_shown
        for stand_in in base_stand_ins(after_call):
            for context in contexts:
                found = self._continue(context, stand_in, request, request.tools)
                if isinstance(found, BridgeRefusal):
                    problem: BridgeRefusal | None = found
                else:
                    problem = check_continuation(found, request.known, true_context=true_context)
                    if problem is None:
                        if not shows_calls or found.shows_call == (has_call is not False):
                            return context, stand_in, found
                        second = second or (context, stand_in, found)
                if problem is not None and (refusal is None or refusal.reason is RefusalReason.TEMPLATE_REFUSED):
                    refusal = problem
        if second is not None:
            return second
        if refusal is not None:
            return refusal
        return BridgeRefusal(RefusalReason.TEMPLATE_REFUSED, "the template takes no such messages")

    def _same_without_tools(self, found: Continuation, context: Messages, stand_in: StandIn, request: _Request) -> bool:
        """Whether the stand-in tool gives the same: real schemas take long to render."""
        if shows_tools(found.encoded.rendering, found.cut):
            return False
        again = self._continue(context, stand_in, request, [STAND_IN_TOOL])
        return isinstance(again, Continuation) and again.tail == found.tail

    def _continue(
        self, context: Messages, stand_in: StandIn, request: _Request, tools: Any
    ) -> Continuation | BridgeRefusal:
        """The new messages after a context and a stand-in, written once for a request."""
        key = (id(context), stand_in, tools is request.tools)
        if key not in request.tried:
            reply = stand_in.message(leading_results(request.new), request.names)
            request.tried[key] = self.written_after([*context, reply, *request.new], len(context), tools)
        return request.tried[key]

    # -- what production would show

    def _change(
        self, context: Messages, stand_in: StandIn, request: _Request, tools: Any, after: Continuation
    ) -> _Rewrite | None:
        """What the new messages change about the turn before them."""
        conversation = [*context, stand_in.message(leading_results(request.new), request.names)]
        alone = find_continuation(
            conversation, len(conversation), lambda some, at: self._write(some, at, tools, False), self._endings
        )
        if isinstance(alone, BridgeRefusal):
            return None
        markers = self._markers
        if stand_in.reasoning and not alone.shows(REASONING_FIELDS):
            ends = markers.left_open(markers.marked.of_text(after.tail))
            return _Rewrite(frozenset(ends), None, "the template never shows reasoning") if ends else None
        was = alone.encoded.rendering.text[: alone.span.body_end]
        now = after.encoded.rendering.text[: after.span.body_end]
        if was == now:
            return None
        shared = common_prefix(was, now)
        begin = max((s.start for s in alone.spans if s.start <= shared), default=0)
        before, later = (markers.markers(markers.marked.of_text(text[begin:])) for text in (was, now))
        how = f"{was[shared : shared + 60]!r} would become {now[shared : shared + 60]!r}"
        return _Rewrite(before - later, stand_in.reasoning or stand_in is INLINE, how)

    def _rewritten(
        self, rewrites: Sequence[_Rewrite], prompt: Sequence[int] | Ids, completion: Ids
    ) -> BridgeRefusal | None:
        """Whether the stream holds what the template would write anew."""
        if not rewrites:
            return None
        wanted = frozenset[str]().union(*(rewrite.markers for rewrite in rewrites))
        stream = self._markers.excerpt(np.concatenate([check_ids(prompt, "prev_prompt_ids"), completion]), wanted)
        seen = self._markers.markers(stream)
        full, blank = self._markers.reasoning(stream)
        for rewrite in rewrites:
            applies = rewrite.reasoning is None or (full if rewrite.reasoning else blank or not rewrite.markers)
            if rewrite.markers <= seen and applies:
                return BridgeRefusal(
                    RefusalReason.REWRITES_PAST, f"in production the template rewrites earlier turns: {rewrite.how}"
                )
        return None


def _described(stand_in: StandIn, context: Messages) -> str:
    parts = ["a call" if stand_in.calls else "an answer"]
    if stand_in.reasoning:
        parts.append("with reasoning")
    return f"{' '.join(parts)} in a conversation of {len(context)} messages"
