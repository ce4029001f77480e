"""Faults on the virtual clock: random servers, workloads and failures, and what must hold whatever happens.

    python -m benchmarks.faults --requests 1000000
    python -m benchmarks.faults --requests 500000 --go-on    further worlds, beside those of the result
    python -m benchmarks.faults --seed 4711            one world again, as a violation names it

Each seed is a world of its own: the limits of a server, its policy, classes and pool; requests with their lengths,
choices, shared prompts, bursts and cancellations; and steps that are slow, freeze, stand still or end with the death of
the engine. The same seed is the same world (after FoundationDB's simulation; Zhou et al., 2021).

What must hold: no block is leaked or held twice, at any time; no queue counts who is gone; every request ends, is
refused or is given up, none waits for ever; every ledger closes to the nanosecond; and a choice that came to its own
end has as many tokens as it was to have, however often its engine died.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import about, save
from headway.bench.client.load import collector_off
from headway.policy.accounting import StepTimes
from headway.policy.kv_blocks import KVBlocks
from headway.policy.order import ORDERS
from headway.policy.plan import StepPlan
from headway.policy.queue_bound import QueueLimits
from headway.policy.request import FinishReason
from headway.policy.scheduler import Scheduler
from headway.policy.scheduler_config import SchedulerConfig
from headway.policy.service_class import BUILT_IN, ClassTable, ServiceClass
from headway.simulator.answers import Answer, EngineDied, Stuck
from headway.simulator.server import Host, Server
from headway.simulator.traffic import Arrival, arrival, made_prompt

OUTPUT = Path(__file__).parent / "results" / "faults.json"
MS, SECOND = 1_000_000, 1_000_000_000
REQUESTS = 200  # of a world, on average
CHECKED_EVERY = 20  # steps
MOST_STEPS = 2_000  # for each request: more is a server that gets nowhere
OWN_ENDS = (FinishReason.LENGTH, FinishReason.STOP)


class Violation(AssertionError):
    """Something that must hold did not, in the world of a seed."""


@dataclass(slots=True)
class World:
    """A server and what happens to it, by a seed alone."""

    seed: int
    requests: int
    rng: random.Random = field(init=False)
    config: SchedulerConfig = field(init=False)
    blocks: tuple[int, int, bool] = field(init=False)
    faults: Counter[str] = field(init=False, default_factory=Counter)
    sent: dict[str, Arrival] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        longest, seats = rng.choice([24, 64, 200]), rng.randrange(1, 17)
        chunked = rng.random() < 0.8
        self.config = SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=max(seats, rng.randrange(8, 128)) if chunked else max(seats, longest),
            max_model_len=longest,
            enable_chunked_prefill=chunked,
            policy=rng.choice(list(ORDERS)),
            lookahead=rng.randrange(0, 6),
            max_bypasses=rng.randrange(0, 8),
            max_prefill_stall_ms=rng.choice([0.5, 5.0, math.inf]),
            max_queue_time=rng.choice([0.5, 20.0, math.inf, math.inf]),
            classes=self._classes(),
        )
        size = rng.choice([1, 4, 16])
        least = -(-longest // size)
        self.blocks = rng.randrange(least, least * (seats + 1) + 1), size, rng.random() < 0.8

    def _classes(self) -> ClassTable:
        rng = self.rng
        if rng.random() < 0.4:
            return BUILT_IN
        shares = [rng.choice([0.0, 0.0, 0.3]) for _ in range(9)]
        return ClassTable(
            tuple(
                ServiceClass(
                    name=name,
                    ttft_ms=rng.choice([20.0, 300.0, math.inf]),
                    tpot_ms=rng.choice([4.0, 40.0, math.inf]),
                    window_ms=rng.choice([(0.0, 0.0), (1.0, 8.0)]),
                    seats=shares[3 * at],
                    tokens=shares[3 * at + 1],
                    kv=shares[3 * at + 2],
                    max_queued=rng.choice([3, 50, math.inf]),
                    queue_timeout_s=rng.choice([0.3, 30.0, math.inf]),
                    starvation_s=rng.choice([0.2, 5.0]),
                    when_late=rng.choice(["serve", "refuse"]),
                )
                for at, name in enumerate(("first", "second", "last"))
            )
        )

    def scheduler(self) -> Scheduler:
        """Of an engine with nothing in it."""
        return Scheduler(self.config, KVBlocks(*self.blocks))

    def limits(self) -> QueueLimits:
        return QueueLimits(self.rng.choice([8, 100, math.inf, math.inf]), self.rng.choice([200, math.inf, math.inf]))

    def host(self) -> Host:
        rng = self.rng
        return Host(rng.choice([0, MS]), rng.choice([0.0, 1e4]), rng.choice([0, 1000]))

    def arrivals(self) -> Iterator[Arrival]:
        """Bursts and lulls; some requests can never fit, some clients go away."""
        rng, now, longest = self.rng, 0, self.config.max_model_len
        names = [each.name for each in self.config.classes]
        for number in range(self.requests):
            now += 0 if rng.random() < 0.4 else int(rng.expovariate(1 / rng.choice([5 * MS, 50 * MS, 500 * MS])))
            prompt = rng.randrange(1, longest + (rng.random() < 0.02) * longest)
            shared = [(rng.randrange(1, 4), rng.randrange(1, longest))] if rng.random() < 0.5 else []
            coming = arrival(
                number,
                now,
                made_prompt(number, prompt, shared),
                rng.choice([None, rng.randrange(1, longest)]),
                output_len=rng.choice([None, rng.randrange(1, 30)]),
                cancel_ns=now + int(rng.expovariate(1 / SECOND)) if rng.random() < 0.15 else None,
                sampling={"n": rng.choice([1, 1, 1, 3]), "prompt_logprobs": rng.choice([None, None, 0])},
                priority=rng.randrange(3),
                service_class=rng.choice(names),
            )
            self.sent[coming.request.request_id] = coming
            yield coming


@dataclass(slots=True)
class Faulty:
    """Steps that take about as long as their tokens, but for faults; looks at the pool now and then."""

    world: World
    server: Server | None = None
    _slow_until: int = 0
    _since: int = 0  # steps since the pool was looked at

    def times(self, plan: StepPlan, now: int) -> StepTimes:
        """As Timing.times(). Raises EngineDied."""
        world, server = self.world, self.server
        rng = world.rng
        assert server is not None
        self._since += 1
        if self._since >= CHECKED_EVERY:
            self._since = 0
            server.scheduler.check()
        if len(server.steps) > MOST_STEPS * world.requests:
            raise Violation(f"seed {world.seed}: {len(server.steps)} steps, and there is no end of it")
        draw = rng.random()
        took = 2 * MS + 20_000 * plan.work.tokens
        if draw < 0.001:
            world.faults["crash"] += 1
            raise EngineDied(now + rng.randrange(took), now + took + rng.randrange(5 * SECOND))
        if draw < 0.002:
            world.faults["freeze"] += 1
            took += rng.randrange(10 * SECOND)
        elif draw < 0.004:
            world.faults["slow"] += 1
            self._slow_until = now + rng.randrange(3 * SECOND)
        elif draw < 0.01:
            world.faults["clock stands still"] += 1
            took = 0
        if now < self._slow_until:
            took *= 25
        return StepTimes(now, now + took * 9 // 10, now + took)


def live(seed: int, requests: int | None = None) -> tuple[World, Counter[str]]:
    """Let a world go on to its end, and look at it.

    Returns:
        What became of the choices, by reason.

    Raises:
        Violation: something does not hold.
    """
    world = World(seed, requests or random.Random(seed).randrange(REQUESTS // 4, REQUESTS * 7 // 4))
    timing = Faulty(world)
    server = timing.server = Server(
        world.scheduler(), timing, world.limits(), world.host(), None, None, world.scheduler
    )
    server.expect(world.arrivals())
    try:
        server.run()
        _check_end(server, world)
    except (Stuck, RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise Violation(f"seed {seed}: {error}") from error
    return world, Counter("refused" if each.refused else str(each.finish_reason) for each in server.answers)


def _check_end(server: Server, world: World) -> None:
    scheduler = server.scheduler
    scheduler.check()
    assert not scheduler.sequences and not scheduler.has_work, "sequences are left"
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks, "blocks are left"
    for bound in (server.queues.of_all, *server.queues.of_class.values()):
        assert not bound.choices and not bound.tokens, f"a queue still counts {bound.choices}, {bound.tokens}"
    assert len({answer.request_id for answer in server.answers}) == world.requests, "a request is missing"
    for answer in server.answers:
        _check_answer(answer, world.sent[answer.request_id])


def _check_answer(answer: Answer, sent: Arrival) -> None:
    name, ledger = f"request {answer.request_id}/{answer.index}", answer.ledger
    assert answer.refused or answer.finish_reason is not None, f"{name} has no end"
    assert sum(ledger.phases_ns.values()) == ledger.total_ns, f"the ledger of {name} does not close"
    assert ledger.began_ns == answer.arrived_ns, f"the ledger of {name} does not begin with it"
    assert list(answer.token_ns) == sorted(answer.token_ns), f"tokens of {name} are not in order"
    assert not answer.token_ns or answer.token_ns[-1] <= answer.ended_ns, f"{name} has a token after its end"
    if answer.finish_reason in OWN_ENDS:
        wanted = min(sent.request.params.max_tokens or 0, sent.output_len or math.inf)
        assert len(answer.token_ns) == wanted, f"{name} has {len(answer.token_ns)} of {wanted} tokens"


def campaign(requests: int, first_seed: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Worlds until so many requests have been in one.

    Args:
        before: the result of worlds with lower seeds; these follow them, and are added to it.

    Raises:
        Violation: of the first world in which something does not hold.
    """
    began, served = time.monotonic(), 0
    ended, faults = Counter[str](), Counter[str]()
    if before is not None:
        first_seed, requests = before["first_seed"], requests + before["requests"]
        served, ended, faults = before["requests"], Counter(before["choices_by_end"]), Counter(before["faults"])
        began -= before["seconds"]
    seed = first_seed + (before["worlds"] if before is not None else 0)
    with collector_off():
        while served < requests:
            world, reasons = live(seed)
            served, seed = served + world.requests, seed + 1
            ended, faults = ended + reasons, faults + world.faults
            if (seed - first_seed) % 200 == 0:
                print(f"{served:,} requests in {seed - first_seed:,} worlds: nothing was violated", flush=True)
    return {
        "requests": served,
        "first_seed": first_seed,
        "worlds": seed - first_seed,
        "choices_by_end": dict(ended.most_common()),
        "faults": dict(faults.most_common()),
        "seconds": round(time.monotonic() - began),
        "violations": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only the world of this seed")
    parser.add_argument("--go-on", action="store_true", help="add to the result that is there")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.seed is not None:
        world, reasons = live(args.seed)
        return print(f"{world.requests} requests, {dict(reasons)}, faults {dict(world.faults)}: nothing was violated")
    before = json.loads(args.output.read_text()) if args.go_on else None
    found = campaign(args.requests, args.first_seed, before)
    save(found | {"machine": about()}, args.output)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
