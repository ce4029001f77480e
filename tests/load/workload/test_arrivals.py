"""Arrival processes against their distributions."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from headway.load.errors import BenchError
from headway.load.workload.arrival_flags import Arrival
from headway.load.workload.arrivals import AllAtOnce, Constant, Gamma, OnOff, Poisson, Ramp, Trace

COUNT = 20_000
RATE = 25.0
# The least p-value of a Kolmogorov-Smirnov test with a fixed seed. A wrong distribution gives less than 1e-9 with so
# many samples.
PLAUSIBLE = 0.001


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaps(arrival: Arrival) -> np.ndarray:
    return np.diff(arrival.offsets(COUNT, rng()), prepend=0.0)


def test_poisson_gaps_are_exponential() -> None:
    assert stats.kstest(gaps(Poisson(RATE)), stats.expon(scale=1 / RATE).cdf).pvalue > PLAUSIBLE


def test_the_number_of_a_poisson_process_in_a_time_is_poisson_distributed() -> None:
    """Its variance is its mean: times stretched to end at count / rate would have less."""
    counts = [len(Poisson(RATE).offsets_until(4.0, rng(seed))) for seed in range(800)]
    assert np.mean(counts) == pytest.approx(100, rel=0.02)
    assert np.var(counts) == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_shape_that_was_asked_for(burstiness: float) -> None:
    drawn = gaps(Gamma(RATE, burstiness))
    expected = stats.gamma(burstiness, scale=1 / (RATE * burstiness))
    assert stats.kstest(drawn, expected.cdf).pvalue > PLAUSIBLE
    assert drawn.std() / drawn.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_gamma_of_another_shape_is_told_apart() -> None:
    """The test above can fail."""
    assert stats.kstest(gaps(Gamma(RATE, 0.8)), stats.expon(scale=1 / RATE).cdf).pvalue < 1e-9


def test_constant_gaps_are_equal_and_begin_at_zero() -> None:
    np.testing.assert_array_equal(Constant(4.0).offsets(5, rng()), [0, 0.25, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(Constant(4.0).offsets_until(1.0, rng()), [0, 0.25, 0.5, 0.75])
    assert len(Constant(10.0).offsets_until(0.01, rng())) == 1


def test_on_off_is_silent_when_off_and_poisson_when_on() -> None:
    arrival = OnOff(RATE, on_s=2.0, off_s=3.0)
    times = arrival.offsets(COUNT, rng())
    cycle, within = np.divmod(times, 5.0)
    assert within.max() < 2.0
    assert arrival.rate_on == 62.5
    on_time = cycle * 2.0 + within
    assert stats.kstest(np.diff(on_time, prepend=0.0), stats.expon(scale=1 / 62.5).cdf).pvalue > PLAUSIBLE
    assert COUNT / times[-1] == pytest.approx(RATE, rel=0.03)
    # Within its phase each time is as likely as any other.
    assert stats.kstest(within, stats.uniform(0, 2).cdf).pvalue > PLAUSIBLE


def test_on_off_until_a_time_within_each_phase() -> None:
    arrival = OnOff(RATE, on_s=2.0, off_s=3.0)
    whole = arrival.offsets(COUNT, rng())
    for duration in (1.0, 2.0, 4.0, 5.0, 6.5, 12.0):
        np.testing.assert_array_equal(arrival.offsets_until(duration, rng()), whole[whole < duration])


def cumulative(ramp: Ramp, t: np.ndarray, duration: float) -> np.ndarray:
    """The rate's integral, by the trapezoid rule over the rate as the documentation writes it."""
    fine = np.linspace(0, duration, 200_001)
    if ramp.strategy == "linear":
        rate = ramp.start_rate + (ramp.end_rate - ramp.start_rate) * fine / duration
    else:
        rate = ramp.start_rate * (ramp.end_rate / ramp.start_rate) ** (fine / duration)
    integral = np.concatenate([[0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(fine))])
    return np.interp(t, fine, integral)


RAMPS = [
    Ramp(2, 50),
    Ramp(50, 2),
    Ramp(0, 40),
    Ramp(40, 0),
    Ramp(7, 7),
    Ramp(2, 50, "exponential"),
    Ramp(50, 2, "exponential"),
    Ramp(7, 7, "exponential"),
]


@pytest.mark.parametrize("ramp", RAMPS, ids=Ramp.describe)
def test_each_slice_of_a_ramp_has_as_many_arrivals_as_the_integral_says(ramp: Ramp) -> None:
    duration = COUNT / ramp.mean_rate
    times = ramp.offsets(COUNT, rng())
    assert np.all(np.diff(times) >= 0) and times[0] >= 0 and times[-1] <= duration
    edges = np.linspace(0, duration, 11)
    seen = np.histogram(times, edges)[0]
    expected = np.diff(cumulative(ramp, edges, duration))
    assert expected.sum() == pytest.approx(COUNT, rel=1e-4)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected) + 1)
    assert stats.kstest(cumulative(ramp, times, duration) / COUNT, stats.uniform.cdf).pvalue > PLAUSIBLE


@pytest.mark.parametrize("ramp", RAMPS, ids=Ramp.describe)
def test_a_ramp_over_a_duration_has_a_poisson_number_of_arrivals(ramp: Ramp) -> None:
    counts = [len(ramp.offsets_until(5.0, rng(seed))) for seed in range(400)]
    expected = ramp.mean_rate * 5
    assert np.mean(counts) == pytest.approx(expected, rel=0.04)
    assert np.var(counts) == pytest.approx(expected, rel=0.25)
    assert all(ramp.offsets_until(5.0, rng(seed)).max() < 5.0 for seed in range(20))


def test_all_at_once() -> None:
    np.testing.assert_array_equal(AllAtOnce().offsets(3, rng()), [0, 0, 0])
    with pytest.raises(BenchError, match="--num-prompts"):
        AllAtOnce().offsets_until(10, rng())


def test_a_trace_keeps_order_and_gaps_exactly() -> None:
    stamps = (100.0, 100.25, 100.25, 103.0, 110.5)
    np.testing.assert_array_equal(Trace(stamps).offsets(5, rng()), [0, 0.25, 0.25, 3.0, 10.5])
    np.testing.assert_array_equal(Trace(stamps, 2.0).offsets(4, rng()), [0, 0.125, 0.125, 1.5])
    np.testing.assert_array_equal(Trace(stamps).offsets_until(3.0, rng()), [0, 0.25, 0.25])
    assert Trace(stamps, 2.0).mean_rate == 4 / 5.25
    assert Trace((1.0, 1.0)).mean_rate is None
    with pytest.raises(BenchError, match="6 arrivals were asked for and the trace has 5"):
        Trace(stamps).offsets(6, rng())
    with pytest.raises(BenchError, match="timestamp 3 of the trace is 1 s, before"):
        Trace((0.0, 2.0, 1.0))
    with pytest.raises(BenchError, match="timestamp 2"):
        Trace((0.0, math.nan))
    with pytest.raises(BenchError, match="at least one"):
        Trace(())


PREFIXED = [Poisson(RATE), Gamma(RATE, 0.3), Constant(RATE), OnOff(RATE, 0.7, 0.4)]


@pytest.mark.parametrize("arrival", PREFIXED, ids=lambda each: each.describe())
def test_a_run_limited_by_time_begins_like_one_limited_by_number(arrival: Arrival) -> None:
    """Also where more has to be drawn than was guessed at first."""
    many = arrival.offsets(5000, rng())
    for duration in (0.05, 1.0, 60.0):
        np.testing.assert_array_equal(arrival.offsets_until(duration, rng()), many[many < duration])


@pytest.mark.parametrize("arrival", [Poisson(1.0), Gamma(1.0, 0.01)], ids=lambda each: each.describe())
def test_a_sluggish_guess_of_the_number_is_made_up_for(arrival: Arrival) -> None:
    many = arrival.offsets(100_000, rng(3))
    for duration in (1.0, 50.0, 1000.0):
        np.testing.assert_array_equal(arrival.offsets_until(duration, rng(3)), many[many < duration])


@pytest.mark.parametrize("arrival", [*PREFIXED, *RAMPS, Trace((0.0, 1.0, 2.0))], ids=lambda each: each.describe())
def test_mean_rate_ascent_and_repeatability(arrival: Arrival) -> None:
    count = 3 if isinstance(arrival, Trace) else COUNT
    times = arrival.offsets(count, rng())
    assert times.shape == (count,) and np.all(np.diff(times) >= 0) and times[0] >= 0
    np.testing.assert_array_equal(times, arrival.offsets(count, rng()))
    if not isinstance(arrival, Trace):
        assert arrival.mean_rate is not None
        assert count / times[-1] == pytest.approx(arrival.mean_rate, rel=0.05)
        assert not np.array_equal(times, arrival.offsets(count, rng(8))) or isinstance(arrival, Constant)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Poisson(0), "request rate is 0"),
        (lambda: Poisson(math.inf), "request rate is inf"),
        (lambda: Poisson(math.nan), "request rate is nan"),
        (lambda: Gamma(1, 0), "burstiness is 0"),
        (lambda: Gamma(1, math.inf), "burstiness is inf"),
        (lambda: Constant(-1), "request rate is -1"),
        (lambda: OnOff(1, 0, 1), "on-phase in seconds is 0"),
        (lambda: OnOff(1, 1, -1), "off-phase in seconds is -1"),
        (lambda: Ramp(0, 0), "from 0 to 0"),
        (lambda: Ramp(-1, 1), "start rate is -1"),
        (lambda: Ramp(1, math.inf), "end rate is inf"),
        (lambda: Ramp(0, 1, "exponential"), "cannot start or end at 0"),
        (lambda: Ramp(1, 2, "stepwise"), "strategy is 'stepwise'; it must be one of linear, exponential"),
        (lambda: Trace((0.0,), 0), "time scale is 0"),
        (lambda: Poisson(1).offsets_until(0, rng()), "duration in seconds is 0"),
        (lambda: Ramp(1, 2).offsets_until(-1, rng()), "duration in seconds is -1"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        make()
