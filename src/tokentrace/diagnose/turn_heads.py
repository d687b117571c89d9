"""Where turns begin among ids, and whose they are, as far as control tokens tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tokens.tokenizer import Ids
from ..tokens.vocabulary import Vocabulary
from .token_text import READ, text_of

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
    """The control tokens that begin turns: those that name their role, all of them, and all that are no tags."""

    vocabulary: Vocabulary
    named: Mapping[int, str]
    heads: npt.NDArray[np.int32]
    structural: frozenset[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary, tags: Collection[str]) -> TurnHeads:
        """The heads of a vocabulary, by their names; `tags` are control tokens inside turns."""
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
        """The number of turns that begin among the ids."""
        return int(np.isin(ids, self.heads).sum())

    def role(self, ids: Ids, at: int) -> str | None:
        """The role of the turn that a token lies in; None if no head tells."""
        start = max(0, at - READ)
        for index in reversed((np.flatnonzero(np.isin(ids[start : at + 1], self.heads)) + start).tolist()):
            match = _ROLE.match(text_of(self.vocabulary, ids[index + 1 : index + 5]))
            if match:
                return "tool" if match[2] else match[1]
            if int(ids[index]) in self.named:
                return self.named[int(ids[index])]
        return None
