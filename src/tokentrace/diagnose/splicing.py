"""Exact ids in place of their rendering, for servers that receive whole message lists.

A chat server renders the whole conversation at every request, and sampled text gets other ids.
`splice_prefix` puts back the exact ids of the last tokenized turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..errors import InputError, TemplateError
from ..rendering.bridged import BridgedTokens
from ..rendering.renderer import Renderer
from ..settings import whole
from ..study.seams import BridgeRefusal, RefusalReason
from ..tokens.ids import check_ids
from ..tokens.tokenizer import Ids
from .breaks import explain_break
from .finding import Cause

PROMPT_IDS: Final = "prompt_token_ids"
COMPLETION_IDS: Final = "generation_token_ids"
"""Fields of an assistant message in which servers return the ids of its turn."""

REWRITTEN: Final = frozenset({Cause.REWRITTEN_CALL, Cause.CHANGED_TOOLS, Cause.CHANGED_SYSTEM, Cause.COMPACTION})
"""Causes by which the ids no longer mean what the messages say."""


def splice_prefix(
    renderer: Renderer,
    messages: Any,
    prompt_ids: Any = None,
    completion_ids: Any = None,
    *,
    message: int | None = None,
    tools: Any = None,
    check: bool = True,
) -> BridgedTokens | BridgeRefusal:
    """Return the next prompt for `messages`, which begins with the exact ids of the turn of assistant `message`.

    `prompt_ids` and `completion_ids` are what the engine received and sampled for it; by default they come from the
    last assistant message that carries them (``prompt_token_ids`` and ``generation_token_ids``). With `check`, messages
    that say something else than the ids (a rewritten call, other tools, a summary) are refused.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> renderer = create_renderer(POCKET)
    >>> question = [{"role": "user", "content": "2+2?"}]
    >>> prompt = renderer.render_ids(question, add_generation_prompt=True)
    >>> sampled = [*renderer.tokenizer.encode("4"), *renderer.tokenizer.encode("<|end|>")]
    >>> history = [*question, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3?"}]
    >>> spliced = splice_prefix(renderer, history, prompt, sampled)
    >>> spliced[: len(prompt) + 2] == [*prompt, *sampled]
    True
    """
    conversation = renderer.adapt_messages(messages, tools=tools).messages
    at = _tokenized(conversation, prompt_ids, message)
    prompt = conversation[at].get(PROMPT_IDS, ()) if prompt_ids is None else prompt_ids
    completion = conversation[at].get(COMPLETION_IDS) if completion_ids is None else completion_ids
    completion = () if completion is None else completion
    check_ids(prompt, PROMPT_IDS)
    if not len(prompt):
        return BridgeRefusal(RefusalReason.EMPTY_STREAM, "there are no exact ids to put in place")
    check_ids(completion, COMPLETION_IDS)
    spliced = renderer.bridge_after(prompt, completion, conversation, at, tools=tools)
    if check and isinstance(spliced, BridgedTokens):
        refusal = _refusal(renderer.silent(), spliced, conversation, at, tools)
        return spliced if refusal is None else refusal
    return spliced


def _tokenized(messages: Sequence[Mapping[str, Any]], prompt_ids: Any, message: int | None) -> int:
    """Return the message whose ids are exact."""
    replies = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    if prompt_ids is None:
        replies = [at for at in replies if messages[at].get(PROMPT_IDS) is not None]
    if message is None and not replies:
        missing = f"no assistant message carries {PROMPT_IDS}; pass prompt_ids and completion_ids"
        raise InputError(missing if prompt_ids is None else "there is no assistant message whose ids these could be")
    at = replies[-1] if message is None else whole("message", message, error=InputError)
    if not 0 <= at < len(messages) or messages[at]["role"] != "assistant":
        raise InputError("is not an assistant's message, so it has no sampled ids", message=at)
    return at


def _refusal(
    renderer: Renderer, spliced: BridgedTokens, messages: Sequence[Mapping[str, Any]], at: int, tools: Any
) -> BridgeRefusal | None:
    """Refuse messages up to `at` that do not say what the ids say."""
    expected = _expected(renderer, messages, at, tools)
    if expected is None:
        why = "the messages cannot be compared with the ids: the template writes no turn for this message"
        return BridgeRefusal(RefusalReason.NO_TURN_END, f"{why}; pass check=False if they agree")
    sampled = np.zeros(spliced.stream_length, np.bool_)
    sampled[len(spliced.prompt) :] = True
    broken = explain_break(spliced.ids[: spliced.stream_length], expected, renderer, sampled=sampled)
    if broken is None or broken.position >= len(expected):  # a stop token that the last turn of a rendering lacks
        return None
    if broken.cause is not Cause.UNKNOWN and not REWRITTEN & {broken.cause, *broken.later}:
        return None
    why = f"the messages are not those that the ids were sampled for ({broken.cause}: {broken.words})"
    return BridgeRefusal(RefusalReason.REWRITES_PAST, f"{why}; start a new branch, or pass check=False")


def _expected(renderer: Renderer, messages: Sequence[Mapping[str, Any]], at: int, tools: Any) -> Ids | None:
    """Render up to the end of message `at`, as the last message if the template accepts that."""
    for count, prompt in ((at + 1, False), (len(messages), True)):
        try:
            before = renderer.render(messages[:at], tools=tools, add_generation_prompt=True)
            answered = renderer.render(messages[:count], tools=tools, add_generation_prompt=prompt)
        except (TemplateError, InputError):
            continue
        if turns := [answered.ids[turn.start : turn.stop] for turn in answered.turns if turn.message == at]:
            return np.concatenate([before.ids, *turns])
    return None
