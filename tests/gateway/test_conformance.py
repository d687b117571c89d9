"""Scripted agents: whatever they do to the history, the tokens that the engine saw are recorded."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import user
from tests.gateway.recorded import TOOLS, Bench, Message, results, say, use
from tests.support import FULL, examples
from tokentrace.conversation.responses import from_responses

FAMILIES = ["qwen3", "glm-4.5", "gpt-oss", "deepseek-v3.1", "kimi-k2", "llama-3.1"]

SYSTEM: Message = {"role": "system", "content": "You are a helpful agent. Answer in few words."}
TASK: Message = {"role": "user", "content": "What is the weather like in Zürich, today and tomorrow?"}
SUNNY = "sunny  \n, 21 degrees, a light breeze from the south; humidity 40 %, no rain expected before the evening\n"


Echo = Callable[[Message], Message]


def _arguments(write: Callable[[Any], Any]) -> Echo:
    def echo(message: Message) -> Message:
        calls = [
            {**call, "function": {**call["function"], "arguments": write(json.loads(call["function"]["arguments"]))}}
            for call in message.get("tool_calls") or ()
        ]
        return {**message, "tool_calls": calls} if calls else message

    return echo


def _without(*names: str) -> Echo:
    return lambda message: {name: value for name, value in message.items() if name not in names}


def _as_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message.get("content") or ""}]}


def _silent(message: Message) -> Message:
    return message if message.get("content") else {k: v for k, v in message.items() if k != "content"}


def _thinking_aloud(message: Message) -> Message:
    """As Qwen Code repeats a turn over Responses: its reasoning is one more message item, before the others."""
    texts = [message.get("reasoning_content") or "", message.get("content") or ""]
    items = [{"role": "assistant", "content": [{"type": "output_text", "text": text}]} for text in texts if text]
    calls = [{"type": "function_call", "call_id": call["id"], **call["function"]}
             for call in message.get("tool_calls") or ()]  # fmt: skip
    [echo] = from_responses([*items, *calls])
    return echo


ECHOES: dict[str, Echo] = {
    "openai-agents": _without("reasoning_content"),
    "pydantic-ai": _arguments(lambda value: json.dumps(value, separators=(",", ":"))),
    "langchain": lambda message: _without("reasoning_content")(
        _arguments(lambda value: json.dumps(value, indent=1))(message)
    ),
    "strands": lambda message: _as_parts(_without("reasoning_content")(message)),
    "inspect-ai": lambda message: {**_arguments(json.dumps)(message), "content": "\n" + (message.get("content") or "")},
    "autogen": lambda message: {**_without("reasoning_content")(message), "name": "assistant"},
    "qwen-agent": lambda message: {**message, "extra": {"model_service_info": 1}, "id": "7"},
    "mini-swe-agent": lambda message: {**message, "provider_specific_fields": {"refusal": None}, "annotations": []},
    "claude code": _arguments(lambda value: dict(reversed(value.items()))),
    "qwen code": _thinking_aloud,
    "no content beside calls": _silent,
    "stripped": lambda message: {**message, "content": (message.get("content") or "").strip() or None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_append_only_agent_gives_one_row_however_it_echoes(family: str) -> None:
    at = FAMILIES.index(family)
    for name, echo in list(ECHOES.items())[slice(None) if FULL or not at else slice(at % 4, None, 4)]:
        bench = Bench(family)
        messages: list[Message] = [SYSTEM, TASK]
        script = [
            use("get_weather", "  Let me look.\n", "I should call.", city="Zürich", day="today"),
            use("get_weather", "", "And tomorrow.", day="to\nmorrow", city='"Zürich"'),
            say("Sunny on both days.", "That is all."),
            say("You are welcome.", "They said thanks."),
        ]
        for turn in script:
            reply = bench.ask(messages, turn)
            assert bool(reply.get("tool_calls")) is bool(turn.get("tool_calls")), (name, reply)
            messages = [*messages, echo(reply)]
            messages += results(reply, SUNNY) if reply.get("tool_calls") else [user("Thank you!")]
        assert bench.causes == [None] * 4, (name, [turn.cause for turn in bench.turns])
        bench.check(rows=1)


def conversation(bench: Bench, calls: int = 3) -> list[Message]:
    messages: list[Message] = [SYSTEM, TASK]
    for day in range(calls):
        reply = bench.ask(
            messages, use("get_weather", f"Day {day}.", "I should call.", city="Zürich", day=f"day {day}")
        )
        messages += [reply, *results(reply, SUNNY)]
    return [*messages, bench.ask(messages, say("Sunny on all days."))]


@pytest.fixture(params=["qwen3", "gpt-oss"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def test_compaction(bench: Bench) -> None:
    messages = conversation(bench)
    summary = user("Here is a summary of the conversation to date:\n\nIt is sunny in Zürich on three days.")
    compacted = [SYSTEM, summary]
    reply = bench.ask(compacted, use("get_weather", city="Bern", day="today"))
    bench.ask([*compacted, reply, *results(reply, SUNNY)], say("Sunny there, too."))
    assert bench.causes == [None] * 4 + ["compaction", None]
    assert bench.turns[4].cause.message == 1  # type: ignore[union-attr]
    bench.ask([*messages, user("And in Bern?")], say("Sunny."))
    assert bench.causes[-1] is None, "the first conversation can still be gone on with"
    bench.check(rows=2)


def test_parallel_sub_agents_in_one_session(bench: Bench) -> None:
    starts = [[SYSTEM, TASK]]
    for place in ("the mountains of Norway", "the islands of Greece"):
        starts.append([{"role": "system", "content": f"You know all about {place}."}, user(f"Is it cold in {place}?")])
    agents = [list(start) for start in starts]
    for day in ("today", "tomorrow", "on Friday"):
        for messages in agents:
            reply = bench.ask(messages, use("get_weather", reasoning="I should call.", city="there", day=day))
            messages += [reply, *results(reply, f"{SUNNY} {day}")]
    assert bench.causes == [None, "sub_agent", "sub_agent"] + [None] * 6
    bench.check(rows=3)


def test_retries(bench: Bench) -> None:
    messages = conversation(bench)[:-1]
    bench.ask(messages, say("Sunny throughout."))
    bench.ask(messages[:4], say("Sunny, I say."))
    bench.ask([*messages, user("That was not valid JSON. Try again, please.")], say("{}"))
    assert bench.causes == [None] * 4 + ["retry"] * 3
    bench.check(rows=4)


def test_changed_tools(bench: Bench) -> None:
    """For example, autogen's reflection sends no tools."""
    reply = bench.ask([SYSTEM, TASK], use("get_weather", city="Zürich", day="today"))
    bench.ask([SYSTEM, TASK, reply, *results(reply, SUNNY)], say("Sunny."), tools=None)
    bench.ask([SYSTEM, TASK, reply, *results(reply, SUNNY)], say("Sunny."), tools=TOOLS[:1])
    assert bench.causes == [None, "changed_tools", "changed_tools"]
    reasons = [turn.cause.words for turn in bench.turns if turn.cause]
    assert reasons[1] == "the same conversation: tools left out: read_file"
    bench.check(rows=3)


FIELDS = st.sampled_from(["name", "mood", "is_error", "prefix", "tools", "reasoning_content", "weight"])


@pytest.mark.parametrize("family", ["qwen3", "kimi-k2"])
@settings(max_examples=examples(60))
@given(
    at=st.integers(0, 3),
    field=FIELDS,
    value=st.sampled_from(["x", "Ann Bo", True]),
    named=st.booleans(),
    more=st.booleans(),
)
def test_a_field_separates_two_histories_only_if_it_changes_tokens(
    family: str, at: int, field: str, value: Any, named: bool, more: bool
) -> None:
    """A reply keeps its tokens though it is named later, as with Semantic Kernel."""
    value = str(value) if field in ("name", "reasoning_content") else value
    bench = Bench(family)
    plain = [SYSTEM, {**TASK, **({"name": "Ann"} if named else {})}, say("In words?"), user("Yes.")]
    changed = [{**message, field: value} if place == at else message for place, message in enumerate(plain)]
    reply = bench.ask(plain, say("Sunny."))
    bench.ask([*changed, *([{**reply, "name": "Host"}, user("Sure?")] if more else [])], say("Sure."))
    prompts = [bench.renderer.silent().render_ids(rows, tools=TOOLS, add_generation_prompt=True)
               for rows in (plain, changed)]  # fmt: skip
    turn, same = bench.turns[-1], prompts[0] == prompts[1]
    assert (turn.base == 0) is (same and more), turn.cause
    assert same or (turn.cause is not None and turn.cause.message == at and f"{field}: " in turn.cause.words)


def test_reasoning_repeated_as_content_is_a_repair_only_if_the_remaining_content_is_the_same(bench: Bench) -> None:
    reply = bench.ask([SYSTEM, TASK], say("Sunny.", "It is summer."))
    bench.ask([SYSTEM, TASK, _thinking_aloud(reply), user("Sure?")], say("Sure."))
    assert "message 2: reasoning repeated as content" in bench.turns[1].repairs
    other = [{"type": "text", "text": text} for text in ("It is summer.", "Rainy.")]
    bench.ask([SYSTEM, TASK, {"role": "assistant", "content": other}, user("So?")], say("Sunny."))
    assert bench.causes == [None, None, "edit"]
    assert "'It is summer.Rainy.' in place of" in bench.turns[2].cause.words  # type: ignore[union-attr]
    bench.check(rows=2)


def test_replies_that_differ_in_reasoning_alone_are_told_apart_or_not_guessed(bench: Bench) -> None:
    replies = [bench.ask([SYSTEM, TASK], say("Sunny.", thought)) for thought in ("It is summer.", "I looked outside.")]
    bench.ask([SYSTEM, TASK, replies[1], user("Sure?")], say("Sure."))
    assert bench.turns[2].base == 1, "the reasoning says which it was"
    bench.ask([SYSTEM, TASK, _without("reasoning_content")(replies[0]), user("Really?")], say("Really."))
    assert bench.turns[3].base is None
    assert bench.causes == [None, "retry", None, "ambiguous"]
    bench.check(rows=3)


def test_equal_calls_are_told_apart_by_their_ids(bench: Bench) -> None:
    replies = [bench.ask([SYSTEM, TASK], use("get_weather", "", why, city="Zürich", day="today")) for why in ("a", "b")]
    for at in (1, 0):
        reply = _without("reasoning_content")(replies[at])
        bench.ask([SYSTEM, TASK, reply, *results(reply, SUNNY)], say("Sunny."))
        assert bench.turns[-1].base == at
    bench.check(rows=2)


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda thought: None, None),
        (lambda thought: f"  {thought}\n", None),
        (lambda thought: thought[-4:], None),  # some clients keep only the last piece of a stream
        (lambda thought: "Something else entirely.", "edit"),
    ],
)
def test_reasoning_may_be_left_out_but_not_rewritten(which: int, change: Any, cause: str | None) -> None:
    bench = Bench("qwen3")
    messages = conversation(bench)
    at = [at for at, message in enumerate(messages) if message.get("reasoning_content")][which]
    messages[at] = {**messages[at], "reasoning_content": change(messages[at]["reasoning_content"])}
    bench.ask([*messages, user("Thanks.")], say("You are welcome."))
    assert bench.causes == [None] * 4 + [cause]
    assert cause is None or bench.turns[-1].cause.message == at  # type: ignore[union-attr]
    bench.check(rows=1 if cause is None else 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"content": " The answer is 7. "},
        {"reasoning_content": "Other."},
        {"tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": '{"day": "1", "city": "Bern"}'}}]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_replies_that_the_agent_wrote_itself_are_compared_exactly(changed: Any) -> None:
    bench = Bench("qwen3")
    call = {"id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Bern", "day": "1"}'}}
    message = {"role": "assistant", "content": "The answer is 7.", "reasoning_content": "Easy.", "tool_calls": [call]}
    start = [TASK, message, {"role": "tool", "tool_call_id": "a", "content": "7"}]
    reply = bench.ask(start, say("Eleven."))
    start[1] = {**message, **changed}
    bench.ask([*start, reply, TASK], say("Sunny."))
    assert (bench.turns[-1].base, bench.causes[-1]) == (None, "edit")
    assert bench.prompts[-1] == bench.renderer.render_ids(
        [*start, reply, TASK], tools=TOOLS, add_generation_prompt=True
    )


def test_a_history_that_was_rendered_anew_continues_though_reasoning_is_left_out_later() -> None:
    """Some agents send reasoning back with the newest reply only."""
    bench, messages = Bench("qwen3"), [TASK]
    for turn in range(6):
        reply = bench.ask(messages, use("get_weather", "", f"Thought {turn}.", city="Bern", day=str(turn)))
        messages = [*map(_without("reasoning_content"), messages), reply, *results(reply, SUNNY)]
        if turn == 2:
            messages[0] = user("Summary: the weather was asked for. Go on.")
    assert sum(cause is not None for cause in bench.causes) == 1, bench.causes


def test_results_are_told_apart_by_the_agents_call_ids_also_after_a_restart() -> None:
    bench = Bench("qwen3")
    calls = [{"type": "function", "function": {"name": "read_file", "arguments": {"path": path}}} for path in "ab"]
    reply = bench.ask([TASK], {"role": "assistant", "content": "", "tool_calls": calls})
    renamed = [{**call, "id": f"mine{at}"} for at, call in enumerate(reply["tool_calls"])]
    answers = [{"role": "tool", "tool_call_id": f"mine{at}", "content": f"result {at}"} for at in (1, 0)]
    messages = [TASK, {**reply, "tool_calls": renamed}, *answers]
    done = bench.ask(messages, say("Done."))
    swapped = [{**answers[0], "tool_call_id": "mine0"}, {**answers[1], "tool_call_id": "mine1"}]
    bench.check(rows=1)
    for session in (bench.session, bench.replayed()):
        continued = session.place(bench.conversation([*messages, done, user("Thanks.")]))
        assert continued.base is not None
        assert continued.base.number == 1
        swapped_order = session.place(bench.conversation([*messages[:2], *swapped, done, TASK]))
        assert swapped_order.base is not None
        assert swapped_order.base.number == 0
