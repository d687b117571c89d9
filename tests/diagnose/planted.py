"""Rollouts with a break of each cause, and writers for the dump format of each framework."""

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
class Call:
    """One call of an engine: its request and its completion."""

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
class Planted:
    """A rollout, with the cause of the break planted in it, if any."""

    name: str
    calls: list[Call]
    cause: Cause | None = None


# -- rollouts


def make_call(family: str, messages: Sequence[Message], text: str | Ids, reply: Message, tools: Any = TOOLS) -> Call:
    renderer = renderer_of(family)
    prompt = renderer.render_ids(list(messages), tools=tools, add_generation_prompt=True)
    completion = renderer.tokenizer.encode(text).tolist() if isinstance(text, str) else text
    return Call(prompt, completion, list(messages), tools, reply)


def two_calls(family: str, text: str | Ids, *replies: Message) -> list[Call]:
    """Two calls: a client renders the history again for the second prompt."""
    second = make_call(family, [*GO, *replies], f"Done.{END[family]}", assistant("Done."))
    return [make_call(family, GO, text, replies[0]), second]


def rewritten(family: str, changed: Sequence[Message], tools: Any = TOOLS) -> list[Call]:
    """Two calls: a long history with its answer, then a request with another history."""
    first = make_call(family, HISTORY, f"{ANSWER['content']}{END[family]}", ANSWER)
    return [first, make_call(family, changed, f"Done.{END[family]}", assistant("Done."), tools)]


END = {"pocket": "<|end|>", "qwen3": "<|im_end|>"}
THOUGHT = "They greet me.\n\nI greet them back, in the way that they did."


def resegmented(family: str, text: str) -> Ids:
    """The ids of the text with its longest word spelled in single letters."""
    tokenizer = renderer_of(family).tokenizer
    ids = tokenizer.encode(text).tolist()
    spelled = [tokenizer.decode([one]) for one in ids]
    at = max(range(len(ids)), key=lambda at: len(spelled[at]) if spelled[at].strip().isalpha() else 0)
    letters = [int(one) for letter in spelled[at] for one in tokenizer.encode(letter)]
    return [*ids[:at], *letters, *ids[at + 1 :]]


def hermes_plants(family: str) -> dict[Cause, list[Call]]:
    """Planted breaks of some causes, in a family that writes calls as JSON. Other tests cover the other causes."""

    def calls(text: str, arguments: Any) -> list[Call]:
        return two_calls(family, weather(text, family=family), *called("get_weather", arguments))

    merged, thinking = (f"{text}{HELLO}{END[family]}" for text in ("", f"<think>\n{THOUGHT}\n</think>\n\n"))
    return {
        Cause.BOOLEAN_CASE: calls('{"city": "Paris", "now": true}', {"city": "Paris", "now": "True"}),
        Cause.BPE_REMERGE: two_calls(family, resegmented(family, merged), assistant(HELLO), user("Bye")),
        Cause.JSON_FORMAT: calls('{"city":"Paris","unit":"c"}', {"city": "Paris", "unit": "c"}),
        Cause.STRIPPED_REASONING: two_calls(family, thinking, assistant(HELLO), user("Bye")),
        Cause.CHANGED_TOOLS: rewritten(family, [*HISTORY, ANSWER, user("And?")], [*TOOLS, ADD]),
        Cause.COMPACTION: rewritten(family, [SYS, SUMMARY]),
    }


@functools.cache
def clean(family: str) -> list[Planted]:
    """Rollouts without a break: every prompt extends the stream, or repeats the prompt before it."""
    renderer, end = renderer_of(family), END[family]
    calls: list[Call] = []
    messages = list(GO)
    prompt = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
    for city in ("Paris", "Rome", "Oslo"):
        completion = renderer.tokenizer.encode(weather(f'{{"city":"{city}"}}', family=family)).tolist()
        reply = assistant("", call("get_weather", {"city": city}), reasoning="I look.")
        calls.append(Call(prompt, completion, list(messages), TOOLS, reply))
        bridged = renderer.bridge_to_next_turn(prompt, completion, [OK], tools=TOOLS)
        assert bridged is not None
        prompt, messages = bridged.token_ids, [*messages, reply, OK]
    last = Call(prompt, renderer.tokenizer.encode(f"Done.{end}").tolist(), messages, TOOLS, assistant("Done."))
    again = Call(prompt, renderer.tokenizer.encode(f"All done.{end}").tolist(), messages, TOOLS, assistant("All done."))
    return [Planted("clean", [*calls, last]), Planted("retried", [*calls, last, again]), Planted("short", calls[:1])]


@functools.cache
def rollouts(family: str) -> list[Planted]:
    """A rollout for each planted cause, among clean ones."""
    broken = [Planted(cause.name.lower(), calls, cause) for cause, calls in hermes_plants(family).items()]
    return [*clean(family)[:1], *broken, *clean(family)[1:]]


# -- shapes

Writer = Callable[[list[Planted], bool], Iterator[Any]]
"""Writes rollouts as the lines of a dump, with messages or without."""


def each(write: Callable[[Planted, bool], Any]) -> Writer:
    """A writer of one line for each rollout."""
    return lambda rollouts, messages: (write(rollout, messages) for rollout in rollouts)


def each_row(write: Callable[[Planted, list[Call]], Any]) -> Writer:
    """A writer of one line for each row."""
    return lambda rollouts, messages: (write(rollout, path) for rollout in rollouts for path in paths(rollout))


def request(call: Call, messages: bool) -> dict[str, Any]:
    return {"messages": call.messages, "tools": call.tools} if messages else {}


def vf_trace(rollout: Planted, messages: bool) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    ends: list[tuple[Ids, int, int]] = []
    """Stream, last node and number of messages of each call."""
    for one in rollout.calls:
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
    return {"version": 1, "id": rollout.name, "task": {"type": "Task", "data": {}}, "nodes": nodes}


def vf_episode(rollout: Planted, messages: bool) -> dict[str, Any]:
    return {"id": f"episode of {rollout.name}", "task": {"type": "Task"}, "traces": [vf_trace(rollout, messages)]}


def vf_steps(rollout: Planted, messages: bool) -> dict[str, Any]:
    steps = []
    for one in rollout.calls:
        tokens = {"prompt_ids": one.prompt, "completion_ids": one.completion, "completion_logprobs": one.logprobs}
        tokens |= {"prompt_mask": [0] * len(one.prompt), "completion_mask": [1] * len(one.completion)}
        steps.append({"tokens": tokens, **({"prompt": one.messages, "completion": [one.reply]} if messages else {})})
    return {"trajectory_id": rollout.name, "trajectory": steps, "reward": 1.0}


def tokens_of(one: Call) -> dict[str, Any]:
    tokens = {"prompt_token_ids": one.prompt, "generation_token_ids": one.completion}
    return tokens | {"generation_log_probs": one.logprobs}


def nemo_rollout(rollout: Planted, messages: bool) -> dict[str, Any]:
    output = []
    for one in rollout.calls:
        text = [{"type": "output_text", "text": str(one.reply["content"])}]
        output.append({"type": "message", "role": "assistant", "content": text, **tokens_of(one)})
        output.append({"type": "function_call_output", "call_id": "c", "output": "ok"})
    body = {"input": rollout.calls[0].messages if messages else []}
    return {"rollout_id": rollout.name, "responses_create_params": body, "response": {"output": output}, "reward": 1.0}


def nemo_entries(rollouts: list[Planted], messages: bool) -> Iterator[Any]:
    """Captured calls, with rollouts interleaved; a prompt that extends the stream is stored as its suffix."""
    longest = max(len(rollout.calls) for rollout in rollouts)
    for at, rollout in ((at, rollout) for at in range(longest) for rollout in rollouts if at < len(rollout.calls)):
        one = rollout.calls[at]
        entry = {"rollout_id": rollout.name, "model_call_id": f"{rollout.name}-{at}", "created_at": float(at)}
        entry |= tokens_of(one)
        before = rollout.calls[at - 1] if at else None
        stream = [*before.prompt, *before.completion] if before is not None else []
        if before is not None and one.prompt[: len(stream)] == stream:
            entry |= {"prompt_token_ids": one.prompt[len(stream) :], "prompt_is_delta": True}
            entry |= {"parent_call_id": f"{rollout.name}-{at - 1}", "parent_resolution": "resolved"}
        yield entry


def openenv_training(rollout: Planted, messages: bool) -> dict[str, Any]:
    turns = []
    for one in rollout.calls:
        entry: dict[str, Any] = {"prompt_token_ids": one.prompt, "completion_token_ids": one.completion}
        entry |= {"per_token_logps": one.logprobs, "loss_mask": one.mask, "metadata": {"node_id": str(id(one))}}
        if messages:
            entry["request"] = request(one, True)
            entry["response"] = {"choices": [{"message": one.reply, "finish_reason": "stop"}]}
        turns.append(entry)
    return {"schema_version": 1, "session_id": rollout.name, "turns": turns}


def paths(rollout: Planted) -> list[list[Call]]:
    """The calls from the root to each leaf: each path makes one training row."""
    all_paths: list[list[Call]] = []
    for one in rollout.calls:
        streams = [(path, path[-1].prompt + path[-1].completion) for path in all_paths]
        fitting = [path for path, stream in streams if one.prompt[: len(stream)] == stream]
        if fitting:
            fitting[-1].append(one)
            continue
        shared = next((path for path in all_paths if any(call.prompt == one.prompt for call in path)), None)
        head = [] if shared is None else shared[: [call.prompt for call in shared].index(one.prompt)]
        all_paths.append([*head, one])
    return all_paths


def row_of(path: list[Call]) -> tuple[Ids, list[int], list[float]]:
    ids = path[-1].prompt + path[-1].completion
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for one in path:
        span = slice(len(one.prompt), len(one.prompt) + len(one.completion))
        mask[span], logprobs[span] = [1] * len(one.completion), one.logprobs
    return ids, mask, logprobs


def openenv_document(rollout: Planted, messages: bool) -> dict[str, Any]:
    number = {id(one): f"n{at}" for at, one in enumerate(rollout.calls)}
    sequences, turns = [], []
    for path in paths(rollout):
        ids, mask, logprobs = row_of(path)
        row = {"input_ids": ids, "loss_mask": mask, "logprobs": logprobs, "role": "agent"}
        row |= {"node_ids": [number[id(one)] for one in path]}
        sequences.append(row | {"turn_lengths": [len(one.completion) for one in path]})
    for one in rollout.calls:
        turn = {"request_messages": one.messages, "request_tools": one.tools, "response_message": one.reply}
        turns.append({"node_id": number[id(one)], **(turn if messages else {})})
    return {"session_id": rollout.name, "sequences": sequences, "turns": turns}


def trl_rollout(rollout: Planted, messages: bool) -> dict[str, Any]:
    turns = []
    for one in rollout.calls:
        record = {"prompt_ids": one.prompt, "output_ids": one.completion, "output_log_probs": one.logprobs}
        record |= {"output_mask": None} | request(one, messages)
        turns.append(record | ({"completion": one.reply} if messages else {}))
    return {"rollout_id": rollout.name, "turns": turns, "samples": [trl_row(rollout, path) for path in paths(rollout)]}


def trl_row(rollout: Planted, path: list[Call]) -> dict[str, Any]:
    ids, mask, logprobs = row_of(path)
    return {"rollout_id": rollout.name, "input_ids": ids, "completion_mask": mask, "old_log_probs": logprobs}


def verl_output(rollout: Planted, path: list[Call]) -> dict[str, Any]:
    (ids, mask, logprobs), size = row_of(path), len(path[0].prompt)
    row = {"request_id": rollout.name, "prompt_ids": ids[:size], "response_ids": ids[size:], "num_turns": 2 * len(path)}
    return row | {"response_mask": mask[size:], "response_logprobs": logprobs[size:]}


def plain_calls(rollouts: list[Planted], messages: bool) -> Iterator[Any]:
    for name, one in ((rollout.name, one) for rollout in rollouts for one in rollout.calls):
        tokens = {"prompt_ids": one.prompt, "completion_ids": one.completion}
        line = {"rollout_id": name, **tokens, "logprobs": one.logprobs, "loss_mask": one.mask}
        yield line | request(one, messages) | ({"reply": one.reply} if messages else {})


def plain_row(rollout: Planted, path: list[Call]) -> dict[str, Any]:
    ids, mask, logprobs = row_of(path)
    return {"rollout_id": rollout.name, "input_ids": ids, "loss_mask": mask, "logprobs": logprobs}


SHAPES: dict[str, Writer] = {
    "verifiers trace": each(vf_trace),
    "verifiers episode": each(vf_episode),
    "verifiers steps": each(vf_steps),
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
"""The writer of each shape that other frameworks dump, by framework and kind of line."""
