"""Tools as Codex sends them: functions in namespaces, and tools that OpenAI would run itself."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.real_agents.scripted import Said, Stage, Story, StoryEngine
from tests.gateway.rows import check_rows
from tests.gateway.server import Served, gateway_server
from tokentrace import create_renderer
from tokentrace.gateway.requests import Request, RequestError
from tokentrace.gateway.responses import RESPONSES
from tokentrace.pocket import POCKET

SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
SHELL: Any = {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": SCHEMA}
READ: Any = {"type": "function", "name": "read", "description": "Reads.", "strict": False, "parameters": SCHEMA}
FILES: Any = {"type": "namespace", "name": "mcp__files", "description": "Tools of files.", "tools": [READ]}
SEARCH: Any = {"type": "web_search", "external_web_access": False}


def codex(items: list[Any], tools: list[Any]) -> dict[str, Any]:
    """A body in the shape that Codex sends."""
    return {
        "model": "pocket",
        "instructions": "You are Codex.",
        "input": items,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-codex",
        "client_metadata": {"session_id": "0199-codex"},
    }


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def read(tools: list[Any]) -> Request:
    return RESPONSES.read(codex([said("user", "Hi.")], tools), {})


def test_hosted_tools_are_listed_and_not_shown() -> None:
    kinds = ("web_search", "web_search_preview_2025_03_11", "image_generation", "tool_search", "file_search")
    request = read([SHELL, *({"type": kind} for kind in kinds)])
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["exec_command"]
    assert request.wishes[: len(kinds)] == tuple(f"tools.{at} ({kind})" for at, kind in enumerate(kinds, 1))
    assert read([SEARCH]).tools is None


def test_functions_of_a_namespace_are_functions() -> None:
    request = read([FILES, SHELL])
    function = {"name": "mcp__files__read", "description": "Reads.", "parameters": SCHEMA}
    assert (request.tools or ())[0] == {"type": "function", "function": function}
    assert "tools.0.description" in request.wishes


@pytest.mark.parametrize(
    ("field", "tools"),
    [
        ("tools.0.name", [{"type": "namespace", "tools": []}]),
        ("tools.0.tools", [{"type": "namespace", "name": "n"}]),
        ("tools.0.tools.0", [{"type": "namespace", "name": "n", "tools": [3]}]),
        ("tools.0.tools.0.type", [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}]),
        ("tools.0.tools.0.defer_loading", [{**FILES, "tools": [{**READ, "defer_loading": True}]}]),
        ("tools", [FILES, {**READ, "name": "mcp__files__read"}]),
        ("tools", [FILES, {**FILES, "name": "mcp__files__"}]),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(field: str, tools: list[Any]) -> None:
    with pytest.raises(RequestError) as refused:
        read(tools)
    assert (refused.value.field, refused.value.status) == (field, 400)


# -- over HTTP


@pytest.fixture(scope="module")
def stage() -> Stage:
    return Stage(create_renderer(POCKET), "<|end|>")


@pytest.fixture(scope="module")
def served(stage: Stage) -> Iterator[Served]:
    with gateway_server(lambda: StoryEngine(stage), stage.renderer) as server:
        yield server


def events(served: Served, session: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The events of an answer, and what its header says is not enforced. The session is named as Codex names it."""
    headers = {"content-type": "application/json", "session-id": session}
    request = urllib.request.Request(f"{served.url}/v1/responses", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return told, answer.headers["x-tokentrace-not-enforced"]


def test_codex_calls_a_function_of_a_namespace(served: Served, stage: Stage) -> None:
    session = "0199-codex"
    called = [("mcp__files__read", '{"path":  "a" }'), ("exec_command", '{"path": "b"}')]
    stage.stories[session] = Story((Said("Let me look.", called, "Hm."), Said("It says so.")))
    items = [said("developer", "Be careful."), said("user", "What does it say?")]
    tools = [SHELL, FILES, SEARCH]
    first, wishes = events(served, session, codex(items, tools))
    assert "tools.2 (web_search)" in wishes
    names = [("read", "mcp__files"), ("exec_command", None)]
    output = first[-1]["response"]["output"]
    done = [each["item"] for each in first if each["type"] == "response.output_item.done"]
    begun = [each["item"] for each in first if each["type"] == "response.output_item.added"]
    for told in (output, done, begun):
        calls = [item for item in told if item["type"] == "function_call"]
        assert [(call["name"], call.get("namespace")) for call in calls] == names
    assert done == output
    sent = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in done]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "So."}
        for item in done
        if item["type"] == "function_call"
    ]
    second, _ = events(served, session, codex([*items, *sent, *results], tools))
    assert second[-1]["response"]["output"][-1]["content"][0]["text"] == "It says so."
    rows = served.rows(session)
    assert len(rows) == 1
    check_rows(stage, session, rows)
