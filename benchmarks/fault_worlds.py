"""Random servers and fleets on the virtual clock, by a seed alone: what they are like, and what happens to them."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.config_files.classes import parse_class_file
from headway.config_files.tenants import parse_tenant_file
from headway.policy.admission.queue_bound import QueueLimits
from headway.policy.admission.quota import Quotas
from headway.policy.admission.tenants import NO_TENANTS, TenantTable
from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.swap import SwapSpace
from headway.policy.fleet.routing import SCORERS, router_of
from headway.policy.fleet.scaling import Scaler, ScalingRule
from headway.policy.objectives.service_class import BUILT_IN, ClassTable
from headway.policy.objectives.slo import first_of_ranks
from headway.policy.step.accounting import StepTimes
from headway.policy.step.plan import StepPlan
from headway.policy.step.policies import POLICIES
from headway.policy.step.request import Status
from headway.policy.step.scheduler import Scheduler
from headway.policy.step.scheduler_config import SchedulerConfig
from headway.policy.step.step_time import StepWork
from headway.simulator.answers import EngineDied
from headway.simulator.engine import Host
from headway.simulator.fleet import ROLES, Failure, Fleet, Handover, Replica, Scaling
from headway.simulator.server import Server
from headway.simulator.traffic import Arrival, arrival, made_prompt

MS, SECOND, HOUR = 1_000_000, 1_000_000_000, 3_600_000_000_000
CHECKED_EVERY = 20  # steps
MOST_STEPS = 2_000  # for each request: more is a server that gets nowhere
MOST_PASSED = 40
CLASSES, TENANTS = ("first", "second", "last"), ("ann", "bob", "cy")


class Violation(AssertionError):
    """Something that must hold did not, in the world of a seed."""


class SteppingQuotas(Quotas):
    """Quotas of one server, whose clock steps, with all that was written of them."""

    def __init__(self, world: World) -> None:
        self.world, self.written = world, list[bytes]()
        super().__init__(world.tenants, 0, lambda record: self.written.append(msgspec.json.encode(record)))

    def reserve(self, tenant: str, tokens: int, now: int) -> Any:
        """Reserve like Quotas.reserve(), by a clock that may be wrong."""
        return super().reserve(tenant, tokens, self.world.clock(now))

    def settle(self, number: int, tokens: int | None, now: int, outputs: Sequence[int] = ()) -> None:
        """Settle like Quotas.settle(), by a clock that may be wrong."""
        super().settle(number, tokens, self.world.clock(now), outputs)


class Watch:
    """Stands before a scheduler: has its pool looked at now and then, and changes its files between two steps."""

    def __init__(self, world: World, scheduler: Scheduler) -> None:
        self.world, self.scheduler = world, scheduler
        self.passed = Counter[int]()  # sequences that were begun while this one had starved and waited
        self.starving = set[int]()  # when it was last looked
        self._schedule, scheduler.schedule = scheduler.schedule, self.schedule  # type: ignore[method-assign]

    def schedule(self, now: int) -> StepPlan:
        """Check the scheduler, then call its schedule(). Raises Violation."""
        world, scheduler = self.world, self.scheduler
        if world.rng.random() < 0.0005:
            world.reload()
        if scheduler.config.classes is not world.classes:
            scheduler.set_classes(world.classes, world.tenants.weights)
        world.steps += 1
        if world.steps % CHECKED_EVERY == 0:
            scheduler.check()
        if world.steps > MOST_STEPS * world.requests:
            raise Violation(f"seed {world.seed}: {world.steps} steps, and there is no end of it")
        plan = self._schedule(now)
        if not plan.wait_until_ns:
            self._look_for_starving(plan, now)
        return plan

    def _look_for_starving(self, plan: StepPlan, now: int) -> None:
        """Check that a sequence goes first if it waited too long (with objectives) or was overtaken too often."""
        scheduler = self.scheduler
        if scheduler.config.policy != "slo":
            most = max((sequence.times_bypassed for sequence in scheduler.waiting), default=0)
            may = scheduler.config.max_bypasses
            assert most <= may, f"{most} have gone past one, {may} may"
            return
        first = next((each for each in scheduler.sequences.values() if each.has_starved), None)
        if first is None:
            behind = first_of_ranks(scheduler.waiting)
            starving = {s.seq_id for s in behind if now - s.arrival_ns > s.service.starvation_s * 1e9}
            assert not starving & self.starving, "one starves, and nobody goes first"
            self.starving = starving  # sequences that have yielded in this step are checked in the next
        elif first.status is Status.WAITING:
            self.passed[first.seq_id] += len(plan.new)
            assert self.passed[first.seq_id] <= MOST_PASSED, f"more than {MOST_PASSED} have gone past one who starves"


@dataclass(slots=True)
class Faulty:
    """Steps that take about as long as their tokens, but for faults."""

    world: World
    _slow_until: int = 0

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """The times of a step, in which something may go wrong. Raises EngineDied."""
        rng, took = self.world.rng, _usual_ns(plan.work)
        if rng.random() < 0.001:
            self.world.faults["crash"] += 1
            raise EngineDied(now + rng.randrange(took), now + took + rng.randrange(5 * SECOND))
        return self._of_step(took, now)

    def _of_step(self, took: int, now: int) -> StepTimes:
        rng, faults = self.world.rng, self.world.faults
        draw = rng.random()
        if draw < 0.001:
            faults["freeze"] += 1
            took += rng.randrange(10 * SECOND)
        elif draw < 0.003:
            faults["slow"] += 1
            self._slow_until = now + rng.randrange(3 * SECOND)
        elif draw < 0.009:
            faults["clock stands still"] += 1
            took = 0
        elif draw < 0.0095:
            faults["clock steps back"] += 1
            took = -rng.choice([1, MS, rng.randrange(10 * SECOND)])
        elif draw < 0.0096:
            faults["clock steps forward"] += 1
            took += rng.randrange(HOUR)
        elif draw < 0.0106:
            faults["quota clock steps"] += 1
            self.world.ahead_ns += rng.choice([-1, 1]) * rng.randrange(rng.choice([SECOND, HOUR]))
        if now < self._slow_until:
            took *= 25
        return StepTimes(now, now + took * 9 // 10, now + took)


class FaultyDecodes(Faulty):
    """A Faulty timing that also gives times of steps without a plan. No engine dies in one."""

    def decode_times(self, work: StepWork, contexts: Callable[[], list[int]], now: int) -> StepTimes:
        """The times of a step in which all sequences decode."""
        return self._of_step(_usual_ns(work), now)


def _usual_ns(work: StepWork) -> int:
    return 2 * MS + 20_000 * work.tokens


@dataclass(slots=True)
class World:
    """A fleet, often of one server, and what happens to it.

    Attributes:
        ahead_ns: by how much the clock of quotas is.
        steps: that engines were asked for.
    """

    seed: int
    requests: int
    rng: random.Random = field(init=False)
    classes: ClassTable = field(init=False)
    tenants: TenantTable = field(init=False)
    fleet: Fleet = field(init=False)
    quotas: list[SteppingQuotas] = field(init=False, default_factory=list)
    faults: Counter[str] = field(init=False, default_factory=Counter)
    sent: dict[str, Arrival] = field(init=False, default_factory=dict)
    ahead_ns: int = field(init=False, default=0)
    steps: int = field(init=False, default=0)
    _longest: int = field(init=False)
    _has_quotas: bool = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self._longest = rng.choice([24, 64, 200])
        self.tenants = self._tenants() if rng.random() < 0.5 else NO_TENANTS
        self.classes = BUILT_IN if rng.random() < 0.3 else self._classes(CLASSES)
        self._has_quotas = bool(self.tenants.tenants) and rng.random() < 0.7
        count = rng.choice([1, 1, 1, 2, 3, 5])
        servers = [Replica(self._server(), weight=rng.choice([1.0, 1.0, 3.0])) for _ in range(count)]
        has_roles = count > 1 and rng.random() < 0.3
        for at, each in enumerate(servers if has_roles else ()):
            each.role, each.handover = ROLES[at % 2], Handover(1.0, rng.choice([1e3, 1e6]), 1e-4)
        scaling = None
        if not has_roles and rng.random() < 0.2:
            rule = ScalingRule(len(servers), len(servers) + 3, rng.randrange(1, 10), rng.choice([0.0, 2.0]))
            scaling = Scaling(Scaler(rule), self._server, rng.choice([0, SECOND]))
        router = router_of(rng.choice(list(SCORERS)), self.classes)
        self.fleet = Fleet(servers, router, None, self._sends, scaling, self._failures(count) if count > 1 else ())

    def clock(self, now: int) -> int:
        """The time by the clock of quotas."""
        return now + self.ahead_ns

    def reload(self) -> None:
        """Other files of classes and tenants are read, which no one who is there expects."""
        self.faults["files change"] += 1
        if self.classes is not BUILT_IN:
            self.classes = self._classes(self.rng.sample(CLASSES, self.rng.randrange(1, len(CLASSES) + 1)))
        if self.tenants.tenants:
            self.tenants = self._tenants()
        for server in self.fleet.servers:
            server.queues.set_classes(self.classes)
            server.queues.set_tenants(self.tenants.weights or None)
        for each in self.quotas:
            each.set_tenants(self.tenants, self.clock(self.fleet.now))

    # --- what a server is like ----------------------------------------------------------------------

    def _server(self) -> Server:
        rng, longest = self.rng, self._longest
        seats, chunked, size = rng.randrange(1, 17), rng.random() < 0.8, rng.choice([1, 4, 16])
        batched = max(seats, rng.randrange(8, 128)) if chunked else max(seats, longest)
        least = -(-longest // size)
        blocks, caches = rng.randrange(least, least * (seats + 1) + 1), rng.random() < 0.8
        policy, lookahead, bypasses = rng.choice(list(POLICIES)), rng.randrange(0, 6), rng.randrange(0, 8)
        swap = SwapSpace(rng.choice([0, 0, 3, 200]), fixed_ns=1e4, block_ns=rng.choice([1e3, 1e5]))
        stall, patience = rng.choice([0.5, 5.0, math.inf]), rng.choice([0.5, 20.0, math.inf, math.inf])

        def engine() -> Scheduler:
            config = SchedulerConfig(
                seats,
                batched,
                longest,
                chunked,
                policy,
                lookahead,
                bypasses,
                stall,
                patience,
                self.classes,
                weights=self.tenants.weights,
                swap=swap,
            )
            made = Scheduler(config, KVBlocks(blocks, size, caches))
            Watch(self, made)
            return made

        quotas = None
        if self._has_quotas:
            self.quotas.append(quotas := SteppingQuotas(self))
        limits = QueueLimits(rng.choice([8, 100, math.inf, math.inf]), rng.choice([200, math.inf, math.inf]))
        host = Host(rng.choice([0, MS]), rng.choice([0.0, 1e4]), rng.choice([0, 1000]))
        timing = rng.choice([Faulty, FaultyDecodes])(self)
        return Server(engine(), timing, limits, host, None, None, engine, quotas)

    def _classes(self, names: tuple[str, ...] | list[str]) -> ClassTable:
        """Draw a table of classes and read it as a file. Some classes leave most keys out."""
        rng, lines = self.rng, [f'default = "{self.rng.choice(names)}"'] if self.rng.random() < 0.5 else []
        for name in names:
            kv = rng.choice([0.0, 0.0, 0.3])
            keys: dict[str, Any] = {
                "ttft_ms": rng.choice([20.0, 300.0, None]),
                "tpot_ms": rng.choice([4.0, 40.0, None]),
                "window_ms": rng.choice([None, [1.0, 8.0]]),
                "seats": rng.choice([0.0, 0.0, 0.3]),
                "tokens": rng.choice([0.0, 0.0, 0.3]),
                "kv": kv,
                "max_kv": rng.choice([None, None, max(kv, 0.05), 0.6]),
                "max_queued": rng.choice([3, 50, None]),
                "queue_timeout_s": rng.choice([0.3, 30.0, None]),
                "max_prompt_tokens": rng.choice([None, None, self._longest // 2]),
                "max_output_tokens": rng.choice([None, None, 20]),
                "starvation_s": rng.choice([0.2, 5.0, None]),
            }
            lines += ["[[class]]", f'name = "{name}"', f'when_late = "{rng.choice(["serve", "refuse"])}"']
            lines += [f"{key} = {value}" for key, value in keys.items() if value is not None]
        return parse_class_file("classes.toml", "\n".join(lines)).table

    def _tenants(self) -> TenantTable:
        """Draw a table of tenants and read it as a file."""
        rng, lines = self.rng, list[str]()
        if rng.random() < 0.3:
            lines += ["[total]", f"tokens_per_minute = {rng.choice([2_000, 100_000])}"]
        for name in rng.sample(TENANTS, rng.randrange(1, 4)):
            lines += ["[[tenant]]", f'name = "{name}"', f"weight = {rng.choice([0.001, 1, 3.5])}"]
            if rng.random() < 0.5:
                lines.append(f"requests_per_minute = {rng.choice([6, 600, 6000])}")
            if rng.random() < 0.5:
                lines.append(f"tokens_per_minute = {rng.choice([100, 10_000, 100_000])}")
        return parse_tenant_file("tenants.toml", "\n".join(lines)).table

    def _failures(self, replicas: int) -> Iterator[Failure]:
        """Servers that are gone with all that they have, for ever."""
        rng, now = self.rng, 0
        while True:
            now += int(rng.expovariate(1 / (20 * SECOND)))
            yield Failure(now, rng.randrange(replicas), now + rng.choice([0, rng.randrange(20 * SECOND)]))
            self.faults["a server is gone"] += 1

    # --- what comes ---------------------------------------------------------------------------------

    def arrivals(self) -> Iterator[Arrival]:
        """Bursts and lulls; some requests can never fit, some clients go away, some as soon as they have come."""
        rng, now, longest = self.rng, 0, self._longest
        names = ["", *(each.name for each in self.classes)]
        for number in range(self.requests):
            now += 0 if rng.random() < 0.4 else int(rng.expovariate(1 / rng.choice([5 * MS, 50 * MS, 500 * MS])))
            prompt = rng.randrange(1, longest + (rng.random() < 0.02) * longest)
            shared = [(rng.randrange(1, 4), rng.randrange(1, longest))] if rng.random() < 0.5 else []
            gone = now + rng.choice([0, 1, MS, 2 * MS, *(int(rng.expovariate(1 / SECOND)) for _ in range(6))])
            coming = arrival(
                number,
                now,
                made_prompt(number, prompt, shared),
                rng.choice([None, rng.randrange(1, longest), rng.randrange(1, max(2, longest - prompt))]),
                output_len=rng.choice([None, rng.randrange(1, 30)]),
                cancel_ns=gone if rng.random() < 0.2 else None,
                sampling={"n": rng.choice([1, 1, 1, 3]), "prompt_logprobs": rng.choice([None, None, 0])},
                priority=rng.randrange(3),
                service_class=rng.choice(names),
                tenant=rng.choice([*TENANTS, "a stranger"]),
            )
            self.sent[coming.request.request_id] = coming
            yield coming

    def _sends(self, coming: Arrival, now: int) -> bool:
        """A class that is no more is not asked for."""
        tables = [self.classes, *(server.scheduler.config.classes for server in self.fleet.servers)]
        name = coming.request.service_class
        if not all(name in (each.name for each in table) for table in tables):
            coming.request.service_class = ""
        return True
