"""What tests of calibration share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.calibration import measure
from tests.calibration.little import LITTLE_MEMORY, LITTLE_OF_PEAKS
from tests.planner.command_line import CommandLine


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where calibrated machines are in this test: nothing is there yet, not even the folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "headway" / "hardware"


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def small_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks from sizes that take no time."""
    for key in measure.EFFORTS:
        monkeypatch.setitem(measure.EFFORTS, key, LITTLE_OF_PEAKS)
    monkeypatch.setattr(measure, "total_memory", lambda: LITTLE_MEMORY)
