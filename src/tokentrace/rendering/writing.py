"""Running the template, and the history that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..conversation.forms import Change
from ..conversation.messages import Messages
from ..errors import TemplateError
from ..template.trace import Rendering
from .history import compare_turns, keep_reasoning, last_user, parsed_arguments, patch_history


class HistoryPolicy(NamedTuple):
    """What is put into the past that the template leaves out of it."""

    patched: bool = False
    """Every turn as it stood when it was sampled, with its values as they were given."""
    all_thinking: bool = False
    thinking_between_calls: bool = False
    """Reasoning of the turns after the last user message."""


class WrittenText(NamedTuple):
    """A rendered conversation with its history."""

    rendering: Rendering
    shown: Messages
    """The messages as the template was shown them: patched, with parsed arguments."""
    changes: list[Change]
    notes: list[str]


def write_history(
    run: Callable[[Messages, bool], Rendering],
    messages: Messages,
    prompt: bool,
    policy: HistoryPolicy,
    *,
    calls: Messages | None = None,
    past: bool = True,
    find_prompt: bool = False,
) -> WrittenText:
    """Run the template and put the past in order, unless `past` is false.

    `calls` are the messages with their tool calls as they were given, where that is not as `messages` have them. With
    `find_prompt`, it is found out where the generation prompt begins if the last message was written outside its turn.
    """
    shown, rendering = _run_shown(run, messages, prompt, policy)
    if find_prompt and prompt and rendering.tail < rendering.last_field:
        without = run(shown, False).text
        rendering.begin_tail(len(without) if rendering.text.startswith(without) else rendering.last_field)
    changes: list[Change] = []
    notes: list[str] = []

    def render(some: Messages) -> Rendering:
        return run(some, False)

    if not past:
        return WrittenText(rendering, shown, changes, notes)
    if policy.patched:
        sampled = messages if calls is None else _with_calls_of(messages, calls)
        rendering, notes = patch_history(rendering, shown, render, sampled)
        rendering, _, more = keep_reasoning(rendering, shown, render)
        notes += more
        try:
            changes = compare_turns(render(messages), rendering, messages)
        except TemplateError as refusal:
            notes.append(f"the shipped template refuses this conversation as it was given ({refusal.problem})")
    elif policy.all_thinking or policy.thinking_between_calls:
        since = -1 if policy.all_thinking else last_user(shown)
        rendering, changes, notes = keep_reasoning(rendering, shown, render, since=since)
    return WrittenText(rendering, shown, changes, notes)


def _run_shown(
    run: Callable[[Messages, bool], Rendering], messages: Messages, prompt: bool, policy: HistoryPolicy
) -> tuple[Messages, Rendering]:
    """The messages as the template takes them, and what it makes of them."""
    if policy.patched:
        parsed = parsed_arguments(messages)
        try:
            return parsed, run(parsed, prompt)
        except TemplateError:
            pass  # a template that takes arguments as JSON strings only
    return messages, run(messages, prompt)


def _with_calls_of(messages: Messages, given: Messages) -> Messages:
    """Messages in the template's form with the calls as given: arguments that were JSON text stay that text."""
    return [
        {**message, "tool_calls": own["tool_calls"]} if message.get("tool_calls") else message
        for message, own in zip(messages, given, strict=True)
    ]
