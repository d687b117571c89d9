"""Every conversation of the matrix, cut at every turn: the next prompt extends the stream, and where the template
is append-only, the bridge equals the full render, id for id.
"""

from collections import Counter
from typing import Any

import pytest

from tests.conversations import (
    ANSWER,
    ASK,
    CONVERSATIONS,
    HI,
    PARIS,
    RAINY,
    ROME,
    SIMPLE,
    SUNNY,
    SYS,
    Conversation,
    assistant,
    call,
    developer,
    result,
    system,
    user,
)
from tests.rendering.bridge.rollouts import Cut, check_credit, check_extension, cut_after, cuts, rendered, turn_ends
from tests.support import FULL, make_renderer, rotating, some, templates_of_trl, trl_renderer, variable_choices
from tokentrace import BridgeRefusal, Renderer, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.rendering import RefusalReason
from tokentrace.tokens import Kind

MOVES_SYSTEM_MESSAGES = {
    *("deepseek-v3", "deepseek-r1", "deepseek-v3.1"),
    *("deepseekv3", "deepseekv3_training", "deepseek_r1_distill", "deepseek_r1_distill_training"),
}
"""Templates that move every system message to the head of the prompt, so that the past would change."""

LOOKS_BACK = {"cohere2", "cohere2_training"}
"""Templates that write a later system message only if there is none before it."""

REPEATS_THE_PAST = {
    *("mistral-nemo", "diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
}
"""Templates that move text of the past into the new turn (the system message to the last user message, content
beside a call behind its results). The bridge leaves it where it is.
"""


class Tally:
    def __init__(self, family: str, renderer: Renderer) -> None:
        self.family = family
        self.renderer = renderer
        self.failures: list[str] = []
        self.count: Counter[str] = Counter()

    def take(self, name: str, cut: Cut, **settings: Any) -> Any:
        bridged = cut.bridge(self.renderer, **settings)
        place = f"{self.family}, {name}, message {cut.at}"
        if isinstance(bridged, BridgeRefusal):
            self.count[bridged.reason] += 1
            if cut.append_only or not self.may_refuse(bridged):
                self.failures.append(f"{place}: {bridged}")
            return None
        check_extension(cut, bridged)
        if bridged.closed:
            self.failures.append(f"{place}: closed a turn that was not cut off")
        if cut.append_only:
            self.count["equal"] += 1
            self.compare(place, "the full render", bridged.token_ids, cut.full.token_ids)
        if cut.stop is not None and bridged.new_ids.tolist() == cut.full.token_ids[cut.stop :]:
            self.count["same tail"] += 1
            self.compare_credit(place, cut, bridged)
        elif self.family not in REPEATS_THE_PAST:
            tail = cut.full.token_ids[cut.stop or 0 :]
            self.compare(place, "what the full render writes after the turn", bridged.new_ids.tolist(), tail)
        else:
            check_credit(cut, bridged)
        return bridged

    def may_refuse(self, refusal: BridgeRefusal) -> bool:
        if refusal.reason is RefusalReason.MOVED:
            return self.family in MOVES_SYSTEM_MESSAGES
        return refusal.reason is RefusalReason.CONTEXT_DEPENDENT and self.family in LOOKS_BACK

    def compare(self, place: str, what: str, ours: list[int], theirs: list[int]) -> None:
        if ours != theirs:
            decode = self.renderer.tokenizer.decode
            at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
            self.failures.append(f"{place}: not {what}: {decode(ours[at:])!r} instead of {decode(theirs[at:])!r}")

    def compare_credit(self, place: str, cut: Cut, bridged: Any) -> None:
        check_credit(cut, bridged)
        origins = cut.full.origins[cut.stop :]
        context = [origin is not None and origin.message is not None and not origin.is_role for origin in origins]
        owners = cut.full.messages[cut.stop :].tolist()
        for turn in cut.full.turns:  # a head that stopped no turn belongs to the turn that it begins
            if cut.stop is not None and turn.stop > cut.stop and turn.stop_token is not None:
                at = turn.stop - cut.stop - 1
                owners[at] = bridged.messages[at] + cut.at + 1
        owners = [max(index - cut.at - 1, -1) for index in owners]
        if (bridged.kinds == Kind.CONTEXT).tolist() != context or bridged.messages.tolist() != owners:
            self.failures.append(f"{place}: kinds or messages are not those of the full render")


# -- the whole matrix

EQUAL = {"qwq-32b": 0, "deepseek-r1": 3}
"""Minimum count of cuts of the whole matrix at which the template is append-only, by family; 15 for all others."""
SAME_TAIL = {"deepseek-r1": 35, "deepseek-v3.1": 35, "gemma-3": 25}
"""Minimum count of cuts at which the tail after the turn is equal, by family; 80 for all others."""
EVERY = 4
"""An ordinary run tries one conversation in so many."""


def test_a_bridge_at_any_cut_is_the_full_render_where_the_template_is_append_only(any_family: str) -> None:
    tally = Tally(any_family, make_renderer(any_family))
    names = {*rotating(CONVERSATIONS, f"cut {any_family}", EVERY), "system_in_the_middle"}
    for name in names:
        for cut in cuts(tally.renderer, CONVERSATIONS[name]):
            tally.take(name, cut)
    assert not tally.failures, some(tally.failures)
    part = 1 if FULL else 2 * EVERY
    assert tally.count["equal"] >= EQUAL.get(any_family, 15) // part
    assert tally.count["same tail"] >= SAME_TAIL.get(any_family, 80) // part
    assert (tally.count[RefusalReason.MOVED] > 0) == (any_family in MOVES_SYSTEM_MESSAGES)


ROLLED = {"gemma-3": 1, "deepseek-r1": 6, "deepseek-v3.1": 6}
"""Minimum count of prompts of the whole matrix that extend a bridged one, by family; 15 for all others."""


def roll(tally: Tally, name: str, conversation: Conversation) -> None:
    """Bridge a conversation turn by turn, each prompt extending the last; a refusal begins a new stream."""
    prompt: list[int] | None = None
    for at, end in turn_ends(conversation.messages):
        cut = cut_after(tally.renderer, conversation.messages, at, end, conversation.tools, prompt)
        if cut is None or (end == at + 1 and end == len(conversation.messages)):  # refused, or nothing follows
            prompt = None
            continue
        bridged = tally.take(name, cut)
        tally.count["turns"] += prompt is not None
        prompt = None if bridged is None else bridged.token_ids


def test_a_rollout_bridged_turn_by_turn_is_one_stream(any_family: str) -> None:
    tally = Tally(any_family, make_renderer(any_family))
    for name in rotating(CONVERSATIONS, f"rolled {any_family}", 4):
        roll(tally, name, CONVERSATIONS[name])
    roll(tally, "multi_turn_open", CONVERSATIONS["multi_turn_open"])
    assert not tally.failures, some(tally.failures)
    assert tally.count["turns"] >= ROLLED.get(any_family, 15) // (1 if FULL else 10)


# -- other settings

SOME = (
    *("multi_turn_open", "reasoning_every_turn", "reasoning_mixed", "calls_parallel_answered", "result_then_user"),
    *("agentic", "agentic_json_arguments_content_none", "calls_parallel_json_arguments", "agentic_open"),
)
PASTS = [{"past": past} for past in ("preserve", "tool_calls", "patched")]


def test_a_bridge_is_the_full_render_under_other_settings(any_family: str) -> None:
    for settings in (*variable_choices(any_family)[1:], *rotating(PASTS, any_family, 2)):
        tally = Tally(any_family, make_renderer(any_family, **settings))
        for name in (SOME[0], *rotating(SOME[1:], f"{any_family} {settings}", 4)):
            roll(tally, f"{name} with {settings}", CONVERSATIONS[name])
        assert not tally.failures, some(tally.failures)
        assert tally.count["same tail"] >= (3 if FULL else 1)


# -- other new messages

CALL_JSON = call("get_weather", '{"city": "Paris"}')
GREETING = [SYS, HI, assistant("Yes?")]
CALLS = [PARIS, ROME, call("add", {"a": 1, "b": 2}, "call00003")]
RESULTS = [SUNNY, RAINY, result("3", "call00003")]
NAMED = [answer | {"name": called["function"]["name"]} for called, answer in zip(CALLS, RESULTS, strict=True)]


def answered(count: int, *, text: bool, named: bool) -> list[Any]:
    """The first `count` calls, with arguments as a mapping or as JSON text, and results with names or without."""
    calls = [call(tool_call["function"]["name"], "{}", tool_call["id"]) for tool_call in CALLS] if text else CALLS
    return [ASK, assistant(None if text else "", *calls[:count]), *(NAMED if named else RESULTS)[:count]]


NEW: dict[str, list[Any]] = {
    "answer, user": [ASK, ANSWER, assistant("And warm."), user("Thanks")],
    "user, answer, user": [*GREETING, ASK, ANSWER, user("Thanks")],
    "user, answer": [*GREETING[1:], ASK, ANSWER],
    "user, thought, user": [*GREETING[1:], ASK, assistant("", reasoning="Hm."), user("Well?")],
    "result, answer, user": [ASK, assistant("", PARIS), SUNNY, ANSWER, user("Thanks")],
    "result, answer, user, JSON": [ASK, assistant(None, CALL_JSON), SUNNY, ANSWER, user("Thanks")],
    "result, call, result": [ASK, assistant("", PARIS), SUNNY, assistant("", ROME), RAINY],
    "result, thoughtful answer, user": [
        *(ASK, assistant("", PARIS, reasoning="Look.")),
        *(SUNNY, assistant("Sunny.", reasoning="So it says."), user("Thanks")),
    ],
    "system": [*GREETING[1:], system("Be brief."), user("Why?")],
    "system after system": [*GREETING, system("Be brief."), user("Why?")],
    "system at the end": [*GREETING, user("Why?"), system("Be brief.")],
    "system alone": [*GREETING[1:], system("Go on.")],
    "developer": [*GREETING[1:], developer("Be brief."), user("Why?")],
    "developer at the end": [*GREETING, user("Why?"), developer("Be brief.")],
    "system after a result": [ASK, assistant("", PARIS), SUNNY, system("Be brief.")],
    **{
        f"{count} results, {text}, {named}, {len(after)}": [*answered(count, text=text, named=named), *after]
        for count in (1, 2, 3)
        for text in (False, True)
        for named in (False, True)
        for after in ([], [user("So?")])
    },
}
"""Conversations in which the caller supplies everything after the first turn: other assistants' turns, later system
messages, and results, which form one group however many there are.
"""


@pytest.mark.parametrize("past", ["template", "preserve"])
def test_whatever_the_caller_puts_in_is_written_as_in_the_full_render_or_refused(any_family: str, past: str) -> None:
    tally = Tally(any_family, make_renderer(any_family, past=past))
    chats = rotating(NEW.items(), any_family, 3) if past == "template" else list(NEW.items())[: 8 if FULL else 3]
    for name, messages in chats:
        tools = SIMPLE if any(message["role"] == "tool" for message in messages) else None
        at = next(turn_ends(messages))[0]
        cut = cut_after(tally.renderer, messages, at, len(messages), tools)
        if cut is not None:
            bridged = tally.take(name, cut)
            assert bridged is None or Kind.SAMPLED not in bridged.kinds
        elif tools is None and (prompt := rendered(tally.renderer, messages[:at], tools, True)) is not None:
            refused = tally.renderer.bridge(prompt.ids, [], messages[at + 1 :], tools=tools)
            assert isinstance(refused, BridgeRefusal), name
            assert refused.reason is RefusalReason.TEMPLATE_REFUSED
    assert not tally.failures, some(tally.failures)
    assert tally.count["same tail"] >= (6 if FULL and past == "template" and any_family != "gemma-3" else 1)


# -- templates without a vocabulary of their own


@pytest.mark.parametrize("name", sorted({*rotating(templates_of_trl(), "bridged", 8), "deepseek_r1_distill"}))
def test_templates_of_trl_are_bridged_as_they_render(name: str) -> None:
    tally = Tally(name, trl_renderer(name))
    for label in (*SOME, "system_in_the_middle", "think_inline_in_history", "kimi_ids", "result_named", "long_code"):
        roll(tally, label, CONVERSATIONS[label])
    assert not tally.failures, some(tally.failures)
    assert tally.count["same tail"] >= (0 if name.startswith("llava") else 2)


def test_the_pocket_model_is_bridged_as_it_renders() -> None:
    tally = Tally("pocket", create_renderer(POCKET))
    for name, conversation in CONVERSATIONS.items():
        roll(tally, name, conversation)
        for cut in cuts(tally.renderer, conversation):
            tally.take(name, cut)
    assert not tally.failures, some(tally.failures)
    assert tally.count["equal"] >= 150
