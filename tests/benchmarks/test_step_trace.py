"""The way of a request through the package: what a reader must open, as architecture.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import step_trace
from benchmarks.step_trace import Entered, summary

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
FIGURES = re.compile(r"(\d+) files of ([\d,]+) lines,\s(\d+) functions of ([\d,]+) lines")


@pytest.fixture(scope="module")
def files() -> list[Entered]:
    return step_trace.trace()


def figures(text: str) -> list[int]:
    found = FIGURES.search(text)
    assert found is not None, text
    return [int(number.replace(",", "")) for number in found.groups()]


def test_the_step_of_every_request_is_in_the_trace(files: list[Entered]) -> None:
    names = {each.name for each in files}
    assert {"engine/core.py", "policy/step/scheduler.py", "models/decoder.py", "llm/batch.py"} <= names
    assert not any(each.room in ("server", "bench", "planner", "cli") for each in files)
    decides_nothing = {f"policy/{name}.py" for name in ("slo", "promises", "shares", "fairness", "victims", "priority")}
    assert not decides_nothing & names, "a request of fcfs enters a policy"
    core = next(each for each in files if each.name == "engine/core.py")
    assert 0 < core.function_lines < core.lines


def test_architecture_gives_the_figures(files: list[Entered]) -> None:
    # Other processors take other kernels, and small changes need no new figures: within 3 %.
    for stated, measured in zip(figures(ARCHITECTURE.read_text()), figures(summary(files)), strict=True):
        assert measured == pytest.approx(stated, rel=0.03), f"docs/architecture.md: now {summary(files)}"
