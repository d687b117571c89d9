"""Starts a vLLM server on a free port of this machine."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

STARTS_WITHIN = 600.0
"""Seconds. It takes one minute on two cores that are idle."""
STOPS_WITHIN = 30.0
TAIL = 60
"""Number of log lines that an error shows."""
OPTIONS = (
    "--dtype=float32",
    "--enforce-eager",  # compiling takes minutes
    "--enable-scale-out",  # else there is no /inference/v1/generate
    "--enable-prompt-tokens-details",
    "--block-size=32",
    "--max-model-len=2048",
)
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_SERVER_DEV_MODE": "1",  # pausing
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def vllm_server(python: str, model: Path, scratch: Path, *options: str) -> Iterator[str]:
    """Start vLLM with this Python; yields its address once healthy; `options` follow `OPTIONS` (raw logprobs)."""
    port = _free_port()
    # not `vllm serve`, which reads the version of the package vllm: the one for CPUs is named vllm-cpu
    command = [python, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--served-model-name=pocket"]
    command += ["--host=127.0.0.1", f"--port={port}", *OPTIONS, *options]
    folders = {"VLLM_CACHE_ROOT": str(scratch / "cache"), "VLLM_CONFIG_ROOT": str(scratch / "config")}
    log = scratch / "vllm.log"
    with log.open("wb") as out:
        # a new session, so that its child processes end with it
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | SETTINGS | folders, cwd=scratch, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log)
            yield url
        finally:
            _end(process)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN
    with httpx2.Client(timeout=10.0, trust_env=False) as client:
        while True:
            with suppress(httpx2.TransportError):
                if client.get(f"{url}/health").is_success:
                    return
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if time.monotonic() < deadline:
                    continue
                raise RuntimeError(f"vLLM is not healthy after {STARTS_WITHIN:g} s{_tail(log)}") from None
            raise RuntimeError(f"vLLM ended with {process.returncode} instead of starting{_tail(log)}")


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
    return "; the end of its log:\n" + "\n".join(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process group; kill it if that takes too long."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOPS_WITHIN)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
