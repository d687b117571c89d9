"""Min-p, penalties and stop texts: what they do to what is drawn, to logprobs, and to what a rollout goes on with."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentrace import create_renderer
from tokentrace.engines.answers import check_logprobs
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.protocol import (
    OPTIONAL,
    Capabilities,
    Completion,
    EngineError,
    EngineRefusal,
    FinishReason,
    LogprobKind,
    LogprobKindError,
    SamplingParams,
    joined,
)
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.engines.stopping import StopFinder
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket

RENDERER = create_renderer(POCKET)
STOPS = tuple(RENDERER.get_stop_token_ids())
SPELLED = RENDERER.tokenizer.vocabulary.token_bytes
PROMPT = RENDERER.render([{"role": "user", "content": "What is 6 * 7?"}], add_generation_prompt=True).ids


def with_engine(work: Callable[[EmbeddedEngine], Awaitable[Any]], **options: Any) -> Any:
    async def go() -> Any:
        engine = EmbeddedEngine(**options)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


# -- what can be asked for


@pytest.mark.parametrize(
    "given",
    [
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"presence_penalty": -3},
        {"frequency_penalty": "1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": 2.5},
        {"stop": [""]},
        {"stop": [7]},
        {"stop": ["\ud800"]},
        {"stop": ["a"] * 33},
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        SamplingParams(8, **given)


def test_what_is_recorded_names_what_was_asked_for_and_nothing_else() -> None:
    plain = SamplingParams(8).described()
    assert not set(plain) & set(OPTIONAL)
    asked = SamplingParams(8, min_p=0.1, repetition_penalty=1.1, stop="\n\n")
    assert asked.described() == plain | {"min_p": 0.1, "repetition_penalty": 1.1, "stop": ["\n\n"]}
    assert asked.optional == ["min_p", "repetition_penalty", "stop"]
    assert asked.penalties == {"repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("mine", {"min_p": 0.1}),
        ("llama.cpp", {"presence_penalty": 1}),
        ("llama.cpp", {"stop": ["x"]}),
        ("scripted", {"stop": ["x"]}),
    ],
)
def test_an_engine_that_cannot_refuses_and_says_why(engine: str, given: dict[str, Any]) -> None:
    scripted = ScriptedEngine(lambda prompt, sampling: [1])
    scripted.capabilities = Capabilities(engine=engine)
    with pytest.raises(EngineRefusal) as refused:
        asyncio.run(scripted.generate([1], SamplingParams(8, **given, allow_raw_logprobs=True)))
    assert refused.value.status is None
    assert scripted.requests == []


# -- what logprobs are of


@pytest.mark.parametrize("kind", ["raw", "unknown"])
def test_penalties_are_refused_where_logprobs_are_not_of_what_is_sampled_from(kind: str) -> None:
    found = Capabilities(engine="vllm", logprobs=LogprobKind(kind), sampling=frozenset(OPTIONAL))
    for name, value in (("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("repetition_penalty", 1.2)):
        sampling = SamplingParams(8, **{name: value})
        with pytest.raises(LogprobKindError):
            check_logprobs(sampling, found)
        check_logprobs(SamplingParams(8, **{name: value}, allow_raw_logprobs=True), found)
        check_logprobs(SamplingParams(8, **{name: value}, temperature=0), found)
        for fine in (LogprobKind.PROCESSED, LogprobKind.SCALED):
            check_logprobs(sampling, Capabilities(engine="vllm", logprobs=fine))
    check_logprobs(SamplingParams(8, min_p=0.2), found)  # as top-p: what is left out, not what is changed
    with pytest.raises(LogprobKindError):
        check_logprobs(SamplingParams(8, temperature=0.5, presence_penalty=1), found)


# -- what is drawn


def reference(logits: Any, prompt: list[int], sampled: list[int], sampling: SamplingParams) -> list[float]:
    """Probabilities after penalties, temperature and min-p, token by token as vLLM documents them."""
    changed = []
    for token, logit in enumerate(map(float, logits)):
        if token in prompt or token in sampled:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * sampled.count(token)
        logit -= sampling.presence_penalty * (token in sampled)
        changed.append(logit / sampling.temperature)
    top = max(changed)
    weights = [math.exp(one - top) for one in changed]
    weights = [one if one >= sampling.min_p else 0.0 for one in weights]
    total = sum(weights)
    return [one / total for one in weights]


SETTINGS: list[dict[str, Any]] = [
    {"min_p": 0.1},
    {"min_p": 0.3, "temperature": 2.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0, "temperature": 0.5},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.7, "min_p": 0.05, "temperature": 1.4},
]


@pytest.mark.parametrize("given", SETTINGS)
def test_the_embedded_engines_logprobs_are_of_that_distribution(given: dict[str, Any]) -> None:
    sampling = SamplingParams(24, seed=3, stop_token_ids=STOPS, **given)

    async def work(engine: EmbeddedEngine) -> Completion:
        return await engine.generate(PROMPT, sampling)

    done = with_engine(work)
    row = [*PROMPT.tolist(), *done.ids.tolist()]
    model = load_pocket()
    [logits] = model.extend([model.new_cache(len(row))], [row], every=True)
    for at, token in enumerate(done.ids.tolist()):
        place = len(PROMPT) + at
        wanted = reference(logits[place - 1], PROMPT.tolist(), row[len(PROMPT) : place], sampling)
        assert float(done.logprobs[at]) == pytest.approx(math.log(wanted[token]), abs=1e-4)
    assert done.logprobs_kind is LogprobKind.PROCESSED


# -- stop texts

TEXTS = st.lists(st.text("aé😀", min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.text("aé😀b", max_size=12), st.lists(st.integers(1, 3), max_size=40), TEXTS)
def test_the_id_that_completes_a_text_is_found_however_it_is_cut(text: str, sizes: list[int], stops: list[str]) -> None:
    raw, pieces = text.encode(), []
    for size in [*sizes, *[1] * len(raw)]:
        if raw:
            pieces.append(raw[:size])
            raw = raw[size:]
    finder = StopFinder(stops, lambda one: pieces[one])
    for at in range(len(pieces)):
        seen = b"".join(pieces[: at + 1])
        found = finder.feed(at)
        ends = {one: seen.index(one.encode()) + len(one.encode()) for one in stops if one.encode() in seen}
        if ends:
            assert found is not None
            assert ends[found] == min(ends.values())
            return
        assert found is None


def test_a_stop_text_ends_a_completion_with_the_id_that_completes_it() -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion, Completion, Completion]:
        greedy = {"max_tokens": 60, "temperature": 0, "stop_token_ids": STOPS}
        whole = await engine.generate(PROMPT, SamplingParams(**greedy))
        text = b"".join(map(SPELLED, whole.ids.tolist())).decode()
        stop = text[7:14]  # over several tokens, and from the middle of one
        assert text.count(stop) == 1
        asked = SamplingParams(**greedy, stop=("never", stop))
        pieces = [delta async for delta in engine.stream(PROMPT, asked)]
        cut = await engine.generate(PROMPT, asked)
        never = await engine.generate(PROMPT, SamplingParams(**greedy, stop=["never"]))
        return whole, cut, joined(pieces), never

    whole, cut, streamed, never = with_engine(work)
    count = len(cut.ids)
    assert 1 < count < len(whole.ids)
    assert cut.ids.tolist() == whole.ids[:count].tolist()
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:count], atol=1e-5)
    assert cut.finish_reason is FinishReason.STOP
    before, through = (b"".join(map(SPELLED, ids)).decode() for ids in (cut.ids[:-1].tolist(), cut.ids.tolist()))
    assert cut.stopped_by is not None
    assert cut.stopped_by in through
    assert cut.stopped_by not in before
    assert (streamed.stopped_by, streamed.ids.tolist()) == (cut.stopped_by, cut.ids.tolist())
    assert (never.stopped_by, never.finish_reason) == (None, FinishReason.STOP)
    assert never.ids.tolist() == whole.ids.tolist()
