"""``tokentrace demo``."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import command, one_blas_thread
from .options import flag, json_option, number
from .output import ProgressBars, note, print_result, write_file, write_page

if TYPE_CHECKING:
    from ..demo.paths import PathReport
    from ..samples.sample import Sample

_FOLDER = click.Path(file_okay=False, path_type=Path)


@command
@number("-n", "--rollouts", default=64, text="Rollouts by each path.")
@number("--seed", default=0, least=0, text="Of the questions and the sampling.")
@click.option("-o", "--output", type=_FOLDER, default="tokentrace-demo", show_default=True, help="Where files go.")
@flag("--render", "render_", text="Render the shipped example instead, and explain it.")
@flag("--open", "open_", text="Open the report in a browser.")
@json_option("Print the table as JSON.")
def demo(*, rollouts: int, seed: int, output: Path, render_: bool, open_: bool, as_json: bool) -> None:
    """Run agents on the embedded pocket model by three client paths, on the same questions with the same seeds.

    Two of them keep messages and encode them again for every turn; tokentrace keeps what was sampled. The first table
    shows what that costs: breaks, samples, mismatched tokens, and how far a trainer's logprobs are from the engine's.
    Pocket was trained with noise that makes streams break; the second table shows which breaks need it.
    """
    one_blas_thread()
    if as_json and render_:
        raise click.UsageError("--json prints the table, and --render has none")
    output.mkdir(parents=True, exist_ok=True)
    report = _explain_example(output) if render_ else _compare(output, rollouts, seed, as_json)
    if open_:
        click.launch(str(report))


def _compare(output: Path, rollouts: int, seed: int, as_json: bool) -> Path:
    import asyncio

    from ..demo.paths import run_demo
    from ..demo.report import demo_document, demo_json
    from ..pocket import POCKET
    from ..rendering.factory import create_renderer

    with ProgressBars(transient=True, counts=True) as bars:
        result = asyncio.run(run_demo(rollouts=rollouts, seed=seed, progress=bars.show))
    summary = json.dumps(demo_json(result), indent=1)
    document = demo_document(result, create_renderer(POCKET))
    if as_json:
        click.echo(summary)
    else:
        print_result(document)
    write_file(output / "summary.json", summary + "\n")
    _write_rows(output, result.paths, seed)
    _write_trajectories(output / "trajectories", result.paths)
    write_page(output / "report.html", document)
    return output / "report.html"


def _write_rows(output: Path, reports: Sequence[PathReport], seed: int) -> None:
    """Write the training rows of tokentrace's path; as JSON Lines without pyarrow."""
    from ..data.tables import write_samples
    from ..samples.trajectories import trajectory_samples

    rollouts = reports[-1].rollouts
    samples = [row for one in rollouts for row in trajectory_samples(one.trajectory, reward=one.reward)]
    if importlib.util.find_spec("pyarrow") is None:
        write_file(output / "rows.jsonl", "".join(json.dumps(_json_row(row)) + "\n" for row in samples))
        return
    write_samples(output / "rows.parquet", samples, {"made_by": "tokentrace demo", "seed": seed})
    note(f"wrote {output / 'rows.parquet'}")


def _json_row(sample: Sample) -> dict[str, Any]:
    logprobs = [] if sample.logprobs is None else sample.logprobs.tolist()
    columns = {"loss_mask": sample.mask, "message_indices": sample.messages, "kinds": sample.kinds}
    return {
        "input_ids": sample.token_ids,
        **{name: values.tolist() for name, values in columns.items()},
        "logprobs": [None if math.isnan(value) else value for value in logprobs],
        **{"source": sample.name, "branch": sample.branch, "reward": sample.reward},
    }


def _write_trajectories(folder: Path, reports: Sequence[PathReport]) -> None:
    """Write each rollout of each path to a file; those of an earlier run are replaced."""
    from ..trajectory.storage import save_trajectory

    for one in reports:
        path = folder / one.path.replace(" ", "-")
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("held_back-*.tt"):
            old.unlink()
        for rollout in one.rollouts:
            save_trajectory(rollout.trajectory, path / f"{rollout.task.name}.tt")
    note(f"wrote {folder}")


def _explain_example(output: Path) -> Path:
    """Render the shipped example, print it, and write a page."""
    from ..pocket import EXAMPLE, POCKET
    from ..rendering.factory import create_renderer
    from .inputs import read_conversation

    messages, tools = read_conversation(str(EXAMPLE))
    renderer = create_renderer(POCKET)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    print_result(rendered, fold=True)
    user = rendered.select(role="user", field="content")
    pattern = renderer.tokenizer.vocabulary.control_pattern
    typed = pattern.findall(rendered.decode(user)) if pattern else []
    click.echo(
        f"\n- {int(rendered.mask.sum())} of {len(rendered)} tokens are sampled: what the assistant wrote, with each "
        "turn's stop token.\n  Generation prompts and the text of system, users and tools are not.\n"
        f"- In message 8 the user typed {' '.join(typed)}. It stayed text: {int(rendered.control[user].sum())} "
        "control tokens came of it."
    )
    write_page(output / "example.html", rendered, title="tokentrace demo")
    return output / "example.html"
