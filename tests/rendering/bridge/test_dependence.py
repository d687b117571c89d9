"""Templates whose new text depends on earlier messages are bridged as they render, or refused."""

import itertools
from typing import Any

import pytest

from tests.conversations import ASK, HI, SIMPLE, assistant, call, result, system, tool, user
from tests.gateway.recorded import Bench
from tests.rendering.bridge.rollouts import cut_after
from tests.support import make_renderer, over_bytes
from tokentrace import Renderer
from tokentrace.errors import ControlTokenError

FLAG = (
    "{% set ns = namespace(on=false) %}{% for m in messages %}{% if CONDITION %}{% set ns.on = true %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if ns.on %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CONDITIONS = {
    "m.role == 'system' and '/no_think' in m.content": "/no_think",
    "m.role == 'user' and m.content.endswith('/no_think')": "Hello /no_think",
    "'DONE' in m.content": "DONE",
    "m.content|length > 500": "x" * 600,
    "messages|length > 8": "Hello",
    "m.role == 'system' and m.content|length > 500": "x" * 600,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_what_depends_on_earlier_text_is_bridged_as_it_renders(condition: str) -> None:
    renderer, bridged = over_bytes(FLAG.replace("CONDITION", condition)), 0
    texts = ("Hello", CONDITIONS[condition])
    for first, second, reply, rounds in itertools.product(texts, texts, texts, (0, 2, 3, 4)):
        past = [system(first), *[user(second), assistant("Yes.")] * rounds, user(second)]
        messages = [*past, assistant(reply), user("Go on.")]
        cut = cut_after(renderer, messages, len(past), len(messages), None)
        assert cut is not None
        for history in (None, past):
            outcome = cut.bridge(renderer, messages=history)
            assert not outcome or outcome.new_ids.tolist() == cut.full.token_ids[cut.stop :], (first, second, reply)
            bridged += bool(outcome)
    assert bridged >= 16


@pytest.mark.parametrize("moved", [False, True])
def test_instructions_in_each_turn_are_repeated_and_those_in_the_last_one_stay_in_place(moved: bool) -> None:
    renderer = over_bytes(
        "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == "
        "'user' and messages[0].role == 'system' and WHERE %} [{{ messages[0].content }}]{% endif %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    .replace("WHERE", "loop.last" if moved else "true"))  # fmt: skip
    past = [system("Be brief."), HI]
    cut = cut_after(renderer, [*past, assistant("Yes."), user("Go on.")], 2, 4, None)
    assert cut is not None
    actual, other = cut.bridge(renderer), cut.bridge(renderer, messages=past)
    actual, other = (actual, other) if moved else (other, actual)
    assert not other
    assert f"user\nGo on.{'' if moved else ' [Be brief.]'}<|im_end|>" in renderer.decode(actual.new_ids)  # type: ignore


@pytest.mark.parametrize("family", ["qwen3", "glm-4.5"])
def test_control_tokens_that_the_template_looks_for_are_tried_under_reject(family: str) -> None:
    renderer = make_renderer(family, control_tokens="reject")
    cut = cut_after(renderer, [HI, assistant("Hello."), ASK], 1, 3, None)
    assert cut is not None
    bridge = cut.bridge(renderer)
    assert bridge
    assert bridge == cut.bridge(make_renderer(family))
    forged = user(renderer.tokenizer.decode(renderer.get_stop_token_ids()[:1]))
    with pytest.raises(ControlTokenError, match=r"^message 0, content: "):
        renderer.bridge(cut.prompt, cut.completion, [forged])


NUMBERED = (
    "{% set ns = namespace(calls=[]) %}{% for m in messages %}{% if m.role == 'tool' %}<r>{% for c in ns.calls %}"
    "{% if c.id == m.tool_call_id %}{{ loop.index }}. {{ c.function.name }}{% endif %}{% endfor %}: {{ m.content }}</r>"
    "{% if loop.last or messages[loop.index].role != 'tool' %}{{ ns.calls|length }} calls{% endif %}"
    "{% else %}<m>{{ m.role }} {{ m.content }}{% if m.tool_calls %}{% set ns.calls = m.tool_calls %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}{% endif %}</m>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<m>assistant {% endif %}"
)
"""Results have the number and name of their call, and are counted."""
CALLS = [call("get_weather", {"city": city}, f"call0000{at}") for at, city in enumerate("abc", 1)]
IDS = [each["id"] for each in CALLS]
RESULTS = [result(f"r{at}", f"call0000{at}") for at in (1, 2, 3)]


@pytest.fixture(scope="module")
def numbered() -> Renderer:
    return over_bytes(NUMBERED, controls="<m></m><r></r><tool_call></tool_call>")


@pytest.mark.parametrize("order", [order for count in (1, 2, 3) for order in itertools.permutations(range(3), count)])
def test_results_belong_to_their_calls_in_any_order(numbered: Renderer, order: tuple[int, ...]) -> None:
    new: list[Any] = [RESULTS[at] for at in order]
    for after in ([], [user("So?")]):
        cut = cut_after(numbered, [ASK, assistant("", *CALLS), *new, *after], 1, 2 + len([*new, *after]), SIMPLE)
        assert cut is not None
        assert cut.bridge(numbered, call_ids=IDS) == cut.full.token_ids
        outcome = cut.bridge(numbered)  # in order, or it refuses
        assert not outcome or outcome == cut.full.token_ids or order in itertools.permutations(range(3))
        assert outcome or order != (0, 1, 2)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_calls_that_are_counted_over_the_conversation_need_it(before: int) -> None:
    counting = NUMBERED.replace("ns.calls = m.tool_calls", "ns.calls = ns.calls + m.tool_calls")
    renderer = over_bytes(counting, controls="<m></m><r></r><tool_call></tool_call>")
    past = [ASK, *[assistant("", CALLS[0]), RESULTS[0]] * before]
    cut = cut_after(renderer, [*past, assistant("", CALLS[1]), RESULTS[1]], len(past), len(past) + 2, SIMPLE)
    assert cut is not None
    assert cut.bridge(renderer, messages=past) == cut.full.token_ids
    outcome = cut.bridge(renderer)
    assert outcome == cut.full.token_ids if not before else not outcome


LOOKUPS = {
    "by id": "{% for c in ns.calls if c.id == m.tool_call_id %}{{ c.function.name }}: {% endfor %}",
    "a wrong index": "{% if messages[loop.index0 - 1].role != 'tool' %}new {% endif %}",
    "the tool": "{% for t in tools if t.function.name == m.name and t.function.parameters.required %}!{% endfor %}",
    "arguments": "{% if not ns.calls[0].function.arguments %}plain {% endif %}",
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_what_results_look_up_is_bridged_as_it_renders(lookup: str) -> None:
    renderer = over_bytes(
        "{% set ns = namespace(calls=[]) %}{% for m in messages[1 if messages[0].role == 'system' else 0:] %}"
        "{% if m.role == 'tool' %}<r>" + LOOKUPS[lookup] + "{{ m.content }}</r>{% else %}<m>{{ m.role }} "
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'id': c.id, 'name': c.function.name, "
        "'arguments': c.function.arguments}|tojson }}</tool_call>{% set ns.calls = m.tool_calls %}{% endfor %}</m>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<m>assistant {% endif %}",
        controls="<m></m><r></r><tool_call>",
    )
    calls, tools = [CALLS[0], call("now", {}, "call00002")], [*SIMPLE, tool("now", "", {}, [])]
    named = [{**RESULTS[0], "name": "get_weather"}, {**RESULTS[1], "name": "now"}]
    earlier = [system("S"), ASK, assistant("", CALLS[0]), named[0]]
    ways: Any = ([ASK], earlier), (1, 2), (named[::-1], RESULTS[1::-1], [user("Hurry."), *named[::-1]])
    for past, count, results in itertools.product(*ways):
        reply, new = calls[-count:], results[: len(results) - 2 + count]
        cut = cut_after(renderer, [*past, assistant("", *reply), *new], len(past), len(past) + 1 + len(new), tools)
        assert cut is not None
        for outcome in (cut.bridge(renderer), cut.bridge(renderer, messages=past)):
            assert not outcome or outcome.new_ids.tolist() == cut.full.token_ids[cut.stop :], (past, reply, new)


def test_the_gateway_knows_the_order_of_calls(numbered: Renderer) -> None:
    bench = Bench("qwen3")
    bench.renderer = numbered
    reply = bench.ask([HI], assistant("", *CALLS), SIMPLE)
    results = [{**RESULTS[at], "tool_call_id": reply["tool_calls"][at]["id"]} for at in (2, 0)]
    messages = [HI, reply, *results]
    bench.ask(messages, assistant("Sunny."), SIMPLE)
    assert bench.causes == [None, None]
    text = numbered.render(messages, tools=SIMPLE, add_generation_prompt=True).text
    assert numbered.decode(bench.prompts[1]) == text
