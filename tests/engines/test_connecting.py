"""Connecting: detection of a server's capabilities, its kind of logprobs, and its type."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest

from tests.engines.dialects import FLAT, TINY, llamacpp_server, sglang_server, vllm_server
from tests.engines.support import Fake, http_head, recording, serving
from tests.loop import in_loop
from tokentrace.engines import Engine, EngineAnswerError, EngineError, HTTPSettings, Router, connect
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import Capabilities
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import VLLMEngine
from tokentrace.trajectory.turns import LogprobKind

SERVERS: dict[str, tuple[Callable[..., Fake], Any]] = {
    "vllm": (vllm_server, VLLMEngine),
    "sglang": (sglang_server, SGLangEngine),
    "llama.cpp": (llamacpp_server, LlamaCppEngine),
}
QUICK = HTTPSettings(retries=0)
KINDS = ["processed", "scaled", "raw"]


def connected(kind: str, fake: Fake, **options: Any) -> Capabilities:
    engine: Engine = asyncio.run(SERVERS[kind][1].connect(fake.connection(), **options))
    return engine.capabilities


FULL = replace(TINY, versions=True, structures=True)
VLLM = replace(FULL, engine="vllm", version="0.32.0")
OFF = replace(VLLM, aborts=False, pauses=False, versions=False, weights=False)
CAPABLE = [
    ("vllm", {"native": True}, replace(VLLM, top_logprobs=19)),
    ("vllm", {"native": False}, OFF),
    ("sglang", {}, replace(FULL, engine="sglang", version="0.5.23")),
]


@pytest.mark.parametrize(("kind", "options", "expected"), CAPABLE, ids=["vllm", "vllm by completions", "sglang"])
@pytest.mark.parametrize("mode", KINDS)
def test_connecting_detects_capabilities(kind: str, options: Any, expected: Capabilities, mode: str) -> None:
    fake = SERVERS[kind][0](mode=mode, **options)
    assert connected(kind, fake, vocab_size=1024) == replace(expected, logprobs=LogprobKind(mode))


def test_capabilities_of_llamacpp() -> None:
    assert connected("llama.cpp", llamacpp_server()) == Capabilities(
        "llama.cpp",
        version="b0-unknown",
        model="tiny.gguf",
        max_length=4096,
        vocab_size=1024,
        logprobs=LogprobKind.PROCESSED,
        top_logprobs=20,
        structures=True,
        sampling=frozenset({"min_p", "repetition_penalty"}),
    )
    props = Fake().on("/props", recording("llamacpp_props")["response"])
    assert connected("llama.cpp", props).vocab_size is None
    assert connected("llama.cpp", props, logprobs="raw", vocab_size=9).logprobs is LogprobKind.RAW
    with pytest.raises(EngineAnswerError):
        connected("llama.cpp", Fake().on("/props", []))


def test_sglang_needs_a_vocabulary_size_and_experts_if_they_are_requested() -> None:
    with pytest.raises(EngineError):
        connected("sglang", sglang_server())
    assert connected("sglang", sglang_server(vocab_size=77)).vocab_size == 77
    fake = sglang_server(experts=6, vocab_size=77)
    assert asyncio.run(SGLangEngine.connect(fake.connection(), routed_experts=True))._experts == 6
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        connected("sglang", sglang_server(experts=0, vocab_size=77), routed_experts=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mode", KINDS)
def test_the_logprobs_kind_does_not_depend_on_the_sampled_tokens(mode: str, native: bool) -> None:
    """The logprob of the sampled token differs between draws, for every kind."""
    for seed in range(30):
        for logits in (FLAT, FLAT * 4, np.log(np.r_[0.6, 0.3, np.full(98, 0.1 / 98)])):
            fake = vllm_server(mode=mode, native=native, logits=logits, seed=seed)
            assert connected("vllm", fake, vocab_size=1024).logprobs is LogprobKind(mode)


# -- connecting by address


@asynccontextmanager
async def on_a_socket(fake: Fake) -> AsyncIterator[str]:
    """Serve a fake server over HTTP."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, remainder = head.split(" ", 2)
        length = re.search(r"content-length: *(\d+)", remainder.lower())
        body = await reader.readexactly(int(length[1])) if length else b""
        response = await fake(httpx2.Request(method, f"http://engine{path}", content=body))
        data = await response.aread()
        writer.write(http_head(f"content-length: {len(data)}", "connection: close", status=f"{response.status_code} X"))
        writer.write(data)
        writer.close()

    async with serving(handle) as url:
        yield url


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("named", [True, False])
@in_loop
async def test_servers_are_recognised_by_their_own_endpoints(kind: str, named: bool) -> None:
    async with on_a_socket(SERVERS[kind][0]()) as url:
        engine = await connect(url, kind if named else "auto", vocab_size=1024, settings=QUICK)
        assert type(engine) is SERVERS[kind][1]
        assert engine.capabilities.vocab_size == 1024
        await engine.close()


@in_loop
async def test_several_addresses_are_a_router_without_their_passwords() -> None:
    async with on_a_socket(vllm_server()) as url:
        with_user = url.replace("http://", "http://me:secret@")
        router = await connect([with_user, url], vocab_size=1024, settings=QUICK)
        assert isinstance(router, Router)
        assert [one.name for one in router.circuits] == [url, url]
        await router.close()


@in_loop
async def test_an_unknown_server_is_an_error_with_what_was_tried() -> None:
    proxy = Fake().on("/v1/models", {"data": [{"id": "gpt"}]}).on("/props", {"a": 1}).on("/version", [1])
    async with on_a_socket(proxy) as url:
        with pytest.raises(EngineError) as caught:
            await connect(url, settings=QUICK)
    assert str(caught.value).startswith(url)
    for name in ("/get_model_info", "404", "/props", "/version", "without /v1"):
        assert name in str(caught.value)


@in_loop
async def test_settings_that_the_engine_does_not_have_are_refused() -> None:
    async with on_a_socket(llamacpp_server()) as url:
        for urls, kind, options in ((url, "auto", {"model": "x"}), ([], "auto", {}), ("http://x", "tgi", {})):
            with pytest.raises(EngineError):
                await connect(urls, kind, settings=QUICK, **options)
