"""The base of servers' adapters, with `_fields` for requests and `_read` for answers."""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Struct

from ..settings import choose
from ..trajectory.turns import PENALTIES, LogprobKind
from ..values.plain import json_bytes
from . import protocol
from .answers import AnswerReader, Count, EngineReply, checked_request
from .errors import EngineAnswerError, EngineError
from .http import Connection, HTTPSettings, errors_at
from .protocol import Capabilities, Completion, Delta, Engine, GenerateRequest, SamplingParams, Weights

MOST_RANKS = 20
"""How many likeliest ids to ask for: vLLM's default ``--max-logprobs``."""


class ModelMeta(Struct):
    """What llama.cpp adds to a model card."""

    n_vocab: Count | None = None


class ModelCard(Struct):
    id: str = ""
    owned_by: str | None = None
    max_model_len: Count | None = None
    meta: ModelMeta | None = None


class Models(Struct):
    data: list[ModelCard] = []


class HTTPEngine(Engine):
    """An engine behind a server. An adapter's `connect` creates it."""

    path: str
    prompt_field: str
    answer: ClassVar[type[Struct]]
    stream_fields: ClassVar[dict[str, Any]] = {"stream": True}
    version_fields: ClassVar[dict[str, Any]] = {}
    check_echo = False
    no_weights = ""

    def __init__(self, connection: Connection, capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self._connection: Final = connection

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        raise NotImplementedError

    def _read(self, answer: Any, reader: AnswerReader) -> EngineReply | None:
        raise NotImplementedError

    def _send(
        self, request: GenerateRequest, more: dict[str, Any]
    ) -> tuple[bytes, Callable[[], AnswerReader]]:
        """The body of a request, and what makes a reader of its answer."""
        prompt = msgspec.json.encode(np.asarray(request.prompt_ids).tolist())
        fields = json_bytes(self._fields(request) | more)
        body = b'{"%s":%s,%s' % (self.prompt_field.encode("ascii"), prompt, fields[1:])
        sent = prompt if self.check_echo else None
        return body, lambda: AnswerReader(request, self.capabilities, self._read, sent)

    async def _generate(self, request: GenerateRequest) -> Completion:
        body, new_reader = self._send(checked_request(request, self.capabilities), {})
        reader = new_reader()
        reader.feed(await self._connection.post(self.path, body, self.answer))
        return protocol.joined([reader.close()])

    def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        body, new_reader = self._send(checked_request(request, self.capabilities), self.stream_fields)
        return self._connection.stream(self.path, body, self.answer, new_reader)

    async def _probe(self, prompt: int = 0, temperature: float = 1.0, top_k: int = 0) -> EngineReply:
        sampling = SamplingParams(1, temperature, top_k=top_k, top_logprobs=1)
        body, new_reader = self._send(GenerateRequest([prompt], sampling), {})
        reply = self._read(await self._connection.post(self.path, body, self.answer), new_reader())
        if reply is None:
            raise EngineAnswerError(f"{self.path} returned no completion")
        return reply

    async def _order(self, path: str, value: dict[str, Any] | None = None, kind: Any = None) -> Any:
        """Post JSON. Raises EngineError if the answer reports a failure."""
        body = None if value is None else json_bytes(value)
        answer = await self._connection.post(path, body, kind)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self._connection.base_url}{path} failed: {answer.get('message')}")
        return answer

    async def check(self) -> None:
        """Request ``/health``, which a server need not have."""
        await self._connection.reach("/health")

    async def set_version(self, version: str | int) -> None:
        self._check_weights()
        name = str(protocol.checked_version(version))
        await self._order("/update_weight_version", {"new_version": name, **self.version_fields}, Any)
        self.version = name

    def _check_weights(self, weights: Weights = "") -> str:
        """The folder for the server to read. Raises EngineError."""
        if not isinstance(weights, str | Path):
            raise self._unable("read weights from arrays: it needs a folder on its machine")
        if not self.capabilities.weights:
            raise EngineError(self.no_weights)
        return str(weights)

    async def close(self) -> None:
        await self._connection.close()


def sampling_fields(sampling: SamplingParams, *, max_tokens: str, seed: str) -> dict[str, Any]:
    """Return all parameters for vLLM and SGLang, whose defaults may differ from ours."""
    names = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
    fields = {max_tokens: sampling.max_tokens} | {name: getattr(sampling, name) for name in names}
    if sampling.seed is not None:
        fields[seed] = sampling.seed
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.stop:  # so that control tokens match as well
        fields |= {"stop": list(sampling.stop), "skip_special_tokens": False}
    return fields


@asynccontextmanager
async def connecting(
    base_url: str | Connection, settings: HTTPSettings | None
) -> AsyncIterator[Connection]:
    """Connect, or use a connection. Errors name the address."""
    connection = base_url if isinstance(base_url, Connection) else Connection(base_url, settings)
    try:
        with errors_at(connection.base_url):
            yield connection
    except BaseException:
        if connection is not base_url:
            await connection.close()
        raise


_COLD = 0.5
_HOT = 2.0
"""vLLM refuses higher temperatures."""
_SAME = 0.05
"""How far a logprob may differ between two requests: servers compute in 16 bits."""
_APART = 0.3
_PROBES = 6


async def probed_kind(
    engine: HTTPEngine, vocab_size: int | None, setting: LogprobKind | str | None
) -> LogprobKind:
    """What an engine's logprobs describe: the `setting`, or what probes show.

    Raw logprobs of the likeliest token do not change with the temperature. Two prompts must
    show that, since ties do not change either. Processed ones change with `top_k`, too.
    """
    if setting is not None:
        return choose(LogprobKind, "logprobs", setting, EngineError)

    async def best(prompt: int, temperature: float, top_k: int = 0) -> float:
        reply = await engine._probe(prompt, temperature, top_k)
        logprobs = [value for row in reply.top[:1] for _, value in row if value is not None]
        if not logprobs or max(logprobs) < -1e9:
            raise EngineAnswerError(f"{engine.path} did not report the logprob of the likeliest token")
        return max(logprobs)

    unmoved = 0
    for prompt in range(_PROBES if vocab_size is None else min(_PROBES, vocab_size)):
        cold, hot = await best(prompt, _COLD), await best(prompt, _HOT)
        if abs(cold - hot) < _SAME and hot < -_APART:  # processed ones would be further apart
            unmoved += 1
            if unmoved == 2:
                return LogprobKind.RAW
        if cold - hot < _APART:
            continue
        few = await best(prompt, _HOT, 2)
        if few - hot > _APART:
            return LogprobKind.PROCESSED
        if abs(few - hot) < _SAME and hot < -math.log(2) - _APART:
            # the better of two ids has at least half
            return LogprobKind.SCALED
    return LogprobKind.UNKNOWN
