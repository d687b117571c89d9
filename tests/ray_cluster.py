"""A local Ray cluster for tests: two CPUs, quiet, and shut down afterwards."""

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def processes_of(folder: str) -> list[str]:
    """Command lines of the running processes that mention this folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if folder in command:
                commands.append(command[:200])
    return commands


def children_of(pid: int) -> Iterator[tuple[int, str]]:
    """Descendants of a process, with their names."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    for child in parents:
        ancestor: int | None = child
        while ancestor is not None and ancestor != pid:
            ancestor = parents.get(ancestor)
        if ancestor is not None and child != pid:
            with contextlib.suppress(OSError):
                yield child, Path(f"/proc/{child}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")


@contextlib.contextmanager
def local_ray() -> Iterator[Any]:
    """Run Ray inside the block; its workers can import the tests."""
    import ray
    import ray.data

    folder = tempfile.mkdtemp(prefix="tt-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 << 20,
            _temp_dir=folder,
        )
        assert processes_of(folder)
        yield ray
        ray.shutdown()
    deadline = time.monotonic() + 60  # workers take a moment to notice the shutdown
    while (remaining := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)
    assert not remaining
    assert not [name for _, name in children_of(os.getpid()) if "raylet" in name or "gcs_server" in name]
