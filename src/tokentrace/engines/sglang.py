"""SGLang: ``/generate``.

What is made the same here: its streams repeat everything so far, unless it was started with
``--incremental-streaming-output``, and both become pieces of what is new; ``max_new_tokens`` has a default of 128, and
is always sent; ``top_k`` 0 is an error to it, and is sent as -1; an id outside of the vocabulary can kill the server,
so its size must be known; an abort ends every request whose id begins with the one given, so ids are sent with their
length before them; ``preferred_sampling_params`` may change how it samples, so every setting is sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal

import numpy as np

from ..errors import shown
from ..tokens.tokenizer import Ids
from .answers import (
    Arriving,
    answered_count,
    answered_ids,
    answered_logprobs,
    answered_text,
    best_logprob,
    check_prompt_count,
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
    EngineUnavailable,
    LogprobKind,
    Logprobs,
    SamplingParams,
)

GENERATE: Final = "/generate"


class SGLangEngine:
    """One SGLang server. Made by `connect`."""

    def __init__(
        self,
        connection: Connection,
        capabilities: Capabilities,
        *,
        pause_mode: Literal["in_place", "retract", "abort"] = "in_place",
    ) -> None:
        self._connection: Final = connection
        self._capabilities: Final = capabilities
        self._pause_mode: Final = pause_mode

    @classmethod
    async def connect(
        cls,
        base_url: str | Connection,
        *,
        vocab_size: int | None = None,
        logprobs: LogprobKind | str | None = None,
        pause_mode: Literal["in_place", "retract", "abort"] = "in_place",
        settings: HTTPSettings | None = None,
    ) -> SGLangEngine:
        """Find out what a server can do; some single tokens are sampled for that.

        `vocab_size` (the tokenizer's) is needed where the server does not tell it, which is usual. Which logprobs it
        returns is found out by comparing them at two temperatures, with and without `top_k`, unless `logprobs` says it;
        usually they are ``SCALED``. `pause_mode` is what `pause` does to requests under way: they wait and keep what
        they have computed (``"in_place"``), or have it computed again by the new weights (``"retract"``), or end with
        ``ABORT``.
        """
        connection = base_url if isinstance(base_url, Connection) else Connection(base_url, settings)
        try:
            model = table(await connection.get("/get_model_info"), "/get_model_info")
            server = await connection.found("/get_server_info")
            server = server if isinstance(server, dict) else {}
            size = vocab_size if vocab_size is not None else answered_count(model.get("vocab_size"), "vocab_size")
            if size is None:
                raise EngineError(
                    "SGLang does not tell the size of its vocabulary, and may die of an id outside of it: give "
                    "vocab_size=, the length of the tokenizer"
                )
            cards = await connection.found("/v1/models")
            card = table(part(cards, "data", 0), "data[0]") if isinstance(cards, dict) else {}
            probe = await _sampled_one(connection, 0, SamplingParams(1))

            async def best(prompt: int, temperature: float, top_k: int) -> float:
                meta = await _sampled_one(connection, prompt, SamplingParams(1, temperature=temperature, top_k=top_k))
                return best_logprob(part(meta, "output_top_logprobs", 0, 0, 0), "output_top_logprobs")

            found = Capabilities(
                engine="sglang",
                version=answered_text(server.get("version"), "version"),
                model=answered_text(card.get("id") or part(model, "model_path"), "model_path"),
                max_length=_smallest(
                    answered_count(card.get("max_model_len"), "max_model_len"),
                    answered_count(server.get("context_length"), "context_length"),
                    answered_count(server.get("max_total_num_tokens"), "max_total_num_tokens"),
                ),
                vocab_size=size,
                logprobs=said_kind(logprobs) or await probed_kind(best, size),
                streams=True,
                aborts=True,
                pauses=True,
                versions=probe.get("weight_versions") is not None,
            )
            return cls(connection, found, pause_mode=pause_mode)
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
        answer = await self._connection.post(
            GENERATE, json_body("input_ids", ids, wire, _fields(sampling, request_id, stream=False))
        )
        reader = _Reader(ids, sampling, self._capabilities)
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
        """As `generate`, in pieces. Closing the iterator closes the connection, upon which SGLang ends the request."""
        ids = checked_prompt(prompt_ids, sampling, self._capabilities)
        return self._connection.stream(
            GENERATE,
            json_body("input_ids", ids, wire, _fields(sampling, request_id, stream=True)),
            lambda: _Reader(ids, sampling, self._capabilities),
        )

    async def abort(self, request_id: str) -> None:
        """End a request; its `generate` returns what was sampled."""
        await self._connection.tell("/abort_request", _text({"rid": _rid(request_id)}))

    async def pause(self) -> None:
        """Let no request go on. Whoever changes the weights also empties the cache (``/flush_cache``)."""
        await self._connection.tell("/pause_generation", _text({"mode": self._pause_mode}))

    async def resume(self) -> None:
        """Let requests go on."""
        await self._connection.tell("/continue_generation", _text({}))

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()


async def _sampled_one(connection: Connection, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
    """What is told of one token after a prompt of one id."""
    fields = _fields(sampling, None, stream=False) | {"top_logprobs_num": 1}
    answer = await connection.post(GENERATE, json_body("input_ids", np.array([prompt], np.int32), None, fields))
    return table(part(answer, "meta_info"), "meta_info")


def _fields(sampling: SamplingParams, request_id: str | None, *, stream: bool) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    fields: dict[str, Any] = {
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,  # from 0 on, the prompt's would be computed again, past the prefix cache
        "stream": stream,
    }
    return fields if request_id is None else fields | {"rid": _rid(request_id)}


def _rid(request_id: str) -> str:
    """No such id begins with another."""
    return f"{len(request_id)}-{request_id}"


class _Reader(Arriving):
    """An answer, whole or in the events of a stream: each with everything so far, or with what is new."""

    def __init__(self, prompt: Ids, sampling: SamplingParams, capabilities: Capabilities) -> None:
        super().__init__("SGLang", sampling, completion_kind(sampling, capabilities))
        self._prompt: Final = prompt
        self._vocab_size: Final = capabilities.vocab_size

    def feed(self, answer: Any) -> Delta | None:
        meta = table(part(answer, "meta_info"), "meta_info")
        reason = meta.get("finish_reason")
        self._refuse(reason)
        if isinstance(reason, dict) and reason.get("type") == "abort" and "completion_tokens" not in meta:
            # ended while it waited: what it has is all that is told
            so_far = rows(part(answer, "output_ids"), "output_ids")
            meta = {"prompt_tokens": len(self._prompt), "completion_tokens": max(self.count, len(so_far))} | meta
        check_prompt_count(part(meta, "prompt_tokens"), self._prompt)
        ids, logprobs = self._new(answer, meta)
        self.cached_tokens = answered_count(meta.get("cached_tokens"), "cached_tokens")
        if reason is None:
            return self.take(ids, logprobs)
        # `weight_version` is the server's when it answers: the spans say what sampled each token
        self.end(ids, logprobs, part(reason, "type"), reason.get("matched"), meta.get("weight_versions"))
        return None

    def _new(self, answer: Any, meta: Any) -> tuple[Ids, Logprobs]:
        given = rows(part(answer, "output_ids"), "output_ids")
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
        ids = answered_ids(given[len(given) - new :], "output_ids", self._vocab_size)
        if not new:
            return ids, answered_logprobs([], ids, "output_token_logprobs")
        triples = rows(part(meta, "output_token_logprobs"), "output_token_logprobs")[-new:]
        logprobs = answered_logprobs([part(row, 0) for row in triples], ids, "output_token_logprobs")
        same_ids([part(row, 1) for row in triples], ids, "output_token_logprobs")
        return ids, logprobs

    def _refuse(self, reason: Any) -> None:
        """An abort with a status is not one that was asked for: the scheduler gave the request up."""
        status = reason.get("status_code") if isinstance(reason, dict) and reason.get("type") == "abort" else None
        if type(status) is not int:
            return
        words = f"SGLang gave the request up ({status}): {_words(reason.get('message'))}"
        if status < 500 and status != 429:
            raise EngineRefusal(words, status=status)
        if self.count:
            raise EngineError(f"{words}, after {self.count} tokens had arrived")
        raise EngineUnavailable(words)


def _text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8")


def _words(value: Any) -> str:
    return value[:300] if isinstance(value, str) else shown(value)


def _smallest(*values: int | None) -> int | None:
    return min([value for value in values if value], default=None)
