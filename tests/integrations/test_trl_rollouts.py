"""`RolloutFunction` with our rollouts and those of agents behind the gateway, without a trainer."""

import asyncio
import dataclasses
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.server import TOOLS, gateway_server
from tests.lazy import lazy
from tokentrace import Agent, InputError, Task, Trajectory, create_renderer
from tokentrace.demo.calculator import calculate
from tokentrace.engines import SamplingParams, ScriptedEngine
from tokentrace.errors import SampleError
from tokentrace.integrations.gateway import GatewayAgent, Session
from tokentrace.integrations.rows import FinishedRollout
from tokentrace.integrations.trl import BackgroundLoop, Collator, RolloutFunction, rollout_reward, unless_failed
from tokentrace.pocket import POCKET
from tokentrace.samples.trajectories import trajectory_samples

openai = lazy("openai")

PROMPT = [{"role": "user", "content": "What is 17 * 23?"}]


@dataclasses.dataclass
class Config:
    """The settings of `GRPOConfig` that a rollout function reads."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict[str, Any] | None = None


def trainer(step: int = 0, processes: int = 1, rewards: Any = (rollout_reward,), tools: Any = None, **args: Any) -> Any:
    """A trainer with this configuration and one weight."""
    return SimpleNamespace(
        reward_funcs=rewards,
        reward_func_names=[reward.__name__ for reward in rewards],
        args=Config(**args),
        tools=tools,
        state=SimpleNamespace(global_step=step),
        processing_class=SimpleNamespace(pad_token_id=4064),
        accelerator=SimpleNamespace(num_processes=processes, process_index=0, unwrap_model=lambda model: model),
        model=SimpleNamespace(state_dict=lambda: {"weights": 0}),
    )


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


class Recorded:
    """An agent that returns recorded rollouts."""

    def __init__(self, *finished: FinishedRollout) -> None:
        self._left = list(finished)

    async def run(self, task: Task, **_: Any) -> FinishedRollout:
        return self._left.pop(0)


def finished(
    *, branches: int = 1, sampled: bool = True, logprobs: Any = (-0.5, -0.25), **about: Any
) -> FinishedRollout:
    record = Trajectory(name="one", logprobs=logprobs is not None)
    record.begin([1, 2, 3], messages=1)
    for branch in range(branches if sampled else 0):
        if branch:
            record.branch([1, 2, 3 + branch], cause="compaction")
        record.append_completion([7, 8], logprobs, finish_reason="stop", **about)
    rows = trajectory_samples(record) if sampled else []
    return FinishedRollout(
        rows, PROMPT, 1, 1.0 if sampled else None, {"end": "answer" if sampled else "engine"}, ["it is down"]
    )


def test_a_rollout_without_sampled_tokens_carries_no_loss(loop: BackgroundLoop) -> None:
    function = RolloutFunction(Recorded(finished(sampled=False), finished()), weights_to=None, loop=loop)
    with pytest.warns(UserWarning, match="it is down"):
        rows = function([PROMPT, PROMPT], trainer())
    assert [rows[key][0] for key in ("prompt_ids", "completion_ids", "env_mask")] == [[4064], [4064], [0]]
    assert [rows[key][1] for key in ("prompt_ids", "completion_ids", "env_mask")] == [[1, 2, 3], [7, 8], [1, 1]]
    assert rows["logprobs"] == [[0.0], [-0.5, -0.25]]
    assert rollout_reward(**rows) == [None, 1.0]


def brief(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.5] * len(completion_ids)


async def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.25] * len(completion_ids)


def test_unless_failed_gives_failed_rollouts_the_reward_none(loop: BackgroundLoop) -> None:
    judged = dataclasses.replace(finished(), reward=None, metrics={"end": "failed"})
    function = RolloutFunction(Recorded(finished(), judged), weights_to=None, loop=loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = function([PROMPT, PROMPT], trainer(rewards=[rollout_reward, unless_failed(brief), unless_failed(slow)]))
    assert rollout_reward(**rows) == [1.0, None]
    assert unless_failed(brief)(**rows) == [0.5, None]
    assert asyncio.run(unless_failed(slow)(**rows)) == [0.25, None]
    assert unless_failed(brief).__name__ == "brief", "as TRL's logs call it"
    with pytest.raises(InputError, match="takes a reward function"):
        unless_failed("judge")  # type: ignore[arg-type]


def test_a_function_that_scores_failed_rollouts_gives_a_warning(loop: BackgroundLoop) -> None:
    for failed in (finished(sampled=False), dataclasses.replace(finished(), metrics={"end": "failed"})):
        function = RolloutFunction(Recorded(finished(), failed), weights_to=None, loop=loop)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function([PROMPT, PROMPT], trainer(rewards=[rollout_reward, brief]))
        (text,) = [str(one.message) for one in caught if "sampled nothing" not in str(one.message)]
        assert text.startswith("1 of 2 rollouts failed")
        assert "score them: brief; wrap them in unless_failed" in text


@pytest.mark.parametrize(
    ("rollout", "settings", "error", "problem"),
    [
        ({"branches": 2}, {}, SampleError, "has 2 rows: its history was rewritten"),
        ({"sampling": {"temperature": 0.5}}, {}, SampleError, r"at temperature 0\.5, but the trainer's is 1"),
        ({"logprobs": None}, {}, SampleError, "has no logprobs"),
        ({}, {"tools": [print]}, InputError, "TRL would run the tools of tools="),
        *(
            ({}, {name: value}, InputError, f"{name} of the trainer's config")
            for name, value in {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}.items()
        ),
    ],
)
def test_rollouts_that_do_not_match_the_trainer_are_refused(
    rollout: dict[str, Any], settings: dict[str, Any], error: Any, problem: str, loop: BackgroundLoop
) -> None:
    function = RolloutFunction(Recorded(finished(**rollout)), weights_to=None, loop=loop)
    with pytest.raises(error, match=problem):
        function([PROMPT], trainer(**settings))


def test_one_of_several_rows_can_be_chosen(loop: BackgroundLoop) -> None:
    last = RolloutFunction(Recorded(finished(branches=2)), weights_to=None, loop=loop, one_of=lambda rows: rows[-1])
    assert last([PROMPT], trainer())["prompt_ids"] == [[1, 2, 4]]


class RecordingEngine:
    """An engine that records its weight updates."""

    def __init__(self) -> None:
        self.updates: list[tuple[Any, int]] = []

    async def update_weights(self, weights: Any, /, *, version: int) -> None:
        self.updates.append((dict(weights), version))

    async def close(self) -> None:
        self.updates.append(("closed", -1))


def test_weights_are_sent_once_a_step_and_by_one_process() -> None:
    engine = RecordingEngine()
    function = RolloutFunction(Recorded(*[finished() for _ in range(4)]), weights_to=engine)
    one = trainer()
    for step in (0, 0, 1):
        one.state.global_step = step
        function([PROMPT], one)
    with pytest.raises(InputError, match="one process"):
        function([PROMPT], trainer(step=2, processes=2))
    function.close()
    assert [version for _, version in engine.updates] == [0, 1, -1]


def test_an_agent_that_fails_is_a_row_without_loss(loop: BackgroundLoop) -> None:
    """Its prompt cannot be rendered, so nothing is sampled; no error is raised."""
    engine = ScriptedEngine(lambda *_: pytest.fail("not asked"))
    agent = Agent(engine, create_renderer(POCKET), sampling=SamplingParams(8), reward=lambda rollout: 1.0)
    function = RolloutFunction(agent, weights_to=None, loop=loop)
    with pytest.warns(UserWarning, match="sampled nothing"):
        rows = function([[{"role": "user", "content": 7}]], trainer())
    assert rows["env_mask"] == [[0]]
    assert rollout_reward(**rows) == [None]


# -- batches


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input_ids": [1, 2]}, "neither labels nor loss_mask"),
        ({"input_ids": [1, 2], "labels": [-100]}, "2 ids, but 1 entries in labels"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "must not be shifted"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [0, 0]}, "do not agree"),
        ({"input_ids": [1, 2], "loss_mask": [0.0, 0.5]}, "must be 0 or 1"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "seq_lengths": [1, 1]}, "packed"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "logprobs": [-0.5]}, "logprobs has 1 entries"),
        ({"input_ids": [1, 2], "labels": [-100, 2], "logprobs": ["x", "y"]}, "advantages of a row are not numbers"),
        ({"labels": [1, 2]}, "has no input_ids"),
        ({"input_ids": [1.7, 2], "labels": [-100, 2]}, r"input_ids\[0\] is 1.7"),
        ({"input_ids": [2**31, 2], "labels": [-100, 2]}, "not a token id"),
        ({"input_ids": [2**70, 2], "labels": [-100, 2]}, "larger than any token id"),
        ({"input_ids": [1, 2], "labels": [-100, None]}, r"labels\[1\] is None"),
        (5, "mapping of columns, not 5"),
    ],
)
def test_invalid_rows_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(SampleError, match=problem):
        Collator(0)([row])


# -- agents that are not ours, behind the gateway


def ask_twice(session: Session) -> float:
    """A foreign agent: OpenAI's client, two turns, and its history as messages."""
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key, max_retries=0) as client:
        assert session.id == session.base_url.rpartition("/")[2]
        messages: list[Any] = list(session.task.messages)
        for _ in range(2):
            answer = client.chat.completions.create(
                model="pocket", messages=messages, tools=TOOLS, max_tokens=64, temperature=0.1
            )
            reply = answer.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": str(calculate("17 * 23"))}
                for call in reply.tool_calls or ()
            ] or [{"role": "user", "content": "Sure?"}]
    return 0.25


def forget(session: Session) -> None:
    """An agent that starts over after its first answer, which gives a second branch."""
    with openai.OpenAI(base_url=session.openai_base_url, api_key=session.key, max_retries=0) as client:
        for text in ("What is 17 * 23?", "Summary: they asked for a product. Go on."):
            client.chat.completions.create(
                model="pocket", messages=[{"role": "user", "content": text}], max_tokens=16, tools=TOOLS
            )


def fail(session: Session) -> float:
    raise RuntimeError("the agent broke")


def test_trl_gets_the_rows_of_the_session() -> None:
    with gateway_server() as served:
        rollouts: list[Any] = []
        function = RolloutFunction(GatewayAgent(served.url, ask_twice), weights_to=None, done=rollouts.extend)
        rows = function([PROMPT, PROMPT], trainer())
        function.close()
        for at, one in enumerate(rollouts):
            (sample,) = one.samples
            ids = rows["prompt_ids"][at] + rows["completion_ids"][at]
            assert ids == sample.token_ids
            assert [0] * len(rows["prompt_ids"][at]) + rows["env_mask"][at] == sample.loss_mask
            assert 0 in rows["env_mask"][at]
            recorded = served.rows(sample.name)
            assert [row["input_ids"] for row in recorded] == [ids]
            sampled = [number for number in recorded[0]["logprobs"] if number is not None]
            assert [x for x, m in zip(rows["logprobs"][at], rows["env_mask"][at], strict=True) if m] == sampled
            assert sample.completions[0].temperature == 1.0  # not the agent's setting
            assert one.messages[: one.prompt] == PROMPT
            assert [message["role"] for message in one.messages][-3:-1] == ["assistant", "tool"]
        assert rollouts[0].samples[0].name != rollouts[1].samples[0].name
        assert rollout_reward(**rows) == [0.25, 0.25]


def test_a_rewritten_history_gives_several_rows_and_a_failing_agent_none() -> None:
    with gateway_server() as served:
        agent = GatewayAgent(served.url, forget)
        rewritten = asyncio.run(agent.run(Task(PROMPT, name="one")))
        function = RolloutFunction(agent, weights_to=None)
        with pytest.raises(SampleError, match="has 2 rows"):
            function([PROMPT], trainer())
        function.close()
        failed = asyncio.run(GatewayAgent(served.url, fail).run(Task(PROMPT, name="two")))
    assert (len(rewritten.samples), rewritten.reward) == (2, None)
    assert (failed.samples, failed.reward, failed.metrics["end"]) == ([], None, "failed")
    assert failed.notes == ["RuntimeError: the agent broke"]


def test_an_unreachable_or_refusing_gateway_ends_only_the_rollout() -> None:
    finished = asyncio.run(GatewayAgent("http://127.0.0.1:9", ask_twice).run(Task(PROMPT)))
    assert (finished.metrics["end"], finished.samples, finished.reward) == ("engine", [], None)
    assert "the gateway cannot be reached" in finished.notes[0]
    with gateway_server() as served:
        agent = GatewayAgent(served.url, ask_twice, settings={"max_turnz": 3})
        refused = asyncio.run(agent.run(Task(PROMPT)))
    assert refused.failed
    assert "400" in refused.notes[0]
