"""Verdicts on templates with one flaw planted in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.diagnose.brute import audit_of, audited, over_bytes, rendered, source_of
from tokentrace.diagnose import AuditReport, Grade, audit_template
from tokentrace.diagnose.appends import AppendOutcome
from tokentrace.diagnose.cases import TOOLS, Append, Style
from tokentrace.errors import TemplateLimitError
from tokentrace.pocket import POCKET
from tokentrace.show.terminal import plain_view
from tokentrace.template.chat_template import ChatTemplate

HEAD = "{%- if tools %}{{ '<|turn|>system\n' ~ tools | tojson ~ '<|end|>' }}{% endif -%}"
TURN = """
{%- for m in messages -%}
{{- '<|turn|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
THINK
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>\n' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}{{- m.content -}}{%- endif -%}
END
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\n' -}}{%- endif -%}
"""
OUTPUT = "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}"
THINK = f"{{%- if m.reasoning_content -%}}{OUTPUT}{{%- endif -%}}"
ONLY_LAST = f"{{%- if m.reasoning_content and (loop.last or keep is defined and keep) -%}}{OUTPUT}{{%- endif -%}}"
DATE = "{{- '<|turn|>system\nToday is ' + strftime_now('%d %b %Y') + '<|end|>' -}}"
ANSWERS = "messages | selectattr('role', 'equalto', 'assistant') | list | length"


def planted(before: str = "", think: str = THINK, end: str = "{{- '<|end|>' -}}") -> AuditReport:
    source = HEAD + before + TURN.replace("THINK", think).replace("END", end)
    return audit_template(POCKET, chat_template=source, name="planted")


def raising(condition: str, words: str) -> AuditReport:
    return planted(f"{{%- if {condition} -%}}{{{{- raise_exception('{words}') -}}}}{{%- endif -%}}")


def grades(report: AuditReport) -> dict[str, Grade]:
    return {str(one.use): one.grade for one in report.verdicts}


def test_the_unchanged_template_holds() -> None:
    assert set(grades(planted()).values()) == {Grade.HOLDS}


def test_a_template_that_refuses_the_second_round_holds_partly() -> None:
    report = raising(f"{ANSWERS} > 1", "one answer only")
    assert set(grades(report).values()) == {Grade.PARTLY}
    for verdict in report.verdicts:
        assert any("one answer only" in words and "after" in words for words in verdict.against)
    assert report.unmet(["rl-append-only", "rl-user-turns"])
    assert report.grades[list(Append).index(Append.USER)] is Grade.PARTLY


def test_refused_roles() -> None:
    report = raising("messages[0].role == 'system'", "no system messages")
    assert set(grades(report).values()) == {Grade.HOLDS}
    assert report.facts.roles["system"] == "refused"
    report = raising("messages[-1].role == 'tool'", "no tools")
    assert report.verdict("rl-append-only").grade is Grade.FAILS
    assert report.verdict("rl-user-turns").grade is Grade.PARTLY


def test_a_setting_that_prints_the_date_does_not_make_parity_hold() -> None:
    report = planted(f"{{%- if keep is defined and keep -%}}{DATE}{{%- endif -%}}", think=ONLY_LAST)
    assert "keep=True" in report.verdict("rl-user-turns").holds_with
    assert report.verdict("production-parity").grade is not Grade.HOLDS
    assert not report.verdict("production-parity").holds_with
    report = planted(f"{{%- if dated is defined and not dated -%}}{{%- else -%}}{DATE}{{%- endif -%}}")
    assert report.verdict("production-parity").holds_with == ("dated=False",)


@pytest.mark.parametrize(
    "condition", ["messages[0].role == 'system'", f"{ANSWERS} > 0", "messages | length > 4", "tools"]
)
def test_a_date_is_detected_anywhere(condition: str) -> None:
    report = planted(f"{{%- if {condition} -%}}{DATE}{{%- endif -%}}")
    assert report.facts.date
    assert "date" in report.verdict("production-parity").against[-1]


def test_chance_is_named_in_every_verdict_however_rare() -> None:
    report = planted("{%- if range(100000) | random == 7 -%}{{- 'x' -}}{%- endif -%}")
    assert set(grades(report).values()) == {Grade.PARTLY}
    assert all("at random" in verdict.against[-1] for verdict in report.verdicts)


def test_a_turn_that_does_not_follow_its_prompt_later_on_is_no_row() -> None:
    report = planted(think="{{- '[' ~ loop.revindex ~ ']' -}}")
    assert report.verdict("sft-per-turn").grade is Grade.FAILS
    assert "after a round of tools" in report.verdict("sft-per-turn").against[0]


def test_rows_without_the_stop_token_do_not_train_where_a_turn_ends() -> None:
    report = planted(end="{%- if m.role != 'assistant' or not loop.last -%}{{- '<|end|>' -}}{%- endif -%}")
    assert report.facts.last_turn_without_stop
    for use, grade in (("sft-per-turn", Grade.FAILS), ("sft-one-row", Grade.PARTLY)):
        assert report.verdict(use).grade is grade
        assert "final_stop=True" in report.verdict(use).against[0]
    assert report.verdict("rl-append-only").grade is Grade.HOLDS


@pytest.mark.parametrize(
    "much",
    [
        "{%- for i in range(100000) -%}{%- for j in range(100000) -%}{%- endfor -%}{%- endfor -%}",
        "{%- for i in range(2000) -%}{{- 'x ' * 1000 -}}{%- endfor -%}",
    ],
)
def test_a_template_that_does_too_much_is_refused_at_once(much: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrace.template.budget.MAX_STEPS", 100_000)
    with pytest.raises(TemplateLimitError, match=r"steps|characters"):
        planted(much)


# -- texts that the template drops, strips or alters

TURNS = """{%- for m in messages SKIPPED %}
{{- '<|turn|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{{- CONTENT }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{%- endfor %}
{%- else %}{{- OTHER }}{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{%- endif %}"""
CALLS = "'{\"name\": \"' + c.function.name + '\", \"arguments\": ' + ARGUMENTS + '}'"


def source(content: str = "", skipped: str = "", other: str = "", arguments: str = "") -> str:
    text = TURNS.replace("CONTENT", content or "m.content or ''").replace("SKIPPED", skipped)
    text = text.replace("OTHER", other or "m.content")
    return text.replace("(c.function | tojson)", CALLS.replace("ARGUMENTS", f"({arguments})")) if arguments else text


def test_altered_content_counts_against_every_use() -> None:
    report = audited(source("(m.content or '')|lower"))
    assert grades(report)["rl-append-only"] is Grade.PARTLY  # a call alone has no content
    assert {grade for use, grade in grades(report).items() if use != "rl-append-only"} == {Grade.FAILS}
    assert all("content is not written as it was given" in one.against[0] for one in report.verdicts)


@pytest.mark.parametrize(
    ("skipped", "other", "system", "words"),
    [
        ("if m.role != 'system'", "", "dropped", "content of system messages reaches no token (line 1: `"),
        ("if m.role != 'system' or m == messages[0]", "", "written", "content of later system messages reaches no"),
        ("", "m.content|upper", "rewritten", "content of system, user and tool messages is not written as it was"),
    ],
)
def test_messages_of_others_that_do_not_arrive_count(skipped: str, other: str, system: str, words: str) -> None:
    report = audited(source(skipped=skipped, other=other))
    assert report.facts.roles["system"] == system
    for use in ("sft-one-row", "sft-per-turn", "production-parity"):
        assert report.verdict(use).grade is Grade.PARTLY
        assert any(one.startswith(words) for one in report.verdict(use).against)


def test_lost_white_space_counts_where_turns_are_rendered_again() -> None:
    report = audited(source("(m.content or '')|trim"))
    again = {"rl-append-only", "rl-user-turns", "production-parity"}
    assert {use for use, grade in grades(report).items() if grade is Grade.PARTLY} == again
    assert {grade for use, grade in grades(report).items() if use not in again} == {Grade.HOLDS}


def test_reasoning_inside_content() -> None:
    report = audited(
        source("m.content.split('</think>')[-1] if m.content and '</think>' in m.content else m.content or ''")
    )
    assert report.facts.inline_reasoning == "left out"
    for use in ("rl-append-only", "rl-user-turns", "production-parity"):
        assert report.verdict(use).grade is Grade.PARTLY
        assert "reasoning inside content reaches no token" in report.verdict(use).against[0]
    assert audit_of("llama-3.1").facts.inline_reasoning == "kept as text"
    assert audit_of("qwen3").facts.inline_reasoning == "read as reasoning"


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1"])
def test_white_space_is_lost_where_transformers_does_not_write_it(family: str) -> None:
    for cell in audit_of(family).cells:
        if cell.turn.style is not Style.SPACED or cell.outcome is AppendOutcome.REFUSED:
            continue
        at, tools = len(cell.case.past), TOOLS if cell.case.tools else None
        text = rendered(source_of(family), cell.messages[: at + 1], tools, False)
        bare = [*cell.messages[:at], {**cell.messages[at], "content": cell.case.reply["content"].strip()}]
        same = text == rendered(source_of(family), bare, tools, False)
        assert any("content" in field for field in cell.lost) or not same


def test_a_window_over_results_is_a_break() -> None:
    other = "'elided' if m.role == 'tool' and loop.index0 < messages|length - 4 else m.content"
    assert audited(source(other=other)).verdict("rl-append-only").grade is not Grade.HOLDS


@pytest.mark.parametrize(
    ("content", "other", "arguments", "words"),
    [
        ("", "m.content|e", "", "content of system, user and tool messages is not"),
        ("", "m.content.split('\\n')[0] if m.role == 'tool' else m.content", "", "content of tool messages is not"),
        ("", "m.content[:300] if m.role == 'tool' else m.content", "", "content of tool messages is not"),
        ("(m.content or '')|replace('&', '&amp;')", "", "", "content of assistant messages is not"),
        ("(m.content or '')|replace('\\n\\n', '\\n')", "", "", "content of assistant messages is not"),
        ("", "", "c.function.arguments|tojson|lower", "arguments of calls are not written as they were given"),
        ("", "", "'{\"someKey\": \"' ~ c.function.arguments.values()|first ~ '\"}'", "arguments of calls"),
    ],
)
def test_the_line_that_alters_a_text_is_named(content: str, other: str, arguments: str, words: str) -> None:
    text = source(content, "", other, arguments)
    flaw = content or other or arguments
    report = audited(text)
    for use in ("sft-one-row", "sft-per-turn") if other else grades(report):
        assert report.verdict(use).grade is not Grade.HOLDS
        (reason,) = [one for one in report.verdict(use).against if words in one]
        line = next(number for number, line in enumerate(text.split("\n"), 1) if flaw in line)
        assert f"line {line}: `" in reason


def test_conversations_with_tools_are_those_of_the_template_for_tools() -> None:
    plain, tools = source(), source(skipped="if not loop.last or m.role != 'tool'")
    both = {"default": ChatTemplate(plain), "tool_use": ChatTemplate(tools)}
    report = audit_template(replace(over_bytes(plain), templates=both))
    assert report.verdict("rl-append-only").grade is Grade.FAILS
    assert audited(plain).verdict("rl-append-only").grade is Grade.HOLDS


# -- the conclusion


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{{- text -}}", "{{- text | lower -}}", "SFT: not safe before line 58 is fixed, where texts are altered."),
        ("{{- bos_token -}}", "{{- bos_token + strftime_now('%d %b') -}}", "The prompt holds the day's date, line 41."),
        ("messages -%}", "messages -%}{{- '' if loop.last else ' ' -}}", "RL: use the bridge; "),
        ("-#}", "-#}", "SFT: safe as it is. RL: safe, every prompt only appends."),
    ],
)
def test_an_audit_begins_with_what_to_do(old: str, new: str, words: str) -> None:
    text = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    report = audited(text.replace(old, new, 1))
    assert words in report.conclusion.text
    lines = plain_view(report).splitlines()
    assert lines[0] == f"• {report.conclusion.text}"
    assert lines[1].startswith("• $ tokentrace tokenize ") is ("SFT: not safe" not in report.conclusion.text)


CHAT = """\
{%- for m in messages %}{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{% endif %}
"""


def test_a_template_without_calls_is_judged_by_conversations_without_tools() -> None:
    assert audit_of("qwen3").conclusion.text == (
        "SFT: safe with --past expand. RL: use the bridge; any new message rewrites earlier turns, lines 43 and 44."
    )
    conclusion = audited(CHAT).conclusion
    assert conclusion.text.startswith("SFT: safe for conversations without tools. RL: safe for conversations ")
    assert [command.split()[1] for command in conclusion.commands] == ["tokenize"]
