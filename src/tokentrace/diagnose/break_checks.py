"""The checks of `explain_break`: the first that matches gives the cause of a difference."""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import re
from bisect import bisect_left
from collections.abc import Collection
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from ..errors import TokentraceError
from ..formats.dialects import REASONING
from ..formats.grammar import Channels
from ..parsing.response import ParsedToolCall
from ..rendering.renderer import Renderer
from ..show.alignment import Hunk, hunks, up_to_shared_end
from ..show.visible import counted, quoted
from ..study.probes import USER
from ..study.turns import common_prefix as shared_text
from ..tokens.ids import common_prefix, runs
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary
from .appends import TOOLS
from .conversation_diff import INSTRUCTIONS
from .finding import Cause
from .records import Mask

READ = 65_536
_ROLE = re.compile(
    r"\s*(system|developer|user|assistant|tool|ipython|model|functions\.)(?![\w.])|\s*(functions)\."
)
_HEAD = re.compile(r"(?!.*end)(?:.*start|.*turn|.*header|.*role|\]~b\])")
_NAMED_HEAD = re.compile(
    r"[<\[]?[|｜]?(?:im_)?(system|developer|user|assistant|observation)[|｜]?>", re.IGNORECASE
)
_OTHER_HEADS = {"[INST]": "user", "[SYSTEM_PROMPT]": "system", "[TOOL_RESULTS]": "tool"}
_ALIKE = 12
"""Texts that share this many characters count as continuing alike."""
_HARMONY = Channels()
REASONING_TAGS = (
    *((frame.open, frame.close) for frame in REASONING.values() if frame is not None),
    (_HARMONY.opening(_HARMONY.reasoning), f"{_HARMONY.end}{_HARMONY.start}assistant"),
)
"""Texts that open and close reasoning, besides those of a renderer's grammar."""
_OPENING = 16
_LITERAL = re.compile(
    r"(?:[>:\[,=({]\s*|\n)(true|false|null|True|False|None)(?=\s*(?:[<,\]})]|\Z)|[ \t]*\n)"
)
_PYTHON = {"true": "True", "false": "False", "null": "None"}
_DECODER = json.JSONDecoder()
_OPENERS = 64
"""Braces and brackets before a difference to try as the start of a JSON value."""


class Match(NamedTuple):
    """A cause, proven by `quotes`; it explains the stream up to `covered`."""

    cause: Cause
    quotes: tuple[str, str] | None = None
    hunk: Hunk | None = None
    covered: int = 0


class Case:
    """One difference between a stream and the next prompt.

    `ours` and `theirs` are the texts around it; character `at` is the first that differs. It
    lies in `completion`; `region` is None if the sampled tokens are unknown.
    """

    def __init__(
        self, stream: Ids, prompt: Ids, model: Any, hunk: Hunk, mask: Mask | None, reach: int = READ
    ) -> None:
        self.stream, self.prompt, self.model, self.hunk = stream, prompt, model, hunk
        self.tokenizer: Tokenizer = model if isinstance(model, Tokenizer) else model.tokenizer
        self.vocabulary = self.tokenizer.vocabulary
        self.completions = [] if mask is None else runs(mask)
        number = sum(start <= hunk.start for start, _ in self.completions)
        before = self.completions[number - 1] if number else (0, 0)
        self.completion = before if hunk.start < before[1] else None
        where = "" if self.completion else "context after "
        self.region = None if mask is None else f"{where}completion {number}" if number else "first prompt"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.lead = decoder.decode(spell(self.vocabulary, stream[max(0, hunk.start - reach) : hunk.start]))
        partial = decoder.getstate()[0]  # the first bytes of a character that both sides complete
        self.ours, self.theirs = (
            self.lead + (partial + spell(self.vocabulary, ids[at : at + reach])).decode("utf-8", "replace")
            for ids, at in ((stream, hunk.start), (prompt, hunk.other_start))
        )
        self.at = shared_text(self.ours, self.theirs)
        self.ended = hunk.start + reach >= len(stream)
        self.start, self.other_start = hunk.start, hunk.other_start
        self.sides = hunk.sides(stream, prompt)

    def explain(self) -> Match:
        ids = self.no_token, self.first_token, self.remerge
        turn = self.stripped_reasoning, self.lost_completion, self.stop_token, self.compaction
        values = self.boolean, self.json_format, self.changed_call, self.whitespace
        for check in (*ids, *turn, *values, self.changed_tools, self.changed_system, self.cut_short):
            # JSON may be nested too deeply, and a turn may be unreadable
            with contextlib.suppress(RecursionError, TokentraceError):
                if (match := check()) is not None:
                    return match
        return Match(Cause.UNKNOWN)

    def words(self, match: Match) -> str:
        sides = (match.hunk or self.hunk).sides(self.stream, self.prompt)
        texts = match.quotes or tuple(self.tokenizer.decode(side[:64]) for side in sides)
        sizes = ["" if match.quotes or not len(side) else f" ({counted(len(side))})" for side in sides]
        ours, theirs = (f"{quoted(text)}{size}" for text, size in zip(texts, sizes, strict=True))
        role = self.roles[0] or self.roles[1]
        turn = f" in the turn of the {role}" if role and not self.completion else ""
        if match.cause is Cause.UNKNOWN and self.other_start == len(self.prompt):
            end = f"the prompt ends {counted(len(self.stream) - self.start)} before the stream"
            return f"{end}: the request was repeated, or goes back in history"
        meaning = (match.cause.meaning or str(match.cause)).rstrip(".")
        return f"{meaning}: the stream has {ours}{turn}, the next prompt {theirs}"

    @functools.cached_property
    def heads(self) -> TurnHeads:
        return TurnHeads(self.tokenizer, {tag for pair in self.reasoning for tag in pair})

    @functools.cached_property
    def roles(self) -> tuple[str | None, str | None]:
        return self.heads.roles_at(self.hunk, self.stream, self.prompt)

    @functools.cached_property
    def reasoning(self) -> tuple[tuple[str, str], ...]:
        frame = None
        with contextlib.suppress(TokentraceError):
            frame = None if self.model is self.tokenizer else self.model.grammar().reasoning
        return (*([(frame.open, frame.close)] if frame is not None and frame.open else []), *REASONING_TAGS)

    def token_at(self, character: int) -> int:
        size = len(self.ours[len(self.lead) : character].encode("utf-8", "surrogatepass"))
        at = self.start
        while size > 0 and at < len(self.stream):
            size -= len(self.vocabulary.token_bytes(int(self.stream[at])))
            at += 1
        return at

    def no_token(self) -> Match | None:
        outside = (side[side >= self.vocabulary.size] for side in self.sides)
        first, second = (f"id {ids[0]}" if len(ids) else "" for ids in outside)
        return Match(Cause.NO_TOKEN, (first, second)) if first or second else None

    def first_token(self) -> Match | None:
        """The first control token on one side only, with the same tokens after it."""
        if self.start > 1 or min(len(self.stream), len(self.prompt)) < 2:
            return None
        pair = self.stream, self.prompt
        for (one, other), cause in ((pair, Cause.BOS_MISSING), (pair[::-1], Cause.BOS_ADDED)):
            same = common_prefix(one[1:], other)
            if int(one[0]) in self.vocabulary.added and same >= min(len(one) - 1, len(other), 8):
                return Match(cause)
        return None

    def remerge(self) -> Match | None:
        """Other tokens that spell the same bytes, with no changed text next to them."""
        sides = [[*map(self.vocabulary.token_bytes, side[:READ].tolist())] for side in self.sides]
        same = common_prefix(*(np.frombuffer(b"".join(side), np.uint8) for side in sides))
        ours, theirs = ([*accumulate(map(len, side))] for side in sides)
        for end in sorted({*ours} & {*theirs}):
            at = self.start + bisect_left(ours, end) + 1
            other = self.other_start + bisect_left(theirs, end) + 1
            agree = self.stream[at : at + 1].tolist() in ([], self.prompt[other : other + 1].tolist())
            if 0 < end <= same and agree:
                return Match(Cause.BPE_REMERGE, hunk=Hunk(self.start, at, self.other_start, other))
        return None

    def stripped_reasoning(self) -> Match | None:
        """A block of reasoning on one side, after which both sides continue alike."""
        for opening, closing in self.reasoning:
            if block := _block(self.ours, self.theirs, len(self.lead), opening, closing):
                body, end = block
                if end < len(self.ours) or self.ended:
                    quotes, hunk = (opening + body + closing, ""), self._up_to(self.token_at(end))
                    return Match(Cause.STRIPPED_REASONING, quotes, hunk)
            if block := _block(self.theirs, self.ours, len(self.lead), opening, closing):
                return Match(Cause.STRIPPED_REASONING, ("", opening + block[0] + closing))
        return None

    def _up_to(self, end: int) -> Hunk:
        """The difference up to this token, or until both sides agree."""
        start, at = self.start, self.other_start
        after = next(hunks(self.stream, self.prompt, end, at), Hunk(end, end, at, at))
        agree = (after.start, after.other_start) != (end, at)
        return Hunk(start, end, at, at) if agree else Hunk(start, after.stop, at, after.other_stop)

    def lost_completion(self) -> Match | None:
        """An empty stream, zeros, or a prompt without the last completion."""
        at, last = self.start, next(reversed(self.completions), None)
        following = self.prompt[self.other_start :][:8]
        zeros = len(following) >= 4 and not following[:4].any() and self.stream[at : at + 4].all()
        if zeros or not len(self.stream):
            return Match(Cause.ZEROED_ANCHOR)
        if last is None or last[0] < at:
            return None
        opened = self.tokenizer.decode(self.stream[at : min(last[0], at + 64)]).strip()
        if opened and opened not in dict(self.reasoning):  # the prompt may open reasoning
            return None
        completion = self.stream[slice(*last)].tolist()
        solid = (index for index in following.tolist() if self.vocabulary.token_bytes(index).strip())
        first = next(solid, None)
        gone = first in self.heads.structural and first not in completion[:-1] and len(completion) > 1
        return Match(Cause.ZEROED_ANCHOR) if gone else None

    def stop_token(self) -> Match | None:
        at, other = self.start, self.other_start
        end = len(self.stream) if self.region is None else self.completion[1] if self.completion else -1
        if at != end - 1 or other == len(self.prompt):
            return None
        tokens = self.stream[at : at + 1], self.prompt[other : other + 1]
        if not self.heads.structural.issuperset(np.concatenate(tokens).tolist()):
            return None
        hunk = Hunk(at, at + 1, other, other + 1) if at + 1 == len(self.stream) else None
        ours, theirs = (self.tokenizer.decode(token) for token in tokens)
        return Match(Cause.STOP_TOKEN, (ours, theirs), hunk)

    def compaction(self) -> Match | None:
        heads = np.flatnonzero(np.isin(self.stream, self.heads.heads))
        last = heads[-1] if len(heads) else len(self.stream)
        for stream in (self.stream, self.stream[:last]):  # the last turn may be rendered another way
            whole = up_to_shared_end(stream, self.prompt, self.start)
            if whole is not None and self._has_fewer_turns(whole, 1):
                return Match(Cause.COMPACTION, hunk=whole)
        ours, theirs = self.sides
        between = (self.region or "").startswith("context") and self.hunk.stop < len(self.stream)
        cut = between and not self.heads.count(ours) and len(ours) >= max(64, 4 * len(theirs))
        return Match(Cause.COMPACTION) if cut or self._has_fewer_turns(self.hunk, 2) else None

    def cut_short(self) -> Match | None:
        whole = Hunk(self.start, len(self.stream), self.other_start, len(self.prompt))
        return Match(Cause.COMPACTION, hunk=whole) if self._has_fewer_turns(whole, 2) else None

    def _has_fewer_turns(self, hunk: Hunk, least: int) -> bool:
        ours, theirs = hunk.sides(self.stream, self.prompt)
        turns = self.heads.count(ours)
        if turns < least or turns <= self.heads.count(theirs) or len(ours) < 2 * len(theirs):
            return False
        return turns > 1 or self.heads.role(self.stream, hunk.start) not in INSTRUCTIONS

    def changed_tools(self) -> Match | None:
        """Different or missing tools where the renderer's template declares them."""
        others = INSTRUCTIONS.isdisjoint(self.roles) and None not in self.roles  # they may mention tools
        if others or self.completion or self.model is self.tokenizer:
            return None
        opening: str = self.model.cache.once(("tools opening",), lambda: _before_tools(self.model))
        pattern, start = self.vocabulary.control_pattern, self.lead.rfind(opening)
        inside = start >= 0 and (pattern is None or not pattern.search(self.lead, start + len(opening)))
        gone = (opening in self.ours) != (opening in self.theirs)
        return Match(Cause.CHANGED_TOOLS) if opening and (inside or gone) else None

    def changed_system(self) -> Match | None:
        context = self.completion is None and not INSTRUCTIONS.isdisjoint(self.roles)
        return Match(Cause.CHANGED_SYSTEM) if context else None

    def boolean(self) -> Match | None:
        """A JSON literal on one side and its Python form on the other, as a value."""
        near = (_LITERAL.finditer(text, max(0, self.at - 80)) for text in (self.ours, self.theirs))
        after = ((match for match in matches if match.end(1) >= self.at) for matches in near)
        one, other = (next(matches, None) for matches in after)
        if one is None or other is None or not one.start(1) == other.start(1) <= self.at:
            return None
        ours, theirs = one[1], other[1]
        same = _PYTHON.get(ours) == theirs or _PYTHON.get(theirs) == ours
        return Match(Cause.BOOLEAN_CASE, (ours, theirs)) if same else None

    def json_format(self) -> Match | None:
        """A complete JSON value around the difference that is the same on both sides."""
        places = (at for at in range(min(self.at, len(self.ours) - 1), -1, -1) if self.ours[at] in "{[")
        for start in islice(places, _OPENERS):
            one, other = _value_at(self.ours, start), _value_at(self.theirs, start)
            if one is None or other is None or min(one[1], other[1]) <= self.at:
                continue
            if not _same_value(one[0], other[0]):
                return None
            quotes = self.ours[start : one[1]], self.theirs[start : other[1]]
            return Match(Cause.JSON_FORMAT, quotes, covered=self.token_at(one[1]))
        return None

    def changed_call(self) -> Match | None:
        """A call of the turn that the prompt changes or lacks."""
        if self.model is self.tokenizer or (self.completion is None and self.region is not None):
            return None
        heads = np.flatnonzero(np.isin(self.stream[: self.start], self.heads.heads)).tolist()
        start, stop = self.completion or ([0, *heads][-1], self._turn_stop(self.stream, self.start))
        other_stop = self._turn_stop(self.prompt, self.other_start)
        sides = self.stream[start:stop], self.prompt[start:other_stop]
        turns = (self.model.parse_response(side, prompt_ids=self.stream[:start]) for side in sides)
        ours, theirs = ([call for call in turn.tool_calls if call.name] for turn in turns)
        match = next(filter(None, map(_compare_calls, ours, theirs)), None)
        if match is None and len(ours) > len(theirs):
            match = Match(Cause.REWRITTEN_CALL, (str(ours[len(theirs)].name), ""))
        return None if match is None else match._replace(covered=stop)

    def _turn_stop(self, ids: Ids, at: int) -> int:
        stops = np.isin(ids[at:], [*self.model.get_stop_token_ids()])
        return at + (int(stops.argmax()) + 1 if stops.any() else len(stops))

    def whitespace(self) -> Match | None:
        texts = self.ours[self.at :], self.theirs[self.at :]
        spaces, other_spaces = (text[: len(text) - len(text.lstrip())] for text in texts)
        solid, other_solid = ("".join(text.lstrip()[:256].split()) for text in texts)
        size = min(8, len(solid)) if self.ended else 8
        same = (spaces or other_spaces) and solid[:size] == other_solid[:size]
        return Match(Cause.WHITESPACE, (spaces, other_spaces)) if same else None


def _block(one: str, other: str, at: int, opening: str, closing: str) -> tuple[str, int] | None:
    """The body and the end of reasoning that only `one` has."""
    begin = one.rfind(opening, 0, at + 2 * len(opening) + 8)
    start = begin + len(opening)
    if begin < 0 or one[at:begin].strip() or closing in one[start:at]:
        return None
    body, close, after = one[start:].partition(closing)
    following = other[min(begin, at) :].lstrip()
    if empty := following.startswith(opening):
        following = following.removeprefix(opening).lstrip()
        if not body.strip() or not following.startswith(closing):
            return None
    following, after = following.removeprefix(closing).lstrip(), after.lstrip()
    if not close and len(body.strip()) >= _ALIKE and body.strip()[:_ALIKE] in other[at:]:
        return None  # both have the text: only the tag differs
    end = start + len(body) + (0 if empty else len(close))
    goes_on = shared_text(after, following) >= min(_ALIKE, len(after))
    return (body, end) if goes_on and not following.startswith(opening) else None


def _before_tools(renderer: Renderer) -> str:
    """What the template writes before the first tool. Raises TokentraceError."""
    spans = [*renderer.silent().render([USER], tools=TOOLS).rendering.spans()]
    sources = [origin and origin.source for *_, origin in spans]
    before = spans[: sources.index("tools")] if "tools" in sources else []
    return "".join(text for text, *_ in before).strip()[-_OPENING:]


def _value_at(text: str, start: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _same_value(one: Any, other: Any) -> bool:
    """True if two values are equal in JSON, or one is a string that holds the other."""
    if isinstance(one, str) != isinstance(other, str):
        text, value = (one, other) if isinstance(one, str) else (other, one)
        parsed = _value_at(text, 0) if isinstance(value, (dict, list)) else None
        return parsed is not None and parsed[1] == len(text) and _same_value(parsed[0], value)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(map(_same_value, one.values(), map(other.get, one)))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_value, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _compare_calls(one: ParsedToolCall, other: ParsedToolCall) -> Match | None:
    if one.name != other.name:
        return Match(Cause.REWRITTEN_CALL, (str(one.name), str(other.name)))
    ours, theirs = (dict(call.raw_arguments or call.arguments or {}) for call in (one, other))
    shared = [key for key in ours if key in theirs]
    for key in dict.fromkeys([*shared, *ours, *theirs]):
        here, there, cause = ours.get(key), theirs.get(key), Cause.REWRITTEN_CALL
        if key not in ours or key not in theirs:
            cause = Cause.EMPTY_PARAMETER
        elif _same_value(here, there):
            continue
        elif isinstance(here, str) and isinstance(there, str) and here.split() == there.split():
            cause = Cause.WHITESPACE
        elif isinstance(here, bool) != isinstance(there, bool) and str(here).lower() == str(there).lower():
            cause = Cause.BOOLEAN_CASE
        write = functools.partial(json.dumps, ensure_ascii=False, default=str)
        first, second = (f"{key}={write(side[key])}" if key in side else "" for side in (ours, theirs))
        return Match(cause, (first, second))
    if list(ours) != list(theirs):
        return Match(Cause.JSON_FORMAT)
    same = "".join(one.raw.split()) == "".join(other.raw.split())
    same = same and (one.arguments is None) == (other.arguments is None)
    return None if same else Match(Cause.EMPTY_PARAMETER, (one.raw, other.raw))


def spell(vocabulary: Vocabulary, ids: Ids) -> bytes:
    return b"".join(map(vocabulary.token_bytes, ids.tolist()))


class TurnHeads:
    """Control tokens that begin turns, by name; `structural` adds special ones but `tags`."""

    def __init__(self, tokenizer: Tokenizer, tags: Collection[str] = ()) -> None:
        roles: dict[int, str] = {}
        self.tokenizer, self.roles, self.structural = tokenizer, roles, set[int]()
        for text, token in tokenizer.vocabulary.control.items():
            match = _NAMED_HEAD.fullmatch(text)
            if match or _HEAD.match(text) or text in _OTHER_HEADS:
                roles[token.id] = match[1].lower() if match else _OTHER_HEADS.get(text, "")
            if token.id in roles or (token.special and text not in tags):
                self.structural.add(token.id)
        self.heads = np.asarray([*roles], np.int32)

    def count(self, ids: Ids) -> int:
        return int(np.isin(ids, self.heads).sum())

    def roles_at(self, hunk: Hunk, ours: Ids, theirs: Ids) -> tuple[str | None, str | None]:
        return self.role(ours, hunk.start), self.role(theirs, hunk.other_start)

    def role(self, ids: Ids, at: int) -> str | None:
        """The role of the turn around a token; None if no head names it."""
        start = max(0, at - READ)
        for index in reversed((np.flatnonzero(np.isin(ids[start : at + 1], self.heads)) + start).tolist()):
            match = _ROLE.match(self.tokenizer.decode(ids[index + 1 : index + 5]))
            if match:
                return "tool" if match[2] else match[1]
            if role := self.roles[int(ids[index])]:
                return role
        return None
