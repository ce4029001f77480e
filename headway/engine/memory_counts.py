"""The metrics of the KV pool: its state, and what happened since it was last asked."""

from __future__ import annotations

from collections import Counter

from headway.engine.messages import EngineStats
from headway.policy.step.scheduler import Scheduler


class MemoryCounts:
    """Adds the state of a scheduler's pool to the statistics of steps, and what was counted since the step before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._pool = scheduler.blocks
        self._host = scheduler.host
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
        if self._host is not None:
            stats.swap_usage = self._host.num_used / self._host.space.num_blocks
            stats.swaps = dict(self._host.counts - self._swaps)
            self._swaps = self._host.counts.copy()
