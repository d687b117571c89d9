"""Turns: where each one is in a rendering.

The trace says in whose turn each span was written (`turn_spans`). Some templates print their
whole output at the end, so scaffold has no owner. For these, `find_turns` renders the
conversation up to each turn and with it, unless the template rewrites the past.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ..computed import computed
from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..template.trace import Rendering
from ..tokens.tokenizer import Tokenizer

Run = Callable[[Messages, bool], Rendering]
TryRun = Callable[[Messages, bool], Rendering | None]


@dataclass(slots=True)
class TurnSpan:
    """A stretch of text written in one message's turn."""

    message: int
    start: int
    end: int
    body: int
    """Where the message's first field begins (`end` if there is none)."""
    body_end: int
    """Where its last field ends (`start` if there is none)."""
    before: int
    """The message whose turn came before (-1: none)."""


def turn_spans(rendering: Rendering, only: Container[int] | None = None) -> list[TurnSpan]:
    """The turns, perhaps of `only` some messages. An interrupted turn has several spans."""
    turns: list[TurnSpan] = []
    turn: TurnSpan | None = None
    start, current, before = 0, -1, -1
    for end, message, origin in zip(rendering.ends, rendering.turns, rendering.origins, strict=True):
        if message != current:
            before, current, turn = current if current >= 0 else before, message, None
            if message >= 0 and (only is None or message in only):
                turn = TurnSpan(message, start, end, end, start, before)
                turns.append(turn)
        if turn is not None:
            turn.end, has_body = end, turn.body_end > turn.start
            if origin is not None and not (origin[-1] == "role" and origin.is_role):
                turn.body, turn.body_end = turn.body if has_body else start, end
            elif not has_body:
                turn.body = end
        start = end
    return turns


def shows_field(rendering: Rendering, fields: Container[str | None], message: int | None = None) -> bool:
    """Whether a rendering has text of one of these fields, of one or any message."""
    origins = (origin for origin in rendering.origins if origin is not None)
    return any(origin.field in fields and message in (None, origin.message) for origin in origins)


def find_turns(
    rendering: Rendering, messages: Messages, run: TryRun, tokenizer: Tokenizer, only: int | None = None
) -> tuple[list[TurnSpan], list[str]]:
    """The assistants' turns, and notes on those that are not proven. `only` limits proofs."""
    text = rendering.text
    notes: list[str] = []
    assistants = {at for at, message in enumerate(messages) if message["role"] == "assistant"}
    turns = turn_spans(rendering, assistants)
    missing = assistants - {turn.message for turn in turns}
    if missing:  # those that are written but have no turn
        origins = (origin for origin in rendering.origins if origin is not None)
        missing &= {origin.message for origin in origins if origin.field not in (None, "role")}
    for index in sorted(missing if only is None else missing & {only}):
        start = _after_prompt(text, messages[:index], run, tokenizer)
        last = rendered_after(messages[: index + 1], run)
        end = len(last.text) if last is not None and text.startswith(last.text) else -1
        if start is None or end < start:
            problem = "the template does not show where its turn is, and it cannot be proven"
            notes.append(f"message {index}: {problem}; none of it counts as sampled")
            continue
        ends = zip(rendering.ends, rendering.origins, strict=True)
        places = (at for at, origin in ends if origin is not None and origin.message == index)
        body_end = max((at for at in places if start < at <= end), default=start)
        turns.append(TurnSpan(index, start, end, start, body_end, index - 1))
    return sorted(turns, key=lambda turn: turn.start) if missing else turns, notes


def _after_prompt(text: str, messages: Messages, run: TryRun, tokenizer: Tokenizer) -> int | None:
    """Where the generation prompt after `messages` ends in the text."""
    if not messages:
        return 0
    plain = rendered_after(messages, run)
    if plain is None or not text.startswith(plain.text):
        return None
    prompt = GenerationPrompt.between(plain, rendered_after(messages, run, prompt=True))
    if prompt is None:
        return None
    before = len(plain.text)
    return before + matched_prefix(text[before:], prompt.added, cut_points(prompt.added, tokenizer))


def rendered_after(messages: Messages, run: TryRun, *, prompt: bool = False) -> Rendering | None:
    """A rendered conversation; None if the template refuses it."""
    try:
        return run(messages, prompt)
    except TokentraceError:
        return None


@dataclass(frozen=True)
class GenerationPrompt:
    """The text that asks for a reply."""

    tail: str
    """The text after the last turn."""
    added: str
    """What asking adds. The tail may also end a message, or lack text of a turn."""

    @classmethod
    def between(cls, plain: Rendering | None, prompted: Rendering | None) -> GenerationPrompt | None:
        if prompted is None:
            return None
        text = prompted.text
        added = text[len(plain.text) :] if plain is not None and text.startswith(plain.text) else ""
        return cls(text[prompted.tail :], added)

    @computed
    def texts(self) -> tuple[str, ...]:
        return tuple(sorted({text for text in (self.tail, self.added) if text}, key=len))


def prompt_after(messages: Messages, run: TryRun) -> GenerationPrompt | None:
    prompted = rendered_after(messages, run, prompt=True)
    return GenerationPrompt.between(None if prompted is None else rendered_after(messages, run), prompted)


def cut_points(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Where a prompt may be cut off: at tags, around control tokens, at its end."""
    cuts = {at for at, char in enumerate(prompt) if char == "<"}
    pattern = tokenizer.vocabulary.control_pattern
    for match in pattern.finditer(prompt) if pattern is not None else ():
        cuts -= set(range(match.start() + 1, match.end()))
        cuts |= set(match.span())
    return sorted((cuts | {len(prompt)}) - {0})


def matched_prefix(scaffold: str, prompt: str, cuts: Sequence[int]) -> int:
    """How much of the prompt the scaffold begins with, up to a cut."""
    length = common_prefix(scaffold, prompt)
    is_whole = length in (len(prompt), len(scaffold))
    return length if is_whole else max((cut for cut in cuts if cut <= length), default=0)


def common_prefix(one: str, other: str) -> int:
    """The number of leading characters that two strings share."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: not one.startswith(other[:length]))
