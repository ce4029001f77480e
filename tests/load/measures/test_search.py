"""The search for the highest rate, on simulated servers whose capacity is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from benchmarks.search_errors import PROCESSES, searched, stalls
from headway.bench.report.search import search_banners
from headway.load.errors import BenchError
from headway.load.measures.anytime import anytime_interval, least_blocks
from headway.load.measures.search import SearchOptions, Stop, find_max_rate
from headway.load.measures.trials import ProbeOutcome, Trial, Verdict, blocks_of, contradictions, isotonic, memory

CHUNK = 400


def slowness(met: int, total: int) -> np.ndarray:
    """Misses evenly among the others."""
    found = np.full(total, 0.5)
    found[np.linspace(0, total - 1, total - met).astype(int)] = 2.0
    return found


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

    async def probe(self, rate: float, wanted: int) -> ProbeOutcome:
        missed = self.rng.random(max(CHUNK, wanted)) > attainment(rate, self.capacity, self.steep)
        return ProbeOutcome(rate, np.where(missed, 2.0, self.rng.random(len(missed))), steady=rate <= self.breaks_at)


def certain(capacity: float, **more: object) -> Callable[[float, int], object]:
    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        return ProbeOutcome(rate, np.full(max(CHUNK, wanted), 0.5 if rate <= capacity else 2.0), **more)  # type: ignore[arg-type]

    return probe


@pytest.mark.parametrize("start", [0.8, 40.0])
async def test_lands_near_the_capacity(start: float) -> None:
    landed = 0
    for seed in range(5):
        server = Server(seed, capacity=float(np.random.default_rng(seed).uniform(5, 20)))
        found = await find_max_rate(server.probe, start)
        assert found.rate is not None and found.above is not None
        landed += 0.85 * server.capacity <= found.rate <= server.capacity
        assert found.above / found.rate <= 1.05 or found.stop is Stop.NOISE
    assert landed == 5


async def test_first_looks_bracket_then_bisect_on_a_logarithmic_scale_and_then_the_best_is_proven() -> None:
    found = await find_max_rate(certain(10.0), 1.0)  # type: ignore[arg-type]
    rates = [trial.rate for trial in found.trials]
    assert rates[:5] == [1, 2, 4, 8, 16]
    assert rates[5] == pytest.approx(np.sqrt(8 * 16))
    assert found.rate is not None and found.above is not None
    assert found.rate <= 10.0 < found.above <= found.rate * 1.05
    assert [trial.verdict for trial in found.trials[:5]] == [Verdict.LIKELY] * 4 + [Verdict.FAILED]
    assert all(trial.total == CHUNK for trial in found.trials if trial.rate != found.rate)
    assert found.claim is not None and found.claim.verdict is Verdict.HELD
    # So many blocks of ten without a miss, and no fewer.
    assert found.claim.total == 10 * least_blocks(0.99, 0.975) and found.claim.block == 10
    assert found.stop is Stop.PRECISE and "held and" in found.reason and found.confidence == 0.975


async def test_a_growing_queue_fails_though_the_objectives_are_met() -> None:
    server = Server(0, capacity=100.0, breaks_at=10.0)
    found = await find_max_rate(server.probe, 4.0)
    assert found.rate is not None and 9.4 <= found.rate <= 10.0


async def test_one_unlucky_trend_does_not_fail_a_rate() -> None:
    steady = iter([False, *[True] * 1000])

    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        return ProbeOutcome(rate, np.full(CHUNK, 0.5 if rate <= 10 else 2.0), steady=next(steady))

    found = await find_max_rate(probe, 8.0)
    assert found.trials[0].verdict is Verdict.LIKELY
    assert len(found.trials[0].probes) == 3


async def test_a_longer_stall_to_survive_takes_longer() -> None:
    for stall_s, block in ((0.0, 10), (1.0, 20), (2.5, 50)):
        found = await find_max_rate(certain(1e9), 20.0, SearchOptions(max_rate=20.0, stall_s=stall_s))  # type: ignore[arg-type]
        assert found.claim is not None and found.claim.block == block
        assert found.claim.total == block * least_blocks(0.99, 0.975)


async def test_misses_that_come_together_count_as_one_and_are_waited_for_in_vain() -> None:
    """One stall of 80 requests in 20,000 is too long for blocks of ten: the search says what it would take."""
    series = np.full(200_000, 0.5)
    series[2000:2080] = 2.0
    begin = 0

    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        nonlocal begin
        begin += CHUNK
        return ProbeOutcome(rate, series[begin - CHUNK : begin])

    found = await find_max_rate(probe, 5.0, SearchOptions(min_rate=5.0, max_rate=5.0))
    assert found.rate is None and found.trials[0].verdict is Verdict.UNDECIDED
    assert "misses come in clusters, so a proof takes" in found.trials[0].reason
    assert found.trials[0].block >= 80 and found.trials[0].total < 3000


async def test_what_only_looks_good_is_never_claimed() -> None:
    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        return ProbeOutcome(rate, slowness(3966 if rate > 5 else 4000, 4000))

    found = await find_max_rate(probe, 4.0, SearchOptions(max_rate=6.0))
    assert found.rate is not None and 4.0 < found.rate < 5.0
    assert found.stop is Stop.NOISE and "could not be proven" in found.reason
    assert {trial.verdict for trial in found.trials if trial.rate > 5.0} == {Verdict.UNDECIDED}
    now = iter(range(1000))
    found = await find_max_rate(certain(10.0), 1.0, SearchOptions(max_seconds=9.5), clock=lambda: next(now))  # type: ignore[arg-type]
    assert (found.rate, found.stop) == (None, Stop.TIME) and found.likely is not None and found.likely <= 10.0


async def test_limits_of_the_rates() -> None:
    found = await find_max_rate(certain(1e9), 5.0, SearchOptions(max_rate=30.0))  # type: ignore[arg-type]
    assert (found.rate, found.above, found.stop) == (30.0, None, Stop.CEILING)
    found = await find_max_rate(certain(0.0), 5.0, SearchOptions(min_rate=1.0))  # type: ignore[arg-type]
    assert (found.rate, found.above, found.stop) == (None, 1.0, Stop.FLOOR)


async def test_budgets_end_the_search() -> None:
    found = await find_max_rate(certain(10.0), 1.0, SearchOptions(max_probes=4))  # type: ignore[arg-type]
    assert (found.stop, found.rate, found.likely) == (Stop.PROBES, None, 8.0)
    assert sum(len(trial.probes) for trial in found.trials) == 4


async def test_an_invalid_probe_ends_the_search() -> None:
    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        return ProbeOutcome(rate, np.full(CHUNK, 0.5), valid=rate < 10, reason="the client was the limit")

    found = await find_max_rate(probe, 4.0)
    assert (found.rate, found.above, found.likely, found.stop) == (None, None, 8.0, Stop.INVALID)
    assert found.reason == "the probe at 16 requests/s is not valid: the client was the limit"
    assert found.trials[-1].verdict is Verdict.UNDECIDED

    async def empty(rate: float, wanted: int) -> ProbeOutcome:
        return ProbeOutcome(rate, np.empty(0))

    found = await find_max_rate(empty, 4.0)
    assert found.stop is Stop.INVALID and "measured no request" in found.reason


async def test_each_verdict_is_told() -> None:
    seen: list[tuple[float, str]] = []
    await find_max_rate(
        certain(10.0),  # type: ignore[arg-type]
        8.0,
        SearchOptions(tolerance=1.5),
        on_trial=lambda trial: seen.append((trial.rate, str(trial.verdict))),
    )
    assert seen == [(8.0, "looks good"), (16.0, "failed"), (8.0, "undecided"), (8.0, "held")]


# --- what it promises -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, 60])
def test_stalls_that_miss_the_target_are_not_claimed(length: int) -> None:
    """Attainment 0.942 at a target of 0.99. A rule that weighs each probe by its own effective count claims 92 % of
    those with stalls of 60 requests: the probes without one outweigh the others.
    """
    assert searched(partial(stalls, length=length), 0.058, 12).claimed <= 0.1
    assert searched(partial(stalls, length=length), 0.0, 2).claimed == 1.0


QUEUE = "M/M/4 at load 0.8"
WITHIN_THE_PROMISE = [
    name for name in PROCESSES if not name.startswith(("stalls of 20", "stalls of 60", "stalls of 100", QUEUE))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHIN_THE_PROMISE)
@pytest.mark.parametrize("missed", [0.058, 0.02, 0.0125, 0.0101])
def test_a_rate_that_misses_is_claimed_in_no_more_than_the_promised_share(name: str, missed: float) -> None:
    searches = 200
    allowed = 0.025 + 2.0 * (0.025 * 0.975 / searches) ** 0.5
    assert searched(PROCESSES[name], missed, searches, seed=1).claimed <= allowed


@pytest.mark.slow
@pytest.mark.parametrize(("missed", "allowed"), [(0.058, 0.0), (0.02, 0.08), (0.0125, 0.2), (0.0101, 0.25)])
def test_a_queue_just_short_of_the_target_is_claimed_at_times(missed: float, allowed: float) -> None:
    """Beyond the promise: what misses in a queue near its limit comes in clusters of any length."""
    assert searched(PROCESSES[QUEUE], missed, 200, seed=1).claimed <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WITHIN_THE_PROMISE, QUEUE])
def test_a_rate_that_clearly_holds_is_claimed(name: str) -> None:
    """The waits of a queue near its limit hang together for long: there many searches stay unsure."""
    outcome = searched(PROCESSES[name], 0.001, 100, seed=2)
    assert outcome.claimed >= (0.6 if name == QUEUE else 0.8) and outcome.requests <= 12_000


def test_the_interval_holds_for_shares_of_blocks_of_any_kind() -> None:
    """At every look at once: a share that is the true one is hardly ever ruled out, whatever the blocks are like."""
    rng = np.random.default_rng(0)
    kinds: list[Callable[[int], np.ndarray]] = [
        lambda n: (rng.random(n) < 0.03).astype(float),
        lambda n: rng.binomial(10, 0.03, n) / 10,
        lambda n: rng.beta(0.03, 0.97, n),
    ]
    for draw in kinds:
        wrong = 0
        for _ in range(40):
            missed = draw(400)
            looks = [anytime_interval(missed[:n]) for n in (50, 400)]
            wrong += any(not low <= 0.97 <= high for low, high in looks)
        assert wrong <= 5
    assert anytime_interval(np.empty(0)) == (0.0, 1.0)
    low, high = anytime_interval(np.repeat([0.0, 1.0], [990, 10]))
    assert 0.97 < low < 0.99 < high < 1.0


def test_memory_is_how_many_requests_miss_together() -> None:
    rng = np.random.default_rng(0)
    calm = rng.random(4000)
    assert memory(calm) < 1.5 and memory(np.full(100, 0.5)) == memory(np.empty(0)) == 1.0
    stalled = calm.copy()
    stalled[1000:1060] = 9.0
    assert 60 < memory(stalled) < 240
    # Nothing was missed, and the slowest requests come in groups of twenty.
    assert memory(np.where(np.arange(4000) % 800 < 20, 0.9, 0.3 * calm)) > 10


def test_blocks_take_all_requests_and_are_no_shorter_than_told() -> None:
    missed = np.arange(105) % 10 == 0
    blocks = blocks_of(missed, 10)
    assert len(blocks) == 10 and np.average(blocks, weights=[10] * 5 + [11] * 5) == pytest.approx(0.1, abs=0.02)
    assert blocks_of(missed, 200).tolist() == pytest.approx([11 / 105])


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99, 0.999])
def test_least_blocks_are_the_least(target: float) -> None:
    least = least_blocks(target)
    assert anytime_interval(np.zeros(least))[0] > target >= anytime_interval(np.zeros(least - 1))[0]


def test_isotonic_pools_what_contradicts() -> None:
    points = [(4.0, 0.5, 100.0), (1.0, 0.9, 100.0), (2.0, 1.0, 300.0), (3.0, 0.6, 50.0)]
    assert [rate for rate, _ in isotonic(points)] == [1.0, 2.0, 3.0, 4.0]
    assert [share for _, share in isotonic(points)] == pytest.approx([0.975, 0.975, 0.6, 0.5])
    assert isotonic([]) == []


def test_contradictions_are_warned_of() -> None:
    def trial(rate: float, met: int) -> Trial:
        outcome = ProbeOutcome(rate, slowness(met, 1000))
        return Trial(rate, [outcome], low=met / 1000 - 0.02, high=met / 1000 + 0.02)

    assert contradictions([trial(1, 990), trial(2, 985), trial(3, 500)]) == []
    said = contradictions([trial(4, 990), trial(2, 500)])
    assert len(said) == 1 and "50.00 % met their objectives at 2 requests/s, but 99.00 % at 4" in said[0]


@pytest.mark.parametrize(
    ("start", "options", "said"),
    [
        (1.0, {"target": 1.0}, "attainment of 1 "),
        (1.0, {"stall_s": -1.0}, "--stall-seconds is -1"),
    ],
)
async def test_options_are_checked(start: float, options: dict[str, float], said: str) -> None:
    with pytest.raises(BenchError, match=said):
        await find_max_rate(Server(0, 1.0).probe, start, SearchOptions(**options))  # type: ignore[arg-type]


async def test_a_search_goes_on_past_a_client_that_is_the_limit() -> None:
    """It cannot tell of rates that this client cannot offer, and names the highest below that held."""

    async def probe(rate: float, wanted: int) -> ProbeOutcome:
        slow = rate > 10.0
        reason = "the load was not offered" if slow else ""
        return ProbeOutcome(rate, np.full(max(CHUNK, wanted), 0.5), offered=not slow, client=reason)

    found = await find_max_rate(probe, 4.0)
    assert found.stop is Stop.PRECISE and found.rate is not None and 9.0 < found.rate <= 10.0
    assert {found.rate, found.above} <= {trial.rate for trial in found.trials}
    above = next(trial for trial in found.trials if trial.rate == found.above)
    assert above.verdict is Verdict.FAILED and above.client == "the load was not offered"
    (banner,) = search_banners(found)
    assert "did not hold, but this client was late" in banner.lines[0] and "the server may do better" in banner.lines[0]
