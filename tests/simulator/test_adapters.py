"""Adapters in a simulation: the slots of the live scheduler, loads one after the other, and steps that read more."""

from __future__ import annotations

from dataclasses import replace

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.step.ledger import Phase
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.simulator.adapters import AdapterPlan, Adapters
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.server import NO_LIMITS, NO_TIME, Server
from headway.simulator.timing import Fixed
from headway.simulator.traffic import arrival

MS = 1_000_000
PLAN = AdapterPlan(count=100, exponent=1.0, load_ns=5 * MS, step_ns=MS)
OPTIONS = ServerOptions(model="llama-3.1-8b", hardware="H100-SXM")


def test_who_waits_for_a_slot_and_how_long() -> None:
    """One slot: the first loads 5 ms and decodes twice, 11 ms each; the second's load begins when that has ended."""
    scheduler = Scheduler(SchedulerConfig(8, 64, 64, max_loras=1), KVBlocks(64, 16))
    server = Server(scheduler, Fixed(10 * MS), NO_LIMITS, NO_TIME, None, None)
    server.adapters = Adapters(PLAN, scheduler)
    server.expect(arrival(n, n, 8, 2, sampling={"ignore_eos": True}, adapter=name) for n, name in enumerate("ab"))
    server.run()
    first, second = server.answers
    assert list(first.token_ns) == [16 * MS, 27 * MS]
    assert list(second.token_ns) == [43 * MS, 54 * MS]
    waited = [answer.ledger.phases_ns.get(Phase.QUEUE_ADAPTER, 0) for answer in server.answers]
    assert waited[0] == 5 * MS and waited[1] == 32 * MS - 1
    assert server.adapters.counts == {"hits": 0, "misses": 2, "loads": 2}
    scheduler.check()


def test_more_slots_find_more_adapters_and_those_take_memory() -> None:
    loads, blocks = [], []
    for slots in (2, 16):
        of = deploy(replace(OPTIONS, lora_adapters=100, max_loras=slots), SchedulingOptions(max_num_seqs=64))
        server = of.server()
        server.expect(arrival(number, number * 20 * MS, 100, 50, output_len=50) for number in range(200))
        server.run()
        assert server.adapters is not None
        counts = server.adapters.counts
        assert counts["hits"] + counts["misses"] == 200
        loads.append(counts["loads"])
        blocks.append(of.scheduler.blocks.num_blocks)
    assert loads[0] > 1.2 * loads[1] >= 16
    assert blocks[0] > blocks[1]


def test_popularity_is_zipfs_and_a_request_is_always_for_one_adapter() -> None:
    asked = [PLAN.of(str(number)) for number in range(5000)]
    assert asked == [PLAN.of(str(number)) for number in range(5000)]
    shares = [asked.count(f"adapter {rank}") / 5000 for rank in range(100)]
    harmonic = sum(1 / rank for rank in range(1, 101))
    for rank in (1, 2, 5):
        assert abs(shares[rank - 1] - 1 / rank / harmonic) < 0.02
    assert 100 >= len(set(asked)) > 90
