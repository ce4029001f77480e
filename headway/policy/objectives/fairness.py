"""Who of several tenants is served next: the one that has been served least, by its weight.

Tenants share a line: a class, a priority, or all of the queue, as the policy says (`Orders`). In a line some requests
may be more urgent, as those that are promised their first token: the policy says which places of the queue belong to
each level. Who takes the next one is decided by the counters of the tenants that have somebody of this level (the
virtual token counter of Sheng et al. 2024); requests of one tenant keep the policy's order.

A counter grows by each token computed for its tenant, by its weight: known tokens when a request is admitted, less what
was in the prefix cache, and then each new one. What is computed again is not counted again. A tenant that comes back to
a line begins no lower than the least of those who wait in it, or who waited last, less a credit: what it has not used
it may catch up on, but no more than that.

A request is owed to its tenant in two cases: another tenant that waits in the line would still be ahead if all that
this one waits for had been served; or the tenant is behind by more than the credit and this is its first request. What
is owed does not yield, even if it is late, and it is promised again if it has yielded before.

The bound: while two tenants wait in a line, the one ahead is not further ahead than the credit and what its running
requests could still take when its last one was admitted, as it was not ahead of the other then. Where the other's could
not be admitted, for want of blocks or because of a promise, what it was ahead then comes on top. `lead` and `bound` are
the largest seen.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headway.policy.step.order import OrderedSequences, OrderKey, Orders
from headway.policy.step.request import Sequence

# Lines in which nobody waits are forgotten when there are more than this: a request may have any priority.
_MOST_LINES = 64
_Entries = list[tuple[OrderKey, Sequence]]


@dataclass(slots=True)
class Line:
    """The tenants that share, with what each has been served and what of theirs waits."""

    # How many tokens each tenant was served, divided by its weight.
    served: dict[str, float] = field(default_factory=dict)
    # The waiting sequences of each level and tenant, in the policy's order.
    waiting: dict[int, dict[str, _Entries]] = field(default_factory=dict)
    # How many tokens of each tenant's waiting sequences are still to be charged.
    asked: dict[str, int] = field(default_factory=dict)
    # A number for each tenant that waits, larger the later it came. Of equals the last to come goes first.
    joined: dict[str, int] = field(default_factory=dict)
    last: str = ""  # the tenant that was the last to have none left
    # How often the first of each tenant at each level has been passed over.
    passes: Counter[tuple[int, str]] = field(default_factory=Counter)
    most: float | None = -math.inf  # the most that a waiting tenant was served; None while it has to be found again

    def join(self, tenant: str, number: int, credit: float) -> None:
        """A tenant has something waiting again."""
        counts = [self.served[each] for each in self.joined] or [self.served.get(self.last, 0.0)]
        self.served[tenant] = max(self.served.get(tenant, 0.0), min(counts) - credit)
        self.asked[tenant], self.joined[tenant] = 0, number
        self.most = None

    def leave(self, tenant: str) -> None:
        """A tenant has nothing waiting any more."""
        del self.asked[tenant], self.joined[tenant]
        self.last, self.most = tenant, None

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant is served so many tokens by its weight."""
        self.served[tenant] = self.served.get(tenant, 0.0) + tokens
        self.most = None

    def most_served(self) -> float:
        """The most that any of the waiting tenants was served; -inf where none waits."""
        if self.most is None:
            self.most = max(map(self.served.__getitem__, self.joined), default=-math.inf)
        return self.most

    def passes_from(self, level: int, tenant: str, at: int) -> int:
        """How often the sequence at this place has been passed over: the sum of what those from there on have noted."""
        total = self.passes[level, tenant]
        return sum(each.passes for _, each in self.waiting[level][tenant][at:]) if at and total else total

    def lead(self) -> float:
        """How far, among waiting tenants, the one served most is ahead of the one served least."""
        counts = [self.served[tenant] for tenant in self.joined]
        return max(counts) - min(counts) if len(counts) > 1 else 0.0


class FairSequences(OrderedSequences):
    """Waiting sequences in the places of the policy's order, taken by tenants in turn.

    Args:
        orders: the orders of the policy.
        weights: the weight of each tenant; 1 for those that are not named.
        credit: tokens that a tenant may catch up on, times its weight.
    """

    def __init__(self, orders: Orders, weights: Mapping[str, float], credit: int) -> None:
        super().__init__(orders.admission)
        self.lead, self.bound = 0.0, float(credit)
        self._credit = credit
        self._level, self._line_of = orders.level, orders.line
        self.weights = weights
        self._lines: dict[int, Line] = {}
        self._joined = 0

    # --- who waits ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        line, tenant = self._line(self._line_of(sequence)), sequence.tenant
        if tenant not in line.joined:
            self._joined += 1
            line.join(tenant, self._joined, self._credit)
        line.asked[tenant] += _uncharged(sequence)
        level = self._level(sequence)
        entries = line.waiting.setdefault(level, {}).setdefault(tenant, [])
        at = bisect_left(entries, (self._order(sequence), sequence))
        sequence.passed_over -= line.passes_from(level, tenant, at)  # those before it came
        entries.insert(at, (self._order(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        line, tenant = self._lines[self._line_of(sequence)], sequence.tenant
        level = self._level(sequence)
        alike = line.waiting[level]
        at = bisect_left(alike[tenant], (self._order(sequence), sequence))
        sequence.passed_over += line.passes_from(level, tenant, at)
        if at:
            alike[tenant][at - 1][1].passes += sequence.passes
        else:
            line.passes[level, tenant] -= sequence.passes
        sequence.passes = 0
        del alike[tenant][at]
        if not alike[tenant]:
            del alike[tenant]
        line.asked[tenant] -= _uncharged(sequence)
        if not any(tenant in each for each in line.waiting.values()):
            line.leave(tenant)

    def _line(self, number: int) -> Line:
        if number not in self._lines:
            if len(self._lines) >= _MOST_LINES:
                self._lines = {each: line for each, line in self._lines.items() if line.joined}
            self._lines[number] = Line()
        return self._lines[number]

    # --- who is next --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._in_turn())

    def _in_turn(self) -> Iterator[tuple[OrderKey, Sequence]]:
        """The places of the queue in order, with the sequence that takes each."""
        turns: dict[int, Iterator[Sequence]] = {}
        for key, sequence in self._entries:
            level = self._level(sequence)
            if level not in turns:
                turns[level] = self._turns(sequence)
            yield key, next(turns[level])

    def _turns(self, like: Sequence) -> Iterator[Sequence]:
        """Waiting sequences of the same level as `like`, in turn, each as if those before it had been admitted."""
        line = self._lines[self._line_of(like)]
        waiting = line.waiting[self._level(like)]
        heads = [(line.served[tenant], -line.joined[tenant], tenant, 0) for tenant in waiting]
        heapq.heapify(heads)
        while heads:
            served, joined, tenant, at = heads[0]
            sequence = waiting[tenant][at][1]
            yield sequence
            if at + 1 < len(waiting[tenant]):
                heapq.heapreplace(heads, (served + self.cost(sequence), joined, tenant, at + 1))
            else:
                heapq.heappop(heads)

    def first(self) -> Sequence:
        return next(iter(self))

    def first_like(self, sequence: Sequence) -> Sequence:
        return next(self._turns(sequence))

    def before(self, key: OrderKey, most: int) -> _Entries:
        count = min(bisect_left(self._entries, (key,)), most)
        return [entry for _, entry in zip(range(count), self._in_turn(), strict=False)]

    def comes_before(self, one: Sequence, other: Sequence) -> bool:
        """Whether a sequence is computed before another, of which either may be running."""
        if one.tenant != other.tenant and self._level(one) == self._level(other):
            served = self._line(self._line_of(one)).served
            return served.get(one.tenant, 0.0) < served.get(other.tenant, 0.0)
        return self._order(one) < self._order(other)

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Running prompts in the order in which they go on: tenants take turns in each level, as in the queue."""
        if len({sequence.tenant for sequence in prompts}) < 2:
            return prompts
        alike: dict[int, list[Sequence]] = {}
        for sequence in reversed(prompts):
            alike.setdefault(self._level(sequence), []).append(sequence)
        for sequences in alike.values():
            sequences.sort(key=lambda each: -self.served(each))
        return [alike[self._level(sequence)].pop() for sequence in prompts]

    # --- who was served -----------------------------------------------------------------------------

    def served(self, sequence: Sequence) -> float:
        """How many tokens the tenant of a sequence was served in its line, divided by the tenant's weight."""
        return self._line(self._line_of(sequence)).served.get(sequence.tenant, 0.0)

    def is_owed(self, sequence: Sequence) -> bool:
        """Whether its tenant is owed a sequence of its own, which waits or runs."""
        line, tenant = self._line(self._line_of(sequence)), sequence.tenant
        served, most = line.served.get(tenant, 0.0), line.most_served()
        if served + line.asked.get(tenant, 0) / self._weight(tenant) < most:
            return True
        if served + self.cost(sequence) + self._credit >= most:
            return False
        key = self._order(sequence)
        return all(alike[tenant][0][0] >= key for alike in line.waiting.values() if tenant in alike)

    def owed(self) -> list[Sequence]:
        """The sequences that are owed. Only the first of the tenant served least can be, at each level of a line."""
        firsts = [
            waiting[min(waiting, key=line.served.__getitem__)][0][1]
            for line in self._lines.values()
            if len(line.joined) > 1
            for waiting in line.waiting.values()
            if waiting
        ]
        return [sequence for sequence in firsts if self.is_owed(sequence)]

    def cost(self, sequence: Sequence) -> float:
        """What the tenant of a sequence is charged when it is admitted, if nothing of it is in the prefix cache."""
        return _uncharged(sequence) / self._weight(sequence.tenant)

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def admitted(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Charge the known tokens of an admitted sequence to its tenant."""
        sequence.line, tenant = self._line_of(sequence), sequence.tenant
        line, weight = self._line(sequence.line), self._weight(tenant)
        sequence.charged = max(sequence.charged, sequence.num_computed)
        mine = (each for each in running if each.tenant == tenant and each.line == sequence.line)
        served = line.served.setdefault(tenant, 0.0)
        others = [line.served[each] for each in line.joined if each != tenant]
        ahead = max(0.0, served - min(others)) if others else 0.0
        left = sum(each.max_len - each.charged for each in mine) / weight
        self._pass_over(line, sequence)
        self.bound = max(self.bound, self._credit + ahead + left)
        self.charge(sequence)

    def _pass_over(self, line: Line, sequence: Sequence) -> None:
        """Count for those whom the policy puts before a sequence that their turn has put them behind it.

        They are the first of each other tenant. It is noted at the last of them only, for all that are before it.
        """
        level, key = self._level(sequence), self._order(sequence)
        for tenant, entries in line.waiting.get(level, {}).items():
            passed = bisect_left(entries, (key,))
            if passed and tenant != sequence.tenant and line.served[sequence.tenant] <= line.served[tenant]:
                entries[passed - 1][1].passes += 1
                line.passes[level, tenant] += 1

    def charge(self, sequence: Sequence) -> None:
        """Charge the tokens of a running sequence that have come since it was charged last."""
        count = _uncharged(sequence)
        if count > 0:
            self._line(sequence.line).charge(sequence.tenant, self.cost(sequence))
            sequence.charged += count

    def end_step(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> None:
        """Charge the new tokens to their tenants."""
        for sequence, tokens in sampled:
            if tokens or sequence.finish_reason is None:
                self.charge(sequence)
        self.measure()

    def measure(self) -> None:
        for line in self._lines.values():
            if len(line.joined) > 1:
                self.lead = max(self.lead, line.lead())


def _uncharged(sequence: Sequence) -> int:
    """Tokens of a sequence that its tenant has not been charged for."""
    return len(sequence.tokens) - sequence.charged
