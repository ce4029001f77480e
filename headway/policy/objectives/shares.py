"""The seats, step tokens and KV blocks that are kept for each class, whoever else wants them.

Others may borrow the blocks of a share while they are idle, but for some that are never lent. Once a sequence of the
class waits that fits in its share, nobody borrows more, and those who have borrowed are preempted for it: sequences of
classes with more than their own share. So no class gets below its share because of another, and all shares together
are less than the pool. Only the sequence that has starved need not keep to shares.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.order import Order
from headway.policy.step.request import Sequence, Status
from headway.policy.step.sequences import Step
from headway.policy.step.step_budget import StepBudget

_UNBOUNDED = 2**31


class Shares:
    """The shares of classes in the seats, the step tokens and the pool of an engine. What is in no share is for all.

    Args:
        unlent: most blocks of each share that are kept free for its class.
        longest: blocks of the longest sequence, which every class may use.

    Attributes:
        blocks: how many blocks are kept for each class with a share.
        most: how many blocks each class with a bound may use.
    """

    def __init__(self, classes: ClassTable, seats: int, pool: KVBlocks, unlent: int, longest: int = 0) -> None:
        self._pool, self._unlent, self._longest = pool, unlent, longest
        self.set_classes(classes, seats)
        self.running: Counter[str] = Counter()  # sequences of each class
        self.waiting: Counter[str] = Counter()
        self._given: Counter[str] = Counter()  # prompt tokens of the step
        self._prompts: set[str] = set()  # classes with prompts to compute

    def set_classes(self, classes: ClassTable, seats: int) -> None:
        """Take the shares of another table of classes, of so many seats."""
        self._seats = {each.name: math.floor(each.seats * seats) for each in classes if each.seats}
        self._tokens = {each.name: each.tokens for each in classes if each.tokens}
        free = self._pool.num_blocks - len(self._pool.pinned)
        self.blocks = {each.name: math.floor(each.kv * free) for each in classes if each.kv}
        bounded = (each for each in classes if each.max_kv < 1)
        self.most = {each.name: max(self._longest, math.floor(each.max_kv * free)) for each in bounded}
        self.classes = self._seats.keys() | self._tokens.keys() | self.blocks.keys()  # these may go past others
        self._pool.cached.set_classes(classes, self.blocks)

    def seats_kept_from(self, name: str) -> int:
        """How many seats a class must leave to others, beyond those that they have."""
        return sum(max(0, share - self.running[other]) for other, share in self._seats.items() if other != name)

    def has_seat_left(self, name: str) -> bool:
        """Whether a class has a seat that is kept for it; one that has tokens kept for it has a right to a seat."""
        return self.running[name] < max(self._seats.get(name, 0), name in self._tokens)

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Prompt tokens of a step are about to be given to `running` and to waiting sequences."""
        if self._tokens:
            self._given.clear()
            self._prompts = {name for name, count in self.waiting.items() if count}
            self._prompts.update(sequence.service.name for sequence in running if not sequence.is_decoding)

    def tokens_for(self, name: str, budget: StepBudget) -> int:
        """The most prompt tokens that a class may take of what a step has left."""
        if not self._tokens:
            return _UNBOUNDED
        left = budget.fit(0, _UNBOUNDED)
        whole = left + self._given.total()
        others = (other for other in self._tokens if other != name and other in self._prompts)
        return max(0, left - sum(max(0, int(self._tokens[other] * whole) - self._given[other]) for other in others))

    def give_tokens(self, name: str, count: int) -> None:
        """A class takes prompt tokens of the step."""
        if self._tokens:
            self._given[name] += count

    def blocks_kept_from(self, name: str) -> int:
        """How many blocks a class must leave to others beyond those in use: all of a share that is waited for."""
        kept, used = 0, self._pool.used
        for other, share in self.blocks.items():
            if other != name and (idle := share - used[other]) > 0:
                kept += idle if self.waiting[other] else min(idle, self._unlent)
        return kept

    def has_blocks_left(self, name: str, wanted: int) -> bool:
        """Whether a class has a share, and does not exceed it with so many more blocks."""
        return name in self.blocks and self._pool.used[name] + wanted <= self.blocks[name]

    def may_use(self, name: str, wanted: int) -> bool:
        """Whether a class stays within its bound with so many more blocks."""
        return name not in self.most or self._pool.used[name] + wanted <= self.most[name]

    def is_over(self, name: str, growth: int = 0) -> bool:
        """Whether a class has more than its share with so many more blocks."""
        return self._pool.used[name] + growth > self.blocks.get(name, 0)

    @property
    def are_lent(self) -> bool:
        """Whether any class has a share of blocks, or a bound."""
        return bool(self.blocks or self.most)

    # --- who gives blocks back ----------------------------------------------------------------------

    def may_go(self, sequence: Sequence) -> bool:
        """Whether the class of a sequence has more than its share of blocks, or there are no shares."""
        return not self.blocks or self.is_over(sequence.service.name)

    def give_back(
        self, step: Step, seats: int, victims_last: Order, may_start: Callable[[Sequence, int], bool]
    ) -> None:
        """Preempt borrowers for the first waiting sequence of each class that fits in its share of blocks.

        Args:
            seats: how many seats are free.
            victims_last: the order in which sequences are preempted, the last one first.
            may_start: SchedulingPolicy.may_start().
        """
        sequences, seen = step.sequences, set[str]()
        if not any(self.waiting[name] for name in self.blocks):
            return
        for candidate in sequences.candidates() if seats > 0 else []:
            name = candidate.service.name
            if name in seen or name not in self.blocks:
                continue
            seen.add(name)
            while self.has_blocks_left(name, wanted := sequences.block_manager.wanted(candidate)):
                missing = wanted + self.blocks_kept_from(name) - self._pool.num_free
                if missing <= 0 or not may_start(candidate, len(sequences.running)):
                    break
                last_first = sorted(sequences.running, key=victims_last, reverse=True)
                kept = candidate.prefix_match.blocks if candidate.prefix_match is not None else []
                victims = self.borrowers(last_first, missing, set(kept))
                if not victims:
                    break
                for victim in victims:  # whose own class may now wait for what is left of its share
                    step.decision.gave_back.append((victim.request_id, name))
                    step.preempt(victim)

    def make_room(self, decoding: list[Sequence], step: Step, victims_last: Order) -> list[Sequence]:
        """Preempt until all who decode have blocks for their next tokens, within bounds; returns who still decodes.

        A victim is of a class that would exceed its bound, or else of one that has more than its share.
        """
        pool, running, manager = self._pool, step.sequences.running, step.sequences.block_manager
        if not self.most and len(decoding) * pool.tables <= pool.num_free:
            return decoding
        growing = [(sequence, count) for sequence in decoding if (count := manager.growth(sequence))]
        while True:
            growth = Counter[str]()
            for sequence, count in growing:
                growth[sequence.service.name] += count
            full = {name for name in self.most if not self.may_use(name, growth[name])}
            victims = [each for each in running if each.service.name in full]
            if not victims and growth.total() <= pool.num_free:
                return [sequence for sequence in decoding if sequence.status is Status.RUNNING]
            over_share = [
                each
                for each in running
                if not each.has_starved and self.is_over(each.service.name, growth[each.service.name])
            ]
            step.preempt(max(victims or over_share or running, key=victims_last))
            growing = [each for each in growing if each[0].status is Status.RUNNING]

    def borrowers(self, last_first: Iterable[Sequence], missing: int, kept: Container[int]) -> list[Sequence] | None:
        """The sequences that have to go so that `missing` blocks become free; None where that is not possible.

        Args:
            last_first: running sequences, in the order in which they are to go.
            kept: blocks that do not count, as they would be taken again.
        """
        used, held, owners = Counter(self._pool.used), Counter[int](), self._pool.cached.owners
        victims: list[Sequence] = []
        for sequence in last_first:
            if missing <= 0:
                break
            name = sequence.service.name
            if sequence.has_starved or used[name] <= self.blocks.get(name, 0):
                continue
            victims.append(sequence)
            for block in sequence.held_blocks:
                held[block] += 1
                if held[block] == self._pool.references[block]:
                    used[owners[block]] -= 1
                    missing -= block not in kept
        return victims if missing <= 0 else None
