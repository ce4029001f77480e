"""How good a run is, and when a candidate is proven better than what it would replace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.load.measures.latencies import Latencies
from headway.load.measures.probability import t_quantile
from headway.load.record import RequestRecord

TAIL = 0.25  # share of the requests that count: those furthest from their objectives
FAILED = math.log(100.0)  # of a request without an answer
FEWEST_PAIRS, MOST_PAIRS = 2, 6
ERRORS = 0.05  # chance of a wrong verdict about a candidate that makes no difference, over all looks
LEAST_GAIN = 1.03  # a smaller gain is not worth a change

Verdict = Literal["better", "worse", "no gain", "undecided"]


def distances(records: Sequence[RequestRecord], objectives: Mapping[str, float]) -> np.ndarray:
    """How far each request is from its objectives: the logarithm of the worst figure over its objective.

    Above 0 an objective is missed. Shape [requests], in the order of the records; those that failed count as FAILED.

    Args:
        objectives: milliseconds by ttft, tpot and e2el.
    """
    found = Latencies.of(records)
    figures = {"ttft": found.ttft("schedule"), "tpot": found.tpot_ms, "e2el": found.e2el("schedule")}
    none = np.full(len(found.records), -math.inf)
    ratios = [np.log(np.maximum(figures[name], 1e-3) / limit) for name, limit in objectives.items()]
    worst = np.nanmax(np.vstack([none, *ratios]), axis=0)
    of = {id(record): value for record, value in zip(found.records, worst.tolist(), strict=True)}
    return np.array([of.get(id(record), FAILED) for record in records])


def furthest(found: np.ndarray) -> np.ndarray:
    """Places of the requests that are furthest from their objectives, of `distances`: TAIL of all, and at least one."""
    count = max(1, math.ceil(TAIL * len(found)))
    return np.argsort(found, kind="stable")[-count:]


def loss(found: np.ndarray) -> float:
    """The mean distance of those furthest from their objectives, of `distances`; FAILED without requests."""
    return float(np.mean(found[furthest(found)])) if len(found) else FAILED


def attainment(found: np.ndarray) -> float:
    """The share of requests that met all objectives, of `distances`; 0 without requests."""
    return float(np.mean(found <= 0)) if len(found) else 0.0


@dataclass(frozen=True, slots=True)
class Race:
    """What pairs of runs of the same requests say of a candidate."""

    gains: tuple[float, ...]  # for each pair, how much smaller the candidate's loss was
    # fewest, most: pairs before the first and before the last look.
    fewest: int = FEWEST_PAIRS
    most: int = MOST_PAIRS

    @property
    def times(self) -> float:
        """How many times nearer to their objectives the slowest requests came, in the mean."""
        return math.exp(float(np.mean(self.gains))) if self.gains else 1.0

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of `times` at this look; all positive numbers before the first.

        The looks share the errors evenly (Bonferroni), so that stopping at any of them keeps ERRORS.
        """
        pairs = len(self.gains)
        if pairs < self.fewest:
            return 0.0, math.inf
        looks = self.most - self.fewest + 1
        spread = float(np.std(self.gains, ddof=1)) / math.sqrt(pairs)
        reach = t_quantile(1 - ERRORS / looks, pairs - 1) * spread
        middle = float(np.mean(self.gains))
        return math.exp(middle - reach), math.exp(min(middle + reach, 700.0))

    @property
    def verdict(self) -> Verdict:
        """`undecided` means that another pair may tell, as long as there are fewer than `most`."""
        low, high = self.interval
        if low > 1.0:
            return "better"
        if high < 1.0:
            return "worse"
        return "no gain" if high < LEAST_GAIN else "undecided"
