"""A pytest plug-in: tests as the tasks of a part, and a process that a test has spoilt is left.

Only tests that need a GPU are kept: those marked so, and those of modules whose DEVICE is cuda.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.part import Lines, is_sticky, own_share

_LAST_LINES = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu")
    group.addoption("--gpu-lines", type=Path, help="file that results are written to")
    group.addoption("--gpu-done", type=Path, help="file with the names of tests that are not to be run again")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporting(config.getoption("--gpu-lines"), config.getoption("--gpu-done")))


class Reporting:
    def __init__(self, lines: Path, done: Path) -> None:
        self._lines = Lines(lines)
        self._done = set(json.loads(done.read_text()))
        self._errors: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        own = set(own_share([item.nodeid for item in items if needs_gpu(item)]))
        wanted = [item for item in items if item.nodeid in own]
        self._lines.write(tasks=[*self._errors, *(item.nodeid for item in wanted)])
        kept = [item for item in wanted if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a task that failed."""
        if report.failed:
            self._errors[report.nodeid] = last_lines(report.longreprtext)
            self._lines.write(began=report.nodeid)
            self._lines.write(ended=report.nodeid, error=self._errors[report.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines.write(began=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._errors[report.nodeid] = last_lines(report.longreprtext)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2]
        if report.when != "teardown":
            return
        name = report.nodeid
        if error := self._errors.get(name):
            self._lines.write(ended=name, error=error)
            if is_sticky(error) or is_sticky(report.longreprtext):
                pytest.exit("the device failed: the rest goes on in another process", returncode=1)
        elif name in self._skipped:
            self._lines.write(ended=name, skipped=self._skipped[name])
        else:
            self._lines.write(ended=name, seconds=report.duration)


def needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None or getattr(getattr(item, "module", None), "DEVICE", "") == "cuda"


def last_lines(text: str) -> str:
    """What pytest marks as the error, else the end of what it shows."""
    marked = [line.removeprefix("E").strip() for line in text.splitlines() if line.startswith("E ")]
    return "\n".join((marked or text.strip().splitlines()[-_LAST_LINES:])[:_LAST_LINES])
