"""Calls in every format: those written well, and cases that parsers of calls are known to get wrong."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.parsing.forms import BLOCKS, FORMS, OBJECTS, TAGGED, Plain, Way, answered, families
from tokentrace import create_renderer
from tokentrace.formats.grammar import CallGrammar, Style
from tokentrace.parsing.response import CallStatus, Finish, PartKind
from tokentrace.pocket import POCKET

OK, TRUNCATED, UNCLOSED, MALFORMED = CallStatus.OK, CallStatus.TRUNCATED, CallStatus.UNCLOSED, CallStatus.MALFORMED
INVALID_JSON, MISSING_NAME = CallStatus.INVALID_JSON, CallStatus.MISSING_NAME
IN_JSON = ["qwen3", "mistral-nemo", "llama-3.1"]
"""Families that write name and arguments in one object."""
ANY: Any = object()
tagged, forms, blocks = families(TAGGED), families(FORMS), families(BLOCKS)


@pytest.fixture
def way(any_family: str) -> Way:
    return Way(any_family)


BROKEN = ('{"path": "a\n b"}', "{'path': 'a'}", '{"path": \'a\', "n": 1}', '{"n": 1, \'path\': "a"}', '{"path": “a”}')


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("family", ["qwen3", "llama-3.1", "kimi-k2", "mistral-nemo"])
def test_broken_arguments_are_kept_whole(family: str, text: str) -> None:
    """A client that repairs JSON must not run a tool with half of what the model wrote."""
    way = Way(family)
    call = way.read(way.form.calls(way.form.call("write", text)))
    assert (call.name, call.arguments_text, call.arguments) == ("write", text, None)
    assert call.status is not OK


# -- one call


class Case(NamedTuple):
    """A completion of some families, and the call that is parsed from it."""

    families: Iterable[str]
    text: Callable[[Way], str]
    arguments: Any
    status: CallStatus = OK
    name: str | None = "write"


ARGUMENTS = {"path": "a.py", "count": 3, "flag": True}
NESTED = {**ARGUMENTS, "items": [1, {"x": None}]}
SPACED = '\n  {\n "count" : 1 ,\n\t"code": " a\\n b " }\n '
DEEP = "[" * 20_000 + "]" * 20_000


def spaced(way: Way) -> str:
    form = way.form
    if '"name"' not in form.begin:
        return form.calls(form.call("write", SPACED))
    key = "parameters" if "parameters" in form.begin else "arguments"
    return form.calls(f'{form.begin.partition("{")[0]}{{ "{key}" :{SPACED},\n"name" : "write"\n{form.end}')


def twice(way: Way) -> str:
    both = [way.form.argument("path", "a"), way.form.argument("path", "b")]
    return way.form.calls(way.form.call("write", *(both if way.form.pair else ['{"path": "a", "path": "b"}'])))


def with_junk(way: Way) -> str:
    return way.form.calls(f"{way.call('write', {'path': 'a'}).removesuffix(way.form.end)} and so on {way.form.end}")


def raw_arguments(text: str) -> Callable[[Way], str]:
    return lambda way: way.form.calls(way.form.call("write", text))


def named(name: str) -> Callable[[Way], str]:
    return lambda way: raw_arguments('{"path": "a"}')(way).replace('"write"', name)


def cases() -> Iterator[tuple[str, Case]]:
    many = [name for name in FORMS if name != "minimax-m3"]
    yield "as written", Case(FORMS, lambda way: way.single("write", ARGUMENTS), ARGUMENTS)
    yield "nested", Case(many, lambda way: way.single("write", NESTED), NESTED)
    for text in ("    x = 1\n", "\n\n", " ", "\tx\n\n\ty", "", "x\r\n", "  <b>  "):
        some = {"code": text, "path": text}
        yield f"white space {text!r}", Case(FORMS, lambda way, some=some: way.single("write", some), some)
    yield "keys in any order, white space anywhere", Case(OBJECTS, spaced, {"count": 1, "code": " a\n b "})
    yield "arguments that are JSON in a string", Case(IN_JSON, raw_arguments('"{\\"code\\": \\"é\\"}"'), {"code": "é"})
    yield "no arguments", Case(FORMS, lambda way: way.single("look", {}), {}, name="look")
    unknown, path = CallStatus.UNKNOWN_TOOL, {"path": "a"}
    yield "unknown", Case(FORMS, lambda way: way.single("delete", path), path, unknown, "delete")
    yield "an argument twice: the last one counts", Case(FORMS, twice, {"path": "b"}, CallStatus.DUPLICATE_ARGUMENT)
    nameless = [name for name in BLOCKS if name != "kimi-k2"]
    yield "no name", Case(nameless, lambda way: way.single("", path), path, MISSING_NAME, None)
    no_id = Case(["kimi-k2"], lambda way: way.single("", path).replace("functions.:0", ""), path, MISSING_NAME, None)
    yield "no id", no_id
    for name in ("3", "null", DEEP):
        yield f"the name {name[:9]}", Case(IN_JSON[:2], named(name), path, MISSING_NAME, None)
    for broken in ("{'path': 'a'}", '{"path": a}', '{"path": "a",}', '{"path" "a"}', "junk", '{"path": NaN}'):
        delimited = [name for name in OBJECTS if name != "llama-3.1"]
        yield f"the arguments {broken}", Case(delimited, raw_arguments(broken), None, INVALID_JSON)
    yield "a list", Case(OBJECTS, raw_arguments("[1, 2]"), None, MALFORMED)
    yield "junk after JSON", Case(["qwen3", "kimi-k2", "deepseek-v3.1"], with_junk, path, INVALID_JSON)
    yield "junk after elements", Case(["minimax-m3"], with_junk, path, MALFORMED)
    yield "nesting without end", Case(FORMS, lambda way: way.write_call(DEEP), ANY, INVALID_JSON)
    yield "half of a surrogate pair", Case(FORMS, lambda way: way.write_call('["\\ud83d"]'), {"items": ["\ud83d"]})
    dsml = ["deepseek-v3.2"]  # marks each value as a string or not, whatever the schema says
    yield "a marked string", Case(dsml, lambda way: way.write_call("42", "true", "count"), {"count": "42"})
    yield "a marked number", Case(dsml, lambda way: way.write_call("42", "false", "code"), {"code": 42})
    yield "marked wrong", Case(dsml, lambda way: way.write_call("x", "false", "count"), {"count": "x"}, INVALID_JSON)


CASES = dict(cases())
ROWS = [(family, name) for family in FORMS for name, case in CASES.items() if family in case.families]


@pytest.mark.parametrize(("any_family", "name"), ROWS, indirect=["any_family"])
def test_a_call_is_read_for_what_it_is(way: Way, name: str) -> None:
    case = CASES[name]
    response = way.parse(case.text(way))
    [call] = response.tool_calls
    assert (call.status, call.name) == (case.status, case.name)
    assert case.arguments is ANY or call.arguments == case.arguments
    assert call.arguments_text.encode()
    assert not call.ok or json.loads(call.arguments_text) == call.arguments
    assert (response.content, response.finish) == ("", Finish.STOP)
    assert response.open is None or not call.ok


@families(name for name in TAGGED if name != "deepseek-v3.2")
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("either", "42", 42), ("either", "forty", "forty"), ("maybe", "null", None),
        ("maybe", "nobody", "nobody"), ("code", "42", "42"), ("code", "null", "null"),
        ("code", '"quoted"', '"quoted"'), ("flag", "True", True), ("flag", "false", False),
        ("maybe", "None", None), ("unheard", "bare words", "bare words"), ("unheard", "[1]", [1]),
        ("code", " x\n", " x\n"),
    ],
)  # fmt: skip
def test_the_schema_says_what_bare_text_means(way: Way, key: str, text: str, value: Any) -> None:
    call = way.read(way.write_call(text, key=key))
    assert (call.status, call.arguments, call.raw_arguments) == (OK, {key: value}, {key: text})
    assert json.loads(call.arguments_text) == {key: value}


@forms
def test_without_tools_every_name_may_be_one(way: Way) -> None:
    text = way.single("delete", {"path": "a"})
    assert way.read(text, tools=None).status is OK
    assert way.parse(text).calls == []


# -- several calls, and text around them


@blocks
def test_several_calls_are_all_found(way: Way) -> None:
    """Also inside one pair of outer delimiters, where calls have inner ones as well."""
    texts = [way.call("write", {"path": "a"}), way.call("look", {"place": "b"})]
    turns = [way.form.calls(*texts)]
    if way.form.begin.startswith("<tool_call>\n"):
        turns.append("\n".join(texts).replace("\n</tool_call>\n<tool_call>", ""))
    for turn in turns:
        response = way.parse(turn)
        calls = [(call.status, call.name, call.arguments) for call in response.tool_calls]
        assert calls == [(OK, "write", {"path": "a"}), (OK, "look", {"place": "b"})]
        assert response.content == ""


@blocks
def test_text_before_between_and_after_calls_stays_in_order(way: Way) -> None:
    text = way.single("look", {"place": "a"})
    response = way.parse("First.", text, "Then.", text, "Last.")
    kinds = [part.kind for part in response.parts]
    assert kinds == [PartKind.CONTENT, PartKind.TOOL_CALL] * 2 + [PartKind.CONTENT]
    assert [part.text for part in response.parts if part.call is None] == ["First.", "Then.", "Last."]
    assert [call.status for call in response.tool_calls] == [OK, OK]


@families(["qwen3", "deepseek-v3.1", "minimax-m2", "glm-4.5"])
def test_a_call_drafted_in_reasoning_is_reasoning(way: Way) -> None:
    grammar = way.renderer.grammar()
    frame = grammar.reasoning
    assert frame is not None
    draft, call = way.single("look", {"place": "a"}), way.single("look", {"place": "b"})
    prompt = way.ids(grammar.head, frame.open, frame.lead)
    response = way.parse(f"I could{draft}or not", frame.close, call, prompt_ids=prompt)
    assert response.reasoning_content == f"I could{draft}or not"
    assert [one.arguments for one in response.calls] == [{"place": "b"}]


# -- delimiters in letters


@forms
def test_delimiters_in_ordinary_tokens_are_text(way: Way) -> None:
    text = way.single("look", {"place": "a"})
    text = f"Say {text}" if way.family == "llama-3.1" else text
    response = way.parse(Plain(text), Plain("</think><think>"))
    assert response.tool_calls == []
    assert (response.content, response.reasoning_content) == (f"{text}</think><think>", None)


# -- calls that are cut off


@forms
def test_a_call_that_is_cut_off_anywhere_is_truncated_and_keeps_what_was_there(way: Way) -> None:
    text = way.single("write", {"code": "x = 1", "path": "a.py"})
    ids, decode = way.ids(text), way.renderer.tokenizer.decode
    whole = way.read(text, ends=False)
    assert whole.status is OK
    names = set()
    for cut in range(whole.span.start + 1, whole.span.stop):
        response = way.check(ids[:cut])
        if not response.tool_calls:  # only the beginning of an opener so far
            assert response.content + (response.reasoning_content or "") == decode(ids[:cut])
            continue
        [call] = response.tool_calls
        assert (call.status, response.open, response.finish) == (TRUNCATED, PartKind.TOOL_CALL, Finish.LENGTH)
        assert decode(ids[:cut]).endswith(call.raw)
        arguments = call.arguments_text.removesuffix("}")
        assert arguments.startswith('{"code": "x = 1') or whole.arguments_text.startswith(arguments)
        names.add(call.name)
    assert names == {None, "write"} or (way.family == "llama-3.1" and names == {"write"})


def unclosed_value(way: Way) -> str:
    return way.form.argument("code", "x = 1").removesuffix(way.form.pair.partition("VALUE")[2].replace("KEY", "code"))


@tagged
def test_a_value_that_is_not_closed_is_kept_and_what_follows_is_found(way: Way) -> None:
    """So is the next call, and the next argument unless it may be an element inside the value."""
    broken, later = way.form.call("write", unclosed_value(way)), way.call("look", {"place": "b"})
    first, second = way.parse(way.form.calls(broken, later)).tool_calls
    assert (first.status, first.raw_arguments["code"].strip(), "x = 1" in first.raw) == (UNCLOSED, "x = 1", True)
    assert (second.status, second.arguments) == (OK, {"place": "b"})
    if way.family != "minimax-m3":
        arguments = [f"{unclosed_value(way)}\n", way.form.argument("path", "a.py")]
        call = way.read(way.form.calls(way.form.call("write", *arguments)))
        assert (call.status, call.name) == (UNCLOSED, "write")
        values = {key: value.strip() for key, value in (call.arguments or {}).items()}
        assert values == {"code": "x = 1", "path": "a.py"}


@blocks
def test_a_call_that_is_not_closed_is_kept_and_the_next_is_found(way: Way) -> None:
    unclosed = way.call("write", {"path": "a.py"}).removesuffix(way.form.end)
    first, *later = way.parse(way.form.calls(unclosed, way.call("look", {"place": "b"}))).tool_calls
    assert (first.ok, first.name, "a.py" in first.raw) == (False, "write", True)
    if way.family != "mistral-nemo":  # only JSON shows where a call ends
        assert first.status is UNCLOSED
        assert [(call.status, call.arguments) for call in later] == [(OK, {"place": "b"})]


@families(name for name in BLOCKS if FORMS[name].close)
def test_a_section_that_is_not_closed_loses_no_call(way: Way) -> None:
    response = way.parse(way.single("look", {"place": "a"}).removesuffix(way.form.close))
    assert [(call.status, call.arguments) for call in response.tool_calls] == [(OK, {"place": "a"})]
    assert (response.content, response.finish) == ("", Finish.STOP)


@families(name for name in BLOCKS if FORMS[name].open)
@pytest.mark.parametrize("inside", ["", "no call at all"])
def test_a_section_without_a_call_is_an_attempt(way: Way, inside: str) -> None:
    response = way.parse("Well.", way.form.open, inside, way.form.close)
    [call] = response.tool_calls
    assert (call.status, call.name, call.arguments) == (MISSING_NAME, None, None)
    assert call.raw == f"{way.form.open}{inside}{way.form.close}"
    assert response.content == "Well."
    cut = way.parse("Well.", way.form.open, inside, ends=False)
    assert ([call.status for call in cut.tool_calls], cut.open) == ([TRUNCATED], PartKind.TOOL_CALL)


@blocks
def test_a_stop_token_inside_a_call_ends_it(way: Way) -> None:
    response = way.parse(way.single("write", {"code": "x = 1"}).partition("1")[0])
    [call] = response.tool_calls
    assert call.status in (UNCLOSED, INVALID_JSON)
    assert (call.name, response.finish, response.open) == ("write", Finish.STOP, PartKind.TOOL_CALL)
    assert "x = " in call.raw


@forms
def test_what_comes_after_the_stop_token_is_not_read(way: Way) -> None:
    stop = way.renderer.get_stop_token_ids()[0]
    before, after = way.ids("Done."), way.ids(way.single("look", {"place": "a"}))
    response = way.check([*before, stop, *after])
    assert (response.content, response.tool_calls, response.stop_token) == ("Done.", [], stop)
    assert response.unread == (len(before) + 1, len(before) + 1 + len(after))


@families(["llama-3.1"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}', '{"age": 3, "name": "Bob", "parameters": {}}', '{"name": "write"}',
        '{"parameters": {}}', "{}", "{", '{"name": 3, "parameters": {}}',
        'See {"name": "write", "parameters": {}}', '[{"name": "write", "parameters": {}}]',
    ],
)  # fmt: skip
def test_json_that_is_not_a_call_is_content(way: Way, text: str) -> None:
    response = way.parse(text)
    assert (response.content, response.tool_calls) == (text, [])


# -- reasoning and prompts


@families(["qwen3", "glm-4.5", "minimax-m2", "deepseek-v3.1", "nemotron-3-nano", "qwq-32b"])
def test_the_prompt_says_whether_reasoning_is_open(way: Way) -> None:
    grammar = way.renderer.grammar()
    frame = grammar.reasoning
    assert frame is not None
    head = way.ids(grammar.head.rstrip()) + way.ids("\n") * grammar.head.endswith("\n")
    opened = head + way.ids(frame.open + frame.lead)
    closed = opened + way.ids(f"Hm.{frame.trail}{frame.close}{frame.after}")
    thought = ("So." + frame.trail, frame.close, f"{frame.after}Yes.")
    for prompt, pieces, expected in (
        (opened, thought, ("So.", "Yes.", None)),
        (closed, ("Yes.",), (None, "Yes.", None)),
        (head, (frame.open, frame.lead + thought[0], frame.close, "Yes."), ("So.", "Yes.", None)),
        (opened, ("So",), ("So", "", PartKind.REASONING)),
    ):
        response = way.parse(*pieces, prompt_ids=prompt)
        assert (response.reasoning_content, response.content, response.open) == expected
    for inside in ("", frame.lead, frame.lead + frame.trail):
        pieces = (frame.open, inside, frame.close, f"{grammar.after_empty}Yes.")
        response = way.parse(*pieces, prompt_ids=way.ids(grammar.head))
        assert (response.reasoning_content, response.content) == (None, "Yes.")


@forms
def test_what_the_prompt_wrote_of_the_answer_is_not_repeated(way: Way) -> None:
    response = way.parse(" is 4.", prompt_ids=answered(way.renderer) + way.ids("The answer"))
    assert (response.content, response.tool_calls) == (" is 4.", [])
    assert response.parts[0].span.start == 0


@families([name for name in BLOCKS if name != "mistral-nemo"])
def test_a_call_that_the_prompt_began_is_whole_and_one_that_it_wrote_is_not_counted(way: Way) -> None:
    ids = way.ids(way.form.calls(way.call("write", {"path": "a"}), way.call("look", {"place": "b"})))
    second = way.check(ids).tool_calls[1].span
    at = (second.start + second.stop) // 2
    [call] = way.check(ids[at:], prompt_ids=answered(way.renderer) + ids[:at]).tool_calls
    assert (call.status, call.index, call.name, call.arguments) == (OK, 0, "look", {"place": "b"})
    assert call.span == (0, second.stop - at)


PYTHON_CALLS = {
    "[f(x=1e999)]": (MALFORMED, None),
    '[f(a="\\ud83d\\ude00")]': (OK, {"a": "😀"}),
    '[f(a="x\ny", b=2)]': (OK, {"a": "x\ny", "b": 2}),
    '[f(from="a,\n)", user-id=["b"],\n)]': (OK, {"from": "a,\n)", "user-id": ["b"]}),
}
ONE_KEY = CallGrammar(Style.JSON_CALL, open="<x>", close="</x>", named_key=True)


@pytest.mark.parametrize("text", PYTHON_CALLS)
def test_arguments_of_python_calls_are_json(text: str) -> None:
    renderer = create_renderer(POCKET, tool_parser="pythonic")
    [call] = renderer.parse_response(renderer.tokenizer.encode(text).tolist(), prompt_ids=[]).tool_calls
    assert (call.status, call.arguments) == PYTHON_CALLS[text]
    if call.arguments is not None:
        assert json.loads(call.arguments_text) == call.arguments
        assert call.raw_arguments.keys() == call.arguments.keys()
        assert all(call.raw_arguments.values())


def test_an_object_with_two_functions_is_not_one_call() -> None:
    renderer = create_renderer(POCKET, tool_parser=ONE_KEY)
    ids = renderer.tokenizer.encode('<x>{"f": {"a": 1}, "g": {"b": 2}}</x>').tolist()
    assert [call.status for call in renderer.parse_response(ids, prompt_ids=[]).tool_calls] == [MALFORMED]
