"""The page at ``/``: what it is told, what its policy allows, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Chromium
from tests.gateway.server import Served, gateway_server
from tests.gateway.story import HOSTILE, Agent, Script, hostile, interesting, says, user
from tokentrace.gateway.keys import Role, add_key
from tokentrace.gateway.page.routes import page_files
from tokentrace.gateway.page.views import TOKENS, _number
from tokentrace.store.store import StoreError
from tokentrace.tokens.visible import visible


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


def ask(served: Served, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(served.url + path, headers=headers or {})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


def got(served: Served, path: str) -> Any:
    status, value = served.call("GET", path)
    assert status == 200, value
    return value


# -- files and policy


def test_nothing_may_run_or_load_but_the_page_itself(served: Served) -> None:
    for path in ("/", *(f"/page/{name}" for name in page_files())):
        status, headers, _ = ask(served, path)
        assert status == 200
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
    assert ask(served, f"/page/{name}")[0] == 404


def test_it_is_for_administrators(script: Script, tmp_path: Path) -> None:

    key = add_key(tmp_path / "keys", Role.ADMIN, "")
    with gateway_server(script.engine, keys=tmp_path / "keys") as server:
        status, headers, _ = ask(server, "/")
        assert status == 401
        assert headers["www-authenticate"].startswith("Basic ")
        server.headers = {"authorization": f"Bearer {key}"}
        session = server.call("POST", "/sessions", {"id": "one"})[1]
        own = {"authorization": f"Bearer {session['key']}"}
        told = {"authorization": "Basic " + base64.b64encode(f"admin:{key}".encode()).decode()}
        for path in ("/", "/page/page.js", "/page/sessions", "/sessions/one/tokens", "/sessions/one/turns/0"):
            assert ask(server, path)[0] == 401
            assert ask(server, path, own)[0] == 403
            assert ask(server, path, told)[0] in (200, 400, 404)
        assert ask(server, "/", told)[0] == 200


# -- what it is told


def test_the_tokens_of_a_branch_are_those_of_the_record(served: Served) -> None:
    live = served.run(served.app.gateway.sessions.get("interesting"))
    trajectory = live.session.trajectory
    for branch in range(trajectory.num_branches):
        told = got(served, f"/sessions/interesting/tokens?branch={branch}")
        assert told["ids"] == trajectory.stream(branch).tolist()
        assert told["total"] == told["stop"] == len(told["ids"]) == len(told["texts"])
        kinds = [piece["kind"] for piece in told["pieces"] for _ in range(piece["stop"] - piece["start"])]
        assert [kind == "sampled" for kind in kinds] == trajectory.loss_mask(branch, once=False).tolist()
        assert [value is not None for value in told["logprobs"]] == [kind == "sampled" for kind in kinds]
        owners = [piece["message"] for piece in told["pieces"] for _ in range(piece["stop"] - piece["start"])]
        assert [-1 if owner is None else owner for owner in owners] == trajectory.message_indices(branch).tolist()
        assert sum(told["counts"].values()) == told["total"]
        assert told["roles"]["0"] == "system"
        for piece in told["pieces"]:
            assert (piece["turn"] is not None) == (piece["kind"] == "sampled")
            if piece["turn"] is not None:
                turn = live.session.turns[piece["turn"]]
                assert turn.start <= piece["start"] < piece["stop"] <= turn.stop


def test_tokens_cut_anywhere_are_the_same(served: Served) -> None:
    whole = got(served, "/sessions/hostile/tokens?stop=700")
    step = 7
    parts = [got(served, f"/sessions/hostile/tokens?start={at}&stop={at + step}") for at in range(0, 700, step)]
    for name in ("ids", "texts", "logprobs"):
        assert [each for part in parts for each in part[name]] == whole[name]
    text = "".join(whole["texts"])
    assert visible(HOSTILE).replace("\u200d", "⟨U+200D⟩") in text, "a joiner that is a token of its own is seen"


def test_an_answer_has_so_many_tokens_and_no_more(served: Served) -> None:
    told = got(served, "/sessions/hostile/tokens?start=0&stop=999999999")
    assert len(told["ids"]) == min(TOKENS, told["total"])
    assert got(served, "/sessions/hostile/tokens?start=99999999")["ids"] == []


def test_a_turn_says_what_was_new_and_why_it_branched(served: Served) -> None:
    state = served.state("interesting")
    causes = {turn["cause"]["cause"]: turn["turn"] for turn in state["tree"] if turn["cause"]}
    assert set(causes) == {"retry", "sub_agent", "trimmed_results", "compaction"}
    told = got(served, f"/sessions/interesting/turns/{causes['trimmed_results']}")
    assert told["cause"]["message"] == 3
    assert told["messages"][0]["content"] == "1638.5 [trimmed]"
    assert told["kept"] == 3
    assert told["reply"]["content"] == "Adding both."
    assert told["tools"] == ["compute"]
    assert told["versions"][0][0] == "step-120"
    assert told["sampling"]["max_tokens"] > 0
    repaired = next(turn["turn"] for turn in state["tree"] if turn["repairs"])
    assert any(
        "written another way" in repair for repair in got(served, f"/sessions/interesting/turns/{repaired}")["repairs"]
    )
    assert got(served, "/sessions/interesting/turns/2")["labels"] == [{"name": "reward", "value": 1, "turn": 2}]


def test_a_turn_that_could_not_be_stored_is_never_shown() -> None:
    """The page asks while the turn is being written, and is answered when that has failed."""
    with gateway_server() as served, ThreadPoolExecutor(2) as threads:
        gateway = served.app.gateway
        asked: list[Any] = []

        async def append(*_: Any, **__: Any) -> None:
            live = gateway.sessions.peek("s")
            listed = await asyncio.to_thread(served.call, "GET", "/page/sessions?session=s")
            assert "tokens" not in listed[1]["chosen"]
            for at, path in enumerate(("turns/0", "tokens"), 1):
                asked.append(threads.submit(served.call, "GET", f"/sessions/s/{path}"))
                while len(live.lock._waiters or ()) < at:
                    await asyncio.sleep(0)
            raise StoreError("no room left")

        gateway.store.append = append  # type: ignore[method-assign]
        body = {"messages": [{"role": "user", "content": "Hello?"}]}
        assert served.call("POST", "/sessions/s/v1/chat/completions", body)[0] == 503
        assert [answer.result(60)[0] for answer in asked] == [404, 400]


def test_the_list_has_the_numbers_of_each_session(served: Served) -> None:
    told = got(served, "/page/sessions?session=interesting")
    state = served.state("interesting")
    listed = {each["id"]: each for each in told["sessions"]}
    assert set(listed) == {"interesting", "hostile", "empty"}
    one = listed["interesting"]
    assert {name: one[name] for name in ("turns", "tokens", "rows", "reward")} == {
        "turns": state["turns"], "tokens": state["tokens"], "rows": state["rows"], "reward": 0.5,
    }  # fmt: skip
    assert one["branches"] == len(state["branches"])
    assert one["last"] == state["tree"][-1]["time"]
    assert told["chosen"]["labels"] == 2
    assert told["counts"]["open"] == 3
    assert [each["id"] for each in got(served, "/page/sessions?search=INVOICES")["sessions"]] == ["interesting"]
    limited = got(served, "/page/sessions?limit=2")
    assert (len(limited["sessions"]), limited["more"]) == (2, True)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/sessions/none/tokens", 404),
        ("/sessions/%3Cscript%3E/tokens", 404),
        ("/sessions/interesting/tokens?branch=99", 400),
        ("/sessions/interesting/tokens?branch=-1", 400),
        ("/sessions/interesting/tokens?start=1e9", 400),
        ("/sessions/interesting/tokens?start=99999999999999999999", 400),
        ("/sessions/interesting/tokens?stop=%D9%A3", 400),
        ("/sessions/empty/tokens", 400),
        ("/sessions/interesting/turns/99", 404),
        ("/sessions/interesting/turns/x", 400),
        ("/page/sessions?state=none", 400),
        ("/page/sessions?limit=-5", 400),
        ("/page/sessions?search=%00%ff&session=%3Cb%3E", 200),
    ],
)  # fmt: skip
def test_bad_questions_are_answered_in_words(served: Served, path: str, status: int) -> None:
    told, body = served.call("GET", path)
    assert told == status, body
    if status != 200:
        assert body["error"]["message"]


# -- in a browser


def test_a_session_is_shown_with_its_tree_and_tokens(served: Served, browser: Chromium) -> None:
    state = served.state("interesting")
    with browser.page() as page:
        page.open(f"{served.url}/#/interesting")
        page.until("document.querySelector('.text s')")
        assert page.evaluate("document.querySelectorAll('.tree .turn').length") == state["turns"]
        labels = page.evaluate("[...document.querySelectorAll('.tree .why .name')].map((each) => each.textContent)")
        assert sorted(labels) == ["0 first branch", "1 retry", "2 sub agent", "3 trimmed results", "4 compaction"]
        # the branch that was written to last is the one that is shown
        assert page.evaluate("document.querySelector('.lane.chosen').dataset.branch") == "4"
        assert "branch 4" in page.evaluate("document.querySelector('.stream h2').textContent")
        # a click on a turn shows it, its branch, and its tokens
        page.evaluate("document.querySelector('.tree .turn[data-turn=\"8\"]').dispatchEvent(new MouseEvent('click'))")
        page.until("document.querySelector('aside:not([hidden]) h2')?.textContent.startsWith('Turn 8')")
        page.until("document.querySelector('.text s.chosen')")
        panel = page.evaluate("document.querySelector('aside').innerText")
        assert "An earlier tool result was shortened or blanked." in panel
        assert "1638.5 [trimmed]" in panel
        shown = page.evaluate(
            "[...document.querySelectorAll('.text s.k-sampled.chosen')].map((s) => s.textContent).join('')"
        )
        ids = got(served, "/sessions/interesting/tokens?branch=3")
        turn = state["tree"][8]
        assert shown.replace("⏎", "") == "".join(ids["texts"][turn["start"] : turn["stop"]])
        # arrow keys go from turn to turn
        page.evaluate("document.querySelector('.tree .turn.chosen').focus()")
        for kind in ("keyDown", "keyUp"):
            page.send(
                "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
            )
        page.until("location.hash === '#/interesting/turns/9'")
        assert page.problems() == []


def test_a_token_says_what_it_is(served: Served, browser: Chromium) -> None:
    with browser.page() as page:
        page.open(f"{served.url}/#/interesting/branches/0")
        page.until("document.querySelector('.text s.k-sampled i')")
        place = page.evaluate("""(() => {
          const token = document.querySelector('.text s.k-sampled i');
          token.scrollIntoView({block: 'center'});
          const box = token.getBoundingClientRect();
          return [box.left + box.width / 2, box.top + box.height / 2];
        })()""")
        page.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        page.until("!document.getElementById('tip').hidden")
        tip = page.evaluate("document.getElementById('tip').innerText")
        first = served.state("interesting")["tree"][0]["start"]
        told = got(served, f"/sessions/interesting/tokens?start={first}&stop={first + 1}")
        for word in (str(told["ids"][0]), "sampled", "2 (assistant)", str(told["logprobs"][0])):
            assert word in tip
        assert page.problems() == []


def test_search_finds_sessions(served: Served, browser: Chromium) -> None:
    with browser.page() as page:
        page.open(served.url)
        page.until("document.querySelectorAll('.list a').length === 3")
        page.evaluate("document.getElementById('search').focus()")
        page.send("Input.insertText", text="invoices")
        page.until("document.querySelectorAll('.list a').length === 1")
        assert page.evaluate("document.querySelector('.list a b').textContent") == "interesting"
        page.send("Input.insertText", text=" of nobody")
        page.until("document.querySelector('.list .none')?.textContent.startsWith('No session fits')")
        assert page.problems() == []


def test_a_session_that_grows_is_seen_to_grow(served: Served, script: Script, browser: Chromium) -> None:
    agent = Agent(served, script, "growing")
    agent.ask(user("one"), reply=says("first"))
    with browser.page() as page:
        page.open(f"{served.url}/#/growing")
        page.until("document.querySelectorAll('.tree .turn').length === 1 && document.querySelector('.text s')")
        agent.ask(user("two"), reply=says("second"))
        page.until("document.querySelectorAll('.tree .turn').length === 2")
        page.until("document.querySelector('.tokens').textContent.includes('second')")
        assert page.problems() == []
    served.call("DELETE", "/sessions/growing")


def test_with_keys_a_browser_logs_in(script: Script, browser: Chromium, tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", Role.ADMIN, "")
    with gateway_server(script.engine, keys=tmp_path / "keys", create_sessions=True) as server:
        server.headers = {"authorization": f"Bearer {key}"}
        agent = Agent(server, script, "secret")
        agent.ask(user("one"), reply=says("first"))
        with browser.page() as page:
            page.open(server.url.replace("://", f"://admin:{key}@") + "/#/secret")
            page.until("document.querySelector('.text s.k-sampled')?.textContent.startsWith('first')")
            assert "pulse" in page.evaluate("document.querySelector('[data-kind=live]').className")


def test_requests_without_a_turn_are_shown_as_such(served: Served, browser: Chromium) -> None:
    store = served.app.gateway.store
    for request in ("r1", "r2"):
        served.run(store.begin("empty", request, {"dialect": "chat", "prompt_tokens": 12}))
    served.run(store.abandon("empty", "r2", "the agent <i>went</i> away"))
    with browser.page() as page:
        page.open(f"{served.url}/#/empty")
        page.until("document.querySelector('.incomplete')")
        shown = page.evaluate("document.querySelector('main').innerText")
        for words in ("2 requests without a turn", "the agent <i>went</i> away", "under way", "No turn yet"):
            assert words in shown
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
                page.until("document.querySelector('.text s') && document.querySelector('aside .said')")
                assert "<script>window.hacked = 1</script>" in page.text()
        assert page.evaluate("window.hacked") is None
        assert page.evaluate("document.querySelectorAll('img, iframe, main script, aside script').length") == 0
        assert page.problems() == []
        assert [url for url in page.requested() if not url.startswith(served.url)] == []


def test_the_policy_is_in_force(served: Served, browser: Chromium) -> None:
    """What a hostile text would try if it became part of the page after all."""
    with browser.page() as page:
        page.open(served.url)
        page.until("document.querySelector('.list a')")
        page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked = 3\">')")
        page.evaluate(
            "const s = document.createElement('script'); s.text = 'window.hacked = 4'; document.body.append(s)"
        )
        page.until("document.images[0].complete")
        assert page.evaluate("window.hacked") is None
        assert any("Content Security Policy" in problem for problem in page.problems())


@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_window(served: Served, browser: Chromium, width: int) -> None:
    with browser.page(width=width, height=800, mobile=width < 500) as page:
        for place in ("", "#/interesting/turns/8", "#/hostile"):
            page.open(f"{served.url}/{place}")
            page.until("document.querySelector('.list a') && (!location.hash || document.querySelector('.text s'))")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.problems() == []


def test_numbers_that_json_cannot_hold_are_left_out() -> None:
    assert json.dumps([_number(value) for value in (float("nan"), float("-inf"), -0.123456)]) == "[null, null, -0.1235]"
