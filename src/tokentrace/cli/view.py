"""``tokentrace view``."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from . import command
from .options import complete_files, number, page_option, tokenizer_option
from .output import note, write_page

if TYPE_CHECKING:
    from ..samples.sample import Sample
    from ..tokens.tokenizer import Tokenizer


@command
@click.argument("file", metavar="FILE", shell_complete=complete_files)
@tokenizer_option
@number("--rows", default=20, text="Show the first N rows of a file.")
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
    from ..tokens.loading import load_tokenizer
    from .inputs import chosen_tokenizer

    path = Path(file).expanduser()
    result = _read(file, path, rows)
    spelling = load_tokenizer(chosen_tokenizer(tokenizer or recorded_tokenizer([file])))
    mismatch = _tokenizer_mismatch(path, result, spelling)
    if mismatch and tokenizer is None:
        raise InputError(f"{mismatch}, not with the embedded pocket model: name it with -t")
    if mismatch:
        note(f"{mismatch}, not with {tokenizer}: the texts on the page may be wrong")
    page = html or Path(tempfile.mkdtemp(prefix="tokentrace-")) / "page.html"
    write_page(page, result, title=path.name, tokenizer=spelling, launch=html is None)


def _read(file: str, path: Path, rows: int) -> Any:
    """Return a trajectory, or rows with titles."""
    from ..data.tables import read_samples
    from ..diagnose.record_files import is_trajectory
    from ..trajectory import load_trajectory

    if path.is_file() and is_trajectory(path):
        return load_trajectory(path)
    samples: list[Sample] = []
    with contextlib.suppress(InputError):  # it may be anyone's
        samples = list(itertools.islice(read_samples(path), rows)) if path.is_file() else []
    samples = samples or list(itertools.islice(_recorded(file), rows))
    if not samples:
        raise InputError(f"{path.name} has no rows")
    return [(f"row {at}: {one.name}" if one.name else f"row {at}", one) for at, one in enumerate(samples, 1)]


def _recorded(file: str) -> Iterator[Sample]:
    """Yield the rows of anything that `tokentrace check` reads."""
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


def _tokenizer_mismatch(file: Path, result: Any, tokenizer: Tokenizer) -> str:
    """Return how one sees that a file was made with another tokenizer; empty if nothing shows it."""
    from ..data.tables import read_metadata

    is_rows = isinstance(result, list)
    metadata = read_metadata(file) if is_rows and file.is_file() else {}
    if metadata.get("tokenizer_sha256", tokenizer.digest) != tokenizer.digest:
        return f"{file.name} was made with the tokenizer {metadata.get('tokenizer') or 'of another digest'}"
    streams = (
        [row.ids for _, row in result]
        if is_rows
        else map(result.trajectory.stream, range(result.trajectory.num_branches))
    )
    highest = max((int(ids.max(initial=0)) for ids in streams), default=0)
    if highest < tokenizer.vocabulary.size:
        return ""
    return f"{file.name} has the id {highest}, so it was made with a larger tokenizer"
