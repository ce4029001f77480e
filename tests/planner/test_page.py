"""`--plot`: a page and its pictures, whole or not at all."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from headway.planner import page
from headway.planner.make import make_plan
from headway.planner.plan import Plan
from headway.planner.request import PlanRequest
from headway.report import style
from headway.report.page import ReportError, render
from tests.bench.command_line import skip_layout
from tests.planner.command_line import CommandLine

LIGHT: dict[str, Any] = {"prompt_tokens": 128, "output_tokens": 16, "max_num_seqs": 16}
PICTURES = {"memory-by-context.png", "roofline.png", "throughput-latency.png", "time-by-operation.png"}


@pytest.fixture(autouse=True)
def _without_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_layout(monkeypatch)


def planned(model: str = "llama-3.1-8b", **settings: Any) -> Plan:
    return make_plan(PlanRequest(model, "H100-SXM", **{**LIGHT, **settings}))


def test_command_writes_the_page_and_its_pictures(headway: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    light = ["--prompt-tokens", 128, "--output-tokens", 16, "--max-num-seqs", 16, "--plot", folder]
    ran = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", *light)
    assert ran.code == 0 and "and 4 pictures." in ran.out
    assert {path.name for path in folder.iterdir()} == {"plan.html", *PICTURES}
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    quiet = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", *light, "--json")
    assert quiet.out.startswith("{") and quiet.out.rstrip().endswith("}")


def test_page_says_what_the_plan_says() -> None:
    plan = planned(concurrency=4, slo={"tpot": 0.01})
    html = render(page.page_of(plan))
    assert plan.ttft and plan.tpot
    for shown in (f"{style.number(plan.ttft.value * 1e3)} ms", f"{style.number(plan.tpot.value * 1e3)} ms"):
        assert f"<b>{shown}</b>" in html
    assert "TPOT ≤ 0.01 ms: missed" in html
    assert all(f'id="{name}"' in html for name in re.findall(r'href="#(\w+)"', html.split("</nav>")[0]))
    assert html.count('<svg class="hw-figure"') == 4
    assert "<script" not in html
    assert not re.search(r"(?:src|href)=\"https?:", html)


def test_page_of_what_does_not_fit_has_its_memory() -> None:
    html = render(page.page_of(planned("llama-3.1-70b", count=1)))
    assert "This plan does not work" in html and "does not fit" in html
    assert "Memory of a device by context" in html
    assert "Throughput against latency" not in html and html.count('<svg class="hw-figure"') == 3


def test_a_folder_that_cannot_be_is_one_line(headway: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for bad in (file, file / "below"):
        ran = headway("plan", "llama-3.1-8b", "--hardware", "H100-SXM", "--max-num-seqs", 4, "--plot", bad)
        assert ran.code == 2 and ran.err.count("\n") == 1 and str(bad) in ran.err
    assert file.read_text() == "mine"


def test_nothing_is_left_of_pages_that_cannot_be_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.html").write_text("older")
    written: list[int] = []

    def full(descriptor: int) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match="No space left on device"):
        page.write_plan(tmp_path, planned())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    assert (tmp_path / "plan.html").read_text() == "older"
