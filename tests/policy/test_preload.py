"""Prompts whose blocks stay: bounded, never evicted, and out of the way of everything else."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.cache.kv_blocks import KVBlocks
from headway.policy.cache.preload import PreloadedPrompt, room_for
from headway.policy.objectives.slo import SloPolicy
from headway.policy.step.request import sequences_of
from tests.policy.simulation import Simulation, make_request
from tests.policy.test_shares import classes


def prompt(first: int, tokens: int, salt: str = "") -> PreloadedPrompt:
    return PreloadedPrompt(f"line {first}", list(range(first, first + tokens)), salt)


def test_prompts_that_leave_too_little_room_are_named() -> None:
    pool = KVBlocks(40, 4, protected_share=0.5)
    all_fit = [prompt(1, 40), prompt(1, 43), prompt(100, 40)]
    assert room_for(all_fit, pool, 40) == (all_fit, [])
    fitting, (why,) = room_for([prompt(1, 40), prompt(100, 44), prompt(200, 40)], pool, 40)
    assert "line 100: with this prompt of 44 tokens, 21 blocks must stay, but only 20 of 40" in why
    assert [each.where for each in fitting] == ["line 1", "line 200"], "what was refused takes no room from the next"
    fitting, (why,) = room_for([prompt(1, 40, "a"), prompt(1, 40, "b")], pool, 84)
    assert "20 blocks must stay, but beside a sequence of 84 tokens only 19 of 40" in why
    assert [each.cache_salt for each in fitting] == ["a"]
    uncached = KVBlocks(40, 4, enable_prefix_caching=False)
    fitting, (why,) = room_for([prompt(1, 4)], uncached, 40)
    assert not fitting and "need the prefix cache" in why


@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 30), policy=st.sampled_from(["slo", "fcfs"]))
def test_pinned_blocks_stay_whatever_comes(seed: int, tokens: int, policy: str) -> None:
    rng = random.Random(seed)
    sim = Simulation(num_blocks=26, policy=policy, classes=classes(chat=0.3, offline=0.3), rng=rng, message_ns=0)
    pinned = [rng.randrange(3) for _ in range(tokens)]
    request = make_request("pinned", pinned, 1, sim.now)
    request.pins_prompt = True
    (sequence,) = sequences_of(request, 64, sim.classes)
    sim.sequences.append(sequence)
    sim.scheduler.add(sequence, sim.now)
    sim.run_until_done()
    pool = sim.scheduler.blocks
    assert len(pool.pinned) == tokens // 4 and pool.usage == 0.0
    if policy == "slo":
        assert isinstance(sim.scheduler.policy, SloPolicy)
        assert sim.scheduler.policy.shares.blocks == dict.fromkeys(("chat", "offline"), int(0.3 * (26 - tokens // 4)))
    for _ in range(20):
        begins = pinned[: rng.randrange(tokens + 1)] if rng.random() < 0.5 else []
        name = rng.choice(["chat", "report", "offline"])
        sim.submit([*begins, *(rng.randrange(3) for _ in range(rng.randrange(1, 24)))], 8, service_class=name)
        for _ in range(rng.randrange(4)):
            sim.step()
    sim.run_until_done()
    assert set(pool.match([*pinned, 9], "")) == set(pool.pinned)
    assert pool.num_free == 26 - len(pool.pinned)
    sim.scheduler.check()
    pool.reset_prefix_cache()
    assert pool.num_free == 26
    sim.scheduler.check()
