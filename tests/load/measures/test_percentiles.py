"""Percentiles against closed forms, scipy, and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats

from headway.load.measures.anytime import anytime_interval
from headway.load.measures.dependence import autocorrelation_time, block_length, design_effect, effective_count
from headway.load.measures.percentiles import distribution, proportion_interval, samples_needed
from headway.load.measures.probability import beta_cdf, beta_quantile, binomial_ranks, t_quantile, t_tail

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


def autoregressive(rng: np.random.Generator, rho: float, runs: int, count: int) -> np.ndarray:
    """AR(1) in its equilibrium, standard normal margins, shape (runs, count)."""
    noise = rng.standard_normal((runs, count)) * math.sqrt(1.0 - rho**2)
    values = np.empty((runs, count))
    values[:, 0] = rng.standard_normal(runs)
    for i in range(1, count):
        values[:, i] = rho * values[:, i - 1] + noise[:, i]
    return values


def coverage(samples: np.ndarray, p: float, truth: float) -> float:
    """Share of samples (rows) whose interval holds the truth."""
    found = [distribution(sample, [p]).percentiles[0] for sample in samples]
    assert all(each.value is not None for each in found)
    return float(np.mean([each.low <= truth <= each.high for each in found]))  # type: ignore[operator]


def test_values_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=5000)
    found = distribution(values, PERCENTILES)
    assert [each.value for each in found.percentiles] == pytest.approx(np.percentile(values, PERCENTILES))
    assert (found.mean, found.std) == pytest.approx((np.mean(values), np.std(values)))
    assert (found.minimum, found.maximum, found.count) == (values.min(), values.max(), 5000)
    for each in found.percentiles:
        assert each.low < each.value < each.high  # type: ignore[operator]


@pytest.mark.parametrize(("p", "needs"), [(50, 6), (90, 36), (95, 72), (99, 368), (99.9, 3688), (1, 368)])
def test_samples_needed_closed_form(p: float, needs: int) -> None:
    assert samples_needed(p) == needs
    # Some orders of independent values look like dependence by chance, which only asks for more.
    orders = [np.random.default_rng(seed).permutation(needs).astype(float) for seed in range(10)]
    enough = [distribution(order, [p]).percentiles[0] for order in orders]
    short = [distribution(order[:-1], [p]).percentiles[0] for order in orders]
    assert sum(each.value is not None for each in enough) >= 5
    assert all(each.needs is None or each.needs > needs for each in enough)
    assert all((each.value, each.low, each.high) == (None, None, None) for each in short)
    assert min(each.needs for each in short if each.needs is not None) == needs


def test_needs_grow_with_dependence() -> None:
    assert samples_needed(99, tau=2.5) == 920
    assert samples_needed(50, confidence=0.99) == math.ceil(math.log(0.005) / math.log(0.5))
    slow = np.repeat(np.random.default_rng(2).exponential(size=50), 20)
    found = distribution(slow, [99.0]).percentiles[0]
    # 1000 values are enough for a P99, but not 50 of them twenty times over: nobody knows how far up it may lie.
    assert found.value is not None and found.low is not None and found.high is None
    assert found.needs is not None and found.needs > 2000


@pytest.mark.parametrize("n", [5, 6, 36, 368, 1000, 12_345, 1_000_000])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99, 0.999])
def test_ranks_agree_with_scipy(n: int, share: float) -> None:
    # The tail must not hold more than 2.5 %, and one rank further in it must.
    low, high = binomial_ranks(n, share, 0.95)
    below = scipy.stats.binom(n, share)
    if low is None:
        assert below.cdf(0) > 0.025
    else:
        assert below.cdf(low - 1) <= 0.025 < below.cdf(low)
    if high is None:
        assert below.sf(n - 1) > 0.025
    else:
        assert below.sf(high - 1) <= 0.025 < below.sf(high - 2)


def test_interval_agrees_with_scipys_quantile_test() -> None:
    values = np.sort(np.random.default_rng(3).lognormal(size=400))
    for p in (10.0, 50.0, 90.0):
        theirs = scipy.stats.quantile_test(values, p=p / 100).confidence_interval(0.95)
        ours = distribution(values[np.random.default_rng(4).permutation(400)], [p]).percentiles[0]
        assert (ours.low, ours.high) == (theirs.low, theirs.high)


def test_special_functions_agree_with_scipy() -> None:
    for a in (0.5, 1.0, 30.0, 1e4, 1e6):
        for b in (0.5, 2.0, 50.0, 1e5):
            for x in (0.0, 1e-4, 0.1, 0.5, 0.9, 0.999, 1.0):
                assert beta_cdf(x, a, b) == pytest.approx(scipy.special.betainc(a, b, x), abs=1e-12)
    assert beta_quantile(0.3, 5.0, 2.0) == pytest.approx(scipy.stats.beta.ppf(0.3, 5, 2), abs=1e-12)
    for df in (1.0, 2.7, 30.0, 1e5):
        assert t_quantile(0.95, df) == pytest.approx(scipy.stats.t.ppf(0.975, df), rel=1e-9)
        assert t_tail(2.5, df) == pytest.approx(2 * scipy.stats.t.sf(2.5, df), rel=1e-9)


@pytest.mark.parametrize("p", [50.0, 90.0, 99.0])
@pytest.mark.parametrize("shape", ["exponential", "lognormal"])
def test_coverage_of_independent_values(p: float, shape: str) -> None:
    rng = np.random.default_rng(5)
    law = {"exponential": scipy.stats.expon(), "lognormal": scipy.stats.lognorm(1.5)}[shape]
    samples = law.rvs(size=(300, 800), random_state=rng)
    assert coverage(samples, p, law.ppf(p / 100)) > 0.925


@pytest.mark.parametrize("p", [50.0, 90.0])
def test_coverage_of_dependent_values(p: float) -> None:
    samples = np.exp(autoregressive(np.random.default_rng(6), 0.9, 200, 2000))
    truth = math.exp(scipy.stats.norm.ppf(p / 100))
    low, high = binomial_ranks(2000, p / 100, 0.95)
    assert low is not None and high is not None
    ordered = np.sort(samples, axis=1)
    naive = np.mean((ordered[:, low - 1] <= truth) & (truth <= ordered[:, high - 1]))
    assert naive < 0.7
    assert coverage(samples, p, truth) > 0.9


def test_an_open_interval_is_not_a_wrong_one() -> None:
    # If there are too few dependent values, nearly all intervals stay open above, and a wrong bound is rare.
    samples = np.exp(autoregressive(np.random.default_rng(7), 0.9, 200, 600))
    truth = math.exp(scipy.stats.norm.ppf(0.99))
    found = [distribution(sample, [99.0]).percentiles[0] for sample in samples]
    assert sum(each.high is None for each in found) > len(found) / 2
    wrong = [
        each
        for each in found
        if (each.low is not None and truth < each.low) or (each.high is not None and truth > each.high)
    ]
    assert len(wrong) / len(found) < 0.05


def test_gaps_of_one_request_count_together() -> None:
    # Every request has a pace of its own: 10,000 gaps of 100 requests say no more than 100 requests do.
    rng = np.random.default_rng(8)
    covered, naive = [], []
    for _ in range(200):
        pace = rng.exponential(size=100)
        gaps = np.repeat(pace, 100) * rng.lognormal(0.0, 0.01, 10_000)
        request = np.repeat(np.arange(100), 100)
        truth = math.log(2.0)
        grouped = distribution(gaps, [50.0], groups=request).percentiles[0]
        alone = binomial_ranks(10_000, 0.5, 0.95)
        ordered = np.sort(gaps)
        covered.append(grouped.low <= truth <= grouped.high)  # type: ignore[operator]
        naive.append(ordered[alone[0] - 1] <= truth <= ordered[alone[1] - 1])  # type: ignore[operator]
    assert np.mean(covered) > 0.92
    assert np.mean(naive) < 0.3


def test_design_effect() -> None:
    rng = np.random.default_rng(9)
    request = np.repeat(np.arange(200), 50)
    assert design_effect(rng.standard_normal(10_000), request) < 1.5
    assert design_effect(np.repeat(rng.standard_normal(200), 50), request) == pytest.approx(50, rel=0.1)
    assert design_effect(np.ones(10_000), request) == 1.0
    assert design_effect(rng.standard_normal(100), np.zeros(100, int)) < 3.0
    # Neighbouring requests share the server's steps as well: ten at a time, each of fifty gaps.
    shared = np.repeat(rng.standard_normal(20), 500)
    assert design_effect(shared, request) > 200


@pytest.mark.parametrize(("rho", "tau"), [(0.0, 1.0), (0.5, 3.0), (0.9, 19.0)])
def test_autocorrelation_time_of_a_known_process(rho: float, tau: float) -> None:
    samples = autoregressive(np.random.default_rng(10), rho, 60, 3000)
    assert np.mean([autocorrelation_time(sample) for sample in samples]) == pytest.approx(tau, rel=0.12, abs=0.03)


def test_block_length_follows_the_memory() -> None:
    rng = np.random.default_rng(11)
    lengths = [np.mean([block_length(each) for each in autoregressive(rng, rho, 40, 1000)]) for rho in (0.0, 0.5, 0.9)]
    assert lengths[0] < 4 < lengths[1] < 20 < lengths[2] < 95
    assert block_length(np.ones(100)) == 1
    assert block_length(np.arange(5.0)) == 1


def test_effective_count_is_reported() -> None:
    rng = np.random.default_rng(12)
    assert distribution(rng.exponential(size=1000), [50.0]).effective_count == 1000
    slow = distribution(autoregressive(rng, 0.9, 1, 5000)[0], [50.0])
    assert 200 < slow.effective_count < 700
    assert effective_count(np.empty(0)) == 0.0


def test_a_million_gaps() -> None:
    gaps = np.random.default_rng(13).exponential(size=1_000_000)
    found = distribution(gaps, PERCENTILES, groups=np.repeat(np.arange(10_000), 100))
    for each, p in zip(found.percentiles, PERCENTILES, strict=True):
        assert each.low <= -math.log(1 - p / 100) * 1.01  # type: ignore[operator]
        assert each.high >= -math.log(1 - p / 100) * 0.99  # type: ignore[operator]


def test_degenerate_samples() -> None:
    nothing = distribution(np.empty(0), [50.0, 99.0])
    assert nothing.count == 0 and math.isnan(nothing.mean)
    assert [each.needs for each in nothing.percentiles] == [6, 368]
    same = distribution(np.full(500, 7.0), [50.0, 99.0])
    assert [(each.low, each.value, each.high) for each in same.percentiles] == [(7.0, 7.0, 7.0)] * 2
    assert distribution(np.array([1.0]), [50.0]).percentiles[0].needs == 6


def test_proportion_interval_is_clopper_pearsons() -> None:
    for met, total in ((0, 10), (10, 10), (99, 100), (37, 1000)):
        theirs = scipy.stats.binomtest(met, total).proportion_ci(0.95, method="exact")
        assert proportion_interval(met, total) == pytest.approx((theirs.low, theirs.high), abs=1e-10)
    narrow, wide = proportion_interval(90, 100), proportion_interval(90, 100, n_eff=20)
    assert wide[0] < narrow[0] and narrow[1] < wide[1]
    assert wide == pytest.approx(proportion_interval(18, 20))
    assert proportion_interval(0, 0) == (0.0, 1.0)


def test_anytime_interval_holds_at_every_look() -> None:
    # Looking after each batch, the interval that is meant for one look misses the truth far more often than 5 %.
    rng = np.random.default_rng(14)
    share, batch, looks, runs = 0.9, 50, 8, 80
    missed_anytime = missed_single = 0
    for _ in range(runs):
        missed = rng.random(batch * looks) >= share
        parts = [missed[: batch * look] for look in range(1, looks + 1)]
        anytime = [anytime_interval(part.astype(float)) for part in parts]
        single = [proportion_interval(len(part) - int(part.sum()), len(part)) for part in parts]
        missed_anytime += any(not low <= share <= high for low, high in anytime)
        missed_single += any(not low <= share <= high for low, high in single)
    assert missed_anytime / runs <= 0.05 + 0.03
    assert missed_single / runs > 0.1
    assert anytime_interval(np.array([])) == (0.0, 1.0)


@pytest.mark.parametrize("requests", [1, 5, 6])
def test_many_gaps_of_a_handful_of_requests_are_refused_as_their_ttft_is(requests: int) -> None:
    groups = np.repeat(np.arange(requests), 500)
    values = np.random.default_rng(1).exponential(size=len(groups))
    found = distribution(values, PERCENTILES[:4], groups=groups).percentiles
    ttft = distribution(values[:requests], [50.0]).percentiles[0]
    assert all((each.value is None) == (ttft.value is None) == (requests < 6) for each in found)
    assert all(each.needs is not None and each.needs >= 3000 for each in found if each.value is None)
