"""Which control tokens live inside an assistant's turn, and which end it or begin another.

An assistant's text may hold the former: a model writes ``<think>`` and ``<tool_call>`` itself. It may not hold the
latter: a model that repeats ``<|im_end|><|im_start|>system`` after a user must not end its turn by that, once its text
is rendered again. Nothing of this is declared per model:

- *never inside* is what turns begin and end with, what stops generation, and the tokens that the tokenizer's
  configuration names (beginning, end, padding);
- *inside* are the delimiters of reasoning, content and calls, what a generation prompt opens under any setting of the
  template's variables, and what else the template writes only in an assistant's turn;
- a token that is never written is inside if it is not special and a tag, ``<name>`` or ``</name>``;
- *outside* is all else: role markers, markers of results, placeholders of media.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ..formats.grammar import TurnGrammar
from ..tokens.vocabulary import Vocabulary
from .probes import ASSISTANT_TURNS, OTHER_TURNS, USER, role_turn

if TYPE_CHECKING:
    from .study import TemplateStudy

_NAMED: Final = frozenset(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))
"""What a configuration calls tokens that no turn holds."""
_ROLE: Final = re.compile(r"[a-z][a-z_.-]{2,30}")
_TAG: Final = re.compile(r"</?[\w:.-]+>")


class ControlTokens(NamedTuple):
    """The control tokens that a template writes, by whose turn they are in."""

    assistant: set[int]
    elsewhere: set[int]
    """Outside of assistants' turns, without tools."""
    all: set[int]


def inner_tokens(study: TemplateStudy, grammar: TurnGrammar) -> frozenset[int]:
    """The control tokens that an assistant's text may hold."""
    vocabulary = study.tokenizer.vocabulary
    variables = study.tokenizer.variables.items()
    named = {name: vocabulary.control[text].id for name, text in variables if text in vocabulary.control}
    never = set(study.eos) | _spelled(vocabulary, grammar.head)
    for tools in (False, True):
        never |= study.endings(tools).closers | study.endings(tools).heads
    never.update(index for name, index in named.items() if name in _NAMED)
    tokens = control_tokens(study)
    delimiters = _spelled(vocabulary, "\n".join([*_delimiters(grammar), *_prompts(study)]))
    inside = (delimiters | (tokens.assistant - tokens.elsewhere)) - never
    tags = {token.id for text, token in vocabulary.control.items() if not token.special and _TAG.fullmatch(text)}
    return frozenset(inside | (tags - tokens.all - set(named.values()) - never))


def _prompts(study: TemplateStudy) -> Iterator[str]:
    """What asking for a reply adds, with each variable of the template on and off."""
    for name, value in itertools.product(sorted(study.template.variables), (True, False)):
        prompted, plain = (study.probe((USER,), False, prompt, {name: value}) for prompt in (True, False))
        if prompted is not None and plain is not None and prompted.text.startswith(plain.text):
            yield prompted.text[len(plain.text) :]


def control_tokens(study: TemplateStudy) -> ControlTokens:
    """The control tokens that the template writes in probe conversations."""
    roles = [word for word in sorted(study.template.constants) if _ROLE.fullmatch(word)][:64]  # maybe other roles
    tokens = ControlTokens(set(), set(), set())
    for tools, prompt in itertools.product((False, True), (False, True)):
        for probe in (*ASSISTANT_TURNS, *OTHER_TURNS, *map(role_turn, roles)):
            rendering = study.readable(probe, tools, prompt)
            spans = rendering.spans() if rendering is not None else ()
            for message, turn in itertools.groupby(spans, key=lambda span: span[1]):
                scaffold = "".join(text if origin is None else "\0" for text, _, origin in turn)
                spelled = _spelled(study.tokenizer.vocabulary, scaffold)
                tokens.all.update(spelled)
                if probe in ASSISTANT_TURNS and message == 1:
                    tokens.assistant.update(spelled)
                elif not tools and (message < 0 or probe[message]["role"] != "assistant"):
                    tokens.elsewhere.update(spelled)
    return tokens


def _delimiters(grammar: TurnGrammar) -> Iterator[str]:
    """The delimiters of what a turn holds. The heads of channels are none."""
    for frame in (grammar.reasoning, grammar.content):
        if frame is not None:
            yield from (frame.open, frame.close)
    calls = grammar.calls
    if calls is not None:
        yield from (calls.section_open, calls.section_close, calls.separator, calls.open, calls.begin, calls.end)
        yield from (calls.close, calls.key_open, calls.value_open, calls.value_close, calls.string_open, calls.quote)
        yield from (text for text, _ in calls.head)
        yield from (text for _, text in calls.typed_opens)


def _spelled(vocabulary: Vocabulary, text: str) -> set[int]:
    """The control tokens in a text."""
    pattern = vocabulary.control_pattern
    return {vocabulary.control[match[0]].id for match in pattern.finditer(text)} if pattern is not None else set()
