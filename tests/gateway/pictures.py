"""Makes the picture of docs/gateway.md from a recorded session: python -m tests.gateway.pictures."""

import sys
from pathlib import Path

from tests.browser import chromium
from tests.conversations import user
from tests.gateway.server import gateway_server
from tests.gateway.story import Script, hostile, interesting, says, talk


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    script = Script()
    with gateway_server(script.engine) as served, chromium() as browser:
        for number in range(18, 26):
            id, words = f"invoices-{number}", "an invoice was paid late " * number
            served.call("POST", "/sessions", {"id": id, "metadata": {"split": "train", "try": 1}})
            turns = ((user(f"{at}: {words}"), says(f"Noted: {at}.")) for at in range(1 + number % 5))
            talk(served, script, id, [], *turns)
            served.call("POST", f"/sessions/{id}/rewards", {"reward": [0, 0.5, 1][number % 3]})
        hostile(served, script, "fuzzed-texts")
        metadata = {"task": "March and April", "split": "train", "try": 2}
        served.call("POST", "/sessions", {"id": "invoices-17", "metadata": metadata})
        interesting(served, script, "invoices-17")
        served.call("POST", "/sessions/invoices-17/rewards", {"rewards": [{"reward": 1.0}]})
        with browser.page(width=1280, height=720) as page:
            page.open(f"{served.url}/#/invoices-17/turns/8")
            page.until("document.querySelector('.text s.chosen') && document.querySelector('aside .message')")
            page.evaluate("dispatchEvent(new Event('wheel')), document.getElementById('main').scrollTop = 0")
            page.until("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(true))))")
            page.shot(folder / "gateway-page.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
