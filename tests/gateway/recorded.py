"""Sessions recorded without a server: real prompts of a renderer, completions chosen by the test."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.conversations import user
from tests.support import make_renderer
from tokentrace import Renderer, trajectory_samples
from tokentrace.diagnose.message_keys import root_key
from tokentrace.engines.protocol import Completion, FinishReason
from tokentrace.errors import TemplateError
from tokentrace.gateway.session import SessionRecord
from tokentrace.gateway.turns import Conversation, PreparedTurn, RecordedTurn
from tokentrace.store.store import SessionInfo, State, Store, TurnRecord
from tokentrace.tokens.ids import common_prefix
from tokentrace.trajectory import Trajectory
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

Message = Mapping[str, Any]


def tool(name: str, *arguments: str) -> Message:
    properties = {each: {"type": "string", "description": f"The {each}."} for each in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [tool("get_weather", "city", "day"), tool("read_file", "path")]


def say(content: str, reasoning: str = "") -> Message:
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


def use(name: str, content: str = "", reasoning: str = "", **arguments: Any) -> Message:
    calls = [{"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {**say(content, reasoning), "tool_calls": calls}


def results(reply: Message, *texts: str) -> list[Message]:
    calls = reply.get("tool_calls") or ()
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]


@dataclass
class Recorder:
    """A session, with the prompt and the completion of each turn."""

    renderer: Renderer
    session: SessionRecord = field(default_factory=lambda: SessionRecord(Trajectory(name="recorded")))
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    turns: list[RecordedTurn] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Message] | None = TOOLS) -> Conversation:
        return Conversation(list(messages), tools, self.renderer, root_key(tools, {}, ""))

    def prepare(
        self,
        messages: Sequence[Message],
        ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        *,
        channels: Mapping[str, Sequence[Any]] | None = None,
        reason: FinishReason = FinishReason.STOP,
        version: str | int = 1,
        **details: Any,
    ) -> PreparedTurn:
        """Prepare, but do not record, a turn in which the engine samples these ids after these messages."""
        number, before = len(self.turns), self.session.trajectory.num_writes
        placed = self.session.place(self.conversation(messages, tools))
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8 - number
        spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
        completion = Completion(
            np.array(ids, np.int32), logprobs, reason, spans, number, LogprobKind.PROCESSED, channels or {}
        )
        response = self.renderer.parse_response(list(ids), tools=tools, prompt_ids=placed.ids)
        reply = response.to_message(call_id=lambda index: f"call{number:03}{index:02}")
        info = {"response": f"r{number}", "dialect": "chat", "model": "pocket", **details}
        prepared = self.session.prepare(placed, completion, reply, info, {"temperature": 1.0})
        assert (len(self.session.turns), self.session.trajectory.num_writes) == (number, before), "nothing has changed"
        self.prompts.append(placed.ids.tolist())
        self.completions.append(completion)
        return prepared

    def apply(self, prepared: PreparedTurn) -> RecordedTurn:
        """Record a turn. A new branch must share the longest recorded prefix."""
        trajectory, turn = self.session.trajectory, prepared.turn
        before = [trajectory.stream(branch) for branch in range(trajectory.num_branches)]
        self.session.apply(prepared)
        if before and turn.branch == len(before):
            longest = max(common_prefix(stream, np.array(self.prompts[-1], np.int32)) for stream in before)
            assert self.session.trajectory.branches[turn.branch].start == longest
        self.turns.append(turn)
        self.records.append(prepared.record)
        return turn


class Bench(Recorder):
    """A scripted agent in one session: the model samples what the test chooses, and `check` checks the record."""

    def __init__(self, family: str) -> None:
        super().__init__(make_renderer(family))

    def ask(self, messages: Sequence[Message], script: Message, tools: Sequence[Message] | None = TOOLS) -> Message:
        wire = json.loads(json.dumps(list(messages)))
        return self.apply(self.prepare(wire, self._completion(script, tools), tools)).reply

    def _completion(self, script: Message, tools: Sequence[Message] | None) -> list[int]:
        """The ids of a scripted reply: those of its turn in a rendered conversation of two messages."""
        try:
            rendered = self.renderer.render([user("x"), script], tools=tools)
        except TemplateError:  # gpt-oss writes either reasoning or content before a call
            script = {name: value for name, value in script.items() if name != "reasoning_content"}
            rendered = self.renderer.render([user("x"), script], tools=tools)
        return [int(each) for each in rendered.ids[rendered.mask]]

    @property
    def causes(self) -> list[str | None]:
        return [None if turn.cause is None else turn.cause.cause.value for turn in self.turns]

    def check(self, rows: int) -> None:
        """Check that prompts and completions are recorded and exported, each sampled token with loss once."""
        samples = {row.branch: row for row in trajectory_samples(self.session.trajectory)}
        assert len(samples) == rows
        for turn, prompt, completion in zip(self.turns, self.prompts, self.completions, strict=True):
            row = samples[turn.branch]
            assert row.ids[: turn.stop].tolist() == [*prompt, *completion.ids.tolist()]
            assert row.mask[turn.start : turn.stop].all()
            assert row.logprobs is not None
            assert row.logprobs[turn.start : turn.stop].tolist() == completion.logprobs.tolist()
        sampled = sum(len(completion.ids) for completion in self.completions)
        assert sum(int(row.mask.sum()) for row in samples.values()) == sampled
        self._check_replay()

    def replayed(self) -> SessionRecord:
        session = SessionRecord(Trajectory(name="recorded"))
        for record in self.records:
            session.replay(record)
        return session

    def _check_replay(self) -> None:
        replayed = self.replayed()
        assert replayed.turns == self.session.turns
        for branch in range(self.session.trajectory.num_branches):
            assert replayed.trajectory.stream(branch).tolist() == self.session.trajectory.stream(branch).tolist()
        last = self.conversation([*self.session.conversation(len(self.turns) - 1), user("And then?")])
        assert replayed.place(last).ids.tolist() == self.session.place(last).ids.tolist()


class Recording(Recorder):
    def __init__(self, store: Store, id: str, renderer: Renderer) -> None:
        super().__init__(renderer, SessionRecord(Trajectory(name=id)))
        self.store, self.id = store, id

    async def begin(self, **fields: Any) -> Recording:
        await self.store.create(SessionInfo(self.id, State.OPEN, fields.pop("created", 1.0), **fields))
        return self

    async def turn(self, messages: Sequence[Message], sampled: Sequence[int], **details: Any) -> RecordedTurn:
        """Record a turn with these sampled ids, and the stop token if the finish reason is STOP."""
        stops = details.get("reason", FinishReason.STOP) is FinishReason.STOP
        ids = [*sampled, *(self.renderer.get_stop_token_ids()[:1] if stops else [])]
        prepared = self.prepare(messages, ids, **details)
        await self.store.append(self.id, prepared.record, request=f"q{prepared.turn.number}")
        return self.apply(prepared)


async def random_tree(recording: Recording, rng: random.Random, turns: int) -> None:
    """Record conversations that continue, go back, are edited, and begin anew; some replies are cut off."""
    pasts: list[list[Message]] = [[]]
    for number in range(turns):
        past = rng.choice(pasts)
        match rng.randrange(5):
            case 0 if past:  # an earlier point
                past = past[: rng.randrange(0, len(past), 2)]
            case 1 if len(past) > 2:  # an edit
                at = rng.randrange(0, len(past), 2)
                past = [*past[:at], user(f"another {number}"), *past[at + 1 :]]
            case 2:
                past = []
            case 3 if past:  # the same request again
                past = past[:-2]
        messages = [*past, user(rng.choice(["a", "b", f"question {number}"]))]
        sampled = [rng.randrange(300, 500) for _ in range(rng.randrange(6))]
        reason = rng.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
        channels = {"entropy": [number] * (len(sampled) + (reason is FinishReason.STOP))}
        turn = await recording.turn(messages, sampled, reason=reason, channels=channels)
        pasts.append([*messages, dict(turn.reply)])
