"""Where turns begin among ids, and the roles that speak in them, as far as control tokens tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tokens.alignment import Hunk
from ..tokens.ids import common_prefix
from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary
from .texts import READ, text_of

_ROLE: Final = re.compile(
    r"\s*(system|developer|user|assistant|tool|ipython|model|functions\.)(?![\w.])|\s*(functions)\."
)
_HEAD: Final = re.compile(r"(?!.*end)(?:.*start|.*turn|.*header|.*role|\]~b\])")
_NAMED_HEAD: Final = re.compile(
    r"[<\[]?[|｜]?(?:im_)?(system|developer|user|assistant|observation)[|｜]?>", re.IGNORECASE
)
_OTHER_HEADS: Final = {
    "[INST]": "user",
    "[SYSTEM_PROMPT]": "system",
    "[TOOL_RESULTS]": "tool",
    "<｜tool▁output▁begin｜>": "tool",
    "<｜tool▁calls▁begin｜>": "assistant",
}


@dataclass(frozen=True, slots=True)
class TurnHeads:
    """The control tokens that begin turns, and those that hold a conversation together."""

    vocabulary: Vocabulary
    named: Mapping[int, str]
    """Heads that name their role."""
    heads: npt.NDArray[np.int32]
    """All heads."""
    structural: frozenset[int]
    """Control tokens other than tags in the text of a turn."""

    @classmethod
    def of(cls, vocabulary: Vocabulary, tags: Collection[str]) -> TurnHeads:
        """The heads that a vocabulary has, by their names; `tags` set off text inside of turns."""
        named, heads, structural = {}, [], set()
        for text, token in vocabulary.control.items():
            match = _NAMED_HEAD.fullmatch(text)
            role = _OTHER_HEADS.get(text) or (match[1].lower() if match else None)
            if role:
                named[token.id] = role
            if role or _HEAD.match(text):
                heads.append(token.id)
            if token.special and text not in tags:
                structural.add(token.id)
        return cls(vocabulary, named, np.asarray(heads, np.int32), frozenset(structural | set(heads)))

    def count(self, ids: Ids) -> int:
        """How many turns begin among the ids."""
        return int(np.isin(ids, self.heads).sum())

    def role(self, ids: Ids, at: int) -> str | None:
        """The role of the turn that a token lies in (or is the name of); None where no head tells."""
        start = max(0, at - READ)
        for index in reversed((self._places(ids[start : at + 1]) + start).tolist()):
            match = _ROLE.match(text_of(self.vocabulary, ids[index + 1 : index + 5]))
            if match:
                return "tool" if match[2] else match[1]
            if int(ids[index]) in self.named:
                return self.named[int(ids[index])]
        return None

    def lead(self, ids: Ids, at: int) -> str:
        """The text before a token in its own turn."""
        before = ids[max(0, at - READ) : at]
        heads = self._places(before)
        return text_of(self.vocabulary, before[heads[-1] :] if len(heads) else before)

    def before_user(self, ids: Ids, at: int) -> bool:
        """Whether nothing but a first user's turn comes next: formats without a head for system text begin so."""
        heads = self._places(ids[: at + READ])
        first = int(heads[0]) if len(heads) else -1
        return first > at and self.named.get(int(ids[first])) == "user"

    def skipped(self, stream: Ids, prompt: Ids, hunk: Hunk) -> Hunk | None:
        """What differs if the prompt goes on with a later turn of the stream, two turns long at the least."""
        at, prompt_at = hunk.start, hunk.other_start
        heads = self._places(stream)
        ahead = int(np.searchsorted(heads, at))
        begun = at - int(heads[ahead - 1]) if ahead else 0
        if not ahead or begun > prompt_at:
            return None
        for head in heads[ahead : ahead + 1024].tolist():
            run = common_prefix(stream[head:], prompt[prompt_at - begun :])
            ended = head + run == len(stream)
            if run > begun and (ended or self.count(stream[head + 1 : head + run]) >= 2):
                return Hunk(at, head + begun, prompt_at, prompt_at)
        return None

    def _places(self, ids: Ids) -> npt.NDArray[np.intp]:
        return np.flatnonzero(np.isin(ids, self.heads))
