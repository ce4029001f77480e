"""Measurements are repeated while the machine's host takes processors away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.steal import TRIES, stolen_seconds, undisturbed


class Machine:
    """One second a measurement, of which the host takes the given shares one after the other, then nothing."""

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares
        self.clock = self.stolen = 0.0
        self.measured = 0

    def measure(self) -> int:
        self.clock += 1.0
        self.stolen += (self.shares.pop(0) if self.shares else 0.0) * (os.cpu_count() or 1)
        self.measured += 1
        return self.measured

    def run(self) -> tuple[int, float]:
        return undisturbed(self.measure, lambda: self.stolen, lambda: self.clock)


def test_the_first_is_taken_when_nothing_was_stolen() -> None:
    machine = Machine([0.005])
    assert machine.run() == (1, pytest.approx(0.005))
    assert machine.measured == 1


def test_a_disturbed_one_is_repeated() -> None:
    assert Machine([0.3, 0.1]).run() == (3, 0.0)


def test_the_least_disturbed_counts_in_the_end() -> None:
    machine = Machine([0.3, 0.2, 0.05, 0.4, 0.1, 0.0])
    assert machine.run() == (3, pytest.approx(0.05))
    assert machine.measured == TRIES


def test_stolen_time_is_the_eighth_figure(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 2 3 4 5 6 7 800 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert stolen_seconds(stat) == 800 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "nothing of the kind, in eight or more words, I fear\n"])
def test_a_system_that_does_not_say_has_none_stolen(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert stolen_seconds(stat) == 0.0
    assert stolen_seconds(tmp_path / "missing") == 0.0
