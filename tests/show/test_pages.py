"""Pages hold all that a result knows, grow with its tokens alone, and let nothing act but their own script."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conversations import CONVERSATIONS
from tests.pages import EVIL, assert_only_its_own_code_runs, both_sides, columns, html_page, read_frame, read_page, said
from tests.show.results import MESSAGES, RENDERER, RESULTS, TOOLS, first_turn, rendering, trajectory
from tests.show.test_views import hostile
from tests.tokens.test_encoding import made as tokenizer_of
from tokentrace import create_renderer, load_trajectory
from tokentrace.diagnose import Cause
from tokentrace.errors import InputError
from tokentrace.show import plain_view, show
from tokentrace.show.page import SCRIPTS, asset
from tokentrace.show.results import document_of
from tokentrace.tokens import Kind


@pytest.mark.parametrize("make", [hostile, *RESULTS.values()])
def test_every_result_shows_itself_and_none_of_its_characters_can_act(make: Callable[[], Any]) -> None:
    result = make()
    text = html_page(result, EVIL)
    assert_only_its_own_code_runs(text)
    assert read_frame(result._repr_html_()) == read_page(html_page(result))
    before, _, after = text.partition('id="document">')
    data = after.partition("</script>")[0]
    assert not set(data) & set("<>&\x00\x1b\u202e\u2028")
    assert "<title>&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in before
    assert before.count("onerror") == 1
    assert not set(before) & set("\x00\x1b\u202e\u2028")


def test_what_is_not_a_result_is_refused() -> None:
    with pytest.raises(InputError, match="cannot show an int"):
        show(3)
    with pytest.raises(InputError, match="row 1: a HistoryReport"):
        show([RESULTS["histories"]()])
    with pytest.raises(InputError, match="first: a CheckReport"):
        show(RESULTS["check"](), rendering())


# -- columns


@pytest.mark.parametrize("name", ["agentic", "content_emoji", "calls_parallel_answered", "reasoning_mixed"])
def test_a_rendering_is_told_token_by_token(name: str) -> None:
    given = CONVERSATIONS[name]
    rendered = RENDERER.render(given.messages, tools=given.tools)
    told = columns(read_page(html_page(rendered)), 0)
    assert told["id"] == rendered.token_ids
    assert "".join(told["text"]) == rendered.text
    assert told["message"] == rendered.message_indices
    assert told["field"] == rendered.fields
    assert [bool(on) for on in told["mask"]] == rendered.sampled
    assert told["control"] == rendered.control.tolist()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_prepended"])
@pytest.mark.filterwarnings("ignore:fastokens cannot be used")
def test_texts_of_tokens_spell_the_rendering(kind: str) -> None:
    """Whatever the tokenizer: bytes, byte fallback, or words with marked spaces."""
    renderer = create_renderer(tokenizer_of(kind)[0], "default", chat_template="{{ messages[0].content }}")
    rendered = renderer.render([{"role": "user", "content": "naïve 🗼 tea,\n\tçok güzel — 東京"}])
    told = "".join(columns(read_page(html_page(rendered)), 0)["text"])
    assert told.lstrip(" ") == rendered.text.lstrip(" ")


def test_a_trajectory_is_told_branch_by_branch() -> None:
    record = trajectory()
    document = read_page(show(record, tokenizer=RENDERER).html)
    for at, branch in enumerate(record.branches):
        told = columns(document, at)
        assert told["id"] == record.stream(at).tolist()
        assert "".join(told["text"]) == RENDERER.tokenizer.decode(told["id"])
        assert told["hue"] == [Kind(kind).name.lower() for kind in record.table(at).kinds.tolist()]
        assert told["message"] == record.table(at).messages.tolist()
        expected = [None if np.isnan(value) else round(value, 4) for value in record.logprobs(at).tolist()]
        assert told["logprob"] == expected
        assert document["branches"][at] == [branch.parent, branch.start, branch.stop, branch.cause]
        for turn in record.turns(at):
            versions = [document["versions"][told["version"][place]] for place in range(turn.start, turn.stop)]
            expected = [one.version for one in turn.versions for _ in range(one.start, one.stop)]
            assert versions == expected[: len(versions)]
            assert len(set(told["turn"][turn.start : turn.stop])) == 1
    tokens = sum(len(track["tokens"]) for track in document["tracks"])
    assert tokens == record.num_tokens, "what branches share is written once"
    without = columns(read_page(html_page(record)), 0)
    assert (without["id"], set(without["text"])) == (record.stream(0).tolist(), {None}), "ids without a tokenizer"


def test_a_trajectory_from_a_file_is_one_and_what_is_missing_of_it_is_said(tmp_path: Path) -> None:
    trajectory().save(tmp_path / "one.tt")
    assert document_of(load_trajectory(tmp_path / "one.tt")).to_json() == document_of(trajectory()).to_json()
    (tmp_path / "cut.tt").write_bytes((tmp_path / "one.tt").read_bytes()[:-3])
    cut = load_trajectory(tmp_path / "cut.tt")
    assert cut.problem
    assert document_of(cut).notes == [cut.problem]


def test_a_bridge_tells_the_stream_from_what_is_new() -> None:
    bridged = RESULTS["bridge"]()
    told = columns(read_page(show(bridged, tokenizer=RENDERER).html), 0)
    prompt, completion = first_turn()
    assert told["id"] == bridged.token_ids
    assert told["hue"][: len(prompt)] == ["prompt"] * len(prompt)
    sampled = [place for place, on in enumerate(told["mask"]) if on]
    assert sampled == [*range(len(prompt), len(prompt) + len(completion))]


def test_rows_carry_their_masks() -> None:
    for sample in (RESULTS["sample"](), RESULTS["supervised"]()):
        document = read_page(html_page(sample))
        assert [bool(on) for on in columns(document, 0)["mask"]] == sample.mask.tolist()
        assert document["tracks"][0]["means"] == "trained"
    several = read_page(html_page([sample, ("named", sample)]))
    assert [track["name"] for track in several["tracks"]] == ["row 1", "named"]


def test_a_parsed_response_shows_its_parts_and_calls() -> None:
    parsed = RESULTS["parsed"]()
    document = read_page(html_page(parsed))
    assert columns(document, 0)["text"] == [part.text for part in parsed.parts if part.text]
    (table,) = document["tables"]
    assert [row[0] for row in table["rows"]] == [call.name for call in parsed.tool_calls]
    ids = RENDERER.tokenizer.encode("<think>\nabc def\n</think>\n\nhello there<|end|>")
    for count, text in ((len(ids), "2 parts"), (3, "1 part")):
        view = plain_view(RENDERER.parse_response(ids[:count], prompt_ids=[]))
        assert f"# {count} tokens in {text}\n" in view


# -- differences


def test_two_renderings_are_aligned_token_by_token() -> None:
    one = rendering()
    other = RENDERER.render(
        [{**m, "content": (m.get("content") or "").replace("Oslo", "Bergen")} for m in MESSAGES], tools=TOOLS
    )
    assert both_sides(read_page(show(one, other).html), 0) == (one.token_ids, other.token_ids)


def test_a_break_shows_what_was_there_and_what_came() -> None:
    found = RESULTS["break"]()
    document = read_page(html_page(found))
    stream, prompt = both_sides(document, 0)
    place = max(0, found.position - 12)
    whole = first_turn()[0] + first_turn()[1]
    assert stream == whole[place : place + len(stream)]
    assert len(stream) - len(prompt) == 2
    assert found.advice in said(html_page(found))


def test_a_check_shows_each_row_that_differs() -> None:
    document = read_page(html_page(RESULTS["check"]()))
    assert [contrast["name"] for contrast in document["contrasts"]] == [f"rows.jsonl, row 2: {Cause.BPE_REMERGE}"]
    told = document["contrasts"][0]
    base, other = ("".join(columns(document, told[side])["text"]) for side in ("base", "other"))
    assert (len(base) > len(other), base[:20], base[-4:]) == (True, other[:20], other[-4:])


# -- size and script


def test_a_page_takes_a_few_bytes_for_a_token() -> None:
    turn = [{"role": role, "content": "The answer is 42, as ever. " * 20} for role in ("user", "assistant")]
    pages = [RENDERER.render(turn * turns) for turns in (20, 200)]
    (few, small), (many, large) = [(len(rendered), len(html_page(rendered))) for rendered in pages]
    assert many > 60_000
    assert large - small < 8 * (many - few)


def test_the_modules_make_one_script() -> None:
    """Names are used once in all modules: in a page they are one script, without imports."""
    seen: dict[str, str] = {}
    for name in SCRIPTS:
        text = asset(name)
        for found in re.findall(r"^(?:export )?(?:const|let|function|class|async function) (\w+)", text, re.MULTILINE):
            assert seen.setdefault(found, name) == name, f"{found} is in {seen[found]} and in {name}"
        for target in re.findall(r'^import .* from "\./([\w.]+)";$', text, re.MULTILINE):
            assert SCRIPTS.index(target) < SCRIPTS.index(name)
        assert not re.search(r"^import (?!\{.*\} from \"\./[\w.]+\";$)", text, re.MULTILINE)
    for name in (*SCRIPTS, "viewer.css", "page.html"):
        text = asset(name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import|</script>(?!\n)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
