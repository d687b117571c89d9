"""Runs the integration tests against the real packages, each in its own environment with its own pins.

`python -m tests.apart.run` runs all of them, `python -m tests.apart.run verl tinker` only these. Each folder here is an
integration: `requirements.txt` has its pins, and its `test_*.py` run with that environment's Python. Environments are
cached beside the other assets. A summary at the end lists what ran, and why others did not.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

from tests.assets.store import cache_root, locked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOOLS = ("pytest>=8.3", "hypothesis>=6.120")


def names() -> list[str]:
    """The integrations that have their own environment."""
    return sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))


def requirements(name: str) -> list[str]:
    """The requirements: the pins of the integration, tokentrace's dependencies, and the test tools."""
    lines = (HERE / name / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*pins, *project["dependencies"], *TOOLS]


def install(name: str) -> Path:
    """The Python of the environment, created if needed. Lines with ``--no-deps`` are installed last."""
    required = requirements(name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join(required).encode()).hexdigest()[:12]
    folder = cache_root() / "apart" / f"{name}-{version}-{digest}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    with locked(f"apart-{name}"):
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            venv.create(folder, with_pip=False, symlinks=os.name != "nt")
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            alone = [line.removeprefix("--no-deps").split() for line in required if line.startswith("--no-deps")]
            together = [line for line in required if not line.startswith("--no-deps")]
            subprocess.run([*pip, *together], check=True)
            for line in alone:
                subprocess.run([*pip, "--no-deps", *line], check=True)
            (folder / ".installed").touch()
    return python


def run(name: str, options: list[str]) -> int:
    """Run the tests of an integration, and return pytest's exit code."""
    python = install(name)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [str(python), "-m", "pytest", "--apart", "-p", "no:cacheprovider", f"tests/apart/{name}", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def main(arguments: list[str]) -> int:
    """Run the named integrations, or all. Returns 1 if one failed or could not be installed."""
    selected = [one for one in arguments if not one.startswith("-")] or names()
    options = [one for one in arguments if one.startswith("-")]
    if unknown := [name for name in selected if name not in names()]:
        print(f"there is no {unknown[0]!r}; there are: {', '.join(names())}")
        return 2
    results = []
    for name in selected:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            code = run(name, options)
            result = "passed" if code == 0 else f"FAILED (pytest's exit code {code})"
        except subprocess.CalledProcessError as error:
            result = f"NOT RUN: pip could not install its packages (exit code {error.returncode})"
        results.append((name, result, time.monotonic() - began))
    print("\nintegrations with an environment of their own:")
    for name, result, seconds in results:
        print(f"  {name:<16} {result}, {seconds:.0f} s")
    return int(any(result != "passed" for _, result, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
