"""The questions that pocket is trained and evaluated on; run, it writes those that the package ships.

    python -m training.pocket.questions

The same seed always gives the same questions. What training sees and what is held back never meet: names are like
"green lamp", "Oakford" or "Ada Stone", and one in eight occurs only in held-back questions; one in eight questions, by
the hash of what is asked, is only ever held back (`words.is_held_back`). The words that names are made of, and the ways
to ask, are the same on both sides.
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
"""The one that the demo asks first, in the place of question 0. Streams break on it by every cause, so that a run of
two shows them."""


@dataclass(frozen=True, slots=True)
class Lesson(Question):
    """A question, and how an expert goes about it."""

    difficulty: int
    """0: no tool at all, to 3: several calls that build on one another."""
    script: tuple[tuple[ExpertReply, ...], ...]
    """The expert's replies to each message of the user."""


def make_questions(
    seed: int, count: int, split: str = "train", *, kinds: Sequence[str] = tuple(KINDS), start: int = 0
) -> list[Lesson]:
    """`count` questions, `kinds` in turn. Question `start` + i is the same however many are made."""
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
    while True:  # until the hash of what is asked falls on this side
        script = Script(rng, held_back)
        writer(script)
        if is_held_back("\n".join(script.asked)) is held_back:
            break
    asked = list(script.asked)
    if rng.random() < 0.1:
        asked[0] = rng.choice(WORDS["around"]["openings"]) + asked[0]
    if rng.random() < 0.1:
        asked[-1] += rng.choice(WORDS["around"]["closings"])
    prompt = [{"role": "user", "content": asked[0]}]
    if rng.random() < 0.4:
        prompt.insert(0, {"role": "system", "content": rng.choice(WORDS["around"]["systems"])})
    chosen = {
        use: WORDS["tools"][use][0] if rng.random() < 0.75 else rng.choice(WORDS["tools"][use]) for use in script.uses
    }
    field = script.field_name
    functions = [
        Function(use, name.format(field=field), parameter, about.format(field=field))
        for use, (name, parameter, about) in chosen.items()
    ]
    if rng.random() < 0.2:
        rng.shuffle(functions)
    return Lesson(
        id=f"{split}-{seed}-{index}",
        kind=kind,
        prompt=prompt,
        follow_ups=tuple(asked[1:]),
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
    """The questions of the package, as they are written."""
    made = make_questions(0, COUNT, "held_back")
    order = [{0: FIRST, FIRST: 0}.get(at, at) for at in range(COUNT)]
    names = [field.name for field in dataclasses.fields(Question)]
    return [{name: getattr(made[at], name) for name in names} for at in order]


def main() -> None:
    """Write the file, a line for each question."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in shipped())
    SHIPPED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
