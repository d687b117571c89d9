"""Connecting by address: each server is known by what only it answers, and what is none of them is said to be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from tests.engines import test_sglang, vllm_server
from tests.engines.support import Fake, http_head, recording, serving
from tokentrace.engines import Engine, EngineError, HTTPSettings, Router, connect
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import VLLMEngine

SERVERS: dict[str, tuple[Callable[[], Fake], type[Engine]]] = {
    "vllm": (lambda: vllm_server.served(Fake()), VLLMEngine),
    "sglang": (lambda: test_sglang.served().on("/version", {"version": "0.5.23"}), SGLangEngine),
    "llamacpp": (
        lambda: (
            Fake()
            .on("/props", recording("llamacpp_props")["response"])
            .on("/v1/models", {"data": [{"id": "tiny.gguf", "meta": {"n_vocab": 1024}}]})
        ),
        LlamaCppEngine,
    ),
}


def on_a_socket(fake: Fake) -> Callable[[bytes], Awaitable[list[bytes]]]:
    """A fake server's answers, over HTTP."""

    async def answer(request: bytes) -> list[bytes]:
        head, _, body = request.partition(b"\r\n\r\n")
        method, path, _ = head.decode().split(" ", 2)
        response = await fake(httpx2.Request(method, f"http://engine{path}", content=body))
        data = await response.aread()
        length = f"content-length: {len(data)}"
        return [http_head(length, "connection: close", status=f"{response.status_code} X"), data]

    return answer


async def with_server(fake: Fake, work: Callable[[str], Awaitable[Any]]) -> Any:
    async with serving(on_a_socket(fake)) as url:
        return await work(url)


QUICK = HTTPSettings(retries=0)


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("said", [True, False])
def test_a_server_is_known_by_what_only_it_answers(kind: str, said: bool) -> None:
    fake, adapter = SERVERS[kind][0](), SERVERS[kind][1]

    async def work(url: str) -> None:
        engine = await connect(url, kind if said else "auto", vocab_size=1024, settings=QUICK)
        assert type(engine) is adapter
        assert engine.capabilities.vocab_size == 1024
        await engine.close()

    asyncio.run(with_server(fake, work))


def test_several_addresses_are_a_router_without_their_passwords() -> None:
    async def work(url: str) -> None:
        with_user = url.replace("http://", "http://me:secret@")
        router = await connect([with_user, url], vocab_size=1024, settings=QUICK)
        assert isinstance(router, Router)
        assert [one.name for one in router.circuits] == [url, url]
        await router.close()

    asyncio.run(with_server(SERVERS["vllm"][0](), work))


def test_what_is_none_of_them_is_told_with_what_was_tried() -> None:
    proxy = Fake().on("/v1/models", {"data": [{"id": "gpt"}]}).on("/props", {"a": 1}).on("/version", [1])

    async def work(url: str) -> None:
        with pytest.raises(EngineError) as caught:
            await connect(url, settings=QUICK)
        message = str(caught.value)
        assert message.startswith(url)
        for name in ("SGLang", "/get_model_info", "404", "llama.cpp", "/props", "vLLM", "/version", "without /v1"):
            assert name in message

    asyncio.run(with_server(proxy, work))


def test_settings_that_an_engine_has_not_are_refused() -> None:
    async def work(url: str) -> None:
        with pytest.raises(EngineError):
            await connect(url, model="x", check_echo=True, settings=QUICK)

    asyncio.run(with_server(SERVERS["llamacpp"][0](), work))
    for urls, kind in (([], "auto"), ("http://x", "tgi")):
        with pytest.raises(EngineError):
            asyncio.run(connect(urls, kind))
