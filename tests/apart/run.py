"""Integrations tried against the real packages, each in an environment of its own: their pins are not ours.

`python -m tests.apart.run` runs all of them, `python -m tests.apart.run verl tinker` these. A folder here is an
integration: `requirements.txt` has its pins, `test_*.py` the tests, which run with that environment's Python. The
environments are kept beside the other assets. At the end it says what ran, and what did not and why.
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
    """The integrations that have an environment of their own."""
    return sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))


def requirements(name: str) -> list[str]:
    """What is installed: the pins of the integration, what tokentrace itself needs, and what runs the tests."""
    lines = (HERE / name / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*pins, *project["dependencies"], *TOOLS]


def install(name: str) -> Path:
    """The Python of an environment, made if it is not there.

    Lines that begin with ``--no-deps`` are installed last, without what they ask for.
    """
    wanted = requirements(name)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join(wanted).encode()).hexdigest()[:12]
    folder = cache_root() / "apart" / f"{name}-{version}-{digest}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    with locked(f"apart-{name}"):
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            venv.create(folder, with_pip=False, symlinks=os.name != "nt")
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
            alone = [line.removeprefix("--no-deps").split() for line in wanted if line.startswith("--no-deps")]
            together = [line for line in wanted if not line.startswith("--no-deps")]
            subprocess.run([*pip, *together], check=True)
            for line in alone:
                subprocess.run([*pip, "--no-deps", *line], check=True)
            (folder / ".installed").touch()
    return python


def run(name: str, options: list[str]) -> int:
    """Run the tests of an integration; pytest's exit code."""
    python = install(name)
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [str(python), "-m", "pytest", "--apart", "-p", "no:cacheprovider", f"tests/apart/{name}", *options]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def main(arguments: list[str]) -> int:
    """Run what is named, or all; 1 where something failed or could not be installed."""
    chosen = [one for one in arguments if not one.startswith("-")] or names()
    options = [one for one in arguments if one.startswith("-")]
    if unknown := [name for name in chosen if name not in names()]:
        print(f"there is no {unknown[0]!r}; there are: {', '.join(names())}")
        return 2
    said = []
    for name in chosen:
        began = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            code = run(name, options)
            result = "passed" if code == 0 else f"FAILED (pytest's exit code {code})"
        except subprocess.CalledProcessError as error:
            result = f"NOT RUN: pip could not install its packages (exit code {error.returncode})"
        said.append((name, result, time.monotonic() - began))
    print("\nintegrations with an environment of their own:")
    for name, result, seconds in said:
        print(f"  {name:<16} {result}, {seconds:.0f} s")
    return int(any(result != "passed" for _, result, _ in said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
