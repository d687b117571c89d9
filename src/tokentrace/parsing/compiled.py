"""A grammar compiled for one vocabulary: delimiters as marked bytes, and the sets of them to look for in each place."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ..computed import computed
from ..formats.dialects import DIALECTS, with_parsers
from ..formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from ..tokens.ids import check_last
from ..tokens.tokenizer import Ids, Tokenizer
from .marked import MarkedBytes, mark, marks_of, parts, pieces, unforgeable
from .reader import Marks

Pieces = tuple[bytes, ...]
_LETTERS: Final = frozenset(string.ascii_letters.encode())


_NAME_IN_ID: Final = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)
"""Kimi's ids: ``functions.NAME:INDEX``."""


def _json_head(grammar: CallGrammar) -> re.Pattern[bytes] | None:
    """How an object begins that holds a name, here in plain letters, and then arguments; None where calls are none."""
    fields = [field for field, _ in grammar.keys]
    if grammar.style is not Style.JSON_CALL or grammar.named_key or fields != ["name", "arguments"]:
        return None
    paths = [path for _, path in grammar.keys]
    if any(len(path) != 1 for path in paths):
        return None
    name, arguments = (re.escape(json.dumps(path[0], ensure_ascii=False).encode()) for path in paths)
    told = rb'"([^"\\\x00-\x1f\x80-\xff]*)"'
    return re.compile(rb"[ \t\n\r]*".join([b"", rb"\{", name, b":", told, b",", arguments, b":", b""]))


def _trail(data: bytes) -> bytes:
    """The white space that data ends with."""
    return data[len(data.rstrip()) :]


class CompiledFrame(NamedTuple):
    """A `Frame` as marked bytes."""

    open: bytes
    lead: bytes
    trail: bytes
    close: bytes
    after: bytes


class CompiledCalls:
    """The delimiters of calls."""

    def __init__(self, grammar: CallGrammar, marked: MarkedBytes, stops: Iterable[bytes]) -> None:
        def of(text: str) -> Pieces:
            return pieces(marked.scaffold(text))

        self.grammar = grammar
        self.before = grammar.before.encode()
        self.separator = grammar.separator.encode()
        self.after = grammar.after.encode()
        self.section_open, self.section_close = of(grammar.section_open), of(grammar.section_close)
        self.open, self.close = of(grammar.open), of(grammar.close)
        self.head: list[tuple[Pieces, str]] = [(of(lead), field) for lead, field in grammar.head]
        self.begin, self.end = of(grammar.begin), of(grammar.end)
        self.quote = marked.scaffold(grammar.quote)
        self.value_marks: dict[frozenset[str], Marks] = {}
        """What may end a value, by the arguments that a tool declares."""
        self.key_open = of(grammar.key_open)
        self.value_opens: list[tuple[Pieces, bytes, bool | None]] = []
        """Ways in which a value opens: the delimiter, the white space after it, and whether it says: a string."""
        others = (grammar.value_open, *(text for _, text in grammar.typed_opens))
        for text, is_string in ((grammar.string_open, True), *((text, False) for text in others)):
            if text:
                opening = marked.scaffold(text)
                self.value_opens.append((parts(opening), _trail(opening), is_string))
        if len(self.value_opens) == 1:  # it does not say
            self.value_opens = [(*self.value_opens[0][:2], True if grammar.others is Value.BARE else None)]
        closing = marked.scaffold(grammar.value_close)
        self.value_close, self.value_trail = pieces(closing), closing[: len(closing) - len(closing.lstrip())]
        self.finish = self.end + self.close
        """All that ends a call."""
        self.another = self.open or (self.head[0][0] if self.head else ())
        """What the next call begins with."""
        first = (self.section_open or self.open or (b"",))[0]
        self.bare = first in (b"", b"[", b"{")
        """Whether calls have no delimiter of their own, and are known by what they hold."""
        self.named_section = any(set(piece[5:]) & _LETTERS for piece in self.section_open if unforgeable(piece))
        """Whether the section opens with a name in a tag, which another name is not."""
        self.inner = bool(self.open) and (bool(self.head and self.head[0][0]) or grammar.style is Style.JSON_CALL)
        """Whether several calls can stand inside one pair of delimiters."""
        self.openers: list[bytes] = []
        """What begins a call in the midst of content: the section's opening, and that of a call if it is sure."""
        if not self.bare:
            self.openers = [self.section_open[0]] if self.section_open else []
            if self.open and (not self.openers or unforgeable(self.open[0])):
                self.openers.append(self.open[0])
        lead = self.head[0][0] if self.head else ()
        self.loose_opener = b""
        """What begins a call for servers, and not for the grammar: the head of a call that lacks its delimiter."""
        if self.bare:
            self.loose_opener = b"{" if grammar.style is Style.JSON_CALL and not self.section_open else first
        elif grammar.style is Style.PAIRS and self.open and lead and self.end:
            self.loose_opener = lead[0]
        self.json_head = _json_head(grammar)
        self._find_marks(stops)

    def name_in_id(self, own: str) -> str | None:
        """The name that an id holds, where it stands nowhere else."""
        match = _NAME_IN_ID.fullmatch(own) if self.grammar.id_is_name else None
        return match[1] if match else None

    def _find_marks(self, stops: Iterable[bytes]) -> None:
        """The marks to look for in each place."""

        def first(kind: str, *delimiters: Pieces) -> list[tuple[str, bytes]]:
            return [(kind, delimiter[0]) for delimiter in delimiters if delimiter]

        style = self.grammar.style
        stopping = [("stop", stop) for stop in stops]
        ends = first("hard", self.section_open, self.open, self.section_close)
        self.hard_marks = [*stopping, *(end for end in ends if unforgeable(end[1]))]
        """What ends a call wherever it stands."""
        self.hard_pieces = [piece for _, piece in self.hard_marks]
        self.hard_pieces += [piece for piece in self.finish if unforgeable(piece)]
        self.hard = Marks(self.hard_marks)
        self.to_close = Marks([*first("close", self.close), *self.hard_marks])
        ending = [*first("end", self.end, self.close), *self.hard_marks]
        self.to_end = Marks(ending)
        body = (b"{",) if style is Style.JSON_ARGUMENTS else self.key_open
        follows = [lead for lead, _ in self.head[1:]] + [self.begin or body]
        self.after_field = [Marks([*first("next", following), *ending]) for following in follows]
        self.to_key = Marks([*first("key", self.key_open), *ending])
        sure = [mark for mark in first("hard", self.end, self.close) if unforgeable(mark[1])]
        values = first("value", *(opening for opening, _, _ in self.value_opens))
        self.to_value = Marks([*values, *self.hard_marks, *sure])
        self.to_value_close = Marks([*first("value", self.value_close), *self.hard_marks])
        sequences = [self.finish, self.finish + self.section_close, self.finish + self.another]
        self.sure_ends = [some for some in sequences if some and (len(some) > 1 or unforgeable(some[0]))]
        """What is certain to end a call even where an argument was not closed."""
        brackets = [("open", b"{"), ("open", b"["), ("close", b"}"), ("close", b"]")]
        self.in_braces = Marks([("quote", self.quote), *brackets, *self.hard_marks])
        self.in_quotes = Marks([("quote", self.quote), *self.hard_marks])
        closers = (self.end[:1], self.close[:1], self.section_close[:1])
        follows = [self.key_open, *closers, self.another, *((piece,) for piece in self.hard_pieces)]
        self.after_value = [some for some in follows if some]
        """What may come after the closing of an argument."""
        begins = self.another or ((b"{",) if style is Style.JSON_CALL else ())
        marks = [*first("closed", self.section_close), *first("open", begins)]
        if self.section_open and unforgeable(self.section_open[0]):
            marks.append(("reopened", self.section_open[0]))
        self.in_section = Marks([*marks, *stopping])


class CompiledChannels:
    """The delimiters of messages that have headers."""

    def __init__(self, channels: Channels, marked: MarkedBytes, stops: Iterable[bytes]) -> None:
        of = marked.scaffold
        self.start, self.channel, self.call_end = of(channels.start), of(channels.channel), of(channels.call_end)
        begins, stopping = ("start", self.start), [("stop", stop) for stop in stops]
        closing = [("end", of(channels.end)), *stopping, ("end", self.call_end)]
        self.to_stop, self.to_close = Marks(stopping), Marks(closing)
        self.in_body = Marks([*closing, begins])
        self.in_header = Marks([*closing, begins, ("message", of(channels.message))])


class Compiled:
    """A turn's grammar for one vocabulary. Immutable; made once."""

    def __init__(
        self, grammar: TurnGrammar, tokenizer: Tokenizer, stops: Iterable[int], marked: MarkedBytes | None = None
    ) -> None:
        self.grammar = grammar
        self.dialect = ""
        """Which dialect its calls are in, in words, where the template does not show them."""
        self.misread: tuple[tuple[str, str], ...] = ()
        """Parts of proofs (`parsing.proof`) that are not read back as the template writes them."""
        self.marked = marked = marked or MarkedBytes(tokenizer.vocabulary)
        self._tokenizer = tokenizer
        self.stops = {mark(index): index for index in stops}
        frame = grammar.reasoning
        self.reasoning = _compiled(frame, marked) if frame is not None and frame.close else None
        self.after_empty = grammar.after_empty.encode()
        self.content = _compiled(grammar.content, marked)
        ends = [*self.stops, *([marked.scaffold(grammar.channels.end)] if grammar.channels is not None else [])]
        self.calls = CompiledCalls(grammar.calls, marked, ends) if grammar.calls is not None else None
        channels = grammar.channels
        self.channels = CompiledChannels(channels, marked, self.stops) if channels is not None else None
        head = marked.scaffold(grammar.head)
        self.head, self.head_trail = head.rstrip(), _trail(head)
        self.prompt = marked.scaffold(grammar.prompt)
        stopping = [("stop", stop) for stop in self.stops]
        reasoning = self.reasoning
        self.in_reasoning = Marks(
            [("close", reasoning.close), *stopping] if reasoning else stopping,
            {"close": reasoning.trail} if reasoning else None,
        )
        opening = [("call", opener) for opener in self.calls.openers] if self.calls else []
        if reasoning and unforgeable(reasoning.open):
            opening.append(("reasoning", reasoning.open))
        if self.content.close:
            opening.append(("answered", self.content.close))
        before = self.calls.before if self.calls else b""
        pads = {"call": before, "answered" if self.content.close else "stop": self.content.trail}
        self.in_content = Marks([*opening, *stopping], pads)
        calling = [mark for mark in opening if mark[0] == "call"]
        self.in_open_reasoning = Marks([*calling, *stopping], {"call": before})
        """What ends reasoning that is never closed, for servers."""
        loose = [("loose", self.calls.loose_opener)] if self.calls else []
        self.in_loose_content = Marks([*opening, *stopping, *loose], pads)

    @computed
    def other_dialects(self) -> list[Compiled]:
        """The grammar with the calls of each dialect that has delimiters, for templates that show no calls."""
        found: list[Compiled] = []
        for name, dialect in DIALECTS.items():
            if dialect.calls is not None:
                grammar = with_parsers(self.grammar, dialect, None)
                other = Compiled(grammar, self._tokenizer, self.stops.values(), self.marked)
                other.dialect = f"the template shows no tool calls; tool_parser={name!r} reads this one"
                found += [other] if other.calls is not None and other.calls.openers else []
        return found

    def delimiters(self, spellable: frozenset[int]) -> dict[str, list[str]]:
        """What ends reasoning, content or arguments wherever it stands: text, and the control tokens of a set."""
        marks = frozenset(map(mark, spellable))
        arguments = [*self.calls.value_close[:1], *self.calls.hard_pieces] if self.calls is not None else []
        found = {"reasoning": self.in_reasoning.kinds, "content": self.in_content.kinds, "arguments": arguments}
        return {
            field: [self.marked.visible(piece).decode() for piece in some if marks_of(piece) <= marks]
            for field, some in found.items()
        }

    def prompt_bytes(self, ids: Sequence[int] | Ids, name: str = "prompt_ids") -> bytes:
        """The end of a prompt, back to the head of the turn that is open, however far that is.

        Only these ids are looked at, more and more of them. Raises InputError, for `name`, if one is not a token id.
        """
        count = 16
        while True:
            tail, _ = self.marked.spelled(check_last(ids, name, count), 0)
            ended = any(stop in tail for stop in self.stops)
            if not self.head or self.head in tail or ended or count >= len(ids):
                return tail
            count *= 8

    def prefix(self, prompt: bytes) -> bytes:
        """What a prompt has already written of the turn, after its head: nothing if the last turn has ended."""
        at = prompt.rfind(self.head) if self.head else -1
        written = prompt[at + len(self.head) :] if at >= 0 else b""
        return b"" if any(stop in written for stop in self.stops) else written


def _compiled(frame: Frame, marked: MarkedBytes) -> CompiledFrame:
    return CompiledFrame(*map(marked.scaffold, (frame.open, frame.lead, frame.trail, frame.close, frame.after)))
