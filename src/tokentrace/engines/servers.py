"""Connect to one or more servers, whichever engine they run."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..errors import brief
from .adapter import Models, connecting
from .errors import EngineAnswerError, EngineError, EngineRefusal
from .http import Connection, HTTPSettings, public_address
from .llamacpp import LlamaCppEngine
from .protocol import Engine
from .routing import Router
from .sglang import SGLangEngine
from .vllm import GATEWAY, VLLMEngine

_ADAPTERS: dict[str, tuple[Any, str, str]] = {
    "sglang": (SGLangEngine, "/get_model_info", "model_path"),
    "llama.cpp": (LlamaCppEngine, "/props", "default_generation_settings"),
    "vllm": (VLLMEngine, "/version", "version"),
}


async def connect(
    urls: str | Sequence[str], kind: str = "auto", *, settings: HTTPSettings | None = None, **options: Any
) -> Engine:
    """The engine at an address; for several addresses, a `Router`.

    `kind` is ``"vllm"``, ``"sglang"``, ``"llama.cpp"`` or ``"auto"``. `options` go to ``connect``.
    """
    addresses = [urls] if isinstance(urls, str) else list(urls)
    if not addresses:
        raise EngineError("there is no address to connect to")
    if kind not in ("auto", *_ADAPTERS):
        raise EngineError(f"the kind of an engine must be auto, {', '.join(_ADAPTERS)}, not {brief(kind)}")
    engines: list[Engine] = []
    try:
        for address in addresses:
            engines.append(await _connected(address, kind, settings, options))
        if len(engines) == 1:
            return engines[0]
        return Router(engines, names=[public_address(address) for address in addresses])
    except BaseException:
        for engine in engines:
            await engine.close()
        raise


async def _connected(
    address: str, kind: str, settings: HTTPSettings | None, options: dict[str, Any]
) -> Engine:
    async with connecting(address, settings) as connection:
        kind = await _detect(connection) if kind == "auto" else kind
        adapter = _ADAPTERS[kind][0]
        unknown = sorted(set(options) - set(inspect.signature(adapter.connect).parameters))
        if unknown:
            raise EngineError(f"{kind} has no setting {', '.join(unknown)}; leave it out")
        engine: Engine = await adapter.connect(connection, **options)
        return engine


async def _detect(connection: Connection) -> str:
    tried = []
    for kind, (_, path, field) in _ADAPTERS.items():
        try:
            answer = await connection.get(path)
            if isinstance(answer, dict) and field in answer:
                return kind
            tried.append(f"{path}: the answer has no {field}")
        except (EngineRefusal, EngineAnswerError) as error:
            tried.append(str(error).removeprefix(connection.base_url))
    with suppress(EngineRefusal, EngineAnswerError):
        if any(card.owned_by == GATEWAY for card in (await connection.get("/v1/models", Models)).data):
            return "vllm"
    raise EngineError(f"no known engine answers: {'; '.join(tried)}; use its own address, without /v1")
