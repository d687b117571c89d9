"""What is learned of a template is shared, and history that is put back takes runs in proportion to its length.

Tokenizers are made up of the templates' own control tokens: what is counted does not depend on the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.assets import family_dir
from tests.conversations import SIMPLE
from tests.support import PYTHON_FORMATS, SPECIAL, tokenizer_json_for
from tokentrace import BridgedTokens, Renderer, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.rendering.factory import create_renderer_pool
from tokentrace.rendering.past import Past
from tokentrace.study.memory import Memory
from tokentrace.study.study import study_of
from tokentrace.template import ChatTemplate, PythonFormat
from tokentrace.tokens import Tokenizer
from tokentrace.tokens.loading import load_tokenizer

ASKED = [{"role": "user", "content": "Hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "Hello."}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


class Runs:
    """Counts the runs of templates."""

    def __init__(self) -> None:
        self.count = 0
        self.messages = 0
        self._lock = threading.Lock()

    def add(self, messages: int) -> None:
        with self._lock:
            self.count += 1
            self.messages += messages

    def of(self, do: Callable[[], Any]) -> int:
        before = self.count
        do()
        return self.count - before


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    counted = Runs()
    for kind in (ChatTemplate, PythonFormat):

        def render(self: Any, *given: Any, real: Any = kind.render, **named: Any) -> Any:
            counted.add(len(given[0]))
            return real(self, *given, **named)

        monkeypatch.setattr(kind, "render", render)
    return counted


def tokenizer_for(family: str) -> tuple[Tokenizer, Any]:
    """A small tokenizer for a family's template, and the template."""
    if family in PYTHON_FORMATS:
        controls = "<｜begin▁of▁sentence｜><｜end▁of▁sentence｜><｜User｜><｜Assistant｜><think></think><｜DSML｜>"
        return Tokenizer(tokenizer_json_for(controls), variables=SPECIAL, fast=False), PYTHON_FORMATS[family]
    source = (family_dir(family) / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(tokenizer_json_for(source), name=family, variables=SPECIAL, fast=False), source


def completion(renderer: Renderer, messages: list[Any], tools: Any = None) -> list[int]:
    rendered = renderer.render(messages, tools=tools)
    return [int(index) for turn in rendered.turns for index in rendered.ids[turn.start : turn.stop]]


# -- sharing


def test_a_pool_that_starts_cold_learns_once(runs: Runs) -> None:
    def work(renderer: Renderer) -> BridgedTokens | None:
        prompt = renderer.render_ids(ASKED, add_generation_prompt=True)
        return renderer.bridge_to_next_turn(prompt, completion(renderer, ANSWERED), ASKED)

    def in_pool(barrier: threading.Barrier, pool: Any) -> None:
        with pool.checkout() as renderer:
            barrier.wait()
            assert work(renderer)

    alone = create_renderer(load_tokenizer(POCKET))
    first, again = (runs.of(lambda: work(alone)) for _ in range(2))
    pool = create_renderer_pool(load_tokenizer(POCKET), size=16)
    barrier = threading.Barrier(16)
    with ThreadPoolExecutor(16) as threads:
        taken = runs.of(lambda: list(threads.map(in_pool, [barrier] * 16, [pool] * 16)))
    assert first > 3 * again
    assert taken <= first + 15 * again


def test_renderers_of_one_template_share_its_study() -> None:
    tokenizer = load_tokenizer(POCKET)
    renderer = create_renderer(tokenizer)
    study = renderer.study()
    assert create_renderer(tokenizer, use_patched=True, history="inference").study() is study
    assert renderer.with_past(Past.PRESERVE).study() is study
    assert renderer.silent().study() is study
    assert renderer.study(SIMPLE) is study
    assert create_renderer(tokenizer, enable_thinking=False).study() is not study
    assert create_renderer(load_tokenizer(POCKET)).study().tokenizer is not tokenizer


def test_variables_that_are_not_json_are_not_shared() -> None:
    tokenizer = load_tokenizer(POCKET)
    template = ChatTemplate("{{ made }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert study_of(template, tokenizer, {"made": 1}) is study_of(template, tokenizer, {"made": 1})
    assert study_of(template, tokenizer, {"made": 1}) is not study_of(template, tokenizer, {"made": True})
    one = study_of(template, tokenizer, {"made": b"x"})
    assert study_of(template, tokenizer, {"made": b"x"}) is not one


# -- memory


def test_memory_answers_after_it_is_full_and_keeps_no_errors() -> None:
    memory = Memory(most=8)
    for key in range(100):
        assert memory.once(key, lambda key=key: key * 2) == key * 2  # type: ignore[misc]

    def fail() -> int:
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        memory.once("x", fail)
    assert memory.once("x", lambda: 1) == 1
    assert memory.once("y", lambda: 1, keep=lambda found: found > 1) == 1
    assert memory.once("y", lambda: 2) == 2


def test_a_study_is_shared_by_what_variables_are_not_by_how_they_look() -> None:
    class Loud(int):
        def __str__(self) -> str:
            return "loud"

        __repr__ = int.__repr__

    tokenizer = load_tokenizer(POCKET)
    template = "{{ x }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"

    def text(x: object) -> str:
        return create_renderer(tokenizer, chat_template=template, x=x).render([{"role": "user", "content": "hi"}]).text

    value = {"a": [1]}
    first = create_renderer(tokenizer, chat_template=template, x=value)
    value["a"].append(2)
    assert text({"a": [1]}).startswith("{'a': [1]}")
    assert first.render([{"role": "user", "content": "hi"}]).text.startswith("{'a': [1]}")
    kept = create_renderer(tokenizer, chat_template=template, x=1)
    assert text(Loud(1)).startswith("loud")
    assert kept.render([{"role": "user", "content": "hi"}]).text.startswith("1")


def chat(turns: int) -> list[Any]:
    """Questions, each answered after some thought."""
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}
    return [message for at in range(turns) for message in ({"role": "user", "content": f"Is it {at}?"}, answer)]


def agent(turns: int) -> list[Any]:
    """One question, and as many thoughtful calls with their results, before it is answered and thanked for."""
    told: list[Any] = [*ASKED]
    for at in range(turns):
        call = {**CALL, "id": f"call{at:05}"}
        told.append({"role": "assistant", "content": "", "reasoning_content": f"Look {at}.", "tool_calls": [call]})
        told.append({"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": "sunny"})
    return [*told, ANSWERED[-1], *ASKED, ANSWERED[-1]]


@pytest.mark.parametrize("setting", ["preserve_all_thinking", "use_patched"])
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "kimi-k2.5", "gpt-oss"])
def test_history_that_is_put_back_takes_runs_in_proportion_to_its_length(family: str, setting: str, runs: Runs) -> None:
    """Turns that the template shows in no context, in their exchange only, or only as the last message."""
    tokenizer, template = tokenizer_for(family)
    renderer = create_renderer(tokenizer, chat_template=template, lost="ignore", **{setting: True})
    for make, tools in ((chat, None), (agent, SIMPLE)):
        renderer.render(make(2), tools=tools)
        shown = []
        for turns in (16, 64):
            before = runs.messages
            renderer.render(make(turns), tools=tools)
            shown.append(runs.messages - before)
        assert shown[1] < 5 * shown[0], (make.__name__, shown)
