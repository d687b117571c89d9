"""One session: its trajectory, and which conversation each of its turns answered. Pure.

A request says a whole conversation. `SessionRecord.place` finds the recorded turn that it goes on from, and makes the
prompt: that turn's stream, id for id, and after it what is new. Nothing that was sampled is rendered again. Where no
turn fits, the conversation is rendered whole, and what its tokens share with the record is shared in the record, too.
`commit` then adds the turn: prompt and completion at once, or nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..conversation.messages import Messages
from ..diagnose.conversation_diff import INSTRUCTIONS, changed_message, changed_tools, find_cause, text_of
from ..diagnose.finding import Cause, Finding
from ..diagnose.message_keys import (
    Key,
    Meaning,
    call_ids,
    chain,
    identical,
    meaning,
    next_key,
    reasoning,
    strict_meaning,
    written_alike,
)
from ..engines.protocol import Completion
from ..errors import InputError, TokentraceError
from ..rendering.bridged import BridgedTokens
from ..store.packing import pack_channels
from ..store.store import TurnRecord
from ..study.seams import BridgeRefusal
from ..tokens.kinds import Kind
from ..tokens.table import message_spans
from ..tokens.tokenizer import Ids
from ..trajectory.storage import replay_records, write_records
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .broken_calls import readable_calls, render_readably
from .matching import Matcher
from .names import with_written_ids
from .turns import Asked, Message, Placement, Recorded

_UNFINISHED = ("length", "abort")
_FEW = 3
"""Among so many recorded conversations the one is looked for that a request was made of."""


@dataclass(slots=True)
class SessionRecord:
    """The record of one session in memory. One writer at a time, and no reader beside it."""

    trajectory: Trajectory
    means: Meaning = meaning
    matcher: str = Matcher.NORMAL
    """What `means` is called: keys that were made by another one are made anew."""
    turns: list[Recorded] = field(default_factory=list)
    roots: dict[Key, tuple[Any, Any]] = field(default_factory=dict)
    """Tools and template variables by their key."""
    _by_key: dict[Key, list[int]] = field(default_factory=dict)
    _seen: dict[Key, tuple[int, int]] = field(default_factory=dict)
    """For every message ever sent or replied: a turn, and how many messages of its conversation the key stands for."""
    _spoken: set[Key] = field(default_factory=set)
    """What the model said, each reply by itself."""
    _thoughts: dict[str, set[Key]] = field(default_factory=dict)
    """The replies by their reasoning."""
    _alike: dict[Key, bool] = field(default_factory=dict)
    """For recorded messages that were repeated with other fields: whether they have the same tokens."""
    _recent: deque[tuple[Messages, list[Key]]] = field(default_factory=lambda: deque(maxlen=4))

    # -- finding the turn

    def place(self, asked: Asked) -> Placement:
        """The prompt for a request. Raises what `Renderer.render` raises for messages that cannot be rendered."""
        if asked.prompt_ids is not None:
            self._check_open_end(asked.prompt_ids, "token_ids")
            return replace(_whole(asked, [asked.root], asked.prompt_ids, []), matcher=self.matcher)
        sent = asked.messages
        asked = replace(asked, messages=[self._with_thought(message) for message in sent])
        keys = self._keys(asked)
        ambiguous, refusal = False, ""
        edit: Finding | None = None
        for count in range(len(asked.messages), 0, -1):
            numbers = self._by_key.get(keys[count]) if asked.messages[count - 1].get("role") == "assistant" else None
            if not numbers or (edit is not None and edit.message is not None and count > edit.message):
                continue
            echo = asked.messages[:count]
            changes = {number: self._first_edit(asked, self.turns[number], echo) for number in numbers}
            fitting = [number for number, change in changes.items() if change is None]
            if not fitting:
                number, at = max(
                    ((number, at) for number, at in changes.items() if at is not None), key=lambda one: one[1]
                )
                edit = changed_message(at, echo[at], self.conversation(number)[at])
                continue
            base = self._the_one(fitting, echo)
            if base is None:
                ambiguous = True
                continue
            placed = self._placed_after(asked, keys, base, count, ambiguous)
            if isinstance(placed, Placement):
                aloud = sent[count - 1] is not asked.messages[count - 1]
                repairs = (f"message {count - 1}: reasoning repeated as words",) if aloud else ()
                if edit is None and not repairs:
                    return placed
                return replace(placed, edit=edit, repairs=(*placed.repairs, *repairs))
            refusal = placed
            break
        return replace(self._rendered(asked, keys, ambiguous, refusal), edit=edit, matcher=self.matcher)

    def _with_thought(self, message: Message) -> Message:
        """A message of the assistant's whose first words, or all of them, are reasoning, with that in its own field.

        Some agents repeat reasoning as if it had been said. It is taken for reasoning where the model, in this
        session, thought exactly this and said exactly the rest.
        """
        content = message.get("content")
        if not self._thoughts or message.get("role") != "assistant" or not content or reasoning(message):
            return message
        first, rest = (text_of({"content": content[:1]}), content[1:]) if type(content) is list else (content, "")
        replies = self._thoughts.get(str(first).strip(), ())
        apart = {**message, "content": rest, "reasoning_content": first}
        if not replies or next_key(b"", self.means(message)) in self._spoken:
            return message
        return apart if next_key(b"", self.means(apart)) in replies else message

    def _keys(self, asked: Asked) -> list[Key]:
        """The keys of a conversation. What it shares with one that was asked for lately is not hashed again."""
        same, known = 0, [asked.root]
        for messages, keys in reversed(self._recent):
            if keys[0] == asked.root and (shared := _shared(messages, asked.messages)) > same:
                same, known = shared, keys
                if same == len(messages):
                    break
        while same and asked.messages[same - 1].get("role") != "assistant":
            same -= 1
        start = max(0, same - 1)  # an assistant's message: what comes after one is hashed by its calls
        keys = [*known[:start], *chain(known[start], asked.messages[start:], self.means)]
        self._recent.append((asked.messages, keys))
        return keys

    def _the_one(self, numbers: Sequence[int], echo: Messages) -> Recorded | None:
        """The turn that the echo is of: by ids and reasoning, as far as it has any; None where tokens are in doubt."""
        fitting = list(numbers)
        if len(fitting) > 1:
            fitting = [number for number in numbers if self._repeats(number, echo)] or fitting
        if len(fitting) > 1 and len({self._stream(self.turns[number]).tobytes() for number in fitting}) > 1:
            return None
        turns = [self.turns[number] for number in reversed(fitting)]  # of like tokens, what was told last was heard
        return next((turn for turn in turns if turn.stop == self._tip(turn.branch)), turns[0])

    def _first_edit(self, asked: Asked, turn: Recorded, echo: Messages) -> int | None:
        """The first message of an echo that is not what a turn's conversation has there, though its key is the same.

        Of what the model said that is one with other reasoning than was sampled; left out and white space are fine.
        What it once said in this session is its own wherever it stands, in a history that was rendered anew, too. Of
        all other messages it is one with other tokens: a field that the template does not print changes nothing.
        """
        sampled = self._sampled(turn)
        doubtful: dict[int, Message] = {}
        rethought: int | None = None
        for at, (said, recorded) in enumerate(zip(echo, self.conversation(turn.number), strict=False)):
            by_model = said.get("role") == "assistant"
            if by_model and (at in sampled or next_key(b"", self.means(said)) in self._spoken):
                thought = reasoning(said)
                # some clients keep only the last piece of what was streamed
                if thought and not " ".join(reasoning(recorded).split()).endswith(" ".join(thought.split())):
                    rethought = at
                    break
            elif (by_model or self.means is meaning) and not written_alike(said, recorded):
                doubtful[at] = said
        reprinted = self._first_reprinted(asked, turn, doubtful)
        return rethought if reprinted is None else reprinted

    def _first_reprinted(self, asked: Asked, turn: Recorded, doubtful: Mapping[int, Message]) -> int | None:
        """The first of some messages, by number, that has other tokens than the one in a turn's conversation.

        The prompt in which the recorded message came is made again with the other one. Its cost is that of the prompt.
        """
        path = [turn]
        while path[-1].base is not None:
            path.append(self.turns[path[-1].base])
        key: Key = b""
        changed: dict[int, Message] = {}
        for at, message in doubtful.items():
            while len(path) > 1 and at >= path[-2].kept:
                path.pop()
            changed[at] = message
            key = next_key(key, [path[-1].number, at, strict_meaning(message)])
            if key not in self._alike:
                self._alike[key] = self._has_prompt(asked, path[-1], changed)
            if not self._alike[key]:
                return at
        return None

    def _has_prompt(self, asked: Asked, turn: Recorded, changed: Mapping[int, Message]) -> bool:
        """Whether a turn would have had the same prompt if these messages of its conversation had been others."""
        messages = [changed.get(at, message) for at, message in enumerate(self.conversation(turn.number)[:-1])]
        before, recorded = None if turn.base is None else self.turns[turn.base], self._stream(turn)[: turn.start]
        try:
            if before is None:
                ids = self._rendered(replace(asked, messages=messages, continued=False), [], False, "").ids
                return np.array_equal(ids, recorded)
            bridged = self._bridged(asked, before, messages[turn.kept :], messages[: before.depth - 1])
        except TokentraceError:
            return False
        return not isinstance(bridged, BridgeRefusal) and np.array_equal(bridged.new_ids, recorded[before.stop :])

    def _sampled(self, turn: Recorded) -> set[int]:
        """Which messages of a turn's conversation were sampled."""
        places = {turn.depth - 1}
        limit = turn.kept
        while turn.base is not None:
            turn = self.turns[turn.base]
            if turn.depth <= limit:
                places.add(turn.depth - 1)
            limit = min(limit, turn.kept)
        return places

    def _repeats(self, number: int, echo: Messages) -> bool:
        for said, recorded in zip(echo, self.conversation(number), strict=True):
            if said.get("role") == "assistant":
                for part in (call_ids, reasoning):
                    if part(said) and part(said) != part(recorded):
                        return False
        return True

    def _stream(self, turn: Recorded) -> Ids:
        return self.trajectory.stream(turn.branch)[: turn.stop]

    def _tip(self, branch: int) -> int:
        return self.trajectory.branches[branch].stop

    def written(self, turn: Recorded) -> Turn:
        """A turn, as the trajectory has it."""
        return next(each for each in self.trajectory.turns(turn.branch) if each.start == turn.start)

    def conversation(self, number: int) -> list[Message]:
        """The messages that a turn answered, as they were recorded, and its reply."""
        parts: list[Sequence[Message]] = []
        at: int | None = number
        limit: int | None = None
        while at is not None:
            turn = self.turns[at]
            own = [*turn.messages, turn.reply]
            parts.append(own if limit is None else own[: max(0, limit - turn.kept)])
            limit = turn.kept if limit is None else min(limit, turn.kept)
            at = turn.base
        return [message for part in reversed(parts) for message in part]

    # -- making the prompt

    def _placed_after(
        self, asked: Asked, keys: list[Key], base: Recorded, count: int, ambiguous: bool
    ) -> Placement | str:
        """The prompt after a recorded turn; why it cannot be had where the bridge is refused."""
        new = asked.messages[count:]
        stream = self._stream(base)
        repairs = tuple(_differences(count - 1, asked.messages[count - 1], base.reply))
        if asked.continued:
            if new or base.finish_reason not in _UNFINISHED or base.notes.get("stopped_by"):
                return "the last message is to be continued: what came before it is rendered with it"
            nothing = np.empty(0, np.int32)
            wire = self._wire(base, nothing)
            return Placement(
                asked,
                keys,
                base,
                stream,
                nothing,
                Kind.CONTEXT,
                [],
                wire,
                True,
                ambiguous,
                repairs=repairs,
                matcher=self.matcher,
            )
        bridged = self._bridged(asked, base, new, self.conversation(base.number)[:-1])
        if isinstance(bridged, BridgeRefusal):
            return str(bridged)
        return Placement(
            asked,
            keys,
            base,
            np.concatenate([stream, bridged.new_ids]),
            bridged.new_ids,
            bridged.kinds,
            bridged.new.message_spans(),
            self._wire(base, bridged.new_ids),
            ambiguous=ambiguous,
            repairs=repairs,
            notes=tuple(bridged.notes),
            matcher=self.matcher,
        )

    def _bridged(self, asked: Asked, base: Recorded, new: Messages, before: Messages) -> BridgedTokens | BridgeRefusal:
        """What comes after a recorded turn; `before` is the conversation that the turn answered."""
        stream = self._stream(base)
        ids, new = (stream[: base.start], stream[base.start :]), with_written_ids(new, base.notes)
        bridged = asked.renderer.bridge(*ids, new, tools=asked.tools)
        if isinstance(bridged, BridgeRefusal):
            bridged = asked.renderer.bridge(*ids, new, tools=asked.tools, messages=readable_calls(before))
        return bridged

    def _rendered(self, asked: Asked, keys: list[Key], ambiguous: bool, refusal: str) -> Placement:
        """The prompt of a conversation that goes on from no recorded turn."""
        how = {"add_generation_prompt": not asked.continued, "continue_final_message": asked.continued}
        rendered, unread = render_readably(asked.renderer, asked.messages, tools=asked.tools, **how)
        ids = np.asarray(rendered.ids, np.int32)
        if asked.continued:
            self._check_open_end(ids, "messages")
        notes = tuple(str(note) for note in (*rendered.notes, *rendered.lost, *unread))
        placed = _whole(asked, keys, ids, message_spans(rendered.messages))
        return replace(placed, ambiguous=ambiguous, refusal=refusal, notes=notes)

    def _check_open_end(self, ids: Ids, field: str) -> None:
        """InputError for a prompt that is a recorded stream to its end, where the model had ended its turn itself."""
        if not self.turns:
            return
        branch = self.trajectory.shared_prefix(ids).extends
        if branch < 0 or self._tip(branch) != len(ids):
            return
        last = self.trajectory.turns(branch)[-1]
        if len(last) and last.finish_reason not in _UNFINISHED:
            raise InputError("is a recorded turn to its end, which the model ended itself: add a message", field=field)

    def _wire(self, base: Recorded, new_ids: Ids) -> tuple[bytes, ...]:
        """The prompt as JSON text: the record keeps that of its stream, so that only what is new is written.

        It is made at once: when an engine wants it, somebody else may be reading the record in another thread.
        """
        if base.stop != self._tip(base.branch):
            return (b"[", _numbers(np.concatenate([self._stream(base), new_ids])), b"]")
        *first, last = self.trajectory.wire_parts(base.branch)
        return (*first, last.removesuffix(b"]"), b"," if len(new_ids) else b"", _numbers(new_ids), b"]")

    # -- why it branches

    def _why(self, placed: Placement) -> Finding | None:
        """Why a turn does not go on from the end of a branch; None where it does, or is the first."""
        base, keys = placed.base, placed.keys
        if not self.turns or (base is not None and base.stop == self._tip(base.branch)):
            return None
        if placed.choice:
            return Finding(Cause.RETRY, words=f"choice {placed.choice} of one request")
        if placed.ambiguous:
            return Finding(Cause.AMBIGUOUS, words="several recorded turns match the request; none of them was guessed")
        if placed.asked.prompt_ids is not None:
            shared = self.trajectory.shared_prefix(placed.ids).length
            return Finding(Cause.EDIT, words=f"its ids leave the record after the first {shared}")
        if placed.edit is not None:
            return placed.edit
        if placed.refusal:
            return Finding(Cause.TEMPLATE, words=f"no bridge from the recorded turn: {placed.refusal}")
        asked, sent = placed.asked, placed.asked.messages
        if asked.continued:  # what was begun for the model is no reply of its own
            sent, keys = sent[:-1], keys[:-1]
        shared = self._known(keys)
        if all(message.get("role") in INSTRUCTIONS for message in sent[:shared]):
            for root, (tools, variables) in list(self.roots.items())[-_FEW:]:
                other = chain(root, sent, self.means)
                same = self._known(other) if root != asked.root else 0
                if any(message.get("role") not in INSTRUCTIONS for message in sent[:same]):
                    return changed_tools(asked.tools, tools, asked.variables, variables)
                if same > shared:
                    shared, keys = same, other
        number = self._seen[keys[shared]][0] if keys[shared] in self._seen else 0
        if (edited := self._first_edit(asked, self.turns[number], sent[:shared])) is not None:
            return changed_message(edited, sent[edited], self.conversation(number)[edited])
        return find_cause(sent, self._longest(number), shared, others=self._latest())

    def _known(self, keys: Sequence[Key]) -> int:
        """How many messages a conversation shares with the record."""
        return max(at for at, key in enumerate(keys) if at == 0 or key in self._seen)

    def _latest(self) -> list[list[Message]]:
        """The conversations that were continued last."""
        tips: dict[int, int] = {}
        for turn in reversed(self.turns):
            tips.setdefault(turn.branch, turn.number)
            if len(tips) == _FEW:
                break
        return [self.conversation(number) for number in tips.values()]

    def _longest(self, number: int) -> list[Message]:
        """The longest recorded conversation that goes on from a turn."""
        last = number
        for turn in self.turns[number + 1 :]:
            if turn.base == last and turn.kept == self.turns[last].depth:
                last = turn.number
        return self.conversation(last)

    # -- recording the turn

    def commit(
        self,
        placed: Placement,
        completion: Completion,
        reply: Message,
        *,
        notes: Mapping[str, Any],
        sampling: Mapping[str, Any],
    ) -> tuple[Recorded, TurnRecord]:
        """Add a turn to the trajectory; returns it, and what a store has to store of it."""
        if placed.matcher != self.matcher:  # the session has got another one since
            placed = replace(placed, keys=self._keys(placed.asked), matcher=self.matcher)
        asked, first = placed.asked, self.trajectory.num_writes
        base = None if placed.base is None else self.turns[placed.base.number]
        at_tip = base is not None and base.stop == self._tip(base.branch)
        extends = -1 if at_tip or not self.turns else self.trajectory.shared_prefix(placed.ids).extends
        cause = None if extends >= 0 else self._why(placed)
        branch = self._open(placed, base, extends, "" if cause is None else cause.cause.value)
        # a prompt that is all recorded ends with a completion: one that was cut off, or that was empty and is retried
        goes_on = self.trajectory.num_writes == first
        written = self.trajectory.append_completion(
            completion.ids,
            completion.logprobs,
            finish_reason=str(completion.finish_reason),
            version=completion.versions or None,
            logprobs_kind=completion.logprobs_kind,
            cached_tokens=completion.cached_tokens,
            sampling=sampling,
            continues=goes_on,
            branch=branch,
        )
        own = asked.messages[:-1] if asked.continued else asked.messages
        kept = 0 if base is None else min(base.depth, len(own))
        info: dict[str, Any] = {
            "base": None if base is None else base.number,
            "kept": kept,
            "messages": [dict(message) for message in own[kept:]],
            "reply": dict(reply),
            "root": asked.root.hex(),
            "branch": branch,
            "start": written.start,
            "stop": written.stop,
            "finish_reason": written.finish_reason,
            "cause": None if cause is None else asdict(cause),
            "notes": {**notes, "repairs": list(placed.repairs), "notes": list(placed.notes), "reused": placed.reused},
        }
        if asked.root not in self.roots:
            info |= {"tools": asked.tools, "variables": dict(asked.variables)}
        keys = placed.keys[kept : len(own) + 1]
        turn = self._add(len(self.turns), info, keys)
        info |= {"matcher": self.matcher, "keys": [key.hex() for key in (*keys, turn.key)]}
        records = tuple(write_records(self.trajectory, first))
        channels = pack_channels(completion.channels)
        sizes = {"sampled": len(completion.ids), "prompted": len(placed.ids)}
        return turn, TurnRecord(turn.number, first, records, info, channels, **sizes)

    def _open(self, placed: Placement, base: Recorded | None, extends: int, cause: str) -> int:
        """Write the prompt's new tokens; returns the branch they are in. `extends`: the branch that the prompt extends.

        A prompt that extends none shares with the record whatever its ids share with it, and branches there.
        """
        trajectory, count = self.trajectory, len(placed.asked.messages)
        if base is not None and base.stop == self._tip(base.branch):
            if not placed.continues:
                trajectory.append_context(
                    placed.new_ids,
                    placed.kinds,
                    message_spans=placed.spans,
                    messages=max(0, count - base.depth),
                    branch=base.branch,
                )
            return base.branch
        if not trajectory.num_writes:
            trajectory.begin(placed.ids, messages=count, message_spans=placed.spans)
            return 0
        spans, kinds = placed.spans, None
        if base is not None:
            spans = [(start + base.stop, stop + base.stop, message + base.depth) for start, stop, message in spans]
            kinds = np.full(len(placed.ids), Kind.CONTEXT, np.uint8)
            kinds[base.stop :] = placed.kinds
        if extends >= 0:
            if len(placed.ids) > self._tip(extends):
                count = max(count, trajectory.message_count(extends))
                trajectory.extend_to(placed.ids, kinds, message_spans=spans, messages=count, branch=extends)
            return extends
        total = None if placed.asked.prompt_ids is not None else count
        return trajectory.branch(placed.ids, kinds=kinds, message_spans=spans, messages=total, cause=cause)

    def replay(self, record: TurnRecord) -> None:
        """Add a turn that was read from a store."""
        replay_records(self.trajectory, record.records)
        info = record.info
        base = None if info["base"] is None else self.turns[info["base"]]
        if info["matcher"] == self.matcher:  # as they were when the agent's own ids were there
            keys = [bytes.fromhex(key) for key in info["keys"][:-1]]
        elif base is None or info["kept"] < base.depth - 1:
            past = [] if base is None else self.conversation(base.number)[: info["kept"]]
            keys = chain(bytes.fromhex(info["root"]), [*past, *info["messages"]], self.means)[len(past) :]
        elif info["kept"] == base.depth:
            keys = chain(base.before, [base.reply, *info["messages"]], self.means)[1:]
        else:
            keys = [base.before]
        self._add(record.number, info, keys)

    def _add(self, number: int, info: Mapping[str, Any], keys: Sequence[Key]) -> Recorded:
        """Add a turn of which a store has this. `keys` are those of its own messages: before the first, after each."""
        root, reply, cause = bytes.fromhex(info["root"]), info["reply"], info["cause"]
        turn = Recorded(
            number=number,
            base=info["base"],
            kept=info["kept"],
            messages=tuple(info["messages"]),
            reply=reply,
            before=keys[-1],
            key=chain(keys[-1], [reply], self.means)[-1],
            root=root,
            depth=info["kept"] + len(info["messages"]) + 1,
            branch=info["branch"],
            start=info["start"],
            stop=info["stop"],
            finish_reason=info["finish_reason"],
            cause=None
            if cause is None
            else Finding(Cause(cause["cause"]), message=cause["message"], words=cause["words"]),
            notes=info["notes"],
        )
        self.turns.append(turn)
        self.roots.setdefault(root, (info.get("tools"), info.get("variables") or {}))
        self._by_key.setdefault(turn.key, []).append(number)
        said = next_key(b"", self.means(reply))
        self._spoken.add(said)
        if thought := reasoning(reply):
            self._thoughts.setdefault(thought, set()).add(said)
        for at, key in enumerate((*keys, turn.key), turn.kept):
            self._seen.setdefault(key, (number, at))
        return turn


def _shared(one: Messages, other: Messages) -> int:
    """How many messages two conversations begin with alike."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if not identical(mine, theirs):
            break
        count += 1
    return count


def _differences(at: int, said: Message, recorded: Message) -> Iterator[str]:
    """How an echo of a reply differs from it, field by field. Both mean the same."""
    for name in sorted({*said, *recorded}):
        if said.get(name) != recorded.get(name) and (said.get(name) or recorded.get(name)):
            yield f"message {at}: {name} {'written another way' if said.get(name) else 'left out'}"


def _whole(asked: Asked, keys: list[Key], ids: Ids, spans: list[tuple[int, int, int]]) -> Placement:
    """A prompt that goes on from no recorded turn."""
    return Placement(asked, keys, None, ids, ids, Kind.PROMPT, spans, lambda: (b"[", _numbers(ids), b"]"))


def _numbers(ids: Ids) -> bytes:
    return ",".join(map(str, ids.tolist())).encode("ascii")
