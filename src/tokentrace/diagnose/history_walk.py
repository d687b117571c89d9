"""Where production, rollout and training differ: the three histories of one conversation, token by token.

*Production* is what the shipped template shows the model at each turn. *Rollout* is the append-only stream: earlier
prompts and completions, bridged turn by turn. *Training* is one row over the whole conversation, rendered at once.
All three come from the same tokenizer, template variables and control-token policy, so only history sets them apart.
Whose token it is comes from the trace, never from its text.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..study.sampling import SampledTurn
from ..study.seams import BridgeRefusal, RefusalReason
from ..tokens.ids import common_prefix, common_suffix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from .history_differences import (
    PAIRS,
    Aligner,
    Columns,
    Comparison,
    Difference,
    DifferenceSide,
    FieldTokens,
    Shown,
    Step,
    View,
    aligned,
)
from .history_findings import find
from .history_report import HistoryReport

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer


def compare_histories(renderer: Renderer, messages: Any, *, tools: Any = None) -> HistoryReport:
    """Where production, rollout and training would differ for a conversation, token by token.

    For each assistant's turn, and for the one to come if the conversation ends with another's: what the shipped
    template shows, what a rollout with this renderer's history shows, and what one row over the whole conversation
    holds, rendered with the renderer's own flags. Every assistant's message counts as sampled, with the ids that its
    turn has as the last one. Raises what `render` raises.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> print(compare_histories(create_renderer(POCKET), chat).summary)
    Production, rollout and training hold the same tokens at the one step there is: 14.
    """
    return _Walk(renderer, messages, tools).report()


class _Stream:
    """What one view holds, from step to step: it goes back to what stays, and on from there."""

    def __init__(self) -> None:
        self._columns: Columns = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.object_))
        self._size = 0
        self._last: Shown | None = None
        self.stable = 0
        """How many tokens are as they were at the step before."""

    def back_to(self, shared: int) -> None:
        self._size = self.stable = shared

    def add(self, piece: Shown) -> None:
        start, self._size = self._size, self._size + len(piece)
        if self._size > len(self._columns[0]):
            ids, messages, fields = (np.resize(column, 2 * self._size) for column in self._columns)
            self._columns = (ids, messages, fields)
        for column, more in zip(self._columns, (piece.ids, piece.messages, piece.fields), strict=True):
            column[start : self._size] = more

    def now(self, prompt: int | None = None) -> Shown:
        """All of it, until it goes back; all of it as a prompt, unless it is said how much of it is."""
        ids, messages, fields = (column[: self._size] for column in self._columns)
        return Shown(ids, messages, fields, self._size if prompt is None else prompt)

    def held(self, prompt: int) -> Shown:
        """The same to be kept, sharing what it can with the step before."""
        ids, messages, fields = (column[self.stable : self._size].copy() for column in self._columns)
        after = self._last if self.stable else None
        self._last = Shown(ids, messages, fields, prompt, after, self.stable)
        return self._last


class _Pair:
    """Two views compared step by step: blocks that are as they were have the differences they had."""

    def __init__(self, left: View, right: View, walk: _Walk) -> None:
        self.left, self.right, self._walk = left, right, walk
        self.forget()

    def forget(self) -> None:
        """There is no step before."""
        self._aligner = Aligner()
        self._totals = [(0, 0, 0)]
        """Differences, and tokens of either side, up to each block."""
        self._before: Comparison | None = None

    def compare(self, now: tuple[Shown, Shown], held: tuple[Shown, Shown], stable: tuple[int, int]) -> Comparison:
        same, blocks = self._aligner.blocks(*now, stable)
        del self._totals[same + 1 :]
        kept = self._totals[-1][0]
        own: list[Difference] = []
        for number, block in enumerate(blocks[same:], same):
            count, left, right = self._totals[-1]
            for hunk in aligned(*now, block):
                found = Difference(
                    self._walk.run(now[0], hunk.start, hunk.stop),
                    self._walk.run(now[1], hunk.other_start, hunk.other_stop),
                    in_turn=number == len(blocks) - 1,
                )
                own.append(found)
                count, left, right = count + 1, left + len(found.left), right + len(found.right)
            self._totals.append((count, left, right))
        _, left, right = self._totals[-1]
        self._before = Comparison(
            self.left, self.right, held, tuple(own), kept, self._before if kept else None, left, right, self._walk.roles
        )
        return self._before


class _Walk:
    """One conversation, walked turn by turn."""

    def __init__(self, renderer: Renderer, messages: Any, tools: Any) -> None:
        self.renderer = renderer = renderer.silent()
        self.shipped = _shipped(renderer)
        self.tools = tools
        self.row = renderer.render(messages, tools=tools)  # raises for what is not a conversation
        self.messages = list(messages)
        self.roles = tuple(str(self.row.role(at)) for at in range(len(self.messages)))
        self.open = self.roles[-1] != "assistant"
        if self.open:
            self.row = renderer.render(messages, tools=tools, add_generation_prompt=True)
        self.turns = {turn.message: turn for turn in reversed(self.row.turns)}
        self.notes: dict[str, None] = {f"training row: {note}": None for note in self.row.notes}
        self.production, self.rollout = _Stream(), _Stream()
        self.pairs = [_Pair(left, right, self) for left, right in PAIRS]
        self._last_prompt: RenderedTokens | None = None

    def report(self) -> HistoryReport:
        steps = self._steps()
        return HistoryReport(
            steps=tuple(steps),
            findings=tuple(find(steps, self.roles)),
            roles=self.roles,
            row=self.row,
            notes=tuple(self.notes),
            settings=_settings(self.renderer),
            tokenizer=self.renderer.tokenizer,
        )

    def _steps(self) -> list[Step]:
        """Every step, the rollout's stream going on from the one before where it can."""
        wanted: list[int | None] = [at for at, role in enumerate(self.roles) if role == "assistant" and at]
        if self.roles[0] == "assistant":
            self._note("message 0: nothing comes before it; it counts as given, not as sampled")
        if self.open:
            wanted.append(None)
        row = self._column(self.row, len(self.messages))
        steps: list[Step] = []
        trained = 0
        for message in wanted:
            at = len(self.messages) if message is None else message
            asked = self._ask(at)
            refusal = self._go_on(steps[-1] if steps else None, at)
            turn = self._turn(message, asked)
            training = row if message is None else None
            if message in self.turns:
                sampled = self.turns[message]
                training = row.cut(0, sampled.stop, sampled.start)
            now: dict[View, Shown] = {}
            held: dict[View, Shown] = {}
            stable = {View.TRAINING: trained}
            for view, stream in ((View.PRODUCTION, self.production), (View.ROLLOUT, self.rollout)):
                prompt = len(stream.now())
                stream.add(turn)
                now[view], held[view], stable[view] = stream.now(prompt), stream.held(prompt), stream.stable
            trained = 0
            if training is not None:
                now[View.TRAINING] = held[View.TRAINING] = training
                trained = len(training)
            comparisons = tuple(self._compare(now, held, stable))
            branch = steps[-1].branch + (refusal is not None) if steps else 0
            views = (held[View.PRODUCTION], held[View.ROLLOUT], training)
            steps.append(Step(len(steps), message, *views, refusal, branch, comparisons))
        return steps

    def _compare(
        self, now: Mapping[View, Shown], held: Mapping[View, Shown], stable: Mapping[View, int]
    ) -> Iterator[Comparison]:
        for pair in self.pairs:
            views = (pair.left, pair.right)
            if View.TRAINING in views and View.TRAINING not in now:
                pair.forget()
                continue
            one, other = views
            yield pair.compare((now[one], now[other]), (held[one], held[other]), (stable[one], stable[other]))

    # -- production

    def _ask(self, at: int) -> Ids:
        """The prompt that asks for message `at`, as production shows it. What of it is the generation prompt."""
        rendered = self._prompt(self.shipped, at)
        shared = 0 if self._last_prompt is None else _agreeing(rendered, self._last_prompt)
        self._last_prompt = rendered
        own = self._column(rendered, at, shared)
        self.production.back_to(shared)
        self.production.add(own)
        asked: Ids = own.ids[own.fields == "generation_prompt"]
        return asked

    def _prompt(self, renderer: Renderer, at: int) -> RenderedTokens:
        try:
            return renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt that asks for message {at}")
            raise

    # -- the rollout

    def _begin(self, at: int) -> None:
        """A stream begins with the prompt that the renderer gives, or with production's."""
        prompt = self.production.now()
        if self.renderer is not self.shipped:
            prompt = self._column(self._prompt(self.renderer, at), at)
        before = self.rollout.now()
        pairs = ((prompt.ids, before.ids), (prompt.messages, before.messages), (prompt.fields, before.fields))
        shared = min(common_prefix(one, other) for one, other in pairs)
        self.rollout.back_to(shared)
        self.rollout.add(prompt.cut(shared, len(prompt)))

    def _go_on(self, last: Step | None, at: int) -> BridgeRefusal | None:
        """The stream goes on from the step before; where it cannot, another begins."""
        if last is None or last.message is None:  # the first; no step follows the one for the turn to come
            self._begin(at)
            return None
        bridged = self._bridge(last.message, last.rollout.prompt, at)
        if isinstance(bridged, BridgeRefusal):
            self._begin(at)
            return bridged
        self.rollout.back_to(len(self.rollout.now()))
        self.rollout.add(self._bridged(bridged, self.production.now(), last.message + 1))
        return None

    def _bridge(self, message: int, prompt: int, at: int) -> BridgedTokens | BridgeRefusal:
        ids = self.rollout.now().ids
        if len(ids) == prompt:
            return BridgeRefusal(RefusalReason.NO_TURN_END, f"the template shows no turn for message {message}")
        bridged = self.renderer.bridge(
            ids[:prompt],
            ids[prompt:],
            self.messages[message + 1 : at],
            tools=self.tools,
            messages=self.messages[:message],
        )
        for note in getattr(bridged, "notes", ()):
            self._note(f"rollout, counted from message {message + 1}: {note}")
        return bridged

    def _turn(self, message: int | None, asked: Ids) -> Shown:
        """What is sampled for a message: its turn as the last one, after the prompt that asks for it."""
        nothing = self._made([], -1, "")
        if message is None:
            return nothing
        rendered = self.row
        if message + 1 < len(self.messages):
            rendered = self.renderer.render(self.messages[: message + 1], tools=self.tools)
        turn = next((turn for turn in rendered.turns if turn.message == message), None)
        if turn is None:
            return nothing
        pieces = [*self._after_prompt(rendered, turn, asked)]
        closed = self.turns.get(message)
        if turn.stop_token is None and closed is not None and closed.stop_token is not None:
            # the head of the next turn ends this one, and the model samples it
            pieces.append(self._made([closed.stop_token], message, "scaffold"))
        stream = _Stream()
        for piece in pieces:
            stream.add(piece)
        return stream.now()

    def _after_prompt(self, rendered: RenderedTokens, turn: SampledTurn, asked: Ids) -> Iterator[Shown]:
        """The turn's tokens, cut where the prompt ends. A token that reaches over the cut is encoded in two."""
        start, there = turn.start, len(asked)
        while there > start or not np.array_equal(rendered.ids[start - there : start], asked[:there]):
            there -= 1
        found = self._column(rendered, -1, start).cut(0, turn.stop - start)
        if there < len(asked):
            decode = self.renderer.tokenizer.decode
            missing = decode(asked[there:].tolist())
            for count in range(1, min(4, len(found)) + 1):
                text = decode(found.ids[:count].tolist())
                if len(text) > len(missing) and text.startswith(missing) and there:
                    (ids,) = self.renderer.tokenizer.encode_plain([text[len(missing) :]])
                    yield self._made(ids, turn.message, found.fields[count - 1])
                    yield found.cut(count, len(found))
                    return
            self._note(
                f"message {turn.message}: its turn does not begin with the prompt that asks for it, "
                f"{decode(asked.tolist())!r}; the rollout holds both, one after the other"
            )
        yield found

    # -- which message and field a token is from

    def _column(self, rendered: RenderedTokens, at: int, start: int = 0) -> Shown:
        """A rendering's tokens from `start` on. Its generation prompt belongs to message `at`, which it asks for, if
        there is one."""
        fields = np.array(rendered.fields[start:], np.object_)
        messages = rendered.messages[start:]
        if 0 <= at < len(self.messages):
            messages = np.where(fields == "generation_prompt", np.int32(at), messages)
        return Shown(rendered.ids[start:], messages, fields, len(fields))

    def _bridged(self, bridged: BridgedTokens, production: Shown, first_new: int) -> Shown:
        """What a bridge added. It knows messages and kinds; fields come from the shipped rendering of the same ids."""
        messages = np.where(bridged.messages >= 0, bridged.messages + first_new, -1).astype(np.int32)
        fields = np.full(len(messages), "scaffold", np.object_)
        fields[bridged.kinds == Kind.CONTEXT] = "text"
        fields[bridged.kinds == Kind.SYNTHETIC] = "synthetic_close"
        same = common_suffix(bridged.new_ids, production.ids)
        if same:
            owners, known = production.messages[-same:], messages[-same:]
            agreed = (known == owners) | (known < 0)
            messages[-same:] = np.where(agreed, owners, known)
            fields[-same:] = np.where(agreed, production.fields[-same:], fields[-same:])
        return Shown(bridged.new_ids, messages, fields, len(messages))

    def _made(self, ids: Sequence[int] | Ids, message: int, name: str) -> Shown:
        made = np.asarray(ids, np.int32)
        return Shown(made, np.full_like(made, message), np.full(len(made), name, np.object_), len(made))

    def _note(self, note: str) -> None:
        self.notes[note] = None

    def run(self, shown: Shown, start: int, stop: int) -> DifferenceSide:
        """One side of a difference."""
        decode = self.renderer.tokenizer.decode
        ids = shown.ids[start:stop].tolist()
        parts = tuple(
            FieldTokens(
                first,
                last,
                message,
                self.roles[message] if message >= 0 else None,
                name,
                decode(ids[first - start : last - start]),
            )
            for first, last, message, name in shown.parts(start, stop)
        )
        return DifferenceSide(start, stop, tuple(ids), parts, decode(ids))


def _agreeing(one: RenderedTokens, before: RenderedTokens) -> int:
    """How many tokens two prompts begin with alike: ids, messages and fields. Generation prompts are not looked at."""
    spans, others = one.rendering, before.rendering
    most = min(bisect.bisect_left(spans.ends, spans.tail), bisect.bisect_left(others.ends, others.tail))
    rows = zip(spans.ends[:most], spans.origins, others.ends, others.origins, strict=False)
    same = next((at for at, (end, origin, stop, other) in enumerate(rows) if end != stop or origin != other), most)
    tokens = int(one.span_indices.searchsorted(same))
    pairs = ((one.ids, before.ids), (one.messages, before.messages))
    return min(tokens, *(common_prefix(here[:tokens], there) for here, there in pairs))


def _shipped(renderer: Renderer) -> Renderer:
    """The same renderer with nothing added to the template; itself, if nothing is."""
    return renderer if renderer.past is Past.INFERENCE else renderer.with_past(Past.TEMPLATE)


def _settings(renderer: Renderer) -> dict[str, Any]:
    return {
        "tokenizer": renderer.tokenizer.name,
        "family": renderer.family,
        "past": str(renderer.past),
        "template_kwargs": dict(renderer.template_kwargs),
    }
