"""Unknown settings are refused; what a renderer learns does not depend on the order of calls."""

import copy
import itertools
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from tests import conversations
from tests.formats.small import small_tokenizer
from tests.support import PYTHON_FORMATS, SPECIAL, byte_tokenizer_json, make_renderer, rotating
from tokentrace import Renderer, TokentraceError, create_renderer
from tokentrace.errors import InputError, RendererError
from tokentrace.pocket import POCKET
from tokentrace.tokens import Tokenizer

CHAT = [{"role": "user", "content": "2+2? <|end|>"}, {"role": "assistant", "content": "4"}]
TOKENIZER = Tokenizer(byte_tokenizer_json(["<s>", "</s>", "<c>", "<u>"]), variables=SPECIAL)


def renderer_for(source: Any, **settings: Any) -> Renderer:
    return create_renderer(TOKENIZER, "default", chat_template=source, **settings)


# -- names of settings


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"control_token": "reject"}, "control_tokens"),
        ({"zzz": 1}, r"does not read it \(it reads .*enable_thinking"),
        ({"documents": []}, "does not read it"),
        ({"tools": []}, r"pass it to render\(\)"),
        ({"add_generation_prompt": True}, r"pass it to render\(\)"),
    ],
)
def test_an_unknown_setting_is_refused(settings: Any, error: str) -> None:
    with pytest.raises(RendererError, match=error):
        create_renderer(POCKET, **settings)


def test_a_template_variable_is_a_setting_of_the_renderer() -> None:
    pocket: Any = create_renderer(POCKET)
    for render in (pocket.render, pocket.render_ids):
        with pytest.raises(InputError, match="enable_thinking: not an argument of render; pass settings and"):
            render(CHAT, enable_thinking=False)


V32 = ["thinking", "enable_thinking", "thinking_mode", "drop_thinking"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ messages }}{{ x }}", ["x"]),
        ("{{ messages }}{% set x = x or 1 %}{{ x }}", ["x"]),
        ("{% macro m(a) %}{{ a }}{{ deep }}{% endmacro %}{{ m(messages) }}", ["deep"]),
        ("{{ messages }}{% if x is defined %}{% set y = x %}{% else %}{% set y = z %}{% endif %}{{ y }}", ["x", "z"]),
        ("{{ messages }}{% for m in messages %}{% if switch %}{{ m }}{% endif %}{% endfor %}", ["switch"]),
        ("{{ messages }}{{ documents }}", ["documents"]),
        ("{{ messages }}{{ strftime_now('%Y') }}", ["strftime_now"]),
        ({"default": "{{ messages }}{{ a }}", "tool_use": "{{ messages }}{{ b }}"}, ["a", "b"]),
        (PYTHON_FORMATS["deepseek-v3.2"], V32),
        (PYTHON_FORMATS["deepseek-v4"], [*V32, "reasoning_effort"]),
    ],
)
def test_a_variable_that_a_template_reads_is_accepted(source: Any, names: list[str]) -> None:
    renderer_for(source, **dict.fromkeys(names))
    with pytest.raises(RendererError, match="does not read"):
        renderer_for(source, **{f"{names[0]}_": None})


# -- what is learned


FAMILIES = ("qwen3", "glm-4.5", "gpt-oss", "llama-3.1", "mistral-nemo", "deepseek-v3", "kimi-k2", "deepseek-v4")
TOOL = conversations.tool("look", "D", {}, [])
ODD_TOOL = {"name": "odd"}
SPLIT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<u>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{% endfor %}{{ '<c>' if tools else '</s>' }}"
    "{% else %}<s>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<u>{% endif %}"
)
"""Turns end with another token if there are tools."""


def _fresh(family: str) -> Renderer:
    if family == "split":
        return renderer_for(SPLIT, lost="ignore")
    return create_renderer(small_tokenizer(family), "default", chat_template=PYTHON_FORMATS.get(family), lost="ignore")


def _rendering(renderer: Renderer, tools: Any) -> Any:
    rendered = renderer.render(CHAT, tools=tools)
    return rendered.token_ids, rendered.sampled


def _bridging(renderer: Renderer, tools: Any) -> Any:
    prompt = renderer.render_ids(CHAT[:1], tools=tools, add_generation_prompt=True)
    bridged = renderer.bridge_to_next_turn(prompt, [52], CHAT[:1], tools=tools)
    return None if bridged is None else bridged.token_ids


def _parsing(renderer: Renderer, tools: Any) -> Any:
    parsed = renderer.parse_response([52, *renderer.get_stop_token_ids()[:1]], tools=tools)
    return parsed.content, str(parsed.finish), renderer.grammar(tools), sorted(renderer.turn_stop_ids())


STEPS = [*itertools.product((_rendering, _bridging, _parsing), (None, [TOOL])), (_rendering, [ODD_TOOL])]


def _results(family: str, *order: int) -> dict[int, Any]:
    renderer, out = _fresh(family), dict[int, Any]()
    for at in order:
        step, tools = STEPS[at]
        try:
            out[at] = step(renderer, tools)
        except TokentraceError as error:
            out[at] = str(error)
    return out


@pytest.mark.parametrize("family", [*FAMILIES, "split"])
def test_the_order_of_calls_does_not_matter(family: str) -> None:
    every = range(len(STEPS))
    alone = {at: _results(family, at)[at] for at in every}
    for first, second in rotating(itertools.permutations(every, 2), family, 3):
        assert _results(family, first, second)[second] == alone[second], (first, second)
    assert _results(family, *every) == _results(family, *reversed(every)) == alone


def test_what_ends_turns_beside_tools_stops_generation() -> None:
    assert renderer_for(SPLIT).get_stop_token_ids() == [257, 258]


# -- copies


def settings_of(renderer: Renderer) -> dict[str, Any]:
    digests = {"tokenizer": renderer.tokenizer.digest, "templates": renderer.template_digests()}
    return {**renderer.__reduce__()[0].keywords, **digests, "eos": renderer.tokenizer.eos_ids}


SETTINGS = {
    "past": "patched",
    "control_tokens": "hf_compat",
    "truncation": "refuse",
    "tool_parser": "hermes",
    "trusted": ("system",),
    "enable_thinking": False,
}


@pytest.mark.parametrize("settings", [{}, *({name: value} for name, value in SETTINGS.items()), SETTINGS])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda renderer: pickle.loads(pickle.dumps(renderer))])
def test_a_copy_renders_the_same_with_the_same_settings(duplicate: Any, settings: dict[str, Any]) -> None:
    renderer = create_renderer(POCKET, **settings)
    renderer.render(CHAT)
    renderer.cache.once("x", threading.Lock)
    renderer.bridge_to_next_turn([1], [2], CHAT[:1])
    other = duplicate(renderer)
    assert settings_of(other) == settings_of(renderer)
    assert other.render_ids(CHAT) == renderer.render_ids(CHAT)
    assert other.get_stop_token_ids() == renderer.get_stop_token_ids()
    assert other.cache.once("x", lambda: None) is None
    assert renderer.silent().cache.once("x", lambda: None) is not None
    assert other.tokenizer.core is renderer.tokenizer.core  # loaded once


def test_a_renderer_works_in_another_process() -> None:
    renderer = create_renderer(POCKET, enable_thinking=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(Renderer.render_ids, [renderer] * 2, [CHAT] * 2)) == [renderer.render_ids(CHAT)] * 2


# -- tools


def tool(value: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "default": value}}}]


def test_tools_are_read_as_they_are_now() -> None:
    renderer = make_renderer("qwen3")

    def printed(tools: Any) -> str:
        return renderer.render([{"role": "user", "content": "hi"}], tools=tools).text

    tools = tool({"a": "first"})
    first = printed(tools)
    tools[0]["function"]["parameters"]["default"]["a"] = "second"
    assert printed(tools) == first.replace("first", "second")
    assert printed(tool({"a": "first"})) == first
    values = [(1, "1}"), (1.0, "1.0}"), (True, "true}"), ("1", '"1"}'), (None, "null}"), ([1.0], "[1.0]}")]
    for value, text in [*values, *values]:
        assert '"default": ' + text in printed(tool(value))
