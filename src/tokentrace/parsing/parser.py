"""Parsing completions, whole or as they arrive.

There is one parser, and it streams: a whole completion is a stream that comes at once. Most of those need not be
streamed, though: `parsing.whole` reads them in one go, and comes to the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .channels import ChannelParser
from .compiled import Compiled
from .events import Done, Event
from .lanes import Lane
from .marked import FEW
from .output import Output
from .reader import Found, Reader
from .response import CallStatus, Finish, ParsedResponse, ParsedToolCall, PartKind, ReadAs, TokenRange
from .turn import TurnParser
from .values import NO_TOOLS, Tools
from .whole import OddTurnError, WholeReader

_SERVED: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})
"""The calls that servers pass on to an agent."""


class StreamingParser:
    """Parses a completion as it arrives. Make one with `Renderer.streaming_parser`.

    `feed` takes ids and returns what has become certain; `finish` says that no more come. Nothing that was said is
    taken back, and however the ids are cut into pieces, the events add up to the same.
    """

    def __init__(
        self, compiled: Compiled, tools: Tools | None = None, prompt: bytes | None = None, *, loose: bool = False
    ) -> None:
        self._compiled = compiled
        self._tools = tools or NO_TOOLS
        self._prompt = prompt
        self._reader = reader = Reader()
        reader.data += compiled.prefix(compiled.prompt if prompt is None else prompt)
        self._output = Output(reader, compiled.marked, len(reader.data), self._tools, loose=loose)
        if compiled.grammar.channels is not None:
            self._reading = ChannelParser(compiled, compiled.grammar.channels, reader, self._output).read()
        else:
            self._reading = TurnParser(compiled, reader, self._output, prompted=prompt is not None).read()
        self._found: Found | None = None
        self._over = False
        self._count = 0
        self._lane: Lane | None = None
        self._passed: list[int] = []
        """Ids that went by in the lane, and that the parser has not seen."""
        self._response: ParsedResponse | None = None
        self._served: ParsedResponse | None = None
        self._read_on()

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Take more ids, and return what has become certain.

        Raises InputError if one of them is not a token id. Then none of them was taken, and the parser can go on.
        """
        lane = self._lane
        if lane is not None and (type(ids) is list or type(ids) is tuple):
            if len(ids) == 1:  # nearly all of a stream comes this way
                index = ids[0]
                if type(index) is int and (step := lane[index]) is not None:
                    self._passed.append(index)
                    delta, self._lane = step
                    return [] if delta is None else [delta]
            elif set(map(type, ids)) == {int} and (events := self._pass(lane, ids)) is not None:
                return events
        checked = check_ids(ids if isinstance(ids, (Sequence, np.ndarray)) else list(ids), "ids")
        self._wake()
        self._take(checked)
        events = self._go_on()
        waiting = self._reader.waiting
        self._lane = self._output.lane(waiting) if waiting is not None else None
        return events

    def _pass(self, lane: Lane, ids: list[int] | tuple[int, ...]) -> list[Event] | None:
        """Let ids go by that only say more of the same, and report them; None if the parser has to look at them."""
        texts: list[str] = []
        for index in ids:
            step = lane[index]
            if step is None:
                return None
            delta, lane = step
            if delta is not None:
                texts.append(delta.text)
        self._passed += ids
        self._lane = lane
        return [lane.telling.make("".join(texts))] if texts else []

    def _wake(self) -> None:
        """Take the ids that went by, before the parser looks at others."""
        waiting, lane, passed = self._reader.waiting, self._lane, self._passed
        if passed and waiting is not None and lane is not None:
            self._passed = []
            self._take(np.array(passed) if len(passed) > FEW else passed)
            self._reader.passed = len(self._reader.data) - len(lane.held)
            self._output.pass_on(waiting.say, waiting.held, self._reader.passed)

    def _take(self, ids: Sequence[int] | Ids) -> None:
        more, starts = self._compiled.marked.spelled(ids, len(self._reader.data))
        self._output.starts += starts if isinstance(starts, list) else starts.tolist()
        self._reader.data += more
        self._count += len(starts)

    def finish(self) -> list[Event]:
        """No more ids come: say what is left, and `Done`."""
        if self._response is not None:
            return []
        self._wake()
        self._lane = None
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

    @property
    def served(self) -> ParsedResponse:
        """All that was said, as servers read it: with the calls that are only attempts in `response`."""
        return self._served or self.response

    @property
    def missing(self) -> str:
        """What the grammar would write to close a completion that was cut off, without the stop token.

        White space is left out that the completion ends with.
        """
        self.finish()
        closing, data = "".join(self._output.missing), self._reader.data
        space = closing[: len(closing) - len(closing.lstrip())].encode()
        written = next((length for length in range(len(space), 0, -1) if data.endswith(space[:length])), 0)
        return closing[written:]

    def _read_on(self) -> None:
        self._reader.waiting = None
        if not self._over:
            try:
                next(self._reading)
            except StopIteration as end:
                self._over, self._found = True, end.value
        self._reader.passed = 0

    def _go_on(self) -> list[Event]:
        self._read_on()
        events, self._output.events = self._output.events, []
        return events

    def _settled(self) -> ParsedResponse:
        output, found = self._output, self._found
        stopped = self._compiled.stops.get(bytes(self._reader.data[found.start : found.stop])) if found else None
        end = output.span(found.start, found.stop).stop if found else self._count
        reasoning = "".join(part.text for part in output.parts if part.kind is PartKind.REASONING)
        attempts: list[ParsedToolCall] = []
        for loose in () if output.loose else self._looser():
            if loose.response.calls or not loose._compiled.dialect:
                self._served, attempts = loose.response, loose.misplaced(output.calls)
                break
        return ParsedResponse(
            content="".join(part.text for part in output.parts if part.kind is PartKind.CONTENT),
            reasoning_content=reasoning or ("" if output.blank_reasoning else None),
            tool_calls=output.calls,
            finish=Finish.LENGTH if stopped is None and not output.closed else Finish.STOP,
            stop_token=stopped,
            open=output.open,
            parts=output.parts,
            unread=TokenRange(end, self._count) if end < self._count else None,
            attempts=attempts,
        )

    # -- as servers read it

    def _looser(self) -> Iterator[StreamingParser]:
        """Parsers that read the same as servers would, where that may come to something else."""
        compiled, output, data = self._compiled, self._output, self._reader.data
        if compiled.grammar.channels is not None:
            return
        if compiled.calls is None:
            for other in compiled.other_dialects if self._tools.given else ():
                if other.calls is not None and any(opener in data for opener in other.calls.openers):
                    yield self._again(other)
            return
        openers = compiled.calls.openers if output.open is PartKind.REASONING else [compiled.calls.loose_opener]
        if any(opener and opener in data for opener in openers) or any(not call.ok for call in output.calls):
            yield self._again(compiled)

    def _again(self, compiled: Compiled) -> StreamingParser:
        other = StreamingParser(compiled, self._tools, self._prompt, loose=True)
        other._reader.data += self._reader.data[self._output.base :]
        other._output.starts += self._output.starts
        other._count = self._count
        other.finish()
        return other

    def misplaced(self, found: Sequence[ParsedToolCall]) -> list[ParsedToolCall]:
        """Calls that a server would run and that are not among those `found`, because no call can stand there."""
        starts = {call.span.start for call in found}
        calls = [call for call in self._output.calls if call.status in _SERVED and call.span.start not in starts]
        otherwise = self._compiled.dialect or "the call is not written as the template writes calls"
        return [
            dataclasses.replace(
                call,
                index=at,
                status=CallStatus.MALFORMED,
                problem=self._output.misplaced.get(call.index, otherwise),
            )
            for at, call in enumerate(calls)
        ]


def called_functions(compiled: Compiled, ids: Ids, prompt_ids: Sequence[int] | Ids) -> list[str] | None:
    """The names of the functions that a completion calls, in order; None where the grammar has no calls."""
    if compiled.grammar.calls is None and compiled.grammar.channels is None:
        return None
    parsed = parse(compiled, ids, prompt=compiled.prompt_bytes(prompt_ids, "prev_prompt_ids"))
    return [call.name for call in parsed.tool_calls if call.name is not None]


def missing_close(compiled: Compiled, ids: Ids, prompt_ids: Sequence[int] | Ids) -> str:
    """What closes the turn that a completion ends in, without its stop token; see `StreamingParser.missing`."""
    parser = StreamingParser(compiled, None, compiled.prompt_bytes(prompt_ids, "prev_prompt_ids"))
    parser.feed(ids)
    return parser.missing


def parse(
    compiled: Compiled,
    ids: Iterable[int] | Ids,
    tools: Tools | None = None,
    prompt: bytes | None = None,
    read_as: ReadAs = ReadAs.STRICT,
) -> ParsedResponse:
    """A whole completion."""
    if read_as is ReadAs.STRICT:
        before = compiled.prefix(compiled.prompt if prompt is None else prompt)
        data, starts = compiled.marked.spelled(ids, len(before))
        try:
            return WholeReader(compiled, before + data, starts, len(before), tools or NO_TOOLS).read(
                prompted=prompt is not None
            )
        except OddTurnError:
            pass
    parser = StreamingParser(compiled, tools, prompt)
    parser.feed(ids)
    response = parser.response
    return parser.served if read_as is ReadAs.SERVER else response
