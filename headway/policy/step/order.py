"""Which sequence comes first: in the queue, in a step, and among those that must go.

An order is a function from a sequence to a key, and the smallest key is first. A sequence's key must not change while
it is in a list, so that lists stay sorted. Of equal keys the one that came first is first. A scheduling policy has its
`Orders`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from headway.policy.step.request import Sequence

_SEQUENCE = itemgetter(1)  # gives the sequence of an entry

OrderKey = tuple[int, ...]
Order = Callable[[Sequence], OrderKey]


def fcfs(sequence: Sequence) -> OrderKey:
    """First come, first served."""
    return (sequence.arrival_ns, sequence.seq_id)


def _equal(sequence: Sequence) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of a scheduling policy."""

    # The order of waiting sequences: the first is admitted first, and before running prompts go on that come after it.
    admission: Order
    running: Order  # the order of running sequences: the first is given blocks and tokens of a step first
    # The order of running sequences without a token of the step as yet: the last is preempted first. The first in
    # `running` should be first here too, or be a victim only so many times, so that one of them always gets on.
    victims: Order
    # A waiting sequence takes the place of a running one only if its level is lower.
    level: Callable[[Sequence], int] = _equal
    displaces: float = 0  # how many times at most one sequence loses its place so; 0 where none does
    # Tenants share within a line: what each has been served is counted for each line. Sequences of one level are of one
    # line.
    line: Callable[[Sequence], int] = _equal

    @classmethod
    def by(cls, order: Order) -> Orders:
        """The orders of a policy that has one order for all three."""
        return cls(order, order, order)


FCFS = Orders.by(fcfs)


class OrderedSequences:
    """Sequences kept sorted by an order. `version` changes whenever one comes or goes; `of_class` counts them.

    Tenants make no difference here; in the subclass `FairSequences` they take turns.
    """

    lead = bound = 0.0  # FairSequences measures them

    def __init__(self, order: Order) -> None:
        self.version = 0
        self.of_class: Counter[str] = Counter()
        self._order = order
        self._entries: list[tuple[OrderKey, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return map(_SEQUENCE, self._entries)

    def add(self, sequence: Sequence) -> None:
        insort(self._entries, (self._order(sequence), sequence))
        self.of_class[sequence.service.name] += 1
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        at = bisect_left(self._entries, (self._order(sequence), sequence))
        if at == len(self._entries) or self._entries[at][1] is not sequence:
            raise KeyError(f"sequence {sequence.request_id}/{sequence.index} is not in this queue")
        del self._entries[at]
        self.of_class[sequence.service.name] -= 1
        self.version += 1

    def first_from(self, key: OrderKey) -> Sequence | None:
        """The first that does not come before `key`."""
        at = bisect_left(self._entries, (key,))
        return self._entries[at][1] if at < len(self._entries) else None

    def before(self, key: OrderKey, most: int) -> list[tuple[OrderKey, Sequence]]:
        """The first sequences that come before `key`, at most `most`, with their keys."""
        return self._entries[: min(bisect_left(self._entries, (key,)), most)]

    def first_like(self, sequence: Sequence) -> Sequence:
        """The sequence that takes the place of a waiting one, when it is that one's turn."""
        return sequence

    def comes_before(self, one: Sequence, other: Sequence) -> bool:
        """Whether a sequence comes before another; they need not be in the list."""
        return self._order(one) < self._order(other)

    def in_turn(self, prompts: list[Sequence]) -> list[Sequence]:
        """Running prompts in the order in which they go on."""
        return prompts

    def admitted(self, sequence: Sequence, running: Iterable[Sequence]) -> None:
        """A sequence has been admitted and is no longer in the list; `running` has all that run, this one too."""

    def end_step(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> None:
        """A step has ended: these sequences have new tokens, or have ended without."""

    def measure(self) -> None:
        """Note how far tenants are ahead of each other at this moment."""

    def first(self) -> Sequence:
        return self._entries[0][1]

    def first_key(self) -> OrderKey:
        return self._entries[0][0]
