"""Lost text: every part of the input that reaches no token is reported.

- Every character of every field reaches a token, or is in `lost`, or is in `dropped` (white space aside).
- Lost text raises a warning or an error, or is ignored, as the setting `lost` says.
- Text that a template drops from the past by design is not lost: `dropped` has it.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, HI, SIMPLE, SUNNY, Conversation, assistant, call, developer, text, user
from tests.support import examples, make_renderer, rendered, rotating, some
from tokentrace import InputError, RenderedTokens, create_renderer
from tokentrace.errors import LostTextError, LostTextWarning
from tokentrace.pocket import POCKET
from tokentrace.rendering.lost import BOOKKEEPING

THOUGHT = assistant("Hello!", reasoning="They greet me.")


# -- every word is accounted for, counted without the library


def strings(value: Any) -> Iterator[str]:
    """Every text in a value, keys and numbers included; JSON text is parsed first."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        yield from strings(inner) if isinstance(inner, (dict, list)) else [value]
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def input_texts(message: dict[str, Any]) -> Iterator[str]:
    for key, value in message.items():
        if key == "content" and isinstance(value, list):
            yield from (part["text"] for part in value)
        elif key == "tool_calls":
            for tool_call in value or ():
                yield tool_call["function"]["name"]
                yield from strings(tool_call["function"]["arguments"])
        elif key not in ("role", "id", "tool_call_id", "name") and value:
            yield from [value] if isinstance(value, str) else strings(value)


def letters(text: str) -> Counter[str]:
    return Counter(char for char in text if char.isalnum() or (ord(char) > 127 and not char.isspace()))


def unaccounted(tokens: RenderedTokens, conversation: Conversation) -> list[str]:
    reported = "\0".join(one.text for one in (*tokens.lost, *tokens.dropped))
    forms = [form for text in (tokens.text, reported) for form in (text, json.dumps(text, ensure_ascii=False))]

    def is_accounted(word: str) -> bool:
        spelled = (word, json.dumps(word, ensure_ascii=False)[1:-1], json.dumps(word)[1:-1])
        if any(one in form for one in spelled for form in forms):
            return True
        return not letters(word) - letters(tokens.text + reported)

    words = (word for message in conversation.messages for text in input_texts(message) for word in text.split())
    return [word for word in words if not is_accounted(word)]


def test_nothing_of_the_matrix_is_lost_unreported(any_family: str) -> None:
    renderer = make_renderer(any_family)
    failures = []
    for name, conversation in rotating(CONVERSATIONS.items(), f"lost {any_family}", 4):
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            failures += [(name, word) for word in unaccounted(tokens, conversation)]
    assert not failures, some(failures)


WORDS = st.lists(st.sampled_from(["alpha", "βeta", "gam\nma", "  d ", "7", '"e"', "é\\", "東京"]), max_size=3).map(
    " ".join
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    def content() -> Any:
        words = draw(WORDS)
        return draw(st.sampled_from([words, text(words), text(words, draw(WORDS))]))

    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": content()})
    for _ in range(draw(st.integers(1, 2))):
        messages.append(user(content()))
        answer = assistant(draw(st.just(None)) if draw(st.booleans()) else content())
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(WORDS)
        if draw(st.booleans()):
            arguments: Any = {"city": draw(WORDS), "n": draw(st.integers(0, 9)), "deep": {"k": [draw(WORDS)]}}
            arguments = json.dumps(arguments) if draw(st.booleans()) else arguments
            messages += [answer | {"tool_calls": [call("get_weather", arguments)]}, SUNNY | {"content": content()}]
            answer = assistant(content())
        messages.append(answer)
    return Conversation(messages, draw(st.sampled_from([None, SIMPLE])))


def test_nothing_is_lost_unreported_in_any_form(any_family: str) -> None:
    renderer = make_renderer(any_family)

    @settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
    @given(conversations())
    def law(conversation: Conversation) -> None:
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            assert not unaccounted(tokens, conversation)

    law()


# -- what is lost


PARIS = call("get_weather", {"city": "Paris"}, "call00000")
ROME = call("get_weather", {"city": "Rome"}, "call00001")
BESIDE = {"note": "hello", "function": {"name": "f", "arguments": {"a": 1}, "thought_signature": "signed"}}
NOTED = HI | {"note": "Be kind.", "id": "m1", "weight": 1, "metadata": {"source": "web"}, "more": [{"x": "y"}]}
LOST: dict[str, tuple[str, list[Any], Any, list[tuple[int | None, str, str]]]] = {
    "a role": ("qwen3", [developer("Answer in French."), HI], None, [(0, "content", "Answer in French.")]),
    "content beside calls": (
        *("llama-3.1", [HI, assistant("Let me look.", PARIS), SUNNY], SIMPLE),
        [(1, "content", "Let me look.")],
    ),
    "calls beside content": (
        *("deepseek-v3", [HI, assistant("Let me look.", PARIS), SUNNY], None),
        [(1, "tool_calls.0", 'get_weather({"city": "Paris"})')],
    ),
    "a second call": (
        *("gpt-oss", [HI, assistant("", PARIS, ROME), SUNNY], SIMPLE),
        [(1, "tool_calls.1", 'get_weather({"city": "Rome"})')],
    ),
    "reasoning that is never shown": ("llama-3.1", [HI, THOUGHT], None, [(1, "reasoning_content", "They greet me.")]),
    "nothing: one text by two names": ("qwen3", [HI, THOUGHT | {"reasoning": "They greet me."}], None, []),
    "tools": ("gemma-3", [HI], SIMPLE, [(None, "tools.0", "get_weather"), (None, "tools.1", "add")]),
    "fields that nobody reads": ("qwen3", [NOTED], None, [(0, "note", "Be kind."), (0, "more.0.x", "y")]),
    "fields of calls": (
        *("qwen3", [HI, assistant("", BESIDE)], None),
        [(1, "tool_calls.0.note", "hello"), (1, "tool_calls.0.function.thought_signature", "signed")],
    ),
}


@pytest.mark.parametrize(("case", "family"), [(case, row[0]) for case, row in LOST.items()])
def test_what_the_template_does_not_write_is_lost(case: str, family: str) -> None:
    _, messages, tools, expected = LOST[case]
    tokens = make_renderer(family).render(messages, tools=tools)
    lost = [(one.message, one.field, one.text) for one in tokens.lost]
    assert set(expected) <= set(lost) if family == "deepseek-v3" else lost == expected
    assert {"id", "tool_call_id", "name", "train", "weight"} <= BOOKKEEPING


def test_parts_are_lost_in_a_template_that_empties_them() -> None:
    tokens = make_renderer("qwen3", messages="as_given").render([user(text("One.", "Two."))])
    assert [(one.field, one.text) for one in tokens.lost] == [("content.0.text", "One."), ("content.1.text", "Two.")]


def test_reasoning_of_the_past_is_dropped_by_design() -> None:
    tokens = make_renderer("qwen3").render([HI, THOUGHT, user("Bye")])
    assert tokens.lost == []
    assert [(one.message, one.field) for one in tokens.dropped] == [(1, "reasoning_content")]
    preserved = make_renderer("qwen3", preserve_all_thinking=True).render([HI, THOUGHT, user("Bye")])
    assert (preserved.lost, preserved.dropped) == ([], [])


SLICES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=3)
WORD = st.text(alphabet='abAB 1é\n"', min_size=1, max_size=12)


@given(content=WORD, slices=SLICES, between=st.sampled_from(["", "-"]))
@settings(max_examples=examples(150), deadline=None)
def test_a_text_of_which_slices_are_written_is_lost_unless_they_hold_all_of_it(
    content: str, slices: list[tuple[int, int]], between: str
) -> None:
    expressions = between.join(f"{{{{ m.content[{start}:{stop}] }}}}" for start, stop in slices)
    source = "{% for m in messages %}" + expressions + "{% endfor %}"
    tokens = create_renderer(POCKET, chat_template=source, lost="ignore").render([user(content)])
    pieces = [content[start:stop] for start, stop in slices]
    left_out = Counter(content.casefold()) - Counter("".join(pieces).casefold())  # a template may change the case
    if content.strip() in "".join(pieces):
        assert tokens.lost == []
    elif any(char.isalnum() for char in left_out):
        assert [(one.message, one.field) for one in tokens.lost] == [(0, "content")]
        assert set(left_out) <= set(tokens.lost[0].text.casefold()) | set(" \n")
    assert all(piece in content for one in tokens.lost for piece in one.text.split("…"))


_ALTERED = ["message 0, content: the template writes this text differently"]


@pytest.mark.parametrize(
    ("expression", "notes"),
    [
        ("{{ m.content | upper }}", _ALTERED),
        ("{{ m.content | replace('7', 'VII') | lower }}", []),  # lost: the 7 is gone
        ("{{ m.content | tojson }}", []),
        ("{{ m.content.strip() }}", []),
    ],
)
def test_text_that_is_written_in_another_way_is_not_lost_but_noted(expression: str, notes: list[str]) -> None:
    source = "{% for m in messages %}" + expression + "{% endfor %}"
    rendered = create_renderer(POCKET, chat_template=source, lost="ignore").render([user(' Straße-"7"\n\tend ')])
    assert bool(rendered.lost) is ("VII" in expression)
    assert rendered.notes == notes


@pytest.mark.parametrize("expression", ["value", "value | lower"])
def test_altered_arguments_are_noted_and_formatted_ones_are_not(expression: str) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{% for key, value in call.function.arguments.items() %} {{ key }}: {{ " + expression + " }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"City":"Oslo"}'}}
    renderer = create_renderer(POCKET, chat_template=source, lost="error")
    field = "message 1, tool_calls.0.function.arguments.City"
    notes = renderer.render([HI, {"role": "assistant", "content": "", "tool_calls": [call]}]).notes
    assert [note for note in notes if "this text differently" in note] == (
        [f"{field}: the template writes this text differently"] if "lower" in expression else []
    )


# -- warnings and errors


def test_a_warning_points_at_the_caller_and_an_error_names_message_and_field() -> None:
    with pytest.warns(LostTextWarning, match="message 1, reasoning_content: .*They greet me") as warned:
        make_renderer("llama-3.1", lost="warn").render([HI, THOUGHT])
    assert [warning.filename for warning in warned] == [__file__]
    renderer = make_renderer("llama-3.1", lost="error")
    with pytest.raises(LostTextError, match="They greet me") as caught:
        renderer.render([HI, THOUGHT])
    assert (caught.value.message, caught.value.field) == (1, "reasoning_content")
    assert isinstance(caught.value, InputError)
    assert renderer.render([HI]).lost == []


# -- the bridge


def test_new_messages_of_a_bridge_take_the_form_that_the_template_reads_and_what_they_lose_is_reported() -> None:
    renderer = make_renderer("qwen3", lost="warn")
    prompt = renderer.render_ids([HI], add_generation_prompt=True)
    answer = [*renderer.tokenizer.encode("Hello!"), renderer.get_stop_token_ids()[0]]

    def bridged(*new: Any) -> Any:
        return renderer.bridge_to_next_turn(prompt, answer, new)

    with pytest.warns(LostTextWarning, match="Answer in French"):
        lossy = bridged(developer("Answer in French."), user("Bye"))
    assert [(one.message, one.field) for one in lossy.lost] == [(0, "content")]
    assert lossy.notes == [f"new {lossy.lost[0]}"]
    plain, parts = bridged(user("Bye\nnow")), bridged(user(text("Bye", "now")))
    assert plain.token_ids == parts.token_ids
    assert (plain.changes, [change.field for change in parts.changes]) == ([], ["content"])
    with pytest.raises(InputError, match=r"message 0, content\.0: is a part of type 'image'"):
        bridged(user([{"type": "image"}]))
