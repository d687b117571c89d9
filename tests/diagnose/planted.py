"""Rollouts with a break of every cause, and how each framework would write them down."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.conversations import ADD, SYS, assistant, call, user
from tests.diagnose.two_requests import ANSWER, GO, HELLO, HISTORY, OK, SUMMARY, TOOLS, called, renderer_of, weather
from tokentrace.diagnose.finding import Cause

Ids = list[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One call of an engine, and what it was asked."""

    prompt: Ids
    completion: Ids
    messages: list[Message]
    tools: list[Any] | None
    reply: Message

    @functools.cached_property
    def logprobs(self) -> list[float]:
        return [-0.25 - 0.125 * (at % 7) for at in range(len(self.completion))]

    @property
    def mask(self) -> list[int]:
        return [0] * len(self.prompt) + [1] * len(self.completion)


@dataclass(frozen=True)
class Told:
    """A rollout as it is written down."""

    name: str
    calls: list[Asked]
    cause: Cause | None = None


# -- rollouts


def asked(family: str, messages: Sequence[Message], text: str | Ids, reply: Message, tools: Any = TOOLS) -> Asked:
    renderer = renderer_of(family)
    prompt = renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)
    completion = renderer.tokenizer.encode(text).tolist() if isinstance(text, str) else text
    return Asked(prompt, completion, list(messages), tools, reply)


def two(family: str, text: str | Ids, *replies: Message) -> list[Asked]:
    """A first call, and a second one whose prompt a client has rendered anew."""
    second = asked(family, [*GO, *replies], f"Done.{END[family]}", assistant("Done."))
    return [asked(family, GO, text, replies[0]), second]


def rewritten(family: str, changed: Sequence[Message], tools: Any = TOOLS) -> list[Asked]:
    """A long history, answered, and then asked on with another one."""
    first = asked(family, HISTORY, f"{ANSWER['content']}{END[family]}", ANSWER)
    return [first, asked(family, changed, f"Done.{END[family]}", assistant("Done."), tools)]


END = {"pocket": "<|end|>", "qwen3": "<|im_end|>"}
THOUGHT = "They greet me.\n\nI greet them back, in the way that they did."


def resegmented(family: str, text: str) -> Ids:
    """The text with its longest word in single letters."""
    tokenizer = renderer_of(family).tokenizer
    ids = tokenizer.encode(text).tolist()
    spelled = [tokenizer.decode([one]) for one in ids]
    at = max(range(len(ids)), key=lambda at: len(spelled[at]) if spelled[at].strip().isalpha() else 0)
    letters = [int(one) for letter in spelled[at] for one in tokenizer.encode(letter)]
    return [*ids[:at], *letters, *ids[at + 1 :]]


def hermes_plants(family: str) -> dict[Cause, list[Asked]]:
    """Breaks of some causes, in a family that writes calls as JSON. The other causes are tested on their own."""

    def calls(text: str, arguments: Any) -> list[Asked]:
        return two(family, weather(text, family=family), *called("get_weather", arguments))

    merged, thinking = (f"{text}{HELLO}{END[family]}" for text in ("", f"<think>\n{THOUGHT}\n</think>\n\n"))
    return {
        Cause.BOOLEAN_CASE: calls('{"city": "Paris", "now": true}', {"city": "Paris", "now": "True"}),
        Cause.BPE_REMERGE: two(family, resegmented(family, merged), assistant(HELLO), user("Bye")),
        Cause.JSON_FORMAT: calls('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}),
        Cause.STRIPPED_REASONING: two(family, thinking, assistant(HELLO), user("Bye")),
        Cause.CHANGED_TOOLS: rewritten(family, [*HISTORY, ANSWER, user("And?")], [*TOOLS, ADD]),
        Cause.COMPACTION: rewritten(family, [SYS, SUMMARY]),
    }


@functools.cache
def clean(family: str) -> list[Told]:
    """Rollouts whose every prompt extends the stream, or asks for another answer; one has a conversation beside it."""
    renderer, end = renderer_of(family), END[family]
    calls: list[Asked] = []
    rows = list(GO)
    prompt = renderer.render_ids(rows, tools=TOOLS, add_generation_prompt=True)
    for city in ("Paris", "Rome", "Oslo"):
        completion = renderer.tokenizer.encode(weather(f'{{"city":"{city}"}}', family=family)).tolist()
        reply = assistant("", call("get_weather", {"city": city}), reasoning="I look.")
        calls.append(Asked(prompt, completion, list(rows), TOOLS, reply))
        bridged = renderer.bridge_to_next_turn(prompt, completion, [OK], tools=TOOLS)
        assert bridged is not None
        prompt, rows = bridged.token_ids, [*rows, reply, OK]
    last = Asked(prompt, renderer.tokenizer.encode(f"Done.{end}").tolist(), rows, TOOLS, assistant("Done."))
    again = Asked(prompt, renderer.tokenizer.encode(f"All done.{end}").tolist(), rows, TOOLS, assistant("All done."))
    return [Told("clean", [*calls, last]), Told("retried", [*calls, last, again]), Told("short", calls[:1])]


@functools.cache
def rollouts(family: str) -> list[Told]:
    """A rollout for each planted cause, among clean ones."""
    broken = [Told(cause.name.lower(), calls, cause) for cause, calls in hermes_plants(family).items()]
    return [*clean(family)[:1], *broken, *clean(family)[1:]]


# -- shapes

Writer = Callable[[list[Told], bool], Iterator[Any]]
"""Writes rollouts as the lines of a dump, with messages or without."""


def each(write: Callable[[Told, bool], Any]) -> Writer:
    """A writer of one line for each rollout."""
    return lambda rollouts, messages: (write(told, messages) for told in rollouts)


def each_row(write: Callable[[Told, list[Asked]], Any]) -> Writer:
    """A writer of one line for each row."""
    return lambda rollouts, messages: (write(told, path) for told in rollouts for path in paths(told))


def request(call: Asked, messages: bool) -> dict[str, Any]:
    return {"messages": call.messages, "tools": call.tools} if messages else {}


def verifiers_trace(told: Told, messages: bool) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    ends: list[tuple[Ids, int, int]] = []
    """Stream, last node and number of messages of each call."""
    for one in told.calls:
        shared = [end for end in ends if one.prompt[: len(end[0])] == end[0]]
        stream, parent, count = max(shared, key=lambda end: len(end[0]), default=([], None, 0))
        new = one.prompt[len(stream) :]
        for message in one.messages[count:]:
            tokens, new = (new, []) if message is one.messages[-1] else ([], new)
            node = {"parent": parent, "message": message, "sampled": False, "token_ids": tokens}
            nodes.append(node | {"mask": [False] * len(tokens), "logprobs": []})
            if parent is None and one.tools:
                nodes[-1]["tools"] = one.tools
            parent = len(nodes) - 1
        mask = [False] * len(new) + [True] * len(one.completion)
        node = {"parent": parent, "message": one.reply, "sampled": True, "token_ids": [*new, *one.completion]}
        nodes.append(node | {"mask": mask, "logprobs": one.logprobs})
        ends.append(([*one.prompt, *one.completion], len(nodes) - 1, len(one.messages) + 1))
    return {"version": 1, "id": told.name, "task": {"type": "Task", "data": {}}, "nodes": nodes}


def verifiers_episode(told: Told, messages: bool) -> dict[str, Any]:
    return {"id": f"episode of {told.name}", "task": {"type": "Task"}, "traces": [verifiers_trace(told, messages)]}


def verifiers_steps(told: Told, messages: bool) -> dict[str, Any]:
    steps = []
    for one in told.calls:
        tokens = {"prompt_ids": one.prompt, "completion_ids": one.completion, "completion_logprobs": one.logprobs}
        tokens |= {"prompt_mask": [0] * len(one.prompt), "completion_mask": [1] * len(one.completion)}
        steps.append({"tokens": tokens, **({"prompt": one.messages, "completion": [one.reply]} if messages else {})})
    return {"trajectory_id": told.name, "trajectory": steps, "reward": 1.0}


def tokens_of(one: Asked) -> dict[str, Any]:
    tokens = {"prompt_token_ids": one.prompt, "generation_token_ids": one.completion}
    return tokens | {"generation_log_probs": one.logprobs}


def nemo_rollout(told: Told, messages: bool) -> dict[str, Any]:
    output = []
    for one in told.calls:
        text = [{"type": "output_text", "text": str(one.reply["content"])}]
        output.append({"type": "message", "role": "assistant", "content": text, **tokens_of(one)})
        output.append({"type": "function_call_output", "call_id": "c", "output": "ok"})
    params = {"input": told.calls[0].messages if messages else []}
    return {"rollout_id": told.name, "responses_create_params": params, "response": {"output": output}, "reward": 1.0}


def nemo_entries(rollouts: list[Told], messages: bool) -> Iterator[Any]:
    """Captured calls, those of several rollouts between one another; prompts that extend are stored as suffixes."""
    longest = max(len(told.calls) for told in rollouts)
    for at, told in ((at, told) for at in range(longest) for told in rollouts if at < len(told.calls)):
        one = told.calls[at]
        entry = {"rollout_id": told.name, "model_call_id": f"{told.name}-{at}", "created_at": float(at)}
        entry |= tokens_of(one)
        before = told.calls[at - 1] if at else None
        stream = [*before.prompt, *before.completion] if before is not None else []
        if before is not None and one.prompt[: len(stream)] == stream:
            entry |= {"prompt_token_ids": one.prompt[len(stream) :], "prompt_is_delta": True}
            entry |= {"parent_call_id": f"{told.name}-{at - 1}", "parent_resolution": "resolved"}
        yield entry


def openenv_training(told: Told, messages: bool) -> dict[str, Any]:
    turns = []
    for one in told.calls:
        entry: dict[str, Any] = {"prompt_token_ids": one.prompt, "completion_token_ids": one.completion}
        entry |= {"per_token_logps": one.logprobs, "loss_mask": one.mask, "metadata": {"node_id": str(id(one))}}
        if messages:
            entry["request"] = request(one, True)
            entry["response"] = {"choices": [{"message": one.reply, "finish_reason": "stop"}]}
        turns.append(entry)
    return {"schema_version": 1, "session_id": told.name, "turns": turns}


def paths(told: Told) -> list[list[Asked]]:
    """The calls from a root to a leaf: what makes one training row."""
    all_paths: list[list[Asked]] = []
    for one in told.calls:
        streams = [(path, path[-1].prompt + path[-1].completion) for path in all_paths]
        fitting = [path for path, stream in streams if one.prompt[: len(stream)] == stream]
        if fitting:
            fitting[-1].append(one)
            continue
        shared = next((path for path in all_paths if any(call.prompt == one.prompt for call in path)), None)
        head = [] if shared is None else shared[: [call.prompt for call in shared].index(one.prompt)]
        all_paths.append([*head, one])
    return all_paths


def row_of(path: list[Asked]) -> tuple[Ids, list[int], list[float]]:
    ids = path[-1].prompt + path[-1].completion
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for one in path:
        where = slice(len(one.prompt), len(one.prompt) + len(one.completion))
        mask[where], logprobs[where] = [1] * len(one.completion), one.logprobs
    return ids, mask, logprobs


def openenv_document(told: Told, messages: bool) -> dict[str, Any]:
    number = {id(one): f"n{at}" for at, one in enumerate(told.calls)}
    sequences, turns = [], []
    for path in paths(told):
        ids, mask, logprobs = row_of(path)
        row = {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "role": "agent"}
        row |= {"node_ids": [number[id(one)] for one in path]}
        sequences.append(row | {"turn_lengths": [len(one.completion) for one in path]})
    for one in told.calls:
        turn = {"request_messages": one.messages, "request_tools": one.tools, "response_message": one.reply}
        turns.append({"node_id": number[id(one)], **(turn if messages else {})})
    return {"session_id": told.name, "sequences": sequences, "turns": turns}


def trl_rollout(told: Told, messages: bool) -> dict[str, Any]:
    turns = []
    for one in told.calls:
        record = {"prompt_ids": one.prompt, "output_ids": one.completion, "output_log_probs": one.logprobs}
        record |= {"output_mask": None} | request(one, messages)
        turns.append(record | ({"completion": one.reply} if messages else {}))
    return {"rollout_id": told.name, "turns": turns, "samples": [trl_row(told, path) for path in paths(told)]}


def trl_row(told: Told, path: list[Asked]) -> dict[str, Any]:
    ids, mask, logprobs = row_of(path)
    return {"rollout_id": told.name, "input_ids": ids, "completion_mask": mask, "old_log_probs": logprobs}


def verl_output(told: Told, path: list[Asked]) -> dict[str, Any]:
    (ids, mask, logprobs), first = row_of(path), len(path[0].prompt)
    row = {"request_id": told.name, "prompt_ids": ids[:first], "response_ids": ids[first:], "num_turns": 2 * len(path)}
    return row | {"response_mask": mask[first:], "response_logprobs": logprobs[first:]}


def plain_calls(rollouts: list[Told], messages: bool) -> Iterator[Any]:
    for name, one in ((told.name, one) for told in rollouts for one in told.calls):
        tokens = {"prompt_ids": one.prompt, "completion_ids": one.completion}
        line = {"rollout_id": name, **tokens, "logprobs": one.logprobs, "loss_mask": one.mask}
        yield line | request(one, messages) | ({"reply": one.reply} if messages else {})


def plain_row(told: Told, path: list[Asked]) -> dict[str, Any]:
    ids, mask, logprobs = row_of(path)
    return {"rollout_id": told.name, "input_ids": ids, "loss_mask": mask, "logprobs": logprobs}


SHAPES: dict[str, Writer] = {
    "verifiers trace": each(verifiers_trace),
    "verifiers episode": each(verifiers_episode),
    "verifiers steps": each(verifiers_steps),
    "nemo-gym rollout": each(nemo_rollout),
    "nemo-gym captured": nemo_entries,
    "openenv training": each(openenv_training),
    "openenv document": each(openenv_document),
    "trl rollout": each(trl_rollout),
    "trl rows": each_row(trl_row),
    "verl outputs": each_row(verl_output),
    "calls lines": plain_calls,
    "rows lines": each_row(plain_row),
}
"""Every foreign shape that is read, by whose it is and what a line is."""
