"""Tools of real MCP servers in the loop, over stdio and HTTP; failures of servers become tool results."""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from psutil import pid_exists as is_alive

from tests.rollout.mcp_server import app
from tests.rollout.support import agent, call, results
from tokentrace import InputError
from tokentrace.rollout import End, MCPConfig, Rollout, Task, mcp_tools, read_run
from tokentrace.rollout.tools import BaseTool

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = {"command": sys.executable, "args": [str(SERVER)]}


async def run(tools: list[BaseTool], *turns: str, name: str = "one") -> Rollout:
    return await agent(*turns, "Done.", tools=tools).run(Task([{"role": "user", "content": "Go."}], name=name))


def test_a_command_serves_the_trajectories_of_a_run_until_it_ends(tmp_path: Path) -> None:
    config = MCPConfig(**STDIO, env={"NUMBERS": "seven"}, cwd=str(tmp_path))

    async def go() -> list[Rollout]:
        tools = await mcp_tools(config)
        assert [tool.name for tool in tools] == ["add", "bump", "boom", "picture", "crash", "environment"]
        first = await run(tools, call("add", a=1, b=2) + call("boom"), call("bump"), call("picture"), name="first")
        pid_before = int(results(await run(tools, call("environment", name="NUMBERS")))[0].split()[-1])
        second = await run(tools, call("bump"), call("crash"), call("add", a=1, b=2), name="second")
        third = await run(tools, call("bump"), call("environment", name="NUMBERS"), name="third")
        pid = int(results(third)[1].split()[-1])
        assert is_alive(pid)
        assert pid != pid_before
        await tools[0].close()
        assert not is_alive(pid)
        assert not is_alive(pid_before)
        assert len(asyncio.all_tasks()) == 1, "nothing is left of the sessions"
        return [first, second, third]

    first, second, third = asyncio.run(go())
    assert results(first) == [
        "3",
        "error: Error executing tool boom",
        "1",
        "a dot\nerror: picture returned image/png, which cannot be shown here",
    ]
    assert first.notes == ["picture returned image/png, which cannot be shown here"]
    assert (first.end, first.tool_errors) == (End.ANSWER, 2)
    assert first.schemas is not None
    assert first.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    problem = "the MCP server python did not answer a call to {}: Connection closed"
    assert results(second) == ["2", f"error: {problem.format('crash')}", f"error: {problem.format('add')}"]
    assert second.notes == [problem.format("crash"), problem.format("add")]
    assert second.end is End.ANSWER
    assert results(third)[0] == "1", "a server that ended is started again for the next trajectory"
    assert results(third)[1].startswith(f"seven {tmp_path} ")


def test_each_trajectory_can_have_its_own_session() -> None:
    config = MCPConfig(**STDIO, session="trajectory", tools=["bump", "environment"], prefix="my_")

    async def go() -> list[Rollout]:
        tools = await mcp_tools(config)
        assert [tool.name for tool in tools] == ["my_bump", "my_environment"]
        turns = [call("my_bump"), call("my_bump"), call("my_environment", name="X")]
        done = await asyncio.gather(*(run(tools, *turns, name=name) for name in ("one", "two")))
        assert len(asyncio.all_tasks()) == 1
        return list(done)

    both = [results(rollout) for rollout in asyncio.run(go())]
    assert [texts[:2] for texts in both] == [["1", "2"], ["1", "2"]]
    pids = {int(texts[2].split()[-1]) for texts in both}
    assert len(pids) == 2
    assert not any(map(is_alive, pids)), "released"


@contextmanager
def served(keys: list[str]) -> Iterator[tuple[str, uvicorn.Server]]:
    """Serve over HTTP on a free port; adds the X-Key header of each request to `keys`."""
    mcp_app = app()

    async def record_key(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            keys.append(dict(scope["headers"]).get(b"x-key", b"").decode())
        await mcp_app(scope, receive, send)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(record_key, log_level="error", timeout_graceful_shutdown=0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", server
        finally:
            server.should_exit = True
            thread.join()


def test_a_server_over_http_and_one_that_stops() -> None:
    keys: list[str] = []

    async def go(url: str, server: uvicorn.Server) -> tuple[Rollout, Rollout, Rollout]:
        tools = await mcp_tools(MCPConfig(url=url, headers={"X-Key": "secret"}, tools=["add"]))

        async def gone() -> None:
            """Stop the server."""
            server.should_exit = True
            while await asyncio.to_thread(_answers, url):
                pass

        there = await run(tools, call("add", a=1, b=2), name="there")
        going = await run([*tools, gone], call("gone"), call("add", a=1, b=2), name="going")  # type: ignore[list-item]
        absent = await run(tools, call("add", a=1, b=2), name="absent")
        await tools[0].close()
        assert len(asyncio.all_tasks()) == 1
        return there, going, absent

    with served(keys) as (url, server):
        there, going, absent = asyncio.run(go(url, server))
    assert results(there) == ["3"]
    assert set(keys) == {"secret"}
    assert results(going)[1].startswith(f"error: the MCP server {url} did not answer a call to add: ")
    assert going.end is End.ANSWER
    assert absent.end is End.FAILED
    assert absent.notes[0].startswith(f"the MCP server {url} cannot be used: ")


def _answers(url: str) -> bool:
    port = int(url.split(":")[2].split("/", maxsplit=1)[0])
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": "no-such-command"}, "the MCP server no-such-command cannot be used: .*No such file"),
        ({"command": sys.executable, "args": ["-c", "raise SystemExit"]}, "cannot be used: Connection closed"),
        (
            {"command": sys.executable, "args": ["-c", "input(); input(); input()"], "start_timeout": 0.2},
            "took longer than 0.2 s",
        ),
    ],
)
def test_a_server_that_does_not_start_is_an_error_at_once(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        asyncio.run(mcp_tools(MCPConfig(**settings)))


def test_servers_in_yaml(tmp_path: Path) -> None:
    """Tools are listed when the file is read, even inside a running event loop; secrets are not recorded."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n', encoding="utf-8")
    file = tmp_path / "run.yaml"

    async def go(url: str) -> None:
        mcp = {"url": url, "headers": {"X-Key": "secret"}, "tools": ["add"]}
        config = {"engine": {"kind": "embedded"}, "data": {"file": "rows.jsonl"}, "output": "out"}
        file.write_text(json.dumps({**config, "tools": [{"mcp": mcp}]}), encoding="utf-8")
        run_ = read_run(file)
        assert run_.settings["tools"] == [{"mcp": {"tools": ["add"]}}]
        assert results(await run(list(run_.tools), call("add", a=2, b=2))) == ["4"]
        await run_.close()
        assert len(asyncio.all_tasks()) == 1
        (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"numbers": {"url": url}}}), encoding="utf-8")
        shared = {"file": "servers.json", "tools": ["add"]}
        file.write_text(json.dumps({**config, "tools": [{"mcp": shared}]}), encoding="utf-8")
        run_ = read_run(file)
        assert results(await run(list(run_.tools), call("add", a=2, b=3))) == ["5"]
        await run_.close()

    with served([]) as (url, _):
        asyncio.run(go(url))
