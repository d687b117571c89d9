"""``tokentrace render``, ``view`` and ``families``."""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError, RendererError
from . import command, options
from .output import note, print_result, working, write_file, write_page

if TYPE_CHECKING:
    from ..samples.sample import Sample
    from ..tokens.tokenizer import Tokenizer

_DETAILS = {
    "name": "family",
    "models": "models",
    "answer": "an answer",
    "call": "an answer with a call",
    "result": "a tool result",
    "tool_parser": "dialect of calls",
}


@command
@click.argument("conversation", type=options.INPUT_FILE)
@options.template_options
@options.flag("-g", "--generation-prompt", text="End with the prompt for the next reply.")
@options.control_tokens_option
@options.messages_option
@options.one_of("--lost", ["ignore", "error"], "Text that reaches no token: show it, or fail.", "ignore")
@options.past_option("What past turns keep: see docs/rendering.md.", "template")
@options.index_option
@click.option("-f", "--format", "form", type=click.Choice(["text", "json", "html"]), help="[default: text]")
@options.json_option("The same as --format json.")
@click.option("-o", "--output", type=options.ResultFile(), help="Write to this file.")
@options.flag("--open", "open_", text="Open the page in a browser.")
def render(*, conversation: str, form: str | None, output: Path | None, open_: bool, **chosen: Any) -> None:
    """Render CONVERSATION to tokens that know where they came from.

    CONVERSATION is a JSON file: a list of messages, or an object with "messages" and perhaps "tools"; a .jsonl
    file has one per line. "-" reads from stdin.

    \b
    Examples:
      tokentrace render chat.json
      tokentrace render chat.json -t ./Qwen3-8B --kwargs enable_thinking=false -g
      tokentrace render rollouts.jsonl --index 3 --format html --open
      tokentrace render - --format json < chat.json | jq .token_ids
    """
    from .inputs import conversation_title, make_renderer, read_conversation, read_tools

    if chosen["as_json"] and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} are mutually exclusive")
    form = "json" if chosen["as_json"] else form or ("html" if open_ else "text")
    if open_ and form != "html":
        raise click.UsageError("--open needs --format html")
    messages, tools = read_conversation(conversation, chosen["index"])
    names = ("past", "lost", "control_tokens", "messages")
    renderer = make_renderer(chosen, **{name: chosen[name] for name in names})
    with working("rendering"):
        tools = read_tools(chosen["tools"], tools)
        rendered = renderer.render(messages, tools=tools, add_generation_prompt=chosen["generation_prompt"])
    if form == "text" and output is None:
        print_result(rendered)
        return
    from ..show import json_view, plain_view, show

    if form == "html":
        text = show(rendered, title=conversation_title(conversation)).html
        output = output or (_temporary("report.html") if open_ else None)
    else:
        text = (json.dumps(json_view(rendered)) if form == "json" else plain_view(rendered)) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text, launch=open_)


def _temporary(name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix="tokentrace-")) / name


@command
@click.argument("file", metavar="FILE", type=click.Path())
@options.tokenizer_option
@options.number("--rows", default=20, text="Show the first N rows of a file.")
@options.page_option("Write the page to this file instead of opening a browser.")
def view(*, file: str, tokenizer: str | None, rows: int, html: Path | None) -> None:
    """Show FILE on a page: a trajectory (.tt), rows of ids, the output of a run, a gateway's store, or a dump.

    The page is self-contained. See docs/viewer.md.

    \b
    Examples:
      tokentrace view rollout.tt -t ./Qwen3-8B
      tokentrace view rows.parquet -t ./Qwen3-8B --html rows.html
      tokentrace view runs/7 --rows 5
    """
    from ..diagnose.rollouts import recorded_tokenizer
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
    page = html or _temporary("page.html")
    write_page(page, result, title=path.name, tokenizer=spelling, launch=html is None)


def _read(file: str, path: Path, rows: int) -> Any:
    from ..data.tables import read_samples
    from ..diagnose.record_files import is_trajectory
    from ..trajectory import load_trajectory

    if path.is_file() and is_trajectory(path):
        return load_trajectory(path)
    samples: list[Sample] = []
    with contextlib.suppress(InputError):  # another tool may have written it
        samples = list(itertools.islice(read_samples(path), rows)) if path.is_file() else []
    samples = samples or list(itertools.islice(_recorded(file), rows))
    if not samples:
        raise InputError(f"{path.name} has no rows")
    return [
        (f"row {at}: {one.name}" if one.name else f"row {at}", one) for at, one in enumerate(samples, 1)
    ]


def _recorded(file: str) -> Iterator[Sample]:
    import numpy as np

    from ..diagnose.record_files import holds_rollouts, read_rollouts
    from ..diagnose.rollouts import CheckedRollout
    from ..samples.sample import Sample
    from ..tokens.kinds import Kind

    holds_rollouts(file)  # raises InputError for a file of conversations
    for rollout in read_rollouts([file]):
        if rollout.problem:
            raise InputError(f"{rollout.where}: {rollout.problem}")
        tracks = [(row.ids, row.mask) for row in rollout.rows]
        for ids, mask in tracks or [(tip.stream, tip.sampled) for tip in CheckedRollout(rollout).tips]:
            kinds = np.where(mask, Kind.SAMPLED, Kind.CONTEXT).astype(np.uint8)
            yield Sample(ids, mask, np.full(len(ids), -1, np.int32), kinds, name=rollout.name)


def _tokenizer_mismatch(file: Path, result: Any, tokenizer: Tokenizer) -> str:
    from ..data.tables import read_metadata

    if isinstance(result, list):
        metadata = read_metadata(file) if file.is_file() else {}
        if metadata.get("tokenizer_sha256", tokenizer.digest) != tokenizer.digest:
            return f"{file.name} was made with the tokenizer {metadata.get('tokenizer') or 'of another digest'}"
        streams = [row.ids for _, row in result]
    else:
        streams = list(map(result.trajectory.stream, range(result.trajectory.num_branches)))
    highest = max((int(ids.max(initial=0)) for ids in streams), default=0)
    is_larger = highest >= tokenizer.vocabulary.size
    return f"{file.name} has the id {highest}, so it was made with a larger tokenizer" if is_larger else ""


@command
@click.argument("name", required=False, shell_complete=options.complete_families)
@options.json_option("Print the families as JSON.")
def families(*, name: str | None, as_json: bool) -> None:
    """List the known families of models, or show the one called NAME.

    A family is recognised by how its template behaves. Templates without a family work, too.

    \b
    Examples:
      tokentrace families
      tokentrace families qwen3
      tokentrace families --json | jq .[].name
    """
    from ..formats.families import FAMILIES
    from ..show.document import Document, Table

    choices = [family for family in FAMILIES if name in (None, family.name)]
    if not choices:
        names = ", ".join(family.name for family in FAMILIES)
        raise RendererError(f"there is no family {name!r}; there are {names}")
    rows = [{key: str(getattr(family, key) or "") for key in _DETAILS} for family in choices]
    if as_json:
        click.echo(json.dumps(rows if name is None else rows[0], indent=2, ensure_ascii=False))
    elif name is None:
        cells = [[row["name"], row["models"]] for row in rows]
        print_result(Document("Families", tables=[Table("Families", ["family", "models"], cells, words=2)]))
    else:
        for key, label in _DETAILS.items():
            if rows[0][key]:
                click.echo("\n  ".join([f"{label}:", *rows[0][key].splitlines()]))
