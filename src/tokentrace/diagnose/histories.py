"""The three histories of one conversation: where production, rollout and training differ.

*Production* is what the shipped template shows at each turn, *rollout* the append-only stream,
bridged turn by turn, and *training* one row over the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import TokentraceError
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..study.seams import BridgeRefusal, RefusalReason
from ..tokens.ids import common_suffix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from .history_report import HistoryReport, Step, View, ViewTokens, compare_views


def compare_histories(renderer: Renderer, messages: Any, *, tools: Any = None) -> HistoryReport:
    """Compare production, rollout and training of a conversation, token by token.

    A step is an assistant turn, or the turn to come. Every assistant message counts as sampled, with
    the ids that its turn has as the last one. Raises what `render` raises.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> print(compare_histories(create_renderer(POCKET), chat).summary)
    Production, rollout and training hold the same tokens at the one step there is: 14 at the last.
    """
    walk = _Walk(renderer.silent(), messages, tools)
    steps = tuple(walk.steps())
    settings = {
        "tokenizer": renderer.tokenizer.name,
        "family": renderer.family,
        "past": str(renderer.past),
        "template_kwargs": dict(renderer.template_kwargs),
    }
    return HistoryReport(steps, walk.roles, walk.row, tuple(dict.fromkeys(walk.notes)), settings, renderer.tokenizer)


class _Walk:
    """One conversation, turn by turn."""

    def __init__(self, renderer: Renderer, messages: Any, tools: Any) -> None:
        self.renderer, self.tools = renderer, tools
        shipped = renderer.past in (Past.INFERENCE, Past.TEMPLATE)
        self.shipped = renderer if shipped else replace(renderer, past=Past.TEMPLATE)
        self.row = renderer.render(messages, tools=tools)  # raises for anything but a conversation
        self.messages = list(messages)
        self.roles = tuple(str(self.row.role(at)) for at in range(len(self.messages)))
        self.open = self.roles[-1] != "assistant"
        if self.open:
            self.row = renderer.render(messages, tools=tools, add_generation_prompt=True)
        self.turns = {turn.message: turn for turn in reversed(self.row.turns)}
        self.notes = [f"training row: {note}" for note in self.row.notes]

    def steps(self) -> Iterator[Step]:
        turns: list[int | None] = [at for at, role in enumerate(self.roles) if role == "assistant" and at]
        if self.roles[0] == "assistant":
            self.notes.append("message 0: nothing comes before it; it counts as given, not as sampled")
        row = self._tokens(self.row, len(self.messages))
        last: Step | None = None
        for index, message in enumerate([*turns, *([None] * self.open)]):
            at = len(self.messages) if message is None else message
            prompt = self._prompt(self.shipped, at)
            stream = self._prompt(self.renderer, at) if last is None else self._continued(last, at, prompt)
            refusal = stream if isinstance(stream, BridgeRefusal) else None
            if isinstance(stream, BridgeRefusal):
                stream = self._prompt(self.renderer, at)
            turn = self._turn(message, prompt.ids[prompt.fields == "generation_prompt"])
            views = {View.PRODUCTION: prompt.followed_by(turn), View.ROLLOUT: stream.followed_by(turn)}
            if message is None:
                views[View.TRAINING] = row.cut(0, len(row), len(row))
            elif message in self.turns:
                views[View.TRAINING] = row.cut(0, self.turns[message].stop, self.turns[message].start)
            branch = 0 if last is None else last.branch + (refusal is not None)
            last = Step(index, message, views, refusal, branch, compare_views(views, self.renderer.tokenizer))
            yield last

    def _prompt(self, renderer: Renderer, at: int) -> ViewTokens:
        try:
            rendered = renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt that asks for message {at}")
            raise
        return self._tokens(rendered, at)

    def _continued(self, last: Step, at: int, production: ViewTokens) -> ViewTokens | BridgeRefusal:
        """Continue the stream of the step before up to the prompt for message `at`."""
        stream, message = last.rollout, last.message or 0
        if len(stream) == stream.prompt:
            return BridgeRefusal(RefusalReason.NO_TURN_END, f"the template shows no turn for message {message}")
        ids, new = (stream.ids[: stream.prompt], stream.ids[stream.prompt :]), self.messages[message + 1 : at]
        bridged = self.renderer.bridge(*ids, new, tools=self.tools, messages=self.messages[:message])
        if isinstance(bridged, BridgeRefusal):
            return bridged
        self.notes += [f"rollout, counted from message {message + 1}: {note}" for note in bridged.notes]
        messages = np.where(bridged.messages >= 0, bridged.messages + message + 1, -1).astype(np.int32)
        fields = np.full(len(messages), "scaffold", np.object_)
        fields[bridged.kinds == Kind.CONTEXT] = "text"
        fields[bridged.kinds == Kind.SYNTHETIC] = "synthetic_close"
        if same := common_suffix(bridged.new_ids, production.ids):  # the shipped rendering names the fields
            owners, bridge_owners = production.messages[-same:], messages[-same:]
            agreed = (bridge_owners == owners) | (bridge_owners < 0)
            fields[-same:] = np.where(agreed, production.fields[-same:], fields[-same:])
            messages[-same:] = np.where(agreed, owners, bridge_owners)
        return stream.followed_by(ViewTokens(bridged.new_ids, messages, fields))

    def _turn(self, message: int | None, prefill: Ids) -> ViewTokens:
        """Return what is sampled for a message: its turn as the last one, after its prompt."""
        rendered = self.row
        if message is not None and message + 1 < len(self.messages):
            rendered = self.renderer.render(self.messages[: message + 1], tools=self.tools)
        turn = next((turn for turn in rendered.turns if turn.message == message), None)
        if turn is None:
            return ViewTokens.of([])
        tokens = self._tokens(rendered, -1).cut(turn.start, turn.stop)
        tokens = self._after_prompt(tokens, rendered.ids[: turn.start], prefill, turn.message)
        closed = self.turns.get(turn.message)
        if turn.stop_token is None and closed is not None and closed.stop_token is not None:
            # The head of the next turn ends this one, and the model samples it.
            return tokens.followed_by(ViewTokens.of([closed.stop_token], turn.message, "scaffold"))
        return tokens

    def _after_prompt(self, tokens: ViewTokens, before: Ids, prefill: Ids, message: int) -> ViewTokens:
        """Return the turn's tokens after the prompt; a token across its end is encoded in two."""
        sizes = range(min(len(prefill), len(before)), 0, -1)
        same = next((size for size in sizes if np.array_equal(before[-size:], prefill[:size])), 0)
        if same == len(prefill):
            return tokens
        tokenizer = self.renderer.tokenizer
        missing = tokenizer.decode(prefill[same:].tolist())
        for count in range(1, min(4, len(tokens)) + 1):
            text = tokenizer.decode(tokens.ids[:count].tolist())
            if len(text) > len(missing) and text.startswith(missing) and same:
                ids = tokenizer.encode_plain(text[len(missing) :])
                first = ViewTokens.of(ids, message, tokens.fields[count - 1])
                return first.followed_by(tokens.cut(count, len(tokens)))
        self.notes.append(
            f"message {message}: its turn does not begin with the prompt that asks for it, "
            f"{tokenizer.decode(prefill.tolist())!r}; the rollout holds both, one after the other"
        )
        return tokens

    def _tokens(self, rendered: RenderedTokens, at: int) -> ViewTokens:
        """Return the tokens of a rendering; its generation prompt belongs to message `at`."""
        fields, messages = np.array(rendered.fields, np.object_), rendered.messages
        if 0 <= at < len(self.messages):
            messages = np.where(fields == "generation_prompt", np.int32(at), messages)
        return ViewTokens(rendered.ids, messages, fields, len(fields))
