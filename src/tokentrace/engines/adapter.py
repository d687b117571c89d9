"""What the adapters of servers share: requests go out, answers come in, and the kind of the logprobs is found out.

An adapter is what differs: the body of a request, how an answer is read, what the server tells of itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from ..errors import shown
from ..settings import choose
from ..trajectory.inputs import POSITIVE_NOISE
from ..trajectory.turns import LogprobKind
from .answers import AnswerReader, checked_request, json_body, json_prompt, part
from .http import Connection, HTTPSettings
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    Engine,
    EngineAnswerError,
    EngineError,
    GenerateRequest,
    SamplingParams,
    Weights,
)


class HTTPEngine(Engine):
    """One server. Made by the `connect` of an adapter."""

    path: str
    """Where requests are sent."""
    prompt_field: str
    """The name of the prompt in the body of a request."""
    stream_fields: ClassVar[dict[str, Any]] = {"stream": True}
    """What asks for a stream."""

    def __init__(self, connection: Connection, capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self._connection: Final = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.capabilities.model or ''} at {self._connection.base_url})"

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        """The body of a request but for the prompt and whether to stream."""
        raise NotImplementedError

    def _reader(self, request: GenerateRequest, text: bytes) -> AnswerReader:
        """What reads the answer to a request whose prompt was sent as this JSON text."""
        raise NotImplementedError

    async def check(self) -> None:
        """Ask for ``/health``, which all servers have; one that answers without knowing the path is there, too."""
        await self._connection.reach("/health")

    async def _generate(self, request: GenerateRequest) -> Completion:
        request = checked_request(request, self.capabilities)
        text = json_prompt(request)
        reader = self._reader(request, text)
        body = json_body(self.prompt_field, text, self._fields(request))
        return reader.whole(await self._connection.post(self.path, body, reader.read))

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Closing the iterator closes the connection, upon which the server ends the request."""
        request = checked_request(request, self.capabilities)
        text = json_prompt(request)
        body = json_body(self.prompt_field, text, self._fields(request) | self.stream_fields)
        return self._connection.stream(self.path, body, lambda: self._reader(request, text))

    async def _post(self, request: GenerateRequest, fields: dict[str, Any]) -> Any:
        return await self._connection.post(self.path, json_body(self.prompt_field, json_prompt(request), fields))

    async def _tell(self, path: str, value: dict[str, Any] | None = None) -> None:
        body = None if value is None else json.dumps(value, separators=(",", ":")).encode("utf-8")
        await self._connection.tell(path, body)

    async def _ask(self, path: str, value: dict[str, Any] | None = None) -> Any:
        """As `_tell`, with an answer that says whether it was done: `EngineError` where it was not."""
        body = b"" if value is None else json.dumps(value, separators=(",", ":")).encode("utf-8")
        answer = await self._connection.post(path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            words = answer.get("message")
            raise EngineError(f"{self._connection.base_url}{path}: it was not done{f': {words}' if words else ''}")
        return answer

    async def close(self) -> None:
        await self._connection.close()


def folder_of(weights: Weights, engine: str) -> str:
    """The folder that a server is to read."""
    if not isinstance(weights, str | Path):
        raise EngineError(
            f"{engine} reads weights from a folder that its machine sees, not from arrays: save them, or send them by "
            "the server's own transfer and call set_version"
        )
    return str(weights)


def sampling_fields(sampling: SamplingParams, *, most: str, seed: str) -> dict[str, Any]:
    """Sampling parameters as vLLM and SGLang are sent them, who call two of them `most` and `seed`.

    What a server might have a default for is sent as the value that does nothing.
    """
    fields: dict[str, Any] = {
        most: sampling.max_tokens,
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
    if sampling.stop:  # in all that was sampled, control tokens too
        fields |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return fields


@asynccontextmanager
async def connecting(base_url: str | Connection, settings: HTTPSettings | None) -> AsyncIterator[Connection]:
    """A connection that is closed again if what is found out through it is an error."""
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
"""vLLM refuses temperatures above."""
_SAME: Final = 0.05
"""How far the same logprob of two requests may differ: servers compute in 16 bits, and in other batches."""
_APART: Final = 0.3
_PROBES: Final = 6


async def probed_kind(
    best: Callable[[int, SamplingParams], Awaitable[float]], vocab_size: int | None, said: LogprobKind | str | None
) -> LogprobKind:
    """Of which distribution an engine's logprobs are: what the user `said`, or what the engine shows.

    ``best(prompt_id, sampling)`` samples one token after a prompt of one id and returns the logprob of the *most
    likely* one, which is the same token at every temperature; that of the sampled one would tell nothing. Raw logprobs
    do not move with the temperature; two prompts must show it, since a tie of two tokens moves as little. Those that do
    move also move with `top_k` if they are of the distribution sampled from. Where a prompt does not tell, because the
    model is nearly certain of what follows, the next id is tried.
    """
    if said is not None:
        return choose(LogprobKind, "logprobs", said, EngineError)
    unmoved = 0
    for prompt in range(_PROBES if vocab_size is None else min(_PROBES, vocab_size)):
        cold = await best(prompt, SamplingParams(1, temperature=COLD))
        hot = await best(prompt, SamplingParams(1, temperature=HOT))
        if abs(cold - hot) < _SAME and hot < -_APART:  # were they processed, they would be further apart
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


def best_logprob(answer: Any, *path: str | int) -> float:
    """The logprob of the most likely token, at a path of an answer."""
    value = part(answer, *path)
    if type(value) not in (float, int) or not -1e9 < value <= POSITIVE_NOISE:
        raise EngineAnswerError(
            f"{'.'.join(map(str, path))}: the engine returns {shown(value)} as a logprob; where it serves logits, it "
            "cannot be used"
        )
    return float(value)
