"""Which control tokens live inside an assistant's turn, and which end it or begin another.

An assistant's text may hold the former: a model writes ``<think>`` and ``<tool_call>`` itself, and hand-made turns
have them in their content. It may not hold the latter: a model that repeats ``<|im_end|><|im_start|>system`` after a
user, and is read and rendered again, must not end its turn by that. Nothing of this is declared per model:

- *never inside* is what turns begin and end with: the head of an assistant's turn, what closes one, what stops
  generation, and the tokens that the tokenizer's configuration names (beginning, end, padding, images);
- *inside* are the delimiters of reasoning, content and calls, and what else the template writes in an assistant's turn
  after a user's, unless it also writes it in the turns of others;
- *outside* is all else that the template writes: role markers, markers of results, placeholders of media;
- a token that is never written is inside if its vocabulary does not call it special and it is a tag, ``<name>`` or
  ``</name>``. Others that nobody shows (``<|image|>``, ``<|EOT|>``) may stand for anything, and are outside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..formats.grammar import TurnGrammar
from ..template.trace import Rendering
from ..tokens.tokenizer import Tokenizer
from ..tokens.vocabulary import Vocabulary
from .turns import TurnFacts, stringified

Draw = Callable[[Messages, bool], Rendering]

_NAMED: Final = frozenset({"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"})
"""What a configuration calls tokens that no turn holds. It may name others, of which the template has the last word."""

_USER: Final = {"role": "user", "content": "question"}
_REPLY: Final = {"role": "assistant", "content": "answer"}
_THOUGHT: Final = {"role": "assistant", "reasoning_content": "thought", "content": "answer"}


def _calling(**fields: Any) -> Mapping[str, Any]:
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": "probe", "arguments": {"key": "value", "n": n}}}
        for n in (1, 2)
    ]
    return {"role": "assistant", "tool_calls": calls[: fields.pop("count", 2)], **fields}


def _result(number: int) -> Mapping[str, Any]:
    return {"role": "tool", "name": "probe", "tool_call_id": f"call0000{number}", "content": "result"}


_CALLS: Final = (
    _calling(content=""),
    _calling(content="", count=1),
    _calling(content="answer", reasoning_content="thought"),
    _calling(content="answer", reasoning_content="thought", count=1),
)
_SAID: Final[tuple[Messages, ...]] = ([_USER, _REPLY], [_USER, _THOUGHT], *([_USER, call] for call in _CALLS))
"""Conversations in which an assistant answers a user."""
_AROUND: Final[tuple[Messages, ...]] = (
    [_USER],
    [{"role": "system", "content": "rules"}, _USER],
    [{"role": "developer", "content": "rules"}, _USER],
    [_USER, _REPLY, _USER, _REPLY],
    *(
        [_USER, call, *(_result(n + 1) for n in range(len(call["tool_calls"]))), *rest]
        for call in _CALLS
        for rest in ((), (_REPLY, _USER), (_THOUGHT,))
    ),
    *(
        [{"role": "user", "content": [{"type": kind, kind: "medium"}, {"type": "text", "text": "question"}]}]
        for kind in ("image", "video", "audio")
    ),
)
"""Conversations in which there is more."""

_ROLE: Final = re.compile(r"[a-z][a-z_.-]{2,30}")
_TAG: Final = re.compile(r"</?[\w:.-]+>")


def inner_tokens(
    tokenizer: Tokenizer,
    draws: Sequence[Draw],
    facts: Iterable[TurnFacts],
    eos: frozenset[int],
    grammar: TurnGrammar,
    constants: frozenset[str],
) -> frozenset[int]:
    """The control tokens that an assistant's text may hold.

    `draws` render without tools and with them; `constants` are what the template compares things with: other roles.
    """
    roles = [word for word in sorted(constants) if _ROLE.fullmatch(word)][:64]
    around = [*_AROUND, *([_USER, {"role": role, "content": "words"}, _USER] for role in roles)]
    vocabulary = tokenizer.vocabulary
    never = set(eos).union(*(some.closers | some.heads for some in facts), _spelled(vocabulary, grammar.head))
    named = {name: vocabulary.control[text].id for name, text in _variables(tokenizer)}
    never.update(index for name, index in named.items() if name in _NAMED)
    written: set[int] = set(named.values())
    others: set[int] = set()
    own: set[int] = set()
    for draw, plain in zip(draws, [True, *[False] * len(draws)], strict=False):
        for messages, turn, text in _scaffold(draw, (*_SAID, *around)):
            found = _spelled(vocabulary, text)
            written |= found
            if messages in _SAID and turn == 1:
                own |= found
            elif plain and (turn < 0 or messages[turn]["role"] != "assistant"):
                others |= found
    delimiters = _spelled(vocabulary, "\n".join(_delimiters(grammar)))
    inside = (delimiters | (own - others)) - never
    tags = {token.id for text, token in vocabulary.control.items() if not token.special and _TAG.fullmatch(text)}
    return frozenset(inside | (tags - written - never))


def _variables(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [(name, text) for name, text in tokenizer.variables.items() if text in tokenizer.vocabulary.control]


def _scaffold(draw: Draw, conversations: Iterable[Messages]) -> Iterator[tuple[Messages, int, str]]:
    """What the template itself writes, in stretches: in which conversation, and in whose turn (-1: in none)."""
    for messages in conversations:
        for prompt in (False, True):
            rendering = _drawn(draw, messages, prompt)
            if rendering is None:
                continue
            stretch, current = "", -1
            for text, turn, origin in rendering.spans():
                if origin is not None or turn != current:
                    yield messages, current, stretch
                    stretch, current = "", turn
                stretch += text if origin is None else ""
            yield messages, current, stretch


def _drawn(draw: Draw, messages: Messages, prompt: bool) -> Rendering | None:
    for some in (messages, [stringified(message) for message in messages]):
        try:
            return draw(some, prompt)
        except TokentraceError:
            continue
    return None


def _delimiters(grammar: TurnGrammar) -> Iterator[str]:
    """The delimiters of what a turn holds. Messages on channels have heads of their own, which are no such thing."""
    for frame in (grammar.reasoning, grammar.content):
        if frame is not None:
            yield from (frame.open, frame.close)
    calls = grammar.calls
    if calls is not None:
        yield from (calls.section_open, calls.section_close, calls.separator, calls.open, calls.begin, calls.end)
        yield from (calls.close, calls.key_open, calls.value_open, calls.value_close, calls.string_open, calls.quote)
        yield from (lead for lead, _ in calls.head)


def _spelled(vocabulary: Vocabulary, text: str) -> set[int]:
    """The control tokens in a text."""
    pattern = vocabulary.control_pattern
    return {vocabulary.control[match[0]].id for match in pattern.finditer(text)} if pattern is not None else set()
