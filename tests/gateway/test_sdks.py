"""OpenAI's and Anthropic's own clients: every way that they have to request an answer, streamed or not."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gateway.real_agents.scripted import Stage, Story, StoryEngine, Turn, check_rows
from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

anthropic = lazy("anthropic")
openai = lazy("openai")

STORY = Story(
    (
        Turn("  Let me look.\n", [("compute", '{"formula":  "17*23" }'), ("compute", '{"formula":"Zürich"}')], "Hm."),
        Turn("\n It is 391. 🌞", reasoning="Both are known."),
    )
)
QUESTION = "What is 17*23?"
RESULTS = ("391", "not a formula  \n")
COMPUTE: Any = TOOLS[0]["function"]
ANTHROPIC_TOOLS: Any = [{**COMPUTE, "input_schema": COMPUTE["parameters"]}]
ANTHROPIC_TOOLS[0].pop("parameters")
CHAT: Any = {"model": "pocket", "tools": TOOLS}
RESPONSES: Any = {"model": "pocket", "tools": [{"type": "function", **COMPUTE, "strict": False}]}


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(create_renderer(POCKET), "<|end|>")


@pytest.fixture(scope="module")
def served(stage: Stage) -> Iterator[Served]:
    with gateway_server(lambda: StoryEngine(stage), stage.renderer) as server:
        yield server


def chat_helper(client: Any, messages: Any) -> Any:
    with client.chat.completions.stream(**CHAT, messages=messages) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def chat_chunks(client: Any, messages: Any) -> Any:
    """Chunks assembled by hand, as agents without a helper do."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage, more = None, {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(**CHAT, messages=messages, **more):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(message["tool_calls"]):
                    empty = {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                    message["tool_calls"].append(empty)
                function = message["tool_calls"][call.index]["function"]
                function["name"] += call.function.name or ""
                function["arguments"] += call.function.arguments or ""
    assert usage is not None
    assert usage.completion_tokens
    return openai.types.chat.ChatCompletionMessage.model_validate(message)


def response_helper(client: Any, input: Any, **more: Any) -> Any:
    with client.responses.stream(**RESPONSES, input=input, **more) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text
    return final


def response_events(client: Any, input: Any, **more: Any) -> Any:
    events = client.responses.create(**RESPONSES, stream=True, input=input, **more)
    [done] = [event.response for event in events if event.type == "response.completed"]
    return done


def message_create(client: Any, messages: Any) -> Any:
    return client.messages.create(model="pocket", max_tokens=500, tools=ANTHROPIC_TOOLS, messages=messages)


def message_helper(client: Any, messages: Any) -> Any:
    with client.messages.stream(model="pocket", max_tokens=500, tools=ANTHROPIC_TOOLS, messages=messages) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    return final


@dataclass(frozen=True)
class Api:
    asks: Sequence[Callable[..., Any]]
    calls: Callable[[Any], list[tuple[str, Any]]]
    text: Callable[[Any], str]
    echo: Callable[[Any], list[Any]]
    results: Callable[[list[tuple[str, str]]], list[Any]]


def tool_results(results: list[tuple[str, str]]) -> list[Any]:
    blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
    return [{"role": "user", "content": blocks}]


APIS = {
    "chat": Api(
        [
            lambda client, messages: client.chat.completions.create(**CHAT, messages=messages).choices[0].message,
            chat_helper,
            chat_chunks,
        ],
        lambda reply: [(call.id, json.loads(call.function.arguments)) for call in reply.tool_calls],
        lambda reply: str(reply.content),
        lambda reply: [reply.model_dump(exclude_none=True)],
        lambda results: [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results],
    ),
    "responses": Api(
        [
            lambda client, input, **more: client.responses.create(**RESPONSES, input=input, **more),
            response_helper,
            response_events,
        ],
        lambda reply: [(i.call_id, json.loads(i.arguments)) for i in reply.output if i.type == "function_call"],
        lambda reply: str(reply.output_text),
        lambda reply: [item.model_dump(exclude_none=True) for item in reply.output],
        lambda results: [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results],
    ),
    "messages": Api(
        [message_create, message_helper, lambda client, messages: message_create(client.beta, messages)],
        lambda reply: [(block.id, block.input) for block in reply.content if block.type == "tool_use"],
        lambda reply: str(reply.content[-1].text),
        lambda reply: [{"role": "assistant", "content": reply.content}],
        tool_results,
    ),
}


def client_of(api: str, url: str, **more: Any) -> Any:
    if api == "messages":
        return anthropic.Anthropic(base_url=url, api_key="none", **more)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **more)


@pytest.mark.parametrize(
    ("api", "way"), [*((api, way) for api in APIS for way in range(3)), *(("previous", way) for way in range(3))]
)
def test_every_way_to_request_gives_one_row(served: Served, stage: Stage, api: str, way: int) -> None:
    session, by_id, api = f"{api}-{way}", api == "previous", "responses" if api == "previous" else api
    stage.stories[session] = STORY
    ask, conversation = APIS[api].asks[way], [{"role": "user", "content": QUESTION}]
    with client_of(api, f"{served.url}/sessions/{session}", max_retries=0) as client:
        first = ask(client, conversation)
        calls = APIS[api].calls(first)
        assert [arguments for _, arguments in calls] == [{"formula": "17*23"}, {"formula": "Zürich"}]
        results = APIS[api].results([(id, text) for (id, _), text in zip(calls, RESULTS, strict=True)])
        if by_id:
            second = ask(client, results, previous_response_id=first.id)
        else:
            second = ask(client, [*conversation, *APIS[api].echo(first), *results])
        assert APIS[api].text(second).strip() == "It is 391. 🌞"
        if api == "messages":
            counted = client.messages.count_tokens(model="pocket", messages=conversation, tools=ANTHROPIC_TOOLS)
            assert counted.input_tokens == first.usage.input_tokens == len(stage.exchanges[session][0].prompt)
    check_one_row(served, stage, session)


BROKEN = Story((Turn("", [("compute", '{"n": 1, "formula": "say "17"}')]), *[Turn("Well.")] * 2))


@pytest.mark.parametrize(("api", "way"), [(api, way) for api in APIS for way in range(3)])
def test_a_conversation_continues_after_a_broken_calls_echo(served: Served, stage: Stage, api: str, way: int) -> None:
    """OpenAI's clients get it as a call, Anthropic's as text. In another conversation it is rendered anew."""
    session = f"broken-{api}-{way}"
    stage.stories[session] = BROKEN
    with client_of(api, f"{served.url}/sessions/{session}", max_retries=0) as client:
        first = APIS[api].asks[way](client, [{"role": "user", "content": QUESTION}])
        if api == "messages":
            assert APIS[api].calls(first) == []
        else:
            with pytest.raises(ValueError, match="delimiter"):
                APIS[api].calls(first)
        after = [*APIS[api].echo(first), {"role": "user", "content": "That is not JSON."}]
        for question in (QUESTION, "Another?"):
            reply = APIS[api].asks[way](client, [{"role": "user", "content": question}, *after])
            assert APIS[api].text(reply) == "Well."
    tree, rows = served.state(session)["tree"], served.rows(session)
    assert [turn["cause"] is None for turn in tree] == [True, True, False]
    assert tree[1]["reused"] == tree[0]["stop"]
    check_rows(stage, session, rows)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_continues_without_threads(served: Served, stage: Stage, stream: bool) -> None:
    """Its first request has a thread; the answer makes it send the whole conversation instead."""
    session = f"runner-{stream}"
    stage.stories[session] = STORY
    client = client_of("messages", f"{served.url}/sessions/{session}", max_retries=0)
    sent: list[Any] = []
    client._client.event_hooks["request"].append(lambda request: sent.append(json.loads(request.content)))

    @anthropic.beta_tool(name="compute")
    def compute(formula: str) -> str:
        """Computes a formula."""
        return dict(zip(("17*23", "Zürich"), RESULTS, strict=True))[formula]

    runner: Any = client.beta.messages.tool_runner(
        model="pocket", max_tokens=500, tools=[compute], messages=[{"role": "user", "content": QUESTION}], stream=stream
    )
    assert runner.until_done().content[-1].text.strip() == "It is 391. 🌞"
    assert ["thread" in body for body in sent] == [True, False, False]
    check_one_row(served, stage, session)


def test_models(served: Served) -> None:
    with client_of("chat", served.url) as client:
        assert [model.id for model in client.models.list()] == ["pocket"]
        assert client.models.retrieve("pocket").id == "pocket"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
    with client_of("messages", served.url) as client:
        assert [model.id for model in client.models.list()] == ["pocket"]
        assert client.models.retrieve("pocket").id == "pocket"


@pytest.mark.parametrize(("api", "sdk"), [("chat", openai), ("messages", anthropic)], ids=["openai", "anthropic"])
def test_clients_do_not_retry_a_permanent_error(served: Served, api: str, sdk: Any) -> None:
    session, sent = f"sealed-{api}", list[str]()
    served.call("POST", "/sessions", {"id": session})
    assert served.call("POST", f"/sessions/{session}/seal")[1]["state"] == "sealed"
    hooks = {"request": [lambda request: sent.append(request.url.path)]}
    with sdk.DefaultHttpxClient(event_hooks=hooks) as http:
        client = client_of(api, f"{served.url}/sessions/{session}", http_client=http)
        with pytest.raises(sdk.ConflictError, match="sealed"):
            APIS[api].asks[0](client, [{"role": "user", "content": "a"}])
    assert len(sent) == 1


@pytest.mark.parametrize("key", [None, "one"])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_lost_answer_is_sampled_once_with_a_key(served: Served, stage: Stage, sdk: str, key: str | None) -> None:
    """The client keeps the key of `extra_headers` when it retries. Without one, a retry is another sample."""
    session, lost = f"lost-{sdk}-{key}", list[bytes]()
    stage.stories[session] = STORY

    def lose_the_first(response: Any) -> None:
        if not lost:
            lost.append(response.read())
            response.status_code = 502  # as from a proxy

    url, hooks = f"{served.url}/sessions/{session}", {"response": [lose_the_first]}
    request: Any = {"model": "pocket", "messages": [{"role": "user", "content": "a"}], "max_tokens": 10}
    request["extra_headers"] = {"Idempotency-Key": key} if key else {}
    with (openai if sdk == "openai" else anthropic).DefaultHttpxClient(event_hooks=hooks) as http:
        client = client_of("chat" if sdk == "openai" else "messages", url, http_client=http)
        id = (client.chat.completions if sdk == "openai" else client.messages).create(**request).id
    assert (json.loads(lost[0])["id"] == id) is bool(key)
    assert served.state(session)["turns"] == (1 if key else 2)


def check_one_row(served: Served, stage: Stage, session: str) -> None:
    assert stage.remaining_turns(session) == 0
    rows = served.rows(session)
    assert len(rows) == 1
    check_rows(stage, session, rows)
