"""What is sent to an engine and what it returns, checked. Pure: no I/O.

A request that an engine is known to cut short, or to crash on, is refused before it is sent. Answers are taken
as they are or not at all: `EngineAnswerError` names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError, shown
from ..tokens.ids import INT32_MAX, common_prefix
from ..tokens.tokenizer import Ids
from ..trajectory.inputs import POSITIVE_NOISE, as_ids
from ..trajectory.turns import LogprobKind, VersionSpan
from .protocol import (
    NO_CHANNELS,
    TOP_LOGPROBS,
    Capabilities,
    Channels,
    Completion,
    Delta,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    LogprobKindError,
    Logprobs,
    SamplingParams,
    check_channels,
    joined,
)

# -- requests


def checked_request(request: GenerateRequest, capabilities: Capabilities) -> GenerateRequest:
    """The request, its prompt as int32.

    `EngineRefusal` where the prompt is empty, has an id outside of the vocabulary, or is too long together with
    `max_tokens`, or where more is asked for than the engine can do. `LogprobKindError` where the logprobs would be of
    another distribution: see `check_logprobs`.
    """
    sampling, limit = request.sampling, capabilities.max_length
    check_logprobs(sampling, capabilities)
    try:
        ids = as_ids(request.prompt_ids, "prompt_ids", capabilities.vocab_size)
        as_ids(sampling.stop_token_ids, "stop_token_ids", capabilities.vocab_size)
    except TrajectoryError as error:
        raise EngineRefusal(f"not sent: {error}") from error
    if not len(ids):
        raise EngineRefusal("not sent: the prompt is empty")
    if limit is not None and len(ids) + sampling.max_tokens > limit:
        raise EngineRefusal(
            f"not sent: {len(ids)} ids of prompt and max_tokens {sampling.max_tokens} are more than the engine's "
            f"{limit}; ask for at most {max(limit - len(ids), 0)}"
        )
    if sampling.top_logprobs > capabilities.top_logprobs:
        raise EngineRefusal(
            f"not sent: top_logprobs is {sampling.top_logprobs}, and {capabilities.engine} tells the logprobs of "
            f"{capabilities.top_logprobs or 'no'} ids beside the sampled one"
        )
    if sampling.structure is not None and not capabilities.structures:
        raise EngineRefusal(
            f"not sent: {capabilities.engine} cannot be held to JSON; ask for it in the prompt, or use vLLM, SGLang or "
            "llama.cpp"
        )
    if sampling.seed is not None and not capabilities.seeds:
        raise EngineRefusal(f"not sent: {capabilities.engine} takes no seed for a request: leave it out")
    for name in sampling.optional:
        if name not in capabilities.sampling:
            why = _WHY_NOT.get((capabilities.engine, name), f"{capabilities.engine} has no such setting")
            raise EngineRefusal(f"not sent: {name} cannot be asked for: {why}")
    return replace(request, prompt_ids=ids)


_COUNTS_PROMPT: Final = "llama.cpp counts the tokens of the prompt too, which is another penalty; use another engine"
_WHY_NOT: Final = {
    ("llama.cpp", "presence_penalty"): _COUNTS_PROMPT,
    ("llama.cpp", "frequency_penalty"): _COUNTS_PROMPT,
    ("llama.cpp", "stop"): "llama.cpp does not return the logprobs of a stop text's tokens; use stop_token_ids",
    ("embedded", "stop"): "an engine knows ids and no text; give EmbeddedEngine token_bytes=, what each id spells",
    ("scripted", "stop"): "an engine knows ids and no text; give ScriptedEngine token_bytes=, what each id spells",
}


def check_logprobs(sampling: SamplingParams, capabilities: Capabilities) -> None:
    """`LogprobKindError` where raw or unknown logprobs are of another distribution than the one that is sampled from.

    At temperature 1 without penalties they are of the same one, but for tokens that top-k, top-p and min-p leave out. A
    greedy completion is drawn from nothing: its logprobs are recorded as what they are, and never refused.
    """
    kind, temperature = capabilities.logprobs, sampling.temperature
    odd = {**({} if temperature == 1 else {"temperature": temperature}), **sampling.penalties}
    if not odd or temperature == 0 or sampling.allow_raw_logprobs:
        return
    if kind in (LogprobKind.PROCESSED, LogprobKind.SCALED):
        return
    what = "raw" if kind is LogprobKind.RAW else "of a kind that is not known"
    how = " and ".join(f"{name} {value:g}" for name, value in odd.items())
    raise LogprobKindError(
        f"not sent: the logprobs of {capabilities.engine} are {what}, and at {how} such are not "
        "those of the distribution that is sampled from. Start the server with processed logprobs (vLLM: "
        "--logprobs-mode processed_logprobs), say logprobs= when connecting if you know that they are, or sample at "
        "temperature 1 without penalties; SamplingParams(allow_raw_logprobs=True) records them as they are"
    )


def completion_kind(sampling: SamplingParams, capabilities: Capabilities) -> LogprobKind:
    """Of which distribution the logprobs of one completion are.

    Not known where it was held to a structure: some engines leave out what does not fit before they compute them, some
    after. The same goes for penalties where it is greedy, unless the engine's are raw in any case.
    """
    if sampling.structure is not None:
        return LogprobKind.UNKNOWN
    if sampling.temperature or capabilities.logprobs is LogprobKind.RAW:
        return capabilities.logprobs
    return LogprobKind.UNKNOWN if sampling.penalties else LogprobKind.RAW


def json_prompt(request: GenerateRequest) -> bytes:
    """The prompt as JSON text: the request's wire text as it is, where it has one."""
    wire, count = request.wire, len(request.prompt_ids)
    if wire is None:
        return repr(np.asarray(request.prompt_ids).tolist()).replace(" ", "").encode("ascii")  # faster than json.dumps
    text = b"".join(wire() if callable(wire) else wire)
    commas = np.count_nonzero(np.frombuffer(text, np.uint8) == _COMMA)  # ten times as fast as bytes.count
    if not (text.startswith(b"[") and text.endswith(b"]")) or commas + 1 != count:
        raise EngineError(f"wire does not hold the prompt's {count} ids: it must say the same as prompt_ids")
    return text


def json_body(field: str, text: bytes, rest: Mapping[str, Any]) -> bytes:
    """A JSON object with the prompt's JSON text as `field`, then the rest."""
    tail = json.dumps(rest, separators=(",", ":")).encode("utf-8")
    return b'{"%s":%s,%s' % (field.encode("ascii"), text, tail[1:])


# -- the fields of answers

_FEW: Final = 4
"""Pieces of streams have one id, mostly: so few are checked sooner one by one than as an array."""
_LOWEST: Final = -3e38
_COMMA: Final = ord(",")
_KINDS: Final[dict[type, str]] = {list: "a list", dict: "an object", str: "text"}


def part(value: Any, *path: str | int, kind: type | None = None) -> Any:
    """What lies at a path of an answer. `EngineAnswerError` where there is nothing, or not what it must be."""
    at = value
    for depth, name in enumerate(path):
        try:
            at = at[name]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, path[: depth + 1]))
            raise EngineAnswerError(f"the answer has no {where}: it is {shown(value)}") from error
    if kind is not None and not isinstance(at, kind):
        where = ".".join(map(str, path)) or "the answer"
        raise EngineAnswerError(f"{where} must be {_KINDS[kind]}, not {shown(at)}")
    return at


def optional(value: dict[str, Any], name: str, kind: type) -> Any:
    """A field that may be missing, as None, but is of a kind where it is there."""
    return None if value.get(name) is None else part(value, name, kind=kind)


def answered_ids(value: Any, what: str, vocab_size: int | None) -> Ids:
    """Sampled ids."""
    if not isinstance(value, list):
        raise EngineAnswerError(f"{what} must be a list, not {shown(value)}")
    size = INT32_MAX if vocab_size is None else vocab_size
    if len(value) <= _FEW and all(type(one) is int and 0 <= one < size for one in value):
        return np.array(value, np.int32)
    try:
        return as_ids(value, what, vocab_size)
    except TrajectoryError as error:
        raise EngineAnswerError(f"the engine returned something that is no id: {error}") from error


def answered_logprobs(given: Sequence[Any], ids: Ids, what: str) -> Logprobs:
    """One logprob for each id: a finite number, at most 0."""
    if len(given) != len(ids):
        raise EngineAnswerError(f"{what}: {len(given)} logprobs for {len(ids)} ids; every sampled id needs its own")
    if len(given) <= _FEW and all(type(one) is float and _LOWEST < one <= POSITIVE_NOISE for one in given):
        return np.array(given, np.float32)
    odd = None if set(map(type, given)) <= {float, int} else [type(one) in (float, int) for one in given].index(False)
    if odd is not None:
        raise EngineAnswerError(f"{what}: the logprob of id {int(ids[odd])} at {odd} is {shown(given[odd])}, no number")
    try:
        logprobs = np.array(given, np.float64)
    except OverflowError as error:
        raise EngineAnswerError(f"{what}: one logprob is an integer beyond floats; they are at most 0") from error
    with np.errstate(over="ignore"):
        small = logprobs.astype(np.float32)
    fine = np.isfinite(small) & (logprobs <= POSITIVE_NOISE)
    if not fine.all():
        at = int(fine.argmin())
        raise EngineAnswerError(
            f"{what}: the logprob of id {int(ids[at])} at {at} is {shown(given[at])}; logprobs are at most 0, unlike "
            "logits, and finite in float32"
        )
    return small


def scored_ids(given: Sequence[Any], ids: Ids, what: str) -> Logprobs:
    """The logprobs of ids that an engine was given, of all but the first, which has none: NaN."""
    return np.concatenate([np.full(1, np.nan, np.float32), answered_logprobs(given, ids[1:], what)])


def same_ids(named: Sequence[Any], ids: Ids, what: str) -> None:
    """The ids that logprobs are said to be of must be those that were sampled."""
    for at, (one, sampled) in enumerate(zip(named, ids.tolist(), strict=False)):
        if type(one) is not int or one != sampled:
            raise EngineAnswerError(f"{what}[{at}] is of id {shown(one)}, but id {sampled} was sampled there")


def answered_versions(value: Any, length: int) -> tuple[VersionSpan, ...]:
    """Spans that cover the completion, once; empty where the engine does not say."""
    if value is None or not length:
        return ()
    spans: list[VersionSpan] = []
    reached = 0
    for row in part({"weight_versions": value}, "weight_versions", kind=list):
        version, start, stop = part(row, "version"), part(row, "start"), part(row, "end")
        is_name = type(version) is str or (type(version) is int and abs(version) < 2**63)
        if not is_name or start != reached or type(stop) is not int or stop <= reached:
            raise EngineAnswerError(f"weight_versions: {shown(row)} does not go on at {reached}")
        spans.append(VersionSpan(version, reached, stop))
        reached = stop
    if reached != length:
        raise EngineAnswerError(f"weight_versions cover {reached} of {length} sampled ids")
    return tuple(spans)


def answered_count(value: Any, what: str) -> int | None:
    """A number of tokens; None where the engine does not say."""
    if value is not None and (type(value) is not int or not 0 <= value <= INT32_MAX):
        raise EngineAnswerError(f"{what} must be a number of tokens, not {shown(value)}")
    return value


def check_prompt_echo(value: Any, ids: Ids) -> None:
    """The prompt that the engine says it read must be the one that was sent."""
    echoed = answered_ids(value, "prompt_token_ids", None)
    at = common_prefix(echoed, ids)
    if not at == len(echoed) == len(ids):
        raise EngineAnswerError(
            f"the engine read another prompt than was sent: {len(echoed)} ids of {len(ids)}, different from {at} on"
        )


# -- whole and in pieces


class AnswerReader:
    """Puts one completion together: out of a whole answer, or of the events of a stream.

    The last piece is held back until all is known of it.
    """

    def __init__(self, request: GenerateRequest, capabilities: Capabilities) -> None:
        self.count = 0
        """How many ids arrived."""
        self.finished = False
        """Whether the reason why it ended has arrived."""
        self.cached_tokens: int | None = None
        self.last_id: int | None = None
        self.prompt: Final[Ids] = np.asarray(request.prompt_ids, np.int32)
        self.sampling: Final = request.sampling
        self.capabilities: Final = capabilities
        self._last: Delta | None = None

    def read(self, answer: bytes) -> Any:
        """The value of an answer or an event, which is JSON text; ValueError or RecursionError where it is not."""
        return json.loads(answer)

    def feed(self, answer: Any) -> Delta | None:
        """The piece that an answer or an event brings; None where it brings no ids, or the last ones."""
        raise NotImplementedError

    def take(self, ids: Ids, logprobs: Logprobs, channels: Channels = NO_CHANNELS) -> Delta | None:
        """A piece that others follow; None where it has no ids."""
        check_channels(channels, len(ids))
        if self.sampling.top_logprobs and len(ids) and TOP_LOGPROBS not in channels:
            raise EngineAnswerError(f"{self.capabilities.engine} returned no top_logprobs, which were asked for")
        self.count += len(ids)
        if self.count > self.sampling.max_tokens:
            raise EngineAnswerError(f"{self.count} ids were returned, where {self.sampling.max_tokens} were asked for")
        self.last_id = int(ids[-1]) if len(ids) else self.last_id
        return Delta(ids, logprobs, channels=channels) if len(ids) else None

    def end(
        self,
        ids: Ids,
        logprobs: Logprobs,
        reason: Any,
        stop: Any = None,
        versions: Any = None,
        channels: Channels = NO_CHANNELS,
        whole: Channels = NO_CHANNELS,
    ) -> None:
        """The last piece: why it ended, with which stop token or text if that is told, and which weights sampled what.

        `whole` are channels that were not told before, of the whole completion.
        """
        self.take(ids, logprobs, channels)
        check_channels(whole, self.count)
        if not isinstance(reason, str) or reason not in set(FinishReason):
            raise EngineAnswerError(
                f"{self.capabilities.engine} ended for a reason that is not known here: {shown(reason)}"
            )
        ended = FinishReason(reason)
        if ended is FinishReason.STOP and (self.last_id is None or (type(stop) is int and self.last_id != stop)):
            raise EngineAnswerError(f"it ended with stop token {stop}, but its last id is {self.last_id}")
        text = stop if ended is FinishReason.STOP and isinstance(stop, str) else None
        if text is not None and text not in self.sampling.stop:
            raise EngineAnswerError(f"it ended with {shown(text)}, which is no stop text that was asked for")
        kind = completion_kind(self.sampling, self.capabilities)
        spans, told = answered_versions(versions, self.count), {**channels, **whole}
        self._last = Delta(ids, logprobs, ended, spans, logprobs_kind=kind, channels=told, stopped_by=text)
        self.finished = True

    def close(self) -> Delta:
        """The last piece."""
        if self._last is None:
            raise EngineAnswerError(f"{self.capabilities.engine} did not say why the completion ended")
        return replace(self._last, cached_tokens=self.cached_tokens)

    def whole(self, answer: Any) -> Completion:
        """The completion that one answer holds."""
        self.feed(answer)
        return joined([self.close()])

    def check_prompt_count(self, value: Any) -> None:
        """The engine must have read as many ids as were sent: it neither cut the prompt nor added to it."""
        if type(value) is not int or value != len(self.prompt):
            raise EngineAnswerError(f"{len(self.prompt)} ids of prompt were sent, and the engine read {shown(value)}")
