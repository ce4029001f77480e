"""Perplexity beyond the trained length, on a short text: the same within it, and no window forgets its sinks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sinks
from tests.quantize.test_quality import SENTENCE


@pytest.mark.slow
def test_a_row_for_each_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text", tmp_path / "found.json"
    text.write_text(SENTENCE * 400)
    arguments = ["--text", text, "--texts", 2, "--tokens", 1100, "--windows", "1024", "--output", output]
    monkeypatch.setattr("sys.argv", ["sinks", *map(str, arguments)])
    sinks.main()
    rows = json.loads(output.read_text())["rows"]
    assert [(row["window"], row["sinks"]) for row in rows] == [(None, 0), (1024, 0), (1024, 16)]
    assert len({round(row["within"], 3) for row in rows}) == 1
    assert len({row["beyond"] for row in rows}) == 3
    assert rows[2]["beyond"] < min(row["beyond"] for row in rows[:2])
    assert len(capsys.readouterr().out.splitlines()) == 5
