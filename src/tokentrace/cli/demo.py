"""``tokentrace demo``."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import command
from .options import flag, folder_option, json_option, number
from .output import ProgressBars, note, print_result, write_file, write_page

if TYPE_CHECKING:
    from ..samples.sample import Sample


@command
@number("-n", "--rollouts", default=64, text="Rollouts per path.")
@number("--seed", default=0, least=0, text="The seed of questions and sampling.")
@folder_option("The output folder.", default="tokentrace-demo")
@flag("--render", "render_", text="Instead, render an example and explain it.")
@flag("--open", "open_", text="Open the report in a browser.")
@json_option("Print the table as JSON.")
def demo(*, rollouts: int, seed: int, output: Path, render_: bool, open_: bool, as_json: bool) -> None:
    """Run agents on the embedded pocket model through three client paths: same questions, same seeds.

    Two of them keep messages and encode them again for every turn; tokentrace keeps what was sampled. The first
    table shows what that costs: breaks, samples, mismatched tokens, and how far a trainer's logprobs are from the
    engine's. Pocket was trained with noise that makes streams break; the second table shows which breaks need it.

    \b
    Examples:
      tokentrace demo
      tokentrace demo --render --open
    """
    if as_json and render_:
        raise click.UsageError("--json prints the table, but --render has none")
    output.mkdir(parents=True, exist_ok=True)
    report = _explain_example(output) if render_ else _compare(output, rollouts, seed, as_json)
    if open_:
        click.launch(str(report))


def _compare(output: Path, rollouts: int, seed: int, as_json: bool) -> Path:
    import asyncio

    from ..demo.paths import demo_document, demo_json, run_demo
    from ..samples.trajectories import trajectory_samples

    with ProgressBars(transient=True, counts=True) as bars:
        trials = asyncio.run(run_demo(rollouts=rollouts, seed=seed, progress=bars.show))
    summary, document = json.dumps(demo_json(trials, seed), indent=1), demo_document(trials, seed)
    if as_json:
        click.echo(summary)
    else:
        print_result(document)
    write_file(output / "summary.json", summary + "\n")
    ours = trials[0].reports[-1].rollouts
    rows = [row for one in ours for row in trajectory_samples(one.trajectory, reward=one.reward)]
    _write_rows(output, rows, seed)
    for report in trials[0].reports:
        path = output / "trajectories" / report.path.replace(" ", "-")
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("held_back-*.tt"):
            old.unlink()
        for rollout in report.rollouts:
            rollout.trajectory.save(path / f"{rollout.task.name}.tt")
    note(f"wrote {output / 'trajectories'}")
    write_page(output / "report.html", document)
    return output / "report.html"


def _write_rows(output: Path, samples: Sequence[Sample], seed: int) -> None:
    from ..data.tables import write_samples

    path = output / "rows.parquet"
    if importlib.util.find_spec("pyarrow") is not None:
        write_samples(path, samples, {"made_by": "tokentrace demo", "seed": seed})
        note(f"wrote {path}")
        return
    lines = ""
    for one in samples:
        columns = {"loss_mask": one.mask, "message_indices": one.messages, "kinds": one.kinds}
        row = {"input_ids": one.token_ids, **{name: values.tolist() for name, values in columns.items()}}
        if one.logprobs is not None:
            row["logprobs"] = [None if math.isnan(value) else value for value in one.logprobs.tolist()]
        lines += json.dumps(row | {"source": one.name, "branch": one.branch, "reward": one.reward}) + "\n"
    write_file(path.with_suffix(".jsonl"), lines)


def _explain_example(output: Path) -> Path:
    from ..pocket import EXAMPLE, POCKET
    from ..rendering.factory import create_renderer
    from .inputs import read_conversation

    messages, tools = read_conversation(str(EXAMPLE))
    renderer = create_renderer(POCKET)
    rendered = renderer.render(messages, tools=tools, add_generation_prompt=True)
    print_result(rendered)
    user = rendered.select(role="user", field="content")
    pattern = renderer.tokenizer.vocabulary.control_pattern
    typed = pattern.findall(rendered.decode(user)) if pattern else []
    click.echo(
        f"\n- {int(rendered.mask.sum())} of {len(rendered)} tokens are sampled: what the assistant wrote, with "
        "each turn's stop token.\n  Generation prompts and the text of system, users and tools are not.\n"
        f"- In message 8 the user typed {' '.join(typed)}. It stayed text: {int(rendered.control[user].sum())} "
        "of its tokens are control tokens."
    )
    write_page(output / "example.html", rendered, title="tokentrace demo")
    return output / "example.html"
