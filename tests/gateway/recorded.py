"""Sessions for tests, recorded without a server: real prompts of a renderer, completions that a test chooses."""

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
    """A session, and what its engine saw and sampled in each turn."""

    renderer: Renderer
    session: SessionRecord = field(default_factory=lambda: SessionRecord(Trajectory(name="recorded")))
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    turns: list[RecordedTurn] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)

    def asked(self, messages: Sequence[Message], tools: Sequence[Message] | None = TOOLS) -> Conversation:
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
        """A turn in which the engine samples these ids after these messages, not recorded yet."""
        number, before = len(self.turns), self.session.trajectory.num_writes
        placed = self.session.place(self.asked(messages, tools))
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8 - number
        spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
        completion = Completion(
            np.array(ids, np.int32), logprobs, reason, spans, number, LogprobKind.PROCESSED, channels or {}
        )
        response = self.renderer.parse_response(list(ids), tools=tools, prompt_ids=placed.ids)
        reply = response.to_message(call_id=lambda index: f"call{number:03}{index:02}")
        about = {"response": f"r{number}", "dialect": "chat", "model": "pocket", **details}
        prepared = self.session.prepare(placed, completion, reply, about, {"temperature": 1.0})
        assert (len(self.session.turns), self.session.trajectory.num_writes) == (number, before), "nothing has changed"
        self.prompts.append(placed.ids.tolist())
        self.completions.append(completion)
        return prepared

    def apply(self, prepared: PreparedTurn) -> RecordedTurn:
        """Record a turn. A branch shares all that is recorded."""
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
    """A scripted agent over one session: the model samples what a test says, and all that is recorded is checked."""

    def __init__(self, family: str) -> None:
        super().__init__(make_renderer(family))

    def ask(self, messages: Sequence[Message], script: Message, tools: Sequence[Message] | None = TOOLS) -> Message:
        wire = json.loads(json.dumps(list(messages)))
        return self.apply(self.prepare(wire, self._completion(script, tools), tools)).reply

    def _completion(self, script: Message, tools: Sequence[Message] | None) -> list[int]:
        """The ids that a model samples when it says this: those of its turn in a conversation of two messages."""
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
        """What the engine saw and sampled is what is recorded and exported, each sampled token with loss once."""
        made = {row.branch: row for row in trajectory_samples(self.session.trajectory)}
        assert len(made) == rows
        for turn, prompt, completion in zip(self.turns, self.prompts, self.completions, strict=True):
            row = made[turn.branch]
            assert row.ids[: turn.stop].tolist() == [*prompt, *completion.ids.tolist()]
            assert row.mask[turn.start : turn.stop].all()
            assert row.logprobs is not None
            assert row.logprobs[turn.start : turn.stop].tolist() == completion.logprobs.tolist()
        sampled = sum(len(completion.ids) for completion in self.completions)
        assert sum(int(row.mask.sum()) for row in made.values()) == sampled
        self._check_replay()

    def replayed(self) -> SessionRecord:
        again = SessionRecord(Trajectory(name="recorded"))
        for record in self.records:
            again.replay(record)
        return again

    def _check_replay(self) -> None:
        again = self.replayed()
        assert again.turns == self.session.turns
        for branch in range(self.session.trajectory.num_branches):
            assert again.trajectory.stream(branch).tolist() == self.session.trajectory.stream(branch).tolist()
        last = self.asked([*self.session.conversation(len(self.turns) - 1), user("And then?")])
        assert again.place(last).ids.tolist() == self.session.place(last).ids.tolist()


class Recording(Recorder):
    def __init__(self, store: Store, id: str, renderer: Renderer) -> None:
        super().__init__(renderer, SessionRecord(Trajectory(name=id)))
        self.store, self.id = store, id

    async def begin(self, **about: Any) -> Recording:
        await self.store.create(SessionInfo(self.id, State.OPEN, about.pop("created", 1.0), **about))
        return self

    async def turn(self, messages: Sequence[Message], said: Sequence[int], **more: Any) -> RecordedTurn:
        """Record that the engine said this after these messages, and its stop token unless it has another reason."""
        stops = more.get("reason", FinishReason.STOP) is FinishReason.STOP
        ids = [*said, *(self.renderer.get_stop_token_ids()[:1] if stops else [])]
        prepared = self.prepare(messages, ids, **more)
        await self.store.append(self.id, prepared.record, request=f"q{prepared.turn.number}")
        return self.apply(prepared)


async def random_tree(recording: Recording, chance: random.Random, turns: int) -> None:
    """Conversations that go on, go back, say something else in the middle, and begin anew; some end cut off."""
    pasts: list[list[Message]] = [[]]
    for number in range(turns):
        past = chance.choice(pasts)
        match chance.randrange(5):
            case 0 if past:  # an earlier point
                past = past[: chance.randrange(0, len(past), 2)]
            case 1 if len(past) > 2:  # an edit
                at = chance.randrange(0, len(past), 2)
                past = [*past[:at], user(f"another {number}"), *past[at + 1 :]]
            case 2:
                past = []
            case 3 if past:  # the same request again
                past = past[:-2]
        asked = [*past, user(chance.choice(["a", "b", f"question {number}"]))]
        said = [chance.randrange(300, 500) for _ in range(chance.randrange(6))]
        reason = chance.choice([FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH])
        channels = {"entropy": [number] * (len(said) + (reason is FinishReason.STOP))}
        turn = await recording.turn(asked, said, reason=reason, channels=channels)
        pasts.append([*asked, dict(turn.reply)])
