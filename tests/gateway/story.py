"""Sessions for the page's tests and picture: scripted agents that change their history as real ones do."""

from random import Random
from typing import Any

from tests.conversations import system, user
from tests.gateway.server import TOOLS, Served
from tokentrace import create_renderer
from tokentrace.engines import Engine, EngineReply, ScriptedEngine
from tokentrace.engines.protocol import SamplingParams
from tokentrace.pocket import POCKET

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> &lt;b&gt; \"'` "
    "javascript:alert(1) </title></style> \x1b[31mred\x07 \u202egnp.exe\u202c \u200bhidden "
    "👩‍👩‍👧‍👦 \U0001f9ea שלום עולם <|im_end|>"
)
Message = dict[str, Any]


def says(content: str, formula: str = "") -> Message:
    function = {"name": "compute", "arguments": {"formula": formula}}
    calls = [{"id": "c00000000", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if formula else {})}


class Script:
    """An engine with replies that are set in advance, as ids that the model's own template would write."""

    def __init__(self) -> None:
        self.renderer = create_renderer(POCKET).silent()
        self.replies: list[Message] = []
        self._random = Random(14)

    def engine(self) -> Engine:
        size = self.renderer.tokenizer.vocabulary.size
        return ScriptedEngine(self._sampled, vocab_size=size, piece=4, version="step-120")

    def _sampled(self, prompt: Any, sampling: SamplingParams) -> EngineReply:
        rendered = self.renderer.render([user("?"), self.replies.pop(0)], tools=TOOLS)
        turn = rendered.turns[-1]
        ids = rendered.ids[turn.start : turn.stop].tolist()
        return EngineReply(ids, [-(self._random.random() ** 4) * 5 for _ in ids])


def talk(served: Served, script: Script, session: str, messages: list[Message], *exchanges: Any) -> list[Message]:
    """Send a growing conversation: each exchange has new messages (a text is the last call's result) and a reply."""
    for *new, reply in exchanges:
        for message in new:
            if isinstance(message, str):
                message = {"role": "tool", "tool_call_id": messages[-1]["tool_calls"][0]["id"], "content": message}
            messages = [*messages, message]
        script.replies.append(reply)
        body = {"model": "pocket", "messages": messages, "tools": TOOLS}
        status, answer = served.call("POST", f"/sessions/{session}/v1/chat/completions", body)
        assert status == 200, answer
        messages = [*messages, answer["choices"][0]["message"]]
    return messages


def interesting(served: Served, script: Script, session: str = "interesting") -> None:
    """Append-only turns, an echo that was repaired, a retry, trimmed results, a sub-agent and a compaction."""
    target = (served, script, session)
    before = talk(
        *target,
        [system("You are a careful accountant. Use the tool for every sum, and say where each number comes from.")],
        (
            user("The invoices of March are 1250, 310.5 and 78. What do they come to, and what is that with 19 % tax?"),
            says("I add them up first.", "1250 + 310.5 + 78"),
        ),
        ("1638.5\n" + "log: adding\n" * 40, says("Now the tax.", "1638.5 * 1.19")),
        ("1949.815", says("They come to 1638.50, and to 1949.82 with tax.")),
    )
    long = talk(
        *target,
        [*before[:-1], {**before[-1], "content": "\n" + before[-1]["content"]}],
        (user("And April: 900 and 77.25?"), says("Once more.", "900 + 77.25")),
        ("977.25", says("April comes to 977.25.")),
    )
    talk(*target, before[:-1], (says("In all: 1638.50 net, 1949.82 gross."),))  # the same request again
    talk(
        *target,
        [system("Check the arithmetic that you are given.")],  # a sub-agent
        (user("Is 1638.5 * 1.19 = 1949.815?"), says("I compute it.", "1638.5 * 1.19")),
        ("1949.815", says("Yes, it is.")),
    )
    talk(
        *target,
        [*long[:3], {**long[3], "content": "1638.5 [trimmed]"}, *long[4:]],
        (user("Both months together?"), says("Adding both.", "1638.5 + 977.25")),
        ("2615.75", says("Together they are 2615.75.")),
    )
    summary = "Here is a summary of the conversation to date: March is 1638.50 net, April 977.25. Which is more?"
    talk(
        *target,
        long[:1],
        (user(summary), says("The difference.", "1638.5 - 977.25")),
        ("661.25", says("March, by 661.25.")),
    )


def hostile(served: Served, script: Script, session: str = "hostile") -> None:
    target = (served, script, session)
    messages = talk(
        *target,
        [],
        (user(HOSTILE), says(HOSTILE.replace("<|im_end|>", ""))),
        (user("long: " + "lorem ipsum dolor " * 2800), says("```html\n<h1>tabs\tand</h1>\n```")),
    )
    talk(*target, [user("another " + HOSTILE), *messages[1:]], (user("and now?"), says("Nothing.")))
