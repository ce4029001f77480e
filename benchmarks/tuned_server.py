"""A simulated server that tunes itself: the policy of a live one, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable

from headway.advisor.online.forecast import Forecast, Forecaster, options_of
from headway.advisor.online.levers import Levers, begun, limits_of
from headway.advisor.online.traffic import History
from headway.advisor.online.tuner import Move, OnlineTuner
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.step.accounting import StepTimes
from headway.policy.step.bounds import Bounds
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.recording import RecordedEngine
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import StepLimits
from headway.policy.step.step_time import StepWork
from headway.policy.step.traffic import Traffic, TrafficRecords
from headway.simulator.answers import Choice, Present
from headway.simulator.server import NO_TIME, Server
from headway.simulator.timing import DecodeTiming

LOOK_NS = 2_000_000_000
STEP_S = 200e-6  # what simulating a step takes of a processor, where many requests wait


class _Told:
    """Another timing, which tells of each step."""

    def __init__(self, timing: DecodeTiming, records: TrafficRecords) -> None:
        self._timing, self._records = timing, records

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        times = self._timing.times(plan, now)
        self._records.ran(plan.work, len(plan.scheduled), times)
        return times

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        times = self._timing.decode_times(work, contexts, now)
        self._records.ran(work, work.decode_tokens, times)
        return times


class Counted(Forecaster):
    """A forecaster whose processor time is counted in steps, so that a simulation of it is the same each time."""

    steps = 0

    def of(self, options: SchedulingOptions, since: int, until: int, lead_ns: int, seed: int = 0) -> Forecast:
        found = super().of(options, since, until, lead_ns, seed)
        self.steps += found.steps
        return found


class TunedServer(Server):
    """A server that tunes itself.

    Args:
        scheduler: with room for the upper bounds.
        limits: what it begins with.
        forecaster: how it predicts.

    Attributes:
        moves: what was done, with the times.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        timing: DecodeTiming,
        queue: QueueLimits,
        device: str,
        limits: StepLimits,
        bounds: Bounds,
        forecaster: type[Counted] = Counted,
    ) -> None:
        self.history, self.moves = History(), list[tuple[int, Move]]()
        blocks, config = scheduler.blocks, scheduler.config
        self._records = TrafficRecords(self._take, blocks.block_size)
        super().__init__(scheduler, _Told(timing, self._records), queue, NO_TIME, None, None)
        about = {"version": "", "model": "", "kv_cache_dtype": "", "settings": {}, "began_unix_s": 0.0}
        engine = RecordedEngine.of(config, blocks, device=device, began_ns=0, **about)
        self._take(engine, False)
        scheduler.set_classes(config.classes, config.weights, limits)
        start = begun(options_of(engine), limits, config.classes)
        self.forecaster = forecaster(self.history)
        levers = Levers(bounds, start, device, config.max_num_seqs, config.max_num_batched_tokens)
        self.tuner = OnlineTuner(self.forecaster, levers, start, lambda: STEP_S * self.forecaster.steps)
        self._device = device
        self._at(LOOK_NS, self._look)

    def _take(self, record: Traffic, idle: bool) -> None:
        self.history.take(record)

    def _look(self, now: int) -> None:
        for move in self.tuner.look(now):
            self.moves.append((now, move))
            if move.options is not None:
                self.scheduler.set_classes(
                    move.options.classes, move.options.weights, limits_of(move.options, self._device)
                )
        if self._coming or self.scheduler.has_work:
            self._at(now + LOOK_NS, self._look)

    def _add(self, present: Present) -> None:
        before = len(present.choices)
        super()._add(present)
        for choice in present.choices[before:]:
            self._records.arrived(choice.sequence, self.now)

    def _note_first_token(self, choice: Choice, now: int) -> None:
        self._records.began(choice.sequence, now)
        super()._note_first_token(choice, now)

    def _end(self, choice: Choice) -> None:
        self._records.ended(choice.sequence, choice.sequence.ledger.last_ns)
        super()._end(choice)
