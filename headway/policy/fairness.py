"""Who of several tenants is served next: the one that has been served least, by its weight.

Requests that are alike in urgency, of one `level` of the policy's orders, make a line: those of a class that are
promised their first token, those of one priority, or all of them. The policy says which places of the queue belong to a
line. Who of the line takes the next one is decided by its tenants' counters (the virtual token counter of Sheng et al.
2024); requests of one tenant keep the policy's order.

A counter grows by each token computed for its tenant, by its weight: known tokens when a request is admitted, less what
was in the prefix cache, and then each new one. What is computed again is not counted again. A tenant that comes back to
a line begins no lower than the least of those who wait in it, or who waited last, less a credit: what it has not used
it may catch up on, but no more than that.

The bound: while two tenants wait in a line, the one ahead is not further ahead than the credit and what its running
requests could still take when its last one was admitted, as it was not ahead of the other then. Where the other's could
not be admitted, for want of blocks or because of a promise, what it was ahead then comes on top. `lead` and `bound` are
the largest seen.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from headway.policy.order import Order, OrderedSequences, OrderKey
from headway.policy.request import Sequence

# Lines of levels at which nobody waits are forgotten when there are more than this: a request may have any priority.
_MOST_LINES = 64
_Entries = list[tuple[OrderKey, Sequence]]


@dataclass(slots=True)
class Line:
    """Requests that are alike in urgency.

    Args:
        served: tokens by weight, of each tenant.
        waiting: the sequences of each tenant that has some, in the policy's order.
        joined: a number of each tenant in `waiting`, the later the larger. Of equals the last to come goes first.
        last: the tenant that was the last to have none left.
    """

    served: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, _Entries] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def join(self, tenant: str, number: int, credit: float) -> None:
        """A tenant has something waiting again."""
        there = [self.served[each] for each in self.waiting] or [self.served.get(self.last, 0.0)]
        self.served[tenant] = max(self.served.get(tenant, 0.0), min(there) - credit)
        self.waiting[tenant], self.joined[tenant] = [], number

    def leave(self, tenant: str) -> None:
        """A tenant has nothing waiting any more."""
        del self.waiting[tenant], self.joined[tenant]
        self.last = tenant

    def lead(self) -> float:
        """By how much the tenant served most is ahead of the one served least, of those who wait."""
        counts = [self.served[tenant] for tenant in self.waiting]
        return max(counts) - min(counts) if len(counts) > 1 else 0.0


class FairSequences(OrderedSequences):
    """Waiting sequences in the places of the policy's order, taken by tenants in turn.

    Args:
        order, level: of the policy.
        weights: by tenant; 1 where it has none.
        credit: tokens that a tenant may catch up on, times its weight.
    """

    def __init__(
        self, order: Order, level: Callable[[Sequence], int], weights: Mapping[str, float], credit: int
    ) -> None:
        super().__init__(order)
        self.lead, self.bound = 0.0, float(credit)
        self._credit = credit
        self._level = level
        self.weights = weights
        self._lines: dict[int, Line] = {}
        self._joined = 0

    # --- who waits ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        line = self._line(self._level(sequence))
        if sequence.tenant not in line.waiting:
            self._joined += 1
            line.join(sequence.tenant, self._joined, self._credit)
        insort(line.waiting[sequence.tenant], (self._order(sequence), sequence))

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        line = self._lines[self._level(sequence)]
        entries = line.waiting[sequence.tenant]
        del entries[bisect_left(entries, (self._order(sequence),))]
        if not entries:
            line.leave(sequence.tenant)

    def _line(self, level: int) -> Line:
        if level not in self._lines:
            if len(self._lines) >= _MOST_LINES:
                self._lines = {each: line for each, line in self._lines.items() if line.waiting}
            self._lines[level] = Line()
        return self._lines[level]

    # --- who is next --------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._in_turn())

    def _in_turn(self) -> Iterator[tuple[OrderKey, Sequence]]:
        """The places of the queue, and who takes each."""
        turns: dict[int, Iterator[Sequence]] = {}
        for key, sequence in self._entries:
            level = self._level(sequence)
            if level not in turns:
                turns[level] = self._turns(self._lines[level])
            yield key, next(turns[level])

    def _turns(self, line: Line) -> Iterator[Sequence]:
        """The sequences of a line, each as if those before it had been admitted."""
        heads = [
            (line.served[tenant], -line.joined[tenant], tenant, 0)
            for tenant, entries in line.waiting.items()
            if entries
        ]
        heapq.heapify(heads)
        while heads:
            served, joined, tenant, at = heads[0]
            sequence = line.waiting[tenant][at][1]
            yield sequence
            if at + 1 < len(line.waiting[tenant]):
                heapq.heapreplace(heads, (served + self.cost(sequence), joined, tenant, at + 1))
            else:
                heapq.heappop(heads)

    def first(self) -> Sequence:
        return next(iter(self))

    def first_like(self, sequence: Sequence) -> Sequence:
        return next(self._turns(self._lines[self._level(sequence)]))

    def before(self, key: OrderKey, most: int) -> _Entries:
        count = min(bisect_left(self._entries, (key,)), most)
        return [entry for _, entry in zip(range(count), self._in_turn(), strict=False)]

    def comes_before(self, one: Sequence, other: Sequence) -> bool:
        """Whether a sequence is computed before another, of which either may be running."""
        level = self._level(one)
        if one.tenant != other.tenant and level == self._level(other):
            served = self._line(level).served
            return served.get(one.tenant, 0.0) < served.get(other.tenant, 0.0)
        return self._order(one) < self._order(other)

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Running prompts in the order in which they go on: the places of a line are taken as in the queue."""
        if len({sequence.tenant for sequence in prompts}) < 2:
            return prompts
        lines: dict[int, list[Sequence]] = {}
        for sequence in reversed(prompts):
            lines.setdefault(self._level(sequence), []).append(sequence)
        for level, sequences in lines.items():
            served = self._line(level).served
            sequences.sort(key=lambda each: -served.get(each.tenant, 0.0))
        return [lines[self._level(sequence)].pop() for sequence in prompts]

    # --- who was served -----------------------------------------------------------------------------

    def served(self, sequence: Sequence) -> float:
        """Of its tenant, among those that are alike in urgency."""
        return self._line(self._level(sequence)).served.get(sequence.tenant, 0.0)

    def cost(self, sequence: Sequence) -> float:
        """What its tenant is charged when it is admitted, if nothing of it is in the prefix cache."""
        return (len(sequence.tokens) - sequence.charged) / self.weights.get(sequence.tenant, 1.0)

    def admitted(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """Charge what is known of a sequence that has been admitted and is no longer in the queue.

        Args:
            running: all sequences that run, with this one.
        """
        level, tenant = self._level(sequence), sequence.tenant
        line, weight = self._line(level), self.weights.get(tenant, 1.0)
        sequence.line = level
        sequence.charged = max(sequence.charged, sequence.num_computed)
        mine = (each for each in running if each.tenant == tenant and each.line == level)
        served = line.served.setdefault(tenant, 0.0)
        others = [line.served[each] for each in line.waiting if each != tenant]
        ahead = max(0.0, served - min(others)) if others else 0.0
        left = sum(each.max_len - each.charged for each in mine) / weight
        self.bound = max(self.bound, self._credit + ahead + left)
        self.charge(sequence)

    def charge(self, sequence: Sequence) -> None:
        """Charge the tokens of a running sequence that have come since it was charged last."""
        count = len(sequence.tokens) - sequence.charged
        if count > 0:
            sequence.charged += count
            served = self._line(sequence.line).served
            weight = self.weights.get(sequence.tenant, 1.0)
            served[sequence.tenant] = served.get(sequence.tenant, 0.0) + count / weight

    def measure(self) -> None:
        """Note who is how far ahead at this moment."""
        for line in self._lines.values():
            if len(line.waiting) > 1:
                self.lead = max(self.lead, line.lead())
