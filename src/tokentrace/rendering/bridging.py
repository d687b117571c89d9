"""The bridge: from a stream to the next prompt, without rendering the past.

`Bridger` serves one template. What it learns it keeps: the facts of a template, and for each shape of new messages
which small context stands for all others. A bridge then costs one small render, whatever the history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.seams import (
    CONTEXTS,
    INLINE,
    STAND_IN_TOOL,
    UNKNOWN_NAME,
    BridgeRefusal,
    Form,
    Join,
    RefusalReason,
    base_forms,
    check_join,
    join,
    leading_results,
    shape,
    shows_earlier_call,
    shows_tools,
    tools_key,
    variants,
)
from ..study.skeleton import Skeleton
from ..study.turns import Section, TurnFacts, common_prefix
from ..template.chat_template import REASONING_FIELDS
from ..tokens.encoding import Encoded
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from .bridged import LOOK_BACK, BridgedTokens
from .lost import Lost, ShowsReasoning, find_lost
from .rendered import span_messages

_OF_CONTEXT: Final = (RefusalReason.CONTEXT_DEPENDENT, RefusalReason.REPEATS_PAST)
_CUT_OFF: Final = "the completion was cut off before it ended its turn"


class History(StrEnum):
    """What becomes of the past when the next turn comes."""

    TRAIN = "train"
    """It stays as it is, all reasoning included."""
    INFERENCE = "inference"
    """It is what the shipped template would show in production; where that rewrites it, there is no bridge."""


class Truncation(StrEnum):
    """What becomes of a completion that was cut off."""

    CLOSE = "close"
    """It is closed with tokens that carry no loss."""
    REFUSE = "refuse"
    """There is no bridge."""


Make = Callable[[Messages, int, Any, bool], tuple[Encoded, list[Section]]]
"""Renders a conversation: messages, the message whose turn has to be found, tools, with a generation prompt or not."""

Called = Callable[[Sequence[int] | Ids, Ids], list[str] | None]
"""The names of the functions that a completion calls, after a prompt; None where calls cannot be parsed."""


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """What a template would write anew: turns that have these markers, with reasoning or without any (None: either)."""

    markers: frozenset[str]
    reasoning: bool | None
    how: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be written: new messages, with these tools, after calls of functions of these names."""

    new: Messages
    tools: Any
    names: Sequence[str]
    known: int
    """How many of the names are known, from the first on."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How to render new messages of one shape, proven not to depend on the rest."""

    context: Messages
    form: Form
    real_tools: bool
    true_context: bool
    rewrites: tuple[_Rewrite, ...] = ()


class Bridger:
    """Bridges for one template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        make: Make,
        facts: TurnFacts,
        skeleton: Skeleton,
        called: Called,
        *,
        words: Sequence[str],
        ends: frozenset[int],
        history: History,
        truncation: Truncation,
        forms: ShowsReasoning,
    ) -> None:
        self._tokenizer = tokenizer
        self._make = make
        self._facts = facts
        self._skeleton = skeleton
        self._called = called
        self._words = words
        self._stops = facts.stops | facts.closers | ends
        self._history = history
        self._truncation = truncation
        self._forms = forms
        self._verdicts: dict[tuple[Any, ...], _Verdict | BridgeRefusal] = {}
        self._known_contexts: dict[bool, list[tuple[Messages, frozenset[int]]]] = {}
        chars = (skeleton.marked.char(index) for index in facts.closers - facts.inner)
        self._closers = frozenset(char for char in chars if char is not None)

    def bridge(
        self,
        prompt: Sequence[int] | Ids,
        completion: Ids,
        given: Any,
        new: Messages,
        tools: Any,
        messages: Messages | None = None,
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt, or why there is none."""
        if not len(prompt):
            return BridgeRefusal(
                RefusalReason.EMPTY_STREAM, "there is no prompt to extend; keep the ids of every turn, cut-off ones too"
            )
        asked = _Asked(new, tools, *self._names(leading_results(new), prompt, completion))
        verdict = self._verdict(asked, prompt, completion, messages)
        if isinstance(verdict, BridgeRefusal):
            return verdict
        refusal = self._rewritten(verdict, prompt, completion)
        if refusal is not None:
            return refusal
        used = tools if verdict.real_tools or not tools else [STAND_IN_TOOL]
        found = self._join(verdict.context, verdict.form, asked, used)
        if isinstance(found, BridgeRefusal):
            return found
        refusal = check_join(found, asked.known, true_context=verdict.true_context)
        if refusal is not None:
            return refusal
        return self.joined(prompt, completion, given, found)

    def rendered_after(self, conversation: Messages, at: int, tools: Any) -> Join | BridgeRefusal:
        """A whole conversation, cut after the turn of message `at`."""

        def build(messages: Messages, index: int) -> tuple[Encoded, list[Section]]:
            return self._make(messages, index, tools, True)

        return join(conversation, at + 1, build, self._facts)

    def joined(
        self, prompt: Sequence[int] | Ids, completion: Ids, given: Any, found: Join
    ) -> BridgedTokens | BridgeRefusal:
        """The stream, its seam, and what was rendered after a turn."""
        seam = self._seam(prompt, completion, found)
        if isinstance(seam, BridgeRefusal):
            return seam
        return self._bridged(prompt, given, found, seam, len(found.conversation) - found.first_new)

    # -- which context stands for all

    def _names(self, results: Messages, prompt: Sequence[int] | Ids, completion: Ids) -> tuple[list[str], int]:
        """The names of the functions that the results answer, and how many of them are known, from the first on."""
        given = [result.get("name") for result in results]
        if all(isinstance(name, str) and name for name in given):
            return [str(name) for name in given], len(given)
        called = self._called(prompt, completion)
        if called is None:
            called = self._skeleton.called(self._skeleton.marked.of_ids(completion.tolist()), len(results))
        known = len(called) if len(called) <= len(results) else 0  # of more calls than results some went unanswered
        return [*called[:known], *[UNKNOWN_NAME] * (len(results) - known)], known

    def _verdict(
        self, asked: _Asked, prompt: Sequence[int] | Ids, completion: Ids, messages: Messages | None
    ) -> _Verdict | BridgeRefusal:
        verdict = self._proven(asked, None, self._contexts(asked.tools))
        if isinstance(verdict, BridgeRefusal) and verdict.reason in _OF_CONTEXT:  # then look at what there is
            has_call = self._skeleton.has_call(self._skeleton.marked.of_ids(completion.tolist()))
            if messages:
                return self._prove(asked, has_call, (messages,), true_context=True)
            return self._proven(asked, has_call, self._alike(prompt, asked.tools))
        return verdict

    def _contexts(self, tools: Any) -> tuple[Messages, ...]:
        """The contexts that the template takes."""
        return tuple(context for context, _ in self._taken(bool(tools)))

    def _taken(self, with_tools: bool) -> list[tuple[Messages, frozenset[int]]]:
        """Contexts and their control tokens; of those with a call one that shows it, and one that does not."""
        if with_tools not in self._known_contexts:
            taken: list[tuple[Messages, frozenset[int]]] = []
            for ways in CONTEXTS:
                found: dict[bool, tuple[Messages, frozenset[int]]] = {}
                for context in ways:
                    try:
                        encoded, _ = self._make(context, -1, [STAND_IN_TOOL] if with_tools else None, True)
                    except TokentraceError:
                        continue
                    controls = frozenset(encoded.ids[encoded.control].tolist())
                    found.setdefault(shows_earlier_call(encoded.rendering), (context, controls))
                taken += found.values()
            self._known_contexts[with_tools] = taken
        return self._known_contexts[with_tools]

    def _alike(self, prompt: Sequence[int] | Ids, tools: Any) -> tuple[Messages, ...]:
        """The contexts with the same control tokens as the prompt: with results in it, or without."""
        taken = self._taken(bool(tools))
        telling = frozenset[int]().union(*(controls for _, controls in taken))
        ids = np.asarray(prompt, np.int32)
        seen = frozenset(index for index in telling if (ids == index).any())
        return tuple(context for context, controls in taken if controls == seen) or self._contexts(tools)

    def _proven(self, asked: _Asked, has_call: bool | None, contexts: tuple[Messages, ...]) -> _Verdict | BridgeRefusal:
        """The verdict for messages of this shape, remembered."""
        look = (shape(asked.new, self._words), tools_key(asked.tools), asked.known)
        key = (look, has_call, tuple(map(id, contexts)))  # contexts are constants
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._prove(asked, has_call, contexts)
            if isinstance(verdict, _Verdict) or verdict.reason in _OF_CONTEXT:  # the rest is about these very messages
                if len(self._verdicts) >= 1024:
                    self._verdicts.clear()
                self._verdicts[key] = verdict
        return verdict

    def _prove(
        self, asked: _Asked, has_call: bool | None, contexts: Sequence[Messages], *, true_context: bool = False
    ) -> _Verdict | BridgeRefusal:
        """Find a context and a stand-in, and see that no other gives another result."""
        base = self._base(asked, has_call, contexts, true_context)
        if isinstance(base, BridgeRefusal):
            return base
        context, form, found = base
        tools = asked.tools
        real_tools = bool(tools) and (true_context or not self._same_without_tools(found, context, form, asked))
        used = tools if real_tools or not tools else [STAND_IN_TOOL]
        rewrites: dict[_Rewrite, None] = {}
        production = self._history is History.INFERENCE
        inline = (INLINE,) if production and not form.calls else ()
        for other in (*variants(form), *inline):
            for around in contexts:
                again = self._join(around, other, asked, used)
                if isinstance(again, BridgeRefusal) or (has_call is not None and again.shows_call != found.shows_call):
                    continue
                problem = check_join(again, asked.known, true_context=true_context)
                if problem is not None and problem.reason is RefusalReason.REPEATS_PAST:
                    # it moves what stands in the past to the new turn: to train, it stays where it is
                    rewrites[_Rewrite(frozenset(), None, problem.detail)] = None
                    continue
                if again.tail != found.tail or problem is not None:
                    return BridgeRefusal(
                        RefusalReason.CONTEXT_DEPENDENT,
                        f"what the template writes after {_described(other, around)} is not what it writes after "
                        f"{_described(form, context)}: {again.tail[:60]!r} instead of {found.tail[:60]!r}; "
                        "pass messages=, the conversation so far",
                    )
                if production:
                    change = self._change(around, other, asked, used, again)
                    if change is not None:
                        rewrites[change] = None
        return _Verdict(context, form, real_tools, true_context, tuple(rewrites) if production else ())

    def _base(
        self, asked: _Asked, has_call: bool | None, contexts: Sequence[Messages], true_context: bool
    ) -> tuple[Messages, Form, Join] | BridgeRefusal:
        """The first context and form that the template takes; one that shows its call, unless there was none."""
        refusal: BridgeRefusal | None = None
        second: tuple[Messages, Form, Join] | None = None
        after_call = bool(leading_results(asked.new))
        for form in base_forms(after_call):
            for context in contexts:
                found = self._join(context, form, asked, asked.tools)
                problem = (
                    found
                    if isinstance(found, BridgeRefusal)
                    else check_join(found, asked.known, true_context=true_context)
                )
                if problem is None and isinstance(found, Join):
                    if not after_call or found.shows_call == (has_call is not False):
                        return context, form, found
                    second = second or (context, form, found)
                elif refusal is None or refusal.reason is RefusalReason.TEMPLATE_REFUSED:
                    refusal = problem
        if second is not None:
            return second
        return refusal or BridgeRefusal(RefusalReason.TEMPLATE_REFUSED, "the template takes no such messages")

    def _same_without_tools(self, found: Join, context: Messages, form: Form, asked: _Asked) -> bool:
        """Whether a small stand-in for the tools gives the same: schemas are dear to render."""
        if shows_tools(found.encoded.rendering, found.cut):
            return False
        again = self._join(context, form, asked, [STAND_IN_TOOL])
        return isinstance(again, Join) and again.tail == found.tail

    def _join(self, context: Messages, form: Form, asked: _Asked, tools: Any) -> Join | BridgeRefusal:
        reply = form.message(leading_results(asked.new), asked.names)
        return self.rendered_after([*context, reply, *asked.new], len(context), tools)

    # -- what production would show

    def _change(self, context: Messages, form: Form, asked: _Asked, tools: Any, after: Join) -> _Rewrite | None:
        """What the new messages change about the turn before them."""
        conversation = [*context, form.message(leading_results(asked.new), asked.names)]

        def build(messages: Messages, at: int) -> tuple[Encoded, list[Section]]:
            return self._make(messages, at, tools, False)

        alone = join(conversation, len(conversation), build, self._facts)
        if isinstance(alone, BridgeRefusal):
            return None
        if form.reasoning and not alone.shows(REASONING_FIELDS):
            ends = self._skeleton.left_open(self._skeleton.marked.of_text(after.tail))
            return _Rewrite(frozenset(ends), None, "the template never shows reasoning") if ends else None
        was = alone.encoded.rendering.text[: alone.section.body_end]
        now = after.encoded.rendering.text[: after.section.body_end]
        if was == now:
            return None
        shared = common_prefix(was, now)
        begin = max((s.start for s in alone.sections if s.start <= shared), default=0)
        text = self._skeleton.marked.of_text(was[begin:])
        markers = self._skeleton.markers(text) - self._skeleton.markers(self._skeleton.marked.of_text(now[begin:]))
        how = f"{was[shared : shared + 60]!r} would become {now[shared : shared + 60]!r}"
        return _Rewrite(markers, form.reasoning or form is INLINE, how)

    def _rewritten(self, verdict: _Verdict, prompt: Sequence[int] | Ids, completion: Ids) -> BridgeRefusal | None:
        """Whether the stream holds what the template would write anew."""
        if not verdict.rewrites:
            return None
        wanted = frozenset[str]().union(*(rewrite.markers for rewrite in verdict.rewrites))
        stream = self._skeleton.excerpt(np.concatenate([np.asarray(prompt, np.int32), completion]), wanted)
        seen = self._skeleton.markers(stream)
        full, blank = self._skeleton.reasoning(stream)
        for rewrite in verdict.rewrites:
            applies = rewrite.reasoning is None or (full if rewrite.reasoning else blank or not rewrite.markers)
            if rewrite.markers <= seen and applies:
                return BridgeRefusal(
                    RefusalReason.REWRITES_PAST, f"in production the template writes the past anew: {rewrite.how}"
                )
        return None

    # -- the seam

    def _seam(
        self, prompt: Sequence[int] | Ids, completion: Ids, found: Join
    ) -> tuple[list[tuple[Sequence[int], Kind]], int] | BridgeRefusal:
        """What has to stand between the completion and the new turn, and how much of the new turn is there already."""
        last = int(completion[-1]) if len(completion) else -1
        stop = found.turn.stop_token
        if stop is None:
            return self._open_seam(prompt, completion, found, last)
        is_head = stop in self._facts.heads and stop not in self._facts.closers
        head: list[tuple[Sequence[int], Kind]] = [([stop], Kind.SCAFFOLD)] if is_head else []
        if last == stop:
            return [], 0
        if self._is_stop(last):
            return head, 0
        overlap = self._overlap(completion, stop, found.ids)
        if overlap is not None:
            return [], overlap
        if self._truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        closing = self._skeleton.marked.ids(self._closing(prompt, completion))
        if not is_head and (closing[-1] if closing else last) not in self._facts.closers:
            closing = [*closing, stop]
        return [(closing, Kind.SYNTHETIC), *head], 0

    def _is_stop(self, token: int) -> bool:
        """Whether generation ends at a token: a known stop, or a special token that no turn of the template holds."""
        if token in self._stops:
            return True
        added = self._tokenizer.vocabulary.added.get(token)
        return added is not None and added.special and not self._skeleton.knows(token)

    def _overlap(self, completion: Ids, stop: int, ids: Ids) -> int | None:
        """How much of what follows the stop token the completion has already: a separator, or the next head."""
        for length in range(min(len(ids), len(completion) - 1, 8), 0, -1):
            if completion[-length - 1] == stop and np.array_equal(completion[-length:], ids[:length]):
                return length
        is_control = self._tokenizer.vocabulary.is_control
        for at, index in enumerate(ids[:8].tolist()):
            if is_control[index]:
                return at + 1 if len(completion) and completion[-1] == index else None
            if self._tokenizer.decode([index]).strip():
                return None
        return None

    def _open_seam(
        self, prompt: Sequence[int] | Ids, completion: Ids, found: Join, last: int
    ) -> tuple[list[tuple[Sequence[int], Kind]], int] | BridgeRefusal:
        """The seam of a template that ends the turn with text, or with nothing."""
        marked = self._skeleton.marked
        closing = marked.of_text(found.encoded.rendering.text[found.section.body_end : found.cut])
        closing = closing[len(closing) - common_prefix(closing[::-1], self._skeleton.plain_close[::-1]) :]
        ended = self._is_stop(last)
        said = marked.of_ids(completion[-256 : -1 if ended else None].tolist())
        there = next((n for n in range(len(closing), 0, -1) if said.endswith(closing[:n])), 0)
        if ended or (closing and there == len(closing)):
            return [(marked.ids(closing[there:]), Kind.SCAFFOLD)], 0
        rest = closing[there:]
        if not there:
            inner = self._closing(prompt, completion)
            done = next((n for n in range(len(closing), 0, -1) if inner.endswith(closing[:n])), 0)
            rest = inner + closing[done:]
        if rest and self._truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        return [(marked.ids(rest), Kind.SYNTHETIC)], 0

    def _closing(self, prompt: Sequence[int] | Ids, completion: Ids) -> str:
        """What closes the turn, as far as its markers tell, in marked text."""
        tail = [*prompt[-LOOK_BACK:], *completion.tolist()]
        return self._skeleton.closing(self._skeleton.marked.of_ids([int(index) for index in tail]), self._closers)

    def _bridged(
        self,
        prompt: Sequence[int] | Ids,
        given: Any,
        found: Join,
        seam: tuple[list[tuple[Sequence[int], Kind]], int],
        new_count: int,
    ) -> BridgedTokens:
        pieces, dropped = seam
        encoded, first = found.encoded, found.turn.stop + dropped
        spans = encoded.spans[first:]
        origins = encoded.rendering.origins
        of_message = [
            Kind.CONTEXT if origin is not None and origin.source == "messages" and not origin.is_role else Kind.SCAFFOLD
            for origin in origins
        ]
        owners = span_messages(encoded.rendering, found.conversation)
        before = [np.full(len(ids), kind, np.uint8) for ids, kind in pieces]
        count = sum(len(ids) for ids, _ in pieces)
        owner = np.maximum(np.asarray(owners, np.int32)[spans] - found.first_new, -1)
        return BridgedTokens(
            prompt,
            given,
            np.concatenate([*(np.asarray(ids, np.int32) for ids, _ in pieces), encoded.ids[first:]]),
            np.concatenate([*before, np.asarray(of_message, np.uint8)[spans]]),
            np.concatenate([np.full(count, -1, np.int32), owner.astype(np.int32)]),
            new_count,
            self._lost(found),
        )

    def _lost(self, found: Join) -> list[Lost]:
        """What of the new messages reached no token."""
        lost, _ = find_lost(found.encoded.rendering, found.conversation, self._forms, first=found.first_new)
        return [dataclasses.replace(one, message=(one.message or 0) - found.first_new) for one in lost]


def _described(form: Form, context: Messages) -> str:
    parts = ["a call" if form.calls else "an answer"]
    if form.reasoning:
        parts.append("with reasoning")
    return f"{' '.join(parts)} in a conversation of {len(context)} messages"
