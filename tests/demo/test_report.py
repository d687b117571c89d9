"""What the demo says: every number with its meaning, the noise with the breaks, and nothing that can act."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tests.demo.test_paths import WIDE, scripted
from tests.pages import assert_only_its_own_code_runs, columns, read_page, said
from tokentrace import create_renderer
from tokentrace.demo.paths import TRIALS, ClientPath, Demo, PathReport, score_row, trained_row
from tokentrace.demo.report import MEASURES, PRETRAINED, demo_document, demo_json, remarks
from tokentrace.pocket import NOISE, POCKET
from tokentrace.pocket.model import load_pocket
from tokentrace.show import plain_view
from tokentrace.show.page import page_html

ROOT = Path(__file__).parents[2]
RENDERER = create_renderer(POCKET)


def printed(demo: Demo) -> str:
    return plain_view(demo_document(demo, RENDERER))


def page_of(demo: Demo) -> str:
    return page_html(demo_document(demo, RENDERER))


def test_every_view_has_the_noise_and_the_meaning_of_every_number(demo: Demo) -> None:
    text, page, data = printed(demo), said(page_of(demo)), demo_json(demo)
    assert (data["noise"], data["remarks"]) == (asdict(NOISE), remarks(demo))
    broken, count = demo.paths[0].numbers()["broken_rollouts"], len(demo.paths[0].rollouts)
    for part in ("1 % of the assistant's tokens", "2 % of its calls", "6 of 384", f"{broken} of {count} rollouts"):
        assert part in " ".join(remarks(demo))
    labels = {one.label: one.about for one in MEASURES} | {one.name: one.about for one in demo.trials}
    for words in [*remarks(demo), *labels.values()]:
        assert words in text
        assert words in page
    for label, about in labels.items():
        assert f"{label}: {about}" in text
    assert all(measure.cell(report).text in text for measure in MEASURES for report in demo.paths)


def test_breaks_are_told_by_cause_for_every_trial(demo: Demo) -> None:
    page = read_page(page_of(demo))
    for row, trial in zip(demo_json(demo)["trials"], demo.trials, strict=True):
        for report in trial.reports:
            told = row["paths"][str(report.path)]
            assert sum(told["causes"].values()) == told["breaks"] == report.numbers()["breaks"]
        for cause in trial.reports[0].causes:
            numbers = [f"{one.causes.get(cause, 0)}" for one in trial.reports]
            assert any(line.split() == [*cause.split(), *numbers] for line in printed(demo).splitlines())
            assert any(row[0][0] == cause and row[1:] == numbers for row in page["tables"][1]["rows"])
    names = [contrast["name"] for contrast in page["contrasts"]]
    assert any(name.startswith("stripped reasoning") for name in names), "an example of it is shown, too"
    assert [bars["title"] for bars in page["bars"]] == [str(path) for path in ClientPath]
    assert page["title"] == "Three ways to the next turn · pocket"


def test_the_page_escapes_whatever_was_said() -> None:
    name = "<img src=x onerror=alert(3)>\x1b[31mred"
    turns = ("\x1b[31mred <script>alert(4)</script>\n" + WIDE, "<b onclick=alert(5)>42</b><|end|>")
    reports = []
    for path in ClientPath:
        rollout, breaks = scripted(path, *turns, name=name)
        scored = score_row(rollout, trained_row(rollout, path, RENDERER), load_pocket().score)
        reports.append(PathReport(path, [rollout], breaks, [scored]))
    demo = Demo(0, [replace(trial, reports=reports) for trial in TRIALS])
    page = page_of(demo)
    assert_only_its_own_code_runs(page)
    assert "\x1b[31mred" not in printed(demo)
    document = read_page(page)
    texts = ["".join(columns(document, at)["text"]) for at in range(len(document["tracks"]))]
    assert any("<b onclick=alert(5)>" in text for text in texts)
    assert any(name in track["name"] for track in document["tracks"])


def test_the_docs_give_the_settings_as_they_are() -> None:
    text = " ".join((ROOT / "docs" / "demo.md").read_text(encoding="utf-8").split())
    for part in (
        f"{100 * NOISE.resegmented:g} % of",
        f"{100 * NOISE.compact:g} % of its calls",
        "{broken_rollouts} of {rollouts} rollouts".format(**PRETRAINED),
        str(PRETRAINED["model"]),
    ):
        assert part in text
