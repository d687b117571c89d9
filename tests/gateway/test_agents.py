"""Real agents, unmodified, on a gateway whose engine follows a script: what the engine saw is what is exported.

Each agent runs as its users run it, in its own environment (`real_agents/install.py`), once for all its dialects. The
model's turns have what makes echoes hard: reasoning, odd spaces in arguments and around content, letters that are not
ASCII, parallel calls; and their tokens are not those that encoding their text would give.

Claude Code chooses its session's name itself. A proxy that never answers receives all that it sends to other servers.
"""

import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.real_agents.install import ENVIRONMENTS
from tests.gateway.real_agents.running import SCRIPTS, Outcome, need, run_agent
from tests.gateway.real_agents.scripted import Stage, Story, StoryEngine, Turn, check_rows
from tests.gateway.server import Served, gateway_server
from tests.support import FULL, make_renderer
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

FAMILIES = ("pocket", "qwen3") if FULL else ("pocket",)
BOTH = (False, True)


def weather_turns(weather: str = "weather") -> list[Turn]:
    return [
        Turn("  Let me look.\n", [(weather, '{"city":  "Zürich" , "days":3}')], "I should call."),
        Turn("\n It is sunny in Zürich. "),
        Turn("", [(weather, '{"days" : 1, "city":"Bern"}'), (weather, '{"city": "Basel", "days": 2}')]),
        Turn('Sunny, too: <b>Bern</b> & "Basel" 🌞', reasoning="Both are sunny."),
        Turn("You are welcome.\n\n"),
    ]


WEATHER = Story(weather_turns(), about="Zürich")
FINAL_ANSWERS = Story(
    [
        weather_turns()[0],
        Turn("", [("final_answer", '{"answer":"sunny"}')], "I know it."),
        Turn("", [("weather", '{"days" : 1, "city":"Bern"}')]),
        Turn("", [("final_answer", '{ "answer": "sunny, too" }')]),
    ],
    about="Zürich",
)
SHELL = Story(
    [
        Turn(" First\n", [("bash", '{"command":  "echo Grüezi"}')], "Say it."),
        Turn("", [("bash", '{"command":"true"}'), ("bash", '{"command": "echo again  "}')]),
        Turn("Done.", [("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}')], "Submit."),
    ],
    about="Zürich",
)


@dataclass(frozen=True)
class Agent:
    """An agent, what it runs, and how its turns are expected to branch."""

    environment: str
    dialects: Mapping[str, Sequence[bool]]
    story: Story = WEATHER
    causes: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    """By dialect, the cause of each turn's branch; without an entry the agent only appends."""
    loses_answers: bool = False
    """Whether its client loses whole answers and retries without a key: each retry is a branch."""


AGENTS = {
    "openai_agents": Agent("current", {"chat": BOTH, "responses": BOTH}),
    "pydantic_ai": Agent("current", {"chat": BOTH, "responses": BOTH, "messages": BOTH}),
    "langgraph": Agent("current", {"chat": BOTH, "responses": BOTH, "messages": BOTH}),
    "inspect_ai": Agent(
        "current",
        {"chat": [False], "responses": [False], "messages": BOTH},
        causes={"responses": (None, "sub_agent", None, None, None, None)},  # it probes the server first
    ),
    # its connections belong to another event loop than the one it sends requests in
    "strands": Agent("earlier", {"chat": [True], "messages": [True]}, loses_answers=True),
    "qwen_agent": Agent("earlier", {"chat": [True]}),
    "mini_swe_agent": Agent("earlier", {"chat": [False]}, SHELL),
    "autogen": Agent("earlier", {"chat": BOTH}, causes={"chat": (None, "changed_tools", None, None, None)}),
    "smolagents": Agent("current", {"chat": BOTH}, FINAL_ANSWERS, {"chat": (None, *["calls_as_text"] * 3)}),
}
TESTED = list(AGENTS) if FULL else ["pydantic_ai"]
"""One agent that speaks all dialects; the others are part of make test-long."""


def ways(agent: str, family: str) -> list[tuple[str, bool]]:
    """The dialects and modes to test an agent with: all on one family, each dialect's last mode on others."""
    dialects = AGENTS[agent].dialects.items()
    return [(dialect, mode) for dialect, modes in dialects for mode in (modes if family == "pocket" else modes[-1:])]


def stage_of(family: str, stories: dict[str, Story]) -> Stage:
    renderer = create_renderer(POCKET) if family == "pocket" else make_renderer(family)
    return Stage(renderer, "<|end|>" if family == "pocket" else "<|im_end|>", stories)


def causes_of(state: Any) -> list[str | None]:
    return [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]]


@dataclass
class Theatre:
    folder: Path
    stages: dict[str, tuple[Stage, Served]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Theatre]:
    need(request.config, *ENVIRONMENTS)
    theatre = Theatre(tmp_path_factory.mktemp("agents"))
    with ExitStack() as stack:
        for family in FAMILIES:
            stage = stage_of(family, {})
            engine = lambda stage=stage: StoryEngine(stage)  # noqa: E731
            theatre.stages[family] = stage, stack.enter_context(gateway_server(engine, stage.renderer))
        yield theatre


def outcome_of(theatre: Theatre, name: str) -> Outcome:
    if name not in theatre.outcomes:
        agent, runs = AGENTS[name], []
        for family, (stage, served) in theatre.stages.items():
            for dialect, stream in ways(name, family):
                session = f"{name}-{dialect}-{stream}"
                stage.stories[session] = agent.story
                run = {"url": f"{served.url}/sessions/{session}", "dialect": dialect, "stream": stream}
                if dialect == "messages":  # the session by its key, which Anthropic's clients send in two ways
                    _, created = served.call("POST", "/sessions", {"id": session})
                    run |= {"url": served.url, "key": created["key"]}
                runs.append(run)
        theatre.outcomes[name] = run_agent(agent.environment, SCRIPTS / f"run_{name}.py", runs, theatre.folder)
    return theatre.outcomes[name]


@pytest.mark.parametrize(
    ("agent", "family", "dialect", "stream"),
    [(agent, family, *way) for agent in TESTED for family in FAMILIES for way in ways(agent, family)],
)
def test_what_the_engine_saw_is_what_is_exported(
    theatre: Theatre, agent: str, family: str, dialect: str, stream: bool
) -> None:
    outcome, session = outcome_of(theatre, agent), f"{agent}-{dialect}-{stream}"
    assert outcome.status == 0, outcome.output[-4000:]
    stage, served = theatre.stages[family]
    assert stage.remaining_turns(session) == 0
    state = served.state(session)
    causes = causes_of(state)
    if AGENTS[agent].loses_answers:
        causes = [cause for cause in causes if cause != "retry"]
    expected = AGENTS[agent].causes.get(dialect, [None] * len(AGENTS[agent].story.turns))
    assert causes == list(expected), [turn for turn in state["tree"] if turn["cause"]]
    rows = served.rows(session)
    assert len(rows) == 1 + sum(cause is not None for cause in causes_of(state))
    check_rows(stage, session, rows)
    assert {turn["dialect"] for turn in state["tree"]} == {dialect}
    assert outcome.connections == ""


SKY = "mcp__sky__weather"
SKY_TURNS = weather_turns(SKY)
TASK = (
    '{"description":  "Weather" , "prompt": "Look at the sky over Zürich, and tell what you see.", '
    '"subagent_type": "general-purpose", "run_in_background": false}'
)
DELEGATED = [
    Turn("I send somebody.", [("Agent", TASK)]),
    Turn("", [(SKY, '{"city":"Zürich" , "days":3}')], "I am the one who was sent."),
    Turn(" Sunny in Zürich."),
    Turn("It is sunny, I am told."),
    Turn("", [("Bash", '{"command":  "echo Grüezi" , "description": "Says it"}')]),
    Turn("Said."),
    Turn("You are welcome."),
]
COMPACTED = [
    *SKY_TURNS,
    Turn("<summary>The weather was told for Zürich, Bern and Basel: sunny.</summary>", reasoning="In short."),
    Turn("", [("Read", '{"file_path": "missing.txt" , "limit":3}')], "I read."),
    Turn("There is no such file."),
    Turn(" No."),
]
SITTINGS = [
    ["What is the weather in Zürich?", "And in Bern and Basel?"],
    ["Thank you!", "/compact", "Is there a file?", "Are you sure?"],
]


@contextmanager
def dead_end() -> Iterator[tuple[str, list[str]]]:
    """A proxy that never answers; yields its URL and the requests that it receives."""
    requests: list[str] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with closing(connection):
                    requests.append(connection.recv(200).decode("ascii", "replace").partition("\r\n")[0])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "story", "sittings", "causes", "branches"),
    [
        # a conversation is one row
        *((family, Story(SKY_TURNS, "Zürich"), None, [None] * 5, [0] * 5) for family in ("pocket", "qwen3")),
        # a sub-agent is a row of its own
        *(
            (family, Story(DELEGATED, "Zürich"), None, [None, "sub_agent", *[None] * 5], [0, 1, 1, 0, 0, 0, 0])
            for family in ("pocket", "qwen3")
        ),
        # a reopened conversation continues, a compacted one begins anew: the request for the summary leaves out the
        # last messages, which are kept unchanged
        (
            "pocket",
            Story(COMPACTED),
            SITTINGS,
            [*[None] * 5, "compaction", "compaction", None, None],
            [*[0] * 5, 1, 2, 2, 2],
        ),
    ],
)
def test_claude_code(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, story: Story, sittings: Any, causes: Any, branches: Any
) -> None:
    need(request.config, "claude")
    stage = stage_of(family, defaultdict(lambda: story))  # Claude Code chooses its session's name
    with dead_end() as (proxy, proxied), gateway_server(lambda: StoryEngine(stage), stage.renderer) as served:
        proxies = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
        run = {"url": served.url, "dialect": "messages", "stream": True} | ({"sittings": sittings} if sittings else {})
        outcome = run_agent("claude", SCRIPTS / "run_claude_code.py", [run], tmp_path, proxies)
        assert outcome.status == 0, outcome.output[-4000:]
        assert (proxied, outcome.connections) == ([], "")
        (session,) = stage.exchanges
        assert stage.remaining_turns(session) == 0
        assert session in outcome.output  # Claude Code prints its name
        rows = served.rows(session)
        check_rows(stage, session, rows)
        state = served.state(session)
    assert causes_of(state) == causes
    assert [turn["branch"] for turn in state["tree"]] == branches
    assert len(rows) == max(branches) + 1
