"""Which control tokens live inside an assistant's turn, and which end it or begin another.

An assistant's text may hold the former: a model writes ``<think>`` and ``<tool_call>`` itself, and hand-made turns
have them in their content. It may not hold the latter: a model that repeats ``<|im_end|><|im_start|>system`` after a
user, and is read and rendered again, must not end its turn by that. Nothing of this is declared per model:

- *never inside* is what turns begin and end with: the head of an assistant's turn, what closes one, what stops
  generation, and the tokens that the tokenizer's configuration names (beginning, end, padding, images);
- *inside* are the delimiters of reasoning, content and calls, what a generation prompt opens with any setting of the
  template's variables, and what else the template writes in an assistant's turn after a user's, unless it also writes
  it in the turns of others;
- *outside* is all else that the template writes: role markers, markers of results, placeholders of media;
- a token that is never written is inside if its vocabulary does not call it special and it is a tag, ``<name>`` or
  ``</name>``. Others that are never written (``<|image|>``, ``<|EOT|>``) may stand for anything, and are outside.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from ..formats.grammar import TurnGrammar
from ..tokens.tokenizer import Tokenizer
from ..tokens.vocabulary import Vocabulary
from .probes import ASSISTANT_TURNS, OTHER_TURNS, USER, Probe, role_turn

if TYPE_CHECKING:
    from .study import TemplateStudy

_NAMED: Final = frozenset({"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"})
"""What a configuration calls tokens that no turn holds. It may name others, of which the template has the last word."""

_ROLE: Final = re.compile(r"[a-z][a-z_.-]{2,30}")
_TAG: Final = re.compile(r"</?[\w:.-]+>")


def inner_tokens(study: TemplateStudy, grammar: TurnGrammar) -> frozenset[int]:
    """The control tokens that an assistant's text may hold, where its turns are written as `grammar` says."""
    vocabulary = study.tokenizer.vocabulary
    named = {name: vocabulary.control[text].id for name, text in _variables(study.tokenizer)}
    never = set(study.eos) | _spelled(vocabulary, grammar.head)
    for tools in (False, True):
        never |= study.endings(tools).closers | study.endings(tools).heads
    never.update(index for name, index in named.items() if name in _NAMED)
    own, others, written = _written(study)
    written |= set(named.values())
    delimiters = _spelled(vocabulary, "\n".join([*_delimiters(grammar), *_prompts(study)]))
    inside = (delimiters | (own - others)) - never
    tags = {token.id for text, token in vocabulary.control.items() if not token.special and _TAG.fullmatch(text)}
    return frozenset(inside | (tags - written - never))


def _prompts(study: TemplateStudy) -> Iterator[str]:
    """What asking for a reply adds to the text, under each truth value of each of the template's variables."""
    for name, value in itertools.product(sorted(study.template.variables), (True, False)):
        prompted, plain = (study.probe((USER,), False, prompt, {name: value}) for prompt in (True, False))
        if prompted is not None and plain is not None and prompted.text.startswith(plain.text):
            yield prompted.text[len(plain.text) :]


def _written(study: TemplateStudy) -> tuple[set[int], set[int], set[int]]:
    """The control tokens of assistants' turns, of what stands outside of them (without tools), and all of them."""
    vocabulary = study.tokenizer.vocabulary
    roles = [word for word in sorted(study.template.constants) if _ROLE.fullmatch(word)][:64]  # maybe other roles
    probes = (*ASSISTANT_TURNS, *OTHER_TURNS, *map(role_turn, roles))
    own: set[int] = set()
    others: set[int] = set()
    written: set[int] = set()
    for tools in (False, True):
        for probe, turn, text in _scaffold(study, probes, tools):
            found = _spelled(vocabulary, text)
            written |= found
            if probe in ASSISTANT_TURNS and turn == 1:
                own |= found
            elif not tools and (turn < 0 or probe[turn]["role"] != "assistant"):
                others |= found
    return own, others, written


def _variables(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [(name, text) for name, text in tokenizer.variables.items() if text in tokenizer.vocabulary.control]


def _scaffold(study: TemplateStudy, probes: Iterable[Probe], tools: bool) -> Iterator[tuple[Probe, int, str]]:
    """What the template itself writes, in stretches: in which conversation, and in whose turn (-1: in none)."""
    for probe in probes:
        for prompt in (False, True):
            rendering = study.readable(probe, tools, prompt)
            if rendering is None:
                continue
            stretch, current = "", -1
            for text, turn, origin in rendering.spans():
                if origin is not None or turn != current:
                    yield probe, current, stretch
                    stretch, current = "", turn
                stretch += text if origin is None else ""
            yield probe, current, stretch


def _delimiters(grammar: TurnGrammar) -> Iterator[str]:
    """The delimiters of what a turn holds. Messages on channels have heads of their own, which are no such thing."""
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
