"""Fixed-base and delta tokenization: message by message, as much of the field does it.

Both modes render a context without and with a new message, cut the second text where the first one ends, and encode
the remainder on its own. The context is everything before the message (``delta``), or a small conversation that never
changes (``fixed_base``), so that a template cannot rewrite what it wrote before.

Neither proves anything: text encoded in parts need not have the ids of the whole, and a template may write a message
differently in another context. The sanity check compares the result with a render of the whole conversation, id by id.
A rollout needs `Renderer.bridge_to_next_turn`, training data `Renderer.render`; these modes are for comparison.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.messages import RESULT_ROLES, Messages
from ..errors import TemplateError, TemplateLimitError
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..settings import choose
from ..show.alignment import Hunk, align
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary
from .finding import Cause, Finding
from .token_text import quoted, spell

SYSTEM: Final = {"role": "system", "content": "You are a helpful assistant."}
USER: Final = {"role": "user", "content": "I am a user."}
ASSISTANT: Final = {"role": "assistant", "content": "I am an assistant."}


class IncrementalMode(StrEnum):
    """What a new message is rendered after."""

    FIXED_BASE = "fixed_base"
    """A conversation of one system and one user message, the same for every message."""
    DELTA = "delta"
    """All messages before it."""


class SanityCheck(StrEnum):
    """Which differences from the full render are reported."""

    STRICT = "strict"
    """All."""
    IGNORE_STRIPPABLE = "ignore_strippable"
    """All but those of white space. The same text in other tokens is reported."""
    OFF = "off"
    """None: there is no full render."""


class TokenizationMismatchWarning(UserWarning):
    """Incremental tokenization gave other ids than a render of the whole conversation."""


@dataclass(frozen=True, slots=True, eq=False)
class IncrementalTokens:
    """The ids, and a mask that is True for the tokens of assistants.

    `mismatches` are what the sanity check reports; `position` counts incremental tokens. `notes` name messages that the
    template wrote otherwise in their context.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    mismatches: list[Finding]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.ids)


def tokenize_incrementally(
    renderer: Renderer,
    messages: Any,
    *,
    tools: Any = None,
    mode: IncrementalMode | str = IncrementalMode.FIXED_BASE,
    sanity_check: SanityCheck | str = SanityCheck.STRICT,
) -> IncrementalTokens:
    """Tokenize a conversation message by message; consecutive tool results are one turn.

    Everything before the first assistant is one plain render. The mask is True for all that an assistant message adds
    after its generation prompt, including the separator after the stop token (`Renderer.render` masks it out).

    Warns with TokenizationMismatchWarning if the sanity check finds differences. Raises TemplateError if the template
    refuses a message in every context that the mode has for it.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> renderer = create_renderer(POCKET)
    >>> tokens = tokenize_incrementally(
    ...     renderer, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    ... )
    >>> renderer.tokenizer.decode(tokens.ids[tokens.mask]), tokens.mismatches
    ('4<|end|>', [])
    """
    mode, check = choose(IncrementalMode, "mode", mode), choose(SanityCheck, "sanity_check", sanity_check)
    renderer = renderer.silent()
    conversation = renderer.check_messages(messages, tools=tools)
    pieces = list(_Tokenizing(renderer, tools, mode, conversation).pieces())
    lengths = [len(piece.ids) for piece in pieces]
    ids = np.concatenate([piece.ids for piece in pieces])
    mask = np.repeat(np.array([piece.sampled for piece in pieces], np.bool_), lengths)
    mismatches: list[Finding] = []
    if check is not SanityCheck.OFF:
        full = renderer.render(conversation, tools=tools)
        owners = np.repeat([piece.message for piece in pieces], lengths)
        mismatches = list(_mismatches(renderer.tokenizer, ids, owners, full))
    if check is SanityCheck.IGNORE_STRIPPABLE:
        mismatches = [one for one in mismatches if one.cause is not Cause.WHITESPACE]
    if mismatches:
        warnings.warn(TokenizationMismatchWarning(_warning(mode, mismatches)), stacklevel=2)
    return IncrementalTokens(ids, mask, mismatches, [note for piece in pieces for note in piece.notes])


class _Piece(NamedTuple):
    """The ids of one message or generation prompt."""

    ids: Ids
    message: int = -1
    sampled: bool = False
    notes: Sequence[str] = ()


class _Added(NamedTuple):
    """The text of a context, and the rendering of the context with a message."""

    context: Messages
    is_base: bool
    before: str
    after: Rendering

    @property
    def flaws(self) -> list[str]:
        """Why the end of the second text may not be what the message adds to the first."""
        flaws = [] if self.after.text.startswith(self.before) else ["the template rewrites what is before it"]
        base = {Origin.of(number, "content") for number in range(len(self.context)) if self.is_base}
        rows = zip(self.after.ends, self.after.origins, strict=True)
        if any(end > len(self.before) and origin in base for end, origin in rows):
            flaws.append("the template writes text of the base conversation into it")
        return flaws


class _Tokenizing(NamedTuple):
    """One conversation in one mode."""

    renderer: Renderer
    tools: Any
    mode: IncrementalMode
    messages: Messages

    def pieces(self) -> Iterator[_Piece]:
        roles = [message["role"] for message in self.messages]
        head = next((i for i, role in enumerate(roles) if role != "assistant"), len(roles))
        head = next((i for i in range(head, len(roles)) if roles[i] == "assistant"), len(roles))
        prompted = head < len(roles)
        first = self.renderer.render(self.messages[:head], tools=self.tools, add_generation_prompt=prompted)
        yield _Piece(first.ids)
        for start, stop in _units(self.messages, head):
            if roles[start] == "assistant" and not prompted:
                yield self._piece(start, start)
            yield self._piece(start, stop)
            prompted = False

    def _piece(self, start: int, stop: int) -> _Piece:
        """Encode what ``messages[start:stop]`` adds after its context; an empty unit is a generation prompt.

        A base that the template rewrites or repeats counts as refused, unless there is no better one: then the text
        is cut by length anyway, and a note says so.
        """
        unit = self.messages[start:stop]
        sampled = bool(unit) and unit[0]["role"] == "assistant"
        tried: list[_Added] = []
        refusals: list[TemplateError] = []
        for context in self._contexts(start, stop):
            try:
                before = self._render(context, prompt=sampled).text
                after = self._render([*context, *unit], prompt=not unit)
            except TemplateLimitError:
                raise
            except TemplateError as error:
                refusals.append(error)
                continue
            tried.append(_Added(context, self.mode is IncrementalMode.FIXED_BASE, before, after))
            if not tried[-1].flaws:
                break
        if not tried:
            raise self._refused(start, stop, refusals[0])
        best = min(tried, key=lambda one: len(one.flaws))
        usual = best is tried[0] and not refusals
        roles = ", ".join(message["role"] for message in best.context)
        notes = [*best.flaws, *([] if usual else [f"rendered after {roles} instead of the usual base"])]
        ids = self._encode(best, start)
        return _Piece(ids, start, sampled, [f"message {start}: {note}" for note in notes])

    def _render(self, messages: Messages, *, prompt: bool) -> Rendering:
        return self.renderer.render_text(messages, tools=self.tools, add_generation_prompt=prompt)

    def _contexts(self, start: int, stop: int) -> Iterator[Messages]:
        """Yield what to render ``messages[start:stop]`` after.

        Fixed bases are system and user; the same without the system message; then, for other roles than assistant, both
        with an assistant turn, which calls the functions that tool results answer.
        """
        if self.mode is IncrementalMode.DELTA:
            yield self.messages[:start]
            return
        yield [SYSTEM, USER]
        yield [USER]
        if start == stop or self.messages[start]["role"] == "assistant":
            return
        answers: list[dict[str, Any]] = [ASSISTANT]
        if self.messages[start]["role"] in RESULT_ROLES:
            answers = [self._calls(start, stop, {}), self._calls(start, stop, "{}")]
        for answer in answers:
            yield [SYSTEM, USER, answer]
            yield [USER, answer]

    def _calls(self, start: int, stop: int, arguments: dict[str, Any] | str) -> dict[str, Any]:
        """Return an assistant message that calls the function of each result."""
        calls = [call for message in self.messages[:start] for call in message.get("tool_calls") or ()]
        names = {call.get("id"): (call.get("function") or call).get("name") for call in calls}
        answered = []
        for number, result in enumerate(self.messages[start:stop], 1):
            index = result.get("tool_call_id") or f"call{number:05}"
            name = result.get("name") or names.get(index) or "function"
            answered.append({"id": index, "type": "function", "function": {"name": name, "arguments": arguments}})
        return {"role": "assistant", "content": "", "tool_calls": answered}

    def _refused(self, start: int, stop: int, refusal: TemplateError) -> TemplateError:
        what = f"the {self.messages[start]['role']} message" if start < stop else "to ask for a reply"
        where = "the messages before it" if self.mode is IncrementalMode.DELTA else "every fixed base"
        return TemplateError(
            f"the template refuses {what} after {where} ({refusal.problem}); use another mode, or Renderer.render on "
            "the whole conversation",
            message=start if start < stop else start - 1,
            line=refusal.line,
        )

    def _encode(self, added: _Added, start: int) -> Ids:
        """Encode what was added by itself, under the renderer's policy for control tokens.

        Origins get the numbers of the conversation's messages; those of a fixed base come after them.
        """
        messages = self.messages
        first = len(messages) if added.is_base else 0
        numbers = [*range(first, first + len(added.context)), *range(start, len(messages))]
        guard = _neutral_control(self.renderer.tokenizer)
        spans = [
            (text, numbers[turn] if turn >= 0 else turn, origin and origin.renumbered(numbers))
            for text, turn, origin in added.after.spans(len(added.before))
        ]
        if not spans:
            return np.zeros(0, np.int32)
        piece = Rendering.of([(guard, -1, None), *spans])
        context = added.context if added.is_base else ()
        encoded = self.renderer.encode_text(piece, [*messages, *context], tools=self.tools)
        return encoded.ids[1:] if guard else encoded.ids


def _units(messages: Messages, start: int) -> Iterator[tuple[int, int]]:
    """Yield messages one by one, consecutive tool results together: templates write them as one turn."""
    while start < len(messages):
        stop = start + 1
        if messages[start]["role"] in RESULT_ROLES:
            while stop < len(messages) and messages[stop]["role"] in RESULT_ROLES:
                stop += 1
        yield start, stop
        start = stop


def _neutral_control(tokenizer: Tokenizer) -> str:
    """Return a control token to put first, if the tokenizer adds a space before the first word of its input."""
    if not tokenizer.vocabulary.first_prefixed:
        return ""
    tokens = tokenizer.vocabulary.control.values()
    return next((token.text for token in tokens if not (token.lstrip or token.rstrip or token.single_word)), "")


# -- the sanity check


def _mismatches(tokenizer: Tokenizer, ids: Ids, owners: npt.NDArray[Any], full: RenderedTokens) -> Iterator[Finding]:
    """Yield the parts in which `ids` differ from a full render; `owners` has the message of each id."""
    for hunk in _hunks(tokenizer.vocabulary, ids, full.ids):
        here, there = hunk.sides(ids, full.ids)
        message = int(full.messages[hunk.other_start] if len(there) else owners[hunk.start])
        texts = [quoted(tokenizer.decode(side.tolist())) for side in (here, there)]
        yield Finding(
            _cause(tokenizer.vocabulary, here, there),
            message=message if message >= 0 else None,
            words=f"{texts[0]} where the full render has {texts[1]}",
            position=hunk.start,
            tokens=len(here),
        )


def _hunks(vocabulary: Vocabulary, one: Ids, other: Ids) -> Iterator[Hunk]:
    """Yield what differs. Hunks between two control tokens that together spell the same text are one."""
    group: list[Hunk] = []
    control = [token.id for token in vocabulary.control.values()]
    for hunk in align(one, other):
        if group and np.isin(one[group[-1].stop : hunk.start], control).any():
            yield from _joined(vocabulary, one, other, group)
            group = []
        group.append(hunk)
    yield from _joined(vocabulary, one, other, group)


def _joined(vocabulary: Vocabulary, one: Ids, other: Ids, group: Sequence[Hunk]) -> Sequence[Hunk]:
    if len(group) < 2:
        return group
    whole = Hunk(group[0].start, group[-1].stop, group[0].other_start, group[-1].other_stop)
    return [whole] if _cause(vocabulary, *whole.sides(one, other)) is Cause.BPE_REMERGE else group


def _cause(vocabulary: Vocabulary, one: Ids, other: Ids) -> Cause:
    """Compare ids as bytes: half a character decodes to U+FFFD, whichever it is half of."""
    left, right = spell(vocabulary, one), spell(vocabulary, other)
    if left == right:
        return Cause.BPE_REMERGE
    bare = left.translate(None, b"\n\t\r ") == right.translate(None, b"\n\t\r ")
    return Cause.WHITESPACE if bare else Cause.UNKNOWN


def _warning(mode: str, mismatches: Sequence[Finding], most: int = 3) -> str:
    """Describe the first few mismatches, and what to do."""
    lines = [f"  {one}" for one in mismatches[:most]]
    lines += [f"  and {len(mismatches) - most} more"] if len(mismatches) > most else []
    return (
        f"{mode} tokenization differs from the render of the whole conversation in {len(mismatches)} places:\n"
        + "\n".join(lines)
        + "\nIn a rollout use Renderer.bridge_to_next_turn, for training data Renderer.render and its mask. If this is "
        "intended, pass sanity_check='ignore_strippable' or 'off'."
    )
