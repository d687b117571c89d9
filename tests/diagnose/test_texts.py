"""What becomes of texts: content that is written otherwise, without its white space, or without reasoning inside it."""

from __future__ import annotations

import pytest

from tests.diagnose.brute import audit_of, audited, rendered, source_of
from tokentrace.diagnose import AuditReport, Grade
from tokentrace.diagnose.appends import AppendOutcome
from tokentrace.diagnose.cases import TOOLS, Append, Style
from tokentrace.pocket import POCKET
from tokentrace.show.terminal import plain_view

TURNS = """{%- for m in messages SKIPPED %}
{{- '<|turn|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{{- WRITTEN }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{%- endfor %}
{%- else %}{{- OTHERS }}{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}"""


def template(written: str = "m.content or ''", skipped: str = "", others: str = "m.content") -> AuditReport:
    return audited(TURNS.replace("WRITTEN", written).replace("SKIPPED", skipped).replace("OTHERS", others))


def grades(report: AuditReport) -> dict[str, Grade]:
    return {str(one.use): one.grade for one in report.verdicts}


def test_a_template_that_writes_texts_as_they_are_holds() -> None:
    assert set(grades(template()).values()) == {Grade.HOLDS}


def test_content_that_is_written_otherwise_counts_against_every_use() -> None:
    found = template("(m.content or '')|lower")
    assert grades(found)["rl-append-only"] is Grade.PARTLY  # a call alone has no content
    assert {grade for use, grade in grades(found).items() if use != "rl-append-only"} == {Grade.FAILS}
    assert all("content is not written as it was given" in one.against[0] for one in found.verdicts)


@pytest.mark.parametrize(
    ("skipped", "others", "system", "words"),
    [
        ("if m.role != 'system'", "m.content", "dropped", "content of system messages reaches no token (line 1: `"),
        (
            "if m.role != 'system' or m == messages[0]",
            "m.content",
            "written",
            "content of later system messages reaches no",
        ),
        ("", "m.content|upper", "rewritten", "content of system, user and tool messages is not written as it was"),
    ],
)
def test_messages_of_others_that_do_not_arrive_count(skipped: str, others: str, system: str, words: str) -> None:
    found = template(skipped=skipped, others=others)
    assert found.reading.roles["system"] == system
    for use in ("sft-one-row", "sft-per-turn", "production-parity"):
        assert found.verdict(use).grade is Grade.PARTLY
        assert any(one.startswith(words) for one in found.verdict(use).against)


def test_content_that_is_given_otherwise_is_tried_with_a_system_message_too() -> None:
    with_system = template(others="m.content if m.role != 'system' or messages|length < 4 else ''")
    kinds = {cell.turn.style: cell.outcome for cell in with_system.cells if cell.append is Append.USER}
    assert kinds == dict.fromkeys(Style, AppendOutcome.BREAKS)


def test_white_space_that_is_lost_counts_where_turns_are_rendered_again() -> None:
    found = template("(m.content or '')|trim")
    again = {"rl-append-only", "rl-user-turns", "production-parity"}
    assert {use for use, grade in grades(found).items() if grade is Grade.PARTLY} == again
    assert {grade for use, grade in grades(found).items() if use not in again} == {Grade.HOLDS}


CUTS = "m.content.split('</think>')[-1] if m.content and '</think>' in m.content else (m.content or '')"


def test_reasoning_that_is_cut_out_of_content_is_found() -> None:
    found = template(CUTS)
    assert found.reading.inline_reasoning == "left out"
    for use in ("rl-append-only", "rl-user-turns", "production-parity"):
        assert found.verdict(use).grade is Grade.PARTLY
        assert "reasoning inside content reaches no token" in found.verdict(use).against[0]


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("deepseek-v3.1", "left out"),
        ("gemma-3", "kept as text"),
        ("llama-3.1", "kept as text"),
        ("qwen3", "read as reasoning"),
    ],
)
def test_what_becomes_of_reasoning_inside_content(family: str, told: str) -> None:
    assert audit_of(family).reading.inline_reasoning == told


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1", "gemma-3", "glm-4.5", "kimi-k2", "deepseek-v3.1"])
def test_white_space_is_lost_where_transformers_does_not_write_it(family: str) -> None:
    for cell in audit_of(family).cells:
        if cell.turn.style is not Style.SPACED or cell.outcome is AppendOutcome.REFUSED:
            continue
        at, tools = len(cell.case.past), TOOLS if cell.case.tools else None
        written = rendered(source_of(family), cell.messages[: at + 1], tools, False)
        bare = [*cell.messages[:at], {**cell.messages[at], "content": cell.case.reply["content"].strip()}]
        same = written == rendered(source_of(family), bare, tools, False)
        lost = any("content" in field for field in cell.lost)
        assert lost or not same


def test_a_list_is_not_tried_as_a_switch() -> None:
    report = audit_of("llama-3.1")
    assert not [one.name for one in report.switches if "custom_tools" in one.name or "builtin_tools" in one.name]
    assert any("builtin_tools, custom_tools" in note for note in report.notes)


def test_a_window_over_results_is_a_break() -> None:
    others = "'elided' if m.role == 'tool' and loop.index0 < messages|length - 4 else m.content"
    assert template(others=others).verdict("rl-append-only").grade is not Grade.HOLDS


# -- texts that templates alter, each planted in a template that writes all of them as they are

CALLS = "'{\"name\": \"' + c.function.name + '\", \"arguments\": ' + ARGUMENTS + '}'"


@pytest.mark.parametrize(
    ("written", "others", "arguments", "words"),
    [
        ("", "m.content|e", "", "content of system, user and tool messages is not written"),
        (
            "",
            "m.content.split('\\n')[0] if m.role == 'tool' else m.content",
            "",
            "content of tool messages is not written",
        ),
        ("", "m.content[:300] if m.role == 'tool' else m.content", "", "content of tool messages is not written"),
        ("(m.content or '')|replace('&', '&amp;')", "", "", "content of assistant messages is not written"),
        ("(m.content or '')|replace('\\n\\n', '\\n')", "", "", "content of assistant messages is not written"),
        ("", "", "c.function.arguments|tojson|lower", "arguments of calls are not written as they were given"),
        ("", "", "c.function.arguments|tojson|replace(' ', '')", "arguments of calls are not written"),
        ("", "", "'{\"someKey\": \"' ~ c.function.arguments.values()|first ~ '\"}'", "arguments of calls"),
    ],
)
def test_texts_that_are_altered_count_and_their_line_is_named(
    written: str, others: str, arguments: str, words: str
) -> None:
    source = TURNS.replace("SKIPPED", "").replace("WRITTEN", written or "m.content or ''")
    source = source.replace("OTHERS", others or "m.content")
    if arguments:
        source = source.replace("(c.function | tojson)", CALLS.replace("ARGUMENTS", f"({arguments})"))
    planted = next(text for text in (written, others, arguments) if text)
    found = audited(source)
    uses = ("sft-one-row", "sft-per-turn") if others else tuple(grades(found))
    for use in uses:
        assert found.verdict(use).grade is not Grade.HOLDS
        (said,) = [one for one in found.verdict(use).against if words in one]
        line = next(number for number, line in enumerate(source.split("\n"), 1) if planted in line)
        assert f"line {line}: `" in said


# -- what to do


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{{- text -}}", "{{- text | lower -}}", "SFT: not safe before line 58 is fixed, where texts are altered."),
        (
            "{{- content -}}",
            "{{- content | lower -}}",
            "SFT: not safe before line 15 is fixed, where texts are altered.",
        ),
        ("{{- bos_token -}}", "{{- bos_token + strftime_now('%d %b') -}}", "The prompt holds the day's date, line 41."),
        (
            "for message in messages -%}",
            "for message in messages -%}{{- '' if loop.last else ' ' -}}",
            "RL: use the bridge; ",
        ),
        ("-#}", "-#}", "SFT: safe as it is. RL: safe, every prompt only appends."),
    ],
)
def test_an_audit_begins_with_what_to_do(old: str, new: str, words: str) -> None:
    source = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    found = audited(source.replace(old, new, 1))
    assert words in found.conclusion.text
    lines = plain_view(found).splitlines()
    assert lines[0] == f"• {found.conclusion.text}"
    assert lines[1].startswith("• $ tokentrace tokenize ") is ("SFT: not safe" not in found.conclusion.text)


CHAT = """\
{%- for m in messages %}{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{% endif %}
"""


def test_a_template_without_calls_is_judged_by_conversations_without_tools() -> None:
    found = audited(CHAT)
    assert found.conclusion.text.startswith("SFT: safe for conversations without tools. RL: safe for conversations ")
    assert [command.split()[1] for command in found.conclusion.commands] == ["tokenize"]


def test_qwen3_is_told_in_one_line() -> None:
    assert audit_of("qwen3").conclusion.text == (
        "SFT: safe with --past expand. RL: use the bridge; any new message rewrites earlier turns, lines 43 and 44."
    )
