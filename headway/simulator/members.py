"""The servers of a simulated fleet: of what kinds they are, how each is made, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.changes import Change
from headway.cost.attention import Chunk
from headway.cost.capacity import sequence_bytes
from headway.planner.engines import HEADWAY
from headway.policy.step.options import SchedulingOptions
from headway.policy.step.scheduler import Scheduler
from headway.simulator.changes import changed
from headway.simulator.deployed import Deployed, ServerOptions
from headway.simulator.fleet import DECODE, NO_HANDOVER, PREFILL, Handover, Replica
from headway.simulator.timing import ReceivedPrompts

# Servers of several kinds are compared by their time for a part of a prompt, and for a batch that decodes.
_PROMPT, _BATCH = Chunk(2048), Chunk(1, 1024, 1, 64)

Deploy = Callable[[ServerOptions, SchedulingOptions], Deployed]


@dataclass(frozen=True, slots=True)
class Kind:
    """Servers of a fleet that are alike."""

    count: int = 1
    # Flags of the server and of its scheduler that differ from those of the command line.
    changes: tuple[Change, ...] = ()
    role: str = ""  # see `Fleet`
    weight: float | None = None  # None is its speed
    price_per_hour: float | None = None  # the price of one; None is that of the command line

    def deploy(self, how: Deploy, server: ServerOptions, scheduling: SchedulingOptions) -> Deployed:
        """Deploy a server of this kind. Raises ValueError like deploy()."""
        made = how(*changed(server, scheduling, self.changes))
        if self.role and made.is_static:
            raise ValueError(
                f"role is {self.role!r}, which --scheduler-profile static cannot have; leave one of them out"
            )
        if self.role != DECODE:
            return made
        config = made.scheduler.config  # what has come takes no time, so that no step is too small for it
        most = config.max_num_seqs * config.max_model_len
        config = replace(config, max_num_batched_tokens=most, max_prefill_stall_ms=math.inf)
        return replace(made, scheduler=Scheduler(config, made.scheduler.blocks))


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a fleet, with nothing in it."""

    deployed: Deployed
    kind: Kind
    weight: float
    make: Callable[[], Deployed]  # another one like it

    def replica(self) -> Replica:
        """Make this server as a part of the fleet."""
        made = self.deployed
        timing = ReceivedPrompts(made.timing) if self.kind.role == DECODE else made.timing

        def engine() -> Scheduler:
            if isinstance(timing, ReceivedPrompts):
                timing.preempted.clear()
            return self.make().scheduler

        server = replace(made, timing=timing).server(engine)
        return Replica(server, self.kind.role, self.weight, self._handover())

    def _handover(self) -> Handover:
        if self.kind.role != PREFILL or self.deployed.deployment is None:
            return NO_HANDOVER
        deployment, block_size = self.deployed.deployment, self.deployed.scheduler.blocks.block_size
        block = sequence_bytes(deployment, block_size, block_size, rolling=False)
        network, is_headway = deployment.network, self.deployed.about["engine"] == HEADWAY
        chunk_tokens = self.deployed.scheduler.config.max_num_batched_tokens if is_headway else 0
        return Handover(block / block_size, network.bytes_per_s, network.latency_s, chunk_tokens)


def members(
    kinds: tuple[Kind, ...],
    how: Deploy,
    server: ServerOptions,
    scheduling: SchedulingOptions,
    one_of_each: bool = False,
) -> list[Member]:
    """All servers of a fleet, in order, or one of each kind. Raises ValueError as deploy()."""
    found: list[Member] = []
    for kind in kinds:
        make = partial(kind.deploy, how, server, scheduling)
        alike = [make() for _ in range(1 if one_of_each else kind.count)]
        weight = kind.weight or (_speed(alike[0], kind.role) if len(kinds) > 1 else 1.0)
        found += [Member(replace(each, timing=alike[0].timing), kind, weight, make) for each in alike]
    return found


def _speed(deployed: Deployed, role: str) -> float:
    """Tokens a second of a server, of prompts or of decodes."""
    assert deployed.deployment is not None
    chunk = _PROMPT if role == PREFILL else _BATCH
    return chunk.tokens * chunk.sequences / deployed.deployment.step((chunk,)).seconds


def about_kinds(servers: Sequence[Member]) -> list[dict[str, Any]]:
    """JSON-able, what the servers of each kind are, in order."""
    firsts = {id(each.kind): each for each in reversed(servers)}
    return [
        each.deployed.about | {"count": each.kind.count, "role": each.kind.role, "weight": each.weight}
        for each in reversed(firsts.values())
    ]


def named(servers: Sequence[Member]) -> str:
    """Name servers, such as "llama-3.1-8b on 2 x H100-SXM and 4 x L40S". If all are alike, their number is left out."""
    kinds = about_kinds(servers)
    several = len(kinds) > 1
    parts = [f"{each['count']} x {each['hardware']}" if several else each["hardware"] for each in kinds]
    return f"{kinds[0]['model']} on {' and '.join(parts)}"


def price_of_all(
    servers: Sequence[Member], hours: Sequence[float], duration_s: float, usual: float | None
) -> float | None:
    """The price of an hour of a run, with servers that were started later; None if a server has no price.

    Args:
        hours: the hours that each server was there.
        usual: the price of a server whose kind gives none.
    """
    prices = [usual if each.kind.price_per_hour is None else each.kind.price_per_hour for each in servers]
    prices += [usual] * (len(hours) - len(prices))
    known = [price for price in prices if price is not None]
    if len(known) < len(prices) or not sum(hours):
        return None
    return sum(price * each for price, each in zip(known, hours, strict=True)) / (duration_s / 3600)
