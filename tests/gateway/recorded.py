"""Sessions for tests, recorded without a server: real prompts of a renderer, and completions that are made up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tokentrace import Renderer
from tokentrace.diagnose.message_keys import root_key
from tokentrace.engines.protocol import Completion, FinishReason
from tokentrace.gateway.session import SessionRecord
from tokentrace.gateway.turns import Conversation, RecordedTurn, TurnDetails
from tokentrace.store.packing import pack_channels
from tokentrace.store.store import SessionInfo, State, Store
from tokentrace.trajectory import Trajectory
from tokentrace.trajectory.turns import LogprobKind, VersionSpan

Message = dict[str, Any]


@dataclass
class Recording:
    """A session that is being recorded, and what the engine saw and said in each of its turns."""

    store: Store
    id: str
    renderer: Renderer
    session: SessionRecord = field(init=False)
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session = SessionRecord(Trajectory(name=self.id))

    async def begin(self, **about: Any) -> Recording:
        await self.store.create(SessionInfo(self.id, State.OPEN, about.pop("created", 1.0), **about))
        return self

    async def turn(
        self,
        messages: Sequence[Message],
        said: Sequence[int],
        *,
        channels: Mapping[str, Sequence[Any]] | None = None,
        reason: FinishReason = FinishReason.STOP,
        version: str | int = 1,
        **details: Any,
    ) -> RecordedTurn:
        """Record that the engine said this after these messages, and ended with its stop token if it was to stop."""
        number = len(self.prompts)
        placed = self.session.place(Conversation(messages, None, self.renderer, root_key(None, {}, "")))
        ids = [*said, *(self.renderer.get_stop_token_ids()[:1] if reason is FinishReason.STOP else [])]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8 - number
        spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
        completion = Completion(
            np.array(ids, np.int32), logprobs, reason, spans, number, LogprobKind.PROCESSED, channels or {}
        )
        response = self.renderer.parse_response(ids, prompt_ids=placed.ids)
        details = {"response": f"r{number}", "dialect": "chat", "model": "pocket", **details}
        recorded, record = self.session.commit(
            placed, completion, response.to_message(), TurnDetails(**details), {"temperature": 1.0}
        )
        record = replace(record, channels=pack_channels(completion.channels))
        await self.store.append(self.id, record, request=f"q{number}")
        self.prompts.append(placed.ids.tolist())
        self.completions.append(completion)
        return recorded


def user(text: str) -> Message:
    return {"role": "user", "content": text}


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
        turn = await recording.turn(
            asked, said, reason=reason, channels={"entropy": [number] * (len(said) + (reason is FinishReason.STOP))}
        )
        pasts.append([*asked, dict(turn.reply)])
