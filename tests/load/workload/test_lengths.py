"""Distributions of lengths and times: their shape, and how they are written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from headway.load.errors import BenchError
from headway.load.workload.lengths import (
    Distribution,
    Exponential,
    Fixed,
    LogNormal,
    Normal,
    Uniform,
    parse_distribution,
    parse_length,
    parse_range_ratio,
    tokens,
)

COUNT = 20_000


def drawn(distribution: Distribution, seed: int = 3) -> np.ndarray:
    return distribution.values(COUNT, np.random.default_rng(seed))


def test_lognormal_mean_and_cv_are_those_of_the_lengths() -> None:
    values = drawn(LogNormal(200, 0.8))
    sigma = math.sqrt(math.log(1 + 0.8**2))
    assert stats.kstest(values, stats.lognorm(sigma, scale=200 / math.sqrt(1 + 0.8**2)).cdf).pvalue > 0.001
    assert values.mean() == pytest.approx(200, rel=0.03)
    assert values.std() / values.mean() == pytest.approx(0.8, rel=0.05)


def test_normal_uniform_exponential_and_fixed() -> None:
    assert stats.kstest(drawn(Normal(200, 0.2)), stats.norm(200, 40).cdf).pvalue > 0.001
    assert stats.kstest(drawn(Exponential(5)), stats.expon(scale=5).cdf).pvalue > 0.001
    values, counts = np.unique(drawn(Uniform(3, 12)), return_counts=True)
    np.testing.assert_array_equal(values, np.arange(3, 13))
    assert stats.chisquare(counts).pvalue > 0.001
    np.testing.assert_array_equal(drawn(Fixed(7)), np.full(COUNT, 7.0))


def test_bounds_clip() -> None:
    values = drawn(LogNormal(200, 0.8, minimum=50, maximum=400))
    assert values.min() == 50 and values.max() == 400
    assert (drawn(Normal(10, 2.0)) >= 0).all()
    assert drawn(Exponential(5, maximum=6)).max() == 6


def test_tokens_are_whole_and_at_least_one() -> None:
    lengths = tokens(Normal(2, 2.0), COUNT, np.random.default_rng(0))
    assert lengths.dtype == np.int64 and lengths.min() == 1


def test_draws_do_not_depend_on_how_many_follow() -> None:
    for distribution in (Uniform(1, 900), Normal(100, 0.4), LogNormal(100, 1.0), Exponential(3)):
        few = distribution.values(10, np.random.default_rng(5))
        np.testing.assert_array_equal(few, distribution.values(100, np.random.default_rng(5))[:10])


def test_the_range_around_a_mean_is_that_of_the_random_dataset() -> None:
    assert Uniform.around(1000, 0.0) == Uniform(1000, 1000)
    assert Uniform.around(1000, 0.3) == Uniform(700, 1300)
    assert Uniform.around(5, 0.5) == Uniform(2, 8)
    assert Uniform.around(1, 0.9) == Uniform(1, 2)
    with pytest.raises(BenchError, match="range ratio is 1"):
        Uniform.around(10, 1.0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (100, Fixed(100)),
        ("100", Fixed(100)),
        ("fixed:100", Fixed(100)),
        ("fixed:value=100", Fixed(100)),
        ("uniform:min=10,max=20", Uniform(10, 20)),
        (" uniform: min = 10 , max = 20 ", Uniform(10, 20)),
        ("uniform:mean=100,ratio=0.5", Uniform(50, 150)),
        ("normal:mean=100,cv=0.3", Normal(100, 0.3)),
        ("lognormal:mean=200,cv=0.8,max=4000", LogNormal(200, 0.8, maximum=4000)),
        ("lognormal:mean=200,cv=0.8,min=5,max=4000", LogNormal(200, 0.8, 5, 4000)),
        ("exponential:mean=5,max=20", Exponential(5, maximum=20)),
        ({"distribution": "normal", "mean": 100, "cv": 0.3, "min": 4}, Normal(100, 0.3, 4)),
        ({"distribution": "fixed", "value": 3}, Fixed(3)),
    ],
)
def test_one_line_or_a_table_says_it(said: Any, expected: Distribution) -> None:
    assert parse_length(said) == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("gauss:mean=3", "'gauss' in 'gauss:mean=3' is not a distribution; choose one of fixed, uniform"),
        ("lognorm:mean=3,cv=1", "did you mean 'lognormal'?"),
        ("normal:mean=3", "lacks cv="),
        ("normal:mean=3,sd=1", "'sd' in 'normal:mean=3,sd=1' is unknown to a normal distribution"),
        ("lognormal:mean=3,cv=1,maxi=5", "did you mean 'max'?"),
        ("normal:mean=three,cv=1", "mean=three in 'normal:mean=three,cv=1' is not a number"),
        ("normal:mean=nan,cv=1", "mean=nan in .* is not finite"),
        ("normal:mean=0,cv=1", "mean of a distribution is 0"),
        ("normal:mean=5,cv=-1", "cv of a distribution is -1"),
        ("normal:mean=5,cv=1,min=9,max=3", "bounded by 9 and 3"),
        ("uniform:min=5", "needs either min= and max=, or mean= and ratio="),
        ("uniform:min=5,max=9,mean=7", "needs either"),
        ("uniform:min=5.5,max=9", "min=5.5 in .* is not a whole number"),
        ("uniform:min=9,max=5", "goes from 9 to 5"),
        ("", "is not a number"),
        ("-5", "value of a distribution is -5"),
        ("0", "a mean of 0 is too small"),
        (True, "True is not a distribution"),
        ([1], "is not a distribution"),
        ({"mean": 5}, "has no distribution; add distribution = one of fixed"),
        ({"distribution": "normal", "mean": True, "cv": 1}, "mean=True"),
    ],
)
def test_what_is_not_understood_is_named(said: Any, words: str) -> None:
    with pytest.raises(BenchError, match=words.replace("?", r"\?")) as caught:
        parse_length(said)
    assert "\n" not in str(caught.value)


def test_times_may_be_below_one_second() -> None:
    assert parse_distribution("exponential:mean=0.25") == Exponential(0.25)
    with pytest.raises(BenchError, match=r"a mean of 0\.25 is too small"):
        parse_length("exponential:mean=0.25")


def test_range_ratios() -> None:
    assert parse_range_ratio("0.3") == (0.3, 0.3)
    assert parse_range_ratio(0.0) == (0.0, 0.0)
    assert parse_range_ratio('{"input": 0.3, "output": 0.5}') == (0.3, 0.5)
    assert parse_range_ratio({"input": 0.1, "output": 0.2}) == (0.1, 0.2)
    for wrong in ("1.0", "-0.1", "much", '{"input": 0.3}', '{"in": 0.3, "out": 0.1}', "[]", "nan"):
        with pytest.raises(BenchError, match="--random-range-ratio"):
            parse_range_ratio(wrong)
