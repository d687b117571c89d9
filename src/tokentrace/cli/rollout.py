"""``tokentrace rollout``."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from . import debug_option, one_blas_thread

if TYPE_CHECKING:
    from ..rollout.batch import Summary
    from ..rollout.loop import Rollout
    from ..rollout.setup import Run
    from ..rollout.store import RolloutStore

_BAD_ENDS: Final = ("engine", "failed", "bridge", "abort")
"""Ends that are neither the agent's own nor a budget's."""


@click.command(short_help="Run agents on an engine and keep exact training rows.")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CONFIG.yaml")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="The folder to write to.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Run the first N tasks only.")
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="How many rollouts are under way at once.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="What the seeds of all rollouts are made from.")
@click.option("--fresh", is_flag=True, help="Discard an earlier run in the output folder instead of going on with it.")
@click.option("--retry", is_flag=True, help=f"Run those again that ended with {', '.join(_BAD_ENDS)}.")
@click.option("--json", "as_json", is_flag=True, help="Write the metrics to stdout as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary.")
@debug_option
@click.pass_context
def rollout(
    ctx: click.Context,
    /,
    *,
    config: Path,
    output: Path | None,
    limit: int | None,
    concurrency: int | None,
    seed: int | None,
    fresh: bool,
    retry: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run agents on an engine, and keep training rows of exactly the tokens that were sampled.

    CONFIG.yaml names the engine, tools, data, sampling and output; see docs/rollout.md. Options go before what it says.

    The output folder gets a file for each trajectory, a journal (rollouts.jsonl), the rows (rows.parquet) and
    metrics.json. A run that was interrupted goes on where it stopped: finished rollouts are on the disk and are
    skipped, those that were under way are run again.

    The exit code is 0 if every rollout ended by itself or by a budget, 1 if some did not (engine, failed, bridge,
    abort), 2 on errors.

    \b
    Examples:
      tokentrace rollout examples/configs/pocket.yaml
      tokentrace rollout agents.yaml --output runs/7 --limit 100 --concurrency 256
      tokentrace rollout agents.yaml --output runs/7 --fresh
      tokentrace rollout agents.yaml --json -q > metrics.json
    """
    one_blas_thread()
    from ..errors import InputError
    from ..rollout.setup import read_run
    from ..rollout.store import RolloutStore, check_run, discard_run

    run = read_run(config, output=output, limit=limit, concurrency=concurrency, seed=seed)
    if fresh:
        discard_run(run.output)
    try:
        check_run(run.output, run.settings)
    except InputError as error:
        raise InputError(f"{error}; --fresh discards that run, --output names another folder") from error
    store = RolloutStore(run.output)
    try:
        again = store.run_again(_BAD_ENDS) if retry else []
        before = {"unfinished_before": len(store.unfinished), "retried": len(again)}
        if not quiet:
            _announce(run, store, before)
        try:
            summary = asyncio.run(_run(run, store, quiet))
        except KeyboardInterrupt:
            done = f"{len(store.finished)} of {len(run.tasks)} rollouts are finished and kept"
            click.secho(f"\ninterrupted: {done}; the same command goes on with the rest", fg="yellow", err=True)
            ctx.exit(130)
        metrics = {**summary.described(), **before, "output": str(run.output), "advantages": run.advantages}
        problem = _write(run, store, metrics)
    finally:
        store.close()
    if as_json:
        click.echo(json.dumps(metrics, indent=2))
    if not quiet:
        _summarize(summary, metrics, as_json)
    if problem is not None:
        raise InputError(f"{problem}; the trajectories are kept, and the same command then writes the rows")
    ctx.exit(1 if any(summary.ends[end] for end in _BAD_ENDS) else 0)


async def _run(run: Run, store: RolloutStore, quiet: bool) -> Summary:
    from ..rollout.batch import Summary, run_rollouts

    if all(store.is_finished(task.name) for task in run.tasks):  # no engine is needed to say so
        return Summary.of(store)
    engine = await run.connect()
    try:
        with _Display(len(run.tasks), store, quiet) as display:
            return await run_rollouts(
                run.agent(engine),
                run.tasks,
                concurrency=min(run.concurrency, len(run.tasks)),
                store=store,
                done=display.update,
                seed=run.seed,
            )
    finally:
        await engine.close()


def _write(run: Run, store: RolloutStore, metrics: dict[str, Any]) -> str | None:
    """Write rows and metrics; says why the rows could not be written."""
    from ..errors import InputError
    from ..rollout.store import METRICS

    problem = None
    try:
        metrics["rows"] = str(store.write_rows(advantages=run.advantages, metadata={"settings": run.settings}))
    except InputError as error:
        problem, metrics["rows"] = str(error), None
    (run.output / METRICS).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    return problem


def _announce(run: Run, store: RolloutStore, before: dict[str, int]) -> None:
    if store.finished or before["unfinished_before"]:
        said = f"going on: {len(store.finished):,} of {len(run.tasks):,} rollouts are finished"
        if before["unfinished_before"]:
            said += f", {before['unfinished_before']:,} were under way and are run again"
        click.secho(said, dim=True, err=True)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        click.secho("pyarrow is missing: no rows will be written (install tokentrace[data])", fg="yellow", err=True)


class _Display:
    """Progress with rate and time left: a bar on a terminal, a line now and then elsewhere."""

    _EVERY = 15.0

    def __init__(self, total: int, store: RolloutStore, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._quiet = quiet
        self._total = total
        self._before = self._done = len(store.finished)
        told = [row["metrics"]["reward"] for row in store.finished if row["metrics"]["reward"] is not None]
        self._reward, self._rewarded = sum(told), len(told)
        self._errors = sum(row["metrics"]["tool_errors"] for row in store.finished)
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> _Display:
        if not self._quiet and self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("rollouts"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, completed=self._done, said="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, rollout: Rollout) -> None:
        self._done += 1
        self._errors += rollout.use.failed
        if rollout.reward is not None:
            self._reward, self._rewarded = self._reward + rollout.reward, self._rewarded + 1
        now = time.monotonic()
        rate = (self._done - self._before) / max(now - self._began, 1e-9)
        said = f"{rate:.1f}/s"
        if self._rewarded:
            said += f" · reward {self._reward / self._rewarded:.3f}"
        if self._errors:
            said += f" · {self._errors:,} tool errors"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, said=said)
        elif not self._quiet and now - self._said >= self._EVERY:
            self._said = now
            left = (self._total - self._done) / rate
            click.echo(f"{self._done:,} of {self._total:,} rollouts · {said} · {left:.0f} s left", err=True)


def _summarize(summary: Summary, metrics: dict[str, Any], to_stderr: bool) -> None:
    count = max(summary.rollouts, 1)
    speed = metrics["tokens_per_second"]
    rows = [
        (
            "rollouts",
            f"{summary.rollouts:,}" + (f" ({summary.resumed:,} by an earlier run)" if summary.resumed else ""),
        ),
        ("ended by", ", ".join(f"{end} {number:,}" for end, number in summary.ends.most_common()) or "-"),
        ("turns", f"{summary.turns:,} ({summary.turns / count:.1f} a rollout)"),
        (
            "sampled tokens",
            f"{summary.sampled:,} of {summary.tokens:,}" + (f", {speed:,.0f} a second" if speed else ""),
        ),
        ("tool calls", f"{summary.tool_calls:,}, {summary.tool_errors:,} with errors"),
        ("malformed turns", f"{summary.malformed_turns:,}"),
        ("breaks", f"{summary.breaks:,}"),
        ("samples", f"{summary.samples:,} ({summary.samples / count:.2f} a rollout)"),
        ("reward", "none" if metrics["reward"] is None else f"{metrics['reward']:.3f} on average"),
    ]
    if metrics["unfinished_before"]:
        rows.insert(1, ("unfinished before", f"{metrics['unfinished_before']:,}, run again"))
    click.secho(f"wrote {metrics['rows'] or metrics['output']}", bold=True, err=to_stderr)
    for name, said in rows:
        click.echo(f"  {name:<17} {said}", err=to_stderr)
    without = summary.rollouts - len(summary.rewards)
    if without and metrics["advantages"]:
        said = f"  {without:,} rollouts have no reward, and their rows no advantages"
        click.secho(said, fg="yellow", err=to_stderr)
    bad = sum(summary.ends[end] for end in _BAD_ENDS)
    if bad:
        where = f"{metrics['output']}/rollouts.jsonl says why; --retry runs them again"
        click.secho(f"  {bad:,} did not end by themselves or a budget: {where}", fg="red", err=to_stderr)
