"""The HTML report: one file, well formed, nothing fetched, nobody's text taken for markup."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from headway.bench.report import run_page
from headway.bench.report.run_page import comparison_page, report_page
from headway.bench.report.search import search_section
from headway.load.measures.compare import compare
from headway.load.measures.search import SearchResult, Stop
from headway.load.measures.summary import summarise_all
from headway.load.measures.trials import ProbeOutcome, Trial, Verdict
from headway.report import style
from headway.report.page import ReportError, render, write_page
from headway.report.parts import Banner, Page, Picture, Section, Table, cells
from tests.bench.command_line import skip_layout
from tests.bench.report.runs import NASTY, OBJECTIVES, empty, failed_only, nasty, sweep, usual
from tests.bench.report.simulated import simulated_run

VOID = {"meta", "br", "img", "link", "input", "hr"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


@pytest.fixture(autouse=True)
def _without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_layout(monkeypatch)


class Checker(HTMLParser):
    """Well-formedness, ids, references, and what a browser would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: set[str] = set()
        self.tags: set[str] = set()
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} runs code"
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "xlink:href", "srcset", "action", "data"):
                (
                    self.references.add((value or "")[1:])
                    if (value or "").startswith("#")
                    else self.fetched.append(value or "")
                )
            self.references |= set(re.findall(r"url\(#([^)]+)\)", value or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def check(html: str) -> Checker:
    page = Checker(html)
    assert not page.fetched and not page.tags & {"script", "img", "link", "iframe", "object", "embed", "foreignobject"}
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert len(set(page.ids)) == len(page.ids), "an id occurs twice"
    assert page.references <= set(page.ids)
    assert re.search(r"Content-Security-Policy\" content=\"default-src 'none'", html)
    return page


def test_the_report_of_a_run(tmp_path: Path) -> None:
    run, summaries = usual()
    path = tmp_path / "new" / "report.html"
    written = write_page(path, report_page([(run, summaries)]), tmp_path / "figures")
    assert written[0] == path and all(each.stat().st_size > 5000 for each in written)
    assert {each.name for each in written[1:]} >= {"latency-cdf.png", "tail-composition.png", "timeline.png"}
    assert sorted(each.name for each in path.parent.iterdir()) == ["report.html"]
    page = check(path.read_text())
    for words in (
        "Not valid" if not summaries[0].completed else "Valid",
        "steady state",
        "TTFT, schedule",
        "TTFT, send",
    ):
        assert words in page.text
    for words in (
        "Objectives",
        "Definitions",
        "base_url",
        "goodput",
        "batch",
        "cost per 1M output tokens",
        "3 REQUESTS",
        "Short requests in addition to the load",
    ):
        assert words in page.text
    html = path.read_text()
    assert html.count('class="hw-figure"') == len(written) - 1
    assert "prefers-color-scheme: dark" in html and "@media print" in html
    for name in re.findall(r"var\((--hw-[a-z-]+)\)", html):
        assert f"{name}:" in html, f"{name} is not defined"


def test_texts_of_others_are_never_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    run = nasty()
    monkeypatch.setattr(run_page, "this_machine", lambda: {NASTY: NASTY})
    html = render(report_page([(run, summarise_all(run))], title=NASTY))
    page = check(html)
    assert "{{7*7}}" in page.text and "49 49" not in page.text
    assert "alert(1)" in page.text  # as text


def test_notes_keep_the_names_of_files() -> None:
    result, views = usual()
    views[0].notes.append("sharegpt.json: 2 are left out")
    numbers = next(section for section in run_page.run_sections(result, views) if section.title == "Numbers")
    assert "Note: sharegpt.json: 2 are left out." in numbers.paragraphs


def test_a_run_without_requests_has_a_report() -> None:
    page = check(render(report_page([(empty(), summarise_all(empty()))])))
    assert "NO ANSWER" in page.text and "Not valid" in page.text and "over time" not in page.text


def test_a_run_without_answers_shows_when_they_failed_and_no_empty_pictures() -> None:
    run = failed_only()
    names = [p.name for section in report_page([(run, summarise_all(run))]).sections for p in section.pictures]
    assert names == ["timeline", "load-over-time", "client-lag"]


def test_a_sweep_shows_all_runs_and_details_of_some() -> None:
    runs, summaries = sweep()
    page = report_page(list(zip(runs, summaries, strict=True)))
    titles = [section.title for section in page.sections]
    assert titles[0] == "4 runs"
    detailed = [title for title in titles if title.startswith("Run at ")]
    assert detailed[0] == "Run at 4 requests/s" and detailed[-1] == "Run at 40 requests/s" and len(detailed) <= 3
    assert titles.count("40 requests/s: Latency") == 1
    shown = check(render(dataclasses.replace(page, sections=page.sections[:1])))
    assert "Objectives held" in shown.text and "Latency against load" in shown.text


def test_a_search_comes_first() -> None:
    trials = (
        Trial(4.0, [ProbeOutcome(4.0, np.zeros(500))], Verdict.HELD, 0.991, 1.0),
        Trial(8.0, [ProbeOutcome(8.0, np.repeat([0.5, 2.0], [300, 200]))], Verdict.FAILED, 0.5, 0.7),
    )
    curve = ((4.0, 1.0), (8.0, 0.6))
    found = SearchResult(4.0, 8.0, None, trials, Stop.PRECISE, "that is all", (NASTY,), curve, confidence=0.975)
    run, summaries = usual()
    page = report_page([(run, summaries)], extra=[search_section(found)])
    assert page.sections[0].title == "The highest rate" and not page.sections[0].banners
    assert page.verdict[0].title == "Highest rate: 4 requests/s"
    shown = check(render(dataclasses.replace(page, sections=page.sections[:1])))
    assert "Highest rate: 4 requests/s" in shown.text and "{{7*7}}" in shown.text


def test_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    a = simulated_run(120, rate=8, seed=1, goodput=OBJECTIVES)
    b = simulated_run(120, rate=8, seed=1, seats=2, goodput=OBJECTIVES)
    found = compare(a, b, resamples=200)
    sides = {NASTY: (a, summarise_all(a)), "b.json": (b, summarise_all(b))}
    parts = run_page.run_sections
    monkeypatch.setattr(run_page, "run_sections", lambda *args, **options: parts(*args, **options)[:1])
    page = check(render(comparison_page(found, sides)))
    for words in ("real", "TTFT median", "Both sides", "b.json: Numbers"):
        assert words in page.text


def test_parts_of_a_page_and_names_that_occur_twice(tmp_path: Path) -> None:
    figures = [style.new_figure()[0] for _ in range(2)]
    section = Section(
        "Things <b>",
        paragraphs=("a & b",),
        banners=(Banner("Careful", ("x < y",), "warn"),),
        terms=(("term", "what it means"),),
        tables=(Table("T", ("", "n"), (cells("row", "1"),), note="note"),),
        pictures=tuple(Picture("same name!", "P", "Caption.", figure) for figure in figures),
        anchor="things",
        folded=True,
    )
    written = write_page(tmp_path / "page.html", Page("Title", sections=(section,)), tmp_path / "png")
    assert [each.name for each in written] == ["page.html", "same-name.png", "same-name-2.png"]
    assert "x < y" in check(written[0].read_text()).text


def test_a_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("T", ("a", "b"), (cells("only one"),))


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page("Title")
    path = tmp_path / "report.html"
    write_page(path, page)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ReportError, match="No space left on device"):
        write_page(path, Page("Another"))
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_place_that_is_no_folder_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write the report .*; name another place") as error:
        write_page(tmp_path / "file" / "report.html", Page("Title"))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to look with")
def test_a_browser_shows_it_in_the_dark(tmp_path: Path) -> None:
    from PIL import Image

    run, summaries = usual()
    page = report_page([(run, summaries)])
    latency = next(section for section in page.sections if section.title == "Latency")
    write_page(tmp_path / "page.html", Page("Title", sections=(latency,)))
    shot = tmp_path / "shot.png"
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --blink-settings=preferredColorScheme=0 "
        f"--window-size=1000,900 --user-data-dir={tmp_path / 'profile'} --screenshot={shot}"
    ).split()
    command = [str(CHROMIUM), *flags, f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False)
    if not shot.exists():
        pytest.skip(f"Chromium made no picture: {done.stderr[-300:]!r}")
    with Image.open(shot) as image:
        colours = image.convert("RGB").getcolors(1 << 24) or []
    shades = {colour: number for number, colour in colours}
    paper, ink, blue = (tuple(bytes.fromhex(style.PALETTE[name][1][1:])) for name in ("paper", "ink", "blue"))
    assert max(shades, key=lambda colour: shades[colour]) == paper
    assert shades.get(ink, 0) > 100 and shades.get(blue, 0) > 100
    black = sum(number for colour, number in shades.items() if max(colour) < min(paper) - 4)
    assert black == 0, "something is drawn darker than the page"
