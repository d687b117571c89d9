"""Verdicts on templates with one thing planted in them."""

from __future__ import annotations

import pytest

from tokentrace.diagnose import AuditReport, Grade, audit_template
from tokentrace.diagnose.cases import Append
from tokentrace.diagnose.verdicts import sentence
from tokentrace.errors import TemplateLimitError
from tokentrace.pocket import POCKET

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
WRITTEN = "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}"
THINK = f"{{%- if m.reasoning_content -%}}{WRITTEN}{{%- endif -%}}"
ONLY_LAST = f"{{%- if m.reasoning_content and (loop.last or keep is defined and keep) -%}}{WRITTEN}{{%- endif -%}}"
DATE = "{{- '<|turn|>system\nToday is ' + strftime_now('%d %b %Y') + '<|end|>' -}}"
ANSWERS = "messages | selectattr('role', 'equalto', 'assistant') | list | length"


def audited(before: str = "", think: str = THINK, end: str = "{{- '<|end|>' -}}") -> AuditReport:
    source = HEAD + before + TURN.replace("THINK", think).replace("END", end)
    return audit_template(POCKET, chat_template=source, name="planted")


def grades(report: AuditReport) -> set[Grade]:
    return {verdict.grade for verdict in report.verdicts}


def test_the_template_that_things_are_planted_in_holds() -> None:
    assert grades(audited()) == {Grade.HOLDS}


def test_a_template_that_refuses_the_second_round_holds_partly() -> None:
    report = audited(f"{{%- if {ANSWERS} > 1 -%}}{{{{- raise_exception('one answer only') -}}}}{{%- endif -%}}")
    assert grades(report) == {Grade.PARTLY}
    for verdict in report.verdicts:
        assert any("one answer only" in words and "after" in words for words in verdict.against)
    assert report.unmet(["rl-append-only", "rl-user-turns"])
    assert report.outcome(Append.USER) is Grade.PARTLY


def test_a_refused_system_message_is_told_among_the_roles_alone() -> None:
    report = audited(
        "{%- if messages[0].role == 'system' -%}{{- raise_exception('no system messages') -}}{%- endif -%}"
    )
    assert grades(report) == {Grade.HOLDS}
    assert report.reading.roles["system"] == "refused"


def test_a_use_of_which_all_is_refused_fails() -> None:
    report = audited(
        "{%- if messages[-1].role == 'tool' -%}{{- raise_exception('no tools') -}}{%- endif -%}",
    )
    assert report.verdict("rl-append-only").grade is Grade.FAILS
    assert report.verdict("rl-user-turns").grade is Grade.PARTLY


def test_a_setting_that_prints_the_date_does_not_make_parity_hold() -> None:
    report = audited(f"{{%- if keep is defined and keep -%}}{DATE}{{%- endif -%}}", think=ONLY_LAST)
    assert "keep=True" in report.verdict("rl-user-turns").holds_with
    assert report.verdict("production-parity").grade is not Grade.HOLDS
    assert not report.verdict("production-parity").holds_with


def test_a_setting_that_changes_nothing_but_the_date_is_a_switch() -> None:
    report = audited(f"{{%- if dated is defined and not dated -%}}{{%- else -%}}{DATE}{{%- endif -%}}")
    assert report.verdict("production-parity").holds_with == ("dated=False",)


@pytest.mark.parametrize(
    "beside",
    ["messages[0].role == 'system'", f"{ANSWERS} > 0", "messages | length > 4", "tools"],
)
def test_a_date_is_found_wherever_it_stands(beside: str) -> None:
    report = audited(f"{{%- if {beside} -%}}{DATE}{{%- endif -%}}")
    assert report.changes.clock
    assert "date" in report.verdict("production-parity").against[-1]


def test_chance_is_named_in_every_verdict_however_rare() -> None:
    report = audited("{%- if range(100000) | random == 7 -%}{{- 'x' -}}{%- endif -%}")
    assert grades(report) == {Grade.PARTLY}
    assert all("at random" in verdict.against[-1] for verdict in report.verdicts)


def test_a_turn_that_is_not_after_its_prompt_only_later_is_no_row_of_its_own() -> None:
    report = audited(think="{{- '[' ~ loop.revindex ~ ']' -}}")
    assert report.verdict("sft-per-turn").grade is Grade.FAILS
    assert "after a round of tools" in report.verdict("sft-per-turn").against[0]


def test_rows_without_the_stop_token_do_not_train_where_a_turn_ends() -> None:
    report = audited(end="{%- if m.role != 'assistant' or not loop.last -%}{{- '<|end|>' -}}{%- endif -%}")
    assert report.stops.untrained_end
    assert report.verdict("sft-per-turn").grade is Grade.FAILS
    assert "final_stop=True" in report.verdict("sft-per-turn").against[0]
    assert report.verdict("sft-one-row").grade is Grade.PARTLY
    assert "final_stop=True" in report.verdict("sft-one-row").against[0]
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
        audited(much)


def test_what_goes_wrong_is_said_of_one_thing_and_of_several() -> None:
    both = [Append.PARALLEL, Append.TOOL_USER]
    assert sentence(both, "", "why") == "where a turn is followed by two results or a result with a user after it: why"
    assert sentence([Append.USER], "turns with calls", "why") == "where turns with calls are followed by a user: why"
    assert sentence([], "turns with calls", "why") == "turns with calls: why"
