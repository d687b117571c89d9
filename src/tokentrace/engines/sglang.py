"""SGLang: ``/generate``.

What is special about SGLang: its streams repeat everything so far, unless it was started with
``--incremental-streaming-output``; ``max_new_tokens`` has a default of 128 and is always sent; ``top_k`` 0 is an error
and is sent as -1; an id outside the vocabulary can crash the server, so its size must be known; an abort ends every
request whose id starts with the aborted one, so ids are sent after their length; ``preferred_sampling_params`` may
change how it samples, so every setting is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from ..errors import brief
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, connecting, folder_of, probed_kind, sampling_fields
from .answers import AnswerReader, Count, Logprob, TokenId, VersionRow, same_ids, scored_ids
from .channels import answered_top, experts_of, flat_experts
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
    EngineUnavailable,
    GenerateRequest,
    LogprobKind,
    Logprobs,
    SamplingParams,
    Weights,
    checked_version,
)

GENERATE: Final = "/generate"
_TOP_LOGPROBS: Final = 20
"""SGLang has no limit."""
PauseMode = Literal["in_place", "retract", "abort"]

# -- answers


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
    routed_experts: str | None = None
    routed_experts_dtype: str | None = None


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


class _Card(Struct):
    id: str | None = None
    max_model_len: Count | None = None


class _Models(Struct):
    data: list[_Card] = []


class SGLangEngine(HTTPEngine):
    """One SGLang server. Made by `connect`."""

    path = GENERATE
    prompt_field = "input_ids"

    def __init__(
        self, connection: Connection, capabilities: Capabilities, *, pause_mode: PauseMode = "in_place"
    ) -> None:
        super().__init__(connection, capabilities)
        self._pause_mode: Final = pause_mode
        self._experts = 0
        """Experts per position, of all layers together; 0 if they are not requested."""

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str | None = None,
        pause_mode: PauseMode = "in_place",
        routed_experts: bool = False,
        settings: HTTPSettings | None = None,
    ) -> SGLangEngine:
        """Find out what a server can do; some single tokens are sampled for that.

        `vocab_size` (the tokenizer's) is required unless the server reports it, which few do. `logprobs` skips the
        probe of their kind, which is usually ``SCALED``. `pause_mode` is what `pause` does to requests under way: they
        wait and keep what they have computed (``"in_place"``), have it computed again by the new weights
        (``"retract"``), or end with ``ABORT``. `routed_experts` requests the channel of that name; start the server
        with ``--enable-return-routed-experts``.
        """
        async with connecting(base_url, settings) as connection:
            model: _Model = await connection.get("/get_model_info", _Model)
            server: _Server = await connection.find("/get_server_info", _Server) or _Server()
            size = model.vocab_size if vocab_size is None else vocab_size
            if size is None:
                raise EngineError(
                    "SGLang does not report the size of its vocabulary, and may crash on an id outside it: pass "
                    "vocab_size=, the length of the tokenizer"
                )
            models: _Models = await connection.find("/v1/models", _Models) or _Models()
            card = models.data[0] if models.data else _Card()
            lengths = (card.max_model_len, server.context_length, server.max_total_num_tokens)
            engine = cls(connection, Capabilities("sglang"), pause_mode=pause_mode)
            sampled: _Answer = await engine._sample(0, SamplingParams(1), _Answer, top_logprobs_num=1)
            engine.capabilities = Capabilities(
                engine="sglang",
                version=server.version,
                model=card.id or model.model_path,
                max_length=min((length for length in lengths if length), default=None),
                vocab_size=size,
                logprobs=await probed_kind(engine._best_logprob, size, logprobs),
                streams=True,
                aborts=True,
                pauses=True,
                versions=sampled.meta_info.weight_versions is not None,
                top_logprobs=_TOP_LOGPROBS,
                structures=True,
                sampling=frozenset(OPTIONAL),
                weights=model.weight_version is not None,
            )
            engine.version = model.weight_version
            if routed_experts:
                engine._experts = await engine._count_experts()
            return engine

    async def _count_experts(self) -> int:
        """Count the experts of one position: the only one that is read where one id follows one."""
        meta = (await self._sample(0, SamplingParams(1), _Answer, return_routed_experts=True)).meta_info
        if meta.routed_experts is None:
            raise EngineError(
                "SGLang returned no routed experts: start it with --enable-return-routed-experts, and with a model "
                "that has experts"
            )
        return flat_experts(meta.routed_experts, meta.routed_experts_dtype, None).size

    async def _best_logprob(self, prompt: int, sampling: SamplingParams) -> float:
        meta = (await self._sample(prompt, sampling, _Answer, top_logprobs_num=1)).meta_info
        best = ((meta.output_top_logprobs or [None])[0] or [(None, 0, None)])[0][0]
        if best is None:
            raise EngineAnswerError("SGLang did not report the logprob of the likeliest token")
        return float(best)

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """Return the logprobs of the prompt, from its beginning on."""
        checked = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        params = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": checked.tolist(), "sampling_params": params, "return_logprob": True}
        answer: _Answer = await self._order(GENERATE, body | {"logprob_start_len": 0}, _Answer)
        rows = answer.meta_info.input_token_logprobs or []
        same_ids([row[1] for row in rows], checked.tolist(), "input_token_logprobs")
        return scored_ids([row[0] for row in rows[1:]], checked, "input_token_logprobs")

    async def abort(self, request_id: str) -> None:
        await self._order("/abort_request", {"rid": _rid(request_id)})

    async def pause(self) -> None:
        await self._order("/pause_generation", {"mode": self._pause_mode})

    async def resume(self) -> None:
        await self._order("/continue_generation", {})

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Load from a folder on the server's machine, and empty the cache.

        Unless paused, SGLang finishes requests under way first. Paused ``"in_place"`` with requests under way, it loads
        the weights and then refuses to empty the cache: pause with ``"retract"`` or ``"abort"``. SGLang names versions
        by text: 3 is ``"3"``.
        """
        name, folder = str(checked_version(version)), folder_of(weights, "SGLang")
        self._refuse_weights()
        order = {"model_path": folder, "weight_version": name, "flush_cache": True}
        await self._order("/update_weights_from_disk", order, Any)
        self.version = name

    async def set_version(self, version: str | int) -> None:
        self._refuse_weights()
        name = str(checked_version(version))
        await self._order("/update_weight_version", {"new_version": name, "abort_all_requests": False}, Any)
        self.version = name

    async def reset_prefix_cache(self) -> None:
        """Empty the cache. SGLang refuses while requests run, or wait in place."""
        await self._order("/flush_cache")

    def _refuse_weights(self) -> None:
        if not self.capabilities.weights:
            raise EngineError("this SGLang does not report its weights (weight_version): use a newer one")

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_fields(request.sampling, max_tokens="max_new_tokens", seed="sampling_seed")
        params |= {"top_k": request.sampling.top_k or -1, "skip_special_tokens": False}
        fields: dict[str, Any] = {
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # 0 would compute the whole prompt again, past the prefix cache
            "stream": False,
        }
        params |= _structure(request.sampling)
        if request.sampling.top_logprobs:
            fields["top_logprobs_num"] = request.sampling.top_logprobs
        if self._experts:  # from the last id of the prompt on, which the first sampled id follows
            fields |= {"return_routed_experts": True, "routed_experts_start_len": len(request.prompt_ids) - 1}
        return fields if request.request_id is None else fields | {"rid": _rid(request.request_id)}

    def _reader(self, request: GenerateRequest, prompt: bytes) -> AnswerReader:
        return _SGLangReader(request, self.capabilities, experts=self._experts)


def _structure(sampling: SamplingParams) -> dict[str, Any]:
    """Return the schema as text; that of any object if there is none."""
    if sampling.structure is None:
        return {}
    return {"json_schema": json.dumps(sampling.structure.get("schema", {"type": "object"}))}


def _rid(request_id: str) -> str:
    """Return an id that no other starts with."""
    return f"{len(request_id)}-{request_id}"


class _SGLangReader(AnswerReader):
    """Reads an answer, whole or in the events of a stream, which repeat everything so far or hold what is new."""

    answer = _Answer

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, *, experts: int = 0) -> None:
        super().__init__(request, capabilities)
        self._experts: Final = experts

    def feed(self, answer: _Answer) -> Delta | None:
        meta, reason, ids = answer.meta_info, answer.meta_info.finish_reason, answer.output_ids or []
        aborted = reason is not None and reason.type == "abort"
        if reason is not None and aborted:
            self._check_abort(reason)
        if aborted and meta.completion_tokens is None:  # aborted while it waited
            total = max(self.count, len(ids))
        else:
            self.check_prompt_count(meta.prompt_tokens)
            total = -1 if meta.completion_tokens is None else meta.completion_tokens
        new = self._new_ids(ids, total)
        self.cached_tokens = meta.cached_tokens
        triples = (meta.output_token_logprobs or [])[-len(new) :] if new else []
        logprobs = [logprob for logprob, _, _ in triples]
        same_ids([one for _, one, _ in triples], new, "output_token_logprobs")
        channels = self._top(meta, len(new))
        if reason is None:
            return self.add(new, logprobs, "output_token_logprobs", channels)
        # `weight_version` is the server's when it answers; the spans say what sampled each token
        stop = reason.matched if isinstance(reason.matched, int | str) else None
        whole = self._routed(meta, len(new))
        self.end(new, logprobs, "output_token_logprobs", reason.type, stop, meta.weight_versions, channels, whole)
        return None

    def _top(self, meta: _Meta, new: int) -> Channels:
        count = self.sampling.top_logprobs
        if not count or not new:
            return NO_CHANNELS
        rows = [[(one, logprob) for logprob, one, _ in row or []] for row in (meta.output_top_logprobs or [])[-new:]]
        return {TOP_LOGPROBS: answered_top(rows, count, self.capabilities.vocab_size, "output_top_logprobs")}

    def _routed(self, meta: _Meta, new: int) -> Channels:
        """Return the experts of the whole completion, which come with its end."""
        sampled = self.count + new
        if not self._experts or not sampled:
            return NO_CHANNELS
        if meta.routed_experts is None:
            raise EngineAnswerError("SGLang returned no routed_experts")
        experts = flat_experts(meta.routed_experts, meta.routed_experts_dtype, self._experts)
        return {ROUTED_EXPERTS: experts_of(experts, len(self.prompt), sampled)}

    def _new_ids(self, ids: list[int], total: int) -> list[int]:
        """Return the ids of an event that no earlier one had."""
        new = total - self.count
        if new < 0 or len(ids) not in (total, new):
            raise EngineAnswerError(f"{len(ids)} ids came after {self.count}, where SGLang has sampled {total}")
        if len(ids) > new and self.count and ids[self.count - 1] != self.last_id:
            raise EngineAnswerError(f"id {self.count - 1} was {self.last_id}, and is now {ids[self.count - 1]}")
        return ids[len(ids) - new :]

    def _check_abort(self, reason: _Finish) -> None:
        """Raise if an abort has a status: then the scheduler dropped the request."""
        status = reason.status_code
        if status is None:
            return
        message = reason.message[:300] if isinstance(reason.message, str) else brief(reason.message)
        problem = f"SGLang dropped the request ({status}): {message}"
        if status < 500 and status != 429:
            raise EngineRefusal(problem, status=status)
        if self.count:
            raise EngineError(f"{problem}, after {self.count} tokens")
        raise EngineUnavailable(problem)
