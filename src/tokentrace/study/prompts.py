"""Generation prompts: what a template writes to ask for a reply, and where it stands at the head of a turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..computed import computed
from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..template.trace import Rendering
from ..tokens.encoded import Encoded
from ..tokens.tokenizer import Tokenizer
from .memory import Memory
from .probes import USER
from .turns import Render, TurnSpan, cut_points, matched_prefix

if TYPE_CHECKING:
    from .study import TemplateStudy

Circumstances = tuple[str, tuple[str, ...], tuple[str, ...], bool]
"""The role of the message before, words of system messages, words of the last user message, whether there are tools."""


@dataclass(frozen=True)
class GenerationPrompt:
    """What is known to ask for a reply."""

    tail: str
    """The text after the last turn."""
    added: str
    """What asking adds to the text.

    Less than the tail where a template writes the end of a message outside its turn (Llama's first user message beside
    tools), more where it writes the prompt inside of one.
    """

    @computed
    def texts(self) -> tuple[str, ...]:
        """Both, the shorter first."""
        return tuple(sorted({text for text in (self.tail, self.added) if text}, key=len))


class GenerationPrompts:
    """Generation prompts, by the circumstances that a template can make them depend on.

    The prompt before an assistant's turn depends on the role of the message before it, on whether there are
    tools, and on words that the template looks for in what system and user said (``/no_think``). For each such
    combination it is found once, by rendering the conversation at hand up to that turn.
    """

    def __init__(self, study: TemplateStudy) -> None:
        self._study = study
        self._words = searched_words(study)
        self._known = Memory()
        self._ends = Memory()

    def before(
        self, turns: Sequence[TurnSpan], messages: Messages, has_tools: bool, render: Render
    ) -> list[GenerationPrompt | None]:
        """The generation prompt of each turn; None where nothing comes before it, or the template refuses one there."""
        said = self._said(messages)
        known: dict[Circumstances, GenerationPrompt | None] = {}
        found: list[GenerationPrompt | None] = []
        for turn in turns:
            count = turn.before + 1 if turn.before >= 0 else turn.message
            circumstances = (messages[count - 1]["role"] if count else "", *said[count], has_tools)
            if circumstances not in known:
                known[circumstances] = self._after(circumstances, messages, count, render)
            found.append(known[circumstances])
        return found

    def _said(self, messages: Messages) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """For each position, the words before it that a generation prompt could depend on: of system and user."""
        now: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        out = [now]
        for message in messages:
            role = message["role"]
            if role == "user":
                now = (now[0], words_in(message.get("content"), self._words))
            elif role in ("system", "developer"):
                now = (now[0] + words_in(message.get("content"), self._words), now[1])
            out.append(now)
        return out

    def _after(
        self, circumstances: Circumstances, messages: Messages, count: int, render: Render
    ) -> GenerationPrompt | None:
        """The generation prompt after so many messages."""
        if not count:
            return None
        try:
            return self._known.once(circumstances, lambda: _prompt_after(messages[:count], render))
        except TokentraceError:
            return None

    def alone(self, has_tools: bool) -> GenerationPrompt | None:
        """The generation prompt after a question by itself."""
        prompted, plain = (self._study.probe((USER,), has_tools, prompt) for prompt in (True, False))
        return None if prompted is None else _compared(prompted, plain)

    def length(
        self,
        encoded: Encoded,
        turn: TurnSpan,
        prompt: GenerationPrompt | None,
        others: Callable[[], Iterable[str]],
    ) -> int | None:
        """How many characters at the head of a turn are its generation prompt.

        0 if the prompt was written before the turn began; None if it is nowhere. A turn that begins with the
        generation prompt of other circumstances than its own has that one.
        """
        tail = None if prompt is None else prompt.tail
        text = encoded.rendering.text
        if tail and turn.start + len(tail) <= turn.body and text.startswith(tail, turn.start):
            return len(tail)  # as nearly all do
        # it may begin with the separator that ends the turn before, and end in a field that brings its own ``<think>``
        whole = text.find(tail, max(turn.start - len(tail) + 1, 0), turn.body + len(tail)) if tail else -1
        if tail and 0 <= whole <= turn.body:
            end = whole + len(tail)
            if end <= turn.body or _is_written(encoded, turn.body, end, self._study.tokenizer):
                return end - turn.start
        scaffold = text[turn.start : turn.body]
        length = self._end_in(scaffold, tail) if tail else None
        if length is None and tail and text.endswith(tail, 0, turn.start):
            length = 0
        if not length and scaffold:
            found = [self._end_in(scaffold, other) for other in others()]
            length = max((other for other in found if other), default=length)
        return 0 if length is None and (tail == "" or not scaffold) else length

    def _end_in(self, scaffold: str, tail: str) -> int | None:
        """Turns begin alike, so this is kept."""
        find = functools.partial(_prompt_end, scaffold, tail, self._study.tokenizer)
        return self._ends.once((scaffold, tail), find)


def searched_words(study: TemplateStudy) -> list[str]:
    """Words that the template looks for in what messages say: what they change is part of a conversation's shape."""
    return sorted(word for word in study.template.searched if len(word) > 1)


def words_in(content: Any, words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word in content) if isinstance(content, str) else ()


def _prompt_after(messages: Messages, render: Render) -> GenerationPrompt:
    prompted = render(messages, True)
    try:
        plain = render(messages, False)
    except TokentraceError:
        plain = None
    return _compared(prompted, plain)


def _compared(prompted: Rendering, plain: Rendering | None) -> GenerationPrompt:
    is_longer = plain is not None and prompted.text.startswith(plain.text)
    return GenerationPrompt(
        prompted.text[prompted.tail :], prompted.text[len(plain.text) :] if plain is not None and is_longer else ""
    )


def _prompt_end(scaffold: str, tail: str, tokenizer: Tokenizer) -> int | None:
    """How many characters at the head of a turn are scaffold up to the end of its generation prompt."""
    cuts = cut_points(tail, tokenizer)
    head = tail[: cuts[0]]
    best, end, at = 0, 0, 0
    while at >= 0:
        length = matched_prefix(scaffold[at:], tail, cuts)
        if length > best:
            best, end = length, at + length
        at = scaffold.find(head, at + 1)
    return end if best else None


def _is_written(encoded: Encoded, start: int, end: int, tokenizer: Tokenizer) -> bool:
    """Whether control tokens that a text spells are those tokens, and not letters: text that is not trusted."""
    pattern = tokenizer.vocabulary.control_pattern
    named = list(pattern.finditer(encoded.rendering.text, start, end)) if pattern is not None else []
    return all(encoded.control[encoded.first_touching([match.start()])[0]] for match in named)
