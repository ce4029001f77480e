"""Sequences that decode together, in groups that are alike: what a step of all of them computes, and who ends when."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headway.cost.attention import Chunk


@dataclass(slots=True)
class Group:
    """Sequences with the same output length whose prompts ended in the same step.

    Args:
        born: steps taken before their first decode.
        ends: steps taken after their last one.
        members: when each was sent.
        passed: window sizes that their context has reached.
    """

    born: int
    ends: int
    output: int
    first: float
    members: list[float]
    passed: int = 0


class Decoding:
    """All groups that decode. What a step needs of them is kept up to date, as there may be thousands.

    Args:
        prompt: tokens, the context of a group when it is born; from then on it grows by one a step.
        windows: sizes, ascending.
    """

    def __init__(self, prompt: int, windows: Sequence[int]) -> None:
        self._prompt = prompt
        self._windows = windows
        self._steps = 0
        self._by_end: list[tuple[int, int, Group]] = []
        self._to_pass: list[deque[Group]] = [deque() for _ in windows]
        self._born = 0
        # By how many windows they have passed, at least: sequences, and the sum of what `born` says of each.
        self._counts = [0] * (len(windows) + 1)
        self._births = [0] * (len(windows) + 1)

    def __len__(self) -> int:
        """Sequences."""
        return self._counts[0]

    def add(self, output: int, first: float, members: list[float]) -> None:
        """Sequences that got their first token in the step before, and are to get `output` in all."""
        group = Group(self._steps, self._steps + output - 1, output, first, members)
        heapq.heappush(self._by_end, (group.ends, self._born, group))
        self._born += 1
        self._count(group, 0, len(members))
        for waiting in self._to_pass:
            waiting.append(group)
        self._pass_windows()

    def chunks(self) -> list[Chunk]:
        """Sequences between the same window sizes as one chunk of their mean context.

        A decode's work is linear in its context between two window sizes, so nothing is lost by it.
        """
        found = []
        for passed, (count, births) in enumerate(zip(self._counts, self._births, strict=True)):
            if passed < len(self._windows):
                count -= self._counts[passed + 1]
                births -= self._births[passed + 1]
            if count:
                contexts = count * (self._prompt + self._steps) - births
                found.append(Chunk(1, round(contexts / count), 1, count))
        return found

    def until_one_ends(self) -> int:
        """Steps."""
        return self._by_end[0][0] - self._steps

    def advance(self, steps: int) -> list[Group]:
        """So many steps go by; those that end with them, in the order in which they were added."""
        self._steps += steps
        ended = []
        while self._by_end and self._by_end[0][0] <= self._steps:
            ended.append(heapq.heappop(self._by_end)[1:])
        for _, group in ended:
            for passed in range(group.passed + 1):
                self._count(group, passed, -len(group.members))
        self._pass_windows()
        return [group for _, group in sorted(ended, key=lambda each: each[0])]

    def _pass_windows(self) -> None:
        for number, (window, waiting) in enumerate(zip(self._windows, self._to_pass, strict=True)):
            while waiting and self._prompt + self._steps - waiting[0].born >= window:
                group = waiting.popleft()
                if group.ends > self._steps:
                    group.passed = number + 1
                    self._count(group, number + 1, len(group.members))

    def _count(self, group: Group, passed: int, members: int) -> None:
        self._counts[passed] += members
        self._births[passed] += members * group.born
