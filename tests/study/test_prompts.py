"""The generation prompt of a turn depends on the conversation before it, and on nothing that was rendered earlier."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import family_dir
from tests.conversations import CONVERSATIONS, SIMPLE, assistant, call, result, user
from tests.support import JINJA_FAMILIES, SPECIAL, byte_tokenizer_json, examples, templates_of_trl
from tokentrace import Renderer, TokentraceError, create_renderer
from tokentrace.template import ChatTemplate, wrap_tools
from tokentrace.tokens import Tokenizer

TURNS = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}{% set ns = namespace(hit=false, calls=0) %}"
    "{% for m in messages %}{% if m.tool_calls %}{% set ns.calls = ns.calls + 1 %}{% endif %}"
    "{% if '/no_think' in text(m.content) %}{% set ns.hit = true %}{% endif %}"
    "<s>{{ m.role }}:{% if m.role == 'assistant' and m.content %}<think></think>{% endif %}{{ text(m.content) }}<e>"
    "{% endfor %}"
)
ASKING = "{% if add_generation_prompt %}<s>assistant:{% if CONDITION %}<think></think>{% endif %}{% endif %}"
CONDITIONS = [
    "messages|length > 2", "messages|length % 4 == 1", "ns.hit", "ns.calls == 1",
    "text(messages[-1].content)|length > 6", "messages[-1].content is not string", "messages[-1].name == 'b'",
    "messages[0].role == 'system'", "tools and tools[0].function.name == 'b'", "tools is not none",
    "enable_thinking is defined", "messages|map(attribute='role')|list|last == 'tool'",
]  # fmt: skip
CALL = call("b", {"x": 1})
INPUTS = [
    user("Hello."),
    user("/no_think Hi"),
    user([{"type": "text", "text": "/no_think"}, {"type": "text", "text": "Hi"}]),
    user([{"type": "text", "text": "Hello you"}]),
    {"role": "system", "content": "Be short."},
    result("sunny", name="a"),
    result("sunny", name="b"),
]
REPLIES = [assistant("Hi."), assistant("Yes."), assistant("", CALL)]
A, B = ({**SIMPLE[0], "function": {**SIMPLE[0]["function"], "name": name}} for name in "ab")
TOOLS = [None, [], [A, B], [B, A]]
PAIRS = st.lists(st.tuples(st.sampled_from(INPUTS), st.sampled_from(REPLIES)), min_size=1, max_size=3)
CHATS = st.tuples(PAIRS.map(lambda pairs: [message for pair in pairs for message in pair]), st.sampled_from(TOOLS))


def renderer_for(source: str, **settings: Any) -> Renderer:
    tokenizer = Tokenizer(byte_tokenizer_json(["<s>", "<e>", "<think>", "</think>"]), fast=False)
    return create_renderer(tokenizer, "default", chat_template=source, lost="ignore", **settings)


def facts(renderer: Renderer, messages: Any, tools: Any) -> Any:
    try:
        rendered = renderer.render(messages, tools=tools)
    except TokentraceError as error:
        return str(error)
    return rendered.token_ids, rendered.mask.tolist(), rendered.turns, rendered.notes


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(CONDITIONS), st.sampled_from(CONDITIONS), st.lists(CHATS, min_size=2, max_size=4))
def test_masks_do_not_depend_on_what_was_rendered_before(one: str, other: str, conversations: Any) -> None:
    source = TURNS + ASKING.replace("CONDITION", f"({one} or {other})")
    shared = renderer_for(source)
    for messages, tools in (*conversations, *reversed(conversations)):
        assert facts(shared, messages, tools) == facts(renderer_for(source), messages, tools)


@pytest.mark.parametrize("condition", ["'/no_think' in messages[-1].content[0].text", "messages|length > 2"])
def test_what_the_prompt_prefilled_is_never_sampled(condition: str) -> None:
    renderer = renderer_for((TURNS + ASKING).replace("CONDITION", condition))
    plain, quiet = ([{"type": "text", "text": text}] for text in ("Hi", "Hi /no_think"))
    earlier = [user(plain), assistant("Yes.")]
    sampled = {}
    for name, messages in {"plain": earlier, "quiet": [*earlier, user(quiet), assistant("No.")]}.items():
        rendered = renderer.render(messages)
        sampled[name] = [renderer.tokenizer.decode(rendered.ids[turn.start : turn.stop]) for turn in rendered.turns]
    assert sampled == {"plain": ["<think></think>Yes.<e>"], "quiet": ["<think></think>Yes.<e>", "No.<e>"]}


SOURCES = {name: family_dir(name) / "chat_template.jinja" for name in JINJA_FAMILIES}


@pytest.mark.parametrize("name", [*JINJA_FAMILIES, *templates_of_trl()])
def test_a_prompt_that_is_proven_constant_is_constant(name: str) -> None:
    source = SOURCES[name].read_text(encoding="utf-8") if name in SOURCES else templates_of_trl()[name]
    template = ChatTemplate(source)
    if not template.asks_alike:
        pytest.skip("nothing is proven")
    tails = set()
    for conversation in list(CONVERSATIONS.values())[::3]:
        tools = None if conversation.tools is None else wrap_tools(conversation.tools)
        for count in range(1, len(conversation.messages) + 1):
            past, options = conversation.messages[:count], {"add_generation_prompt": True, "variables": SPECIAL}
            with contextlib.suppress(TokentraceError):
                prompted = template.render(past, tools, **options)
                tails |= {prompted.text[prompted.tail :]} if prompted.tail else set()
    assert len(tails) <= 1


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_prompt_is_proven_constant_only_if_it_reads_no_conversation(condition: str) -> None:
    reads_variables_only = condition == "enable_thinking is defined"
    assert ChatTemplate((TURNS + ASKING).replace("CONDITION", condition)).asks_alike == reads_variables_only
    macro = "{% macro state() %}{% if " + condition + " %}x{% endif %}{% endmacro %}"
    through = TURNS + macro + "{% set flag %}{{ state() }}{% endset %}" + ASKING.replace("CONDITION", "flag")
    assert ChatTemplate(through).asks_alike == reads_variables_only


LOOP = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
ASK = "{% if add_generation_prompt %}<s>assistant:"
LOUD = "'!' in messages[-1].content"
HIDDEN = {
    "an earlier elif": f"{LOOP}{ASK}{{% if x %}}{{% elif {LOUD} %}}{{% else %}}<think>{{% endif %}}{{% endif %}}",
    "an elif before a break": f"{LOOP}{ASK}{{% for i in [1] %}}{{% if x %}}{{% elif {LOUD} %}}{{% else %}}{{% break %}}"
    "{% endif %}<think>{% endfor %}{% endif %}",
    "a loop over letters": LOOP + "{% set last = messages[-1].content %}" + ASK
    + "{% for c in last %}<think>{% endfor %}{% endif %}",
    "a parameter of a macro": "{% set ns = namespace(x='') %}{% macro note(v) %}{% set ns.x = v %}{% endmacro %}"
    + LOOP.replace("<s>", "{{ note('<think>' if '!' in m.content else '') }}<s>") + ASK + "{{ ns.x }}{% endif %}",
    "a count in a macro": "{% set ns = namespace(n=0) %}{% macro b() %}{% set ns.n = ns.n + 1 %}{% endmacro %}"
    + LOOP.replace("<s>", "{{ b() }}<s>") + ASK + "{{ '<think>' if ns.n > 3 else '' }}{% endif %}",
    "a namespace made anew": "{% set ns = namespace(x='', y='<think>') %}" + LOOP
    + f"{{% if not {LOUD} %}}{{% set ns = namespace(x='') %}}{{% endif %}}" + ASK + "{{ ns.y }}{% endif %}",
    "a generator that is used up": "{% set g = ['<think>']|map('string') %}"
    + LOOP.replace("<s>", "{% if '!' not in m.content and loop.last %}{% set _ = g|list %}{% endif %}<s>")
    + ASK + "{{ g|join }}{% endif %}",
    "a prompt in the loop": LOOP.replace(
        "<e>", "<e>{% if loop.last and add_generation_prompt %}<s>assistant:{% if '!' in m.content %}<think>{% endif %}"
        "{% endif %}"
    ) + "{% if add_generation_prompt %}{% endif %}",
}  # fmt: skip


@pytest.mark.parametrize("source", HIDDEN.values(), ids=HIDDEN.keys())
def test_a_conversation_that_the_prompt_reads_in_a_roundabout_way_proves_nothing(source: str) -> None:
    assert not ChatTemplate(source).asks_alike


def test_white_space_is_no_part_of_another_turns_prompt() -> None:
    """After a result the prompt is empty, and the turn begins with blanks, as the prompt after a question does."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}    {{ m.content }}<e>{% else %}<s>{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}  <think>{% endif %}"
    )
    renderer, messages = renderer_for(source), [user("Hi."), assistant("", CALL), result("4"), assistant("Four.")]
    prompt = renderer.render_ids(messages[:3], add_generation_prompt=True)
    assert renderer.render(messages).turns[-1].start == len(prompt)
