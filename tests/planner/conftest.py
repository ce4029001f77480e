"""What tests of the planner share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.planner import loads
from headway.simulator.serving import Served
from tests.planner.command_line import CommandLine


@pytest.fixture(scope="package", autouse=True)
def each_load_once() -> Iterator[None]:
    """What a load comes to is a function of what is asked, takes most of a plan, and is asked by many tests."""
    known: dict[str, Served] = {}

    def once(simulate: Callable[..., Served]) -> Callable[..., Served]:
        def served(*arguments: object, **options: object) -> Served:
            asked = repr((simulate.__name__, arguments, options))
            return known.get(asked) or known.setdefault(asked, simulate(*arguments, **options))

        return served

    with pytest.MonkeyPatch.context() as patched:
        for simulate in (loads.closed_loop, loads.open_loop, loads.saturated):
            patched.setattr(loads, simulate.__name__, once(simulate))
        yield


@pytest.fixture(autouse=True)
def no_calibrated_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of whoever runs the tests. Returns where there would be some."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "headway" / "hardware"


@pytest.fixture
def headway(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)
