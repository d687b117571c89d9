"""Rollouts built from finished conversations: each assistant message becomes the completion that an engine would
have sampled, and the messages between two of them become the new messages of a bridge.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.conversations import Conversation, Message
from tokentrace import BridgedTokens, BridgeRefusal, RenderedTokens, Renderer, TokentraceError
from tokentrace.tokens import Kind


@dataclass(frozen=True, slots=True)
class Cut:
    """A conversation cut after one assistant turn.

    `prompt` is the engine's prompt, `completion` what it sampled, `new` the messages that follow, and `full` the render
    of everything with a generation prompt. `stop` is where the turn ends in `full`; None if `full` lacks that turn.
    """

    at: int
    prompt: list[int]
    completion: list[int]
    new: list[Message]
    tools: Any
    full: RenderedTokens
    stop: int | None

    @property
    def stream(self) -> list[int]:
        return [*self.prompt, *self.completion]

    @property
    def append_only(self) -> bool:
        return self.full.token_ids[: len(self.stream)] == self.stream

    def bridge(self, renderer: Renderer, **settings: Any) -> BridgedTokens | BridgeRefusal:
        return renderer.bridge(self.prompt, self.completion, self.new, tools=self.tools, **settings)


def rendered(renderer: Renderer, messages: Sequence[Message], tools: Any, prompt: bool) -> RenderedTokens | None:
    try:
        return renderer.render(list(messages), tools=tools, add_generation_prompt=prompt)
    except TokentraceError:
        return None


def completion_of(partial: RenderedTokens, full: RenderedTokens, message: int) -> list[int] | None:
    """The turn of a message as rendered last; a template may leave it open, so its stop token is from `full`."""
    turn = next((turn for turn in partial.turns if turn.message == message), None)
    if turn is None:
        return None
    later = next((turn for turn in full.turns if turn.message == message), None)
    stop = later.stop_token if turn.stop_token is None and later is not None else None
    return partial.token_ids[turn.start : turn.stop] + ([] if stop is None else [stop])


def cut_after(
    renderer: Renderer, messages: Sequence[Message], at: int, end: int, tools: Any, prompt: list[int] | None = None
) -> Cut | None:
    """The conversation up to message `end`, cut after message `at`; None if the template refuses a part."""
    if prompt is None:
        before = rendered(renderer, messages[:at], tools, True)
        prompt = None if before is None else before.token_ids
    partial = rendered(renderer, messages[: at + 1], tools, False)
    full = rendered(renderer, messages[:end], tools, True)
    if prompt is None or partial is None or full is None:
        return None
    completion = completion_of(partial, full, at)
    if completion is None:
        return None
    stop = next((turn.stop for turn in full.turns if turn.message == at), None)
    return Cut(at, prompt, completion, list(messages[at + 1 : end]), tools, full, stop)


def turn_ends(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """The index of each assistant message but one that comes first, and where the messages after it end."""
    indices = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for at, end in itertools.pairwise([*indices, len(messages)]):
        if at:
            yield at, end


def cuts(renderer: Renderer, conversation: Conversation) -> Iterator[Cut]:
    for at, end in turn_ends(conversation.messages):
        cut = cut_after(renderer, conversation.messages, at, end, conversation.tools) if end > at + 1 else None
        if cut is not None:
            yield cut


# -- what holds for every bridge


def check_extension(cut: Cut, bridged: BridgedTokens) -> None:
    """The next prompt begins with the stream, id for id; each new id has a kind and a message, and none is sampled."""
    stream = cut.stream
    assert bridged.stream_length == len(stream)
    assert bridged.token_ids[: len(stream)] == stream
    assert bridged.token_ids[len(stream) :] == bridged.new_ids.tolist()
    assert len(bridged.new_ids) == len(bridged.kinds) == len(bridged.messages)
    assert set(bridged.kinds.tolist()) <= {Kind.CONTEXT, Kind.SCAFFOLD, Kind.SYNTHETIC}
    assert all(-1 <= index < len(cut.new) for index in bridged.messages.tolist())
    assert (bridged.messages[bridged.kinds == Kind.CONTEXT] >= 0).all()
    synthetic = np.flatnonzero(bridged.kinds == Kind.SYNTHETIC)
    assert synthetic.tolist() == list(range(len(synthetic))), "only what closes the turn is synthetic"
    assert bridged.closed == bool(len(synthetic))


def check_credit(cut: Cut, bridged: BridgedTokens) -> None:
    """Every new message that the full render shows has its text in the bridge, as context."""
    visible = {
        int(origin[1]) - cut.at - 1
        for origin in cut.full.origins
        if origin is not None and origin[0] == "messages" and len(origin) > 2 and origin[2] != "role"
    }
    credited = set(bridged.messages[bridged.kinds == Kind.CONTEXT].tolist())
    assert {index for index in visible if index >= 0} <= credited
