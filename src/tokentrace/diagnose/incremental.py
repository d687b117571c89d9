"""Fixed-base and delta tokenization, for comparison with a full render."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.messages import RESULT_ROLES, Messages
from ..errors import InputError, TemplateError, TemplateLimitError
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..settings import choose
from ..show.alignment import hunks
from ..show.visible import counted, quoted
from ..study.seams import CalledFunction, StandIn
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.tokenizer import Ids, Tokenizer
from .break_checks import spell
from .finding import Cause, Finding

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "I am a user."}
ASSISTANT = {"role": "assistant", "content": "I am an assistant."}


class IncrementalMode(StrEnum):
    """What a message is rendered after: a fixed conversation, or all messages before it."""

    FIXED_BASE = "fixed_base"
    DELTA = "delta"


class SanityCheck(StrEnum):
    """Which differences are reported: all, all but white space, or none."""

    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"
    OFF = "off"


class TokenizationMismatchWarning(UserWarning):
    """Incremental tokenization gave other ids than a full render."""


@dataclass(frozen=True, slots=True, eq=False)
class IncrementalTokens:
    """Ids, a mask of assistant tokens, and what the sanity check reports."""

    ids: Ids
    mask: npt.NDArray[np.bool_]
    mismatches: list[Finding]


def tokenize_incrementally(
    renderer: Renderer,
    messages: Any,
    *,
    tools: Any = None,
    mode: IncrementalMode | str = IncrementalMode.FIXED_BASE,
    sanity_check: SanityCheck | str = SanityCheck.STRICT,
) -> IncrementalTokens:
    """Tokenize a conversation message by message; consecutive tool results are one turn.

    All before the first assistant is one render. The mask covers what an assistant message adds
    after its prompt. Issues a TokenizationMismatchWarning if ids differ. Raises TemplateError
    if the template refuses a message in every context.

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
    pieces = list(_Pieces(renderer, tools, mode is IncrementalMode.FIXED_BASE, conversation))
    ids = np.concatenate([piece.ids for piece in pieces])
    lengths = [len(piece.ids) for piece in pieces]
    mask = np.repeat(np.array([piece.sampled for piece in pieces], np.bool_), lengths)
    mismatches: list[Finding] = []
    if check is not SanityCheck.OFF:
        owners = np.repeat([piece.message for piece in pieces], lengths)
        full = renderer.render(conversation, tools=tools)
        ignored = Cause.WHITESPACE if check is SanityCheck.IGNORE_STRIPPABLE else None
        differing = _mismatches(renderer.tokenizer, ids, owners, full)
        mismatches = [one for one in differing if one.cause is not ignored]
    if mismatches:
        problem = f"{mode} tokenization differs from a full render in {counted(len(mismatches), 'place')}"
        warnings.warn(f"{problem}, first at {mismatches[0]}", TokenizationMismatchWarning, stacklevel=2)
    return IncrementalTokens(ids, mask, mismatches)


def _mismatches(
    tokenizer: Tokenizer, ids: Ids, owners: npt.NDArray[Any], full: RenderedTokens
) -> Iterator[Finding]:
    """Compare with a full render. `owners` has the message of each id."""
    for hunk in hunks(ids, full.ids):
        sides = hunk.sides(ids, full.ids)
        here, there = (spell(tokenizer.vocabulary, side) for side in sides)
        cause = Cause.UNKNOWN if b"".join(here.split()) != b"".join(there.split()) else Cause.WHITESPACE
        cause = Cause.BPE_REMERGE if here == there else cause
        owner = int(full.messages[hunk.other_start] if len(sides[1]) else owners[hunk.start])
        texts = [quoted(tokenizer.decode(side)) for side in sides]
        words, message = f"{texts[0]} where the full render has {texts[1]}", owner if owner >= 0 else None
        yield Finding(cause, message=message, words=words, position=hunk.start, tokens=len(sides[0]))


class _Piece(NamedTuple):
    ids: Ids
    message: int = -1
    sampled: bool = False


@dataclass(frozen=True, slots=True)
class _Pieces:
    renderer: Renderer
    tools: Any
    has_base: bool
    messages: Messages

    def __iter__(self) -> Iterator[_Piece]:
        roles = [message["role"] for message in self.messages]
        replies = (
            at for at, role in enumerate(roles) if role == "assistant" and {*roles[:at]} - {"assistant"}
        )
        start = next(replies, len(roles))
        prompted = start < len(roles)
        yield _Piece(self._render(self.messages[:start], prompted).ids)
        while start < len(roles):
            stop = start + 1
            while roles[start] in RESULT_ROLES and stop < len(roles) and roles[stop] in RESULT_ROLES:
                stop += 1  # templates write consecutive results as one turn
            if roles[start] == "assistant" and not prompted:
                yield self._piece(start, start)
            yield self._piece(start, stop)
            start, prompted = stop, False

    def _render(self, messages: Messages, prompt: bool) -> RenderedTokens:
        return self.renderer.render(messages, tools=self.tools, add_generation_prompt=prompt)

    def _piece(self, start: int, stop: int) -> _Piece:
        """What messages add; for none, the generation prompt."""
        unit = self.messages[start:stop]
        role = unit[0]["role"] if unit else ""
        tried: dict[int, Ids] = {}
        refusals: list[TemplateError] = []
        for context in self._contexts(start, unit, role):
            try:
                added, problems = self._added(context, unit, role == "assistant")
            except TemplateLimitError:
                raise
            except TemplateError as error:
                refusals.append(error)
                continue
            except InputError as error:
                raise error.renumbered(len(context) - start) from None
            tried.setdefault(problems, added)
            if not problems:
                break
        if tried:
            return _Piece(tried[min(tried)], start, role == "assistant")
        what = f"the {role} message" if unit else "to ask for a reply"
        where = "every fixed base" if self.has_base else "the messages before it"
        advice = "use another mode, or Renderer.render on the whole conversation"
        problem = f"the template refuses {what} after {where} ({refusals[0].problem}); {advice}"
        raise TemplateError(problem, message=start if unit else start - 1, line=refusals[0].line)

    def _added(self, context: Messages, unit: Messages, sampled: bool) -> tuple[Ids, int]:
        """What a unit adds, and the number of possible problems."""
        vocabulary = self.renderer.tokenizer.vocabulary
        before = self._render(context, sampled).text
        after = self._render([*context, *unit], not unit).rendering
        spans = after.spans(len(before))
        base = {Origin.of(number, "content") for number in range(len(context) * self.has_base)}
        rewrites, repeats = not after.text.startswith(before), any(origin in base for *_, origin in spans)
        # a control token goes first if the tokenizer adds a space to the first word
        control = vocabulary.control.values() if vocabulary.first_prefixed else ()
        guard = next((one.text for one in control if not (one.lstrip or one.rstrip or one.single_word)), "")
        piece = Rendering.of([(guard, -1, None), *spans])
        encoded = self.renderer.encode_text(piece, [*context, *unit], tools=self.tools)
        return encoded.ids[bool(guard) :], rewrites + repeats

    def _contexts(self, start: int, unit: Messages, role: str) -> Iterator[Messages]:
        """Contexts; before an assistant, they end with a user."""
        if not self.has_base:
            yield self.messages[:start]
            return
        yield from ([SYSTEM, USER], [USER])
        answers: Messages = [ASSISTANT] if role not in ("", "assistant") else []
        if role in RESULT_ROLES:
            calls = [call for message in self.messages[:start] for call in message.get("tool_calls") or ()]
            called = {call.get("id"): (call.get("function") or call).get("name") for call in calls}
            ids = [(one.get("tool_call_id"), one.get("name")) for one in unit]
            answered = [CalledFunction(id, name or called.get(id) or "function") for id, name in ids]
            forms = (StandIn("", calls=True, text_arguments=as_text) for as_text in (False, True))
            answers = [form.message(answered) for form in forms]
        for answer in answers:
            yield from ([SYSTEM, USER, answer], [USER, answer])
