"""A completion and the request that follows it, for tests of breaks."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.conversations import GET_WEATHER, NOW, SYS, assistant, call, result, tool, user
from tests.formats.small import small_renderer
from tests.support import make_renderer, per_family
from tokentrace import Renderer, create_renderer
from tokentrace.diagnose.breaks import Break, explain_break
from tokentrace.pocket import POCKET

REMOVE = tool("remove", "Remove a file.", {"path": {"type": "string"}, "dry_run": {"type": "boolean"}}, ["path"])
TOOLS = [REMOVE, GET_WEATHER, NOW]
GO = [SYS, user("Go.")]
OK = result("ok")
Ids = npt.NDArray[np.int32]


@per_family
def renderer_of(family: str) -> Renderer:
    return create_renderer(POCKET) if family == "pocket" else make_renderer(family)


@dataclass(frozen=True)
class Rollout:
    """A rendered prompt, a sampled completion, and the messages that a client adds for the next request."""

    family: str
    completion: str
    replies: tuple[dict[str, Any], ...]
    messages: tuple[dict[str, Any], ...] = tuple(GO)

    @property
    def renderer(self) -> Renderer:
        return renderer_of("pocket") if self.family == "pocket" else small_renderer(self.family, lost="ignore")

    @property
    def prompt(self) -> Ids:
        return self.renderer.render(list(self.messages), tools=TOOLS, add_generation_prompt=True).ids

    @property
    def stream(self) -> Ids:
        return np.concatenate([self.prompt, self.renderer.tokenizer.encode(self.completion)])

    @property
    def sampled(self) -> npt.NDArray[np.bool_]:
        return np.arange(len(self.stream)) >= len(self.prompt)

    @property
    def next_prompt(self) -> Ids:
        messages = [*self.messages, *self.replies]
        return self.renderer.render(messages, tools=TOOLS, add_generation_prompt=True).ids

    def explain(self, **more: Any) -> Break:
        consistent(self.stream, self.next_prompt, self.renderer.tokenizer)
        return consistent(self.stream, self.next_prompt, self.renderer, sampled=self.sampled, **more)


def consistent(stream: Any, prompt: Any, model: Any, **more: Any) -> Break:
    """The break between stream and prompt, after checks that hold for every cause."""
    broken = explain_break(stream, prompt, model, **more)
    assert broken is not None
    stream_ids, prompt_ids = np.asarray(stream, np.int64), np.asarray(prompt, np.int64)
    at = broken.position
    assert np.array_equal(stream_ids[:at], prompt_ids[:at])
    if min(len(stream_ids), len(prompt_ids)) > at:
        assert stream_ids[at] != prompt_ids[at]
    assert broken.stream_range[0] == broken.prompt_range[0] == at
    a, b = broken.stream_range[1], broken.prompt_range[1]
    assert at <= a <= len(stream_ids)
    assert at <= b <= len(prompt_ids)
    assert a > at or b > at
    assert a == len(stream_ids) or (b < len(prompt_ids) and stream_ids[a] == prompt_ids[b])
    contrast = broken.contrast()
    for track, ids in ((contrast.base, stream_ids), (contrast.other, prompt_ids)):
        assert len(track.ids) < 300
        assert set(track.ids.tolist()) <= set(ids.tolist())
    report = str(broken)
    assert report.startswith(f"✗ break at token {at:,} of {len(stream_ids):,}")
    assert str(broken.cause) in report.splitlines()[0]
    assert "\x1b" not in report
    assert broken.advice == broken.cause.advice
    return broken


def hermes(body: str, *, family: str) -> str:
    end = {"qwen3": "<|im_end|>", "pocket": "<|end|>"}[family]
    return f"<think>\nI look.\n</think>\n\n<tool_call>\n{body}\n</tool_call>{end}"


def weather(arguments: str, *, family: str) -> str:
    return hermes(f'{{"name": "get_weather", "arguments": {arguments}}}', family=family)


def called(name: str, arguments: Any) -> tuple[dict[str, Any], ...]:
    return assistant("", call(name, arguments), reasoning="I look."), OK


HELLO = "Hello there, how can I help you today?"


def report(city: int) -> str:
    """A long tool result, different for each city."""
    return "\n".join(f"{hour} o'clock in city {city}: {city * 7 + hour * 13} degrees" for hour in range(24))


HISTORY = [*GO]
for n in range(4):
    HISTORY += [assistant("", call("get_weather", {"city": f"City {n}"})), result(report(n))]
ANSWER = assistant("All is known now, and the rest is as it was before.")
SUMMARY = user("So far: the weather of four cities was asked for. Go on.")
