"""Parsing completions, whole or as they arrive.

There is one parser, and it streams: a whole completion is a stream that comes at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ..tokens.tokenizer import Ids
from .channels import ChannelParser
from .compiled import Compiled
from .events import Done, Event
from .output import Output
from .reader import Found, Reader
from .response import Finish, ParsedResponse, PartKind, TokenRange
from .turn import TurnParser
from .values import Tools


class StreamingParser:
    """Parses a completion as it arrives. Make one with `Renderer.streaming_parser`.

    `feed` takes ids and returns what has become certain; `finish` says that no more come. Nothing that was said is
    taken back, and however the ids are cut into pieces, all that is said comes to the same.
    """

    def __init__(
        self,
        compiled: Compiled,
        tools: Tools | None = None,
        prompt: bytes | None = None,
    ) -> None:
        self._compiled = compiled
        self._reader = reader = Reader()
        reader.data += compiled.prefix(compiled.prompt if prompt is None else prompt)
        self._output = Output(reader, compiled.marked, len(reader.data), tools or Tools(None))
        channels = compiled.grammar.channels
        asked = prompt is not None
        if channels is not None:
            self._reading = ChannelParser(compiled, channels, reader, self._output).read()
        else:
            self._reading = TurnParser(compiled, reader, self._output, asked=asked).read()
        self._found: Found | None = None
        self._over = False
        self._count = 0
        self._response: ParsedResponse | None = None
        self._read_on()

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Take more ids, and say what has become certain."""
        pieces = self._compiled.marked.tokens(ids)
        if pieces:
            data, starts = self._reader.data, self._output.starts
            starts += itertools.accumulate(map(len, pieces[:-1]), initial=len(data))
            data += b"".join(pieces)
            self._count += len(pieces)
        return self._go_on()

    def finish(self) -> list[Event]:
        """No more ids come: say what is left, and `Done`."""
        if self._response is not None:
            return []
        self._reader.ended = True
        events = self._go_on()
        self._response = self._settled()
        return [*events, Done(self._response)]

    @property
    def response(self) -> ParsedResponse:
        """All that was said. The completion ends here if it had not yet."""
        self.finish()
        assert self._response is not None
        return self._response

    def _read_on(self) -> None:
        if not self._over:
            try:
                next(self._reading)
            except StopIteration as end:
                self._over, self._found = True, end.value

    def _go_on(self) -> list[Event]:
        self._read_on()
        events, self._output.events = self._output.events, []
        return events

    def _settled(self) -> ParsedResponse:
        output, found = self._output, self._found
        stopped = self._compiled.stops.get(bytes(self._reader.data[found.start : found.stop])) if found else None
        end = output.span(found.start, found.stop).stop if found else self._count
        reasoning = "".join(part.text for part in output.parts if part.kind is PartKind.REASONING)
        return ParsedResponse(
            content="".join(part.text for part in output.parts if part.kind is PartKind.CONTENT),
            reasoning_content=reasoning or None,
            tool_calls=output.calls,
            finish=Finish.LENGTH if stopped is None and not output.closed else Finish.STOP,
            stop_token=stopped,
            open=output.open,
            parts=output.parts,
            unread=TokenRange(end, self._count) if end < self._count else None,
        )


def called_functions(compiled: Compiled, ids: Ids, prompt_ids: Sequence[int] | Ids) -> list[str] | None:
    """The names of the functions that a completion calls, in order; None where the grammar has no calls."""
    if compiled.grammar.calls is None and compiled.grammar.channels is None:
        return None
    parsed = parse(compiled, ids.tolist(), prompt=compiled.prompt_bytes(prompt_ids))
    return [call.name for call in parsed.tool_calls if call.name is not None]


def parse(
    compiled: Compiled,
    ids: Iterable[int],
    tools: Tools | None = None,
    prompt: bytes | None = None,
) -> ParsedResponse:
    """A whole completion."""
    parser = StreamingParser(compiled, tools, prompt)
    parser.feed(ids)
    return parser.response
