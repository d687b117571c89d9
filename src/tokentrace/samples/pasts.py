"""Past turns: where a template writes a turn differently once it is no longer the last, or than it prompts for it.

The trace of a row shows which reasoning is left out of the past. All else (an empty thinking block that only the last
turn has, a stop token that history replaces) is found once for each kind of turn, with a small conversation: the turn
is rendered as the last message, and again with other messages after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..rendering.past import reasoning_of
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.probes import stringified
from ..template.origin import Origin

TurnKind = tuple[bool, bool, str, bool, bool, bool, bool]
"""Has reasoning, has it in the content, the content (its outline), has calls; a user speaks later, an answer follows;
there are tools."""

REASONING_LEFT_OUT: Final = (
    "trained without the reasoning that the template leaves out of the past; inference shows these turns with it. "
    "Choose past='expand' (a row for every turn), 'preserve' (keep it) or 'template' (as it is)"
)
REASONING_NOWHERE: Final = "the template does not show the reasoning of such a turn at all, and it is not trained"
WRITTEN_OTHERWISE: Final = (
    "the template writes these turns otherwise than the model wrote them when they were the last. "
    "Choose past='expand' (a row for every turn) or 'template' (as it is)"
)

_SHOWN: Final = 48
"""How many characters of a prompt are shown, from its end."""

_USER: Final = {"role": "user", "content": "question"}
_ANSWER: Final = {"role": "assistant", "content": "reply"}
_CALL: Final = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_RESULT: Final = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "result"}


class HistoryWarning(UserWarning):
    """A row trains turns as inference never shows them."""


class TurnStartWarning(UserWarning):
    """A row trains a turn that does not continue the prompt that inference asks for it with."""


Remark: TypeAlias = str | HistoryWarning | TurnStartWarning
"""What to know about the turns of a row: a note, or a note that is also a warning."""


class PastTurns:
    """How one renderer writes turns that are no longer the last."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer.silent()
        self._changed: dict[TurnKind, bool] = {}
        self._thinking: dict[tuple[str, bool, bool, bool], bool] = {}
        self._stops: dict[tuple[str, bool], int | None] = {}
        self._remedies: dict[tuple[bool, bool, bool], str] = {}

    def remarks(
        self, rendered: RenderedTokens, messages: Messages, tools: Any, chosen: Sequence[int], *, of_history: bool
    ) -> list[Remark]:
        """What to know about the chosen turns of a row; `of_history`: also where inference shows them otherwise."""
        own = [at for at in chosen if messages[at]["role"] == "assistant"]
        thoughts = {at: thought for at in own if (thought := reasoning_of(messages[at])) is not None}
        silent: list[int] = []
        nowhere: list[int] = []
        for at in _hidden(thoughts, rendered):
            is_past = at < len(messages) - 1
            can_think = is_past and self._can_think(messages[at], thoughts[at][1], tools)
            (silent if can_think else nowhere).append(at)
        if not of_history:  # it matters only to turns that something else is to be said of
            prompted = {turn.message for turn in rendered.turns if turn.other_prompt}
            own = [at for at in own if at in prompted] if prompted else []
        changed = self._changed_among(messages, [at for at in own if at not in silent], tools) if own else []
        found = ((silent, REASONING_LEFT_OUT), (changed, WRITTEN_OTHERWISE)) if of_history else ()
        return [
            *(HistoryWarning(f"{listed(who)}: {what}") for who, what in found if who),
            *self.starts(rendered, messages, tools, set(chosen) - {*silent, *changed}),
            *([f"{listed(nowhere)}: {REASONING_NOWHERE}"] if nowhere else []),
        ]

    def _changed_among(self, messages: Messages, own: Sequence[int], tools: Any) -> list[int]:
        """Those of the turns that the template writes otherwise than when they were the last."""
        roles = [message["role"] for message in messages]
        last_user = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
        answers = [at for at, role in enumerate(roles) if role == "assistant" and not messages[at].get("tool_calls")]
        last_answer = answers[-1] if answers else -1
        return [
            at
            for at in own
            if at < len(messages) - 1 and self._is_changed(messages[at], at < last_user, at < last_answer, tools)
        ]

    def starts(
        self, rendered: RenderedTokens, messages: Messages, tools: Any, chosen: Collection[int]
    ) -> list[TurnStartWarning]:
        """A warning for chosen turns that do not continue their generation prompt."""
        found: dict[str, list[int]] = {}
        for turn in rendered.turns:
            if turn.other_prompt and turn.message in chosen:
                remedy = self._remedy(messages[turn.message], tools)
                said = (
                    f"the prompt for such a turn ends in {turn.other_prompt[-_SHOWN:]!r} and the row does not go on "
                    f"from there, so it trains a start that inference never gives. {remedy}"
                )
                found.setdefault(said, []).append(turn.message)
        return [TurnStartWarning(f"{listed(who)}: {what}") for what, who in found.items()]

    def _remedy(self, message: Mapping[str, Any], tools: Any) -> str:
        """What would make a turn of this kind continue its prompt, as far as trying it on a small turn shows."""
        kind = (reasoning_of(message) is not None, bool(message.get("tool_calls")), bool(tools))
        if kind not in self._remedies:
            thought, called, _ = kind
            renderer, ways = self._renderer, []
            if _continues(renderer, thought, called, tools):
                ways.append("take white space off the beginning of their text")
            else:
                for name, value in renderer.switches():
                    if _continues(renderer.with_variables({name: value}), thought, called, tools):
                        ways.append(f"set {name}={value}")
                if not thought and _continues(renderer, True, called, tools):
                    ways.append("give them their reasoning")
            said = ", or ".join((*ways, "leave them out: turns='flagged'"))
            self._remedies[kind] = said[0].upper() + said[1:]
        return self._remedies[kind]

    def _can_think(self, message: Mapping[str, Any], field: str, tools: Any) -> bool:
        """Whether the template shows the reasoning of such a turn when it is the last."""
        kind = (field, bool(message.get("content")), bool(message.get("tool_calls")), bool(tools))
        if kind not in self._thinking:
            turn = _small_turn(True, kind[2], "answer" if kind[1] else "", field)
            try:
                self._thinking[kind] = "thought" in _rendered(self._renderer, [_USER, turn], tools).text
            except TokentraceError:  # the template refuses it: only this row, which left it out, is known
                self._thinking[kind] = True
        return self._thinking[kind]

    def _is_changed(self, message: Mapping[str, Any], user_follows: bool, answered: bool, tools: Any) -> bool:
        thought = reasoning_of(message) is not None
        content, called = message.get("content"), bool(message.get("tool_calls"))
        inline = isinstance(content, str) and "</think>" in content
        kind = (thought, inline, _outline(content), called, user_follows, answered, bool(tools))
        if kind not in self._changed:
            self._changed[kind] = self._probe(kind, tools)
        return self._changed[kind]

    def _probe(self, kind: TurnKind, tools: Any) -> bool:
        """Whether a turn of this kind is written differently when others follow; False if the template refuses it."""
        thought, inline, spoken, called, user_follows, answered, _ = kind
        turn = _small_turn(thought, called, spoken, "content" if inline else "reasoning_content")
        answer = [_ANSWER] if answered else []
        later = [_RESULT, *answer] if called else []
        if user_follows or not called:
            later += [_USER, *answer]
        try:
            alone = _rendered(self._renderer, [_USER, turn], tools)
            whole = _rendered(self._renderer, [_USER, turn, *later], tools)
        except TokentraceError:
            return False
        stop = max((one.stop for one in alone.turns if one.message == 1), default=0)
        return not np.array_equal(alone.ids[:stop], whole.ids[:stop])

    def stop_before(self, messages: Messages, following: Mapping[str, Any], tools: Any) -> int | None:
        """The token that ends the last turn of a conversation when `following` comes after it."""
        key = (str(following["role"]), bool(tools))
        if key not in self._stops:
            try:
                rendered = self._renderer.render([*messages, following], tools=tools)
            except TokentraceError:
                return None
            ends = [turn.stop_token for turn in rendered.turns if turn.message == len(messages) - 1]
            self._stops[key] = ends[-1] if ends else None
        return self._stops[key]


def _small_turn(thought: bool, called: bool, content: str, field: str = "reasoning_content") -> dict[str, Any]:
    """An assistant's turn to try on a template, with its reasoning in a field, or in its content."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if field == "content":
        turn["content"] = f"<think>\n{'thought' if thought else ''}\n</think>\n\nanswer"
    elif thought:
        turn[field] = "thought"
    if called:
        turn["tool_calls"] = [_CALL]
    return turn


def _continues(renderer: Renderer, thought: bool, called: bool, tools: Any) -> bool:
    """Whether a small turn begins with the ids of the prompt for it."""
    turn = _small_turn(thought, called, "" if called else "answer")
    try:
        asked = renderer.render_ids([_USER], tools=tools, add_generation_prompt=True)
        plain = renderer.render_ids([_USER], tools=tools)
        written = _rendered(renderer, [_USER, turn], tools)
    except TokentraceError:
        return False
    return (
        len(asked) > len(plain)
        and any(turn.start == len(asked) for turn in written.turns)
        and (written.token_ids[: len(asked)] == asked)
    )


def _rendered(renderer: Renderer, messages: Messages, tools: Any) -> RenderedTokens:
    """A small conversation, with arguments as a mapping or, if the template refuses that, as a JSON string."""
    try:
        return renderer.render(messages, tools=tools)
    except TokentraceError:
        return renderer.render([stringified(message) for message in messages], tools=tools)


def _outline(content: Any) -> str:
    """A short text that begins and ends with the same white space, which some templates strip off past turns."""
    if not isinstance(content, str) or not content.strip():
        return "answer" if content else ""
    head, tail = content[:8], content[-8:]
    return head[: len(head) - len(head.lstrip())] + "answer" + tail[len(tail.rstrip()) :]


def _hidden(thoughts: Mapping[int, tuple[str, str]], rendered: RenderedTokens) -> list[int]:
    """The messages whose reasoning is not in the rendering."""
    if not thoughts:
        return []
    origins = (origin for origin in rendered.rendering.origins if origin and origin[0] == "messages")
    shown = {origin[1:3] for origin in origins}
    out = []
    for at, (reasoning, field) in thoughts.items():
        if field != "content":
            is_shown = (at, field) in shown
        else:
            own = Origin.of(at, "content")
            spoken = "".join(piece for piece, _, whose in rendered.rendering.spans() if whose == own)
            is_shown = reasoning.strip() in spoken
        if not is_shown:
            out.append(at)
    return out


def listed(messages: Sequence[int]) -> str:
    """``"message 2"``, ``"messages 2, 4"``."""
    return f"message{'s' if len(messages) > 1 else ''} {', '.join(map(str, messages))}"
