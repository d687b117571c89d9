"""Calls written by a grammar are what the template writes, and what is written is read back."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import assistant, call, user
from tests.formats.small import made_up_renderer, small_renderer
from tests.parsing.test_streaming import TOOLS
from tests.support import CONTROL
from tokentrace import InputError, Renderer, TokentraceError
from tokentrace.formats.dialects import DIALECTS, Dialect, dialect_of
from tokentrace.formats.grammar import ONE_CALL, CallGrammar, Style, Value
from tokentrace.formats.writing import write_calls
from tokentrace.parsing.response import CallStatus

SETTINGS: Final = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
NOT_BESIDE: Final = "the template shows no content before tool calls"
CALLING: Final = [family for family in FAMILIES if family not in ("gemma-3", "gpt-oss")]
"""Families that write calls inside the answer's message."""

Call = dict[str, Any]
"""A call: name, arguments and id."""

WORDS: Final = st.text("abcxyzéß日🙂_", min_size=1, max_size=6)
TEXTS: Final = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12) | st.sampled_from(
    ['"', "\\", "a\n b", "<b> & </b>", "{'x': 1}", "12", "true", " x ", "e\u0301", "[]"]
)
NESTED: Final = st.recursive(
    st.integers() | WORDS | st.floats(allow_nan=False, allow_infinity=False),
    lambda some: st.lists(some, min_size=1, max_size=2) | st.dictionaries(WORDS, some, min_size=1, max_size=2),
    max_leaves=4,
)


def calls_of(values: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[list[Call]]:
    arguments = st.dictionaries(st.sampled_from(["place", "days", "where_to", "note"]), values, max_size=3)
    names = st.lists(st.tuples(st.sampled_from(["look_up", "stop"]), arguments), min_size=1, max_size=most)
    return names.map(
        lambda some: [
            {"name": name, "arguments": mapping, "id": f"functions.{name}:{at}"}
            for at, (name, mapping) in enumerate(some)
        ]
    )


# -- what templates write


def turn_text(renderer: Renderer, calls: list[Call], content: str) -> tuple[str, list[Call]]:
    """A turn up to its stop token as the template writes it, and its calls with the ids that were rendered."""
    short = [one | {"id": f"call0000{at}"} for at, one in enumerate(calls)]
    forms = [(calls, False), (short, False), (calls, True)]
    for (some, as_text), words in itertools.product(forms, dict.fromkeys((content, content or None))):
        arguments = [json.dumps(one["arguments"], ensure_ascii=False) if as_text else one["arguments"] for one in some]
        parts = [call(one["name"], values, one["id"]) for one, values in zip(some, arguments, strict=True)]
        try:
            rendered = renderer.render([user("Hi."), assistant(words, *parts)])
        except TokentraceError:
            continue
        ids = rendered.token_ids[rendered.turns[-1].start : rendered.turns[-1].stop]
        text = renderer.tokenizer.decode(ids[:-1] if ids[-1] in renderer.get_stop_token_ids() else ids)
        if all(one["name"] in text for one in some):
            return text, some
    raise AssertionError("the template does not write these calls")


@cache
def shape(family: str) -> tuple[Renderer, CallGrammar, str, int]:
    """A renderer, its grammar, content that may stand before calls, and how many calls may stand in a turn."""
    renderer = small_renderer(family, trusted=[])
    grammar = renderer.grammar()
    assert grammar.calls is not None
    content = "" if NOT_BESIDE in grammar.notes else "I look."
    return renderer, grammar.calls, content, 1 if ONE_CALL in grammar.notes else 3


BLANK: Final = frozenset({"deepseek-v3.2", "deepseek-v4"})
"""Families that leave a line blank where a call has no arguments: a grammar cannot express that."""


def as_many(family: str, calls: list[Call]) -> list[Call]:
    """Exactly two calls for DeepSeek V3: its template does not close one, and closes three twice."""
    return [*calls, *calls][:2] if family == "deepseek-v3" else calls


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("family", CALLING)
def test_a_derived_grammar_writes_calls_as_its_template_does(family: str) -> None:
    renderer, grammar, content, most = shape(family)
    dialect = DIALECTS[str(dialect_of(grammar, None))]
    scalars = TEXTS if grammar.style is Style.TREE else TEXTS | st.booleans() | st.none()

    @SETTINGS
    @given(calls_of(scalars | NESTED, most), st.sampled_from(["", content]))
    def law(calls: list[Call], words: str) -> None:
        text, final_calls = turn_text(renderer, as_many(family, calls), words)
        expected = words + write_calls(grammar, final_calls, beside=bool(words))
        if family in BLANK and any(not one["arguments"] for one in final_calls):
            text, expected = squeezed(text), squeezed(expected)
        assert text.endswith(expected)
        if all(not isinstance(value, bool | None) for one in final_calls for value in one["arguments"].values()):
            assert squeezed(dialect.format(final_calls, content=words)) == squeezed(expected)
        before = squeezed(text[: len(text) - len(expected)])
        reasoning = renderer.grammar().reasoning
        assert before in ("", *((reasoning.close, reasoning.open + reasoning.close) if reasoning else ()))

    law()


def test_harmony_writes_a_call_as_the_template_does() -> None:
    renderer = small_renderer("gpt-oss", trusted=[])

    @SETTINGS
    @given(calls_of(TEXTS | NESTED, 1))
    def law(calls: list[Call]) -> None:
        rendered = renderer.render([user("Hi."), assistant("", call(calls[0]["name"], calls[0]["arguments"]))])
        assert rendered.text.endswith("<|start|>assistant" + DIALECTS["harmony"].format(calls))

    law()


# -- what is written is read back

PLAIN: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}{{ '' if m.role == 'assistant' else '<|message|>' }}{{ m.content }}"
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TYPED: Final = st.fixed_dictionaries(
    {},
    optional={
        "place": TEXTS, "note": WORDS, "days": st.integers(), "exact": st.booleans(),
        "where": st.fixed_dictionaries({"lat": st.integers(), "tags": st.lists(WORDS, min_size=1, max_size=2)}),
    },
)  # fmt: skip


def renderer_for(dialect: Dialect) -> Renderer:
    """A renderer with the dialect's control tokens, for a template that shows no calls (channels: with its own)."""
    if dialect.channels is not None:
        return small_renderer("gpt-oss")
    controls = sorted(set(CONTROL.findall(str(dialect.calls))))
    return made_up_renderer(PLAIN, "<|start|>", "<|message|>", "<|eot|>", *controls, tool_parser=dialect)


def read_back(dialect: Dialect, arguments: list[Mapping[str, Any]], content: str) -> None:
    renderer = renderer_for(dialect)
    calls = [{"name": "look_up", "arguments": one, "id": f"functions.look_up:{at}"} for at, one in enumerate(arguments)]
    ids = renderer.tokenizer.encode(dialect.format(calls, content=content)).tolist()
    stop = [] if dialect.channels is not None else renderer.tokenizer.encode("<|eot|>").tolist()
    response = renderer.parse_response([*ids, *stop], tools=TOOLS)
    parsed = [(one.name, one.arguments, one.status) for one in response.tool_calls]
    assert parsed == [(one["name"], one["arguments"], CallStatus.OK) for one in calls]
    assert response.content == content


@pytest.mark.parametrize("name", DIALECTS)
def test_what_a_dialect_writes_is_read_back(name: str) -> None:
    dialect = DIALECTS[name]
    bare = name in ("llama-json", "pythonic")
    """Calls without an opener are found only if no content comes before them."""

    @SETTINGS
    @given(st.data())
    def law(data: st.DataObject) -> None:
        arguments = data.draw(st.lists(TYPED, min_size=1, max_size=1 if dialect.channels else 3))
        read_back(dialect, arguments, data.draw(st.sampled_from(["", "" if bare else "I look."])))

    law()


CUSTOM: Final = {
    "a name as the only key": CallGrammar(Style.JSON_CALL, open="<call>", close="</call>", named_key=True),
    "keys in keys": CallGrammar(
        Style.JSON_CALL, open="<call>", close="</call>",
        keys=(("id", ("id",)), ("name", ("function", "name")), ("arguments", ("function", "arguments"))),
    ),
    "braces": CallGrammar(
        Style.BRACES, open="<|call|>", head=(("", "name"),), begin="{", close="<|done|>", quote='<|"|>'
    ),
    "CDATA": CallGrammar(
        Style.PAIRS, open="<call>", head=(("", "name"),), close="</call>", key_open="<k>", value_open="</k><v>",
        value_close="</v>", strings=Value.CDATA,
    ),
    "Python with JSON's constants": CallGrammar(
        Style.PYTHON, section_open="<|calls|>[", section_close="]<|done|>", separator=", "
    ),
    "escaped": replace(DIALECTS["hermes"].calls or CallGrammar(Style.JSON_CALL), ascii=True),
}  # fmt: skip
"""Grammars that no dialect has."""


@pytest.mark.parametrize("name", CUSTOM)
def test_what_a_custom_grammar_writes_is_read_back(name: str) -> None:
    @SETTINGS
    @given(st.lists(TYPED, min_size=1, max_size=3))
    def law(arguments: list[Mapping[str, Any]]) -> None:
        read_back(Dialect("mine", CUSTOM[name]), arguments, "I look.")

    law()


# -- what cannot be written


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_without_a_name_or_arguments_is_refused(name: str) -> None:
    whole = {"name": "f", "arguments": {}, "id": "functions.f:0"}
    assert DIALECTS[name].format([whole])
    for field in ("arguments", "id" if name == "kimi" else "name"):
        with pytest.raises(InputError, match=rf"tool_calls\.0\.{field}"):
            DIALECTS[name].format([{key: value for key, value in whole.items() if key != field}])
    with pytest.raises(InputError, match=r"tool_calls\.0"):
        DIALECTS[name].format([5])  # type: ignore[list-item]
