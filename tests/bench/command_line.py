"""`headway bench` as a user runs it: in this process, or in one of its own where signals matter."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main


def skip_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of a picture; where its parts lie is a matter of the tests of pictures."""
    monkeypatch.setattr("headway.report.style._lay_out", lambda figure: figure.set_layout_engine(None))


@dataclass
class Ran:
    """What a command said, and what it left in its folder of results."""

    code: int
    out: str
    err: str
    folder: Path

    def files(self, suffix: str) -> list[Path]:
        return sorted(self.folder.rglob(f"*{suffix}")) if self.folder.exists() else []

    def result(self) -> dict[str, Any]:
        """The result of the only run."""
        (path,) = self.files(".json")
        content: dict[str, Any] = json.loads(path.read_text())
        return content

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.result()["headway"]["settings"]
        return settings

    def error(self) -> str:
        """The one line that a user gets for input that cannot be used."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("headway: "), self.err
        return lines[0]


class CommandLine:
    """Runs `headway` in this process, with results in a folder of the test.

    The client's own delays make no run invalid here unless `strict`: the machine of a test may be busy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capsys, self._folder = monkeypatch, capsys, folder
        self._count = 0
        monkeypatch.setenv("COLUMNS", "200")
        for name in ("HEADWAY_API_KEY", "OPENAI_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        self.never_client_bound()
        skip_layout(monkeypatch)

    def never_client_bound(self) -> None:
        self._monkeypatch.setattr("headway.bench.client.watch.reasons", lambda *_: [])
        self._monkeypatch.setattr("headway.load.measures.client_effect.SPOILT", math.inf)

    def __call__(self, *arguments: object, results: bool = True, verbose: bool = True) -> Ran:
        """`results` off leaves out --result-dir, for commands that have none; `verbose` off is the short answer."""
        self._count += 1
        folder = self._folder / f"results-{self._count}"
        command = ["headway", *map(str, arguments), *(["--result-dir", str(folder)] if results else [])]
        if verbose and results and arguments[0] == "bench" and arguments[1] != "profile":
            command.append("--verbose")
        self._monkeypatch.setattr(sys, "argv", command)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "Traceback" not in said.err
        return Ran(ended.value.code, said.out, said.err, folder)


class Subprocess:
    """`headway bench` in a process of its own, that gets signals."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.folder = folder
        environment = os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "headway", *map(str, arguments), "--verbose", "--result-dir", str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, within_s: float = 60.0) -> Ran:
        try:
            out, err = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        assert "Traceback" not in err, err
        return Ran(self.process.returncode, out, err, self.folder)


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Raises TimeoutError where it does not become true."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what was waited for did not come")
        time.sleep(0.02)
