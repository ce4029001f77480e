"""Steps that are taken without a look at each sequence: everything comes out as if all had been scheduled."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fault_worlds import World
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.kv_groups import kv_cache_groups
from headway.policy.cache.sizing import PoolSize
from headway.policy.fleet.routing import router_of
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.accounting import StepTimes
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.plan import StepPlan
from headway.policy.step.recording import Record, RecordedScheduler, Step
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.step_time import StepWork
from headway.simulator.answers import Answer
from headway.simulator.deployed import ServerOptions, deploy
from headway.simulator.engine import Host
from headway.simulator.fleet import Failure, Fleet, Replica
from headway.simulator.server import Server, simulate
from headway.simulator.timing import DecodeTiming, Timing
from headway.simulator.traffic import Arrival, arrival

US, MS = 1000, 1_000_000
Plans = dict[int, bytes]


@dataclass
class Linear:
    """Steps that differ by their work, and by chance of their time."""

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return self.decode_times(plan.work, list, now)

    def times_beside(self, plan: StepPlan, beside: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self.decode_times(plan.work, list, now)

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        spread = random.Random(now).uniform(1, 1.5)
        forward = round(spread * US * (400 + 20 * work.tokens + work.decode_context + work.logit_rows))
        return StepTimes(now + 7, now + 7 + forward, now + 12 + forward)

    def next_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int, most: int) -> list[StepTimes]:
        steps = [self.decode_times(work, contexts, now)]
        while len(steps) < most:
            work = work + StepWork(decode_context=work.decode_tokens)
            steps.append(self.decode_times(work, contexts, steps[-1].sampled_ns))
        return steps


@dataclass
class OfPlans:
    """The same, of plans alone."""

    timing: Timing

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        return self.timing.times(plan, now)


@dataclass
class OneByOne(OfPlans):
    """The same, but one step after the other."""

    timing: DecodeTiming

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        return self.timing.decode_times(work, contexts, now)


class Decided(Server):
    """Keeps each plan by its time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans: Plans = {}
        schedule = self.scheduler.schedule

        def kept(now: int) -> StepPlan:
            plan = schedule(now)
            self.plans[now] = msgspec.msgpack.encode(plan)
            return plan

        self.scheduler.schedule = kept  # type: ignore[method-assign]


def world(seed: int, timing: Timing) -> Decided:
    """A server like those of the campaign of faults, without faults."""
    made, rng = World(seed, 80), random.Random(seed)
    scheduler = made.fleet.servers[0].scheduler
    config = replace(scheduler.config, max_num_seqs=4 * scheduler.config.max_num_seqs, max_num_batched_tokens=256)
    if rng.random() < 0.9:
        config = replace(config, weights={})
    checkpoints = rng.choice([None, None, None, 2, 12, 100])
    num_blocks, size = scheduler.blocks.num_blocks, scheduler.blocks.block_size
    has_windows = checkpoints is None and rng.random() < 0.3
    groups = kv_cache_groups((24, None), 256, config.max_model_len, size) if has_windows else ()
    num_blocks += sum(group.most(num_blocks) for group in groups if group.window)
    pool = KVBlocks(num_blocks, size, rng.random() < 0.8, num_checkpoints=checkpoints, groups=groups)
    limits = QueueLimits(rng.choice([8, 100, math.inf]))
    host = Host(rng.choice([0, 10**6]), rng.choice([0.0, 1e4]), rng.choice([0, 1000]))
    server = Decided(Scheduler(config, pool), timing, limits, host, None, None)
    server.expect(made.arrivals())
    return server


def said(answers: list[Answer]) -> list[Any]:
    """All of each answer, with its ledger."""
    ledgers = [(each.ledger.began_ns, each.ledger.last_ns, each.ledger.phases_ns) for each in answers]
    others = [asdict(replace(each, ledger=None)) for each in answers]  # type: ignore[arg-type]
    return list(zip(others, ledgers, strict=True))


def state(server: Server) -> dict[str, Any]:
    """All that later decisions depend on, and all that is reported."""
    scheduler = server.scheduler
    pool, accounting = scheduler.blocks, scheduler.accounting
    promises = scheduler.policy.promises if isinstance(scheduler.policy, SloPolicy) else None
    return {
        "now": server.now,
        "answers": said(server.answers),
        "steps": asdict(server.steps),
        "stalls": accounting.take_stalls(),
        "clocks": (accounting._decode.phases_ns, accounting._queue.phases_ns, accounting._steps),
        "learnt": vars(accounting.step_time),
        "pool": (pool._free, vars(pool.index), pool.references, list(pool.cached), pool.cached.evictions),
        "checkpoints": None if pool.checkpoints is None else vars(pool.checkpoints),
        "preemptions": scheduler.sequences.num_preemptions,
        "promises": promises and (promises.between_steps_ns, promises._passes, promises.are_prompts_promised),
    }


def assert_same(steady: Decided, each: Decided) -> int:
    """Returns how many steps were not scheduled one by one."""
    steady.run()
    each.run()
    one, other = state(steady), state(each)
    for name, value in one.items():
        assert value == other[name], name
    for now, plan in steady.plans.items():
        assert plan == msgspec.msgpack.encode(without_beside(plan, each.plans[now]))
    return len(each.plans) - len(steady.plans)


def without_beside(plan: bytes, whole: bytes) -> StepPlan:
    """A plan without the parts of sequences that another plan of the same step has decode beside it."""
    left, found = (msgspec.msgpack.decode(each, type=StepPlan) for each in (plan, whole))
    beside = {item.seq_id for item in found.scheduled} - {item.seq_id for item in left.scheduled}
    gone = [item for item in found.scheduled if item.seq_id in beside]
    assert all(item.decoding and len(item.token_ids) == item.samples == 1 and not item.keeps for item in gone)
    found.scheduled = [item for item in found.scheduled if item.seq_id not in beside]
    found.tables = [change for change in found.tables if change.seq_id not in beside]
    return found


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (20, 40, 60, 80, 100))])
def test_in_any_world_nothing_comes_out_otherwise(first):
    """Policies, classes with shares, pools that run out, choices, clients that go away: as in the fault campaign."""
    saved = [assert_same(world(seed, Linear()), world(seed, OfPlans(Linear()))) for seed in range(first, first + 20)]
    assert sum(count > 0 for count in saved) >= 10 and sum(saved) > 400, saved


def fleet(seed: int, servers: int, ahead: bool, timing: Timing) -> Fleet:
    """Servers that fail now and then, with clients who go away or send again, after all is done."""
    rng = random.Random(seed)
    options = SchedulingOptions(max_num_seqs=rng.choice([2, 8, 64]), scheduling_policy=rng.choice(["slo", "fcfs"]))
    make = partial(options.scheduler, "cuda", PoolSize(rng.choice([20, 400]), 200))
    host = Host(rng.randrange(MS), 100.0, rng.randrange(2 * US), rng.randrange(US), ahead)
    replicas = [Replica(Server(make(), timing, QueueLimits(), host, None, None, make)) for _ in range(servers)]
    numbers, at_ns, pause_ns = itertools.count(), 0, rng.choice([1, 10, 30]) * MS

    def made(at_ns: int) -> Arrival:
        leaves_ns = at_ns + rng.randrange(100 * MS) if rng.random() < 0.2 else None
        sampling = {"n": rng.choice([1, 1, 1, 3]), "ignore_eos": rng.random() < 0.1}
        prompt, most, output = (rng.randrange(1, 90) for _ in range(3))
        return arrival(next(numbers), at_ns, prompt, most, output_len=output, cancel_ns=leaves_ns, sampling=sampling)

    def after(answers: list[Answer]) -> list[Arrival]:
        return [made(max(each.ended_ns for each in answers))] if rng.random() < 0.3 else []

    coming = []
    for _ in range(40):
        at_ns += int(rng.expovariate(1.0) * pause_ns)
        coming.append(made(at_ns))
    fails_ns = sorted(rng.randrange(at_ns + 1) for _ in range(4))
    failures = [Failure(each, rng.randrange(servers), each + rng.randrange(50 * MS)) for each in fails_ns]
    done = Fleet(replicas, router_of("least-loaded", options.classes), after, failures=iter(failures))
    done.run(coming)
    return done


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_fleet_does_the_same_whether_steps_are_scheduled_or_taken_together(seed, servers, ahead, foreseen):
    """What comes in between, requests, clients that leave or a failure, finds the steps that have ended by then."""
    each = fleet(seed, servers, ahead, OfPlans(Linear()))
    steady = fleet(seed, servers, ahead, Linear() if foreseen else OneByOne(Linear()))
    for one, other in zip(each.servers, steady.servers, strict=True):
        expected, found = state(one), state(other)
        for name, value in expected.items():
            assert value == found[name], name
    assert said(each.answers) == said(steady.answers)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])  # the latter's windows need each context
def test_steps_are_as_long_as_the_cost_model_says(model):
    coming = [arrival(number, number * 40_000_000, 90 + 7 * number, 60 + number) for number in range(60)]

    def served(wrap: Callable[[Timing], Timing]) -> Decided:
        made = deploy(ServerOptions(model=model, hardware="H100-SXM"), SchedulingOptions())
        server = Decided(made.scheduler, wrap(made.timing), made.limits, made.host, None, None)
        server.expect(iter([replace(each, request=copy(each.request)) for each in coming]))
        return server

    assert assert_same(served(lambda timing: timing), served(OfPlans)) > 100


def test_a_scheduler_that_records_its_steps_plans_each():
    written = list[Record]()
    options = SchedulingOptions()
    recorded = options.scheduler(
        "cpu",
        PoolSize(50, 100),
        lambda config, blocks: RecordedScheduler(config, blocks, lambda record, _: written.append(record)),
    )
    ran = simulate(recorded, [arrival(0, 0, 10, 30)], Linear())
    assert sum(isinstance(record, Step) for record in written) == len(ran.steps) == 30
