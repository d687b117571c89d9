"""A grammar compiled for one vocabulary: delimiters as marked bytes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..computed import computed
from ..formats.dialects import DIALECTS
from ..formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from ..tokens.ids import check_last
from ..tokens.tokenizer import Ids
from .marked import MarkedBytes, mark, parts, pieces, tags, unforgeable
from .reader import Delimiters, Kinds, Pieces

_ARGUMENT_KEYS: dict[tuple[str, ...], str] = {("arguments",): "arguments", ("parameters",): "arguments"}


def _first(kind: str, *delimiters: Pieces) -> Kinds:
    return [(kind, delimiter[0]) for delimiter in delimiters if delimiter]


class CompiledFrame:
    def __init__(self, frame: Frame, marked: MarkedBytes) -> None:
        self.frame = frame
        texts = (frame.open, frame.lead, frame.trail, frame.close, frame.after)
        self.open, self.lead, self.trail, self.close, self.after = map(marked.scaffold, texts)


class ValueOpening(NamedTuple):
    """How a value opens. `is_string` is None if the opening does not say."""

    pieces: Pieces
    lead: bytes
    is_string: bool | None


class CompiledCalls:
    def __init__(self, grammar: CallGrammar, marked: MarkedBytes, stops: Iterable[bytes]) -> None:
        def of(text: str) -> Pieces:
            return pieces(marked.scaffold(text))

        self.grammar, self.style, self.stops = grammar, grammar.style, list(stops)
        self.before, self.after = grammar.before.encode(), grammar.after.encode()
        self.separator = grammar.separator.encode()
        self.section_open, self.section_close = of(grammar.section_open), of(grammar.section_close)
        self.open, self.close = of(grammar.open), of(grammar.close)
        self.head: list[tuple[Pieces, str]] = [(of(lead), field) for lead, field in grammar.head]
        self.begin, self.end = of(grammar.begin), of(grammar.end)
        self.finish = self.end + self.close
        lead = self.head[0][0] if self.head else ()
        self.another = self.open or lead
        self.quote = marked.scaffold(grammar.quote)
        self.key_open = of(grammar.key_open)
        self.value_opens = _value_openings(grammar, marked)
        closing = marked.scaffold(grammar.value_close)
        self.value_close = pieces(closing)
        self.value_trail = closing[: len(closing) - len(closing.lstrip())]
        first = (self.section_open or self.open or (b"",))[0]
        self.bare = first in (b"", b"[", b"{")
        """True if calls have no delimiters: their contents tell."""
        tagged = (piece[5:] for piece in self.section_open if unforgeable(piece))
        self.named_section = any(re.search(b"[A-Za-z]", name) for name in tagged)
        """True if a tag names the section: calls outside are misplaced."""
        self.inner = bool(self.open) and (bool(lead) or self.style is Style.JSON_CALL)
        """True if one pair of delimiters can enclose several calls."""
        self.openers = [] if self.bare else [*self.section_open[:1]]
        if not self.bare and self.open and (not self.openers or unforgeable(self.open[0])):
            self.openers.append(self.open[0])
        self.headless_opener = b""
        if self.bare:
            self.headless_opener = (
                b"{" if self.style is Style.JSON_CALL and not self.section_open else first
            )
        elif self.style is Style.PAIRS and self.open and lead and self.end:
            self.headless_opener = lead[0]
        self._compile_keys()
        self._compile_sets([("stop", stop) for stop in self.stops])

    def _compile_keys(self) -> None:
        self.paths = {path: field for field, path in self.grammar.keys}
        self.inner_paths = {path[:length] for path in self.paths for length in range(1, len(path))}
        self.keys = {path[0] for path in self.paths} | {"type"}
        usual = any(len(path) == 1 for path, field in self.paths.items() if field == "arguments")
        self.fields = {**(_ARGUMENT_KEYS if usual else {}), **self.paths}
        """The field at each path, also at paths that servers accept for arguments."""
        if self.style is Style.TREE:
            tag = (self.value_close[0], self.key_open[0], self.value_opens[0].pieces[0])
            pattern = b"(?:(?P<close>%b)|%b)(?P<name>[^<\xff]*?)(?P<end>%b|\\Z)"
            self.tags = re.compile(pattern % tuple(map(re.escape, tag)))

    def _compile_sets(self, stops: Kinds) -> None:
        openings = _first("hard", self.section_open, self.open, self.section_close)
        self._hard = [*stops, *(one for one in openings if unforgeable(one[1]))]
        self.hard = Delimiters(self._hard)
        """What ends a call anywhere: stop tokens, and openings that no text can spell."""
        self.hard_ends: list[Pieces] = [(piece,) for _, piece in self._hard]
        self.hard_ends += [(piece,) for piece in self.finish if unforgeable(piece)]
        """The same, and the closings that no text can spell."""
        ending = [*_first("end", self.end, self.close), *self._hard]
        self.to_end = Delimiters(ending)
        self.to_close = Delimiters([*_first("close", self.close), *self._hard])
        self.to_finish = Delimiters([*_first("finish", self.finish), *self._hard])
        body = (b"{",) if self.style is Style.JSON_ARGUMENTS else self.key_open
        following = [lead for lead, _ in self.head[1:]] + [self.begin or body]
        self.after_field = [Delimiters([*_first("next", one), *ending]) for one in following]
        self.to_key = Delimiters([*_first("key", self.key_open), *ending])
        certain = [one for one in _first("hard", self.end, self.close) if unforgeable(one[1])]
        opening = _first("value", *(way.pieces for way in self.value_opens))
        self.to_value = Delimiters([*opening, *self._hard, *certain])
        sequences = [self.finish, self.finish + self.section_close, self.finish + self.another]
        self.certain_ends = [some for some in sequences if some and (len(some) > 1 or unforgeable(some[0]))]
        """What ends a call even inside an argument that was not closed."""
        closers = (self.end[:1], self.close[:1], self.section_close[:1])
        self.after_value = [
            some for some in (self.key_open, *closers, self.another, *self.hard_ends) if some
        ]
        brackets = [("open", b"{"), ("open", b"["), ("close", b"}"), ("close", b"]")]
        self.in_braces = Delimiters([("quote", self.quote), *brackets, *self._hard])
        begins = self.another or ((b"{",) if self.style is Style.JSON_CALL else ())
        section = [*_first("closed", self.section_close), *_first("open", begins)]
        section += [one for one in _first("reopened", self.section_open) if unforgeable(one[1])]
        self.in_section = Delimiters([*section, *stops])
        self.value_ends = functools.lru_cache(maxsize=1000)(self._value_ends)

    def _value_ends(self, declared: frozenset[str]) -> Delimiters:
        """What may end a value, also the openings of the tool's other arguments."""
        opening, after = b" ".join(self.key_open), self.value_opens[0].pieces[0]
        kinds = [("value", self.value_close[0]), *(("finish", some[0]) for some in self.certain_ends)]
        kinds += [(f"key {key}", opening + key.encode("utf-8", "replace") + after) for key in declared]
        return Delimiters([*kinds, *self._hard], {kind: self.value_trail for kind, _ in kinds})


def _value_openings(grammar: CallGrammar, marked: MarkedBytes) -> list[ValueOpening]:
    texts = [(grammar.string_open, True), (grammar.value_open, False)]
    texts += [(text, False) for _, text in grammar.typed_opens]
    openings: list[tuple[bytes, bool | None]]
    openings = [(marked.scaffold(text), is_string) for text, is_string in texts if text]
    if len(openings) == 1:  # one opening for all values says nothing about their type
        openings = [(openings[0][0], True if grammar.others is Value.BARE else None)]
    return [
        ValueOpening(parts(text), text[len(text.rstrip()) :], is_string) for text, is_string in openings
    ]


class CompiledChannels:
    def __init__(self, channels: Channels, marked: MarkedBytes, stops: Iterable[bytes]) -> None:
        of, self.channels = marked.scaffold, channels
        self.start, self.channel, self.call_end = map(
            of, (channels.start, channels.channel, channels.call_end)
        )
        stopping = [("stop", stop) for stop in stops]
        closing = [("end", of(channels.end)), *stopping, ("end", self.call_end)]
        in_body = [*closing, ("start", self.start)]
        self.to_stop, self.to_close, self.in_body = map(Delimiters, (stopping, closing, in_body))
        self.in_header = Delimiters([*in_body, ("message", of(channels.message))])


class Compiled:
    """A turn's grammar for one vocabulary."""

    def __init__(self, grammar: TurnGrammar, marked: MarkedBytes, stops: Iterable[int]) -> None:
        self.grammar, self.marked = grammar, marked
        self.stops = {mark(index): index for index in stops}
        frame, channels = grammar.reasoning, grammar.channels
        self.reasoning = CompiledFrame(frame if frame is not None and frame.close else Frame(), marked)
        self.after_empty = grammar.after_empty.encode()
        self.content = CompiledFrame(grammar.content, marked)
        ends = [*self.stops, *([marked.scaffold(channels.end)] if channels is not None else [])]
        self.calls = CompiledCalls(grammar.calls, marked, ends) if grammar.calls is not None else None
        self.channels = CompiledChannels(channels, marked, self.stops) if channels is not None else None
        head = marked.scaffold(grammar.head)
        self.head = head.rstrip()
        self.head_trail = head[len(self.head) :]
        self.prompt = marked.scaffold(grammar.prompt)
        stopping = [("stop", stop) for stop in self.stops]
        closing = [("close", self.reasoning.close), *stopping]
        self.in_reasoning = Delimiters(closing, {"close": self.reasoning.trail})
        opening = [("call", opener) for opener in self.calls.openers] if self.calls else []
        if unforgeable(self.reasoning.open):
            opening.append(("reasoning", self.reasoning.open))
        pads = {"answered" if self.content.close else "stop": self.content.trail}
        pads |= {"call": self.calls.before} if self.calls else {}
        self.in_content = Delimiters([*opening, ("answered", self.content.close), *stopping], pads)

    @computed
    def dialects(self) -> dict[str, CompiledCalls]:
        """The calls of each dialect that has delimiters."""
        calls = ((name, dialect.calls) for name, dialect in DIALECTS.items() if dialect.calls)
        compiled = ((name, CompiledCalls(grammar, self.marked, self.stops)) for name, grammar in calls)
        return {name: dialect for name, dialect in compiled if dialect.openers}

    @computed
    def reasoning_close(self) -> bytes:
        """The first tag of what closes reasoning, if anything does."""
        channels = self.grammar.channels
        close = self.reasoning.close or (self.marked.scaffold(channels.end) if channels else b"")
        return next((tag[0] for tag in tags(close)), close)

    def prompt_bytes(self, ids: Sequence[int] | Ids, name: str = "prompt_ids") -> bytes:
        """The end of a prompt, with at least its open turn. Raises InputError."""
        count = 16
        while True:
            tail, _ = self.marked.spelled(check_last(ids, name, count), 0)
            ended = any(stop in tail for stop in self.stops)
            if not self.head or self.head in tail or ended or count >= len(ids):
                return tail
            count *= 8

    def prefix(self, prompt: bytes) -> bytes:
        """What the prompt wrote of the turn after its head; empty if the turn has ended."""
        at = prompt.rfind(self.head) if self.head else -1
        prefix = prompt[at + len(self.head) :] if at >= 0 else b""
        return b"" if any(stop in prefix for stop in self.stops) else prefix
