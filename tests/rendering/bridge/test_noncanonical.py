"""Completions that no template would write: the sampled ids stay as they are, and the new turn is the same.

Each oddity alters completions of every family. The law: there is a bridge wherever there is one for the canonical
completion, and what it adds is

- what it adds to the canonical completion,
- before it, if the turn was not ended, what ends it: synthetic tokens, and the head of the next turn if that is
  where the model should have stopped;
- less what the completion already has of it: the separator after the stop token, the next turn's head.
"""

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import CONVERSATIONS, SIMPLE, SYS, assistant, call, result, user
from tests.rendering.bridge.rollouts import Cut, check_extension, cut_after, cuts
from tests.support import FULL, load_family, make_renderer, per_family, rotating
from tokentrace import BridgedTokens, BridgeRefusal
from tokentrace.tokens import Kind, Tokenizer
from tokentrace.tokens.vocabulary import Vocabulary

SHORT = 12
"""Examples for each family and each oddity."""

# -- completions, and the messages after them

ARGUMENTS = {
    "city": "Paris",
    "unit": "celsius",
    "now": True,
    "old": False,
    "day": None,
    "n": [1, 2.5],
    "deep": {"k": 1},
}
JSON = '{"city": "Paris", "unit": "celsius", "now": true, "old": false, "day": null, "n": [1, 2.5], "deep": {"k": 1}}'
BOTH = [call("get_weather", ARGUMENTS), call("add", {"a": 1, "b": 2}, "call00002")]
BOTH_JSON = [call("get_weather", JSON), call("add", '{"a": 1, "b": 2}', "call00002")]
RESULTS = [result("sunny", name="get_weather"), result("3", "call00002", name="add")]
WEATHER = user("What is the weather?")
THINK = "I need the weather.\n\nOf Paris."

SITUATIONS: dict[str, list[dict[str, Any]]] = {
    "answer": [SYS, WEATHER, assistant("It is sunny, 21.5 °C.\n\nEnjoy — 旅行 🧳!"), user("Thanks!")],
    "thoughtful answer": [WEATHER, assistant("Sunny.", reasoning=THINK), user("Thanks!")],
    "calls": [SYS, WEATHER, assistant("", *BOTH, reasoning=THINK), *RESULTS],
    "calls with JSON": [SYS, WEATHER, assistant(None, *BOTH_JSON, reasoning=THINK), *RESULTS],
    "words and a call": [WEATHER, assistant("Let me look.", BOTH[0]), RESULTS[0], user("And?")],
    "words and a call with JSON": [WEATHER, assistant("Let me look.", BOTH_JSON[0]), RESULTS[0], user("And?")],
}


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    name: str
    cut: Cut
    bridged: BridgedTokens

    @property
    def is_ended(self) -> bool:
        """Whether the template ends the turn with a token, and not by beginning the next one."""
        return any(turn.message == self.cut.at and turn.stop_token is not None for turn in self.cut.full.turns)


@per_family
def situations(family: str) -> list[Situation]:
    renderer = make_renderer(family)
    usable = []
    for name, messages in SITUATIONS.items():
        at = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        cut = cut_after(renderer, messages, at, len(messages), SIMPLE if "call" in name else None)
        if cut is not None:
            bridged = cut.bridge(renderer)
            assert isinstance(bridged, BridgedTokens)
            usable.append(Situation(name, cut, bridged))
    assert len(usable) >= 2
    return usable


@per_family
def stops_of(family: str) -> frozenset[int]:
    """The tokens that end turns: those at which generation stops, and those that end turns of the past."""
    turns = [turn for situation in situations(family) for turn in situation.cut.full.turns]
    past = {turn.stop_token for turn in turns if turn.stop_token is not None}
    return frozenset([*make_renderer(family).get_stop_token_ids(), *past])


# -- the law


def check_law(family: str, situation: Situation, odd: Sequence[int]) -> BridgedTokens:
    renderer, stops = make_renderer(family), stops_of(family)
    cut = dataclasses.replace(situation.cut, completion=list(odd))
    bridged = cut.bridge(renderer)
    assert isinstance(bridged, BridgedTokens), f"{situation.name}: {bridged}"
    check_extension(cut, bridged)
    canonical = situation.bridged
    expected, new = canonical.new_ids.tolist(), bridged.new_ids.tolist()
    assert len(bridged) == len(cut.prompt) + len(odd) + len(new)
    shared = min(len(expected), len(new))
    assert shared > 0
    assert new[-shared:] == expected[-shared:]
    assert bridged.kinds[-shared:].tolist() == canonical.kinds[-shared:].tolist()
    assert bridged.messages[-shared:].tolist() == canonical.messages[-shared:].tolist()
    if len(new) < len(expected):  # the completion went on into the next turn
        assert not bridged.closed
        assert odd[-1] == expected[len(expected) - shared - 1]
        return bridged
    seam, kinds = new[:-shared], bridged.kinds[: len(new) - shared].tolist()
    ended = bool(len(odd)) and odd[-1] in stops
    assert (bridged.messages[: len(seam)] == -1).all()
    assert kinds.count(Kind.SCAFFOLD) <= 1
    assert kinds == sorted(kinds, reverse=True), "first what is synthetic, then the head of the next turn"
    assert bridged.closed == (Kind.SYNTHETIC in kinds)
    assert not (ended and bridged.closed), "a turn that was ended needs no close"
    if situation.is_ended and not begins_a_call(family, situation, odd):
        last = [*odd, *seam][-1]
        assert last in stops or is_special(renderer.tokenizer, last), "the turn is ended"
    return bridged


def begins_a_call(family: str, situation: Situation, odd: Sequence[int]) -> bool:
    """Whether only the odd completion has tokens of a call: templates may end such a turn differently."""
    is_control = load_family(family).vocabulary.is_control
    calls = {index for one in situations(family) if "calls" in one.name for index in one.cut.completion}
    marks = {index for index in calls if is_control[index]} - stops_of(family)
    return not marks & set(situation.cut.completion) and bool(marks & set(odd))


def is_special(tokenizer: Tokenizer, index: int) -> bool:
    """A special token may end a turn, too: engines stop at some that no template writes."""
    added = tokenizer.vocabulary.added.get(index)
    return added is not None and added.special


# -- oddities: each alters one completion

Oddity = Callable[[random.Random, Tokenizer, list[int]], list[int]]


@lru_cache(maxsize=1)
def tokens_by_bytes(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    tokens: dict[bytes, list[int]] = {}
    for index in range(min(vocabulary.size, 50_000)):
        if index not in vocabulary.added:
            tokens.setdefault(vocabulary.token_bytes(index), []).append(index)
    tokens.pop(b"", None)
    return tokens


def runs(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[bool, list[int]]]:
    is_control = tokenizer.vocabulary.is_control
    out: list[tuple[bool, list[int]]] = []
    for index in ids:
        control = bool(is_control[index])
        if not out or out[-1][0] != control:
            out.append((control, []))
        out[-1][1].append(index)
    return out


def respelled(rng: random.Random, raw: bytes, tokens: dict[bytes, list[int]]) -> list[int] | None:
    """Other tokens that spell the same bytes; None where the walk ends at bytes that no token spells."""
    out: list[int] = []
    at = 0
    while at < len(raw):
        lengths = [n for n in range(1, min(12, len(raw) - at) + 1) if raw[at : at + n] in tokens]
        if not lengths:
            return None
        length = rng.choice(lengths)
        out.append(rng.choice(tokens[raw[at : at + length]]))
        at += length
    return out


def retokenized(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    tokens = tokens_by_bytes(tokenizer.vocabulary)
    out: list[int] = []
    for control, run in runs(tokenizer, ids):
        raw = b"".join(map(tokenizer.vocabulary.token_bytes, run))
        out += (not control and respelled(rng, raw, tokens)) or run
    assert tokenizer.vocabulary.spells(out, b"".join(map(tokenizer.vocabulary.token_bytes, ids)))
    return out


STRUCTURE = re.compile(r"""(</?[^<>\s]+[^<>]*>|[{}\[\],:"\n]|\b(?:true|false|null|True|False|None)\b)""")
NOISE = (
    *(" ", "\n", "\t", "\r\n\n    ", "\u00a0", "true", "False", "None", "0", '"": "", ', '"none": null, '),
    *("<parameter=none>\n</parameter>\n", "<arg_key>none</arg_key>\n<arg_value></arg_value>\n"),
)


def edited(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Tags, brackets, quotes, literals and control tokens left out, doubled, or followed by something else."""
    pieces: list[int | str] = []
    for control, run in runs(tokenizer, ids):
        pieces += run if control else filter(None, STRUCTURE.split(tokenizer.decode(run)))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(max(1, len(pieces) - rng.randint(0, 1)))
        doubled = pieces[max(0, at - rng.randint(0, 6)) : at + 1]
        pieces[at : at + 1] = rng.choice([[], doubled, [*pieces[at : at + 1], rng.choice(NOISE)]])
    out: list[int] = []
    for is_text, group in itertools.groupby(pieces, key=lambda piece: isinstance(piece, str)):
        run = list(group)
        out += tokenizer.encode_plain("".join(map(str, run))).tolist() if is_text else map(int, run)
    return out


def random_ids(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Any ids of the vocabulary, control tokens among them, in place of the completion, before its end or after it."""
    controls = [token.id for token in tokenizer.vocabulary.control.values()]
    size = tokenizer.vocabulary.size
    noise = [rng.choice(controls) if rng.random() < 0.3 else rng.randrange(size) for _ in range(rng.randint(1, 12))]
    return rng.choice((noise, noise + ids[-1:], ids + noise, ids[: rng.randint(0, len(ids))] + noise))


def unknown_ids(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Ids that the tokenizer does not have: rows with which the model's embedding was padded."""
    out = list(ids)
    for _ in range(rng.randint(1, 4)):
        out.insert(rng.randint(0, len(out)), tokenizer.vocabulary.size + rng.randrange(5_000))
    return out


def cut_off(rng: random.Random, tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Another tokenization of the text, cut off anywhere: in the middle of a character, too."""
    other = retokenized(rng, tokenizer, ids)
    return other[: rng.randrange(len(other) + 1)]


ODDITIES: dict[str, Oddity] = {
    "retokenized": retokenized,
    "edited": edited,
    "random_ids": random_ids,
    "unknown_ids": unknown_ids,
    "cut_off": cut_off,
}


@pytest.mark.parametrize(
    ("any_family", "oddity"),
    [(family, oddity) for family in FAMILIES for oddity in rotating(ODDITIES, family, 2)],
    indirect=["any_family"],
)
def test_an_odd_completion_stays_and_the_new_turn_is_the_same(any_family: str, oddity: str) -> None:
    tokenizer = load_family(any_family)
    changed: list[bool] = []

    @settings(max_examples=SHORT, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(situations(any_family)), st.integers(0, 2**32 - 1))
    def law(situation: Situation, seed: int) -> None:
        odd = ODDITIES[oddity](random.Random(seed), tokenizer, situation.cut.completion)
        changed.append(odd != situation.cut.completion)
        check_law(any_family, situation, odd)

    law()
    assert sum(changed) > len(changed) / 4


# -- without chance


def test_a_completion_cut_off_after_any_token_is_closed(any_family: str) -> None:
    closed = 0
    for situation in situations(any_family):
        completion = situation.cut.completion
        for length in rotating(range(len(completion)), f"{any_family} {situation.name}", 3):
            closed += check_law(any_family, situation, completion[:length]).closed
        assert not check_law(any_family, situation, completion).closed
    assert closed >= (20 if FULL else 5)


def test_an_empty_completion_is_closed_anywhere_in_the_matrix(any_family: str) -> None:
    renderer = make_renderer(any_family)
    checked = 0
    for name, conversation in rotating(CONVERSATIONS.items(), f"empty {any_family}", 3):
        for cut in cuts(renderer, conversation):
            results = [message for message in cut.new if message["role"] == "tool"]
            if any("name" not in message for message in results):  # the name may stand only in the completion
                continue
            bridged = cut.bridge(renderer)
            if isinstance(bridged, BridgeRefusal):
                refusal = dataclasses.replace(cut, completion=[]).bridge(renderer)
                assert isinstance(refusal, BridgeRefusal)
                assert refusal.reason is bridged.reason
                continue
            situation = Situation(name, cut, bridged)
            empty = check_law(any_family, situation, [])
            assert len(empty.new_ids) > len(bridged.new_ids) or not situation.is_ended, "something ends the turn"
            checked += 1
    assert checked >= (15 if FULL else 1)
