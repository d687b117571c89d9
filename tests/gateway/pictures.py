"""The pictures of docs/gateway.md, made from a session that is really recorded: python -m tests.gateway.pictures."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser import chromium
from tests.gateway.server import gateway_server
from tests.gateway.story import Script, hostile, interesting, many_turns

_TREE = r"""(() => {
  // the tree as a file of its own: what the style sheet says of each element is written into it
  const original = document.querySelector('.tree svg');
  const copy = original.cloneNode(true);
  const part = (number) => Math.round(number * 255);
  const rgb = (value) => value.replace(/color\(srgb ([\d.]+) ([\d.]+) ([\d.]+)(?: \/ ([\d.]+))?\)/g,
    (_, r, g, b, a) => `rgba(${part(r)},${part(g)},${part(b)},${a ?? 1})`);
  const wanted = {rect: ['fill', 'stroke', 'stroke-dasharray'], path: ['fill', 'stroke', 'stroke-width'],
    circle: ['fill'], text: ['fill', 'font-size', 'font-weight', 'text-anchor'], tspan: ['fill', 'font-weight']};
  const from = [...original.querySelectorAll('*')];
  [...copy.querySelectorAll('*')].forEach((node, at) => {
    const style = getComputedStyle(from[at]);
    for (const name of wanted[node.tagName] ?? []) {
      const value = style.getPropertyValue(name);
      if (value !== 'none' || name === 'fill') node.setAttribute(name, rgb(value));
    }
    const needless = ['class', 'role', 'tabindex', 'aria-label', 'data-turn', 'data-branch'];
    for (const name of needless) node.removeAttribute(name);
    if (node.tagName === 'title') node.remove();
  });
  const ground = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
  const look = {width: '100%', height: '100%', rx: 12, fill: '#f7f8fa'};
  for (const [name, value] of Object.entries(look)) ground.setAttribute(name, value);
  copy.prepend(ground);
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  copy.setAttribute('font-family', 'system-ui, sans-serif');
  return copy.outerHTML;
})()"""


def main(folder: Path) -> None:
    """Write the pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Script()
    with gateway_server(script.engine) as served, chromium() as browser:
        for number in range(18, 26):
            served.call("POST", "/sessions", {"id": f"invoices-{number}", "metadata": {"split": "train", "try": 1}})
            many_turns(served, script, f"invoices-{number}", 1 + number % 5, 12 * (number % 7 + 1))
            served.call("POST", f"/sessions/invoices-{number}/rewards", {"reward": [0, 0.5, 1][number % 3]})
        hostile(served, script, "fuzzed-texts")
        metadata = {"task": "March and April", "split": "train", "try": 2}
        served.call("POST", "/sessions", {"id": "invoices-17", "metadata": metadata})
        interesting(served, script, "invoices-17")
        served.call("POST", "/sessions/invoices-17/rewards", {"rewards": [{"reward": 1.0}]})
        with browser.page(width=1280, height=720) as page:
            page.open(f"{served.url}/#/invoices-17/turns/8")
            page.until("document.querySelector('.text s.chosen') && document.querySelector('aside .said')")
            page.evaluate("dispatchEvent(new Event('wheel')), document.getElementById('main').scrollTop = 0")
            page.until("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(true))))")
            page.shot(folder / "gateway-page.png")
            (folder / "gateway-tree.svg").write_text(page.evaluate(_TREE) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
