"""Adapters on a virtual clock: which one each request is for, how long loads take, and how much longer steps do.

Slots are the scheduler's own. All adapters are in the host's memory, and one is loaded at a time, as in a live engine.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.scheduler import Scheduler
from headway.simulator.answers import Choice


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters of a server, and what they cost."""

    # How many there are. A request that names none is for one of them: the popularity of the n-th is n ** -exponent
    # (Zipf's law).
    count: int
    exponent: float
    load_ns: int  # nanoseconds of a load
    step_ns: int  # what each adapter that a step has adds to it

    @cached_property
    def _popularity(self) -> list[float]:
        return list(accumulate(rank**-self.exponent for rank in range(1, self.count + 1)))

    def of(self, request_id: str) -> str:
        """The adapter that a request is for; always the same one."""
        at = random.Random(request_id).random() * self._popularity[-1]
        return f"adapter {min(bisect_left(self._popularity, at), self.count - 1)}"


@dataclass(slots=True)
class Adapters:
    """Loads the adapters that the scheduler of a simulated engine chooses."""

    plan: AdapterPlan
    scheduler: Scheduler
    _loads: deque[tuple[int, str]] = field(init=False, default_factory=deque)  # when each ends

    @property
    def counts(self) -> dict[str, int]:
        """Requests that found their adapter in a slot, those that did not, and loads."""
        slots = self.scheduler.sequences.slots
        assert slots is not None
        return dict(zip(("hits", "misses", "loads"), slots.counts, strict=True))

    def before(self, now: int) -> None:
        """Tell the scheduler which loads have ended."""
        while self._loads and self._loads[0][0] <= now:
            self.scheduler.adapter_loaded(self._loads.popleft()[1], now)

    def planned(self, plan: StepPlan, now: int) -> None:
        """Begin the loads that a plan asks for. Where nothing runs, the next plan comes when one has ended."""
        slots = self.scheduler.sequences.slots
        assert slots is not None
        for load in slots.loads:
            begun = max(now, self._loads[-1][0]) if self._loads else now
            self._loads.append((begun + self.plan.load_ns, load.digest))
        slots.loads.clear()
        if self._loads and not plan.scheduled:
            plan.wait_until_ns = self._loads[0][0]

    def longer(self, times: StepTimes, plan: StepPlan, choices: Mapping[int, Choice]) -> StepTimes:
        """The times of a step with what its adapters add."""
        used = {choices[item.seq_id].sequence.adapter for item in plan.scheduled} - {""}
        more_ns = self.plan.step_ns * len(used)
        return StepTimes(times.launched_ns, times.computed_ns + more_ns, times.sampled_ns + more_ns)
