"""Real agents, unmodified, on a gateway whose engine follows a script: what the engine saw is what is exported.

Each agent runs as its users run it, in an environment that is not ours (`real_agents/install.py`), once for all its
dialects. The model's turns have what makes echoes hard: reasoning, odd spaces in arguments and around content, letters
that are not ASCII, parallel calls; and their tokens are not those that encoding their text would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gateway.real_agents.install import ENVIRONMENTS
from tests.gateway.real_agents.running import SCRIPTS, Outcome, need, run_agent
from tests.gateway.real_agents.scripted import Said, Stage, Story, StoryEngine
from tests.gateway.rows import check_rows
from tests.gateway.server import Served, gateway_server
from tests.support import FULL, make_renderer
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

FAMILIES = ("pocket", "qwen3") if FULL else ("pocket",)
WHOLE, STREAMED = "whole", "streamed"
BOTH = (WHOLE, STREAMED)

WEATHER = Story(
    (
        Said("  Let me look.\n", [("weather", '{"city":  "Zürich" , "days":3}')], "I should call."),
        Said("\n It is sunny in Zürich. "),
        Said("", [("weather", '{"days" : 1, "city":"Bern"}'), ("weather", '{"city": "Basel", "days": 2}')]),
        Said('Sunny, too: <b>Bern</b> & "Basel" 🌞', reasoning="Both are sunny."),
        Said("You are welcome.\n\n"),
    ),
    about="Zürich",
)
FINAL_ANSWERS = Story(
    (
        Said("  Let me look.\n", [("weather", '{"city":  "Zürich" , "days":3}')], "I should call."),
        Said("", [("final_answer", '{"answer":"sunny"}')], "I know it."),
        Said("", [("weather", '{"days" : 1, "city":"Bern"}')]),
        Said("", [("final_answer", '{ "answer": "sunny, too" }')]),
    ),
    about="Zürich",
)
SHELL = Story(
    (
        Said(" First\n", [("bash", '{"command":  "echo Grüezi"}')], "Say it."),
        Said("", [("bash", '{"command":"true"}'), ("bash", '{"command": "echo again  "}')]),
        Said("Done.", [("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')], "Submit."),
    ),
    about="Zürich",
)


@dataclass(frozen=True)
class Agent:
    """An agent, and what it does to what it is told."""

    environment: str
    dialects: Mapping[str, Sequence[str]]
    """How it talks: by dialect, streamed or not."""
    story: Story = WEATHER
    causes: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """By dialect, why each of its turns branched; where it is not told, the agent only appends."""
    loses_answers: bool = False
    """Whether its client loses whole answers and asks again without a key: each retry is a branch of its own."""


AGENTS = {
    "openai_agents": Agent("current", {"chat": BOTH, "responses": BOTH}),
    "pydantic_ai": Agent("current", {"chat": BOTH, "responses": BOTH, "messages": BOTH}),
    "langgraph": Agent("current", {"chat": BOTH, "responses": BOTH, "messages": BOTH}),
    "inspect_ai": Agent(
        "current",
        {"chat": [WHOLE], "responses": [WHOLE], "messages": BOTH},
        causes={"responses": (None, "sub_agent", None, None, None, None)},  # it tries first what the server can do
    ),
    # it asks in another event loop than its connections belong to
    "strands": Agent("earlier", {"chat": [STREAMED], "messages": [STREAMED]}, loses_answers=True),
    "qwen_agent": Agent("earlier", {"chat": [STREAMED]}),
    "mini_swe_agent": Agent("earlier", {"chat": [WHOLE]}, SHELL),
    "autogen": Agent("earlier", {"chat": BOTH}, causes={"chat": (None, "changed_tools", None, None, None)}),
    "smolagents": Agent("current", {"chat": BOTH}, FINAL_ANSWERS, {"chat": (None, *["calls_as_text"] * 3)}),
}


TRIED = list(AGENTS) if FULL else ["pydantic_ai"]
"""One agent that speaks all dialects; the others are part of make test-long."""


def ways(agent: str, family: str) -> list[tuple[str, str]]:
    """The dialects and modes that an agent is tried with: all on one family, the last of each dialect's on others."""
    dialects = AGENTS[agent].dialects.items()
    return [(dialect, mode) for dialect, modes in dialects for mode in (modes if family == "pocket" else modes[-1:])]


CASES = [
    pytest.param(agent, family, dialect, mode, id=f"{agent}-{family}-{dialect}-{mode}")
    for agent in TRIED
    for family in FAMILIES
    for dialect, mode in ways(agent, family)
]


@dataclass
class Theatre:
    """Gateways of all families, and the agents that have run."""

    stages: dict[str, Stage] = field(default_factory=dict)
    served: dict[str, Served] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    folder: Path = Path()


def session_of(agent: str, dialect: str, mode: str) -> str:
    return f"{agent}-{dialect}-{mode}"


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    need(request.config, *ENVIRONMENTS)
    made = Theatre(folder=tmp_path_factory.mktemp("agents"))
    with ExitStack() as stack:
        for family in FAMILIES:
            renderer = create_renderer(POCKET) if family == "pocket" else make_renderer(family)
            stage = Stage(renderer, "<|end|>" if family == "pocket" else "<|im_end|>")
            made.stages[family] = stage
            engine = lambda stage=stage: StoryEngine(stage)  # noqa: E731
            made.served[family] = stack.enter_context(gateway_server(engine, renderer))
        yield made


def ran(theatre: Theatre, name: str) -> Outcome:
    """What became of an agent, which is run once."""
    if name not in theatre.outcomes:
        agent, runs = AGENTS[name], []
        for family, served in theatre.served.items():
            for dialect, mode in ways(name, family):
                session = session_of(name, dialect, mode)
                theatre.stages[family].stories[session] = agent.story
                run = {"url": f"{served.url}/sessions/{session}", "dialect": dialect, "stream": mode == STREAMED}
                if dialect == "messages":  # the session by its key, which Anthropic's clients send in two ways
                    _, made = served.call("POST", "/sessions", {"id": session})
                    run |= {"url": served.url, "key": made["key"]}
                runs.append(run)
        theatre.outcomes[name] = run_agent(agent.environment, SCRIPTS / f"run_{name}.py", runs, theatre.folder)
    return theatre.outcomes[name]


@pytest.mark.parametrize(("agent", "family", "dialect", "mode"), CASES)
def test_what_the_engine_saw_is_what_is_exported(
    theatre: Theatre, agent: str, family: str, dialect: str, mode: str
) -> None:
    outcome, session = ran(theatre, agent), session_of(agent, dialect, mode)
    assert outcome.status == 0, outcome.output[-4000:]
    stage, served = theatre.stages[family], theatre.served[family]
    assert stage.unsaid(session) == 0
    state = served.state(session)
    about = [turn for turn in state["tree"] if turn["cause"]]
    causes = [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]]
    if AGENTS[agent].loses_answers:
        causes = [cause for cause in causes if cause != "retry"]
    expected = AGENTS[agent].causes.get(dialect, [None] * len(AGENTS[agent].story.turns))
    assert causes == list(expected), about
    rows = served.rows(session)
    assert len(rows) == 1 + len(about)
    check_rows(stage, session, rows)
    assert {turn["dialect"] for turn in state["tree"]} == {dialect}


@pytest.mark.parametrize("agent", TRIED)
def test_agents_stay_on_this_machine(theatre: Theatre, agent: str) -> None:
    assert ran(theatre, agent).strayed == ""
