"""Histories of long conversations: steps share what they hold alike, and nothing comes out otherwise for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conversations import CONVERSATIONS, assistant, user
from tests.diagnose.compared import LAST_ONLY, made_up, spelled
from tests.support import JINJA_FAMILIES, rotating
from tokentrace import TokentraceError
from tokentrace.diagnose import HistoryReport, compare_histories, history_differences, history_walk
from tokentrace.diagnose.history_differences import Shown
from tokentrace.show.results import document_of
from tokentrace.template.chat_template import ChatTemplate


def thoughtful(turns: int) -> list[dict[str, Any]]:
    """A chat in which every answer is thought about."""
    return [
        message
        for at in range(turns)
        for message in (user(f"Question {at:02}?"), assistant(f"Answer {at:02}.", reasoning=f"I think of {at:02}."))
    ]


def working(rounds: int) -> list[dict[str, Any]]:
    """Calls and their results, with an answer and another question now and then."""
    messages: list[dict[str, Any]] = [user("Begin.")]
    for at in range(rounds):
        call = {"id": f"call{at:05}", "type": "function", "function": {"name": "look", "arguments": {"at": at}}}
        messages.append({**assistant("", reasoning=f"I look at {at}."), "tool_calls": [call]})
        messages.append({"role": "tool", "name": "look", "tool_call_id": f"call{at:05}", "content": f"It is {at}."})
        if at % 3 == 2:
            messages += [assistant(f"It was {at}.", reasoning="That is all."), user("Go on.")]
    return messages


LONG = {"thoughtful": (thoughtful(5), None), "working": (working(5), None)}
OTHERWISE = {"history": "inference"}, {"preserve_all_thinking": True}
CASES = [
    *((family, {}) for family in JINJA_FAMILIES),
    *((family, settings) for family in ("qwen3", "gpt-oss", "glm-4.5", "mistral-nemo") for settings in OTHERWISE),
]


def told(found: HistoryReport) -> list[Any]:
    """All that a report says."""
    views = [
        [None if shown is None else (shown.ids.tolist(), shown.messages.tolist(), shown.fields.tolist())]
        for step in found.steps
        for shown in (step.production, step.rollout, step.training)
    ]
    return [found.to_json(), str(found), [repr(one) for one in found.findings], found.rows(), views]


@pytest.mark.parametrize(("family", "settings"), CASES, ids=str)
def test_steps_that_share_hold_what_each_would_by_itself(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way forgets every step: prompts, blocks, differences and findings are made anew for each."""
    chosen = [name for name in rotating(CONVERSATIONS, family, 32) if CONVERSATIONS[name].messages]
    long = {name: LONG[name] for name in rotating(LONG, f"{family} {settings}", 2)}
    given = long | {name: (CONVERSATIONS[name].messages, CONVERSATIONS[name].tools) for name in chosen if not settings}
    renderer = spelled(family, **settings)
    shared: dict[str, list[Any]] = {}
    for name, (messages, tools) in given.items():
        try:
            shared[name] = told(compare_histories(renderer, messages, tools=tools))
        except TokentraceError:
            continue
    compare = history_walk._Pair.compare

    def anew(pair: Any, now: Any, held: Any, stable: Any) -> Any:
        pair.forget()
        return compare(pair, now, held, (0, 0))

    monkeypatch.setattr(history_walk._Pair, "compare", anew)
    monkeypatch.setattr(history_walk, "_agreeing", lambda *prompts: 0)
    for name, said in shared.items():
        assert told(compare_histories(renderer, given[name][0], tools=given[name][1])) == said, name


@pytest.mark.parametrize("history", ["train", "inference"])
def test_work_and_page_grow_with_the_conversation(history: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = dict.fromkeys(("runs", "compared", "held"), 0)
    render, align, hold = ChatTemplate.render, history_differences.align, Shown.__init__

    def rendered(*given: Any, **named: Any) -> Any:
        counts["runs"] += 1
        return render(*given, **named)

    def compared(one: Any, other: Any) -> Any:
        counts["compared"] += len(one) + len(other)
        return align(one, other)

    def held(shown: Any, ids: Any, *rest: Any) -> None:
        counts["held"] += len(ids) if ids.base is None else 0  # views of what others hold take no room
        hold(shown, ids, *rest)

    monkeypatch.setattr(ChatTemplate, "render", rendered)
    monkeypatch.setattr(history_differences, "align", compared)
    monkeypatch.setattr(Shown, "__init__", held)
    renderer, made = made_up(LAST_ONLY, history=history), []
    compare_histories(renderer, thoughtful(3))  # what is learned of the template is learned once
    for turns in (10, 40):
        counts.update(dict.fromkeys(counts, 0))
        found = compare_histories(renderer, thoughtful(turns))
        page = len(json.dumps(document_of(found).to_json()))
        made.append(
            {**counts, "page": page, "differences": sum(len(c.own) for s in found.steps for c in s.comparisons)}
        )
    small, large = made
    assert {name: large[name] for name in large if large[name] > 4.5 * small[name]} == {}, made
