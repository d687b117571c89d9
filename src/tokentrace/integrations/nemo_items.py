"""Trajectories as NeMo Gym's items, and captured calls as trajectories."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import SampleError, TrajectoryError, brief
from ..gateway.dialect import Item
from ..gateway.responses import output_item
from ..parsing.response import PartKind
from ..trajectory.trajectory import Trajectory
from .rows import only_sample

Message = Mapping[str, Any]


def output_items(
    trajectory: Trajectory, messages: Sequence[Message], *, branch: int | None = None
) -> list[dict[str, Any]]:
    """``response.output``. The last item of a turn has its tokens.

    Raises SampleError for several branches without `branch`: NeMo RL takes one response.
    """
    branch = only_sample(trajectory).branch if branch is None else branch
    tokens = _tokens(trajectory, messages, branch)
    first = min((turn.message for turn in trajectory.turns(branch)), default=len(messages))
    items: list[dict[str, Any]] = []
    for number, message in enumerate(messages[first:], first):
        items += _items(number, message)
        items[-1] |= tokens.get(number, {})
    return items


def chat_messages(
    trajectory: Trajectory, messages: Sequence[Message], *, branch: int | None = None
) -> list[dict[str, Any]]:
    """Like `output_items`, but as chat messages, with the prompt."""
    branch = only_sample(trajectory).branch if branch is None else branch
    tokens = _tokens(trajectory, messages, branch)
    return [{**message, **tokens.get(number, {})} for number, message in enumerate(messages)]


def _tokens(trajectory: Trajectory, messages: Sequence[Message], branch: int) -> dict[int, dict[str, Any]]:
    stream, logprobs = trajectory.stream(branch), trajectory.logprobs(branch)
    spans: dict[int, tuple[int, int]] = {}
    for turn in trajectory.turns(branch):
        if turn.message >= len(messages) or messages[turn.message]["role"] != "assistant":
            raise SampleError(f"message {turn.message} was sampled, but is not an assistant's")
        if turn.branch != branch or not len(turn):
            continue
        start, stop = spans.get(turn.message, (turn.start, turn.start))
        if stop != turn.start:
            raise SampleError(f"message {turn.message} has several completions, but NeMo Gym takes one")
        spans[turn.message] = (start, turn.stop)
    return {
        number: {
            "prompt_token_ids": stream[:start].tolist(),
            "generation_token_ids": stream[start:stop].tolist(),
            "generation_log_probs": logprobs[start:stop].tolist(),
        }
        for number, (start, stop) in spans.items()
    }


def _items(number: int, message: Message) -> list[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        if not isinstance(content, str):
            raise SampleError(f"message {number}: a tool's result must be text, not {brief(content)}")
        return [
            {"type": "function_call_output", "call_id": message.get("tool_call_id", ""), "output": content}
        ]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": content}]
    reasoning, calls, turn = message.get("reasoning_content"), message.get("tool_calls") or (), f"t{number}"
    items = [Item(0, PartKind.REASONING, reasoning)] if reasoning else []
    if content or not calls:
        items.append(Item(len(items), PartKind.CONTENT, content or ""))
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        items.append(Item(len(items), PartKind.TOOL_CALL, text, name, call["id"]))
    return [output_item(turn, item) for item in items]


def captured_trajectory(entries: Iterable[Any], *, name: str = "") -> Trajectory:
    """Build a trajectory from ``TokenEntry`` records (`TokenStore.freeze`), in any order.

    A prompt that does not extend an earlier call is a branch. Finish reasons are unknown, or
    "length" for a turn that continues. Raises TrajectoryError if the start of a prompt is
    missing.
    """
    calls = {entry.model_call_id: entry for entry in entries}
    prompts = full_prompts(calls.values())
    if missing := sorted(calls.keys() - prompts.keys()):
        raise TrajectoryError(f"call {missing[0]!r}: the call that its prompt continues is missing")
    trajectory = Trajectory(name=name)
    continued = {tuple(prompts[call]) for call, entry in calls.items() if entry.generation_token_ids}
    for call, prompt in sorted(prompts.items(), key=lambda item: (len(item[1]), item[0])):
        ids, continues = calls[call].generation_token_ids, False
        if not ids:
            continue
        if not trajectory.num_branches:
            trajectory.begin(prompt)
        elif (extends := trajectory.shared_prefix(prompt).extends) >= 0:
            continues = len(prompt) == len(trajectory.stream(extends))
            trajectory.extend_to(prompt, branch=extends)
        else:
            trajectory.branch(prompt, cause="captured by NeMo Gym")
        reason = "length" if (*prompt, *ids) in continued else "unknown"
        logprobs = calls[call].generation_log_probs
        trajectory.append_completion(ids, logprobs, finish_reason=reason, continues=continues)
    return trajectory


def full_prompts(entries: Iterable[Any]) -> dict[str, list[int]]:
    """Return calls' whole prompts, unless a call that one continues is missing."""
    calls = {entry.model_call_id: entry for entry in entries}
    whole: dict[str, list[int]] = {}
    before = -1
    while len(whole) > before:
        before = len(whole)
        for call, entry in calls.items():
            parent = entry.parent_call_id if entry.prompt_is_delta else None
            if call not in whole and (parent in whole or not entry.prompt_is_delta):
                start = [] if parent is None else [*whole[parent], *calls[parent].generation_token_ids]
                whole[call] = [*start, *entry.prompt_token_ids]
    return whole
