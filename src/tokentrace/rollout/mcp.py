"""Tools of MCP servers: listed once, then called in a session of the whole run or of one trajectory.

A server that ends, or that cannot be reached, becomes results that the model sees. New trajectories get a new session.
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
from weakref import WeakKeyDictionary

from ..errors import InputError
from ..settings import choose, limit, nearest
from .tools import BaseTool, ToolResult

_ANSWERS: Final = frozenset({-32601, -32602, -32603})
"""Codes of JSON-RPC by which a server that is well refuses a call: no such method, bad arguments, its own failure."""


class MCPSession(StrEnum):
    """What a session with a server belongs to."""

    RUN = "run"
    """All trajectories share one, and with it whatever the server remembers."""
    TRAJECTORY = "trajectory"
    """Each has its own: a process of its own where the server is a command."""


@dataclass(frozen=True, slots=True)
class MCPConfig:
    """An MCP server: a `command` to start, spoken to by its stdin and stdout, or the `url` of one that runs (streamable
    HTTP)."""

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Beside PATH, HOME and the like, which are all that the server gets of this process' environment."""
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tools: list[str] | None = None
    """Only these of its tools; all where None."""
    prefix: str = ""
    """Put before the names of its tools, where two servers have tools of one name."""
    session: MCPSession = MCPSession.RUN
    start_timeout: float | None = 30.0
    """Seconds until it must be ready."""

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise InputError("an MCP server has a command or a url, and not both")
        if self.url is None and self.headers:
            raise InputError("headers are for an MCP server with a url")
        if self.command is None and (self.args or self.env or self.cwd):
            raise InputError("args, env and cwd are for an MCP server with a command")
        object.__setattr__(self, "session", choose(MCPSession, "session", self.session, InputError))
        limit("start_timeout", self.start_timeout, error=InputError)

    def __str__(self) -> str:
        return f"the MCP server {self.url or Path(str(self.command)).name}"


async def mcp_tools(server: MCPConfig) -> list[BaseTool]:
    """The tools of a server. It is started or connected to and asked for them; sessions for calls begin with a rollout.

    `close` of any of them ends the session that the trajectories share.
    """
    session = await _Session.open(server)
    try:
        listed, cursor = [], None
        async with asyncio.timeout(server.start_timeout):
            while True:
                page = await session.client.list_tools(cursor=cursor)
                listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
    except TimeoutError:
        raise InputError(f"{server} did not list its tools within {server.start_timeout:g} s") from None
    finally:
        await session.close()
    names = [tool.name for tool in listed]
    for name in server.tools or ():
        if name not in names:
            raise InputError(f"{server} has no tool {name!r}; {nearest(name, names)}")
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
            raise InputError(f"there are settings for {self.name!r}, a tool of {self._link.server}: it takes none")
        await self._link.hold(instance_id)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        return await self._link.call(instance_id, self._tool, parameters)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._link.let_go(instance_id)

    async def close(self) -> None:
        await self._link.close()


class _Session:
    """A connection that a task of its own holds open: what mcp opens must be closed by the task that opened it."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self.has_failed = False
        """No new trajectory should begin with it."""
        self.tools: Counter[str] = Counter()
        """How many tools of each trajectory have it."""
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, server: MCPConfig) -> _Session:
        """A session with a server that is ready; InputError where it does not get so."""
        made = cls(server)
        try:
            async with asyncio.timeout(server.start_timeout):
                await asyncio.shield(made._opened)
        except TimeoutError:
            await made.close()
            raise InputError(f"{server} was not ready within {server.start_timeout:g} s") from None
        except BaseException:
            await made.close()
            raise
        return made

    @property
    def client(self) -> Any:
        return self._opened.result()

    async def close(self) -> None:
        """End it; a command is told to end, and killed where it does not."""
        self._closing.set()
        if not self._opened.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self) -> None:
        try:
            async with _client(self.server) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:
            self.has_failed = True
            if not self._opened.done():
                self._opened.set_exception(InputError(f"{self.server} cannot be used: {_said(error)}"))
                self._opened.exception()  # seen, even if nobody waits any more
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
            given = StdioServerParameters(command=server.command, args=server.args, env=server.env, cwd=server.cwd)
        else:  # how long an answer may take is the budget's tool_timeout
            timeout = httpx2.Timeout(30.0, read=None)
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=server.headers, timeout=timeout))
            given = streamable_http_client(server.url, http_client=http)
        yield await stack.enter_async_context(Client(given))


@dataclass(slots=True)
class _Sessions:
    """The sessions of one event loop."""

    shared: _Session | None = None
    held: dict[str, _Session] = field(default_factory=dict)
    """By trajectory."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Link:
    """The sessions with a server, of all trajectories."""

    def __init__(self, server: MCPConfig) -> None:
        self.server = server
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Sessions] = WeakKeyDictionary()

    @property
    def _sessions(self) -> _Sessions:
        return self._loops.setdefault(asyncio.get_running_loop(), _Sessions())

    async def hold(self, instance_id: str) -> None:
        """Have a session for a trajectory; the tools of a trajectory have the same one."""
        sessions = self._sessions
        if instance_id not in sessions.held:
            sessions.held[instance_id] = await self._session(sessions)
        sessions.held[instance_id].tools[instance_id] += 1

    async def _session(self, sessions: _Sessions) -> _Session:
        if self.server.session is MCPSession.TRAJECTORY:
            return await _Session.open(self.server)
        async with sessions.lock:
            if sessions.shared is None or sessions.shared.has_failed:
                sessions.shared = await _Session.open(self.server)
            return sessions.shared

    async def let_go(self, instance_id: str) -> None:
        """One tool of a trajectory less: the last one ends a session that nobody else will use."""
        sessions = self._sessions
        session = sessions.held[instance_id]
        session.tools[instance_id] -= 1
        if session.tools[instance_id]:
            return
        del sessions.held[instance_id], session.tools[instance_id]
        if session.tools:
            return
        if session is sessions.shared and session.has_failed:
            sessions.shared = None
        if session is not sessions.shared:
            await session.close()

    async def call(self, instance_id: str, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """The result of a call. Where there is no answer, the session is not for new trajectories."""
        session = self._sessions.held[instance_id]
        try:
            answer = await session.client.call_tool(tool, arguments)
        except Exception as error:
            if getattr(error, "code", None) in _ANSWERS:
                return ToolResult(f"error: {_said(error)}", failed=True)
            session.has_failed = True
            said = f"{self.server} did not answer a call of {tool}: {_said(error)}"
            return ToolResult(f"error: {said}", failed=True, note=said)
        return _result(answer, tool)

    async def close(self) -> None:
        """End the session that trajectories share."""
        sessions = self._sessions
        shared, sessions.shared = sessions.shared, None
        if shared is not None:
            await shared.close()


def _result(answer: Any, tool: str) -> ToolResult:
    """What a server answered: its texts in their order; what is no text is refused by name."""
    texts, refused = [], []
    for block in answer.content:
        text = block.text if block.type == "text" else getattr(getattr(block, "resource", None), "text", None)
        if text is None:
            refused.append(_named(block))
        else:
            texts.append(text)
    if not answer.content and answer.structured_content is not None:
        texts.append(json.dumps(answer.structured_content, ensure_ascii=False))
    said = "\n".join(texts)
    if answer.is_error:
        said = f"error: {said}"
    if not refused:
        return ToolResult(said, failed=bool(answer.is_error))
    note = f"{tool} returned {' and '.join(refused)}, which cannot be shown here"
    return ToolResult("\n".join(filter(None, [said, f"error: {note}"])), failed=True, note=note)


def _named(block: Any) -> str:
    what = f"{'an' if block.type in ('image', 'audio') else 'a'} {block.type.replace('_', ' ')}"
    kind = getattr(block, "mime_type", None) or getattr(getattr(block, "resource", None), "mime_type", None)
    where = getattr(block, "uri", None)
    return what + (f" ({kind})" if kind else "") + (f" to {where}" if where else "")


def _said(error: BaseException) -> str:
    """An error in words; of a group its first, since task groups wrap what went wrong."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(getattr(error, "message", "") or error) or type(error).__name__


def read_servers(path: Path) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file with ``mcpServers``, the form that most clients share."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
        return {str(name): dict(one) for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no file of MCP servers, JSON with mcpServers: {_said(error)}") from error


def tools_now(servers: Sequence[MCPConfig]) -> list[BaseTool]:
    """The tools of servers, for code that is not asynchronous."""

    async def listed() -> list[BaseTool]:
        return [tool for server in servers for tool in await mcp_tools(server)]

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        return thread.submit(asyncio.run, listed()).result()
