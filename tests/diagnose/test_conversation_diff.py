"""Causes of branches, on histories as real agents rewrite them, and as laws over any conversation."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.diagnose.rewritten import CASES, RECORDED, TASK, C, Message, call, reply, result, system, user
from tokentrace.diagnose.conversation_diff import changed_tools, find_cause
from tokentrace.diagnose.finding import Finding
from tokentrace.diagnose.message_keys import chain, root_key
from tokentrace.diagnose.wording import changed_words


def shared_of(sent: Sequence[Message], recorded: Sequence[Message]) -> int:
    """How many messages both begin with, as the matcher counts."""
    ours, theirs = (chain(root_key(None, {}, ""), messages) for messages in (sent, recorded))
    return sum(one == other for one, other in zip(ours[1:], theirs[1:], strict=False))


def cause_of(sent: Sequence[Message], recorded: Sequence[Message], **more: Any) -> Finding:
    return find_cause(sent, recorded, shared_of(sent, recorded), **more)


@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_what_agents_do(name: str) -> None:
    case = CASES[name]
    found = cause_of(case.sent, case.recorded, recent=case.others)
    assert (found.cause, found.message) == (case.cause, case.message), found.words
    assert case.words in found.words
    assert found.message is None or f"message {found.message} (" in found.words


# -- tools


def tool(name: str, description: str = "") -> Message:
    return {"type": "function", "function": {"name": name, "description": description}}


@pytest.mark.parametrize(
    ("sent", "recorded", "words"),
    [
        ([], [tool("a")], "tools left out: a"),
        ([tool("a"), tool("b")], [tool("a")], "new tools: b"),
        ([tool("a")], [tool("a"), tool("b")], "tools left out: b"),
        ([tool("a", "x")], [tool("a", "y")], "tools described otherwise: a"),
        ([tool("b"), tool("a")], [tool("a"), tool("b")], "another order"),
        ([tool("a")], None, "new tools: a"),
    ],
)
def test_changed_tools_are_named(sent: Any, recorded: Any, words: str) -> None:
    assert words in changed_tools(sent, recorded).words
    assert "template variables: enable" in changed_tools(None, None, {"enable": False}, {}).words


# -- laws

WORDS = st.lists(st.sampled_from(["the", "a", "parser", "file", "test", "link", "river", "goes", "over"]), min_size=1)
MESSAGES = st.one_of(
    WORDS.map(lambda words: user(" ".join(words))),
    WORDS.map(lambda words: reply(" ".join(words))),
    WORDS.map(lambda words: result(" ".join(words))),
    WORDS.map(lambda words: call("look", place=" ".join(words))),
)
CONVERSATIONS = st.lists(MESSAGES, min_size=3, max_size=8).map(lambda said: [system(), user(TASK), *said])


@given(CONVERSATIONS, st.data())
def test_a_changed_text_is_found_where_it_is(recorded: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(recorded) - 2))
    sent = [*recorded[:at], {**recorded[at], "content": "something that nobody has ever said"}, *recorded[at + 1 : -1]]
    found = cause_of(sent, recorded)
    assert found.message == at
    allowed = {
        "system": {C.CHANGED_SYSTEM},
        "user": {C.EDIT, C.COMPACTION, C.SUB_AGENT},
        "assistant": {C.EDIT},
        "tool": {C.EDIT, C.TRIMMED_RESULTS},
    }
    assert found.cause in allowed[str(recorded[at]["role"])], found
    if at + 1 < len(sent):
        assert found.cause not in (C.COMPACTION, C.SUB_AGENT), found


@given(CONVERSATIONS, st.data())
def test_a_prefix_is_a_retry(recorded: list[Message], data: st.DataObject) -> None:
    found = cause_of(recorded[: data.draw(st.integers(1, len(recorded) - 1))], recorded)
    assert (found.cause, found.message) == (C.RETRY, None)


@given(CONVERSATIONS, st.data())
def test_what_is_left_out_is_never_called_an_edit_of_the_system_or_a_call(
    recorded: list[Message], data: st.DataObject
) -> None:
    start = data.draw(st.integers(2, len(recorded) - 2))
    stop = data.draw(st.integers(start + 1, len(recorded) - 1))
    assume(any(message["role"] != "user" for message in recorded[start:stop]))
    sent = [*recorded[:start], *recorded[stop:]]
    shared = shared_of(sent, recorded)
    assume(shared < len(sent))
    found = find_cause(sent, recorded, shared)
    assert found.message == shared
    allowed = {C.COMPACTION, C.EDIT, C.RETRY}
    if sent[shared]["role"] == recorded[shared]["role"] == "tool":  # the next result may be the start of this one
        allowed.add(C.TRIMMED_RESULTS)
    assert found.cause in allowed, found


@given(st.lists(st.dictionaries(st.text(max_size=4), st.none() | st.text(max_size=9) | st.integers(), max_size=3)))
def test_any_two_conversations_have_a_cause(said: list[dict[str, Any]]) -> None:
    roles = ["user", "assistant", "tool", "system"]
    odd = [{**message, "role": roles[at % 4]} for at, message in enumerate(said)]
    for sent, recorded in ((odd, RECORDED), (RECORDED, odd), (odd, odd[::-1])):
        if sent and recorded:
            assert cause_of(sent, recorded).words


SPACED = st.lists(st.sampled_from(["a", "bb", "b", "é", " ", "  ", "\n", "b b"]), max_size=8).map("".join)


@given(SPACED, SPACED)
def test_the_words_that_differ_are_quoted(new: str, old: str) -> None:
    """Putting back what is quoted gives the old text, and only whole words are quoted."""
    assume(new != old)
    words = changed_words(new, old)
    quotes = [ast.literal_eval(quote) for quote in re.findall(r"'(?:[^'\\]|\\.)*'", words)]
    added, removed = {"new": (quotes[0], ""), "out": ("", quotes[0])}.get(words.split()[-1], (quotes[0], quotes[-1]))
    places = [at for at in range(len(new) + 1) if new.startswith(added, at)]
    assert any(" ".join([new[:at], removed, new[at + len(added) :]]).split() == old.split() for at in places) or (
        any(new[:at] + removed + new[at + len(added) :] == old for at in places)
    ), (words, new, old)


def test_long_texts_cost_no_more_than_their_length() -> None:
    """Two megabytes of one word: a comparison of every place with every other would not come back."""
    long = "word " * 400_000
    sent = [system(long), user(long + "x"), reply(long)]
    recorded = [system(long), user(long), call("look", place=long), result(long), reply(long)]
    assert cause_of(sent, recorded).message == 1
    assert cause_of([system(long + "y"), *sent[1:]], recorded).message == 0


def test_the_guide_lists_every_cause() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    section = guide.split("## Why a conversation branched")[1].split("\n## ")[0]
    causes = {*(case.cause.value for case in CASES.values()), "changed_tools", "template", "ambiguous"}
    cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == causes
