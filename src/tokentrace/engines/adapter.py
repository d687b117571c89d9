"""What the adapters of servers share: sending requests, reading answers, and probing the kind of logprobs.

An adapter adds what differs: the body of a request, the structs of an answer, what the server reports of itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from ..settings import choose
from ..trajectory.turns import LogprobKind
from .answers import AnswerReader, checked_request, json_body, json_prompt
from .http import Connection, HTTPSettings
from .protocol import Capabilities, Completion, Delta, Engine, EngineError, GenerateRequest, SamplingParams, Weights


class HTTPEngine(Engine):
    """One server. Made by the `connect` of an adapter."""

    path: str
    prompt_field: str
    """The name of the prompt in a request."""
    stream_fields: ClassVar[dict[str, Any]] = {"stream": True}

    def __init__(self, connection: Connection, capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self._connection: Final = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capabilities.model or ''} at {self._connection.base_url})"

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the body of a request without the prompt."""
        raise NotImplementedError

    def _reader(self, request: GenerateRequest, prompt: bytes) -> AnswerReader:
        """Return the reader of the answer to a request, whose prompt was sent as this JSON text."""
        raise NotImplementedError

    async def check(self) -> None:
        """Request ``/health``, which all servers have. A server that does not know the path is up, too."""
        await self._connection.reach("/health")

    async def _generate(self, request: GenerateRequest) -> Completion:
        request = checked_request(request, self.capabilities)
        prompt = json_prompt(request)
        reader = self._reader(request, prompt)
        body = json_body(self.prompt_field, prompt, self._fields(request))
        return reader.whole(await self._connection.post(self.path, body, reader.answer))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Closing the iterator closes the connection, and the server ends the request."""
        request = checked_request(request, self.capabilities)
        prompt = json_prompt(request)
        body = json_body(self.prompt_field, prompt, self._fields(request) | self.stream_fields)
        return self._connection.stream(self.path, body, lambda: self._reader(request, prompt))

    async def _sample(self, prompt: int, sampling: SamplingParams, kind: Any, **fields: Any) -> Any:
        """Return the answer to a request with a prompt of one id."""
        request = GenerateRequest([prompt], sampling)
        body = json_body(self.prompt_field, json_prompt(request), self._fields(request) | fields)
        return await self._connection.post(self.path, body, kind)

    async def _order(self, path: str, value: dict[str, Any] | None = None, kind: Any = None) -> Any:
        """Post JSON. Raises EngineError if the answer reports a failure."""
        body = None if value is None else json.dumps(value, separators=(",", ":")).encode("utf-8")
        answer = await self._connection.post(path, body, kind)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self._connection.base_url}{path} failed: {answer.get('message') or 'no reason'}")
        return answer

    async def close(self) -> None:
        await self._connection.close()


def folder_of(weights: Weights, engine: str) -> str:
    """Return the folder that a server reads. Raises EngineError for arrays."""
    if not isinstance(weights, str | Path):
        raise EngineError(
            f"{engine} reads weights from a folder on its machine, not from arrays: save them, or send them with the "
            "server's own transfer and call set_version"
        )
    return str(weights)


def sampling_fields(sampling: SamplingParams, *, max_tokens: str, seed: str) -> dict[str, Any]:
    """Return sampling parameters for vLLM and SGLang, with their own names for two of them.

    Sends every setting, since a server may have other defaults.
    """
    fields: dict[str, Any] = {
        max_tokens: sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.seed is not None:
        fields[seed] = sampling.seed
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:  # so that control tokens match as well
        fields |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return fields


@asynccontextmanager
async def connecting(base_url: str | Connection, settings: HTTPSettings | None) -> AsyncIterator[Connection]:
    """Open a connection; close it again on an error."""
    connection = base_url if isinstance(base_url, Connection) else Connection(base_url, settings)
    try:
        yield connection
    except BaseException:
        if connection is not base_url:
            await connection.close()
        raise


# -- which logprobs

COLD: Final = 0.5
HOT: Final = 2.0
"""vLLM refuses higher temperatures."""
_SAME: Final = 0.05
"""How far one logprob of two requests may differ: servers compute in 16 bits, and in other batches."""
_APART: Final = 0.3
_PROBES: Final = 6


async def probed_kind(
    best: Callable[[int, SamplingParams], Awaitable[float]],
    vocab_size: int | None,
    setting: LogprobKind | str | None,
) -> LogprobKind:
    """Return which distribution an engine's logprobs describe: the user's `setting`, or what probes show.

    ``best(prompt_id, sampling)`` samples one token after a prompt of one id and returns the logprob of the *likeliest*
    one, which is the same token at every temperature. Raw logprobs do not move with the temperature; two prompts must
    show it, since a tie of two tokens moves as little. Those that move also move with `top_k` if they are of the
    sampled distribution. Tries the next id where the model is nearly certain of what follows.
    """
    if setting is not None:
        return choose(LogprobKind, "logprobs", setting, EngineError)
    unmoved = 0
    for prompt in range(_PROBES if vocab_size is None else min(_PROBES, vocab_size)):
        cold = await best(prompt, SamplingParams(1, temperature=COLD))
        hot = await best(prompt, SamplingParams(1, temperature=HOT))
        if abs(cold - hot) < _SAME and hot < -_APART:  # processed ones would be further apart
            unmoved += 1
            if unmoved == 2:
                return LogprobKind.RAW
        if cold - hot < _APART:
            continue
        few = await best(prompt, SamplingParams(1, temperature=HOT, top_k=2))
        if few - hot > _APART:
            return LogprobKind.PROCESSED
        if abs(few - hot) < _SAME and hot < -math.log(2) - _APART:  # of two ids, the better has at least a half
            return LogprobKind.SCALED
    return LogprobKind.UNKNOWN
