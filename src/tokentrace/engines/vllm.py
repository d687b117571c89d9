"""vLLM: ``/inference/v1/generate``, or ``/v1/completions`` with ids where that is off.

Start it with ``--enable-scale-out`` (enables the first endpoint), ``--logprobs-mode processed_logprobs`` (the default
is raw) and ``--enable-prompt-tokens-details`` (for `Completion.cached_tokens`). Pausing needs
``VLLM_SERVER_DEV_MODE=1``.

What is special about vLLM: it clips a completion that does not fit without a word, so such a request is not sent; ids
in ``abort_requests`` need a prefix that the request does not have; the model's ``generation_config.json`` may change
how ``/v1/completions`` samples, so every setting is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from msgspec import Raw, Struct

from ..tokens.ids import check_ids, common_prefix
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, connecting, folder_of, probed_kind, sampling_fields
from .answers import AnswerReader, Count, Logprob, TokenId, VersionRow, answered_ids, decode, same_ids, scored_ids
from .channels import answered_top, experts_of, npy_experts
from .http import Connection, HTTPSettings
from .protocol import (
    NO_CHANNELS,
    OPTIONAL,
    ROUTED_EXPERTS,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    GenerateRequest,
    LogprobKind,
    Logprobs,
    SamplingParams,
    Weights,
    checked_version,
)

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
_ABORT_PREFIX: Final = "generate-tokens-"
"""vLLM prepends it to the id of a request; an abort without it is answered 200 and does nothing."""
_TOKEN_ID: Final = "token_id:"
_PROMPT: Final = {GENERATE: "token_ids", COMPLETIONS: "prompt"}
MAX_LOGPROBS: Final = 20
"""The default of vLLM's ``--max-logprobs``."""
PauseMode = Literal["keep", "wait", "abort"]

# -- answers


class _Alternative(Struct):
    token_id: TokenId
    logprob: Logprob | None = None
    rank: int | None = None


class _Token(Struct):
    token_id: TokenId
    logprob: Logprob
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(Struct):
    content: list[_Token] | None = None
    """Of ``/inference/v1/generate``; the other fields are of ``/v1/completions``."""
    token_logprobs: list[Logprob] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, Logprob | None]] | None = None


class _Scored(Struct):
    logprob: Logprob


class _Choice(Struct):
    token_ids: list[TokenId] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VersionRow] | None = None
    routed_experts: str | None = None
    prompt_token_ids: Raw = Raw(b"null")
    prompt_logprobs: list[dict[str, _Scored] | None] | None = None


class _PromptDetails(Struct):
    cached_tokens: Count | None = None


class _Usage(Struct):
    prompt_tokens: Count | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: Raw = Raw(b"null")


class _Card(Struct):
    id: str
    max_model_len: Count | None = None


class _Models(Struct):
    data: list[_Card]


class VLLMEngine(HTTPEngine):
    """One vLLM server. Made by `connect`."""

    stream_fields: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        *,
        path: str = GENERATE,
        check_echo: bool = True,
        pause_mode: PauseMode = "keep",
    ) -> None:
        super().__init__(connection, capabilities)
        self.path, self.prompt_field = path, _PROMPT[path]
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
        pause_mode: PauseMode = "keep",
        max_logprobs: int = MAX_LOGPROBS,
        settings: HTTPSettings | None = None,
    ) -> VLLMEngine:
        """Find out what a server can do; some single tokens are sampled for that.

        `model` is required if several are served. vLLM reports neither its vocabulary's size nor its kind of logprobs:
        `vocab_size` (the tokenizer's) lets ids be checked, and `logprobs` skips the probe of single tokens at two
        temperatures, which may end in ``UNKNOWN``. `check_echo` compares each prompt with the one that the server read;
        without it, only the lengths are compared. `pause_mode` is what `pause` does to requests under way: they wait
        (``"keep"``), finish first (``"wait"``), or end with ``ABORT``. `max_logprobs` is the server's
        ``--max-logprobs``; ``/inference/v1/generate`` reports one alternative less.

        A server with ``--enable-return-routed-experts`` fills the channel ``"routed_experts"``.
        """
        async with connecting(base_url, settings) as connection:
            card = _card((await connection.get("/v1/models", _Models)).data, model)
            version = (await connection.find("/version", dict[str, str]) or {}).get("version")
            paused = await connection.find("/is_paused", dict[str, bool])
            weights = await connection.find("/weight_info", dict[str, str | None])
            if (paused or {}).get("is_paused"):
                raise EngineError(f"{connection.base_url} is paused: resume it before connecting")
            capabilities = Capabilities(
                engine="vllm",
                version=version,
                model=card.id,
                max_length=card.max_model_len,
                vocab_size=vocab_size,
                streams=True,
                pauses=paused is not None,
                sampling=frozenset(OPTIONAL),
                weights=paused is not None and weights is not None,
            )
            engine = cls(connection, capabilities, check_echo=check_echo, pause_mode=pause_mode)
            try:
                choice = await engine._sample_one(0, SamplingParams(1))
            except EngineRefusal as error:
                if error.status not in (403, 404, 405):
                    raise
                engine = cls(connection, capabilities, path=COMPLETIONS, check_echo=check_echo, pause_mode=pause_mode)
                choice = await engine._sample_one(0, SamplingParams(1))
            engine.capabilities = replace(
                capabilities,
                logprobs=await probed_kind(engine._best_logprob, vocab_size, logprobs),
                aborts=engine.path == GENERATE,
                versions=choice.weight_versions is not None,
                # vLLM ignores unknown fields: without a version, it might ignore the request for JSON
                structures=version is not None,
                # generate counts the sampled id among them
                top_logprobs=max(0, max_logprobs - (engine.path == GENERATE)),
            )
            engine.version = (weights or {}).get("weight_version")
            return engine

    async def _sample_one(self, prompt: int, sampling: SamplingParams) -> _Choice:
        request = GenerateRequest([prompt], sampling)
        fields = self._fields(request, logprobs=2)  # with 1, generate returns only that of the sampled token
        answer: _Answer = await self._sample(prompt, sampling, _Answer, **fields)
        if not answer.choices:
            raise EngineAnswerError("vLLM returned no choices")
        return answer.choices[0]

    async def _best_logprob(self, prompt: int, sampling: SamplingParams) -> float:
        """Return the logprob of the likeliest token: one of two, or more, that are reported."""
        logprobs = (await self._sample_one(prompt, sampling)).logprobs or _Logprobs()
        if self.path == COMPLETIONS:
            values = [*(logprobs.top_logprobs or [{}])[0].values()]
        else:
            alternatives = (logprobs.content or [_Token(0, 0.0)])[0].top_logprobs or []
            values = [one.logprob for one in alternatives if one.rank == 1]
        best = max((value for value in values if value is not None), default=-math.inf)
        if best < -1e9:
            raise EngineAnswerError("vLLM did not report the logprob of the likeliest token")
        return best

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """Return the ``prompt_logprobs`` of ``/v1/completions``, which are raw."""
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        body = {"model": self.capabilities.model, "prompt": checked.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._order(COMPLETIONS, body | {"add_special_tokens": False, "temperature": 0}, _Answer)
        rows = (answer.choices[0].prompt_logprobs if answer.choices else None) or []
        pairs = zip(rows[1:], checked[1:].tolist(), strict=False)
        scored = [row[str(one)].logprob for row, one in pairs if row is not None and str(one) in row]
        return scored_ids(scored, checked, "prompt_logprobs")

    async def abort(self, request_id: str) -> None:
        if not self.capabilities.aborts:
            raise EngineError("vLLM aborts requests by id only if it was started with --enable-scale-out")
        await self._order("/inference/v1/abort_requests", {"request_ids": [_ABORT_PREFIX + request_id]})

    async def pause(self) -> None:
        self._refuse_pausing()
        await self._order(f"/pause?mode={self._pause_mode}&clear_cache=false")

    async def resume(self) -> None:
        self._refuse_pausing()
        await self._order("/resume")

    async def is_paused(self) -> bool:
        """True if the server is paused, by whomever."""
        self._refuse_pausing()
        return bool((await self._connection.get("/is_paused", dict[str, bool])).get("is_paused"))

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Reload from a folder on the server's machine, paused meanwhile. A failure leaves the server paused.

        vLLM names versions by text: 3 is ``"3"``.
        """
        version, folder = checked_version(version), folder_of(weights, "vLLM")
        self._refuse_weights()
        was_paused = await self.is_paused()
        if not was_paused:
            await self.pause()
        try:
            order = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await self._order("/collective_rpc", order, Any)
            await self.reset_prefix_cache()
            await self.set_version(version)
        except EngineError as error:
            raise EngineError(
                f"vLLM did not load the weights of {version!r}: {error}. It stays paused: load others, or restart it"
            ) from error
        if not was_paused:
            await self.resume()

    async def set_version(self, version: str | int) -> None:
        self._refuse_weights()
        name = str(checked_version(version))
        await self._order("/update_weight_version", {"new_version": name}, Any)
        self.version = name

    async def reset_prefix_cache(self) -> None:
        """Empty the cache. Requests under way are computed again."""
        self._refuse_weights()
        await self._order("/reset_prefix_cache?reset_running_requests=true&reset_external=true", kind=Any)

    def _refuse_weights(self) -> None:
        if not self.capabilities.weights:
            raise EngineError(
                "vLLM loads other weights only if it was started with VLLM_SERVER_DEV_MODE=1 and has /weight_info"
            )

    def _refuse_pausing(self) -> None:
        if not self.capabilities.pauses:
            raise EngineError("vLLM can be paused only if it was started with VLLM_SERVER_DEV_MODE=1")

    def _fields(self, request: GenerateRequest, logprobs: int | None = None) -> dict[str, Any]:
        if logprobs is None:
            logprobs = request.sampling.top_logprobs
            logprobs += 1 if logprobs and self.path == GENERATE else 0
        params = sampling_fields(request.sampling, max_tokens="max_tokens", seed="seed") | {"logprobs": logprobs}
        params |= _structure(request.sampling)
        fields: dict[str, Any] = {"model": self.capabilities.model}
        if self.path == COMPLETIONS:
            fields |= params
            return fields | {"add_special_tokens": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
        fields |= {"sampling_params": params, "return_token_ids": self._check_echo}
        return fields if request.request_id is None else fields | {"request_id": request.request_id}

    def _reader(self, request: GenerateRequest, prompt: bytes) -> AnswerReader:
        return _VLLMReader(request, self.capabilities, self.path, prompt if self._check_echo else None)


class _VLLMReader(AnswerReader):
    """Reads an answer, whole or in the chunks of a stream.

    Compares an echoed prompt as the JSON text that was sent, and as ids only if the texts differ.
    """

    answer = _Answer

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, path: str, sent: bytes | None) -> None:
        super().__init__(request, capabilities)
        self._path: Final = path
        self._unconfirmed = sent
        """The prompt, until it was echoed."""

    def feed(self, answer: _Answer) -> Delta | None:
        if answer.usage is not None:
            self.check_prompt_count(answer.usage.prompt_tokens)
            details = answer.usage.prompt_tokens_details
            self.cached_tokens = None if details is None else details.cached_tokens
        if not answer.choices:
            return None
        choice = answer.choices[0]
        if self._unconfirmed is not None:
            self._check_echo((choice if self._path == COMPLETIONS else answer).prompt_token_ids, self._unconfirmed)
            self._unconfirmed = None
        ids, (logprobs, channels) = choice.token_ids, self._logprobs(choice)
        if choice.finish_reason is None:
            if choice.routed_experts is not None:
                raise EngineAnswerError("vLLM sent routed_experts before the end of the stream")
            return self.add(ids, logprobs, "logprobs", channels)
        whole: Channels = NO_CHANNELS
        if choice.routed_experts is not None:
            experts = npy_experts(choice.routed_experts)
            whole = {ROUTED_EXPERTS: experts_of(experts, len(self.prompt), self.count + len(ids))}
        stop, versions = choice.stop_reason, choice.weight_versions
        self.end(ids, logprobs, "logprobs", choice.finish_reason, stop, versions, channels, whole)
        return None

    def _check_echo(self, echo: Raw, sent: bytes) -> None:
        if bytes(echo) == sent:
            return
        if bytes(echo) == b"null":
            raise EngineAnswerError("vLLM did not echo the prompt (prompt_token_ids)")
        ids = answered_ids(decode(bytes(echo), list[TokenId]), "prompt_token_ids", None)
        at = common_prefix(ids, self.prompt)
        if not at == len(ids) == len(self.prompt):
            raise EngineAnswerError(
                f"the engine read another prompt than was sent: {len(ids)} ids of {len(self.prompt)}, different from "
                f"{at} on"
            )

    def _logprobs(self, choice: _Choice) -> tuple[Sequence[float], Channels]:
        """Return the logprobs of a choice's ids, and their alternatives if requested."""
        ids, logprobs = choice.token_ids, choice.logprobs or _Logprobs()
        rows: list[list[tuple[int, float | None]]]
        if self._path == COMPLETIONS:
            values, where = logprobs.token_logprobs or [], "logprobs.top_logprobs"
            tokens = logprobs.tokens or []
            if all(token.startswith(_TOKEN_ID) for token in tokens):  # otherwise they are text
                same_ids([_token_id(token) for token in tokens], ids, "logprobs.tokens")
            rows = [[(_token_id(token), value) for token, value in row.items()] for row in logprobs.top_logprobs or []]
        else:
            content, where = logprobs.content or [], "logprobs.content"
            values = [token.logprob for token in content]
            same_ids([token.token_id for token in content], ids, where)
            rows = [[(one.token_id, one.logprob) for one in token.top_logprobs or []] for token in content]
        if not self.sampling.top_logprobs or not ids:
            return values, NO_CHANNELS
        top = answered_top(rows, self.sampling.top_logprobs, self.capabilities.vocab_size, where)
        return values, {TOP_LOGPROBS: top}


def _token_id(token: str) -> int:
    """Return the id in ``token_id:17``; -1 if there is none."""
    digits = token.removeprefix(_TOKEN_ID)
    return int(digits) if digits.isdecimal() and len(digits) < 12 else -1


def _structure(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields for structured outputs, as vLLM has them since 0.11."""
    if sampling.structure is None:
        return {}
    schema = sampling.structure.get("schema")
    return {"structured_outputs": {"json_object": True} if schema is None else {"json": schema}}


def _card(cards: list[_Card], model: str | None) -> _Card:
    """Return what the server reports of a model: of its only one if `model` is None."""
    names = [card.id for card in cards]
    if model is None and len(names) != 1:
        raise EngineError(f"the server has {len(names)} models: choose with model= among {names}")
    if model is not None and model not in names:
        raise EngineRefusal(f"the server has no model {model!r}, but {names}", status=404)
    return cards[0 if model is None else names.index(model)]
