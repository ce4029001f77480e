"""The study of searches: regret is what was chosen beside the best of the grid, and tune's is small here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import regret
from headway.policy.step.options import SchedulingOptions


@pytest.mark.slow
def test_tune_finds_that_seats_are_few_and_others_are_compared_by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = replace(regret.WORLDS["chat"], seqs=1, rate=60.0, lengths=(64, 16), prompts=24)
    monkeypatch.setattr(regret, "WORLDS", {"small": world})
    monkeypatch.setattr(regret, "RUNS", (4, 8))
    few = [regret.settings(world, seqs, 512, "slo", 50.0) for seqs in (1, 8, 32)]
    monkeypatch.setattr(regret, "grid", lambda _: iter(few))
    found = regret.study("small", 0)
    assert found["start"] > 0.5 and found["tune"]["regret"] < 0.1 < found["tune"]["runs"]
    assert {"tune", "random", "sweep"} <= found["regret"].keys()
    assert all(each >= 0.0 for values in found["regret"].values() for each in values.values())
    assert found["trials"][0]["change"].startswith("--max-num-seqs") and found["trials"][0]["verdict"] == "better"
    assert "| small | tune |" in regret.table([found]) and f"Of {len(found['trials'])} trials" in regret.table([found])


def test_what_had_been_chosen_after_some_runs() -> None:
    began, then = SchedulingOptions(max_num_seqs=1), SchedulingOptions(max_num_seqs=2)
    chosen = regret.Choices([(0, began), (6, then)])
    assert [chosen.after(runs).max_num_seqs for runs in (4, 6, 8)] == [1, 2, 2]
