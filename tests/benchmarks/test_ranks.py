"""What is compared, and a run of the benchmark on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ranks
from tests.engine.models import TINY_LLAMA


def test_the_speed_is_that_of_neighbours_in_time() -> None:
    found = {"decode:1": [{"one": 2.0, "ranks": 4.0}, {"one": 20.0, "ranks": 20.0}, {"one": 3.0, "ranks": 2.0}]}
    row = ranks.speeds(found)["decode:1"]
    assert (row["one"], row["ranks"]) == (3.0, 4.0)
    assert (row["least"], row["speed"], row["most"]) == (0.5, 1.0, 1.5)


@pytest.mark.slow
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(ranks.SHAPES, "qwen2.5-0.5b", TINY_LLAMA)
    output = tmp_path / "ranks.json"
    points = ["--ranks", "1", "--stages", "2", "--points", "decode:2", "prefill:32"]
    ranks.main(["--rounds", "2", "--budget", "0.05", "--context", "32", *points, "--output", str(output)])
    assert "decode:2" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert len(found["rounds"]["prefill:32"]) == 2 and found["settings"]["stages"] == 2
    assert all(row["speed"] > 0 and row["in_turn"] > 0 for row in found["rows"].values())
    assert all(
        0 <= row["bubbles"] <= 0.5 and row["ranks_waits"] > row["one_waits"] == 0 for row in found["rows"].values()
    )
    assert all(row[f"{name}_products"] > 0 for row in found["rows"].values() for name in ("one", "ranks"))


@pytest.mark.slow
def test_ranks_that_have_the_whole_model_wait_for_each_other_in_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ranks.SHAPES, "qwen2.5-0.5b", TINY_LLAMA)
    output = tmp_path / "ranks.json"
    points = ["--ranks", "1", "--context-ranks", "2", "--points", "decode:2", "prefill:64"]
    ranks.main(["--rounds", "1", "--budget", "0.05", "--context", "32", *points, "--output", str(output)])
    rows = json.loads(output.read_text())["rows"]
    assert rows["prefill:64"]["ranks_waits"] > rows["decode:2"]["ranks_waits"] == 0
