"""Breakers: who gets requests after failures, and how those who come back begin."""

from __future__ import annotations

import pytest

from headway.policy.fleet.health import LEAST_SHARE, Breaker, HealthRule, RetryBudget

S = 1_000_000_000
RULE = HealthRule(failures=3, eject_s=5.0, most_eject_s=30.0, slow_start_s=10.0)


def failing(breaker: Breaker, now: int, times: int = 3) -> None:
    for _ in range(times):
        breaker.sent(now)
        breaker.failed(now)


def test_failures_in_a_row_eject_and_one_request_tries_again() -> None:
    breaker, now = Breaker(RULE), 100 * S
    failing(breaker, now, 2)
    breaker.succeeded(now)
    failing(breaker, now, 2)
    assert breaker.allows(now) and breaker.state(now) == "closed"
    failing(breaker, now, 1)
    assert not breaker.allows(now) and breaker.state(now) == "open" and breaker.wait_ns(now) == 5 * S
    now += 5 * S
    assert breaker.allows(now) and breaker.state(now) == "half_open"
    breaker.sent(now)
    assert not breaker.allows(now)  # only one tries
    breaker.succeeded(now)
    assert breaker.allows(now) and breaker.state(now) == "closed"


def test_a_backend_that_comes_back_gets_its_share_slowly() -> None:
    breaker, now = Breaker(RULE), 0
    assert breaker.share(now) == 1.0
    failing(breaker, now)
    now += 6 * S
    breaker.sent(now)
    breaker.succeeded(now)
    assert breaker.share(now) == pytest.approx(LEAST_SHARE) and breaker.share(now + 5 * S) == pytest.approx(0.55)
    assert breaker.share(now + 20 * S) == 1.0


def test_each_ejection_is_longer_and_is_forgotten_slowly() -> None:
    breaker, now, waits = Breaker(RULE), 0, []
    failing(breaker, now)
    for _ in range(4):
        waits.append(breaker.wait_ns(now) // S)
        now += breaker.wait_ns(now)
        breaker.sent(now)
        breaker.failed(now)  # a single failure of the one that tries is enough
    assert waits == [5, 10, 20, 30]
    now += 31 * S
    breaker.sent(now)
    breaker.succeeded(now)
    failing(breaker, now + 1000 * S)
    assert breaker.ejections == 1 and breaker.wait_ns(now + 1000 * S) == 5 * S


def test_one_that_fails_often_but_never_in_a_row_is_ejected_too() -> None:
    breaker = Breaker(RULE)
    for number in range(40):
        breaker.failed(0) if number % 3 else breaker.succeeded(0)
        if not breaker.allows(0):
            break
    assert 10 <= number < 39 and not breaker.allows(0)
    steady = Breaker(RULE)
    for number in range(300):
        steady.failed(0) if number % 3 == 0 else steady.succeeded(0)
    assert steady.allows(0)


def test_a_try_of_which_nothing_is_heard_is_not_waited_for() -> None:
    breaker = Breaker(RULE)
    failing(breaker, 0)
    breaker.sent(5 * S)
    assert not breaker.allows(6 * S) and breaker.allows(36 * S)
    breaker.sent(36 * S)
    breaker.gave_up()
    assert breaker.allows(36 * S)


def test_questions_that_go_unanswered_take_it_down_until_one_is_answered() -> None:
    breaker = Breaker(RULE)
    for _ in range(2):
        breaker.asked(False, 0)
    assert breaker.allows(0)
    breaker.asked(True, 0)
    for _ in range(3):
        breaker.asked(False, 0)
    assert breaker.state(0) == "down" and not breaker.allows(10**6 * S)
    breaker.asked(True, 9 * S)
    assert breaker.allows(9 * S) and breaker.share(9 * S) == pytest.approx(LEAST_SHARE)


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(per_retry=5, most=5)
    assert [budget.spend() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(10):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]
