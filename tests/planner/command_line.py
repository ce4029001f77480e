"""`headway` as a user runs it, in this process."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from headway.cli import main
from tests.bench.command_line import skip_layout


@dataclass(frozen=True)
class Ran:
    """What a command said."""

    code: int
    out: str
    err: str

    def error(self) -> str:
        """The one line that a user gets for input that cannot be used."""
        assert (self.code, self.out) == (2, ""), (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("headway: "), self.err
        return lines[0]


class CommandLine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        skip_layout(monkeypatch)

    def __call__(self, *arguments: object, columns: int = 100) -> Ran:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._monkeypatch.setattr(sys, "argv", ["headway", *map(str, arguments)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ran(ended.value.code, said.out, said.err)
