"""The search for the highest rate, on simulated servers whose capacity is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headway.bench.errors import BenchError
from headway.bench.measures.search import (
    ProbeOutcome,
    SearchOptions,
    Stop,
    Trial,
    Verdict,
    contradictions,
    find_max_rate,
    isotonic,
    least_samples,
)

CHUNK = 300


def attainment(rate: float, capacity: float, steep: float = 30.0) -> float:
    """0.99 at the capacity, nearly 1 below and falling quickly beyond."""
    return 0.9995 / (1.0 + (0.9995 / 0.99 - 1.0) * (rate / capacity) ** steep)


class Server:
    """Requests meet their objectives by chance; beyond `breaks_at` a queue grows, seen or not."""

    def __init__(self, seed: int, capacity: float, breaks_at: float = float("inf"), steep: float = 30.0) -> None:
        self.rng = np.random.default_rng(seed)
        self.capacity = capacity
        self.breaks_at = breaks_at
        self.steep = steep
        self.rates: list[float] = []

    async def probe(self, rate: float) -> ProbeOutcome:
        self.rates.append(rate)
        met = int(self.rng.binomial(CHUNK, attainment(rate, self.capacity, self.steep)))
        return ProbeOutcome(rate, met, CHUNK, steady=rate <= self.breaks_at)


def certain(capacity: float, **more: object) -> Callable[[float], object]:
    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, CHUNK if rate <= capacity else CHUNK // 2, CHUNK, **more)  # type: ignore[arg-type]

    return probe


@pytest.mark.parametrize("start", [0.8, 40.0])
async def test_lands_near_the_capacity(start: float) -> None:
    landed = 0
    for seed in range(40):
        server = Server(seed, capacity=float(np.random.default_rng(seed).uniform(5, 20)))
        found = await find_max_rate(server.probe, start)
        assert found.rate is not None and found.above is not None
        landed += 0.9 * server.capacity <= found.rate <= 1.02 * server.capacity
        assert attainment(found.rate, server.capacity) > 0.985
        assert found.stop is Stop.PRECISE and found.above / found.rate <= 1.05
    assert landed >= 38


async def test_never_claims_where_the_slope_is_gentle() -> None:
    # Attainment falls slowly with the rate, so rates near the limit cannot be told apart; none too high is claimed.
    stops = set()
    for seed in range(25):
        server = Server(seed, capacity=10.0, steep=6.0)
        found = await find_max_rate(server.probe, 4.0, SearchOptions(max_samples=2000))
        assert found.rate is not None and attainment(found.rate, 10.0, 6.0) > 0.985
        stops.add(found.stop)
    assert Stop.NOISE in stops


async def test_brackets_then_bisects_on_a_logarithmic_scale() -> None:
    found = await find_max_rate(certain(10.0), 1.0)  # type: ignore[arg-type]
    rates = [trial.rate for trial in found.trials]
    assert rates[:5] == [1, 2, 4, 8, 16]
    assert rates[5] == pytest.approx(np.sqrt(8 * 16))
    assert found.rate is not None and found.above is not None
    assert found.rate <= 10.0 < found.above <= found.rate * 1.05
    assert [trial.verdict for trial in found.trials[:5]] == [Verdict.HELD] * 4 + [Verdict.FAILED]
    assert "held and" in found.reason


async def test_a_growing_queue_fails_though_the_objectives_are_met() -> None:
    server = Server(0, capacity=100.0, breaks_at=10.0)
    found = await find_max_rate(server.probe, 4.0)
    assert found.rate is not None and 9.4 <= found.rate <= 10.0


async def test_one_unlucky_trend_does_not_fail_a_rate() -> None:
    steady = iter([False, *[True] * 1000])

    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, CHUNK if rate <= 10 else 0, CHUNK, steady=next(steady))

    found = await find_max_rate(probe, 8.0)
    assert found.trials[0].verdict is Verdict.HELD
    assert len(found.trials[0].probes) == 3


async def test_dependent_requests_count_for_less() -> None:
    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, CHUNK, CHUNK, effective_total=CHUNK / 10)

    found = await find_max_rate(probe, 1.0, SearchOptions(max_rate=1.0, max_samples=20_000))
    assert 18 <= len(found.trials[0].probes) <= 20
    assert found.stop is Stop.CEILING


async def test_undecided_is_never_claimed() -> None:
    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, 99 if rate > 4 else 100, 100)

    found = await find_max_rate(probe, 4.0, SearchOptions(max_samples=1000))
    assert found.rate == 4.0
    assert found.stop is Stop.NOISE
    assert [trial.verdict for trial in found.trials] == [Verdict.HELD, Verdict.UNDECIDED, Verdict.UNDECIDED]
    assert all(trial.total <= 1000 for trial in found.trials)


async def test_limits_of_the_rates() -> None:
    found = await find_max_rate(certain(1e9), 5.0, SearchOptions(max_rate=30.0))  # type: ignore[arg-type]
    assert (found.rate, found.above, found.stop) == (30.0, None, Stop.CEILING)
    found = await find_max_rate(certain(0.0), 5.0, SearchOptions(min_rate=1.0))  # type: ignore[arg-type]
    assert (found.rate, found.above, found.stop) == (None, 1.0, Stop.FLOOR)


async def test_budgets_leave_what_was_found() -> None:
    found = await find_max_rate(certain(10.0), 1.0, SearchOptions(max_probes=4))  # type: ignore[arg-type]
    assert (found.stop, found.rate, sum(len(trial.probes) for trial in found.trials)) == (Stop.PROBES, 2.0, 4)
    now = iter(range(1000))
    found = await find_max_rate(
        certain(10.0),  # type: ignore[arg-type]
        1.0,
        SearchOptions(max_seconds=3.5),
        clock=lambda: next(now),
    )
    assert found.stop is Stop.TIME
    assert sum(len(trial.probes) for trial in found.trials) == 3


async def test_an_invalid_probe_ends_the_search() -> None:
    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, CHUNK, CHUNK, valid=rate < 10, reason="the client was the limit")

    found = await find_max_rate(probe, 4.0)
    assert (found.rate, found.above, found.stop) == (8.0, None, Stop.INVALID)
    assert found.reason == "the probe at 16 requests/s is not valid: the client was the limit"
    assert found.trials[-1].verdict is Verdict.UNDECIDED

    async def empty(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, 0, 0)

    found = await find_max_rate(empty, 4.0)
    assert found.stop is Stop.INVALID and "measured no request" in found.reason


async def test_each_look_is_told() -> None:
    seen: list[tuple[float, int]] = []
    found = await find_max_rate(
        certain(10.0),  # type: ignore[arg-type]
        8.0,
        on_trial=lambda trial: seen.append((trial.rate, trial.total)),
    )
    assert seen[:3] == [(8.0, CHUNK), (8.0, 2 * CHUNK), (16.0, CHUNK)]
    assert len(seen) == sum(len(trial.probes) for trial in found.trials)


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99, 0.999])
async def test_least_samples_are_the_least(target: float) -> None:
    least = least_samples(target)
    for count, verdict in ((least, Verdict.HELD), (least - 1, Verdict.UNDECIDED)):

        async def probe(rate: float, count: int = count) -> ProbeOutcome:
            return ProbeOutcome(rate, count, count)

        found = await find_max_rate(probe, 1.0, SearchOptions(target, max_probes=1))
        assert found.trials[0].verdict is verdict


def test_isotonic_pools_what_contradicts() -> None:
    points = [(4.0, 0.5, 100.0), (1.0, 0.9, 100.0), (2.0, 1.0, 300.0), (3.0, 0.6, 50.0)]
    assert [rate for rate, _ in isotonic(points)] == [1.0, 2.0, 3.0, 4.0]
    assert [share for _, share in isotonic(points)] == pytest.approx([0.975, 0.975, 0.6, 0.5])
    assert isotonic([]) == []


def test_contradictions_are_warned_of() -> None:
    def trial(rate: float, met: int) -> Trial:
        outcome = ProbeOutcome(rate, met, 1000)
        return Trial(rate, [outcome], low=met / 1000 - 0.02, high=met / 1000 + 0.02)

    assert contradictions([trial(1, 990), trial(2, 985), trial(3, 500)]) == []
    said = contradictions([trial(4, 990), trial(2, 500)])
    assert len(said) == 1 and "50.00% met their objectives at 2 requests/s, but 99.00% at 4" in said[0]


@pytest.mark.parametrize(
    ("start", "options", "said"),
    [
        (0.0, {}, "cannot start at 0"),
        (1.0, {"target": 1.0}, "attainment of 1 "),
        (1.0, {"confidence": 0.1}, "confidence 0.1"),
        (1.0, {"tolerance": 0.0}, "tolerance of 0"),
        (1.0, {"max_samples": 400}, "400 samples at a rate cannot show an attainment of 0.99: allow at least 535"),
        (1.0, {"max_probes": 0}, "no budget"),
        (1.0, {"min_rate": 2.0}, "between its limits"),
        (1.0, {"max_rate": 0.5}, "between its limits"),
    ],
)
async def test_options_are_checked(start: float, options: dict[str, float], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        await find_max_rate(Server(0, 1.0).probe, start, SearchOptions(**options))  # type: ignore[arg-type]


async def test_a_probe_that_cannot_count_is_an_error() -> None:
    async def probe(rate: float) -> ProbeOutcome:
        return ProbeOutcome(rate, 11, 10)

    with pytest.raises(BenchError, match="11 of 10"):
        await find_max_rate(probe, 1.0)
