"""Agents that do to a history what agents do, with an engine that answers from a script: sessions worth looking at."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.gateway.server import TOOLS, Served
from tokentrace import Renderer, create_renderer
from tokentrace.engines import Engine
from tokentrace.engines.protocol import SamplingParams
from tokentrace.engines.scripted import Sampled, ScriptedEngine
from tokentrace.pocket import POCKET

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> &lt;b&gt; \"'` "
    "javascript:alert(1) </title></style> \x1b[31mred\x07 \u202egnp.exe\u202c \u200bhidden "
    "👩‍👩‍👧‍👦 \U0001f9ea שלום עולם <|im_end|>"
)


def call(formula: str) -> dict[str, Any]:
    return {"id": "c00000000", "type": "function", "function": {"name": "compute", "arguments": {"formula": formula}}}


def says(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


class Script:
    """Replies that are put in beforehand, as ids that the model's own template would write."""

    def __init__(self, renderer: Renderer | None = None) -> None:
        self.renderer = renderer or create_renderer(POCKET)
        self.replies: list[dict[str, Any]] = []
        self._random = Random(14)

    def engine(self) -> Engine:
        return ScriptedEngine(
            self._sampled, vocab_size=self.renderer.tokenizer.vocabulary.size, piece=4, version="step-120"
        )

    def _sampled(self, prompt: Any, sampling: SamplingParams) -> Sampled:
        reply = self.replies.pop(0) if self.replies else says("I do not know.")
        rendered = self.renderer.silent().render([{"role": "user", "content": "?"}, reply], tools=TOOLS)
        turn = rendered.turns[-1]
        ids = rendered.ids[turn.start : turn.stop].tolist()
        return Sampled(ids, [-(self._random.random() ** 4) * 5 for _ in ids])


class Agent:
    """A conversation with one session."""

    def __init__(self, served: Served, script: Script, session: str) -> None:
        self.served, self.script, self.session = served, script, session
        self.messages: list[dict[str, Any]] = []

    def ask(self, *new: dict[str, Any], reply: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Send the conversation with some new messages; the reply is added to it."""
        self.messages += new
        self.script.replies.append(reply)
        body = {"model": "pocket", "messages": self.messages, "tools": TOOLS, **more}
        status, answer = self.served.call("POST", f"/sessions/{self.session}/v1/chat/completions", body)
        assert status == 200, answer
        message = dict(answer["choices"][0]["message"])
        self.messages = [*self.messages, message]
        return message

    def result(self, text: str, reply: dict[str, Any]) -> dict[str, Any]:
        """Answer the call that was made last."""
        calls = self.messages[-1]["tool_calls"]
        return self.ask({"role": "tool", "tool_call_id": calls[0]["id"], "content": text}, reply=reply)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def interesting(served: Served, script: Script, session: str = "interesting") -> None:
    """Append-only turns, an echo that was repaired, a retry, trimmed results, a sub-agent and a compaction."""
    agent = Agent(served, script, session)
    agent.ask(
        system("You are a careful accountant. Use the tool for every sum, and say where each number comes from."),
        user("The invoices of March are 1250, 310.5 and 78. What do they come to, and what is that with 19 % tax?"),
        reply=says("I add them up first.", call("1250 + 310.5 + 78")),
    )
    agent.result("1638.5\n" + "log: adding\n" * 40, says("Now the tax.", call("1638.5 * 1.19")))
    agent.result("1949.815", says("They come to 1638.50, and to 1949.82 with tax."))
    before = list(agent.messages)
    echoed = {**agent.messages[-1], "content": "\n" + agent.messages[-1]["content"]}
    agent.messages = [*agent.messages[:-1], echoed]
    agent.ask(user("And April: 900 and 77.25?"), reply=says("Once more.", call("900 + 77.25")))
    agent.result("977.25", says("April comes to 977.25."))
    long = list(agent.messages)
    # the same request again
    again = Agent(served, script, session)
    again.messages = before[:-1]
    again.ask(reply=says("In all: 1638.50 net, 1949.82 gross."))
    # a sub-agent with a prompt of its own
    sub = Agent(served, script, session)
    sub.ask(
        system("Check the arithmetic that you are given."),
        user("Is 1638.5 * 1.19 = 1949.815?"),
        reply=says("I compute it.", call("1638.5 * 1.19")),
    )
    sub.result("1949.815", says("Yes, it is."))
    # trimmed results
    trimmed = Agent(served, script, session)
    trimmed.messages = [
        {**message, "content": "1638.5 [trimmed]"} if message["role"] == "tool" and at == 3 else message
        for at, message in enumerate(long)
    ]
    trimmed.ask(user("Both months together?"), reply=says("Adding both.", call("1638.5 + 977.25")))
    trimmed.result("2615.75", says("Together they are 2615.75."))
    # a compaction
    short = Agent(served, script, session)
    short.messages = [long[0]]
    short.ask(
        user("Here is a summary of the conversation to date: March is 1638.50 net, April 977.25. Which is more?"),
        reply=says("The difference.", call("1638.5 - 977.25")),
    )
    short.result("661.25", says("March, by 661.25."))


def hostile(served: Served, script: Script, session: str = "hostile") -> None:
    """Texts that would do harm if they were taken for anything else than text."""
    agent = Agent(served, script, session)
    agent.ask(user(HOSTILE), reply=says(HOSTILE.replace("<|im_end|>", "")))
    agent.ask(user("long: " + "lorem ipsum dolor " * 2800), reply=says("```html\n<h1>tabs\tand</h1>\n```"))
    agent.messages = [user("another " + HOSTILE), *agent.messages[1:]]
    agent.ask(user("and now?"), reply=says("Nothing."))
