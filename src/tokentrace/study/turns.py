"""Turns: where each one stands in a rendering, and which of its tokens the model samples.

A token is sampled iff it lies in an assistant's turn, after that turn's own generation prompt, up to and
including its stop token. Nothing of this is declared per model:

- *where a turn stands* the trace says (`sections`);
- *its generation prompt* is what the template writes after the last message when it is asked for one, at that
  very point of a conversation (`PromptTails`);
- *its stop token* is the control token that ends it. Where a template closes turns with nothing, the model
  stops by sampling the head of the next turn (GLM), and that token is the stop (`TurnFacts`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..template.trace import Rendering
from ..tokens.encoding import Encoded
from ..tokens.tokenizer import Tokenizer

Render = Callable[[Messages, bool], Rendering]
"""Renders messages with or without a generation prompt; tools and template variables are already settled."""


@dataclass(slots=True)
class Section:
    """A stretch of text written in one message's turn."""

    message: int
    start: int
    end: int
    body: int
    """Where the first text of one of the message's own fields begins (`end` if there is none)."""
    body_end: int
    """Where the last such text ends (`start` if there is none)."""
    before: int
    """The message whose turn came before (-1: none)."""


def sections(rendering: Rendering) -> list[Section]:
    """The turns of a rendering, in order. A message has several where others were written inside its turn."""
    out: list[Section] = []
    current: Section | None = None
    start = 0
    for end, turn, origin in zip(rendering.ends, rendering.turns, rendering.origins, strict=True):
        if turn < 0:
            current = None
        else:
            if current is None or current.message != turn:
                before = out[-1].message if out else -1
                current = Section(turn, start, end, -1, start, before)
                out.append(current)
            current.end = end
            if origin is not None and not origin.is_role:
                if current.body < 0:
                    current.body = start
                current.body_end = end
        start = end
    for section in out:
        if section.body < 0:
            section.body = section.end
    return out


class PromptTails:
    """Generation prompts, by the circumstances that a template can make them depend on.

    The prompt before an assistant's turn depends on the role of the message before it, on whether there are
    tools, and on words that the template looks for in what system and user said (``/no_think``). For each such
    combination it is found once, by rendering the conversation at hand up to that turn.
    """

    def __init__(self, constants: frozenset[str]) -> None:
        self.words = sorted(word for word in constants if len(word) > 1)
        self._known: dict[tuple[Any, ...], str] = {}
        self._added: dict[tuple[Any, ...], str] = {}
        self._lengths: dict[tuple[str, str], int | None] = {}

    def circumstances(self, messages: Messages, has_tools: bool) -> list[tuple[Any, ...]]:
        """For each position, what a generation prompt at that position could depend on."""
        out: list[tuple[Any, ...]] = [("", (), (), has_tools)]
        system: tuple[str, ...] = ()
        user: tuple[str, ...] = ()
        for message in messages:
            role = message["role"]
            if role in ("system", "developer", "user"):
                content = message.get("content")
                found = tuple(word for word in self.words if word in content) if isinstance(content, str) else ()
                if role == "user":
                    user = found
                else:
                    system += found
            out.append((role, system, user, has_tools))
        return out

    def tail(self, circumstance: tuple[Any, ...], messages: Messages, count: int, render: Render) -> str | None:
        """The generation prompt after the first `count` messages; None where the template refuses to write one."""
        known = self._known.get(circumstance)
        if known is None and count:
            try:
                rendering = render(messages[:count], True)
            except TokentraceError:
                return None
            known = self._known[circumstance] = rendering.text[rendering.tail :]
            self._added[circumstance] = _added(rendering, messages[:count], render)
        return known

    def others(self, circumstances: Iterable[tuple[Any, ...]], render: Render) -> set[str]:
        """The generation prompts of some circumstances, and of a question by itself.

        Of this conversation's, and of no other that was rendered before: its mask must not depend on those.
        """
        self.tail(_ALONE, [_USER], 1, render)
        some = [_ALONE, *circumstances]
        return {found[one] for found in (self._known, self._added) for one in some if found.get(one)}

    def prompts(self, circumstance: tuple[Any, ...]) -> list[str]:
        """What is known to ask for a reply: the generation prompt, and what asking for it adds to the text."""
        found = (self._known.get(circumstance, ""), self._added.get(circumstance, ""))
        return sorted({prompt for prompt in found if prompt}, key=len)

    def prompt_length(
        self, encoded: Encoded, section: Section, tail: str | None, others: Callable[[], set[str]], tokenizer: Tokenizer
    ) -> int | None:
        """How many characters at the head of a turn are its generation prompt.

        0 if the prompt was written before the turn began; None if it is nowhere. A turn that begins with the
        generation prompt of other circumstances than its own has that one.
        """
        text = encoded.rendering.text
        whole = text.find(tail, section.start, section.body + len(tail)) if tail else -1
        if tail and 0 <= whole <= section.body:  # it may end inside a field: content that brings its own ``<think>``
            end = whole + len(tail)
            if end <= section.body or _is_written(encoded, section.body, end, tokenizer):
                return end - section.start
        scaffold = text[section.start : section.body]
        length = self._prompt_in(scaffold, tail, tokenizer) if tail else None
        if length is None and tail and text.endswith(tail, 0, section.start):
            length = 0
        if not length and scaffold:
            found = [self._prompt_in(scaffold, other, tokenizer) for other in others()]
            length = max((other for other in found if other), default=length)
        return 0 if length is None and (tail == "" or not scaffold) else length

    def _prompt_in(self, scaffold: str, tail: str, tokenizer: Tokenizer) -> int | None:
        """`_prompt_in`, remembered: turns begin alike."""
        key = (scaffold, tail)
        if key not in self._lengths:
            if len(self._lengths) > 1000:
                self._lengths.clear()
            self._lengths[key] = _prompt_in(scaffold, tail, tokenizer)
        return self._lengths[key]


def _added(prompted: Rendering, messages: Messages, render: Render) -> str:
    """What asking for a generation prompt adds to the text.

    Less than the tail where a template writes the end of a message outside its turn (Llama's first user message
    beside tools), more where it writes the prompt inside of one.
    """
    try:
        plain = render(messages, False)
    except TokentraceError:
        return ""
    return prompted.text[len(plain.text) :] if prompted.text.startswith(plain.text) else ""


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """How turns end, found out on small conversations."""

    closers: frozenset[int] = frozenset()
    """Control tokens that end an assistant's turn."""
    heads: frozenset[int] = frozenset()
    """Control tokens that begin the next turn and are sampled as the stop of the one before."""
    open_ended: bool = False
    """Nothing closes a turn: the head of the next one does."""
    inner: frozenset[int] = frozenset()
    """Closers that also stand inside a turn (Harmony's ``<|end|>``, after reasoning): no reason to stop there."""
    seen: bool = False
    """Whether the end of an answer was seen at all."""

    @property
    def stops(self) -> frozenset[int]:
        """The tokens at which generation has to stop."""
        return (self.closers - self.inner or self.closers) | self.heads


_PROBE_CALL: Final = {"id": "call00001", "type": "function"}


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"probe{number}", "arguments": {"key": "value"}}
    return {**_PROBE_CALL, "id": f"call0000{number}", "function": function}


_USER: Final = {"role": "user", "content": "question"}
_ALONE: Final = ("user",)
"""The circumstances of a question by itself."""
_TOOL: Final = {"role": "tool", "name": "probe1", "tool_call_id": "call00001", "content": "result"}
_PROBES: Final[tuple[tuple[tuple[Mapping[str, Any], ...], bool], ...]] = (
    ((_USER, {"role": "assistant", "content": "answer"}), False),
    ((_USER, {"role": "assistant", "content": "answer"}, _USER), False),
    ((_USER, {"role": "assistant", "content": "", "tool_calls": [_call(1)]}, _TOOL), True),
    ((_USER, {"role": "assistant", "content": "", "tool_calls": [_call(1)]}), True),
)


def find_turn_facts(
    tokenizer: Tokenizer,
    render: Render,
    encode: Callable[[Rendering, Messages], Encoded],
    eos: frozenset[int],
) -> TurnFacts:
    """Look at how the template ends turns: with an answer, with a tool call, last and not last."""
    closers: set[int] = set()
    heads: set[int] = set()
    open_ended = seen = False
    for probe, is_call in _PROBES:
        ending = _probe(probe, render, encode)
        if ending is None:
            continue
        closer, head = ending
        if not is_call:
            seen = True
            if closer is not None:
                closers.add(closer)
            elif head is not None:
                open_ended = True
                heads.add(head)
        elif open_ended:
            if head is not None:
                heads.add(head)
        elif seen and not closers and closer not in eos:
            continue  # answers end in text, and so do calls: what stands at their end is a delimiter
        elif closer is not None and (closer in closers | eos or not _is_delimiter(closer, render, encode)):
            closers.add(closer)
        elif head is not None:
            heads.add(head)
    inner = closers & _inside(render, encode)
    return TurnFacts(frozenset(closers), frozenset(heads), open_ended, frozenset(inner), seen)


def _inside(render: Render, encode: Callable[[Rendering, Messages], Encoded]) -> set[int]:
    """Control tokens that stand between an assistant's reasoning and what it says."""
    messages: Messages = [_USER, {"role": "assistant", "content": "answer", "reasoning_content": "thought"}]
    try:
        encoded = encode(render(messages, False), messages)
    except TokentraceError:
        return set()
    found: set[int] = set()
    for section in sections(encoded.rendering):
        if section.message == 1 and section.body < section.body_end:
            first, stop = encoded.tokens_touching(section.body, section.body_end)
            found.update(int(encoded.ids[at]) for at in range(first, stop) if encoded.control[at])
    return found


def _probe(
    messages: Messages, render: Render, encode: Callable[[Rendering, Messages], Encoded]
) -> tuple[int | None, int | None] | None:
    """The last control token of the assistant's turn after its text, and the token that comes next."""
    try:
        rendering = render(_with_text_arguments(messages, render), False)
        encoded = encode(rendering, messages)
    except TokentraceError:
        return None
    own = [section for section in sections(rendering) if section.message == 1 and section.start < section.end]
    if not own:
        return None
    section = own[0]
    first, stop = encoded.tokens_touching(section.body_end, section.end)
    inside = [int(encoded.ids[at]) for at in range(first, stop) if encoded.control[at]]
    after = int(encoded.ids[stop]) if stop < len(encoded.ids) and encoded.control[stop] else None
    return inside[-1] if inside else None, after


def _with_text_arguments(messages: Messages, render: Render) -> Messages:
    """The probe with arguments as a mapping or, where the template wants that, as a JSON string."""
    try:
        render(messages, False)
    except TokentraceError:
        return [stringified(message) for message in messages]
    return messages


def stringified(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its arguments as JSON strings, and None where it says nothing beside them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in calls
    ]
    return {
        **message,
        "content": None if not message.get("content") else message["content"],
        "tool_calls": changed,
    }


def _is_delimiter(token: int, render: Render, encode: Callable[[Rendering, Messages], Encoded]) -> bool:
    """Whether a control token stands after every call of a turn, so that it ends a call and not the turn."""
    messages: Messages = [_USER, {"role": "assistant", "content": "", "tool_calls": [_call(1), _call(2)]}]
    try:
        encoded = encode(render(_with_text_arguments(messages, render), False), messages)
    except TokentraceError:
        return False
    return int((encoded.ids == token).sum()) > 1


@dataclass(slots=True)
class SampledTurn:
    """The tokens of one turn that the model samples: ``start`` to ``stop``, the stop token included."""

    message: int
    start: int
    stop: int
    stop_token: int | None
    other_prompt: str = ""
    """The generation prompt of this turn, where the turn does not go on from it, id for id: a start that inference
    never gives. Empty where it does, or where nothing is known of the prompt."""


@dataclass(slots=True)
class Sampling:
    """The sampled turns of a rendering, and what could not be settled."""

    turns: list[SampledTurn] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def mask(self, length: int) -> npt.NDArray[np.bool_]:
        mask = np.zeros(length, np.bool_)
        for turn in self.turns:
            mask[turn.start : turn.stop] = True
        return mask


def find_sampled(
    encoded: Encoded,
    turns: Sequence[Section],
    messages: Messages,
    *,
    facts: TurnFacts,
    tails: PromptTails,
    has_tools: bool,
    render: Render,
    tokenizer: Tokenizer,
) -> Sampling:
    """Which tokens the model samples. `render` is asked for a generation prompt only in new circumstances."""
    own = [section for section in turns if messages[section.message]["role"] == "assistant"]
    sampling = Sampling()
    if not own:
        return sampling
    circumstances = tails.circumstances(messages, has_tools)
    begins = []
    counts = [section.before + 1 if section.before >= 0 else section.message for section in own]
    tailed = [tails.tail(circumstances[count], messages, count, render) for count in counts]
    prompts = [tails.prompts(circumstances[count]) for count in counts]
    others = functools.cache(lambda: tails.others({circumstances[count] for count in counts}, render))
    for section, tail in zip(own, tailed, strict=True):
        length = tails.prompt_length(encoded, section, tail, others, tokenizer)
        if length is None:
            sampling.notes.append(
                f"message {section.message}: the template writes this turn without the generation prompt that it "
                "asks for a reply with; all of the turn counts as sampled"
            )
        begins.append(section.start + (length or 0))
    starts, aligned = encoded.first_touching(begins), encoded.first_after(begins)
    closes = encoded.first_touching([section.body_end for section in own])
    stops = encoded.first_after([section.end for section in own])
    for at, (section, start, close, stop) in enumerate(zip(own, starts, closes, stops, strict=True)):
        turn = _ended(encoded, section.message, start, max(start, close), max(start, stop), facts)
        is_first = not sampling.turns or sampling.turns[-1].message != section.message
        if is_first and prompts[at]:
            is_asked = encoded.rendering.text.endswith(tuple(prompts[at]), 0, begins[at])
            turn.other_prompt = "" if is_asked and aligned[at] == start else prompts[at][0]
        sampling.turns.append(turn)
    return sampling


def _is_written(encoded: Encoded, start: int, end: int, tokenizer: Tokenizer) -> bool:
    """Whether control tokens that a text names are those tokens, and not letters: text that nobody trusts."""
    pattern = tokenizer.vocabulary.control_pattern
    named = list(pattern.finditer(encoded.rendering.text, start, end)) if pattern is not None else []
    return all(encoded.control[encoded.first_touching([match.start()])[0]] for match in named)


def _prompt_in(scaffold: str, tail: str, tokenizer: Tokenizer) -> int | None:
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


def cut_points(tail: str, tokenizer: Tokenizer) -> list[int]:
    """Where a generation prompt may be cut off: at a tag, before and after a control token, at its end."""
    cuts = {at for at, char in enumerate(tail) if char == "<"}
    if tokenizer.vocabulary.control_pattern is not None:
        for match in tokenizer.vocabulary.control_pattern.finditer(tail):
            cuts -= set(range(match.start() + 1, match.end()))
            cuts |= {match.start(), match.end()}
    return sorted(cut for cut in cuts | {len(tail)} if cut)


def matched_prefix(scaffold: str, tail: str, cuts: Sequence[int]) -> int:
    """How much of the prompt the scaffold begins with: all of it, all of the scaffold, or up to a cut."""
    length = common_prefix(scaffold, tail)
    if length in (len(tail), len(scaffold)):
        return length
    return max((cut for cut in cuts if cut <= length), default=0)


def common_prefix(one: str, other: str) -> int:
    """How many characters two strings have in common at their beginning."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def turn_end(encoded: Encoded, section: Section, facts: TurnFacts) -> SampledTurn:
    """The end of one turn. Nothing is said about where it begins: `start` is the first token after its last field."""
    close = encoded.first_touching([section.body_end])[0]
    stop = encoded.first_after([section.end])[0]
    return _ended(encoded, section.message, close, close, max(close, stop), facts)


def _ended(encoded: Encoded, message: int, start: int, close: int, stop: int, facts: TurnFacts) -> SampledTurn:
    """A turn's sampled tokens: up to its closer, or up to the next head where that is the stop.

    `close` is the first token after the turn's last field, `stop` the first after the turn.
    """
    after = encoded.ids[close : stop + 1].tolist()
    for at in range(min(stop - close, len(after)) - 1, -1, -1):
        if after[at] in facts.closers:
            return SampledTurn(message, start, close + at + 1, after[at])
    if stop - close < len(after) and after[stop - close] in facts.heads:
        return SampledTurn(message, start, stop + 1, after[stop - close])
    if not facts.seen and not facts.open_ended and not facts.closers:
        control = np.flatnonzero(encoded.control[close:stop])
        if len(control):
            at = int(control[-1])
            return SampledTurn(message, start, close + at + 1, after[at])
    return SampledTurn(message, start, stop, None)
