"""Generation prompts: what a template writes to ask for a reply."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..computed import computed
from ..conversation.messages import Messages
from ..tokens.encoding import Encoded
from ..tokens.tokenizer import Tokenizer
from .probes import CONTINUED, USER
from .turns import GenerationPrompt, TryRun, TurnSpan, cut_points, matched_prefix, prompt_after

if TYPE_CHECKING:
    from .study import TemplateStudy


Prompt = GenerationPrompt | None


class GenerationPrompts:
    """Generation prompts of one template.

    If its syntax proves that they do not depend on the conversation (`Template.asks_alike`),
    every turn has the prompt of a probe. If not, the conversation up to the turn is rendered.
    """

    def __init__(self, study: TemplateStudy) -> None:
        self._study = study
        self._end_in = functools.lru_cache(1024)(functools.partial(_prompt_end, study.tokenizer))
        """Cached, because most turns begin alike."""

    def before(self, turns: Sequence[TurnSpan], messages: Messages, run: TryRun) -> list[Prompt]:
        """The generation prompt of each turn; None if the template refuses one there."""
        prompts: dict[int, Prompt] = {0: None}
        counts = [turn.before + 1 if turn.before >= 0 else turn.message for turn in turns]
        for count in counts:
            if count not in prompts:
                prompts[count] = self.constant or prompt_after(messages[:count], run)
        return [prompts[count] for count in counts]

    @computed
    def constant(self) -> Prompt:
        """The prompt of every turn, if it is surely the same for all."""
        if not self._study.template.asks_alike:
            return None
        prompts: list[Prompt] = []
        for messages in (CONTINUED, (USER,)):
            plain, prompted = (self._study.probe(messages, False, prompt) for prompt in (False, True))
            if prompted is not None and plain is not None and len(messages) - 1 in prompted.turns:
                prompts.append(GenerationPrompt.between(plain, prompted))
        return prompts[0] if len(set(prompts)) == 1 else None

    def alone(self, has_tools: bool, changes: Mapping[str, Any] | None = None) -> Prompt:
        """The generation prompt after a single question."""
        plain, prompted = (
            self._study.probe((USER,), has_tools, prompt, changes) for prompt in (False, True)
        )
        return GenerationPrompt.between(plain, prompted)

    def length(
        self, encoded: Encoded, turn: TurnSpan, prompt: Prompt, alternatives: Callable[[], Iterable[str]]
    ) -> int | None:
        """How many characters of a turn's head are its generation prompt; None if it is not there.

        It may precede the turn. A turn may begin with one of the `alternatives` instead.
        """
        tail, text = None if prompt is None else prompt.tail, encoded.rendering.text
        if tail and turn.start + len(tail) <= turn.body and text.startswith(tail, turn.start):
            return len(tail)  # nearly all turns
        # it may begin in the turn before, and end in a field with its own ``<think>``
        whole = text.find(tail, max(turn.start - len(tail) + 1, 0), turn.body + len(tail)) if tail else -1
        if tail and 0 <= whole <= turn.body:
            end, pattern = whole + len(tail), self._study.tokenizer.vocabulary.control_pattern
            # it may reach into the body with control tokens, not with letters
            names = pattern.finditer(text, turn.body, end) if pattern and end > turn.body else ()
            if encoded.control[encoded.first_touching([match.start() for match in names])].all():
                return end - turn.start
        scaffold = text[turn.start : turn.body]
        length = self._end_in(scaffold, tail) if tail else None
        if length is None and tail and text.endswith(tail, 0, turn.start):
            length = 0
        if not length and scaffold:
            lengths = [self._end_in(scaffold, other) for other in alternatives()]
            length = max((other for other in lengths if other and scaffold[:other].strip()), default=length)
        return 0 if length is None and (tail == "" or not scaffold) else length


def _prompt_end(tokenizer: Tokenizer, scaffold: str, tail: str) -> int | None:
    """Where a prompt, or its longest prefix, ends in the scaffold of a turn."""
    cuts = cut_points(tail, tokenizer)
    head = tail[: cuts[0]]
    best, end, at = 0, 0, 0
    while at >= 0:
        length = matched_prefix(scaffold[at:], tail, cuts)
        if length > best:
            best, end = length, at + length
        at = scaffold.find(head, at + 1)
    return end if best else None
