"""What is measured of drafts: how long steps take by their rows, and how often drafts are right."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

_BY_MATCH = (3, 4, 6, 9, 16)  # lengths of a match from which drafts are counted apart
_BY_CONFIDENCE = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.99)  # the same of what a draft model gives its drafts
_FORGETTING, _ALL_FORGETTING, _OWN_FORGETTING = 0.99, 0.98, 0.95
_PRIOR = 3.0  # a sequence's own hits count as much as those of all after so many drafts
_COMMON = 0.8  # Leviathan et al. (2023) report 0.5 to 0.9 for drafts of models; what is hoped for is tried
_LEAST_CHANCE = 0.05
_LEAST_KEPT, _MOST_KEPT = 32, 256  # steps
_PACE_GAIN = 0.25
_CHANGED = 1.15  # times that steps take longer or shorter than expected, from where the pace has changed


class Pace:
    """How long steps take of late, as a multiple of what the same steps took before.

    A machine that others use too becomes slower and quicker within some steps, and then all sizes do. A size that was
    measured while it was slow would else look worse than those that are measured now. The pace follows large changes
    alone, so on a steady machine it stays what it is.

    Attributes:
        changes: how often it has changed.
    """

    def __init__(self) -> None:
        self.now, self.changes = 1.0, 0
        self._off = 1.0  # how many times as long as expected steps take of late

    def note(self, ratio: float) -> None:
        """A step took so many times as long as expected."""
        ratio = min(max(ratio, 0.5), 2.0)
        self._off *= (ratio / self._off) ** _PACE_GAIN
        if not 1.0 / _CHANGED < self._off < _CHANGED:
            self.now *= self._off
            self._off = 1.0
            self.changes += 1


class RowTimes:
    """How long steps take that only decode, by their rows of logits; or passes of a draft model, by their tokens.

    Times follow the machine within some steps, and those that were not measured for long are forgotten. So a time that
    was wrong once, as the machine was held up, does not keep its size from being tried for good.

    Args:
        memory: the mean is over about so many steps of a size.
        pace: what all times are multiplied with.
        leads: the pace follows the steps that are observed here.
    """

    def __init__(self, memory: int = 8, pace: Pace | None = None, leads: bool = False) -> None:
        self.pace = pace or Pace()
        self._leads = leads
        self._memory = memory
        self._counts: dict[int, int] = {}
        self._ns: dict[int, float] = {}
        self._rows: list[int] = []  # that are known, in order
        self._seen: dict[int, tuple[int, int]] = {}  # how often each was measured, and when last
        self._steps = 0

    def observe(self, rows: int, took_ns: int) -> float:
        """Note the time of a step. The first of its size prepares others, and does not count.

        Returns:
            the nanoseconds that count: a step that was held up counts as twice as long as expected at most.
        """
        times, _ = self._seen.get(rows, (-1, 0))
        self._seen[rows] = times + 1, self._steps
        if times < 0:
            return 0.0
        self._steps += 1
        if self._steps % _LEAST_KEPT == 0:
            self._forget()
        known, pace = self._ns.get(rows), self.pace
        if known is not None and self._leads:
            pace.note(took_ns / pace.now / known)
        own = took_ns / pace.now
        counted = max(1.0, min(own, self._dearest(rows) if known is None else 2.0 * known))
        count = self._counts[rows] = 1 if known is None else min(self._counts[rows] + 1, self._memory)
        self._ns[rows] = now = counted if known is None else known + (counted - known) / count
        if known is None:
            self._rows = sorted(self._ns)
        for smaller in reversed(self._rows[: bisect_right(self._rows, rows) - 1]):
            if self._ns[smaller] <= now:
                break
            self._ns[smaller] = now  # it cannot take longer
        return counted * pace.now

    def _dearest(self, rows: int) -> float:
        """What a step takes at most: not longer than several of fewer rows one after the other."""
        at = bisect_right(self._rows, rows) - 1
        return self._ns[low] * rows / low if at >= 0 and (low := self._rows[at]) else math.inf

    def _forget(self) -> None:
        """Forget the sizes that were not measured for long, those soonest that were measured least often."""
        for rows in self._rows:
            times, last = self._seen[rows]
            if self._steps - last > min(_LEAST_KEPT << times, _MOST_KEPT):
                del self._ns[rows]
        self._rows = sorted(self._ns)

    def times(self, rows: int) -> int:
        """How often a step of so many rows was measured."""
        return self._seen.get(rows, (0, 0))[0]

    def known_ns(self, rows: int) -> float | None:
        """The nanoseconds of a step of so many rows; None where none was measured."""
        known = self._ns.get(rows)
        return None if known is None else known * self.pace.now

    @property
    def smallest(self) -> int:
        """The fewest rows that were measured; 0 before any were."""
        return self._rows[0] if self._rows else 0

    @property
    def largest(self) -> int:
        """The most rows that were measured."""
        return self._rows[-1]

    def expected_ns(self, rows: int, row_ns: float) -> float:
        """The nanoseconds of a step of more rows than the smallest that is known.

        Between two known sizes they are interpolated. Beyond all of them, a row is taken to cost as much as between the
        two largest, but at most `row_ns`.
        """
        above = bisect_right(self._rows, rows)
        low = self._rows[above - 1]
        if above < len(self._rows):
            return self._at(low) + (rows - low) * self._slope(above)
        return self._at(low) + (rows - low) * (min(row_ns, self._slope(above - 1)) if above > 1 else row_ns)

    def feared_ns(self, rows: int, row_ns: float) -> float:
        """The same where a row beyond all known sizes costs at least `row_ns`."""
        low = self._rows[-1]
        steepest = max(row_ns, self._slope(len(self._rows) - 1)) if len(self._rows) > 1 else row_ns
        return self._at(low) + (rows - low) * steepest if rows > low else self.expected_ns(rows, row_ns)

    def _at(self, rows: int) -> float:
        return self._ns[rows] * self.pace.now

    def _slope(self, at: int) -> float:
        """Nanoseconds of a row between a known size and the one before it."""
        low, high = self._rows[at - 1], self._rows[at]
        return (self._at(high) - self._at(low)) / (high - low)


class HitRates:
    """How often a draft was right where those before it were, by the length of the match before it."""

    def __init__(self) -> None:
        kinds = len(_BY_MATCH) + 1
        self._hits, self._drafts = [0.5] * kinds, [1.0] * kinds
        self._own: dict[int, tuple[float, float]] = {}

    def note(self, seq_id: int, match: int, is_hit: bool) -> None:
        """A draft behind a match of this length was the token that was drawn, or was not."""
        kind, hit = bisect_right(_BY_MATCH, match), float(is_hit)
        self._hits[kind] = self._hits[kind] * _FORGETTING + hit
        self._drafts[kind] = self._drafts[kind] * _FORGETTING + 1.0
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        self._own[seq_id] = hits * _OWN_FORGETTING + hit, drafts * _OWN_FORGETTING + 1.0

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    def chances(self, seq_id: int, match: int, count: int) -> list[float]:
        """The chance that each of the next drafts and all before it are right, as far as that is worth a row."""
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        found: list[float] = []
        chance = 1.0
        for length in range(match, match + count):
            kind = bisect_right(_BY_MATCH, length)
            chance *= (hits + _PRIOR * self._hits[kind] / self._drafts[kind]) / (drafts + _PRIOR)
            if chance < _LEAST_CHANCE:
                break
            found.append(chance)
        return found


class Confidences:
    """How often drafts of a model were right: by the probability that it gave them, and for each sequence.

    At first its probabilities are taken for true, as two drafts count, and drafts for as likely right as is common.

    Attributes:
        judged: how many drafts were compared with what was drawn.
    """

    def __init__(self) -> None:
        bounds = (0.0, *_BY_CONFIDENCE, 1.0)
        self._drafts = [2.0] * (len(bounds) - 1)
        self._hits = [low + high for low, high in pairwise(bounds)]
        self._all, self._own = (_COMMON, 1.0), dict[int, tuple[float, float]]()
        self.judged = 0

    def note(self, seq_id: int, confidence: float, is_hit: bool) -> None:
        """A draft that the model gave this probability was the token that was drawn, or was not."""
        kind, hit = bisect_right(_BY_CONFIDENCE, confidence), float(is_hit)
        self._hits[kind] = self._hits[kind] * _FORGETTING + hit
        self._drafts[kind] = self._drafts[kind] * _FORGETTING + 1.0
        self._all = self._all[0] * _ALL_FORGETTING + hit, self._all[1] * _ALL_FORGETTING + 1.0
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        self._own[seq_id] = hits * _OWN_FORGETTING + hit, drafts * _OWN_FORGETTING + 1.0
        self.judged += 1

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    @property
    def mean(self) -> float:
        """The share of drafts that were right of late, of those with none before them that was wrong."""
        return self._all[0] / self._all[1]

    def usual(self, seq_id: int) -> float:
        """The chance that the next draft of a sequence is right, before it is made."""
        hits, drafts = self._own.get(seq_id, (0.0, 0.0))
        return (hits + _PRIOR * self.mean) / (drafts + _PRIOR)

    def chance(self, confidence: float) -> float:
        """The chance that a draft is right to which the model gives this probability."""
        kind = bisect_right(_BY_CONFIDENCE, confidence)
        return self._hits[kind] / self._drafts[kind]

    @property
    def by_confidence(self) -> tuple[tuple[float, ...], list[float]]:
        """Bounds of probabilities, and the chance of drafts below the first, from the first on, and so on."""
        return _BY_CONFIDENCE, [hits / drafts for hits, drafts in zip(self._hits, self._drafts, strict=True)]

    def chances(self, confidences: list[float]) -> list[float]:
        """The chance that each draft and all before it are right, as far as that is worth a row."""
        found: list[float] = []
        chance = 1.0
        for confidence in confidences:
            chance *= self.chance(confidence)
            if chance < _LEAST_CHANCE:
                break
            found.append(chance)
        return found
