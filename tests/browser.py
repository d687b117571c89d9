"""A headless Chromium, driven over a pipe with the protocol of its own developer tools: no driver, no port."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "no Chromium on this machine: put chromium, chromium-browser or google-chrome on the PATH (make browser)"
_PATIENCE = 120.0
_OTHER_PAGE = ("navigated or closed", "context was destroyed", "find context")
_WAIT = """(async () => {
  const last = performance.now() + 1000 * SECONDS;
  while (performance.now() < last) {
    try { if (await (CONDITION)) return true; } catch {}
    await new Promise((go) => setTimeout(go, 20));
  }
  return false;
})()"""


class NoBrowserError(Exception):
    """No Chromium is installed, or it does not start; the message says which, with its stderr."""


class Chromium:
    """A browser process, used for one page at a time."""

    def __init__(self, to: BinaryIO, back: BinaryIO) -> None:
        self._to, self._back = to, back
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[Any]] = {}
        self.events: list[tuple[str, Any]] = []
        self._gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        partial = b""
        while chunk := self._back.read1(1 << 16):
            *whole, partial = (partial + chunk).split(b"\0")
            for raw in whole:
                message = json.loads(raw)
                if "id" in message:
                    self._answers[message["id"]].put(message)
                else:
                    self.events.append((message["method"], message.get("params")))
        self._gone = True
        for waiting in list(self._answers.values()):
            waiting.put({"error": {"message": "the browser is gone"}})

    def send(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = queue.Queue()
        if self._gone:
            raise RuntimeError(f"{method}: the browser is gone")
        command = {"id": number, "method": method, "params": parameters}
        self._to.write(json.dumps(command if session is None else {**command, "sessionId": session}).encode() + b"\0")
        self._to.flush()
        answer = self._answers[number].get(timeout=_PATIENCE)
        del self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    @contextlib.contextmanager
    def page(self, *, width: int = 1280, height: int = 800, mobile: bool = False) -> Iterator[Page]:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        page.seen = len(self.events)
        try:
            yield page
        finally:
            self.send("Target.closeTarget", targetId=target)


@dataclass
class Page:
    """A tab."""

    browser: Chromium
    session: str
    seen: int = 0

    def send(self, method: str, **parameters: Any) -> Any:
        return self.browser.send(method, self.session, **parameters)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        response = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in response:
            raise RuntimeError(response["exceptionDetails"].get("exception", response["exceptionDetails"]))
        return response["result"].get("value")

    def until(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true. It is polled, also across a navigation to another page."""
        last = time.monotonic() + seconds
        value = None
        while value is None:
            left = max(0.0, last - time.monotonic())
            script = _WAIT.replace("CONDITION", condition).replace("SECONDS", str(left))
            try:
                value = self.evaluate(script)
            except RuntimeError as error:
                if not left or not any(words in str(error) for words in _OTHER_PAGE):
                    raise
        assert value, f"{condition} did not become true; the page says: {self.text()[:2000]}"

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[str]:
        """Problems of the page: exceptions, errors on the console, violations of its policy."""
        problems = []
        for method, params in self.browser.events[self.seen :]:
            if method == "Runtime.exceptionThrown":
                problems.append(json.dumps(params["exceptionDetails"])[:500])
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                problems.append(json.dumps(params["args"])[:500])
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                problems.append(f"{params['entry']['text']} {params['entry'].get('url')}")
            elif method == "Page.javascriptDialogOpening":
                problems.append(f"a dialog: {params['message']}")
        return problems

    def requested(self) -> list[str]:
        """Every URL that the page requested."""
        events = self.browser.events[self.seen :]
        return [params["request"]["url"] for method, params in events if method == "Network.requestWillBeSent"]


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """Run a browser with a fresh profile. Raises NoBrowserError if there is none, or it does not start."""
    if CHROMIUM is None:
        raise NoBrowserError(NO_CHROMIUM)
    down, up = os.pipe(), os.pipe()
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio",
        "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile() as stderr:
        shell = f'exec "$@" 3<&{down[0]} 4>&{up[1]}'
        command = ["bash", "-c", shell, "-", CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, pass_fds=(down[0], up[1]), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        os.close(down[0])
        os.close(up[1])
        with os.fdopen(down[1], "wb") as to, os.fdopen(up[0], "rb") as back:
            browser = Chromium(to, back)
            try:
                try:
                    browser.send("Browser.getVersion")
                except (RuntimeError, OSError, queue.Empty) as error:
                    stderr.seek(0)
                    output = stderr.read().decode(errors="replace").strip()[-1000:]
                    raise NoBrowserError(f"{CHROMIUM} is here, but does not start: {output or error}") from error
                yield browser
            finally:
                with contextlib.suppress(Exception):
                    browser.send("Browser.close")
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
