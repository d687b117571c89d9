"""The gateway over HTTP: an agent that goes on, one that comes again, and what the record has of them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy
from tokentrace.engines import SamplingParams, VLLMEngine

openai = lazy("openai")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server


def client(served: Served, session: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="none", max_retries=0)


def spoken(message: Any) -> dict[str, Any]:
    return dict(message.model_dump(exclude_none=True))


def test_a_conversation_that_goes_on_is_one_stream(served: Served) -> None:
    agent = client(served, "goes-on")
    messages: list[Any] = [{"role": "user", "content": "What is 17 * 23?"}]
    seen = len(served.prompts)
    first = agent.chat.completions.create(model="pocket", messages=messages, tools=TOOLS)
    reply = first.choices[0].message
    assert reply.tool_calls
    messages += [spoken(reply), {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "391"}]
    agent.chat.completions.create(model="pocket", messages=messages, tools=TOOLS)
    state = served.state("goes-on")
    assert state["rows"] == 1
    one, two = served.prompts[seen:]
    row = served.run(_stream(served, "goes-on"))
    assert row[: len(one)] == one
    assert row[: len(two)] == two
    assert [turn["cause"] for turn in state["tree"]] == [None, None]
    assert state["tree"][1]["reused"] == state["tree"][0]["stop"]


async def _stream(served: Served, session: str) -> list[int]:
    live = await served.app.gateway.sessions.get(session)
    return [int(each) for each in live.session.trajectory.stream(0)]


def test_the_same_request_is_another_sample_unless_it_has_the_same_key(served: Served) -> None:
    body = {"model": "pocket", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    path = "/sessions/again/v1/chat/completions"
    _, first = served.call("POST", path, body)
    _, second = served.call("POST", path, body)
    assert first["id"] != second["id"]
    state = served.state("again")
    assert state["turns"] == 2
    assert state["tree"][1]["cause"]["cause"] == "retry"
    keyed = {"idempotency-key": "k1"}
    _, third = served.call("POST", path, body, keyed)
    _, fourth = served.call("POST", path, body, keyed)
    assert third == fourth
    assert served.state("again")["turns"] == 3


def test_a_retry_without_a_key_never_gets_the_answer_of_another_request(served: Served) -> None:
    """The first attempt of a retry may have failed on its way: what this gateway has seen was then another request."""
    body = {"model": "pocket", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
    path = "/sessions/lost/v1/chat/completions"
    answers = [served.call("POST", path, body, {"x-stainless-retry-count": count})[1] for count in "0112"]
    state = served.state("lost")
    assert len({answer["id"] for answer in answers}) == state["turns"] == 4
    assert [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]] == [None, "retry", "retry", "retry"]


def test_prompts_of_ids_are_recorded_by_their_ids(served: Served) -> None:
    async def rollout() -> tuple[list[int], Any]:
        engine = await VLLMEngine.connect(f"{served.url}/sessions/ids", vocab_size=4096)
        try:
            seen = len(served.prompts)
            first = await engine.generate([5, 6, 7], SamplingParams(8))
            second = await engine.generate([5, 6, 7, *first.ids.tolist(), 9], SamplingParams(8))
            streamed = [delta async for delta in engine.stream([5, 6, 8], SamplingParams(4))]
        finally:
            await engine.close()
        assert served.prompts[seen:] == [[5, 6, 7], [5, 6, 7, *first.ids.tolist(), 9], [5, 6, 8]]
        whole = np.concatenate([delta.ids for delta in streamed])
        return [5, 6, 7, *first.ids.tolist(), 9, *second.ids.tolist()], whole.tolist()

    stream, third = asyncio.run(rollout())
    state = served.state("ids")
    last = state["tree"][-2:]
    assert last[0]["cause"] is None
    assert last[1]["cause"]["cause"] == "edit"
    live = served.run(served.app.gateway.sessions.get("ids"))
    assert live.session.trajectory.stream(last[0]["branch"]).tolist() == stream
    assert live.session.trajectory.stream(last[1]["branch"]).tolist() == [5, 6, 8, *third]


@pytest.mark.parametrize(
    ("echoed", "cause"), [(None, None), ("as it was", None), ("I guess that it is five.", "edit")], ids=str
)
def test_reasoning_may_be_left_out_but_not_rewritten(served: Served, echoed: str | None, cause: str | None) -> None:
    session = f"thought-{cause}-{echoed is None}"
    path = f"/sessions/{session}/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "What is 17 * 23?"}]
    reply = served.call("POST", path, {"model": "m", "messages": messages, "tools": TOOLS})[1]["choices"][0]["message"]
    assert reply["reasoning_content"]
    thought = f"  {reply['reasoning_content']}\n" if echoed == "as it was" else echoed
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "391"}
    again = [*messages, {**reply, "reasoning_content": thought}, answer]
    assert served.call("POST", path, {"model": "m", "messages": again, "tools": TOOLS})[0] == 200
    last = served.state(session)["tree"][-1]
    assert (last["cause"] or {}).get("cause") == cause
    assert (last["goes_on_from"] is None) == (cause is not None)


def test_samples_of_one_prompt_share_all_of_it(served: Served) -> None:
    path = "/sessions/shared/v1/chat/completions"
    messages: list[Any] = [{"role": "user", "content": "What is 17 * 23?"}]
    body = {"model": "m", "messages": messages, "tools": TOOLS, "n": 3}
    reply = served.call("POST", path, body)[1]["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "391"} for call in reply.get("tool_calls", [])]
    again = {**body, "messages": [*messages, reply, *(results or [{"role": "user", "content": "Sure?"}])], "n": 1}
    for _ in range(3):
        assert served.call("POST", path, again)[0] == 200
    state = served.state("shared")
    sampled = sum(turn["stop"] - turn["start"] for turn in state["tree"])
    prompts = state["tree"][0]["start"] + state["tree"][3]["start"] - state["tree"][0]["stop"]
    assert state["tokens"] == sampled + prompts
    assert len(served.rows("shared")) == state["rows"] == 5


def conversation(served: Served, session: str, questions: list[str]) -> list[Any]:
    """What an agent has after some questions, each answered by the model, with a tool where it calls one."""
    path, messages = f"/sessions/{session}/v1/chat/completions", []
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(4):
            body = {"model": "m", "messages": messages, "tools": TOOLS}
            messages.append(served.call("POST", path, body)[1]["choices"][0]["message"])
            if not messages[-1].get("tool_calls"):
                break
            for call in messages[-1]["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "391"})
    return messages


@pytest.mark.parametrize("which", [0, 1, -1])
def test_reasoning_of_any_turn_may_not_be_rewritten(served: Served, which: int) -> None:
    session = f"thoughts{which}"
    messages = conversation(served, session, ["What is 17 * 23?", "And 5 + 6?", "And 7 + 8?"])
    spoken = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spoken) > 2
    at = spoken[which]
    messages[at] = {**messages[at], "reasoning_content": "Something else entirely."}
    body = {"model": "m", "messages": [*messages, {"role": "user", "content": "Thanks."}], "tools": TOOLS}
    assert served.call("POST", f"/sessions/{session}/v1/chat/completions", body)[0] == 200
    last = served.state(session)["tree"][-1]
    assert (last["cause"]["cause"], last["cause"]["message"]) == ("edit", at)


def test_the_last_words_of_reasoning_are_reasoning_left_out(served: Served) -> None:
    """As a client keeps them that takes the last piece of a stream for the whole."""
    messages = conversation(served, "last-words", ["What is 17 * 23?"])
    spoken = [at for at, message in enumerate(messages) if message.get("reasoning_content")]
    for at in spoken:
        messages[at] = {**messages[at], "reasoning_content": messages[at]["reasoning_content"][-4:]}
    body = {"model": "m", "messages": [*messages, {"role": "user", "content": "And 5 + 6?"}], "tools": TOOLS}
    assert served.call("POST", "/sessions/last-words/v1/chat/completions", body)[0] == 200
    state = served.state("last-words")
    assert state["rows"] == 1
    assert state["tree"][-1]["repairs"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_a_stop_text_ended_keeps_what_the_engine_said_of_it(served: Served, stream: bool) -> None:
    path = f"/sessions/stopped-{stream}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "What is 17 * 23?"}], "stop": [" "], "stream": stream}
    assert served.call("POST", path, body)[0] == 200
    [turn] = served.state(f"stopped-{stream}")["tree"]
    live = served.run(served.app.gateway.sessions.get(f"stopped-{stream}"))
    [recorded] = live.session.trajectory.turns(0)
    if turn["stopped_by"] is not None:
        assert recorded.finish_reason == "abort"
    assert recorded.logprobs_kind == "processed"
    assert recorded.version == 0
    assert recorded.cached_tokens is not None
    [row] = served.rows(f"stopped-{stream}")
    assert row["tokenizer"]
    assert row["template"]


def test_any_name_of_a_field_that_nobody_reads_fits_into_a_header(served: Served) -> None:
    """The turn is stored by then: the answer must not fail over the header that tells of the field."""
    names = [*map(chr, range(32)), "\x7f", "\x85", "é", "\u2028", "🌞", "a" * 2000]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **{f"x{name}y": 1 for name in names}}
    request = urllib.request.Request(f"{served.url}/sessions/names/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
        ignored = answer.headers["x-tokentrace-ignored"]
    assert "x?y" in ignored
    assert ignored.isascii()
    assert ignored.isprintable()


def test_what_nobody_reads_is_refused_and_errors_have_an_id(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinkin": False}}
    status, answer = served.call("POST", "/sessions/typo/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs.enable_thinkin")
    status, answer = served.call("POST", "/sessions/typo/v1/v1/chat/completions", body)
    assert status == 404
    assert "twice" in answer["error"]["message"]
    status, answer = served.call("POST", "/sessions/typo/v1/messages", {"messages": []})
    assert (status, bool(answer["request_id"])) == (400, True)
