"""Truncation of long samples: the result is one run, cut where the policy says, and always carries loss."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import examples
from tokentrace.errors import SampleError
from tokentrace.samples.sample import Overlong, Sample, Truncated, truncate
from tokentrace.tokens.kinds import Kind, Part
from tokentrace.trajectory import VersionSpan

CUTTING = [Overlong.TURNS, Overlong.RIGHT, Overlong.LEFT]


@dataclass(frozen=True)
class Piece:
    message: int
    kind: Kind
    count: int
    trained: bool = False


def sample_of(pieces: list[Piece], with_parts: bool = False) -> Sample:
    """A sample whose ids are its positions, so that a part shows where it was cut from."""
    counts = [piece.count for piece in pieces]
    total = sum(counts)
    kinds = np.repeat(np.array([piece.kind for piece in pieces], np.uint8), counts)
    mask = np.repeat(np.array([piece.trained for piece in pieces], np.bool_), counts)
    parts = np.full(total, Part.CONTENT, np.uint8)
    parts[(kinds == Kind.SCAFFOLD) | (kinds == Kind.SYNTHETIC)] = Part.SCAFFOLD
    return Sample(
        ids=np.arange(total, dtype=np.int32),
        mask=mask,
        messages=np.repeat(np.array([piece.message for piece in pieces], np.int32), counts),
        kinds=kinds,
        parts=parts if with_parts else None,
        logprobs=np.where(kinds == Kind.SAMPLED, -np.arange(total), np.nan).astype(np.float32),
        advantages=np.where(mask, np.arange(total) + 0.5, 0).astype(np.float32),
        reward=1.0,
        versions=tuple(VersionSpan(k // 3, k, min(k + 3, total)) for k in range(0, total, 3)),
        name="synthetic",
    )


pieces = st.builds(
    lambda message, kind, count, trained: Piece(message, kind, count, trained and kind == Kind.SAMPLED),
    st.integers(-1, 3),
    st.sampled_from(Kind),
    st.integers(1, 4),
    st.booleans(),
)
anything = st.builds(sample_of, st.lists(pieces, min_size=1, max_size=12), st.booleans())


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Sample, list[tuple[int, int, int]]]:
    """A row like those of rollouts, and each message's start, end, and end with the closing scaffold."""
    layout: list[Piece] = []
    spans: list[tuple[int, int, int]] = []
    counts = st.integers(1, 3)

    def put(message: int, kind: Kind, count: int, trained: bool = False) -> None:
        if count:
            layout.append(Piece(message, kind, count, trained))

    def here() -> int:
        return sum(piece.count for piece in layout)

    put(-1, Kind.SCAFFOLD, draw(st.integers(0, 2)))
    for number in range(draw(st.integers(1, 7))):
        start = here() if number else 0
        if draw(st.booleans()):
            put(-1, Kind.SCAFFOLD, draw(counts))  # the generation prompt
            put(number, Kind.SAMPLED, draw(counts), draw(st.booleans()))
            end = here()
            put(-1, Kind.SYNTHETIC, draw(st.integers(0, 2)))
        else:
            put(number, Kind.SCAFFOLD, draw(counts))
            put(number, Kind.CONTEXT, draw(st.integers(0, 3)))
            put(number, Kind.SCAFFOLD, draw(counts))
            end = here()
        spans.append((start, end, here()))
    put(-1, Kind.SCAFFOLD, draw(st.integers(0, 2)))
    return sample_of(layout, draw(st.booleans())), spans


def assert_same_run(sample: Sample, result: Sample, start: int) -> None:
    stop = start + len(result)
    for name in ("ids", "mask", "messages", "kinds", "parts", "logprobs", "advantages"):
        whole, part = getattr(sample, name), getattr(result, name)
        assert (whole is None) == (part is None)
        if whole is not None:
            assert part.tobytes() == whole[start:stop].tobytes(), name
    spread = [version for version, first, last in sample.versions for _ in range(first, last)]
    assert [version for version, first, last in result.versions for _ in range(first, last)] == spread[start:stop]
    assert (result.name, result.reward, result.branch) == (sample.name, sample.reward, sample.branch)


def expected(
    sample: Sample, spans: list[tuple[int, int, int]], length: int, policy: Overlong
) -> tuple[int, int] | None:
    """The expected span, found by trying every cut; None if nothing remains."""
    count = len(sample)
    if policy is Overlong.TURNS:
        fits = [cut for _, end, stop in spans for cut in (end, stop) if cut <= length]
        return (0, max(fits)) if fits else None
    if policy is Overlong.LEFT:
        starts = [start for start, _, _ in spans if count - start <= length]
        return (min(starts), count) if starts else None
    borders = {0, *(at for start, _, stop in spans for at in (start, stop))}
    kinds = sample.kinds.tolist()
    fixed = [Kind.SCAFFOLD, Kind.SYNTHETIC]

    def good(cut: int) -> bool:
        if cut in borders:
            return True
        whole = not (kinds[cut - 1] == kinds[cut] and kinds[cut] in fixed)
        if sample.parts is not None:
            whole &= not (sample.parts[cut - 1] == sample.parts[cut] == Part.SCAFFOLD)
        border_before = max(border for border in borders if border < cut)
        return whole and any(kind not in fixed for kind in kinds[border_before:cut])

    cut = max(cut for cut in range(length + 1) if good(cut))
    return (0, cut) if cut else None


# -- properties


@settings(deadline=None, max_examples=examples(400))
@given(anything, st.integers(1, 50), st.sampled_from([Overlong.DROP, *CUTTING]))
def test_the_result_is_one_run_of_the_sample_that_fits(sample: Sample, length: int, policy: Overlong) -> None:
    result = truncate(sample, length, policy)
    if len(sample) <= length:
        assert result == Truncated(sample, None, 0)
        assert result.sample is sample
        return
    assert (result.sample is None) == (result.reason is not None)
    if result.sample is None:
        assert result.cut == len(sample)
        return
    part = result.sample
    assert 0 < len(part) <= length
    assert bool(part.mask[1:].any()) or not sample.trained, "a completion is never emptied in silence"
    assert sample.trained or not part.trained
    assert result.cut == len(sample) - len(part)
    assert_same_run(sample, part, int(part.ids[0]))
    assert part.ids[0] == 0 or (policy is Overlong.LEFT and part.ids[-1] == len(sample) - 1)
    assert part.notes == (
        f"cut to the {'last' if policy is Overlong.LEFT else 'first'} {len(part)} of {len(sample)} tokens ({policy})",
    )


@settings(deadline=None, max_examples=examples(800))
@given(conversations(), st.integers(1, 60), st.sampled_from(CUTTING))
def test_truncated_rollouts_have_the_span_of_the_policy(
    case: tuple[Sample, list[tuple[int, int, int]]], length: int, policy: Overlong
) -> None:
    sample, spans = case
    if len(sample) <= length:
        return
    result = truncate(sample, length, policy)
    span = expected(sample, spans, length, policy)
    if span is None:
        assert result.sample is None
        assert result.reason is not None
        return
    if sample.trained and not sample.mask[span[0] : span[1]].any():
        assert result.reason == f"nothing that carries loss is left within {length} tokens"
        return
    assert result.sample is not None
    assert (int(result.sample.ids[0]), int(result.sample.ids[-1]) + 1) == span


def test_an_error_names_the_sample_and_both_lengths() -> None:
    sample = sample_of([Piece(0, Kind.PROMPT, 5), Piece(1, Kind.SAMPLED, 4, True)])
    with pytest.raises(SampleError, match="sample 'synthetic' has 9 tokens, but only 8 are allowed"):
        truncate(sample, 8, Overlong.ERROR)
    assert truncate(sample, 9, "error").cut == 0
