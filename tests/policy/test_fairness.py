"""How often a request is passed over by turn, held against counting it for each of those who wait."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings

from headway.policy.objectives.fairness import FairSequences
from headway.policy.step.policies import POLICIES
from headway.policy.step.request import Sequence
from headway.policy.step.sampling_params import SamplingParams


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(["fcfs", "slo"]), tenants=st.integers(1, 4))
def test_who_is_passed_over_is_counted(seed: int, policy: str, tenants: int) -> None:
    """Whoever is admitted, goes away, or yields and waits elsewhere: from the front, the middle and the end."""
    rng, orders = random.Random(seed), POLICIES[policy].orders
    fair = FairSequences(orders, {"t0": 2.0}, 10)
    waiting: list[Sequence] = []
    counted: Counter[int] = Counter()
    for number in range(60):
        tokens = rng.randrange(1, 30)
        made = Sequence(str(number), 0, SamplingParams(), [1] * tokens, tokens, 40, frozenset(), 0)
        made.seq_id, made.arrival_ns, made.tenant = number, rng.randrange(100), f"t{rng.randrange(tenants)}"
        made.due_ns = made.arrival_ns + 100 * 10**9 * rng.randrange(2)
        fair.add(made)
        waiting.append(made)
        what = rng.random()
        if what < 0.45:
            leaves = fair.first() if what < 0.35 else rng.choice(waiting)  # as where the first one does not fit
            fair.remove(leaves)
            waiting.remove(leaves)
            for each in waiting:
                later = orders.admission(each) < orders.admission(leaves) and orders.level(each) == orders.level(leaves)
                if later and each.tenant != leaves.tenant and fair.served(leaves) <= fair.served(each):
                    counted[each.seq_id] += 1
            fair.admitted(leaves, [leaves])
        elif what < 0.6:
            leaves = rng.choice(waiting)
            fair.remove(leaves)
            waiting.remove(leaves)
            if what < 0.5:
                leaves.yielded = "late"
                fair.add(leaves)
                waiting.append(leaves)
                continue
        else:
            continue
        assert leaves.passed_over == counted[leaves.seq_id]
    for each in rng.sample(waiting, len(waiting)):
        fair.remove(each)
        assert each.passed_over == counted[each.seq_id] and not each.passes
