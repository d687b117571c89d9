"""Where production, rollout and training differ: the three histories of one conversation, token by token.

*Production* is what the shipped template shows the model at each turn. *Rollout* is the append-only stream: earlier
prompts and completions, bridged turn by turn. *Training* is one row over the whole conversation, rendered at once.
All three use the same tokenizer, template variables and control-token policy, so only history sets them apart. The
trace says which message a token belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TokentraceError
from ..rendering.bridged import BridgedTokens
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..showing import ShowsItself
from ..study.sampling import SampledTurn
from ..study.seams import BridgeRefusal, RefusalReason
from ..tokens.ids import common_suffix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from .history_differences import Step, View, ViewTokens, compare_views
from .history_findings import HistoryFinding, find_changes

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer
    from ..show.document import Document


@dataclass(frozen=True, slots=True, eq=False)
class HistoryReport(ShowsItself):
    """Where production, rollout and training differ, step by step. `row` is the training row."""

    steps: tuple[Step, ...]
    findings: tuple[HistoryFinding, ...]
    roles: tuple[str, ...]
    row: RenderedTokens
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def equal(self) -> bool:
        """True if all three agree at every step, and the rollout never breaks."""
        return all(step.equal and step.refusal is None for step in self.steps)

    @property
    def branches(self) -> tuple[Ids, ...]:
        """The streams of the rollout: one, and one more for every break."""
        last = {step.branch: step.rollout for step in self.steps}
        return tuple(tokens.ids for tokens in last.values())

    @property
    def breaks(self) -> list[Step]:
        """The steps at which the rollout could not continue."""
        return [step for step in self.steps if step.refusal is not None]

    def differing(self, left: View | str, right: View | str) -> list[Step]:
        """Return the steps at which two views differ."""
        return [step for step in self.steps if (one := step.compare(left, right)) is None or not one.equal]

    @property
    def summary(self) -> str:
        """The conclusions, one sentence a line."""
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Return the conclusions."""
        if not self.steps:
            return ["There is no turn to compare: the model is never asked for one."]
        out = [str(one) for one in self.findings]
        for step in self.steps:
            if step.refusal is not None:
                out.append(f"The rollout breaks at {step.place}: {step.refusal}.")
            if step.training is None:
                out.append(f"The training row holds no turn for {step.place}.")
        steps = f"all {len(self.steps)} steps" if len(self.steps) > 1 else "the one step there is"
        size = len(self.steps[-1].rollout)
        return out or [f"Production, rollout and training hold the same tokens at {steps}: {size:,} at the last."]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data for ``json.dumps``.

        A step's rollout is the beginning of its branch, its training the beginning of the row, and its production
        follows from either by the differences.
        """
        return {
            "equal": self.equal,
            "summary": self.sentences(),
            "settings": dict(self.settings),
            "roles": list(self.roles),
            "branches": [ids.tolist() for ids in self.branches],
            "row": self.row.token_ids,
            "steps": [_step_json(step) for step in self.steps],
            "findings": [asdict(one) | {"text": str(one)} for one in self.findings],
            "notes": list(self.notes),
        }

    def document(self, _: Any = None, *, step: int | None = None) -> Document:
        """Return the report as a document; with `step`, what differs at that step only."""
        from .history_document import history_document

        return history_document(self, step)

    def __repr__(self) -> str:
        differ = sum(not step.equal for step in self.steps)
        return f"HistoryReport({len(self.steps)} steps, {differ} differ, {len(self.breaks)} breaks)"

    def __str__(self) -> str:
        from ..show.terminal import plain_view

        return plain_view(self)


def _step_json(step: Step) -> dict[str, Any]:
    refusal = step.refusal
    return {
        "step": step.index,
        "message": step.message,
        "equal": step.equal,
        "branch": step.branch,
        "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
        "tokens": {view: None if (tokens := step.view(view)) is None else len(tokens) for view in View},
        "comparisons": [asdict(one) for one in step.comparisons],
    }


def compare_histories(renderer: Renderer, messages: Any, *, tools: Any = None) -> HistoryReport:
    """Compare production, rollout and training of a conversation, token by token.

    For each assistant turn, and for the turn to come if the conversation ends with another role: what the shipped
    template shows, what a rollout with this renderer's history shows, and what one row over the whole conversation
    holds. Every assistant message counts as sampled, with the ids that its turn has as the last one. Raises what
    `render` raises.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> print(compare_histories(create_renderer(POCKET), chat).summary)
    Production, rollout and training hold the same tokens at the one step there is: 14 at the last.
    """
    return _Walk(renderer, messages, tools).report()


class _Walk:
    """One conversation, turn by turn."""

    def __init__(self, renderer: Renderer, messages: Any, tools: Any) -> None:
        self.renderer = renderer = renderer.silent()
        self.shipped = _shipped(renderer)
        self.tools = tools
        self.row = renderer.render(messages, tools=tools)  # raises for anything but a conversation
        self.messages = list(messages)
        self.roles = tuple(str(self.row.role(at)) for at in range(len(self.messages)))
        self.open = self.roles[-1] != "assistant"
        if self.open:
            self.row = renderer.render(messages, tools=tools, add_generation_prompt=True)
        self.turns = {turn.message: turn for turn in reversed(self.row.turns)}
        self.notes: dict[str, None] = {f"training row: {note}": None for note in self.row.notes}

    def report(self) -> HistoryReport:
        steps = tuple(self._steps())
        findings = tuple(find_changes(steps))
        renderer = self.renderer
        settings = {
            "tokenizer": renderer.tokenizer.name,
            "family": renderer.family,
            "past": str(renderer.past),
            "template_kwargs": dict(renderer.template_kwargs),
        }
        return HistoryReport(steps, findings, self.roles, self.row, tuple(self.notes), settings, renderer.tokenizer)

    def _steps(self) -> Iterator[Step]:
        turns: list[int | None] = [at for at, role in enumerate(self.roles) if role == "assistant" and at]
        if self.roles[0] == "assistant":
            self._note("message 0: nothing comes before it; it counts as given, not as sampled")
        row = self._tokens(self.row, len(self.messages))
        last: Step | None = None
        for index, message in enumerate([*turns, *([None] if self.open else [])]):
            at = len(self.messages) if message is None else message
            prompt = self._tokens(self._prompt(self.shipped, at), at)
            stream = self._continue(last, at, prompt)
            refusal = stream if isinstance(stream, BridgeRefusal) else None
            if last is None or isinstance(stream, BridgeRefusal):
                stream = self._start(at, prompt)
            turn = self._turn(message, prompt.ids[prompt.fields == "generation_prompt"])
            views = {View.PRODUCTION: prompt.followed_by(turn), View.ROLLOUT: stream.followed_by(turn)}
            training = row.cut(0, len(row), len(row)) if message is None else None
            if message in self.turns:
                training = row.cut(0, self.turns[message].stop, self.turns[message].start)
            if training is not None:
                views[View.TRAINING] = training
            branch = 0 if last is None else last.branch + (refusal is not None)
            comparisons = tuple(compare_views(views, self.renderer.tokenizer))
            production, rollout = views[View.PRODUCTION], views[View.ROLLOUT]
            last = Step(index, message, production, rollout, training, refusal, branch, comparisons)
            yield last

    def _prompt(self, renderer: Renderer, at: int) -> RenderedTokens:
        try:
            return renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt that asks for message {at}")
            raise

    def _start(self, at: int, production: ViewTokens) -> ViewTokens:
        """Start a stream with the prompt of the renderer, or with production's."""
        if self.renderer is not self.shipped:
            return self._tokens(self._prompt(self.renderer, at), at)
        return production

    def _continue(self, last: Step | None, at: int, production: ViewTokens) -> ViewTokens | BridgeRefusal:
        """Continue the stream of the step before up to the prompt for message `at`."""
        if last is None or last.message is None:
            return production
        stream, message = last.rollout, last.message
        if len(stream) == stream.prompt:
            return BridgeRefusal(RefusalReason.NO_TURN_END, f"the template shows no turn for message {message}")
        bridged = self.renderer.bridge(
            stream.ids[: stream.prompt],
            stream.ids[stream.prompt :],
            self.messages[message + 1 : at],
            tools=self.tools,
            messages=self.messages[:message],
        )
        for note in getattr(bridged, "notes", ()):
            self._note(f"rollout, counted from message {message + 1}: {note}")
        if isinstance(bridged, BridgeRefusal):
            return bridged
        return stream.followed_by(self._bridged(bridged, production, message + 1))

    def _turn(self, message: int | None, prefill: Ids) -> ViewTokens:
        """Return what is sampled for a message: its turn as the last one, after the prompt that asks for it."""
        nothing = ViewTokens.of([], -1, "")
        if message is None:
            return nothing
        rendered = self.row
        if message + 1 < len(self.messages):
            rendered = self.renderer.render(self.messages[: message + 1], tools=self.tools)
        turn = next((turn for turn in rendered.turns if turn.message == message), None)
        if turn is None:
            return nothing
        tokens = self._after_prompt(rendered, turn, prefill)
        closed = self.turns.get(message)
        if turn.stop_token is None and closed is not None and closed.stop_token is not None:
            # The head of the next turn ends this one, and the model samples it.
            return tokens.followed_by(ViewTokens.of([closed.stop_token], message, "scaffold"))
        return tokens

    def _after_prompt(self, rendered: RenderedTokens, turn: SampledTurn, prefill: Ids) -> ViewTokens:
        """Return the turn's tokens after the prompt. A token that spans the end of the prompt is encoded in two."""
        start, same = turn.start, len(prefill)
        while same > start or not np.array_equal(rendered.ids[start - same : start], prefill[:same]):
            same -= 1
        tokens = self._tokens(rendered, -1).cut(start, turn.stop)
        if same == len(prefill):
            return tokens
        decode = self.renderer.tokenizer.decode
        missing = decode(prefill[same:].tolist())
        for count in range(1, min(4, len(tokens)) + 1):
            text = decode(tokens.ids[:count].tolist())
            if len(text) > len(missing) and text.startswith(missing) and same:
                ids = self.renderer.tokenizer.encode_plain(text[len(missing) :])
                first = ViewTokens.of(ids, turn.message, tokens.fields[count - 1])
                return first.followed_by(tokens.cut(count, len(tokens)))
        self._note(
            f"message {turn.message}: its turn does not begin with the prompt that asks for it, "
            f"{decode(prefill.tolist())!r}; the rollout holds both, one after the other"
        )
        return tokens

    def _tokens(self, rendered: RenderedTokens, at: int) -> ViewTokens:
        """Return the tokens of a rendering. Its generation prompt belongs to message `at`, if there is one."""
        fields, messages = np.array(rendered.fields, np.object_), rendered.messages
        if 0 <= at < len(self.messages):
            messages = np.where(fields == "generation_prompt", np.int32(at), messages)
        return ViewTokens(rendered.ids, messages, fields, len(fields))

    def _bridged(self, bridged: BridgedTokens, production: ViewTokens, first_new: int) -> ViewTokens:
        """Return the tokens of a bridge. Their fields come from the shipped rendering of the same ids."""
        messages = np.where(bridged.messages >= 0, bridged.messages + first_new, -1).astype(np.int32)
        fields = np.full(len(messages), "scaffold", np.object_)
        fields[bridged.kinds == Kind.CONTEXT] = "text"
        fields[bridged.kinds == Kind.SYNTHETIC] = "synthetic_close"
        same = common_suffix(bridged.new_ids, production.ids)
        if same:
            owners, bridge_owners = production.messages[-same:], messages[-same:]
            agreed = (bridge_owners == owners) | (bridge_owners < 0)
            fields[-same:] = np.where(agreed, production.fields[-same:], fields[-same:])
            messages[-same:] = np.where(agreed, owners, bridge_owners)
        return ViewTokens(bridged.new_ids, messages, fields)

    def _note(self, note: str) -> None:
        self.notes[note] = None


def _shipped(renderer: Renderer) -> Renderer:
    """Return the renderer without additions to the template; itself if it has none."""
    return renderer if renderer.past is Past.INFERENCE else renderer.with_past(Past.TEMPLATE)
