"""OpenAI's and Anthropic's own clients, blocking and not: every way that they have to ask for an answer.

Each way says the same conversation, so that whatever a client makes of an answer is sent back by the same client; the
record then has to be one stream, with the tokens that the engine saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.gateway.real_agents.scripted import Said, Stage, Story, StoryEngine
from tests.gateway.rows import check_rows
from tests.gateway.server import TOOLS, Served, gateway_server
from tests.lazy import lazy
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

anthropic = lazy("anthropic")
openai = lazy("openai")

STORY = Story(
    (
        Said("  Let me look.\n", [("compute", '{"formula":  "17*23" }'), ("compute", '{"formula":"Zürich"}')], "Hm."),
        Said("\n It is 391. 🌞", reasoning="Both are known."),
    )
)
QUESTION = "What is 17*23?"
RESULTS = ("391", "not a formula  \n")
ANTHROPIC_TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
RESPONSES_TOOLS: Any = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]
CHAT_TOOLS: Any = TOOLS


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(create_renderer(POCKET), "<|end|>")


@pytest.fixture(scope="module")
def served(stage: Stage) -> Iterator[Served]:
    with gateway_server(lambda: StoryEngine(stage), stage.renderer) as server:
        yield server


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Clients that are closed at the end."""
    with ExitStack() as stack:
        yield stack


# -- chat completions


def chat_create(client: openai.OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(model="pocket", messages=messages, tools=CHAT_TOOLS).choices[0].message


def chat_helper(client: openai.OpenAI, messages: Any) -> Any:
    with client.chat.completions.stream(model="pocket", messages=messages, tools=CHAT_TOOLS) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


def chat_chunks(client: openai.OpenAI, messages: Any) -> Any:
    """Chunks put together by hand, as agents do that have no helper."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    usage = None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        model="pocket", messages=messages, tools=CHAT_TOOLS, stream=True, stream_options=options
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.index == len(message["tool_calls"]):
                    message["tool_calls"].append(
                        {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                    )
                function = message["tool_calls"][call.index]["function"]
                function["name"] += call.function.name or ""
                function["arguments"] += call.function.arguments or ""
    assert usage is not None
    assert usage.completion_tokens
    return openai.types.chat.ChatCompletionMessage.model_validate(message)


@pytest.mark.parametrize("ask", [chat_create, chat_helper, chat_chunks])
def test_chat_completions(served: Served, opened: ExitStack, stage: Stage, ask: Callable[..., Any]) -> None:
    session = f"chat-{ask.__name__}"
    stage.stories[session] = STORY
    client = opened.enter_context(
        openai.OpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="none", max_retries=0)
    )
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    reply = ask(client, messages)
    assert reply.content.strip() == "Let me look."
    assert [json.loads(call.function.arguments) for call in reply.tool_calls] == [
        {"formula": "17*23"},
        {"formula": "Zürich"},
    ]
    messages.append(reply.model_dump(exclude_none=True))
    for call, result in zip(reply.tool_calls, RESULTS, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert ask(client, messages).content.strip() == "It is 391. 🌞"
    check_one_row(served, stage, session)


# -- responses


def response_create(client: openai.OpenAI, **asked: Any) -> Any:
    return client.responses.create(model="pocket", tools=RESPONSES_TOOLS, **asked)


def response_helper(client: openai.OpenAI, **asked: Any) -> Any:
    with client.responses.stream(model="pocket", tools=RESPONSES_TOOLS, **asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text
    return final


def response_events(client: openai.OpenAI, **asked: Any) -> Any:
    done = None
    for event in client.responses.create(model="pocket", tools=RESPONSES_TOOLS, stream=True, **asked):
        if event.type == "response.completed":
            done = event.response
    assert done is not None
    return done


def results_of(response: Any) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, RESULTS, strict=True)
    ]


@pytest.mark.parametrize("how", ["previous", "echo"])
@pytest.mark.parametrize("ask", [response_create, response_helper, response_events])
def test_responses(served: Served, opened: ExitStack, stage: Stage, ask: Callable[..., Any], how: str) -> None:
    session = f"responses-{ask.__name__}-{how}"
    stage.stories[session] = STORY
    client = opened.enter_context(
        openai.OpenAI(base_url=f"{served.url}/sessions/{session}/v1", api_key="none", max_retries=0)
    )
    first = ask(client, input=QUESTION)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    if how == "previous":
        second = ask(client, input=results_of(first), previous_response_id=first.id)
    else:
        said = [item.model_dump(exclude_none=True) for item in first.output]
        second = ask(client, input=[{"role": "user", "content": QUESTION}, *said, *results_of(first)])
    assert second.output_text.strip() == "It is 391. 🌞"
    check_one_row(served, stage, session)


# -- messages


def message_create(door: Any, **asked: Any) -> Any:
    return door.create(model="pocket", max_tokens=500, tools=ANTHROPIC_TOOLS, **asked)


def message_helper(door: Any, **asked: Any) -> Any:
    with door.stream(model="pocket", max_tokens=500, tools=ANTHROPIC_TOOLS, **asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    return final


def tool_results(message: Any) -> Any:
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"formula": "17*23"}, {"formula": "Zürich"}]
    blocks = [
        {"type": "tool_result", "tool_use_id": call.id, "content": result}
        for call, result in zip(calls, RESULTS, strict=True)
    ]
    return {"role": "user", "content": blocks}


@pytest.mark.parametrize("beta", [False, True], ids=["stable", "beta"])
@pytest.mark.parametrize("ask", [message_create, message_helper])
def test_messages(served: Served, opened: ExitStack, stage: Stage, ask: Callable[..., Any], beta: bool) -> None:
    session = f"messages-{ask.__name__}-{beta}"
    stage.stories[session] = STORY
    client = opened.enter_context(
        anthropic.Anthropic(base_url=f"{served.url}/sessions/{session}", api_key="none", max_retries=0)
    )
    door: Any = client.beta.messages if beta else client.messages
    conversation: list[Any] = [{"role": "user", "content": QUESTION}]
    counted = door.count_tokens(model="pocket", messages=conversation, tools=ANTHROPIC_TOOLS)
    first = ask(door, messages=conversation)
    assert first.stop_reason == "tool_use"
    assert counted.input_tokens == first.usage.input_tokens == len(stage.exchanges[session][0].prompt)
    conversation += [{"role": "assistant", "content": first.content}, tool_results(first)]
    second = ask(door, messages=conversation)
    assert second.content[-1].text.strip() == "It is 391. 🌞"
    check_one_row(served, stage, session)


@pytest.mark.parametrize("stream", [False, True])
def test_the_runner_of_tools_goes_on_without_threads(
    served: Served, opened: ExitStack, stage: Stage, stream: bool
) -> None:
    """Its first request would have a thread; what it is told makes it send the whole conversation instead."""
    session = f"runner-{stream}"
    stage.stories[session] = STORY
    client = opened.enter_context(
        anthropic.Anthropic(base_url=f"{served.url}/sessions/{session}", api_key="none", max_retries=0)
    )
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


# -- models


def test_models(served: Served, opened: ExitStack) -> None:
    client = opened.enter_context(openai.OpenAI(base_url=f"{served.url}/v1", api_key="none"))
    assert [model.id for model in client.models.list()] == ["pocket"]
    assert client.models.retrieve("pocket").id == "pocket"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    theirs = opened.enter_context(anthropic.Anthropic(base_url=served.url, api_key="none"))
    assert [model.id for model in theirs.models.list()] == ["pocket"]
    assert theirs.models.retrieve("pocket").id == "pocket"


# -- what is wrong, as the clients tell it


def test_what_would_fail_again_is_sent_once(served: Served, opened: ExitStack) -> None:
    served.call("POST", "/sessions", {"id": "sealed"})
    assert served.call("POST", "/sessions/sealed/seal")[1]["state"] == "sealed"
    sent: list[str] = []
    counting = {"request": [lambda request: sent.append(request.url.path)]}
    ours = opened.enter_context(
        openai.OpenAI(
            base_url=f"{served.url}/sessions/sealed/v1",
            api_key="none",
            http_client=openai.DefaultHttpxClient(event_hooks=counting),
        )
    )
    asked: Any = {"model": "pocket", "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(openai.ConflictError, match="sealed"):
        ours.chat.completions.create(**asked)
    theirs = opened.enter_context(
        anthropic.Anthropic(
            base_url=f"{served.url}/sessions/sealed",
            api_key="none",
            http_client=anthropic.DefaultHttpxClient(event_hooks=counting),
        )
    )
    with pytest.raises(anthropic.ConflictError, match="sealed"):
        theirs.messages.create(**asked, max_tokens=10)
    assert sent == ["/sessions/sealed/v1/chat/completions", "/sessions/sealed/v1/messages"]


@pytest.mark.parametrize("key", [None, "one"])
@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_a_lost_answer_is_sampled_once_with_a_key(served: Served, stage: Stage, sdk: str, key: str | None) -> None:
    """The client keeps the key of `extra_headers` when it retries. Without one, a retry is another sample."""
    session, lost = f"lost-{sdk}-{key}", list[bytes]()
    stage.stories[session] = STORY

    def lose_the_first(response: Any) -> None:
        if not lost:
            lost.append(response.read())
            response.status_code = 502  # as a proxy has it

    url, hooks = f"{served.url}/sessions/{session}", {"response": [lose_the_first]}
    asked: Any = {"model": "pocket", "messages": [{"role": "user", "content": "a"}], "max_tokens": 10}
    asked["extra_headers"] = {"Idempotency-Key": key} if key else {}
    if sdk == "openai":
        with openai.DefaultHttpxClient(event_hooks=hooks) as http:
            chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http).chat
            id = chat.completions.create(**asked).id
    else:
        with anthropic.DefaultHttpxClient(event_hooks=hooks) as http:
            id = anthropic.Anthropic(base_url=url, api_key="none", http_client=http).messages.create(**asked).id
    assert (json.loads(lost[0])["id"] == id) is bool(key)
    assert served.state(session)["turns"] == (1 if key else 2)


# -- the session, by each client's key


def check_one_row(served: Served, stage: Stage, session: str) -> None:
    assert stage.unsaid(session) == 0
    rows = served.rows(session)
    assert len(rows) == 1
    check_rows(stage, session, rows)
