"""Reading a turn that is made of messages with headers (Harmony).

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``: a header says on
which channel a message is and to whom it goes. One that goes to somebody is a call; one on the channel of reasoning
is reasoning; any other is content.
"""

from __future__ import annotations

import re
from typing import Final

from ..formats.grammar import Channels
from .compiled import Compiled
from .output import Output
from .reader import Found, Marks, Reader, Reading
from .response import CallStatus, PartKind

_NOBODY: Final = frozenset({"user", "assistant", "all"})
"""Recipients that are no tool."""


class ChannelParser:
    """Reads a turn of messages."""

    def __init__(self, compiled: Compiled, channels: Channels, reader: Reader, output: Output) -> None:
        self.channels = channels
        self.reader = reader
        self.output = output
        of = compiled.marked.scaffold
        self._start, self._channel = of(channels.start), of(channels.channel)
        stopping = [("stop", stop) for stop in compiled.stops]
        begins = ("start", self._start)
        self._in_header = Marks([("message", of(channels.message)), ("end", of(channels.end)), begins, *stopping])
        self._in_body = Marks([("end", of(channels.end)), begins, *stopping])
        self._call_end = of(channels.call_end)
        self._stops = compiled.stops

    def read(self) -> Reading[Found | None]:
        """All of the turn: its stop token, or None where the completion ends without one."""
        reader = self.reader
        while True:
            begun = reader.at
            found = yield from reader.find(self._in_header)
            if found is None or found.kind == "stop":
                return self._no_body(begun, found)
            header = reader.data[begun : found.start]
            reader.at = found.stop
            if found.kind == "message":
                found = yield from self._message(begun, bytes(header))
                if found is None or found.kind == "stop":
                    return found
                reader.at = found.stop
            elif header.strip() and found.kind == "end":
                self.output.content(begun, found.start)
                self.output.settle()

    def _no_body(self, begun: int, found: Found | None) -> Found | None:
        """A header that nothing follows: what it says is lost otherwise, unless it is no more than the head's."""
        stop = found.start if found is not None else len(self.reader.data)
        if self._channel not in self.reader.data[begun:stop]:
            self.output.content(begun, stop)
            self.output.settle()
        return found

    def _message(self, begun: int, header: bytes) -> Reading[Found | None]:
        """A message, after its header; the mark that ends it."""
        reader, output = self.reader, self.output
        channel, recipient = self._header(header)
        if recipient is not None and recipient not in _NOBODY:
            return (yield from self._call(begun, recipient))
        thought = channel == self.channels.reasoning
        found = yield from reader.find(self._in_body, output.reasoning if thought else output.content)
        output.settle()
        if thought and (found is None or found.kind == "stop"):
            output.open = PartKind.REASONING
        return found

    def _call(self, begun: int, recipient: str) -> Reading[Found | None]:
        reader, output = self.reader, self.output
        attempt = output.start_call(begun)
        output.name_call(attempt, recipient.removeprefix(self.channels.namespace))
        say, done = output.arguing(attempt)
        found = yield from reader.find(self._in_body, say)
        done()
        stop = reader.at
        if found is None:
            attempt.blame(CallStatus.TRUNCATED, "the completion ends inside the call")
            output.open = PartKind.TOOL_CALL
        elif reader.data[found.start : found.stop] == self._call_end:
            stop = found.stop
        elif found.kind == "start":
            attempt.blame(CallStatus.UNCLOSED, "another message begins inside the call")
        elif found.kind == "end":
            stop = found.stop
        output.finish_call(attempt, stop)
        return found

    def _header(self, header: bytes) -> tuple[str, str | None]:
        """The channel and the recipient that a header names."""
        before, _, after = header.partition(self._channel)
        words = re.split(rb"[\s\xff]", after)
        channel = words[0].decode("utf-8", "replace")
        lead = self.channels.recipient.encode()
        for word in [*re.split(rb"[\s\xff]", before), *words]:
            if word.startswith(lead):
                return channel, word[len(lead) :].decode("utf-8", "replace")
        return channel, None
