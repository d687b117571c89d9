"""Run a gateway: what `tokentrace serve` does."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from ..engines.protocol import Engine
from ..errors import InputError
from ..rendering.renderer import Renderer
from ..store.store import open_store
from .access import Access, Keys
from .admission import Admission, Limits
from .app import App
from .gateway import Gateway
from .metrics import Metrics
from .sessions import Sessions
from .tracing import Tracing, configured_tracing

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Ready = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 0
    store: str | None = None
    keys: Path | None = None
    dev: bool = False
    create_sessions: bool = False
    matcher: str | None = None
    model: str = "tokentrace"
    version: str | int | None = None
    public_health: bool = False
    patience: float = 30.0
    """How many seconds running requests have to finish when the gateway stops."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.dev and self.keys is not None:
            raise InputError("--dev means no keys: use --dev or --keys FILE, not both")
        if not self.dev and self.keys is None:
            ways = "--keys FILE (create it with: tokentrace keys FILE --admin), or --dev for anyone on"
            raise InputError(f"say who may use the gateway: {ways} this machine, without keys")
        if self.dev and self.host not in _LOOPBACK:
            problem = f"--dev serves this machine only, not {self.host}"
            raise InputError(f"{problem}: use --host 127.0.0.1, or --keys FILE")


@contextlib.asynccontextmanager
async def open_gateway(
    engine: Engine, renderer: Renderer, settings: ServeSettings, *, tracing: Tracing | None = None
) -> AsyncIterator[App]:
    keys = None if settings.keys is None else Keys(settings.keys)
    store = open_store(settings.store)
    try:
        await asyncio.to_thread(warm_up, renderer)
        create = settings.dev or settings.create_sessions
        size = renderer.tokenizer.vocabulary.size
        sessions = Sessions(store, size, matcher=settings.matcher, create=create)
        admission = Admission(sessions, settings.limits)
        about = (settings.model, settings.version, tracing or configured_tracing())
        gateway = Gateway(engine, renderer, store, sessions, Metrics(), admission, *about)
        yield App(gateway, Access(store, keys), public_health=settings.public_health)
    finally:
        await store.close()


def warm_up(renderer: Renderer) -> None:
    silent, question = renderer.silent(), {"role": "user", "content": "a"}
    silent.tokenizer.warm_up()
    parameters = {"type": "object", "properties": {"b": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"b": "c"}}}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "c"}
    stops = silent.get_stop_token_ids()
    for tools, calls, answer in ((None, {}, question), ([tool], {"tool_calls": [call]}, result)):
        # a template without tools fails again when a request has some
        with contextlib.suppress(Exception):
            prompt = silent.render_ids([question], tools=tools, add_generation_prompt=True)
            parser = silent.streaming_parser(tools=tools, prompt_ids=prompt)
            silent.bridge(prompt, stops[:1], [question], tools=tools)
            reply = {"role": "assistant", "content": "b", **calls}
            whole = silent.render_ids([question, reply], tools=tools)
            end = next(at for at in range(len(prompt), len(whole)) if whole[at] in stops) + 1
            parser.feed(whole[len(prompt) : end])
            parser.finish()
            silent.bridge(prompt, whole[len(prompt) : end], [answer], tools=tools)


async def serve(app: App, settings: ServeSettings, *, ready: Callable[[str], None]) -> None:
    """Serve until the process is told to stop, then finish running requests."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        place = f"{settings.host}:{settings.port}"
        raise InputError(f"cannot listen on {place}: {error.strerror}; use another --port") from error
    options: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}
    options |= {"lifespan": "off", "ws": "none", "proxy_headers": False}
    grace = max(1, int(settings.patience) + 1)
    config = uvicorn.Config(app, timeout_graceful_shutdown=grace, **options)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    app.server = _Server(config, app.gateway.admission, settings.patience, lambda: ready(url))
    await app.server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, admission: Admission, patience: float, ready: Ready) -> None:
        super().__init__(config)
        self._admission = admission
        self._patience = patience
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own handlers would end the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._admission.drain(self._patience)
        await super().shutdown(sockets)
