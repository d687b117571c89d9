"""A real MCP server for tests: `python mcp_server.py` serves stdin and stdout, `app()` serves HTTP."""

import os
from typing import Any

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("numbers")
_counts = {"bumps": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def bump() -> int:
    """Count how often this was called."""
    _counts["bumps"] += 1
    return _counts["bumps"]


@server.tool()
def boom() -> str:
    """Raise."""
    raise ValueError("out of order")


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """A text and a picture."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """A variable of the environment, where the server runs, and its process."""
    return f"{os.environ.get(name)} {os.getcwd()} {os.getpid()}"


def app() -> Any:
    return server.streamable_http_app()


if __name__ == "__main__":
    server.run("stdio")
