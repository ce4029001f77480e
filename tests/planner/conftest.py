"""What tests of the planner share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.command_line import CommandLine


@pytest.fixture(autouse=True)
def no_calibrated_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of whoever runs the tests. Returns where there would be some."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "headway" / "hardware"


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)
