"""verl's own tools and simulated users in our loop, with the unmodified classes of its package.

No release of verl has the configurations in its wheel or its source archive: they are in its repository, under
``examples/sglang_multiturn/config``. ``configs/`` has the same keys and values with our own descriptions, as digests of
verl's files without descriptions at the tag v0.7.1 prove. 0.7.1 is the last release whose package has the classes.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import yaml

from tests.apart.shared import RENDERER, calculator, call, scripted
from tests.servers import json_server
from tokentrace import trajectory_samples
from tokentrace.demo.questions import pick_questions
from tokentrace.engines import EmbeddedEngine
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.rollout import FAILED_ENDS, Agent, Budget, End, Rollout, Task, load_interactions, load_tools, row_task

SHIPPED = Path(__file__).parent / "configs"


def check_exact(rollout: Rollout, engine: ScriptedEngine, turns: Sequence[str]) -> None:
    """Checks that each prompt is a prefix of the stream, and that the row trains exactly the sampled tokens."""
    stream = rollout.trajectory.stream()
    for request in engine.requests:
        np.testing.assert_array_equal(request.prompt_ids, stream[: len(request.prompt_ids)])
    (sample,) = trajectory_samples(rollout.trajectory)
    sampled = [RENDERER.tokenizer.encode(f"{turn}<|end|>") for turn in turns]
    np.testing.assert_array_equal(sample.ids[sample.mask], np.concatenate(sampled))


def test_the_gsm8k_tool_is_created_as_in_verl(capsys: pytest.CaptureFixture[str]) -> None:
    from verl.tools.gsm8k_tool import Gsm8kTool
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.tools.utils.tool_registry import initialize_tools_from_config

    (tool,) = load_tools(SHIPPED / "gsm8k_tool_config.yaml")
    assert capsys.readouterr().out == "", "verl's tools print their schema; stdout is for results"
    (theirs,) = initialize_tools_from_config(SHIPPED / "gsm8k_tool_config.yaml")
    assert type(tool.tool) is type(theirs) is Gsm8kTool
    assert isinstance(tool.tool.tool_schema, OpenAIFunctionToolSchema)
    assert (tool.tool.tool_schema, tool.tool.config) == (theirs.tool_schema, theirs.config)
    assert tool.tool_schema == theirs.tool_schema.model_dump(exclude_unset=True, exclude_none=True)


def test_the_gsm8k_tool_rewards_a_rollout_of_pocket() -> None:
    """The ground truth is in the row, as verl's own preprocessing writes it."""
    (gsm8k,) = load_tools(SHIPPED / "gsm8k_tool_config.yaml")
    questions = pick_questions(8, kinds=["checked"])
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": question.prompt,
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {
                "need_tools_kwargs": True,
                "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(question.answer)}}},
            },
        }
        for question in questions
    ]

    async def go() -> list[Rollout]:
        engine = EmbeddedEngine(seed=0)
        agent = Agent(engine, RENDERER, tools=[calculator, gsm8k], budget=Budget(turns=6, turn_tokens=256))
        tasks = [row_task(row, agent.tools, name=f"row-{at}") for at, row in enumerate(rows)]
        try:
            return list(await asyncio.gather(*(agent.run(task, seed=3) for task in tasks)))
        finally:
            await engine.close()

    rollouts = asyncio.run(go())
    for rollout, question in zip(rollouts, questions, strict=True):
        assert rollout.end not in FAILED_ENDS, rollout.notes
        answers = [
            json.loads(one["function"]["arguments"])["answer"]
            for message in rollout.messages
            for one in message.get("tool_calls") or ()
            if one["function"]["name"] == "calc_gsm8k_reward"
        ]
        right = [str(answer) == str(question.answer) for answer in answers]
        steps = [0.0 if now > before else -0.05 for before, now in zip([False, *right], right, strict=False)]
        assert rollout.reward == pytest.approx(sum(steps) + (right or [0.0])[-1])
    assert any(rollout.reward == 1.0 for rollout in rollouts), "pocket asked the tool, and was right"
    assert gsm8k.tool._instance_dict == {}, "all were released"


def test_the_gsm8k_interaction_leads_a_rollout() -> None:
    users = load_interactions(SHIPPED / "gsm8k_interaction_config.yaml")
    assert list(users) == ["gsm8k"]
    assert users["gsm8k"].name == "gsm8k"
    turns = ["I think it is #### 41", "Sorry: #### 42"]
    engine = scripted(*turns)
    row = {
        "prompt": [{"role": "user", "content": "What is 6 * 7?"}],
        "extra_info": {"interaction_kwargs": {"name": "gsm8k", "query": "What is 6 * 7?", "ground_truth": "42"}},
    }
    rollout = asyncio.run(Agent(engine, RENDERER, interaction=users).run(row_task(row, name="one")))
    assert (rollout.end, rollout.reward) == (End.USER, 1.0), "the score of the last turn, counted once"
    assert [message["content"] for message in rollout.messages[1:]] == [
        turns[0],
        "Your response is incorrect! You need to reflect on your answer and try again.",
        turns[1],
    ]
    assert rollout.notes == []
    check_exact(rollout, engine, turns)
    assert users["gsm8k"]._user._instance_dict == {}, "finalized"


def test_the_row_selects_one_of_verls_interactions(tmp_path: Path) -> None:
    shipped = yaml.safe_load((SHIPPED / "gsm8k_interaction_config.yaml").read_text(encoding="utf-8"))
    more = {"class_name": "verl.interactions.weather_interaction.WeatherInteraction", "config": {}}
    file = tmp_path / "users.yaml"
    file.write_text(yaml.safe_dump({"interaction": [*shipped["interaction"], more]}), encoding="utf-8")
    users = load_interactions(file)
    assert list(users) == ["gsm8k", "weather"], "one without a name is called as verl calls it"

    def led_by(**settings: Any) -> Rollout:
        task = Task([{"role": "user", "content": "?"}], name="one", interaction_settings=settings)
        return asyncio.run(Agent(scripted("#### 42", "#### 42"), RENDERER, interaction=users).run(task))

    assert led_by(name="gsm8k", ground_truth="42").reward == 1.0
    assert led_by(name="weather").end is End.USER
    assert "there is no simulated user 'wether'" in str(led_by(name="wether").notes)
    assert "interaction_kwargs.name is gsm8k or weather" in str(led_by(ground_truth="42").notes)


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", _node_ip_address="127.0.0.1")
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_the_search_tool_searches_in_a_rollout() -> None:
    (search,) = load_tools(SHIPPED / "search_tool_config.yaml")
    document = yaml.safe_load((SHIPPED / "search_tool_config.yaml").read_text(encoding="utf-8"))
    assert search.tool_schema == document["tools"][0]["tool_schema"], "what the file says, with what verl's class drops"
    turns = [call("search", query_list=["Ada Lovelace", "Alan Turing"]), "She was first."]
    requests: list[dict[str, Any]] = []

    def retrieve(_: str, body: Any) -> tuple[int, Any]:
        """A minimal version of Search-R1's retrieval server, for the requests of verl's tool."""
        requests.append(body)
        hits = [{"document": {"contents": f"{query}\nAll about {query}."}, "score": 1.0} for query in body["queries"]]
        return 200, {"result": [[one] for one in hits]}

    with json_server(retrieve) as url:
        search.tool.retrieval_service_url = f"{url}/retrieve"  # the file has a fixed port
        engine = scripted(*turns)
        agent = Agent(engine, RENDERER, tools=[search], budget=Budget(tool_timeout=300))
        rollout = asyncio.run(agent.run(Task([{"role": "user", "content": "Who was first?"}], name="one")))
    assert requests == [{"queries": ["Ada Lovelace", "Alan Turing"], "topk": 3, "return_scores": True}]
    assert rollout.end is End.ANSWER, rollout.notes
    assert json.loads(rollout.messages[2]["content"]) == {
        "result": "Doc 1 (Title: Ada Lovelace)\nAll about Ada Lovelace.\n---\n"
        "Doc 1 (Title: Alan Turing)\nAll about Alan Turing."
    }
    assert rollout.per_turn[0].metrics[0]["total_results"] == 2
    assert rollout.notes == ["search: calc_reward returned a list instead of a number: it is ignored"]
    assert rollout.reward == 0.0, "the reward of the call, as verl's tools return it"
    check_exact(rollout, engine, turns)
