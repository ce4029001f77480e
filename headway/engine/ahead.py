"""Steps that are handed to a device while the one before them runs there, so that it never waits for the host.

The next step is submitted before the tokens of the running one are read. While it runs, the host applies the results of
the one before, makes outputs, and receives and sends messages.
"""

from __future__ import annotations

from typing import Any, Protocol

from headway.engine.executor import Executor, StepOutcome
from headway.policy.step.ahead import Lookahead
from headway.policy.step.plan import StepPlan
from headway.policy.step.scheduler import Scheduler

# So many steps are not followed after one that had to be run again: sequences like its own may well need it again.
_NOT_FOLLOWED = 32


class AheadExecutor(Executor, Protocol):
    """An Executor that can be given a step while the one before runs."""

    def submit(self, plan: StepPlan) -> Any:
        """Have a step run, of nothing but decodes whose draws follow from logits alone, and do not wait for it.

        Where the plan has UNKNOWN in the place of a token, that is what the step submitted before draws.
        """

    def collect(self, submitted: Any) -> StepOutcome | None:
        """Wait for a step. None where it has to be run again, by run(): a draw needs another look at the logits.

        Steps are collected in the order in which they were submitted.
        """


class StepsAhead:
    """Submits each step that may be planned ahead while the one before runs. Others are run one after the other."""

    def __init__(self, scheduler: Scheduler, executor: AheadExecutor) -> None:
        self._scheduler, self._device = scheduler, executor
        self._lookahead = Lookahead(scheduler)
        self._next: StepPlan | None = None  # planned behind the step that runs
        self._running: Any = None  # the next step, if it was submitted
        self._not_followed = 0

    def plan(self, now: int) -> StepPlan:
        """The step that was planned ahead, as far as its sequences are there still; else a new one."""
        plan, self._next = self._next, None
        if plan is not None:
            self._lookahead.begin(plan, now)
            if plan.scheduled:
                return plan
            self._running = None  # all have ended
        return self._scheduler.schedule(now)

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a step as Executor.run() does, and submit the one behind it meanwhile, if there may be one."""
        submitted, self._running = self._running, None
        follows = not self._not_followed and self._lookahead.may_follow(plan)
        self._not_followed = max(0, self._not_followed - 1)
        if submitted is None:
            if not follows:
                return self._device.run(plan)
            submitted = self._device.submit(plan)
        try:
            if follows:
                self._next = self._lookahead.behind(plan)
                if self._next is not None:
                    self._running = self._device.submit(self._next)
            outcome = self._device.collect(submitted)
        except BaseException:
            self._running = None
            raise
        if outcome is None:
            self._running, self._not_followed = None, _NOT_FOLLOWED
            return self._device.run(plan)
        return outcome
