"""Connect to one or more servers, whichever engine they run."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from ..errors import brief
from .adapter import Models, connecting
from .errors import EngineAnswerError, EngineError, EngineRefusal
from .http import Connection, HTTPSettings, public_address
from .llamacpp import LlamaCppEngine
from .protocol import Engine
from .routing import Router
from .sglang import SGLangEngine
from .vllm import GATEWAY, VLLMEngine

_ADAPTERS: Final[dict[str, tuple[str, Any, str, str]]] = {
    "sglang": ("SGLang", SGLangEngine, "/get_model_info", "model_path"),
    "llama.cpp": ("llama.cpp", LlamaCppEngine, "/props", "default_generation_settings"),
    "vllm": ("vLLM", VLLMEngine, "/version", "version"),
}
"""A title, the adapter, a path and a field of its answer. Other engines have ``/version`` too, so vLLM is last."""


async def connect(
    urls: str | Sequence[str], kind: str = "auto", *, settings: HTTPSettings | None = None, **options: Any
) -> Engine:
    """Return the engine at an address; for several addresses, a `Router`.

    `kind` is ``"vllm"``, ``"sglang"``, ``"llama.cpp"`` or ``"auto"``. `options` go to the adapter's ``connect``. Raises
    EngineError naming the address and what was tried.
    """
    addresses = [urls] if isinstance(urls, str) else list(urls)
    if not addresses:
        raise EngineError("there is no address to connect to, such as 'http://127.0.0.1:8000'")
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


async def _connected(address: str, kind: str, settings: HTTPSettings | None, options: dict[str, Any]) -> Engine:
    async with connecting(address, settings) as connection:
        title, adapter, *_ = _ADAPTERS[await _detect(connection) if kind == "auto" else kind]
        unknown = sorted(set(options) - set(inspect.signature(adapter.connect).parameters))
        if unknown:
            raise EngineError(f"{title} has no setting {', '.join(unknown)}; leave it out")
        engine: Engine = await adapter.connect(connection, **options)
        return engine


async def _detect(connection: Connection) -> str:
    tried = []
    for kind, (title, _, path, field) in _ADAPTERS.items():
        try:
            answer = await connection.get(path)
        except (EngineRefusal, EngineAnswerError) as error:
            tried.append(f"{title}: {str(error).removeprefix(connection.base_url)}")
            continue
        if isinstance(answer, dict) and field in answer:
            return kind
        tried.append(f"{title}: {path}: the answer has no {field}")
    with suppress(EngineRefusal, EngineAnswerError):
        if any(card.owned_by == GATEWAY for card in (await connection.get("/v1/models", Models)).data):
            return "vllm"
    raise EngineError(
        f"no known engine answers here. Tried {'; '.join(tried)}. Use the address of the engine's own server, without "
        "/v1 and with no gateway in front of it, or name the engine"
    )
