"""``tokentrace explain``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ..errors import InputError
from . import command
from .options import json_option, page_option, tokenizer_option
from .output import working, write_page


@command
@click.argument("stream", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("prompt", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@tokenizer_option
@click.option("--branch", type=int, metavar="N", help="The branch of a trajectory file.  [default: the last written]")
@page_option("Write a page as well, if there is a break.")
@json_option("Write JSON instead of text.")
def explain(
    *, stream: Path, prompt: Path | None, tokenizer: str | None, branch: int | None, html: Path | None, as_json: bool
) -> None:
    """Say where and why the next prompt does not extend a stream, id for id.

    STREAM is a trajectory file, or JSON: a list of ids, or an object with "stream" and perhaps "next_prompt" and
    "prompt_length" (where the last completion begins). PROMPT is JSON with the ids of the next prompt. Exits with 0 if
    the prompt extends the stream, with 1 if it does not.

    \b
    Examples:
      tokentrace explain rollout.tt next.json -t ./Qwen3-8B
      tokentrace explain both.json -t ./Qwen3-8B --json | jq .cause
    """
    import numpy as np

    from ..compare.breaks import explain_break
    from ..tokens.loading import load_tokenizer
    from .inputs import chosen_tokenizer

    ids, known = _read_stream(stream, branch)
    if prompt is not None:
        asked = _ids(_read_json(prompt), prompt)
    elif "next_prompt" in known:
        asked = _ids(known["next_prompt"], stream)
    else:
        raise InputError(f"{stream.name} has no next_prompt; give the ids of the next prompt as a second file")
    sampled = known.get("sampled")
    if sampled is None and "prompt_length" in known:
        sampled = np.arange(len(ids)) >= int(known["prompt_length"])
    name = chosen_tokenizer(tokenizer)
    with working(f"loading {name}"):
        loaded = load_tokenizer(name)
    with working("comparing"):
        found = explain_break(ids, asked, loaded, sampled=sampled)
    if as_json:
        click.echo(json.dumps({"extends": found is None} | ({} if found is None else found.to_json())))
    elif found is None:
        click.echo(f"the prompt extends the stream: {len(ids):,} ids, and {len(asked) - len(ids):,} new ones")
    else:
        click.echo(str(found))
    if html is not None and found is not None:
        write_page(html, found, tokenizer=loaded)
    raise SystemExit(0 if found is None else 1)


def _read_stream(path: Path, branch: int | None) -> tuple[list[int], dict[str, Any]]:
    """The ids of a stream, and what else its file says."""
    from ..audit.dumps.records import is_trajectory
    from ..trajectory import load_trajectory

    if is_trajectory(path):
        trajectory = load_trajectory(path).trajectory
        return trajectory.stream(branch).tolist(), {"sampled": trajectory.loss_mask(branch, once=False)}
    found = _read_json(path)
    if isinstance(found, dict):
        return _ids(found.get("stream"), path), found
    return _ids(found, path), {}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path.name} is neither a trajectory file nor JSON: {error}") from None


def _ids(found: Any, path: Path) -> list[int]:
    from ..tokens.ids import check_ids

    if not isinstance(found, list):
        raise InputError(f"{path.name} must hold a list of token ids")
    return check_ids(found, path.name).tolist()  # type: ignore[no-any-return]
