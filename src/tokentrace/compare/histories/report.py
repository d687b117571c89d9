"""Where production, rollout and training differ: the three histories of one conversation, token by token.

*Production* is what the shipped template shows the model at each turn. *Rollout* is the append-only stream: earlier
prompts and completions, bridged turn by turn. *Training* is one row over the whole conversation, rendered at once.
All three come from the same tokenizer, template variables and control-token policy, so only history sets them apart.
Whose token it is comes from the trace, never from its text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import TokentraceError
from ...rendering.bridged import BridgedTokens
from ...rendering.bridging import History
from ...rendering.rendered import RenderedTokens
from ...showing import ShowsItself
from ...study.seams import BridgeRefusal, RefusalReason
from ...tokens.alignment import common_suffix
from ...tokens.kinds import Kind
from ...tokens.tokenizer import Ids, Tokenizer
from .differences import PAIRS, Comparison, Difference, FieldCount, FieldTokens, Run, Shown, Step, View, differing
from .findings import Finding, find

if TYPE_CHECKING:
    from ...rendering.renderer import Renderer

_FLAGS: Final = ("preserve_all_thinking", "preserve_thinking_between_tool_calls", "use_patched")
"""What a renderer adds to the shipped template."""


@dataclass(frozen=True, slots=True, eq=False)
class HistoryReport(ShowsItself):
    """Where production, rollout and training differ, step by step. Made by `compare_histories`.

    `row` is the training row. `branches` are the streams of the rollout: one, and one more for every break; with
    history ``train`` these are also the rows that the rollout is trained on.
    """

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    roles: tuple[str, ...]
    row: RenderedTokens
    branches: tuple[Ids, ...]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all three agree at every step, and the rollout never breaks."""
        return all(step.equal and step.refusal is None for step in self.steps)

    @property
    def breaks(self) -> list[Step]:
        """The steps at which the rollout could not go on."""
        return [step for step in self.steps if step.refusal is not None]

    def differing(self, left: View | str, right: View | str) -> list[Step]:
        """The steps at which two views differ."""
        return [step for step in self.steps if (found := step.compare(left, right)) is None or not found.equal]

    @property
    def summary(self) -> str:
        """What it comes to, a sentence a line."""
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """What it comes to, in plain language."""
        if not self.steps:
            return ["There is no turn to compare: the model is never asked for one."]
        out = [str(found) for found in self.findings]
        for step in self.steps:
            if step.refusal is not None:
                out.append(f"The rollout breaks at {self.place(step)}: {step.refusal}.")
            if step.training is None:
                out.append(f"The training row holds no turn for {self.place(step)}.")
        if not out:
            steps = f"all {len(self.steps)} steps" if len(self.steps) > 1 else "the one step there is"
            held = f"{len(self.steps[-1].rollout):,} at the last" if len(self.steps) > 1 else len(self.steps[0].rollout)
            out = [f"Production, rollout and training hold the same tokens at {steps}: {held}."]
        return out

    def place(self, step: Step) -> str:
        """What a step asks for, in words."""
        return "the turn to come" if step.message is None else f"message {step.message}"

    def rows(self) -> list[dict[str, Any]]:
        """All that differs as a flat table: one row for each field's part of each side of each difference."""
        return [
            {
                "step": step.index,
                "message": step.message,
                "left": str(found.left),
                "right": str(found.right),
                "difference": number,
                "in": "turn" if difference.in_turn else "prompt",
                "side": str(side),
                "start": part.start,
                "stop": part.stop,
                "tokens": len(part),
                "from_message": part.message,
                "role": part.role,
                "field": part.field,
                "text": part.text,
            }
            for step in self.steps
            for found in step.comparisons
            for number, difference in enumerate(found.differences)
            for side, run in ((found.left, difference.left), (found.right, difference.right))
            for part in run.parts
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data that ``json.dumps`` takes. Nothing is lost.

        A step's rollout is the first ids of its branch, its training the first ids of the row, and its production is
        made from either with the differences of the comparison.
        """
        from ...show.histories import json_view

        return json_view(self)

    def __repr__(self) -> str:
        differ = sum(not step.equal for step in self.steps)
        return f"HistoryReport({len(self.steps)} steps, {differ} differ, {len(self.breaks)} breaks)"

    def __str__(self) -> str:
        from ...show.histories import plain_view

        return plain_view(self)


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

    def report(self) -> HistoryReport:
        steps = self._steps()
        streams = {step.branch: step.rollout.ids for step in steps}
        return HistoryReport(
            steps=tuple(steps),
            findings=tuple(find(steps, self.roles)),
            roles=self.roles,
            row=self.row,
            branches=tuple(streams.values()),
            notes=tuple(self.notes),
            settings=_settings(self.renderer),
            tokenizer=self.renderer.tokenizer,
        )

    # -- the rollout

    def _steps(self) -> list[Step]:
        """Every step, the rollout's stream going on from the one before where it can."""
        wanted: list[int | None] = [at for at, role in enumerate(self.roles) if role == "assistant" and at]
        if self.roles[0] == "assistant":
            self._note("message 0: nothing comes before it; it counts as given, not as sampled")
        if self.open:
            wanted.append(None)
        row = self._column(self.row, len(self.messages))
        steps: list[Step] = []
        for message in wanted:
            at = len(self.messages) if message is None else message
            production = self._column(self._prompt(self.shipped, at), at)
            bridged = self._bridge(steps[-1], at) if steps else None
            if isinstance(bridged, BridgedTokens):
                prompt = steps[-1].rollout.joined(self._bridged(bridged, production, steps[-1].message, at))
            elif self.renderer is not self.shipped and self.renderer.history is History.TRAIN:
                prompt = self._column(self._prompt(self.renderer, at), at)
            else:
                prompt = production
            turn = self._turn(message, production)
            training = row if message is None else None
            if message in self.turns:
                sampled = self.turns[message]
                training = row.cut(0, sampled.stop, sampled.start)
            shown, rollout = production.joined(turn), prompt.joined(turn)
            views = {View.PRODUCTION: shown, View.ROLLOUT: rollout, View.TRAINING: training}
            comparisons = tuple(
                self._compare(left, right, one, other)
                for left, right in PAIRS
                if (one := views[left]) is not None and (other := views[right]) is not None
            )
            refusal = bridged if isinstance(bridged, BridgeRefusal) else None
            branch = steps[-1].branch + (refusal is not None) if steps else 0
            steps.append(Step(len(steps), message, shown, rollout, training, refusal, branch, comparisons))
        return steps

    def _prompt(self, renderer: Renderer, at: int) -> RenderedTokens:
        try:
            return renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt that asks for message {at}")
            raise

    def _bridge(self, last: Step, at: int) -> BridgedTokens | BridgeRefusal:
        assert last.message is not None  # only the last step asks for a turn to come
        prompt, turn = last.rollout.ids[: last.rollout.prompt], last.rollout.ids[last.rollout.prompt :]
        if not len(turn):
            return BridgeRefusal(RefusalReason.NO_TURN_END, f"the template shows no turn for message {last.message}")
        bridged = self.renderer.bridge(
            prompt,
            turn,
            self.messages[last.message + 1 : at],
            tools=self.tools,
            messages=self.messages[: last.message],
        )
        for note in getattr(bridged, "notes", ()):
            self._note(f"rollout, counted from message {last.message + 1}: {note}")
        return bridged

    def _turn(self, message: int | None, production: Shown) -> Shown:
        """What is sampled for a message: its turn as the last one, after the prompt that asks for it."""
        if message is None:
            return production.cut(0, 0)
        rendered = self.row
        if message + 1 < len(self.messages):
            rendered = self.renderer.render(self.messages[: message + 1], tools=self.tools)
        turn = next((turn for turn in rendered.turns if turn.message == message), None)
        if turn is None:
            return production.cut(0, 0)
        column = self._column(rendered, -1)
        found = self._after_prompt(column.cut(0, turn.stop), turn.start, message, production)
        closed = self.turns.get(message)
        if turn.stop_token is None and closed is not None and closed.stop_token is not None:
            # the head of the next turn ends this one, and the model samples it
            found = found.joined(self._made([closed.stop_token], message, "scaffold"))
        return found

    def _after_prompt(self, column: Shown, start: int, message: int, production: Shown) -> Shown:
        """The turn's tokens, cut where the prompt ends. A token that reaches over the cut is encoded in two."""
        asking = production.ids[production.fields == "generation_prompt"]
        there = len(asking)
        while there > start or not np.array_equal(column.ids[start - there : start], asking[:there]):
            there -= 1
        turn = column.cut(start, len(column))
        if there == len(asking):
            return turn
        decode = self.renderer.tokenizer.decode
        missing = decode(asking[there:].tolist())
        for count in range(1, min(4, len(turn)) + 1):
            text = decode(turn.ids[:count].tolist())
            if len(text) > len(missing) and text.startswith(missing) and there:
                (ids,) = self.renderer.tokenizer.encode_plain([text[len(missing) :]])
                first = self._made(ids, message, turn.fields[count - 1])
                return first.joined(turn.cut(count, len(turn)))
        self._note(
            f"message {message}: its turn does not begin with the prompt that asks for it, "
            f"{decode(asking.tolist())!r}; the rollout holds both, one after the other"
        )
        return turn

    # -- which message and field a token is from

    def _column(self, rendered: RenderedTokens, at: int) -> Shown:
        """A rendering's tokens. Its generation prompt belongs to message `at`, which it asks for, if there is one."""
        fields = np.array(rendered.fields, np.object_)
        messages = rendered.messages
        if 0 <= at < len(self.messages):
            messages = np.where(fields == "generation_prompt", np.int32(at), messages)
        return Shown(rendered.ids, messages, fields, len(rendered))

    def _bridged(self, bridged: BridgedTokens, production: Shown, previous: int | None, at: int) -> Shown:
        """What a bridge added. It knows messages and kinds; fields come from the shipped rendering of the same ids."""
        first_new = (previous or 0) + 1
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

    # -- comparing

    def _compare(self, left: View, right: View, one: Shown, other: Shown) -> Comparison:
        differences = []
        counts: dict[tuple[int, str], list[int]] = {}
        for in_turn, (start, stop, other_start, other_stop) in differing(one, other):
            found = Difference(self._run(one, start, stop), self._run(other, other_start, other_stop), in_turn)
            differences.append(found)
            for side, run in enumerate((found.left, found.right)):
                for part in run.parts:
                    counts.setdefault((part.message, part.field), [0, 0])[side] += len(part)
        fields = tuple(
            FieldCount(
                message, self._role(message), name, here, there, one.count(message, name), other.count(message, name)
            )
            for (message, name), (here, there) in counts.items()
        )
        return Comparison(left, right, tuple(differences), fields)

    def _run(self, shown: Shown, start: int, stop: int) -> Run:
        decode = self.renderer.tokenizer.decode
        ids = shown.ids[start:stop].tolist()
        parts = tuple(
            FieldTokens(first, last, message, self._role(message), name, decode(ids[first - start : last - start]))
            for first, last, message, name in shown.parts(start, stop)
        )
        return Run(start, stop, tuple(ids), parts, decode(ids))

    def _role(self, message: int) -> str | None:
        return self.roles[message] if message >= 0 else None


def _shipped(renderer: Renderer) -> Renderer:
    """The same renderer with nothing added to the template; itself, if nothing is."""
    if not any(getattr(renderer, flag) for flag in _FLAGS):
        return renderer
    plain = copy.copy(renderer)
    for flag in _FLAGS:
        setattr(plain, flag, False)
    return plain


def _settings(renderer: Renderer) -> dict[str, Any]:
    return {
        "tokenizer": renderer.tokenizer.name,
        "family": renderer.family,
        "history": str(renderer.history),
        **{flag: getattr(renderer, flag) for flag in _FLAGS},
        "template_kwargs": dict(renderer.template_kwargs),
    }
