"""Which control tokens end an assistant's turn, and which live inside it.

If a template does not close turns (GLM), the head of the next turn is the stop. A token after each
of several calls ends a call, not the turn.

An assistant's text may contain tokens that live inside a turn (``<think>``), but none that end or
begin one: a repeated ``<|im_end|><|im_start|>system`` must not end the turn.

- *Never inside*: tokens that begin or end turns, stop generation, or are named by the
  tokenizer's configuration (beginning, end, padding).
- *Inside*: delimiters of reasoning, content and calls, what a generation prompt opens with any
  variables, and any other token that the template writes only in an assistant's turn.
- A token that is never written is inside if it is not special and looks like ``<name>``.
- *Outside*: everything else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..formats.grammar import TurnGrammar
from ..tokens.encoding import Encoded
from ..tokens.vocabulary import Vocabulary
from . import probes
from .probes import Probe
from .turns import turn_spans

if TYPE_CHECKING:
    from .study import TemplateStudy

_NAMED = frozenset(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
_ROLE = re.compile(r"[a-z][a-z_.-]{2,30}")
_TAG = re.compile(r"</?[\w:.-]+>")


@dataclass(frozen=True, slots=True)
class TurnEndings:
    closers: frozenset[int] = frozenset()
    """Control tokens that end an assistant's turn."""
    heads: frozenset[int] = frozenset()
    """Control tokens that begin the next turn and stop the one before."""
    open_ended: bool = False
    """True if no closer ends turns, but the head of the next turn."""
    inner: frozenset[int] = frozenset()
    """Closers that also occur inside a turn: Harmony's ``<|end|>``."""
    has_end: bool = False
    """True if a probe shows the end of an answer."""

    @property
    def stops(self) -> frozenset[int]:
        """The tokens at which generation has to stop."""
        return (self.closers - self.inner or self.closers) | self.heads


def find_endings(study: TemplateStudy, tools: bool) -> TurnEndings:
    """How the template ends turns: answers and calls, last and not last."""
    closers, heads = set[int](), set[int]()
    open_ended = has_end = False
    for probe in (probes.ANSWERED, probes.CONTINUED, probes.RETURNED, probes.CALLED):
        ending = _ending(study, probe, tools)
        if ending is None:
            continue
        closer, head = ending
        if probe in (probes.ANSWERED, probes.CONTINUED):
            has_end = True
            open_ended |= closer is None and head is not None
        elif open_ended:
            closer = None
        elif has_end and not closers and closer not in study.eos:
            continue  # answers and calls end in text: this is a delimiter
        elif closer is not None and closer not in closers | study.eos:
            twice = study.readable(probes.CALLED_TWICE, tools)
            if twice is not None and int((study.encode(twice).ids == closer).sum()) > 1:
                closer = None  # it ends each call
        if closer is not None:
            closers.add(closer)
        elif head is not None:
            heads.add(head)
    between = set[int]()
    if (rendering := study.probe(probes.REASONED, tools)) is not None:
        for turn in turn_spans(rendering, {1}):
            if turn.body < turn.body_end:
                between.update(_control_tokens(study.encode(rendering), turn.body, turn.body_end))
    return TurnEndings(
        frozenset(closers), frozenset(heads), open_ended, frozenset(closers & between), has_end
    )


def _ending(study: TemplateStudy, probe: Probe, tools: bool) -> tuple[int | None, int | None] | None:
    """The last control token after the turn's text, and the next after the turn."""
    rendering = study.readable(probe, tools)
    turns = [turn for turn in turn_spans(rendering, {1}) if turn.start < turn.end] if rendering else []
    if rendering is None or not turns:
        return None
    encoded, start, end = study.encode(rendering), turns[0].body_end, turns[0].end
    inside, stop = _control_tokens(encoded, start, end), encoded.tokens_touching(start, end)[1]
    after = int(encoded.ids[stop]) if stop < len(encoded.ids) and encoded.control[stop] else None
    return inside[-1] if inside else None, after


def _control_tokens(encoded: Encoded, start: int, end: int) -> list[int]:
    tokens = slice(*encoded.tokens_touching(start, end))
    return list(map(int, encoded.ids[tokens][encoded.control[tokens]]))


def find_past_close(study: TemplateStudy) -> str:
    """What the template writes after the content of a past answer, in its turn."""
    for rendering in map(study.probe, (probes.CONTINUED, probes.ANSWERED)):
        if rendering is not None and (turns := turn_spans(rendering, {1})):
            return rendering.text[turns[0].body_end : turns[0].end]
    return ""


class WrittenControlTokens(NamedTuple):
    """The control tokens that a template writes. `elsewhere` is without tools."""

    assistant: set[int]
    elsewhere: set[int]
    all: set[int]


def inner_tokens(study: TemplateStudy, grammar: TurnGrammar) -> frozenset[int]:
    """The control tokens that an assistant's text may contain."""
    vocabulary = study.tokenizer.vocabulary
    control, variables = vocabulary.control, study.tokenizer.variables.items()
    named = {name: control[text].id for name, text in variables if text in control}
    never = set(study.eos) | _spelled(vocabulary, grammar.head)
    for tools in (False, True):
        never |= study.endings(tools).closers | study.endings(tools).heads
    never.update(index for name, index in named.items() if name in _NAMED)
    tokens = written_control_tokens(study)
    prompts = (study.prompts.alone(False, toggle) for toggle in study.toggles)
    added = (prompt.added for prompt in prompts if prompt is not None)
    delimiters = _spelled(vocabulary, "\n".join([*_delimiters(grammar), *added]))
    inside = delimiters | (tokens.assistant - tokens.elsewhere)
    tags = {token.id for text, token in control.items() if not token.special and _TAG.fullmatch(text)}
    return frozenset((inside | (tags - tokens.all - set(named.values()))) - never)


def written_control_tokens(study: TemplateStudy) -> WrittenControlTokens:
    words = list(filter(_ROLE.fullmatch, sorted(study.template.constants)))[:64]  # perhaps other roles
    role_turns = [(probes.USER, {"role": word, "content": "words"}, probes.USER) for word in words]
    tokens = WrittenControlTokens(set(), set(), set())
    for tools, prompt in itertools.product((False, True), (False, True)):
        for probe in (*probes.ASSISTANT_TURNS, *probes.OTHER_TURNS, *role_turns):
            rendering = study.readable(probe, tools, prompt)
            spans = rendering.spans() if rendering is not None else ()
            for message, turn in itertools.groupby(spans, key=lambda span: span[1]):
                scaffold = "".join(text if origin is None else "\0" for text, _, origin in turn)
                spelled = _spelled(study.tokenizer.vocabulary, scaffold)
                tokens.all.update(spelled)
                if probe in probes.ASSISTANT_TURNS and message == 1:
                    tokens.assistant.update(spelled)
                elif not tools and (message < 0 or probe[message]["role"] != "assistant"):
                    tokens.elsewhere.update(spelled)
    return tokens


def _delimiters(grammar: TurnGrammar) -> Iterator[str]:
    """The delimiters inside a turn, without headers of channels."""
    for frame in (grammar.reasoning, grammar.content):
        if frame is not None:
            yield from (frame.open, frame.close)
    if (calls := grammar.calls) is not None:
        yield from (
            calls.section_open,
            calls.section_close,
            calls.separator,
            calls.open,
            calls.begin,
            calls.end,
        )
        yield from (
            calls.close,
            calls.key_open,
            calls.value_open,
            calls.value_close,
            calls.string_open,
            calls.quote,
        )
        yield from (*(text for text, _ in calls.head), *(text for _, text in calls.typed_opens))


def _spelled(vocabulary: Vocabulary, text: str) -> set[int]:
    pattern = vocabulary.control_pattern
    names = pattern.findall(text) if pattern is not None else ()
    return {vocabulary.control[name].id for name in names}
