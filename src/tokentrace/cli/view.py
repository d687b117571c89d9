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
from .options import page_option, tokenizer_option
from .output import note, write_page

if TYPE_CHECKING:
    from ..tokens.tokenizer import Tokenizer


@command
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@tokenizer_option
@click.option("--rows", type=click.IntRange(1), default=20, show_default=True, help="Show the first N rows of a file.")
@page_option("Write the page to this file, and open no browser.")
def view(*, file: Path, tokenizer: str | None, rows: int, html: Path | None) -> None:
    """Show FILE on a page: a trajectory (.tt), or rows of ids that tokentrace wrote (Parquet, Arrow, JSON lines).

    The page needs nothing but itself. See docs/viewer.md for what is on it.

    \b
    Examples:
      tokentrace view rollout.tt -t ./Qwen3-8B
      tokentrace view rows.parquet -t ./Qwen3-8B --html rows.html
    """
    from ..show.documents import document_of
    from ..tokens.loading import load_tokenizer
    from .inputs import chosen_tokenizer

    result = _read(file, rows)
    spelled = load_tokenizer(chosen_tokenizer(tokenizer))
    other = _of_another(file, result, spelled)
    if other is not None and tokenizer is None:
        raise InputError(f"{other}, not with the embedded pocket model: say which it is with -t")
    if other is not None:
        note(f"{other}, not with {tokenizer}: the texts on the page may be wrong")
    document = document_of(result, tokenizer=spelled, title=file.name)
    if isinstance(result, list):
        tracks = [
            replace(track, roles=roles) if roles else track
            for track, roles in itertools.zip_longest(document.tracks, _roles(file, len(result)))
        ]
        document = replace(document, tracks=tracks)
    path = html or Path(tempfile.mkdtemp(prefix="tokentrace-")) / "page.html"
    write_page(path, document, launch=html is None)


def _read(file: Path, rows: int) -> Any:
    from ..audit.dumps.records import begins_with, is_trajectory
    from ..data.tables import is_lines, read_samples
    from ..trajectory import load_trajectory

    if is_trajectory(file):
        return load_trajectory(file)
    if not (begins_with(file, b"PAR1") or file.suffix == ".arrow" or is_lines(file)):
        raise InputError(
            f"{file.name} is not a trajectory (.tt), nor rows of ids (.parquet, .arrow, .jsonl); "
            f"a conversation is shown by tokentrace render {file} --format html --open"
        )

    try:
        found = list(itertools.islice(read_samples(file), rows))
    except InputError as error:
        if file.suffix == ".jsonl" and _is_conversation(file):
            raise InputError(
                f"{file.name} holds conversations, not rows of ids: tokentrace render {file} --format html --open "
                f"shows the first of them, and tokentrace tokenize {file} -o rows.jsonl makes rows"
            ) from None
        raise InputError(
            f"{error}; view shows rows that tokentrace wrote; those of others: tokentrace inspect {file} --html FILE"
        ) from error
    if not found:
        raise InputError(f"{file.name} has no rows")
    return [
        (f"row {at + 1}: {sample.name}" if sample.name else f"row {at + 1}", sample) for at, sample in enumerate(found)
    ]


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

    made = read_metadata(file) if isinstance(result, list) else {}
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


def _is_conversation(file: Path) -> bool:
    """Whether the first line is a conversation."""
    from .inputs import read_conversation

    try:
        return isinstance(read_conversation(str(file))[0], list)
    except InputError:
        return False
