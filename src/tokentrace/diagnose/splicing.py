"""The on-policy token-id fix, for servers that are sent whole message lists.

A chat server renders the whole conversation at every request, and what the model sampled earlier comes out in other
ids. `splice_prefix` puts the exact ids of the last tokenized turn in place of their rendering. Where that turn ends in
the rendering the trace says: no stop token is looked for, so it works with any set of them, and with none.
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
"""Fields of an assistant's message in which servers hand back the ids of its turn."""

REWRITTEN: Final = frozenset({Cause.REWRITTEN_CALL, Cause.CHANGED_TOOLS, Cause.CHANGED_SYSTEM, Cause.COMPACTION})
"""Causes that make it another conversation: the old ids no longer say what the messages do."""


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
    """The next prompt for `messages`, which begins with the exact ids of the turn of assistant message `message`.

    `prompt_ids` and `completion_ids` are what the engine was given and what it sampled for that message. Left out, they
    are taken from the last assistant message that carries them (``prompt_token_ids`` and ``generation_token_ids``).
    What comes after that turn is rendered, later assistant messages without ids included. With `check`, messages that
    say something else than the ids do (a rewritten tool call, other tools, a summary) are refused: spelling may
    differ, meaning may not.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> renderer = create_renderer(POCKET)
    >>> asked = [{"role": "user", "content": "2+2?"}]
    >>> prompt = renderer.render_ids(asked, add_generation_prompt=True)
    >>> sampled = [*renderer.tokenizer.encode("4"), *renderer.tokenizer.encode("<|end|>")]
    >>> history = [*asked, {"role": "assistant", "content": "4"}, {"role": "user", "content": "3+3?"}]
    >>> spliced = splice_prefix(renderer, history, prompt, sampled)
    >>> spliced[: len(prompt) + 2] == [*prompt, *sampled]
    True
    """
    checked = renderer.adapt_messages(messages, tools=tools).messages
    at, prompt, completion = _tokenized(checked, prompt_ids, completion_ids, message)
    if not len(prompt):
        return BridgeRefusal(RefusalReason.EMPTY_STREAM, "there are no exact ids to put in place")
    check_ids(completion, COMPLETION_IDS)
    spliced = renderer.bridge_after(prompt, completion, checked, at, tools=tools)
    if check and isinstance(spliced, BridgedTokens):
        refusal = _rewritten(renderer.silent(), spliced, checked, at, tools)
        return spliced if refusal is None else refusal
    return spliced


def _tokenized(
    messages: Sequence[Mapping[str, Any]], prompt_ids: Any, completion_ids: Any, message: int | None
) -> tuple[int, Any, Any]:
    """The message whose ids are known, and its ids."""
    said = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    if prompt_ids is None:
        said = [at for at in said if messages[at].get(PROMPT_IDS) is not None]
    if message is None and not said:
        raise InputError(
            f"no assistant message carries {PROMPT_IDS}; pass prompt_ids and completion_ids"
            if prompt_ids is None
            else "there is no assistant message whose ids these could be"
        )
    at = said[-1] if message is None else whole("message", message, error=InputError)
    if not 0 <= at < len(messages) or messages[at]["role"] != "assistant":
        raise InputError("is not an assistant's message, so it has no sampled ids", message=at)
    own = messages[at]
    prompt = own.get(PROMPT_IDS, ()) if prompt_ids is None else prompt_ids
    completion = own.get(COMPLETION_IDS, ()) if completion_ids is None else completion_ids
    check_ids(prompt, PROMPT_IDS)
    return at, prompt, () if completion is None else completion


def _rewritten(
    renderer: Renderer, spliced: BridgedTokens, messages: Sequence[Mapping[str, Any]], at: int, tools: Any
) -> BridgeRefusal | None:
    """A refusal if the messages up to message `at` say something else than the ids, or if that cannot be told."""
    expected = _expected(renderer, messages, at, tools)
    if expected is None:
        return BridgeRefusal(
            RefusalReason.NO_TURN_END,
            "the messages cannot be compared with the ids: the template writes no turn for this message; "
            "pass check=False if they are known to agree",
        )
    sampled = np.zeros(spliced.stream_length, np.bool_)
    sampled[len(spliced.prompt) :] = True
    found = explain_break(spliced.ids[: spliced.stream_length], expected, renderer, sampled=sampled)
    if found is None or found.position >= len(expected):  # a stop token that the last turn of a rendering has not
        return None
    if found.cause is not Cause.UNKNOWN and not REWRITTEN & {found.cause, *found.later}:
        return None
    return BridgeRefusal(
        RefusalReason.REWRITES_PAST,
        f"the messages are not those that the ids were sampled for ({found.cause}: {found.words}); "
        "start a new branch, or pass check=False",
    )


def _expected(renderer: Renderer, messages: Sequence[Mapping[str, Any]], at: int, tools: Any) -> Ids | None:
    """What the template writes up to the end of message `at`, an assistant's.

    The message is rendered as the last one, as it was when its ids were sampled: what the template changes about the
    past later on does not count. A template that rejects such a conversation is asked for the whole one instead.
    """
    for count, prompt in ((at + 1, False), (len(messages), True)):
        try:
            asked = renderer.render(messages[:at], tools=tools, add_generation_prompt=True)
            answered = renderer.render(messages[:count], tools=tools, add_generation_prompt=prompt)
        except (TemplateError, InputError):
            continue
        if turns := [answered.ids[turn.start : turn.stop] for turn in answered.turns if turn.message == at]:
            return np.concatenate([asked.ids, *turns])
    return None
