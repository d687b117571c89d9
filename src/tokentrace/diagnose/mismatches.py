"""Where tokenization in pieces gave other ids than a render of the whole conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..rendering.rendered import RenderedTokens
from ..tokens.alignment import Hunk, align
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.vocabulary import Vocabulary
from .finding import Cause
from .token_text import spell


class TokenizationMismatchWarning(UserWarning):
    """Incremental tokenization gave other ids than a render of the whole conversation."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One part in which the ids differ. `position` counts tokens of the incremental ids.

    `message` is the message that the part belongs to, None where it belongs to none. The texts are for people.
    """

    position: int
    incremental_ids: tuple[int, ...]
    full_ids: tuple[int, ...]
    incremental_text: str
    full_text: str
    message: int | None
    kind: Cause

    def __str__(self) -> str:
        owner = "" if self.message is None else f" (message {self.message})"
        here = f"{short_text(self.incremental_text)} {_short_ids(self.incremental_ids)}"
        full = f"{short_text(self.full_text)} {_short_ids(self.full_ids)}"
        return f"token {self.position}{owner}, {self.kind}: {here} where the full render has {full}"


def find_mismatches(tokenizer: Tokenizer, ids: Ids, owners: npt.NDArray[Any], full: RenderedTokens) -> list[Mismatch]:
    """The parts in which `ids` differ from those of a full render, in order; no part iff they are equal.

    `owners` has the message of each of the ids.
    """
    out = []
    for hunk in _parts(tokenizer.vocabulary, ids, full.ids):
        start, _, full_start, _ = hunk
        here, there = hunk.sides(ids, full.ids)
        message = int(full.messages[full_start] if len(there) else owners[start])
        out.append(
            Mismatch(
                position=start,
                incremental_ids=tuple(here.tolist()),
                full_ids=tuple(there.tolist()),
                incremental_text=tokenizer.decode(here.tolist()),
                full_text=tokenizer.decode(there.tolist()),
                message=message if message >= 0 else None,
                kind=_kind(tokenizer.vocabulary, here, there),
            )
        )
    return out


def _parts(vocabulary: Vocabulary, one: Ids, other: Ids) -> Iterator[Hunk]:
    """The parts that differ. Parts between two control tokens that together spell the same text are one part:
    by themselves they would seem to spell different text."""
    group: list[Hunk] = []
    control = [token.id for token in vocabulary.control.values()]
    for hunk in align(one, other):
        if group and np.isin(one[group[-1].stop : hunk.start], control).any():
            yield from _together(vocabulary, one, other, group)
            group = []
        group.append(hunk)
    yield from _together(vocabulary, one, other, group)


def _together(vocabulary: Vocabulary, one: Ids, other: Ids, group: Sequence[Hunk]) -> Sequence[Hunk]:
    if len(group) < 2:
        return group
    whole = Hunk(group[0].start, group[-1].stop, group[0].other_start, group[-1].other_stop)
    return [whole] if _kind(vocabulary, *whole.sides(one, other)) is Cause.BPE_REMERGE else group


def _kind(vocabulary: Vocabulary, one: Ids, other: Ids) -> Cause:
    """In what ids differ. Compared as bytes: half a character decodes to U+FFFD, whichever it is half of."""
    left, right = spell(vocabulary, one), spell(vocabulary, other)
    if left == right:
        return Cause.BPE_REMERGE
    bare = left.translate(None, b"\n\t\r ") == right.translate(None, b"\n\t\r ")
    return Cause.WHITESPACE if bare else Cause.UNKNOWN


def warning_text(mode: str, mismatches: Sequence[Mismatch], shown: int = 3) -> str:
    """What to tell about mismatches, the first few of them in full, and what to do."""
    parts = "\n".join(f"  {one}" for one in mismatches[:shown])
    more = f"\n  and {len(mismatches) - shown} more" if len(mismatches) > shown else ""
    return (
        f"{mode} tokenization differs from the render of the whole conversation in {len(mismatches)} "
        f"part{'s' if len(mismatches) > 1 else ''}, so training and inference would see different tokens:\n"
        f"{parts}{more}\n"
        "In a rollout use Renderer.bridge_to_next_turn, for training data Renderer.render and its mask. If reasoning "
        "of past turns differs, preserve_all_thinking=True makes the full render keep it. If this is meant, pass "
        "sanity_check='ignore_strippable' or 'off'."
    )


def short_text(text: str, limit: int = 200) -> str:
    """Text in quotes, its middle left out where it is long."""
    return repr(text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 4 :]}")


def _short_ids(ids: Sequence[int], limit: int = 16) -> str:
    shown = ", ".join(map(str, ids[:limit]))
    return f"[{shown}]" if len(ids) <= limit else f"[{shown}, … {len(ids)} ids]"
