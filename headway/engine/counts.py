"""What is counted of steps, for metrics: the state after a step, and what has happened since the one before.

The engine as a library has nobody who asks for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.engine.executor import StepOutcome
from headway.engine.messages import EngineStats
from headway.policy.step.plan import StepPlan
from headway.policy.step.request import Sequence
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.step_time import StepWork, pairs

if TYPE_CHECKING:
    from headway.engine.roofline import StepRoofline

# The longest step is predicted anew, and a step compared with the roofline, after so many steps.
_STEPS_OF_PREDICTION = 16


@dataclass(slots=True)
class Stepped:
    """A step that has ended: what Scheduler.complete() was given and has returned."""

    plan: StepPlan
    outcome: StepOutcome
    changed: list[tuple[Sequence, list[int]]]


class StepCounts:
    """The statistics of a scheduler's steps.

    Args:
        roofline: knows the least time of steps; None where nobody does.
    """

    def __init__(self, scheduler: Scheduler, roofline: StepRoofline | None = None) -> None:
        self._scheduler = scheduler
        self._roofline = roofline
        self._memory = MemoryCounts(scheduler)
        self._queries = self._hits = self._preemptions = self._windows = self._steps = 0
        self._longest_step_ns = 0.0

    def take(self, stepped: Stepped | None, received: int) -> EngineStats:
        """Gauges now, and counters since the last call.

        Args:
            stepped: the step since then; None where nothing was run.
            received: how many requests have reached the engine since its start.
        """
        scheduler = self._scheduler
        sequences, prefix = scheduler.sequences, scheduler.blocks.prefix_stats
        stats = EngineStats(
            num_running=len(sequences.running),
            num_waiting=len(sequences.waiting),
            kv_cache_usage=scheduler.blocks.usage,
            prefix_cache_queries=prefix.queries - self._queries,
            prefix_cache_hits=prefix.hits - self._hits,
            preemptions=sequences.num_preemptions - self._preemptions,
            received=received,
            stall_ns={str(phase): ns for phase, ns in scheduler.accounting.take_stalls().items() if ns},
            windows=scheduler.policy.num_windows - self._windows,
            running_of_class=dict(sequences.running.of_class),
            waiting_of_class=dict(sequences.waiting.of_class),
            fairness_lead=sequences.waiting.lead,
            fairness_bound=sequences.waiting.bound,
        )
        self._queries, self._hits = prefix.queries, prefix.hits
        self._preemptions, self._windows = sequences.num_preemptions, scheduler.policy.num_windows
        self._memory.add_to(stats)
        if stepped is not None:
            self._add_step(stepped, stats)
        stats.longest_step_ns = self._longest_step_ns
        return stats

    def _add_step(self, stepped: Stepped, stats: EngineStats) -> None:
        plan, outcome, decision = stepped.plan, stepped.outcome, self._scheduler.decisions[-1]
        stats.step_ns = outcome.times.sampled_ns - (outcome.failed_since_ns or outcome.times.launched_ns)
        stats.scheduled_tokens = decision.decoding + decision.prompt_tokens
        stats.prompt_tokens = self._prompt_tokens(stepped) if plan.work.prefill_tokens else 0
        stats.generation_tokens = sum([len(new) for _, new in stepped.changed])
        stats.scheduled_sequences = len(plan.scheduled)
        stats.moe_mixtures, stats.moe_expert_tokens, stats.moe_experts_touched, stats.moe_busiest_expert_tokens = (
            outcome.routing
        )
        stats.predicted_ns, stats.forward_ns, stats.left_out = (
            decision.predicted_ns,
            decision.took_ns,
            decision.left_out,
        )
        stats.slack_ns = max(1.0, decision.slack_ns) if decision.tightest else 0.0
        if self._steps % _STEPS_OF_PREDICTION == 0:
            self._longest_step_ns = longest_step_ns(self._scheduler)
            if self._roofline is not None:
                stats.least_ns = decision.least_ns = self._roofline.least_ns(plan)
        self._steps += 1

    def _prompt_tokens(self, stepped: Stepped) -> int:
        """How many tokens of the plan's chunks begin within a prompt."""
        sequences = {sequence.seq_id: sequence for sequence, _ in stepped.changed}
        tokens = 0
        for item in stepped.plan.scheduled:
            if not item.decoding:
                sequence = sequences.get(item.seq_id) or self._scheduler.sequences[item.seq_id]
                tokens += item.num_tokens if item.start < sequence.prompt_len else 0
        return tokens


def longest_step_ns(scheduler: Scheduler) -> float:
    """What a step takes with as much of everything as there may be; 0 where that cannot be predicted as yet."""
    config, step_time = scheduler.config, scheduler.accounting.step_time
    if not step_time.is_trained:
        return 0.0
    tokens, seats, length = config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    work = StepWork(tokens, seats, pairs(max(0, length - tokens), tokens), seats * length)
    return step_time.most_ns(work)


class MemoryCounts:
    """Adds the state of a scheduler's pool to the statistics of steps, and what was counted since the step before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._pool = scheduler.blocks
        self._host = scheduler.host
        self._slots, self._adapters = scheduler.sequences.slots, dict[str, int]()
        self._watermark = scheduler.config.kept_free(scheduler.blocks.num_blocks)
        self._allocated = self._runs = self._looked_up = self._evicted = 0
        self._evictions: Counter[tuple[str, str]] = Counter()
        self._swaps: Counter[str] = Counter()
        self._queries: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()

    def add_to(self, stats: EngineStats) -> None:
        """Fill in the fields about the pool."""
        pool, prefix = self._pool, self._pool.prefix_stats
        stats.protected_blocks, stats.watermark_blocks = pool.cached.num_protected, self._watermark
        stats.blocks_of_class = dict(pool.used)
        stats.allocated_blocks, stats.allocated_runs = pool.allocated - self._allocated, pool.runs - self._runs
        self._allocated, self._runs = pool.allocated, pool.runs
        if prefix.queries != self._looked_up:
            stats.queries_of_class = dict(prefix.queries_of_class - self._queries)
            stats.hits_of_class = dict(prefix.hits_of_class - self._hits)
            self._looked_up = prefix.queries
            self._queries, self._hits = prefix.queries_of_class.copy(), prefix.hits_of_class.copy()
        if pool.cached.num_evicted != self._evicted:
            for (name, reason), count in (pool.cached.evictions - self._evictions).items():
                stats.evictions.setdefault(name, {})[reason] = count
            self._evicted, self._evictions = pool.cached.num_evicted, pool.cached.evictions.copy()
        if self._slots is not None:
            counts = dict(zip(("hits", "misses", "loads"), self._slots.counts, strict=True))
            stats.adapters = {name: count - self._adapters.get(name, 0) for name, count in counts.items()}
            self._adapters, stats.adapter_slots_used = counts, len(self._slots.resident)
        if self._host is not None:
            stats.swap_usage = self._host.num_used / self._host.space.num_blocks
            stats.swaps = dict(self._host.counts - self._swaps)
            self._swaps = self._host.counts.copy()
