"""Parity: the ids are those of transformers' `apply_chat_template`, or both refuse."""

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conversations import SIMPLE, Conversation, assistant, call, result, system, user
from tests.oracle import Refusal, hf_ids, hf_jinja, hf_tokenizer
from tests.support import (
    SPECIAL,
    Case,
    load_family,
    make_renderer,
    matrix,
    rendered,
    rotating,
    some,
    templates_of_trl,
    variable_choices,
)
from tokentrace import RenderedTokens, Renderer, TokentraceError
from tokentrace.conversation.messages import check_messages, check_tools
from tokentrace.template import ChatTemplate, wrap_tools, wrap_variables

GOLDEN = Path(__file__).parent / "golden"


def spells_control(conversation: Conversation, controls: list[str]) -> bool:
    """Whether a user's or a tool's message contains the text of an added token."""
    texts = [str(message) for message in conversation.messages if message["role"] in ("user", "tool")]
    return any(control in text for text in texts for control in controls)


def difference(
    family: str, case: Case, renderers: list[Renderer], variables: dict[str, Any], *, again: bool = False
) -> str | None:
    """How the ids of the renderers and those of transformers differ, if they do."""
    conversation = case.conversation
    theirs = hf_ids(family, conversation.messages, conversation.tools, case.prompt, **variables)
    for renderer in renderers:
        ours = rendered(renderer, conversation, prompt=case.prompt, again=again)
        if isinstance(theirs, Refusal) or not isinstance(ours, RenderedTokens):
            if isinstance(theirs, Refusal) and isinstance(ours, TokentraceError):
                continue
            return f"only one refuses: {ours!r}, {theirs!r}"
        if ours.token_ids != theirs:
            decode = load_family(family).decode
            return f"{decode(ours.token_ids)!r} is not {decode(theirs)!r} ({renderer.control_tokens})"
    return None


def test_ids_are_those_of_transformers(family: str) -> None:
    added = [str(token) for token in hf_tokenizer(family).added_tokens_decoder.values()]
    literal = make_renderer(family, messages="as_given")
    failures: list[str] = []
    for variables in variable_choices(family):
        compatible = make_renderer(family, control_tokens="hf_compat", messages="as_given", **variables)
        for case in matrix() if not variables else rotating(matrix(), f"{family} {variables}", 16):
            renderers = [compatible]
            if not variables and not spells_control(case.conversation, added):
                renderers.append(literal)
            problem = difference(family, case, renderers, variables)
            if problem:  # try again: the date that a template prints may have changed in between
                problem = difference(family, case, renderers, variables, again=True)
            if problem:
                failures.append(f"{case.name}, prompt {case.prompt}, {variables}: {problem}")
    assert not failures, some(failures)


# -- templates of the pinned TRL release, as text

VARIABLES: list[dict[str, Any]] = [{"enable_thinking": False}, {"enable_thinking": True, "reasoning_effort": "high"}]


def plain_text(source: str, case: Case, tools: Any, variables: dict[str, Any]) -> str | Refusal:
    """The text that transformers' own Jinja environment renders."""
    copies = copy.deepcopy((case.conversation.messages, tools))
    result = hf_jinja(source, *copies, add_generation_prompt=case.prompt, **SPECIAL, **variables)
    return result if isinstance(result, Refusal) else result[0]


def traced_text(template: ChatTemplate, case: Case, tools: Any, variables: dict[str, Any]) -> str | TokentraceError:
    """The text that the same template renders with traced values."""
    try:
        messages = check_messages(case.conversation.messages, is_role=template.constants.__contains__)
        checked = check_tools(tools)
        rendering = template.render(
            messages,
            None if checked is None else wrap_tools(checked),
            add_generation_prompt=case.prompt,
            variables=wrap_variables({**SPECIAL, **variables}),
        )
    except TokentraceError as error:
        return error
    assert "".join(text for text, _, _ in rendering.spans()) == rendering.text
    return rendering.text


@pytest.mark.parametrize("name", sorted(templates_of_trl()))
def test_text_is_that_of_plain_jinja(name: str) -> None:
    source = templates_of_trl()[name]
    template = ChatTemplate(source)
    failures: list[str] = []
    rendered_count = 0
    varied = {(case.name, case.prompt) for case in rotating(matrix(), name, 24)}
    accepted = (case for case in matrix() if isinstance(traced_text(template, case, case.conversation.tools, {}), str))
    for case in (*itertools.islice(accepted, 2), *rotating(matrix(), f"{name} plain", 12)):
        declared = case.conversation.tools
        choices: list[tuple[Any, dict[str, Any]]] = [(declared, {})]
        if (case.name, case.prompt) in varied:
            other_tools = SIMPLE if declared is None else None
            choices += [(declared, variables) for variables in VARIABLES] if case.prompt else [(other_tools, {})]
        for tools, variables in choices:
            for _ in range(2):  # twice: the date that a template prints may have changed in between
                ours = traced_text(template, case, tools, variables)
                theirs = plain_text(source, case, tools, variables)
                same = ours == theirs or (isinstance(ours, TokentraceError) and isinstance(theirs, Refusal))
                if same:
                    break
            else:
                failures.append(f"{case.name}, prompt {case.prompt}, {variables}: {ours!r} is not {theirs!r}")
            rendered_count += isinstance(ours, str)
    assert not failures, some(failures)
    assert rendered_count > 0


# -- golden files

CALL = call("get_weather", {"city": "Paris"})
TALK = [
    system("Be brief."),
    user("Weather in Paris?"),
    assistant("Let me look.", CALL, reasoning="I need the weather."),
    result("sunny"),
    assistant("Sunny.", reasoning="The tool says so."),
    user("Thanks!"),
    assistant("You are welcome.", reasoning="Be polite."),
]
JSON_CALL = call("get_weather", '{"city": "Paris"}')
CASES: dict[str, Conversation] = {
    "all of it": Conversation(TALK, SIMPLE),
    "nothing said beside the call": Conversation([*TALK[:2], TALK[2] | {"content": ""}, *TALK[3:]], SIMPLE),
    "arguments as JSON, no content beside the call": Conversation(
        [*TALK[:2], assistant(None, JSON_CALL, reasoning="I need the weather."), *TALK[3:]], SIMPLE
    ),
    "no tools": Conversation([*TALK[:2], *TALK[4:]]),
}
"""The conversation of the golden files in full and in part: a file shows the first that the template accepts."""

DATES = [
    (r"Current date: \d{4}-\d\d-\d\d", "Current date: DATE"),
    (r"Today Date: \d\d \w{3} \d{4}", "Today Date: DATE"),
]


def as_golden(family: str) -> str:
    """A rendering for people: one line per turn, ⟦ ⟧ around sampled text, ⏎ for a newline."""
    renderer = make_renderer(family, messages="as_given")
    name, tokens = next((k, r) for k, c in CASES.items() if isinstance(r := rendered(renderer, c), RenderedTokens))
    lines: list[str] = []
    turn, inside = -2, False
    for text, message, is_sampled in zip(tokens.tokens(), tokens.message_indices, tokens.sampled, strict=True):
        if inside and not is_sampled:
            lines[-1] += "⟧"
            inside = False
        if turn == -2 or (message not in (turn, -1)):
            turn = message
            lines.append(f"{tokens.role(message) or '-'}: ")
        if is_sampled and not inside:
            lines[-1] += "⟦"
            inside = True
        lines[-1] += text.replace("\n", "⏎")
    stops = " ".join(load_family(family).decode([stop]) for stop in renderer.get_stop_token_ids())
    page = "\n".join(lines) + ("⟧" if inside else "")
    for pattern, date in DATES:
        page = re.sub(pattern, date, page)
    notes = "".join(f"note: {note}\n" for note in tokens.notes)
    return f"stops at: {stops}\nshows: {name}\n{notes}\n{page}\n"


def test_golden_file_shows_what_is_rendered(any_family: str, update_golden: bool) -> None:
    path = GOLDEN / f"{any_family}.txt"
    actual = as_golden(any_family)
    if update_golden:
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual, encoding="utf-8")
    assert actual == path.read_text(encoding="utf-8"), f"{path.name} differs; pytest --update-golden writes it anew"
