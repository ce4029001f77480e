"""The benchmark of kept KV blocks: both ways are taken for the same prompt, and the engine's prediction is judged."""

from __future__ import annotations

from pathlib import Path

from benchmarks.offload import Case, engine, measure


def test_a_case_is_right_where_the_cheaper_way_was_predicted() -> None:
    took = {"load": 2.0, "compute": 8.0}
    assert Case(100, took, {"load": 3.0, "compute": 4.0}).is_right
    assert not Case(100, took, {"load": 5.0, "compute": 4.0}).is_right


def test_both_ways_are_taken(tmp_path: Path) -> None:
    core = engine("story", str(tmp_path), 64, threads=1)
    (case,) = measure(core, [64], rounds=2)
    host = core.scheduler.host
    assert host is not None and (host.counts["load"], host.counts["recompute_loadable"]) == (2, 2)
    assert host.counts["offload_in"] == 2 * 48
    assert all(value > 0 for each in (case.took, case.predicted) for value in each.values())
