"""``tokentrace serve``."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import command
from .options import control_tokens_option, flag, number, one_of, renderer_options, value
from .output import note, working

if TYPE_CHECKING:
    from ..gateway.serving import ServeSettings
    from ..rendering.renderer import Renderer

_SETTINGS = ("host", "port", "store", "keys", "dev", "create_sessions", "matcher", "public_health")


@command
@value(
    "--engine",
    "URL",
    "The engine's address (several with commas), or 'embedded': the pocket model.",
    default="embedded",
)
@one_of("--engine-kind", ["auto", "vllm", "sglang", "llama.cpp"], "The kind of engine.", "auto")
@renderer_options
@control_tokens_option
@one_of(
    "--calls",
    ["strict", "lenient"],
    "lenient: well-formed calls outside their place count, too, as in vLLM and SGLang.",
    "strict",
)
@value("--host", "NAME", "The address to listen on.", default="127.0.0.1")
@value("--port", "N", "0 for any free port.", type=click.IntRange(0, 65535), default=8400)
@value("--store", "FILE|URL", "A file (SQLite) or postgresql://….  [default: in memory]")
@value("--keys", "FILE", "The keys of clients.", type=click.Path(dir_okay=False, path_type=Path))
@flag("--dev", text="No keys, this machine only, sessions created on first use.")
@flag("--create-sessions", text="With --keys: a request may create the session that it names.")
@value("--matcher", "NAME", "strict, normal or module:function.", default="normal")
@value("--model", "NAME", "The name for /v1/models.  [default: the engine's]")
@value("--weights", "VERSION", "The weight version, if the engine does not report it.")
@number("--max-tokens", default=32_768, text="The longest answer.")
@number("--max-concurrent", default=512, text="Concurrent answers.")
@number("--max-waiting", default=2048, least=0, text="Waiting requests; more get 429.")
@number("--max-body-mb", default=64, text="The longest request.")
@flag("--public-health", text="With --keys: answer /healthz and /readyz without a key.")
@value("--grace", "SECONDS", "Seconds to finish on exit.", type=click.FloatRange(0), default=30.0)
@flag("-q", "--quiet", text="Log only warnings.")
def serve(*, engine: str, engine_kind: str, control_tokens: str, calls: str, **options: Any) -> None:
    """Serve an engine to agents that speak OpenAI's or Anthropic's API, and record every token.

    Prints its URL when ready; the log goes to stderr, a line of JSON per request. Give an OpenAI client
    URL/sessions/ID/v1, and Anthropic's clients URL/sessions/ID. Rows are at URL/sessions/ID/rows, and URL is a
    page for your browser. See docs/gateway.md.

    \b
    Examples:
      tokentrace serve --dev
      tokentrace serve --dev --engine http://127.0.0.1:8000 --tokenizer ./Qwen3-8B --store runs.db
      tokentrace keys gateway.keys --admin
      tokentrace serve --keys gateway.keys --engine http://gpu1:8000,http://gpu2:8000 -t ./Qwen3-8B \\
        --store postgresql://gateway@db/tokentrace --host 0.0.0.0
    """
    try:
        from ..gateway.admission import Limits
        from ..gateway.serving import ServeSettings
    except ImportError as error:
        problem = 'the gateway needs extra packages: pip install "tokentrace[gateway]"'
        raise InputError(f"{problem} ({error})") from None
    from .inputs import make_renderer

    if engine == "embedded" and options["tokenizer"] not in (None, "pocket"):
        raise InputError("the embedded engine has its own tokenizer: omit --tokenizer, or add --engine URL")
    if engine != "embedded" and options["tokenizer"] is None:
        raise InputError("name the model that the engine serves: --tokenizer PATH")
    version, quiet = options["weights"], options["quiet"]
    settings = ServeSettings(
        **{name: options[name] for name in _SETTINGS},
        model=options["model"] or "",
        version=int(version) if re.fullmatch("0|[1-9][0-9]{0,17}", version or "") else version,
        patience=options["grace"],
        limits=Limits(
            body_bytes=options["max_body_mb"] * 2**20,
            max_tokens=options["max_tokens"],
            concurrent=options["max_concurrent"],
            waiting=options["max_waiting"],
        ),
    )
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s")
    for name in ("httpx", "httpx2", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    renderer = make_renderer(options, control_tokens=control_tokens, calls=calls)
    if settings.store is None and not quiet:
        note("the store is in memory and lost when the gateway stops; --store FILE keeps it")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(engine, engine_kind, renderer, settings))


async def _serve(engine: str, kind: str, renderer: Renderer, settings: ServeSettings) -> None:
    from ..engines.http import HTTPSettings
    from ..gateway.serving import open_gateway, serve
    from .inputs import connect_engine

    http = HTTPSettings(read_timeout=None)  # an agent that gives up ends the request
    with working(f"connecting to {engine}"):
        connected = await connect_engine(engine, renderer.tokenizer, kind, http)
    try:
        model = settings.model or connected.capabilities.model or renderer.tokenizer.name or "tokentrace"
        settings = replace(settings, model=model)
        async with open_gateway(connected, renderer, settings) as app:
            gc.collect()
            gc.freeze()  # loaded objects stay
            gc.set_threshold(20_000, 20, 20)  # a turn allocates thousands, hardly any in cycles
            await serve(app, settings, ready=lambda url: print(url, flush=True))
    finally:
        await connected.close()


def _loop_factory() -> Any:
    """Return uvloop's if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
