"""The comparison of client paths as a page: what each comes to, why and where streams broke, and the tokens of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..compare.breaks import Break
from ..rendering.renderer import Renderer
from ..rollout.loop import Rollout
from ..show.contrasts import break_contrast
from ..show.documents import document_of
from ..tokens.alignment import Hunk, align
from ..tokens.tokenizer import Ids
from ..tokens.visible import counted
from ..viewer.document import HUES, Cell, Contrast, Document, Lanes, Table, Track, token_columns
from ..viewer.page import page_html
from .paths import ABOUT, TEMPERATURE, ClientPath, PathReport
from .trials import Demo, remarks
from .views import MEASURES, cause_lines, examples_of

_EXAMPLES: Final = 4
"""Breaks that are shown."""


def demo_page(demo: Demo, renderer: Renderer) -> str:
    """The demo as a page that needs nothing but itself."""
    return page_html(demo_document(demo, renderer))


def demo_document(demo: Demo, renderer: Renderer) -> Document:
    reports = demo.paths
    tracks: list[Track] = []
    contrasts: list[Contrast] = []
    for found, place in _examples(demo):
        sides, contrast = break_contrast(found, len(tracks), f"{found.cause}: {place}", renderer.tokenizer)
        tracks += sides
        contrasts.append(contrast)
    _add_whole(reports, renderer, tracks, contrasts)
    rollouts = counted(len(reports[0].rollouts), "rollout")
    return Document(
        "Three ways to the next turn",
        "tokentrace demo",
        lead=f"{rollouts} of the pocket model on held-back questions, at temperature {TEMPERATURE:g}, by "
        f"{len(reports)} client paths: the same questions, tools, weights and seeds (--seed {demo.seed}). All numbers "
        "of the tables were counted in this run. A request that two paths make alike, same prompt and same seed, was "
        "computed once.",
        tables=[_measures(reports), _causes(demo)],
        lanes=[_lanes(report) for report in reports],
        notes=remarks(demo),
        tracks=tracks,
        contrasts=contrasts,
        start="diff=0" if contrasts else "track=0",
    )


def _measures(reports: Sequence[PathReport]) -> Table:
    head: list[str | Cell] = ["", *(Cell(str(report.path), small=ABOUT[report.path]) for report in reports)]
    rows: list[list[str | Cell]] = [
        [Cell(measure.label, small=measure.about), *(Cell(measure.value(one), measure.tone(one)) for one in reports)]
        for measure in MEASURES
    ]
    return Table("What each path comes to", head, rows)


def _causes(demo: Demo) -> Table:
    rows: list[list[str | Cell]] = []
    for trial in demo.trials:
        rows.append([Cell(trial.name, small=trial.about)])
        rows += [[Cell(label, small=words), *numbers] for label, words, numbers in cause_lines(trial)]
    about = (
        "Breaks by cause, on the same questions: with the noise that pocket was trained on, without it, and under a "
        "template that drops past reasoning."
    )
    return Table("Why streams broke", ["", *(str(report.path) for report in demo.paths)], rows, about)


def _lanes(report: PathReport) -> Lanes:
    """The streams of a path: the last prompt of each rollout and what was sampled after it."""
    streams = []
    for rollout in report.rollouts:
        trajectory = rollout.trajectory
        edges = np.flatnonzero(np.diff(trajectory.loss_mask(once=False), prepend=False, append=False)).tolist()
        sampled = list(zip(edges[::2], edges[1::2], strict=True))
        streams.append((len(trajectory), sampled, [one.start for one in trajectory.branches[1:]]))
    return Lanes(
        str(report.path), f"{counted(report.num_breaks, 'break')}, {counted(report.samples, 'sample')}", streams
    )


def _examples(demo: Demo) -> list[tuple[Break, str]]:
    """For a few causes a break, and where it is."""
    shown: dict[str, tuple[Break, str]] = {}
    for trial in demo.trials:
        for path, name, found in examples_of(trial):
            if found.cause not in shown and len(shown) < _EXAMPLES:
                shown[found.cause] = found, f"{trial.name}, {path}, {name}"
    return list(shown.values())


# -- one rollout


def _add_whole(
    reports: Sequence[PathReport], renderer: Renderer, tracks: list[Track], contrasts: list[Contrast]
) -> None:
    """A rollout of tokentrace, and where a render of its final messages has other tokens; one that has, if any does."""
    ours = [one for report in reports if report.path is ClientPath.TOKENTRACE for one in report.rollouts]
    if not ours:
        return
    found = ((one, *_encoded_again(one, renderer)) for one in ours)
    chosen, ids, hunks = min(found, key=lambda each: (not each[2], each[0].turns < 3, len(each[0].trajectory)))
    made = document_of(chosen.trajectory, tokenizer=renderer).tracks[0]
    name = f"{chosen.task.name} by tokentrace, whole"
    tracks.append(dataclasses.replace(made, name=name, roles=[str(message["role"]) for message in chosen.messages]))
    if hunks:
        hues = np.full(len(ids), HUES["scaffold"], np.uint8)
        tracks.append(Track("", ids, hues, **token_columns(renderer.tokenizer, ids)))
        base, names = len(tracks) - 2, ("sampled", "encoded again")
        about = "what encoding its text again would replace"
        contrasts.append(
            Contrast(f"{name}, and encoded again", base, len(made.ids), base + 1, hunks, names, about=about)
        )


def _encoded_again(rollout: Rollout, renderer: Renderer) -> tuple[Ids, list[Hunk]]:
    """The ids of a render of its final messages, and where its stream has others."""
    ids = renderer.render(rollout.messages, tools=rollout.schemas).ids
    return ids, list(align(rollout.trajectory.stream(), ids))
