"""``tokentrace view``."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import command
from .options import complete_files, page_option, tokenizer_option
from .output import note, write_page

if TYPE_CHECKING:
    from ..samples.sample import Sample
    from ..tokens.tokenizer import Tokenizer


@command
@click.argument("file", metavar="FILE", shell_complete=complete_files)
@tokenizer_option
@click.option("--rows", type=click.IntRange(1), default=20, show_default=True, help="Show the first N rows of a file.")
@page_option("Write the page to this file, and open no browser.")
def view(*, file: str, tokenizer: str | None, rows: int, html: Path | None) -> None:
    """Show FILE on a page: a trajectory (.tt), rows of ids, the output of a run, a gateway's store, or a dump.

    The page needs nothing but itself. See docs/viewer.md for what is on it.

    \b
    Examples:
      tokentrace view rollout.tt -t ./Qwen3-8B
      tokentrace view rows.parquet -t ./Qwen3-8B --html rows.html
      tokentrace view runs/7 --rows 5
    """
    from ..diagnose.rollout_report import recorded_tokenizer
    from ..show.results import document_of
    from ..tokens.loading import load_tokenizer
    from .inputs import chosen_tokenizer

    path = Path(file).expanduser()
    result, has_columns = _read(file, path, rows)
    spelled = load_tokenizer(chosen_tokenizer(tokenizer or recorded_tokenizer([file])))
    other = _of_another(path, result, spelled)
    if other is not None and tokenizer is None:
        raise InputError(f"{other}, not with the embedded pocket model: say which it is with -t")
    if other is not None:
        note(f"{other}, not with {tokenizer}: the texts on the page may be wrong")
    document = document_of(result, tokenizer=spelled, title=path.name)
    if has_columns:
        tracks = [
            replace(track, roles=roles) if roles else track
            for track, roles in itertools.zip_longest(document.tracks, _roles(path, len(result)))
        ]
        document = replace(document, tracks=tracks)
    page = html or Path(tempfile.mkdtemp(prefix="tokentrace-")) / "page.html"
    write_page(page, document, launch=html is None)


def _read(file: str, path: Path, rows: int) -> tuple[Any, bool]:
    """What is shown, and whether it is rows with the columns that tokentrace writes."""
    from ..data.tables import read_samples
    from ..diagnose.record_files import is_trajectory
    from ..trajectory import load_trajectory

    if path.is_file() and is_trajectory(path):
        return load_trajectory(path), False
    try:
        samples = list(itertools.islice(read_samples(path), rows)) if path.is_file() else []
    except InputError:
        samples = []
    has_columns = bool(samples)
    samples = samples or list(itertools.islice(_recorded(file), rows))
    if not samples:
        raise InputError(f"{path.name} has no rows")
    titles = (f"row {at}: {one.name}" if one.name else f"row {at}" for at, one in enumerate(samples, 1))
    return list(zip(titles, samples, strict=True)), has_columns


def _recorded(file: str) -> Iterator[Sample]:
    """The rows of anything that `tokentrace check` reads: what was sampled or is trained, and nothing else."""
    import numpy as np

    from ..diagnose.record_files import holds_rollouts, read_rollouts
    from ..diagnose.records import Unreadable
    from ..diagnose.rollouts import check_rollout
    from ..samples.sample import Sample
    from ..tokens.kinds import Kind

    holds_rollouts(file)  # refuses a file of conversations
    for rollout in read_rollouts([file]):
        if isinstance(rollout, Unreadable):
            raise InputError(f"{rollout.where}: {rollout.problem}")
        tracks = [(row.ids, row.mask) for row in rollout.rows]
        for ids, mask in tracks or [(tip.stream, tip.sampled) for tip in check_rollout(rollout).tips]:
            kinds = np.where(mask, Kind.SAMPLED, Kind.CONTEXT).astype(np.uint8)
            yield Sample(ids, mask, np.full(len(ids), -1, np.int32), kinds, name=rollout.name)


def _roles(file: Path, rows: int) -> Iterator[list[str]]:
    """The roles of the messages of the first rows, if the file holds their conversations as the gateway's rows do."""
    from ..data.sources import pyarrow
    from ..data.tables import is_lines, read_tables
    from ..data.writers import read_line_tables

    conversation = pyarrow().schema([("messages", pyarrow().string())])
    tables = read_line_tables(file, conversation) if is_lines(file) else read_tables(file)
    held = (table for table in tables if "messages" in table.schema.names)
    texts = (text for table in held for text in table.column("messages").to_pylist())
    for text in itertools.islice(texts, rows):
        yield [str(message["role"]) for message in json.loads(text)]


def _of_another(file: Path, result: Any, tokenizer: Tokenizer) -> str | None:
    """How one sees that a file was made with another tokenizer, whose ids spell other texts; else None."""
    from ..data.tables import read_metadata

    made = read_metadata(file) if isinstance(result, list) and file.is_file() else {}
    if made.get("tokenizer_sha256", tokenizer.digest) != tokenizer.digest:
        return f"{file.name} was made with the tokenizer {made.get('tokenizer') or 'of another digest'}"
    if isinstance(result, list):
        streams = [row.ids for _, row in result]
    else:
        streams = [result.trajectory.stream(branch) for branch in range(result.trajectory.num_branches)]
    highest = max((int(ids.max(initial=0)) for ids in streams), default=0)
    if highest < tokenizer.vocabulary.size:
        return None
    return f"{file.name} holds the id {highest}, so it was made with a larger tokenizer"
