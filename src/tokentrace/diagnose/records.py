"""Recorded rollouts in one form: calls of an engine, and training rows built from them.

Anywhere in a line of a dump, an object with a prompt and a completion is a call; one with ids
and a mask, labels or logprobs is a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InputError, brief
from ..samples.sample import IGNORE
from ..settings import as_float
from ..show.visible import counted
from ..tokens.ids import check_ids, check_integers, runs
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from ..trajectory.turns import POSITIVE_NOISE
from .finding import Cause, Finding

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Line = Mapping[str, Any]
IDS = ("input_ids", "token_ids", "ids", "tokens")
PROMPTS = ("prompt_ids", "prompt_token_ids")
COMPLETIONS = (
    *("completion_ids", "completion_token_ids", "generation_token_ids"),
    *("output_ids", "token_ids"),
)
MASKS = (
    *("loss_mask", "completion_mask", "output_mask", "response_mask"),
    *("env_mask", "assistant_masks", "assistant_mask", "mask"),
)
LOGPROBS = (
    *("logprobs", "log_probs", "completion_logprobs", "generation_log_probs"),
    *("output_log_probs", "per_token_logps", "response_logprobs", "rollout_log_probs"),
    *("old_log_probs", "inference_logprobs", "sampling_per_token_logps"),
)
"""The names that frameworks use. The first with a value counts."""
_NAMES = (
    *("rollout_id", "session_id", "trajectory_id", "conversation_id", "episode_id"),
    *("request_id", "rollout", "session", "uid", "name"),
)
_LISTS = ("calls", "turns", "steps", "entries", "trace", "trajectory")
"""Lists of calls. They take precedence over tokens next to them."""
_IGNORED = (
    *("message", "messages", "prompt", "completion", "input", "request"),
    *("responses_create_params", "tools", "metadata"),
)
"""Fields with messages and settings. Their tokens belong to no call."""
_BAD_VALUES = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
ROWS = "rows of ids"


class UnknownShapeError(InputError):
    """A line with neither calls nor rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A prompt and, from `start` on, sampled tokens. `recorded`: the cause that the record names."""

    stream: Ids
    start: int
    where: str
    logprobs: Floats | None = None
    mask: Mask | None = None
    request: Line | None = None
    reply: Line | None = None
    recorded: str = ""
    temperature: float | None = None

    @property
    def prompt(self) -> Ids:
        return self.stream[: self.start]

    @property
    def conversation(self) -> Line | None:
        if self.request is None or self.reply is None:
            return self.request
        return {**self.request, "messages": [*self.request["messages"], self.reply]}


class TrainingRow(NamedTuple):
    """A training row, and its trained runs as calls."""

    ids: Ids
    mask: Mask
    where: str
    sampled: Mask | None
    calls: Sequence[Call]


@dataclass(slots=True, eq=False)
class Rollout:
    """Calls, and rows made from them. `problem`: why it is unreadable."""

    name: str
    where: str
    calls: list[Call] = field(default_factory=list)
    rows: list[TrainingRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    tokenizer: str | None = None
    ordered: bool = True
    problem: str = ""


def first_of(value: Line, names: Sequence[str]) -> str | None:
    return next((name for name in names if value.get(name) is not None), None)


def exchange(messages: Any, tools: Any, reply: Any = None) -> dict[str, Any]:
    if not isinstance(messages, list):
        return {}
    request = {"messages": messages, "tools": tools if isinstance(tools, list) else None}
    return {"request": request, "reply": reply if isinstance(reply, Mapping) else None}


@dataclass(frozen=True, slots=True)
class Fields:
    """An object in a record. Reading it adds to a rollout."""

    value: Line
    rollout: Rollout
    path: str = ""

    def inner(self, name: str, value: Any) -> Fields:
        return Fields(value, self.rollout, self.field(name))

    def field(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path and name else self.path or name

    def where(self, name: str = "") -> str:
        return ", ".join(filter(None, (self.rollout.where, self.field(name))))

    def report(self, cause: Cause, name: str, words: str, tokens: int, at: int | None = None) -> None:
        where, field = self.where(name), self.field(name)
        self.rollout.findings.append(Finding(cause, where, None, field, words, at, tokens))

    def ids(self, names: Sequence[str]) -> Ids:
        name = first_of(self.value, names)
        if name is None:
            raise InputError("is missing", field=self.field(names[0]))
        return check_ids(self.value[name], self.field(name))

    def mask(self, count: int, before: int = 0) -> Mask | None:
        """The record may leave out the prompt's `before` tokens."""
        name = first_of(self.value, MASKS)
        if name is None:
            return None
        if not isinstance(self.value[name], (list, tuple, np.ndarray)):
            raise InputError(f"must be a list, not {brief(self.value[name])}", field=self.field(name))
        values = list(self.value[name])
        words = [f"entry {at} is {brief(one)}" for at, one in enumerate(values) if one not in (0, 1)]
        if len(values) not in (count, before + count):
            words = [f"{len(values):,} entries for {counted(before + count)}"]
        if not words:
            return np.asarray([False] * (before + count - len(values)) + values, np.bool_)
        self.report(Cause.BAD_MASK, name, words[0], len(values))
        return None

    def trained(self, ids: Ids, first: int = 0) -> Mask | None:
        """The trained tokens; None without mask and labels."""
        mask = self.mask(len(ids) - first, first)
        if self.value.get("labels") is None:
            return mask
        labels = check_integers(self.value["labels"], self.field("labels"))
        if len(labels) != len(ids):
            words = f"{len(labels):,} labels for {len(ids):,} tokens"
            self.report(Cause.BAD_LABELS, "labels", words, len(labels))
            return mask
        trained: Mask = labels != IGNORE
        mask = trained if mask is None else mask
        problems = {
            "is not the id there": trained & (labels != ids),
            "contradicts the mask": mask != trained,
        }
        shifted = np.array_equal(labels[:-1][trained[:-1]], ids[1:][trained[:-1]])
        shift = "; every label is the next token's id, but models shift labels themselves" * shifted
        for problem, wrong in problems.items():
            for at in np.flatnonzero(wrong)[:1].tolist():
                words = f"label {at:,} is {labels[at]}, which {problem}{shift}"
                self.report(Cause.BAD_LABELS, "labels", words, int(wrong.sum()), at)
        return mask

    def logprobs(self, sampled: Mask, sizes: Sequence[int]) -> Floats | None:
        """Logprobs of sampled tokens, or of the last n (n in `sizes`)."""
        name, count = first_of(self.value, LOGPROBS) or "", int(sampled.sum())
        try:
            values = np.asarray(self.value[name] if name else [], np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.zeros((0, 0))
        if values.ndim != 1:
            raise InputError("must be one list of numbers", field=self.field(name))
        if len(values) not in (count, *sizes):
            cause = Cause.BAD_LOGPROBS if len(values) else Cause.NO_LOGPROBS
            if count:
                self.report(cause, name, f"{len(values):,} logprobs for {counted(count)}", count)
            return None
        scores = np.full(len(sampled), np.nan)
        scores[slice(len(sampled) - len(values), None) if len(values) in sizes else sampled] = values
        for start, stop in runs(sampled):
            run = scores[start:stop]
            wrong = np.flatnonzero(~np.isfinite(run) | (run > POSITIVE_NOISE)).tolist()
            for at in wrong[:1]:
                words = f"token {at} of the completion: {run[at]:g}"
                self.report(Cause.BAD_LOGPROBS, name, words, len(wrong), at)
            if len(run) >= 4 and not run.any():
                self.report(Cause.ZERO_LOGPROBS, name, "a whole completion", len(run))
        return scores

    def calls(
        self, ids: Ids, sampled: Mask, mask: Mask | None = None, sizes: Sequence[int] = (), **more: Any
    ) -> list[Call]:
        scores, calls, where = self.logprobs(sampled, sizes), [], self.where()
        for start, stop in runs(sampled):
            logprobs = None if scores is None else scores[start:stop]
            trained = None if mask is None else mask[:stop]
            calls.append(Call(ids[:stop], start, where, logprobs, trained, **more))
        return calls

    def add_row(self, ids: Ids, first: int = 0, requests: Sequence[Line] = ()) -> None:
        """Add a row; without mask and labels, all after `first` is trained."""
        total, sampled, mask = len(ids), None, self.trained(ids, first)
        if mask is None:
            unmarked = first_of(self.value, (*MASKS, "labels")) is None
            mask = np.arange(total) >= (first if unmarked else total)
        if self.value.get("kinds") is not None:
            kinds = check_integers(self.value["kinds"], self.field("kinds"))
            if len(kinds) != total:
                raise InputError(f"has {len(kinds):,} entries for {total:,} ids", field=self.field("kinds"))
            sampled = kinds == Kind.SAMPLED
            if (count := self.value.get("num_tokens", total)) != total:
                raise InputError(f"is {brief(count)}, but there are {total:,} ids", field="num_tokens")
        messages, tools, *causes = map(self.value.get, ("messages", "tools", "cause", "cause_detail"))
        recorded = ": ".join(cause for cause in causes if isinstance(cause, str) and cause)
        request = exchange(messages, tools) if "cause" not in self.value else {}
        calls = self.calls(ids, mask, sizes=(total, total - first), recorded=recorded, **request)
        if isinstance(messages, str) and "message_indices" in self.value:  # a session's row
            messages, tools = json.loads(messages), json.loads(tools or "null")
            places = [self.value["message_indices"][call.start] for call in calls]
            if (last := max(places, default=-1)) >= len(messages):
                raise InputError(f"message_indices names message {last} of {len(messages)}")
            requests = [exchange(messages[:at], tools, messages[at]) for at in places]
        if len(requests) == len(calls):
            calls = [replace(call, **one) for call, one in zip(calls, requests, strict=True)]
        self.rollout.rows.append(TrainingRow(ids, mask, self.where(), sampled, calls))


def read_lines(lines: Sequence[tuple[Line, str]]) -> Iterator[Rollout]:
    """The rollouts of some lines; those that name a rollout become one."""
    parts: list[Rollout] = []
    streams: dict[Any, list[int]] = {}
    captured = any("model_call_id" in line for line, _ in lines)
    if captured:
        lines = sorted(lines, key=lambda pair: as_float(pair[0].get("created_at")) or 0)
    for line, where in lines:
        try:
            parts += read_line(_complete_prompt(line, streams) if captured else line, where)
        except InputError as error:
            yield Rollout("", where, problem=str(error))
        except _BAD_VALUES as error:
            yield Rollout("", where, problem=f"has a malformed field ({error})")
    if len(parts) > 1 and line_key(lines[0][0]) is not None:
        for name in ("calls", "rows", "findings"):
            setattr(parts[0], name, [one for part in parts for one in getattr(part, name)])
        parts = [replace(parts[0], ordered=False)]
    yield from parts


def read_line(line: Any, where: str) -> Iterator[Rollout]:
    """prime-rl's episodes and TRL's batches have several rollouts."""
    columns = line if isinstance(line, Mapping) else {}
    traces, prompts = columns.get("traces"), columns.get("prompt_ids")
    if isinstance(traces, list):
        yield from (_rollout(trace, f"{where}, traces[{at}]") for at, trace in enumerate(traces))
    elif isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
        columns = {name: values for name, values in columns.items() if isinstance(values, list)}
        columns["response_ids"] = columns.pop("completion_ids", [])
        if len({len(values) for values in columns.values()}) > 1:
            problem = "the lists differ in length; each needs one entry per rollout"
            raise InputError(problem, field="prompt_ids")
        for at in range(len(prompts)):
            yield _rollout({name: values[at] for name, values in columns.items()}, f"{where}, [{at}]")
    else:
        yield _rollout(line, where)


def _rollout(line: Any, where: str) -> Rollout:
    if not isinstance(line, Mapping):
        raise UnknownShapeError(f"a line of a record must be an object, not {brief(line)}")
    field, tokenizer = first_of(line, ("id", "example_id")), line.get("tokenizer")
    name = _rollout_name(line) or (where.rpartition(", ")[2] if field is None else str(line[field]))
    rollout = Rollout(name, where, tokenizer=tokenizer if isinstance(tokenizer, str) else None)
    _read(Fields(line, rollout), line.get("tools"))
    if not rollout.calls and not rollout.rows and "nodes" not in line:
        needs = "a call needs prompt_ids and completion_ids, a row input_ids and loss_mask"
        raise UnknownShapeError(f"this is {brief(line)}, which has no known shape: {needs}")
    return rollout


def recognise(line: Any) -> str:
    """Describe what a line holds. Raises UnknownShapeError if it has no tokens."""
    try:
        next(read_line(line, ""), None)
    except UnknownShapeError:
        raise
    except (InputError, *_BAD_VALUES):  # is reported when the line is read
        pass
    return ROWS if _is_row(line) else "calls, one per line" if _is_call(line) else "rollouts, one per line"


def line_key(line: Any) -> str | None:
    """The rollout that a line is a part of; None if it is a rollout by itself."""
    alone = not isinstance(line, Mapping) or _lists_calls(line)
    return _rollout_name(line) if not alone and (_is_call(line) or _is_row(line)) else None


def _rollout_name(line: Line) -> str | None:
    for part in (line, line.get("metadata")):
        if isinstance(part, Mapping) and (name := first_of(part, _NAMES)):
            return str(part[name])
    if line.get("source") is not None:
        alone = line.get("branch") is None and line.get("row") is not None
        return f"{line['source']}, row {line['row']}" if alone else str(line["source"])
    return "" if "per_token_logps" in line else None  # a file of OpenEnv's trace entries is one rollout


def _is_call(line: Line, inner: bool = False) -> bool:
    """True for a prompt and a completion or, inside a rollout (`inner`), one of them."""
    parts = [any(name in line for name in names) for names in (PROMPTS, ("response_ids", *COMPLETIONS))]
    return all(parts) or (inner and any(parts) and first_of(line, IDS) is None)


def _lists_calls(line: Line) -> bool:
    firsts = [items[0] for items in map(line.get, _LISTS) if isinstance(items, list) and items]
    return any(isinstance(item, Mapping) and _is_call(item) for item in firsts)


def _is_row(line: Line) -> bool:
    marks = (*MASKS, *LOGPROBS, "labels")
    return not _is_call(line) and first_of(line, IDS) is not None and first_of(line, marks) is not None


def _read(line: Fields, tools: Any) -> None:
    value = line.value
    nodes, tokens = value.get("nodes"), value.get("tokens")
    if isinstance(nodes, list) and nodes and isinstance(nodes[0], Mapping) and "message" in nodes[0]:
        _read_trace(line)
    elif {"prompt_ids", "response_ids"} <= value.keys():  # verl, or one of TRL's batch
        prompt = line.ids(("prompt_ids",))
        line.add_row(np.concatenate([prompt, line.ids(("response_ids",))]), len(prompt))
    elif isinstance(value.get("sequences"), list):
        _read_session(line)
    elif _is_call(value, inner=bool(line.path)) and not _lists_calls(value):
        _read_call(line, line, tools)
    elif isinstance(tokens, Mapping) and _is_call(tokens):
        _read_call(line, line.inner("tokens", tokens), tools)
    elif _is_row(value):
        line.add_row(line.ids(IDS))
    else:
        for name, inner in value.items():
            items = enumerate(inner) if isinstance(inner, list) else [(-1, inner)]
            for at, item in items if name not in _IGNORED else ():
                path = name if at < 0 else f"{name}[{at}]"
                if isinstance(item, Mapping):
                    _read(line.inner(path, item), tools)
                elif name in _LISTS and _lists_calls(value):
                    raise InputError(f"is {brief(item)}, not a call", field=line.field(path))


def _read_call(line: Fields, tokens: Fields, tools: Any) -> None:
    value = line.value
    choices = _inside(value, "response").get("choices") or [{}]
    reply = value.get("reply") or value.get("completion") or choices[0].get("message")
    reply = reply[-1] if isinstance(reply, list) and reply else reply
    request = _inside(value, "request") or value
    if "messages" not in request and isinstance(request.get("prompt"), list):
        request = {"messages": request["prompt"], "tools": tools}
    temperature = (_inside(_inside(value, "metadata"), "sampling_params") or value).get("temperature")
    more = exchange(request.get("messages"), request.get("tools"), reply)
    more["temperature"] = None if temperature is None else float(temperature)
    prompt, completion = tokens.ids(PROMPTS), tokens.ids(COMPLETIONS)
    mask, stream = tokens.mask(len(completion), len(prompt)), np.concatenate([prompt, completion])
    calls = tokens.calls(stream, np.arange(len(stream)) >= len(prompt), mask, **more)
    line.rollout.calls += calls or [Call(stream, len(stream), tokens.where(), mask=mask, **more)]


def _inside(value: Line, name: str) -> Line:
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _read_session(line: Fields) -> None:
    """OpenEnv: rows and the turns that they were built from."""
    turns = {str(turn.get("node_id")): turn for turn in line.value.get("turns") or ()}
    names = ("request_messages", "request_tools", "response_message")
    for at, sequence in enumerate(line.value["sequences"]):
        of_row = (turns.get(str(node)) or {} for node in sequence.get("node_ids") or ())
        row = line.inner(f"sequences[{at}]", sequence)
        row.add_row(row.ids(IDS), requests=[exchange(*map(turn.get, names)) for turn in of_row])


def _read_trace(line: Fields) -> None:
    """verifiers: a node has a message; its path is the prompt."""
    nodes = [line.inner(f"nodes[{at}]", node) for at, node in enumerate(line.value["nodes"])]
    ids = [check_ids(node.value.get("token_ids") or [], node.field("token_ids")) for node in nodes]
    masks = [node.mask(len(tokens)) for node, tokens in zip(nodes, ids, strict=True)]
    for at, node in enumerate(nodes):
        size, sampled = len(ids[at]), masks[at]
        if not node.value.get("sampled") or not size:
            continue
        path, parents = [at], {at}
        while (parent := nodes[path[-1]].value.get("parent")) is not None:
            if not isinstance(parent, int) or not 0 <= parent < len(nodes) or parent in parents:
                problem = f"is {parent!r}, which is not a valid parent node"
                raise InputError(problem, field=node.field("parent"))
            path.append(parent)
            parents.add(parent)
        path.reverse()
        if sampled is None or not sampled.any():  # what comes before the completion belongs to the prompt
            sampled = np.arange(size) >= size - len(node.value.get("logprobs") or ids[at])
        stream = np.concatenate([ids[one] for one in path])
        sampled = np.concatenate([np.zeros(len(stream) - size, np.bool_), sampled])
        path_masks: Any = [masks[one] for one in path if len(ids[one])]
        trained = None if any(mask is None for mask in path_masks) else np.concatenate(path_masks)
        *messages, reply = [nodes[one].value.get("message") for one in path]
        are_messages = all(isinstance(message, Mapping) for message in (*messages, reply))
        request = exchange(messages, nodes[path[0]].value.get("tools"), reply) if are_messages else {}
        line.rollout.calls += node.calls(stream, sampled, trained, **request)


def _complete_prompt(line: Line, streams: dict[Any, list[int]]) -> Line:
    """NeMo Gym: a prompt may be a delta on another stream."""
    name, parent = line.get("model_call_id"), line.get("parent_call_id")
    fields = ("prompt_token_ids", "generation_token_ids")
    prompt, completion = (check_ids(line.get(field), field).tolist() for field in fields)
    if line.get("prompt_is_delta"):
        if not streams.get(parent):
            words = f"call {name!r} is stored as a delta on call {parent!r}, which is missing or ambiguous"
            raise InputError(words, field="parent_call_id")
        prompt = streams[parent] + prompt
    stream = prompt + completion
    streams[name] = stream if streams.get(name, stream) == stream else []
    return {**line, "prompt_token_ids": prompt}
