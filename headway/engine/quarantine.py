"""Runs steps so that a request which makes one fail does not take the others with it.

A step that raises has changed nothing that counts: sequences are as they were before it, keys and values that it
wrote are written again with the same numbers, and what the runner keeps of sequences is made anew from their tokens.
So its sequences are run again in halves, and the halves that fail in halves, until those are alone that still fail.
They are at fault; what the others got is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from headway.engine.runner import Runner, StepResult
from headway.policy.accounting import ScheduledSequence, StepTimes
from headway.policy.scheduler import StepPlan

# So many requests at fault, and no run between them that succeeded: then it is not the requests.
MOST_FAULTS = 3
_DEVICE_ERRORS = ("CUDA error", "Error [CUDA]")
logger = logging.getLogger("headway.engine")


class EngineFault(RuntimeError):
    """A step failed and no request is to blame. The engine's state is unknown: it is of no further use."""


class Quarantine:
    """Runs a runner's steps; `clock` gives monotonic nanoseconds."""

    def __init__(self, runner: Runner, clock: Callable[[], int]) -> None:
        self._runner = runner
        self._clock = clock
        self._at_fault: set[str] = set()  # requests, since a run last succeeded
        self._logged = ""

    def run(self, plan: StepPlan) -> StepResult:
        """The step's result. Where it failed, `faults` of it names the requests that made it fail.

        Raises:
            EngineFault: the device failed, or every request does.
        """
        began = self._clock()
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._take_note(error)
            said = repr(error)
            logger.error(
                "a step of %d sequences failed and is run again in parts: %s",
                len(plan.scheduled), said, exc_info=error if said != self._logged else None,
            )  # fmt: skip
            self._logged = said
        else:
            self._at_fault.clear()
            return result
        if plan.copies:
            raise EngineFault("the KV blocks of a step could not be copied")
        result = self._in_parts(plan.scheduled)
        ended = self._clock()
        result.times = StepTimes(ended, ended, ended)
        result.failed_since_ns = began
        return result

    def _in_parts(self, items: list[ScheduledSequence]) -> StepResult:
        result = StepResult(StepTimes(0, 0, 0))
        succeeded = False
        parts = [items] if len(items) == 1 else _halves(items)
        while parts:
            failed: list[list[ScheduledSequence]] = []
            for part in parts:
                try:
                    result.take(self._runner.run(StepPlan(part)))
                    succeeded = True
                except Exception as error:
                    self._take_note(error)
                    failed.append(part)
                    if len(part) == 1:
                        result.faults.setdefault(part[0].sequence.request_id, type(error).__name__)
            parts = [half for part in failed if len(part) > 1 for half in _halves(part)]
        self._judge(result.faults, succeeded)
        return result

    def _take_note(self, error: Exception) -> None:
        """Make the runner fit to go on, unless the device is beyond that."""
        if isinstance(error, torch.AcceleratorError) or any(mark in str(error) for mark in _DEVICE_ERRORS):
            raise EngineFault(f"the device failed: {error}") from error
        self._runner.recover()

    def _judge(self, faults: dict[str, str], succeeded: bool) -> None:
        if succeeded:
            self._at_fault.clear()
        else:
            self._at_fault.update(faults)
        if len(self._at_fault) >= MOST_FAULTS:
            raise EngineFault(f"{len(self._at_fault)} requests failed one after the other, and none succeeded")
        for request_id, name in faults.items():
            logger.error("request %s makes its steps fail (%s) and is ended", request_id, name)


def _halves(items: list[ScheduledSequence]) -> list[list[ScheduledSequence]]:
    middle = len(items) // 2
    return [items[:middle], items[middle:]]
