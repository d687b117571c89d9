"""Any ids can be parsed: nothing raises, nothing is lost, and the cost grows no faster than the completion."""

import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.conversations import assistant, call
from tests.parsing.test_streaming import TOOLS, completion, delimiters, pieces, renderer_of, spelled, telling_ids
from tests.parsing.test_streaming import check_response as check
from tests.support import FULL, per_family
from tokentrace import InputError
from tokentrace.parsing import arguments, reader
from tokentrace.parsing import channels as harmony
from tokentrace.parsing.compiled import Compiled
from tokentrace.parsing.marked import MarkedBytes
from tokentrace.parsing.parser import StreamingParser
from tokentrace.parsing.reader import Notation
from tokentrace.parsing.response import Finish, ParsedResponse, PartKind
from tokentrace.values.schema import Tools

SEQUENCES = 10_000 if FULL else 500
"""Random completions for each family."""


# -- random ids


def lengths(rng: np.random.Generator, count: int) -> list[int]:
    """Mostly short, a few long, some empty."""
    sizes = rng.integers(1, 12, count)
    sizes[::10] = rng.integers(12, 41, len(sizes[::10]))
    sizes[::500] = rng.integers(200, 400, len(sizes[::500]))
    sizes[7::1000] = 0
    return sizes.tolist()


def draw(rng: np.random.Generator, family: str) -> Iterator[list[int]]:
    """Random ids: uniform, or tokens of grammars, or whole delimiters; some are not in the vocabulary."""
    size = renderer_of(family).tokenizer.vocabulary.size
    telling, control, units = np.array(telling_ids(family)), np.array(control_ids(family)), delimiter_ids(family)
    for index, length in enumerate(lengths(rng, SEQUENCES)):
        if index % 3 == 0:
            yield rng.integers(0, size + 3, length).tolist()
        elif index % 3 == 1:
            punctuation = telling[rng.integers(0, len(telling), length)]
            yield np.where(
                rng.random(length) < 0.6, punctuation, control[rng.integers(0, len(control), length)]
            ).tolist()
        else:
            yield [one for unit in rng.integers(0, len(units), length // 2 + 1).tolist() for one in units[unit]]


@per_family
def delimiter_ids(family: str) -> list[list[int]]:
    """Delimiters, words and stop tokens, each as its tokens."""
    encode = renderer_of(family).tokenizer.encode
    texts = [*delimiters(family), "look_up", "place", " ", "\n", '{"name": "look_up", "arguments": {"days": 1}}']
    texts += ['{"name": "look_up", "parameters": {}}'] * 2
    channels = renderer_of(family).grammar().channels
    if channels is not None:
        texts += [f"{channels.channel}{one}{channels.message}" for one in (channels.reasoning, channels.content)] * 2
    return [*(encode(text).tolist() for text in texts), *([index] for index in control_ids(family))]


@per_family
def control_ids(family: str) -> list[int]:
    """The control tokens of the grammar, stop tokens among them."""
    renderer = renderer_of(family)
    table = renderer.tokenizer.vocabulary.control
    ids = {token.id for text, token in table.items() if any(text in one for one in delimiters(family))}
    return sorted({*ids, *renderer.get_stop_token_ids()})


def lost(family: str, ids: list[int], response: ParsedResponse) -> str:
    """The text in no part that is neither a delimiter, nor white space, nor the stop token."""
    end = len(ids) if response.unread is None else response.unread.start
    end -= response.stop_token is not None
    outside = bytearray(b"\1" * end)
    for part in response.parts:
        outside[part.span.start : part.span.stop] = bytes(part.span.stop - part.span.start)
    if 1 not in outside:
        return ""
    runs = "".join(
        "\0" if not outside[at] or ids[at] in control_ids(family) else spelled(renderer_of(family), [ids[at]])
        for at in range(end)
    )
    marks = letters(family)
    pattern = re.compile("|".join([*map(re.escape, marks), r"[\s,;]"]))
    left = [pattern.sub("", run) for run in runs.split("\0")]
    # a token of the text that follows may spell the end of a delimiter
    return "".join(run for run in left if not any(text.startswith(run) or text.endswith(run) for text in marks))


@per_family
def letters(family: str) -> list[str]:
    """Delimiters, without their control tokens and without words that are names."""
    table, texts = renderer_of(family).tokenizer.vocabulary.control, pieces(renderer_of(family).grammar())
    names = sorted((text for text in table if table[text].id in control_ids(family)), key=len, reverse=True)
    control = re.compile("|".join(map(re.escape, names)))
    words = [word for text in texts for word in (*control.sub(" ", text).split(), control.sub("", text))]
    return sorted({word for word in words if word and not word.isalnum()}, key=len, reverse=True)


def test_random_completions_all_come_back(any_family: str) -> None:
    renderer = renderer_of(any_family)
    rng = np.random.default_rng(len(any_family))
    channelled = renderer.grammar().channels is not None
    prompt = completion(any_family, assistant("x"))[0]
    seen: dict[Any, int] = {}
    for index, ids in enumerate(draw(rng, any_family)):
        options: dict[str, Any] = {"tools": TOOLS} if index % 4 == 0 else {}
        if index % 3 == 0:
            options["prompt_ids"] = prompt
        response = renderer.parse_response(ids, **options)
        check(renderer, ids, response)
        assert (response.finish is Finish.STOP) == (response.stop_token is not None)
        if not channelled:  # headers of Harmony are words, and not all of its tools take JSON
            assert all(isinstance(parsed.arguments, dict) for parsed in response.calls)
            assert lost(any_family, ids, response) == "", ids
        for one in (response.finish, *(part.kind for part in response.parts)):
            seen[one] = seen.get(one, 0) + 1
    assert index + 1 == SEQUENCES
    grammar = renderer.grammar()
    expected = {PartKind.CONTENT, Finish.STOP, Finish.LENGTH}
    expected |= {PartKind.TOOL_CALL} if grammar.calls is not None else set()
    expected |= {PartKind.REASONING} if grammar.reasoning is not None or channelled else set()
    assert {kind for kind in expected if seen.get(kind, 0) < SEQUENCES / (500 if FULL else 1_000)} == set()


def test_ids_of_a_padded_embedding_read_as_unknown_and_others_are_refused(any_family: str) -> None:
    renderer = renderer_of(any_family)
    size = renderer.tokenizer.vocabulary.size
    prompt = completion(any_family, assistant("x"))[0]
    response = renderer.parse_response([size, size + 300], prompt_ids=prompt)
    assert response.content + (response.reasoning_content or "") == "\ufffd" * 2
    for wrong in ([2 * size], [10**9], [-1], [0x80000000], [1.5], ["1"], [[1]], None, 3, "12"):
        with pytest.raises(InputError, match="token_ids"):
            renderer.parse_response(wrong)
    with pytest.raises(InputError, match="prompt_ids"):
        renderer.parse_response([], prompt_ids=[-1])


# -- cost


class Counted:
    """A pattern that counts the bytes that it scans."""

    total = 0

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        def method(data: bytes, at: int = 0, *stop: int) -> Any:
            match = getattr(self._pattern, name)(data, at, *stop)
            end = match.end() if isinstance(match, re.Match) else at if name == "match" else min([len(data), *stop])
            Counted.total += max(0, end - at)
            return match

        return method


def counted(value: Any) -> Any:
    """A counting copy of a pattern, or of a notation of patterns."""
    if isinstance(value, Notation):
        strings = {quote: Counted(one) for quote, one in value.strings.items()}
        return Notation(value.opening, value.closing, Counted(value.outside), strings, value.strict)
    return Counted(value) if isinstance(value, re.Pattern) and isinstance(value.pattern, bytes) else value


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers compiled from here on count the bytes that their patterns scan, and those that they decode."""
    make, visible = reader.Delimiters.__init__, MarkedBytes.visible

    def init(self: reader.Delimiters, *args: Any) -> None:
        make(self, *args)
        vars(self).update({name: counted(value) for name, value in vars(self).items()})

    def decode(self: MarkedBytes, data: bytes | bytearray) -> bytes:
        Counted.total += len(data)
        return visible(self, data)

    monkeypatch.setattr(reader.Delimiters, "__init__", init)
    monkeypatch.setattr(MarkedBytes, "visible", decode)
    for module in (reader, arguments, harmony):
        for name, value in list(vars(module).items()):
            monkeypatch.setattr(module, name, counted(value))


def work(compiled: Compiled, ids: list[int], size: int) -> int:
    """The cost of parsing ids in pieces of one size: bytes scanned plus functions called, those of C included."""
    parser, before, calls = StreamingParser(compiled, Tools(TOOLS)), Counted.total, itertools.count()
    sys.setprofile(lambda _frame, event, _arg: next(calls) if event in ("call", "c_call") else None)
    try:
        for at in range(0, len(ids), size):
            parser.feed(ids[at : at + size])
        parser.finish()
    finally:
        sys.setprofile(None)
    return Counted.total - before + next(calls)


UNITS = [
    *("<", "{", "[", '"', "\\", "\n", " ", "\n<", "}", ",", '{"a":', '"a",', "'", "f("),
    '{"name": "f", "arguments": {}}',
    *("<parameter=a>", "<parameter=a>\n1", "</parameter>\n", "</function>\n", "</invoke>", '<parameter name="a">'),
]
ADVERSE = ["qwen3", "qwen3-coder", "glm-4.5", "minimax-m2", "minimax-m3", "deepseek-v3", "deepseek-v3.2", "kimi-k2"]
ADVERSE += ["llama-3.1", "mistral-nemo", "gpt-oss", "nemotron-3-nano"]
CASES = 80 if FULL else 16
"""About how many pairs of a beginning and a repeated unit are tried."""
TIMES = 60


def adverse(family: str) -> Iterator[tuple[list[int], list[int]]]:
    """Beginnings of completions, each with a unit to repeat after it."""
    renderer = renderer_of(family)
    message = assistant("word", call("look_up", {"place": "Paris", "where": {"a": [1]}}, "functions.look_up:0"))
    ids = completion(family, message)[1]
    control = renderer.tokenizer.vocabulary.is_control
    cuts = {0, len(ids) - 1} | {at + 1 for at, index in enumerate(ids) if control[index]} | set(range(0, len(ids), 4))
    units = {tuple(renderer.tokenizer.encode(text).tolist()) for text in [*UNITS, *delimiters(family)]}
    units |= {tuple(renderer.tokenizer.encode_plain(text).tolist()) for text in delimiters(family)}
    pairs = [(ids[:cut], list(unit)) for unit in sorted(units) for cut in sorted(cuts)]
    yield from pairs[:: max(1, len(pairs) // CASES)]


@pytest.mark.parametrize("any_family", ADVERSE, indirect=True)
@pytest.mark.usefixtures("counting")
def test_cost_grows_no_faster_than_the_completion(any_family: str) -> None:
    renderer = renderer_of(any_family)
    compiled = Compiled(renderer.grammar(), MarkedBytes(renderer.tokenizer.vocabulary), renderer.get_stop_token_ids())
    for beginning, unit in adverse(any_family):
        for size in (1, 1_000_000):
            once, twice = (work(compiled, beginning + unit * (TIMES * times), size) for times in (1, 2))
            assert twice < 2.6 * once + 500, (spelled(renderer, beginning), spelled(renderer, unit), size, once, twice)
