"""One session: its trajectory, and which conversation each of its turns answered. Pure.

`SessionRecord.place` finds the recorded turn that a request continues. The prompt is that
turn's stream, id for id, plus what is new. If no turn matches, it renders the whole
conversation. `prepare` makes a turn; `apply` adds it once stored, `replay` a stored one.
"""

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ..conversation.messages import Messages
from ..diagnose import message_keys
from ..diagnose.conversation_diff import INSTRUCTIONS, changed_message, changed_tools, find_cause, text_of
from ..diagnose.finding import Cause, Finding
from ..diagnose.message_keys import Key, Meaning, chain, meaning, next_key, reasoning
from ..engines.protocol import Completion
from ..errors import InputError, TokentraceError
from ..rendering.bridged import BridgedTokens
from ..store.packing import pack_channels
from ..store.store import TurnRecord
from ..study.seams import BridgeRefusal
from ..tokens.kinds import Kind, Kinds
from ..tokens.table import TokenTable, message_spans
from ..tokens.tokenizer import Ids
from ..trajectory.storage import replay_records, write_records
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .adapting import readable_calls, render_readably
from .turns import Conversation, Message, Placement, PreparedTurn, RecordedTurn, SentMessages

_UNFINISHED = ("length", "abort")
_RECENT = 3


@dataclass(slots=True)
class SessionRecord:
    """A session in memory. `Sessions.locked` locks it."""

    trajectory: Trajectory
    means: Meaning = meaning
    matcher: str = "normal"
    turns: list[RecordedTurn] = field(default_factory=list)
    roots: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    _by_key: dict[Key, list[int]] = field(default_factory=dict)
    _turn_of: dict[Key, int] = field(default_factory=dict)
    _by_reply: dict[Key, list[int]] = field(default_factory=dict)
    _replies_read: int = 0
    _by_reasoning: dict[str, list[int]] = field(default_factory=dict)
    _prints_alike: dict[Key, bool] = field(default_factory=dict)
    _tips: dict[int, int] = field(default_factory=dict)
    _latest: deque[SentMessages] = field(default_factory=lambda: deque(maxlen=4))

    def place(self, conversation: Conversation) -> Placement:
        if conversation.prompt_ids is not None:
            self._check_unfinished(conversation.prompt_ids, "token_ids")
            return _whole(conversation, SentMessages(keys=[conversation.root]), conversation.prompt_ids)
        sent, earlier = self._received(conversation)
        conversation = replace(conversation, messages=sent.messages)
        count, base, edit, ambiguous = len(sent.messages), None, None, False
        while count and base is None:
            numbers = self._by_key.get(sent.keys[count], ())
            if not numbers or sent.messages[count - 1].get("role") != "assistant":
                count -= 1
                continue
            echo = sent.messages[:count]
            turns = (self.turns[number] for number in numbers)
            edits = [self._first_edit(conversation, turn, echo, earlier) for turn in turns]
            matches = [number for number, at in zip(numbers, edits, strict=True) if at is None]
            if matches:
                base = self._choose(matches, echo)
                if base is None:
                    ambiguous, count = True, count - 1
            else:  # all longer prefixes contain the edit, too
                count = max(at or 0 for at in edits)
                number = numbers[edits.index(count)]
                edit = changed_message(count, echo[count], self.conversation(number)[count])
        placed = "" if base is None else self._extend(conversation, sent, base, count)
        if isinstance(placed, str):
            placed = replace(self._render(conversation, sent), refusal=placed)
        return replace(placed, ambiguous=ambiguous, edit=edit) if ambiguous or edit else placed

    def _received(self, conversation: Conversation) -> tuple[SentMessages, SentMessages | None]:
        """The messages with keys, and the earlier request that they continue."""
        originals = list(conversation.messages)
        same, earlier = 0, None
        for sent in reversed(self._latest):
            if sent.keys[0] == conversation.root and sent.matcher == self.matcher:
                if (shared := message_keys.shared_prefix(originals, sent.originals)) > same:
                    same, earlier = shared, sent
                if same == len(sent.originals):
                    break
        messages, keys = [], [conversation.root]
        if earlier is not None:
            originals[:same] = earlier.originals[:same]
            messages, keys = earlier.messages[:same], earlier.keys
        messages += [self._with_reasoning(message) for message in originals[same:]]
        start = max(0, min(same, len(messages) - 1))
        # a result's key depends on the calls before it
        while start and messages[start].get("role") != "assistant":
            start -= 1
        keys = [*keys[:start], *chain(keys[start], messages[start:], self.means)]
        received = SentMessages(originals, messages, keys, self.matcher)
        self._latest.append(received)
        return received, earlier if earlier is not None and same == len(earlier.messages) else None

    def _with_reasoning(self, message: Message) -> Message:
        """Move the first text to the reasoning if only that gives a recorded reply."""
        content = message.get("content")
        by_model = message.get("role") == "assistant"
        if not (self._by_reasoning and by_model and content) or reasoning(message):
            return message
        first: Any = content
        remaining: Any = ""
        if type(content) is list:
            first, remaining = text_of({"content": content[:1]}), content[1:]
        numbers = self._by_reasoning.get(str(first).strip())
        if not numbers or self._is_reply(message):
            return message
        separate = {**message, "content": remaining, "reasoning_content": first}
        return separate if self._is_reply(separate, numbers) else message

    def _is_reply(self, message: Message, numbers: Sequence[int] | None = None) -> bool:
        """True if a message means the same as the reply of these turns, or of any."""
        for turn in self.turns[self._replies_read :]:
            self._by_reply.setdefault(self._key_alone(turn.reply), []).append(turn.number)
        self._replies_read = len(self.turns)
        replies = self._by_reply.get(self._key_alone(message), ())
        return bool(replies) if numbers is None else not set(numbers).isdisjoint(replies)

    def _key_alone(self, message: Message) -> Key:
        return chain(b"", [message], self.means)[-1]

    def _choose(self, numbers: Sequence[int], echo: Messages) -> RecordedTurn | None:
        """The turn that the echo repeats; None if several with other tokens remain."""

        def repeats(number: int) -> bool:
            for sent, recorded in zip(echo, self.conversation(number), strict=True):
                for part in (message_keys.call_ids, reasoning):
                    if sent.get("role") == "assistant" and part(sent) and part(sent) != part(recorded):
                        return False
            return True

        candidates = list(filter(repeats, numbers)) if len(numbers) > 1 else numbers
        # the agent probably saw the last
        turns = [self.turns[number] for number in reversed(candidates or numbers)]
        if len(turns) > 1 and len({self._stream(turn).tobytes() for turn in turns}) > 1:
            return None
        return next((turn for turn in turns if self._is_tip(turn)), turns[0])

    def _first_edit(
        self,
        conversation: Conversation,
        turn: RecordedTurn,
        echo: Messages,
        earlier: SentMessages | None = None,
    ) -> int | None:
        """The first message that has the recorded key but gives other tokens, or None.

        A reply may leave reasoning out, change its white space, or repeat only its end (the
        last streamed piece). The fields of any other message must give the same tokens.
        Messages that the turn had in `earlier` do.
        """
        first = len(earlier.messages) if earlier is not None and turn.number in earlier.answers else 0
        sampled = {each.depth - 1 for each in self._path(turn, first)}
        doubtful: dict[int, Message] = {}
        pairs = zip(echo[first:], self.conversation(turn.number, first), strict=False)
        for at, (message, recorded) in enumerate(pairs, first):
            by_model = message.get("role") == "assistant"
            if by_model and (at in sampled or self._is_reply(message)):
                repeated = " ".join(reasoning(message).split())
                if not " ".join(reasoning(recorded).split()).endswith(repeated):
                    reprinted = self._first_reprinted(conversation, turn, doubtful)
                    return at if reprinted is None else reprinted
            elif message is recorded:
                continue
            elif (by_model or self.means is meaning) and not message_keys.same_fields(message, recorded):
                doubtful[at] = message
        return self._first_reprinted(conversation, turn, doubtful)

    def _first_reprinted(
        self, conversation: Conversation, turn: RecordedTurn, doubtful: Mapping[int, Message]
    ) -> int | None:
        """The first doubtful message that changes a prompt, or None."""
        path = self._path(turn) if doubtful else []
        key, changed = b"", dict[int, Message]()
        for at, message in doubtful.items():
            while len(path) > 1 and at >= path[-2].shared:
                path.pop()  # path[-1] is the turn whose prompt first wrote the message
            changed[at] = message
            key = next_key(key, [path[-1].number, at, message_keys.strict_meaning(message)])
            if key not in self._prints_alike:
                self._prints_alike[key] = self._gives_recorded_prompt(conversation, path[-1], changed)
            if not self._prints_alike[key]:
                return at
        return None

    def _gives_recorded_prompt(
        self, conversation: Conversation, turn: RecordedTurn, changed: Mapping[int, Message]
    ) -> bool:
        past = self.conversation(turn.number)[:-1]
        messages = [changed.get(at, message) for at, message in enumerate(past)]
        base = None if turn.base is None else self.turns[turn.base]
        prompt = self.prompt_ids(turn)
        try:
            if base is None:
                conversation = replace(conversation, messages=messages, continued=False)
                return np.array_equal(self._render(conversation, SentMessages()).ids, prompt)
            last = base.depth - 1
            bridged = self._bridge(conversation, base, messages[last:], messages[:last])
        except TokentraceError:
            return False
        new_ids = prompt[base.stop :]
        return not isinstance(bridged, BridgeRefusal) and np.array_equal(bridged.new_ids, new_ids)

    def _extend(
        self, conversation: Conversation, sent: SentMessages, base: RecordedTurn, count: int
    ) -> Placement | str:
        """The prompt after a turn of `count` messages; or why there is none."""
        messages = conversation.messages[count:]
        place = f"message {count - 1}"
        echo = conversation.messages[count - 1]
        reply = base.reply
        repairs = list[str]()
        for name in sorted({*echo, *reply}):
            if (echo.get(name) or None) != (reply.get(name) or None):
                way = "written another way" if echo.get(name) else "left out"
                repairs.append(f"{place}: {name} {way}")
        if echo is not sent.originals[count - 1]:
            repairs.append(f"{place}: reasoning repeated as content")
        if conversation.continued:
            if messages or base.finish_reason not in _UNFINISHED:
                return "the request continues its last message, so the whole conversation is rendered"
            new = TokenTable.of(np.empty(0, np.int32), Kind.CONTEXT)
            notes = []
        else:
            bridged = self._bridge(conversation, base, [echo, *messages])
            if isinstance(bridged, BridgeRefusal):
                return str(bridged)
            new, notes = bridged.new, bridged.notes
        ids = np.concatenate([self._stream(base), new.ids])
        placed = Placement(conversation, sent, base, ids, new.ids, new.kinds, new.messages)
        if not repairs and not notes:
            return placed
        return replace(placed, repairs=tuple(repairs), notes=tuple(notes))

    def _bridge(
        self, conversation: Conversation, base: RecordedTurn, messages: Messages, before: Messages = ()
    ) -> BridgedTokens | BridgeRefusal:
        """`messages` begin with the reply of `base`; `before` replaces those that it answered."""
        reply, *new = messages
        # a result names its call by the id that the model wrote
        for at, message in enumerate(new):
            if (id := base.late_ids.get(str(message.get("tool_call_id")))) is not None:
                new[at] = {**message, "tool_call_id": id}
        ids = [base.late_ids.get(id, id) for id in message_keys.call_ids(reply)]
        stream = self._stream(base)
        streams = stream[: base.start], stream[base.start :]
        bridge = partial(
            conversation.renderer.bridge, *streams, new, tools=conversation.tools, call_ids=ids
        )
        try:
            bridged = bridge()
            if isinstance(bridged, BridgeRefusal):
                bridged = bridge(messages=readable_calls(before or self.conversation(base.number)[:-1]))
        except InputError as error:
            raise error.renumbered(-base.depth) from None
        return bridged

    def _render(self, conversation: Conversation, sent: SentMessages) -> Placement:
        continued = conversation.continued
        how: dict[str, Any] = {"tools": conversation.tools, "continue_final_message": continued}
        how["add_generation_prompt"] = not continued
        rendered, unread = render_readably(conversation.renderer, conversation.messages, **how)
        ids = np.asarray(rendered.ids, np.int32)
        if continued:
            self._check_unfinished(ids, "messages")
        notes = tuple(str(note) for note in (*rendered.notes, *rendered.lost, *unread))
        return _whole(conversation, sent, ids, rendered.messages, notes)

    def _check_unfinished(self, ids: Ids, field: str) -> None:
        if not self.turns:
            return
        branch = self.trajectory.shared_prefix(ids).extends
        if branch < 0 or self._tips[branch] != len(ids):
            return
        last = self.trajectory.turns(branch)[-1]
        if len(last) and last.finish_reason not in _UNFINISHED:
            problem = "ends with a recorded turn that the model has finished: add a message"
            raise InputError(problem, field=field)

    def conversation(self, number: int, first: int = 0) -> list[Message]:
        """The messages that a turn answered, and its reply, from message `first` on."""
        parts: list[Sequence[Message]] = []
        limit = self.turns[number].depth
        for turn in self._path(self.turns[number], first):
            start, stop = (max(0, at - turn.shared) for at in (first, limit))
            parts.append([*turn.messages, turn.reply][start:stop])
            limit = min(limit, turn.shared)
        return [message for part in reversed(parts) for message in part]

    def _path(self, turn: RecordedTurn, first: int = 0) -> list[RecordedTurn]:
        """A turn and those that it continues, back to that of message `first`."""
        path, limit = [turn], turn.shared
        while turn.base is not None and limit > first:
            turn = self.turns[turn.base]
            path.append(turn)
            limit = min(limit, turn.shared)
        return path

    def sampled_turn(self, turn: RecordedTurn) -> Turn:
        place = (turn.start, turn.stop)
        return next(each for each in self.trajectory.turns(turn.branch) if (each.start, each.stop) == place)

    def prompt_ids(self, turn: RecordedTurn) -> Ids:
        return self._stream(turn)[: turn.start]

    def _stream(self, turn: RecordedTurn) -> Ids:
        return self.trajectory.stream(turn.branch)[: turn.stop]

    def _is_tip(self, turn: RecordedTurn) -> bool:
        return turn.stop == self._tips[turn.branch]

    def _cause(self, placed: Placement) -> Finding | None:
        """Why a turn does not extend a branch; None if it does, or is the first."""
        conversation, keys = placed.conversation, placed.sent.keys
        if not self.turns or (placed.base is not None and self._is_tip(placed.base)):
            return None
        if placed.choice:
            return Finding(Cause.RETRY, words=f"choice {placed.choice} of the same request")
        if placed.ambiguous:
            words = "several recorded turns match the request, with different tokens"
            return Finding(Cause.AMBIGUOUS, words=words)
        if conversation.prompt_ids is not None:
            shared = self.trajectory.shared_prefix(placed.ids).length
            return Finding(Cause.EDIT, words=f"its ids differ from the record after the first {shared}")
        if placed.edit is not None:
            return placed.edit
        if placed.refusal:
            return Finding(Cause.TEMPLATE, words=f"no bridge from the recorded turn: {placed.refusal}")
        sent = conversation.messages
        if conversation.continued:  # a prefilled message is not a reply
            sent, keys = sent[:-1], keys[:-1]
        shared = self._shared_prefix(keys)
        if _are_instructions(sent[:shared]):
            for root, (tools, variables) in list(self.roots.items())[-_RECENT:]:
                alternative = chain(root, sent, self.means)
                same = self._shared_prefix(alternative) if root != conversation.root else 0
                if not _are_instructions(sent[:same]):
                    return changed_tools(conversation.tools, tools, conversation.variables, variables)
                if same > shared:
                    shared, keys = same, alternative
        number = self._turn_of.get(keys[shared], 0)
        if (edited := self._first_edit(conversation, self.turns[number], sent[:shared])) is not None:
            return changed_message(edited, sent[edited], self.conversation(number)[edited])
        longest, tips = number, dict[int, int]()
        for turn in self.turns[number + 1 :]:  # the longest that continues it
            if turn.base == longest and turn.shared == self.turns[longest].depth:
                longest = turn.number
        for turn in reversed(self.turns):  # those continued last, one per branch
            if len(tips) < _RECENT:
                tips.setdefault(turn.branch, turn.number)
        recent = [self.conversation(tip) for tip in tips.values()]
        return find_cause(sent, self.conversation(longest), shared, recent=recent)

    def _shared_prefix(self, keys: Sequence[Key]) -> int:
        return max(at for at, key in enumerate(keys) if at == 0 or key in self._turn_of)

    def prepare(
        self, placed: Placement, completion: Completion, reply: Message, details: Message, sampling: Message
    ) -> PreparedTurn:
        conversation, first = placed.conversation, self.trajectory.num_writes
        # the matcher may have changed since
        if placed.sent.matcher != self.matcher and conversation.prompt_ids is None:
            placed = replace(placed, sent=self._received(conversation)[0])
        base = None if placed.base is None else self.turns[placed.base.number]
        trajectory = copy.copy(self.trajectory)
        at_tip = base is not None and self._is_tip(base)
        extends = -1 if at_tip or not self.turns else trajectory.shared_prefix(placed.ids).extends
        cause = None if extends >= 0 else self._cause(placed)
        why = "" if cause is None else cause.cause.value
        branch = _append_prompt(trajectory, placed, base, at_tip, extends, why)
        sampled = trajectory.append_completion(
            completion.ids,
            completion.logprobs,
            finish_reason=str(completion.finish_reason),
            version=completion.versions or None,
            logprobs_kind=completion.logprobs_kind,
            cached_tokens=completion.cached_tokens,
            sampling=sampling,
            # without a new prompt the last completion continues: it was cut off, or empty
            continues=trajectory.num_writes == first,
            branch=branch,
        )
        answered = conversation.messages[:-1] if conversation.continued else conversation.messages
        shared = 0 if base is None else min(base.depth, len(answered))
        keys = placed.sent.keys[shared : len(answered) + 1]
        is_new_root = conversation.root not in self.roots
        turn = RecordedTurn(
            number=len(self.turns),
            base=None if base is None else base.number,
            shared=shared,
            messages=list(answered[shared:]),
            reply=reply,
            root=conversation.root,
            keys=[*keys, chain(keys[-1], [reply], self.means)[-1]],
            matcher=self.matcher,
            branch=sampled.branch,
            start=sampled.start,
            stop=sampled.stop,
            finish_reason="stop" if details.get("stopped_by") else str(sampled.finish_reason),
            cause=cause,
            tools=list(conversation.tools) if is_new_root and conversation.tools is not None else None,
            variables=dict(conversation.variables) if is_new_root else {},
            repairs=list(placed.repairs),
            notes=list(placed.notes),
            reused=placed.reused,
            **details,
        )
        records = tuple(write_records(trajectory, first))
        channels = pack_channels(completion.channels)
        counts = (len(completion.ids), len(placed.ids))
        record = TurnRecord(turn.number, first, records, turn, channels, *counts)
        return PreparedTurn(turn, record, trajectory, placed.sent)

    def apply(self, prepared: PreparedTurn) -> None:
        self.trajectory = prepared.trajectory
        prepared.sent.answers.add(prepared.turn.number)
        self._index(prepared.turn)

    def replay(self, record: TurnRecord) -> None:
        replay_records(self.trajectory, record.records)
        turn = msgspec.convert(record.info, RecordedTurn)
        if turn.matcher != self.matcher:
            past = [] if turn.base is None else self.conversation(turn.base)[: turn.shared]
            keys = chain(turn.root, [*past, *turn.messages, turn.reply], self.means)[turn.shared :]
            turn = msgspec.structs.replace(turn, keys=keys, matcher=self.matcher)
        self._index(turn)

    def _index(self, turn: RecordedTurn) -> None:
        self.turns.append(turn)
        self._tips[turn.branch] = turn.stop
        self.roots.setdefault(turn.root, (turn.tools, turn.variables))
        self._by_key.setdefault(turn.keys[-1], []).append(turn.number)
        if thought := reasoning(turn.reply):
            self._by_reasoning.setdefault(thought, []).append(turn.number)
        for key in turn.keys:
            self._turn_of.setdefault(key, turn.number)


def _append_prompt(
    trajectory: Trajectory,
    placed: Placement,
    base: RecordedTurn | None,
    at_tip: bool,
    extends: int,
    cause: str,
) -> int:
    """Write new tokens to the branch that the prompt extends, or to a new one."""
    # a prefilled message and its continuation are one: the reply
    count, owners = len(placed.conversation.messages), placed.owners
    if placed.conversation.continued:
        count -= 1
        owners = np.where(owners < count, owners, -1)
    kinds: Kinds | Kind = Kind.CONTEXT
    if base is not None and at_tip:
        if not placed.conversation.continued:
            first = trajectory.message_count(base.branch)
            owners = np.where(owners < 0, -1, owners + first)
            count = first + max(0, count - base.depth)
            trajectory.record_context(base.branch, base.stop, placed.new_ids, placed.kinds, owners, count)
        return base.branch
    spans = message_spans(owners)
    if not trajectory.num_writes:
        trajectory.begin(placed.ids, messages=count, message_spans=spans)
        return 0
    if base is not None:
        past, depth = base.stop, base.depth
        spans = [(start + past, stop + past, message + depth) for start, stop, message in spans]
        kinds = np.full(len(placed.ids), Kind.CONTEXT, np.uint8)
        kinds[base.stop :] = placed.kinds
    if extends < 0:
        shared = trajectory.messages_at(*trajectory.shared_prefix(placed.ids)[:2])
        count = shared if placed.conversation.prompt_ids is not None else max(count, shared)
        return trajectory.branch(placed.ids, kinds=kinds, message_spans=spans, messages=count, cause=cause)
    if len(placed.ids) > trajectory.length(extends):
        count = max(count, trajectory.message_count(extends))
        trajectory.extend_to(placed.ids, kinds, message_spans=spans, messages=count, branch=extends)
    return extends


def _are_instructions(messages: Messages) -> bool:
    return all(message.get("role") in INSTRUCTIONS for message in messages)


def _whole(
    conversation: Conversation, sent: SentMessages, ids: Ids, owners: Ids | None = None, notes: Any = ()
) -> Placement:
    owners = np.full(len(ids), -1, np.int32) if owners is None else owners
    return Placement(conversation, sent, None, ids, ids, Kind.PROMPT, owners, notes=notes)
