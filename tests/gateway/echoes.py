"""A scripted agent over one session, without HTTP: it says what the model samples, and checks what was recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support import make_renderer
from tokentrace import Renderer, trajectory_samples
from tokentrace.diagnose.message_keys import root_key
from tokentrace.engines.protocol import Completion, FinishReason
from tokentrace.errors import TemplateError
from tokentrace.gateway.session import SessionRecord
from tokentrace.gateway.turns import Conversation, RecordedTurn, TurnDetails
from tokentrace.store.store import TurnRecord
from tokentrace.tokens.ids import common_prefix
from tokentrace.trajectory import Trajectory

Message = Mapping[str, Any]


def tool(name: str, *arguments: str) -> Message:
    properties = {each: {"type": "string", "description": f"The {each}."} for each in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = [tool("get_weather", "city", "day"), tool("read_file", "path")]


def say(content: str, reasoning: str = "") -> Message:
    """What the model is to sample: words."""
    return {"role": "assistant", "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


def use(name: str, content: str = "", reasoning: str = "", **arguments: Any) -> Message:
    """What the model is to sample: a call."""
    calls = [{"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {**say(content, reasoning), "tool_calls": calls}


def results(reply: Message, *texts: str) -> list[Message]:
    """The results to a reply's calls."""
    calls = reply.get("tool_calls") or ()
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}
        for call, text in zip(calls, texts, strict=True)
    ]


@dataclass
class Bench:
    """A session, and all that an engine was given and sampled."""

    family: str
    session: SessionRecord = field(default_factory=lambda: SessionRecord(Trajectory(name="bench")))
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    turns: list[RecordedTurn] = field(default_factory=list)
    records: list[TurnRecord] = field(default_factory=list)

    @property
    def renderer(self) -> Renderer:
        return make_renderer(self.family)

    def asked(self, messages: Sequence[Message], tools: Sequence[Message] | None = TOOLS) -> Conversation:
        return Conversation(list(messages), tools, self.renderer, root_key(tools, {}, ""))

    def ask(self, messages: Sequence[Message], script: Message, tools: Sequence[Message] | None = TOOLS) -> Message:
        """Send a conversation; the model samples the script. Returns the reply as the agent is told it."""
        wire = json.loads(json.dumps(list(messages)))
        placed = self.session.place(self.asked(wire, tools))
        trajectory = self.session.trajectory
        before = [trajectory.stream(branch).copy() for branch in range(len(trajectory.branches))]
        parts = placed.wire() if callable(placed.wire) else placed.wire
        assert json.loads(b"".join(parts)) == placed.ids.tolist()
        ids = self.completion(script, tools)
        response = self.renderer.parse_response(ids, tools=tools, prompt_ids=placed.ids)
        number = len(self.turns)
        reply = response.to_message(call_id=lambda index: f"call{number:03}{index:02}")
        logprobs = np.linspace(-1, -0.5, len(ids)).astype(np.float32)
        completion = Completion(np.array(ids, np.int32), logprobs, FinishReason.STOP)
        turn, record = self.session.commit(placed, completion, reply, TurnDetails(), {})
        if before and turn.branch == len(before):
            longest = max(common_prefix(stream, placed.ids) for stream in before)
            assert trajectory.branches[turn.branch].start == longest, "a branch shares all that is recorded"
        self.prompts.append(placed.ids.tolist())
        self.sampled.append(ids)
        self.turns.append(turn)
        self.records.append(record)
        return reply

    def completion(self, script: Message, tools: Sequence[Message] | None) -> list[int]:
        """The ids that a model samples when it says this: those of its turn in a conversation of two messages."""
        ask = {"role": "user", "content": "x"}
        try:
            rendered = self.renderer.render([ask, script], tools=tools)
        except TemplateError:  # gpt-oss writes either reasoning or content before a call
            script = {name: value for name, value in script.items() if name != "reasoning_content"}
            rendered = self.renderer.render([ask, script], tools=tools)
        return [int(each) for each in rendered.ids[rendered.mask]]

    @property
    def causes(self) -> list[str | None]:
        return [None if turn.cause is None else turn.cause.cause.value for turn in self.turns]

    def check(self, rows: int) -> None:
        """What the engine saw and sampled is what is recorded and exported, each sampled token with loss once."""
        trajectory = self.session.trajectory
        made = {row.branch: row for row in trajectory_samples(trajectory)}
        assert len(made) == rows
        for turn, prompt, sampled in zip(self.turns, self.prompts, self.sampled, strict=True):
            row = made[turn.branch]
            assert row.ids[: turn.start].tolist() == prompt
            assert row.ids[turn.start : turn.stop].tolist() == sampled
            assert row.mask[turn.start : turn.stop].all()
            assert row.logprobs is not None
            assert np.isfinite(row.logprobs[turn.start : turn.stop]).all()
        assert sum(int(row.mask.sum()) for row in made.values()) == sum(map(len, self.sampled))
        self._check_replay()

    def _check_replay(self) -> None:
        """What a store gives back is the same session."""
        again = SessionRecord(Trajectory(name="bench"))
        for record in self.records:
            again.replay(record)
        assert again.turns == self.session.turns
        for branch in range(len(self.session.trajectory.branches)):
            assert again.trajectory.stream(branch).tolist() == self.session.trajectory.stream(branch).tolist()
        last = self.asked([*self.session.conversation(len(self.turns) - 1), {"role": "user", "content": "And then?"}])
        assert again.place(last).ids.tolist() == self.session.place(last).ids.tolist()
