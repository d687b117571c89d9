"""A bridge out of a frame is the bridge of a run of the template: ids, kinds, messages, losses and refusals.

Two renderers of one template bridge the same texts, ordinary and hostile; one of them may learn frames.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.assets import FAMILIES
from tests.conversations import ASK, HI, PARIS, ROME, SIMPLE, assistant, result, text, user
from tests.rendering.bridge.rollouts import Cut, cut, trl_renderer
from tests.support import PYTHON_FORMATS, load_family, rotating, some, templates_of_trl
from tokentrace import BridgedTokens, BridgeRefusal, Renderer, TokentraceError, create_renderer
from tokentrace.rendering import forms, framing
from tokentrace.template import ChatTemplate
from tokentrace.tokens import Tokenizer

FRAGMENTS = [
    *("plain words", "x", "{'a': 1}", '{"a": "b"}', "1234567", "def f(x):\n    return x\n", "\n", "\n\n", "  ", "\t"),
    *("</tool_response>", "<tool_response>", "</think>", "<think>", "<tool_call>", "</tool_call>", "/no_think", "]"),
    *(
        "naïve café",
        "e\u0301",
        "\u1100\u1161",
        "日本語",
        "🙂",
        "I'ſ",
        "\u00a0",
        "\ufeff",
        "<|",
        "|>",
        "<｜",
        "\\",
        '"',
        "'",
    ),
]


def texts(tokenizer: Tokenizer, seed: str, count: int) -> list[str]:
    """Texts of one or more fragments; every other one of ordinary words, so that frames are learned and used."""
    random_of = random.Random(seed)
    controls = sorted(tokenizer.vocabulary.control)
    odd = [*FRAGMENTS, *random_of.sample(controls, min(12, len(controls)))]
    made = ["", " ", "\n\n", " padded\n", *(f"word{at} and more" for at in range(6))]
    while len(made) < count:
        made.append(f"result {len(made)}: all is well")
        made.append("".join(random_of.choices(odd, k=random_of.randint(1, 5))))
    return made


@contextmanager
def no_frames(patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as patched:
        patched.setattr(forms.Frames, "shelf", lambda *_: None)
        yield


def told(bridge: BridgedTokens | BridgeRefusal | TokentraceError) -> Any:
    """All that a bridge says."""
    if isinstance(bridge, BridgedTokens):
        lost, changes = list(map(str, bridge.lost)), list(map(str, bridge.changes))
        arrays = [bridge.new_ids.tolist(), bridge.kinds.tolist(), bridge.messages.tolist()]
        return arrays, bridge.new_count, lost, changes, bridge.closed, bridge.new_ids.dtype, bridge.messages.dtype
    return type(bridge), str(bridge)


def bridged(renderer: Renderer, made: Cut, new: Any) -> BridgedTokens | BridgeRefusal | TokentraceError:
    try:
        return renderer.bridge(made.prompt, made.completion, new, tools=made.tools)
    except TokentraceError as error:
        return error


def about(said: str, call_id: str = "call00001") -> Any:
    """A result with or without its name and its id, as the text has it."""
    made = result(said, call_id, name="get_weather")
    left_out = ((), ("name",), ("tool_call_id",), ("name", "tool_call_id"))[sum(map(ord, said)) % 4]
    return {name: value for name, value in made.items() if name not in left_out}


def situations(renderer: Renderer) -> Iterator[tuple[str, Cut, Any]]:
    """Streams, and how new messages are made of a text."""
    asked = [ASK, assistant("", PARIS), result("sunny", name="get_weather")]
    twice = [ASK, assistant("", PARIS, ROME), result("sunny"), result("rain", "call00002")]
    ways: dict[str, tuple[Any, Any, Any]] = {
        "user": ([HI, assistant("Yes?"), ASK], None, lambda said: [user(said)]),
        "user, in parts": ([HI, assistant("Yes?"), ASK], None, lambda said: [user(text(said, "and"))]),
        "result": (asked, SIMPLE, lambda said: [result(said, name="get_weather")]),
        "result without a name": (asked, SIMPLE, lambda said: [result(said)]),
        "result of an id": (asked, SIMPLE, lambda said: [result("fine", said, name="get_weather")]),
        "results": (twice, SIMPLE, lambda said: [result(said), result("rain", "call00002")]),
        "result, user": (asked, SIMPLE, lambda said: [result("sunny", name="get_weather"), user(said)]),
        "result, and what is about it": (asked, SIMPLE, lambda said: [about(said)]),
        "results, and what is about them": (twice, SIMPLE, lambda said: [about(said), about(said[::-1], "call00002")]),
        "result with a field more": (asked, SIMPLE, lambda said: [{**result(said), "note": "n"}]),
        "cut off": ([HI, assistant("Yes?"), ASK], None, lambda said: [user(said)]),
    }
    for name, (messages, tools, new) in ways.items():
        made = cut(renderer, messages, 1, len(messages), tools)
        if made is not None:
            stream = made.completion[:-2] if name == "cut off" else made.completion
            yield name, Cut(made.at, made.prompt, stream, made.new, tools, made.full, made.stop), new


def compare(framed: Renderer, plain: Renderer, patch: pytest.MonkeyPatch, count: int, seed: str, every: int = 1) -> int:
    """Bridge all texts in all situations with both; how often a frame served."""
    failures: list[str] = []
    served = 0
    write = forms.Shelf.write
    used: list[bool] = []

    def noted(self: Any, *given: Any) -> Any:
        found = write(self, *given)
        used.append(found is not None and not found[0].unchecked)
        return found

    patch.setattr(forms.Shelf, "write", noted)
    for name, made, new in rotating(situations(plain), seed, every):
        for said in texts(plain.tokenizer, f"{seed} {name}", count):
            used.clear()
            ours = bridged(framed, made, new(said))
            served += any(used)
            with no_frames(patch):
                theirs = bridged(plain, made, new(said))
            if told(ours) != told(theirs):
                failures.append(f"{name}, {said!r}, frame {any(used)}: {told(ours)} instead of {told(theirs)}")
    assert not failures, some(failures)
    return served


def renderers(family: str, **settings: Any) -> tuple[Renderer, Renderer]:
    template = PYTHON_FORMATS.get(family)
    given = {"chat_template": template, "lost": "ignore", **settings}
    framed, plain = (create_renderer(load_family(family), "default", **given) for _ in range(2))
    return framed, plain


FEW = dict.fromkeys((*PYTHON_FORMATS, "deepseek-v3", "deepseek-r1"), 0)
"""At least so many bridges came out of frames, by family; 5 for all others. Formats written in Python have none, and
results of DeepSeek V3, whose place depends on the conversation, neither."""


@pytest.mark.parametrize("family", rotating(FAMILIES, "frames", 3))
def test_a_frame_writes_what_the_template_writes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = compare(*renderers(family), monkeypatch, 18, family, every=3)
    assert served >= FEW.get(family, 5)


@pytest.mark.parametrize("policy", ["reject", "hf_compat"])
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_frames_keep_to_the_policy_for_control_tokens(
    family: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compare(*renderers(family, control_tokens=policy), monkeypatch, 20, policy, every=3) >= 10


@pytest.mark.parametrize("name", rotating(sorted(templates_of_trl()), "frames", 20))
def test_frames_of_templates_of_trl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = trl_renderer(name)
    template = shared.study().template
    assert isinstance(template, ChatTemplate)
    framed, plain = (
        create_renderer(shared.tokenizer, "default", chat_template=template.source, lost="ignore") for _ in range(2)
    )
    served = compare(framed, plain, monkeypatch, 16, name, every=2)
    assert served >= (0 if name.startswith("llava") else 5)  # which takes no text but beside images


LOOKS_AT_NAMES = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'tool' and not m.content %}{{ m.name | default('nobody') }}{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_names_count_where_the_template_looks_at_them_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_family("qwen3")
    framed, plain = (create_renderer(tokenizer, chat_template=LOOKS_AT_NAMES, lost="ignore") for _ in range(2))
    made = cut(plain, [ASK, assistant("x"), result("sunny", name="get_weather")], 1, 3, None)
    assert made is not None
    runs: list[Any] = []
    render = ChatTemplate.render
    for said in ("fine", ""):
        for at in range(12):
            new = [{"role": "tool", "content": said, "tool_call_id": f"c{at}", "name": f"f{at}"}]
            for name in ("name",) * (at % 2) + ("tool_call_id",) * (at % 3 == 0):
                del new[0][name]
            with monkeypatch.context() as patch:
                patch.setattr(ChatTemplate, "render", lambda *given, **named: runs.append(1) or render(*given, **named))
                ours = bridged(framed, made, new)
                if said and at > framing.CHECKED:
                    assert not runs, "with or without a name it is the same frame"
                runs.clear()
            with no_frames(monkeypatch):
                assert told(ours) == told(bridged(plain, made, new))
