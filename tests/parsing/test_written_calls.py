"""Calls that are written well are read as they were written, in every way of writing them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parsing.forms import (
    FORMS,
    OBJECTS,
    OK,
    TAGGED,
    Plain,
    blocks,
    families,
    forms,
    ids_of,
    objects,
    one_call,
    only,
    parse,
    single,
)
from tests.parsing.test_streaming import renderer
from tokentrace.parsing.response import CallStatus, Finish, PartKind

# -- ways of writing calls


LETTERS = ["qwen3-coder", "nemotron-3-nano", "minimax-m2"]
"""Those that close arguments with what any text can spell."""
# -- what is written well


@forms
def test_a_call_comes_back_as_it_was_written(any_family: str) -> None:
    arguments = {"path": "a.py", "count": 3, "items": [1, {"x": None}], "flag": True}
    if any_family == "minimax-m3":
        del arguments["items"]
    response = parse(any_family, single(any_family, "write", arguments))
    call = only(response)
    assert (call.status, call.name, call.arguments) == (OK, "write", arguments)
    assert json.loads(call.arguments_text) == arguments
    assert (response.content, response.finish, response.open) == ("", Finish.STOP, None)


@forms
@pytest.mark.parametrize("text", ["    x = 1\n", "\n\n", " ", "\tx\n\n\ty", "", "x\r\n", "  <b>  "])
def test_arguments_keep_their_white_space(any_family: str, text: str) -> None:
    call = only(parse(any_family, single(any_family, "write", {"code": text, "path": text})))
    assert (call.status, call.arguments) == (OK, {"code": text, "path": text})
    if any_family in TAGGED:
        assert call.raw_arguments == {"code": text, "path": text}


@families(name for name in TAGGED if name != "deepseek-v3.2")  # which says of each whether it is a string
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("either", "42", 42),
        ("either", "forty", "forty"),
        ("maybe", "null", None),
        ("maybe", "nobody", "nobody"),
        ("code", "42", "42"),
        ("code", "null", "null"),
        ("code", '"quoted"', '"quoted"'),
        ("flag", "True", True),
        ("flag", "false", False),
        ("maybe", "None", None),
        ("unheard", "bare words", "bare words"),
        ("unheard", "[1]", [1]),
    ],
)
def test_the_schema_says_what_bare_text_means(any_family: str, key: str, text: str, value: Any) -> None:
    form = TAGGED[any_family]
    call = only(parse(any_family, form.calls(form.call("write", form.argument(key, text)))))
    assert (call.status, call.arguments, call.raw_arguments) == (OK, {key: value}, {key: text})
    assert json.loads(call.arguments_text) == {key: value}


@families(["deepseek-v3.2"])
def test_a_format_that_marks_strings_is_believed_whatever_the_schema_says(any_family: str) -> None:
    form = TAGGED[any_family]
    arguments = [form.argument("count", "42", "true"), form.argument("code", "42", "false")]
    call = only(parse(any_family, form.calls(form.call("write", *arguments))))
    assert (call.status, call.arguments) == (OK, {"count": "42", "code": 42})
    bad = only(parse(any_family, form.calls(form.call("write", form.argument("count", "many", "false")))))
    assert (bad.status, bad.arguments) == (CallStatus.INVALID_JSON, {"count": "many"})


@objects
def test_json_may_have_its_keys_in_any_order_and_white_space_anywhere(any_family: str) -> None:
    form, spaced = OBJECTS[any_family], '\n  {\n "count" : 1 ,\n\t"code": " a\\n b " }\n '
    written = form.calls(form.call("write", spaced))
    if '"name"' in form.begin:
        key = "parameters" if "parameters" in form.begin else "arguments"
        before = form.begin.partition("{")[0]
        written = form.calls(f'{before}{{ "{key}" :{spaced},\n"name" : "write"\n{form.end}')
    call = only(parse(any_family, written))
    assert (call.status, call.name, call.arguments) == (OK, "write", {"count": 1, "code": " a\n b "})


@families(["qwen3", "mistral-nemo", "llama-3.1"])
def test_arguments_that_are_json_in_a_string_are_read(any_family: str) -> None:
    form = OBJECTS[any_family]
    call = only(parse(any_family, form.calls(form.call("write", json.dumps('{"code": "é\\n"}')))))
    assert (call.status, call.arguments, call.arguments_text) == (OK, {"code": "é\n"}, '{"code": "é\\n"}')


@forms
def test_a_call_without_arguments_has_none(any_family: str) -> None:
    call = only(parse(any_family, single(any_family, "look", {})))
    assert (call.status, call.arguments, call.arguments_text) == (OK, {}, "{}")


# -- several calls, and text around them


@blocks
def test_several_calls_are_all_found(any_family: str) -> None:
    form = FORMS[any_family]
    written = [one_call(any_family, "write", {"path": "a"}), one_call(any_family, "look", {"place": "b"})]
    response = parse(any_family, form.calls(*written, written[0]))
    assert [(call.status, call.name) for call in response.tool_calls] == [(OK, "write"), (OK, "look"), (OK, "write")]
    assert response.content == ""


@families(["qwen3", "qwen3-coder", "nemotron-3-nano"])
def test_two_calls_inside_one_pair_of_delimiters_are_both_found(any_family: str) -> None:
    written = [one_call(any_family, "write", {"path": "a"}), one_call(any_family, "look", {"place": "b"})]
    inner = [text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") for text in written]
    response = parse(any_family, "<tool_call>\n", "\n".join(inner), "\n</tool_call>")
    found = [(call.status, call.name, call.arguments) for call in response.tool_calls]
    assert found == [(OK, "write", {"path": "a"}), (OK, "look", {"place": "b"})]


@blocks
def test_text_before_between_and_after_calls_stays_in_order(any_family: str) -> None:
    written = single(any_family, "look", {"place": "a"})
    response = parse(any_family, "First.", written, "Then.", written, "Last.")
    kinds = [part.kind for part in response.parts]
    assert kinds == [PartKind.CONTENT, PartKind.TOOL_CALL] * 2 + [PartKind.CONTENT]
    texts = [part.text for part in response.parts if part.kind is PartKind.CONTENT]
    assert texts == ["First.", "Then.", "Last."]
    assert [call.status for call in response.tool_calls] == [OK, OK]


@families(["qwen3", "deepseek-v3.1", "minimax-m2", "glm-4.5"])
def test_a_call_drafted_in_reasoning_is_reasoning(any_family: str) -> None:
    made = renderer(any_family)
    frame = made.grammar().reasoning
    assert frame is not None
    draft, call = single(any_family, "look", {"place": "a"}), single(any_family, "look", {"place": "b"})
    prompt = ids_of(made, (made.grammar().head, frame.open, frame.lead))
    response = parse(any_family, f"I could{draft}or not", frame.close, call, prompt_ids=prompt)
    assert response.reasoning_content == f"I could{draft}or not"
    assert [one.arguments for one in response.calls] == [{"place": "b"}]


# -- delimiters in letters


@forms
def test_delimiters_in_ordinary_tokens_are_text(any_family: str) -> None:
    written = single(any_family, "look", {"place": "a"})
    if any_family == "llama-3.1":
        written = f"Say {written}"
    response = parse(any_family, Plain(written), Plain("</think><think>"))
    assert response.tool_calls == []
    assert (response.content, response.reasoning_content) == (f"{written}</think><think>", None)


@forms
def test_delimiters_in_ordinary_tokens_are_text_inside_a_value_as_well(any_family: str) -> None:
    form, text = FORMS[any_family], single(any_family, "look", {"place": "a"}) + "</parameter></arg_value> x"
    if any_family in LETTERS:  # where one closing follows the other, nothing tells them from delimiters
        text = "<tool_call></parameter> x</function> y</invoke></parameter> z"
    before, after = form.calls(one_call(any_family, "write", {"code": "\0"})).split("\0" if form.pair else "\\u0000")
    inner = text if form.pair else json.dumps(text)[1:-1]
    call = only(parse(any_family, before, Plain(inner), after))
    assert (call.status, call.arguments) == (OK, {"code": text})
