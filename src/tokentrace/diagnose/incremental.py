"""Fixed-base and delta tokenization: message by message, as much of the field does it.

Both modes render a context without and with a new message, cut the second text where the first one ends, and encode
the rest on its own. The mode says what the context is: everything before the message (``delta``), or a small
conversation that never changes (``fixed_base``), so that a template cannot rewrite what it wrote before.

Neither proves anything. Text encoded in parts need not have the ids of the whole, and a template may write a message
differently in another context. The sanity check compares the result with a render of the whole conversation, id by id.
These modes are here to compare with, and for templates of which nothing better can be proven; a rollout wants
`Renderer.bridge_to_next_turn`, training data `Renderer.render`, which masks in one render.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from ..conversation.messages import RESULT_ROLES, Messages
from ..errors import RendererError, TemplateError, TemplateLimitError
from ..rendering.renderer import Renderer
from ..settings import choose
from ..study.turns import common_prefix
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids, Tokenizer
from .finding import Cause
from .mismatches import Mismatch, TokenizationMismatchWarning, find_mismatches, short_text, warning_text

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
    """Every one."""
    IGNORE_STRIPPABLE = "ignore_strippable"
    """All but those of white space. The same text in other tokens is not a difference of white space."""
    OFF = "off"
    """None: nothing is rendered to compare with."""


class NoteCause(StrEnum):
    """Why a piece is less certain than others."""

    REWRITTEN = "rewritten"
    """The template wrote the context differently once the message followed; the text was cut by length all the same."""
    BASE_SHOWN = "base_shown"
    """The template wrote text of the base into the message (as a system message put before the last user)."""
    OTHER_BASE = "other_base"
    """The template refused the message after the usual base, rewrote or repeated it; another base served."""


@dataclass(frozen=True, slots=True)
class Note:
    """What the tokens of a message rest on, where that is not what they should."""

    cause: NoteCause
    message: int
    detail: str

    def __str__(self) -> str:
        return f"message {self.message}: {self.detail}"


@dataclass(frozen=True, slots=True, eq=False)
class IncrementalTokens:
    """What incremental tokenization gave: ids, and True in `mask` for each token of an assistant.

    `mismatches` is what the sanity check reports (nothing where it was off), `notes` what became apparent on the way.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    mismatches: list[Mismatch]
    notes: list[Note]
    sanity_check: SanityCheck

    @property
    def token_ids(self) -> list[int]:
        """The ids as a list."""
        return cast(list[int], self.ids.tolist())

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
    """Tokenize a conversation message by message; consecutive tool results, which are one turn, as one.

    What comes before the first assistant is one plain render. The mask is True for all that an assistant's message
    adds after its generation prompt, which takes in the separator after the stop token where there is one
    (`Renderer.render` masks it out). A conversation that begins with an assistant has that message in its prompt.

    Warns with TokenizationMismatchWarning where the sanity check finds differences. Raises TemplateError where the
    template refuses a message in every context that the mode has for it.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> renderer = create_renderer(POCKET)
    >>> tokens = tokenize_incrementally(
    ...     renderer, [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    ... )
    >>> renderer.tokenizer.decode(tokens.ids[tokens.mask]), tokens.mismatches
    ('4<|end|>', [])
    """
    check = choose(SanityCheck, "sanity_check", sanity_check)
    stream = IncrementalTokenizer(renderer, mode=mode, tools=tools)
    stream._read(messages)
    return stream._tokens(check)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Ids that were appended at once."""

    ids: Ids
    message: int = -1
    sampled: bool = False
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Added:
    """What a template wrote for a context, and what for the context with more."""

    context: Messages
    is_base: bool
    before: str
    after: Rendering

    @property
    def causes(self) -> list[NoteCause]:
        """Why the end of the second text may not be what the new message adds to the first."""
        causes = []
        if not self.after.text.startswith(self.before):
            causes.append(NoteCause.REWRITTEN)
        said = {Origin.of(number, "content") for number in range(len(self.context)) if self.is_base}
        rows = zip(self.after.ends, self.after.origins, strict=True)
        if any(end > len(self.before) and origin in said for end, origin in rows):
            causes.append(NoteCause.BASE_SHOWN)
        return causes

    def notes(self, message: int, is_usual: bool) -> tuple[Note, ...]:
        causes = self.causes + ([] if is_usual else [NoteCause.OTHER_BASE])
        return tuple(Note(cause, message, self._detail(cause)) for cause in causes)

    def _detail(self, cause: NoteCause) -> str:
        if cause is NoteCause.REWRITTEN:
            at = common_prefix(self.before, self.after.text)
            was, now = short_text(self.before[at:]), short_text(self.after.text[at:])
            return (
                f"the template writes what stands before it otherwise once it is there: at character {at}, {was} "
                f"became {now}; cut by length, its tokens are not to be trusted"
            )
        roles = ", ".join(one["role"] for one in self.context)
        if cause is NoteCause.BASE_SHOWN:
            return f"the template writes text of the base conversation ({roles}) into it"
        return f"rendered after {roles}, as the template has no use for the usual base"


class IncrementalTokenizer:
    """The same, step by step in a rollout: `prompt`, then `append_completion` and `append` in turns.

    Sampled ids are kept as they are. What the template writes between a sampled turn and the next message is found on
    the base conversation: the rest of an assistant's turn after the stop token, all of its end where the completion
    was cut off. A stop token that is the head of the next turn is not written twice.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> stream = IncrementalTokenizer(create_renderer(POCKET))
    >>> prompt = stream.prompt([{"role": "user", "content": "2+2?"}])
    >>> stream.append_completion(stream.renderer.tokenizer.encode("4<|end|>"))
    >>> stream.renderer.tokenizer.decode(stream.append([{"role": "user", "content": "3+3?"}]))
    '<|turn|>user\\n3+3?<|end|><|turn|>assistant\\n'
    """

    def __init__(
        self, renderer: Renderer, *, mode: IncrementalMode | str = IncrementalMode.FIXED_BASE, tools: Any = None
    ) -> None:
        self.renderer = renderer.silent()
        self.mode = choose(IncrementalMode, "mode", mode)
        self.tools = tools
        self._messages: list[Mapping[str, Any]] = []
        self._unknown: int | None = None
        self._pieces: list[_Piece] = []
        self._asked = False
        self._completion: Ids | None = None

    @property
    def ids(self) -> Ids:
        """All ids so far: what the engine is given next, or was given together with what it sampled."""
        return _joined([piece.ids for piece in self._pieces])

    def prompt(self, messages: Any) -> Ids:
        """The first prompt: a plain render with a generation prompt."""
        if self._pieces:
            raise RendererError("the prompt was already given; append() what comes after a completion")
        self._begin(self._checked(messages), asks=True)
        return self.ids

    def append_completion(self, ids: Iterable[int], message: Mapping[str, Any] | None = None) -> None:
        """What the engine sampled, kept verbatim.

        `message` is what it says. ``delta`` renders it with the past and cannot go on without; ``fixed_base`` needs it
        for the sanity check alone.
        """
        if not self._asked:
            raise RendererError("there is no open generation prompt; call prompt() or append() before a completion")
        if message is None and self.mode is IncrementalMode.DELTA:
            raise RendererError("delta mode renders the past again: pass message= with what the completion says")
        sampled = check_ids(ids, "completion")
        known = self._checked([{"role": "assistant", "content": ""} if message is None else message])
        if known[0]["role"] != "assistant":
            raise RendererError(f"a completion is an assistant's message, not one of role {known[0]['role']!r}")
        if message is None and self._unknown is None:
            self._unknown = len(self._messages)
        self._pieces.append(_Piece(sampled, len(self._messages), sampled=True))
        self._messages += known
        self._completion = sampled
        self._asked = False

    def append(self, new_messages: Any) -> Ids:
        """What the next prompt has after the completion: the end of its turn, the new messages, a generation prompt.

        If the template refuses, nothing is appended.
        """
        if self._completion is None or self._asked:
            raise RendererError("give the completion first: new messages follow a completion, all of them at once")
        new = self._checked(new_messages)
        if any(message["role"] == "assistant" for message in new):
            raise RendererError("an assistant's message is a completion; give its ids to append_completion()")
        start = len(self._messages)
        messages = [*self._messages, *new]
        added = [self._unit(messages, first, stop) for first, stop in _units(messages, start)]
        added.append(self._unit(messages, len(messages), len(messages)))
        added = self._after_completion(self._completion, added, start - 1)
        self._messages = messages
        self._pieces += added
        self._asked = True
        return _joined([piece.ids for piece in added])

    def tokens(self, *, sanity_check: SanityCheck | str = SanityCheck.STRICT) -> IncrementalTokens:
        """All of it so far, compared with a full render of the messages. Warns as `tokenize_incrementally` does."""
        return self._tokens(choose(SanityCheck, "sanity_check", sanity_check))

    # -- stages

    def _read(self, given: Any) -> None:
        """Go through a conversation that is already complete."""
        messages = self._checked(given)
        roles = [message["role"] for message in messages]
        head = next((i for i, role in enumerate(roles) if role != "assistant"), len(roles))
        head = next((i for i in range(head, len(roles)) if roles[i] == "assistant"), len(roles))
        self._begin(messages[:head], asks=head < len(messages))
        for start, stop in _units(messages, head):
            if roles[start] == "assistant" and not self._asked:
                self._pieces.append(self._unit(messages, start, start))
            self._pieces.append(self._unit(messages, start, stop))
            self._asked = False
        self._messages = messages

    def _begin(self, messages: list[Mapping[str, Any]], *, asks: bool) -> None:
        rendered = self.renderer.render(messages, tools=self.tools, add_generation_prompt=asks)
        self._messages = messages
        self._pieces.append(_Piece(rendered.ids))
        self._asked = asks

    def _checked(self, messages: Any) -> list[Mapping[str, Any]]:
        return self.renderer.check_messages(messages, tools=self.tools)

    def _render(self, messages: Messages, *, asks: bool = False) -> Rendering:
        return self.renderer.render_text(messages, tools=self.tools, add_generation_prompt=asks)

    def _unit(self, messages: Messages, start: int, stop: int) -> _Piece:
        """What ``messages[start:stop]`` adds after its context; an assistant's, after its generation prompt.

        An empty unit is a generation prompt. A base that the template rewrites or repeats counts as refused,
        unless there is no better one: then the text is cut by length all the same, and a note says so.
        """
        unit = messages[start:stop]
        sampled = bool(unit) and unit[0]["role"] == "assistant"
        tried: list[_Added] = []
        refusals: list[TemplateError] = []
        for context in self._contexts(messages, start, stop):
            try:
                before = self._render(context, asks=sampled).text
                after = self._render([*context, *unit], asks=not unit)
            except TemplateLimitError:
                raise
            except TemplateError as error:
                refusals.append(error)
                continue
            tried.append(_Added(context, self.mode is IncrementalMode.FIXED_BASE, before, after))
            if not tried[-1].causes:
                break
        if not tried:
            raise self._refused(messages, start, stop, refusals[0])
        chosen = min(tried, key=lambda one: len(one.causes))
        is_usual = chosen is tried[0] and not refusals
        return _Piece(self._encode_added(chosen, messages, start), start, sampled, chosen.notes(start, is_usual))

    def _contexts(self, messages: Messages, start: int, stop: int) -> Iterator[Messages]:
        """What to render ``messages[start:stop]`` after: the first that the template takes."""
        if self.mode is IncrementalMode.DELTA:
            yield messages[:start]
        else:
            yield from _bases(messages, start, stop)

    def _refused(self, messages: Messages, start: int, stop: int, refusal: TemplateError) -> TemplateError:
        what = f"the {messages[start]['role']} message" if start < stop else "to ask for a reply"
        where = "the messages before it" if self.mode is IncrementalMode.DELTA else "every fixed base"
        return TemplateError(
            f"the template refuses {what} after {where} ({refusal.problem}); use another mode, or Renderer.render on "
            "the whole conversation",
            message=start if start < stop else start - 1,
            line=refusal.line,
        )

    def _encode_added(self, added: _Added, messages: Messages, start: int) -> Ids:
        """The ids of what was added, encoded by itself under the renderer's policy for control tokens.

        Origins are renumbered to the conversation's messages; those of a fixed base are put behind them.
        """
        first = len(messages) if added.is_base else 0
        numbers = [*range(first, first + len(added.context)), *range(start, len(messages))]
        # Some tokenizers put a space before the first word of the input. This is not the input's beginning.
        guard = _neutral_control(self.renderer.tokenizer)
        piece = _cut(added.after, len(added.before), numbers, guard)
        if len(piece.text) == len(guard):
            return np.zeros(0, np.int32)
        encoded = self.renderer.encode_text(
            piece, [*messages, *added.context] if added.is_base else messages, tools=self.tools
        )
        return encoded.ids[1:] if guard else encoded.ids

    def _after_completion(self, completion: Ids, added: list[_Piece], message: int) -> list[_Piece]:
        """`added` with what the template writes before it at the end of the turn that was sampled."""
        end = self._turn_end()
        last = int(completion[-1]) if len(completion) else -1
        if last not in self.renderer.get_stop_token_ids():
            return [_Piece(end, message), *added]
        found = np.flatnonzero(end == last)
        if len(found):
            return [_Piece(end[int(found[0]) + 1 :], message), *added]
        if len(added[0].ids) and int(added[0].ids[0]) == last:  # the stop token is the head of the next turn
            return [replace(added[0], ids=added[0].ids[1:]), *added[1:]]
        return added

    def _turn_end(self) -> Ids:
        """How the template ends an assistant's turn after what it says."""
        said = ASSISTANT["content"]
        for base in _bases([], 0, 0):
            try:
                rendering = self._render([*base, ASSISTANT])
            except TemplateLimitError:
                raise
            except TemplateError:
                continue
            before, found, _ = rendering.text.rpartition(said)
            if found:
                return self._encode_added(_Added(base, True, before + said, rendering), [ASSISTANT], 0)
        return np.zeros(0, np.int32)

    # -- the check

    def _tokens(self, check: SanityCheck) -> IncrementalTokens:
        ids = self.ids
        lengths = [len(piece.ids) for piece in self._pieces]
        mask = np.repeat([piece.sampled for piece in self._pieces], lengths)
        mismatches: list[Mismatch] = []
        if check is not SanityCheck.OFF and self._pieces:
            if self._unknown is not None:
                raise RendererError(
                    f"what message {self._unknown} says is not known, so there is nothing to compare with; pass "
                    "message= to append_completion(), or sanity_check='off'"
                )
            full = self.renderer.render(self._messages, tools=self.tools, add_generation_prompt=self._asked)
            owners = np.repeat([piece.message for piece in self._pieces], lengths)
            mismatches = find_mismatches(self.renderer.tokenizer, ids, owners, full)
        if check is SanityCheck.IGNORE_STRIPPABLE:
            mismatches = [one for one in mismatches if one.kind is not Cause.WHITESPACE]
        if mismatches:
            warnings.warn(TokenizationMismatchWarning(warning_text(self.mode, mismatches)), stacklevel=3)
        notes = [note for piece in self._pieces for note in piece.notes]
        return IncrementalTokens(ids, mask.astype(np.bool_), mismatches, notes, check)


# -- what to render a message after


def _units(messages: Messages, start: int) -> Iterator[tuple[int, int]]:
    """Messages from `start` on, one by one; consecutive tool results together, as templates write one turn of them."""
    while start < len(messages):
        stop = start + 1
        if messages[start]["role"] in RESULT_ROLES:
            while stop < len(messages) and messages[stop]["role"] in RESULT_ROLES:
                stop += 1
        yield start, stop
        start = stop


def _bases(messages: Messages, start: int, stop: int) -> Iterator[Messages]:
    """Fixed conversations for ``messages[start:stop]``: system and user; without the system message; then, for what
    is not an assistant's, the same with an assistant's turn, which for tool results makes the calls they answer."""
    yield [SYSTEM, USER]
    yield [USER]
    if start == stop or messages[start]["role"] == "assistant":
        return
    answers: list[dict[str, Any]] = [ASSISTANT]
    if messages[start]["role"] in RESULT_ROLES:
        results, past = messages[start:stop], messages[:start]
        answers = [_calls(results, past, {}), _calls(results, past, "{}")]
    for answer in answers:
        yield [SYSTEM, USER, answer]
        yield [USER, answer]


def _calls(results: Messages, past: Messages, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """An assistant's message with a call for each result, under the names that the conversation gave them."""
    names = {
        call.get("id"): (call.get("function") or call).get("name")
        for message in past
        for call in message.get("tool_calls") or ()
    }
    made = []
    for number, result in enumerate(results, 1):
        called = result.get("tool_call_id") or f"call{number:05}"
        name = result.get("name") or names.get(called) or "function"
        made.append({"id": called, "type": "function", "function": {"name": name, "arguments": arguments}})
    return {"role": "assistant", "content": "", "tool_calls": made}


def _cut(rendering: Rendering, at: int, numbers: Sequence[int], guard: str) -> Rendering:
    """A rendering from character `at` on, its messages renumbered, after a guard of scaffold if one is given."""
    moved = [
        (text, numbers[turn] if turn >= 0 else turn, origin and origin.renumbered(numbers))
        for text, turn, origin in rendering.spans(at)
    ]
    return Rendering.of([(guard, -1, None), *moved])


def _neutral_control(tokenizer: Tokenizer) -> str:
    """A control token that leaves its neighbours alone, for tokenizers that treat the first word differently."""
    if not tokenizer.vocabulary.first_prefixed:
        return ""
    tokens = tokenizer.vocabulary.control.values()
    return next((token.text for token in tokens if not (token.lstrip or token.rstrip or token.single_word)), "")


def _joined(parts: Sequence[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


__all__ = [
    "Cause",
    "IncrementalMode",
    "IncrementalTokenizer",
    "IncrementalTokens",
    "Mismatch",
    "Note",
    "NoteCause",
    "SanityCheck",
    "TokenizationMismatchWarning",
    "tokenize_incrementally",
]
