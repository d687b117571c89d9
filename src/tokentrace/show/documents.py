"""Every public result as a document of token tracks: what pages and notebooks show of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..audit.inspect_report import Inspection
from ..data.check.report import CheckReport
from ..diagnose.alignment import align
from ..diagnose.audit_report import AuditReport
from ..diagnose.breaks import Break
from ..diagnose.history_report import HistoryReport
from ..errors import InputError, kind_of
from ..parsing.response import ParsedResponse, PartKind
from ..rendering.bridged import BridgedTokens
from ..rendering.rendered import RenderedTokens
from ..rendering.renderer import Renderer
from ..samples.sample import CompletionSpan, Sample
from ..study.sampling import SampledTurn
from ..tokens.kinds import Kind, Part
from ..tokens.tokenizer import Ids, Tokenizer
from ..tokens.visible import counted, visible
from ..trajectory.storage import Loaded
from ..trajectory.trajectory import Trajectory
from ..viewer.document import (
    HUES,
    OF_KIND,
    Card,
    Cell,
    Document,
    Edit,
    Table,
    Track,
    token_columns,
)
from .audit import audit_document
from .checks import check_document
from .contrasts import Differences, break_document
from .histories import history_document
from .inspections import inspection_document
from .pieces import edited, hue_of, listed, stops, template_name

_LEAD: Final = 240
"""Characters of metadata that are put in a line; more are a table."""
_PARTS: Final = {PartKind.REASONING: "reasoning", PartKind.CONTENT: "assistant", PartKind.TOOL_CALL: "calls"}


def document_of(
    value: Any, other: Any = None, *, tokenizer: Tokenizer | Renderer | None = None, title: str = ""
) -> Document:
    """What a page shows of a result; with `other`, of the two side by side, aligned by token.

    `tokenizer` tells the texts of tokens where the result does not know them (trajectories, bridges, rows that were
    read from a file); without one ids are shown. InputError for what is not a result.
    """
    texts = tokenizer.tokenizer if isinstance(tokenizer, Renderer) else tokenizer
    made = _document(value, texts) if other is None else _side_by_side(value, other, texts)
    template = made.template or (template_name(texts) if texts is not None else "")
    return dataclasses.replace(made, title=title or made.title, template=template)


@functools.singledispatch
def _document(value: Any, tokenizer: Tokenizer | None) -> Document:
    if isinstance(value, Document):
        return value
    if isinstance(value, list | tuple) and value:
        return _several(value, tokenizer)
    raise InputError(
        f"nothing to show of {type(value).__name__}: give a rendering, a bridge, a trajectory, samples, a parsed "
        "response, or what explain_break, compare_histories, a check, an audit or an inspection returned"
    )


def _several(values: Sequence[Any], tokenizer: Tokenizer | None) -> Document:
    """Results of one track each, one after the other. An item may be a pair of a name and a result."""
    tracks, templates = [], set()
    for at, item in enumerate(values):
        name, value = item if isinstance(item, tuple) and len(item) == 2 else (f"row {at + 1}", item)
        made = _document(value, tokenizer)
        if len(made.tracks) != 1 or made.contrasts:
            raise InputError(f"{kind_of(value)} is shown on a page of its own, not in a list", field=f"[{at}]")
        tracks.append(dataclasses.replace(made.tracks[0], name=str(name)))
        templates.add(made.template)
    template = templates.pop() if len(templates) == 1 else ""
    return Document(counted(len(tracks), "row"), "tokentrace rows", template, tracks=tracks)


def _texts(tokenizer: Tokenizer | None, ids: Ids) -> dict[str, Any]:
    return {} if tokenizer is None else token_columns(tokenizer, ids)


# -- renderings, bridges, rows


@_document.register
def _rendering(value: RenderedTokens, tokenizer: Tokenizer | None) -> Document:
    track = rendering_track(value)
    name = f"Conversation of {counted(len(track.roles), 'message')}"
    return Document(name, "tokentrace render", template_name(value.tokenizer), tracks=[track])


def rendering_track(rendered: RenderedTokens) -> Track:
    """A rendering as a track."""
    hues = np.zeros(len(rendered), np.uint8)
    for span in rendered.spans():
        hues[span.start : span.stop] = hue_of(span.role, span.field)
    last = int(rendered.messages.max(initial=-1))
    return Track(
        "rendering",
        rendered.ids,
        hues,
        rendered.messages,
        **token_columns(rendered.tokenizer, rendered.ids),
        fields=rendered.fields,
        mask=rendered.mask,
        turns=_numbered(rendered.turns, len(rendered)),
        roles=[str(rendered.role(at)) for at in range(last + 1)],
        means=rendered.mask_means,
        about=counted(int(rendered.control.sum()), "control token"),
        cards=[
            Card("Ends with" if at == 0 else "and with", "nothing" if text is None else visible(text), _ended(ended))
            for at, (text, ended) in enumerate(stops(rendered).items())
        ],
        notes=[*(f"lost: {one}" for one in rendered.lost), *rendered.notes],
        edits=[
            Edit(f"message {made.message}: {made.what}", *edited(made.before, made.after)) for made in rendered.changes
        ],
    )


def _ended(messages: list[int]) -> str:
    return f"message{'s' if len(messages) > 1 else ''} {listed(messages)}"


@_document.register
def _bridge(value: BridgedTokens, tokenizer: Tokenizer | None) -> Document:
    stream = value.stream_length
    hues = np.concatenate([np.full(stream, HUES["prompt"], np.uint8), OF_KIND[value.kinds]])
    hues[len(value.prompt) : stream] = HUES["sampled"]
    track = Track(
        "next prompt",
        value.ids,
        hues,
        np.concatenate([np.full(stream, -1, np.int32), value.messages]),
        **_texts(tokenizer, value.ids),
        mask=hues == HUES["sampled"],
        roles=["new message"] * value.new_count,
        about=f"{counted(stream)} of stream and {len(value.new_ids):,} new",
        notes=value.notes,
        edits=[Edit(f"new message {one.message}: {one.what}", *edited(one.before, one.after)) for one in value.changes],
    )
    return Document("Bridge to the next turn", "tokentrace bridge", tracks=[track], start=f"track=0&at={stream}")


@_document.register
def _sample(value: Sample, tokenizer: Tokenizer | None) -> Document:
    rendered, hues, names = value.rendered, OF_KIND[value.kinds], None
    if rendered is not None:
        tokenizer = rendered.tokenizer
        source = rendering_track(rendered).hues[value.offset : value.offset + len(value)]
        hues = np.concatenate([source, hues[len(source) :]])
    if value.parts is not None:
        names = [Part(part).name.lower().replace("_", " ") for part in value.parts.tolist()]
    count = int(value.messages.max(initial=-1)) + 1
    if rendered is not None:
        roles = [str(rendered.role(at)) for at in range(count)]
    else:
        assistant = set(value.trained_messages)
        roles = ["assistant" if at in assistant else "" for at in range(count)]
    track = Track(
        value.name or "row",
        value.ids,
        hues,
        value.messages,
        **_texts(tokenizer, value.ids),
        fields=names,
        mask=value.mask,
        logprobs=value.logprobs,
        turns=_numbered(value.completions, len(value)),
        versions=value.versions,
        roles=roles,
        means="trained",
        cards=[] if value.reward is None else [Card("Reward", f"{value.reward:g}")],
        notes=value.notes,
    )
    template = "" if rendered is None else template_name(rendered.tokenizer)
    return Document(value.name or "Training row", "tokentrace rows", template, tracks=[track])


def _numbered(spans: Iterable[SampledTurn | CompletionSpan], length: int) -> Any:
    """The number of the span that each of some tokens lies in; -1 where it lies in none."""
    turns = np.full(length, -1, np.int32)
    for number, span in enumerate(spans):
        turns[span.start : span.stop] = number
    return turns


def _side_by_side(one: Any, other: Any, tokenizer: Tokenizer | None) -> Document:
    """Two results of one track each, aligned by token."""
    tracks: list[Track] = []
    for value in (one, other):
        made = _document(value, tokenizer)
        if len(made.tracks) != 1 or made.contrasts:
            raise InputError(f"{kind_of(value)} is not one row of tokens, and cannot be shown side by side")
        tracks += made.tracks
    names = ("first", "second")
    first, second = (dataclasses.replace(track, name=name) for track, name in zip(tracks, names, strict=True))
    hunks = list(align(np.asarray(first.ids, np.int32), np.asarray(second.ids, np.int32)))
    out, new = sum(hunk.stop - hunk.start for hunk in hunks), sum(hunk.other_stop - hunk.other_start for hunk in hunks)
    about = f"{counted(out)} only in the first, {new:,} only in the second" if hunks else "the same tokens"
    differences = Differences()
    differences.add("difference", first, second, hunks, names, about)
    return Document("Two results compared", "tokentrace", **differences.shown())


# -- trajectories


@_document.register
def _trajectory(value: Trajectory, tokenizer: Tokenizer | None) -> Document:
    branches = value.branches
    turns = sorted(
        {turn.write: turn for at in range(len(branches)) for turn in value.turns(at) if turn.branch == at}.items()
    )
    metadata = list(value.metadata.items())
    told = " · ".join(f"{name}: {given}" for name, given in metadata)
    numbers = {write: number for number, (write, _) in enumerate(turns)}
    reward = [] if value.reward is None else [Card("Reward", f"{value.reward:g}")]
    return Document(
        value.name or "Trajectory",
        "tokentrace trajectory",
        cards=[
            Card("Turns", f"{len(turns):,}", counted(value.num_writes, "write")),
            Card("Tokens", f"{value.num_tokens:,}", f"{value.num_sampled:,} sampled"),
            Card("Rows", f"{value.num_samples:,}", f"{len(branches)} branch{'' if len(branches) == 1 else 'es'}"),
            *reward,
        ],
        lead=told if len(told) < _LEAD else "",
        tables=[]
        if len(told) < _LEAD
        else [Table("Metadata", ["", ""], [[*map(str, one)] for one in metadata], words=2)],
        tracks=[_branch(value, at, numbers, tokenizer) for at in range(len(branches))],
        branches=branches,
        turns=[turn for _, turn in turns],
        start=f"track={max(0, value.current)}",
    )


@_document.register
def _loaded(value: Loaded, tokenizer: Tokenizer | None) -> Document:
    made = _trajectory(value.trajectory, tokenizer)
    return dataclasses.replace(made, notes=[value.problem]) if value.problem is not None else made


def _branch(trajectory: Trajectory, at: int, numbers: dict[int, int], tokenizer: Tokenizer | None) -> Track:
    """The tokens that a branch has of its own."""
    branch = trajectory.branches[at]
    start = branch.start
    kinds = trajectory.kinds(at)[start:]
    ids = trajectory.stream(at)[start:]
    turns = np.full(len(ids), -1, np.int32)
    versions: list[tuple[Any, int, int]] = []
    for turn in trajectory.turns(at):
        if turn.branch == at:
            turns[turn.start - start : turn.stop - start] = numbers[turn.write]
            versions += [
                (one.version, turn.start - start + one.start, turn.start - start + one.stop) for one in turn.versions
            ]
    return Track(
        f"branch {at}" + (f": {branch.cause}" if branch.cause else ""),
        ids,
        OF_KIND[kinds],
        trajectory.message_indices(at)[start:],
        **_texts(tokenizer, ids),
        mask=kinds == Kind.SAMPLED,
        logprobs=trajectory.logprobs(at)[start:] if trajectory.has_logprobs else None,
        turns=turns,
        versions=versions,
        parent=branch.parent,
        shared=start,
    )


# -- what a completion says


@_document.register
def _parsed(value: ParsedResponse, tokenizer: Tokenizer | None) -> Document:
    parts = [part for part in value.parts if part.text]
    track = Track(
        "completion",
        np.full(len(parts), -1, np.int32),
        np.array([HUES[_PARTS[part.kind]] for part in parts], np.uint8),
        np.zeros(len(parts), np.int32),
        texts=[part.text for part in parts],
        fields=[f"{part.kind}, tokens {part.span.start}–{part.span.stop - 1}" for part in parts],
        roles=["assistant"],
        about=counted(len(parts), "part"),
    )
    rows: list[list[str | Cell]] = [
        [
            call.name or "no name",
            call.arguments_text,
            Cell(str(call.status), "good" if call.ok else "bad", call.problem),
        ]
        for call in (*value.tool_calls, *value.attempts)
    ]
    stop = "none" if value.stop_token is None else str(value.stop_token)
    inside = f"inside of {value.open}" if value.open is not None else ""
    return Document(
        "Parsed response",
        "tokentrace parse",
        cards=[
            Card("Finish", value.finish_reason, inside, "bad" if value.open is not None else ""),
            Card("Stop token", stop),
            Card("Calls", f"{len(value.calls):,}", f"of {counted(len(value.tool_calls), 'attempt')}"),
        ],
        notes=[]
        if value.unread is None
        else [f"tokens {value.unread.start} to {value.unread.stop - 1} come after the stop token"],
        tables=[Table("Calls", ["name", "arguments", "status"], rows, words=3)] if rows else [],
        tracks=[track] if parts else [],
    )


# -- what reports say

_document.register(HistoryReport, lambda value, _: history_document(value))
_document.register(AuditReport, lambda value, _: audit_document([value]))
_document.register(Break, break_document)
_document.register(CheckReport, lambda value, _: check_document(value))
_document.register(Inspection, inspection_document)
