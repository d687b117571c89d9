"""MCP tools: listed once, then called in a session that lasts for a run or a trajectory.

If a server does not answer, the model sees an error, and new trajectories get a new session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, brief
from ..settings import limit
from .calling import within
from .tools import BaseTool, ToolResult, failure, text_result

_REFUSALS = frozenset({-32601, -32602, -32603})
"""JSON-RPC codes of a working server: no such method, invalid arguments, internal error."""


@dataclass(slots=True)
class MCPConfig:
    """An MCP server: a `command` to start, or the `url` of a running one."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Added to PATH, HOME and the like."""
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tools: list[str] | None = None
    prefix: str = ""
    session: Literal["run", "trajectory"] = "run"
    """All trajectories share a session, or each has its own."""
    start_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise InputError("an MCP server needs either a command or a url, not both")
        if self.headers if self.url is None else self.args or self.env or self.cwd:
            raise InputError(
                "headers need an MCP server with a url; args, env and cwd need one with a command"
            )
        if self.session not in ("run", "trajectory"):
            raise InputError(f"session must be 'run' or 'trajectory', not {brief(self.session)}")
        limit("start_timeout", self.start_timeout, error=InputError)

    def __str__(self) -> str:
        return f"the MCP server {self.url or Path(str(self.command)).name}"


async def mcp_tools(server: MCPConfig) -> list[BaseTool]:
    """The tools of a server. Closing one ends the session that trajectories share."""
    session = await _open(server)
    try:
        listed = await within(session.list_tools(), server.start_timeout, f"listing the tools of {server}")
    finally:
        await session.close()
    for name in server.tools or ():
        if name not in listed:
            raise InputError(f"{server} has no tool {name!r}; it has {', '.join(listed)}")
    link = _Link(server)
    tools = [tool for name, tool in listed.items() if server.tools is None or name in server.tools]
    return [MCPTool(link, tool) for tool in tools]


class MCPTool(BaseTool):
    def __init__(self, link: _Link, tool: Any) -> None:
        self._link, self._tool, name = link, tool.name, link.server.prefix + tool.name
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        super().__init__(tool_schema={"type": "function", "function": function})

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await super().create(instance_id, **kwargs)
        await self._link.acquire(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return await self._link.sessions[instance_id].call(self._tool, parameters)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._link.release(instance_id)

    async def close(self) -> None:
        await self._link.close()


class _Link:
    """The sessions with one server, for all trajectories in the running event loop."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self._loop: asyncio.AbstractEventLoop | None = None

    def _enter_loop(self) -> None:
        """Forget an earlier event loop's sessions, which ended with it."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._lock = asyncio.get_running_loop(), asyncio.Lock()
            self._shared: list[_Session] = []
            self.sessions: dict[str, _Session] = {}

    async def acquire(self, instance_id: str) -> None:
        """Open a trajectory's session, which all its tools share."""
        self._enter_loop()
        if instance_id in self.sessions:
            return
        if self.server.session == "trajectory":
            self.sessions[instance_id] = await _open(self.server)
            return
        async with self._lock:
            if not self._shared or self._shared[-1].has_failed:
                self._shared.append(await _open(self.server))
            self.sessions[instance_id] = self._shared[-1]

    async def release(self, instance_id: str) -> None:
        """End a trajectory when its first tool is released."""
        session = self.sessions.pop(instance_id, None)
        if session is not None and session not in self._shared:
            await session.close()

    async def close(self) -> None:
        self._enter_loop()
        while self._shared:
            await self._shared.pop().close()


async def _open(server: MCPConfig) -> _Session:
    session = _Session(server)
    try:
        await within(asyncio.shield(session.client), server.start_timeout, f"the start of {server}")
    except BaseException:
        await session.close()
        raise
    return session


class _Session:
    """A connection in its own task: mcp wants one task to open and close it."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.has_failed = False
        """True if no new trajectory should use it."""
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with _connected(self.server) as client:
                self.client.set_result(client)
                await self._closing.wait()
        except Exception as error:
            self.has_failed = True
            if not self.client.done():
                self.client.set_exception(InputError(f"{self.server} cannot be used: {_message(error)}"))
                self.client.exception()  # mark it as retrieved, even if nobody is waiting
        finally:
            self.client.cancel()

    async def close(self) -> None:
        self._closing.set()
        if not self.client.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def list_tools(self) -> dict[str, Any]:
        client, tools, cursor = self.client.result(), dict[str, Any](), None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. A session that does not answer gets no new trajectories."""
        try:
            return _result(await self.client.result().call_tool(tool, arguments), tool)
        except Exception as error:
            if getattr(error, "code", None) in _REFUSALS:
                return failure(_message(error))
            self.has_failed = True
            problem = f"{self.server} did not answer a call to {tool}: {_message(error)}"
            return failure(problem, note=problem)


@asynccontextmanager
async def _connected(server: MCPConfig) -> AsyncIterator[Any]:
    try:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise InputError("tools of MCP servers need mcp 2: install tokentrace[mcp]") from error
    async with AsyncExitStack() as stack:
        if server.url is None:
            names = ("command", "args", "env", "cwd")
            target = StdioServerParameters(**{name: getattr(server, name) for name in names})
        else:  # the budget's tool_timeout limits answers
            timeout = httpx2.Timeout(30.0, read=None)
            http = await stack.enter_async_context(
                httpx2.AsyncClient(headers=server.headers, timeout=timeout)
            )
            target = streamable_http_client(server.url, http_client=http)
        yield await stack.enter_async_context(Client(target))


def _result(answer: Any, tool: str) -> ToolResult:
    texts, media = [], []
    for block in answer.content:
        resource = getattr(block, "resource", None)
        text = block.text if block.type == "text" else getattr(resource, "text", None)
        if text is not None:
            texts.append(text)
        else:
            kinds = (getattr(one, "mime_type", None) for one in (block, resource))
            media.append(next(filter(None, kinds), block.type))
    if not answer.content and answer.structured_content is not None:
        texts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    result = text_result(("error: " if answer.is_error else "") + "\n".join(texts), media, tool)
    return replace(result, failed=True) if answer.is_error else result


def _message(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):  # of a task group
        error = error.exceptions[0]
    return str(getattr(error, "message", "") or error) or type(error).__name__
