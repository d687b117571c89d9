"""SGLang: ``/generate``.

Where SGLang differs from other engines: its streams repeat everything so far, unless it was started with
``--incremental-streaming-output``, and both become pieces of what is new; ``max_new_tokens`` has a default of 128, and
is always sent; ``top_k`` 0 is an error to it, and is sent as -1; an id outside of the vocabulary can crash the server,
so its size must be known; an abort ends every request whose id begins with the one given, so ids are sent with their
length before them; ``preferred_sampling_params`` may change how it samples, so every setting is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Literal

from ..errors import shown
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, best_logprob, connecting, folder_of, probed_kind, sampling_fields
from .answers import AnswerReader, answered_count, answered_ids, answered_logprobs, optional, part, same_ids, scored_ids
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
"""It has no bound of its own."""
PauseMode = Literal["in_place", "retract", "abort"]


class SGLangEngine(HTTPEngine):
    """One SGLang server. Made by `connect`."""

    path = GENERATE
    prompt_field = "input_ids"

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        *,
        pause_mode: PauseMode = "in_place",
    ) -> None:
        super().__init__(connection, capabilities)
        self._pause_mode: Final = pause_mode
        self._experts = 0
        """How many experts are told of each position, of all layers together; 0 where they are not asked for."""

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

        `vocab_size` (the tokenizer's) is needed where the server does not tell it, which is usual. Which logprobs it
        returns is found out by comparing them at two temperatures, with and without `top_k`, unless `logprobs` says it;
        usually they are ``SCALED``. `pause_mode` is what `pause` does to requests under way: they wait and keep what
        they have computed (``"in_place"``), or have it computed again by the new weights (``"retract"``), or end with
        ``ABORT``. `routed_experts` asks for the experts of each sampled id, as the channel of that name; the server
        must have been started with ``--enable-return-routed-experts``.
        """
        async with connecting(base_url, settings) as connection:
            model = part(await connection.get("/get_model_info"), kind=dict)
            server = await connection.found("/get_server_info")
            server = server if isinstance(server, dict) else {}
            size = vocab_size if vocab_size is not None else answered_count(model.get("vocab_size"), "vocab_size")
            if size is None:
                raise EngineError(
                    "SGLang does not tell the size of its vocabulary, and may crash on an id outside of it: give "
                    "vocab_size=, the length of the tokenizer"
                )
            cards = await connection.found("/v1/models")
            card = part(cards, "data", 0, kind=dict) if isinstance(cards, dict) else {}
            lengths = [
                answered_count(told.get(name), name)
                for told, name in (
                    (card, "max_model_len"),
                    (server, "context_length"),
                    (server, "max_total_num_tokens"),
                )
            ]
            engine = cls(connection, Capabilities("sglang"), pause_mode=pause_mode)
            sampled = await engine._sample_one(0, SamplingParams(1))
            engine.capabilities = Capabilities(
                engine="sglang",
                version=optional(server, "version", str),
                model=optional(card, "id", str) or part(model, "model_path", kind=str),
                max_length=min([length for length in lengths if length], default=None),
                vocab_size=size,
                logprobs=await probed_kind(engine._best_logprob, size, logprobs),
                streams=True,
                aborts=True,
                pauses=True,
                versions=sampled.get("weight_versions") is not None,
                top_logprobs=_TOP_LOGPROBS,
                structures=True,
                sampling=frozenset(OPTIONAL),
                weights=model.get("weight_version") is not None,
            )
            engine.version = optional(model, "weight_version", str)
            if routed_experts:
                engine._experts = await engine._count_experts()
            return engine

    async def _count_experts(self) -> int:
        """How many experts one position has: the only one that is read where one id follows one."""
        request = GenerateRequest([0], SamplingParams(1))
        answer = await self._post(request, self._fields(request) | {"return_routed_experts": True})
        meta = part(answer, "meta_info", kind=dict)
        if meta.get("routed_experts") is None:
            raise EngineError(
                "SGLang returned no routed experts: start it with --enable-return-routed-experts, and with a model "
                "that has experts"
            )
        return flat_experts(meta["routed_experts"], meta.get("routed_experts_dtype"), None).size

    async def _sample_one(self, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
        """What is told of one token after a prompt of one id."""
        request = GenerateRequest([prompt], sampling)
        answer = await self._post(request, self._fields(request) | {"top_logprobs_num": 1})
        meta: dict[str, Any] = part(answer, "meta_info", kind=dict)
        return meta

    async def _best_logprob(self, prompt: int, sampling: SamplingParams) -> float:
        return best_logprob(await self._sample_one(prompt, sampling), "output_top_logprobs", 0, 0, 0)

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """By the logprobs of the prompt, from its beginning on."""
        given = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        params = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": given.tolist(), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        told = part(await self._ask("/generate", body), "meta_info", "input_token_logprobs", kind=list)
        same_ids([part(row, 1) for row in told], given, "input_token_logprobs")
        return scored_ids([part(row, 0) for row in told[1:]], given, "input_token_logprobs")

    async def abort(self, request_id: str) -> None:
        await self._tell("/abort_request", {"rid": _rid(request_id)})

    async def pause(self) -> None:
        """Let no request go on."""
        await self._tell("/pause_generation", {"mode": self._pause_mode})

    async def resume(self) -> None:
        await self._tell("/continue_generation", {})

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Load from a folder that the server's machine sees, in place, and empty the cache.

        Where it is not paused, requests under way are finished first and new ones wait. Where it is, with
        ``pause_mode="in_place"`` and requests under way, SGLang loads the weights and then refuses to empty the cache,
        which is an error: pause with ``"retract"`` or ``"abort"``. SGLang names versions by text: 3 is ``"3"``.
        """
        name, folder = str(checked_version(version)), folder_of(weights, "SGLang")
        self._refuse_weights()
        wanted = {"model_path": folder, "weight_version": name, "flush_cache": True}
        await self._ask("/update_weights_from_disk", wanted)
        self.version = name

    async def set_version(self, version: str | int) -> None:
        self._refuse_weights()
        name = str(checked_version(version))
        await self._ask("/update_weight_version", {"new_version": name, "abort_all_requests": False})
        self.version = name

    async def reset_prefix_cache(self) -> None:
        """Refused while requests run, or wait in place."""
        await self._tell("/flush_cache")

    def _refuse_weights(self) -> None:
        if not self.capabilities.weights:
            raise EngineError("this SGLang does not tell which weights it has (weight_version): use a newer one")

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        params = sampling_fields(request.sampling, most="max_new_tokens", seed="sampling_seed")
        params |= {"top_k": request.sampling.top_k or -1, "skip_special_tokens": False}
        fields: dict[str, Any] = {
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,  # from 0 on, the prompt's would be computed again, past the prefix cache
            "stream": False,
        }
        params |= _structure(request.sampling)
        if request.sampling.top_logprobs:
            fields["top_logprobs_num"] = request.sampling.top_logprobs
        if self._experts:  # from the last id of the prompt on: the first sampled id comes of it
            fields |= {"return_routed_experts": True, "routed_experts_start_len": len(request.prompt_ids) - 1}
        return fields if request.request_id is None else fields | {"rid": _rid(request.request_id)}

    def _reader(self, request: GenerateRequest, text: bytes) -> AnswerReader:
        return _SGLangReader(request, self.capabilities, experts=self._experts)


def _structure(sampling: SamplingParams) -> dict[str, Any]:
    """SGLang takes a schema, as text; that of any object where none is asked for."""
    if sampling.structure is None:
        return {}
    return {"json_schema": json.dumps(sampling.structure.get("schema", {"type": "object"}))}


def _rid(request_id: str) -> str:
    """An id that no other begins with."""
    return f"{len(request_id)}-{request_id}"


class _SGLangReader(AnswerReader):
    """An answer, whole or in the events of a stream: each with everything so far, or with what is new."""

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, *, experts: int = 0) -> None:
        super().__init__(request, capabilities)
        self._experts: Final = experts

    def feed(self, answer: Any) -> Delta | None:
        meta = part(answer, "meta_info", kind=dict)
        reason = meta.get("finish_reason")
        self._refuse(reason)
        if isinstance(reason, dict) and reason.get("type") == "abort" and "completion_tokens" not in meta:
            # ended while it waited: what it has is all that is told
            so_far = part(answer, "output_ids", kind=list)
            meta = {"prompt_tokens": len(self.prompt), "completion_tokens": max(self.count, len(so_far))} | meta
        self.check_prompt_count(part(meta, "prompt_tokens"))
        ids, logprobs = self._new(answer, meta)
        channels = self._top(meta, len(ids))
        self.cached_tokens = answered_count(meta.get("cached_tokens"), "cached_tokens")
        if reason is None:
            return self.take(ids, logprobs, channels)
        # `weight_version` is the server's when it answers: the spans say what sampled each token
        kind, spans, whole = part(reason, "type"), meta.get("weight_versions"), self._routed(meta, len(ids))
        self.end(ids, logprobs, kind, reason.get("matched"), spans, channels, whole)
        return None

    def _top(self, meta: Any, new: int) -> Channels:
        count = self.sampling.top_logprobs
        if not count or not new:
            return NO_CHANNELS
        rows = part(meta, "output_top_logprobs", kind=list)[-new:]
        pairs = [[(part(one, 1), part(one, 0)) for one in part(rows, at, kind=list)] for at in range(len(rows))]
        return {TOP_LOGPROBS: answered_top(pairs, count, self.capabilities.vocab_size, "output_top_logprobs")}

    def _routed(self, meta: Any, new: int) -> Channels:
        """The experts of the whole completion, which come with its end."""
        sampled = self.count + new
        if not self._experts or not sampled:
            return NO_CHANNELS
        found = flat_experts(part(meta, "routed_experts"), meta.get("routed_experts_dtype"), self._experts)
        return {ROUTED_EXPERTS: experts_of(found, len(self.prompt), sampled)}

    def _new(self, answer: Any, meta: Any) -> tuple[Ids, Logprobs]:
        given = part(answer, "output_ids", kind=list)
        total = part(meta, "completion_tokens")
        new = total - self.count if type(total) is int else -1
        if new < 0 or len(given) not in (total, new):
            raise EngineAnswerError(
                f"{len(given)} ids came after {self.count}, where SGLang has sampled {shown(total)}"
            )
        if len(given) > new and self.count and given[self.count - 1] != self.last_id:
            raise EngineAnswerError(
                f"id {self.count - 1} was {self.last_id}, and is now {shown(given[self.count - 1])}"
            )
        ids = answered_ids(given[len(given) - new :], "output_ids", self.capabilities.vocab_size)
        if not new:
            return ids, answered_logprobs([], ids, "output_token_logprobs")
        triples = part(meta, "output_token_logprobs", kind=list)[-new:]
        logprobs = answered_logprobs([part(row, 0) for row in triples], ids, "output_token_logprobs")
        same_ids([part(row, 1) for row in triples], ids, "output_token_logprobs")
        return ids, logprobs

    def _refuse(self, reason: Any) -> None:
        """An abort with a status is not one that was asked for: the scheduler gave the request up."""
        status = reason.get("status_code") if isinstance(reason, dict) and reason.get("type") == "abort" else None
        if type(status) is not int:
            return
        said = reason.get("message")
        words = f"SGLang gave the request up ({status}): {said[:300] if isinstance(said, str) else shown(said)}"
        if status < 500 and status != 429:
            raise EngineRefusal(words, status=status)
        if self.count:
            raise EngineError(f"{words}, after {self.count} tokens had arrived")
        raise EngineUnavailable(words)
