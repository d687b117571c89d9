"""Reading a turn that is made of messages with headers (Harmony).

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``: a header says which
channel a message is on, who it goes to (``to=``, before or after the channel) and how it is written (``json``,
``<|constrain|>json``, ``code``). A message to a tool is a call, whatever its channel; one on the reasoning channel is
reasoning; any other is content: an answer, a preamble to calls, a message on an unknown channel or on none.

What openai-harmony parses is parsed to the same messages, with these deliberate differences:

- Only a word that begins with ``to=`` is a recipient. openai-harmony also takes a lone word for one, so that
  ``final <|constrain|>json`` goes to ``<|constrain|>json``. A message to ``user``, ``assistant`` or ``all`` is no call.
- ``<|start|>`` inside a body begins a message, because no text can spell it: ``<|end|>`` is missing. For openai-harmony
  it is text. A call that ends so is UNCLOSED.
- What comes after a stop token is unread, except where the assistant goes on right after ``<|call|>`` with another
  message: several calls in a row. openai-harmony goes on after any stop token.
- From the header of another role on (a made-up turn of the user, a made-up result) nothing is the assistant's. All of
  it is content, as it was written with its control tokens, and no call in it counts. openai-harmony parses it, or
  raises if it does not know the role.
- Headers that openai-harmony refuses are read as far as possible. Words before channel and recipient that belong to no
  header are content; unknown words after the channel are ignored. Without ``<|message|>``, all after the channel's name
  is the body, unless there is a recipient: then it is a call that is MALFORMED, or TRUNCATED if the completion ends
  there. Nothing else is read from a header that is cut off.

Where headers have no channels, they name who a message goes to, and what is neither reasoning nor content is a call.
How its body is written is then read off the template, if it is not JSON.

A call may be closed with ``<|end|>`` and ``<|return|>`` as well as with ``<|call|>``: openai-harmony accepts each. The
arguments of a function have to be a JSON object, as does everything that a header says is ``json``. Other tools
(``python``) may be given anything: `arguments` are then None unless it is a JSON object, and `arguments_text` is the
text as written.
"""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Final, NamedTuple

from ..formats.grammar import Channels
from .calls import CallParser
from .compiled import Compiled
from .output import Attempt, Output
from .reader import Found, Reader, Reading, Say
from .response import CallStatus, PartKind

_NOT_TOOLS: Final = frozenset({b"user", b"assistant", b"all"})
"""Recipients that are not tools."""

_WORD: Final = re.compile(rb"[^\s\xff]+|\xff[\x80-\xbf]{4}")
"""A word of a header, or a control token."""


class _Word(NamedTuple):
    text: bytes
    start: int
    """Where the white space before it begins, unless it is a control token."""
    stop: int
    control: bool


class _Header(NamedTuple):
    """What a header says."""

    role: _Word | None
    channel: bytes
    recipient: _Word | None
    tool: bytes | None
    """The recipient, if it can be called."""
    stray: list[_Word]
    """Words before channel and recipient that belong to no header."""
    stray_stop: int
    """Where the text of these ends."""
    types: list[_Word]
    """Words that say how the message is written."""
    stop: int


class ChannelParser:
    """Reads a turn of messages."""

    def __init__(self, compiled: Compiled, channels: Channels, reader: Reader, output: Output) -> None:
        self.channels = channels
        self.reader = reader
        self.output = output
        marks = compiled.channels
        assert marks is not None
        self._start, self._channel, self._call_end = marks.start, marks.channel, marks.call_end
        self._to = channels.recipient.encode()
        self._calls = CallParser(compiled, compiled.calls, reader, output) if compiled.calls is not None else None
        """Reads the body of a call, where that is not one JSON."""
        named = (channels.reasoning, channels.content) if not channels.channel else ()
        self._not_tools = _NOT_TOOLS.union(name.encode() for name in named)
        self._role = compiled.head.rpartition(self._start)[2].strip() or b"assistant"
        self._to_stop, self._to_close = marks.to_stop, marks.to_close
        self._in_body, self._in_header = marks.in_body, marks.in_header

    def read(self) -> Reading[Found | None]:
        """All of the turn: its stop token, or None where the completion ends without one."""
        reader = self.reader
        begun = self._after_prompt()
        started = False
        while True:
            reader.at = begun + len(self._start) if started else begun
            at = reader.at
            found = yield from reader.find(self._in_header)
            header = self._header(at, reader.at, started=started)
            if self._is_foreign(header, cut=found is None):
                reader.at = begun
                found = yield from reader.find(self._to_stop, self.output.content)
                self.output.end_text()
                return found
            begun = self._stray(header, begun, cut=found is None)
            if found is not None and found.kind == "message":
                reader.at = found.stop
                found = yield from self._message(header, begun)
            else:
                self._without_body(header, begun, found)
                if found is None:
                    self.output.missing.append(self._empty_message(header, at, started))
            if found is None or (found.kind == "stop" and not (yield from self._goes_on(found))):
                return found
            started = found.kind == "start"
            begun = found.start if started else found.stop

    def _after_prompt(self) -> int:
        """Where the message begins that the prompt left open; those before it are over."""
        pattern = self._to_close.pattern
        closed = pattern.finditer(self.reader.data, 0, self.output.base) if pattern is not None else ()
        return max((match.end() for match in closed), default=self.reader.at)

    def _goes_on(self, found: Found) -> Reading[bool]:
        """Whether a stop token is the end of a call, and another message of the assistant comes right after."""
        if self.reader.data[found.start : found.stop] != self._call_end:
            return False
        return (yield from self.reader.sees(self._start + self._role, found.stop))

    # -- headers

    def _header(self, at: int, stop: int, *, started: bool) -> _Header:
        """The header that stands from `at` to `stop`. It names a role if it is `started`, and else may."""
        words = self._words(at, stop)
        lead = list(takewhile(lambda word: not word.control and not self._names_recipient(word), words))
        rest = words[len(lead) :]
        role = lead.pop(0) if lead and (started or lead[0].text == self._role) else None
        named = next((word for word in rest if self._names_recipient(word)), None)
        to = named.text.removeprefix(self._to) if named is not None else None
        marker = next((word.start for word in rest if word.text == self._channel), stop)
        said = [word for word in rest if not word.control and not self._names_recipient(word)]
        channel = next((word for word in said if word.start > marker), None)
        return _Header(
            role=role,
            channel=(channel.text if channel is not None else b"") if self._channel else to or b"",
            recipient=named,
            tool=to if to not in self._not_tools else None,
            stray=lead,
            stray_stop=rest[0].start if rest else stop,
            types=[word for word in said if word is not channel],
            stop=stop,
        )

    def _words(self, at: int, stop: int) -> list[_Word]:
        words: list[_Word] = []
        for match in _WORD.finditer(self.reader.data, at, stop):
            control = match[0][0] == 0xFF
            words.append(_Word(match[0], match.start() if control else at, match.end(), control))
            at = match.end()
        return words

    def _names_recipient(self, word: _Word) -> bool:
        return word.text.startswith(self._to)

    def _is_foreign(self, header: _Header, *, cut: bool) -> bool:
        """Whether a message is not the assistant's. A role that may go on is not known yet."""
        if header.role is None or header.role.text == self._role:
            return False
        return not (cut and header.role.stop == header.stop and self._role.startswith(header.role.text))

    def _stray(self, header: _Header, begun: int, *, cut: bool) -> int:
        """Report what of a header is text. Returns where the header begins after it."""
        stray = header.stray
        if not stray or (cut and stray[0].stop == header.stop and self._to.startswith(stray[0].text)):
            return begun
        self.output.content(stray[0].start, header.stray_stop)
        self.output.end_text()
        return header.stray_stop

    def _without_body(self, header: _Header, begun: int, found: Found | None) -> None:
        """A header that no message follows: a call without arguments, or text that lacks the mark before it.

        One that is cut off may still name a content type.
        """
        if header.tool is not None:
            attempt = self.output.start_call(begun)
            assert header.recipient is not None
            if found is not None:
                attempt.fail(CallStatus.MALFORMED, "the call breaks off before its arguments")
            if found is not None or header.recipient.stop < header.stop:
                self._name(attempt, header.tool)  # else there may be more of it
            self._finish(attempt, found)
        elif len(header.types) > (found is None):
            self._sink(header)(header.types[0].start, header.stop)
            self.output.end_text()

    def _empty_message(self, header: _Header, at: int, started: bool) -> str:
        """What makes a message of a header that is cut off: one of content, if it does not say what it is."""
        channels = self.channels
        if header.recipient is not None or (self._channel and self._channel in self.reader.data[at : header.stop]):
            return f"{channels.message}{channels.end}"
        role = self._role[len(header.role.text) if header.role is not None else 0 :] if started else b""
        return f"{role.decode()}{channels.opening(channels.content)}{channels.end}"

    # -- messages

    def _sink(self, header: _Header) -> Say:
        return self.output.reasoning if header.channel == self.channels.reasoning.encode() else self.output.content

    def _message(self, header: _Header, begun: int) -> Reading[Found | None]:
        """A message, after its header; the mark that ends it."""
        if header.tool is not None:
            return (yield from self._call(header, header.tool, begun))
        say = self._sink(header)
        start = self.reader.at
        found = yield from self.reader.find(self._in_body, say)
        self.output.end_text()
        if say == self.output.reasoning and start == self.reader.at > self.output.base:
            self.output.blank_reasoning = True
        if found is None:
            self.output.missing.append(self.channels.end)
            if say == self.output.reasoning:
                self.output.open = PartKind.REASONING
        return found

    def _call(self, header: _Header, tool: bytes, begun: int) -> Reading[Found | None]:
        output, calls = self.output, self._calls
        if calls is not None and (yield from self.reader.sees_all(calls.calls.open)) is not None:
            calls.introduced = begun
            yield from calls.read()
            found = yield from self.reader.find(self._in_body, output.content)
            output.end_text()
            output.missing += [self.channels.end] if found is None else []
            return found
        attempt = Attempt(len(output.calls), begun, takes_json=self._takes_json(header, tool))
        output.announce(attempt)
        self._name(attempt, tool)
        say, done = output.arguments_sink(attempt)
        found = yield from self.reader.find(self._in_body, say)
        done()
        self._finish(attempt, found)
        output.missing += [self.channels.end] if found is None else []
        return found

    def _takes_json(self, header: _Header, tool: bytes) -> bool:
        """Whether a call's arguments have to be JSON: a function's, or those of which the header says so."""
        if tool.startswith(self.channels.namespace.encode()) or any(word.text == b"json" for word in header.types):
            return True
        tools = self.output.tools
        return tools.given and tools.knows(tool.decode("utf-8", "replace"))

    def _name(self, attempt: Attempt, tool: bytes) -> None:
        name = tool.decode("utf-8", "replace").removeprefix(self.channels.namespace)
        self.output.name_call(attempt, name)

    def _finish(self, attempt: Attempt, found: Found | None) -> None:
        """A call ends: at what closes a message, or at what comes instead."""
        if found is None:
            attempt.fail(CallStatus.TRUNCATED, "the completion ends inside the call")
            self.output.open = PartKind.TOOL_CALL
        elif found.kind == "start":
            attempt.fail(CallStatus.UNCLOSED, "another message begins inside the call")
        closed = found is not None and found.kind != "start"
        self.output.finish_call(attempt, found.stop if found is not None and closed else self.reader.at)
