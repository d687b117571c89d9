"""Verdicts on templates with one flaw planted in them."""

from dataclasses import replace

import pytest

from tests.diagnose.brute import audit_of, audited, rendered, source_of
from tests.support import over_bytes
from tokentrace.diagnose import AuditReport, Grade, audit_template
from tokentrace.diagnose.appends import TOOLS, AppendOutcome, Style
from tokentrace.diagnose.certify import SIGNS
from tokentrace.diagnose.facts import find_facts
from tokentrace.errors import TemplateLimitError
from tokentrace.pocket import POCKET
from tokentrace.show.terminal import plain_view
from tokentrace.template.chat_template import ChatTemplate

TEMPLATE = """{%- if tools %}{{ '<|turn|>system\n' ~ tools | tojson ~ '<|end|>' }}{% endif -%}
BEFORE
{%- for m in messages SKIPPED -%}
{{- '<|turn|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
THINK
{{- CONTENT -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + ARGUMENTS + '}\n</tool_call>' -}}
{%- endfor -%}
{%- else -%}{{- OTHER -}}{%- endif -%}
END
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn|>assistant\n' -}}{%- endif -%}
"""
OUTPUT = "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}"
THINK = f"{{%- if m.reasoning_content -%}}{OUTPUT}{{%- endif -%}}"
ONLY_LAST = f"{{%- if m.reasoning_content and (loop.last or keep is defined and keep) -%}}{OUTPUT}{{%- endif -%}}"
PARTS = {
    **{"before": "", "skipped": "", "think": THINK, "content": "m.content or ''", "other": "m.content"},
    **{"arguments": "(c.function.arguments | tojson)", "end": "{{- '<|end|>' -}}"},
}
DATE = "{{- '<|turn|>system\nToday is ' + strftime_now('%d %b %Y') + '<|end|>' -}}"
SAME_CALL = "messages | selectattr('tool_call_id', 'equalto', m.tool_call_id) | list | length"
ANSWERS = "messages | selectattr('role', 'equalto', 'assistant') | list | length"


def source(**changes: str) -> str:
    text = TEMPLATE
    for name, part in {**PARTS, **changes}.items():
        text = text.replace(name.upper(), part)
    return text


def guarded(condition: str, part: str) -> str:
    return f"{{%- if {condition} -%}}{part}{{%- endif -%}}"


def refusing(condition: str) -> str:
    return guarded(condition, "{{- raise_exception('not this') -}}")


def signs(report: AuditReport) -> str:
    """A sign for each use: one row, per turn, tools only, user turns, parity."""
    return "".join(SIGNS[one.grade].text for one in report.verdicts)


@pytest.mark.parametrize(
    ("changes", "grades", "words"),
    [
        ({}, "✓✓✓✓✓", ""),
        ({"other": f"m.content ~ ({SAME_CALL} if m.tool_call_id else '')"}, "✓✓✓✓✓", ""),
        ({"before": refusing(f"{ANSWERS} > 1")}, "◐◐◐◐◐", "not this"),
        ({"before": refusing("messages[0].role == 'system'")}, "✓✓✓✓✓", ""),
        ({"before": refusing("messages[-1].role == 'tool'")}, "◐◐✗◐◐", "not this"),
        ({"before": "{%- if range(100000) | random == 7 -%}{{- 'x' -}}{%- endif -%}"}, "◐◐◐◐◐", "randomness"),
        ({"think": "{{- '[' ~ loop.revindex ~ ']' -}}"}, "✗✗✗✗✗", "after a round of tools"),
        ({"end": guarded("m.role != 'assistant' or not loop.last", "{{- '<|end|>' -}}")}, "◐✗✓✓✓", "final_stop=True"),
        ({"other": "'elided' if m.role == 'tool' and loop.index0 < messages|length - 4 else m.content"}, "✗✓◐✗✗", ""),
        ({"content": "(m.content or '')|trim"}, "✓✓◐◐◐", "white space around content reaches no token"),
        ({"content": "(m.content or '').split('</think>')[-1]"}, "◐◐◐◐◐", "reasoning inside content reaches no token"),
        ({"skipped": "if m.role != 'system'"}, "◐◐✓✓◐", "content of system messages reaches no token"),
        ({"skipped": "if m.role != 'system' or m == messages[0]"}, "◐◐✓✓◐", "content of later system messages reaches"),
    ],
)
def test_a_flaw_is_counted_where_it_matters(changes: dict[str, str], grades: str, words: str) -> None:
    report = audited(source(**changes))
    assert signs(report) == grades
    reasons = [reason for one in report.verdicts for reason in one.against]
    assert any(words in reason for reason in reasons) or not reasons


@pytest.mark.parametrize(
    "condition", ["messages[0].role == 'system'", f"{ANSWERS} > 0", "messages | length > 4", "tools"]
)
def test_a_date_is_detected_anywhere(condition: str) -> None:
    report = audited(source(before=guarded(condition, DATE)))
    assert report.facts.date
    assert "date" in report.verdict("production-parity").against[-1]


def test_what_happens_to_a_role() -> None:
    changes = {
        "written": {},
        "rewritten": {"other": "m.content|upper"},
        "dropped": {"skipped": "if m.role != 'system'"},
        "refused": {"before": refusing("messages[0].role == 'system'")},
    }
    assert {name: find_facts(over_bytes(source(**one))).roles["system"] for name, one in changes.items()} == {
        name: name for name in changes
    }


@pytest.mark.parametrize(
    ("part", "flaw", "grades", "words"),
    [
        ("other", "m.content|upper", "◐◐✓✓◐", "content of system, user and tool messages is not"),
        ("other", "m.content|e", "◐◐✓✓◐", "content of system, user and tool messages is not"),
        ("other", "m.content.split('\\n')[0] if m.role == 'tool' else m.content", "◐◐✓✓◐", "content of tool messages"),
        ("other", "m.content[:300] if m.role == 'tool' else m.content", "◐◐✓✓◐", "content of tool messages is not"),
        ("content", "(m.content or '')|lower", "✗✗◐✗✗", ""),
        ("content", "(m.content or '')|replace('&', '&amp;')", "◐◐◐◐◐", "content of assistant messages is not"),
        ("content", "(m.content or '')|replace('\\n\\n', '\\n')", "◐◐◐◐◐", "content of assistant messages is not"),
        ("arguments", "(c.function.arguments|tojson|lower)", "◐◐◐◐◐", "arguments of calls are not written"),
        (
            "arguments",
            "'{\"someKey\": \"' ~ c.function.arguments.values()|first ~ '\"}'",
            "◐◐◐◐◐",
            "arguments of calls",
        ),
    ],
)
def test_the_line_that_alters_a_text_is_named(part: str, flaw: str, grades: str, words: str) -> None:
    text = source(**{part: flaw})
    report = audited(text)
    assert signs(report) == grades
    line = next(number for number, line in enumerate(text.split("\n"), 1) if flaw in line)
    for verdict in report.verdicts:
        assert not verdict.against or any(words in one and f"line {line}: `" in one for one in verdict.against)


def test_a_setting_that_prints_the_date_does_not_make_parity_hold() -> None:
    report = audited(source(before=guarded("keep is defined and keep", DATE), think=ONLY_LAST))
    assert "keep=True" in report.verdict("rl-user-turns").holds_with
    assert report.verdict("production-parity").grade is not Grade.HOLDS
    assert not report.verdict("production-parity").holds_with
    report = audited(source(before=guarded("dated is not defined or dated", DATE)))
    assert report.verdict("production-parity").holds_with == ("dated=False",)


@pytest.mark.parametrize(
    "costly",
    [
        "{%- for i in range(100000) -%}{%- for j in range(100000) -%}{%- endfor -%}{%- endfor -%}",
        "{%- for i in range(2000) -%}{{- 'x ' * 1000 -}}{%- endfor -%}",
    ],
)
def test_a_template_that_does_too_much_is_refused_at_once(costly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrace.template.budget.MAX_STEPS", 100_000)
    with pytest.raises(TemplateLimitError, match=r"steps|characters"):
        audited(source(before=costly))


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1"])
def test_white_space_is_lost_where_transformers_does_not_write_it(family: str) -> None:
    for cell in audit_of(family).cells:
        if cell.turn.style is not Style.SPACED or cell.outcome is AppendOutcome.REFUSED:
            continue
        (*past, reply), tools = cell.messages[: cell.index + 1], TOOLS if cell.tools else None
        bare = {**reply, "content": reply["content"].strip()}
        texts = {rendered(source_of(family), [*past, one], tools, False) for one in (reply, bare)}
        assert any("content" in field for field in cell.lost) or len(texts) == 2


def test_conversations_with_tools_are_those_of_the_template_for_tools() -> None:
    plain, tools = source(), source(skipped="if not loop.last or m.role != 'tool'")
    both = {"default": ChatTemplate(plain), "tool_use": ChatTemplate(tools)}
    report = audit_template(replace(over_bytes(plain), templates=both))
    assert report.verdict("rl-append-only").grade is Grade.FAILS


POCKET_TEMPLATE = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
NO_CALLS = """{%- for m in messages %}{{- '<|turn|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|turn|>assistant\\n' }}{% endif %}"""
SCOPE = "for conversations without tools"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (POCKET_TEMPLATE, "SFT: safe as it is. RL: safe, every prompt only appends."),
        (POCKET_TEMPLATE.replace("{{- text -}}", "{{- text | lower -}}", 1), "SFT: not safe until you stop line"),
        (POCKET_TEMPLATE.replace("bos_token -", "bos_token + strftime_now('%d %b') -", 1), "current date (line 41)."),
        (POCKET_TEMPLATE.replace("messages -%}", "messages -%}{{- '' if loop.last else ' ' -}}", 1), "use the bridge"),
        (NO_CALLS, f"SFT: safe {SCOPE}. RL: safe {SCOPE}, every prompt only appends."),
    ],
)
def test_an_audit_begins_with_what_to_do(text: str, words: str) -> None:
    report = audited(text)
    assert words in report.conclusion[0]
    lines = plain_view(report).splitlines()
    assert lines[: len(report.conclusion)] == [f"• {line}" for line in report.conclusion]
    commands = ["tokenize"] * ("SFT: not safe" not in report.conclusion[0]) + ["serve", "audit"] * (
        "bridge" in report.conclusion[0]
    )
    assert [line.split()[2] for line in report.conclusion[1:]] == commands
