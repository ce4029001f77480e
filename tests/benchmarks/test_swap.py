"""What is counted as the right choice, and a run of the benchmark on the bundled model."""

from __future__ import annotations

import pytest

from benchmarks.swap import Case, engine, measure, summary


def test_the_predicted_way_is_right_where_it_was_the_cheaper_one() -> None:
    right = Case(100, 0, {"swap": 1.0, "recompute": 9.0}, {"swap": 2.0, "recompute": 8.0})
    wrong = Case(20, 3, {"swap": 3.0, "recompute": 2.0}, {"swap": 2.0, "recompute": 3.0})
    assert (right.chosen, right.is_right, right.lost) == ("swap", True, 1.0)
    assert (wrong.chosen, wrong.is_right, wrong.lost) == ("recompute", False, 1.5)
    found = summary([right, wrong])
    assert (found["right"], found["swapped"], found["mean_lost"]) == (0.5, 0.5, 1.25)
    assert found["swap_predicted_to_taken"] == pytest.approx(1.0)


def test_each_way_is_taken_when_it_is_forced() -> None:
    core = engine("story", "cpu", 200, 1)
    cases = measure(core, 200, 3, 2, 0)
    host = core.scheduler.host
    assert host is not None and host.counts["swap"] == host.counts["recompute"] == 6
    assert host.counts["in"] == host.counts["out"] > 0, "nothing is found in a prefix cache"
    assert all(min(case.took.values()) > 0 and min(case.predicted.values()) > 0 for case in cases)
    core.scheduler.check()
    assert host.num_used == 0
