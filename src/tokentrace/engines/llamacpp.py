"""The server of llama.cpp: ``/completion``.

Where llama.cpp differs from other engines: its logprobs are raw unless probabilities after sampling are asked for
(``post_sampling_probs``), as they are here; its samplers run in the order that the request names; it knows no stop
tokens but the end of the model's text, so what it samples after one of them is cut off here.

It is never streamed: ids whose bytes are not a whole character are lost in its streams. Whole answers have them, but
some without a logprob, and that is `EngineAnswerError`. For training on text that is not ASCII, use another engine.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from typing import Any, Final

import numpy as np

from ..errors import shown
from ..settings import choose
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, connecting
from .answers import AnswerReader, answered_count, answered_ids, answered_logprobs, optional, part, same_ids
from .channels import answered_top
from .http import Connection, HTTPSettings
from .protocol import (
    NO_CHANNELS,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Delta,
    EngineAnswerError,
    EngineError,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    SamplingParams,
)

COMPLETION: Final = "/completion"
_TOP_LOGPROBS: Final = 20
"""It has no bound of its own."""
_SAMPLING: Final = frozenset({"min_p", "repetition_penalty"})
"""Its presence and frequency penalties count the prompt too, and it keeps no logprobs of a stop text's tokens."""
_WHOLE: Final = 1 << 30
"""How many tokens back repetitions are looked for where the context's size is not known: all."""
_REASONS: Final = {"eos": FinishReason.STOP, "limit": FinishReason.LENGTH}


class LlamaCppEngine(HTTPEngine):
    """One llama.cpp server. Made by `connect`."""

    path = COMPLETION
    prompt_field = "prompt"

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str = LogprobKind.PROCESSED,
        settings: HTTPSettings | None = None,
    ) -> LlamaCppEngine:
        """Find out what a server can do. `logprobs` is which to ask for: ``processed`` or ``raw``.

        At temperature 0 they are always raw.
        """
        kind = choose(LogprobKind, "logprobs", logprobs, EngineError)
        if kind not in (LogprobKind.PROCESSED, LogprobKind.RAW):
            raise EngineError(f"llama.cpp returns logprobs that are processed or raw, as asked for, not {logprobs}")
        async with connecting(base_url, settings) as connection:
            props = part(await connection.get("/props"), kind=dict)
            models = await connection.found("/v1/models")
            found = Capabilities(
                engine="llama.cpp",
                version=optional(props, "build_info", str),
                model=optional(props, "model_alias", str) or optional(props, "model_path", str),
                max_length=answered_count(part(props, "default_generation_settings", "n_ctx"), "n_ctx"),
                vocab_size=_vocab_size(models) if vocab_size is None else vocab_size,
                logprobs=kind,
                top_logprobs=_TOP_LOGPROBS,
                structures=True,
                sampling=_SAMPLING,
            )
            return cls(connection, found)

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The whole completion as one piece."""
        yield await self._generate(request)

    def _fields(self, request: GenerateRequest) -> dict[str, Any]:
        sampling = request.sampling
        fields: dict[str, Any] = {
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": _samplers(sampling),
            "return_tokens": True,
            "n_probs": max(1, sampling.top_logprobs),
            "post_sampling_probs": _is_processed(sampling, self.capabilities),
            "cache_prompt": True,
            "stream": False,
        }
        if sampling.repetition_penalty != 1:
            back = self.capabilities.max_length or _WHOLE
            fields |= {"repeat_penalty": sampling.repetition_penalty, "repeat_last_n": back}
        if sampling.structure is not None:
            fields["json_schema"] = sampling.structure.get("schema", {"type": "object"})
        return fields if sampling.seed is None else fields | {"seed": sampling.seed}

    def _reader(self, request: GenerateRequest, text: bytes) -> AnswerReader:
        return _LlamaCppReader(request, self.capabilities)


def _samplers(sampling: SamplingParams) -> list[str]:
    """What it samples with, in the order in which vLLM does."""
    used = {
        "penalties": sampling.repetition_penalty != 1,
        "temperature": True,
        "min_p": sampling.min_p > 0,
        "top_k": sampling.top_k > 0,
        "top_p": sampling.top_p < 1,
    }
    return [name for name, is_used in used.items() if is_used]


def _is_processed(sampling: SamplingParams, capabilities: Capabilities) -> bool:
    """Whether logprobs after sampling are asked for.

    At temperature 0 the best token would be certain then; the other engines return its raw logprob.
    """
    return capabilities.logprobs is LogprobKind.PROCESSED and sampling.temperature > 0


class _LlamaCppReader(AnswerReader):
    def feed(self, answer: Any) -> None:
        self.check_prompt_count(part(answer, "tokens_evaluated"))
        sampled = ids = answered_ids(part(answer, "tokens"), "tokens", self.capabilities.vocab_size)
        reason = part(answer, "stop_type")
        if answer.get("truncated") and len(self.prompt) + len(ids) < (self.capabilities.max_length or 0):
            raise EngineAnswerError("llama.cpp shifted its context: it sampled from a prompt that was cut")
        stops = np.flatnonzero(np.isin(ids, self.sampling.stop_token_ids))
        if len(stops):
            ids, reason = ids[: int(stops[0]) + 1], "eos"
        entries = _entries_of(optional(answer, "completion_probabilities", list) or [], ids, sampled)
        processed = _is_processed(self.sampling, self.capabilities)
        given = [_logprob(entry, processed) for entry in entries]
        cached = (optional(answer, "timings", dict) or {}).get("cache_n")
        self.cached_tokens = answered_count(cached, "timings.cache_n")
        reason = _REASONS.get(reason, reason) if isinstance(reason, str) else reason
        logprobs = answered_logprobs(given, ids, "completion_probabilities")
        self.end(ids, logprobs, reason, channels=self._top(entries, processed))

    def _top(self, entries: list[Any], processed: bool) -> Channels:
        count = self.sampling.top_logprobs
        if not count:
            return NO_CHANNELS
        told, value = ("top_probs", "prob") if processed else ("top_logprobs", "logprob")
        pairs = [
            [
                (part(one, "id"), _log(part(one, value)) if processed else part(one, value))
                for one in part(entry, told, kind=list)
            ]
            for entry in entries
        ]
        return {TOP_LOGPROBS: answered_top(pairs, count, self.capabilities.vocab_size, told)}


def _entries_of(entries: list[Any], ids: Ids, sampled: Ids) -> list[Any]:
    """The entries of `ids`, of which none may be missing; they are the first of those that were sampled."""
    named = [part(entry, "id") for entry in entries[: len(ids)]]
    missing = next((at for at, one in enumerate(ids.tolist()) if at >= len(named) or named[at] != one), None)
    if missing is None:
        return entries[: len(ids)]
    if not {one if type(one) is int else None for one in named} <= set(sampled.tolist()):
        same_ids(named, ids, "completion_probabilities")
    raise EngineAnswerError(
        f"llama.cpp gave no logprob for id {int(ids[missing])} at {missing}: it gives none for tokens that are "
        "incomplete UTF-8; sample again, or use vLLM, SGLang or the embedded engine"
    )


def _logprob(entry: Any, processed: bool) -> Any:
    if not processed:
        return part(entry, "logprob")
    probability = part(entry, "prob")
    if type(probability) not in (float, int) or not 0 < probability <= 1:
        raise EngineAnswerError(
            f"completion_probabilities: {shown(probability)} cannot be the probability of a sampled id"
        )
    return math.log(probability)


def _log(probability: Any) -> Any:
    """The logprob of an alternative: None where it could not have been drawn; what is no probability, as it is."""
    is_number = type(probability) in (float, int) and 0 <= probability <= 1
    return (math.log(probability) if probability else None) if is_number else shown(probability)


def _vocab_size(models: Any) -> int | None:
    try:
        return answered_count(part(models, "data", 0, "meta", "n_vocab"), "n_vocab")
    except EngineAnswerError:
        return None
