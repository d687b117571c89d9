"""SGLang: ``/generate``.

Its streams repeat everything so far, unless it runs with ``--incremental-streaming-output``. An
id outside the vocabulary can crash it. An abort ends all requests whose ids start with the
aborted one.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from msgspec import Struct

from ..tokens.ids import check_ids
from ..trajectory.turns import IdsLike, LogprobKind, Logprobs
from . import protocol
from .adapter import MOST_RANKS, HTTPEngine, ModelCard, Models, connecting, probed_kind, sampling_fields
from .answers import AnswerReader, Count, EngineReply, Logprob, TokenId, VersionRow, same_ids, scored_ids
from .channels import Experts, ExpertType, flat_experts
from .errors import EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from .http import Connection, HTTPSettings
from .protocol import OPTIONAL, Capabilities, GenerateRequest

GENERATE = "/generate"


class _Finish(Struct):
    type: str
    matched: int | str | list[Any] | None = None
    status_code: int | None = None
    message: Any = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_token_logprobs: list[tuple[Logprob, TokenId, Any]] | None = None
    output_top_logprobs: list[list[tuple[Logprob | None, TokenId, Any]] | None] | None = None
    input_token_logprobs: list[tuple[Logprob | None, TokenId, Any]] | None = None
    weight_versions: list[VersionRow] | None = None
    routed_experts: bytes | None = None
    routed_experts_dtype: ExpertType | None = None

    def experts(self, width: int | None) -> Experts:
        if self.routed_experts is None:
            raise EngineAnswerError("SGLang needs --enable-return-routed-experts and a model with experts")
        return flat_experts(self.routed_experts, self.routed_experts_dtype or "int32", width)


class _Answer(Struct):
    meta_info: _Meta
    output_ids: list[TokenId] | None = None


class _Model(Struct):
    model_path: str
    vocab_size: Count | None = None
    weight_version: str | None = None


class _Server(Struct):
    version: str | None = None
    context_length: Count | None = None
    max_total_num_tokens: Count | None = None


class SGLangEngine(HTTPEngine):
    """One SGLang server. Create it with `connect`."""

    path = GENERATE
    prompt_field = "input_ids"
    answer = _Answer
    version_fields: ClassVar[dict[str, Any]] = {"abort_all_requests": False}
    no_weights = "this SGLang does not report its weights (weight_version): use a newer version"

    _experts: int | None = 0
    """Per position, over all layers; 0 if not requested, None if unknown."""

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str | None = None,
        routed_experts: bool = False,
        settings: HTTPSettings | None = None,
    ) -> SGLangEngine:
        """Connect, and find out what the server can do by sampling a few single tokens.

        `vocab_size` is required if it is not reported; `logprobs` names their kind, unprobed.
        """
        async with connecting(base_url, settings) as connection:
            model: _Model = await connection.get("/get_model_info", _Model)
            server: _Server = await connection.find("/get_server_info", _Server) or _Server()
            size = model.vocab_size if vocab_size is None else vocab_size
            if size is None:
                raise EngineError("SGLang does not report its vocabulary: pass vocab_size=")
            models: Models = await connection.find("/v1/models", Models) or Models()
            card = models.data[0] if models.data else ModelCard()
            lengths = (card.max_model_len, server.context_length, server.max_total_num_tokens)
            engine = cls(connection, Capabilities("sglang"))
            reply = await engine._probe()
            engine.capabilities = Capabilities(
                engine="sglang",
                version=server.version,
                model=card.id or model.model_path,
                max_length=min((length for length in lengths if length), default=None),
                vocab_size=size,
                logprobs=await probed_kind(engine, size, logprobs),
                aborts=True,
                pauses=True,
                versions=bool(reply.versions),
                top_logprobs=MOST_RANKS,
                structures=True,
                sampling=frozenset(OPTIONAL),
                weights=model.weight_version is not None,
            )
            engine.version = model.weight_version
            if routed_experts:
                engine._experts = None
                experts = (await engine._probe()).experts
                engine._experts = 0 if experts is None else experts.size
            return engine

    async def score(self, ids: IdsLike) -> Logprobs:
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        params = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": checked.tolist(), "sampling_params": params, "return_logprob": True}
        answer: _Answer = await self._order(GENERATE, body | {"logprob_start_len": 0}, _Answer)
        rows = answer.meta_info.input_token_logprobs or []
        same_ids([row[1] for row in rows], checked.tolist())
        return scored_ids([row[0] for row in rows[1:]], checked)

    async def abort(self, request_id: str) -> None:
        await self._order("/abort_request", {"rid": _rid(request_id)})

    async def pause(self) -> None:
        await self._order("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._order("/continue_generation", {})

    async def update_weights(self, weights: protocol.Weights, *, version: str | int) -> None:
        """Load from a folder on the server. SGLang finishes requests under way first."""
        name, folder = str(protocol.checked_version(version)), self._check_weights(weights)
        order = {"model_path": folder, "weight_version": name, "flush_cache": True}
        await self._order("/update_weights_from_disk", order, Any)
        self.version = name

    async def reset_prefix_cache(self) -> None:
        """Empty the cache. SGLang refuses while requests run or are paused."""
        await self._order("/flush_cache")

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        params = sampling_fields(sampling, max_tokens="max_new_tokens", seed="sampling_seed")
        params |= {"top_k": sampling.top_k or -1, "skip_special_tokens": False}
        if sampling.structure is not None:
            params["json_schema"] = json.dumps(sampling.structure.get("schema", {"type": "object"}))
        fields: dict[str, Any] = {"sampling_params": params, "return_logprob": True, "stream": False}
        fields["logprob_start_len"] = -1  # 0 would compute the whole prompt again, past the prefix cache
        if sampling.top_logprobs:
            fields["top_logprobs_num"] = sampling.top_logprobs
        if self._experts != 0:  # from the prompt's last id on, after which the first id is sampled
            fields |= {
                "return_routed_experts": True,
                "routed_experts_start_len": len(request.prompt_ids) - 1,
            }
        return fields if request.request_id is None else fields | {"rid": _rid(request.request_id)}

    def _read(self, answer: _Answer, reader: AnswerReader) -> EngineReply:
        """Read an event, which repeats everything so far or has only new ids."""
        meta, reason, ids = answer.meta_info, answer.meta_info.finish_reason, answer.output_ids or []
        aborted = reason is not None and reason.type == "abort"
        if reason is not None and aborted and reason.status_code is not None:
            _raise_dropped(reason, reason.status_code, reader.count)
        if aborted and meta.completion_tokens is None:  # aborted while it waited
            total = max(reader.count, len(ids))
        else:
            reader.check_prompt_count(meta.prompt_tokens)
            total = -1 if meta.completion_tokens is None else meta.completion_tokens
        new, before = total - reader.count, reader.count
        if new < 0 or len(ids) not in (total, new):
            raise EngineAnswerError(f"{len(ids)} ids came after {before}, but SGLang has sampled {total}")
        if len(ids) > new and before and ids[before - 1] != reader.last_id:
            raise EngineAnswerError(f"id {before - 1} was {reader.last_id}, but is now {ids[before - 1]}")
        ids = ids[len(ids) - new :]
        triples = (meta.output_token_logprobs or [])[-new:] if new else []
        rows = (meta.output_top_logprobs or [])[-new:] if new else []
        same_ids([one for _, one, _ in triples], ids)
        matched = None if reason is None else reason.matched
        has_experts = self._experts != 0 and total and reason is not None
        return EngineReply(
            ids,
            [logprob for logprob, _, _ in triples],
            None if reason is None else reason.type,
            meta.weight_versions or (),  # `weight_version` is the server's at answer time
            meta.cached_tokens,
            stop=matched if isinstance(matched, int | str) else None,
            top=[[(one, logprob) for logprob, one, _ in row or []] for row in rows],
            experts=meta.experts(self._experts) if has_experts else None,
        )


def _rid(request_id: str) -> str:
    """A request id that is no prefix of another: its length comes first."""
    return f"{len(request_id)}-{request_id}"


def _raise_dropped(reason: _Finish, status: int, count: int) -> None:
    problem = f"SGLang dropped the request ({status}): {str(reason.message)[:300]}"
    if status < 500 and status != 429:
        raise EngineRefusal(problem, status=status)
    raise EngineError(f"{problem}, after {count} tokens") if count else EngineUnavailable(problem)
