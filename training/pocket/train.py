"""Train the pocket model on the expert's conversations.

    python -m training.pocket.train                       # as shipped: one GPU
    python -m training.pocket.train --steps 30 --rows 8 --workers 1 --questions 12 --out pocket-try    # a try on a CPU

The data is generated while training: each question of ``questions.py`` gives one conversation of the expert, and
``tokentrace`` makes it a training row with loss on the assistant's turns (`build_supervised_sample`). The same settings
give the same rows in the same order. At the end the weights are rounded to the shipped precision and evaluated with
rollouts on held-back questions.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokentrace import Renderer, build_supervised_sample, create_renderer
from tokentrace.demo.questions import Question, follow_up, reward, run_tool
from tokentrace.pocket import NOISE, POCKET
from training.pocket.expert import solve
from training.pocket.model import SHIPPED, Cache, Pocket, Shape, save
from training.pocket.questions import Lesson, make_questions

HERE = Path(__file__).resolve().parent
LONGEST = 1024
CHUNK = 256
"""Conversations that a worker generates at a time."""
POOL = 16
"""Chunks whose conversations are sorted by length together, so that batches have little padding."""

# Fractions of noise, which makes the data more like a model's own text; `Noise` describes each.
UNTHINKING, SLIPS, RESEGMENTED, COMPACT = astuple(NOISE)

Row = tuple[np.ndarray, np.ndarray]


# -- data


@functools.cache
def renderer(thinking: bool = True) -> Renderer:
    return create_renderer(POCKET) if thinking else create_renderer(POCKET, enable_thinking=False)


@functools.cache
def splits() -> dict[int, list[tuple[int, int]]]:
    """For each token, the pairs of tokens that spell the same bytes."""
    spec = json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = spec["model"]["vocab"]
    pairs = {
        index: [
            (vocabulary[piece[:at]], vocabulary[piece[at:]])
            for at in range(1, len(piece))
            if piece[:at] in vocabulary and piece[at:] in vocabulary
        ]
        for piece, index in vocabulary.items()
    }
    return {index: choices for index, choices in pairs.items() if choices}


def resegment(ids: np.ndarray, mask: np.ndarray, rng: random.Random) -> Row:
    """The row with some of the assistant's tokens split into two."""
    new_ids: list[int] = []
    new_mask: list[bool] = []
    for index, trained in zip(ids.tolist(), mask.tolist(), strict=True):
        if trained and index in splits() and rng.random() < RESEGMENTED:
            new_ids += rng.choice(splits()[index])
            new_mask += [True, True]
        else:
            new_ids.append(index)
            new_mask.append(trained)
    return np.asarray(new_ids, np.int16), np.asarray(new_mask, np.bool_)


def make_row(question: Lesson, seed: int) -> Row:
    """A conversation as ids and loss mask."""
    rng = random.Random(f"row/{question.id}/{seed}")
    thinking = rng.random() >= UNTHINKING
    messages = solve(question, seed=seed, think=thinking, slips=SLIPS)
    for message in messages:
        for call in message.get("tool_calls", ()):
            if rng.random() < COMPACT:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"], separators=(",", ":"))
    sample = build_supervised_sample(renderer(thinking), messages, tools=question.tools, turns="flagged")
    return resegment(sample.ids, sample.mask, rng)


def make_chunk(job: tuple[int, int]) -> list[Row]:
    seed, start = job
    rows = [make_row(question, seed) for question in make_questions(seed, CHUNK, start=start)]
    return [row for row in rows if len(row[0]) <= LONGEST]


def chunks(seed: int, workers: int) -> Iterator[list[Row]]:
    """Endless chunks of rows, in an order that does not depend on the number of workers."""
    jobs = ((seed, start) for start in range(0, 2**40, CHUNK))
    if workers <= 1:
        yield from map(make_chunk, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = [pool.apply_async(make_chunk, (next(jobs),)) for _ in range(4 * workers)]
        while True:
            ready = waiting.pop(0).get()
            waiting.append(pool.apply_async(make_chunk, (next(jobs),)))
            yield ready


def batches(seed: int, rows: int, workers: int, pool: int = POOL) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of ids and masks, padded on the right."""
    rng = random.Random(f"batches/{seed}")
    source = chunks(seed, workers)
    while True:
        pooled = [row for _ in range(pool) for row in next(source)]
        rng.shuffle(pooled)
        pooled.sort(key=lambda row: len(row[0]))
        parts = [pooled[at : at + rows] for at in range(0, len(pooled) - rows + 1, rows)]
        rng.shuffle(parts)
        for batch in parts:
            width = -(-max(len(ids) for ids, _ in batch) // 32) * 32
            ids = np.zeros((len(batch), width), np.int16)
            mask = np.zeros((len(batch), width), np.bool_)
            for at, (row, trained) in enumerate(batch):
                ids[at, : len(row)] = row
                mask[at, : len(row)] = trained
            yield torch.from_numpy(ids), torch.from_numpy(mask)


# -- training


def train(options: argparse.Namespace, device: torch.device) -> tuple[Pocket, dict[str, Any]]:
    """Train, and return the model with rounded weights and the report."""
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = Pocket(Shape()).to(device)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    warm = min(options.warmup, options.steps // 5)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, options.steps - warm)))

    began = time.monotonic()
    curve: list[tuple[int, float]] = []
    losses: list[torch.Tensor] = []
    seen = trained = rows = 0
    data = batches(options.seed, options.rows, options.workers, options.pool)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * rate(step)
        ids, mask = next(data)
        seen, trained, rows = seen + ids.numel(), trained + int(mask.sum()), rows + len(ids)
        targets = mask.view(-1).nonzero()[:, 0].to(device, non_blocking=True)  # never the first token
        ids = ids.to(device, torch.long, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            states = model(ids).flatten(0, 1)[targets - 1]
            loss = torch.nn.functional.cross_entropy(model.logits(states).float(), ids.view(-1)[targets])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            curve.append((step + 1, round(mean, 4)))
            spent = time.monotonic() - began
            print(f"step {step + 1:6d}  loss {mean:.4f}  {seen / spent:,.0f} tokens/s  {spent:.0f} s", flush=True)
            if (
                options.minutes
                and step < options.steps // 4
                and spent * options.steps / (step + 1) > 60 * options.minutes
            ):
                raise SystemExit(f"{options.minutes} minutes are not enough for {options.steps} steps")
    data.close()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(SHIPPED))
    report = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": options.steps,
        "rows_per_step": options.rows,
        "conversations": rows,
        "tokens": seen,
        "tokens_with_loss": trained,
        "seconds": round(time.monotonic() - began),
        "settings": {"seed": options.seed, "rate": options.rate, "decay": options.decay, "warmup": warm},
        "noise": asdict(NOISE),
        "shape": asdict(model.shape),
        "loss": curve,
    }
    return model, report


# -- evaluation

Generate = Callable[[list[list[int]]], list[list[int]]]


@torch.inference_mode()
def generate(
    model: Pocket, prompts: list[list[int]], stop: int, temperature: float, longest: int = 160
) -> list[list[int]]:
    """Complete a batch of prompts, up to the stop token or `longest` tokens. Temperature 0 is greedy."""
    device = model.cos.device
    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device=device)
    for at, prompt in enumerate(prompts):
        ids[at, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    cache = Cache(model.shape, len(prompts), width + longest, device, torch.float32)
    states = model(ids, cache)[torch.arange(len(prompts), device=device), lengths - 1]
    cache.lengths.copy_(lengths)
    sampled: list[torch.Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for _ in range(longest):
        logits = model.logits(states).float()
        if temperature:
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1)[:, 0]
        else:
            token = logits.argmax(-1)
        sampled.append(token)
        done |= token == stop
        if bool(done.all()):
            break
        states = model(token[:, None], cache)[:, 0]
        cache.lengths += 1
    rows = torch.stack(sampled, 1).tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def roll_out(questions: Sequence[Question], generate: Generate, turns: int = 12) -> tuple[list[float], Counter[str]]:
    """Roll the questions out, and return the reward of each and counts of events."""
    codec = renderer()
    conversations = [list(question.prompt) for question in questions]
    prompts = [
        codec.render_ids(question.prompt, tools=question.tools, add_generation_prompt=True) for question in questions
    ]
    active = list(range(len(questions)))
    seen: Counter[str] = Counter()
    odd: set[int] = set()
    for _ in range(turns):
        if not active:
            break
        completions = generate([prompts[at] for at in active])
        continued = []
        for at, completion in zip(active, completions, strict=True):
            question = questions[at]
            parsed = codec.parse_response(completion, tools=question.tools, prompt_ids=prompts[at])
            seen["turns"] += 1
            seen["tokens"] += len(completion)
            if codec.tokenizer.encode(codec.tokenizer.decode(completion)).tolist() != completion:
                seen["turns with a non-canonical tokenization"] += 1
                odd.add(at)
            conversations[at].append(parsed.to_message())
            new = []
            for call in parsed.tool_calls:
                seen["calls"] += 1
                seen["malformed calls"] += not call.ok
                result = run_tool(question, call.name or "", call.arguments) if call.ok else f"Error: {call.problem}"
                seen["calls that a tool refused"] += call.ok and result.startswith("Error")
                new.append({"role": "tool", "tool_call_id": call.id or "call", "content": result})
            if not new and parsed.stop_token is not None:
                text = follow_up(question, conversations[at])
                new = [] if text is None else [{"role": "user", "content": text}]
            if not new or len(prompts[at]) + len(completion) > LONGEST:
                continue
            bridged = codec.bridge_to_next_turn(prompts[at], completion, new, tools=question.tools)
            if bridged is None:
                seen["bridges refused"] += 1
                continue
            conversations[at] += new
            prompts[at] = bridged.token_ids
            continued.append(at)
        active = continued
    seen["rollouts with a non-canonical tokenization"] = len(odd)
    return [
        reward(question, conversation) for question, conversation in zip(questions, conversations, strict=True)
    ], seen


def evaluate(model: Pocket, count: int, temperature: float, seed: int) -> dict[str, Any]:
    """Roll held-back questions out, and return the accuracy by kind."""
    torch.manual_seed(seed)
    stop = renderer().get_stop_token_ids()[0]
    questions = make_questions(seed, count, "held_back")
    rewards: list[float] = []
    seen: Counter[str] = Counter()
    for start in range(0, count, 600):
        part_rewards, part_seen = roll_out(
            questions[start : start + 600], lambda prompts: generate(model, prompts, stop, temperature)
        )
        rewards += part_rewards
        seen += part_seen
    by_kind = defaultdict(list)
    for question, value in zip(questions, rewards, strict=True):
        by_kind[question.kind].append(value)
    return {
        "questions": count,
        "temperature": temperature,
        "solved": round(sum(rewards) / count, 4),
        "by_kind": {kind: round(sum(values) / len(values), 4) for kind, values in by_kind.items()},
        "seen": dict(seen),
    }


# -- the report


def loss_curve(curve: Sequence[tuple[int, float]]) -> str:
    """An SVG of the losses, with a logarithmic axis."""
    wide, high, left, low = 640, 320, 56, 36
    last = curve[-1][0]
    values = [math.log10(loss) for _, loss in curve]
    bottom, top = math.floor(min(values) * 4) / 4, math.ceil(max(values) * 4) / 4

    def across(step: float) -> float:
        return round(left + step / last * (wide - left - 16), 1)

    def up(value: float) -> float:
        return round(16 + (top - value) / (top - bottom) * (high - low - 16), 1)

    points = " ".join(f"{across(step)},{up(math.log10(loss))}" for step, loss in curve)
    marks = [f'<text x="{wide // 2}" y="{high - 4}" text-anchor="middle">step</text>']
    marks += [
        f'<text x="{across(last * part / 4)}" y="{high - 20}" text-anchor="middle">{last * part // 4:,}</text>'
        for part in range(5)
    ]
    for at in range(int((top - bottom) * 4) + 1):
        value = bottom + at / 4
        marks.append(f'<path d="M{left} {up(value)}H{wide - 16}" stroke="#ddd"/>')
        marks.append(f'<text x="{left - 6}" y="{up(value) + 4}" text-anchor="end">{10**value:.3g}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" '
        'font-size="12">\n'
        f'<title>Loss per assistant token while training</title>\n<rect width="{wide}" height="{high}" fill="#fff"/>\n'
        + "\n".join(marks)
        + f'\n<polyline points="{points}" fill="none" stroke="#2457a6" stroke-width="1.5"/>\n</svg>\n'
    )


def main() -> None:
    """Train, save and evaluate the model, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--rows", type=int, default=128, help="conversations in a batch")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=15, help="processes that make data")
    parser.add_argument("--pool", type=int, default=POOL, help="chunks that are sorted by length together")
    parser.add_argument("--questions", type=int, default=1200, help="held-back questions")
    parser.add_argument("--every", type=int, default=100, help="steps between two losses")
    parser.add_argument("--minutes", type=float, default=0, help="give up early if this will not be enough; 0: never")
    parser.add_argument("--out", type=Path, default=POCKET, help="where the model goes")
    parser.add_argument("--report", type=Path, default=None, help="where report.json and loss.svg go")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, report = train(options, device)
    tokenizer = renderer().tokenizer
    bos, eos, pad = (tokenizer.token_id(name) for name in ("<|bos|>", "<|end|>", "<|pad|>"))
    options.out.mkdir(parents=True, exist_ok=True)
    save(model, options.out, bos=bos, eos=eos, pad=pad)
    report["bytes"] = (options.out / "model.safetensors").stat().st_size
    report["greedy"] = evaluate(model, options.questions, 0.0, seed=options.seed + 1000)
    report["sampled"] = evaluate(model, options.questions, 1.0, seed=options.seed + 1000)
    folder = options.report or (HERE if options.out == POCKET else options.out)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8", newline="\n")
    (folder / "loss.svg").write_text(loss_curve(report["loss"]), encoding="utf-8", newline="\n")
    print(json.dumps({key: report[key] for key in ("parameters", "bytes", "seconds", "greedy", "sampled")}, indent=1))


if __name__ == "__main__":
    main()
