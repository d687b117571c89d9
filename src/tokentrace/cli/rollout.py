"""``tokentrace rollout``."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import click

from ..errors import InputError, TokentraceError
from ..rollout.ends import FAILED_ENDS, End
from ..show.visible import counted
from . import command, options
from .output import ProgressBars, note, working

if TYPE_CHECKING:
    from ..engines.protocol import Engine
    from ..engines.routing import Circuit
    from ..rollout.batch import Summary
    from ..rollout.cluster import MakeCrew
    from ..rollout.record import Rollout
    from ..rollout.setup import Run
    from ..rollout.store import RolloutStore

_FAILED = tuple(sorted(map(str, FAILED_ENDS)))


@command
@click.argument(
    "config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CONFIG.yaml"
)
@options.folder_option("The folder to write to.")
@options.number("--limit", text="Run the first N tasks only.")
@options.number("--concurrency", text="How many rollouts run at once.")
@options.number("--seed", least=0, text="The seed of all rollouts' seeds.")
@options.flag("--fresh", text="Discard an earlier run in the folder instead of continuing it.")
@options.flag("--retry", text=f"Rerun rollouts that ended with {', '.join(_FAILED)}.")
@options.flag("--continue-aborted", text="Continue unfinished rollouts from their tokens.")
@options.ray_option
@options.number("-j", "--workers", text="Actors on Ray.  [default: all CPUs]")
@options.json_option("Write the metrics to stdout as JSON.")
@options.quiet_option
@click.pass_context
def rollout(ctx: click.Context, /, *, config: Path, **options: Any) -> None:
    """Run agents on an engine, and keep training rows of exactly the sampled tokens.

    CONFIG.yaml names the engine, tools, data, sampling and output; see docs/rollout.md. Options override it.

    The output folder gets a store with a session per rollout (rollouts.db), the rows (rows.parquet) and
    metrics.json. The same command continues an interrupted run: finished rollouts are skipped, unfinished ones
    run again (with --continue-aborted: go on from their tokens). If the engine stops answering, the run waits as
    long as `patience` allows.

    The exit code is 0 if every rollout ended by itself or by a budget, 1 if some failed (abort, bridge, engine,
    failed, hung), 2 on errors and if no engine answers at the start, 3 if it was down too long, 130 on Ctrl-C.

    \b
    Examples:
      tokentrace rollout examples/configs/pocket.yaml
      tokentrace rollout agents.yaml --output runs/7 --limit 100 --concurrency 256
      tokentrace rollout agents.yaml --json -q > metrics.json
      tokentrace rollout /shared/agents.yaml --output /shared/runs/7 --ray auto
    """
    from ..demo.questions import question_tasks
    from ..rollout.cluster import configured_crew
    from ..rollout.patience import EngineDown
    from ..rollout.setup import read_run
    from ..rollout.store import RolloutStore, check_run, discard_run, group_advantages

    names = ("fresh", "retry", "continue_aborted", "ray", "workers", "as_json", "quiet")
    job = SimpleNamespace(**{name: options.pop(name) for name in names})
    if job.workers is not None and job.ray is None:
        raise click.UsageError("--workers is the number of actors on Ray: give --ray, too")
    if job.continue_aborted and job.ray is not None:
        raise click.UsageError("--continue-aborted works in this process: leave out --ray")
    options["questions"] = question_tasks
    with working("loading"):
        run = read_run(config, **options)
    if job.fresh:
        discard_run(run.output)
    store = RolloutStore(run.output)  # locks the folder, so that no other process changes it
    try:
        try:
            check_run(run.output, run.settings)
        except InputError as error:
            raise InputError(f"{error}; --fresh discards that run, --output names another") from error
        again = store.run_again(_FAILED if job.retry else [End.ABORT] if job.continue_aborted else [])
        unfinished = len(store.unfinished)
        before = {"unfinished_before": unfinished, "retried": len(again)}
        if not job.quiet and (store.finished or unfinished):
            how = "to continue from their tokens" if job.continue_aborted else "to run again"
            more = f", {unfinished:,} unfinished {how}" if unfinished else ""
            note(f"continuing: {_finished(run, store)}{more}")
        try:
            crew = partial(
                configured_crew, config.absolute(), options | {"output": run.output}, run.settings
            )
            summary, circuits, waited = asyncio.run(_run(run, store, job, crew))
        except (KeyboardInterrupt, EngineDown) as error:
            is_down = isinstance(error, EngineDown)
            why = f"stopped: {' '.join(str(error).split())}" if is_down else "\ninterrupted"
            click.secho(why, fg="red", err=True)
            done = f"{_finished(run, store)} and kept; the same command continues with the rest"
            click.secho(done, fg="yellow", err=True)
            ctx.exit(3 if is_down else 130)
        metrics = {**summary.described(), **before, "output": str(run.output), "advantages": run.advantages}
        metrics["advantage_notes"] = list(group_advantages(store.finished).notes) if run.advantages else []
        metrics |= {"waited_seconds": waited, "circuits": [one.described() for one in circuits]}
        problem = _write(run, store, metrics)
    finally:
        store.close()
    if job.as_json:
        click.echo(json.dumps(metrics, indent=2))
    if not job.quiet:
        _summarize(summary, metrics, circuits, job.as_json)
    if problem is not None:
        raise InputError(
            f"{problem}; the trajectories are kept: fix it, then the same command writes the rows"
        )
    ctx.exit(1 if any(summary.ends[end] for end in _FAILED) else 0)


def _finished(run: Run, store: RolloutStore) -> str:
    return f"{len(store.finished):,} of {counted(len(run.tasks), 'rollout')} finished"


async def _run(
    run: Run, store: RolloutStore, job: SimpleNamespace, crew: MakeCrew
) -> tuple[Summary, list[Circuit], float]:
    """The summary, the endpoints' states, and how long the run waited for an engine."""
    from ..rollout.batch import Summary, run_rollouts
    from ..rollout.cluster import run_rollouts_on_ray
    from ..rollout.patience import Patience

    tasks, count = run.tasks, len(run.tasks)
    if all(store.is_finished(task.name) for task in tasks):  # this needs no engine
        return Summary.of(store), [], 0.0
    options: dict[str, Any] = {"concurrency": min(run.concurrency, count), "store": store, "seed": run.seed}
    if job.ray is not None:
        options |= {"make": crew, "workers": job.workers, "address": job.ray or None}
        with _Display(count, store, job.quiet) as display:
            options |= {"done": display.update, "patience": run.file.patience}
            return await run_rollouts_on_ray(tasks=tasks, **options), [], 0.0
    with working("connecting to the engine"):
        engine = await run.connect()
    try:
        with _Display(count, store, job.quiet, engine) as display:
            patience = Patience(run.file.patience, notice=display.outage)
            options |= {
                "done": display.update,
                "patience": patience,
                "continue_aborted": job.continue_aborted,
            }
            summary = await run_rollouts(run.agent(engine), tasks, **options)
            return summary, getattr(engine, "circuits", []), patience.waited
    finally:
        try:
            await run.close()
        finally:
            await engine.close()


def _write(run: Run, store: RolloutStore, metrics: dict[str, Any]) -> str | None:
    """Write rows and metrics. Returns why the rows could not be written."""
    from ..files import write_whole
    from ..rollout.store import METRICS

    problem = metrics["rows"] = None
    try:
        metrics["rows"] = str(
            store.write_rows(advantages=run.advantages, metadata={"settings": run.settings})
        )
    except TokentraceError as error:
        problem = str(error)
    write_whole(run.output / METRICS, (json.dumps(metrics, indent=2) + "\n").encode(), private=True)
    return problem


class _Display(ProgressBars):
    _OUTAGES_EVERY = 60.0

    def __init__(self, total: int, store: RolloutStore, quiet: bool, engine: Engine | None = None) -> None:
        super().__init__(quiet=quiet, counts=True)
        from ..rollout.batch import Summary

        self._engine, self._total = engine, total
        self._summary, self._reported = Summary.of(store), 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self.show("rollouts", self._summary.rollouts, self._total)
        return self

    def update(self, rollout: Rollout) -> None:
        summary = self._summary
        summary.add(rollout.metrics())
        done = summary.rollouts
        rate = (done - summary.resumed) / max(time.monotonic() - self._began, 1e-9)
        status = f"{rate:.1f}/s"
        if summary.rewards:
            status += f" · reward {summary.reward:.3f}"
        if summary.tool_errors:
            status += f" · {counted(summary.tool_errors, 'tool error')}"
        status += _circuits(self._engine)
        left = f"{(self._total - done) / rate:.0f} s left"
        line = f"{done:,} of {counted(self._total, 'rollout')} · {status} · {left}"
        self.show("rollouts", done, self._total, status, line)

    def outage(self, outage: str | None) -> None:
        """Report an outage from time to time, and once that the engine answers again."""
        now, due = time.monotonic(), self._reported + self._OUTAGES_EVERY
        if self._quiet or (outage is not None and self._reported and now < due):
            return
        self._reported, text, style = 0.0, "the engine answers again: continuing", "green"
        if outage is not None:
            self._reported, text, style = now, f"{outage}{_circuits(self._engine)}", "yellow"
        self._console.print(text, style=style, markup=False, highlight=False)


def _circuits(engine: Engine | None) -> str:
    circuits = getattr(engine, "circuits", [])
    away = [str(one) for one in circuits if one.cooldown]
    states = ", ".join([f"{len(circuits) - len(away)} closed", *away])
    return f" · engines: {states}" if circuits else ""


def _summarize(summary: Summary, metrics: dict[str, Any], circuits: list[Circuit], to_stderr: bool) -> None:
    count, speed, reward = max(summary.rollouts, 1), metrics["tokens_per_second"], metrics["reward"]
    cached, prompted = summary.cached_tokens, summary.prompt_tokens
    earlier = f" ({summary.resumed:,} by an earlier run)" if summary.resumed else ""
    rows = {
        "rollouts": f"{summary.rollouts:,}{earlier}",
        "ended by": ", ".join(f"{end} {number:,}" for end, number in summary.ends.most_common()) or "-",
        "turns": f"{summary.turns:,} ({summary.turns / count:.1f} per rollout)",
        "sampled tokens": f"{summary.sampled:,} of {summary.tokens:,}"
        + (f", {speed:,.0f}/s" if speed else ""),
        "cached tokens": ""
        if cached is None
        else f"{cached:,} of {prompted:,} in prompts ({cached / max(1, prompted):.0%})",
        "tool calls": f"{summary.tool_calls:,}, {summary.tool_errors:,} with errors",
        "malformed turns": f"{summary.malformed_turns:,}",
        "breaks": f"{summary.breaks:,}",
        "samples": f"{summary.samples:,} ({summary.samples / count:.2f} per rollout)",
        "reward": "none" if reward is None else f"{reward:.3f} on average",
        "engines": "; ".join(map(str, circuits)),
    }
    click.secho(f"wrote {metrics['rows'] or metrics['output']}", bold=True, err=to_stderr)
    for name, text in rows.items():
        if text:
            click.echo(f"  {name:<17} {text}", err=to_stderr)
    notes = list(metrics["advantage_notes"])
    without = summary.rollouts - len(summary.rewards)
    if without and metrics["advantages"]:
        notes.insert(0, f"{counted(without, 'rollout')} without a reward: no advantages for their rows")
    for text in notes:
        click.secho(f"  {text}", fg="yellow", err=to_stderr)
    if failed := sum(summary.ends[end] for end in _FAILED):
        where = f"{metrics['output']}/rollouts.db says why; --retry runs them again"
        click.secho(f"  {failed:,} failed and have no reward: {where}", fg="red", err=to_stderr)
