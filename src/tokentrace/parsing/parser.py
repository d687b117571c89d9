"""The parser. It streams: a whole completion is one large chunk."""

from collections.abc import Sequence

from ..errors import InputError
from ..study.reading import leading
from ..tokens.ids import INT32_MAX, check_ids
from ..tokens.tokenizer import Ids
from ..values.schema import Tools
from .calls import CallParser, count_attempts, find_attempts
from .channels import ChannelParser
from .compiled import Compiled
from .events import Done, Event, events_of
from .output import Output, Placed
from .reader import Match, Reader, Reading
from .response import Finish, ParsedResponse, PartKind, TokenRange


class TurnParser:
    """Reads a turn from its head on, without reporting what the prompt wrote.

    If the prompt is not known (`prompted`), a completion may open reasoning again.
    """

    def __init__(self, compiled: Compiled, output: Output, *, prompted: bool) -> None:
        self.compiled, self.reader, self.output = compiled, output.reader, output
        self.prompted, self.opened = prompted, False
        self.calls = CallParser(compiled.calls, output) if compiled.calls is not None else None

    def read(self) -> Reading[Match | None]:
        """Read the whole turn; return its stop token, if any."""
        compiled, reader, output, calls = self.compiled, self.reader, self.output, self.calls
        yield from reader.skip(compiled.head_trail)
        yield from self._begin()
        fresh, answered, after_calls = True, False, -1
        while True:
            if fresh and calls is not None and calls.calls.bare:
                output.enter(PartKind.TOOL_CALL, reader.at)
                yield from calls.bare()
                output.enter(PartKind.CONTENT, reader.at)
            fresh, start = False, reader.at
            match = yield from reader.find(compiled.in_content, output.content)
            if not match or match.kind == "stop" or (yield from self._is_stop(match)):
                break
            if match.kind == "reasoning":
                output.enter(PartKind.REASONING, match.start)
                reader.at = match.stop
                yield from self._reasoning()
                fresh = True
            elif match.kind == "answered":
                reader.at = match.stop
                output.closed, answered = not compiled.content.open, True
                yield from reader.skip(compiled.content.after)
            elif calls is not None:
                output.enter(PartKind.TOOL_CALL, match.text)
                yield from calls.read()
                output.enter(PartKind.CONTENT, reader.at)
                after_calls = reader.at
        if match is not None:
            output.enter(PartKind.STOP, match.start)
        elif after_calls == start == reader.at:
            if compiled.grammar.calls and output.missing:
                output.missing.append(compiled.grammar.calls.after)
        elif not answered:
            frame = compiled.grammar.content
            output.end_text()
            texts = (one.part.text for one in output.placed if one.part.kind is PartKind.CONTENT)
            opening = "" if self.opened or any(map(str.strip, texts)) else frame.open + frame.lead
            after = frame.after if frame.close else ""
            output.missing.append(f"{opening}{frame.trail}{frame.close}{after}")
        return match

    def _is_stop(self, match: Match) -> Reading[bool]:
        """True if a token that may open calls is a stop token here."""
        calls = self.compiled.calls
        if bytes(self.reader.data[match.start : match.stop]) not in self.compiled.stops or calls is None:
            return False
        return (yield from self.reader.sees_all(calls.section_open or calls.open)) is None

    def _begin(self) -> Reading[None]:
        reader, frame, output = self.reader, self.compiled.reasoning, self.output
        if frame.close:
            at = yield from reader.past_space()
            opens = bool(frame.open) and (yield from reader.sees(frame.open, at))
            if opens or (yield from reader.sees(frame.close, at)):
                output.enter(PartKind.CONTENT, reader.at)
                output.content(reader.at, at)
                output.end_text()
                output.enter(PartKind.REASONING, at)
                reader.at = at + len(frame.open if opens else frame.close)
                if opens:
                    yield from self._reasoning()
                else:
                    yield from self._open_content(self.compiled.after_empty)
                return
        yield from self._open_content()

    def _reasoning(self) -> Reading[None]:
        compiled, reader, output = self.compiled, self.reader, self.output
        frame, by_prompt = compiled.reasoning, reader.at <= output.base
        yield from reader.skip(frame.lead)
        if by_prompt and not self.prompted:
            if (yield from reader.skip(frame.open)):
                yield from reader.skip(frame.lead)
            if frame.lead and (yield from reader.sees(frame.lead + frame.trail + frame.close)):
                reader.at += len(frame.lead)
        start = reader.at
        match = yield from reader.find(compiled.in_reasoning, output.reasoning)
        if not match or match.kind != "close":
            output.open = PartKind.REASONING
            text = frame.frame
            after = compiled.grammar.after_empty if start == reader.at else text.after
            output.missing += [f"{text.trail}{text.close}{after}"] if match is None else []
            return
        reader.at = match.stop
        yield from self._open_content(compiled.after_empty if match.text == start else frame.after)

    def _open_content(self, before: bytes = b"") -> Reading[None]:
        reader, frame = self.reader, self.compiled.content
        yield from reader.skip(before)
        self.output.enter(PartKind.CONTENT, reader.at)
        if (yield from reader.skip(frame.open)):
            self.opened = True
            yield from reader.skip(frame.lead)


class StreamingParser:
    """Parses a completion as it arrives. Make one with `Renderer.streaming_parser`.

    Events are never taken back, and add up to the same for any chunks. With ``calls="lenient"``
    all come from `finish`: only then is it certain which text is a call.
    """

    def __init__(
        self,
        compiled: Compiled,
        tools: Tools | None = None,
        prompt: bytes | None = None,
        *,
        lenient: bool = False,
    ) -> None:
        self._compiled, self._lenient = compiled, lenient
        prefix = compiled.prefix(compiled.prompt if prompt is None else prompt)
        self._reader, self._token_bytes = Reader(compiled.marked, prefix), compiled.marked.token_bytes
        self._output = output = Output(self._reader, tools or Tools(None), lenient=lenient)
        turn = TurnParser(compiled, output, prompted=prompt is not None)
        self._reading = ChannelParser(compiled, output).read() if compiled.channels else turn.read()
        self._stop: Match | None = None
        self._response: ParsedResponse | None = None
        self._resume()

    def feed(self, ids: Sequence[int] | Ids) -> list[Event]:
        """Take more ids; return the events that became certain.

        Raises InputError, and takes none, if one is not a token id, or after `finish`.
        """
        if self._response is not None:
            raise InputError("this parser has finished (finish, response): make a new one for other ids")
        reader, output = self._reader, self._output
        if type(ids) is list and len(ids) == 1 and type(index := ids[0]) is int and 0 <= index <= INT32_MAX:
            # the usual case in a stream: one id
            piece = self._token_bytes(index)
            output.starts.append(len(reader.data))
            plain = reader.plain(reader.pending + piece) if reader.plain is not None else None
            if plain is None:
                self._resume(piece)
            else:
                text, pending = plain
                if text:
                    reader.report.put(text)
                reader.pending = pending
                reader.data += piece
        else:
            data, starts = reader.marked.spelled(check_ids(ids, "ids"), len(reader.data))
            output.starts += starts
            self._resume(data)
        events, output.events = output.events, []
        return [] if self._lenient else events

    def finish(self) -> list[Event]:
        """End the completion: the remaining events, and `Done`."""
        if self._response is not None:
            return []
        output, self._reader.ended = self._output, True
        self._resume()
        attempts = find_attempts(self._compiled, output)
        if self._lenient:
            self._response = self._read_response(count_attempts(output, attempts), [])
            return [*events_of(self._response), Done(self._response)]
        self._response = self._read_response(output.placed, attempts)
        return [*output.events, Done(self._response)]

    @property
    def response(self) -> ParsedResponse:
        """The whole completion, which this ends."""
        self.finish()
        assert self._response is not None
        return self._response

    def _resume(self, data: bytes = b"") -> None:
        reader, output = self._reader, self._output
        if reader.plain is not None:
            reader.plain, reader.reported = None, len(reader.data) - len(reader.pending)
            if output.current is not None:
                output.stop = reader.reported
        reader.data += data
        try:
            next(self._reading)
        except StopIteration as end:
            self._stop = self._stop or end.value

    def _read_response(self, placed: list[Placed], attempts: list[Placed]) -> ParsedResponse:
        output, match, data, count = self._output, self._stop, self._reader.data, len(self._output.starts)
        stop = self._compiled.stops.get(bytes(data[match.start : match.stop])) if match else None
        end = output.span(match.start, match.stop).stop if match else count
        closing = "".join(output.missing)
        space = leading(closing).encode()
        parts, calls = [one.part for one in placed], [one.call for one in placed if one.call is not None]
        texts = {kind: "".join(part.text for part in parts if part.kind is kind) for kind in PartKind}
        return ParsedResponse(
            content=texts[PartKind.CONTENT],
            reasoning_content=texts[PartKind.REASONING] or ("" if output.blank_reasoning else None),
            tool_calls=calls,
            finish=Finish.LENGTH if stop is None and not output.closed else Finish.STOP,
            stop_token=stop,
            open=output.open,
            parts=parts,
            unread=TokenRange(end, count) if end < count else None,
            attempts=[one.call for one in attempts if one.call is not None],
            closing=closing[next((n for n in range(len(space), 0, -1) if data.endswith(space[:n])), 0) :],
            regions=output.regions(),
            answer="" if all(call.ok for call in calls) else output.answer(),
        )


def read_turn(compiled: Compiled, completion: Ids, prompt_ids: Sequence[int] | Ids) -> ParsedResponse:
    """Parse a completion after a prompt. Raises InputError for an invalid id."""
    parser = StreamingParser(compiled, prompt=compiled.prompt_bytes(prompt_ids, "prev_prompt_ids"))
    parser.feed(completion)
    return parser.response
