"""The server of llama.cpp: ``/completion``.

What is made the same here: its logprobs are raw unless ``post_sampling_probs`` is asked for, which gives probabilities
after sampling, and is; its samplers are asked for in the order temperature, top-k, top-p; stop tokens other than the
model's own end are not known to it, so what it samples after one is cut off here.

It is never streamed: ids whose bytes are no whole character are lost in its streams. In whole answers they are there,
but some have no logprob, and that is `EngineAnswerError`. For training on text that is not ASCII, use another engine.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

import numpy as np

from ..errors import shown
from ..tokens.tokenizer import Ids
from .answers import (
    Arriving,
    answered_count,
    answered_ids,
    answered_logprobs,
    answered_text,
    check_prompt_count,
    checked_prompt,
    completion_kind,
    json_body,
    part,
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
    FinishReason,
    LogprobKind,
    SamplingParams,
)

COMPLETION: Final = "/completion"
_REASONS: Final = {"eos": FinishReason.STOP, "limit": FinishReason.LENGTH}


class LlamaCppEngine:
    """One llama.cpp server. Made by `connect`."""

    def __init__(self, connection: Connection, capabilities: Capabilities) -> None:
        self._connection: Final = connection
        self._capabilities: Final = capabilities

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
        kind = said_kind(logprobs)
        if kind not in (LogprobKind.PROCESSED, LogprobKind.RAW):
            raise EngineError(f"llama.cpp returns logprobs that are processed or raw, as asked for, not {logprobs}")
        connection = base_url if isinstance(base_url, Connection) else Connection(base_url, settings)
        try:
            props = table(await connection.get("/props"), "/props")
            models = await connection.found("/v1/models")
            found = Capabilities(
                engine="llama.cpp",
                version=answered_text(props.get("build_info"), "build_info"),
                model=answered_text(props.get("model_alias") or props.get("model_path"), "model_path"),
                max_length=answered_count(part(props, "default_generation_settings", "n_ctx"), "n_ctx"),
                vocab_size=_vocab_size(models) if vocab_size is None else vocab_size,
                logprobs=kind,
            )
            return cls(connection, found)
        except BaseException:
            if connection is not base_url:
                await connection.close()
            raise

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
        # after sampling, the best token is certain at temperature 0; the other engines return its raw logprob then
        processed = self._capabilities.logprobs is LogprobKind.PROCESSED and sampling.temperature > 0
        body = json_body("prompt", ids, wire, _fields(sampling, processed))
        return self._read(await self._connection.post(COMPLETION, body), ids, sampling, processed)

    async def stream(
        self,
        prompt_ids: Sequence[int] | Ids,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        session: str | None = None,
        wire: Sequence[bytes] | None = None,
    ) -> AsyncGenerator[Delta]:
        """The whole completion as one piece."""
        whole = await self.generate(prompt_ids, sampling, request_id=request_id, session=session, wire=wire)
        yield Delta(
            whole.ids, whole.logprobs, whole.finish_reason, whole.versions, whole.cached_tokens, whole.logprobs_kind
        )

    async def abort(self, request_id: str) -> None:
        """Refused: cancel the task that awaits `generate`, which closes the connection and ends the request."""
        raise EngineError("llama.cpp cannot end a request and return what it has sampled; cancel the task instead")

    async def pause(self) -> None:
        """Refused: llama.cpp cannot be paused."""
        raise EngineError("llama.cpp cannot be paused")

    async def resume(self) -> None:
        """Refused: llama.cpp cannot be paused."""
        raise EngineError("llama.cpp cannot be paused")

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()

    def _read(self, answer: Any, prompt: Ids, sampling: SamplingParams, processed: bool) -> Completion:
        check_prompt_count(part(answer, "tokens_evaluated"), prompt)
        sampled = ids = answered_ids(part(answer, "tokens"), "tokens", self._capabilities.vocab_size)
        reason = part(answer, "stop_type")
        if answer.get("truncated") and len(prompt) + len(ids) < (self._capabilities.max_length or 0):
            raise EngineAnswerError("llama.cpp shifted its context: it sampled from a prompt that was cut")
        stops = np.flatnonzero(np.isin(ids, sampling.stop_token_ids))
        if len(stops):
            ids, reason = ids[: int(stops[0]) + 1], "eos"
        entries = rows(answer.get("completion_probabilities", []), "completion_probabilities")
        given = [_logprob(entry, processed) for entry in _entries_of(entries, ids, sampled)]
        logprobs = answered_logprobs(given, ids, "completion_probabilities")
        arriving = Arriving("llama.cpp", sampling, completion_kind(sampling, self._capabilities))
        cached = table(answer.get("timings", {}), "timings").get("cache_n")
        arriving.cached_tokens = answered_count(cached, "timings.cache_n")
        arriving.end(ids, logprobs, _REASONS.get(reason, reason) if isinstance(reason, str) else reason, None, None)
        return arriving.whole()


def _fields(sampling: SamplingParams, processed: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": 0.0,
        "samplers": ["temperature", *["top_k"] * (sampling.top_k > 0), *["top_p"] * (sampling.top_p < 1)],
        "return_tokens": True,
        "n_probs": 1,
        "post_sampling_probs": processed,
        "cache_prompt": True,
        "stream": False,
    }
    return fields if sampling.seed is None else fields | {"seed": sampling.seed}


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
        raise EngineAnswerError(f"completion_probabilities: {shown(probability)} is no probability of a sampled id")
    return math.log(probability)


def _vocab_size(models: Any) -> int | None:
    try:
        return answered_count(part(models, "data", 0, "meta", "n_vocab"), "n_vocab")
    except EngineAnswerError:
        return None
