"""Tools of MCP servers: listed once, then called in a session of the whole run or of one trajectory.

If a server cannot be reached, the model sees an error. New trajectories get a new session.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..errors import InputError
from ..settings import choose, limit
from .tools import BaseTool, ToolResult

_REFUSALS: Final = frozenset({-32601, -32602, -32603})
"""JSON-RPC codes of a working server: no such method, invalid arguments, internal error."""


class MCPSession(StrEnum):
    """How long a session with a server lives."""

    RUN = "run"
    """All trajectories share one."""
    TRAJECTORY = "trajectory"
    """Each has its own: a process of its own where the server is a command."""


@dataclass(slots=True)
class MCPConfig:
    """An MCP server: a `command` to start (stdin and stdout), or the `url` of a running one (streamable HTTP)."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Added to PATH, HOME and the like; the server gets nothing else of this environment."""
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tools: list[str] | None = None
    """Only these of its tools; None is all."""
    prefix: str = ""
    """Prepended to the names of its tools."""
    session: MCPSession = MCPSession.RUN
    start_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise InputError("an MCP server has a command or a url, and not both")
        if self.url is None and self.headers:
            raise InputError("headers are for an MCP server with a url")
        if self.command is None and (self.args or self.env or self.cwd):
            raise InputError("args, env and cwd are for an MCP server with a command")
        self.session = choose(MCPSession, "session", self.session, InputError)
        limit("start_timeout", self.start_timeout, error=InputError)

    def __str__(self) -> str:
        return f"the MCP server {self.url or Path(str(self.command)).name}"


async def mcp_tools(server: MCPConfig) -> list[BaseTool]:
    """Return the tools of a server. `close` of any tool ends the session that trajectories share."""
    session = await _Session.open(server)
    try:
        async with asyncio.timeout(server.start_timeout):
            page = await session.client.list_tools()
            listed = list(page.tools)
            while page.next_cursor is not None:
                page = await session.client.list_tools(cursor=page.next_cursor)
                listed += page.tools
    except TimeoutError:
        raise InputError(f"{server} did not list its tools within {server.start_timeout:g} s") from None
    finally:
        await session.close()
    names = [tool.name for tool in listed]
    for name in server.tools or ():
        if name not in names:
            raise InputError(f"{server} has no tool {name!r}; there are {', '.join(names)}")
    link = _Link(server)
    return [MCPTool(link, tool) for tool in listed if server.tools is None or tool.name in server.tools]


class MCPTool(BaseTool):
    """A tool of an MCP server."""

    def __init__(self, link: _Link, tool: Any) -> None:
        self._link = link
        self._tool = tool.name
        function = {
            "name": link.server.prefix + tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        super().__init__(tool_schema={"type": "function", "function": function})

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        if kwargs:
            raise InputError(f"there are settings for {self.name!r}, a tool of {self._link.server}: it has none")
        await self._link.acquire(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return await self._link.call(instance_id, self._tool, parameters)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._link.release(instance_id)

    async def close(self) -> None:
        await self._link.close()


class _Session:
    """A connection in a task of its own: mcp requires that the task which opens it also closes it."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self.has_failed = False
        """True if no new trajectory should begin with it."""
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(cls, server: MCPConfig) -> _Session:
        """Open a session. Raises InputError if the server does not become ready."""
        session = cls(server)
        try:
            async with asyncio.timeout(server.start_timeout):
                await asyncio.shield(session._opened)
        except BaseException as error:
            await session.close()
            if isinstance(error, TimeoutError):
                raise InputError(f"{server} was not ready within {server.start_timeout:g} s") from None
            raise
        return session

    @property
    def client(self) -> Any:
        return self._opened.result()

    async def close(self) -> None:
        """End it; a command that does not exit is killed."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            async with _client(self.server) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            self.has_failed = True
            if not self._opened.done():
                self._opened.set_exception(InputError(f"{self.server} cannot be used: {_message(error)}"))
                self._opened.exception()  # retrieved, even if nobody waits any more
        finally:
            self._opened.cancel()


@asynccontextmanager
async def _client(server: MCPConfig) -> AsyncIterator[Any]:
    try:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client
    except ImportError as error:
        raise InputError("tools of MCP servers need mcp 2: install tokentrace[mcp]") from error
    async with AsyncExitStack() as stack:
        if server.url is None:
            target = StdioServerParameters(command=server.command, args=server.args, env=server.env, cwd=server.cwd)
        else:  # the budget's tool_timeout limits answers
            timeout = httpx2.Timeout(30.0, read=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=server.headers, timeout=timeout))
            target = streamable_http_client(server.url, http_client=http)
        yield await stack.enter_async_context(Client(target))


class _Link:
    """The sessions with a server, of all trajectories of the running event loop."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self._loop: asyncio.AbstractEventLoop | None = None

    def _enter_loop(self) -> None:
        """Forget the sessions of an earlier event loop, which ended with it."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._lock = asyncio.get_running_loop(), asyncio.Lock()
            self._shared: list[_Session] = []
            self._sessions: dict[str, _Session] = {}
            self._users: Counter[str] = Counter()

    async def acquire(self, instance_id: str) -> None:
        """Get a session for a trajectory; all tools of a trajectory share it."""
        self._enter_loop()
        async with self._lock:
            if instance_id not in self._sessions:
                session = self._shared[-1] if self._shared else None
                if session is None or session.has_failed or self.server.session is MCPSession.TRAJECTORY:
                    session = await _Session.open(self.server)
                    if self.server.session is MCPSession.RUN:
                        self._shared.append(session)
                self._sessions[instance_id] = session
        self._users[instance_id] += 1

    async def release(self, instance_id: str) -> None:
        """Release one tool of a trajectory; the last one closes the trajectory's own session."""
        self._users[instance_id] -= 1
        if not self._users[instance_id]:
            session = self._sessions.pop(instance_id)
            if session not in self._shared:
                await session.close()

    async def call(self, instance_id: str, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Return the result of a call. A session that does not answer gets no new trajectory."""
        session = self._sessions[instance_id]
        try:
            answer = await session.client.call_tool(tool, arguments)
        except Exception as error:
            if getattr(error, "code", None) in _REFUSALS:
                return ToolResult(f"error: {_message(error)}", failed=True)
            session.has_failed = True
            problem = f"{self.server} did not answer a call of {tool}: {_message(error)}"
            return ToolResult(f"error: {problem}", failed=True, note=problem)
        return _result(answer, tool)

    async def close(self) -> None:
        """Close the sessions that trajectories share."""
        self._enter_loop()
        while self._shared:
            await self._shared.pop().close()


def _result(answer: Any, tool: str) -> ToolResult:
    texts, refused = [], []
    for block in answer.content:
        text = block.text if block.type == "text" else getattr(getattr(block, "resource", None), "text", None)
        if text is not None:
            texts.append(text)
            continue
        kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
        article = "an" if block.type in ("image", "audio") else "a"
        refused.append(f"{article} {block.type.replace('_', ' ')}" + (f" ({kind})" if kind else ""))
    if not answer.content and answer.structured_content is not None:
        texts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    content = ("error: " if answer.is_error else "") + "\n".join(texts)
    if not refused:
        return ToolResult(content, failed=bool(answer.is_error))
    note = f"{tool} returned {' and '.join(refused)}, which cannot be shown here"
    return ToolResult("\n".join([*filter(None, [content]), f"error: {note}"]), failed=True, note=note)


def _message(error: BaseException) -> str:
    """Return an error's message; task groups wrap errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(getattr(error, "message", "") or error) or type(error).__name__


def read_servers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the servers of a JSON file with ``mcpServers``, which most clients share."""
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
        return {str(name): dict(one) for name, one in servers.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no file of MCP servers, JSON with mcpServers: {_message(error)}") from error


def tools_now(servers: Sequence[MCPConfig]) -> list[BaseTool]:
    """Return the tools of servers, for code that is not asynchronous."""

    async def listed() -> list[BaseTool]:
        return [tool for server in servers for tool in await mcp_tools(server)]

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        return thread.submit(asyncio.run, listed()).result()
