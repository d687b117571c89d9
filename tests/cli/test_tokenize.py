"""``tokentrace tokenize``: files of conversations to rows, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests.data.generate import conversations
from tests.pages import read_page
from tokentrace import build_supervised_sample, create_renderer
from tokentrace.cli import main
from tokentrace.data import tables
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.pocket import POCKET

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations(12, seed=1)), encoding="utf-8")
    return path


def invoke(*arguments: Any, **options: Any) -> Result:
    return CliRunner().invoke(main, ["tokenize", "-t", str(POCKET), *map(str, arguments)], **options)


def test_it_writes_rows_and_says_what_they_come_to(chats: Path, tmp_path: Path) -> None:
    done = invoke(chats, "-o", tmp_path / "rows.parquet")
    assert done.exit_code == 0, done.output
    samples = list(read_samples(tmp_path / "rows.parquet"))
    tokens, trained = sum(map(len, samples)), sum(sample.trained for sample in samples)
    assert f"12 samples of 12 rows · {tokens:,} tokens, {trained:,} trained" in done.stdout
    assert not (tmp_path / "rows.bad.jsonl").exists()


def test_rows_are_never_written_in_a_vocabulary_that_nobody_chose(chats: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["tokenize", str(chats), "-o", str(tmp_path / "rows.parquet")])
    assert done.exit_code == 2
    assert "-t pocket" in done.stderr
    assert not list(tmp_path.glob("rows*"))
    assert CliRunner().invoke(main, ["tokenize", str(chats), "--show", "1"]).exit_code == 0


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_are_replaced_only_if_asked_for_and_never_by_none(chats: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    assert invoke(chats, "-o", output).exit_code == 0
    before = output.read_bytes()
    again = invoke(chats, "-o", output)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"messages": []}, {"text": "no conversation"}]', encoding="utf-8")
    for options in ([], ["--overwrite"]):
        assert invoke(bad, "-o", output, *options).exit_code == 2
        assert output.read_bytes() == before
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "rows.bad.jsonl").read_text().splitlines()]
    assert len(reasons) == 2
    none = invoke(bad, "-o", tmp_path / f"none-{name}")
    assert (none.exit_code, "no row gave a sample" in " ".join(none.stderr.split())) == (2, True)
    assert "holds no message" in none.stderr, "the first reason is told at once"
    assert [path.name for path in tmp_path.glob("none*")] == ["none-rows.bad.jsonl"]
    assert invoke(chats, "-o", output, "--overwrite", "--turns", "last").exit_code == 0
    assert output.read_bytes() != before


@pytest.mark.parametrize("wrap", [lambda messages: messages, lambda messages: {"messages": messages}])
def test_a_file_of_one_conversation_is_one_row(tmp_path: Path, wrap: Any) -> None:
    (tmp_path / "chat.json").write_text(json.dumps(wrap(GOOD["messages"]), indent=1), encoding="utf-8")
    done = invoke(tmp_path / "chat.json", "-o", tmp_path / "rows.parquet")
    assert done.exit_code == 0, done.output
    assert "1 sample of 1 row" in done.stdout


def test_bad_rows_are_beside_it_and_in_the_exit_code(chats: Path, tmp_path: Path) -> None:
    with chats.open("a") as file:
        file.write('{"messages": []}\nnonsense\n')
    done = invoke(chats, "-o", tmp_path / "rows.parquet")
    assert done.exit_code == 1
    assert "2 rows gave no sample (1 InputError, 1 unreadable)" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "rows.bad.jsonl").read_text().splitlines()]
    assert [(row["line"], row["kind"]) for row in rows] == [(13, "InputError"), (14, "unreadable")]
    assert pq.read_metadata(tmp_path / "rows.parquet").num_rows == 12


def test_options_reach_the_settings(chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    options = ["--turns", "last", "--parts", "content,stop", "--roles", "assistant,tool", "--past", "template"]
    options += ["--max-length", "900", "--overlong", "right", "--no-labels", "--kwargs", "enable_thinking=false"]
    assert invoke(chats, "-o", output, "-q", *options).exit_code == 0
    told = read_metadata(output)["settings"]
    wanted = {
        "turns": "last",
        "parts": ["content", "stop"],
        "roles": ["assistant", "tool"],
        "past": "template",
        "max_length": 900,
        "overlong": "right",
        "labels": False,
        "template_kwargs": {"enable_thinking": False},
    }
    assert {name: told[name] for name in wanted} == wanted
    assert "labels" not in pq.read_schema(output).names


def test_stats_show_lengths(chats: Path, tmp_path: Path) -> None:
    done = invoke(chats, "-o", tmp_path / "rows.parquet", "--stats")
    lengths = [len(sample) for sample in read_samples(tmp_path / "rows.parquet")]
    assert f"{max(lengths):,}" in done.stdout
    assert f"{min(lengths):,}" in done.stdout


def test_show_is_what_render_shows(chats: Path) -> None:
    done = invoke(chats, "--show", "2")
    assert done.exit_code == 0
    renderer = create_renderer(POCKET)
    for row in list(conversations(12, seed=1))[:2]:
        sample = build_supervised_sample(renderer, row["messages"])
        assert f"{len(sample):,} tokens, {sample.trained:,} trained" in done.stdout
    assert done.stdout.count("## ") == 2


def test_show_marks_what_carries_loss(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([GOOD, {"messages": []}, GOOD]))
    done = invoke(path, "--show", "5", "--parts", "stop")
    marked = [line.split() for line in done.stdout.splitlines() if " * " in line]
    assert [row[-1] for row in marked] == ["<|end|>", "<|end|>"]
    assert "row 2: InputError" in done.stderr


def test_rows_make_a_page_of_their_own(chats: Path, tmp_path: Path) -> None:
    with chats.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "<script>x"}, *GOOD["messages"][1:]]}) + "\n")
    page = tmp_path / "rows.html"
    assert invoke(chats, "--show", "20", "--html", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert [track["means"] for track in read_page(text)["tracks"]] == ["trained"] * 13
    assert "<script>x" not in text


def test_notes_of_rows_are_summed_up_with_the_options_that_help(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    thought = {"role": "assistant", "content": "ho", "reasoning_content": "hm"}
    rows = [{"messages": [GOOD["messages"][0], thought] * 2}] * 3
    (tmp_path / "x.json").write_text(json.dumps(rows))
    arguments = [tmp_path / "x.json", "-o", tmp_path / "o.parquet", "--chat-template", tmp_path / "t.jinja"]
    done = invoke(*arguments)
    assert done.exit_code == 0
    assert "3 samples: trained without the reasoning" in done.stdout
    assert "--past 'expand'" in done.stdout
    done = invoke(*arguments, "--overwrite", "--past", "expand")
    assert "trained without" not in done.stdout
    assert "6 samples of 3 rows" in done.stdout
    (tmp_path / "t.jinja").write_text(template.replace("{{ m.content }}", "{{ m.content | upper }}"))
    assert "3 samples: text is not written as in the message" in invoke(*arguments, "--overwrite").stdout


def test_turns_that_inference_never_starts_are_counted_with_the_option_that_helps(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n<think>{{ '</think>' if quiet else '\n' }}{% endif %}"
    )
    (tmp_path / "t.jinja").write_text(template)
    (tmp_path / "x.json").write_text(json.dumps([GOOD] * 3))
    arguments = [tmp_path / "x.json", "-o", tmp_path / "o.parquet", "--chat-template", tmp_path / "t.jinja"]
    done = invoke(*arguments, "--stats")
    assert done.exit_code == 0, done.output
    told = " ".join(done.stdout.split())
    assert "3 samples: the prompt for such a turn ends in " in told
    assert "Set --kwargs quiet=true, or leave them out: --turns 'flagged'" in told
    assert told.count("3 samples: the prompt for such a turn") == 2, "in the summary, and in the statistics"
    done = invoke(*arguments, "--overwrite", "--kwargs", "quiet=true")
    assert "the prompt for such a turn" not in done.stdout


def test_lines_are_written_and_other_names_are_refused(chats: Path, tmp_path: Path) -> None:
    done = invoke(chats, "-o", tmp_path / "rows.jsonl", "--stats")
    assert done.exit_code == 0, done.output
    assert len([json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]) == 12
    assert "median" in done.stdout
    refused = invoke(chats, "-o", tmp_path / "rows.csv")
    assert refused.exit_code == 2
    assert "'rows.csv' is neither" in refused.stderr
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_that_names_the_file(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(tables, "draft_path", lambda _: tmp_path / "draft")
        done = invoke(chats, "-o", tmp_path / "rows.parquet")
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path / 'rows.parquet'} cannot be written: No space left on device" in line
    assert not (tmp_path / "rows.parquet").exists()


def test_errors_are_one_line_and_name_the_option_that_helps(chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    output.write_bytes(b"")
    done = invoke(chats, "-o", output)
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert invoke(chats, "-o", output, "--parts", "feelings").exit_code == 2
    assert "name the file to write with -o" in invoke(chats).stderr
    assert "-o names" in invoke(chats, "--stats", "--show", "1").stderr
    assert "no file or folder" in invoke("./nothing.jsonl", "-o", tmp_path / "x.parquet").stderr


def test_stdin_is_an_input(tmp_path: Path) -> None:
    done = invoke("-", "-o", tmp_path / "rows.parquet", input=json.dumps(GOOD) + "\n")
    assert done.exit_code == 0, done.output
    assert "1 sample of 1 row" in done.stdout


def test_an_interrupted_run_says_that_nothing_was_written(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokentrace.data import job

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "tokenize_files", interrupted)
    done = invoke(chats, "-o", tmp_path / "rows.parquet")
    assert done.exit_code == 130
    assert "nothing was written" in done.stderr


def test_the_most_frequent_reasons_are_told_with_a_place_each(tmp_path: Path) -> None:
    alien = [{"messages": [{"role": f"alien{at}", "content": "x"}]} for at in range(3)]
    others = [{"messages": []}, {"messages": []}, {"no": 1}, {"messages": [{"role": "user"}]}, {"messages": "x"}, "x"]
    text = "".join(json.dumps(row) + "\n" for row in [*others, *alien, GOOD])
    chats = tmp_path / "chats.jsonl"
    chats.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["tokenize", str(chats), "-o", str(tmp_path / "rows.jsonl"), "-t", "pocket"])
    assert result.exit_code == 1
    reasons = [line for line in result.stdout.splitlines() if " × " in line]
    assert len(reasons) == 5
    assert reasons[0].startswith("    3 × message 0, role: 'alien0' is not a known role")
    assert reasons[0].endswith("chats.jsonl, row 7)")
    assert reasons[1].startswith("    2 × ")
