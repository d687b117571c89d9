"""References to items of stored responses, as Vercel's AI SDK sends them: the recorded turn is gone on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.server import Served, gateway_server
from tests.gateway.test_responses_app import ASK, agent_of, check, items_of, result_of, without_ids
from tests.lazy import lazy
from tokentrace.gateway.gateway import resolved
from tokentrace.gateway.problems import RequestError

openai = lazy("openai")

CALL: Any = {"id": "c1", "type": "function", "function": {"name": "compute", "arguments": "{}"}}
REPLY: Any = {"role": "assistant", "content": "Well.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
EMPTY: Any = {"role": "assistant", "content": ""}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def mixed(item: dict[str, Any]) -> dict[str, Any]:
    return without_ids(item) if item["type"] == "function_call" else reference(item)


WAYS: Any = {"references": reference, "calls inline": mixed, "without a type": lambda item: {"id": item["id"]}}


@pytest.mark.parametrize(("way", "stream"), [*((way, False) for way in WAYS), ("references", True)])
def test_items_that_are_referred_to_are_gone_on_from(served: Served, way: str, stream: bool) -> None:
    session = f"refers-{list(WAYS).index(way)}-{stream}"
    seen = len(served.prompts)
    with agent_of(served, session, stream=stream) as agent:
        first = agent.ask([ASK])
        told = [ASK, *map(WAYS[way], items_of(first)), result_of(first)]
        second = agent.ask(told)
        agent.ask([*told, *map(reference, items_of(second)), {"role": "user", "content": "And 3 + 4?"}])
    assert {item.type for item in first.output} >= {"reasoning", "function_call"}
    check(served, session, served.prompts[seen:])
    messages = served.run(_conversation(served, session))
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]


async def _conversation(served: Served, session: str) -> Any:
    live = await served.app.gateway.sessions.get(session)
    return live.session.conversation(len(live.session.turns) - 1)


def test_references_that_stand_for_nothing_here_are_refused_by_id(served: Served) -> None:
    with agent_of(served, "another") as other, agent_of(served, "refers-to-nothing") as agent:
        elsewhere = other.ask([ASK]).output[0].id
        unstored = agent.ask([ASK], store=False).output[0].id
        for id in (elsewhere, unstored, "rs_nobody_0", "rs_foreign"):
            with pytest.raises(openai.BadRequestError, match=id) as refused:
                agent.ask([ASK, {"type": "item_reference", "id": id}])
            assert refused.value.param in ("input", "input.1")
    assert len(served.state("refers-to-nothing")["tree"]) == 1


def test_only_what_is_referred_to_is_added() -> None:
    assert resolved(EMPTY, REPLY, ["rs_a_0", "msg_a_1", "fc_a_2"]) == REPLY
    assert resolved(EMPTY, REPLY, ["msg_a_1"]) == {"role": "assistant", "content": "Well."}
    edited = {**CALL, "function": {"name": "compute", "arguments": '{"formula": "1"}'}}
    added = {**CALL, "id": "c2"}
    inline = {**EMPTY, "tool_calls": [edited, added]}
    assert resolved(inline, REPLY, ["rs_a_0"]) == {**inline, "reasoning_content": "Hm."}
    assert resolved(inline, REPLY, ["fc_a_2"])["tool_calls"] == [edited, added]
    assert resolved({**EMPTY, "content": " So."}, REPLY, ["msg_a_1"])["content"] == "Well. So."
    for item in ("rs_a_0", "fc_a_1"):
        with pytest.raises(RequestError, match=item):
            resolved(EMPTY, {"role": "assistant", "content": "Well."}, [item])
