"""How many servers are wanted."""

from __future__ import annotations

import random

import pytest

from headway.policy.fleet.scaling import Scaler, ScalingRule

S = 1_000_000_000


def test_as_many_are_wanted_as_hold_the_choices_within_limits() -> None:
    scaler = Scaler(ScalingRule(2, 5, choices=10, down_after_s=0.0))
    wanted = [scaler.wanted(choices, now) for now, choices in enumerate((0, 20, 21, 50, 51, 900, 30, 1))]
    assert wanted == [2, 2, 3, 5, 5, 5, 3, 2]


def test_one_goes_when_it_was_not_needed_for_the_whole_time() -> None:
    scaler = Scaler(ScalingRule(1, 9, choices=1, down_after_s=10.0))
    said = [
        scaler.wanted(choices, at * S) for at, choices in ((0, 5), (4, 3), (10, 1), (11, 1), (14, 1), (15, 1), (16, 7))
    ]
    assert said == [5, 5, 5, 3, 3, 1, 7]


def test_it_is_the_most_of_what_was_needed_of_late() -> None:
    rng, scaler, asked, now = random.Random(3), Scaler(ScalingRule(1, 50, 3, 20.0)), list[tuple[int, int]](), 0
    for _ in range(500):
        now += rng.randrange(5 * S)
        choices = rng.randrange(200)
        asked.append((now, min(50, max(1, -(-choices // 3)))))
        assert scaler.wanted(choices, now) == max(needed for at, needed in asked if at >= now - 20 * S)


@pytest.mark.parametrize("wrong", [(0, 2, 1, 1.0), (3, 2, 1, 1.0), (1, 2, 0, 1.0), (1, 2, 1, -1.0)])
def test_a_rule_that_makes_no_sense_is_refused(wrong: tuple[int, int, int, float]) -> None:
    with pytest.raises(ValueError, match=r"give 1 or more|it must be"):
        ScalingRule(*wrong)
