"""vLLM: ``/inference/v1/generate``, or ``/v1/completions`` with ids where that is off.

Start it with ``--enable-scale-out`` (the first endpoint is off without), ``--logprobs-mode processed_logprobs`` (the
default is raw) and ``--enable-prompt-tokens-details`` (for `Completion.cached_tokens`). Pausing needs
``VLLM_SERVER_DEV_MODE=1``.

What is made the same here: vLLM clips a completion that does not fit without saying so, so such a request is not sent;
its ids in ``abort_requests`` have a prefix that is not in the request; its model's ``generation_config.json`` may
change how ``/v1/completions`` samples, so every setting is sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from ..tokens.tokenizer import Ids
from .answers import (
    Arriving,
    answered_count,
    answered_ids,
    answered_logprobs,
    answered_text,
    best_logprob,
    check_prompt_count,
    check_prompt_echo,
    checked_prompt,
    completion_kind,
    json_body,
    part,
    probed_kind,
    rows,
    said_kind,
    same_ids,
    table,
)
from .http import Connection, HTTPSettings
from .protocol import (
    Capabilities,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    LogprobKind,
    Logprobs,
    SamplingParams,
)

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
_ABORTED_ID: Final = "generate-tokens-"
"""What vLLM puts before the id of a request; an abort without it is answered 200, and nothing happens."""
_TOKEN_ID: Final = "token_id:"
_PROMPT: Final = {GENERATE: "token_ids", COMPLETIONS: "prompt"}
_LOGPROBS: Final = {GENERATE: "content", COMPLETIONS: "token_logprobs"}


class VLLMEngine:
    """One vLLM server. Made by `connect`."""

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        *,
        path: str = GENERATE,
        check_echo: bool = True,
        pause_mode: Literal["keep", "wait", "abort"] = "keep",
    ) -> None:
        self._connection: Final = connection
        self._capabilities: Final = capabilities
        self._path: Final = path
        self._check_echo: Final = check_echo
        self._pause_mode: Final = pause_mode

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str | None = None,
        check_echo: bool = True,
        pause_mode: Literal["keep", "wait", "abort"] = "keep",
        settings: HTTPSettings | None = None,
    ) -> VLLMEngine:
        """Find out what a server can do; some single tokens are sampled for that.

        `model` is needed where several are served. vLLM does not tell the size of its vocabulary: give `vocab_size`
        (the tokenizer's) to have ids checked before they are sent and after they are returned. Nor does it tell which
        logprobs it returns: those of the likeliest token are compared at two temperatures, unless `logprobs` says
        which they are. Where that does not tell, they are ``UNKNOWN``.
        `check_echo` has each prompt sent back and compared, which costs as much as the prompt is long; without it,
        its length is compared. `pause_mode` is what `pause` does to requests under way: they wait (``"keep"``), are
        finished first (``"wait"``), or end with ``ABORT``.
        """
        connection = base_url if isinstance(base_url, Connection) else Connection(base_url, settings)
        try:
            served = rows(part(await connection.get("/v1/models"), "data"), "data")
            card = _card(served, model)
            version = await connection.found("/version")
            paused = await connection.found("/is_paused")
            if isinstance(paused, dict) and paused.get("is_paused"):
                raise EngineError(f"{connection.base_url} is paused: resume it before connecting")
            found = Capabilities(
                engine="vllm",
                version=answered_text(version.get("version"), "version") if isinstance(version, dict) else None,
                model=answered_text(part(card, "id"), "data.id"),
                max_length=answered_count(card.get("max_model_len"), "max_model_len"),
                vocab_size=vocab_size,
                streams=True,
                pauses=paused is not None,
            )
            engine = cls(connection, found, check_echo=check_echo, pause_mode=pause_mode)
            return await engine._probed(said_kind(logprobs))
        except BaseException:
            if connection is not base_url:
                await connection.close()
            raise

    async def _probed(self, kind: LogprobKind | None) -> VLLMEngine:
        """The same engine with the endpoint that is on, and with what an answer of it shows."""
        path = GENERATE
        try:
            choice = await self._sample_one(path, 0, SamplingParams(1))
        except EngineRefusal as error:
            if error.status not in (403, 404, 405):
                raise
            path = COMPLETIONS
            choice = await self._sample_one(path, 0, SamplingParams(1))

        async def best(prompt: int, temperature: float, top_k: int) -> float:
            sampling = SamplingParams(1, temperature=temperature, top_k=top_k)
            return _best_logprob(await self._sample_one(path, prompt, sampling), path)

        found = replace(
            self._capabilities,
            logprobs=kind or await probed_kind(best, self._capabilities.vocab_size),
            aborts=path == GENERATE,
            versions=choice.get("weight_versions") is not None,
        )
        return VLLMEngine(self._connection, found, path=path, check_echo=self._check_echo, pause_mode=self._pause_mode)

    async def _sample_one(self, path: str, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
        fields = self._fields(path, sampling, logprobs=2)  # with 1, generate returns that of the sampled token alone
        body = json_body(_PROMPT[path], np.array([prompt], np.int32), None, fields)
        answer = await self._connection.post(path, body)
        choice = table(part(answer, "choices", 0), "choices[0]")
        _pieces(choice, path, None)
        return choice

    @property
    def capabilities(self) -> Capabilities:
        """What was found out at `connect`."""
        return self._capabilities

    async def generate(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> Completion:
        """Sample a completion."""
        ids = checked_prompt(prompt_ids, sampling, self._capabilities)
        fields = self._fields(self._path, sampling, request_id=request_id)
        answer = await self._connection.post(self._path, json_body(_PROMPT[self._path], ids, wire, fields))
        reader = self._reader(ids, sampling)
        reader.feed(answer)
        return reader.whole()

    def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> AsyncGenerator[Delta]:
        """As `generate`, in pieces. Closing the iterator closes the connection, upon which vLLM ends the request."""
        ids = checked_prompt(prompt_ids, sampling, self._capabilities)
        fields = self._fields(self._path, sampling, request_id=request_id)
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return self._connection.stream(
            self._path,
            json_body(_PROMPT[self._path], ids, wire, fields),
            lambda: self._reader(ids, sampling),
        )

    def _reader(self, prompt: Ids, sampling: SamplingParams) -> _Reader:
        return _Reader(self._path, prompt, sampling, self._capabilities, self._check_echo)

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled."""
        if not self._capabilities.aborts:
            raise EngineError("vLLM ends requests by id only where it was started with --enable-scale-out")
        body = json.dumps({"request_ids": [_ABORTED_ID + request_id]})
        await self._connection.tell("/inference/v1/abort_requests", body.encode("utf-8"))

    async def pause(self) -> None:
        """Let no request go on. Whoever changes the weights also empties the prefix cache (``/reset_prefix_cache``)."""
        self._refuse_pausing()
        await self._connection.tell(f"/pause?mode={self._pause_mode}&clear_cache=false")

    async def resume(self) -> None:
        """Let requests go on."""
        self._refuse_pausing()
        await self._connection.tell("/resume")

    async def is_paused(self) -> bool:
        """Whether the server is paused, by whomever."""
        self._refuse_pausing()
        return part(await self._connection.get("/is_paused"), "is_paused") is True

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    def _refuse_pausing(self) -> None:
        if not self._capabilities.pauses:
            raise EngineError("vLLM can be paused only where it was started with VLLM_SERVER_DEV_MODE=1")

    def _fields(
        self, path: str, sampling: SamplingParams, *, logprobs: int = 0, request_id: str | None = None
    ) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": logprobs,
        }
        if sampling.seed is not None:
            params["seed"] = sampling.seed
        if sampling.stop_token_ids:
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        fields: dict[str, Any] = {"model": self._capabilities.model}
        if path == COMPLETIONS:
            fields |= params
            return fields | {"add_special_tokens": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
        fields |= {"sampling_params": params, "return_token_ids": self._check_echo}
        return fields if request_id is None else fields | {"request_id": request_id}


class _Reader(Arriving):
    """An answer, whole or in the chunks of a stream, which carry what is new."""

    def __init__(
        self, path: str, prompt: Ids, sampling: SamplingParams, capabilities: Capabilities, check_echo: bool
    ) -> None:
        super().__init__("vLLM", sampling, completion_kind(sampling, capabilities))
        self._path: Final = path
        self._prompt: Final = prompt
        self._vocab_size: Final = capabilities.vocab_size
        self._echo_due = check_echo

    def feed(self, answer: Any) -> Delta | None:
        usage = table(answer, "the answer").get("usage")
        if isinstance(usage, dict):
            check_prompt_count(usage.get("prompt_tokens"), self._prompt)
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = answered_count(cached, "cached_tokens")
        choices = rows(part(answer, "choices"), "choices")
        if not choices:
            return None
        choice = table(choices[0], "choices[0]")
        if self._echo_due:
            echo = part(choice if self._path == COMPLETIONS else answer, "prompt_token_ids")
            check_prompt_echo(echo, self._prompt)
            self._echo_due = False
        ids, logprobs = _pieces(choice, self._path, self._vocab_size)
        reason = choice.get("finish_reason")
        if reason is None:
            return self.take(ids, logprobs)
        self.end(ids, logprobs, reason, choice.get("stop_reason"), choice.get("weight_versions"))
        return None


def _pieces(choice: dict[str, Any], path: str, vocab_size: int | None) -> tuple[Ids, Logprobs]:
    ids = answered_ids(part(choice, "token_ids"), "token_ids", vocab_size)
    if not len(ids):
        told = choice.get("logprobs")
        given = None if told is None else table(told, "logprobs").get(_LOGPROBS[path])
        return ids, answered_logprobs([] if given is None else given, ids, "logprobs")
    if path == COMPLETIONS:
        given = part(choice, "logprobs", "token_logprobs")
        logprobs = answered_logprobs(given, ids, "logprobs.token_logprobs")
        tokens = rows(part(choice, "logprobs", "tokens"), "logprobs.tokens")
        if all(isinstance(token, str) and token.startswith(_TOKEN_ID) for token in tokens):  # else they are text
            same_ids([_number(token.removeprefix(_TOKEN_ID)) for token in tokens], ids, "logprobs.tokens")
        return ids, logprobs
    content = rows(part(choice, "logprobs", "content"), "logprobs.content")
    logprobs = answered_logprobs([part(entry, "logprob") for entry in content], ids, "logprobs.content")
    same_ids([part(entry, "token_id") for entry in content], ids, "logprobs.content")
    return ids, logprobs


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _best_logprob(choice: Any, path: str) -> float:
    """The logprob of the likeliest token: one of two, or more, that are told."""
    if path == COMPLETIONS:
        told = table(part(choice, "logprobs", "top_logprobs", 0), "top_logprobs[0]")
        return max([best_logprob(value, "top_logprobs[0]") for value in told.values()], default=-math.inf)
    for row in rows(part(choice, "logprobs", "content", 0, "top_logprobs"), "top_logprobs"):
        if part(row, "rank") == 1:
            return best_logprob(part(row, "logprob"), "top_logprobs")
    raise EngineAnswerError("vLLM did not tell the logprob of the likeliest token, which was asked for")


def _card(served: list[Any], model: str | None) -> dict[str, Any]:
    names = [answered_text(part(card, "id"), "data.id") for card in served]
    if model is None and len(names) != 1:
        raise EngineError(f"the server has {len(names)} models: say which with model=, of {names}")
    for card in served:
        if model is None or card["id"] == model:
            return dict(card)
    raise EngineRefusal(f"the server has no model {model!r}, but {names}", status=404)
