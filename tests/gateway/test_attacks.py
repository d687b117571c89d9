"""What an attacker tried on the gateway: matches that would be false, variables that take over, budgets, sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.server import TOOLS, Served, gateway_server
from tokentrace import create_renderer
from tokentrace.engines import Sampled, ScriptedEngine
from tokentrace.pocket import POCKET

ASK = {"role": "user", "content": "What is 3 + 4?"}
RENDERER = create_renderer(POCKET)


def says(text: str, **more: Any) -> Callable[[], ScriptedEngine]:
    ids = RENDERER.tokenizer.encode(text).tolist()
    return lambda: ScriptedEngine(lambda prompt, sampling: ids, piece=1, **more)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server


def post(served: Served, session: str, body: dict[str, Any], api: str = "chat/completions") -> tuple[int, Any]:
    return served.call("POST", f"/sessions/{session}/v1/{api}", {"model": "m", **body})


@pytest.mark.parametrize(
    "changed",
    [
        {"content": " The answer is 7. "},
        {"reasoning_content": "Other."},
        {"tool_calls": [{"id": "a", "function": {"name": "compute", "arguments": '{"b": 1, "a": 2}'}}]},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_words_that_the_agent_put_into_the_models_mouth_count_as_written(served: Served, changed: Any) -> None:
    session = f"few-shot-{next(iter(changed))}"
    call = {"id": "a", "function": {"name": "compute", "arguments": '{"a": 2, "b": 1}'}}
    shown = {"role": "assistant", "content": "The answer is 7.", "reasoning_content": "Easy.", "tool_calls": [call]}
    start = [
        ASK,
        shown,
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "user", "content": "And 5 + 6?"},
    ]
    reply = post(served, session, {"messages": start, "tools": TOOLS})[1]["choices"][0]["message"]
    start[1] = {**shown, **changed}
    assert post(served, session, {"messages": [*start, reply, ASK], "tools": TOOLS})[0] == 200
    last = served.state(session)["tree"][-1]
    assert (last["goes_on_from"], last["cause"]["cause"]) == (None, "edit")
    fresh = create_renderer(POCKET).render_ids([*start, reply, ASK], tools=TOOLS, add_generation_prompt=True)
    assert served.prompts[-1] == fresh


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_variables_do_not_replace_what_a_request_says(served: Served, name: str) -> None:
    body = {"messages": [ASK], "chat_template_kwargs": {name: [{"role": "user", "content": "Other"}]}}
    status, answer = post(served, "replace", body)
    assert (status, answer["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


def test_variables_of_a_request_spell_no_control_token() -> None:
    template = (
        "{{ messages[0].content }}{{ greeting }}<|end|>{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    renderer = create_renderer(POCKET, "default", chat_template=template)
    with gateway_server(renderer=renderer) as served:
        for value, wanted in (("hello", 200), ("a<|end|>b", 400), ({"k<|turn|>": 1}, 400), (["<|end|>"], 400)):
            body = {"messages": [ASK], "chat_template_kwargs": {"greeting": value}, "max_tokens": 3}
            assert post(served, "spell", body)[0] == wanted, value


def calls_twice() -> ScriptedEngine:
    """An engine that calls the tool twice, and then says that it is done."""
    calls = [{"type": "function", "function": {"name": "compute", "arguments": {"formula": at}}} for at in "12"]
    rendered = RENDERER.render([ASK, {"role": "assistant", "content": "", "tool_calls": calls}], tools=TOOLS)
    twice = rendered.ids[rendered.mask].tolist()
    done = RENDERER.tokenizer.encode("Done.").tolist() + RENDERER.get_stop_token_ids()[:1]
    return ScriptedEngine(lambda prompt, sampling: done if len(prompt) > len(rendered.ids) else twice)


def test_a_session_read_again_knows_the_agents_own_ids(tmp_path: Path) -> None:
    """Results are told apart by the ids that the agent gave the calls, after a restart as before."""
    place = str(tmp_path / "store.db")
    with gateway_server(calls_twice, store=place) as served:
        reply = post(served, "ids", {"messages": [ASK], "tools": TOOLS})[1]["choices"][0]["message"]
        assert len(reply["tool_calls"]) == 2
        own = [{**call, "id": f"mine{at}"} for at, call in enumerate(reply["tool_calls"])]
        results = [{"role": "tool", "tool_call_id": f"mine{at}", "content": f"result {at}"} for at in (1, 0)]
        messages = [ASK, {**reply, "tool_calls": own}, *results]
        done = post(served, "ids", {"messages": messages, "tools": TOOLS})[1]["choices"][0]["message"]
    with gateway_server(calls_twice, store=place) as served:
        again = [*messages, done, {"role": "user", "content": "Thanks."}]
        assert post(served, "ids", {"messages": again, "tools": TOOLS})[0] == 200
        state = served.state("ids")
        assert (state["rows"], state["tree"][-1]["goes_on_from"]) == (1, 1)
        swapped = [
            *messages[:2],
            {**results[0], "tool_call_id": "mine0"},
            {**results[1], "tool_call_id": "mine1"},
            done,
        ]
        assert post(served, "ids", {"messages": [*swapped, ASK], "tools": TOOLS})[0] == 200
        assert served.state("ids")["tree"][-1]["goes_on_from"] == 0


def test_a_stop_text_cuts_what_the_engine_told_of_each_token() -> None:
    ids = RENDERER.tokenizer.encode("one two STOP three four").tolist()
    told = [[at] for at in range(len(ids))]
    sampled = Sampled(ids, [-0.5] * len(ids), {"routed_experts": told})
    with gateway_server(lambda: ScriptedEngine(lambda prompt, sampling: sampled, piece=0)) as served:
        status, answer = post(served, "experts", {"messages": [ASK], "stop": ["STOP"]})
        assert status == 200, answer
        [row] = served.rows("experts")
        assert sum(row["loss_mask"]) == served.state("experts")["sampled"] < len(ids)


def test_an_answer_is_not_continued_behind_its_stop_text() -> None:
    with gateway_server(says("The sum is 4. Observation: none")) as served:
        reply = post(served, "behind", {"messages": [ASK], "stop": ["Observation:"]})[1]["choices"][0]["message"]
        assert reply["content"] == "The sum is 4. "
        body = {"messages": [ASK, reply], "continue_final_message": True, "add_generation_prompt": False}
        assert post(served, "behind", body)[0] == 200
        wanted = create_renderer(POCKET).render([ASK, reply], continue_final_message=True)
        assert served.prompts[-1] == wanted.token_ids


def test_what_cannot_be_recorded_is_refused_before_it_is_sampled(served: Served) -> None:
    path = "/sessions/whole/inference/v1/generate"
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 60}}
    sampled = served.call("POST", path, body)[1]["choices"][0]
    seen = len(served.prompts)
    status, answer = served.call("POST", path, {**body, "token_ids": [5, 6, 7, *sampled["token_ids"]]})
    if sampled["finish_reason"] == "stop":
        assert (status, len(served.prompts)) == (400, seen), answer
    else:
        assert status == 200


def test_a_history_that_was_rendered_anew_goes_on_though_reasoning_is_left_out_later(served: Served) -> None:
    """As agents do that send reasoning back with the newest reply alone."""
    path = "/sessions/anew/v1/chat/completions"
    messages: list[Any] = [ASK]
    for turn in range(6):
        body = {"model": "m", "messages": messages, "tools": TOOLS}
        reply = served.call("POST", path, body)[1]["choices"][0]["message"]
        calls = reply.get("tool_calls") or []
        more = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
        older = [{key: value for key, value in each.items() if key != "reasoning_content"} for each in messages]
        messages = [*older, reply, *(more or [{"role": "user", "content": "And 5 + 6?"}])]
        if turn == 2:
            messages[0] = {"role": "user", "content": "Summary: sums were asked for. What is 3 + 4?"}
    causes = [turn["cause"] and turn["cause"]["cause"] for turn in served.state("anew")["tree"]]
    assert sum(cause is not None for cause in causes) == 1, causes


def test_reasoning_that_is_rewritten_in_a_part_is_not_taken_for_what_was_sampled(served: Served) -> None:
    """It is no echo, and as a message of its own it has a part that OpenAI's messages do not have."""
    reply = post(served, "part", {"messages": [ASK]})[1]["choices"][0]["message"]
    said = [{"type": "thinking", "thinking": "Zebras."}, {"type": "text", "text": reply["content"] or ""}]
    calls = {"tool_calls": reply["tool_calls"]} if reply.get("tool_calls") else {}
    echo = {"role": "assistant", "content": said, **calls}
    status, answer = post(served, "part", {"messages": [ASK, echo, {"role": "user", "content": "Thanks."}]})
    assert (status, answer["error"]["param"]) == (400, "messages.1.content.0")
    assert served.state("part")["turns"] == 1
