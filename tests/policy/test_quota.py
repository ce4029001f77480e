"""Budgets: exact to the token whatever becomes of requests, and after a crash at any point."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from headway.policy.admission.quota import MINUTE_US, TOTAL, OverLimit, Quotas, Record, Settle, State
from headway.policy.admission.tenants import Limits, Tenant, TenantTable
from headway.policy.objectives.output_lengths import OutputBound

SECOND = 1_000_000_000
NAMES = ("acme", "lab", "default")  # the last one is not in the table


def table(requests: int = 0, tokens: int = 0, total: int = 0) -> TenantTable:
    acme = Tenant(name="acme", requests_per_minute=requests, tokens_per_minute=tokens)
    return TenantTable((acme, Tenant(name="lab")), Limits(tokens_per_minute=total))


def reserved(quotas: Quotas, tokens: int, now: int, tenant: str = "acme") -> int:
    made = quotas.reserve(tenant, tokens, now)
    assert isinstance(made, int), made
    return made


def refused(quotas: Quotas, tokens: int, now: int, tenant: str = "acme") -> OverLimit:
    made = quotas.reserve(tenant, tokens, now)
    assert isinstance(made, OverLimit)
    return made


def test_what_is_not_used_comes_back_and_what_fails_costs_nothing() -> None:
    quotas = Quotas(table(tokens=1000), 0)
    first, second = reserved(quotas, 600, 0), reserved(quotas, 400, 0)
    assert refused(quotas, 1, 0).unit == "tokens"
    quotas.settle(first, 100, 0)
    quotas.settle(second, None, 0)
    requests, tokens = quotas.of("acme")
    assert (tokens.reserved, tokens.settled, tokens.refunded, tokens.left(0)) == (1000, 100, 900, 900)
    assert (requests.reserved, requests.settled, requests.refunded) == (2, 1, 1)


def test_what_is_used_beyond_is_taken_too() -> None:
    quotas = Quotas(table(tokens=600), 0)
    quotas.settle(reserved(quotas, 100, 0), 900, 0)
    tokens = quotas.of("acme")[1]
    assert (tokens.reserved, tokens.settled, tokens.left(0)) == (900, 900, 0)
    assert refused(quotas, 60, 0).wait_ns == (300 + 60) * SECOND // 10  # ten tokens a second


def test_budgets_refill_at_once_where_the_clock_was_set_back_between_two_servers() -> None:
    written: list[Record] = []
    before = Quotas(table(tokens=600), 3600 * SECOND, lambda record: written.append(copy.deepcopy(record)))
    before.settle(reserved(before, 600, 3600 * SECOND), 600, 3600 * SECOND)
    after = Quotas(table(tokens=600), 0, past=written)
    assert after.of("acme")[1].left(0) == 0 and after.of("acme")[1].left(30 * SECOND) == 300


def test_a_request_above_a_whole_budget_comes_in_when_that_is_full() -> None:
    quotas = Quotas(table(tokens=60), 0)
    number = reserved(quotas, 500, 0)
    assert quotas.open[number].tokens == 60
    quotas.settle(number, 500, 0)
    assert refused(quotas, 500, 0).wait_ns == 500 * SECOND
    reserved(quotas, 500, 500 * SECOND)


def test_the_budget_of_all_limits_each() -> None:
    quotas = Quotas(table(tokens=1000, total=300), 0)
    reserved(quotas, 200, 0, "lab")
    over = refused(quotas, 200, 0)
    assert (over.tenant, over.limit, over.left, over.wait_ns) == (TOTAL, 300, 100, 20 * SECOND)
    assert quotas.of("acme")[1].reserved == 0, "all or none"


@given(
    limit=st.integers(1, 10**8),
    taken=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**11)), max_size=8),
    asked=st.integers(1, 10**8),
)
def test_who_waits_as_told_is_let_in_and_not_a_moment_before(
    limit: int, taken: list[tuple[int, int]], asked: int
) -> None:
    """No refusal at the edge of a window: there are no windows."""
    quotas, now = Quotas(table(tokens=limit), 0), 0
    for tokens, later in taken:
        quotas.reserve("acme", tokens, now)
        now += later
    over = quotas.reserve("acme", asked, now)
    if isinstance(over, OverLimit):
        assert isinstance(quotas.reserve("acme", asked, (now // 1000) * 1000 + over.wait_ns - 1), OverLimit)
        assert isinstance(quotas.reserve("acme", asked, now + over.wait_ns), int)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5 * SECOND)), min_size=1, max_size=60))
def test_no_more_than_a_minutes_budget_and_what_refills_gets_in(asked: list[tuple[int, int]]) -> None:
    """This holds in any span of time, for requests within the limit that use what they reserve."""
    quotas, now, admitted = Quotas(table(tokens=600), 0), 0, list[tuple[int, int]]()
    for tokens, later in asked:
        if isinstance(number := quotas.reserve("acme", tokens, now), int):
            quotas.settle(number, tokens, now)
            admitted.append((now, tokens))
        now += later
    for first, (began, _) in enumerate(admitted):
        got = 0
        for when, tokens in admitted[first:]:
            got += tokens
            assert got <= 600 + (when - began) * 600 / (60 * SECOND)


def test_other_limits_keep_what_was_used() -> None:
    quotas = Quotas(table(tokens=600), 0)
    reserved(quotas, 500, 0)
    quotas.set_tenants(table(tokens=1000), 0)
    assert quotas.of("acme")[1].left(0) == 500
    quotas.set_tenants(table(tokens=100), 0)
    assert quotas.of("acme")[1].left(0) == 100
    quotas.set_tenants(TenantTable(), 0)
    assert "acme" in quotas.meters, "it has a request that has not ended"
    quotas.settle(0, 500, 0)
    quotas.set_tenants(TenantTable(), 0)
    assert "acme" not in quotas.meters and "lab" not in quotas.meters


def test_records_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="reservation 3 is settled and was never made"):
        Quotas(table(), 0, past=[State(0, {}, {}, 0), Settle(0, 3)])


class Server(RuleBasedStateMachine):
    """Requests come, end, fail and are preempted at a server that is killed at any point, whatever it had written."""

    numbers: Bundle[int] = Bundle("numbers")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.limits = table(requests=30, tokens=5000, total=8000)
        self.journal: list[bytes] = []
        self.fails = False
        self.quotas = Quotas(self.limits, 0, self.write)
        self.settled = dict.fromkeys(NAMES, 0)
        self.outstanding: dict[int, tuple[str, int]] = {}

    def write(self, record: Record) -> None:
        if self.fails:
            raise OSError("no space")
        line = msgspec.json.encode(record)
        self.journal = [line] if isinstance(record, State) else [*self.journal, line]

    @rule(target=numbers, tenant=st.sampled_from(NAMES), tokens=st.integers(0, 9000))
    def reserve(self, tenant: str, tokens: int) -> int:
        made = self.quotas.reserve(tenant, tokens, self.now)
        if isinstance(made, OverLimit):
            return -1
        self.outstanding[made] = tenant, self.quotas.open[made].tokens
        return made

    @rule(tenant=st.sampled_from(NAMES), tokens=st.integers(0, 9000))
    def reserve_without_room_on_the_disk(self, tenant: str, tokens: int) -> None:
        before = copy.deepcopy(self.quotas.state(self.now))
        self.fails = True
        try:
            assert isinstance(self.quotas.reserve(tenant, tokens, self.now), OverLimit)
        except OSError:
            assert self.quotas.state(self.now) == before
        finally:
            self.fails = False

    @rule(number=consumes(numbers), used=st.none() | st.integers(0, 12_000))
    def end(self, number: int, used: int | None) -> None:
        """End a request: it came to its end, was cancelled in the middle, or failed."""
        if number in self.outstanding:
            tenant, _ = self.outstanding.pop(number)
            self.quotas.settle(number, used, self.now)
            self.settled[tenant] += used or 0

    @rule(later=st.integers(0, 90 * SECOND))
    def time_passes(self, later: int) -> None:
        self.now += later

    @rule(requests=st.integers(0, 50), tokens=st.integers(0, 9000))
    def reload(self, requests: int, tokens: int) -> None:
        self.limits = table(requests=requests, tokens=tokens, total=8000)
        self.quotas.set_tenants(self.limits, self.now)

    @precondition(lambda self: self.journal)
    @rule(later=st.integers(0, 90 * SECOND), wall_clock_went_back=st.booleans())
    def crash(self, later: int, wall_clock_went_back: bool) -> None:
        before = self.quotas
        self.now = max(0, self.now - later) if wall_clock_went_back else self.now + later
        past = [msgspec.json.decode(line, type=Record) for line in self.journal]
        self.quotas = Quotas(self.limits, self.now, self.write, past)
        for meter in (meter for both in before.meters.values() for meter in both):
            meter.at_us = min(meter.at_us, self.now // 1000)  # budgets refill from now on
        for number in self.outstanding:
            before.settle(number, None, self.now)  # what was under way is refunded
        self.outstanding.clear()
        before.set_tenants(self.limits, self.now)
        assert before.state(self.now) == self.quotas.state(self.now)

    @invariant()
    def every_token_is_accounted_for(self) -> None:
        for name in NAMES:
            requests, tokens = self.quotas.of(name)
            mine = [reserved for tenant, reserved in self.outstanding.values() if tenant == name]
            assert tokens.settled == self.settled[name]
            assert (tokens.outstanding, requests.outstanding) == (sum(mine), len(mine))
            assert tokens.level <= tokens.limit * MINUTE_US
        of_all = self.quotas.of(TOTAL)[1]
        assert of_all.settled == sum(self.settled.values())
        assert of_all.outstanding == sum(reserved for _, reserved in self.outstanding.values())


Server.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestServer = Server.TestCase


def test_what_hardly_any_output_exceeds() -> None:
    bound = OutputBound()
    assert bound.expected(500) == 500
    for length in [100, 120, 80, 110, 90] * 20:
        bound.ended(length)
    assert 120 < bound.expected(500) < 180
    assert bound.expected(50) == 50
