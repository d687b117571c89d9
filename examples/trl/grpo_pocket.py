"""GRPO of the embedded model with TRL, on a CPU: it learns to give correct answers in few tokens.

Needs `pip install trl torch`. Each rollout is an agent with a calculator; the loss gets exactly the sampled ids.
"""

import argparse
import os
import random
from fractions import Fraction

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tokentrace import Agent, Budget, EmbeddedEngine, Task, create_renderer
from tokentrace.demo.calculator import calculate
from tokentrace.integrations.trl import RolloutFunction, rollout_reward
from tokentrace.pocket import POCKET
from tokentrace.rollout import Rollout


def calculator(expression: str) -> Fraction:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def brevity(rollout: Rollout) -> float:
    """The reward: 0 for a wrong answer, else falling from 1 for no tokens to 0 for 100 or more."""
    right = str(rollout.task.metadata["answer"]) in rollout.answer.replace(",", "")
    return right * max(0.0, 1 - rollout.trajectory.num_sampled / 100)


def questions(count: int, seed: int) -> dict[str, int]:
    """Questions and their answers."""
    rng = random.Random(seed)
    answers: dict[str, int] = {}
    while len(answers) < count:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        answers[f"What is {a} * {b} + {c}?"] = a * b + c
    return answers


def main() -> None:
    """Train, and print the reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rollouts", type=int, default=32, help="in each step, 8 of each question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="grpo-pocket")
    options = parser.parse_args()

    answers = questions(512, options.seed)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in answers]

    def task(prompt: list[dict[str, str]]) -> Task:
        """TRL passes only the prompt, so the answer is looked up."""
        return Task(prompt, metadata={"answer": answers[prompt[-1]["content"]]})

    engine = EmbeddedEngine(seed=options.seed)
    agent = Agent(
        engine, create_renderer(POCKET), tools=[calculator], reward=brevity, budget=Budget(turns=4, turn_tokens=96)
    )
    rollouts = RolloutFunction(agent, weights_to=engine, task=task, seed=options.seed)
    config = GRPOConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.rollouts,
        num_generations=8,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        str(POCKET),
        reward_funcs=rollout_reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        rollout_func=rollouts,
    )
    try:
        trainer.train()
    finally:
        rollouts.close()
    trainer.save_model(options.output)
    for log in trainer.state.log_history[:-1]:
        print(f"step {log['step']:3}  reward {log['reward']:.3f}  tokens {log['completions/mean_length']:.1f}")


if __name__ == "__main__":
    main()
