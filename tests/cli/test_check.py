"""``tokentrace check``: its input, output and exit codes."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.data.generate import write_conversations, write_lines
from tests.diagnose.planted import SHAPES, clean, rollouts
from tokentrace import Trajectory, create_renderer
from tokentrace.cli import main
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import build_supervised_sample

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "It is four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
RENDERER = create_renderer(POCKET)
SAMPLE = build_supervised_sample(RENDERER, MESSAGES)
ROW: dict[str, Any] = {"messages": MESSAGES, "input_ids": SAMPLE.token_ids, "loss_mask": SAMPLE.loss_mask}


def run(*args: Any, **env: str) -> Result:
    return CliRunner().invoke(main, ["check", *(str(arg) for arg in args)], env=env or None)


def tokenize(source: Path, output: Path, *more: Any) -> None:
    command = ["tokenize", source, "-o", output, "-t", POCKET, "-q", *more]
    assert CliRunner().invoke(main, [str(one) for one in command]).exit_code == 0


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "good.jsonl", [ROW, ROW])


def test_matching_rows_exit_with_0(good: Path) -> None:
    result = run(good, "-t", POCKET)
    assert result.exit_code == 0
    assert result.stdout.startswith("✓ all 2 rows match the template: ids and mask\n")
    assert result.stderr == ""
    assert "pocket" in run(good).stderr


def test_differing_rows_exit_with_1_and_show_place_and_tokens(tmp_path: Path) -> None:
    doubled = {**ROW, "input_ids": [SAMPLE.token_ids[0], *SAMPLE.token_ids], "loss_mask": [0, *SAMPLE.loss_mask]}
    untrained = {**ROW, "loss_mask": [*SAMPLE.loss_mask[:-1], 0]}
    poor = write_lines(tmp_path / "poor.jsonl", [ROW, doubled, untrained, {"text": "no ids"}])
    result = run(poor, "-t", POCKET)
    assert result.exit_code == 1
    assert result.stdout.startswith("✗ 3 of 4 rows do not match the template\n")
    assert "\x1b" not in result.stdout
    for words in (
        *("not trained, and should be", "the row holds no ids", f"{poor}, row 2: BOS token doubled"),
        *("expected  <|bos|>│⟦⟧│<|turn|>│user│⏎", "found     <|bos|>│⟦<|bos|>⟧│<|turn|>│user│⏎"),
        f"token {len(SAMPLE) - 1}: stop token of 1 assistant turn not trained (1 token)",
    ):
        assert words in result.stdout
    report = json.loads(run(poor, "-t", POCKET, "--json").stdout)
    names = {table: {str(one["name"]) for one in report[table]} for table in ("outcomes", "causes", "mask")}
    assert names["outcomes"] == {"same", "ids differ", "mask differs", "bad"}
    assert (names["causes"], names["mask"]) == ({"bos_doubled"}, {"['assistant', 'stop', 'mask_missing']"})
    assert report["outcomes"][1]["examples"][0]["findings"][0]["position"] == 1


@pytest.mark.parametrize(("suffix", "packed"), [(".parquet", False), (".jsonl", True)])
def test_a_tokenized_file_finds_its_source(
    suffix: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any working directory, and after both files were moved together."""
    pytest.importorskip("pyarrow")
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "data")
    write_conversations(Path("chats.jsonl"), 5)
    if packed:
        Path("chats.jsonl.gz").write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
        Path("chats.jsonl").unlink()
    name = "chats.jsonl.gz" if packed else "chats.jsonl"
    tokenize(Path(name), Path(f"../rows{suffix}"), "--turns", "last")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    result = run(tmp_path / "there" / f"rows{suffix}", "-t", POCKET)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✓ all 5 rows match the template: ids and mask\n")


def test_a_missing_or_changed_source_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    chats, out = tmp_path / "chats.jsonl", tmp_path / "rows.parquet"
    write_conversations(chats, 5)
    tokenize(chats, out)
    before, time = chats.read_bytes(), chats.stat().st_mtime_ns
    chats.write_bytes(before.replace(b"river", b"RIVER"))
    os.utime(chats, ns=(time, time))
    changed = run(out, "-t", POCKET)
    assert (changed.exit_code, "ids differ" in changed.stdout) == (1, True)
    for result in (changed, run(out, "-t", POCKET, "--source", chats)):
        assert "has changed since" in result.stdout
    chats.rename(tmp_path / "moved.jsonl")
    gone = run(out, "-t", POCKET)
    assert (gone.exit_code, "unchecked" in gone.stdout) == (1, True)
    assert "was not found: pass it with --source" in " ".join(gone.stdout.split())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "chats.jsonl").write_bytes(before)
    assert run(out, "-t", POCKET, "--source", tmp_path / "elsewhere" / "chats.jsonl").exit_code == 0


def test_rows_of_another_template_are_noted_and_refused_where_no_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    chats, out = write_lines(tmp_path / "chats.jsonl", [{"messages": MESSAGES}]), tmp_path / "rows.parquet"
    template, words = tmp_path / "other.jinja", "rows.parquet was made with another template"
    template.write_text((POCKET / "chat_template.jinja").read_text() + "{#- another -#}")
    tokenize(chats, out, "--chat-template", template)
    refused, noted, fine = run(out), run(out, "-t", POCKET), run(out, "-t", POCKET, "--chat-template", template)
    assert (refused.exit_code, refused.stdout, "-t" in refused.stderr) == (2, "", True)
    assert (noted.exit_code, fine.exit_code) == (0, 0)
    assert [words in " ".join(text.split()) for text in (refused.stderr, noted.stdout, fine.stdout)] == [1, 1, 0]
    tokenize(chats, other := tmp_path / "other.parquet", "--turns", "last")
    assert "other.parquet was made with other settings" in " ".join(run(out, other, "-t", POCKET).stdout.split())


def test_rows_that_cannot_be_checked_exit_with_1_unless_allowed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "bare.jsonl", [{"input_ids": SAMPLE.token_ids, "loss_mask": SAMPLE.loss_mask}])
    result = run(path, "-t", POCKET)
    assert result.exit_code == 1
    assert result.stdout.startswith("• 1 of 1 rows have no conversation to compare them with\n")
    assert run(path, "-t", POCKET, "--allow", "unchecked").exit_code == 0


def test_options_reach_the_check(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{{ mark }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    source = template.read_text(encoding="utf-8")
    renderer = create_renderer(POCKET, "default", chat_template=source, lost="ignore", mark="!")
    sample = build_supervised_sample(renderer, MESSAGES, roles=["assistant", "user"], parts=["content"])
    labels = np.where(sample.mask, sample.ids, -100).tolist()
    pad = renderer.tokenizer.token_id("<|turn|>")
    row = {"talk": MESSAGES, "x": [pad, pad, *sample.token_ids], "y": [-100, -100, *labels]}
    path = write_lines(tmp_path / "rows.jsonl", [row, {"x": 1}])
    args: list[Any] = [path, "-t", POCKET, "--renderer", "default", "--chat-template", template, "--kwargs", "mark=!"]
    args += ["--ids-column", "x", "--mask-column", "y", "--messages-column", "talk", "--limit", 1]
    args += ["--roles", "assistant,user", "--parts", "content", "--pad-token", "<|turn|>"]
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert "padding 2" in result.stdout
    assert "stopped after 1 row" in result.stdout


def test_errors_exit_with_2(good: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent.jsonl"
    assert run(absent, "-t", POCKET).stderr.startswith("error: there is no file or folder")
    for args in ((), (absent,), (good, "--parts", "colour"), (good, "--pad-token", "no"), (good, "--source", absent)):
        assert run(*args, "-t", POCKET).exit_code == 2
    result = run(write_lines(tmp_path / "empty.jsonl", []), "-t", POCKET)
    assert (result.exit_code, "there are no rows" in result.stdout) == (1, True)


# -- rollouts


def dump(folder: Path, planted: Any, shape: str = "calls lines") -> Path:
    return write_lines(folder / "dump.jsonl", SHAPES[shape](planted, False))


def test_breaks_are_listed_with_cause_place_diff_and_share(tmp_path: Path) -> None:
    result = run(dump(tmp_path, rollouts("pocket")), "-t", POCKET)
    assert result.exit_code == 1, result.output
    for words in (
        *("6 of 9 rollouts break (66.7 %), 6 times", "calls, one per line", "boolean or None case", "11.1 %"),
        *("│⟦ true", "tokens prefilled again"),
    ):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    report = json.loads(run(tmp_path / "dump.jsonl", "-t", POCKET, "--json").stdout)
    assert [report["counts"][name] for name in ("rollouts", "broken", "samples")] == [9, 6, 16]
    [finding] = report["causes"][0]["examples"][0]["findings"]
    assert {"cause", "where", "position", "words", "tokens"} <= finding.keys()


def test_the_exit_code_is_for_ci(tmp_path: Path) -> None:
    broken = dump(tmp_path, rollouts("pocket"))
    quiet = run(broken, "-t", POCKET, "-q")
    assert (quiet.exit_code, quiet.stdout) == (1, "")
    assert quiet.stderr == "6 of 9 rollouts break (66.7 %), 6 times\n"
    assert run(broken, "-t", POCKET, "--allow", "breaks").exit_code == 0
    fine = dump(tmp_path, clean("pocket"))
    result = run(fine, "-t", POCKET)
    assert (result.exit_code, "every prompt extends its stream" in result.stdout) == (0, True)
    fine.write_text(fine.read_text() + "{\n", encoding="utf-8")
    result = run(fine, "-t", POCKET)
    assert result.exit_code == 1
    assert "dump.jsonl, line 11  could not be read  not valid JSON" in result.stdout
    assert run(tmp_path / "gone.jsonl").exit_code == 2
    call = '{"prompt_ids": [1], "completion_ids": [2]}'
    fine.write_text(f'{{"steps": [{call}, "junk"]}}\n', encoding="utf-8")
    assert "'junk', not a call" in " ".join(run(fine, "-t", POCKET).stdout.split())


def test_rollouts_of_an_unknown_model_are_not_explained(tmp_path: Path) -> None:
    """The pocket model is the default if its vocabulary has the ids."""
    assert "using the embedded pocket model" in run(dump(tmp_path, rollouts("pocket"))).stderr
    large = {"rollout_id": "a", "prompt_ids": [1, 151_645], "completion_ids": [2]}
    result = run(write_lines(tmp_path / "large.jsonl", [large]))
    assert "without --tokenizer, breaks are counted but not explained" in result.stderr
    named = write_lines(tmp_path / "named.jsonl", [{"tokenizer": "Qwen/Qwen3-8B", **large, "prompt_ids": [1]}])
    assert "another tokenizer" not in run(named, "-t", POCKET).stdout


# -- a prompt against a stream


QUESTION = [{"role": "user", "content": "2+2?"}]
ANSWER = {"role": "assistant", "content": "four"}
FOLLOW_UP = {"role": "user", "content": "Sure?"}
PROMPT = RENDERER.render_ids(QUESTION, add_generation_prompt=True)
LETTERS = [index for letter in "four" for index in RENDERER.tokenizer.encode(letter).tolist()]
SAMPLED = [*LETTERS, *RENDERER.tokenizer.encode("<|end|>").tolist()]
AGAIN = RENDERER.render_ids([*QUESTION, ANSWER, FOLLOW_UP], add_generation_prompt=True)
FIRST = next(at for at, pair in enumerate(zip(PROMPT + SAMPLED, AGAIN, strict=False)) if pair[0] != pair[1])


def test_a_prompt_is_compared_with_a_stream(tmp_path: Path) -> None:
    """The model samples letter by letter; a client renders the history again, or bridges."""
    record = tmp_path / "rollout.tt"
    trajectory = Trajectory(logprobs=False)
    trajectory.begin(PROMPT)
    trajectory.append_completion(SAMPLED, None, finish_reason="stop")
    trajectory.save(record)
    prompt, stream = tmp_path / "next.json", tmp_path / "stream.json"
    prompt.write_text(json.dumps(AGAIN), encoding="utf-8")
    result = run(record, "--prompt", prompt)
    assert result.exit_code == 1
    assert f"break at token {FIRST}" in result.output
    assert "BPE re-merge" in result.output
    stream.write_text(json.dumps(PROMPT + SAMPLED), encoding="utf-8")
    result = run(stream, "--prompt", prompt, "--json")
    row = json.loads(result.stdout)
    assert (result.exit_code, row["cause"], row["position"], row["extends"]) == (1, "bpe_remerge", FIRST, False)
    bridged = RENDERER.bridge_to_next_turn(PROMPT, SAMPLED, [FOLLOW_UP])
    assert bridged is not None
    prompt.write_text(json.dumps(bridged.token_ids), encoding="utf-8")
    result = run(record, "--prompt", prompt)
    assert (result.exit_code, f"{len(bridged.new_ids)} new ones" in result.output) == (0, True)
    for option in (("--limit", 1), ("--allow", "breaks")):
        assert "cannot be used with --prompt" in run(record, "--prompt", prompt, *option).stderr
