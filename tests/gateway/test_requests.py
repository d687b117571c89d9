"""The fields that each dialect reads, and those that it refuses by name."""

import itertools
import json
from typing import Any

import pytest

from tests.conversations import system, user
from tests.gateway.answers import LOOK
from tokentrace.gateway.chat import Chat
from tokentrace.gateway.dialect import Dialect
from tokentrace.gateway.http import Body, parse_body
from tokentrace.gateway.messages import Messages, read_count
from tokentrace.gateway.requests import AnswerOptions, Request, RequestError
from tokentrace.gateway.responses import Responses
from tokentrace.gateway.tokens import Tokens

TOOL: dict[str, Any] = {"name": "look", "description": "Does look.", "input_schema": LOOK["function"]["parameters"]}
FLAT: dict[str, Any] = {"type": "function", **LOOK["function"]}
ASK: dict[str, tuple[type[Dialect], dict[str, Any]]] = {
    "chat": (Chat, {"model": "m", "messages": [user("Hi.")]}),
    "messages": (Messages, {"model": "m", "max_tokens": 9, "messages": [user("Hi.")]}),
    "responses": (Responses, {"model": "m", "input": "Hi."}),
    "tokens": (Tokens, {"token_ids": [1, 2, 3]}),
}
SHARED = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 3, "stream": True, "flavour": "mint"}
READ = {
    "model": "m",
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "seed": 3},
    "stop": ("x",),
    "stream": True,
    "structure": {"type": "json_schema", "schema": {"type": "object"}},
    "hints": {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
}


CHAT_FIELDS: dict[str, Any] = {
    **SHARED,
    "tools": [LOOK],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 9,
    "max_completion_tokens": 7,
    "stop": "x",
    "n": 2,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "metadata": {"a": "b"},
    "logit_bias": {},
    "return_token_ids": True,
}
MESSAGES_FIELDS: dict[str, Any] = {
    **SHARED,
    "system": [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": " brief."},
    ],
    "tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "type": "custom"}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
}
RESPONSES_FIELDS: dict[str, Any] = {
    **SHARED,
    "instructions": "Be brief.",
    "tools": [{**FLAT, "strict": True}, {"type": "web_search"}],
    "tool_choice": "required",
    "max_output_tokens": 7,
    "max_tool_calls": 3,
    "stop": "x",
    "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "tone": "mild"},
    "reasoning": {"effort": "low", "summary": "auto", "context": "auto"},
    "previous_response_id": "resp_x1",
    "store": False,
}


def read(name: str, **fields: Any) -> Request:
    dialect, ask = ASK[name]
    return dialect.read({**ask, **fields}, {})


def test_chat_is_read() -> None:
    request = read("chat", **CHAT_FIELDS)
    assert request == Request(
        messages=[user("Hi.")],
        tools=[LOOK],
        max_tokens=7,
        n=2,
        variables={"enable_thinking": False},
        ignored=("flavour",),
        unenforced=("parallel_tool_calls", "tool_choice"),
        answer=AnswerOptions(logprobs=2, usage_in_stream=True, token_fields=("vllm",)),  # type: ignore[arg-type]
        **READ,
    )
    assert read("chat", temperature=None, tools=[], tool_choice="auto") == Request([user("Hi.")], model="m")
    messages = [user("Hi."), {"role": "assistant", "content": "We"}]
    assert read("chat", messages=messages, continue_final_message=True, add_generation_prompt=False).continued
    assert read("chat", enable_thinking=True).hints == {"enable_thinking": True, "thinking": True}
    assert read("chat", thinking={"type": "disabled"}).hints == {"enable_thinking": False, "thinking": False}
    legacy = read("chat", functions=[LOOK["function"]], function_call={"name": "look"})
    assert (legacy.tools, legacy.unenforced) == ([LOOK], ("function_call",))
    assert not read("chat", functions=[LOOK["function"]], function_call="none").answer.calls_allowed


def test_messages_are_read() -> None:
    request = read("messages", **MESSAGES_FIELDS)
    assert request == Request(
        messages=[system("Be brief."), user("Hi.")],
        tools=[LOOK],
        max_tokens=9,
        ignored=("flavour",),
        unenforced=("tool_choice", "tool_choice.disable_parallel_tool_use", "thinking.budget_tokens"),
        answer=AnswerOptions(object_arguments=True, usage_in_stream=True),
        **READ,
    )
    assert read("messages", messages=[user("a"), {"role": "assistant", "content": "It is"}]).continued
    assert read("messages", thinking={"type": "disabled"}).hints == {"enable_thinking": False, "thinking": False}
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    assert read("messages", context_management=edits).unenforced == ("context_management",)
    assert read_count({"model": "m", "messages": [user("Hi.")], "system": "A"}, {}).messages[0] == system("A")


def test_responses_are_read() -> None:
    request = read("responses", **RESPONSES_FIELDS)
    assert request == Request(
        messages=[system("Be brief."), user("Hi.")],
        tools=[LOOK],
        max_tokens=7,
        previous="resp_x1",
        instructions=1,
        stored=False,
        ignored=("flavour", "reasoning.context", "text.tone"),
        unenforced=("tools.1 (web_search)", "tool_choice", "reasoning.summary", "max_tool_calls"),
        joined=True,
        answer=request.answer,
        **READ,
    )
    assert request.answer.logprobs == 2
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    assert read("responses", input=[result], previous_response_id="resp_x1").messages[0]["tool_call_id"] == "c1"


def test_choices_of_tools() -> None:
    for name, none, single, tools in (
        ("chat", "none", {"type": "function", "function": {"name": "look"}}, [LOOK]),
        ("messages", {"type": "none"}, {"type": "tool", "name": "look"}, [TOOL]),
        ("responses", "none", {"type": "function", "name": "look"}, [FLAT]),
    ):
        assert not read(name, tools=tools, tool_choice=none).answer.calls_allowed
        assert read(name, tools=tools, tool_choice=none).tools == [LOOK]
        assert read(name, tools=tools, tool_choice=single).unenforced == ("tool_choice",)


def test_the_header_asks_for_ids() -> None:
    dialect, ask = ASK["chat"]
    for value, ways in (("vllm, nemo-gym", ("vllm", "nemo_gym")), ("true", ("tokentrace",)), ("0", ())):
        assert dialect.read(ask, {"x-tokentrace-token-ids": value}).answer.token_fields == ways
    for name, value in (("chat", "all"), ("messages", "vllm"), ("responses", "vllm")):
        with pytest.raises(RequestError) as refused:
            ASK[name][0].read(ASK[name][1], {"x-tokentrace-token-ids": value})
        assert refused.value.field == "x-tokentrace-token-ids"


def test_functions_of_a_namespace_are_functions() -> None:
    space = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [FLAT]}
    request = read("responses", tools=[space])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["mcp__files__look"]
    assert request.answer.namespaces == {"mcp__files__look": ["mcp__files", "look"]}
    assert request.unenforced == ("tools.0.description",)


def claude_code(**more: Any) -> dict[str, Any]:
    """A body with the fields that Claude Code 2.1.325 sends."""
    text = {"type": "text", "text": "Where am I?"}
    late = {"name": "fetch", "description": "Fetch a page.", "input_schema": {"type": "object"}, "defer_loading": True}
    return {
        "model": "claude-opus-5-5",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>\nx\n</system-reminder>\n"}, text]},
            {
                "role": "system",
                "content": [{"type": "text", "text": "# Environment", "cache_control": {"type": "ephemeral"}}],
                "output_config": {"effort": "medium"},
            },
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.325.0dc; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\nBe careful.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [{**TOOL, "description": "Look."}, late],
        "metadata": {"user_id": '{"session_id":"s"}'},
        "max_tokens": 128000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }


def test_claude_code_is_understood() -> None:
    request = Messages.read(claude_code(), {"anthropic-beta": "claude-code-20250219,effort-2025-11-24"})
    assert request.messages == [
        system("You are an agent.\nBe careful."),
        user("<system-reminder>\nx\n</system-reminder>\nWhere am I?"),
        system("# Environment"),
    ]
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["look"]
    assert request.hints == {"reasoning_effort": "medium", "enable_thinking": True, "thinking": True}
    assert set(request.unenforced) == {"messages.output_config", "thinking.display"}
    assert request.ignored == ("system.x-anthropic-billing-header",)
    messages = [claude_code()["messages"][0], {"role": "system", "content": "# Environment"}]
    assert Messages.read(claude_code(messages=messages), {}).messages == request.messages
    quiet = {"role": "system", "content": [], "output_config": {"effort": "high"}}
    assert read("messages", messages=[user("a"), quiet]).messages == [user("a")]


def test_a_deferred_tool_is_defined_where_it_is_referred_to() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "fetch"}]}
    messages = [*claude_code()["messages"], call, {"role": "user", "content": [result]}]
    before, after = Messages.read(claude_code(), {}), Messages.read(claude_code(messages=messages), {})
    assert after.tools == before.tools
    assert list(after.messages[:3]) == list(before.messages)
    definition = (
        '<function>{"description": "Fetch a page.", "name": "fetch", "parameters": {"type": "object"}}</function>\n'
    )
    assert after.messages[-1]["content"] == definition
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    more = [*claude_code()["messages"], {"role": "system", "content": [addition, removal]}]
    content = Messages.read(claude_code(messages=more), {}).messages[-1]["content"]
    assert content == f"{definition}The function look is no longer available.\n"
    with pytest.raises(RequestError, match="defer_loading"):
        Messages.read(claude_code(messages=messages, tools=[TOOL]), {})


SPACE = {"type": "namespace", "name": "n", "tools": []}
ALONE: dict[str, dict[str, list[Any]]] = {
    "chat messages responses": {
        "temperature": [1e-5, -1, float("nan")], "top_p": [0, True], "top_k": [-2], "seed": [-1],
        "frequency_penalty": [2.1], "repetition_penalty": [0], "min_p": ["much"], "logit_bias": [{"5": 1}],
        "guided_json": [{}], "return_token_ids": ["yes"], "tools": [{"a": 1}], "stream": [1],
    },
    "chat": {
        "messages": [[], "Hi."], "tool_choice": ["sometimes"], "max_tokens": [0], "stop": [["a"] * 17, [""]],
        "n": [0], "top_logprobs": [2], "reasoning_effort": ["<|im_end|>"], "add_generation_prompt": [False],
        "continue_final_message": [True], "audio": [{"voice": "x"}], "modalities": [["text", "audio"]],
        "chat_template": ["{{ x }}"],
    },
    "messages": {
        "max_tokens": [None], "messages": [[{"role": "system", "content": []}]], "system": [3], "container": ["c"],
        "mcp_servers": [[{"url": "x"}]], "thread": [{"type": "continue", "previous_message_id": "msg_1"}],
    },
    "responses": {
        "input": [None, []], "background": [True], "conversation": ["conv_1"], "prompt": [{"id": "p"}],
        "context_management": [[{"type": "compaction"}]], "truncation": ["always"], "metadata": [3],
        "previous_response_id": ["chatcmpl-1", "a1b2", "resp_", "resp_a-b", "resp_ä", "", "msg_a1b2"],
        "tool_choice": ["all"], "tools": [[{**SPACE, "tools": [FLAT]}, {**FLAT, "name": "n__look"}]],
    },
    "tokens": {"token_ids": [[], [-1]]},
}  # fmt: skip
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (name, field, {field: value})
        for names, fields in ALONE.items()
        for name in names.split()
        for field, values in fields.items()
        for value in values
    ),
    ("chat", "messages.0", {"messages": [3]}),
    ("chat", "messages.1.content", {"messages": [user("a"), user(3)]}),
    ("chat", "messages.0.role", {"messages": [{"content": "a"}]}),
    ("chat", "tools.0.type", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
    ("chat", "tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("chat", "functions", {"tools": [LOOK], "functions": [LOOK["function"]]}),
    ("chat", "thinking.type", {"thinking": {"type": "much"}}),
    ("chat", "stop.0", {"stop": [1]}),
    ("chat", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("chat", "response_format.type", {"response_format": {"type": "xml"}}),
    ("chat", "response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
    ("messages", "messages.0.role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages", "messages.0.content.0.type", {"messages": [{"role": "user", "content": [{}]}]}),
    ("messages", "system.0.text", {"system": [{"type": "text"}]}),
    ("messages", "tools.0.input_schema", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("messages", "tools.0.input_schema", {"tools": [{"name": "look"}]}),
    ("messages", "tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("messages", "stop_sequences.0", {"stop_sequences": [3]}),
    ("messages", "thinking.type", {"thinking": {"type": "much"}}),
    ("messages", "output_config.effort", {"output_config": {"effort": "\n"}}),
    ("messages", "output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
    ("messages", "output_config.format", {"output_config": {"format": {"type": "json_schema"}}}),
    ("messages", "x-tokentrace-token-ids", {"return_token_id_information": True}),
    ("responses", "input.0.type", {"input": [{"type": "web_search_call"}]}),
    ("responses", "input.0.call_id", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}),
    ("responses", "include.0", {"include": ["everything"]}),
    ("responses", "reasoning.effort", {"reasoning": {"effort": "huge"}}),
    ("responses", "reasoning.summary", {"reasoning": {"summary": "long"}}),
    ("responses", "text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("responses", "text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("responses", "text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    ("responses", "tools.0", {"tools": [{"type": "function"}]}),
    ("responses", "tools.0.type", {"tools": [{"name": "f"}]}),
    ("responses", "tools.0.defer_loading", {"tools": [{**FLAT, "defer_loading": True}]}),
    ("responses", "tools.0", {"tools": [{"type": "namespace", "tools": []}]}),
    ("responses", "tools.0.tools.0.type", {"tools": [{**SPACE, "tools": [3]}]}),
    *(
        ("responses", "tools.1.type", {"tools": [FLAT, {"type": kind}]})
        for kind in ("computer", "mcp", "custom", "local_shell", "shell", "apply_patch", "my_web_search")
    ),
    ("tokens", "sampling_params.temperature", {"sampling_params": {"temperature": -1}}),
    ("tokens", "stop", {"sampling_params": {"stop": "x"}}),
]


@pytest.mark.parametrize(("name", "field", "body"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name: str, field: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        read(name, **body)
    assert refused.value.field == field
    assert refused.value.status == 400
    error = ASK[name][0].error(refused.value)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field}: ")


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "chat": [
        system("S"),
        user("a"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "assistant", "content": "b"},
        user("c"),
    ],
    "chat, legacy": [
        user("a"),
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
        {"role": "function", "name": "look", "content": "r"},
        {"role": "assistant", "content": "b"},
        user("c"),
    ],
    "messages": [
        user("a"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "r"}]},
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}], "output_config": {"effort": "low"}},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "again"}]},
    ],
    "responses": [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_7x_0", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc_7x_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r"},
        {"type": "function_call", "id": "fc_7x_2", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "r"},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "message", "role": "user", "content": "c"},
        {"type": "function_call_output", "call_id": "c1", "output": "again"},
        {"type": "message", "role": "assistant", "id": "msg_8y_0", "content": "d"},
        {"type": "reasoning", "id": "rs_9z_0", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_read_the_same_after_an_earlier_request(name: str) -> None:
    dialect, ask = ASK[name.partition(",")[0]]
    items, reused = HISTORIES[name], 0
    more = {"instructions": "I"} if name == "responses" else {"system": "S"} if name == "messages" else {}

    def read(history: list[Any], earlier: tuple[Body, Request] | None = None) -> tuple[Body, Request]:
        raw = json.dumps({**ask, **more, dialect.history: history}).encode()
        body = parse_body(raw, dialect.history, earlier)
        return body, dialect.read(body.value, {}, body.past)

    for changed, count in itertools.product(range(len(items) + 1), range(1, len(items) + 1)):
        history = [*items[:changed], *({**item, "id": "fc_8y_1"} for item in items[changed:count])]
        _, whole = read(history)
        for earlier in range(1, len(items) + 1):
            body, incremental = read(history, read(items[:earlier], read(items[: max(1, earlier - 2)])))
            assert (incremental, list(incremental.starts)) == (whole, list(whole.starts))
            reused += body.past.items
    assert reused
    assert parse_body(json.dumps({dialect.history: []}).encode(), dialect.history, read(items)).past.items == 0
