"""Calls in every way of writing them: those written well, and what parsers of calls are known to get wrong.

Every attempt is kept and none is invented: what is wrong with one is in its status, and what was written is in `raw`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parsing.forms import (
    BLOCKS,
    FORMS,
    OBJECTS,
    OK,
    TAGGED,
    TOOLS,
    TRUNCATED,
    UNCLOSED,
    Plain,
    answered,
    blocks,
    families,
    forms,
    ids_of,
    objects,
    one_call,
    only,
    parse,
    single,
    tagged,
)  # fmt: skip
from tests.parsing.test_streaming import check, renderer
from tokentrace.parsing.response import CallStatus, Finish, PartKind

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
        ("either", "42", 42), ("either", "forty", "forty"), ("maybe", "null", None),
        ("maybe", "nobody", "nobody"), ("code", "42", "42"), ("code", "null", "null"),
        ("code", '"quoted"', '"quoted"'), ("flag", "True", True), ("flag", "false", False),
        ("maybe", "None", None), ("unheard", "bare words", "bare words"), ("unheard", "[1]", [1]),
    ],
)  # fmt: skip
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


# -- what is broken off


@forms
def test_a_call_that_is_cut_off_anywhere_is_truncated_and_keeps_what_was_there(any_family: str) -> None:
    made = renderer(any_family)
    written = single(any_family, "write", {"code": "x = 1", "path": "a.py"})
    ids = ids_of(made, (written,))
    whole = only(parse(any_family, written, ends=False))
    assert whole.status is OK
    start, stop = whole.span
    seen = set()
    for cut in range(start + 1, stop):
        response = check(made, ids[:cut], [], tools=TOOLS, prompt_ids=answered(made))
        if not response.tool_calls:  # no more than the beginning of what may open one
            assert response.content + (response.reasoning_content or "") == made.tokenizer.decode(ids[:cut])
            continue
        call = only(response)
        assert (call.status, response.open, response.finish) == (TRUNCATED, PartKind.TOOL_CALL, Finish.LENGTH)
        assert made.tokenizer.decode(ids[:cut]).endswith(call.raw)
        assert call.name in (None, "write")
        said = call.arguments_text.removesuffix("}")
        assert said.startswith('{"code": "x = 1') or whole.arguments_text.startswith(said)
        seen.add(call.name)
    assert seen == {None, "write"} or (any_family == "llama-3.1" and seen == {"write"})


@tagged
def test_a_value_that_is_not_closed_is_kept_and_what_follows_is_found(any_family: str) -> None:
    form = TAGGED[any_family]
    closing = form.pair.partition("VALUE")[2].replace("KEY", "code")
    unclosed = form.argument("code", "x = 1").removesuffix(closing)
    later = one_call(any_family, "look", {"place": "b"})
    response = parse(any_family, form.calls(form.call("write", unclosed), later))
    first, second = response.tool_calls
    assert first.status is UNCLOSED
    assert first.raw_arguments["code"].strip() == "x = 1"
    assert "x = 1" in first.raw
    assert (second.status, second.arguments) == (OK, {"place": "b"})


@families([name for name in TAGGED if name != "minimax-m3"])
def test_a_value_that_is_not_closed_ends_where_another_argument_opens(any_family: str) -> None:
    form = TAGGED[any_family]
    closing = form.pair.partition("VALUE")[2]
    unclosed = form.argument("code", "x = 1").removesuffix(closing) + "\n"
    call = only(parse(any_family, form.calls(form.call("write", unclosed, form.argument("path", "a.py")))))
    assert (call.status, call.name) == (UNCLOSED, "write")
    assert call.arguments is not None
    assert {key: value.strip() for key, value in call.arguments.items()} == {"code": "x = 1", "path": "a.py"}


@blocks
def test_a_call_that_is_not_closed_is_kept_and_the_next_is_found(any_family: str) -> None:
    form = FORMS[any_family]
    written = one_call(any_family, "write", {"path": "a.py"})
    unclosed = written.removesuffix(form.end)
    response = parse(any_family, form.calls(unclosed, one_call(any_family, "look", {"place": "b"})))
    first = response.tool_calls[0]
    assert (first.status is not OK, first.name) == (True, "write")
    assert "a.py" in first.raw
    if any_family != "mistral-nemo":  # nothing but JSON says where one ends
        assert first.status is UNCLOSED
        assert [(call.status, call.arguments) for call in response.tool_calls[1:]] == [(OK, {"place": "b"})]


@pytest.mark.parametrize("any_family", [name for name in BLOCKS if FORMS[name].close], indirect=True)
def test_a_section_that_is_not_closed_loses_no_call(any_family: str) -> None:
    form = FORMS[any_family]
    response = parse(any_family, form.calls(one_call(any_family, "look", {"place": "a"})).removesuffix(form.close))
    assert [(call.status, call.arguments) for call in response.tool_calls] == [(OK, {"place": "a"})]
    assert (response.content, response.finish) == ("", Finish.STOP)


@pytest.mark.parametrize("any_family", [name for name in BLOCKS if FORMS[name].open], indirect=True)
@pytest.mark.parametrize("inside", ["", "no call at all"])
def test_a_section_without_a_call_is_an_attempt(any_family: str, inside: str) -> None:
    form = FORMS[any_family]
    response = parse(any_family, "Well.", form.open, inside, form.close)
    call = only(response)
    assert (call.status, call.name, call.arguments) == (CallStatus.MISSING_NAME, None, None)
    assert call.raw == f"{form.open}{inside}{form.close}"
    assert response.content == "Well."
    cut = parse(any_family, "Well.", form.open, inside, ends=False)
    assert (only(cut).status, cut.open) == (TRUNCATED, PartKind.TOOL_CALL)


@blocks
def test_a_stop_token_inside_a_call_ends_it(any_family: str) -> None:
    written = single(any_family, "write", {"code": "x = 1"})
    response = parse(any_family, written.partition("1")[0])
    call = only(response)
    assert call.status in (UNCLOSED, CallStatus.INVALID_JSON)
    assert (call.name, response.finish, response.open) == ("write", Finish.STOP, PartKind.TOOL_CALL)
    assert "x = " in call.raw


@forms
def test_what_comes_after_the_stop_token_is_not_read(any_family: str) -> None:
    made = renderer(any_family)
    stop = made.get_stop_token_ids()[0]
    said, more = ids_of(made, ("Done.",)), ids_of(made, (single(any_family, "look", {"place": "a"}),))
    response = check(made, [*said, stop, *more], [], tools=TOOLS, prompt_ids=answered(made))
    assert (response.content, response.tool_calls, response.stop_token) == ("Done.", [], stop)
    assert response.unread == (len(said) + 1, len(said) + 1 + len(more))


# -- what is wrong with a call


@forms
def test_a_tool_that_was_not_given_is_unknown(any_family: str) -> None:
    written = single(any_family, "delete", {"path": "a"})
    call = only(parse(any_family, written))
    assert (call.status, call.name, call.arguments) == (CallStatus.UNKNOWN_TOOL, "delete", {"path": "a"})
    assert only(parse(any_family, written, tools=None)).status is OK
    assert parse(any_family, written).calls == []


@forms
def test_an_argument_given_twice_is_blamed_and_the_last_one_counts(any_family: str) -> None:
    form = FORMS[any_family]
    if form.pair:
        written = form.call("write", form.argument("path", "a"), form.argument("path", "b"))
    else:
        written = form.call("write", '{"path": "a", "path": "b"}')
    call = only(parse(any_family, form.calls(written)))
    assert (call.status, call.arguments) == (CallStatus.DUPLICATE_ARGUMENT, {"path": "b"})


@blocks
def test_a_call_without_a_name_is_kept(any_family: str) -> None:
    written = single(any_family, "", {"path": "a"})
    if any_family == "kimi-k2":
        written = written.replace("functions.:0", "")
    call = only(parse(any_family, written))
    assert (call.status, call.name) == (CallStatus.MISSING_NAME, None)
    assert call.arguments == {"path": "a"}
    assert "path" in call.raw


@families([name for name in OBJECTS if name != "llama-3.1"])
@pytest.mark.parametrize(
    "broken", ["{'path': 'a'}", '{"path": a}', '{"path": "a",}', '{"path" "a"}', "junk", '{"path": NaN}']
)
def test_arguments_that_are_not_json_are_kept_as_they_are(any_family: str, broken: str) -> None:
    form = OBJECTS[any_family]
    call = only(parse(any_family, form.calls(form.call("write", broken))))
    assert (call.status, call.name, call.arguments) == (CallStatus.INVALID_JSON, "write", None)
    assert broken in call.raw


@objects
def test_arguments_that_are_no_object_are_malformed(any_family: str) -> None:
    form = OBJECTS[any_family]
    call = only(parse(any_family, form.calls(form.call("write", "[1, 2]"))))
    assert (call.status, call.name, call.arguments, call.arguments_text) == (
        CallStatus.MALFORMED,
        "write",
        None,
        "[1, 2]",
    )


@families(["qwen3", "kimi-k2", "deepseek-v3.1", "minimax-m3"])
def test_junk_before_the_end_of_a_call_is_blamed_and_kept(any_family: str) -> None:
    form = FORMS[any_family]
    written = one_call(any_family, "write", {"path": "a"}).removesuffix(form.end)
    call = only(parse(any_family, form.calls(f"{written} and so on {form.end}")))
    expected = CallStatus.MALFORMED if form.pair else CallStatus.INVALID_JSON
    assert (call.status, call.name, call.arguments) == (expected, "write", {"path": "a"})
    assert "and so on" in call.raw


@forms
def test_nesting_without_end_is_no_crash(any_family: str) -> None:
    form, deep = FORMS[any_family], "[" * 20_000 + "]" * 20_000
    written = form.argument("items", deep, "false") if form.pair else f'{{"items": {deep}}}'
    call = only(parse(any_family, form.calls(form.call("write", written))))
    assert (call.status, call.name) == (CallStatus.INVALID_JSON, "write")


@families(["qwen3", "mistral-nemo"])
def test_a_name_that_is_no_string_is_missing(any_family: str) -> None:
    form = OBJECTS[any_family]
    for name in ("3", "null", "[" * 20_000 + "]" * 20_000):
        written = form.call("write", '{"path": "a"}').replace('"write"', name)
        call = only(parse(any_family, form.calls(written)))
        assert (call.status, call.name, call.arguments) == (CallStatus.MISSING_NAME, None, {"path": "a"})


@forms
def test_half_of_a_surrogate_pair_is_escaped_in_what_is_told(any_family: str) -> None:
    form, half = FORMS[any_family], '["\\ud83d"]'
    written = form.argument("items", half, "false") if form.pair else f'{{"items": {half}}}'
    call = only(parse(any_family, form.calls(form.call("write", written))))
    assert (call.status, call.arguments) == (OK, {"items": ["\ud83d"]})
    assert call.arguments_text == '{"items": ["\\ud83d"]}'


# -- calls that nothing but their content tells


@families(["llama-3.1"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}', '{"age": 3, "name": "Bob", "parameters": {}}', '{"name": "write"}',
        '{"parameters": {}}', "{}", "{", '{"name": 3, "parameters": {}}',
        'See {"name": "write", "parameters": {}}', '[{"name": "write", "parameters": {}}]',
    ],
)  # fmt: skip
def test_json_that_is_not_a_call_is_content(any_family: str, text: str) -> None:
    response = parse(any_family, text)
    assert (response.content, response.tool_calls) == (text, [])


# -- reasoning and prompts


THINKING = ["qwen3", "glm-4.5", "minimax-m2", "deepseek-v3.1", "nemotron-3-nano", "qwq-32b"]


@families(THINKING)
def test_the_prompt_says_whether_reasoning_is_open(any_family: str) -> None:
    made = renderer(any_family)
    grammar = made.grammar()
    frame = grammar.reasoning
    assert frame is not None
    head = ids_of(made, (grammar.head.rstrip(),)) + ids_of(made, ("\n",)) * grammar.head.endswith("\n")
    opened = head + ids_of(made, (frame.open + frame.lead,))
    closed = opened + ids_of(made, (f"Hm.{frame.trail}{frame.close}{frame.after}",))
    text = f"So.{frame.trail}"
    response = parse(any_family, text, frame.close, f"{frame.after}Yes.", prompt_ids=opened)
    assert (response.reasoning_content, response.content, response.open) == ("So.", "Yes.", None)
    response = parse(any_family, "Yes.", prompt_ids=closed)
    assert (response.reasoning_content, response.content) == (None, "Yes.")
    response = parse(any_family, frame.open, f"{frame.lead}So.{frame.trail}", frame.close, "Yes.", prompt_ids=head)
    assert (response.reasoning_content, response.content) == ("So.", "Yes.")
    response = parse(any_family, "So", prompt_ids=opened)
    assert (response.reasoning_content, response.content, response.open) == ("So", "", PartKind.REASONING)


@families(THINKING)
def test_empty_reasoning_is_none(any_family: str) -> None:
    made = renderer(any_family)
    grammar = made.grammar()
    frame = grammar.reasoning
    assert frame is not None
    head = ids_of(made, (grammar.head,))
    for inside in ("", frame.lead, frame.lead + frame.trail):
        response = parse(any_family, frame.open, inside, frame.close, f"{grammar.after_empty}Yes.", prompt_ids=head)
        assert (response.reasoning_content, response.content) == (None, "Yes.")


@forms
def test_what_the_prompt_wrote_of_the_answer_is_not_repeated(any_family: str) -> None:
    made = renderer(any_family)
    prompt = answered(made) + ids_of(made, ("The answer",))
    response = parse(any_family, " is 4.", prompt_ids=prompt)
    assert (response.content, response.tool_calls) == (" is 4.", [])
    assert response.parts[0].span.start == 0


@families([name for name in BLOCKS if name != "mistral-nemo"])
def test_a_call_that_the_prompt_began_is_whole_and_one_that_it_wrote_is_not_counted(any_family: str) -> None:
    made = renderer(any_family)
    form = FORMS[any_family]
    written = [one_call(any_family, "write", {"path": "a"}), one_call(any_family, "look", {"place": "b"})]
    ids = ids_of(made, (form.calls(*written),))
    whole = check(made, ids, [], tools=TOOLS, prompt_ids=answered(made))
    second = whole.tool_calls[1].span
    at = (second.start + second.stop) // 2
    response = check(made, ids[at:], [], tools=TOOLS, prompt_ids=answered(made) + ids[:at])
    call = only(response)
    assert (call.status, call.index, call.name, call.arguments) == (OK, 0, "look", {"place": "b"})
    assert call.span == (0, second.stop - at)
