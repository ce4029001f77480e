"""Records the traffic of an engine while it runs, for whoever simulates it."""

from __future__ import annotations

import secrets
import time

from headway.engine.config import EngineConfig
from headway.engine.executor import StepOutcome
from headway.engine.hooks import StepHooks
from headway.engine.messages import AddRequest, SequenceOutput
from headway.engine.record_file import RecordFile
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan, accepted_drafts
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.traffic import NONE, TrafficRecords

MOST_BYTES = 16 << 20  # about 100,000 steps or requests


class RecordedTraffic(StepHooks):
    """Tells the records of what each step has shown."""

    allows_ahead = True

    def __init__(self, records: TrafficRecords) -> None:
        self._records = records
        self._times: StepTimes | None = None
        self._is_usual = True

    def queued(self, request: AddRequest, sequences: list[Sequence]) -> None:
        now = time.monotonic_ns()
        for sequence in sequences:
            self._records.arrived(sequence, now)

    def computed(self, outcome: StepOutcome) -> None:
        self._times, self._is_usual = outcome.times, not outcome.faults

    def after(
        self, plan: StepPlan, changed: list[tuple[Sequence, list[int]]], outputs: list[SequenceOutput], now: int
    ) -> list[SequenceOutput]:
        times, self._times = self._times, None
        if times is None:
            self._records.waited()
            return outputs
        if plan.work.prefill_tokens:  # else nobody has a first token
            for sequence, new in changed:
                if new:
                    self._records.began(sequence, times.sampled_ns)
        drafts = _drafts(plan, changed) if plan.work.drafts else NONE
        self._records.ran(plan.work, len(plan.scheduled), times, self._is_usual, drafts)
        return outputs

    def forget(self, sequence: Sequence) -> None:
        self._records.ended(sequence, time.monotonic_ns())


def _drafts(plan: StepPlan, changed: list[tuple[Sequence, list[int]]]) -> tuple[int, int, int]:
    """What became of a step's drafts, as Ran has it."""
    new_of = {sequence.seq_id: new for sequence, new in changed}
    tried = [item for item in plan.scheduled if item.samples > 1 and item.seq_id in new_of]
    accepted = [accepted_drafts(item, new_of[item.seq_id]) for item in tried]
    refused = sum(right < item.samples - 1 for item, right in zip(tried, accepted, strict=True))
    return len(tried), sum(accepted), refused


def traffic_of(config: EngineConfig, scheduler: Scheduler, device: str, kv_cache_dtype: str) -> RecordedTraffic:
    """What records the traffic of this scheduler. Raises ValueError where the file cannot be written."""
    assert config.record_traffic is not None
    file, blocks = RecordFile(config.record_traffic, MOST_BYTES), scheduler.blocks
    file.begin(config, device, kv_cache_dtype, scheduler.config, blocks)
    return RecordedTraffic(TrafficRecords(file.write, blocks.block_size, secrets.randbits(60)))
