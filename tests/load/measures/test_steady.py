"""The steady state of simulated queues whose equilibrium is known."""

from __future__ import annotations

import numpy as np
import pytest

from headway.load.measures.steady import falls_behind, find_steady_window
from headway.load.record import Failure, FailureKind, RequestRecord
from tests.load.measures.queues import BEGAN_NS, closed_run, ended_ns, poisson_run, record, served


def window(records: list[RequestRecord]):  # type: ignore[no-untyped-def]
    return find_steady_window(records, BEGAN_NS, ended_ns(records))


def mean_in_flight(records: list[RequestRecord], began_ns: int, stopped_ns: int) -> float:
    return sum(max(0, min(each.end_ns, stopped_ns) - max(each.scheduled_ns, began_ns)) for each in records) / (
        stopped_ns - began_ns
    )


def test_a_stable_queue_has_a_steady_state() -> None:
    found = [window(poisson_run(np.random.default_rng(seed), 0.7, 600)) for seed in range(60)]
    assert sum(each.found for each in found) >= 56
    assert "no trend" in next(each for each in found if each.found).reason


def test_the_empty_start_and_the_drain_are_cut() -> None:
    # 40 servers start empty, and requests take 10 s: for some 20 s fewer are in flight than ever after.
    rng = np.random.default_rng(1)
    records = served(np.cumsum(rng.exponential(1 / 3, 1200)), rng.exponential(10.0, 1200), 40)
    found = window(records)
    assert found.found, found.reason
    last_due = max(each.scheduled_ns for each in records)
    assert BEGAN_NS + 8e9 < found.began_ns < BEGAN_NS + 80e9
    assert found.began_ns < found.ended_ns < last_due - 2e9


def test_the_window_is_less_biased_than_the_whole_run() -> None:
    truth = 30.0  # M/M/60 with 30 Erlang: hardly anyone waits
    whole, inside = [], []
    for seed in range(15):
        rng = np.random.default_rng(seed)
        records = served(np.cumsum(rng.exponential(1 / 3, 500)), rng.exponential(10.0, 500), 60)
        found = window(records)
        if found.found:
            whole.append(mean_in_flight(records, BEGAN_NS, ended_ns(records)))
            inside.append(mean_in_flight(records, found.began_ns, found.ended_ns))
    assert len(inside) >= 10
    assert abs(np.mean(inside) - truth) < 0.5 * abs(np.mean(whole) - truth)


def test_an_overloaded_queue_has_none_and_says_why() -> None:
    found = [window(poisson_run(np.random.default_rng(seed), 1.2, 600)) for seed in range(40)]
    assert sum(each.found for each in found) <= 2
    strong = [window(poisson_run(np.random.default_rng(seed), 1.6, 600)) for seed in range(20)]
    assert not any(each.found for each in strong)
    said = [each for each in strong if "the offered load exceeds what the server can do" in each.reason]
    assert len(said) >= 18
    assert (strong[0].began_ns, strong[0].ended_ns) == (
        BEGAN_NS,
        ended_ns(poisson_run(np.random.default_rng(0), 1.6, 600)),
    )


def test_the_growth_is_named_with_its_slope() -> None:
    # Each second brings 2 requests of 0.75 s each to one server: a request waits 0.5 s longer each second.
    found = window(served(np.arange(400) * 0.5, np.full(400, 0.75), 1))
    assert found.reason == "TTFT grows by 500 ms per second: the offered load exceeds what the server can do"


def test_falling_behind_is_told_from_a_short_run() -> None:
    stable = [falls_behind(poisson_run(np.random.default_rng(seed), 0.7, 150)) for seed in range(60)]
    assert sum(map(bool, stable)) <= 4
    over = [falls_behind(poisson_run(np.random.default_rng(seed), 1.6, 400)) for seed in range(30)]
    assert sum(map(bool, over)) >= 28
    assert falls_behind(served(np.arange(400) * 0.5, np.full(400, 0.75), 1)).startswith("TTFT grows by 500 ms")
    assert falls_behind(served(np.arange(20) * 0.5, np.full(20, 0.75), 1)) == ""
    assert falls_behind([]) == ""


@pytest.mark.parametrize("concurrency", [1, 4, 16])
def test_a_closed_loop_has_a_steady_state(concurrency: int) -> None:
    for seed in range(10):
        found = window(closed_run(np.random.default_rng(seed), concurrency, 300))
        assert found.found, found.reason


@pytest.mark.parametrize(("first", "last", "way"), [(1.0, 10.0, "rises"), (10.0, 1.0, "falls")])
def test_a_ramp_has_none(first: float, last: float, way: str) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        span = 300 / ((first + last) / 2)
        half_slope = (last - first) / (2 * span)
        due = (-first + np.sqrt(first**2 + 4 * half_slope * np.sort(rng.random(300)) * 300)) / (2 * half_slope)
        found = window(served(due, rng.exponential(0.2, 300), 8))
        assert not found.found
        assert f"the arrival rate {way} by" in found.reason


def test_bursts_are_no_ramp() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        busy = np.cumsum(rng.exponential(1 / 20, 600))
        found = window(served(busy + np.floor(busy / 2) * 3, rng.exponential(0.2, 600), 8))
        assert found.found, found.reason


def test_a_freeze_is_not_taken_for_a_ramp_up() -> None:
    # For 5 s nothing moves; what was under way ends after it. The window has to keep the freeze in.
    for seed in range(10):
        rng = np.random.default_rng(seed)
        due = np.cumsum(rng.exponential(0.1, 1000))
        frozen = due[-1] * 0.3
        records = []
        for each in served(due, rng.exponential(0.3, 1000), 4):
            due_s, first, end = ((ns - BEGAN_NS) / 1e9 for ns in (each.scheduled_ns, each.first_token_ns, each.end_ns))
            first, end = (s if s < frozen else max(s, frozen + 5) for s in (first, end))
            records.append(record(each.index, due_s, first, end))
        found = window(records)
        assert found.found, found.reason
        assert found.began_ns < BEGAN_NS + frozen * 1e9


def test_all_at_once_has_none() -> None:
    found = window(served(np.zeros(200), np.full(200, 0.1), 4))
    assert not found.found and "at once" in found.reason


def test_too_little_to_tell() -> None:
    few = window(served(np.arange(12.0), np.full(12, 0.2), 4))
    assert not few.found and few.reason == "12 requests are too few: at least 30 must be left in the window"
    long_requests = window(served(np.arange(100) * 0.1, np.full(100, 4.0), 100))
    assert not long_requests.found and "a request takes 4 s and the arrivals lasted 9.9 s" in long_requests.reason
    nothing = find_steady_window([], BEGAN_NS, BEGAN_NS + 1)
    assert (nothing.found, nothing.reason) == (False, "no request was due")


def test_failed_requests_and_those_never_due() -> None:
    records = poisson_run(np.random.default_rng(3), 0.5, 400)
    for each in records[::10]:
        each.failure = Failure(FailureKind.TIMEOUT, "took too long")
        each.chunk_ns = each.chunk_ns[:0]
    records.append(RequestRecord(index=400, failure=Failure(FailureKind.ABANDONED, "never sent")))
    found = find_steady_window(records, BEGAN_NS, ended_ns(records))
    assert found.found, found.reason


def test_the_order_of_the_records_does_not_matter() -> None:
    records = poisson_run(np.random.default_rng(4), 0.6, 400)
    shuffled = [records[i] for i in np.random.default_rng(5).permutation(400)]
    assert window(records) == window(shuffled)
