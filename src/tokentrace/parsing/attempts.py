"""Attempts: well-formed calls outside their place, as vLLM and SGLang accept them.

A strict reading reports them; a lenient one counts them as calls. They are calls inside reasoning that is never closed,
calls without the delimiter before their head, calls without delimiters after other text, and, if the template shows no
calls, calls in any dialect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from .calls import CallParser
from .compiled import Compiled, CompiledCalls
from .output import Output
from .reader import Reader
from .response import CallStatus, ParsedPart, ParsedResponse, ParsedToolCall, PartKind, joined

_RUNNABLE: Final = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL})
"""The calls that servers pass on to an agent."""
_INTRODUCTION: Final = re.compile(rb"(?:\xff[\x80-\xbf]{4}\s*)?\Z")
"""A control token before a call without delimiters: ``<|python_tag|>``."""


class Attempt(NamedTuple):
    """A call outside its place, and its bytes."""

    call: ParsedToolCall
    start: int
    stop: int


def find_attempts(compiled: Compiled, output: Output) -> list[Attempt]:
    """The attempts of a completion; in a strict reading each is MALFORMED, with the reason."""
    if compiled.grammar.channels is not None:
        return []
    if compiled.calls is not None:
        return list(_attempts(compiled, compiled.calls, output, ""))
    for name, dialect in compiled.dialects.items() if output.tools.declared_any else ():
        problem = f"the template shows no tool calls; tool_parser={name!r} reads this one"
        if dialect.calls is not None and (attempts := list(_attempts(dialect, dialect.calls, output, problem))):
            return attempts
    return []


def _attempts(compiled: Compiled, calls: CompiledCalls, output: Output, problem: str) -> Iterator[Attempt]:
    data, count = output.reader.data, 0
    for start, stop, openers, why in _places(calls, output, problem):
        pattern, at = re.compile(b"|".join(map(re.escape, openers))), start
        while (match := pattern.search(data, at, stop)) is not None:
            base = match.start()
            introduction = _INTRODUCTION.search(data, at, base) if calls.bare else None
            scratch = _read_calls(compiled, calls, output, base, stop)
            at = base + max(scratch.reader.at, len(match[0]))
            places = [place for part, place in zip(scratch.parts, scratch.places, strict=True) if part.call is not None]
            for call, (begin, end) in zip(scratch.calls, places, strict=True):
                if call.status in _RUNNABLE:  # the first and the last with what opens and closes a section
                    begin = base + begin if call.index else introduction.start() if introduction is not None else base
                    end = base + (scratch.reader.at if call is scratch.calls[-1] else end)
                    call = replace(call, index=count, raw=output.reader.text(begin, end), span=output.span(begin, end))
                    if not output.lenient:
                        reason = problem or (calls.bare and call.problem) or why
                        call = replace(call, status=CallStatus.MALFORMED, problem=reason)
                    count += 1
                    yield Attempt(call, begin, end)


def _places(calls: CompiledCalls, output: Output, problem: str) -> Iterator[tuple[int, int, list[bytes], str]]:
    """Stretches that may hold attempts, what these begin with, and why they are none."""
    for part, (start, stop) in zip(output.parts, output.places, strict=True):
        openers = [*(calls.openers if problem else []), calls.headless_opener]
        why = f"{calls.grammar.open.strip()!r} is missing before the call"
        if calls.bare:
            why = "the call comes after something else, and only its place says that it is a call"
        if part.kind is PartKind.REASONING and output.open is PartKind.REASONING and part is output.parts[-1]:
            openers, why = calls.openers, "the call is inside reasoning that is not closed"
        elif part.kind is not PartKind.CONTENT:
            continue
        openers = [opener for opener in openers if opener]
        if any(output.reader.data.find(opener, start, stop) >= 0 for opener in openers):
            yield start, stop, openers, why


def _read_calls(compiled: Compiled, calls: CompiledCalls, output: Output, start: int, stop: int) -> Output:
    reader = Reader(compiled.marked, bytes(output.reader.data[start:stop]), ended=True)
    scratch = Output(reader, 0, output.tools, lenient=True)
    parser = CallParser(compiled, calls, scratch, any_key=True)
    headless = calls.headless_opener and reader.data.startswith(calls.headless_opener)
    for _ in parser.bare() if calls.bare else parser.calls_from(0) if headless else parser.read():
        pass
    if calls.bare and not scratch.calls:  # what is inside of some other JSON is no call
        for _ in parser.json.value():
            pass
    return scratch


def count_attempts(response: ParsedResponse, output: Output, attempts: list[Attempt]) -> ParsedResponse:
    """The lenient reading: attempts are calls."""
    parts: list[ParsedPart] = []
    calls: list[ParsedToolCall] = []

    def add_call(call: ParsedToolCall, lead: str) -> None:
        parts.append(ParsedPart(PartKind.TOOL_CALL, call.raw, call.span, len(calls), lead))
        problem = "" if call.status is CallStatus.OK else call.problem
        calls.append(replace(call, index=len(calls), problem=problem))

    for part, (start, stop) in zip(output.parts, output.places, strict=True):
        if part.call is not None:
            add_call(output.calls[part.call], part.lead)
            continue
        for attempt in (*(one for one in attempts if start <= one.start < stop), None):
            end = stop if attempt is None else attempt.start
            if start < end:
                parts.append(ParsedPart(part.kind, output.reader.text(start, end), output.span(start, end)))
            if attempt is not None:
                add_call(attempt.call, "")
                output.enter(PartKind.TOOL_CALL, attempt.start)
                output.enter(part.kind, attempt.stop)
                start = attempt.stop
    return replace(
        response,
        content=joined(parts, PartKind.CONTENT),
        reasoning_content=joined(parts, PartKind.REASONING) or ("" if response.reasoning_content == "" else None),
        tool_calls=calls,
        parts=parts,
        attempts=[],
        regions=output.regions(),
    )
