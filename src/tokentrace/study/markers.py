"""The markers of an assistant's turn: which follows which, and how a turn that was cut off is closed.

A marker is a control token of the template's scaffold, or a tag spelled out in it. Probes, with and
without reasoning and calls, show which marker can come after which. A completion that stops in the middle of
reasoning, of a call or of a header is then closed by the shortest way from the last marker it wrote to the end of
the turn: ``\\n</think>\\n\\n<|im_end|>`` on Qwen, ``<|message|><|end|>`` inside a header of gpt-oss.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ..template.chat_template import REASONING_FIELDS
from ..template.trace import Rendering
from ..tokens.tokenizer import Ids, Tokenizer
from .probes import marked_turns
from .turns import turn_spans

if TYPE_CHECKING:
    from .study import TemplateStudy

START: Final = "start"
END: Final = "end"
_PLANE: Final = 0xF0000
"""Control tokens stand as characters of the private planes, one each, so that text can never look like one."""
_MARKER: Final = re.compile("</?[^\\s<>=\"'/]+(?:>|(?=[\\s=]))|[\U000f0000-\U0010fffd]")
"""A tag, the head of one that has a value (``<parameter=``), or a control token."""

_NAME: Final = "([^\\s\"'<>{}()|\U000f0000-\U0010fffd]+)(?=[\\s\"'<>{}()|\U000f0000-\U0010fffd])"


class MarkedText:
    """Text in which each control token is one private character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary = tokenizer.vocabulary
        tokens = sorted(vocabulary.control.values(), key=lambda token: token.id)[: 0x10FFFD - _PLANE]
        self._ids = [token.id for token in tokens]
        self._chars = {token.id: chr(_PLANE + at) for at, token in enumerate(tokens)}

    def of_ids(self, ids: Sequence[int]) -> str:
        """What ids say. Ids that the vocabulary does not have say U+FFFD."""
        vocabulary = self.vocabulary
        pieces: list[bytes] = []
        for index in ids:
            char = self._chars.get(index)
            if char is not None:
                pieces.append(char.encode())
            elif 0 <= index < vocabulary.size:
                pieces.append(vocabulary.token_bytes(index))
            else:
                pieces.append(b"\xef\xbf\xbd")
        return b"".join(pieces).decode("utf-8", "replace")

    def of_text(self, text: str) -> str:
        """Scaffold, its control tokens marked."""
        vocabulary = self.vocabulary
        if vocabulary.control_pattern is None:
            return text
        return vocabulary.control_pattern.sub(lambda match: self._chars[vocabulary.control[match[0]].id], text)

    def to_text(self, marked: str) -> str:
        """Marked text as it is written."""
        added = self.vocabulary.added
        return re.sub("[\U000f0000-\U0010fffd]", lambda match: added[self._ids[ord(match[0]) - _PLANE]].text, marked)

    def char(self, index: int) -> str | None:
        """The character that stands for a control token."""
        return self._chars.get(index)

    def ids(self, marked: str) -> list[int]:
        """Ids of text that the template would have written itself."""
        out: list[int] = []
        for piece in re.split("([\U000f0000-\U0010fffd])", marked):
            if len(piece) == 1 and ord(piece) >= _PLANE:
                out.append(self._ids[ord(piece) - _PLANE])
            elif piece:
                out += self._tokenizer.encode_plain([piece])[0].tolist()
        return out


@dataclass(slots=True)
class _Edge:
    """What stands between two markers."""

    literal: str | None
    """The scaffold between them, where no field is."""
    field: bool = False
    """Whether a field may be between them."""
    lead: str = ""
    trail: str = ""
    """White space after the first and before the second, where a field is between them."""


class TurnMarkers:
    """The markers of a template's assistant turns, and their order."""

    def __init__(self, study: TemplateStudy) -> None:
        self.marked = MarkedText(study.tokenizer)
        self.reasoning_close: set[str] = set()
        """The markers that come after reasoning."""
        self._edges: dict[str, dict[str, _Edge]] = {START: {}}
        seen = False
        with_call: set[str] = set()
        without: set[str] = set()
        self._names: dict[str, None] = {}
        self.plain_close = ""
        """What the template writes after the words of a past answer, in its turn; marked."""
        for messages in marked_turns(study.forms.calls.silent_fields):
            rendering = study.readable(messages)
            if rendering is None:
                continue
            segments = list(self._segments(rendering, 1))
            markers = self._learn(segments)
            if not seen:
                self.plain_close = "".join(text for text, field in segments[_last_field(segments) + 1 :] if not field)
            seen = True
            if messages[1].get("tool_calls"):
                with_call |= markers
                self._learn_names(segments)
            else:
                without |= markers
        self._nest()
        self._call_markers = with_call - without

    # -- learning

    def _segments(self, rendering: Rendering, message: int) -> Iterator[tuple[str, str]]:
        """The turn in pieces: marked scaffold with ``""``, fields with their name."""
        own = next((turn for turn in turn_spans(rendering) if turn.message == message and turn.start < turn.end), None)
        if own is None:
            return
        begin = 0
        for end, origin in zip(rendering.ends, rendering.origins, strict=True):
            text = rendering.text[max(begin, own.start) : min(end, own.end)]
            if text:
                if origin is None or origin.is_role:
                    yield self.marked.of_text(text), ""
                else:
                    yield text, str(origin[-1])
            begin = end

    def _learn(self, segments: Sequence[tuple[str, str]]) -> set[str]:
        seen: set[str] = set()
        last = ""
        between, hole, any_hole = "", "", False
        lead = whole = ""
        started = False
        for text, field in segments:
            if field:
                if not hole:
                    lead = _leading(between)
                hole, any_hole = field, True
                between = ""
                continue
            at = 0
            for match in _MARKER.finditer(text):
                between += text[at : match.start()]
                edge = _Edge(None, True, lead, _trailing(between)) if hole else _Edge(between)
                if last:
                    self._add(last, match[0], edge)
                if whole and whole != last:  # past the head of a tag, of which only a whole one can be written
                    self._add(whole, match[0], _Edge(None, True, "", _trailing(between)))
                if any_hole and not started:
                    started = True
                    self._add(START, match[0], edge)
                seen.add(match[0])
                if hole in REASONING_FIELDS:
                    self.reasoning_close.add(match[0])
                last, between, hole, lead, at = match[0], "", "", "", match.end()
                whole = last if _is_whole(last) else whole
            between += text[at:]
        if last:
            self._add(last, END, _Edge(""))
        if any_hole and not started:
            self._add(START, END, _Edge(""))
        return seen

    def _add(self, before: str, after: str, edge: _Edge) -> None:
        known = self._edges.setdefault(before, {}).setdefault(after, edge)
        known.field = known.field or edge.field
        if known.literal is None and edge.literal is not None:
            known.literal = edge.literal
        elif known.literal is not None and edge.literal is None and not known.trail:
            known.lead, known.trail = edge.lead, edge.trail

    def _nest(self) -> None:
        """An opened tag can be closed at once, whatever stood between the two in the probes."""
        named = {self.marked.to_text(marker): marker for marker in self._edges}
        for text, marker in named.items():
            closer = named.get(f"</{text[1:].rstrip('>')}>") if text[0] == "<" and text[1:2] != "/" else None
            if closer is not None and closer not in self._edges[marker]:
                before = [edges[closer] for edges in self._edges.values() if closer in edges]
                trail = next((edge.trail or _trailing(edge.literal or "") for edge in before), "")
                self._add(marker, closer, _Edge(None, True, "", trail))

    def _learn_names(self, segments: Sequence[tuple[str, str]]) -> None:
        """How the name of a called function is introduced, wherever it stands: the last words before it."""
        for (scaffold, before), (_, field) in itertools.pairwise(segments):
            if field == "name" and not before:
                piece = scaffold[max((match.end() for match in _MARKER.finditer(scaffold)), default=0) :]
                if not piece:  # right after a marker: that one
                    self._names[re.escape([match[0] for match in _MARKER.finditer(scaffold)][-1]) + _NAME] = None
                words = [] if piece[-1:].isspace() else piece.split()[-2:]
                for count in (2, 1) if words and words[-1] not in ('"', "'") else (2,) if words else ():
                    self._names[r"\s*".join(map(re.escape, words[-count:])) + _NAME] = None

    # -- using

    def knows(self, token: int) -> bool:
        """Whether a control token is one of the markers."""
        return self.marked.char(token) in self._edges

    def has_any(self, marked: str) -> bool:
        """Whether marked text holds one of the markers of a turn."""
        return any(match[0] in self._edges for match in _MARKER.finditer(marked))

    def markers(self, marked: str) -> frozenset[str]:
        """The markers that marked text holds."""
        return frozenset(match[0] for match in _MARKER.finditer(marked))

    def left_open(self, marked: str) -> list[str]:
        """The marker that closes what marked text ends in, where that is an open tag: ``</think>``."""
        text = self.marked.to_text(marked)
        opened = re.findall("<([^\\s<>/=]+)>", text)
        if not opened or f"</{opened[-1]}>" in text[text.rindex(f"<{opened[-1]}>") :]:
            return []
        return [self.marked.of_text(f"</{opened[-1]}>")]

    def reasoning(self, marked: str) -> tuple[bool, bool]:
        """Whether marked text holds reasoning, and whether it holds an empty place for it; both where none can tell."""
        if not self.reasoning_close:
            return True, True
        blank = full = False
        at = 0
        for match in _MARKER.finditer(marked):
            if match[0] in self.reasoning_close:
                between = marked[at : match.start()]  # white space alone may be either
                blank, full = blank or not between.strip(), full or bool(between)
            at = match.end()
        return full, blank

    def excerpt(self, ids: Ids, wanted: frozenset[str]) -> str:
        """Marked text that is as good as all of it where only `wanted` markers and `reasoning` are looked for.

        Where all of these are control tokens, what lies between control tokens is cut short: that is much cheaper.
        """
        vocabulary = self.marked.vocabulary
        if any(len(marker) > 1 or ord(marker) < _PLANE for marker in wanted | self.reasoning_close):
            return self.marked.of_ids(ids.tolist())
        control = np.flatnonzero(vocabulary.is_control[np.minimum(ids, vocabulary.size - 1)])
        chosen = np.unique(np.concatenate([control, *(control - back for back in range(1, 5))]))
        return self.marked.of_ids(ids[chosen[chosen >= 0]].tolist())

    def has_call(self, completion: str) -> bool | None:
        """Whether marked text holds a tool call; None where calls have no markers of their own."""
        if not self._call_markers:
            return None
        return any(match[0] in self._call_markers for match in _MARKER.finditer(completion))

    def called(self, completion: str, count: int) -> list[str]:
        """The names of the functions that marked text calls, in order: `count` of them, or fewer.

        By the words around them: for templates whose calls are not understood well enough to be parsed.
        """
        found = [[str(name) for name in re.findall(pattern, completion)] for pattern in self._names]
        return next((names for names in found if len(names) == count), next(filter(None, found), []))

    def closing(self, stream: str, closed_by: frozenset[str], bare: Callable[[], bool], last: str = END) -> str:
        """What closes a turn of which `stream` is the end so far, both in marked text.

        `closed_by` are markers that end turns: what comes after one is a new beginning. `last` is the marker to close
        it with, by default the one by which it is done soonest, or none. `bare` says whether what comes after the last
        marker is content by itself: an answer without the empty reasoning that the template would write before it.
        """
        state, said = START, ""
        for match in _MARKER.finditer(stream):
            if match[0] in self._edges:
                state = START if match[0] in closed_by else match[0]
                said = stream[match.end() :]
        path = self._way(state, last) or self._way(START, last) or []
        first = self._edges.get(state, {}).get(path[0]) if path and path[0] != END else None
        if first is not None and not first.field and not _is_begun(first.literal or "", said) and bare():
            state, path = START, self._way(START, last) or []
        out = ""
        for step, (before, after) in enumerate(zip([state, *path], path, strict=False)):
            if after == END:
                break
            edge = self._edges.get(before, {}).get(after) or _Edge("")
            if step == 0:  # somewhere between the two: only the white space before the marker may be missing
                out += "" if stream.endswith(edge.trail) else edge.trail
            else:
                out += edge.lead + edge.trail if edge.literal is None else edge.literal
            out += after
        return out

    def _way(self, state: str, last: str) -> list[str] | None:
        """The fewest markers from one to the last of the turn, or to its end."""
        queue: deque[tuple[str, ...]] = deque([(state,)])
        seen = {state}
        while queue:
            path = queue.popleft()
            for after in self._edges.get(path[-1], ()):
                if after == last:
                    return [*path[1:], last]
                if after not in seen and _is_whole(after):
                    seen.add(after)
                    queue.append((*path, after))
        return None


def _is_begun(literal: str, said: str) -> bool:
    """Whether what was said is (some of) a literal, and white space."""
    return literal.startswith(said) or not said.removeprefix(literal).strip()


def _is_whole(marker: str) -> bool:
    """Whether a marker can be written by itself; the head of a tag cannot."""
    return marker[0] != "<" or marker[-1] == ">"


def _last_field(segments: Sequence[tuple[str, str]]) -> int:
    return max((at for at, (_, field) in enumerate(segments) if field), default=len(segments))


def _leading(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _trailing(text: str) -> str:
    return text[len(text.rstrip()) :]
