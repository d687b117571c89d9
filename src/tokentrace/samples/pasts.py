"""Past turns: where a template writes a turn differently once it is past.

The trace shows which reasoning is left out. The rest is learned once for each kind of turn: a
small turn is rendered as the last message, and again with other messages after it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..rendering.past import reasoning_of, shows_reasoning
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.probes import RESULT, USER, call, stringified
from ..template.trace import Span

REASONING_LEFT_OUT = (
    "trained without their reasoning, which the template leaves out of the past, but the model samples it. "
    "Choose past='expand' (a row for every turn), 'preserve' (keep it) or 'template' (as it is)"
)
REASONING_NOWHERE = "the template does not show the reasoning of such a turn, so it is not trained"
CHANGED = (
    "the template writes them differently than when each was the last turn. "
    "Choose past='expand' (a row for every turn) or 'template' (as it is)"
)
REMEDY = (
    "Strip leading white space from their text, add their reasoning, change a template variable such as "
    "enable_thinking, or leave them out with turns='flagged'"
)

_EXCERPT = 48
_REPLY = {"role": "assistant", "content": "reply"}


class HistoryWarning(UserWarning):
    """A row trains turns in a form that inference never shows."""


class TurnStartWarning(UserWarning):
    """A row trains a turn that does not continue the prompt that inference uses for it."""


Remark = str | HistoryWarning | TurnStartWarning


class _TurnKind(NamedTuple):
    """All that a template may make a turn's text depend on."""

    reasoning: str
    """The field with its reasoning, if any."""
    inline: bool
    content: str
    calls: bool
    tools: bool
    before_user: bool = False
    before_answer: bool = False

    def turn(self) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            turn[self.reasoning] = "thought"
        if self.inline:
            # some templates show only the field, or only text between tags
            inline = {"": "", "content": "thought"}.get(self.reasoning, "aside")
            turn["content"] = f"<think>\n{inline}\n</think>\n\nanswer"
        return {**turn, "tool_calls": [call()]} if self.calls else turn

    def following(self) -> list[Mapping[str, Any]]:
        reply = [_REPLY] if self.before_answer else []
        question: list[Mapping[str, Any]] = [USER, *reply] if self.before_user or not self.calls else []
        return [RESULT, *reply, *question] if self.calls else question


class PastTurns:
    """How one renderer writes turns that are no longer the last."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer.silent()

    def remarks(
        self,
        rendered: RenderedTokens,
        messages: Messages,
        tools: Any,
        chosen: Sequence[int],
        *,
        of_history: bool,
    ) -> list[Remark]:
        """Notes on a row's chosen turns; with `of_history`, also on what inference shows differently."""
        replies = [at for at in chosen if messages[at]["role"] == "assistant"]
        thinking = [at for at in replies if reasoning_of(messages[at]) is not None]
        spans: dict[int | None, list[Span]] = {}
        for span in rendered.rendering.spans() if thinking else ():
            if span[2] is not None:
                spans.setdefault(span[2].message, []).append(span)
        left_out, nowhere = list[int](), list[int]()
        for at in thinking:
            if not shows_reasoning(messages[at], spans.get(at, []), at):
                can_think = at < len(messages) - 1 and self._can_think(_kind(messages[at], tools), tools)
                (left_out if can_think else nowhere).append(at)
        if not of_history:  # then `changed` only decides which turns get a TurnStartWarning
            prompted = {turn.message for turn in rendered.turns if turn.other_prompt}
            replies = [at for at in replies if at in prompted]
        rows = enumerate(messages if replies else ())
        last = {message["role"]: at for at, message in rows if not message.get("tool_calls")}
        user, answer = last.get("user", -1), last.get("assistant", -1)
        changed = []
        for at in replies:
            if at not in left_out and at < len(messages) - 1:
                kind = _kind(messages[at], tools)._replace(before_user=at < user, before_answer=at < answer)
                changed += [at] if self._is_changed(kind, tools) else []
        of_past = ((left_out, REASONING_LEFT_OUT), (changed, CHANGED)) if of_history else ()
        return [
            *(HistoryWarning(f"{listed(turns)}: {what}") for turns, what in of_past if turns),
            *turn_starts(rendered, set(chosen) - {*left_out, *changed}),
            *([f"{listed(nowhere)}: {REASONING_NOWHERE}"] if nowhere else []),
        ]

    def stop_before(self, messages: Messages, following: Mapping[str, Any], tools: Any) -> int | None:
        """The token that ends a conversation's last turn when `following` comes next."""
        last = len(messages) - 1

        def find() -> int | None:
            turns = self._renderer.render([*messages, following], tools=tools).turns
            return next((turn.stop_token for turn in reversed(turns) if turn.message == last), None)

        try:
            return self._renderer.cache.once(("stop before", following["role"], bool(tools)), find)
        except TokentraceError:
            return None

    def _can_think(self, kind: _TurnKind, tools: Any) -> bool:

        def find() -> bool:
            try:
                return "thought" in self._render([USER, kind.turn()], tools).text
            except TokentraceError:  # it is refused: all we know is that this row left it out
                return True

        return self._renderer.cache.once(("can think", kind), find)

    def _is_changed(self, kind: _TurnKind, tools: Any) -> bool:

        def find() -> bool:
            try:
                alone = self._render([USER, kind.turn()], tools)
                whole = self._render([USER, kind.turn(), *kind.following()], tools)
            except TokentraceError:
                return False
            stop = max((turn.stop for turn in alone.turns if turn.message == 1), default=0)
            return not np.array_equal(alone.ids[:stop], whole.ids[:stop])

        return self._renderer.cache.once(("changed", kind), find)

    def _render(self, messages: Messages, tools: Any) -> RenderedTokens:
        try:
            return self._renderer.render(messages, tools=tools)
        except TokentraceError:
            return self._renderer.render([stringified(message) for message in messages], tools=tools)


def turn_starts(rendered: RenderedTokens, chosen: Collection[int]) -> list[TurnStartWarning]:
    """Warnings for chosen turns that do not continue their generation prompt."""
    by_prompt: dict[str, list[int]] = {}
    for turn in rendered.turns:
        if turn.other_prompt and turn.message in chosen:
            by_prompt.setdefault(turn.other_prompt[-_EXCERPT:], []).append(turn.message)
    return [
        TurnStartWarning(
            f"{listed(turns)}: the prompt for such a turn ends in {prompt!r}, but the row does not continue from "
            f"there, so it trains a start that inference never shows. {REMEDY}"
        )
        for prompt, turns in by_prompt.items()
    ]


def _kind(message: Mapping[str, Any], tools: Any) -> _TurnKind:
    reasoning, content = reasoning_of(message), message.get("content")
    outline = "answer" if content else ""
    if isinstance(content, str) and content.strip():  # some templates strip white space off past turns
        head, tail = content[:8], content[-8:]
        outline = head[: len(head) - len(head.lstrip())] + "answer" + tail[len(tail.rstrip()) :]
    inline = isinstance(content, str) and "</think>" in content
    field = "" if reasoning is None else reasoning[1]
    return _TurnKind(field, inline, outline, bool(message.get("tool_calls")), bool(tools))


def listed(messages: Sequence[int]) -> str:
    """``"message 2"``, ``"messages 2, 4"``."""
    return f"message{'s' if len(messages) > 1 else ''} {', '.join(map(str, messages))}"
