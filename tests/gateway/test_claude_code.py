"""Claude Code, unmodified, on a gateway whose engine follows a script: a tool, a sub-agent, one session by its header.

The gateway is told nothing of a session but what Claude Code says itself. A proxy that leads nowhere stands before
everything else that it might call.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.real_agents.running import SCRIPTS, need, run_agent
from tests.gateway.real_agents.scripted import Said, Stage, Story, StoryEngine
from tests.gateway.rows import check_rows
from tests.gateway.server import gateway_server
from tests.support import make_renderer
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

pytestmark = pytest.mark.long

WEATHER = "mcp__sky__weather"
TOLD = Story(
    (
        Said("  Let me look.\n", [(WEATHER, '{"city":  "Zürich" , "days":3}')], "I should call."),
        Said("\n It is sunny in Zürich. "),
        Said("", [(WEATHER, '{"days" : 1, "city":"Bern"}'), (WEATHER, '{"city": "Basel", "days": 2}')]),
        Said('Sunny, too: <b>Bern</b> & "Basel" 🌞', reasoning="Both are sunny."),
        Said("You are welcome.\n\n"),
    ),
    about="Zürich",
)
DELEGATED = Story(
    (
        Said(
            "I send somebody.",
            [
                (
                    "Agent",
                    '{"description":  "Weather" , "prompt": "Look at the sky over Zürich, and tell what you see.", '
                    '"subagent_type": "general-purpose", "run_in_background": false}',
                )
            ],
        ),
        Said("", [(WEATHER, '{"city":"Zürich" , "days":3}')], "I am the one who was sent."),
        Said(" Sunny in Zürich."),
        Said("It is sunny, I am told."),
        Said("", [("Bash", '{"command":  "echo Grüezi" , "description": "Says it"}')]),
        Said("Said."),
        Said("You are welcome."),
    ),
    about="Zürich",
)

COMPACTED = Story(
    (
        *TOLD.turns,
        Said("<summary>The weather was told for Zürich, Bern and Basel: sunny.</summary>", reasoning="In short."),
        Said("", [("Read", '{"file_path": "missing.txt" , "limit":3}')], "I read."),
        Said("There is no such file."),
        Said(" No."),
    )
)
SITTINGS = [
    ["What is the weather in Zürich?", "And in Bern and Basel?"],
    ["Thank you!", "/compact", "Is there a file?", "Are you sure?"],
]


class Everywhere(dict[str, Story]):
    """The same story for every session: Claude Code makes up its name."""

    def __init__(self, story: Story) -> None:
        super().__init__()
        self._story = story

    def __missing__(self, session: str) -> Story:
        return self._story


@contextmanager
def dead_end() -> Iterator[tuple[str, list[str]]]:
    """A proxy that answers nobody, and what it was asked for."""
    asked: list[str] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:

        def answer() -> None:
            while True:
                try:
                    one, _ = listening.accept()
                except OSError:
                    return
                with closing(one):
                    asked.append(one.recv(200).decode("ascii", "replace").partition("\r\n")[0])

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)


@pytest.fixture(autouse=True, scope="module")
def claude(request: pytest.FixtureRequest) -> None:
    need(request.config, "claude")


def renderer_of(family: str) -> Any:
    return create_renderer(POCKET) if family == "pocket" else make_renderer(family)


def talk(stage: Stage, folder: Path, **run: Any) -> tuple[Any, list[Any]]:
    """Let Claude Code ask its questions; returns the state and the rows of the one session that there is."""
    with dead_end() as (proxy, asked), gateway_server(lambda: StoryEngine(stage), stage.renderer) as served:
        proxies = {"HTTPS_PROXY": proxy, "HTTP_PROXY": proxy, "NO_PROXY": "127.0.0.1"}
        runs = [{"url": served.url, "dialect": "messages", "stream": True, **run}]
        outcome = run_agent("claude", SCRIPTS / "run_claude_code.py", runs, folder, proxies)
        assert outcome.status == 0, outcome.output[-4000:]
        assert asked == []
        assert outcome.strayed == ""
        (session,) = stage.exchanges
        assert stage.unsaid(session) == 0
        assert session in outcome.output  # as Claude Code calls it
        rows = served.rows(session)
        check_rows(stage, session, rows)
        return served.state(session), rows


@pytest.mark.parametrize("family", ["pocket", "qwen3"])
def test_a_conversation_is_one_row(family: str, tmp_path: Path) -> None:
    stage = Stage(renderer_of(family), "<|end|>" if family == "pocket" else "<|im_end|>", Everywhere(TOLD))
    state, rows = talk(stage, tmp_path)
    assert [turn["cause"] for turn in state["tree"]] == [None] * 5
    assert len(rows) == 1


@pytest.mark.parametrize("family", ["pocket", "qwen3"])
def test_a_sub_agent_is_a_row_of_its_own(family: str, tmp_path: Path) -> None:
    stage = Stage(renderer_of(family), "<|end|>" if family == "pocket" else "<|im_end|>", Everywhere(DELEGATED))
    state, rows = talk(stage, tmp_path)
    causes = [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]]
    assert causes == [None, "sub_agent", None, None, None, None, None]
    assert [turn["branch"] for turn in state["tree"]] == [0, 1, 1, 0, 0, 0, 0]
    assert len(rows) == 2


def test_closed_and_opened_again_it_goes_on_and_compacted_it_begins_anew(tmp_path: Path) -> None:
    """What is asked for a summary leaves out the last words of the conversation, which are kept as they are."""
    stage = Stage(renderer_of("pocket"), "<|end|>", Everywhere(COMPACTED))
    state, rows = talk(stage, tmp_path, sittings=SITTINGS)
    causes = [turn["cause"] and turn["cause"]["cause"] for turn in state["tree"]]
    assert causes == [None] * 5 + ["compaction", "compaction", None, None]
    assert [turn["branch"] for turn in state["tree"]] == [0] * 5 + [1, 2, 2, 2]
    assert len(rows) == 3
