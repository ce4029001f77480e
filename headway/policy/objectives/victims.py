"""Which running sequences give up seat and blocks for a waiting one that ranks above them.

A running sequence gives way to one whose level is strictly lower and that comes before it in the order of admission,
the last in the order of victims first, and with priorities only some times in its life (`Orders.displaces`). So the
work that is thrown away is bounded: after that it keeps its place until it ends, or until those who decode run out of
blocks. With objectives it is bounded by what starves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headway.policy.step.order import OrderedSequences, OrderKey, Orders
from headway.policy.step.request import Sequence, Status
from headway.policy.step.scheduling_policy import SchedulingPolicy
from headway.policy.step.sequences import Sequences, Step


@dataclass(frozen=True, slots=True)
class RunningRanks:
    """What waiting sequences are compared with, for as long as the same sequences run."""

    last: OrderKey  # the greatest key of the running sequences in the order of admission
    latest: dict[int, int]  # for each level of the running sequences, when the newest of them arrived

    @classmethod
    def of(cls, running: OrderedSequences, orders: Orders) -> RunningRanks:
        last = max(map(orders.admission, running), default=())
        latest: dict[int, int] = {}
        for level, arrival_ns in [(orders.level(sequence), sequence.arrival_ns) for sequence in running]:
            if arrival_ns >= latest.get(level, arrival_ns):
                latest[level] = arrival_ns
        return cls(last, latest)

    def outrank(self, level: int, arrival_ns: int) -> bool:
        """Whether a waiting sequence would run by now if a lower level had not put others before it."""
        return any(each < level and latest_ns > arrival_ns for each, latest_ns in self.latest.items())


def victims_for(
    candidate: Sequence, running: Iterable[Sequence], orders: Orders, seats: int, missing: int, references: list[int]
) -> list[Sequence] | None:
    """The running sequences that must go so that `candidate` can run; None where that is not possible.

    Args:
        running: in the order of victims, the last one first.
        seats: how many are free without them.
        missing: blocks that the candidate lacks beyond the free ones; the prefix that it shares is its `prefix_match`.
        references: how many sequences hold each block.
    """
    kept = set(candidate.prefix_match.blocks) if candidate.prefix_match is not None else set()
    held: Counter[int] = Counter()
    victims: list[Sequence] = []
    for sequence in running:
        if seats > 0 and missing <= 0:
            return victims
        if orders.level(sequence) <= orders.level(candidate) or sequence.displacements >= orders.displaces:
            continue
        if orders.admission(sequence) < orders.admission(candidate):
            continue
        victims.append(sequence)
        seats += 1
        for block in sequence.held_blocks:
            held[block] += 1
            missing -= held[block] == references[block] and block not in kept
    return victims if seats > 0 and missing <= 0 else None


def _anybody(sequence: Sequence) -> bool:
    return True


class Displacement:
    """Preempts running sequences for waiting ones that rank above them, by the orders of a policy."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._ranks, self._version = RunningRanks((), {}), -1

    def _ranks_of(self, running: OrderedSequences) -> RunningRanks:
        """The ranks of the running sequences, found again only when one has come or gone."""
        if self._version != running.version:
            self._ranks, self._version = RunningRanks.of(running, self._policy.orders), running.version
        return self._ranks

    def is_outranked(self, sequences: Sequences) -> bool:
        """Whether the first that waits would run by now if the order of levels had not put others before it."""
        orders = self._policy.orders
        if not orders.displaces:
            return False
        first = sequences.waiting.first()
        return self._ranks_of(sequences.running).outrank(orders.level(first), first.arrival_ns)

    def displace(self, step: Step, may_go: Callable[[Sequence], bool] = _anybody) -> None:
        """Preempt for those who wait, as far as it helps; they are then admitted like any other.

        Args:
            may_go: whether a running sequence may be preempted.
        """
        policy, sequences, orders = self._policy, step.sequences, self._policy.orders
        running, waiting, manager = sequences.running, sequences.waiting, sequences.block_manager
        if not (orders.displaces and len(waiting) and len(running)):
            return
        last = self._ranks_of(running).last
        if waiting.first_key() > last:
            return
        seats, promised = policy.config.max_num_seqs - len(running), 0
        last_first = [each for each in sorted(running, key=orders.victims, reverse=True) if may_go(each)]
        for candidate in sequences.candidates():
            if orders.admission(candidate) > last or not policy.may_start(candidate, len(running) - 1):
                return
            missing = manager.wanted(candidate) + sequences.spare + promised - sequences.blocks.num_free
            victims = victims_for(candidate, last_first, orders, seats, missing, sequences.blocks.references)
            if victims is None:
                return
            for victim in victims:
                if victim in step.left_out:
                    step.left_out.remove(victim)
                if may_go(victim):  # it may not, if earlier victims have left its class no more than its share
                    victim.displacements += 1
                    step.preempt(victim)
            last_first = [sequence for sequence in last_first if sequence.status is Status.RUNNING]
            seats += len(victims) - 1
            promised += manager.wanted(candidate)
