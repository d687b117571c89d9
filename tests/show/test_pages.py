"""Pages hold all data of a result, grow with its tokens alone, and run no script but their own."""

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
def test_every_result_has_a_page_on_which_no_text_can_act(make: Callable[[], Any]) -> None:
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


def test_values_that_are_no_results_are_refused() -> None:
    with pytest.raises(InputError, match="cannot show an int"):
        show(3)
    with pytest.raises(InputError, match="row 1: a HistoryReport"):
        show([RESULTS["histories"]()])
    with pytest.raises(InputError, match="first: a CheckReport"):
        show(RESULTS["check"](), rendering())


# -- columns


@pytest.mark.parametrize("name", ["agentic", "content_emoji", "calls_parallel_answered", "reasoning_mixed"])
def test_a_page_has_every_token_of_a_rendering(name: str) -> None:
    conversation = CONVERSATIONS[name]
    rendered = RENDERER.render(conversation.messages, tools=conversation.tools)
    track = columns(read_page(html_page(rendered)), 0)
    assert track["id"] == rendered.token_ids
    assert "".join(track["text"]) == rendered.text
    assert track["message"] == rendered.message_indices
    assert track["field"] == rendered.fields
    assert [bool(on) for on in track["mask"]] == rendered.sampled
    assert track["control"] == rendered.control.tolist()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_prepended"])
@pytest.mark.filterwarnings("ignore:fastokens cannot be used")
def test_texts_of_tokens_spell_the_rendering(kind: str) -> None:
    """For byte-level tokenizers, byte fallback, and words with marked spaces."""
    renderer = create_renderer(tokenizer_of(kind)[0], "default", chat_template="{{ messages[0].content }}")
    rendered = renderer.render([{"role": "user", "content": "naïve 🗼 tea,\n\tçok güzel — 東京"}])
    text = "".join(columns(read_page(html_page(rendered)), 0)["text"])
    assert text.lstrip(" ") == rendered.text.lstrip(" ")


def test_a_page_has_every_branch_of_a_trajectory() -> None:
    record = trajectory()
    document = read_page(show(record, tokenizer=RENDERER).html)
    for at, branch in enumerate(record.branches):
        track = columns(document, at)
        assert track["id"] == record.stream(at).tolist()
        assert "".join(track["text"]) == RENDERER.tokenizer.decode(track["id"])
        assert track["hue"] == [Kind(kind).name.lower() for kind in record.table(at).kinds.tolist()]
        assert track["message"] == record.table(at).messages.tolist()
        expected = [None if np.isnan(value) else round(value, 4) for value in record.logprobs(at).tolist()]
        assert track["logprob"] == expected
        assert document["branches"][at] == [branch.parent, branch.start, branch.stop, branch.cause]
        for turn in record.turns(at):
            versions = [document["versions"][track["version"][place]] for place in range(turn.start, turn.stop)]
            expected = [one.version for one in turn.versions for _ in range(one.start, one.stop)]
            assert versions == expected[: len(versions)]
            assert len(set(track["turn"][turn.start : turn.stop])) == 1
    tokens = sum(len(track["tokens"]) for track in document["tracks"])
    assert tokens == record.num_tokens, "what branches share is written once"
    plain = columns(read_page(html_page(record)), 0)
    assert (plain["id"], set(plain["text"])) == (record.stream(0).tolist(), {None}), "ids without a tokenizer"


def test_a_trajectory_from_a_file_looks_the_same_and_a_cut_file_has_a_note(tmp_path: Path) -> None:
    trajectory().save(tmp_path / "one.tt")
    assert document_of(load_trajectory(tmp_path / "one.tt")).to_json() == document_of(trajectory()).to_json()
    (tmp_path / "cut.tt").write_bytes((tmp_path / "one.tt").read_bytes()[:-3])
    cut = load_trajectory(tmp_path / "cut.tt")
    assert cut.problem
    assert document_of(cut).notes == [cut.problem]


def test_a_bridge_separates_the_stream_from_the_new_tokens() -> None:
    bridged = RESULTS["bridge"]()
    track = columns(read_page(show(bridged, tokenizer=RENDERER).html), 0)
    prompt, completion = first_turn()
    assert track["id"] == bridged.token_ids
    assert track["hue"][: len(prompt)] == ["prompt"] * len(prompt)
    sampled = [place for place, on in enumerate(track["mask"]) if on]
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


def test_a_break_shows_the_stream_and_the_next_prompt() -> None:
    broken = RESULTS["break"]()
    document = read_page(html_page(broken))
    stream, prompt = both_sides(document, 0)
    place = max(0, broken.position - 12)
    whole = first_turn()[0] + first_turn()[1]
    assert stream == whole[place : place + len(stream)]
    assert len(stream) - len(prompt) == 2
    assert broken.advice in said(html_page(broken))


def test_a_check_shows_each_row_that_differs() -> None:
    document = read_page(html_page(RESULTS["check"]()))
    assert [contrast["name"] for contrast in document["contrasts"]] == [f"rows.jsonl, row 2: {Cause.BPE_REMERGE}"]
    first = document["contrasts"][0]
    base, other = ("".join(columns(document, first[side])["text"]) for side in ("base", "other"))
    assert (len(base) > len(other), base[:20], base[-4:]) == (True, other[:20], other[-4:])


# -- size and script


def test_a_page_takes_a_few_bytes_for_a_token() -> None:
    turn = [{"role": role, "content": "The answer is 42, as ever. " * 20} for role in ("user", "assistant")]
    pages = [RENDERER.render(turn * turns) for turns in (20, 200)]
    (few, small), (many, large) = [(len(rendered), len(html_page(rendered))) for rendered in pages]
    assert many > 60_000
    assert large - small < 8 * (many - few)


def test_the_modules_make_one_script() -> None:
    """Top-level names are unique across modules: a page joins them into one script without imports."""
    seen: dict[str, str] = {}
    for name in SCRIPTS:
        text = asset(name)
        for symbol in re.findall(r"^(?:export )?(?:const|let|function|class|async function) (\w+)", text, re.MULTILINE):
            assert seen.setdefault(symbol, name) == name, f"{symbol} is in {seen[symbol]} and in {name}"
        for target in re.findall(r'^import .* from "\./([\w.]+)";$', text, re.MULTILINE):
            assert SCRIPTS.index(target) < SCRIPTS.index(name)
        assert not re.search(r"^import (?!\{.*\} from \"\./[\w.]+\";$)", text, re.MULTILINE)
    for name in (*SCRIPTS, "viewer.css", "page.html"):
        text = asset(name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import|</script>(?!\n)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
