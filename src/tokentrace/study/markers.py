"""The markers of an assistant's turn: which of them a stream holds.

A marker is a control token of the template's scaffold, or a tag spelled out in it. Probes, with and without reasoning
and calls, show which there are, which come after reasoning, and which only calls have.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ..template.chat_template import REASONING_FIELDS
from ..template.trace import Rendering
from ..tokens.tokenizer import Ids, Tokenizer
from .probes import marked_turns
from .turns import turn_spans

if TYPE_CHECKING:
    from .study import TemplateStudy

_PLANE: Final = 0xF0000
"""Control tokens stand as characters of the private planes, one each. Text that has such characters shows U+FFFD."""
_MARKER: Final = re.compile("</?[^\\s<>=\"'/]+(?:>|(?=[\\s=]))|[\U000f0000-\U0010fffd]")
"""A tag, the head of one that has a value (``<parameter=``), or a control token."""

_CONTROL: Final = re.compile("[\U000f0000-\U0010fffd]")
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
        """What ids say. Ids that the vocabulary does not have say U+FFFD, and so do private characters in text."""
        vocabulary = self.vocabulary
        out: list[str] = []
        text: list[bytes] = []
        for index in [*ids, -1]:
            char = self._chars.get(index)
            if char is None and index >= 0:
                text.append(vocabulary.token_bytes(index) if index < vocabulary.size else b"\xef\xbf\xbd")
                continue
            out += [_CONTROL.sub("\ufffd", b"".join(text).decode("utf-8", "replace")), char or ""]
            text = []
        return "".join(out)

    def of_text(self, text: str) -> str:
        """Scaffold, its control tokens marked."""
        vocabulary = self.vocabulary
        if vocabulary.control_pattern is None:
            return text
        return vocabulary.control_pattern.sub(lambda match: self._chars[vocabulary.control[match[0]].id], text)

    def to_text(self, marked: str) -> str:
        """Marked text as it is written."""
        added = self.vocabulary.added
        return _CONTROL.sub(lambda match: added[self._ids[ord(match[0]) - _PLANE]].text, marked)

    def ends_with_token(self, marked: str) -> bool:
        """True if marked text ends with a control token."""
        return _CONTROL.fullmatch(marked[-1:]) is not None

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


class TurnMarkers:
    """The markers of a template's assistant turns, and their order."""

    def __init__(self, study: TemplateStudy) -> None:
        self.marked = MarkedText(study.tokenizer)
        self.reasoning_close: set[str] = set()
        """The markers that come after reasoning."""
        self._controls: set[str] = set()
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
        before = ""
        for text, field in segments:
            if field:
                before = field
                continue
            self._controls.update(_CONTROL.findall(text))
            for match in _MARKER.finditer(text):
                seen.add(match[0])
                if before in REASONING_FIELDS:
                    self.reasoning_close.add(match[0])
                before = ""
        return seen

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
        """Whether the template writes a control token in an assistant's turn, in a tag or by itself."""
        return self.marked.char(token) in self._controls

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


def _last_field(segments: Sequence[tuple[str, str]]) -> int:
    return max((at for at, (_, field) in enumerate(segments) if field), default=len(segments))
