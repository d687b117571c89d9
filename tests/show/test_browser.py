"""The viewer in a real browser: it copes with a hundred thousand tokens, and no content runs."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Chromium
from tests.browser import Page as Tab
from tests.guides import ROOT
from tests.pages import EVIL
from tests.show.results import RENDERER, RESULTS, histories, rendering, trajectory
from tests.show.test_views import hostile
from tokentrace import Trajectory
from tokentrace.show import show

DRAWN = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(true))))"


@pytest.fixture
def opened(browser: Chromium, tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    """Open a result's page from disk; at the end, check that there was no error and no other request."""
    contexts = contextlib.ExitStack()
    pages: list[Tab] = []

    def open_page(result: Any, place: str = "", **window: Any) -> Tab:
        path = tmp_path / f"{len(pages)}.html"
        show(result, tokenizer=RENDERER, title=EVIL).save(path)
        page = contexts.enter_context(browser.page(**window))
        pages.append(page)
        page.open(path.as_uri() + place)
        page.until("document.documentElement.dataset.ready === ''")
        page.until(DRAWN)
        return page

    with contexts:
        yield open_page
        assert [page.problems() for page in pages] == [[]] * len(pages)
        assert [url for page in pages for url in page.requested() if not url.startswith("file:")] == []


def press(page: Tab, key: str, **more: Any) -> None:
    text = {"text": key} if len(key) == 1 else {}
    for kind in ("keyDown", "keyUp"):
        page.send("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}), **more)


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_is_shown_whole(opened: Callable[..., Tab], name: str) -> None:
    result = RESULTS[name]()
    page = opened(result)
    page.until("document.querySelector('.tokens .row s > *')")
    assert page.evaluate("document.querySelector('h1').textContent").startswith("</script><img src=x onerror=alert(1)>")
    assert page.evaluate("document.querySelectorAll('img, iframe').length") == 0


def test_the_tokens_on_the_page_are_those_of_the_rendering(opened: Callable[..., Tab]) -> None:
    rendered = rendering()
    page = opened(rendered)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # printing draws every row
    page.until(f"document.querySelectorAll('.tokens s > *').length === {len(rendered)}")
    text = page.evaluate(
        "[...document.querySelectorAll('.tokens s > *')].map((token) => { const own = token.cloneNode(true);"
        " own.querySelectorAll('u:not(.blank)').forEach((sign) => sign.remove()); return own.textContent; }).join('')"
    )
    assert text == rendered.text
    sampled = page.evaluate("document.querySelectorAll('.tokens s.on > *').length")
    assert sampled == int(rendered.mask.sum())
    assert page.evaluate("document.querySelectorAll('.tokens s > b').length") == int(rendered.control.sum())


def test_of_a_hundred_thousand_tokens_only_a_few_are_drawn(opened: Callable[..., Tab]) -> None:
    texts = [f"Part {turn}: the answer is {turn * 7}, as ever. " * 12 for turn in range(260)]
    roles = ("user", "assistant")
    rendered = RENDERER.render([{"role": role, "content": text} for text in texts for role in roles])
    assert len(rendered) > 100_000
    page = opened(rendered)
    page.until("document.querySelector('.tokens .row s')")
    assert f"{len(rendered):,}" in page.text()
    assert page.evaluate("document.querySelectorAll('*').length") < 8_000
    # the end, by a position in the address
    page.evaluate(f"location.hash = 'track=0&at={len(rendered) - 3}'")
    page.until("document.querySelector('.tokens .at')")
    page.until(f"document.querySelector('.panel').textContent.includes('{len(rendered) - 3:,}')")
    page.until("document.querySelector('.at').getBoundingClientRect().top < innerHeight")
    assert page.evaluate("document.querySelectorAll('*').length") < 16_000
    # a search scrolls to a distant hit
    page.evaluate("document.querySelector('input[type=search]').focus()")
    page.send("Input.insertText", text="part 123: the ANSWER")
    page.until("document.querySelector('.hits').textContent.endsWith('of 24')")
    page.until("document.querySelector('.hit.now')?.getBoundingClientRect().top < innerHeight")
    hit = page.evaluate("[...document.querySelectorAll('.hit.now')].map((token) => token.textContent).join('')")
    assert "Part 123: the answer" in hit
    press(page, "Enter")
    page.until("/^\\d+ of 24$/.test(document.querySelector('.hits').textContent)")
    # the rail follows, and jumps
    page.until("document.querySelector('.rail [aria-current]')")
    third = "[...document.querySelectorAll('BOX')].find((one) => one.querySelector('b')?.textContent === '3')"
    button = third.replace("BOX", ".rail li button")  # the rail may still be following the search
    page.until(f"(document.querySelector('.messages').scrollTop = 0, {button} && ({button}.click(), true))")
    page.until("document.querySelector('.panel') && location.hash.includes('at=')")
    page.until(f"{third.replace('BOX', '.row .gutter')}.getBoundingClientRect().top < 200")


def test_the_panel_describes_a_token_and_keys_move_on(opened: Callable[..., Tab]) -> None:
    rendered = rendering()
    place = rendered.turns[0].start
    page = opened(rendered, f"#track=0&at={place}")
    page.until("!document.querySelector('.panel').hidden")
    token = rendered[place]
    panel = page.evaluate("document.querySelector('.panel').innerText")
    for word in (str(token.id), f"{token.message} ({token.role})", token.field, "yes"):
        assert word in panel
    press(page, "ArrowRight", windowsVirtualKeyCode=39)
    page.until(f"location.hash === '#track=0&at={place + 1}'")
    press(page, "j")
    page.until(f"document.querySelector('.panel') && !location.hash.endsWith('at={place + 1}')")
    press(page, "/")
    page.until("document.activeElement === document.querySelector('input[type=search]')")
    press(page, "Escape", windowsVirtualKeyCode=27)
    page.until("document.querySelector('.panel').hidden")


def test_colours_folding_and_copying(opened: Callable[..., Tab]) -> None:
    rendered = rendering()
    page = opened(rendered)
    page.evaluate(
        "[...document.querySelectorAll('.views button')].find((one) => one.textContent === 'Sampled').click()"
    )
    page.until("document.querySelector('.stream').dataset.view === 'mask'")
    page.evaluate("document.querySelector('.legend [data-kind=user]').click()")
    page.until("document.querySelector('.stream').dataset.only === 'user'")
    row = "[...document.querySelectorAll('.row')].find((one) => one.querySelector('.gutter b')?.textContent === '1')"
    page.until(row)
    page.evaluate(f"{row}.querySelector('.fold').click()")
    page.until(f"!{row}.querySelector('s') && {row}.querySelector('.preview')")
    page.evaluate(f"{row}.querySelector('.fold').click()")
    page.until(f"{row}.querySelector('s')")
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.evaluate(f"{row}.querySelector('.copy-ids').click()")
    page.until("window.copied")
    expected = [token.id for token in rendered if token.message == 1]
    assert page.evaluate("JSON.parse(window.copied)") == expected


def test_a_tree_leads_to_its_branches(opened: Callable[..., Tab]) -> None:
    record = trajectory()
    page = opened(record)
    assert page.evaluate("document.querySelectorAll('.tree .turn').length") == 3
    assert page.evaluate("document.querySelector('.tree .lane.chosen').dataset.branch") == "1"
    page.evaluate("document.querySelector('.tree .turn[data-turn=\"1\"]').dispatchEvent(new MouseEvent('click'))")
    page.until("document.querySelector('.stream h2').textContent === 'branch 0'")
    page.until(f"location.hash === '#track=0&at={record.turns(0)[1].start}'")
    names = page.evaluate("[...document.querySelectorAll('.views button')].map((one) => one.textContent)")
    assert names == ["Kind", "Message", "Sampled", "Logprob", "Version"]


def test_every_branch_of_a_deep_tree_is_its_stream(opened: Callable[..., Tab]) -> None:
    """Nested branches, each of which starts inside the sampled tokens of its parent."""
    record = Trajectory(logprobs=True)
    record.begin([5, 6, 7, 8])
    for turn in range(30):
        ids = [100 + turn, 200 + turn, 300 + turn]
        record.append_completion(ids, [-0.1 * turn, -0.2, -0.3], finish_reason="stop", version=turn // 7)
        record.branch([*record.stream()[: len(record) - 1 - turn % 2].tolist(), 9 + turn], cause="retry")
    page = opened(record)
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    for branch in (30, 0, 17, 29):
        page.evaluate(f"window.copied = null, location.hash = 'track={branch}'")
        page.until(f"document.querySelector('.stream h2').textContent.startsWith('branch {branch}')")
        page.evaluate("[...document.querySelectorAll('.bar > .plain')].at(-1).click()")
        page.until("window.copied")
        assert page.evaluate("JSON.parse(window.copied)") == record.stream(branch).tolist()
        marked = int(record.table(branch).mask.sum())
        page.until(f"document.querySelectorAll('.tokens s.on > *').length === {marked}")


def test_a_difference_shows_both_sides_and_opens_equal_parts(opened: Callable[..., Tab]) -> None:
    report = histories(6)
    page = opened(report)
    page.until("document.querySelector('.tokens s.out, .tokens s.new')")
    page.evaluate("[...document.querySelectorAll('td .link')].at(-1).click()")
    page.until("document.querySelector('.stream h2').textContent.startsWith('step 5')")
    removed = sum(one.stop - one.start for one in report.steps[-1].compare("rollout", "training"))
    page.until(f"document.querySelectorAll('.tokens s.out > *').length === {removed}")
    page.evaluate("document.querySelector('.gap')?.click()")
    page.until(DRAWN)
    press(page, "]")
    page.until("document.querySelector('.tokens .at')?.closest('s').matches('.out, .new')")


def test_hostile_texts_stay_texts(opened: Callable[..., Tab]) -> None:
    page = opened(hostile())
    page.until("document.querySelector('.tokens .row s')")
    assert "<img src=x onerror=alert(1)>" in page.text()
    assert not {"\u202e", "\x1b", "\u2028", "\x00"} & set(
        page.evaluate("document.body.textContent.replace(document.getElementById('document').textContent, '')")
    )
    assert page.evaluate("document.querySelectorAll('img, iframe, style').length") == 1
    for place in ("#track=99&at=-5", "#diff=<img>", "#q=%3Cimg%20src&at=zz", "#%00"):
        page.evaluate(f"location.hash = {place!r}")
        page.until(DRAWN)


def test_the_policy_is_in_force(browser: Chromium, tmp_path: Path) -> None:
    """Run what a hostile text would run if it became part of the page."""
    with browser.page() as page:
        page.open(show(rendering()).save(tmp_path / "page.html").as_uri())
        page.until("document.documentElement.dataset.ready === ''")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 3\">')")
        page.evaluate(
            "const s = document.createElement('script'); s.text = 'window.hacked = 4'; document.body.append(s)"
        )
        page.until("document.images[0].complete")
        assert page.evaluate("window.hacked") is None
        assert any("Content Security Policy" in problem for problem in page.problems())


def test_the_search_of_the_site_works_in_a_page_from_disk(browser: Chromium, tmp_path: Path) -> None:
    """A page from disk cannot start a worker: the replacement answers as a worker does."""
    shutil.copy(ROOT / "docs" / "offline.js", tmp_path)
    (tmp_path / "worker.js").write_text("addEventListener('message', (told) => postMessage(told.data * 2))")
    script = """const worker = new Worker("worker.js");
        worker.addEventListener("message", (told) => document.body.append(`it is ${told.data}`));
        worker.postMessage(21);"""
    (tmp_path / "page.html").write_text(f"<body><script src=offline.js></script><script>{script}</script>")
    with browser.page() as page:
        page.open((tmp_path / "page.html").as_uri())
        page.until("document.body.innerText === 'it is 42'")
        assert page.problems() == []


def in_the_frame(browser: Chromium, page: Tab, script: str) -> object:
    """The value of a script in the page's only frame; None while the frame is missing or being replaced."""
    targets = browser.send("Target.getTargets", filter=[{}])["targetInfos"]
    for frame in (one["targetId"] for one in targets if one["type"] == "iframe"):
        inside = Tab(browser, browser.send("Target.attachToTarget", targetId=frame, flatten=True)["sessionId"])
        return inside.evaluate(script)
    for child in page.send("Page.getFrameTree")["frameTree"].get("childFrames", ()):
        world = page.send("Page.createIsolatedWorld", frameId=child["frame"]["id"])["executionContextId"]
        reply = page.send("Runtime.evaluate", expression=script, contextId=world, returnByValue=True)
        return reply["result"].get("value")
    return None


def test_a_notebook_shows_the_page_in_a_frame(browser: Chromium, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{rendering()._repr_html_()}", encoding="utf-8")
    with browser.page() as page:
        page.open(path.as_uri())
        click = "document.querySelector('.tokens s > *').click()"
        for condition in (
            "document.querySelectorAll('.tokens s').length > 10",
            f"{click}, !document.querySelector('.panel').hidden",
        ):
            for _ in range(1000):
                with contextlib.suppress(RuntimeError):  # the frame was replaced during the call
                    if in_the_frame(browser, page, condition):
                        break
                page.until(DRAWN)
            else:
                pytest.fail(f"in the frame, this did not become true: {condition}")
        assert page.problems() == []


@pytest.mark.parametrize("width", [400, 900, 1400])
def test_pages_fit_the_window(opened: Callable[..., Tab], width: int) -> None:
    for result in (hostile(), trajectory(), histories(), RESULTS["check"]()):
        page = opened(result, width=width, height=800, mobile=width < 500)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
