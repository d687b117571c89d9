"""A traced string equals the plain string, and knows the origin of each of its characters. So does its JSON."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokentrace.template.jsonify import JsonOptions, dumps
from tokentrace.template.origin import KEY, UNKNOWN, Origin
from tokentrace.template.strings import TracedStr, join_traced, traced
from tokentrace.template.traced import wrap

CONTENT, ROLE = Origin.of(0, "content"), Origin.of(1, "role")
LETTERS: dict[Origin | None, str] = {
    None: "aB-+ \n<|",
    CONTENT: "xY.é\t\rßΣ",
    ROLE: "uV0\u2028\x0b%{İ",
    UNKNOWN: "nM}\x85\x1cǅς",
}
OWNERS = {letter: origin for origin, letters in LETTERS.items() for letter in letters}
runs = st.sampled_from(list(LETTERS)).flatmap(
    lambda origin: st.tuples(st.text(LETTERS[origin], max_size=5), st.just(origin))
)
values = st.lists(runs, max_size=5).map(lambda parts: join_traced([traced(*part) for part in parts]))
words = st.text(list(OWNERS), max_size=2)
small = st.integers(-9, 9)


def origins(value: TracedStr) -> list[Origin | None]:
    """The origin of each character. Fails if the runs do not cover the text exactly."""
    by_character: list[Origin | None] = []
    for end, origin in value.runs:
        assert end > len(by_character), f"a run that is empty or goes backwards: {value.runs}"
        by_character += [origin] * (end - len(by_character))
    assert len(by_character) == len(value), f"runs end at {len(by_character)}, the text at {len(value)}"
    return by_character


def plain(value: Any) -> Any:
    """A result without its trace, which must match its letters."""
    if isinstance(value, TracedStr):
        text = str.__getitem__(value, slice(None))
        assert origins(value) == [OWNERS[letter] for letter in text]
        return text
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def outcome(function: Callable[[], Any]) -> Any:
    """The result of a call, or the error that it raises."""
    try:
        return function()
    except (ValueError, TypeError, IndexError) as error:
        return type(error)


CUTS: dict[str, Callable[[Any, Any, int], Any]] = {
    "split": lambda text, word, count: text.split(word, count),
    "split at spaces": lambda text, word, count: text.split(None, count),
    "rsplit": lambda text, word, count: text.rsplit(word, count),
    "rsplit at spaces": lambda text, word, count: text.rsplit(None, count),
    "strip": lambda text, word, count: [text.strip(), text.lstrip(), text.rstrip()],
    "strip words": lambda text, word, count: [text.strip(word), text.lstrip(word), text.rstrip(word)],
    "partition": lambda text, word, count: text.partition(word),
    "rpartition": lambda text, word, count: text.rpartition(word),
    "affixes": lambda text, word, count: [text.removeprefix(word), text.removesuffix(word)],
    "lines": lambda text, word, count: [text.splitlines(), text.splitlines(True), text.splitlines(keepends=True)],
    "index": lambda text, word, count: text[count],
    "iteration": lambda text, word, count: [list(text), list(reversed(text))],
    "product": lambda text, word, count: [text * count, count * text],
    "sum": lambda text, word, count: [text + text, text + "aB", "aB" + text],
    "join": lambda text, word, count: [text.join([text, "a", text]), text.join(iter([])), "a".join([text]), text],
}


@given(values, words, small, st.sampled_from(sorted(CUTS)))
def test_cutting_and_joining(value: TracedStr, word: str, count: int, name: str) -> None:
    text = plain(value)
    expected = outcome(lambda: CUTS[name](text, word, count))
    assert plain(outcome(lambda: CUTS[name](value, word, count))) == expected
    assert plain(value) == text, "the string itself has changed"


@given(values, words, values, small)
def test_replace(value: TracedStr, old: str, new: TracedStr, count: int) -> None:
    for result, expected in (
        (value.replace(old, new, count), plain(value).replace(old, plain(new), count)),
        (value.replace(old, new), plain(value).replace(old, plain(new))),
    ):
        if old or result is value:
            assert plain(result) == expected
        else:  # inserted between all letters: of unknown origin
            assert result == expected
            assert set(origins(result)) <= {UNKNOWN}


@example(traced("", None), None, None, -1)
@given(values, st.none() | small, st.none() | small, st.none() | small)
def test_slices(value: TracedStr, start: int | None, stop: int | None, step: int | None) -> None:
    key = slice(start, stop, step)
    assert plain(outcome(lambda: value[key])) == outcome(lambda: plain(value)[key])


@given(values, st.sampled_from(["lower", "upper", "casefold", "swapcase", "title", "capitalize"]))
def test_case_mappings_are_exact_or_unknown(value: TracedStr, name: str) -> None:
    expected, result = getattr(plain(value), name)(), getattr(value, name)()
    assert result == expected
    if len(expected) == len(value):
        assert origins(result) == origins(value)
    else:
        assert set(origins(result)) <= {*origins(value), UNKNOWN}
    if len(set(origins(value))) == 1:
        assert set(origins(result)) == set(origins(value))
    both = join_traced([traced("ß", CONTENT), "ß", traced("x", ROLE)]).upper()
    assert origins(both) == [CONTENT, CONTENT, None, None, ROLE]


@given(values, words)
def test_queries_return_the_same_as_for_a_plain_string(value: TracedStr, word: str) -> None:
    text = plain(value)
    for name in (name for name in dir(str) if name.startswith("is")):
        assert getattr(value, name)() == getattr(text, name)(), name
    for name in ("startswith", "endswith", "count", "find", "rfind", "__contains__", "__eq__", "__lt__", "__ge__"):
        assert getattr(value, name)(word) == getattr(text, name)(word), name
    for function in (hash, len, bool, repr):
        assert function(value) == function(text)
    assert {value: 1}[text] == 1
    assert str(value) is value


def test_copies_are_plain_strings() -> None:
    value = traced("hi", CONTENT)
    for copied in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert (copied, type(copied)) == ("hi", str)


# -- ``tojson`` writes what ``json.dumps`` writes, each scalar credited to its own field


texts = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\/\n\t\x00\x7f\u2028<>&é😀'), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
json_options = st.fixed_dictionaries(
    {},
    optional={
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(-1, 6) | st.sampled_from(["", "\t", "> "]),
        "separators": st.none() | st.tuples(st.sampled_from([",", ", ", " ;"]), st.sampled_from([":", ": ", "="])),
        "sort_keys": st.booleans(),
    },
)
ROOT = Origin.of(3, "field")


def expected(value: Any, options: dict[str, Any]) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


@given(json_values, json_options)
def test_the_text_is_that_of_json_dumps(value: Any, options: dict[str, Any]) -> None:
    dumped = dumps(wrap(value, ROOT), JsonOptions(**options))
    assert dumped == expected(value, options)
    assert dumped == dumps(value, JsonOptions(**options))
    assert isinstance(dumped, TracedStr)
    assert dumped.runs[-1][0] == len(dumped)
    assert [end for end, _ in dumped.runs] == sorted({end for end, _ in dumped.runs})
    if value != "":  # an empty string has no character to be credited
        assert all(origin is not None and origin[: len(ROOT)] == ROOT for _, origin in dumped.runs)


@given(json_values, json_options)
def test_arguments_are_one_field(value: Any, options: dict[str, Any]) -> None:
    origin = Origin.of(3, "tool_calls", 0, "function", "arguments")
    arguments = {"value": value, "more": [value]}
    dumped = dumps(wrap(arguments, origin), JsonOptions(**options))
    assert dumped == expected(arguments, options)
    assert dumped.runs == ((len(dumped), origin),)
    outer = dumps({"name": "f", "arguments": wrap(arguments, origin)}, JsonOptions(**options))
    assert outer == expected({"name": "f", "arguments": arguments}, options)


@given(
    st.dictionaries(scalars.filter(lambda key: not (isinstance(key, float) and math.isnan(key))), scalars, max_size=4),
    json_options,
)
def test_keys_of_every_kind(value: dict[Any, Any], options: dict[str, Any]) -> None:
    try:
        text = expected(value, options)
    except TypeError:  # keys that cannot be sorted
        with pytest.raises(TypeError):
            dumps(wrap(value, ROOT), JsonOptions(**options))
        return
    assert dumps(wrap(value, ROOT), JsonOptions(**options)) == text
    assert dumps(value, JsonOptions(**options)) == text


@given(st.lists(st.tuples(texts, st.sampled_from([None, ROOT, UNKNOWN])), max_size=5), st.booleans())
def test_strings_of_several_origins_are_escaped_run_by_run(parts: list[tuple[str, Any]], ensure_ascii: bool) -> None:
    whole = join_traced([traced(text, origin) for text, origin in parts])
    dumped = dumps([whole], JsonOptions(ensure_ascii))
    assert dumped == json.dumps(["".join(text for text, _ in parts)], ensure_ascii=ensure_ascii)
    for origin in (ROOT, UNKNOWN):
        credited = "".join(
            str.__getitem__(dumped, slice(start, end))
            for start, (end, owner) in zip([0, *(end for end, _ in dumped.runs)], dumped.runs, strict=False)
            if owner == origin
        )
        escaped = [json.dumps(text, ensure_ascii=ensure_ascii)[1:-1] for text, owner in parts if owner == origin]
        assert credited.strip('"') == "".join(escaped).strip('"')


def test_each_scalar_is_credited_to_its_own_field() -> None:
    dumped = dumps(wrap({"a": "x", "b": [1, None]}, ROOT))
    inside = [origin[len(ROOT) :] for _, origin in dumped.runs if origin is not None]
    assert inside == [(), ("a", KEY), (), ("a",), (), ("b", KEY), (), ("b",), ("b", 0), ("b",), ("b", 1), ("b",), ()]
    built = dumps({"role": traced("x", ROOT), "n": 1})
    assert [origin for _, origin in built.runs] == [None, ROOT, None]


def test_values_that_are_not_json_are_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        dumps({"a": object()})
    with pytest.raises(TypeError, match="keys must be"):
        dumps({(1, 2): 1})
