"""Supervised samples: conversations to rows with an exact loss mask, in one render."""

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ..conversation.messages import REASONING_FIELDS, ROLES, Messages
from ..errors import SampleError, TokentraceError, brief, kind_of
from ..parsing.response import PartKind
from ..rendering.past import Past
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..settings import choose, flag, instance, items, whole
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.ids import runs
from ..tokens.kinds import Kind, Part
from ..tokens.table import Deferred, TokenTable, join
from .pasts import PastTurns, Remark, listed, turn_starts
from .sample import Sample

FLAGS = ("train", "weight")  # keys of a message that say whether it carries loss
TRAINED_PARTS = (Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP)
TRAINED_ROLES = ("assistant",)
ROW_PASTS = (Past.TEMPLATE, Past.PRESERVE, Past.EXPAND)
NO_STOP = "the template writes no stop token here, so the row does not teach to stop after such a turn"
Columns = dict[str, npt.NDArray[Any]]
_FIXED = frozenset({str, bool, type(None)})
_ALL_PARTS, _ALL_ROLES = frozenset(TRAINED_PARTS), frozenset(TRAINED_ROLES)
_BY_NAME = {part.name.lower(): part for part in TRAINED_PARTS}


class Turns(StrEnum):
    """Which assistant turns carry loss."""

    ALL = "all"
    LAST = "last"
    FLAGGED = "flagged"
    """All but messages with ``"train": false`` or ``"weight": 0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """The settings of `build_supervised_sample`."""

    turns: str = Turns.ALL
    parts: Collection[Part | str] = TRAINED_PARTS
    roles: Collection[str] = TRAINED_ROLES
    past: str | None = None
    final_stop: bool = False

    def __post_init__(self) -> None:
        names, roles = _listed("parts", self.parts), _listed("roles", self.roles)
        if not all(isinstance(role, str) for role in roles):
            raise SampleError(f"roles must be a list of strings, not {brief(roles)}")
        past = None if self.past is None else choose(Past, "past", self.past)
        if past not in (None, *ROW_PASTS):
            choices = ", ".join(ROW_PASTS)
            raise SampleError(f"past of rows must be one of {choices}; set past={past!s} on the renderer")
        checked = {
            "turns": choose(Turns, "turns", self.turns),
            "parts": frozenset(map(_part, names)),
            "roles": frozenset(roles),
            "past": past,
            "final_stop": flag("final_stop", self.final_stop, SampleError),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def described(self) -> dict[str, Any]:
        """The settings as JSON values; ``SampleSettings(**described)`` restores them."""
        return {
            "turns": str(self.turns),
            "parts": sorted(_part(part).name.lower() for part in self.parts),
            "roles": sorted(self.roles),
            "past": self.past and str(self.past),
            "final_stop": self.final_stop,
        }


def _listed(name: str, value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else items(name, value, SampleError)


def _part(name: Any) -> Part:
    part = name if isinstance(name, Part) else _BY_NAME.get(name) if isinstance(name, str) else None
    if part not in TRAINED_PARTS:
        raise SampleError(f"parts must be some of {', '.join(map(repr, _BY_NAME))}, not {brief(name)}")
    return part


def build_supervised_sample(
    renderer: Renderer,
    messages: Any,
    *,
    tools: Any = None,
    turns: str = "all",
    parts: Collection[Any] = TRAINED_PARTS,
    roles: Collection[str] = TRAINED_ROLES,
    past: str | None = None,
    final_stop: bool = False,
    since: int = 0,
) -> Sample:
    """A conversation as one row: ids, mask, labels and each token's origin, in one render.

    - `turns`: which assistant turns carry loss, from message `since` on: ``"all"``, ``"last"``,
      or ``"flagged"`` (all but those with ``"train": false`` or ``"weight": 0``).
    - `parts`: which of their ``"reasoning"``, ``"content"``, ``"tool_calls"`` (with
      delimiters), ``"stop"`` do.
    - `roles`: whose messages do. For roles other than the assistant, only the text carries
      loss.
    - `past`: ``"template"`` or ``"preserve"`` (all reasoning kept); see `Past`. By default the
      renderer's, with a `HistoryWarning` if that trains turns in a form that inference never
      shows.
    - `final_stop`: add the token that the model ends the last turn with, if the template leaves
      it out.

    Raises what `render` raises, and SampleError for unknown settings.

    >>> from tokentrace import create_renderer
    >>> from tokentrace.pocket import POCKET
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> renderer = create_renderer(POCKET)
    >>> sample = build_supervised_sample(renderer, messages)
    >>> renderer.tokenizer.decode(sample.ids[sample.mask])
    '4<|end|>'
    >>> ids, mask = sample
    """
    if isinstance(past, str) and past == Past.EXPAND:
        raise SampleError("past='expand' makes several rows: call build_supervised_samples")
    settings = {"turns": turns, "parts": parts, "roles": roles, "past": past, "final_stop": final_stop}
    return _built(renderer, settings, messages, tools, since)[0]


def build_supervised_samples(
    renderer: Renderer, messages: Any, *, tools: Any = None, since: int = 0, **settings: Any
) -> list[Sample]:
    """Like `build_supervised_sample`, but `past` may be ``"expand"``, which makes as many rows as needed.

    Each assistant turn is trained once, in a row that shows what the model would have seen. A row
    goes on while the next turn's history is the row so far.
    """
    return _built(renderer, settings, messages, tools, since)


def _built(
    renderer: Renderer, settings: dict[str, Any], messages: Any, tools: Any, since: int
) -> list[Sample]:
    """Build rows, and warn the caller once of each kind."""
    instance("renderer", renderer, Renderer, SampleError)
    values = [
        value for value in settings.values() if value is not TRAINED_PARTS and value is not TRAINED_ROLES
    ]
    is_fixed = _FIXED.issuperset(map(type, values))  # nobody can change them, and equal ones mean the same
    check = functools.partial(SampleSettings, **settings)
    checked = renderer.cache.once(tuple(settings.items()), check) if is_fixed else check()
    builder = renderer.cache.once(checked, lambda: SampleBuilder(renderer, checked))
    samples = builder.build(messages, tools, since, keep=False)
    first = {
        type(warning): warning for sample in reversed(samples) for warning in reversed(sample.warnings)
    }
    for warning in first.values():
        warnings.warn(warning, stacklevel=3)
    return samples


def build_prompt_response_sample(
    renderer: Renderer, prompt: Any, response: str, *, tools: Any = None, eos: str | None = None
) -> Sample:
    """A row of one turn: the prompt, the response, the end-of-sequence token; loss on the last two.

    `prompt` is a list of messages, rendered with a generation prompt, or a string. Prompt and
    response are encoded separately, as at inference. `eos` is the tokenizer's by default; a
    note says if the template ends turns with another token.
    """
    tokenizer = renderer.tokenizer
    if not isinstance(response, str):
        raise SampleError(f"the response must be a string, not {kind_of(response)}")
    end = tokenizer.variables.get("eos_token") if eos is None else instance("eos", eos, str, SampleError)
    end_id = tokenizer.token_id(end) if end else None
    if end_id is None:
        name = tokenizer.name or "the tokenizer"
        raise SampleError(f"{end!r} is not a control token of {name}; name one with eos=")
    notes: list[str] = []
    if isinstance(prompt, str):
        head, count = TokenTable.of(tokenizer.encode(prompt), Kind.CONTEXT, 0), 1
    else:
        rendered = renderer.render(prompt, tools=tools, add_generation_prompt=True)
        kinds = part_columns(renderer, rendered)["kinds"]
        head, count = TokenTable.of(rendered.ids, kinds, rendered.messages), len(prompt)
        notes += rendered.notes
    stops = renderer.turn_stop_ids()
    if stops and end_id not in stops:
        names = ", ".join(repr(tokenizer.decode([index])) for index in sorted(stops))
        notes.append(f"the row ends in {end!r}, but the template ends turns with {names}")
    text = Rendering.of([(response, 0, Origin.of(0, "content"))])  # it may have no control tokens of turns
    ids = renderer.encode_text(text, [{"role": "assistant", "content": response}], tools=tools).ids
    body = np.append(ids, np.int32(end_id)).astype(np.int32)
    parts = np.full(len(head) + len(body), Part.CONTENT, np.uint8)
    parts[: len(head)], parts[-1] = Part.SCAFFOLD, Part.STOP
    columns = join([head, TokenTable.of(body, Kind.SAMPLED, count)]).columns()
    columns["mask"] = np.arange(len(parts)) >= len(head)
    return Sample(**columns, parts=parts, notes=tuple(notes))


class SampleBuilder:
    def __init__(self, renderer: Renderer, settings: SampleSettings | None = None) -> None:
        self.settings = settings or SampleSettings()
        is_preserved = self.settings.past is Past.PRESERVE
        self.renderer = replace(renderer, past=Past.PRESERVE) if is_preserved else renderer
        self._pasts = PastTurns(self.renderer)

    def build(self, messages: Any, tools: Any = None, since: int = 0, *, keep: bool = True) -> list[Sample]:
        """The rows of one conversation, several if it is expanded. With `keep`, they keep their rendering."""
        since = whole("since", since, least=0, error=SampleError)
        expands, is_flagged = self.settings.past is Past.EXPAND, self.settings.turns is Turns.FLAGGED
        if expands or is_flagged:
            messages = self.renderer.check_messages(messages, tools=tools)
            chosen, notes = self._chosen(messages, since)
        if is_flagged:
            messages = [{key: value for key, value in row.items() if key not in FLAGS} for row in messages]
        if expands:
            return self._expanded(messages, tools, chosen, notes, keep)
        rendered = self.renderer.render(messages, tools=tools)
        checked = rendered.conversation
        if not is_flagged:
            chosen, notes = self._chosen(checked, since)
        remarks = self._pasts.remarks(
            rendered, checked, tools, chosen, of_history=self.settings.past is None
        )
        return [self._sample(rendered, checked, tools, chosen, [*notes, *remarks], keep)]

    def _chosen(self, messages: Messages, since: int) -> tuple[list[int], list[str]]:
        if since > len(messages):
            raise SampleError(f"since is {since}, but the conversation has {len(messages)} messages")
        unusual = self.settings.roles - ROLES  # type: ignore[operator]
        if unusual and (unknown := sorted(unusual.difference(row["role"] for row in messages))):
            raise SampleError(f"roles names {unknown[0]!r}, no usual role and none of this conversation")
        chosen = [
            at for at, row in enumerate(messages) if row["role"] in self.settings.roles and at >= since
        ]
        replies = [at for at in chosen if messages[at]["role"] == "assistant"]
        flagged = [at for at in chosen if not messages[at].keys().isdisjoint(FLAGS)]
        off = [at for at in flagged if _flag(at, messages[at]) is False]
        if self.settings.turns is Turns.FLAGGED:
            return [at for at in chosen if at not in off], []
        if self.settings.turns is Turns.LAST:
            return [at for at in chosen if at not in replies[:-1]], []
        off = [at for at in off if at in replies]
        note = f"{listed(off)}: flagged not to be trained, but trained: use turns='flagged'"
        return chosen, [note] if off else []

    def _expanded(
        self, messages: Messages, tools: Any, chosen: list[int], notes: list[str], keep: bool
    ) -> list[Sample]:
        """The fewest rows that show each chosen turn after the history of its prompt."""
        rows: list[tuple[RenderedTokens, list[int]]] = []
        for at in chosen:
            if messages[at]["role"] != "assistant":
                continue
            rendered = self.renderer.render_turn(messages[: at + 1], tools=tools)
            turns = [at]
            if rows:  # does it begin with the row before it, up to the end of its last trained turn?
                before, trained = rows[-1]
                stops = (turn.stop for turn in before.turns if turn.message == trained[-1])
                stop = max(stops, default=len(before.ids))
                if np.array_equal(rendered.ids[:stop], before.ids[:stop]):
                    turns = [*rows.pop()[1], at]
            rows.append((rendered, turns))
        if not rows:
            rows = [(self.renderer.render(messages, tools=tools), [])]
        late = [at for at in chosen if rows[-1][1] and at > rows[-1][1][-1]]
        notes = [*notes, f"{listed(late)}: after the last trained answer, so in no row"] if late else notes
        samples, previous = [], -1
        for rendered, turns in rows:
            last = turns[-1] if turns else len(messages) - 1
            texts = [at for at in chosen if previous < at <= last and messages[at]["role"] != "assistant"]
            remarks: list[Remark] = [*notes, *turn_starts(rendered, turns)]
            samples.append(self._sample(rendered, messages, tools, sorted([*turns, *texts]), remarks, keep))
            previous = last
        return samples

    def _sample(
        self,
        rendered: RenderedTokens,
        messages: Messages,
        tools: Any,
        chosen: list[int],
        remarks: Sequence[Remark],
        keep: bool,
    ) -> Sample:
        notes = [*map(str, remarks), *(() if chosen else ("nothing carries loss: no turn is chosen",))]
        stop = None
        unstopped = [turn for turn in rendered.turns if turn.stop_token is None and turn.message in chosen]
        # a turn may go on in the next message
        starts = {turn.start for turn in rendered.turns if unstopped}
        endless = [turn.message for turn in unstopped if turn.stop not in starts]
        last = rendered.turns[-1] if rendered.turns else None
        if last is not None and last in unstopped and last.stop == len(rendered.ids):
            is_last = last.message == len(messages) - 1
            if is_last or self.settings.past is Past.EXPAND:
                stop = self._stop_of(messages, last.message, tools)
            endless = [at for at in endless if stop is None or at != last.message]
            if stop is not None and is_last and not self.settings.final_stop:
                text = self.renderer.tokenizer.decode([stop])
                problem = (
                    f"ends without the token {text!r} that the model stops with: final_stop=True adds it"
                )
                notes.append(f"message {last.message}: {problem}")
                stop = None
        if endless and self.renderer.turn_stop_ids():
            notes.append(f"{listed([*dict.fromkeys(endless)])}: {NO_STOP}")
        columns: Any = functools.partial(part_columns, self.renderer, rendered, tools is not None)
        if self.settings.parts != _ALL_PARTS or self.settings.roles != _ALL_ROLES:
            columns = columns().copy  # the mask depends on them
        all_notes: Any = lambda: {"notes": (*rendered.notes, *notes)}  # noqa: E731
        sample = Sample(
            ids=rendered.ids,
            mask=self._mask(rendered, messages, columns, chosen),
            messages=columns,
            kinds=columns,
            parts=columns,
            notes=all_notes,
            warnings=tuple(one for one in remarks if isinstance(one, Warning)),
            rendered=rendered if keep else None,
        )
        if last is None or stop is None:
            return sample
        stop_table = TokenTable.of(np.array([stop], np.int32), Kind.SAMPLED, last.message)
        joined = join([TokenTable(**sample.columns()), stop_table])
        joined.mask[-1] = Part.STOP in self.settings.parts
        joined.columns()["parts"][-1] = Part.STOP
        return sample.replace(**joined.columns())

    def _mask(
        self, rendered: RenderedTokens, messages: Messages, columns: Deferred, chosen: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        parts, roles = self.settings.parts, [row["role"] for row in messages]
        is_all = parts == _ALL_PARTS and self.settings.roles == _ALL_ROLES
        if is_all and len(chosen) == roles.count("assistant"):
            return rendered.mask.copy()  # everything sampled
        picked = np.isin(rendered.messages, chosen)
        mask: npt.NDArray[np.bool_] = rendered.mask & picked
        if parts != _ALL_PARTS:
            names = {*parts, *([Part.OTHER] if Part.CONTENT in parts else [])}
            mask &= np.isin(columns()["parts"], [*names])
        if any(roles[at] != "assistant" for at in chosen):
            texts = np.isin(rendered.messages, [at for at in chosen if roles[at] != "assistant"])
            mask |= texts & (columns()["parts"] == Part.CONTENT) & ~rendered.mask
        return mask

    def _stop_of(self, messages: Messages, at: int, tools: Any) -> int | None:
        """The token that ends turn `at` before the next message or, failing that, before a made-up one.

        If expansion ends a row early, no other row trains how its last turn stopped.
        """
        following: dict[str, Any] = {"role": "user", "content": "and then?"}
        for call in (messages[at].get("tool_calls") or ())[:1]:
            name, call_id = (call.get("function") or call).get("name", ""), call.get("id")
            following = {"role": "tool", "name": name, "content": "result"}
            following |= {"tool_call_id": call_id} if call_id else {}
        candidates = (*messages[at + 1 : at + 2], following)
        stops = (self._pasts.stop_before(messages[: at + 1], one, tools) for one in candidates)
        return next((stop for stop in stops if stop is not None), None)


def _flag(at: int, message: Mapping[str, Any]) -> bool | None:
    for name in FLAGS:
        if getattr(value := message.get(name), "ndim", 0) == 0 and value in (0, 1):
            return bool(value)
        if value is not None:
            raise SampleError(f"message {at}, {name}: must be true or false (1 or 0), not {value!r}")
    return None


# what each token is, delimiters inside an assistant's turn included
_BY_FIELD = {
    "role": Part.SCAFFOLD,
    "content": Part.CONTENT,
    "tool_calls": Part.TOOL_CALLS,
    **dict.fromkeys(REASONING_FIELDS, Part.REASONING),
}
_BY_KIND = {
    **{PartKind.REASONING: Part.REASONING, PartKind.CONTENT: Part.CONTENT},
    **{PartKind.TOOL_CALL: Part.TOOL_CALLS, PartKind.STOP: Part.STOP},
}
_IS_FIELD = np.isin([*Part], (Part.CONTENT, Part.REASONING, Part.TOOL_CALLS))
_KIND_OF_PART = np.where(np.equal([*Part], Part.SCAFFOLD), Kind.SCAFFOLD, Kind.CONTEXT).astype(np.uint8)


def part_columns(renderer: Renderer, rendered: RenderedTokens, tools: bool = False) -> Columns:
    """Each token's message, `Part` and `Kind`. The parser labels scaffold inside sampled turns."""
    codes = [_field_part(origin) for origin in rendered.rendering.origins]
    parts = rendered.encoded.per_token(np.asarray(codes, np.uint8))
    kinds = _KIND_OF_PART.take(parts)
    kinds[rendered.mask] = Kind.SAMPLED
    for turn in rendered.turns:
        prompt, completion = rendered.ids[: turn.start], rendered.ids[turn.start : turn.stop]
        try:
            parsed = renderer.parse_response(completion, tools=[] if tools else None, prompt_ids=prompt)
        except TokentraceError:  # a template that refuses every turn has no grammar
            continue
        turn_parts = parts[turn.start : turn.stop]
        traced = turn_parts.copy()
        for kind, span in parsed.regions:
            turn_parts[slice(*span)] = _BY_KIND[kind]
        _restore_fields(turn_parts, traced)
        if turn.stop_token is not None and len(turn_parts):
            turn_parts[turn_parts == Part.STOP] = Part.CONTENT
            turn_parts[-1] = Part.STOP
    return {"messages": rendered.messages, "parts": parts, "kinds": kinds}


def _restore_fields(parsed: npt.NDArray[np.uint8], traced: npt.NDArray[np.uint8]) -> None:
    """Correct the part of field tokens that the parser misread, and of scaffold next to them.

    Text may spell a delimiter: ``<tool_call>`` in content opens no call.
    """
    is_field = _IS_FIELD.take(traced)
    if not (traced == Part.REASONING).any():  # else content has none
        is_field &= (traced != Part.CONTENT) | (parsed != Part.REASONING)
    misread = is_field & (parsed != traced)
    if not misread.any():
        return
    parsed[is_field] = traced[is_field]
    for start, stop in runs(~is_field):
        before, after = slice(max(0, start - 1), start), slice(stop, stop + 1)
        if misread[before].any() or misread[after].any():
            closed = [part for part in traced[before] if part != Part.CONTENT]
            parsed[start:stop] = [*closed, *traced[after], Part.CONTENT][0]


def _field_part(origin: Origin | None) -> Part:
    if origin is None:
        return Part.SCAFFOLD
    if origin.field is not None:
        return _BY_FIELD.get(origin.field, Part.OTHER)
    return Part.TOOLS if origin.source == "tools" else Part.OTHER
