"""What grammars cost beside peers: the tiny shape on this engine alone, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import structured
from benchmarks.rounds import Rounds
from benchmarks.sitting import Entry


@pytest.mark.slow
def test_a_sitting_of_the_tiny_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With this engine as its own peer."""
    again = Entry("again", "headway", sys.executable)
    ours = structured.entries
    monkeypatch.setattr(structured, "entries", lambda precision, peers, *more: [*ours(precision, [], *more), again])
    monkeypatch.setattr(structured, "CHECKPOINTS", tmp_path)
    output = tmp_path / "found.json"
    arguments = ["--peer", f"vllm={sys.executable}", "--shape", "tiny", "--batches", 2, "--rounds", 1, "--tokens", 24]
    monkeypatch.setattr("sys.argv", ["structured", *map(str, arguments), "--threads", "1", "--output", str(output)])
    structured.main()
    content = json.loads(output.read_text())
    assert content["rates"].keys() == {f"{schema}, decode, batch 2" for schema in structured.SCHEMAS}
    for things in content["rates"].values():
        assert things.keys() == {"headway", "again"} and all(len(each["held"]) == 1 for each in things.values())
    assert not content["died"] and sys.executable not in output.read_text()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * len(structured.SCHEMAS)


def test_the_table_compares_rounds_with_one_another() -> None:
    rounds = Rounds()
    for ours, theirs in ((100.0, 50.0), (80.0, 20.0), (90.0, 30.0)):
        rounds.add("texts, batch 1", "headway", {"free": 100.0, "held": ours, "cost": 100 / ours})
        rounds.add("texts, batch 1", "vllm", {"free": 60.0, "held": theirs, "cost": 60 / theirs})
    table = structured.peers_table({"rates": rounds.values})
    assert table.splitlines()[-1] == (
        "| texts, batch 1 | vllm | 60.0 | 30.0 | 2.00 (1.20 .. 3.00) | 3.00 (2.00 .. 4.00) |"
    )
