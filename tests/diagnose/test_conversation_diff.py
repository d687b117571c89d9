"""Causes of branches: histories as real agents rewrite them, and properties of arbitrary conversations."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conversations import assistant as reply
from tests.conversations import user
from tokentrace.diagnose.conversation_diff import changed_tools, find_cause
from tokentrace.diagnose.finding import Cause, Finding
from tokentrace.diagnose.message_keys import chain, shared_prefix
from tokentrace.diagnose.wording import changed_words

Message = Mapping[str, Any]

SYSTEM = "You are a coding agent. Work in small steps, run the tests often, and say when you are done."
TASK = "The parser in src/parser.py fails on empty input. Find out why, fix it, and add a test for it."
LISTING = "\n".join(f"src/module_{number}.py  {number * 37} bytes  checked" for number in range(40))
SOURCE = "\n".join(f"def function_{number}(text): return text.strip() or None" for number in range(40))


def system(text: str = SYSTEM) -> Message:
    return {"role": "system", "content": text}


def call(name: str, content: str = "", **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"call_{name}", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, name: str = "") -> Message:
    return {"role": "tool", "content": text, **({"tool_call_id": f"call_{name}"} if name else {})}


RECORDED: list[Message] = [
    system(),
    user(TASK),
    call("list_files", "Let me look.", path="src", depth=2),
    result(LISTING),
    call("read_file", "The parser first.", path="src/parser.py"),
    result(SOURCE),
    call("edit_file", path="src/parser.py", text="def parse(text):\n    return text or ''\n"),
    result("1 file changed"),
    call("run_tests", path="tests"),
    result("12 passed in 0.31 seconds"),
    reply("It is fixed: the parser returned None for empty input. There is a test for it now."),
]


def swap(at: int, *messages: Message, until: int | None = None) -> list[Message]:
    """The recorded conversation without its last reply, and with the messages from `at` to `until` replaced."""
    stop = at + 1 if until is None else until
    return [*RECORDED[:at], *messages, *RECORDED[stop:-1]]


def with_text(at: int, text: str) -> list[Message]:
    return swap(at, {**RECORDED[at], "content": text})


@dataclass(frozen=True)
class Case:
    sent: Sequence[Message]
    cause: Cause
    message: int | None
    words: str = ""
    recorded: Sequence[Message] = tuple(RECORDED)
    recent: Sequence[Sequence[Message]] = ()


C = Cause
CLAUDE_SUMMARY = (
    "This session is being continued from a previous conversation that ran out of context. The conversation is "
    "summarized below:\nAnalysis:\nThe user asked for a fix of the parser."
)
PARENT: list[Message] = [
    system(),
    user("Review the whole repository."),
    call("task", prompt="Read every file below docs/ and tell me which links are dead.", agent="reader"),
    result("docs/a.md has two dead links"),
    reply("Two links are dead."),
]
SMOL_CALL = (
    "Let me look.\nCalling tools:\n[{'id': 'call_list_files', 'type': 'function', 'function': {'name': 'list_files', "
    "'arguments': {'path': 'src', 'depth': 2}}}]"
)
TWO_CALLS: Message = {
    "role": "assistant",
    "tool_calls": [*call("list_files", path="src")["tool_calls"], *call("run_tests", path="tests")["tool_calls"]],
}
SYSTEM_AT = (
    "You are a helpful agent. Today is Monday, 16 November 2026, 10:31 AM. Session 4f1c-9a2b. Be brief and kind."
)

CASES: dict[str, Case] = {
    # compaction
    "Claude Code compacts": Case([system(), user(CLAUDE_SUMMARY)], C.COMPACTION, 1),
    "Claude Code compacts under a dated prompt": Case(
        [system(SYSTEM_AT.replace("10:31", "10:57")), user(CLAUDE_SUMMARY)], C.COMPACTION, 0,
        recorded=[system(SYSTEM_AT), *RECORDED[1:]]),
    "langchain summarises and keeps the tail": Case(
        [system(), user("Here is a summary of the conversation to date:\n\nThe parser is read."), *RECORDED[6:10]],
        C.COMPACTION, 1),
    "langmem puts the summary into the system prompt": Case(
        [system(SYSTEM + "\n\nSummary of the conversation so far: the parser was read."), *RECORDED[8:10]],
        C.COMPACTION, 0),
    "a summary in one word": Case([system(), user("Summary: the parser was read.")], C.COMPACTION, 1),
    **{f"an agent's summary, {text!r}": Case([system(), user(f"{text} the parser was read.")], C.COMPACTION, 1)
       for text in ("<state_snapshot>", "Session summary", "Here is a summarization of the work:", "Our summary:")},
    "words of its own after the task": Case([*RECORDED[:2], user("All of it was read. Go on with the second half.")],
        C.COMPACTION, 2),
    "langgraph trims to a window": Case([RECORDED[0], *RECORDED[6:10]], C.COMPACTION, 1),
    "a window over calls with equal results": Case(
        [*RECORDED[:2], call("b"), result("fine"), call("c"), result("fine")], C.COMPACTION, 2,
        recorded=[*RECORDED[:2], *(each for name in "abc" for each in (call(name), result("fine"))), reply("Done.")]),
    "a cleared result among equal ones": Case(
        [*RECORDED[:3], result("[cleared]"), call("b"), result(LISTING), call("c"), result(LISTING)],
        C.TRIMMED_RESULTS, 3,
        recorded=[*RECORDED[:4], call("b"), result(LISTING), call("c"), result(LISTING), reply("Done.")]),
    "openai-agents drops the oldest turns after the task": Case([*RECORDED[:2], *RECORDED[8:10]], C.COMPACTION, 2),
    "autogen keeps head and tail": Case(
        [*RECORDED[:2], user("Skipped 6 messages."), *RECORDED[8:10]], C.COMPACTION, 2),
    "codex hands over": Case(
        [*RECORDED[:2], user("Another language model started this and produced a summary of its thinking: …")],
        C.COMPACTION, 2),
    "a summary that does not say so": Case(
        [*RECORDED[:2], user("Known: src/module_1.py src/module_2.py src/module_3.py checked; function_1 function_2 "
                             "function_3 return text.strip; changed src/parser.py")],
        C.COMPACTION, 2),
    "a compaction of another conversation": Case(
        [system(), user("Links were checked."), call("task", prompt="Check the pictures.")], C.COMPACTION, 1,
        recent=[[*PARENT, call("task", prompt="Check the pictures."), result("All fine.")]]),
    # trimmed results
    "Claude Code clears a result": Case(with_text(3, "[Old tool result content cleared]"), C.TRIMMED_RESULTS, 3),
    "a result is emptied": Case(with_text(5, ""), C.TRIMMED_RESULTS, 5),
    "a result is cut in the middle": Case(with_text(3, LISTING[:500] + "\n… truncated …\n" + LISTING[-300:]),
        C.TRIMMED_RESULTS, 3),
    "a result is cut at its end": Case(with_text(5, SOURCE[:1000]), C.TRIMMED_RESULTS, 5),
    "two results are cut": Case(
        [*RECORDED[:3], result("[removed]"), RECORDED[4], result("[removed]"), *RECORDED[6:10]], C.TRIMMED_RESULTS, 3),
    # sub-agents
    "a sub-agent with a prompt of its own": Case(
        [system("You search the web and cite what you find."), user("Who maintains the parser library?")],
        C.SUB_AGENT, 0),
    "a sub-agent with its parent's prompt": Case([system(), user("Write a poem about rivers in autumn.")],
        C.SUB_AGENT, 1),
    "a sub-agent whose task was a call's argument": Case(
        [system(), user("Read every file below docs/ and tell me which links are dead.")], C.SUB_AGENT, 1,
        "gave it this task", recorded=PARENT),
    "a task that asks for a summary": Case([system(), user("Summarize README.md in three sentences.")], C.SUB_AGENT,
        1),
    "a sub-agent of another conversation": Case(
        [system("You read."), user("Read every file below docs/ and tell me which links are dead.")], C.SUB_AGENT, 0,
        "gave it this task", recent=[PARENT]),
    "a sub-agent without instructions": Case([user("Write a title for this chat, at most five words.")], C.SUB_AGENT,
        0),
    "opencode asks for a title, then begins": Case([system(), user(TASK)], C.SUB_AGENT, 0,
        recorded=[system("You are a title generator. You output ONLY a thread title. Nothing else."),
                  user("Generate a title for this conversation:"), user(TASK), reply("Parser fails on empty input")]),
    "a window under other instructions that begins with a reply": Case(
        [system("You are a reviewer. Be strict."), *RECORDED[2:10]], C.COMPACTION, 0),
    # retries
    "the same again": Case(RECORDED[:-1], C.RETRY, None),
    "back to an earlier point": Case(RECORDED[:4], C.RETRY, None),
    "an error in place of the last reply": Case([*RECORDED[:-1], user("Your answer was not valid JSON. Try again.")],
        C.RETRY, 10),
    "several turns dropped for another instruction": Case([*RECORDED[:4], user("No, look at the lexer.")], C.RETRY, 4),
    # messages inserted or split
    "a message put in before a short last reply": Case(
        [*RECORDED[:2], user("Please hurry."), reply("Done."), user("Thanks.")], C.EDIT, 2,
        recorded=[*RECORDED[:2], reply("Done.")]),
    "a reply in two messages": Case(
        [*RECORDED[:2], reply("The parser fails."), reply("On empty input."), user("Thanks.")], C.EDIT, 2,
        recorded=[*RECORDED[:2], reply("The parser fails. On empty input.")]),
    # calls
    "a repaired argument": Case(swap(4, call("read_file", "The parser first.", path="/work/src/parser.py")),
        C.REWRITTEN_CALL, 4),
    "a repaired name": Case(swap(4, call("readFile", "The parser first.", path="src/parser.py")), C.REWRITTEN_CALL, 4),
    "another parameter": Case(swap(4, call("read_file", "The parser first.", file="src/parser.py")),
        C.REWRITTEN_CALL, 4, "file"),
    "a call left out of two": Case([*RECORDED[:2], call("list_files", path="src")], C.REWRITTEN_CALL, 2,
        recorded=[*RECORDED[:2], TWO_CALLS]),
    "calls made of text": Case([*RECORDED[:2], call("list_files", path="src")], C.REWRITTEN_CALL, 2,
        recorded=[*RECORDED[:2], reply('<tool_call>{"name": "list_files", "arguments": {"path": "src"}}')]),
    "smolagents puts calls into words": Case([*RECORDED[:2], reply(SMOL_CALL), user("Observation:\n" + LISTING)],
        C.CALLS_AS_TEXT, 2, recorded=RECORDED[:3]),
    "smolagents, some turns later": Case([*RECORDED[:2], reply(SMOL_CALL), user("Observation:\n" + LISTING)],
        C.CALLS_AS_TEXT, 2),
    "a transcript in a user's message": Case(
        [*RECORDED[:2], user("assistant called list_files(path='src', depth=2)")], C.CALLS_AS_TEXT, 2,
        recorded=RECORDED[:3]),
    "a user talks of a tool": Case(
        [*RECORDED[:2], user("Do not use list_files here, src is all there is, at depth 2.")], C.RETRY, 2,
        recorded=RECORDED[:3]),
    "a tool's name inside a word": Case([system(), user("Sum it up."), user("It was computed by hand: 4.")], C.RETRY,
        2, recorded=[system(), user("Sum it up."), call("compute", expression="2+2")]),
    "calls left out": Case(swap(8, reply("I will test."), until=10), C.EDIT, 8),
    # instructions
    "another system prompt": Case(with_text(0, "You are a reviewer. Be strict, and look at style first of all."),
        C.CHANGED_SYSTEM, 0),
    "a system prompt put in": Case([system(), *RECORDED[1:-1]], C.CHANGED_SYSTEM, 0, recorded=RECORDED[1:]),
    "a system prompt left out": Case(RECORDED[1:-1], C.CHANGED_SYSTEM, 0),
    "a system message in the middle": Case([*RECORDED[:2], system("Plan mode is off."), *RECORDED[2:10]],
        C.CHANGED_SYSTEM, 2, recorded=[*RECORDED[:2], system("Plan mode is on: do not edit."), *RECORDED[2:]]),
    # nonces
    "the time in the system prompt": Case([system(SYSTEM_AT.replace("10:31", "10:32")), *RECORDED[1:-1]], C.NONCE, 0,
        recorded=[system(SYSTEM_AT), *RECORDED[1:]]),
    "the day in the system prompt": Case([system(SYSTEM_AT.replace("Monday", "Thurs")), *RECORDED[1:-1]], C.NONCE, 0,
        recorded=[system(SYSTEM_AT), *RECORDED[1:]]),
    "a billing header": Case(
        [system("x-header: version=2.1.325.a1f; entry=cli; cch=0e1f7;\n" + SYSTEM), *RECORDED[1:4]], C.NONCE, 0,
        recorded=[system("x-header: version=2.1.325.a1f; entry=cli; cch=93b2a;\n" + SYSTEM), *RECORDED[1:]]),
    "the clock in a user's message": Case([system(), user("[10:32] " + TASK), *RECORDED[2:6]], C.NONCE, 1,
        recorded=[system(), user("[10:31] " + TASK), *RECORDED[2:]]),
    "the time that a test took": Case(with_text(9, "12 passed in 0.47 seconds"), C.NONCE, 9),
    # edits
    "another question": Case([*RECORDED, user("Now fix the lexer.")], C.EDIT, 11,
        recorded=[*RECORDED, user("Thanks! Now write a changelog."), reply("Done.")]),
    "another number in a question": Case([system(), reply("Hi."), user("Solve task 13")], C.EDIT, 2,
        recorded=[system(), reply("Hi."), user("Solve task 12"), reply("Done.")]),
    "the task itself": Case(with_text(1, TASK.replace("empty", "very long")), C.EDIT, 1,
        "content: 'very long' in place of 'empty'"),
    "the model's words": Case(with_text(2, "Let me see what is there."), C.EDIT, 2),
    "content dropped beside a call": Case(with_text(4, ""), C.EDIT, 4, "was left out"),
    "a reminder put in": Case(swap(4, user("Remember the time."), RECORDED[4]), C.EDIT, 4),
    "camel's last words come before a call without words": Case(
        [*RECORDED[:8], RECORDED[10], {**RECORDED[8], "content": None}, RECORDED[9], user("Thanks!")], C.EDIT, 8,
        recorded=[*RECORDED[:8], {**RECORDED[8], "content": "One more."}, *RECORDED[9:]]),
    "camel's words and calls are two messages": Case(
        [*RECORDED[:2], reply("Let me look."), call("list_files", path="src", depth=2), *RECORDED[3:10]], C.EDIT, 2),
    "results in another order": Case(
        [*RECORDED[:2], RECORDED[2], result("second one of the two results"), result("first one of the two results")],
        C.EDIT, 3,
        recorded=[*RECORDED[:3], *map(result, ("first one of the two results", "second one of the two results")),
                  reply("Done.")]),
}  # fmt: skip


def shared_of(sent: Sequence[Message], recorded: Sequence[Message]) -> int:
    return shared_prefix(*(chain(b"", messages)[1:] for messages in (sent, recorded)))


def cause_of(sent: Sequence[Message], recorded: Sequence[Message], **more: Any) -> Finding:
    return find_cause(sent, recorded, shared_of(sent, recorded), **more)


@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_each_rewrite(name: str) -> None:
    case = CASES[name]
    finding = cause_of(case.sent, case.recorded, recent=case.recent)
    assert (finding.cause, finding.message) == (case.cause, case.message), finding.words
    assert case.words in finding.words
    assert finding.message is None or f"message {finding.message} (" in finding.words


# -- tools


def tool(name: str, description: str = "") -> Message:
    return {"type": "function", "function": {"name": name, "description": description}}


@pytest.mark.parametrize(
    ("sent", "recorded", "words"),
    [
        ([], [tool("a")], "tools left out: a"),
        ([tool("a"), tool("b")], [tool("a")], "new tools: b"),
        ([tool("a")], [tool("a"), tool("b")], "tools left out: b"),
        ([tool("a", "x")], [tool("a", "y")], "changed tools: a"),
        ([tool("b"), tool("a")], [tool("a"), tool("b")], "another order"),
        ([tool("a")], None, "new tools: a"),
    ],
)
def test_changed_tools_are_named(sent: Any, recorded: Any, words: str) -> None:
    assert words in changed_tools(sent, recorded).words
    assert "template variables: enable" in changed_tools(None, None, {"enable": False}, {}).words


# -- properties

WORDS = st.lists(st.sampled_from(["the", "a", "parser", "file", "test", "link", "river", "goes", "over"]), min_size=1)
MESSAGES = st.one_of(
    WORDS.map(lambda words: user(" ".join(words))),
    WORDS.map(lambda words: reply(" ".join(words))),
    WORDS.map(lambda words: result(" ".join(words))),
    WORDS.map(lambda words: call("look", place=" ".join(words))),
)
CONVERSATIONS = st.lists(MESSAGES, min_size=3, max_size=8).map(lambda messages: [system(), user(TASK), *messages])


@given(CONVERSATIONS, st.data())
def test_a_changed_text_is_found_at_its_message(recorded: list[Message], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(recorded) - 2))
    retry = cause_of(recorded[: at + 1], recorded)
    assert (retry.cause, retry.message) == (C.RETRY, None)
    sent = [*recorded[:at], {**recorded[at], "content": "something that nobody has ever said"}, *recorded[at + 1 : -1]]
    finding = cause_of(sent, recorded)
    assert finding.message == at
    allowed = {
        "system": {C.CHANGED_SYSTEM},
        "user": {C.EDIT, C.COMPACTION, C.SUB_AGENT},
        "assistant": {C.EDIT},
        "tool": {C.EDIT, C.TRIMMED_RESULTS},
    }
    assert finding.cause in allowed[str(recorded[at]["role"])], finding
    if at + 1 < len(sent):
        assert finding.cause not in (C.COMPACTION, C.SUB_AGENT), finding


@given(CONVERSATIONS, st.data())
def test_a_removal_is_never_called_an_edit_of_the_system_or_a_call(
    recorded: list[Message], data: st.DataObject
) -> None:
    start = data.draw(st.integers(2, len(recorded) - 2))
    stop = data.draw(st.integers(start + 1, len(recorded) - 1))
    assume(any(message["role"] != "user" for message in recorded[start:stop]))
    sent = [*recorded[:start], *recorded[stop:]]
    shared = shared_of(sent, recorded)
    assume(shared < len(sent))
    finding = find_cause(sent, recorded, shared)
    assert finding.message == shared
    allowed = {C.COMPACTION, C.EDIT, C.RETRY}
    if sent[shared]["role"] == recorded[shared]["role"] == "tool":  # the next result may be the start of this one
        allowed.add(C.TRIMMED_RESULTS)
    assert finding.cause in allowed, finding


@given(st.lists(st.dictionaries(st.text(max_size=4), st.none() | st.text(max_size=9) | st.integers(), max_size=3)))
def test_any_two_conversations_have_a_cause(messages: list[dict[str, Any]]) -> None:
    roles = ["user", "assistant", "tool", "system"]
    unusual = [{**message, "role": roles[at % 4]} for at, message in enumerate(messages)]
    for sent, recorded in ((unusual, RECORDED), (RECORDED, unusual), (unusual, unusual[::-1])):
        if sent and recorded:
            assert cause_of(sent, recorded).words


SPACED = st.lists(st.sampled_from(["a", "bb", "b", "é", " ", "  ", "\n", "b b"]), max_size=8).map("".join)


@given(SPACED, SPACED)
def test_differing_words_are_quoted(new: str, old: str) -> None:
    """Undoing the quoted change gives the old text, and only whole words are quoted."""
    assume(new != old)
    words = changed_words(new, old)
    quotes = [ast.literal_eval(quote) for quote in re.findall(r"'(?:[^'\\]|\\.)*'", words)]
    added, removed = {"new": (quotes[0], ""), "out": ("", quotes[0])}.get(words.split()[-1], (quotes[0], quotes[-1]))
    places = [at for at in range(len(new) + 1) if new.startswith(added, at)]
    assert any(" ".join([new[:at], removed, new[at + len(added) :]]).split() == old.split() for at in places) or (
        any(new[:at] + removed + new[at + len(added) :] == old for at in places)
    ), (words, new, old)


def test_long_texts_cost_no_more_than_their_length() -> None:
    """Two megabytes of one word: a comparison of all pairs of places would not finish."""
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
