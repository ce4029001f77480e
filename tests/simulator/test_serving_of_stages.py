"""Pipelines, whose batches queue for the slowest stage, and prompts that hold up those who decode."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import pytest

from headway.cost.attention import Chunk
from headway.cost.parallel import Parallelism
from headway.cost.requests import Limits, RequestShape
from headway.cost.timing import Deployment
from headway.simulator.serving import open_loop
from tests.cost.machines import LINK, MACHINE, deployment
from tests.simulator.test_serving import burst, exact_contexts  # noqa: F401


def staged(stages: int, **changes: Any) -> Deployment:
    """No host and no network: a step takes as long with stages as without."""
    nothing = replace(LINK, bytes_per_s=1e30, latency_s=0.0)
    return deployment(hardware=replace(MACHINE, link=nothing), parallelism=Parallelism(pipeline=stages), **changes)


@pytest.mark.parametrize("stages", [2, 4])
def test_batches_of_a_pipeline_that_are_alike_leave_it_full(stages):
    """Answers of one length: each batch decodes beside the others, and TPOT is its own step."""
    on = staged(stages)
    served = burst(on, RequestShape(8, 90), 4 * stages, Limits(sequences=4 * stages))
    decodes = [on.step([Chunk(1, 8 + token, sequences=4)]) for token in range(89)]
    rounds = [max(step.seconds, stages * on.pace(step)) for step in decodes]
    assert served.tpot_s == pytest.approx(statistics.fmean(rounds), rel=1e-2)
    assert served.bubble < 1 - decodes[44].seconds / rounds[44] + 0.05
    assert served.running == pytest.approx(4 * stages, rel=0.02)


def test_stages_without_a_batch_idle():
    """One request in a pipeline of four: a stage works a quarter of the time (GPipe: (p - 1) / (m + p - 1))."""
    assert burst(staged(4), RequestShape(8, 50), 1).bubble == pytest.approx(3 / 4, rel=1e-4)
    assert burst(staged(1), RequestShape(8, 50), 1).bubble == 0.0


def test_a_long_prompt_in_one_batch_holds_up_the_others():
    """Two stages, two requests that decode, and a prompt that joins one: the other one waits for its step."""
    on, workload = staged(2), RequestShape(2000, 40)
    arrivals = [0.0, 0.0, on.step([Chunk(2000)]).seconds * 1.5]
    served = open_loop(on, workload, arrivals, Limits(sequences=8))
    prompt, decode = on.step([Chunk(2000)]).seconds, on.step([Chunk(1, 2020)]).seconds
    # Two of three decode when the prompt comes, one of them in the other batch: both wait for it.
    held_up = 2 / 3 * (prompt - decode) / 39
    assert served.tpot_s > decode + 0.9 * held_up
    assert 0.0 < served.bubble < 1.0


def test_a_stage_has_its_layers_and_the_last_one_the_head():
    on = staged(4)
    step = on.step([Chunk(1, 100, sequences=8)])
    after = sum(part.seconds for part in step.parts if part.name in ("final_norm", "head", "sampling"))
    assert on.pace(step) == pytest.approx((step.seconds - after) / 4 + after, rel=1e-4)
    assert staged(1).pace(step) == step.seconds


@pytest.mark.parametrize("stall_s", [2e-5, 1e-4, 1e-3])
def test_prompts_hold_up_decodes_by_no_more_than_the_bound(stall_s, monkeypatch):
    """One sequence decodes when ten prompts come: no step is longer than alone and the bound, or twice."""
    on, seen = deployment(), []
    plain, plain_s = Deployment.step, Deployment.step_s

    def noted(self: Deployment, chunks: Any) -> Any:
        seen.append(list(chunks))
        return plain_s(self, chunks)

    arrivals = [0.0] + [on.step([Chunk(400)]).seconds * 1.5] * 10
    free = open_loop(on, RequestShape(400, 60), arrivals, Limits())
    monkeypatch.setattr(Deployment, "step_s", noted)
    bound = open_loop(on, RequestShape(400, 60), arrivals, Limits(prefill_stall_s=stall_s, least_tokens=1))
    mixed = [step for step in seen if {c.tokens == 1 for c in step} == {True, False}]
    for step in mixed:
        alone = plain(on, [chunk for chunk in step if chunk.tokens == 1]).seconds
        # Tokens are taken to cost the same each, which is not quite so.
        assert plain(on, step).seconds <= 1.25 * (alone + max(stall_s, alone))
    assert mixed and bound.ttft_p99_s > free.ttft_p99_s


def test_the_first_wave_waits_for_all_prompts_before_it():
    """No host, and answers of one token: of prompts that each fill a step, the n-th has its token after n steps."""
    on = deployment()
    wave = burst(on, RequestShape(64, 1), 10, Limits(batched_tokens=64))
    step = on.step([Chunk(64)]).seconds
    assert wave.ttft_p99_s == pytest.approx(9.91 * step, rel=1e-4) and wave.ttft_s == pytest.approx(
        5.5 * step, rel=1e-4
    )
