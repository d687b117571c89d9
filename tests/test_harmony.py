"""gpt-oss through its own template, compared with openai-harmony: the ids differ only as listed here."""

import datetime
from typing import Any

import openai_harmony as harmony
import pytest

from tests import conversations
from tests.assets import family_dir
from tests.conversations import GET_WEATHER
from tokentrace import Renderer, create_renderer

pytestmark = pytest.mark.xdist_group("gpt-oss")

# Differences between openai-harmony and the shipped template: (harmony's text, the template's text).
INSTRUCTIONS = ("Be brief.<|end|>", "Be brief.\n\n<|end|>")
"""Instructions with no tools after them are followed by an empty line."""
RESULT = ("<|message|>sunny<|end|>", '<|message|>"sunny"<|end|>')
"""A tool's result is written as JSON, so a string has quotes around it."""
LAST = ("yo<|end|>", "yo<|return|>")
"""The last answer ends with the token that was sampled; harmony writes that only when it renders for training."""
THOUGHT = ("<|channel|>final", "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant<|channel|>final")
"""The last answer keeps its reasoning; harmony drops it as soon as there is an answer."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return create_renderer(family_dir("gpt-oss"), renderer="gpt_oss")


def system(effort: harmony.ReasoningEffort = harmony.ReasoningEffort.MEDIUM) -> harmony.Message:
    today = datetime.date.today().isoformat()
    content = harmony.SystemContent.new().with_reasoning_effort(effort).with_conversation_start_date(today)
    return harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)


def developer(*, tools: bool) -> harmony.Message:
    content = harmony.DeveloperContent.new().with_instructions("Be brief.")
    if tools:
        function: Any = GET_WEATHER["function"]
        description = harmony.ToolDescription.new(
            function["name"], function["description"], parameters=function["parameters"]
        )
        content = content.with_function_tools([description])
    return harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)


def user(text: str) -> harmony.Message:
    return harmony.Message.from_role_and_content(harmony.Role.USER, text)


def answer(text: str, channel: str = "final") -> harmony.Message:
    return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)


def tool_call() -> harmony.Message:
    return answer('{"city": "Paris"}', "commentary").with_recipient("functions.get_weather").with_content_type("json")


def result() -> harmony.Message:
    author = harmony.Author.new(harmony.Role.TOOL, "functions.get_weather")
    message = harmony.Message.from_author_and_content(author, "sunny")
    return message.with_channel("commentary").with_recipient("assistant")


ASK = conversations.user("hi")
BRIEF = conversations.system("Be brief.")
ANSWER = conversations.assistant("yo")
THINKING = conversations.assistant("yo", reasoning="hmm")
CALL = conversations.assistant("", conversations.call("get_weather", {"city": "Paris"}), reasoning="look")
SUNNY = conversations.result("sunny")

Case = tuple[list[dict[str, Any]], list[harmony.Message], list[tuple[str, str]]]


def cases() -> dict[str, Case]:
    """Cases by name, built for each test because they contain the date."""
    return {
        "user": ([ASK], [system(), user("hi")], []),
        "instructions": ([BRIEF, ASK], [system(), developer(tools=False), user("hi")], [INSTRUCTIONS]),
        "history": ([ASK, ANSWER, ASK], [system(), user("hi"), answer("yo"), user("hi")], []),
        "last answer": ([ASK, ANSWER], [system(), user("hi"), answer("yo")], [LAST]),
        "last answer with reasoning": (
            [ASK, THINKING],
            [system(), user("hi"), answer("hmm", "analysis"), answer("yo")],
            [LAST, THOUGHT],
        ),
        "reasoning in history": (
            [ASK, THINKING, ASK],
            [system(), user("hi"), answer("hmm", "analysis"), answer("yo"), user("hi")],
            [],
        ),
        "tools": ([BRIEF, ASK], [system(), developer(tools=True), user("hi")], []),
        "call": (
            [BRIEF, ASK, CALL],
            [system(), developer(tools=True), user("hi"), answer("look", "analysis"), tool_call()],
            [],
        ),
        "result": (
            [BRIEF, ASK, CALL, SUNNY],
            [system(), developer(tools=True), user("hi"), answer("look", "analysis"), tool_call(), result()],
            [RESULT],
        ),
        "answer after a result": (
            [BRIEF, ASK, CALL, SUNNY, ANSWER, ASK],
            [
                *(system(), developer(tools=True), user("hi"), answer("look", "analysis"), tool_call(), result()),
                *(answer("yo"), user("hi")),
            ],
            [RESULT],
        ),
    }


@pytest.mark.parametrize("name", cases())
def test_ids_are_harmonys_but_for_the_listed_differences(
    name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    messages, theirs, differences = cases()[name]
    tools = [GET_WEATHER] if developer(tools=True) in theirs else None
    rendered = renderer.render(messages, tools=tools)
    expected = encoding.decode(encoding.render_conversation(harmony.Conversation.from_messages(theirs)))
    for harmonys, templates in differences:
        assert harmonys in expected, "a difference that is not there any more"
        at = expected.rindex(harmonys)
        expected = expected[:at] + templates + expected[at + len(harmonys) :]
    assert rendered.text == expected
    assert rendered.token_ids == encoding.encode(expected, allowed_special="all")


def test_stop_tokens_are_harmonys(encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    assert set(renderer.get_stop_token_ids()) == set(encoding.stop_tokens_for_assistant_actions())


@pytest.mark.parametrize("messages", [[ASK, THINKING], [ASK, CALL]])
def test_sampled_tokens_parse_as_a_completion(
    messages: list[dict[str, Any]], encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    """The mask begins after ``<|start|>assistant``, with the header that the model samples: harmony can parse it."""
    rendered = renderer.render(messages, tools=[GET_WEATHER])
    parsed = encoding.parse_messages_from_completion_tokens(
        rendered.ids[rendered.mask].tolist(), harmony.Role.ASSISTANT
    )
    channels = [message.channel for message in parsed]
    assert channels == (["analysis", "final"] if messages[1] is THINKING else ["analysis", "commentary"])
    assert parsed[-1].recipient == (None if messages[1] is THINKING else "functions.get_weather")
