"""What is kept for each class of seats, step tokens and KV blocks, whoever else wants it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from headway.policy.request import Sequence
from headway.policy.service_class import ClassTable
from headway.policy.step_budget import Budget

_UNBOUNDED = 2**31


class Shares:
    """The shares of a table, of an engine of this size. What nobody has a share in is for all."""

    def __init__(self, classes: ClassTable, seats: int, blocks: int) -> None:
        self._size = seats, blocks
        self.set_classes(classes)
        self.running: Counter[str] = Counter()  # sequences of each class
        self.waiting: Counter[str] = Counter()
        self._given: Counter[str] = Counter()  # prompt tokens of the step
        self._prompts: set[str] = set()  # classes with prompts to compute

    def set_classes(self, classes: ClassTable) -> None:
        """From now on the shares of another table."""
        seats, blocks = self._size
        self._seats = {each.name: math.floor(each.seats * seats) for each in classes if each.seats}
        self._tokens = {each.name: each.tokens for each in classes if each.tokens}
        self._blocks = {each.name: math.floor(each.kv * blocks) for each in classes if each.kv}
        self.classes = self._seats.keys() | self._tokens.keys()  # that may go past others

    def seats_kept_from(self, name: str) -> int:
        """Seats that a class must leave to others, beyond those that they have."""
        return sum(max(0, share - self.running[other]) for other, share in self._seats.items() if other != name)

    def has_seat_left(self, name: str) -> bool:
        """Whether a class has a seat that is kept for it; one that has tokens kept for it has a right to a seat."""
        return self.running[name] < max(self._seats.get(name, 0), name in self._tokens)

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Prompt tokens of a step are to be given, to `running` sequences and to those who wait."""
        if self._tokens:
            self._given.clear()
            self._prompts = {name for name, count in self.waiting.items() if count}
            self._prompts.update(sequence.service.name for sequence in running if not sequence.is_decoding)

    def tokens_for(self, name: str, budget: Budget) -> int:
        """Most prompt tokens that a class may take of what a step has left."""
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

    def blocks_kept_from(self, name: str, running: Iterable[Sequence]) -> int:
        """Blocks that a class must leave to others, beyond those that they hold; none where nobody runs.

        So any sequence that fits in the pool gets into it.
        """
        if not self._blocks or self._blocks.keys() == {name}:
            return 0
        held: Counter[str] = Counter()
        for sequence in running:
            held[sequence.service.name] += len(sequence.block_table)
        if not held:
            return 0
        return sum(max(0, share - held[other]) for other, share in self._blocks.items() if other != name)
