"""What takes part in the steps of an engine beside its scheduler and its executor.

These are drafts, beam searches, prompts that engines hand over to each other, blocks that are kept elsewhere, adapters
on their way into slots, and marks for profilers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from headway.engine.executor import StepOutcome
from headway.engine.messages import AddRequest, EngineStats, SequenceOutput
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence


class StepHooks:
    """What an EngineCore calls in each step and at each end of a sequence. Here, nothing is done.

    Attributes:
        allows_ahead: whether a step may be planned before the one in front of it has ended.
    """

    allows_ahead = False

    def awaited(self, request: AddRequest) -> Future[Any] | None:
        """Called when a request comes; what must be there before its sequences are queued, or None."""
        return None

    def queued(self, request: AddRequest, sequences: list[Sequence]) -> None:
        """Called when the sequences of a request are queued, before any of them may run."""

    def left(self, request_id: str) -> None:
        """Called when a request is dropped before its sequences were queued."""

    def before(self) -> None:
        """Called before a step is planned."""

    def ends(self, now: int) -> Iterable[tuple[Sequence, str]]:
        """Called before a step is planned: the sequences that end now, and why, in one line for the user."""
        return ()

    def planned(self, plan: StepPlan, now: int) -> None:
        """Called with each plan, before it runs; where nothing does, it may say until when the next one waits."""

    def computed(self, outcome: StepOutcome) -> None:
        """Called before the outcome of a step is applied, and may change it."""

    def after(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        """Called after a step, also after one in which nothing could run. Returns what is said in place of `outputs`.

        Args:
            changed: what Scheduler.complete() returned; tokens that are told otherwise are added, for metrics.
            now: when the step ended.
        """
        return outputs

    def abort(self, request_id: str, now: int) -> list[SequenceOutput]:
        """Called when a request is dropped, or a choice of it; returns what is said if somebody still listens."""
        return []

    def ended(self, sequence: Sequence, output: SequenceOutput) -> None:
        """Called before the last output of a sequence is said, to which something may be added."""

    def forget(self, sequence: Sequence) -> None:
        """Called when a sequence has ended."""

    def idle(self) -> None:
        """Called now and then while there are no steps."""

    def count(self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], stats: EngineStats) -> None:
        """Called to count what a step did, where metrics are wanted."""

    def check_by_parts(self) -> Iterator[None]:
        """Called to check blocks while the engine is idle, as KVBlocks.check_by_parts() does."""
        yield from ()
