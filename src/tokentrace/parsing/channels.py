"""Reading a turn that consists of messages with headers (Harmony).

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``:
a header names the channel of a message, its recipient (``to=``) and its type (``json``). A
message to a tool is a call; one on the reasoning channel is reasoning; any other is content.
Without channels, headers name only the recipient.

Differs from openai-harmony on purpose:

- A message to ``user``, ``assistant`` or ``all`` is not a call.
- ``<|start|>`` inside a body begins a message: no text can spell it. A call that ends this way
  is UNCLOSED.
- A stop token ends the turn, unless the assistant goes on right after ``<|call|>`` with another
  message.
- Everything from the header of another role on is content, verbatim.
- Stray words before channel and recipient are content. Without ``<|message|>``, all after the
  channel's name is the body, or with a recipient a MALFORMED call.

Arguments of functions, and what is typed ``json``, are JSON; other tools (``python``) take text.
"""

import re
from itertools import takewhile
from typing import NamedTuple

from .calls import CallParser
from .compiled import Compiled
from .output import ArgumentsText, OpenCall, Output, Text
from .reader import Match, Reading
from .response import CallStatus, PartKind

_NOT_TOOLS = frozenset({"user", "assistant", "all"})
_WORD = re.compile(rb"\s*+[^\s\xff]++|\s++|\xff[\x80-\xbf]{4}")
"""A word of a header with the white space before it, white space alone, or a control token."""
_Word = re.Match[bytes]


class _Header(NamedTuple):
    """A header's fields. `tool` is a recipient to call; `stray` words end at `stray_stop`."""

    role: _Word | None
    recipient: _Word | None
    tool: str | None
    text: Text
    stray: list[_Word]
    stray_stop: int
    types: list[_Word]
    stop: int


def _text(word: _Word) -> bytes:
    return word[0].strip()


class ChannelParser:
    def __init__(self, compiled: Compiled, output: Output) -> None:
        assert compiled.channels is not None
        self.delimiters, self.channels = compiled.channels, compiled.channels.channels
        self.reader, self.output = output.reader, output
        channels, self._to = self.channels, self.channels.recipient.encode()
        self._calls = CallParser(compiled.calls, output) if compiled.calls is not None else None
        named = (channels.reasoning, channels.content) if not channels.channel else ()
        self._not_tools = _NOT_TOOLS.union(named)
        self._role = compiled.head.partition(self.delimiters.start)[2].strip() or b"assistant"
        self._empty_answer = f"{channels.start}{self._role.decode()}{channels.opening(channels.content)}"

    def read(self) -> Reading[Match | None]:
        reader, delimiters, output = self.reader, self.delimiters, self.output
        closed = delimiters.to_close.pattern.finditer(reader.data, 0, output.base)
        # the prompt may leave a message open
        start = max((match.end() for match in closed), default=reader.at)
        started, goes_on, first = False, True, True
        while goes_on:
            reader.at = at = start + len(delimiters.start) if started else start
            match = yield from reader.find(delimiters.in_header)
            header = self._header(at, reader.at, started=started)
            if self._is_foreign(header, cut=match is None):
                output.enter(PartKind.CONTENT, start)
                reader.at = start
                match = yield from reader.find(delimiters.to_stop, output.content)
                break
            start, is_call = self._stray(header, start, cut=match is None), header.tool is not None
            output.enter(PartKind.TOOL_CALL if is_call else header.text.kind, start)
            if match and match.kind == "message":
                reader.at = match.stop
                match = yield from (self._call(header, start) if is_call else self._text(header))
                if match is None and is_call:
                    output.missing.append(self.channels.end)
                elif match is None and header.text is output.reasoning:
                    output.missing += [self.channels.end, self._empty_answer]
            else:
                self._without_body(header, start, match)
                output.missing += [self._empty_message(header, at, started, first)] if match is None else []
            goes_on, first = match is not None, False
            if match is not None:
                if match.kind == "stop":  # the assistant may go on right after a call
                    after_call = reader.data[match.start : match.stop] == delimiters.call_end
                    goes_on = after_call and (
                        yield from reader.sees(delimiters.start + self._role, match.stop)
                    )
                started = match.kind == "start"
                start = match.start if started else match.stop
        if match is not None:
            output.enter(PartKind.STOP, match.start)
        return match

    def _header(self, at: int, stop: int, *, started: bool) -> _Header:
        """The header from `at` to `stop`. It must name a role only if `started`."""
        words = [word for word in _WORD.finditer(self.reader.data, at, stop) if _text(word)]
        special = (b"\xff", self._to)
        lead = list(takewhile(lambda word: not _text(word).startswith(special), words))
        remaining = words[len(lead) :]
        role = lead.pop(0) if lead and (started or _text(lead[0]) == self._role) else None
        recipient = next((word for word in remaining if _text(word).startswith(self._to)), None)
        to = _text(recipient).removeprefix(self._to).decode("utf-8", "replace") if recipient else None
        marker = next((word.start() for word in remaining if word[0] == self.delimiters.channel), stop)
        plain = [word for word in remaining if not _text(word).startswith(special)]
        channel = next((word for word in plain if word.start() > marker), None)
        name = (
            (_text(channel).decode("utf-8", "replace") if channel else "") if self.channels.channel else to
        )
        text = self.output.reasoning if name == self.channels.reasoning else self.output.content
        types = [word for word in plain if word is not channel]
        stray_stop = remaining[0].start() if remaining else stop
        tool = to if to not in self._not_tools else None
        return _Header(role, recipient, tool, text, lead, stray_stop, types, stop)

    def _is_foreign(self, header: _Header, *, cut: bool) -> bool:
        if (role := header.role) is None or _text(role) == self._role:
            return False
        return not (cut and role.end() == header.stop and self._role.startswith(_text(role)))

    def _stray(self, header: _Header, start: int, *, cut: bool) -> int:
        """Report stray words as content; return where the header begins."""
        stray = header.stray
        if not stray or (cut and stray[0].end() == header.stop and self._to.startswith(_text(stray[0]))):
            return start
        self.output.enter(PartKind.CONTENT, start)
        self.output.content(stray[0].start(), header.stray_stop)
        self.output.end_text()
        return header.stray_stop

    def _without_body(self, header: _Header, start: int, match: Match | None) -> None:
        """A header without a message: a call without arguments, or text."""
        if header.tool is not None and header.recipient is not None:
            call = self.output.start_call(start)
            if match is not None:
                call.fail("the call breaks off before its arguments")
            if match is not None or header.recipient.end() < header.stop:
                # else more of the name may follow
                call.set_name(header.tool.removeprefix(self.channels.namespace))
            self._finish(call, match)
        elif len(header.types) > (match is None):  # one word of a header that is cut off may be a type
            header.text(header.types[0].start(), header.stop)
            self.output.end_text()

    def _empty_message(self, header: _Header, at: int, started: bool, first: bool) -> str:
        """What turns a cut-off header into an empty message, without what ends it."""
        channels, marker = self.channels, self.delimiters.channel
        if header.recipient is not None or (marker and marker in self.reader.data[at : header.stop]):
            return channels.message
        if not started and not first:
            return self._empty_answer
        role = self._role[len(_text(header.role)) if header.role else 0 :] if started else b""
        return f"{role.decode()}{channels.opening(channels.content)}"

    def _text(self, header: _Header) -> Reading[Match | None]:
        output, start = self.output, self.reader.at
        match = yield from self.reader.find(self.delimiters.in_body, header.text)
        if header.text is output.reasoning:
            output.blank_reasoning |= start == self.reader.at > output.base
            if match is None:
                output.open = PartKind.REASONING
        return match

    def _call(self, header: _Header, begin: int) -> Reading[Match | None]:
        tool, calls = header.tool or "", self._calls
        if calls is not None and (yield from self.reader.sees_all(calls.calls.open)) is not None:
            yield from calls.read(begin)
            return (yield from self.reader.find(self.delimiters.in_body, self.output.content))
        takes_json = tool.startswith(self.channels.namespace) or b"json" in map(_text, header.types)
        takes_json |= self.output.tools.declares(tool)
        call = self.output.start_call(begin, takes_json=takes_json)
        call.set_name(tool.removeprefix(self.channels.namespace))
        match = yield from self.reader.find(self.delimiters.in_body, ArgumentsText(call))
        self._finish(call, match)
        return match

    def _finish(self, call: OpenCall, match: Match | None) -> None:
        if match is None:
            call.fail("the completion ends inside the call", CallStatus.TRUNCATED)
            self.output.open = PartKind.TOOL_CALL
        elif match.kind == "start":
            call.fail("another message begins inside the call", CallStatus.UNCLOSED)
        call.finish(match.stop if match and match.kind != "start" else self.reader.at)
