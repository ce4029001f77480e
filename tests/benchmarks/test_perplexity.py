"""Perplexity by scheme: the same windows for all, and a change with its error."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path

import pytest

from benchmarks import perplexity
from benchmarks.perplexity import row
from headway.bundled import STORY
from headway.kernels.interface import KV_CACHE_DTYPES
from headway.kernels.weights import QUANTIZATIONS
from headway.quantize.calibration import excerpts

SENTENCE = "The old house stood at the end of the lane, and nobody had lived in it for many years. "


def test_the_change_is_that_of_pairs() -> None:
    """Windows that differ a lot, and all get worse by the same: an error of zero."""
    found = row("int4", "auto", [-1.1, -3.1, -2.1], [-1.0, -3.0, -2.0])
    assert found.perplexity == pytest.approx(math.exp(2.1))
    assert found.change == pytest.approx(math.exp(0.1) - 1)
    assert found.standard_error == pytest.approx(0.0, abs=1e-12)
    found = row("int4", "auto", [-1.1, -3.3], [-1.0, -3.0])
    assert found.standard_error == pytest.approx(math.exp(0.2) * statistics.stdev([0.1, 0.3]) / math.sqrt(2))


def test_excerpts_are_spread_and_begin_with_words() -> None:
    text = " ".join(f"word{number:05d}" for number in range(1000))
    found = excerpts(text, 4, 100)
    assert [piece.split()[0] for piece in found] == ["word00000", "word00250", "word00500", "word00750"]
    assert all(piece in text for piece in found)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["perplexity", *map(str, arguments)])
    perplexity.main()


def test_every_scheme_of_the_bundled_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.gz", tmp_path / "found.json"
    text.write_bytes(gzip.compress((SENTENCE * 40).encode()))
    run(monkeypatch, STORY, text, "--windows", 2, "--tokens", 64, "--dtype", "float32", "--output", output)
    rows = json.loads(output.read_text())["rows"]
    assert [(r["quantization"], r["kv_cache_dtype"]) for r in rows] == [
        (quantization, dtype) for quantization in QUANTIZATIONS for dtype in KV_CACHE_DTYPES
    ]
    assert rows[0]["change"] == 0.0
    assert all(0 < abs(r["change"]) < 0.1 for r in rows[1:])
    assert len({r["perplexity"] for r in rows}) == len(rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    assert set(tmp_path.iterdir()) == {text, output}


@pytest.mark.parametrize(
    ("model", "content", "said"),
    [
        (STORY, SENTENCE, "the text has 87 characters; 32 windows may take 24,576"),
        (STORY, "aaaa" * 10_000 + " " * 400_000, "characters of the text became"),
        ("no such folder", SENTENCE * 1000, "no such folder"),
        (STORY, None, "No such file"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: object,
    content: str | None,
    said: str,
) -> None:
    text, output = tmp_path / "text", tmp_path / "found.json"
    if content is not None:
        text.write_text(content)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, model, text, "--tokens", 64, "--output", output)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not output.exists()
