"""Whether an idle engine waits a little, so that the first request gets company."""

from __future__ import annotations

from collections import deque

from headway.policy.step.request import NEVER, Sequence
from headway.policy.step.step_time import StepTimeModel, StepWork

# The share of the time until the first token is due that a window may take.
MOST_OF_TIME_LEFT = 0.25
_GAPS = 15  # so many gaps between requests must be known


class Window:
    """Learns how soon requests follow each other, and waits for the next one where that is predicted to pay.

    A server to which requests come evenly is busy long before it would pay: it pays where they come in bursts. So the
    gap that is expected, 1 / rate below, is one that three of four of the last ones did not exceed. Let a step take
    `fixed` plus the work of its prompts, each `work`, and requests come at `rate`. The n that wait lose W each by a
    window of W. One that comes meanwhile would have found a step under way and taken one of its own afterwards; it
    gains `fixed - W`, and the first lose its work. So a window is worth rate * W * (fixed - work - W) - n * W, which is
    greatest at half of fixed - work - n / rate. A minimum is kept whether it pays or not.
    """

    def __init__(self, step_time: StepTimeModel) -> None:
        self._step_time = step_time
        self._last_arrival_ns = 0
        self._gaps_ns = deque[int](maxlen=_GAPS)  # the latest gaps between requests
        self.opened_ns = 0  # when the window that is open was opened
        self.num_opened = 0

    def arrived(self, now: int) -> None:
        """A request came in."""
        if self._last_arrival_ns:
            self._gaps_ns.append(now - self._last_arrival_ns)
        self._last_arrival_ns = now

    def _usual_gap_ns(self) -> int:
        return sorted(self._gaps_ns)[_GAPS * 3 // 4]

    def close(self) -> None:
        self.opened_ns = 0

    def until(self, waiting: list[Sequence], work_ns: float, now: int) -> int:
        """When the window of an engine in which nothing runs closes; `now` where there is no window.

        Args:
            waiting: all sequences that wait, which are few.
            work_ns: the predicted work of the first one's prompt.
        """
        least_ms, most_ms = (min(each) for each in zip(*(s.service.window_ms for s in waiting), strict=True))
        best = 0.0
        if most_ms and len(self._gaps_ns) == _GAPS and self._step_time.is_trained:
            fixed = self._step_time.predict_ns(StepWork(prefill_tokens=1))
            best = (fixed - work_ns - len(waiting) * self._usual_gap_ns()) / 2
        length = min(max(best, least_ms * 1e6), most_ms * 1e6)
        if length <= 0:
            return now
        if not self.opened_ns:
            self.opened_ns = now
            self.num_opened += 1
        end = self.opened_ns + int(length)
        for sequence in waiting:
            if sequence.due_ns != NEVER:
                end = min(end, self.opened_ns + int(MOST_OF_TIME_LEFT * (sequence.due_ns - self.opened_ns)))
        return max(now, end)
