"""``tokentrace demo``."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import command, one_blas_thread
from .options import json_option
from .output import ProgressBars, make_console

if TYPE_CHECKING:
    from ..demo.paths import PathReport
    from ..rendering.renderer import Renderer
    from ..samples.sample import Sample


@command
@click.option("-n", "--rollouts", type=click.IntRange(1), default=64, show_default=True, help="How many by each path.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the questions and the sampling.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tokentrace-demo"),
    show_default=True,
    help="The folder that rows, trajectories and the report go to.",
)
@click.option("--render", "render_", is_flag=True, help="Render the shipped example instead, and explain it.")
@click.option("--open", "open_", is_flag=True, help="Show the report in a browser.")
@json_option("Print the table as JSON; what is written is the same.")
def demo(*, rollouts: int, seed: int, output: Path, render_: bool, open_: bool, as_json: bool) -> None:
    """Run agents on the embedded pocket model by three client paths, on the same questions with the same seeds.

    Two of them keep messages and encode them again for every turn; tokentrace keeps what was sampled. The table tells
    what that costs: breaks, samples, mismatched tokens, and how far a trainer's logprobs are from the engine's.
    Pocket was trained with noise that makes streams break; a second table tells which breaks need it and which do not.
    """
    one_blas_thread()
    output.mkdir(parents=True, exist_ok=True)
    if as_json and render_:
        raise click.UsageError("--json is of the table; --render has none")
    report = _show_example(output) if render_ else _compare(output, rollouts, seed, as_json)
    if open_:
        click.launch(str(report))


def _compare(output: Path, rollouts: int, seed: int, as_json: bool) -> Path:
    import asyncio

    from ..demo.paths import run_demo
    from ..demo.report import demo_document, demo_json, demo_text
    from ..pocket import POCKET
    from ..rendering.factory import create_renderer
    from ..show.page import page_html

    with ProgressBars(transient=True, counts=True) as bars:
        found = asyncio.run(run_demo(rollouts=rollouts, seed=seed, progress=bars.show))
    table = json.dumps(demo_json(found), indent=1)
    if as_json:
        click.echo(table)
    else:
        make_console().print(demo_text(found), soft_wrap=True)
        click.echo()
    for wrote in (_write_rows(output, found.paths, seed), _write_trajectories(output, found.paths)):
        click.echo(wrote, err=as_json)
    (output / "summary.json").write_text(table + "\n", encoding="utf-8")
    page = output / "report.html"
    page.write_text(page_html(demo_document(found, create_renderer(POCKET))), encoding="utf-8")
    click.echo(f"Table         {output / 'summary.json'}", err=as_json)
    click.secho(f"Report        {page}", bold=True, err=as_json)
    return page


def _write_rows(output: Path, reports: Sequence[PathReport], seed: int) -> str:
    """The training rows of tokentrace's path; as JSON lines where there is no pyarrow."""
    from ..data.tables import write_samples
    from ..demo.paths import ClientPath
    from ..samples.trajectories import trajectory_samples

    rollouts = [rollout for one in reports if one.path is ClientPath.TOKENTRACE for rollout in one.rollouts]
    samples = [row for one in rollouts for row in trajectory_samples(one.trajectory, reward=one.reward)]
    if importlib.util.find_spec("pyarrow") is not None:
        path = output / "rows.parquet"
        write_samples(path, samples, {"made_by": "tokentrace demo", "seed": seed})
        return f"Rows          {path}"
    path = output / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in samples:
            file.write(json.dumps(_json_row(row)) + "\n")
    return f"Rows          {path} (for Parquet: pip install tokentrace[data])"


def _json_row(sample: Sample) -> dict[str, Any]:
    logprobs = [] if sample.logprobs is None else sample.logprobs.tolist()
    return {
        "input_ids": sample.token_ids,
        "loss_mask": sample.mask.tolist(),
        "message_indices": sample.messages.tolist(),
        "kinds": sample.kinds.tolist(),
        "logprobs": [None if math.isnan(value) else value for value in logprobs],
        "source": sample.name,
        "branch": sample.branch,
        "reward": sample.reward,
    }


def _write_trajectories(output: Path, reports: Sequence[PathReport]) -> str:
    """Each rollout of each path as a file; those of an earlier run are replaced."""
    from ..trajectory.storage import save_trajectory

    folder = output / "trajectories"
    for one in reports:
        own = folder / one.path.replace(" ", "-")
        own.mkdir(parents=True, exist_ok=True)
        for old in own.glob("held_back-*.tt"):
            old.unlink()
        for rollout in one.rollouts:
            save_trajectory(rollout.trajectory, own / f"{rollout.task.name}.tt")
    return f"Trajectories  {folder}"


def _show_example(output: Path) -> Path:
    """Render the shipped example, show it, and write an HTML report."""
    from ..pocket import EXAMPLE, POCKET
    from ..rendering.factory import create_renderer
    from ..show.page import show
    from .inputs import read_conversation
    from .render import write

    messages, tools = read_conversation(str(EXAMPLE))
    renderer = create_renderer(POCKET)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    write(rendered, "text", None, title="demo")
    page = output / "example.html"
    page.write_text(show(rendered, title="tokentrace demo").html, encoding="utf-8")

    sampled = int(rendered.mask.sum())
    ends = {rendered.decode(slice(turn.stop - 1, turn.stop)) for turn in rendered.turns if turn.stop_token}
    forged = rendered.select(role="user", field="content")
    pattern = renderer.tokenizer.vocabulary.control_pattern
    typed = pattern.findall(rendered.decode(forged)) if pattern else []
    made = int(rendered.control[forged].sum())
    click.echo()
    click.secho("What to notice", bold=True)
    click.echo(
        f"- {sampled} of {len(rendered)} tokens are sampled: what the assistant wrote, each turn with its "
        f"{' and '.join(sorted(ends))}.\n"
        "  The prompt that asks for a turn is not, nor is anything that system, users and tools said.\n"
        f"- In message 8 the user typed {' '.join(typed)}. It stayed text: {made} control tokens came of it.\n"
        "- Reasoning of earlier turns is still there: what was sampled once is never written anew."
    )
    _show_next_turn(renderer, messages, tools)
    click.secho(f"\nReport: {page}", bold=True)
    return page


def _show_next_turn(renderer: Renderer, messages: list[dict[str, Any]], tools: Any) -> None:
    """One step of a rollout, continued in both ways: rendered again, and bridged."""
    from ..diagnose.breaks import explain_break

    called = next(at for at, message in enumerate(messages) if message.get("tool_calls"))
    prompt = renderer.render_ids(messages[:called], tools=tools, add_generation_prompt=True)
    whole = renderer.render(messages[: called + 1], tools=tools)
    canonical = whole.ids[whole.turns[-1].start : whole.turns[-1].stop].tolist()
    sampled = _sampled_otherwise(renderer, canonical)
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages[called + 1 :]))
    again = renderer.render_ids([*messages[: called + 1], *results], tools=tools, add_generation_prompt=True)
    found = explain_break(prompt + sampled, again, renderer)
    bridged = renderer.bridge_to_next_turn(prompt, sampled, results, tools=tools)
    click.echo()
    click.secho("The next turn", bold=True)
    click.echo(
        f"An engine sampled message {called}, a word of it in other tokens than the tokenizer would have chosen, as "
        "engines do.\nA client that keeps messages renders them again:\n"
    )
    click.echo("\n".join(f"  {line}" for line in str(found or "no break").splitlines()))
    if bridged is not None:
        click.echo(
            f"\nThe bridge keeps all {bridged.stream_length} ids of the stream and adds {len(bridged.new_ids)}: "
            f"{renderer.tokenizer.decode(bridged.new_ids)!r}"
        )


def _sampled_otherwise(renderer: Renderer, ids: list[int]) -> list[int]:
    """The same text with its longest word spelled letter by letter."""
    texts = [renderer.tokenizer.decode([index]) for index in ids]
    longest = max(range(len(ids)), key=lambda at: len(texts[at]) if texts[at].strip().isalpha() else 0)
    letters = [int(index) for letter in texts[longest] for index in renderer.tokenizer.encode(letter)]
    return [*ids[:longest], *letters, *ids[longest + 1 :]]
