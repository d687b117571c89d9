"""The bridge: from a stream to the next prompt, without rendering the past.

`Bridger.bridge` renders ``[a small context, a stand-in for the turn, the new messages]``, keeps what follows the
stand-in's turn, and joins that to the stream. For each shape of new messages it proves once that no other context and
no other stand-in gives another result; then a bridge costs one small render, whatever the history.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ..conversation.messages import Messages, check_tools
from ..errors import TokentraceError
from ..parsing.marked import tags
from ..parsing.parser import read_turn
from ..study.memory import Memory
from ..study.probes import STAND_IN_TOOL
from ..study.seams import (
    CONTEXTS,
    INLINE,
    BridgeRefusal,
    Continuation,
    EncodedTurns,
    RefusalReason,
    StandIn,
    base_stand_ins,
    check_continuation,
    find_continuation,
    leading_results,
    shape,
    shows_field,
    shows_tools,
    variants,
)
from ..study.turns import common_prefix
from ..template.chat_template import REASONING_FIELDS
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .bridged import BridgedTokens, SeamFinder, Stream

_OF_CONTEXT: Final = (RefusalReason.CONTEXT_DEPENDENT, RefusalReason.REPEATS_PAST)

Write = Callable[[Messages, int, Any, bool], EncodedTurns]
"""Renders a conversation: messages, the message whose turn has to be found, tools, with a generation prompt or not."""


@dataclass(frozen=True, slots=True)
class _Request:
    """New messages to be written after a turn with calls of functions of these names."""

    new: Messages
    tools: Any
    key: tuple[object, ...]
    """The shape of the messages, and the tools: what the template's control flow may depend on."""
    names: Sequence[str] = ()
    """Those of the completion's calls, from the first on."""

    def visible_tools(self, real_tools: bool) -> Any:
        """The tools that the template is shown: the real ones, or a stand-in."""
        return self.tools if real_tools or not self.tools else [STAND_IN_TOOL]


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """A past that the template would write anew: turns that have these tags, with reasoning or without."""

    tags: frozenset[bytes]
    reasoning: bool | None
    """None: either."""
    how: str


@dataclass(frozen=True, slots=True)
class _Proof:
    """A context and a stand-in that give what any others give, for new messages of one shape."""

    context: Messages
    stand_in: StandIn
    real_tools: bool
    """Whether the template has to be shown the real tools. The stand-in tool is quicker to render."""
    true_context: bool
    rewrites: tuple[_Rewrite, ...] = ()


class Bridger:
    """Bridges for one template under the settings of one renderer. Remembers what it has proven."""

    def __init__(self, write: Write, seams: SeamFinder, *, as_inference: bool) -> None:
        self._write = write
        self._seams, self._study, self._compiled = seams, seams.study, seams.compiled
        self._words = sorted(word for word in seams.study.template.searched if len(word) > 1)
        self._as_inference = as_inference
        self._proofs = Memory()

    def bridge(
        self, stream: Stream, new: Messages, tools: Any, tools_key: object, messages: Messages | None = None
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt, or why there is none. `messages` is the conversation before the completion, if known."""
        if not len(stream.prompt):
            return BridgeRefusal(
                RefusalReason.EMPTY_STREAM, "there is no prompt to extend; keep the ids of every turn, cut-off ones too"
            )
        request = self._request(stream, new, tools, tools_key)
        proof = self._prove_any(request, stream, messages)
        if isinstance(proof, BridgeRefusal):
            return proof
        refusal = self._find_rewrite(proof.rewrites, stream)
        if refusal is not None:
            return refusal
        continuation = self._continue(proof.context, proof.stand_in, request, proof.real_tools)
        if isinstance(continuation, BridgeRefusal):
            return continuation
        refusal = check_continuation(continuation, len(request.names), true_context=proof.true_context)
        return self._seams.join(stream, continuation) if refusal is None else refusal

    # -- rendering after a turn

    def _continue(
        self, context: Messages, stand_in: StandIn, request: _Request, real_tools: bool = True
    ) -> Continuation | BridgeRefusal:
        """The new messages after a context and a stand-in."""
        reply = stand_in.message(leading_results(request.new), request.names)
        return self._rendered_after([*context, reply, *request.new], len(context), request.visible_tools(real_tools))

    def _rendered_after(
        self, conversation: Messages, at: int, tools: Any, *, prompt: bool = True
    ) -> Continuation | BridgeRefusal:
        """A conversation, cut after the turn of message `at`."""
        write = self._write
        return find_continuation(
            conversation, at + 1, lambda some, index: write(some, index, tools, prompt), self._seams.endings
        )

    def _request(self, stream: Stream, new: Messages, tools: Any, tools_key: object) -> _Request:
        """The request, with the names of the called functions if results have them or the template needs them."""
        key = (shape(new, self._words), tools_key)
        results = leading_results(new)
        names = [result.get("name") for result in results]
        if all(isinstance(name, str) and name for name in names):
            return _Request(new, tools, key, [str(name) for name in names])
        unnamed = _Request(new, tools, key)
        if not self._proofs.once(("names", *key), lambda: self._needs_names(unnamed)):
            return unnamed
        called = read_turn(self._compiled(), stream.completion, stream.prompt).called_names
        return _Request(new, tools, key, called if len(called) <= len(results) else ())  # else some went unanswered

    def _needs_names(self, unnamed: _Request) -> bool:
        """Whether what follows may depend on the names of called functions: it repeats them, or compares them."""
        constants = self._study.template.constants
        for tool in check_tools(unnamed.tools) or ():
            name = str(tool.get("function", tool).get("name"))
            if name in constants or any(word in name for word in self._words):
                return True
        return isinstance(self._remembered(unnamed, None, self._contexts(bool(unnamed.tools))), BridgeRefusal)

    # -- proofs

    def _prove_any(self, request: _Request, stream: Stream, messages: Messages | None) -> _Proof | BridgeRefusal:
        """The proof for messages of this shape: in any context or, if they depend on it, in the one that there is."""
        contexts = self._contexts(bool(request.tools))
        proof = self._remembered(request, None, contexts)
        if not isinstance(proof, BridgeRefusal) or proof.reason not in _OF_CONTEXT:
            return proof
        grammar = self._compiled().grammar
        has_call: bool | None = None
        if grammar.calls is not None or grammar.channels is not None:
            has_call = bool(read_turn(self._compiled(), stream.completion, stream.prompt).tool_calls)
        if messages:
            return self._prove(request, has_call, (messages,), true_context=True)
        return self._remembered(request, has_call, self._alike(stream.prompt, bool(request.tools)))

    def _remembered(
        self, request: _Request, has_call: bool | None, contexts: tuple[Messages, ...]
    ) -> _Proof | BridgeRefusal:
        return self._proofs.once(
            (request.key, len(request.names), has_call, tuple(map(id, contexts))),  # contexts are constants
            lambda: self._prove(request, has_call, contexts),
            keep=lambda proof: (
                isinstance(proof, _Proof) or proof.reason in _OF_CONTEXT
            ),  # other refusals depend on this message's text
        )

    def _prove(
        self, request: _Request, has_call: bool | None, contexts: Sequence[Messages], *, true_context: bool = False
    ) -> _Proof | BridgeRefusal:
        """Find a context and a stand-in that the template takes, and see that no others give another result."""
        base = self._base(request, has_call, contexts, true_context)
        if isinstance(base, BridgeRefusal):
            return base
        context, stand_in, expected = base
        real_tools = true_context or shows_tools(expected.encoded.rendering, expected.cut)
        if request.tools and not real_tools:  # the stand-in is quicker to render
            actual = self._continue(context, stand_in, request, real_tools=False)
            real_tools = isinstance(actual, BridgeRefusal) or actual.tail != expected.tail
        rewrites: dict[_Rewrite, None] = {}
        inline = (INLINE,) if self._as_inference and not stand_in.calls else ()
        for other in (*variants(stand_in), *inline):
            for around in contexts:
                actual = self._continue(around, other, request, real_tools)
                if isinstance(actual, BridgeRefusal):
                    continue
                if has_call is not None and actual.shows("tool_calls") != expected.shows("tool_calls"):
                    continue
                problem = check_continuation(actual, len(request.names), true_context=true_context)
                if problem is not None and problem.reason is RefusalReason.REPEATS_PAST:
                    # it moves text of the past to the new turn: to train, it stays where it is
                    rewrites[_Rewrite(frozenset(), None, problem.detail)] = None
                    continue
                if actual.tail != expected.tail or problem is not None:
                    return BridgeRefusal(
                        RefusalReason.CONTEXT_DEPENDENT,
                        f"what the template writes after {_described(other, around)} is not what it writes after "
                        f"{_described(stand_in, context)}: {actual.tail[:60]!r} instead of {expected.tail[:60]!r}; "
                        "pass messages=, the conversation so far",
                    )
                tools = request.visible_tools(real_tools)
                if self._as_inference and (rewrite := self._rewrite(other, tools, actual)):
                    rewrites[rewrite] = None
        return _Proof(context, stand_in, real_tools, true_context, tuple(rewrites) if self._as_inference else ())

    def _base(
        self, request: _Request, has_call: bool | None, contexts: Sequence[Messages], true_context: bool
    ) -> tuple[Messages, StandIn, Continuation] | BridgeRefusal:
        """The first context and stand-in that the template takes; one that shows its call, unless there was none."""
        refusal = BridgeRefusal(RefusalReason.TEMPLATE_REFUSED, "the template takes no such messages")
        second: tuple[Messages, StandIn, Continuation] | None = None
        after_call = has_call is True or bool(leading_results(request.new))  # a user may speak before a result is there
        shows_calls = after_call and self._study.forms.calls.are_shown
        for stand_in in base_stand_ins(after_call):
            for context in contexts:
                result = self._continue(context, stand_in, request)
                problem: BridgeRefusal | None
                if isinstance(result, BridgeRefusal):
                    problem = result
                else:
                    problem = check_continuation(result, len(request.names), true_context=true_context)
                    if problem is None:
                        if not shows_calls or result.shows("tool_calls") == (has_call is not False):
                            return context, stand_in, result
                        second = second or (context, stand_in, result)
                if problem is not None and refusal.reason is RefusalReason.TEMPLATE_REFUSED:
                    refusal = problem
        return second or refusal

    # -- contexts

    def _contexts(self, has_tools: bool) -> tuple[Messages, ...]:
        """Contexts to try; of those with a call the first that shows it, and one that does not if that comes first."""

        def choose() -> tuple[Messages, ...]:
            chosen: list[Messages] = []
            for ways in CONTEXTS:
                by_call: dict[bool, Messages] = {}
                for context in ways if len(ways) > 1 else ():
                    result = self._try_context(context, has_tools)
                    if result is not None:
                        by_call.setdefault(shows_field(result[0].rendering, ("tool_calls",)), context)
                    if True in by_call:
                        break
                chosen += by_call.values() if len(ways) > 1 else ways
            return tuple(chosen)

        return self._proofs.once(("contexts", has_tools), choose)

    def _alike(self, prompt: Sequence[int] | Ids, has_tools: bool) -> tuple[Messages, ...]:
        """The contexts with the same control tokens as the prompt: with results in it, or without."""

        def find() -> list[tuple[Messages, frozenset[int]]]:
            results = [(context, self._try_context(context, has_tools)) for context in self._contexts(has_tools)]
            return [
                (context, frozenset(one[0].ids[one[0].control].tolist())) for context, one in results if one is not None
            ]

        by_context = self._proofs.once(("controls", has_tools), find)
        telling = frozenset[int]().union(*(controls for _, controls in by_context))
        ids = check_ids(prompt, "prev_prompt_ids")
        seen = frozenset(index for index in telling if (ids == index).any())
        return tuple(context for context, controls in by_context if controls == seen) or self._contexts(has_tools)

    def _try_context(self, context: Messages, has_tools: bool) -> EncodedTurns | None:
        try:
            return self._write(context, -1, [STAND_IN_TOOL] if has_tools else None, True)
        except TokentraceError:
            return None

    # -- a past that production would write anew

    def _rewrite(self, stand_in: StandIn, tools: Any, after: Continuation) -> _Rewrite | None:
        """What the new messages change about the turn before them."""
        at = after.first_new - 1
        alone = self._rendered_after(after.conversation[: at + 1], at, tools, prompt=False)
        if isinstance(alone, BridgeRefusal):
            return None
        marked = self._compiled().marked
        if stand_in.reasoning and not alone.shows(*REASONING_FIELDS):
            opened = re.findall("<([^\\s<>/=]+)>", after.tail)
            if not opened or f"</{opened[-1]}>" in after.tail[after.tail.rindex(f"<{opened[-1]}>") :]:
                return None
            close = frozenset({marked.scaffold(f"</{opened[-1]}>")})
            return _Rewrite(close, None, "the template never shows reasoning")
        was = alone.encoded.rendering.text[: alone.span.body_end]
        now = after.encoded.rendering.text[: after.span.body_end]
        if was == now:
            return None
        shared = common_prefix(was, now)
        begin = max((span.start for span in alone.spans if span.start <= shared), default=0)
        before, later = (frozenset(tag[0] for tag in tags(marked.scaffold(text[begin:]))) for text in (was, now))
        how = f"{was[shared : shared + 60]!r} would become {now[shared : shared + 60]!r}"
        return _Rewrite(before - later, stand_in.reasoning or stand_in is INLINE, how)

    def _find_rewrite(self, rewrites: Sequence[_Rewrite], stream: Stream) -> BridgeRefusal | None:
        """A refusal if the stream holds a turn that the template would write anew."""
        if not rewrites:
            return None
        compiled = self._compiled()
        ids = np.concatenate([check_ids(stream.prompt, "prev_prompt_ids"), stream.completion])
        data, _ = compiled.marked.spelled(ids, 0)
        stream_tags = tags(data)
        seen = frozenset(tag[0] for tag in stream_tags)
        full = blank = not compiled.reasoning_close  # either, if no tag closes reasoning
        for before, tag in zip([None, *stream_tags], stream_tags, strict=False):
            if tag[0] == compiled.reasoning_close:
                between = data[before.end() if before is not None else 0 : tag.start()]
                full, blank = full or bool(between), blank or not between.strip()  # white space alone may be either
        for rewrite in rewrites:
            applies = True
            if rewrite.reasoning is not None:  # of turns with reasoning, or of turns without
                applies = full if rewrite.reasoning else blank or not rewrite.tags
            if rewrite.tags <= seen and applies:
                return BridgeRefusal(
                    RefusalReason.REWRITES_PAST, f"in production the template rewrites earlier turns: {rewrite.how}"
                )
        return None


def _described(stand_in: StandIn, context: Messages) -> str:
    what = "a call" if stand_in.calls else "an answer"
    return f"{what}{' with reasoning' if stand_in.reasoning else ''} in a conversation of {len(context)} messages"
