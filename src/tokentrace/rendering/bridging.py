"""The bridge: from a stream to the next prompt, without rendering the past.

`Bridger.bridge` renders ``[a small context, a stand-in for the turn, the new messages]`` and joins
what follows the turn to the stream. For each shape of new messages it proves once that other
contexts and stand-ins give the same. After that, a bridge costs one small render.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..conversation.messages import REASONING_FIELDS, RESULT_ROLES, Messages, check_tools
from ..conversation.sketch import sketch
from ..errors import TokentraceError
from ..parsing.compiled import Compiled
from ..parsing.marked import mark, tags
from ..parsing.parser import read_turn
from ..parsing.response import ParsedResponse
from ..study import seams
from ..study.endings import TurnEndings, find_past_close
from ..study.memory import Memory, learned
from ..study.probes import STAND_IN_TOOL, USER
from ..study.seams import BridgeRefusal, CalledFunction, Continuation, EncodedTurns, RefusalReason, StandIn
from ..study.study import TemplateStudy
from ..study.turns import common_prefix, shows_field, turn_spans
from ..tokens.ids import check_ids
from ..tokens.kinds import Kind
from ..tokens.table import TokenTable, join
from ..tokens.tokenizer import Ids
from .bridged import BridgedTokens, Stream, Truncation
from .lost import find_lost
from .rendered import span_messages

_OF_CONTEXT = (RefusalReason.CONTEXT_DEPENDENT, RefusalReason.MOVES_PAST)
_CUT_OFF = BridgeRefusal(RefusalReason.TRUNCATED, "the completion was cut off before it ended its turn")

Write = Callable[[Messages, int, Any, bool], EncodedTurns]
"""Renders messages: these, the one whose turn to find, tools, whether to add a prompt."""

Outcome = Continuation | BridgeRefusal


class _Context(NamedTuple):
    """A conversation before the turn."""

    messages: Messages
    controls: frozenset[int] = frozenset()
    prompt_ids: Sequence[int] = ()
    has_word: bool = False
    number: int = 0


class _Request(NamedTuple):
    """New messages to write after a turn that calls functions."""

    new: Messages
    tools: Any
    key: tuple[object, ...]
    calls: Sequence[CalledFunction]
    words: Sequence[str]
    """Texts that the turn may have and the template may look for."""
    true_context: bool = False
    """Whether the template sees the actual conversation so far, and so the real tools."""
    seen_tools: list[Any] | None = None
    """What the template sees instead of the real tools. Fewer render faster."""
    message: Mapping[str, Any] = {}

    def follow(self, context: Messages, stand_in: StandIn) -> list[Any]:
        return [*context, {**stand_in.message(self.calls), **self.message}, *self.new]

    @property
    def has_results(self) -> bool:
        return any(call.result >= 0 for call in self.calls)

    @property
    def visible_tools(self) -> Any:
        return self.tools if self.seen_tools is None or not self.tools else self.seen_tools


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """Past turns that the template would rewrite: those with these tags."""

    tags: frozenset[bytes]
    reasoning: bool | None
    """With reasoning, without, or either (None)."""
    how: str


@dataclass(frozen=True, slots=True)
class _Proof:
    """A context and a stand-in that represent all others."""

    context: Messages
    stand_in: StandIn
    seen_tools: list[Any] | None
    true_context: bool
    rewrites: tuple[_Rewrite, ...] = ()
    message: Mapping[str, Any] = field(default_factory=dict)


class _Seam(NamedTuple):
    """Ids to add, and how many ids after the stop token to skip."""

    pieces: Sequence[tuple[Sequence[int], Kind]] = ()
    overlap: int = 0


@dataclass(slots=True)
class Bridger:
    """Makes bridges for one template with one renderer's settings."""

    study: TemplateStudy
    endings: TurnEndings
    write: Write
    compiled: Callable[[], Compiled]
    """The grammar of completions: slow to compile, seldom needed."""
    truncation: Truncation
    as_inference: bool
    cache: Memory = field(default_factory=Memory)

    def bridge(
        self,
        stream: Stream,
        new: Messages,
        tools: Any,
        key: object,
        past: Messages,
        call_ids: Sequence[str],
    ) -> BridgedTokens | BridgeRefusal:
        """The next prompt. `past` is the conversation before the completion, if known."""
        if not len(stream.prompt):
            problem = "there is no prompt to extend; keep the ids of every turn, including cut-off ones"
            return BridgeRefusal(RefusalReason.EMPTY_STREAM, problem)
        request = self._request(stream, new, tools, key, call_ids)
        proof = self._prove_any(request, stream, past)
        if isinstance(proof, BridgeRefusal):
            return proof
        if (refusal := self._refuse_rewrite(proof.rewrites, stream)) is not None:
            return refusal
        continuation = self._with_proof(request, proof)
        if isinstance(continuation, BridgeRefusal):
            return continuation
        refusal = seams.check_continuation(continuation, proof.true_context)
        return self._join(stream, continuation) if refusal is None else refusal

    def _with_proof(self, request: _Request, proof: _Proof) -> Outcome:
        request = request._replace(true_context=proof.true_context, message=proof.message)
        fewer = request._replace(seen_tools=proof.seen_tools)

        def needs_tools(name: str | None) -> bool:
            """Whether this function is written another way with all tools."""
            calls = [call._replace(name=name) for call in request.calls]
            new = [{**message, "name": name} if message.get("name") else message for message in request.new]
            ways = [way._replace(calls=calls, new=new) for way in (request, fewer)]
            afters = [self._continue(way, proof.context, proof.stand_in) for way in ways]
            return len({after and after.tail for after in afters}) > 1

        names = {call.name for call in request.calls} if proof.seen_tools is not None else ()
        if any(self.cache.once(("tools", name, request.key), partial(needs_tools, name)) for name in names):
            fewer = request
        return self._continue(fewer, proof.context, proof.stand_in)

    def _continue(self, request: _Request, context: Messages, stand_in: StandIn) -> Outcome:
        return self._rendered_after(request.follow(context, stand_in), len(context), request.visible_tools)

    def _rendered_after(self, messages: Messages, at: int, tools: Any, prompted: bool = True) -> Outcome:
        write = partial(self.write, messages, at, tools, prompted)
        return seams.find_continuation(messages, at + 1, write, self.endings)

    def _request(
        self, stream: Stream, new: Messages, tools: Any, tools_key: object, call_ids: Sequence[str]
    ) -> _Request:
        """The new messages, and the calls that they answer."""
        words = self.study.template.searched
        calls = seams.called_functions(new, call_ids)
        if calls and not call_ids and new[0]["role"] not in RESULT_ROLES:  # they may answer an earlier turn
            calls = calls if read_turn(self.compiled(), stream.completion, stream.prompt).tool_calls else []
        key = (sketch(new, words), tools_key, tuple(call.result for call in calls))
        request = _Request(new, tools, key, calls, (*words, seams.LONG))
        is_named = all(call.name for call in calls)

        def needs_completion() -> bool | None:
            """Whether the template may compare functions' names, or count calls; None: unknown."""
            functions = (str(tool.get("function", tool).get("name")) for tool in check_tools(tools) or ())
            for name in () if is_named else functions:
                if name in self.study.template.constants or any(word in name for word in words):
                    return True
            if not (proof := self._prove_once(request)):
                return None if is_named else True
            more = (request._replace(calls=[*calls, *[CalledFunction()] * count]) for count in (0, 1, 4))
            tails = {(after := self._with_proof(which, proof)) and after.tail for which in more}
            return bool(calls and not call_ids and len(tails) > 1)

        cached = ("completion", is_named, bool(call_ids), *key)
        if not self.cache.once(cached, needs_completion, keep=lambda needed: needed is not None):
            return request
        parsed = read_turn(self.compiled(), stream.completion, stream.prompt).tool_calls
        answered = [call.id for call in calls]
        ids = [call.id or "" for call in parsed if call.status.runnable]
        if not call_ids and answered != ids and {*answered} <= {*ids}:
            return self._request(stream, new, tools, tools_key, ids)
        names = [call.name for call in parsed]
        if len(names) > len(calls):  # the history has those that can be run
            names = [call.name for call in parsed if call.status.runnable]
            if len(names) != len(calls):  # it is unknown which have results
                names = [None] * max(len(calls), 0 if call_ids else len(names))
        calls = [*calls, *[CalledFunction()] * (len(names) - len(calls))]
        pairs = itertools.zip_longest(calls, names)
        return request._replace(calls=[call._replace(name=call.name or name) for call, name in pairs])

    def _prove_any(self, request: _Request, stream: Stream, past: Messages) -> _Proof | BridgeRefusal:
        """The proof in any context or, if messages depend on it, in the actual one."""
        if not past:
            proof = self._prove_once(request)
            if isinstance(proof, _Proof) or proof.reason not in _OF_CONTEXT:
                return proof
        grammar = self.compiled().grammar
        turn = read_turn(self.compiled(), stream.completion, stream.prompt)
        has_call: bool | None = None  # unknown: stand-ins with a call count, and those without
        if grammar.calls is not None or grammar.channels is not None:
            has_call = bool(turn.tool_calls or (turn.attempts and request.has_results))
        text = turn.content + seams.LONG * (len(turn.content) > 20)
        request = request._replace(words=[word for word in request.words if word in text])
        if past:
            return self._prove_in(past, request, turn, has_call)
        ids, contexts = check_ids(stream.prompt, "prev_prompt_ids"), self._contexts(bool(request.tools))
        usual = frozenset[int]().union(*(context.controls for context in contexts if not context.has_word))
        in_prompt = frozenset(token for token in usual if (ids == token).any())
        prompts = [one.prompt_ids for one in contexts]
        ends = [prompt for prompt in prompts if prompt == ids[len(ids) - len(prompt) :].tolist()]
        fitting = [one for one in contexts if not ends or one.prompt_ids == max(ends, key=len)]
        alike = [one for one in fitting if one.controls & usual == in_prompt]
        return self._prove_once(request, has_call, alike or fitting)

    def _prove_in(
        self, past: Messages, request: _Request, turn: ParsedResponse, has_call: bool | None
    ) -> _Proof | BridgeRefusal:
        """The proof in this context: with the turn's own text, else with stand-ins."""
        request, contexts = request._replace(true_context=True), (_Context(past),)
        thought = {"reasoning_content": turn.reasoning_content} if turn.reasoning_content else {}
        if not self.as_inference:
            with contextlib.suppress(TokentraceError):
                content = {} if has_call and not turn.content.strip() else {"content": turn.content}
                actual = request._replace(message={**content, **thought})
                if proof := self._prove(actual, has_call, contexts):
                    return proof
        return self._prove(request, has_call, contexts)

    def _prove_once(
        self, request: _Request, has_call: bool | None = None, alike: Sequence[_Context] = ()
    ) -> _Proof | BridgeRefusal:
        def is_reusable(proof: _Proof | BridgeRefusal) -> bool:
            """Other refusals depend on the text."""
            return isinstance(proof, _Proof) or proof.reason in _OF_CONTEXT

        named = tuple((call.result, call.name is None) for call in request.calls)
        numbers = tuple(context.number for context in alike)

        def prove() -> _Proof | BridgeRefusal:
            return self._prove(request, has_call, alike or self._contexts(bool(request.tools)))

        key = (request.key, named, tuple(request.words), has_call, numbers)
        return self.cache.once(key, prove, keep=is_reusable)

    def _prove(
        self, request: _Request, has_call: bool | None, contexts: Sequence[_Context]
    ) -> _Proof | BridgeRefusal:
        """Find a context and a stand-in, and check that all others agree."""
        usual = [one.messages for one in contexts if not one.has_word]
        rare = [one.messages for one in contexts if one.has_word]
        if usual and not request.true_context:
            rare += itertools.chain.from_iterable(map(seams.lengthened, usual))
        base = self._base(request, has_call, usual or rare)
        if isinstance(base, BridgeRefusal):
            return base
        context, stand_in, expected = base
        seen_tools = None
        can_change = request.tools and not request.true_context and not expected.shows_tools
        for fewer in ([STAND_IN_TOOL], []) if can_change else ():
            quicker = request._replace(seen_tools=fewer)
            actual = self._continue(quicker, context, stand_in)
            if actual and actual.tail == expected.tail:
                seen_tools, request = fewer, quicker if fewer else request
        rewrites: dict[_Rewrite, None] = {}
        inline = (seams.INLINE,) if self.as_inference and not stand_in.calls else ()
        forms = [*seams.variants(stand_in), *inline]
        forms = [stand_in, replace(stand_in, has_arguments=True)] if request.message else forms
        pairs = [*itertools.product(forms, usual or rare)]
        rewriting = len(pairs)
        pairs += [(stand_in, around) for around in rare]
        if not request.message:
            pairs += [(replace(stand_in, content=word), context) for word in request.words]
        for at, (other, around) in enumerate(pairs):
            actual = self._continue(request, around, other)
            if not actual:
                continue
            if has_call is not None and actual.shows("tool_calls") != expected.shows("tool_calls"):
                continue
            problem = seams.check_continuation(actual, request.true_context)
            if problem is not None and problem.reason is RefusalReason.MOVES_PAST:
                # the template moves past text, which a stream keeps in place
                rewrites[_Rewrite(frozenset(), None, problem.detail)] = None
            elif actual.tail != expected.tail or problem is not None:
                begin = max(0, common_prefix(actual.tail, expected.tail) - 40)
                texts = " or ".join(repr(one.tail[begin:][:60]) for one in (actual, expected))
                advice = "" if request.true_context else "; pass messages=, the conversation so far"
                detail = f"the text after the turn depends on the messages before it: {texts}{advice}"
                return BridgeRefusal(RefusalReason.CONTEXT_DEPENDENT, detail)
            elif (
                self.as_inference
                and at < rewriting
                and (rewrite := self._rewrite(other, request.visible_tools, actual))
            ):
                rewrites[rewrite] = None
        past = tuple(rewrites) if self.as_inference else ()
        return _Proof(context, stand_in, seen_tools, request.true_context, past, request.message)

    def _base(
        self, request: _Request, has_call: bool | None, contexts: Sequence[Messages]
    ) -> tuple[Messages, StandIn, Continuation] | BridgeRefusal:
        """The first context and stand-in that the template accepts, best with a call like the turn."""
        refusal = BridgeRefusal(RefusalReason.TEMPLATE_REFUSED, "the template refuses these messages here")
        second: tuple[Messages, StandIn, Continuation] | None = None
        # a user may speak before the result arrives
        after_call = has_call is True or request.has_results
        shows_calls = after_call and self.study.forms.calls.are_shown
        for stand_in in seams.base_stand_ins(after_call):
            for context in contexts:
                result = self._continue(request, context, stand_in)
                problem = seams.check_continuation(result, request.true_context)
                if result and problem is None:
                    if not shows_calls or result.shows("tool_calls") == (has_call is not False):
                        return context, stand_in, result
                    second = second or (context, stand_in, result)
                elif problem is not None and refusal.reason is RefusalReason.TEMPLATE_REFUSED:
                    refusal = problem
        return second or refusal

    @learned
    def _contexts(self, has_tools: bool) -> tuple[_Context, ...]:
        """Contexts: of each kind, the first with and without a call."""
        chosen: list[_Context] = []
        tools = [STAND_IN_TOOL] if has_tools else None
        template = self.study.template
        worded = [ways for word in template.searched for ways in seams.contexts_saying(word)]
        worded += [seams.DEVELOPER] if "developer" in template.constants else []
        kinds = [*seams.CONTEXTS, *worded]
        for number, ways in enumerate(kinds):
            has_word = number >= len(seams.CONTEXTS)
            by_call: dict[bool, _Context] = {}
            for messages in ways:
                try:
                    encoded, _ = self.write(messages, -1, tools, True)
                except TokentraceError:
                    continue
                controls = frozenset(encoded.ids[encoded.control].tolist())
                prompt_ids = encoded.ids[encoded.first_after([encoded.rendering.tail])[0] :].tolist()
                context = _Context(messages, controls, prompt_ids, has_word, len(chosen) + len(by_call))
                by_call.setdefault(shows_field(encoded.rendering, ("tool_calls",)), context)
                is_new = prompt_ids not in (one.prompt_ids for one in chosen)
                if is_new and has_word and messages[1:] == (USER,):  # the word sets the prompt
                    kinds += [((messages[0], {**USER, "content": word}),) for word in template.searched]
                if True in by_call:
                    break
            chosen += by_call.values()
        return tuple(chosen)

    def _rewrite(self, stand_in: StandIn, tools: Any, after: Continuation) -> _Rewrite | None:
        """What the new messages change about the turn before them."""
        at = after.first_new - 1
        alone = self._rendered_after(after.conversation[: at + 1], at, tools, prompted=False)
        if not alone:
            return None
        marked = self.compiled().marked
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
        spans = (*turn_spans(alone.encoded.rendering), alone.span)
        begin = max((span.start for span in spans if span.start <= shared), default=0)
        before, later = ({tag[0] for tag in tags(marked.scaffold(text[begin:]))} for text in (was, now))
        how = f"for example, {was[shared : shared + 60]!r} would become {now[shared : shared + 60]!r}"
        return _Rewrite(frozenset(before - later), stand_in.reasoning or stand_in is seams.INLINE, how)

    def _refuse_rewrite(self, rewrites: Sequence[_Rewrite], stream: Stream) -> BridgeRefusal | None:
        if not rewrites:
            return None
        compiled = self.compiled()
        ids = np.concatenate([check_ids(stream.prompt, "prev_prompt_ids"), stream.completion])
        data, _ = compiled.marked.spelled(ids, 0)
        stream_tags = tags(data)
        seen = frozenset(tag[0] for tag in stream_tags)
        full = blank = not compiled.reasoning_close  # either, if no tag closes reasoning
        end = 0
        for tag in stream_tags:
            if tag[0] == compiled.reasoning_close:
                between = data[end : tag.start()]
                # white space may be either
                full, blank = (full or bool(between), blank or not between.strip())
            end = tag.end()
        for rewrite in rewrites:
            applies = True
            if rewrite.reasoning is not None:  # only turns with reasoning, or only turns without
                applies = full if rewrite.reasoning else blank or not rewrite.tags
            if rewrite.tags <= seen and applies:
                problem = f"in production the template rewrites earlier turns: {rewrite.how}"
                return BridgeRefusal(RefusalReason.REWRITES_PAST, problem)
        return None

    def _join(self, stream: Stream, continuation: Continuation) -> BridgedTokens | BridgeRefusal:
        seam = self._seam(stream, continuation)
        if isinstance(seam, BridgeRefusal):
            return seam
        encoded = continuation.encoded
        conversation = continuation.conversation
        first = continuation.first_new
        rendering, after = encoded.rendering, slice(continuation.stop + seam.overlap, None)
        owners = [max(owner - first, -1) for owner in span_messages(rendering, conversation)]
        of_spans = [  # everything but a message's own text is scaffold, including its role
            Kind.SCAFFOLD if origin is None or origin[0] != "messages" or origin.is_role else Kind.CONTEXT
            for origin in rendering.origins
        ]
        kinds = encoded.per_token(np.asarray(of_spans, np.uint8))[after]
        messages = encoded.per_token(np.asarray(owners, np.int32))[after]
        pieces = [TokenTable.of(np.asarray(ids, np.int32), kind) for ids, kind in seam.pieces if len(ids)]
        table = join([*pieces, TokenTable.of(encoded.ids[after].copy(), kinds, messages)])
        left_out = find_lost(rendering, conversation, self.study.forms, first=first)
        lost = [replace(one, message=(one.message or 0) - first) for one in left_out.lost]
        return BridgedTokens(*stream, table, len(conversation) - first, lost)

    def _seam(self, stream: Stream, continuation: Continuation) -> _Seam | BridgeRefusal:
        completion, stop, inner = stream.completion, continuation.stop_token, self.endings.inner
        in_prompt = inner and not len(completion)
        tail = np.asarray(stream.prompt[-9:]) if in_prompt else completion  # `_overlap` reads nine
        last = int(tail[-1]) if len(completion) or not inner.isdisjoint(tail[-1:].tolist()) else -1
        if stop is None:
            return self._open_seam(stream, continuation, last)
        if last == stop:
            return _Seam()
        is_head = stop in self.endings.heads and stop not in self.endings.closers
        head: list[tuple[Sequence[int], Kind]] = [([stop], Kind.SCAFFOLD)] if is_head else []
        if self._is_stop(last):
            return _Seam(head)
        following = continuation.encoded.ids[continuation.stop :]
        if (overlap := self._overlap(tail, stop, following)) is not None:
            return _Seam(overlap=overlap)
        if self.truncation is Truncation.REFUSE:
            return _CUT_OFF
        parsed = read_turn(self.compiled(), completion, stream.prompt)
        missing = parsed.closing or self._space_before(stop, completion, parsed)
        closing = self._ids(self._marked(missing.rstrip() if is_head else missing))
        if stop in closing:  # part of the grammar, if turns are not shown
            closing = closing[: closing.index(stop) + 1]
        elif not is_head and not (closing and closing[-1] in self.endings.closers):
            closing = [*closing, stop]
        return _Seam([(closing, Kind.SYNTHETIC), *head])

    def _open_seam(self, stream: Stream, continuation: Continuation, last: int) -> _Seam | BridgeRefusal:
        """The seam of a template that ends the turn with text, or with nothing."""
        completion = stream.completion
        text = continuation.encoded.rendering.text
        whole = self._marked(text[continuation.span.body_end : continuation.cut])
        past = self._marked(find_past_close(self.study))
        starts = (at for at in range(len(whole) + 1) if _begins(whole, at) and past.endswith(whole[at:]))
        closing = whole[next(starts) :]
        ended = self._is_stop(last)
        data, _ = self.compiled().marked.spelled(completion[-256 : -1 if ended else None], 0)
        ends_with_control_token = whole[-5:-4] == b"\xff"  # as `MarkedBytes` spells one
        if ends_with_control_token and data.endswith(whole):
            return _Seam()  # the template ends such a turn here: DeepSeek V3, after a single call
        there = _shared_end(data, closing)
        if ended or (closing and there == len(closing)):
            return _Seam([(self._ids(closing[there:]), Kind.SCAFFOLD)])
        remaining = closing[there:]
        if not there:
            inner = self._marked(read_turn(self.compiled(), completion, stream.prompt).closing)
            remaining = inner + closing[_shared_end(inner, closing) :]
        if remaining and self.truncation is Truncation.REFUSE:
            return _CUT_OFF
        return _Seam([(self._ids(remaining), Kind.SYNTHETIC)])

    def _marked(self, text: str) -> bytes:
        return self.compiled().marked.scaffold(text)

    def _ids(self, marked: bytes) -> list[int]:
        return self.compiled().marked.ids(marked, self.study.tokenizer)

    def _space_before(self, stop: int, completion: Ids, parsed: ParsedResponse) -> str:
        """The white space that a past answer has before its stop token, and this lacks."""
        space, token, _ = self._marked(find_past_close(self.study)).partition(mark(stop))
        if not token or space.strip() or parsed.tool_calls:
            return ""
        data, _ = self.compiled().marked.spelled(completion, 0)
        return space[_shared_end(data, space) :].decode()

    def _is_stop(self, token: int) -> bool:
        """Whether a token is a known stop, or special and never in a turn."""
        if token in self.endings.stops | self.endings.closers | self.study.eos:
            return True
        added = self.study.tokenizer.vocabulary.added.get(token)
        inside = self.study.turn_tokens() | self.study.inner_tokens(self.compiled().grammar)
        return added is not None and added.special and token not in inside

    def _overlap(self, completion: Ids, stop: int, ids: Ids) -> int | None:
        """How many ids after the stop token the completion already has."""
        for length in range(min(len(ids), len(completion) - 1, 8), 0, -1):
            if completion[-length - 1] == stop and np.array_equal(completion[-length:], ids[:length]):
                return length
        is_control = self.study.tokenizer.vocabulary.is_control
        for at, index in enumerate(ids[:8].tolist()):
            if is_control[index]:  # unless the turn may go on with it
                is_head = index not in self.study.turn_tokens()
                return at + 1 if is_head and len(completion) and completion[-1] == index else None
            if self.study.tokenizer.decode([index]).strip():
                return None
        return None


def _shared_end(data: bytes, closing: bytes) -> int:
    """How many bytes of a closing, in whole characters, the data ends with."""
    lengths = (length for length in range(len(closing), 0, -1) if _begins(closing, length))
    return next((length for length in lengths if data.endswith(closing[:length])), 0)


def _begins(marked: bytes, at: int) -> bool:
    """True if a character or a control token begins at this byte, or none is left."""
    return at == len(marked) or marked[at] & 0xC0 != 0x80
