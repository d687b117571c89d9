"""Fetching: the configured index is used, wrong bytes are refused, concurrent runs share one download."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.assets import AssetError, index, packages, store
from tests.assets.packages import Package

WHEEL = "demo-1.0-py3-none-any.whl"
SDIST = "demo-1.0.tar.gz"
Publish = Callable[[str, bytes], str]


def wheel_bytes() -> bytes:
    """A wheel with one member."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("demo/data.txt", "from the wheel")
    return buffer.getvalue()


def sdist_bytes() -> bytes:
    """An sdist with one member under its top folder."""
    buffer, content = io.BytesIO(), b"from the sdist"
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("demo-1.0/demo/data.txt")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Puts a file on an index of its own, in an empty cache, as package `demo`; returns its sha256."""
    monkeypatch.setenv("TOKENTRACE_ASSETS", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", (tmp_path / "nowhere").as_uri())
    index.settings.cache_clear()
    store.package_member.cache_clear()

    def put(filename: str, content: bytes) -> str:
        page = tmp_path / "index" / "demo" / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        (page.parent / filename).write_bytes(content)
        page.write_text(f'<a href="other-{filename}">no</a><a href="{filename}#sha256=0">{filename}</a>')
        digest = hashlib.sha256(content).hexdigest()
        package = Package("demo", "1.0", filename, len(content), digest)
        monkeypatch.setitem(packages.PACKAGES, "demo", package)
        return digest

    yield put
    index.settings.cache_clear()
    store.package_member.cache_clear()


@pytest.mark.parametrize(("filename", "content"), [(WHEEL, wheel_bytes()), (SDIST, sdist_bytes())])
def test_member_comes_from_the_configured_index(publish: Publish, filename: str, content: bytes) -> None:
    publish(filename, content)
    kind = "wheel" if filename == WHEEL else "sdist"
    assert store.package_member("demo", "demo/data.txt") == f"from the {kind}".encode()
    with pytest.raises(AssetError, match="no member"):
        store.package_member("demo", "demo/other.txt")


def test_wrong_bytes_are_refused_and_leave_nothing(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(WHEEL, wheel_bytes())
    pinned = packages.PACKAGES["demo"]
    wrong = Package(pinned.project, pinned.version, pinned.filename, pinned.size, "0" * 64)
    monkeypatch.setitem(packages.PACKAGES, "demo", wrong)
    arrived: list[int] = []
    with pytest.raises(AssetError, match="sha256 is"):
        store.fetch_package("demo", arrived.append)
    assert sum(arrived) == 0
    assert list((tmp_path / "cache" / "packages").iterdir()) == []


def test_a_file_that_no_index_lists_is_reported(publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(WHEEL, wheel_bytes())
    missing = Package("demo", "2.0", "demo-2.0-py3-none-any.whl", 1, "0" * 64)
    monkeypatch.setitem(packages.PACKAGES, "demo", missing)
    with pytest.raises(AssetError, match=r"demo-2\.0.*none of the configured indexes lists it"):
        store.fetch_package("demo")


def test_concurrent_fetches_download_once(publish: Publish) -> None:
    content = wheel_bytes()
    publish(WHEEL, content)
    arrived: list[int] = []
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: store.fetch_package("demo", arrived.append), range(8)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == content
    assert sum(arrived) == len(content)


def test_index_pages_in_both_forms() -> None:
    html = b'<!DOCTYPE html><a href="../a-1.whl#sha256=1" data-x="&gt;">a</a><p><a>none</a>'
    json_page = b'{"files": [{"filename": "a-1.whl", "url": "../a-1.whl"}]}'
    assert index._links(html) == ["../a-1.whl#sha256=1"]
    assert index._links(json_page) == ["../a-1.whl"]


def test_environment_binds_more_than_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "global.index-url='file:///configured'\nglobal.cert='/c.pem'\ndownload.trusted-host='a b'\n"
    monkeypatch.setattr(index, "_ask_pip", lambda *_: listing)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)
    configured = index.settings.__wrapped__()
    assert configured == index.Settings(("file:///configured/",), "/c.pem", frozenset({"a", "b"}))
    monkeypatch.setenv("PIP_INDEX_URL", "file:///environment/")
    assert index.settings.__wrapped__().indexes == ("file:///environment/",)


def test_credentials_follow_only_to_the_index_host() -> None:
    with_login = "https://me:secret@index.invalid/simple/"
    same, other = "https://index.invalid/f/a.whl", "https://files.invalid/f/a.whl"
    assert index._with_credentials(same, with_login) == "https://me:secret@index.invalid/f/a.whl"
    assert index._with_credentials(other, with_login) == other
