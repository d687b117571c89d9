"""A small example of each result that a page can show."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.pages import EVIL
from tokentrace import (
    Trajectory,
    build_supervised_samples,
    compare_histories,
    create_renderer,
    explain_break,
    trajectory_samples,
)
from tokentrace.diagnose.finding import Cause, Finding
from tokentrace.diagnose.rollouts import check_rollouts
from tokentrace.diagnose.row_files import CheckReport
from tokentrace.diagnose.rows import CheckedRow, Outcome
from tokentrace.pocket import EXAMPLE, POCKET

RENDERER = create_renderer(POCKET)
CONVERSATION: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
MESSAGES, TOOLS = CONVERSATION["messages"], CONVERSATION["tools"]
LAST_ONLY = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
    "{% if loop.last and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
"""A template that shows reasoning in the last turn alone."""


def rendering() -> Any:
    return RENDERER.render(MESSAGES, tools=TOOLS, add_generation_prompt=True)


@functools.cache
def first_turn() -> tuple[list[int], list[int]]:
    """The prompt and the completion of the first turn, which calls tools."""
    at = next(number for number, message in enumerate(MESSAGES) if message.get("tool_calls"))
    whole = RENDERER.render(MESSAGES[: at + 1], tools=TOOLS)
    turn = whole.turns[-1]
    return whole.token_ids[: turn.start], whole.token_ids[turn.start : turn.stop]


def bridge() -> Any:
    return RENDERER.bridge(*first_turn(), MESSAGES[3:5], tools=TOOLS)


def trajectory() -> Trajectory:
    """Two branches, weights that change in the middle of a turn, a reward."""
    prompt, completion = first_turn()
    rng = np.random.default_rng(0)
    record = Trajectory(name="rollout", metadata={"task": EVIL})
    record.begin(prompt, messages=2)
    record.append_completion(completion, (-rng.random(len(completion))).tolist(), finish_reason="stop", version="a")
    record.append_bridge(bridge())
    versions = [("a", 0, 3), ("b", 3, len(completion))]
    record.append_completion(completion, [-0.5] * len(completion), finish_reason="length", version=versions)
    record.branch([*record.stream()[: len(prompt) + 4].tolist(), *first_turn()[0][:9]], cause="retry")
    record.append_completion(completion[:7], [-0.25] * 7, finish_reason="stop", version="b")
    record.set_reward(0.5)
    return record


def histories(turns: int = 3) -> Any:
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}, and some more words."})
        messages.append({"role": "assistant", "content": f"It is {turn}.", "reasoning_content": f"Thinking of {turn}."})
    return compare_histories(create_renderer(POCKET, "default", chat_template=LAST_ONLY), messages)


def broken() -> Any:
    prompt, completion = first_turn()
    return explain_break(prompt + completion, prompt + completion[:4] + completion[6:], RENDERER)


def checked() -> CheckReport:
    finding = Finding(Cause.BPE_REMERGE, "", 0, "content", EVIL, 3)
    contrast = broken().contrast()
    report = CheckReport()
    report.notes.append(EVIL)
    for row in (
        CheckedRow("rows.jsonl, row 1", counts={"rows": 1, "tokens": 9}),
        CheckedRow("rows.jsonl, row 2", Outcome.IDS, "", (finding,), (contrast,), {"rows": 1, "tokens": 9}),
        CheckedRow("rows.jsonl, row 3", Outcome.BAD, EVIL, counts={"rows": 1}),
    ):
        report.add(row.counts, row.entries())
    return report


def inspected() -> Any:
    """The inspection of a trajectory with a rewritten history."""
    with tempfile.TemporaryDirectory() as folder:
        trajectory().save(Path(folder) / "one.tt")
        report = check_rollouts([str(Path(folder) / "one.tt")], RENDERER)
    report.notes.append(EVIL)
    return report


RESULTS = {
    "rendering": rendering,
    "bridge": bridge,
    "trajectory": trajectory,
    "sample": lambda: trajectory_samples(trajectory(), reward=1.0)[0],
    "supervised": lambda: build_supervised_samples(RENDERER, MESSAGES, tools=TOOLS)[0],
    "histories": histories,
    "break": broken,
    "check": checked,
    "inspection": inspected,
    "parsed": lambda: RENDERER.parse_response(first_turn()[1], tools=TOOLS, prompt_ids=first_turn()[0]),
}
