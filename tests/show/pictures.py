"""The picture of docs/viewer.md, made from the shipped example: python -m tests.show.pictures."""

import sys
import tempfile
from pathlib import Path

from tests.browser import chromium
from tests.show.results import rendering
from tokentrace.show import show


def main(folder: Path) -> None:
    """Write the picture into a folder."""
    with tempfile.TemporaryDirectory() as place, chromium() as browser, browser.page(width=1280, height=800) as page:
        path = show(rendering(), title="Which city has more people?").save(Path(place) / "page.html")
        page.open(f"{path.as_uri()}#track=0&at=273")
        page.until("!document.querySelector('.panel').hidden")
        page.evaluate(
            "dispatchEvent(new Event('wheel')), document.querySelector('.row[data-start=\"236\"]').scrollIntoView()"
        )
        page.until("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(true))))")
        page.shot(folder / "viewer.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
