"""Finds and downloads files from the package index that pip is configured with."""

import ast
import base64
import hashlib
import html
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from tests.assets.lock import AssetError, Package

CHUNK = 1 << 18
ATTEMPTS = 4
TIMEOUT_S = 120.0

Progress = Callable[[int], None]
"""Called with the number of new bytes (negative if an attempt starts over)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """pip's settings for reaching the index."""

    indexes: tuple[str, ...]
    cert: str | None
    trusted_hosts: frozenset[str]


def _interpreters() -> Iterator[str]:
    """Interpreters that may have pip: this one first (a venv made by uv has none), then those on PATH."""
    yield sys.executable
    for name in ("python3", "python"):
        if path := shutil.which(name):
            yield path


def _ask_pip(*arguments: str) -> str | None:
    """The output of the first interpreter that succeeds, or None if none does."""
    for python in dict.fromkeys(_interpreters()):
        try:
            completed = subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if completed.returncode == 0:
            return completed.stdout
    return None


def _pip_options() -> dict[str, str]:
    """pip's effective options by long name, least binding first: global, download, environment."""
    sections: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in (_ask_pip("-m", "pip", "config", "list") or "").splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.partition(".")
        if section in sections:
            sections[section][option] = str(ast.literal_eval(value))
    for name, value in os.environ.items():
        if name.startswith("PIP_") and value:
            sections[":env:"][name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return sections["global"] | sections["download"] | sections[":env:"]


def _default_index() -> str:
    """uv's index if one is set, else pip's default. Raises AssetError if there is neither."""
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    if not index:
        index = _ask_pip("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)")
    if not index:
        raise AssetError("no package index known: no interpreter on PATH has pip; set PIP_INDEX_URL")
    return index.strip()


@cache
def settings() -> Settings:
    """pip's settings, read once per process."""
    options = _pip_options()
    indexes = [options.get("index-url") or _default_index(), *options.get("extra-index-url", "").split()]
    return Settings(
        indexes=tuple(url.rstrip("/") + "/" for url in indexes),
        cert=options.get("cert"),
        trusted_hosts=frozenset(options.get("trusted-host", "").split()),
    )


def _open(url: str, accept: str = "*/*") -> IO[bytes]:
    """Open a URL as pip would: its certificate, its trusted hosts, credentials written into the URL."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(urllib.request.url2pathname(parts.path))
        return (path / "index.html" if path.is_dir() else path).open("rb")
    headers = {"User-Agent": "tokentrace-tests", "Accept": accept}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    context = ssl.create_default_context(cafile=settings().cert)
    if {parts.hostname, f"{parts.hostname}:{parts.port}"} & settings().trusted_hosts:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opened: IO[bytes] = urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S, context=context
    )
    return opened


def _links(page: bytes) -> list[str]:
    """The file addresses on a project's index page, in either of the two standard forms."""
    text = page.decode()
    if text.lstrip().startswith("{"):
        return [str(entry["url"]) for entry in json.loads(text)["files"]]
    return [html.unescape(link) for link in re.findall(r"""<a\b[^>]*\bhref=["']([^"']+)""", text)]


def _locate(package: Package) -> Iterator[str]:
    """Addresses of the file, one for each configured index that has it."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    for index in settings().indexes:
        page_url = f"{index}{package.project}/"
        try:
            with _open(page_url, accept) as page:
                links = _links(page.read())
        except OSError:
            continue
        for link in links:
            address = urldefrag(urljoin(page_url, link)).url
            if unquote(address.rpartition("/")[2]) == package.filename:
                yield _with_credentials(address, index)
                break


def _with_credentials(address: str, index: str) -> str:
    """The address, with the index's own credentials when both are on the same host."""
    there, here = urlsplit(address), urlsplit(index)
    if here.username is None or there.username is not None or there.hostname != here.hostname:
        return address
    return urlunsplit(there._replace(netloc=f"{here.netloc.rpartition('@')[0]}@{there.netloc}"))


def download(package: Package, target: Path, progress: Progress) -> None:
    """Write the pinned file to `target`. Raises AssetError if its sha256 is not the pinned one."""
    problem = "none of the configured indexes lists it"
    for _ in range(ATTEMPTS):
        for address in _locate(package):
            arrived, digest = 0, hashlib.sha256()
            try:
                with _open(address) as response, target.open("wb") as out:
                    while chunk := response.read(CHUNK):
                        out.write(chunk)
                        digest.update(chunk)
                        arrived += len(chunk)
                        progress(len(chunk))
            except (OSError, HTTPException) as error:
                problem = f"the download broke off: {error}"
            else:
                if digest.hexdigest() == package.sha256:
                    return
                problem = f"sha256 is {digest.hexdigest()}, pinned is {package.sha256}"
            progress(-arrived)
    target.unlink(missing_ok=True)
    raise AssetError(f"{package.filename} ({package.project} {package.version}): {problem}")
