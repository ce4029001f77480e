"""Runs a step that failed again, so that a request that makes it fail does not end the others.

A step that raises has changed nothing that counts: sequences are as they were before it, keys and values that it
wrote are written again with the same numbers, and what the executor keeps of sequences is made again from their tokens.
So its sequences are run again in halves, and the halves that fail in halves, down to single sequences. Those that fail
alone are at fault; what the others got is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import torch

from headway.engine.executor import EngineFault, Executor, StepOutcome
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import ScheduledSequence, StepPlan

# When this many requests fail and no run between them succeeds, the requests are not at fault.
MOST_FAULTS = 3
_DEVICE_ERRORS = ("CUDA error", "Error [CUDA]")
logger = logging.getLogger("headway.engine")


class Quarantine:
    """Finds out which requests make steps of an executor fail.

    Args:
        clock: gives monotonic nanoseconds.
        request_of: the id of the request that a sequence belongs to, by its seq_id.
    """

    def __init__(self, executor: Executor, clock: Callable[[], int], request_of: Callable[[int], str]) -> None:
        self._executor = executor
        self._clock = clock
        self._request_of = request_of
        self._at_fault: set[str] = set()  # requests that failed since the last run that succeeded
        self._failed_step = 0
        self._logged = ""

    def run_again(self, plan: StepPlan, error: Exception, began: int, number: int) -> StepOutcome:
        """Run a step again in parts. The outcome's `faults` names the sequences that made it fail.

        Args:
            error: what was raised when it was run as a whole.
            began: when that was, in nanoseconds of the clock.
            number: how many steps there were before.

        Raises:
            EngineFault: the device failed, or every request fails.
        """
        self._recover_from(error)
        if number > self._failed_step + 1:
            self._at_fault.clear()
        self._failed_step = number
        text = repr(error)
        logger.error(
            "a step of %d sequences failed and is run again in parts: %s",
            len(plan.scheduled), text, exc_info=error if text != self._logged else None,
        )  # fmt: skip
        self._logged = text
        outcome = self._in_parts(plan)
        ended = self._clock()
        outcome.times = StepTimes(ended, ended, ended)
        outcome.failed_since_ns = began
        return outcome

    def _in_parts(self, plan: StepPlan) -> StepOutcome:
        outcome = StepOutcome(StepTimes(0, 0, 0))
        succeeded = False
        items = plan.scheduled
        parts = [items] if len(items) == 1 else _halves(items)
        while parts:
            failed: list[list[ScheduledSequence]] = []
            for part in parts:
                try:
                    outcome.take(self._executor.run(msgspec.structs.replace(plan, scheduled=part, swaps=[], copies=[])))
                    succeeded = True
                except Exception as error:
                    self._recover_from(error)
                    failed.append(part)
                    if len(part) == 1:
                        outcome.faults[part[0].seq_id] = type(error).__name__
            parts = [half for part in failed if len(part) > 1 for half in _halves(part)]
        self._count_faults(outcome.faults, succeeded)
        return outcome

    def _recover_from(self, error: Exception) -> None:
        """Have the executor recover, unless the device itself has failed."""
        if isinstance(error, EngineFault):
            raise error
        if isinstance(error, torch.AcceleratorError) or any(mark in str(error) for mark in _DEVICE_ERRORS):
            raise EngineFault(f"the device failed: {error}") from error
        self._executor.recover()

    def _count_faults(self, faults: dict[int, str], succeeded: bool) -> None:
        requests = {self._request_of(seq_id): name for seq_id, name in faults.items()}
        if succeeded:
            self._at_fault.clear()
        else:
            self._at_fault.update(requests)
        if len(self._at_fault) >= MOST_FAULTS:
            raise EngineFault(f"{len(self._at_fault)} requests failed in a row")
        for request_id, name in requests.items():
            logger.error("request %s makes its steps fail (%s) and is ended", request_id, name)


def _halves(items: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    middle = len(items) // 2
    return [items[:middle], items[middle:]]
