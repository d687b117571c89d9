"""Every cause is found in real renders, shown with its tokens, and never claimed without evidence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import SYS, assistant, user
from tests.diagnose.two_requests import HELLO, Ids, Rollout, consistent, renderer_of
from tests.support import examples
from tokentrace import create_renderer
from tokentrace.diagnose.breaks import explain_break
from tokentrace.diagnose.finding import Cause
from tokentrace.errors import TrajectoryError
from tokentrace.pocket import POCKET


def test_a_repeated_request() -> None:
    rollout = Rollout("pocket", f"{HELLO}<|end|>", ())
    broken = consistent(rollout.stream, rollout.prompt, rollout.renderer, sampled=rollout.sampled)
    assert (broken.cause, broken.position) == (Cause.UNKNOWN, len(rollout.prompt))
    assert broken.prompt_range == (len(rollout.prompt), len(rollout.prompt))
    assert "the request was repeated, or goes back in history" in broken.words


def test_differences_close_together_are_printed_in_one_line() -> None:
    renderer = create_renderer(POCKET)
    stream, prompt = (renderer.tokenizer.encode(text) for text in ("a b c d e f g", "a X c Y e Z g"))
    *_, ours, theirs = str(explain_break(stream, prompt, renderer)).splitlines()
    assert ours.split() == ["stream", "a│⟦", "b⟧│", "c│⟦", "d⟧│", "e│⟦", "f⟧│", "g"]
    assert theirs.split() == ["next", "prompt", "a│⟦", "X⟧│", "c│⟦", "Y⟧│", "e│⟦", "Z⟧│", "g"]


@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        (Cause.BOS_MISSING, lambda ids: ids[1:]),
        (Cause.BOS_ADDED, lambda ids: [ids[0], *ids]),
        (Cause.NO_TOKEN, lambda ids: [*ids[:3], 999_999, *ids[4:]]),
    ],
)
def test_ids_of_another_encoder_are_named(cause: Cause, changed: Callable[[Any], list[int]]) -> None:
    renderer = renderer_of("pocket")
    stream = renderer.render_ids([SYS, user("Go."), assistant("Gone.")])
    broken = consistent(stream, changed(stream), renderer)
    assert broken.cause is cause
    assert "None" not in broken.words


def test_regions() -> None:
    tokenizer = renderer_of("pocket").tokenizer
    sampled = [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    stream = list(range(300, 309))
    changed = [[*stream[:at], 999, *stream[at + 1 :]] for at in range(len(stream))]
    regions = [consistent(stream, prompt, tokenizer, sampled=sampled).region for prompt in changed]
    context = "context after completion 1"
    assert regions == ["first prompt"] * 3 + ["completion 1"] * 2 + [context] * 2 + ["completion 2"] * 2
    assert consistent(stream, changed[0], tokenizer).region is None


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], 7, None, [2**40], np.zeros((2, 2), np.int32)])
def test_arguments_that_do_not_fit(ids: Any) -> None:
    for pair in ((ids, [1]), ([1], ids)):
        with pytest.raises(TrajectoryError):
            explain_break(*pair, renderer_of("pocket"))
    with pytest.raises(TrajectoryError, match="one entry per token"):
        explain_break([1, 2], [1, 3], renderer_of("pocket"), sampled=[True])
    with pytest.raises(TrajectoryError, match="Tokenizer or a Renderer"):
        explain_break([1, 2], [1, 3], "pocket")


def test_a_report_escapes_control_characters() -> None:
    completion, content = "\x1b[31mred\u202e<|end|>", "\x1b[32mgreen\u202e"
    broken = Rollout("pocket", completion, (assistant(content), user("Bye"))).explain()
    assert "\u202e" not in str(broken)
    assert "␛" in str(broken)


# -- properties


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>",
        "</parameter>", '{"a": 1', "}", "[", "]", '"', "'", ", ", "\n", " ", "true", "True", "null", "None", "é",
        "\\u00e9", "<|end|>", "<|turn|>", "user\n", "system\n", "assistant\n", "<tools>", "</tools>", "name", "{",
        "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", " to=functions.", "<|call|>", "[TOOL_CALLS]", "</s>",
        '{"name": "f", "arguments": {}}', "# Tools\n", "日", "本",
    ]
)  # fmt: skip


TOKENS = st.integers(0, 4200) | st.integers(0, 12)  # some beyond the vocabulary


def encoded(pieces: list[str]) -> list[int]:
    return renderer_of("pocket").tokenizer.encode("".join(pieces)).tolist()


@pytest.mark.parametrize(("items", "ids_of"), [(TOKENS, list), (PIECES, encoded)], ids=["ids", "texts"])
@given(st.data())
@settings(deadline=None, max_examples=examples(300))
def test_any_edit_is_a_break_unless_the_prompt_extends_the_stream(items: Any, ids_of: Any, data: st.DataObject) -> None:
    before = data.draw(st.lists(items, max_size=40))
    after = [*before]
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(after)))
        after[at : at + data.draw(st.integers(0, 40))] = data.draw(st.lists(items, max_size=20))
    stream, prompt = ids_of(before), ids_of(after)
    masks = st.lists(st.booleans(), min_size=len(stream), max_size=len(stream))
    sampled = data.draw(st.none() | masks) if stream else None
    model = renderer_of("pocket") if data.draw(st.booleans()) else renderer_of("pocket").tokenizer
    extends = prompt[: len(stream)] == stream
    assert (explain_break(stream, prompt, model, sampled=sampled) is None) == extends
    if not extends:
        consistent(stream, prompt, model, sampled=sampled)


@given(st.text(min_size=1, max_size=60), st.data())
@settings(deadline=None, max_examples=examples(200))
def test_another_spelling_of_the_same_text_is_a_remerge(text: str, data: st.DataObject) -> None:
    tokenizer = renderer_of("pocket").tokenizer
    whole = tokenizer.encode_plain(text)
    cut = data.draw(st.integers(0, len(text)))
    if data.draw(st.booleans()):
        parts = [text[:cut], text[cut:]]
        split = np.concatenate([tokenizer.encode_plain(part) for part in parts if part])
    else:
        split = np.asarray([i for char in text for i in tokenizer.encode_plain(char)], np.int32)
    after = np.concatenate([whole, tokenizer.encode("<|end|>")])
    if split.tolist() == whole.tolist():
        assert explain_break(split, after, tokenizer) is None
    else:
        broken = consistent(split, after, tokenizer)
        assert {broken.cause, *broken.later} == {Cause.BPE_REMERGE}


# -- size: the comparison is bounded, so these tests finish


def stream_range(stream: Ids, prompt: Ids) -> tuple[int, int]:
    return consistent(stream, prompt, renderer_of("pocket")).stream_range


def test_two_hundred_thousand_tokens() -> None:
    size = 200_000
    rng = np.random.default_rng(7)
    base = rng.integers(0, 4_000, size).astype(np.int32)
    changed = base.copy()
    changed[size // 2] += 1
    assert stream_range(base, changed) == (size // 2, size // 2 + 1)
    cut = np.concatenate([base[: size // 4], base[size // 2 :]])
    assert stream_range(base, cut) == (size // 4, size // 2)
    assert stream_range(base, rng.integers(0, 4_000, size).astype(np.int32))[1] == size
    changed[::5] += 1
    assert stream_range(base, changed)[0] == 0
    same = np.full(size, 5, np.int32)
    assert stream_range(same, np.concatenate([same[: size // 2], [7], same]))[0] == size // 2


@pytest.mark.parametrize("lead", ["", "x", "A long way before it. " * 600], ids=["none", "short", "long"])
def test_later_differences_are_named_wherever_the_first_one_stands(lead: str) -> None:
    """Two words differ, far apart: the second one is named too, however long the text before the first one is."""
    encode = create_renderer(POCKET).tokenizer.encode
    middle = " and much more in between," * 8
    stream = encode(f"{lead}a  b{middle} c  d, and the rest of it")
    prompt = encode(f"{lead}a b{middle} c d, and the rest of it")
    broken = consistent(stream, prompt, create_renderer(POCKET))
    assert (broken.cause, broken.later) == (Cause.WHITESPACE, (Cause.WHITESPACE,))
