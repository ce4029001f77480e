"""The measurement of what a step costs outside the model runs on the engine as it is."""

from __future__ import annotations

import pytest

from benchmarks.bookkeeping import PARAMS, build, measure, schedulings
from headway.policy.step.policies import POLICIES


def test_steps_of_every_kind_of_request_are_timed() -> None:
    core = build(sequences=2, vocab_size=64, context=128)
    for params in PARAMS.values():
        times = measure(core, sequences=2, steps=3, prompt_len=20, params=params)
        assert len(times) == 3 and min(times) > 0
    core.scheduler.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_scheduler_is_timed_with_a_queue(policy: str) -> None:
    times = schedulings(policy, running=2, waiting=3, steps=4)
    assert len(times) == 4 and min(times) > 0
