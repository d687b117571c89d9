"""The command line of the gateway: errors before it serves, and keys."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tokentrace.cli import main
from tokentrace.engines import http
from tokentrace.pocket import POCKET


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "say who may use the gateway"),
        (["--dev", "--keys", "keys"], "not both"),
        (["--dev", "--host", "0.0.0.0"], "this machine only"),
        (["--dev", "--engine", "http://127.0.0.1:9"], "name the model that the engine serves"),
        (["--dev", "--tokenizer", str(POCKET)], "has its own tokenizer"),
        (["--dev", "--engine", "http://127.0.0.1:9", "--engine-kind", "llama.cpp", "-t", str(POCKET)], "is it running"),
        (["--dev", "--store", "nowhere/store.db"], "create it first"),
        (["--dev", "--matcher", "odd"], "strict, normal or module:function"),
        (["--keys", "nowhere.keys"], "tokentrace keys nowhere.keys --admin"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_bad_options_are_refused_in_one_line(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http, "_PAUSES", (0.001, 0.001))
    result = CliRunner().invoke(main, ["serve", "--port", "0", *options])
    assert result.exit_code == 2, result.output
    assert message.replace("is it running", "is the engine running") in result.stderr
    assert "Traceback" not in result.stderr


def test_a_key_is_printed_once_and_only_its_hash_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    printed = CliRunner().invoke(main, ["keys", str(file), "--admin", "--name", "me"]).stdout.strip()
    assert printed.startswith("tt-")
    assert printed not in file.read_text()
    for roles in ([], ["--admin", "--agent"]):
        assert CliRunner().invoke(main, ["keys", str(file), *roles]).exit_code == 2
