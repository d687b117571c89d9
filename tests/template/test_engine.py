"""Templates render the same text as in transformers, and every character is credited to its field."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import family_dir
from tests.lazy import lazy
from tests.support import JINJA_FAMILIES, examples, rotating, templates_of_trl
from tokentrace import TemplateError
from tokentrace.conversation.messages import REASONING_FIELDS
from tokentrace.template import ChatTemplate, wrap_tools, wrap_variables
from tokentrace.template.origin import UNKNOWN
from tokentrace.template.trace import Rendering

chat_template_utils = lazy("transformers.utils.chat_template_utils")

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = [
    *("Looking.", "", " \n x\n", "<think>\nhm\n</think>\n\nok", "</think>", "née ∑ 漢字 🏳️‍🌈", "a</think>b</think>c"),
    *("<tool_response>\nx\n</tool_response>", "/no_think go", "\n\nline\n\n", "<|im_end|>", "plain text", '{"a": 1}'),
    *("<|eot_id|>", "x" * 5000, "İﬁ ß", "  ", "{{ messages }}", "%s {0}", "\u2028\x85", "<|channel|>a<|message|>"),
]
VALUES: list[Any] = ["x", True, None, 3, 1.5, {"A": "1", "b": [True, 1.5]}, ["x", "é"], "", -1, {}, []]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run <it>.",
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string", "description": "né", "enum": ["a", "b"]},
                "depth": {"type": ["integer", "null"], "default": 1},
                "rest": {"type": "array", "items": {"type": "string"}},
                "deep": {"type": "object", "properties": {"q": {"type": "number"}}, "required": ["q"]},
            },
            "required": ["cmd"],
        },
    },
}


def facts(rendering: Rendering) -> tuple[Any, ...]:
    """All public facts of a rendering."""
    return rendering.text, rendering.spans(), rendering.generation, rendering.tail


def outcome(render: Any) -> Any:
    """The facts of a rendering; None if the template refuses."""
    try:
        return facts(render())
    except TemplateError:
        return None


def by_transformers(source: str, messages: Any, tools: Any, prompt: bool, variables: Any) -> str | None:
    """The text that transformers writes; None if it fails."""
    try:
        return chat_template_utils._compile_jinja_template(source).render(
            messages=chat_template_utils._plain_template_data(with_reasoning(messages)),
            tools=chat_template_utils._plain_template_data(tools),
            documents=None,
            add_generation_prompt=prompt,
            **chat_template_utils._plain_template_data({**SPECIALS, **variables}),
        )
    except Exception:  # whatever a template raises is its refusal
        return None


def same(source: str, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = False, **variables: Any) -> Any:
    """Render twice and compare with transformers; return the facts, or None if both refuse."""
    options = {"add_generation_prompt": prompt, "variables": wrap_variables({**SPECIALS, **variables})}
    before = json.dumps(messages, default=str)
    template = ChatTemplate(source)
    wrapped = wrap_tools(tools) if tools else None
    results = []
    for _ in range(2):
        random.seed(0)
        results.append(outcome(lambda: template.render(messages, wrapped, **options)))
    assert results[0] == results[1], "a second time"
    assert json.dumps(messages, default=str) == before
    random.seed(0)
    plain = by_transformers(source, messages, tools or None, prompt, variables)
    if plain is None or " at 0x" not in plain:  # the address of some object
        assert (results[0] and results[0][0]) == plain
    return results[0]


def signed(value: Any, path: tuple[Any, ...], letters: Iterator[int], owners: dict[str, tuple[Any, ...]]) -> Any:
    """A message with a unique letter around each text; `owners` gets the field of each letter."""
    if isinstance(value, dict):
        unsigned = ("role", "type", "arguments")
        return {
            key: item if key in unsigned else signed(item, (*path, key), letters, owners) for key, item in value.items()
        }
    if isinstance(value, list):
        return [signed(item, (*path, at), letters, owners) for at, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    letter = chr(next(letters))
    owners[letter] = path
    return f"{letter}{value}{letter}"


# -- every family, on awkward conversations


def text(chance: random.Random) -> str:
    return chance.choice(WORDS) if chance.random() < 0.7 else " ".join(chance.choices(WORDS, k=3))


def content(chance: random.Random) -> Any:
    roll = chance.random()
    if roll < 0.75:
        return text(chance)
    if roll < 0.9:
        return [{"type": "text", "text": text(chance)} for _ in range(chance.randrange(3))]
    return chance.choice([None, "", [{"type": "image"}], 7])


def conversation(chance: random.Random, string_arguments: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.5:
        messages.append({"role": chance.choice(["system", "developer"]), "content": content(chance)})
    for number in range(chance.randrange(1, 4)):
        messages.append({"role": "user", "content": content(chance)})
        for step in range(chance.randrange(0, 3)):
            turn: dict[str, Any] = {"role": "assistant", "content": content(chance)}
            if chance.random() < 0.5:
                turn[chance.choice(["reasoning_content", "thinking", "reasoning"])] = text(chance)
            calls = []
            for at in range(chance.randrange(3)):
                arguments: Any = {name: chance.choice(VALUES) for name in chance.sample(["cmd", "depth", "deep"], 2)}
                if string_arguments or chance.random() < 0.1:
                    arguments = json.dumps(arguments)
                name = f"functions.run:{number}{step}{at}"
                calls.append({"id": name, "type": "function", "function": {"name": "run", "arguments": arguments}})
            if calls or chance.random() < 0.1:
                turn["tool_calls"] = calls
            messages.append(turn)
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": "run", "content": content(chance)})
    if chance.random() < 0.1:
        messages.append({"role": "critic", "content": "no such role"})
    return messages


def family_templates(family: str) -> list[str]:
    """The templates that a family ships; its vocabulary is not needed."""
    folder = family_dir(family)
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*.jinja")]
    configured = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template") or []
    return sources + ([configured] if isinstance(configured, str) else [entry["template"] for entry in configured])


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_families(family: str) -> None:
    rendered_at_all = 0
    for source in family_templates(family):
        for seed in range(12):
            chance = random.Random(f"{family} {seed}")
            messages = conversation(chance, string_arguments=seed % 2 == 0)
            tools = chance.choice([None, [TOOL], [TOOL, {**TOOL, "strict": True}]])
            variables = chance.choice([{}, {"enable_thinking": False}, {"reasoning_effort": "high"}])
            owners: dict[str, tuple[Any, ...]] = {}
            letters = itertools.count(0xE000)
            messages = [signed(message, ("messages", at), letters, owners) for at, message in enumerate(messages)]
            result = same(source, messages, tools, chance.random() < 0.5, **variables)
            rendered_at_all += result is not None
            for text, _, origin in result[1] if result is not None else ():
                for letter in owners.keys() & set(text):
                    assert origin == UNKNOWN or origin == owners[letter], (owners[letter], text)
    assert rendered_at_all


def test_templates_of_trl() -> None:
    for name, source in rotating(templates_of_trl().items(), "engine", 3):
        for seed in rotating(range(3), name, 3):
            chance = random.Random(f"{name} {seed}")
            same(source, conversation(chance, string_arguments=False), [TOOL], seed % 2 == 0)


# -- the language

SETUP = (
    "{%- set m = messages[1] -%}{%- set c = m.content -%}{%- set a = messages[2].tool_calls[0].function.arguments -%}"
    "{%- set tool = tools[0] -%}"
)
ARGUMENTS = {
    **{"text": "a <b> & é \n", "int": 42, "float": 1.5, "yes": True, "nothing": None},
    "list": [3, "b", [1], {"k": "v"}],
    **{"empty": {}, "nested": {"b": {"z": 1, "a": [True, None]}, "a": "x"}, "items": "shadows a method"},
}
CALL = {"type": "function", "function": {"name": "get_it", "arguments": ARGUMENTS}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": "Hello <there> & Welcome!\n  It's naïve\tİ ﬁ.\n", "pair": ("a", 2)},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL], "reasoning": " why\nnot "},
    {"role": "tool", "content": [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]},
    {"role": "tool", "content": "second", "n": 4},
    {"role": "assistant", "content": "done", "thinking": "hm"},
    {"role": "user", "content": "https://example.org/?a=b&c=d and 1,234.50"},
]
_SNIPPETS = (Path(__file__).parent / "language.txt").read_text(encoding="utf-8").split("\n### ")[1:]
LANGUAGE = {name: source.removesuffix("\n") for name, _, source in (one.partition("\n") for one in _SNIPPETS)}


@pytest.mark.parametrize("name", sorted(LANGUAGE))
def test_language(name: str) -> None:
    source = SETUP + LANGUAGE[name]
    variables = {"given": {"k": "v", "l": ["x", 1]}, "number": 3, "flag": True, "words": ["x", "y"], "date_string": "d"}
    same(source, MESSAGES, [TOOL], **variables)
    for prompt in (True, False):
        same(LANGUAGE[name], MESSAGES[:3], None, prompt, c=MESSAGES[1]["content"], m={"role": "r"}, **variables)


def with_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with reasoning under each name by which transformers passes it."""
    renamed = []
    for message in messages:
        renamed.append(message)
        for reasoning in [message[name] for name in REASONING_FIELDS if message.get(name) is not None][:1]:
            renamed[-1] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return renamed


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": values},
    optional={
        **dict.fromkeys(
            ("reasoning_content", "thinking", "reasoning", "name"), st.one_of(st.text(max_size=9), st.none())
        ),
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": st.text(), "arguments": values})})
        ),
    },
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(turns, max_size=4))
def test_any_messages(messages: list[dict[str, Any]]) -> None:
    same(LANGUAGE["any messages"], messages)
