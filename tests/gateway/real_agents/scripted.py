"""An engine for agents: it samples a script's turns, in tokens that encoding their text would not give."""

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokentrace import Renderer
from tokentrace.engines import Completion, Delta, EngineReply, GenerateRequest, SamplingParams, ScriptedEngine
from tokentrace.tokens.tokenizer import Ids


@dataclass(frozen=True)
class Turn:
    """One turn of the model: its parts as written. Arguments are JSON text, spaced as models space it."""

    content: str = ""
    calls: Sequence[tuple[str, str]] = ()
    reasoning: str = ""


@dataclass(frozen=True)
class Exchange:
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


def hermes(turn: Turn, stop: str) -> str:
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in turn.calls
    ]
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    return thought + "\n".join([*([turn.content] if turn.content else []), *calls]) + stop


def oddly_encoded(renderer: Renderer, text: str) -> list[int]:
    """Ids that decode to a text, cut so that encoding the text gives others. Control tokens stay whole."""
    tokenizer = renderer.tokenizer
    canonical = [int(each) for each in tokenizer.encode(text)]
    is_control = tokenizer.vocabulary.is_control
    ids: list[int] = []
    for each in canonical:
        piece = tokenizer.decode([each])
        if is_control[each] or len(piece) < 4 or "\N{REPLACEMENT CHARACTER}" in piece:
            ids.append(each)
        else:
            ids += [int(part) for half in (piece[:2], piece[2:]) for part in tokenizer.encode(half)]
    assert tokenizer.decode(ids) == text
    return ids


@dataclass(frozen=True)
class Story:
    """The model's turns for one agent, whose prompts contain `about`. A repeated prompt gets the same turn."""

    turns: Sequence[Turn]
    about: str = ""


@dataclass
class Stage:
    """The stories of a gateway's sessions, and the exchanges of each."""

    renderer: Renderer
    stop: str
    stories: dict[str, Story] = field(default_factory=dict)
    exchanges: defaultdict[str, list[Exchange]] = field(default_factory=lambda: defaultdict(list))
    _prompts: defaultdict[str, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """By session, the distinct prompts that its story has answered."""
    _sampled: int = 0

    def answer(self, session: str, prompt: Ids) -> EngineReply:
        story, prompts = self.stories[session], self._prompts[session]
        text = self.renderer.tokenizer.decode(prompt.tolist())
        if story.about in text:
            if prompt.tobytes() not in prompts:
                prompts.append(prompt.tobytes())
            turn = story.turns[prompts.index(prompt.tobytes())]
        else:
            turn = Turn("OK")
        ids = oddly_encoded(self.renderer, hermes(turn, self.stop))
        logprobs = [-(self._sampled + at) / 2**16 for at in range(1, len(ids) + 1)]
        self._sampled += len(ids)
        self.exchanges[session].append(Exchange([int(each) for each in prompt], ids, logprobs))
        return EngineReply(ids, logprobs)

    def remaining_turns(self, session: str) -> int:
        return len(self.stories[session].turns) - len(self._prompts[session])


def check_rows(stage: Stage, session: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Check that every turn is in a row, with loss in exactly one, and that only sampled tokens have logprobs."""
    exchanges = stage.exchanges[session]
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(len(each.ids) for each in exchanges)
    for each in exchanges:
        start, stream = len(each.prompt), [*each.prompt, *each.ids]
        holding = [row for row in rows if row["input_ids"][: len(stream)] == stream]
        trained = [row for row in holding if all(row["loss_mask"][start : len(stream)])]
        logprobs = [np.asarray(row["logprobs"][start : len(stream)], np.float32) for row in trained]
        # logprobs are unique, so they tell a turn from one that was sampled again with the same tokens
        assert sum(np.array_equal(some, np.asarray(each.logprobs, np.float32)) for some in logprobs) == 1
    for row in rows:
        sampled = {at for span in row["completions"] for at in range(span["start"], span["stop"])}
        assert {at for at, logprob in enumerate(row["logprobs"]) if logprob is not None} == sampled
        assert {at for at, one in enumerate(row["loss_mask"]) if one} <= sampled


class StoryEngine(ScriptedEngine):
    def __init__(self, stage: Stage) -> None:
        super().__init__(lambda *_: [], vocab_size=stage.renderer.tokenizer.vocabulary.size)
        self._stage = stage

    async def _generate(self, request: GenerateRequest) -> Completion:
        return await self._scripted(request)._generate(request)

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        return self._scripted(request)._stream(request)

    def _scripted(self, request: GenerateRequest) -> ScriptedEngine:
        def script(prompt: Ids, sampling: SamplingParams) -> EngineReply:
            return self._stage.answer(str(request.session), prompt)

        return ScriptedEngine(script, piece=5, vocab_size=self.capabilities.vocab_size)
