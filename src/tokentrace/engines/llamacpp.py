"""llama.cpp's server: ``/completion``.

It stops only at the model's own stop tokens, so the adapter cuts answers after any other. Answers
are not streamed: streams drop ids that are not whole characters.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from msgspec import Meta, Struct

from ..settings import choose
from ..trajectory.turns import LogprobKind
from .adapter import MOST_RANKS, HTTPEngine, Models, connecting
from .answers import AnswerReader, Count, EngineReply, Logprob, TokenId
from .errors import EngineAnswerError, EngineError
from .http import Connection, HTTPSettings
from .protocol import Capabilities, Delta, FinishReason, GenerateRequest, SamplingParams

COMPLETION = "/completion"
_SAMPLING = frozenset({"min_p", "repetition_penalty"})
"""Its other penalties count the prompt too, and it drops the logprobs of stop texts."""
_ALL = 1 << 30
"""How many tokens back to count repetitions if the context's size is unknown."""
_REASONS = {"eos": FinishReason.STOP, "limit": FinishReason.LENGTH}


class _Alternative(Struct):
    id: TokenId
    logprob: Logprob | None = None
    prob: Annotated[float, Meta(ge=0, le=1)] | None = None

    def value(self, processed: bool) -> float | None:
        """The logprob; None if the token could not have been drawn."""
        if not processed:
            return self.logprob
        return math.log(self.prob) if self.prob else None


class _Token(_Alternative):
    top_logprobs: list[_Alternative] = []
    top_probs: list[_Alternative] = []


class _Timings(Struct):
    cache_n: Count | None = None


class _Answer(Struct):
    tokens_evaluated: Count
    tokens: list[TokenId]
    stop_type: str
    truncated: bool = False
    completion_probabilities: list[_Token] = []
    timings: _Timings | None = None


class _Generation(Struct):
    n_ctx: Count | None = None


class _Props(Struct):
    default_generation_settings: _Generation
    build_info: str | None = None
    model_alias: str | None = None
    model_path: str | None = None


class LlamaCppEngine(HTTPEngine):
    """One llama.cpp server. Create it with `connect`."""

    path = COMPLETION
    prompt_field = "prompt"
    answer = _Answer

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str = LogprobKind.PROCESSED,
        settings: HTTPSettings | None = None,
    ) -> LlamaCppEngine:
        """Connect, and find what the server can do. `logprobs`: ``"processed"`` or ``"raw"``."""
        kind = choose(LogprobKind, "logprobs", logprobs, EngineError)
        if kind not in (LogprobKind.PROCESSED, LogprobKind.RAW):
            raise EngineError(f"llama.cpp returns processed or raw logprobs, not {logprobs}")
        async with connecting(base_url, settings) as connection:
            props: _Props = await connection.get("/props", _Props)
            models: Models = await connection.find("/v1/models", Models) or Models()
            meta = models.data[0].meta if models.data else None
            capabilities = Capabilities(
                "llama.cpp",
                version=props.build_info,
                model=props.model_alias or props.model_path,
                max_length=props.default_generation_settings.n_ctx,
                vocab_size=vocab_size or (meta.n_vocab if meta else None),
                logprobs=kind,
                top_logprobs=MOST_RANKS,
                structures=True,
                sampling=_SAMPLING,
            )
            return cls(connection, capabilities)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        yield await self._generate(request)

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        samplers = {  # in vLLM's order
            "penalties": sampling.repetition_penalty != 1,
            "temperature": True,
            "min_p": sampling.min_p > 0,
            "top_k": sampling.top_k > 0,
            "top_p": sampling.top_p < 1,
        }
        fields: dict[str, Any] = {
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": [name for name, is_used in samplers.items() if is_used],
            "return_tokens": True,
            "n_probs": max(1, sampling.top_logprobs),
            "post_sampling_probs": _is_processed(sampling, self.capabilities),
            "cache_prompt": True,
            "stream": False,
        }
        if sampling.repetition_penalty != 1:
            back = self.capabilities.max_length or _ALL
            fields |= {"repeat_penalty": sampling.repetition_penalty, "repeat_last_n": back}
        if sampling.structure is not None:
            fields["json_schema"] = sampling.structure.get("schema", {"type": "object"})
        return fields if sampling.seed is None else fields | {"seed": sampling.seed}

    def _read(self, answer: _Answer, reader: AnswerReader) -> EngineReply:
        reader.check_prompt_count(answer.tokens_evaluated)
        ids, reason = answer.tokens, _REASONS.get(answer.stop_type, answer.stop_type)
        if answer.truncated and len(reader.prompt) + len(ids) < (self.capabilities.max_length or 0):
            raise EngineAnswerError("llama.cpp shifted its context: it sampled from a prompt that was cut")
        stops = [at for at, one in enumerate(ids) if one in reader.sampling.stop_token_ids]
        if stops:
            ids, reason = ids[: stops[0] + 1], FinishReason.STOP
        tokens = answer.completion_probabilities[: len(ids)]
        reported = [token.id for token in tokens]
        if reported != ids:
            at = next(at for at, one in enumerate(ids) if reported[at : at + 1] != [one])
            why = (
                "it has none for incomplete UTF-8"
                if set(reported) <= set(answer.tokens)
                else "it has other ids"
            )
            advice = "sample again, or use another engine"
            raise EngineAnswerError(f"llama.cpp has no logprob for id {ids[at]} at {at}: {why}; {advice}")
        processed = _is_processed(reader.sampling, self.capabilities)
        tops = [token.top_probs if processed else token.top_logprobs for token in tokens]
        return EngineReply(
            ids,
            [token.value(processed) for token in tokens],
            reason,
            cached_tokens=answer.timings.cache_n if answer.timings else None,
            top=[[(one.id, one.value(processed)) for one in top] for top in tops],
        )


def _is_processed(sampling: SamplingParams, capabilities: Capabilities) -> bool:
    """True to ask for logprobs after sampling. At temperature 0 they would all be 0."""
    return capabilities.logprobs is LogprobKind.PROCESSED and sampling.temperature > 0
