"""The page at ``/``: its data, its security policy, and what a real browser shows."""

import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import Chromium
from tests.gateway.server import Served, gateway_server
from tests.gateway.story import HOSTILE, Script, hostile, interesting
from tokentrace.gateway.page.routes import page_files


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def served(script: Script) -> Iterator[Served]:
    with gateway_server(script.engine) as server:
        metadata = {"task": "invoices-17", "<b>note</b>": HOSTILE}
        server.call("POST", "/sessions", {"id": "interesting", "metadata": metadata, "settings": {"max_turns": 50}})
        interesting(server, script)
        server.call("POST", "/sessions/interesting/rewards", {"rewards": [{"reward": 0.5}, {"reward": 1, "turn": 2}]})
        hostile(server, script)
        server.call("POST", "/sessions", {"id": "empty"})
        yield server


def get(served: Served, path: str) -> Any:
    status, value = served.call("GET", path)
    assert status == 200, value
    return value


def test_nothing_may_run_or_load_but_the_page_itself(served: Served) -> None:
    for path in ("/", *(f"/page/{name}" for name in page_files())):
        with urllib.request.urlopen(served.url + path) as answer:
            headers = answer.headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
            "img-src": "'self' data:", "frame-ancestors": "'none'", "base-uri": "'none'", "form-action": "'none'",
        }  # fmt: skip
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_files_load_nothing_from_elsewhere_and_write_no_html() -> None:
    for name, raw in page_files().items():
        text = raw.decode().replace('xmlns="http://www.w3.org/2000/svg"', "").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=\"|style=\"", text), name


@pytest.mark.parametrize("name", ["routes.py", "..%2froutes.py", "%2e%2e/app.py", "__init__.py", "none.js"])
def test_only_the_files_of_the_page_are_served(served: Served, name: str) -> None:
    assert served.call("GET", f"/page/{name}")[0] == 404


def test_the_tokens_of_a_branch_are_those_of_the_record(served: Served) -> None:
    record = served.record("interesting")
    trajectory = record.trajectory
    for branch in range(trajectory.num_branches):
        tokens = get(served, f"/sessions/interesting/tokens?branch={branch}")
        assert tokens["ids"] == trajectory.stream(branch).tolist()
        assert tokens["total"] == tokens["stop"] == len(tokens["ids"]) == len(tokens["texts"])
        kinds = [piece["kind"] for piece in tokens["pieces"] for _ in range(piece["stop"] - piece["start"])]
        assert [kind == "sampled" for kind in kinds] == trajectory.table(branch).mask.tolist()
        assert [value is not None for value in tokens["logprobs"]] == [kind == "sampled" for kind in kinds]
        owners = [piece["message"] for piece in tokens["pieces"] for _ in range(piece["stop"] - piece["start"])]
        assert [-1 if owner is None else owner for owner in owners] == trajectory.table(branch).messages.tolist()
        assert sum(tokens["counts"].values()) == tokens["total"]
        assert tokens["roles"]["0"] == "system"
        for piece in tokens["pieces"]:
            assert (piece["turn"] is not None) == (piece["kind"] == "sampled")
            if piece["turn"] is not None:
                turn = record.turns[piece["turn"]]
                assert turn.start <= piece["start"] < piece["stop"] <= turn.stop


def test_a_turn_has_its_new_messages_and_the_cause_of_its_branch(served: Served) -> None:
    state = served.state("interesting")
    causes = {turn["cause"]["cause"]: turn["turn"] for turn in state["tree"] if turn["cause"]}
    assert set(causes) == {"retry", "sub_agent", "trimmed_results", "compaction"}
    details = get(served, f"/sessions/interesting/turns/{causes['trimmed_results']}")
    assert details["cause"]["message"] == 3
    assert details["messages"][0]["content"] == "1638.5 [trimmed]"
    assert details["kept"] == 3
    assert details["reply"]["content"] == "Adding both."
    assert details["tools"] == ["compute"]
    assert details["versions"][0][0] == "step-120"
    assert details["sampling"]["max_tokens"] > 0
    repaired = next(turn["turn"] for turn in state["tree"] if turn["repairs"])
    assert any(
        "written another way" in repair for repair in get(served, f"/sessions/interesting/turns/{repaired}")["repairs"]
    )
    assert get(served, "/sessions/interesting/turns/2")["labels"] == [{"name": "reward", "value": 1, "turn": 2}]


def test_a_session_is_shown_with_its_tree_and_tokens(served: Served, browser: Chromium) -> None:
    state = served.state("interesting")
    with browser.page() as page:
        page.open(f"{served.url}/#/interesting")
        page.until("document.querySelector('.text s')")
        assert page.evaluate("document.querySelectorAll('.tree .turn').length") == state["turns"]
        labels = page.evaluate("[...document.querySelectorAll('.tree .why .name')].map((each) => each.textContent)")
        assert sorted(labels) == ["0 first branch", "1 retry", "2 sub agent", "3 trimmed results", "4 compaction"]
        # the branch with the newest turn is shown
        assert page.evaluate("document.querySelector('.lane.chosen').dataset.branch") == "4"
        assert "branch 4" in page.evaluate("document.querySelector('.stream h2').textContent")
        # a click on a turn shows it, its branch, and its tokens
        page.evaluate("document.querySelector('.tree .turn[data-turn=\"8\"]').dispatchEvent(new MouseEvent('click'))")
        page.until("document.querySelector('aside:not([hidden]) h2')?.textContent.startsWith('Turn 8')")
        page.until("document.querySelector('.text s.chosen')")
        panel = page.evaluate("document.querySelector('aside').innerText")
        assert "An old tool result was cut." in panel
        assert "1638.5 [trimmed]" in panel
        selected = page.evaluate(
            "[...document.querySelectorAll('.text s.k-sampled.chosen')].map((s) => s.textContent).join('')"
        )
        tokens = get(served, "/sessions/interesting/tokens?branch=3")
        turn = state["tree"][8]
        assert selected.replace("⏎", "") == "".join(tokens["texts"][turn["start"] : turn["stop"]])
        # arrow keys go from turn to turn
        page.evaluate("document.querySelector('.tree .turn.chosen').focus()")
        for kind in ("keyDown", "keyUp"):
            page.send(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
        page.until("location.hash === '#/interesting/turns/9'")
        assert page.problems() == []


def test_hostile_texts_stay_texts(served: Served, browser: Chromium) -> None:
    with browser.page() as page:
        for place in (
            "#/hostile/turns/0",
            "#/interesting",
            "#/%3Cimg%20src=x%20onerror=alert(1)%3E",
            "#/<script>/turns/1",
        ):
            page.open(f"{served.url}/{place}")
            page.until("document.querySelector('main h1')")
            if "hostile" in place:
                page.until("document.querySelector('.text s') && document.querySelector('aside .message')")
                assert "<script>window.hacked = 1</script>" in page.text()
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('img, iframe, main script, aside script').length") == 0
        assert page.problems() == []
        assert [url for url in page.requested() if not url.startswith(served.url)] == []
