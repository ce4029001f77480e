"""Notices an engine process that has work and ends no step: one that is stopped, waits for ever or runs in circles.

It is judged by steps that end, not by a sign of life: a process may well answer while its device does not. Only time in
which the engine could have got on counts. While its main thread waits for a processor, as on a crowded machine, or for
the disk, only the processor time that it has had counts. While the API process itself stands still, as on a machine
that is suspended, no time counts. So no healthy engine is restarted on a slow machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

# The limit, in multiples of what the longest step is predicted to take, and within these bounds.
FACTOR, LEAST_S, MOST_S = 10.0, 30.0, 600.0
# The limit doubles with each engine that was ended within the last hour, but not more often than this.
FORGOTTEN_AFTER_S, MOST_DOUBLINGS = 3600.0, 3
_LOOKS_EVERY_S, _LOOKS_IN_LIMIT = 1.0, 8
STOPPED = "Tt"  # by a signal or a debugger, as Linux names the states of a thread
WANTS_TO_RUN = "RD"
_TICKS_PER_S = 100.0  # the unit of times in /proc


class Watchdog:
    """Watches one engine process after the other.

    Args:
        timeout_s: the limit; None follows the prediction, and is MOST_S until there is one.

    Attributes:
        steps: how many steps have ended; counted up by the owner, which hears of them.
        longest_step_ns: the longest step as the engine predicts it; 0 while it is not known.
        stalled_s: for how long no step has ended, where that is beyond the limit; else 0.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self.steps = 0
        self.longest_step_ns = 0.0
        self.stalled_s = 0.0
        self._timeout_s = timeout_s
        self._fired: deque[float] = deque(maxlen=MOST_DOUBLINGS)

    @property
    def limit_s(self) -> float:
        """Seconds without the end of a step, beyond which an engine with work is stalled."""
        limit = self._timeout_s
        if limit is None:
            limit = min(MOST_S, max(LEAST_S, FACTOR * self.longest_step_ns / 1e9)) if self.longest_step_ns else MOST_S
        recent = sum(time.monotonic() - fired < FORGOTTEN_AFTER_S for fired in self._fired)
        return math.ldexp(limit, recent)

    async def watch(self, pid: int, has_work: Callable[[], bool], loads: Callable[[], bool]) -> str:
        """Return when an engine process has been stalled for twice the limit: what is to be said of it.

        Args:
            has_work: whether a step of it should end some time.
            loads: it is starting, which may take any time; then it only counts that it is stopped.
        """
        self.stalled_s = waited = 0.0
        steps, before, had_s, had_work = self.steps, time.monotonic(), 0.0, False
        try:
            while waited <= 2 * self.limit_s:
                pause = min(_LOOKS_EVERY_S, self.limit_s / _LOOKS_IN_LIMIT)
                await asyncio.sleep(pause)
                now, loading = time.monotonic(), loads()
                passed, before = min(now - before, 2 * pause), now
                state, has_s = main_thread(pid)
                may_wait, had_work = had_work, loading or has_work()  # work may have come just before this look
                if self.steps != steps or not (may_wait and had_work) or (loading and state not in STOPPED):
                    steps, waited = self.steps, 0.0
                else:
                    waited += min(passed, has_s - had_s) if state in WANTS_TO_RUN else passed
                had_s = has_s
                self.stalled_s = waited if waited > self.limit_s else 0.0
            self._fired.append(time.monotonic())
            what = "was stopped while it loaded" if loading else "had requests and ended no step"
            return f"the engine process {what} for {waited:.3g} s"
        finally:
            self.stalled_s = 0.0


def main_thread(pid: int) -> tuple[str, float]:
    """(state, seconds of processor time so far) of the thread that runs the steps; the state is S if it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, ValueError, IndexError):  # it has ended, or this is not Linux
        return "S", 0.0
