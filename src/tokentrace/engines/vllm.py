"""vLLM: ``/inference/v1/generate``, or ``/v1/completions`` with ids where that is off.

Start it with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs`` and
``--enable-prompt-tokens-details``; pausing needs ``VLLM_SERVER_DEV_MODE=1``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from msgspec import Raw, Struct

from ..tokens.ids import check_ids
from ..trajectory.turns import IdsLike, LogprobKind, Logprobs
from . import protocol
from .adapter import MOST_RANKS, HTTPEngine, Models, connecting, probed_kind, sampling_fields
from .answers import AnswerReader, Count, EngineReply, Logprob, TokenId, VersionRow, same_ids, scored_ids
from .channels import npy_experts
from .errors import EngineError, EngineRefusal
from .http import Connection, HTTPSettings
from .protocol import OPTIONAL, Capabilities, GenerateRequest

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
GATEWAY = "tokentrace"
"""Who owns the models of a tokentrace gateway, which also serves `GENERATE`."""
_ABORT_PREFIX = "generate-tokens-"
"""vLLM puts it before a request's id; an abort without it does nothing."""
_TOKEN_ID = "token_id:"


class _Alternative(Struct):
    token_id: TokenId
    logprob: Logprob | None = None


class _Token(Struct):
    token_id: TokenId
    logprob: Logprob
    top_logprobs: list[_Alternative] | None = None


class _Logprobs(Struct):
    content: list[_Token] | None = None
    """Of `GENERATE`; the other fields are of `COMPLETIONS`."""
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
    routed_experts: bytes | None = None
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
    """One vLLM server. Create it with `connect`."""

    answer = _Answer
    stream_fields: ClassVar[dict[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
    no_weights = "vLLM loads other weights only with VLLM_SERVER_DEV_MODE=1 and /weight_info"

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        path: str = GENERATE,
        *,
        check_echo: bool = True,
    ) -> None:
        super().__init__(connection, capabilities)
        self.path, self.check_echo = path, check_echo
        self.prompt_field = "token_ids" if path == GENERATE else "prompt"

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        model: str | None = None,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str | None = None,
        check_echo: bool = True,
        settings: HTTPSettings | None = None,
    ) -> VLLMEngine:
        """Connect, and find out what the server can do by sampling a few single tokens.

        `model` is required if there are several; `logprobs` names their kind without a probe.
        """
        async with connecting(base_url, settings) as connection:
            cards = {card.id: card for card in (await connection.get("/v1/models", Models)).data}
            if model is None and len(cards) != 1:
                raise EngineError(f"the server has {len(cards)} models: set model= to one of {list(cards)}")
            name = next(iter(cards)) if model is None else model
            if name not in cards:
                raise EngineRefusal(f"the server has no model {model!r}; it has {list(cards)}", status=404)
            version = (await connection.find("/version", dict[str, str]) or {}).get("version")
            paused = await connection.find("/is_paused", dict[str, bool])
            weights = await connection.find("/weight_info", dict[str, str | None])
            if (paused or {}).get("is_paused"):
                raise EngineError(f"{connection.base_url} is paused: resume it before connecting")
            capabilities = Capabilities(
                engine="gateway" if cards[name].owned_by == GATEWAY else "vllm",
                version=version,
                model=name,
                max_length=cards[name].max_model_len,
                vocab_size=vocab_size,
                pauses=paused is not None,
                sampling=frozenset(OPTIONAL),
                weights=paused is not None and weights is not None,
            )
            engine = cls(connection, capabilities, check_echo=check_echo)
            try:
                reply = await engine._probe()
            except EngineRefusal as error:
                if error.status not in (403, 404, 405):
                    raise
                engine = cls(connection, capabilities, COMPLETIONS, check_echo=check_echo)
                reply = await engine._probe()
            engine.capabilities = replace(
                capabilities,
                logprobs=await probed_kind(engine, vocab_size, logprobs),
                aborts=engine.path == GENERATE and capabilities.engine == "vllm",
                versions=bool(reply.versions),
                # vLLM ignores unknown fields: without a version, it might ignore the request
                # for JSON
                structures=version is not None,
                # GENERATE counts the sampled id among them
                top_logprobs=MOST_RANKS - (engine.path == GENERATE),
            )
            engine.version = (weights or {}).get("weight_version")
            return engine

    async def score(self, ids: IdsLike) -> Logprobs:
        """The ``prompt_logprobs`` of ``/v1/completions``, which are raw."""
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        body = {"model": self.capabilities.model, "prompt": checked.tolist(), "add_special_tokens": False}
        body |= {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        answer = await self._order(COMPLETIONS, body, _Answer)
        rows = answer.choices[0].prompt_logprobs if answer.choices else None
        pairs = zip((rows or [])[1:], map(str, checked[1:].tolist()), strict=False)
        return scored_ids([row[one].logprob for row, one in pairs if row and one in row], checked)

    async def abort(self, request_id: str) -> None:
        if not self.capabilities.aborts:
            raise EngineError("vLLM aborts requests by id only with --enable-scale-out")
        await self._order("/inference/v1/abort_requests", {"request_ids": [_ABORT_PREFIX + request_id]})

    async def pause(self) -> None:
        await self._switch("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._switch("/resume")

    async def _switch(self, path: str) -> None:
        if not self.capabilities.pauses:
            raise EngineError("vLLM can be paused only with VLLM_SERVER_DEV_MODE=1")
        await self._order(path)

    async def is_paused(self) -> bool:
        return bool((await self._connection.get("/is_paused", dict[str, bool])).get("is_paused"))

    async def update_weights(self, weights: protocol.Weights, *, version: str | int) -> None:
        """Reload from a folder on the server. A failure leaves the server paused."""
        version, folder = protocol.checked_version(version), self._check_weights(weights)
        was_paused = await self.is_paused()
        if not was_paused:
            await self.pause()
        try:
            order = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            await self._order("/collective_rpc", order, Any)
            await self.reset_prefix_cache()
            await self.set_version(version)
        except EngineError as error:
            raise EngineError(f"vLLM stays paused without the weights {version!r}: {error}") from error
        if not was_paused:
            await self.resume()

    async def reset_prefix_cache(self) -> None:
        self._check_weights()
        await self._order("/reset_prefix_cache?reset_running_requests=true&reset_external=true", kind=Any)

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling, native = request.sampling, self.path == GENERATE
        params = sampling_fields(sampling, max_tokens="max_tokens", seed="seed")
        params["logprobs"] = sampling.top_logprobs + bool(sampling.top_logprobs and native)
        if sampling.structure is not None:
            schema = sampling.structure.get("schema")
            params["structured_outputs"] = {"json_object": True} if schema is None else {"json": schema}
        fields: dict[str, Any] = {"model": self.capabilities.model}
        if not native:
            names = ("return_token_ids", "return_tokens_as_token_ids")
            return fields | params | {"add_special_tokens": False} | dict.fromkeys(names, True)
        fields |= {"sampling_params": params, "return_token_ids": self.check_echo}
        return fields if request.request_id is None else fields | {"request_id": request.request_id}

    def _read(self, answer: _Answer, reader: AnswerReader) -> EngineReply | None:
        if answer.usage is not None:
            reader.check_prompt_count(answer.usage.prompt_tokens)
            details = answer.usage.prompt_tokens_details
            reader.cached_tokens = None if details is None else details.cached_tokens
        if not answer.choices:
            return None
        choice, native = answer.choices[0], self.path == GENERATE
        reader.check_echo((answer if native else choice).prompt_token_ids)
        ids, logprobs = choice.token_ids, choice.logprobs or _Logprobs()
        if native:
            content = logprobs.content or []
            values, reported = [token.logprob for token in content], [token.token_id for token in content]
            top = [[(one.token_id, one.logprob) for one in token.top_logprobs or []] for token in content]
        else:
            values, rows = logprobs.token_logprobs or [], logprobs.top_logprobs or []
            tokens = logprobs.tokens or []
            is_text = not all(token.startswith(_TOKEN_ID) for token in tokens)
            reported = [] if is_text else list(map(_token_id, tokens))
            top = [[(_token_id(token), value) for token, value in row.items()] for row in rows]
        same_ids(reported, ids)
        return EngineReply(
            ids,
            values,
            choice.finish_reason,
            choice.weight_versions or (),
            stop=choice.stop_reason,
            top=top,
            experts=None if choice.routed_experts is None else npy_experts(choice.routed_experts),
        )


def _token_id(token: str) -> int:
    digits = token.removeprefix(_TOKEN_ID)
    return int(digits) if digits.isdecimal() and len(digits) < 12 else -1
