"""Faults on the virtual clock: random fleets, workloads and failures, and what must hold whatever happens.

    python -m benchmarks.faults --requests 1000000
    python -m benchmarks.faults --requests 500000 --minutes 5 --go-on    further worlds, beside those of the result
    python -m benchmarks.faults --seed 4711            one world again, as a violation names it

Each seed is a world of its own (`fault_worlds`): one server or several behind a router, that may grow in number or
compute prompts for each other; their limits, policies, pools and swap space; files of classes and of tenants with
quotas, which change while the servers run; requests with their lengths, choices, shared prompts, bursts, and clients
that go away at any moment; steps that are slow, freeze or end with the death of the engine; servers that are gone with
all that they had; and clocks that step forward and backward. The same seed is the same world (after FoundationDB's
simulation; Zhou et al., 2021).

What must hold: no block is leaked or held twice, at any time; no queue counts who is gone; every request ends, is
refused or is given up, none waits for ever; whoever has waited for its starvation time goes first; every ledger closes
to the nanosecond; a choice that came to its own end has as many tokens as it was to have, however often its engine
died; and quotas have counted each token of each answer once, also when made again from a part of their records.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fault_worlds import HOUR, SteppingQuotas, Violation, World
from benchmarks.machine import about, save
from headway.bench.client.load import collector_off
from headway.policy.admission.quota import MINUTE_US, TOTAL, Quotas, Record
from headway.policy.step.request import FinishReason
from headway.simulator.answers import Answer, Stuck
from headway.simulator.server import Server
from headway.simulator.traffic import Arrival

OUTPUT = Path(__file__).parent / "results" / "faults.json"
REQUESTS = 200  # requests in a world, on average
OWN_ENDS = (FinishReason.LENGTH, FinishReason.STOP)
_record = msgspec.json.Decoder(Record)


def live(seed: int, requests: int | None = None) -> tuple[World, Counter[str]]:
    """Let a world go on to its end, and look at it.

    Returns:
        What became of the choices, by reason.

    Raises:
        Violation: something does not hold.
    """
    world = World(seed, requests or random.Random(seed).randrange(REQUESTS // 4, REQUESTS * 7 // 4))
    fleet = world.fleet
    try:
        fleet.run(world.arrivals())
        for server in fleet.servers:
            _check_server(server)
        assert len({answer.request_id for answer in fleet.answers}) == world.requests, "a request is missing"
        for answer in fleet.answers:
            _check_answer(answer, world.sent[answer.request_id], world.faults["clock steps back"] == 0)
        for server in fleet.servers:
            if isinstance(server.quotas, SteppingQuotas):
                _check_quotas(server.quotas, server.answers, world)
    except (Stuck, RuntimeError, LookupError, ValueError, AssertionError) as error:
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
    return world, Counter("refused" if each.refused else str(each.finish_reason) for each in fleet.answers)


def _check_server(server: Server) -> None:
    scheduler, queues = server.scheduler, server.queues
    scheduler.check()
    assert not scheduler.sequences and not scheduler.has_work, "sequences are left"
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks, "blocks are left"
    for bound in (queues.of_all, *queues.of_class.values(), *queues.of_tenant.values()):
        assert not bound.choices and not bound.tokens, f"a queue still counts {bound.choices}, {bound.tokens}"


def _check_quotas(quotas: SteppingQuotas, answers: list[Answer], world: World) -> None:
    """Each answer was charged once, and the records make the same again, as far as they go and wherever they end."""
    used: dict[str, Counter[str]] = defaultdict(Counter)
    seen = Counter[tuple[str, int]]()
    visits: dict[tuple[str, int], list[Answer]] = {}  # a prompt may be computed again for another server
    for answer in answers:
        seen[answer.request_id, answer.index] += 1
        visits.setdefault((answer.request_id, seen[answer.request_id, answer.index]), []).append(answer)
    for (name, _), choices in visits.items():
        tokens = sum(len(each.token_ns) for each in choices)
        for scope in (world.sent[name].request.tenant, TOTAL):
            used[scope].update({"requests": int(tokens > 0), "tokens": tokens + choices[0].prompt_len if tokens else 0})
    assert not quotas.open, "a reservation is open"
    for name, (requests, tokens_) in quotas.meters.items():
        for unit, meter in (("requests", requests), ("tokens", tokens_)):
            assert meter.outstanding == 0, f"{meter.outstanding} {unit} of {name!r} are lost"
            assert meter.level <= meter.limit * MINUTE_US, f"more {unit} of {name!r} are left than there are"
            if name == TOTAL or not world.faults["files change"]:  # the meters of a tenant that has gone are forgotten
                wanted = used[name][unit]
                assert meter.settled == wanted, f"{meter.settled} {unit} of {name!r} were charged, {wanted} used"
    written = quotas.written
    for cut in {len(written), world.rng.randrange(1, len(written) + 1)}:
        past = [_record.decode(line) for line in written[:cut]]
        now = past[-1].at_ns + world.rng.choice([-1, 1]) * world.rng.randrange(HOUR)
        again = Quotas(world.tenants, now, past=past)
        assert not again.open and not any(meter.outstanding for meter in chain(*again.meters.values()))
        if cut == len(written) and not world.faults["files change"]:
            for name in (TOTAL, *world.tenants.weights):
                assert again.of(name)[1].settled == quotas.of(name)[1].settled, "other sums are made of the records"
        for meter in chain(*again.meters.values()):
            full = meter.limit * MINUTE_US
            until_us = 1 + -(-(full - meter.level) // max(1, meter.limit))
            assert not full or meter.level_at(now + 1000 * until_us) == full, "a budget is not full when it should be"


def _check_answer(answer: Answer, sent: Arrival, is_even: bool) -> None:
    """What must hold of a choice; `is_even` where no clock has stepped back."""
    name, ledger = f"request {answer.request_id}/{answer.index}", answer.ledger
    assert answer.refused or answer.finish_reason is not None, f"{name} has no end"
    assert sum(ledger.phases_ns.values()) == ledger.total_ns, f"the ledger of {name} does not close"
    assert ledger.began_ns == answer.arrived_ns, f"the ledger of {name} does not begin with it"
    if is_even:
        assert list(answer.token_ns) == sorted(answer.token_ns), f"tokens of {name} are not in order"
        assert not answer.token_ns or answer.token_ns[-1] <= answer.ended_ns, f"{name} has a token after its end"
    if answer.finish_reason in OWN_ENDS:
        wanted = min(sent.request.params.max_tokens or 0, sent.output_len or math.inf)
        assert len(answer.token_ns) == wanted, f"{name} has {len(answer.token_ns)} of {wanted} tokens"


def campaign(
    requests: int, first_seed: int, before: dict[str, Any] | None = None, minutes: float = math.inf
) -> dict[str, Any]:
    """Worlds until so many requests have been in one, or so much time has passed.

    Args:
        before: the result of worlds with lower seeds; these follow them, and are added to it.

    Raises:
        Violation: of the first world in which something does not hold.
    """
    began, served = time.monotonic(), 0
    ends = began + 60 * minutes
    ended, faults = Counter[str](), Counter[str]()
    if before is not None:
        first_seed, requests = before["first_seed"], requests + before["requests"]
        served, ended, faults = before["requests"], Counter(before["choices_by_end"]), Counter(before["faults"])
        began -= before["seconds"]
    seed = first_seed + (before["worlds"] if before is not None else 0)
    with collector_off():
        while served < requests and time.monotonic() < ends:
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
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no further world after so many")
    parser.add_argument("--seed", type=int, help="only the world of this seed")
    parser.add_argument("--go-on", action="store_true", help="add to the result that is there")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    if args.seed is not None:
        world, reasons = live(args.seed)
        return print(f"{world.requests} requests, {dict(reasons)}, faults {dict(world.faults)}: nothing was violated")
    before = json.loads(args.output.read_text()) if args.go_on else None
    found = campaign(args.requests, args.first_seed, before, args.minutes)
    save(found | {"machine": about()}, args.output)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
