"""The questions that pocket is trained and evaluated on. As a script, it writes the ones that the package ships.

    python -m training.pocket.questions

The same seed always gives the same questions. Training and held-back questions share neither names nor questions: names
are like "green lamp", "Oakford" or "Ada Stone", and one in eight occurs only in held-back questions; one in eight
questions, by the hash of the user's messages, is held back (`words.is_held_back`). The parts of names and the wordings
of questions are the same on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokentrace.demo.questions import FILE, Function, Question
from training.pocket.kinds import KINDS
from training.pocket.script import ExpertReply, Script
from training.pocket.words import WORDS, is_held_back

SPLITS: Final = ("train", "held_back")
SHIPPED: Final = Path(__file__).parents[2] / "src" / "tokentrace" / "demo" / FILE
COUNT: Final = 128
FIRST: Final = 107
"""The question that the demo asks first; it swaps places with question 0. Streams break on it for every cause, so a run
of two shows them all."""


@dataclass(frozen=True, slots=True)
class Lesson(Question):
    """A question and the expert's script for it."""

    difficulty: int
    """From 0, no tool, to 3, several calls that build on one another."""
    script: tuple[tuple[ExpertReply, ...], ...]
    """The expert's replies to each message of the user."""


def make_questions(
    seed: int, count: int, split: str = "train", *, kinds: Sequence[str] = tuple(KINDS), start: int = 0
) -> list[Lesson]:
    """`count` questions, `kinds` in turn. Question `start` + i does not depend on `count`."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds are of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
    return [_make(seed, index, split, kinds[index % len(kinds)]) for index in range(start, start + count)]


def _make(seed: int, index: int, split: str, kind: str) -> Lesson:
    rng = random.Random(f"{split}/{seed}/{index}")
    held_back = split == "held_back"
    writer, difficulty = KINDS[kind]
    while True:  # until the hash of the user's messages falls on this side
        script = Script(rng, held_back)
        writer(script)
        if is_held_back("\n".join(script.user_messages)) is held_back:
            break
    user_messages = list(script.user_messages)
    if rng.random() < 0.1:
        user_messages[0] = rng.choice(WORDS["around"]["openings"]) + user_messages[0]
    if rng.random() < 0.1:
        user_messages[-1] += rng.choice(WORDS["around"]["closings"])
    prompt = [{"role": "user", "content": user_messages[0]}]
    if rng.random() < 0.4:
        prompt.insert(0, {"role": "system", "content": rng.choice(WORDS["around"]["systems"])})
    signatures = {
        use: WORDS["tools"][use][0] if rng.random() < 0.75 else rng.choice(WORDS["tools"][use]) for use in script.uses
    }
    field = script.field_name
    functions = [
        Function(use, name.format(field=field), parameter, description.format(field=field))
        for use, (name, parameter, description) in signatures.items()
    ]
    if rng.random() < 0.2:
        rng.shuffle(functions)
    return Lesson(
        id=f"{split}-{seed}-{index}",
        kind=kind,
        prompt=prompt,
        follow_ups=tuple(user_messages[1:]),
        functions=tuple(functions),
        table=script.table,
        field=field,
        style=rng.choice(("number", "number", "pair", "json", "sentence")),
        answer=script.answer,
        mentions=script.mentions,
        difficulty=difficulty,
        script=tuple(map(tuple, script.steps)),
    )


def shipped() -> list[dict[str, Any]]:
    """The rows of the package's file of questions."""
    questions = make_questions(0, COUNT, "held_back")
    order = [{0: FIRST, FIRST: 0}.get(at, at) for at in range(COUNT)]
    names = [field.name for field in dataclasses.fields(Question)]
    return [{name: getattr(questions[at], name) for name in names} for at in order]


def main() -> None:
    """Write the file, one question per line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in shipped())
    SHIPPED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
