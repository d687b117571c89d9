"""Completions that are read in one go: all that is said of them is what the parser that streams would say.

They are what a family writes itself, and what becomes of that when tokens are lost, doubled, swapped or put in.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from tests.assets import FAMILIES
from tests.conversations import assistant, call, user
from tests.parsing.test_streaming import AWKWARD, TOOLS, delimiters, renderer, variants
from tokentrace import Renderer, TokentraceError
from tokentrace.parsing.parser import StreamingParser
from tokentrace.parsing.whole import OddTurnError, WholeReader

LEFT_TO_THE_PARSER = {
    "gpt-oss": {"text", "call"},  # messages with headers
    "llama-3.1": {"call"},  # calls without delimiters
    "llama-3.2": {"call"},
    "mistral-nemo": {"call"},  # an object that holds an id, too
    "minimax-m3": {"call"},  # arguments as elements
}
"""What is never read in one go."""
ROUNDS = 24


def both(made: Renderer, ids: list[int], tools: Any, prompt: list[int] | None) -> bool:
    """Compare both readings of a completion; whether it was read in one go."""
    compiled, schemas, before = made._parsing(tools, prompt)
    parser = StreamingParser(compiled, schemas, before)
    parser.feed(ids)
    prefix = compiled.prefix(compiled.prompt if before is None else before)
    data, starts = compiled.marked.spelled(ids, len(prefix))
    try:
        read = WholeReader(compiled, prefix + data, starts, len(prefix), schemas).read(prompted=before is not None)
    except OddTurnError:
        return False
    assert dataclasses.asdict(read) == dataclasses.asdict(parser.response)  # also what does not count for ==
    assert made.parse_response(ids, tools=tools, prompt_ids=prompt) == read
    return True


def said(dice: random.Random, family: str, *, plain: bool) -> dict[str, Any]:
    """What an assistant says."""
    odd = ["a word ", "é ", "x = 1\n"] if plain else [*AWKWARD, *delimiters(family), "word "]

    def text() -> str:
        return "".join(dice.choices(odd, k=dice.randrange(1, 5)))

    calls = [
        call(
            dice.choice(["look_up", "look_up", "stop"]),
            {
                key: dice.choice([text(), 3, True, ["a", 1.5], {"lat": 2}])
                for key in dice.sample(KEYS, dice.randrange(4))
            },
            f"functions.look_up:{at}",
        )
        for at in range(dice.choice([0, 1, 1, 2]))
    ]
    return assistant(dice.choice(["", text()]), *calls, reasoning=dice.choice([None, text(), text()]))


KEYS = ["place", "note", "days", "exact", "where", "either", "other"]


def mutated(dice: random.Random, ids: list[int], vocabulary: list[int]) -> list[int]:
    found = list(ids)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(4):
            case 0:
                del found[at : at + dice.choice([1, 1, 5])]
            case 1:
                found[at:at] = found[at : at + dice.choice([1, 8])]
            case 2:
                found.insert(at, dice.choice(vocabulary))
            case _:
                del found[at:]
        if not found:
            return [dice.choice(vocabulary)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_in_one_go_is_what_the_parser_reads(family: str) -> None:
    made = renderer(family)
    dice = random.Random(family)
    seen: Counter[str] = Counter()
    control = [token.id for token in made.tokenizer.vocabulary.control.values()][:40]
    pieces = [made.tokenizer.encode(text).tolist() for text in delimiters(family)]
    vocabulary = [*control, *(index for piece in pieces for index in piece), *range(300, 340)]
    for number in range(ROUNDS):
        plain = number % 2 == 0
        for message in variants(said(dice, family, plain=plain)):
            try:
                rendered = made.render([user("Go."), message], tools=TOOLS)
            except TokentraceError:
                continue
            break
        else:
            continue
        if not rendered.turns:
            continue
        turn = rendered.turns[-1]
        ids, prompt = rendered.token_ids[turn.start : turn.stop], rendered.token_ids[: turn.start]
        kind = "call" if message.get("tool_calls") else "text"
        seen[kind] += both(made, ids, TOOLS, prompt) and plain
        for some in ([], ids, ids[:-1], [*ids, *ids]):
            both(made, some, TOOLS, None)
        for _ in range(6):
            both(made, mutated(dice, ids, vocabulary), dice.choice([TOOLS, None]), dice.choice([prompt, None]))
    assert {kind for kind, count in seen.items() if not count} == LEFT_TO_THE_PARSER.get(family, set())
