"""Where the three histories of one conversation differ.

*Production* is what the shipped template shows at each turn, *rollout* the append-only stream,
bridged turn by turn, and *training* one row over the whole conversation.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.messages import REASONING_FIELDS
from ..errors import TokentraceError
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..show.alignment import Hunk, align
from ..show.document import Cell, Contrast, Document, Table, Track, token_columns
from ..show.results import hue_of, rendering_track, template_name
from ..show.terminal import plain_view
from ..show.visible import counted, listed
from ..showing import ShowsItself
from ..study.seams import BridgeRefusal, RefusalReason
from ..tokens.ids import common_suffix
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids
from .message_keys import call_ids

_SCAFFOLD = ("scaffold", "generation prompt")
_NAMES = {
    "tool_calls": "tool calls",
    "generation_prompt": "generation prompt",
    "role": "scaffold",
    **dict.fromkeys(REASONING_FIELDS, "reasoning"),
}
_SHORT = 40
_COLUMNS = [("ids", np.int32), ("messages", np.int32), ("fields", np.object_)]
Rows = npt.NDArray[np.void]
"""Tokens, with the columns ``ids``, ``messages`` (-1 for none) and ``fields``."""


def token_rows(ids: Any, messages: Any = -1, fields: Any = "scaffold") -> Rows:
    """Make rows from columns; a single message or field applies to all."""
    rows = np.empty(len(ids), _COLUMNS)
    rows["ids"], rows["messages"], rows["fields"] = ids, messages, fields
    return rows


class View(StrEnum):
    """An API's engine, the policy in a rollout, or the trainer."""

    PRODUCTION = "production"
    ROLLOUT = "rollout"
    TRAINING = "training"


PAIRS = tuple(itertools.combinations(View, 2))


class ViewTokens(NamedTuple):
    """The tokens of one view: a prompt of `prompt` tokens, then the turn."""

    rows: Rows
    prompt: int

    @property
    def ids(self) -> Ids:
        return self.rows["ids"]

    def differing(self, other: ViewTokens) -> Iterator[Hunk]:
        """Yield what differs: by message, then in the turn."""
        starts, other_starts = (
            dict(zip(*np.unique(side.rows["messages"][: side.prompt], return_index=True), strict=True))
            for side in (self, other)
        )
        cuts = [(0, 0)]
        for at, message in sorted((int(at), message) for message, at in starts.items() if message >= 0):
            last, other_last = cuts[-1]
            there = int(other_starts.get(message, -1))
            if at > last and there > other_last and self.ids[at] == other.ids[there]:
                cuts.append((at, there))
        cuts += [(self.prompt, other.prompt), (len(self.ids), len(other.ids))]
        for (start, other_start), (stop, other_stop) in itertools.pairwise(cuts):
            for hunk in align(self.ids[start:stop], other.ids[other_start:other_stop]):
                yield hunk.moved(start, other_start)


@dataclass(frozen=True, slots=True)
class Step:
    """The views up to the end of a turn. `refusal`: why it starts a `branch`."""

    index: int
    message: int | None
    views: Mapping[View, ViewTokens]
    refusal: BridgeRefusal | None
    branch: int
    differences: Mapping[tuple[View, View], Sequence[Hunk]]

    @property
    def rollout(self) -> ViewTokens:
        return self.views[View.ROLLOUT]

    @property
    def equal(self) -> bool:
        return View.TRAINING in self.views and not any(self.differences.values())

    @property
    def place(self) -> str:
        return "the turn to come" if self.message is None else f"message {self.message}"

    def compare(self, left: View | str, right: View | str) -> Sequence[Hunk] | None:
        """Where the ids of two views differ; None if one lacks the turn."""
        pair = View(left), View(right)
        if (swapped := self.differences.get(pair[::-1])) is not None:
            return [Hunk(*one[2:], *one[:2]) for one in swapped]
        return self.differences.get(pair)


@dataclass(frozen=True, slots=True)
class HistoryFinding:
    """At `steps`, `views` drop, add or change (`verb`) text of the rollout's `messages`.

    `tokens` counts each message once. `in_turn`: not in the prompt. `texts`: theirs and the
    rollout's, if short.
    """

    views: tuple[View, ...]
    verb: str
    what: str
    messages: tuple[int, ...]
    tokens: int
    steps: tuple[int, ...]
    in_turn: bool
    texts: tuple[str, str] | None

    def __str__(self) -> str:
        verb = self.verb if len(self.views) == 1 else self.verb.removesuffix("s")
        where = " in the turn itself" if self.in_turn else ""
        how = "{!r} instead of {!r}, ".format(*self.texts) if self.texts else ""
        numbers = [number for number in self.messages if number >= 0]
        of = f" of message{'s' * (len(numbers) > 1)} {listed(numbers)}" if numbers else ""
        if len(numbers) > 8:
            of = f" of {len(numbers)} messages ({numbers[0]} to {numbers[-1]})"
        who = listed(self.views).capitalize()
        return f"{who} {verb} the {self.what}{of}{where}: {how}{counted(self.tokens)}."


class _Change(NamedTuple):
    view: int
    rollout: int
    texts: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, eq=False)
class HistoryReport(ShowsItself):
    """Where histories differ, step by step. `row` is the training row."""

    steps: tuple[Step, ...]
    row: RenderedTokens
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if all agree at every step, and the rollout never breaks."""
        return all(step.equal and step.refusal is None for step in self.steps)

    @property
    def branches(self) -> tuple[Ids, ...]:
        """The streams of the rollout: one, and one more for every break."""
        return tuple({step.branch: step.rollout.ids for step in self.steps}.values())

    @property
    def breaks(self) -> list[Step]:
        return [step for step in self.steps if step.refusal is not None]

    def differing(self, left: View | str, right: View | str) -> list[Step]:
        return [step for step in self.steps if step.compare(left, right) != []]

    @property
    def findings(self) -> tuple[HistoryFinding, ...]:
        """The differences from the rollout, by kind."""
        groups = defaultdict[Any, list[tuple[int, int, _Change]]](list)
        for step in self.steps:
            views = defaultdict[Any, tuple[View, ...]](tuple)
            for view in (View.PRODUCTION, View.TRAINING):
                for one in self._changes(step, view):
                    views[one] += (view,)
            for (message, what, in_turn, change), who in views.items():
                verb = "drops" if not change.view else "changes" if change.rollout else "adds"
                groups[who, verb, what, in_turn].append((step.index, message, change))
        findings = []
        for (views, verb, what, in_turn), group in groups.items():
            tokens = Counter[int]()
            for _, message, change in group:
                tokens[message] = max(tokens[message], change.rollout or change.view)
            pairs = {pair for *_, change in group for pair in change.texts}
            is_short = len(pairs) == 1 and verb == "changes" and max(map(len, *pairs)) <= _SHORT
            messages, steps = tuple(sorted(tokens)), tuple(sorted({step for step, *_ in group}))
            texts = pairs.pop() if is_short else None
            finding = HistoryFinding(views, verb, what, messages, tokens.total(), steps, in_turn, texts)
            findings.append(finding)
        findings.sort(key=lambda one: (View.PRODUCTION not in one.views, one.in_turn, one.steps))
        return tuple(findings)

    def _changes(self, step: Step, view: View) -> Iterator[tuple[int, str, bool, _Change]]:
        """Yield the changed fields. Scaffold counts toward its hunk's field."""
        ours, theirs, texts = Counter[Any](), Counter[Any](), defaultdict[Any, set[tuple[str, str]]](set)
        for hunk in step.compare(view, View.ROLLOUT) or ():
            sides = hunk.sides(step.views[view].rows, step.rollout.rows)
            in_turn = hunk.start >= step.views[view].prompt and hunk.other_start >= step.rollout.prompt
            here, there = map(_sizes, sides)
            total = here + there
            fields = [key for key in total if key[1] not in _SCAFFOLD]
            main = max(fields or total, key=total.__getitem__)
            for key in total:
                place = *(key if key in fields else main), in_turn
                ours[place] += here[key]
                theirs[place] += there[key]
            one, other = (self.row.tokenizer.decode(side["ids"]) for side in sides)
            texts[*main, in_turn].add((one, other))
        for place in ours:
            yield *place, _Change(ours[place], theirs[place], frozenset(texts[place]))

    @property
    def summary(self) -> str:
        """The conclusions, one sentence per line."""
        if not self.steps:
            return "There is no turn to compare: the model is never asked for one."
        lines = [*map(str, self.findings)]
        for step in self.steps:
            if step.refusal is not None:
                lines.append(f"The rollout breaks at {step.place}: {step.refusal}.")
            if View.TRAINING not in step.views:
                lines.append(f"The training row holds no turn for {step.place}.")
        where = f"all {len(self.steps)} steps" if len(self.steps) > 1 else "the only step"
        end = f"{len(self.steps[-1].rollout.ids):,} at the end"
        same = f"Production, rollout and training hold the same tokens at {where}: {end}."
        return "\n".join(lines) or same

    def to_json(self) -> dict[str, Any]:
        """A step's rollout and training are prefixes of its branch and the row."""
        return {
            "equal": self.equal,
            "summary": self.summary.split("\n"),
            "branches": [ids.tolist() for ids in self.branches],
            "row": self.row.token_ids,
            "steps": [*map(self._step_json, self.steps)],
            "findings": [asdict(one) | {"text": str(one)} for one in self.findings],
            "notes": self.notes,
        }

    def _step_json(self, step: Step) -> dict[str, Any]:
        differences = []
        for pair, hunks in step.differences.items():
            for hunk in hunks:
                sides = hunk.sides(*(step.views[view].ids for view in pair))
                ids, texts = [side.tolist() for side in sides], [*map(self.row.tokenizer.decode, sides)]
                differences.append({"views": pair, **hunk._asdict(), "ids": ids, "texts": texts})
        return {
            **{"step": step.index, "message": step.message, "equal": step.equal, "branch": step.branch},
            "break": None if step.refusal is None else asdict(step.refusal),
            "tokens": {view: len(tokens.ids) for view, tokens in step.views.items()},
            "differences": differences,
        }

    def document(self, _: Any = None) -> Document:
        last = {step.branch: step.rollout.rows for step in self.steps}
        streams = {
            at: self._track("rollout" + f", stream {at}" * bool(at), rows) for at, rows in last.items()
        }
        row = replace(rendering_track(self.row), name="training row")
        contrasts: list[Contrast] = []
        table: list[list[str | Cell]] = []
        for step in self.steps:
            links: dict[View, str] = {}
            for view in (View.PRODUCTION, View.TRAINING):
                if not (hunks := step.compare(View.ROLLOUT, view)):
                    continue
                parts = [step.views[view].rows[one.other_start : one.other_stop] for one in hunks]
                starts = itertools.accumulate(map(len, parts), initial=0)
                pairs = zip(hunks, starts, strict=False)
                hunks = [one.moved(0, start - one.other_start) for one, start in pairs]
                links[view] = f"diff={len(contrasts)}"
                sides = str(View.ROLLOUT), str(view)
                name = f"step {step.index}, {step.place}: rollout → {view}"
                base, other = streams[step.branch], self._track("", np.concatenate(parts))
                contrasts.append(Contrast(base, other, hunks, sides, name, stop=len(step.rollout.ids)))
            table.append(_table_row(step, links))
        head = ["step", "asks for", *map(str, View), *(f"{left} → {right}" for left, right in PAIRS), ""]
        return Document(
            "Histories",
            "tokentrace audit --on",
            template_name(self.row.tokenizer),
            summary=self.summary.split("\n"),
            notes=self.notes,
            tables=[Table("Steps", head, table, words=2)] if table else [],
            tracks=[*streams.values(), row],
            contrasts=contrasts,
        )

    def _track(self, name: str, rows: Rows) -> Track:
        ids, messages, fields = (rows[key] for key, _ in _COLUMNS)
        owners = zip(messages, fields, strict=True)
        hues = [hue_of(self.row.role(message), path) for message, path in owners]
        columns = token_columns(self.row.tokenizer, ids)
        roles = [str(message["role"]) for message in self.row.conversation]
        return Track(name, ids, np.array(hues, np.uint8), messages, **columns, fields=fields, roles=roles)

    def __str__(self) -> str:
        return plain_view(self)


def _table_row(step: Step, links: dict[View, str]) -> list[str | Cell]:
    row: list[str | Cell] = [str(step.index), step.place]
    row += [f"{len(step.views[view].ids):,}" if view in step.views else "none" for view in View]
    for pair in PAIRS:
        hunks = step.compare(*pair)
        removed, added = (sum(one[at + 1] - one[at] for one in hunks or ()) for at in (0, 2))
        words = "?" if hunks is None else f"−{removed:,} +{added:,}"
        link = "".join(links.get(view, "") for view in pair) if View.ROLLOUT in pair else ""
        row.append(Cell("=", "dim") if hunks == [] else Cell(words, "bad", link=link))
    return [*row, Cell("" if step.refusal is None else f"break: {step.refusal.reason}", "poor")]


def _sizes(rows: Rows) -> Counter[tuple[int, str]]:
    names = (path.split(".", maxsplit=1)[0] for path in rows["fields"])
    return Counter(zip(rows["messages"].tolist(), (_NAMES.get(name, name) for name in names), strict=True))


def compare_histories(renderer: Renderer, messages: Any, *, tools: Any = None) -> HistoryReport:
    """Compare production, rollout and training of a conversation, token by token.

    A step is an assistant turn, or the turn to come. Every assistant message counts as sampled,
    with the ids that its turn has as the last one. Raises what `render` raises.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> print(compare_histories(create_renderer(POCKET), chat).summary)
    Production, rollout and training hold the same tokens at the only step: 14 at the end.
    """
    walk = _Walk(renderer.silent(), messages, tools)
    steps = tuple(walk.steps())
    return HistoryReport(steps, walk.row, tuple(dict.fromkeys(walk.notes)))


class _Walk:
    def __init__(self, renderer: Renderer, messages: Any, tools: Any) -> None:
        self.renderer, self.tools = renderer, tools
        shipped = renderer.past in (Past.INFERENCE, Past.TEMPLATE)
        self.shipped = renderer if shipped else replace(renderer, past=Past.TEMPLATE)
        self.row = renderer.render(messages, tools=tools)  # raises for anything but a conversation
        self.messages = list(messages)
        roles = [self.row.role(at) for at in range(len(self.messages))]
        self.targets: list[int | None] = [at for at, role in enumerate(roles) if role == "assistant"]
        if roles[-1] != "assistant":
            self.row = renderer.render(messages, tools=tools, add_generation_prompt=True)
            self.targets.append(None)
        self.turns = {turn.message: turn for turn in reversed(self.row.turns)}
        self.notes = [f"training row: {note}" for note in self.row.notes]
        if self.targets[0] == 0:
            self.targets.pop(0)
            self.notes.append("message 0: nothing comes before it, so it does not count as sampled")

    def steps(self) -> Iterator[Step]:
        row = self._rows(self.row, len(self.messages))
        branch, last, stream = 0, 0, ViewTokens(row[:0], 0)
        for index, message in enumerate(self.targets):
            at = len(self.messages) if message is None else message
            prompt, refusal = self._prompt(self.shipped, at), None
            before = self._continued(stream, last, at, prompt) if index else self._prompt(self.renderer, at)
            if isinstance(before, BridgeRefusal):
                refusal, before, branch = before, self._prompt(self.renderer, at), branch + 1
            turn = self._turn(message, prompt["ids"][prompt["fields"] == "generation_prompt"])
            stream = ViewTokens(np.concatenate([before, turn]), len(before))
            production = ViewTokens(np.concatenate([prompt, turn]), len(prompt))
            views = {View.PRODUCTION: production, View.ROLLOUT: stream}
            if message is None:
                views[View.TRAINING] = ViewTokens(row, len(row))
            elif (trained := self.turns.get(message)) is not None:
                views[View.TRAINING] = ViewTokens(row[: trained.stop], trained.start)
            pairs = itertools.combinations(views.items(), 2)
            differences = {(one, other): [*left.differing(right)] for (one, left), (other, right) in pairs}
            yield Step(index, message, views, refusal, branch, differences)
            last = at

    def _prompt(self, renderer: Renderer, at: int) -> Rows:
        try:
            rendered = renderer.render(self.messages[:at], tools=self.tools, add_generation_prompt=True)
        except TokentraceError as error:
            error.add_note(f"while rendering the prompt for message {at}")
            raise
        return self._rows(rendered, at)

    def _continued(self, stream: ViewTokens, last: int, at: int, production: Rows) -> Rows | BridgeRefusal:
        prompt, completion = stream.ids[: stream.prompt], stream.ids[stream.prompt :]
        if not len(completion):
            problem = f"the template writes no turn for message {last}"
            return BridgeRefusal(RefusalReason.NO_TURN_END, problem)
        new, before = self.messages[last + 1 : at], self.messages[:last]
        ids = call_ids(self.messages[last])
        bridge = partial(self.renderer.bridge, tools=self.tools, messages=before, call_ids=ids)
        bridged = bridge(prompt, completion, new)
        if isinstance(bridged, BridgeRefusal):
            return bridged
        self.notes += [f"rollout (its message 0 is message {last + 1}): {note}" for note in bridged.notes]
        rows = token_rows(bridged.new_ids, np.where(bridged.messages >= 0, bridged.messages + last + 1, -1))
        rows["fields"][bridged.kinds == Kind.CONTEXT] = "text"
        rows["fields"][bridged.kinds == Kind.SYNTHETIC] = "synthetic_close"
        if same := common_suffix(rows["ids"], production["ids"]):  # the shipped rendering names the fields
            owners, tail = production["messages"][-same:], rows["messages"][-same:]
            rows[-same:] = np.where((tail == owners) | (tail < 0), production[-same:], rows[-same:])
        return np.concatenate([stream.rows, rows])

    def _turn(self, message: int | None, prefill: Ids) -> Rows:
        """A message's sampled tokens, as if it were the last."""
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
            # the model samples the head of the next turn, which ends this one
            return np.concatenate([rows, token_rows([closed.stop_token], turn.message)])
        return rows

    def _after_prompt(self, message: int, turn: Rows, before: Ids, prefill: Ids) -> Rows:
        """Drop the prompt, which a token may span."""
        sizes = range(min(len(prefill), len(before)), 0, -1)
        same = next((size for size in sizes if np.array_equal(before[-size:], prefill[:size])), 0)
        if same == len(prefill):
            return turn
        tokenizer = self.renderer.tokenizer
        missing = tokenizer.decode(prefill[same:])
        for count in range(1, min(4, len(turn)) + 1):
            text = tokenizer.decode(turn["ids"][:count])
            if len(text) > len(missing) and text.startswith(missing) and same:
                ids = tokenizer.encode_plain(text[len(missing) :])
                first = token_rows(ids, message, turn["fields"][count - 1])
                return np.concatenate([first, turn[count:]])
        problem = f"its turn does not begin with its generation prompt, {tokenizer.decode(prefill)!r}"
        self.notes.append(f"message {message}: {problem}; the rollout has both, one after the other")
        return turn

    def _rows(self, rendered: RenderedTokens, at: int) -> Rows:
        """A rendering's tokens; its prompt belongs to `at`."""
        rows = token_rows(rendered.ids, rendered.messages, rendered.fields)
        if 0 <= at < len(self.messages):
            rows["messages"][rows["fields"] == "generation_prompt"] = at
        return rows
