"""What the pool says for metrics: increments add up to what happened, and nothing is said twice."""

from __future__ import annotations

import random
from collections import Counter

from headway.engine.counts import MemoryCounts
from headway.engine.messages import EngineStats
from headway.policy.cache.swap import SwapSpace
from tests.policy.test_shares import classes, shared


def test_increments_add_up() -> None:
    rng = random.Random(5)
    sim = shared(classes(chat=0.3), num_blocks=24, rng=rng, swap=SwapSpace(20))
    counts, evicted, found = MemoryCounts(sim.scheduler), Counter[tuple[str, str]](), Counter[str]()
    swaps = Counter[str]()
    allocated = runs = 0
    for _ in range(60):
        prompt = [*([7] * rng.randrange(20)), *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
        sim.submit(prompt, 16, service_class=rng.choice(["chat", "report", "offline"]))
        sim.step()
        stats = EngineStats(0, 0, 0.0)
        counts.add_to(stats)
        evicted.update({(name, why): n for name, reasons in stats.evictions.items() for why, n in reasons.items()})
        found.update(stats.hits_of_class)
        swaps.update(stats.swaps)
        allocated, runs = allocated + stats.allocated_blocks, runs + stats.allocated_runs
        assert sum(stats.blocks_of_class.values()) == 24 - sim.scheduler.blocks.num_free
    pool = sim.scheduler.blocks
    assert evicted == pool.cached.evictions and evicted.total() == pool.cached.num_evicted > 0
    assert sim.scheduler.host is not None and swaps["swap"] and swaps == +sim.scheduler.host.counts
    assert stats.swap_usage == sim.scheduler.host.num_used / 20
    assert found.total() == pool.prefix_stats.hits > 0
    assert (allocated, runs) == (pool.allocated, pool.runs) and 0 < runs < allocated
    again = EngineStats(0, 0, 0.0)
    counts.add_to(again)
    assert (again.evictions, again.hits_of_class, again.allocated_blocks, again.swaps) == ({}, {}, 0, {})
