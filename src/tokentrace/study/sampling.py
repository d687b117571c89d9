"""Which tokens of a rendering the model samples.

A token is sampled if it is in an assistant's turn (`study.turns`), after its generation prompt
(`study.prompts`), up to and including the control token that ends it (`study.endings`).
"""

import bisect
import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..conversation.messages import Messages
from ..template.traced import TracedList
from ..tokens.encoding import Encoded
from .endings import TurnEndings
from .study import TemplateStudy
from .turns import TurnSpan, find_turns


@dataclass(slots=True)
class SampledTurn:
    """The sampled tokens of one turn, the stop token included."""

    message: int
    start: int
    stop: int
    stop_token: int | None
    other_prompt: str = ""
    """The turn's generation prompt, if other ids precede the turn."""


@dataclass(slots=True)
class Sampling:
    turns: list[SampledTurn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def mask(self, length: int) -> npt.NDArray[np.bool_]:
        mask = np.zeros(length, np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.stop] = True
        return mask


def find_sampled(
    study: TemplateStudy, encoded: Encoded, messages: Messages, tools: TracedList | None
) -> Sampling:
    run = functools.partial(study.run, tools)
    turns, notes = find_turns(encoded.rendering, messages, run, study.tokenizer)
    if not turns:
        return Sampling(notes=notes)
    endings, prompts = study.endings(bool(tools)), study.prompts.before(turns, messages, run)

    others: list[str] = []

    def alternatives() -> list[str]:
        """Prompts that a turn may begin with instead of its own."""
        if not others:
            every = {study.prompts.alone(bool(tools)), *prompts}
            others.extend({text for prompt in every if prompt is not None for text in prompt.texts})
        return others

    pairs = list(zip(turns, prompts, strict=True))
    lengths = [study.prompts.length(encoded, turn, prompt, alternatives) for turn, prompt in pairs]
    begins = [turn.start + (length or 0) for turn, length in zip(turns, lengths, strict=True)]
    places = zip(lengths, begins, encoded.first_touching(begins), encoded.first_after(begins), strict=True)
    sampling, before = Sampling(), -1
    for (turn, prompt), (length, begin, start, after) in zip(pairs, places, strict=True):
        if length is None:
            problem = "this turn does not start with the template's generation prompt"
            sampling.notes.append(f"message {turn.message}: {problem}; the whole turn counts as sampled")
        sampled = _sampled(encoded, turn, begin, start, endings)
        if prompt is not None and turn.message != before and prompt.texts:
            follows_prompt = after == start and encoded.rendering.text.endswith(prompt.texts, 0, begin)
            sampled.other_prompt = "" if follows_prompt else prompt.texts[0]
        sampling.turns.append(sampled)
        before = turn.message
    sampling.notes += notes
    return sampling


def turn_end(encoded: Encoded, turn: TurnSpan, endings: TurnEndings) -> tuple[int, int | None]:
    """The token after the turn, and the stop token before it, if any."""
    end = _sampled(encoded, turn, turn.body_end, encoded.first_touching([turn.body_end])[0], endings)
    return end.stop, end.stop_token


def _sampled(encoded: Encoded, turn: TurnSpan, begin: int, start: int, endings: TurnEndings) -> SampledTurn:
    """A turn's sampled tokens, from character `begin` in token `start`."""
    message = turn.message
    tokens, ids, starts, ends = encoded.control_tokens
    after = bisect.bisect_left(starts, turn.end)  # the first control token after the turn
    if begin > turn.end:
        after = max(after, bisect.bisect_right(ends, begin))
    least, last = max(begin, turn.body_end), after - 1
    while last >= 0 and ends[last] > least:
        if ids[last] in endings.closers:
            return SampledTurn(message, start, tokens[last] + 1, ids[last])
        last -= 1
    stop = max(start, encoded.first_after([turn.end])[0])
    if after < len(tokens) and tokens[after] == stop and ids[after] in endings.heads:
        return SampledTurn(message, start, stop + 1, ids[after])
    # no turn in the probes had an end: a control token after this turn's text is its stop
    is_unknown = not (endings.has_end or endings.open_ended or endings.closers)
    if is_unknown and after and ends[after - 1] > least:
        return SampledTurn(message, start, tokens[after - 1] + 1, ids[after - 1])
    return SampledTurn(message, start, stop, None)
