"""`inspect_rollouts`: what happened to the tokens of rollouts, whoever recorded them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engines.protocol import Engine
from ..tokens.tokenizer import Tokenizer
from .dumps.calls import DumpedRollout, UnreadSource
from .dumps.reading import Progress, read_rollouts
from .inspect_calls import InspectedRollout, inspect_rollout
from .inspect_report import Inspection
from .inspect_scores import Scores
from .shown_turns import ShownTurns


def inspect_rollouts(
    inputs: Sequence[str],
    known: Any = None,
    *,
    shape: str | None = None,
    limit: int | None = None,
    engine: Callable[[], Any] | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Check the rollouts that `inputs` name: does each prompt extend the stream, and if not, why and at what cost.

    - `inputs` and `shape` are as `read_rollouts` takes them.
    - `known` is the tokenizer of the model or, better, a renderer. Without one, breaks are found and not explained.
    - `limit`: look at so many rollouts only.
    - `engine` connects to an engine (a function that returns an `Engine`, or something to await): the logprobs of the
      dump are compared with those that it gives.

    Memory does not grow with the number of rollouts but for a few bytes for each length. What cannot be read is in the
    report; InputError where an input is not there, or is nothing that is known.
    """
    report = Inspection(explained=known is not None)
    digest = None if known is None else (known if isinstance(known, Tokenizer) else known.tokenizer).digest
    shown = ShownTurns.of(known)
    with contextlib.ExitStack() as stack:
        add_scores = None if engine is None else _scoring(engine, report, stack)
        for found in read_rollouts(inputs, shape=shape, progress=progress, told=report.notes.append):
            if limit is not None and report.rollouts == limit:
                report.stopped = True
                break
            if isinstance(found, UnreadSource):
                report.skip(found)
                continue
            _note(report, found, digest)
            inspected = inspect_rollout(found, known, shown)
            report.add(inspected)
            if add_scores is not None:
                add_scores(inspected)
    return report


def _note(report: Inspection, found: DumpedRollout, digest: str | None) -> None:
    said = list(found.notes)
    if digest is not None and found.tokenizer is not None and not digest.startswith(found.tokenizer):
        said.append("rollouts were recorded with another tokenizer than the one given: their breaks are misread")
    report.notes += [one for one in said if one not in report.notes]


def _scoring(
    connect: Callable[[], Any], report: Inspection, stack: contextlib.ExitStack
) -> Callable[[InspectedRollout], None]:
    """Adds the scores of a rollout to a report, from an engine in an event loop of its own; the stack closes both."""

    async def opened() -> Engine:
        made = connect()
        engine: Engine = await made if hasattr(made, "__await__") else made
        return engine

    runner = stack.enter_context(asyncio.Runner())
    engine = runner.run(opened())
    stack.callback(lambda: runner.run(engine.close()))
    scores = report.scores = Scores()
    return lambda found: runner.run(scores.add(found, engine))


def recorded_tokenizer(inputs: Sequence[str]) -> str | None:
    """The tokenizer that the output folder of a run names, where an input is one; the embedded model's where the run
    was on that."""
    from ..pocket import POCKET

    for given in inputs:
        path = Path(given).expanduser() / "run.json"
        if "://" in given or not path.is_file():
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
            engine = settings["engine"]
            name = settings.get("tokenizer")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if isinstance(name, str):
            return name
        if isinstance(engine, dict) and engine.get("kind", engine.get("type")) == "embedded":
            return str(POCKET)
    return None
