"""Budgets of requests and tokens a minute: reserved when a request is admitted, settled by what it used.

A budget refills continuously, up to what a minute brings. It counts in units times microseconds of a minute, so that a
microsecond brings a whole number and nothing is ever rounded. A request takes from the budget of its tenant and from
that of all. Where it turns out to use more than was reserved, the rest is taken too, and the budget may be below zero
until it has refilled.

Every change is a `Record`, and is written before it is made. So the same records make the same state again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from headway.policy.admission.tenants import DEFAULT_TENANT, Limits, TenantTable
from headway.policy.objectives.output_lengths import OutputBound

MINUTE_US = 60_000_000
TOTAL = ""  # the name under which all tenants together have meters
UNITS = ("requests", "tokens")


class Meter(msgspec.Struct, array_like=True, gc=False):
    """A budget, and the sums of what was taken from it. What was reserved is settled, refunded, or outstanding."""

    limit: int = 0  # units a minute; 0 for no limit
    level: int = 0  # what was left at `at_us`, in units times MINUTE_US
    at_us: int = 0
    reserved: int = 0
    settled: int = 0
    refunded: int = 0

    @property
    def outstanding(self) -> int:
        return self.reserved - self.settled - self.refunded

    def level_at(self, now: int) -> int:
        """What is left of the budget, in units times MINUTE_US."""
        return min(self.limit * MINUTE_US, self.level + self.limit * max(0, now // 1000 - self.at_us))

    def left(self, now: int) -> int:
        """How many whole units are left; not below 0."""
        return max(0, self.level_at(now) // MINUTE_US)

    def wait_ns(self, asked: int, now: int) -> int:
        """Nanoseconds until so many units can be had, in whole microseconds; 0 where they can be had now."""
        missing = asked * MINUTE_US - self.level_at(now)
        return -(-missing // self.limit) * 1000 if self.limit and missing > 0 else 0

    def set_limit(self, limit: int, now: int) -> None:
        """Change the limit. If it grows, what was used stays used; if it shrinks, what is left is cut to the limit."""
        level = self.level_at(now)
        grows = limit > self.limit > 0
        full = limit * MINUTE_US
        self.level = full - (self.limit * MINUTE_US - level) if grows else min(full, level) if self.limit else full
        self.limit, self.at_us = limit, now // 1000

    def reserve(self, count: int, now: int) -> None:
        self.reserved += count
        self._add(-count, now)

    def settle(self, reserved: int, used: int, now: int) -> None:
        """Settle a reservation by what was used: refund the rest of it, or take what was used beyond it."""
        self.reserved += max(0, used - reserved)
        self.settled += used
        self.refunded += max(0, reserved - used)
        self._add(reserved - used, now)

    def _add(self, count: int, now: int) -> None:
        if self.limit:
            level = self.level_at(now) + count * MINUTE_US
            self.level, self.at_us = min(self.limit * MINUTE_US, level), max(now // 1000, self.at_us)


class _Record(msgspec.Struct, tag=str.lower, gc=False):
    at_ns: int


class Reserve(_Record):
    """A request was admitted, which takes one request and so many tokens."""

    number: int
    tenant: str
    tokens: int


class Settle(_Record):
    """A request has ended and used so many tokens; None where it failed, and is charged nothing."""

    number: int
    tokens: int | None = None


class State(_Record):
    """The whole state, in place of all records before."""

    meters: dict[str, tuple[Meter, Meter]]  # the meters of each tenant, for requests and for tokens
    open: dict[int, Reserve]  # requests that have not ended
    next_number: int


Record = Reserve | Settle | State


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Why a request may not come in now."""

    tenant: str  # whose limit it is; TOTAL for that of all
    unit: str  # requests | tokens
    limit: int
    # asked, left: units.
    asked: int
    left: int
    wait_ns: int  # the time until it may come in


class Quotas:
    """The budgets of all tenants.

    Args:
        write: is given each change before it is made. What it raises goes to the caller, and nothing has changed.
        past: earlier records, which begin with a State. Requests that had not ended are refunded.

    Raises:
        ValueError: the records do not go together.
    """

    def __init__(
        self, table: TenantTable, now: int, write: Callable[[Record], None] | None = None, past: Iterable[Record] = ()
    ) -> None:
        self.meters: dict[str, tuple[Meter, Meter]] = {}
        self.open: dict[int, Reserve] = {}
        self._next_number = 0
        self._outputs: dict[str, OutputBound] = {}  # by tenant
        for record in past:
            self._apply(record)
        for meter in chain(*self.meters.values()):
            meter.at_us = min(meter.at_us, now // 1000)  # where the clock was set back, it is not waited for
        for number in list(self.open):
            self._apply(Settle(now, number))
        self._write = write or (lambda record: None)
        self.set_tenants(table, now)

    def set_tenants(self, table: TenantTable, now: int) -> None:
        """Replace all limits by those of another table. What was used stays used."""
        limits: dict[str, Limits] = {DEFAULT_TENANT: Limits(), TOTAL: table.total} | {each.name: each for each in table}
        in_use = {each.tenant for each in self.open.values()}
        self.meters = {name: both for name, both in self.meters.items() if name in limits or name in in_use}
        for name in self.meters.keys() | limits.keys():
            of = limits.get(name, Limits())
            for meter, limit in zip(self.of(name), (of.requests_per_minute, of.tokens_per_minute), strict=True):
                if meter.limit != limit:
                    meter.set_limit(limit, now)
        self.compact(now)

    def compact(self, now: int) -> None:
        """Write the whole state in place of the records so far."""
        self._write(self.state(now))

    def of(self, tenant: str) -> tuple[Meter, Meter]:
        """The meters of a tenant's requests and of its tokens."""
        return self.meters.setdefault(tenant, (Meter(), Meter()))

    def state(self, now: int) -> State:
        """The whole state as a record, which shares the meters."""
        return State(now, self.meters, self.open, self._next_number)

    def over_limit(self, tenant: str, tokens: int | None, now: int) -> OverLimit | None:
        """Why a request of a tenant with so many tokens may not come in; None where it may.

        One that asks for more than a whole budget may come in when that is full.

        Args:
            tokens: None looks at the budgets of requests alone.
        """
        found = []
        wanted = (1,) if tokens is None else (1, self._capped(tenant, tokens))
        for scope in (tenant, TOTAL):
            for unit, meter, asked in zip(UNITS, self.of(scope), wanted, strict=False):
                if wait_ns := meter.wait_ns(asked, now):
                    found.append(OverLimit(scope, unit, meter.limit, asked, meter.left(now), wait_ns))
        return max(found, key=lambda each: each.wait_ns, default=None)

    def reserve(self, tenant: str, tokens: int, now: int) -> int | OverLimit:
        """Take a request and so many tokens, as far as the smallest budget has them. Returns the reservation's number,
        or why nothing was taken.
        """
        refusal = self.over_limit(tenant, tokens, now)
        if refusal is not None:
            return refusal
        record = Reserve(now, self._next_number, tenant, self._capped(tenant, tokens))
        self._write(record)
        self._apply(record)
        return record.number

    def expected_output(self, tenant: str, allowed: int) -> int:
        """How many tokens to reserve for an output that may have `allowed`: few late outputs of the tenant had more."""
        return self._outputs[tenant].expected(allowed) if tenant in self._outputs else allowed

    def settle(self, number: int, tokens: int | None, now: int, outputs: Sequence[int] = ()) -> None:
        """The request with this reservation has used so many tokens; None where it has failed.

        Args:
            outputs: lengths of the outputs that came to their own end.
        """
        tenant, record = self.open[number].tenant, Settle(now, number, tokens)
        self._write(record)
        self._apply(record)
        self.learn(tenant, outputs)

    def learn(self, tenant: str, outputs: Iterable[int]) -> None:
        """Note lengths of outputs of a tenant that came to their own end."""
        for length in outputs:
            self._outputs.setdefault(tenant, OutputBound()).ended(length)

    def _capped(self, tenant: str, tokens: int) -> int:
        """The tokens, or the smallest budget where that is less."""
        return min([tokens, *(meter.limit for meter in (self.of(tenant)[1], self.of(TOTAL)[1]) if meter.limit)])

    def _apply(self, record: Record) -> None:
        now = record.at_ns
        if isinstance(record, State):
            self.meters, self.open, self._next_number = record.meters, record.open, record.next_number
        elif isinstance(record, Reserve):
            self.open[record.number] = record
            self._next_number = record.number + 1
            for requests, tokens in (self.of(record.tenant), self.of(TOTAL)):
                requests.reserve(1, now)
                tokens.reserve(record.tokens, now)
        else:
            was = self.open.pop(record.number, None)
            if was is None:
                raise ValueError(f"reservation {record.number} is settled and was never made")
            for requests, tokens in (self.of(was.tenant), self.of(TOTAL)):
                requests.settle(1, 0 if record.tokens is None else 1, now)
                tokens.settle(was.tokens, record.tokens or 0, now)
