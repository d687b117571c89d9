"""vLLM: ``/inference/v1/generate``, or ``/v1/completions`` with ids where that is off.

Start it with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs`` and ``--enable-prompt-tokens-details``;
pausing needs ``VLLM_SERVER_DEV_MODE=1``. It silently clips a completion that does not fit, so such a request is not
sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
from msgspec import Raw, Struct

from ..tokens.ids import check_ids, common_prefix
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, ModelCard, Models, connecting, folder_of, probed_kind, sampling_fields
from .answers import AnswerReader, Count, EngineReply, Logprob, TokenId, VersionRow, decode, same_ids, scored_ids
from .channels import npy_experts
from .errors import EngineAnswerError, EngineError, EngineRefusal
from .http import Connection, HTTPSettings
from .protocol import Capabilities, GenerateRequest, LogprobKind, Logprobs, Weights, checked_version
from .sampling import OPTIONAL, SamplingParams

GENERATE: Final = "/inference/v1/generate"
COMPLETIONS: Final = "/v1/completions"
_ABORT_PREFIX: Final = "generate-tokens-"
"""vLLM prepends it to a request's id; an abort without it does nothing."""
_TOKEN_ID: Final = "token_id:"
_MAX_LOGPROBS: Final = 20
"""The default of vLLM's ``--max-logprobs``."""
PauseMode = Literal["keep", "wait", "abort"]
Row = list[tuple[int, float | None]]

# -- answers


class _Alternative(Struct):
    token_id: TokenId
    logprob: Logprob | None = None


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

    def rows(self) -> list[Row]:
        if self.content is not None:
            return [[(one.token_id, one.logprob) for one in token.top_logprobs or []] for token in self.content]
        return [[(_token_id(token), value) for token, value in row.items()] for row in self.top_logprobs or []]


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


class VLLMEngine(HTTPEngine):
    """One vLLM server. Made by `connect`."""

    stream_fields: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
    no_weights = "vLLM loads other weights only if it was started with VLLM_SERVER_DEV_MODE=1 and has /weight_info"

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
        self.path, self.prompt_field = path, "token_ids" if path == GENERATE else "prompt"
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
        settings: HTTPSettings | None = None,
    ) -> VLLMEngine:
        """Find out what a server can do; some single tokens are sampled for that.

        `model` is required if several are served. `vocab_size` lets ids be checked, `logprobs` skips the probe of their
        kind. Without `check_echo` only the length of the prompt that the server read is compared. `pause_mode` is what
        happens to requests under way: they wait (``"keep"``), finish first (``"wait"``), or end with ``ABORT``.
        """
        async with connecting(base_url, settings) as connection:
            card = _card((await connection.get("/v1/models", Models)).data, model)
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
                answer = await engine._sample(0, SamplingParams(1))
            except EngineRefusal as error:
                if error.status not in (403, 404, 405):
                    raise
                engine = cls(connection, capabilities, path=COMPLETIONS, check_echo=check_echo, pause_mode=pause_mode)
                answer = await engine._sample(0, SamplingParams(1))
            engine.capabilities = replace(
                capabilities,
                logprobs=await probed_kind(engine, vocab_size, logprobs),
                aborts=engine.path == GENERATE,
                versions=_choice(answer).weight_versions is not None,
                # vLLM ignores unknown fields: without a version, it might ignore the request for JSON
                structures=version is not None,
                # generate counts the sampled id among them
                top_logprobs=_MAX_LOGPROBS - (engine.path == GENERATE),
            )
            engine.version = (weights or {}).get("weight_version")
            return engine

    def _likeliest(self, answer: _Answer) -> Iterable[tuple[int, float | None]]:
        rows = (_choice(answer).logprobs or _Logprobs()).rows()
        return rows[0] if rows else []

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """Return the ``prompt_logprobs`` of ``/v1/completions``, which are raw."""
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        body = {"model": self.capabilities.model, "prompt": checked.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._order(COMPLETIONS, body | {"add_special_tokens": False, "temperature": 0}, _Answer)
        pairs = zip((_choice(answer).prompt_logprobs or [])[1:], checked[1:].tolist(), strict=False)
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
        """Reload from a folder on the server. A failure leaves the server paused."""
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

    async def reset_prefix_cache(self) -> None:
        """Empty the cache. Requests under way are computed again."""
        self._refuse_weights()
        await self._order("/reset_prefix_cache?reset_running_requests=true&reset_external=true", kind=Any)

    def _refuse_pausing(self) -> None:
        if not self.capabilities.pauses:
            raise EngineError("vLLM can be paused only if it was started with VLLM_SERVER_DEV_MODE=1")

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling, native = request.sampling, self.path == GENERATE
        params = sampling_fields(sampling, max_tokens="max_tokens", seed="seed")
        params["logprobs"] = sampling.top_logprobs + bool(sampling.top_logprobs and native)
        if sampling.structure is not None:
            schema = sampling.structure.get("schema")
            params["structured_outputs"] = {"json_object": True} if schema is None else {"json": schema}
        fields: dict[str, Any] = {"model": self.capabilities.model}
        if not native:
            fields |= params
            return fields | {"add_special_tokens": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
        fields |= {"sampling_params": params, "return_token_ids": self._check_echo}
        return fields if request.request_id is None else fields | {"request_id": request.request_id}

    def _reader(self, request: GenerateRequest, prompt: bytes) -> AnswerReader:
        return _VLLMReader(request, self.capabilities, self.path, prompt if self._check_echo else None)


class _VLLMReader(AnswerReader):
    """Compares an echoed prompt as text, and as ids only if the texts differ."""

    answer = _Answer

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, path: str, sent: bytes | None) -> None:
        super().__init__(request, capabilities)
        self._path: Final = path
        self._unconfirmed = sent
        """The prompt, until it was echoed."""

    def read(self, answer: _Answer) -> EngineReply | None:
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
        ids, logprobs, where = choice.token_ids, choice.logprobs or _Logprobs(), "logprobs.content"
        if self._path == COMPLETIONS:
            values, tokens, where = logprobs.token_logprobs or [], logprobs.tokens or [], "logprobs.tokens"
            reported = [_token_id(token) for token in tokens if token.startswith(_TOKEN_ID)]
            reported = reported if len(reported) == len(tokens) else []  # otherwise they are text
        else:
            values = [token.logprob for token in logprobs.content or []]
            reported = [token.token_id for token in logprobs.content or []]
        same_ids(reported, ids, where)
        return EngineReply(
            ids,
            values,
            choice.finish_reason,
            VersionRow.spans(choice.weight_versions),
            stop=choice.stop_reason,
            top=logprobs.rows() if self.sampling.top_logprobs else (),
            experts=None if choice.routed_experts is None else npy_experts(choice.routed_experts),
            where=where,
        )

    def _check_echo(self, echo: Raw, sent: bytes) -> None:
        if bytes(echo) == sent:
            return
        if bytes(echo) == b"null":
            raise EngineAnswerError("vLLM did not echo the prompt (prompt_token_ids)")
        ids = np.array(decode(bytes(echo), list[TokenId]), np.int32)
        at = common_prefix(ids, self.prompt)
        if not at == len(ids) == len(self.prompt):
            raise EngineAnswerError(
                f"the engine read another prompt than was sent: {len(ids)} ids of {len(self.prompt)}, different from "
                f"{at} on"
            )


def _token_id(token: str) -> int:
    """Return the id in ``token_id:17``; -1 if there is none."""
    digits = token.removeprefix(_TOKEN_ID)
    return int(digits) if digits.isdecimal() and len(digits) < 12 else -1


def _choice(answer: _Answer) -> _Choice:
    if not answer.choices:
        raise EngineAnswerError("vLLM returned no choices")
    return answer.choices[0]


def _card(cards: list[ModelCard], model: str | None) -> ModelCard:
    names = [card.id for card in cards]
    if model is None and len(names) != 1:
        raise EngineError(f"the server has {len(names)} models: choose with model= among {names}")
    if model is not None and model not in names:
        raise EngineRefusal(f"the server has no model {model!r}, but {names}", status=404)
    return cards[0 if model is None else names.index(model)]
