"""The package installs with its declared dependencies, and needs no others."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import FULL
from tests.test_layout import run_when_loaded

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "tokentrace").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = {"transformers", "torch", "huggingface_hub", "datasets", "pandas", "pyarrow", "ray", "requests", "httpx"}
HEAVY |= {"httpx2", "openai_harmony"}


def distributions(rows: list[str]) -> set[str]:
    """Import names of requirements; a few differ from the name of the distribution."""
    names = [re.split(r"[\[<>=!~ ;]", row)[0].replace("-", "_").lower() for row in rows]
    import_names = {"pyyaml": "yaml", "opentelemetry_sdk": "opentelemetry"}
    import_names["opentelemetry_exporter_otlp_proto_http"] = "opentelemetry"
    pools = {"psycopg_pool"} if any("pool]" in row or "pool," in row for row in rows) else set()
    return {import_names.get(name, name) for name in names} | pools


SERVER = {
    "gateway": distributions(PROJECT["optional-dependencies"]["gateway"]),
    "postgres.py": {"psycopg", "psycopg_pool"},
}
"""Packages that gateway modules may import when they are loaded: only the gateway loads these modules."""


INTEGRATIONS = {
    **{"gateway.py": {"httpx2"}, "nemo_gym.py": {"nemo_gym"}, "trainers.py": {"areal", "torch"}},
    **{"renderers.py": {"renderers"}, "renderers_compat.py": {"renderers"}},
    **{"trl_async.py": {"trl"}, "verl.py": {"verl"}, "verl_sft.py": {"omegaconf", "torch", "verl"}},
    **{"tinker.py": {"tinker", "tinker_cookbook", "torch"}, "tinker_rollouts.py": {"tinker"}},
    **{"pytest_plugin.py": {"pytest"}},
}
"""Packages that integrations import: the trainer and its dependencies, which their users have installed. pytest itself
loads its plugin."""


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """The top-level packages a module imports, each with whether it does so when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    loaded = set(run_when_loaded(tree))
    packages: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        packages += ((name.partition(".")[0], node in loaded) for name in names)
    return packages


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_every_import_is_declared(path: Path) -> None:
    required = distributions(PROJECT["dependencies"])
    optional = {name for rows in PROJECT["optional-dependencies"].values() for name in distributions(rows)}
    integrations = INTEGRATIONS.get(path.name, set()) if {"integrations", "pytest_plugin.py"} & {*path.parts} else set()
    assert integrations <= {name for name, _ in imports(path)}
    for name, at_import in imports(path):
        if name in sys.stdlib_module_names or name == "tokentrace" or name in integrations:
            continue
        assert name in required | optional, f"{name} is not declared"
        allowed = SERVER["gateway"] if {"gateway", "store"} & {*path.parts} else set()
        allowed = allowed | SERVER.get(path.name, set())
        assert name in required | allowed or not at_import, f"{name} is optional: import it where it is used"


def test_every_dependency_is_imported() -> None:
    used = {name for path in SOURCES for name, _ in imports(path)}
    optional = {name for rows in PROJECT["optional-dependencies"].values() for name in distributions(rows)}
    assert distributions(PROJECT["dependencies"]) <= used
    # pyarrow is loaded by name; transformers is for its users, who pass its tokenizers; uvicorn uses httptools
    assert optional - used <= {"pyarrow", "transformers", "httptools"}


def loaded_by(statement: str, python: str = sys.executable) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    completed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(completed.stdout.splitlines()[-1]))


HELP = "from tokentrace.cli import main; main(['-h'], standalone_mode=False)"


@pytest.mark.parametrize("statement", ["import tokentrace", HELP, "from tokentrace import create_renderer"])
def test_importing_is_light(statement: str) -> None:
    modules = loaded_by(statement)
    assert not {name.partition(".")[0] for name in modules} & HEAVY
    assert not {"tokenizers", "fastokens"} & {name.partition(".")[0] for name in modules}, "loaded where they are used"
    assert not {"rich", "tokentrace.show", "tokentrace.cli.render"} & modules
    dependencies = loaded_by("import numpy, jinja2.sandbox, jinja2.ext, click, rich.console, rich.text, rich.table")
    extra = {name for name in modules - dependencies if not name.startswith("tokentrace")}
    assert len(extra) < 200, sorted(extra)


# -- clean environments; they need a package index


def run(*command: str, **options: Any) -> str:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, **options)
    assert completed.returncode == 0, (command, completed.stdout[-2_000:], completed.stderr[-2_000:])
    return completed.stdout


ADDRESS = "https://example.org/tokentrace"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with a repository address."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "hatch_build.py"):
        shutil.copy(ROOT / name, source)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pyproject = re.sub(r'^repository = ""$', f'repository = "{ADDRESS}"', project, flags=re.MULTILINE)
    (source / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def test_links_of_the_package_page_lead_somewhere(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith("METADATA")]
        head, _, page = packed.read(name).decode().partition("\n\n")
    assert f"Project-URL: Source, {ADDRESS}" in head
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert links
    for link in links:
        assert link.startswith(f"{ADDRESS}/blob/main/"), link
        assert (ROOT / link.removeprefix(f"{ADDRESS}/blob/main/").partition("#")[0]).is_file(), link


def environment(folder: Path) -> str:
    venv.create(folder, with_pip=False)
    return str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment with only the wheel and its dependencies."""
    python = environment(tmp_path_factory.mktemp("base"))
    pip(python, "install", "--quiet", "--no-compile", str(wheel))
    return python


def pip(python: str, *arguments: str) -> str:
    """Run this environment's pip on another environment, which has none."""
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *arguments)


USE = """
import tokentrace, tokenizers
from tokenizers import models, pre_tokenizers
alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
made = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
renderer = tokentrace.create_renderer(made, "default", chat_template="{{ messages[0].content }}")
assert len(renderer.render_ids([{"role": "user", "content": "hi"}])) == 2
"""

FOLDER = """
import json, pathlib
folder = pathlib.Path("made")
folder.mkdir()
made.add_special_tokens(["<|end|>"])
made.save(str(folder / "tokenizer.json"))
template = "{% for m in messages %}{{ m.role + ': ' }}{{ m.content }}<|end|>{% endfor %}"
template += "{% if add_generation_prompt %}assistant: {% endif %}"
(folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
pathlib.Path("rows.jsonl").write_text(2 * (json.dumps(row) + "\\n"))
from tokentrace.data.job import tokenize_files
from tokentrace.data.tokenizing import TokenizeSettings
settings = TokenizeSettings("made")
"""

TO_PARQUET = """
done = tokenize_files(["rows.jsonl"], "rows.parquet", settings)
assert (done.counts.samples, done.bad_rows) == (2, None), done
first, second = pyarrow.parquet.read_table("rows.parquet").to_pylist()
assert len(first["input_ids"]) == len("user: hi") + 1 + len("assistant: yes") + 1
assert first["num_trained"] == len("yes") + 1
assert first["input_ids"] == second["input_ids"]
"""

GATEWAY = """
import json, subprocess, sys, urllib.request
served = subprocess.Popen([sys.executable, "-m", "tokentrace", "serve", "--dev", "--port", "0"], stdout=subprocess.PIPE)
url = served.stdout.readline().decode().strip()
try:
    body = json.dumps({"messages": [{"role": "user", "content": "What is 3 + 4?"}]}).encode()
    with urllib.request.urlopen(f"{url}/sessions/one/v1/chat/completions", body) as answer:
        assert json.load(answer)["choices"][0]["finish_reason"] in ("stop", "length")
    assert urllib.request.urlopen(f"{url}/sessions/one/rows").read().count(b"\\n") == 1
finally:
    served.terminate()
    assert served.wait(60) == 0
"""

TRACED = """
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
from tokentrace.gateway.tracing import configured_tracing
with configured_tracing().span("nothing"):
    pass
os._exit(0)
"""

WITHOUT_TABLES = """
try:
    tokenize_files(["rows.jsonl"], "rows.parquet", settings)
except tokentrace.InputError as error:
    print(error)
"""

SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


@pytest.mark.skipif(not FULL, reason="long: make test-long")
@pytest.mark.xdist_group("install")
def test_the_base_install_works(base: str, tmp_path: Path) -> None:
    python = base
    run(python, "-c", USE, cwd=tmp_path)
    assert "Usage" in run(str(Path(python).with_name("tokentrace")), "--help", cwd=tmp_path)
    installed = {row["name"].lower() for row in json.loads(pip(python, "list", "--format", "json"))}
    assert not installed & {"transformers", "torch", "datasets", "pytest", "hypothesis"}
    files = run(
        python, "-c", "import tokentrace, pathlib; print(pathlib.Path(tokentrace.__file__).parent / 'py.typed')"
    )
    assert Path(files.strip()).is_file(), "typed packages say so"
    message = run(
        python,
        "-c",
        "import tokentrace\ntry: tokentrace.load_tokenizer('a/b')\nexcept tokentrace.TokentraceError as e: print(e)",
    )
    assert "tokentrace[hub]" in message or "the hub could not be reached" in message
    assert "install tokentrace[data]" in run(python, "-c", USE + FOLDER + WITHOUT_TABLES, cwd=tmp_path)
    newcomer = tmp_path / "newcomer"
    newcomer.mkdir()
    clean_env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(python, str(ROOT / "tests" / "guides.py"), str(ROOT / "README.md"), cwd=newcomer, env=clean_env)


EXTRAS = {
    "hub": ("import huggingface_hub; huggingface_hub.snapshot_download", ""),
    "transformers": ("from transformers import PreTrainedTokenizerFast", ""),
    "data": ("import pyarrow.parquet", FOLDER + TO_PARQUET),
    "ray": ("import ray.data", "from tokentrace.data import tokenize_dataset; tokenize_dataset"),
    "engines": ("import httpx2", "from tokentrace.engines.http import Connection; Connection('http://127.0.0.1')"),
    "rollout": ("import yaml", "from tokentrace.rollout.loading import read_config; read_config"),
    "mcp": ("import mcp", "from tokentrace.rollout import MCPConfig; MCPConfig(command='x')"),
    "gateway": ("import starlette, uvicorn, apsw, prometheus_client", GATEWAY),
    "postgres": ("import psycopg", "from tokentrace.store.postgres import postgres_store; postgres_store"),
    "telemetry": ("import opentelemetry.sdk", TRACED),
}


@pytest.mark.skipif(not FULL, reason="long: make test-long")
@pytest.mark.xdist_group("install")
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_installs_on_its_own(extra: str, wheel: Path, base: str, tmp_path: Path) -> None:
    """Each extra is installed on top of the base environment, which is left as it is."""
    assert set(PROJECT["optional-dependencies"]) == set(EXTRAS), "a new extra needs a row here"
    (statement, script), python = EXTRAS[extra], environment(tmp_path / extra)
    base_packages, packages = (Path(run(one, "-c", SITE).strip()) for one in (base, python))
    (packages / "base.pth").write_text(f"{base_packages}\n", encoding="utf-8")
    pip(python, "install", "--quiet", "--no-compile", f"{wheel}[{extra}]")
    run(python, "-c", f"{statement}\n{USE}\n{script}", cwd=tmp_path)
