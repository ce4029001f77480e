"""What tracing costs: how contestants differ, how their figures are compared, and a sitting with a tiny model."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path

import pytest

from benchmarks import servers, tracing
from benchmarks.rounds import Rounds


def test_contestants_differ_by_what_is_watched_alone() -> None:
    asked = {name: tracing.flags_of(name, "http://there") for name in tracing.CONTESTANTS}
    assert asked[tracing.OFF] == asked[tracing.KERNELS] == asked[tracing.AGAIN] == []
    assert [each[-1] for each in asked.values() if each] == ["0.01", "0.1", "1"]
    closed, opened = tracing.loads(tracing.parse(["--prompts", "50", "--rate", "4"]))
    assert (closed.streams, closed.rate, opened.streams, opened.rate) == (8, None, None, 4.0)
    assert closed.prompts == opened.prompts == 50


def test_changes_are_of_medians_and_their_range_of_rounds() -> None:
    rounds = Rounds()
    for base, traced in ((100.0, 99.0), (200.0, 190.0), (150.0, 150.0)):
        for name, value in ((tracing.OFF, base), ("100 %", traced)):
            rounds.add("8 streams", name, dict.fromkeys(tracing.SHOWN, value))
    head, _, row, *_ = tracing.table(rounds).splitlines()
    assert head == "| 8 streams | off | 100 % |"
    assert row == "| output tokens/s | 150 (100 .. 200) | +0.0 % (-5.0 .. +0.0) |"


def test_a_value_of_0_has_no_change() -> None:
    rounds = Rounds()
    for name, value in ((tracing.OFF, 0.0), ("1 %", 2.0)):
        rounds.add("8 streams", name, dict.fromkeys(tracing.SHOWN, value))
    assert tracing.table(rounds).splitlines()[2] == "| output tokens/s | 0.00 | - |"


@pytest.mark.parametrize("given", [["--rounds", "0"], ["--rate", "-1"], ["--output-len", "1"]])
def test_bad_input_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        tracing.parse(given)


def test_the_collector_takes_what_it_gets() -> None:
    with tracing.collector() as address:
        for _ in range(2):
            with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/traces", b"spans"), timeout=20) as answer:
                assert answer.status == 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for module in (servers, tracing):
        monkeypatch.setattr(module, "CHECKPOINTS", tmp_path / "checkpoints")
    wanted = ["--shape", "tiny", "--rounds", "1", "--prompts", "20", "--input-len", "8", "--output-len", "4"]
    tracing.run(tracing.parse([*wanted, "--threads", "1", "--output", str(tmp_path / "tracing.json")]))
    printed = capsys.readouterr().out
    assert (
        printed.count("| output tokens/s |") == 2
        and "| 8 streams | off | 1 % | 10 % | 100 % | kernels timed | off again |" in printed
    )
    kept = json.loads((tmp_path / "tracing.json").read_text())
    assert kept["died"] == {} and set(kept["values"]["8 streams"]) == set(tracing.CONTESTANTS)
