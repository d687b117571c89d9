"""Documents of results. Reports have a method `document`."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import PurePath
from typing import Any

import numpy as np

from ..conversation.messages import REASONING_FIELDS
from ..errors import InputError, kind_of
from ..parsing.response import ParsedResponse, PartKind
from ..rendering.bridged import BridgedTokens
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..samples.pasts import listed
from ..samples.sample import CompletionSpan, Sample
from ..samples.trajectories import owned_turns
from ..study.sampling import SampledTurn
from ..study.turns import common_prefix
from ..tokens.ids import common_prefix as common_ids
from ..tokens.kinds import Part
from ..tokens.tokenizer import Ids, Tokenizer
from ..trajectory.storage import Loaded
from ..trajectory.trajectory import Trajectory
from .alignment import Hunk, align
from .document import (
    HUES,
    KIND_HUES,
    Card,
    Cell,
    Contrast,
    Document,
    Edit,
    Table,
    Track,
    token_columns,
)
from .visible import counted, visible

_LEAD = 240  # longer metadata is shown as a table
_AROUND = 12  # equal tokens on either side of a difference
_LIMIT = 256  # tokens per side of a difference
_PART_HUES = {
    PartKind.REASONING: "reasoning",
    PartKind.CONTENT: "assistant",
    PartKind.TOOL_CALL: "calls",
}
_ROLE_HUES = {
    "assistant": "assistant",
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython"), "result"),
}
_FIELD_HUES = {
    **{"generation_prompt": "generation", "tool_calls": "calls", "tools": "tools", "kwargs": "variables"},
    **dict.fromkeys(("scaffold", "synthetic_close", "role"), "scaffold"),
    **dict.fromkeys(("unknown", ""), "unknown"),
    **dict.fromkeys(REASONING_FIELDS, "reasoning"),
}


def document_of(
    value: Any, other: Any = None, *, tokenizer: Tokenizer | Renderer | None = None, title: str = ""
) -> Document:
    """The document of a result; with `other`, of two results side by side, aligned by token.

    `tokenizer` has the texts of tokens that the result does not carry; without it, ids are shown.
    Raises InputError for a value that is not a result.
    """
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, Renderer) else tokenizer
    document = _document(value, tokenizer) if other is None else _side_by_side(value, other, tokenizer)
    template = document.template or (template_name(tokenizer) if tokenizer is not None else "")
    return replace(document, title=title or document.title, template=template)


def template_name(tokenizer: Tokenizer) -> str:
    return PurePath(tokenizer.name).name


def hue_of(role: str | None, field: str) -> int:
    """The hue of a token by its field, or by its message's role."""
    name = _FIELD_HUES.get(field.split(".", maxsplit=1)[0])
    return HUES[name or ("unknown" if role is None else _ROLE_HUES.get(role, "user"))]


@functools.singledispatch
def _document(value: Any, tokenizer: Tokenizer | None) -> Document:
    if isinstance(value, Document):
        return value
    if isinstance(value, list | tuple) and value:
        return _several(value, tokenizer)
    if callable(build := getattr(value, "document", None)):
        document: Document = build(tokenizer)
        return document
    expected = "a rendering, a bridge, a trajectory, samples, a parsed response or a report"
    raise InputError(f"cannot show {kind_of(value)}: pass {expected}")


def _single_track(value: Any, tokenizer: Tokenizer | None, name: str) -> Track:
    document = _document(value, tokenizer)
    if len(document.tracks) != 1 or document.contrasts:
        raise InputError(f"{name}: {kind_of(value)} is not one row of tokens: show it on its own page")
    return replace(document.tracks[0], name=name)


def _several(values: Sequence[Any], tokenizer: Tokenizer | None) -> Document:
    """Results of one track each; an item may be a pair of a name and a result."""
    tracks = []
    for at, item in enumerate(values, 1):
        name, value = item if isinstance(item, tuple) and len(item) == 2 else (f"row {at}", item)
        tracks.append(_single_track(value, tokenizer, str(name)))
    return Document(counted(len(tracks), "row"), "tokentrace rows", tracks=tracks)


def _side_by_side(one: Any, other: Any, tokenizer: Tokenizer | None) -> Document:
    first, second = _single_track(one, tokenizer, "first"), _single_track(other, tokenizer, "second")
    hunks = list(align(np.asarray(first.ids, np.int32), np.asarray(second.ids, np.int32)))
    removed = sum(hunk.stop - hunk.start for hunk in hunks)
    added = sum(hunk.other_stop - hunk.other_start for hunk in hunks)
    about = f"{counted(removed)} only in the first, {added:,} only in the second"
    names = (first.name, second.name)
    contrast = Contrast(first, second, hunks, names, "difference", about if hunks else "the same tokens")
    return Document("Two results compared", "tokentrace", contrasts=[contrast])


def excerpt(tokenizer: Tokenizer, one: Ids, other: Ids, hunk: Hunk, names: tuple[str, str]) -> Contrast:
    lead = one[max(0, hunk.start - _AROUND) : hunk.start]
    sides = [side[:_LIMIT] for side in hunk.sides(one, other)]
    same = common_ids(one[hunk.stop : hunk.stop + _AROUND], other[hunk.other_stop :])
    after = one[hunk.stop : hunk.stop + same]

    def track(side: Ids, start: int) -> Track:
        ids = np.concatenate([lead, side, after])
        hues = np.full(len(ids), HUES["plain"], np.uint8)
        return Track("", ids, hues, first=max(0, start - len(lead)), **token_columns(tokenizer, ids))

    parts = [part.moved(len(lead), len(lead)) for part in align(*sides)]
    return Contrast(track(sides[0], hunk.start), track(sides[1], hunk.other_start), parts, names)


@_document.register
def _rendering(value: RenderedTokens, tokenizer: Tokenizer | None) -> Document:
    track = rendering_track(value)
    title = f"Conversation of {counted(len(track.roles), 'message')}"
    return Document(title, "tokentrace render", template_name(value.tokenizer), tracks=[track])


def rendering_track(rendered: RenderedTokens) -> Track:
    hues = np.zeros(len(rendered), np.uint8)
    for start, stop, token in rendered.spans():
        hues[start:stop] = hue_of(token.role, token.field)
    last = int(rendered.messages.max(initial=-1))
    return Track(
        "rendering",
        rendered.ids,
        hues,
        rendered.messages,
        **token_columns(rendered.tokenizer, rendered.ids),
        fields=rendered.fields,
        mask=rendered.mask,
        turns=_turn_numbers(rendered.turns, len(rendered)),
        roles=[str(rendered.role(at)) for at in range(last + 1)],
        about=counted(int(rendered.control.sum()), "control token"),
        cards=_stop_cards(rendered),
        notes=[*(f"lost: {one}" for one in rendered.lost), *rendered.notes],
        edits=[
            edit(f"message {one.message}: {one.what}", one.before, one.after) for one in rendered.changes
        ],
    )


def _stop_cards(rendered: RenderedTokens) -> list[Card]:
    ended: dict[str, list[int]] = {}
    for turn in rendered.turns:
        text = _stop_text(rendered, turn)
        ended.setdefault("nothing" if text is None else visible(text), []).append(turn.message)
    return [
        Card(
            "Ends with" if at == 0 else "and with",
            text,
            listed(messages) if len(messages) < 9 else counted(len(messages), "message"),
        )
        for at, (text, messages) in enumerate(ended.items())
    ]


def _stop_text(rendered: RenderedTokens, turn: SampledTurn) -> str | None:
    return None if turn.stop_token is None else rendered.decode(slice(turn.stop - 1, turn.stop))


def edit(what: str, before: str, after: str, around: int = 40) -> Edit:
    """The change from one text to another, with `around` characters on both sides."""
    prefix = common_prefix(before, after)
    suffix = common_prefix(before[prefix:][::-1], after[prefix:][::-1])
    end = len(before) - suffix
    old, new = before[prefix:end], after[prefix : len(after) - suffix]
    return Edit(what, before[max(0, prefix - around) : prefix], old, new, before[end : end + around])


@_document.register
def _bridge(value: BridgedTokens, tokenizer: Tokenizer | None) -> Document:
    stream = value.stream_length
    hues = np.concatenate([np.full(stream, HUES["prompt"], np.uint8), KIND_HUES[value.kinds]])
    hues[len(value.prompt) : stream] = HUES["sampled"]
    track = Track(
        "next prompt",
        value.ids,
        hues,
        np.concatenate([np.full(stream, -1, np.int32), value.messages]),
        **token_columns(tokenizer, value.ids),
        mask=hues == HUES["sampled"],
        roles=["new message"] * value.new_count,
        about=f"{counted(stream)} of stream and {len(value.new_ids):,} new",
        notes=value.notes,
        edits=[
            edit(f"new message {one.message}: {one.what}", one.before, one.after) for one in value.changes
        ],
    )
    start = f"track=0&at={stream}"
    return Document("Bridge to the next turn", "tokentrace bridge", tracks=[track], start=start)


@_document.register
def _sample(value: Sample, tokenizer: Tokenizer | None) -> Document:
    rendered, hues, names = value.rendered, KIND_HUES[value.kinds], None
    if rendered is not None:
        tokenizer = rendered.tokenizer
        source = rendering_track(rendered).hues[value.offset : value.offset + len(value)]
        hues = np.concatenate([source, hues[len(source) :]])
    if value.parts is not None:
        names = [Part(part).name.lower().replace("_", " ") for part in value.parts.tolist()]
    trained = set(value.trained_messages)
    roles = [
        str(rendered.role(at)) if rendered is not None else "assistant" if at in trained else ""
        for at in range(int(value.messages.max(initial=-1)) + 1)
    ]
    track = Track(
        value.name or "row",
        value.ids,
        hues,
        value.messages,
        **token_columns(tokenizer, value.ids),
        fields=names,
        mask=value.mask,
        logprobs=value.logprobs,
        turns=_turn_numbers(value.completions, len(value)),
        versions=value.versions,
        roles=roles,
        means="trained",
        cards=[] if value.reward is None else [Card("Reward", f"{value.reward:g}")],
        notes=value.notes,
    )
    template = "" if rendered is None else template_name(rendered.tokenizer)
    return Document(value.name or "Training row", "tokentrace rows", template, tracks=[track])


def _turn_numbers(spans: Iterable[SampledTurn | CompletionSpan], length: int) -> Any:
    turns = np.full(length, -1, np.int32)
    for number, span in enumerate(spans):
        turns[span.start : span.stop] = number
    return turns


def json_view(rendered: RenderedTokens) -> dict[str, Any]:
    """A rendering as plain data. All lists but ``turns`` and remarks have one entry per token."""
    if not isinstance(rendered, RenderedTokens):
        raise InputError(f"json_view takes a rendering, not {kind_of(rendered)}")
    return {
        "text": rendered.text,
        "token_ids": rendered.token_ids,
        "tokens": rendered.tokens(),
        "message_indices": rendered.message_indices,
        "roles": [rendered.role(message) for message in rendered.message_indices],
        "fields": rendered.fields,
        "sampled": rendered.sampled,
        "turns": [
            {
                "message": turn.message,
                "start": turn.start,
                "stop": turn.stop,
                "stop_token_id": turn.stop_token,
                "stop_token": _stop_text(rendered, turn),
            }
            for turn in rendered.turns
        ],
        **{
            name: [asdict(one) for one in getattr(rendered, name)]
            for name in ("changes", "lost", "dropped")
        },
        "notes": list(rendered.notes),
    }


@_document.register
def _trajectory(value: Trajectory, tokenizer: Tokenizer | None) -> Document:
    branches, turns = value.branches, owned_turns(value)
    numbers = {turn.write: number for number, turn in enumerate(turns)}
    lead = " · ".join(f"{name}: {entry}" for name, entry in value.metadata.items())
    metadata = Table(
        "Metadata", ["", ""], [[*map(str, entry)] for entry in value.metadata.items()], words=2
    )
    reward = [] if value.reward is None else [Card("Reward", f"{value.reward:g}")]
    return Document(
        value.name or "Trajectory",
        "tokentrace trajectory",
        cards=[
            Card("Turns", f"{len(turns):,}", counted(value.num_writes, "write")),
            Card("Tokens", f"{value.num_tokens:,}", f"{value.num_sampled:,} sampled"),
            Card("Rows", f"{value.num_samples:,}", counted(len(branches), "branch")),
            *reward,
        ],
        lead=lead if len(lead) < _LEAD else "",
        tables=[] if len(lead) < _LEAD else [metadata],
        tracks=[_branch(value, at, numbers, tokenizer) for at in range(len(branches))],
        branches=branches,
        turns=turns,
        start=f"track={max(0, value.current)}",
    )


@_document.register
def _loaded(value: Loaded, tokenizer: Tokenizer | None) -> Document:
    document = _trajectory(value.trajectory, tokenizer)
    return document if value.problem is None else replace(document, notes=[value.problem])


def _branch(trajectory: Trajectory, at: int, numbers: dict[int, int], tokenizer: Tokenizer | None) -> Track:
    branch = trajectory.branches[at]
    start = branch.start
    tokens = trajectory.table(at).slice(start, branch.stop)
    turns = np.full(len(tokens), -1, np.int32)
    versions: list[tuple[Any, int, int]] = []
    for turn in trajectory.turns(at):
        if turn.branch == at:
            offset = turn.start - start
            turns[offset : turn.stop - start] = numbers[turn.write]
            versions += [(one.version, offset + one.start, offset + one.stop) for one in turn.versions]
    return Track(
        f"branch {at}" + (f": {branch.cause}" if branch.cause else ""),
        tokens.ids,
        KIND_HUES[tokens.kinds],
        tokens.messages,
        **token_columns(tokenizer, tokens.ids),
        mask=tokens.mask,
        logprobs=trajectory.logprobs(at)[start:] if trajectory.has_logprobs else None,
        turns=turns,
        versions=versions,
        parent=branch.parent,
        shared=start,
    )


@_document.register
def _parsed(value: ParsedResponse, tokenizer: Tokenizer | None) -> Document:
    parts = [part for part in value.parts if part.text]
    size = max(
        (span.stop for span in (*(one.span for one in value.regions), value.unread) if span), default=0
    )
    track = Track(
        "completion",
        np.full(len(parts), -1, np.int32),
        np.array([HUES[_PART_HUES[part.kind]] for part in parts], np.uint8),
        np.zeros(len(parts), np.int32),
        texts=[part.text for part in parts],
        fields=[f"{part.kind}, tokens {part.span.start}–{part.span.stop - 1}" for part in parts],
        roles=["assistant"],
        about=f"{counted(size)} in {counted(len(parts), 'part')}",
    )
    calls: list[list[str | Cell]] = []
    for call in (*value.tool_calls, *value.attempts):
        status = Cell(str(call.status), "good" if call.ok else "bad", call.problem)
        calls.append([call.name or "no name", call.arguments_text, status])
    stop = "none" if value.stop_token is None else str(value.stop_token)
    cut_off, unread = value.open is not None, value.unread
    return Document(
        "Parsed response",
        "tokentrace parse",
        cards=[
            Card("Finish", value.finish_reason, *((f"inside {value.open}", "bad") if cut_off else ())),
            Card("Stop token", stop),
            Card("Calls", f"{len(value.calls):,}", f"of {counted(len(value.tool_calls), 'attempt')}"),
        ],
        notes=[]
        if unread is None
        else [f"tokens {unread.start} to {unread.stop - 1} follow the stop token"],
        tables=[Table("Calls", ["name", "arguments", "status"], calls, words=3)] if calls else [],
        tracks=[track] if parts else [],
    )
