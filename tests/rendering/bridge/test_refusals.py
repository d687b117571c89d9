"""When a bridge is refused, and why; bad input; and what holds for every call."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import ALL, ASK, HI, PARIS, SIMPLE, SUNNY, assistant, system, user
from tests.formats.small import made_up_renderer
from tests.rendering.bridge.rollouts import cut_after
from tests.support import make_renderer
from tokentrace import BridgedTokens, BridgeRefusal, InputError, Renderer, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.rendering import RefusalReason

BYE = user("Bye")
ANSWERED = [HI, assistant("I am Ada.")]
THOUGHT = [HI, assistant("I am Ada.", reasoning="They ask.")]
CALLED = [ASK, assistant("", PARIS, reasoning="Look.")]


def reason(outcome: Any) -> RefusalReason | None:
    if isinstance(outcome, BridgeRefusal):
        return outcome.reason
    assert isinstance(outcome, BridgedTokens)
    return None


@pytest.fixture
def pocket() -> Renderer:
    return create_renderer(POCKET)


# -- reasons


def test_no_prompt_is_no_stream(pocket: Renderer) -> None:
    for empty in ([], (), np.zeros(0, np.int32)):
        assert reason(pocket.bridge(empty, [1, 2], [BYE])) is RefusalReason.EMPTY_STREAM
        assert pocket.bridge_to_next_turn(empty, [1, 2], [BYE]) is None


def test_a_result_without_a_function_name_is_refused() -> None:
    renderer = make_renderer("gpt-oss")
    prompt = renderer.render([ASK], tools=SIMPLE, add_generation_prompt=True)
    sampled = renderer.tokenizer.encode("<|channel|>final<|message|>Hi.<|return|>")
    refused = renderer.bridge(prompt.ids, sampled, [SUNNY], tools=SIMPLE)
    assert reason(refused) is RefusalReason.UNKNOWN_VALUE
    assert "name" in str(refused)
    named = renderer.bridge(prompt.ids, sampled, [SUNNY | {"name": "get_weather"}], tools=SIMPLE)
    assert reason(named) is None


def test_a_message_that_the_template_would_move_is_refused() -> None:
    renderer = make_renderer("deepseek-v3.1")
    prompt = renderer.render([HI], add_generation_prompt=True)
    refused = renderer.bridge(prompt.ids, [], [BYE, system("Be brief.")])
    assert reason(refused) is RefusalReason.MOVED
    assert "new message 1" in str(refused)


PRODUCTION = {
    "qwen2.5": [(THOUGHT, [BYE], False), (CALLED, [SUNNY], False)],
    "qwen3": [(THOUGHT, [BYE], True), (CALLED, [SUNNY], False), (CALLED, [SUNNY, BYE], True)],
    "glm-4.5": [
        *((THOUGHT, [BYE], True), (ANSWERED, [BYE], False)),
        *((CALLED, [SUNNY], False), (CALLED, [SUNNY, BYE], True)),
    ],
    "minimax-m3": [(THOUGHT, [BYE], False)],
    "gpt-oss": [(THOUGHT, [BYE], True), (CALLED, [SUNNY], False), (CALLED, [SUNNY, BYE], False)],
    **{key: [(THOUGHT, [BYE], True), (CALLED, [SUNNY], False)] for key in ("glm-5", "minimax-m2", "nemotron-3-nano")},
}
"""The messages before, the new messages, and whether the template rewrites the past."""


@pytest.mark.parametrize("family", PRODUCTION)
def test_in_production_a_past_that_is_rewritten_is_refused(family: str) -> None:
    production = make_renderer(family, history="inference")
    for past, new, is_rewritten in PRODUCTION[family]:
        cut = cut_after(production, [*past, *new], 1, 2 + len(new), SIMPLE if past is CALLED else None)
        assert cut is not None
        assert cut.append_only is not is_rewritten, "what the template itself does"
        assert reason(cut.bridge(production)) is (RefusalReason.REWRITES_PAST if is_rewritten else None)
        assert reason(cut.bridge(make_renderer(family))) is None, "to train, the past stays"


FORGETFUL: list[tuple[str, dict[str, Any]]] = [
    *(("qwq-32b", {}), ("qwen3-thinking-2507", {}), ("glm-5", {}), ("deepseek-v3.2", {"thinking": True})),
    *(("deepseek-r1", {}), ("deepseek-v3.1", {"thinking": True}), ("kimi-k2.5", {})),
]


@pytest.mark.parametrize(("family", "variables"), FORGETFUL, ids=[family for family, _ in FORGETFUL])
def test_in_production_reasoning_that_the_template_drops_is_refused(family: str, variables: dict[str, Any]) -> None:
    """The prompt ends in ``<think>``, the model reasons and answers; no full render shows the reasoning."""
    renderer = make_renderer(family, history="inference", **variables)
    prompt = renderer.render([HI], add_generation_prompt=True)
    assert prompt.text.rstrip().endswith("<think>")
    sampled = renderer.tokenizer.encode("They ask.\n</think>\n\nI am Ada.").tolist()
    sampled += renderer.get_stop_token_ids()[:1]
    full = renderer.render([*THOUGHT, BYE], add_generation_prompt=True)
    assert "They ask" not in full.text
    assert reason(renderer.bridge(prompt.ids, sampled, [BYE])) is RefusalReason.REWRITES_PAST


ROUNDS = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}]{% endif %}"
    "<m>{{ m.role }}:{{ m.content }}</m>{% endfor %}{% if add_generation_prompt %}<m>assistant:{% endif %}"
)


def test_a_template_that_counts_is_bridged_only_with_the_conversation_before() -> None:
    renderer = made_up_renderer(ROUNDS, "<m>", "</m>")
    for past in (ANSWERED, [*ANSWERED, BYE, assistant("Bye!")], [system("x"), *ANSWERED]):
        cut = cut_after(renderer, [*past, BYE], len(past) - 1, len(past) + 1, None)
        assert cut is not None
        assert cut.append_only
        refused = cut.bridge(renderer)
        assert reason(refused) is RefusalReason.CONTEXT_DEPENDENT
        assert "messages=" in str(refused)
        assert cut.bridge(renderer, messages=past[:-1]) == cut.full.token_ids


# -- bad input


@pytest.mark.parametrize(
    ("new", "message", "field"),
    [
        ("Bye", None, None),
        ([BYE, "Bye"], 1, None),
        ([BYE, {"content": "x"}], 1, "role"),
        ([{"role": "wizard", "content": "x"}], 0, "role"),
        ([BYE, {"role": "user", "content": 7}], 1, "content"),
        ([{"role": "user", "content": "\ud800"}], 0, "content"),
    ],
)
def test_bad_messages_are_named_by_index_and_field(
    pocket: Renderer, new: Any, message: int | None, field: str | None
) -> None:
    prompt = pocket.render([HI], add_generation_prompt=True)
    with pytest.raises(InputError) as caught:
        pocket.bridge_to_next_turn(prompt.ids, [], new)
    assert (caught.value.message, caught.value.field) == (message, field)


@pytest.mark.parametrize("bad", [[-1], [1.5], ["a"], "abc", [[1]], [8192], [2**31], [2**70], 7, None, [None], [1, "2"]])
def test_bad_completions_are_input_errors(pocket: Renderer, bad: Any) -> None:
    prompt = pocket.render([HI], add_generation_prompt=True)
    with pytest.raises(InputError, match="prev_completion_ids"):
        pocket.bridge(prompt.ids, bad, [BYE])


READINGS = [
    lambda bridged: bridged.ids,
    lambda bridged: bridged.token_ids,
    list,
    lambda bridged: bridged[0],
    lambda bridged: bridged[3:5],
    np.asarray,
    lambda bridged: bridged == [0] * len(bridged),
]


@functools.cache
def pocket_with(history: str) -> Renderer:
    return create_renderer(POCKET, history=history)


@settings(max_examples=80, deadline=None)
@given(
    history=st.sampled_from(["train", "inference"]),
    count=st.integers(0, 300),
    wrong=st.sampled_from([2**31, 2**32 + 5, -1, 1.7, 1.0, True, "1", None, 2**70, np.timedelta64(5, "s")]),
    read=st.sampled_from(READINGS),
    data=st.data(),
)
def test_no_id_comes_out_that_was_not_put_in(history: str, count: int, wrong: Any, read: Any, data: Any) -> None:
    renderer = pocket_with(history)
    prompt = renderer.render_ids([user("word " * count)], add_generation_prompt=True)
    at = data.draw(st.integers(0, len(prompt) - 1))
    ids: Any = [*prompt[:at], wrong, *prompt[at + 1 :]]
    form = data.draw(st.sampled_from([list, tuple, np.array] if type(wrong) is int and abs(wrong) < 2**63 else [list]))
    with pytest.raises(InputError, match=f"prev_prompt_ids: entry {at} "):
        read(renderer.bridge(form(ids), prompt[:2], [BYE]))


# -- what holds for every call


def bridged_or_none(renderer: Renderer, past: Any, new: Any, tools: Any) -> Any:
    cut = cut_after(renderer, [*past, *new], 1, 2 + len(new), tools)
    outcome = None if cut is None else cut.bridge(renderer)
    return outcome.token_ids if isinstance(outcome, BridgedTokens) else outcome


def test_threads_share_a_renderer() -> None:
    cases: list[tuple[Any, Any, Any]] = [
        (ANSWERED, [BYE], None),
        (CALLED, [SUNNY], SIMPLE),
        (CALLED, [SUNNY, BYE], ALL),
        (THOUGHT, [BYE, assistant("So."), BYE], None),
    ]
    tokenizer = make_renderer("qwen3").tokenizer
    alone, shared = create_renderer(tokenizer), create_renderer(tokenizer)
    expected = [bridged_or_none(alone, *case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda at: bridged_or_none(shared, *cases[at % len(cases)]), range(64)))
    assert outcomes == [expected[at % len(cases)] for at in range(64)]


def test_a_bridge_is_a_sequence_of_ids(pocket: Renderer) -> None:
    prompt = pocket.render([HI], add_generation_prompt=True).token_ids
    sampled = pocket.tokenizer.encode("I am Ada.<|end|>").tolist()
    bridged = pocket.bridge(prompt, sampled, [BYE])
    assert isinstance(bridged, BridgedTokens)
    whole = [*prompt, *sampled, *bridged.new_ids.tolist()]
    assert len(bridged) == len(whole) == bridged.stream_length + len(bridged.new_ids)
    assert list(bridged) == bridged.token_ids == whole
    assert (bridged[-1], type(bridged[0]), bridged[2:5]) == (whole[-1], int, whole[2:5])
    for same in (whole, tuple(whole), np.asarray(whole)):
        assert bridged == same
    for other in (whole[:-1], [*whole[:-1], whole[-1] + 1], "no ids"):
        assert bridged != other
    assert (np.asarray(bridged).dtype, np.asarray(bridged, np.int64).tolist()) == (np.int32, whole)
    again = pocket.bridge(bridged, sampled, [BYE])
    assert isinstance(again, BridgedTokens)
    assert again[: len(whole)] == whole
