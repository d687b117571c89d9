"""Forms: new messages without their texts, and the frames that are known for each.

Fields that are about a message and not in it (`BOOKKEEPING`: the name of a function, the id of a call) count only where
the template looked at them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..conversation.messages import Messages
from ..study.prompts import words_in
from ..study.seams import call_ids
from ..study.study import TemplateStudy
from ..template.chat_template import ChatTemplate
from .closing import Tail
from .framing import BridgeFrame, Example, FrameEncoder, Names, learn
from .lost import BOOKKEEPING

MOST_FRAMES: Final = 4
"""So many frames are learned for one form: where there are more ways than that, the words themselves decide."""
MOST_FORMS: Final = 1024


def form_of(messages: Messages, words: Sequence[str]) -> tuple[Hashable, list[str]] | None:
    """New messages without their texts, and those: equal forms have equal shapes (`study.seams.shape`), up to fields
    that are about a message.

    None for messages that hold other things than texts, or that an assistant said.
    """
    form: list[Hashable] = []
    texts: list[str] = []
    for message in messages:
        role = message["role"]
        if role == "assistant":
            return None
        form.append(role)
        for name, value in message.items():
            if name in BOOKKEEPING:
                continue
            if type(value) is str:
                form += (name, _look(value))
                texts.append(value)
                if words and name == "content":
                    form.append(words_in(value, words))
            elif name == "content" and type(value) is list and all(map(_is_text, value)):
                form += (name, tuple(_look(part["text"]) for part in value))
                texts += (part["text"] for part in value)
            else:
                return None
        form.append(None)
    return tuple(form), texts


def _look(text: str) -> int:
    """Whether a text says something, is blank, or empty."""
    return 0 if not text else 1 if text.isspace() else 2


def _is_text(part: Any) -> bool:
    return (
        type(part) is dict and list(part) == ["type", "text"] and part["type"] == "text" and type(part["text"]) is str
    )


@dataclass(slots=True)
class Shelf:
    """The frames of one form with the same tools, where the fields that are looked at are alike, too."""

    frames: tuple[BridgeFrame, ...] = ()
    is_open: bool = True
    """Whether a frame is worth learning: not where others did not do."""

    def write(
        self, texts: list[str], new: Messages, names: Names, encoder: FrameEncoder
    ) -> tuple[BridgeFrame, Tail] | None:
        """What the first frame that fits writes."""
        for frame in self.frames:
            given = texts
            if frame.takes_ids:
                given = [*given, *call_ids(new)]
            if frame.names is not None:
                called, known = names()
                if known != frame.names:
                    continue
                given = [*texts, *call_ids(new), *called]
            tail = frame.write(given, encoder)
            if tail is not None:
                return frame, tail
        return None

    def add(self, frame: BridgeFrame | None) -> None:
        if frame is None:
            self.give_up()
        else:
            self.frames = (*self.frames, frame)
            self.is_open = len(self.frames) < MOST_FRAMES

    def give_up(self) -> None:
        """No frame serves this form."""
        self.frames, self.is_open = (), False


@dataclass(slots=True)
class _Form:
    """Messages of one form with the same tools: which fields about them the template looks at, and the frames."""

    tools: Any
    """Kept, as it is known by who it is."""
    watched: tuple[tuple[int, str], ...] = ()
    shelves: dict[tuple[int, ...], Shelf] = field(default_factory=dict)


class Frames:
    """The frames of one template under the settings of one renderer."""

    def __init__(self, study: TemplateStudy, words: Sequence[str]) -> None:
        self._study = study
        self._words = words
        self._forms: dict[Hashable, _Form] = {}

    def shelf(self, new: Messages, tools: Any) -> tuple[Shelf, list[str]] | None:
        """The frames for new messages, and their texts; None where there can be none.

        `tools` are as they are wrapped for the template: equal ones are the same object.
        """
        found = form_of(new, self._words) if type(self._study.template) is ChatTemplate else None
        if found is None:
            return None
        key, texts = (found[0], id(tools)), found[1]
        form = self._forms.get(key)
        if form is None:
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            form = self._forms[key] = _Form(tools)
        looks = []
        for at, name in form.watched:
            value = new[at].get(name, self)
            if value is self:
                looks.append(-1)
            elif type(value) is str:
                looks.append(_look(value))
                texts.append(value)
            else:
                return None
        shelf = form.shelves.get(tuple(looks))
        if shelf is None:
            if len(form.shelves) >= MOST_FORMS:
                form.shelves.clear()
            shelf = form.shelves[tuple(looks)] = Shelf()
        return shelf, texts

    def learn(self, example: Example, tools: Any, encoder: FrameEncoder) -> None:
        """Learn a frame of an example, where that is possible; where not, none will serve its like."""
        place = self.shelf(example.new, tools)
        found = form_of(example.new, self._words)
        if place is None or found is None:
            return
        form = self._forms[found[0], id(tools)]
        made = learn(self._study, example, place[1], form.watched, encoder)
        if isinstance(made, frozenset):  # the template looks at more
            form.watched = tuple(sorted(made.union(form.watched)))
            form.shelves.clear()
            self.learn(example, tools, encoder)
        else:
            place[0].add(made)
