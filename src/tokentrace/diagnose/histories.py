"""The three histories of one conversation: where production, rollout and training differ.

*Production* is what the shipped template shows at each turn, *rollout* the append-only stream,
bridged turn by turn, and *training* one row over the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
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
from .history_report import HistoryReport, Rows, Step, View, ViewTokens, token_rows


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
    return HistoryReport(steps, walk.row, tuple(dict.fromkeys(walk.notes)))


class _Walk:
    """One conversation, turn by turn."""

    def __init__(self, renderer: Renderer, messages: Any, tools: Any) -> None:
        self.renderer, self.tools = renderer, tools
        self.shipped = renderer if renderer.past is Past.INFERENCE else renderer.with_past(Past.TEMPLATE)
        self.row = renderer.render(messages, tools=tools)  # raises for anything but a conversation
        self.messages = list(messages)
        self.targets: list[int | None] = [at for at in range(len(self.messages)) if self.row.role(at) == "assistant"]
        if self.row.role(len(self.messages) - 1) != "assistant":
            self.row = renderer.render(messages, tools=tools, add_generation_prompt=True)
            self.targets.append(None)
        self.turns = {turn.message: turn for turn in reversed(self.row.turns)}
        self.notes = [f"training row: {note}" for note in self.row.notes]
        if self.targets[0] == 0:
            self.targets.pop(0)
            self.notes.append("message 0: nothing comes before it; it counts as given, not as sampled")

    def steps(self) -> Iterator[Step]:
        row = self._rows(self.row, len(self.messages))
        branch, last, stream = 0, 0, ViewTokens(row[:0], 0)
        for index, message in enumerate(self.targets):
            at = len(self.messages) if message is None else message
            prompt = self._prompt(self.shipped, at)
            before = self._continued(stream, last, at, prompt) if index else self._prompt(self.renderer, at)
            refusal = before if isinstance(before, BridgeRefusal) else None
            if isinstance(before, BridgeRefusal):
                before, branch = self._prompt(self.renderer, at), branch + 1
            turn = self._turn(message, prompt["ids"][prompt["fields"] == "generation_prompt"])
            stream = ViewTokens(np.concatenate([before, turn]), len(before))
            production = ViewTokens(np.concatenate([prompt, turn]), len(prompt))
            views = {View.PRODUCTION: production, View.ROLLOUT: stream}
            if message is None:
                views[View.TRAINING] = ViewTokens(row, len(row))
            elif message in self.turns:
                views[View.TRAINING] = ViewTokens(row[: self.turns[message].stop], self.turns[message].start)
            pairs = combinations(views.items(), 2)
            differences = {(one, other): [*left.differing(right)] for (one, left), (other, right) in pairs}
            yield Step(index, message, views, refusal, branch, differences)
            last = at

    def _prompt(self, renderer: Renderer, at: int) -> Rows:
        try:
            rendered = renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt that asks for message {at}")
            raise
        return self._rows(rendered, at)

    def _continued(self, stream: ViewTokens, last: int, at: int, production: Rows) -> Rows | BridgeRefusal:
        """Continue the stream, which ends with message `last`, up to the prompt for message `at`."""
        prompt, completion = stream.ids[: stream.prompt], stream.ids[stream.prompt :]
        if not len(completion):
            return BridgeRefusal(RefusalReason.NO_TURN_END, f"the template shows no turn for message {last}")
        new, before = self.messages[last + 1 : at], self.messages[:last]
        bridged = self.renderer.bridge(prompt, completion, new, tools=self.tools, messages=before)
        if isinstance(bridged, BridgeRefusal):
            return bridged
        self.notes += [f"rollout, counted from message {last + 1}: {note}" for note in bridged.notes]
        rows = token_rows(bridged.new_ids, np.where(bridged.messages >= 0, bridged.messages + last + 1, -1))
        rows["fields"][bridged.kinds == Kind.CONTEXT] = "text"
        rows["fields"][bridged.kinds == Kind.SYNTHETIC] = "synthetic_close"
        if same := common_suffix(rows["ids"], production["ids"]):  # the shipped rendering names the fields
            owners, tail = production["messages"][-same:], rows["messages"][-same:]
            rows[-same:] = np.where((tail == owners) | (tail < 0), production[-same:], rows[-same:])
        return np.concatenate([stream.rows, rows])

    def _turn(self, message: int | None, prefill: Ids) -> Rows:
        """Return what is sampled for a message: its turn as the last one, after its prompt."""
        rendered = self.row
        if message is not None and message + 1 < len(self.messages):
            rendered = self.renderer.render(self.messages[: message + 1], tools=self.tools)
        turn = next((turn for turn in rendered.turns if turn.message == message), None)
        if turn is None:
            return token_rows([])
        rows = self._rows(rendered, -1)[turn.start : turn.stop]
        rows = self._after_prompt(turn.message, rows, rendered.ids[: turn.start], prefill)
        closed = self.turns.get(turn.message)
        if turn.stop_token is None and closed is not None and closed.stop_token is not None:
            # The head of the next turn ends this one, and the model samples it.
            return np.concatenate([rows, token_rows([closed.stop_token], turn.message)])
        return rows

    def _after_prompt(self, message: int, turn: Rows, before: Ids, prefill: Ids) -> Rows:
        """Return the turn's tokens after the prompt; a token across its end is encoded in two."""
        sizes = range(min(len(prefill), len(before)), 0, -1)
        same = next((size for size in sizes if np.array_equal(before[-size:], prefill[:size])), 0)
        if same == len(prefill):
            return turn
        tokenizer = self.renderer.tokenizer
        missing = tokenizer.decode(prefill[same:].tolist())
        for count in range(1, min(4, len(turn)) + 1):
            text = tokenizer.decode(turn["ids"][:count].tolist())
            if len(text) > len(missing) and text.startswith(missing) and same:
                ids = tokenizer.encode_plain(text[len(missing) :])
                first = token_rows(ids, message, turn["fields"][count - 1])
                return np.concatenate([first, turn[count:]])
        self.notes.append(
            f"message {message}: its turn does not begin with the prompt that asks for it, "
            f"{tokenizer.decode(prefill.tolist())!r}; the rollout holds both, one after the other"
        )
        return turn

    def _rows(self, rendered: RenderedTokens, at: int) -> Rows:
        """Return the tokens of a rendering; its generation prompt belongs to message `at`."""
        rows = token_rows(rendered.ids, rendered.messages, rendered.fields)
        if 0 <= at < len(self.messages):
            rows["messages"][rows["fields"] == "generation_prompt"] = at
        return rows
