"""The table of schemes: a row for each, its perplexity first and its speed added later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import schemes
from benchmarks.schemes import Case, cases
from headway.quantize.schemes import Recipe

SENTENCE = "The old house stood at the end of the lane, and nobody had lived in it for many years. "


def test_rows_are_all_different_and_twins_are_rows() -> None:
    found = {case.label: case for case in cases(with_gguf=True)}
    assert len(found) == len(list(cases(with_gguf=True)))
    assert all(case.twin is None or found[case.twin].twin is None for case in found.values())
    assert not any(case.gguf for case in cases(with_gguf=False))


@pytest.mark.slow
def test_perplexity_and_then_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [
        Case("bfloat16"),
        Case("int8", arguments={"quantization": "int8"}),
        Case("W4A16 g128 rtn", Recipe.of("W4A16", "rtn", None)),
        Case("W4A16 g128 awq", Recipe.of("W4A16", "rtn", None), twin="W4A16 g128 rtn"),
        Case("GGUF BF16", gguf="bf16"),
    ]
    monkeypatch.setattr(schemes, "cases", lambda with_gguf: iter(few))
    monkeypatch.setattr(schemes, "_FOLDER", tmp_path / "made")
    monkeypatch.setattr(schemes, "_DECODED", 4)
    text, output = tmp_path / "text", tmp_path / "found.json"
    text.write_text(SENTENCE * 40)
    with pytest.raises(SystemExit):
        schemes.main(["--speed", "--output", str(output)])
    assert "has no perplexities yet" in capsys.readouterr().err
    schemes.main([str(text), "--windows", "2", "--tokens", "64", "--output", str(output)])
    rows = {row["label"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == [case.label for case in few]
    sizes = [row["bytes"] for row in rows.values()]
    assert sizes[1] < 0.6 * sizes[0] and sizes[2] == sizes[3] < sizes[0]
    assert rows["GGUF BF16"]["perplexity"] == pytest.approx(rows["bfloat16"]["perplexity"], rel=1e-3)
    capsys.readouterr()
    schemes.main(["--speed", "--rounds", "1", "--output", str(output)])
    report = json.loads(output.read_text())
    assert len(report["speed"]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(few)
    assert lines[4].split("|")[5:] == lines[5].split("|")[5:]
    schemes.main([str(text), "--windows", "2", "--tokens", "32", "--output", str(output)])
    assert json.loads(output.read_text())["speed"] == report["speed"]
