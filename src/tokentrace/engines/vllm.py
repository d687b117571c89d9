"""vLLM: ``/inference/v1/generate``, or ``/v1/completions`` with ids where that is off.

Start it with ``--enable-scale-out`` (the first endpoint is off without), ``--logprobs-mode processed_logprobs`` (the
default is raw) and ``--enable-prompt-tokens-details`` (for `Completion.cached_tokens`). Pausing needs
``VLLM_SERVER_DEV_MODE=1``.

Where vLLM differs from other engines: it cuts a completion that does not fit without saying so, so such a request is
not sent; its ids in ``abort_requests`` have a prefix that the request does not have; the model's
``generation_config.json`` may change how ``/v1/completions`` samples, so every setting is sent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .adapter import HTTPEngine, best_logprob, connecting, folder_of, probed_kind, sampling_fields
from .answers import (
    AnswerReader,
    answered_count,
    answered_ids,
    answered_logprobs,
    check_prompt_echo,
    optional,
    part,
    same_ids,
    scored_ids,
)
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
_ABORTED_ID: Final = "generate-tokens-"
"""What vLLM puts before the id of a request; an abort without it is answered 200, and nothing happens."""
_TOKEN_ID: Final = "token_id:"
_PROMPT: Final = {GENERATE: "token_ids", COMPLETIONS: "prompt"}
_LOGPROBS: Final = {GENERATE: "content", COMPLETIONS: "token_logprobs"}
_ECHO: Final = b'"prompt_token_ids":'
_STRUCTURED_OUTPUTS: Final = (0, 11)
"""The version since which there are no guided_* fields that one could rely on."""
MAX_LOGPROBS: Final = 20
"""The default of vLLM's ``--max-logprobs``."""
PauseMode = Literal["keep", "wait", "abort"]


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

        `model` is needed where several are served. vLLM does not tell the size of its vocabulary: give `vocab_size`
        (the tokenizer's) to have ids checked before they are sent and after they are returned. Nor does it tell which
        logprobs it returns: those of the likeliest token are compared at two temperatures, unless `logprobs` says
        which they are. Where that does not tell, they are ``UNKNOWN``.
        `check_echo` has each prompt sent back and compared, which costs as much as the prompt is long; without it,
        its length is compared. `pause_mode` is what `pause` does to requests under way: they wait (``"keep"``), are
        finished first (``"wait"``), or end with ``ABORT``. `max_logprobs` is what the server was started with as
        ``--max-logprobs``, if not the default; ``/inference/v1/generate`` tells one alternative less.

        Where the server was started with ``--enable-return-routed-experts``, what it returns is the channel
        ``"routed_experts"``: of each sampled id the experts of all layers.
        """
        async with connecting(base_url, settings) as connection:
            card = _card(part(await connection.get("/v1/models"), "data", kind=list), model)
            version = await connection.found("/version")
            paused = await connection.found("/is_paused")
            weights = await connection.found("/weight_info")
            if isinstance(paused, dict) and paused.get("is_paused"):
                raise EngineError(f"{connection.base_url} is paused: resume it before connecting")
            found = Capabilities(
                engine="vllm",
                version=optional(version, "version", str) if isinstance(version, dict) else None,
                model=card["id"],
                max_length=answered_count(card.get("max_model_len"), "max_model_len"),
                vocab_size=vocab_size,
                streams=True,
                pauses=paused is not None,
                sampling=frozenset(OPTIONAL),
                weights=paused is not None and weights is not None,
            )
            engine = cls(connection, found, check_echo=check_echo, pause_mode=pause_mode)
            try:
                choice = await engine._sample_one(0, SamplingParams(1))
            except EngineRefusal as error:
                if error.status not in (403, 404, 405):
                    raise
                engine = cls(connection, found, path=COMPLETIONS, check_echo=check_echo, pause_mode=pause_mode)
                choice = await engine._sample_one(0, SamplingParams(1))
            engine.capabilities = replace(
                found,
                logprobs=await probed_kind(engine._best_logprob, vocab_size, logprobs),
                aborts=engine.path == GENERATE,
                versions=choice.get("weight_versions") is not None,
                # unknown fields are ignored: where the version is not known, JSON might be asked for in vain
                structures=_version(found.version) is not None,
                # generate tells as many as it is asked for, the sampled one among them
                top_logprobs=max(0, max_logprobs - (engine.path == GENERATE)),
            )
            engine.version = optional(weights, "weight_version", str) if isinstance(weights, dict) else None
            return engine

    async def _sample_one(self, prompt: int, sampling: SamplingParams) -> dict[str, Any]:
        request = GenerateRequest([prompt], sampling)
        fields = self._fields(request, logprobs=2)  # with 1, generate returns that of the sampled token alone
        choice: dict[str, Any] = part(await self._post(request, fields), "choices", 0, kind=dict)
        _sampled(choice, self.path, None)
        return choice

    async def _best_logprob(self, prompt: int, sampling: SamplingParams) -> float:
        """The logprob of the likeliest token: one of two, or more, that are told."""
        choice = await self._sample_one(prompt, sampling)
        if self.path == COMPLETIONS:
            told = part(choice, "logprobs", "top_logprobs", 0, kind=dict)
            return max([best_logprob(told, name) for name in told], default=-math.inf)
        for row in part(choice, "logprobs", "content", 0, "top_logprobs", kind=list):
            if part(row, "rank") == 1:
                return best_logprob(row, "logprob")
        raise EngineAnswerError("vLLM did not tell the logprob of the likeliest token, which was asked for")

    async def score(self, ids: Sequence[int] | Ids) -> Logprobs:
        """By ``prompt_logprobs`` of ``/v1/completions``, which are raw: of the model at temperature 1."""
        given = check_ids(ids, "ids", vocab_size=self.capabilities.vocab_size)
        body = {"model": self.capabilities.model, "prompt": given.tolist(), "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._ask(COMPLETIONS, body | {"add_special_tokens": False, "temperature": 0})
        told = part(answer, "choices", 0, "prompt_logprobs", kind=list)
        rows = zip(told[1:], given[1:].tolist(), strict=False)
        return scored_ids([part(row, str(one), "logprob") for row, one in rows], given, "prompt_logprobs")

    async def abort(self, request_id: str) -> None:
        if not self.capabilities.aborts:
            raise EngineError("vLLM ends requests by id only where it was started with --enable-scale-out")
        await self._tell("/inference/v1/abort_requests", {"request_ids": [_ABORTED_ID + request_id]})

    async def pause(self) -> None:
        """Let no request go on."""
        self._refuse_pausing()
        await self._tell(f"/pause?mode={self._pause_mode}&clear_cache=false")

    async def resume(self) -> None:
        self._refuse_pausing()
        await self._tell("/resume")

    async def is_paused(self) -> bool:
        """Whether the server is paused, by this engine or by somebody else."""
        self._refuse_pausing()
        return part(await self._connection.get("/is_paused"), "is_paused") is True

    async def update_weights(self, weights: Weights, *, version: str | int) -> None:
        """Reload from a folder that the server's machine sees, in place. Paused meanwhile, where it is not already.

        Where it fails the server is left paused: what it would sample with is not known. vLLM names versions by text:
        3 is ``"3"``.
        """
        version, folder = checked_version(version), folder_of(weights, "vLLM")
        self._refuse_weights()
        was_paused = await self.is_paused()
        if not was_paused:
            await self.pause()
        try:
            await self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            await self.reset_prefix_cache()
            await self.set_version(version)
        except EngineError as error:
            raise EngineError(
                f"vLLM did not take the weights of {version!r}: {error}. It is left paused: give it weights that it "
                "can load, or start it again"
            ) from error
        if not was_paused:
            await self.resume()

    async def set_version(self, version: str | int) -> None:
        self._refuse_weights()
        name = str(checked_version(version))
        await self._ask("/update_weight_version", {"new_version": name})
        self.version = name

    async def reset_prefix_cache(self) -> None:
        """Requests under way are put back, and have what was computed of them computed anew."""
        self._refuse_weights()
        await self._ask("/reset_prefix_cache?reset_running_requests=true&reset_external=true")

    def _refuse_weights(self) -> None:
        if not self.capabilities.weights:
            raise EngineError(
                "vLLM can be given other weights only where it was started with VLLM_SERVER_DEV_MODE=1, and is new "
                "enough to have /weight_info"
            )

    def _refuse_pausing(self) -> None:
        if not self.capabilities.pauses:
            raise EngineError("vLLM can be paused only where it was started with VLLM_SERVER_DEV_MODE=1")

    def _fields(self, request: GenerateRequest, logprobs: int | None = None) -> dict[str, Any]:
        if logprobs is None:
            logprobs = request.sampling.top_logprobs
            logprobs += 1 if logprobs and self.path == GENERATE else 0
        params = sampling_fields(request.sampling, most="max_tokens", seed="seed") | {"logprobs": logprobs}
        params |= _structure(request.sampling, self.capabilities.version)
        fields: dict[str, Any] = {"model": self.capabilities.model}
        if self.path == COMPLETIONS:
            fields |= params
            return fields | {"add_special_tokens": False, "return_token_ids": True, "return_tokens_as_token_ids": True}
        fields |= {"sampling_params": params, "return_token_ids": self._check_echo}
        return fields if request.request_id is None else fields | {"request_id": request.request_id}

    def _reader(self, request: GenerateRequest, text: bytes) -> AnswerReader:
        return _VLLMReader(request, self.capabilities, self.path, text if self._check_echo else None)


class _VLLMReader(AnswerReader):
    """An answer, whole or in the chunks of a stream, which carry what is new.

    The prompt comes back in it, if that was asked for. It is compared as the JSON text that was sent; only where that
    differs, in white space or in earnest, are its ids read and compared.
    """

    def __init__(self, request: GenerateRequest, capabilities: Capabilities, path: str, sent: bytes | None) -> None:
        super().__init__(request, capabilities)
        self._path: Final = path
        self._sent: Final = sent
        self._echo_due = sent is not None

    def read(self, answer: bytes) -> Any:
        at = answer.find(_ECHO) if self._echo_due else -1
        start = at + len(_ECHO)
        if at < 0 or self._sent is None or not answer.startswith(self._sent, start):
            return super().read(answer)
        value = super().read(answer[:start] + b"null" + answer[start + len(self._sent) :])
        self._echo_due = False
        return value

    def feed(self, answer: Any) -> Delta | None:
        usage = part(answer, kind=dict).get("usage")
        if isinstance(usage, dict):
            self.check_prompt_count(usage.get("prompt_tokens"))
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, dict) else None
            self.cached_tokens = answered_count(cached, "cached_tokens")
        if not part(answer, "choices", kind=list):
            return None
        choice = part(answer, "choices", 0, kind=dict)
        if self._echo_due:
            echo = part(choice if self._path == COMPLETIONS else answer, "prompt_token_ids")
            check_prompt_echo(echo, self.prompt)
            self._echo_due = False
        ids, logprobs = _sampled(choice, self._path, self.capabilities.vocab_size)
        channels = self._top(choice) if self.sampling.top_logprobs and len(ids) else NO_CHANNELS
        reason, experts = choice.get("finish_reason"), choice.get("routed_experts")
        if reason is None:
            if experts is not None:
                raise EngineAnswerError("vLLM told routed_experts before the end; they are known to come with it")
            return self.take(ids, logprobs, channels)
        whole: Channels = NO_CHANNELS
        if experts is not None:
            whole = {ROUTED_EXPERTS: experts_of(npy_experts(experts), len(self.prompt), self.count + len(ids))}
        self.end(ids, logprobs, reason, choice.get("stop_reason"), choice.get("weight_versions"), channels, whole)
        return None

    def _top(self, choice: dict[str, Any]) -> Channels:
        pairs: list[list[tuple[Any, Any]]]
        if self._path == COMPLETIONS:
            where = "logprobs.top_logprobs"
            told = part(choice, "logprobs", "top_logprobs", kind=list)
            pairs = [
                [(_number(name.removeprefix(_TOKEN_ID)), value) for name, value in part(told, at, kind=dict).items()]
                for at in range(len(told))
            ]
        else:
            where = "logprobs.content"
            content = part(choice, "logprobs", "content", kind=list)
            pairs = [
                [(part(one, "token_id"), part(one, "logprob")) for one in part(entry, "top_logprobs", kind=list)]
                for entry in content
            ]
        return {TOP_LOGPROBS: answered_top(pairs, self.sampling.top_logprobs, self.capabilities.vocab_size, where)}


def _sampled(choice: dict[str, Any], path: str, vocab_size: int | None) -> tuple[Ids, Logprobs]:
    ids = answered_ids(part(choice, "token_ids"), "token_ids", vocab_size)
    if not len(ids):
        told = optional(choice, "logprobs", dict) or {}
        return ids, answered_logprobs(optional(told, _LOGPROBS[path], list) or [], ids, "logprobs")
    if path == COMPLETIONS:
        given = part(choice, "logprobs", "token_logprobs", kind=list)
        logprobs = answered_logprobs(given, ids, "logprobs.token_logprobs")
        tokens = part(choice, "logprobs", "tokens", kind=list)
        if all(isinstance(token, str) and token.startswith(_TOKEN_ID) for token in tokens):  # else they are text
            same_ids([_number(token.removeprefix(_TOKEN_ID)) for token in tokens], ids, "logprobs.tokens")
        return ids, logprobs
    content = part(choice, "logprobs", "content", kind=list)
    logprobs = answered_logprobs([part(entry, "logprob") for entry in content], ids, "logprobs.content")
    same_ids([part(entry, "token_id") for entry in content], ids, "logprobs.content")
    return ids, logprobs


def _structure(sampling: SamplingParams, version: str | None) -> dict[str, Any]:
    """Structured outputs, or guided decoding as versions before 0.11 had it."""
    if sampling.structure is None:
        return {}
    schema = sampling.structure.get("schema")
    if (_version(version) or (0, 0)) < _STRUCTURED_OUTPUTS:
        return {"guided_json": {"type": "object"} if schema is None else schema}
    return {"structured_outputs": {"json_object": True} if schema is None else {"json": schema}}


def _version(text: str | None) -> tuple[int, int] | None:
    """The first two numbers of a version; None where there are none."""
    found = re.match(r"v?(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _card(served: list[Any], model: str | None) -> dict[str, Any]:
    """What the server says of the model; of its only one, where none is named."""
    names = [part(card, "id", kind=str) for card in served]
    if model is None and len(names) != 1:
        raise EngineError(f"the server has {len(names)} models: say which with model=, of {names}")
    if model is not None and model not in names:
        raise EngineRefusal(f"the server has no model {model!r}, but {names}", status=404)
    return dict(served[0 if model is None else names.index(model)])
