"""Installs the agents' environments: their requirements differ from ours, and from each other's."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from tests.assets.lock import AssetError
from tests.assets.store import cache_root, locked

HERE = Path(__file__).parent
ENVIRONMENTS = ("current", "earlier")
"""Named by the generation of Anthropic's client in them. The long tests have one more, `claude`."""
PIPS = 4


def requirements(name: str) -> Path:
    return HERE / f"{name}.txt"


def folder_of(name: str) -> Path:
    """The folder of an environment, which depends on its pins and on the version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(requirements(name).read_bytes()).hexdigest()[:12]
    return cache_root() / "agents" / f"{name}-{version}-{digest}"


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def environment(name: str) -> Path:
    """The Python of an environment. Raises AssetError if it is not installed."""
    folder = folder_of(name)
    if not (folder / ".installed").exists():
        raise AssetError(
            f"the agents' environment {name} is not there; run: python -m tests.gateway.real_agents.install"
        )
    return _python(folder)


def install(name: str) -> Path:
    """The Python of an environment, which is created if needed. Raises AssetError if pip fails."""
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(f"agents-{name}"):
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=False, symlinks=os.name != "nt")
            lines = requirements(name).read_text(encoding="utf-8").splitlines()
            pins = [line for line in lines if line and not line.startswith("#")]
            _fetch(_python(folder), [pins[start::PIPS] for start in range(PIPS)])
            (folder / ".installed").touch()
    return _python(folder)


def _fetch(python: Path, shares: list[list[str]]) -> None:
    """Install each share with its own pip. The order does not matter: dependencies are among the pins."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-deps", "--no-compile", "--only-binary", ":all:"]
    running = [
        subprocess.Popen([*pip, *share], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for share in shares
    ]
    outputs = [process.communicate()[0] for process in running]
    failed = [output for output, process in zip(outputs, running, strict=True) if process.returncode]
    if failed:
        raise AssetError(f"pip could not install the agents' packages: {failed[0][-2000:]}")


def main(names: list[str]) -> int:
    """Install the named environments, or those of the quick tests; returns 1 if one fails."""
    for name in names or ENVIRONMENTS:
        started = time.monotonic()
        try:
            install(name)
        except AssetError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"agents: {name} in {folder_of(name)} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
