"""A traced string is the string it traces, and knows the origin of each of its characters.

The truth is modelled as a list of ``(character, origin)`` pairs, on which each method is written once more, naively.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokentrace.template.budget import TooLarge
from tokentrace.template.origin import UNKNOWN, Origin
from tokentrace.template.strings import TracedStr, join_traced, traced

Pair = tuple[str, Origin | None]
Pairs = list[Pair]

CONTENT = Origin.of(0, "content")
ROLE = Origin.of(1, "role")
ORIGINS: list[Origin | None] = [None, CONTENT, ROLE, UNKNOWN]

alphabet = st.sampled_from("aabBx-+0 \t\n\r\u2028.éßİŉǅΣς<|>%{}")
origins = st.sampled_from(ORIGINS)
pairs = st.lists(st.tuples(st.text(alphabet, max_size=5), origins), max_size=5).map(
    lambda runs: [(char, origin) for text, origin in runs for char in text]
)
seps = st.text(alphabet, min_size=1, max_size=2)
small = st.integers(-9, 9)


def make(model: Pairs) -> TracedStr:
    return join_traced([traced(char, origin) for char, origin in model])


def seen(value: Any) -> Any:
    """A result as pairs (strings), lists of pairs, or itself; plain strings count as scaffold."""
    if isinstance(value, TracedStr):
        return [(char, origin) for char, origin in zip(str.__str__(value)[:], expanded(value), strict=True)]
    if isinstance(value, str):
        return [(char, None) for char in value]
    if isinstance(value, (list, tuple)):
        return [seen(item) for item in value]
    return value


def expanded(value: TracedStr) -> list[Origin | None]:
    """The origin of each character; fails unless the runs cover the text without gaps."""
    out: list[Origin | None] = []
    at = 0
    for end, origin in value.runs:
        assert end > at, f"a run that is empty or goes backwards: {value.runs}"
        out += [origin] * (end - at)
        at = end
    assert at == len(value), f"runs end at {at}, the text at {len(value)}"
    return out


def outcome(function: Callable[[], Any]) -> Any:
    """What a call gives, or which error it raises."""
    try:
        return function()
    except (ValueError, TypeError, IndexError) as error:
        return type(error)


def plain_text(value: Any) -> Any:
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, (list, tuple)):
        return type(value)(plain_text(item) for item in value)
    return value


def text(model: Pairs) -> str:
    return "".join(char for char, _ in model)


def scaffold(value: str) -> Pairs:
    return [(char, None) for char in value]


# -- the naive model


def find(model: Pairs, sep: str, start: int = 0) -> int:
    return next((at for at in range(start, len(model) - len(sep) + 1) if text(model[at : at + len(sep)]) == sep), -1)


def split(model: Pairs, sep: str | None, maxsplit: int) -> list[Pairs]:
    if sep is None:
        out: list[Pairs] = []
        at = 0
        while True:
            while at < len(model) and model[at][0].isspace():
                at += 1
            if at == len(model):
                return out
            if 0 <= maxsplit <= len(out):
                return [*out, model[at:]]
            start = at
            while at < len(model) and not model[at][0].isspace():
                at += 1
            out.append(model[start:at])
    out, start = [], 0
    while (maxsplit < 0 or len(out) < maxsplit) and (at := find(model, sep, start)) >= 0:
        out.append(model[start:at])
        start = at + len(sep)
    return [*out, model[start:]]


def rsplit(model: Pairs, sep: str | None, maxsplit: int) -> list[Pairs]:
    mirrored = split(model[::-1], sep and sep[::-1], maxsplit)
    return [piece[::-1] for piece in mirrored][::-1]


def strip(model: Pairs, chars: str | None, *, left: bool = True, right: bool = True) -> Pairs:
    def goes(char: str) -> bool:
        return char.isspace() if chars is None else char in chars

    model = list(model)
    while left and model and goes(model[0][0]):
        model.pop(0)
    while right and model and goes(model[-1][0]):
        model.pop()
    return model


def replace(model: Pairs, old: str, new: Pairs, count: int) -> Pairs:
    if old:
        pieces = split(model, old, count)
        return [pair for at, piece in enumerate(pieces) for pair in ([*new, *piece] if at else piece)]
    return [(char, UNKNOWN) for char in text(model).replace("", text(new), count)]


def partition(model: Pairs, sep: str) -> list[Pairs]:
    at = find(model, sep)
    return [model, [], []] if at < 0 else [model[:at], model[at : at + len(sep)], model[at + len(sep) :]]


def splitlines(model: Pairs, keepends: bool) -> list[Pairs]:
    out: list[Pairs] = []
    rest = model
    for line in text(model).splitlines(keepends=True):
        body = line if keepends else line.splitlines()[0]
        out.append(rest[: len(body)])
        rest = rest[len(line) :]
    return out


# -- cutting and joining: same text, same origins


def same(model: Pairs, function: Callable[[str], Any], truth: Callable[[], Any]) -> None:
    """`function` does to a traced string what it does to a plain one, and the origins are those of `truth`."""
    value = make(model)
    expected = outcome(lambda: function(text(model)))
    got = outcome(lambda: function(value))
    assert plain_text(got) == expected
    if not isinstance(expected, type):
        assert seen(got) == truth()
    assert seen(value) == model, "the string itself has changed"


@given(pairs, st.none() | seps, small)
def test_split(model: Pairs, sep: str | None, maxsplit: int) -> None:
    same(model, lambda s: s.split(sep, maxsplit), lambda: split(model, sep, maxsplit))
    same(model, lambda s: s.rsplit(sep, maxsplit), lambda: rsplit(model, sep, maxsplit))


def test_an_empty_separator_is_refused() -> None:
    for call in ("split", "rsplit", "partition", "rpartition"):
        with pytest.raises(ValueError, match="empty separator"):
            getattr(traced("abc", CONTENT), call)("")


@given(pairs, st.none() | seps)
def test_strip(model: Pairs, chars: str | None) -> None:
    same(model, lambda s: s.strip(chars), lambda: strip(model, chars))
    same(model, lambda s: s.lstrip(chars), lambda: strip(model, chars, right=False))
    same(model, lambda s: s.rstrip(chars), lambda: strip(model, chars, left=False))
    same(model, lambda s: s.strip(), lambda: strip(model, None))


@given(pairs, seps)
def test_partition(model: Pairs, sep: str) -> None:
    same(model, lambda s: s.partition(sep), lambda: partition(model, sep))
    mirrored = [piece[::-1] for piece in partition(model[::-1], sep[::-1])][::-1]
    same(model, lambda s: s.rpartition(sep), lambda: mirrored)


@given(pairs, st.text(alphabet, max_size=2))
def test_removing_affixes(model: Pairs, affix: str) -> None:
    size = len(affix)
    same(
        model,
        lambda s: s.removeprefix(affix),
        lambda: model[size:] if text(model).startswith(affix) else model,
    )
    same(
        model,
        lambda s: s.removesuffix(affix),
        lambda: model[: len(model) - size] if text(model).endswith(affix) else model,
    )


@given(pairs, st.text(alphabet, max_size=2), pairs, small)
def test_replace(model: Pairs, old: str, new: Pairs, count: int) -> None:
    replacement = make(new)
    same(model, lambda s: s.replace(old, replacement, count), lambda: replace(model, old, new, count))
    same(model, lambda s: s.replace(old, replacement), lambda: replace(model, old, new, -1))


@given(pairs, st.booleans())
def test_splitlines(model: Pairs, keepends: bool) -> None:
    same(model, lambda s: s.splitlines(keepends), lambda: splitlines(model, keepends))
    same(model, lambda s: s.splitlines(keepends=keepends), lambda: splitlines(model, keepends))


@example([], None, None, -1)
@given(pairs, st.none() | small, st.none() | small, st.none() | small)
def test_slices(model: Pairs, start: int | None, stop: int | None, step: int | None) -> None:
    key = slice(start, stop, step)
    same(model, lambda s: s[key], lambda: model[key])


@given(pairs, small)
def test_indices_and_iteration(model: Pairs, index: int) -> None:
    same(model, lambda s: s[index], lambda: [model[index]])
    same(model, list, lambda: [[pair] for pair in model])
    same(model, lambda s: list(reversed(s)), lambda: [[pair] for pair in model[::-1]])


@given(pairs, pairs, small)
def test_sums_and_products(model: Pairs, other: Pairs, count: int) -> None:
    same(model, lambda s: s + text(other), lambda: model + scaffold(text(other)))
    same(model, lambda s: text(other) + s, lambda: scaffold(text(other)) + model)
    assert seen(make(model) + make(other)) == model + other
    same(model, lambda s: s * count, lambda: model * count)
    same(model, lambda s: count * s, lambda: count * model)


@given(pairs, st.lists(pairs, max_size=4))
def test_join(separator: Pairs, parts: list[Pairs]) -> None:
    truth = [pair for at, part in enumerate(parts) for pair in ([*separator, *part] if at else part)]
    assert seen(make(separator).join([make(part) for part in parts])) == truth
    assert seen(make(separator).join(iter([make(part) for part in parts]))) == truth


def test_join_takes_strings_only() -> None:
    with pytest.raises(TypeError, match="expected str"):
        traced(", ", None).join(["a", 1])  # type: ignore[list-item]


# -- mapping characters: the text is Python's; the origins are exact, or UNKNOWN where no one can say


CASES = ("lower", "upper", "casefold", "swapcase", "title", "capitalize")


@given(pairs, st.sampled_from(CASES))
def test_case_mappings(model: Pairs, name: str) -> None:
    value = make(model)
    expected = getattr(text(model), name)()
    got = getattr(value, name)()
    assert got == expected
    if len(expected) == len(model):
        assert seen(got) == [(char, origin) for char, (_, origin) in zip(expected, model, strict=True)]
    else:
        assert set(expanded(got)) <= {origin for _, origin in model} | {UNKNOWN}
    if len({origin for _, origin in model}) == 1:
        assert set(expanded(got)) == {model[0][1]}


def test_case_mappings_that_grow_keep_their_origins() -> None:
    value = join_traced([traced("ß", CONTENT), "ß", traced("x", ROLE)])
    assert seen(value.upper()) == [("S", CONTENT)] * 2 + [("S", None)] * 2 + [("X", ROLE)]


# -- everything else is a plain string's


@given(pairs, st.text(alphabet, max_size=2))
def test_questions_have_the_answers_of_a_plain_string(model: Pairs, other: str) -> None:
    value, plain = make(model), text(model)
    for name in (name for name in dir(str) if name.startswith("is")):
        assert getattr(value, name)() == getattr(plain, name)(), name
    for name in ("startswith", "endswith", "count", "find", "rfind", "__contains__", "__eq__", "__lt__", "__ge__"):
        assert getattr(value, name)(other) == getattr(plain, name)(other), name
    assert hash(value) == hash(plain)
    assert len(value) == len(plain)
    assert bool(value) == bool(plain)
    assert repr(value) == repr(plain)
    assert {value: 1}[plain] == 1
    assert str(value) is value


def test_copies_are_plain_strings() -> None:
    value = traced("hi", CONTENT)
    for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert copied == "hi"
        assert type(copied) is str


GROW = {
    "mul": lambda s: s * 10**12,
    "replace": lambda s: (s * 10**5).replace("x", s * 10**5),
    "join": lambda s: (s * 10**5).join([s] * 10**4),
    "split": lambda s: (s * 6_000_000).split("x"),
    "lines": lambda s: ("\n" + s * 2_000_000 * 2).replace("x", "x\n").splitlines(),
    "characters": lambda s: list(s * 6_000_000),
}


@pytest.mark.parametrize("name", GROW)
def test_values_do_not_grow_without_bounds(name: str) -> None:
    with pytest.raises(TooLarge):
        GROW[name](traced("x", CONTENT))
