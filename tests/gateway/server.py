"""A gateway for tests: a real server on a free port, in a thread, whose engine records its prompts."""

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tokentrace import Renderer, create_renderer
from tokentrace.engines import EmbeddedEngine, Engine
from tokentrace.gateway.app import App
from tokentrace.gateway.serving import ServeSettings, open_gateway, serve
from tokentrace.gateway.tracing import Tracing
from tokentrace.pocket import POCKET

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "compute",
            "description": "Computes a formula.",
            "parameters": {"type": "object", "properties": {"formula": {"type": "string"}}, "required": ["formula"]},
        },
    }
]


@dataclass
class Served:
    url: str
    app: App
    loop: asyncio.AbstractEventLoop
    prompts: list[list[int]] = field(default_factory=list)

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send a request; returns the status and the body, parsed if it is JSON."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        if data is not None:
            request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        with contextlib.suppress(ValueError):
            return status, json.loads(raw)
        return status, raw

    def chat(self, session: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        return self.call("POST", f"/sessions/{session}/v1/chat/completions", body, headers)

    def send(self, session: str, body: Any, buffer_size: int = 1 << 16) -> socket.socket:
        """Send a chat request without reading the answer, of which the system buffers about `buffer_size` bytes."""
        address, raw = urlsplit(self.url), json.dumps(body).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_size)
        connection.connect((address.hostname, address.port))
        path = f"/sessions/{session}/v1/chat/completions"
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        return connection

    def state(self, session: str) -> Any:
        status, state = self.call("GET", f"/sessions/{session}")
        assert status == 200, state
        return state

    def rows(self, session: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/sessions/{session}/rows") as response:
            return [json.loads(line) for line in response.read().splitlines()]

    def record(self, session: str) -> Any:
        return self.run(self.app.gateway.sessions.get(session)).session

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)


def until(condition: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


def recording_prompts(engine: Engine, prompts: list[list[int]]) -> Engine:
    """Make an engine append each of its prompts to `prompts`."""

    def record(inner: Callable[..., Any]) -> Callable[..., Any]:
        def recording(prompt_ids: Any, sampling: Any, **options: Any) -> Any:
            prompts.append([int(id) for id in prompt_ids])
            return inner(prompt_ids, sampling, **options)

        return recording

    engine.generate = record(engine.generate)  # type: ignore[method-assign]
    engine.stream = record(engine.stream)  # type: ignore[method-assign]
    return engine


@contextlib.contextmanager
def gateway_server(
    engine: Callable[[], Engine] | None = None,
    renderer: Renderer | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> Iterator[Served]:
    """Run a gateway on a free port, with the embedded engine unless another is given; `--dev` without keys."""
    if "keys" not in settings:
        settings.setdefault("dev", True)
    options = ServeSettings(**{"port": 0, "patience": 5.0, "model": "pocket", **settings})
    running: dict[str, Any] = {}
    ready = threading.Event()
    prompts: list[list[int]] = []

    async def main() -> None:
        recorded = recording_prompts((engine or (lambda: EmbeddedEngine(seed=0)))(), prompts)
        try:
            async with open_gateway(recorded, renderer or create_renderer(POCKET), options, tracing=tracing) as app:
                running.update(app=app, loop=asyncio.get_running_loop())
                await serve(app, options, ready=lambda url: (running.update(url=url), ready.set()))
        finally:
            await recorded.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            running["error"] = error
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    if "error" in running:
        raise running["error"]
    try:
        yield Served(running["url"], running["app"], running["loop"], prompts)
    finally:
        running["app"].server.should_exit = True
        thread.join(30)
        if "error" in running:
            raise running["error"]
        assert not thread.is_alive()
