"""All that a scheduler can do in any combination: the invariants of the simulation hold, and nobody's tokens change."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.cost.layers import AttentionSinks
from headway.policy.cache.kv_groups import kv_cache_groups, most_blocks
from headway.policy.cache.swap import NO_SWAP, SwapSpace
from headway.policy.objectives.orders import AGEING_NS
from headway.policy.objectives.service_class import ClassTable
from headway.policy.step.request import Status
from tests.policy.pooled import some_pooling
from tests.policy.simulation import Simulation, check_ledger, random_classes
from tests.policy.test_drafts import Drafting
from tests.policy.test_swap import preempt

MODEL_LEN = 64


@dataclass(frozen=True)
class World:
    """What a run consists of, beside its seed."""

    policy: str
    max_num_seqs: int
    extra_budget: int
    chunked: bool
    caching: bool
    spare_blocks: int
    checkpoints: int | None
    windows: tuple[int | None, ...]
    sinks: AttentionSinks | None
    swap: SwapSpace
    lookahead: int
    max_bypasses: int
    max_prefill_stall_ms: float
    max_queue_time: float
    longest_step_ns: int
    most_drafts: int
    idle_steps: float
    tenants: int
    kv_bounds: bool
    faults: dict[int, tuple[str, int]]
    preempts: float  # share of running sequences that are preempted by force after a step
    aborts: float  # share of sequences that are aborted then
    others: bool  # pooling, log-probabilities of prompts, priorities, salts, stop ids and further choices


WORLDS = st.builds(
    World,
    policy=st.sampled_from(["fcfs", "priority", "slo"]),
    max_num_seqs=st.integers(1, 8),
    extra_budget=st.integers(0, 24),
    chunked=st.sampled_from([True, True, True, False]),
    caching=st.booleans(),
    spare_blocks=st.integers(0, 40),
    checkpoints=st.sampled_from([None, None, None, 0, 2, 6]),
    windows=st.sampled_from([(), (), (None, 8), (5,), (None, 3, 13)]),
    sinks=st.sampled_from([None, None, AttentionSinks(4, 13)]),
    swap=st.sampled_from([NO_SWAP, SwapSpace(3), SwapSpace(12, block_ns=300.0), SwapSpace(60)]),
    lookahead=st.integers(0, 4),
    max_bypasses=st.integers(0, 4),
    max_prefill_stall_ms=st.sampled_from([0.0, 0.001, 0.01, math.inf]),
    max_queue_time=st.sampled_from([math.inf, math.inf, 1e-5]),
    longest_step_ns=st.sampled_from([10_000, AGEING_NS // 4]),
    most_drafts=st.sampled_from([0, 1, 6]),
    idle_steps=st.sampled_from([0.0, 0.2]),
    tenants=st.sampled_from([0, 0, 3]),
    kv_bounds=st.booleans(),
    faults=st.dictionaries(
        st.integers(0, 15), st.tuples(st.sampled_from(["nan", "raises"]), st.integers(0, 40)), max_size=2
    ),
    preempts=st.sampled_from([0.0, 0.1]),
    aborts=st.sampled_from([0.0, 0.03]),
    others=st.booleans(),
)


def bounded(classes: ClassTable, rng: random.Random) -> ClassTable:
    """These classes, with a bound on what some of them may have of the pool."""
    return ClassTable(tuple(replace(each, max_kv=max(each.kv, rng.choice([0.5, 1.0]))) for each in classes))


def simulation(world: World, seed: int) -> Drafting:
    rng = random.Random(seed)
    windows = () if world.checkpoints is not None else world.windows
    sinks = world.sinks if windows else None
    if sinks is not None:
        windows = (*windows, sinks.window)
    budget = world.max_num_seqs + world.extra_budget if world.chunked else MODEL_LEN
    groups = kv_cache_groups(windows, budget, MODEL_LEN, 4, sinks)
    classes = random_classes(rng, world.longest_step_ns)
    common = {each.name for each in fields(Simulation)} & {each.name for each in fields(World)} - {
        "windows",
        "sinks",
        "swap",
    }
    recurrent = world.checkpoints is not None  # then the engine has no swap space
    return Drafting(
        **{name: getattr(world, name) for name in common},
        max_num_batched_tokens=budget,
        num_blocks=most_blocks(groups, MODEL_LEN // 4) + bool(groups) + world.spare_blocks,
        num_checkpoints=world.checkpoints,
        swap=NO_SWAP if recurrent else world.swap,
        windows=windows,
        sinks=sinks,
        classes=bounded(classes, rng) if world.kv_bounds else classes,
        weights={f"t{number}": number + 1.0 for number in range(world.tenants)},
        faults=dict(world.faults),
        most_drafts=world.most_drafts,
        idle_steps=0.0 if recurrent else world.idle_steps,
        rng=random.Random(seed),
    )


def request(sim: Drafting, world: World, rng: random.Random, beginnings: list[list[int]]) -> None:
    """Submit a random request."""
    prompt = rng.choice(beginnings) + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 24))]
    options: dict[str, Any] = {"service_class": rng.choice(["", "chat", "report", "offline"])}
    if world.tenants:
        options["tenant"] = f"t{rng.randrange(world.tenants)}"
    if world.others:
        options |= {"priority": rng.randrange(-2, 3), "salt": rng.choice(["", "", "a"])}
        options["stop_token_ids"] = [rng.randrange(3, 93) for _ in range(rng.choice([0, 3]))]
        options["pooling"] = some_pooling(rng)
        if options["pooling"] is None:
            options["n"] = rng.choice([1, 1, 1, 2, 4])
            if rng.random() < 0.2:
                options["prompt_logprobs"] = 0
    sim.submit_choices(prompt, rng.randrange(1, 20), **options)


@given(seed=st.integers(0, 2**32), world=WORLDS)
def test_whatever_is_combined_the_invariants_hold(seed: int, world: World) -> None:
    sim, rng = simulation(world, seed), random.Random(seed + 1)
    beginnings = [[], *([rng.randrange(3, 9) for _ in range(rng.randrange(1, 24))] for _ in range(2))]
    for number in range(rng.randrange(4, 20)):
        request(sim, world, rng, beginnings)
        for _ in range(rng.randrange(4)):
            sim.step()
            if sim.scheduler.has_work:
                disturb(sim, world, rng)
        if number == 7 and world.policy == "slo":
            seats = {each.name: each.seats for each in sim.classes}
            others = random_classes(rng, world.longest_step_ns)
            sim.classes = ClassTable(tuple(replace(each, seats=seats[each.name]) for each in others))
            sim.scheduler.set_classes(sim.classes, sim.weights)
    sim.run_until_done()
    sim.check_all_closed()
    for sequence in sim.sequences:
        check_ledger(sequence)
        for at in range(sequence.prompt_len, len(sequence.tokens)):
            assert sequence.tokens[at] == 3 + hash(tuple(sequence.tokens[:at])) % 90, "another token than alone"


def disturb(sim: Drafting, world: World, rng: random.Random) -> None:
    """Preempt and abort some sequences, whatever they are about to do."""
    for sequence in list(sim.scheduler.sequences.values()):
        if sequence.status is Status.RUNNING and rng.random() < world.preempts:
            preempt(sim, sequence)
        elif rng.random() < world.aborts:
            sim.scheduler.abort(sequence, sim.now)
        check_ledger(sequence)
